package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
	pages "github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/config"
)

func statusCommand() *cobra.Command {
	return showCommand("status", "Show where images, writable layers and logs are and what they take",
		func(ctx context.Context, cfg config.Config) (page, error) {
			return agent.FetchStatus(ctx, cfg.Control.Endpoint.Path())
		}, "control")
}

// page is what a status command shows: as JSON or YAML, or for people.
type page interface {
	WriteText(w io.Writer, now time.Time) error
}

// showCommand is a command that asks a running process and shows its answer. flags
// are those that override the configuration.
func showCommand(use, short string, fetch func(context.Context, config.Config) (page, error), flags ...string) *cobra.Command {
	cmd, _ := showOf(use, short, cobra.NoArgs, func(ctx context.Context, cfg config.Config, _ []string) (page, error) { return fetch(ctx, cfg) }, flags...)
	return cmd
}

// showOf is showCommand for one with arguments, and returns its settings too.
func showOf(use, short string, args cobra.PositionalArgs, fetch func(context.Context, config.Config, []string) (page, error), flags ...string) (*cobra.Command, *settings) {
	cmd := &cobra.Command{Use: use, Short: short, Args: args}
	s := settingsFlags(cmd, flags...)
	output := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := output.check(); err != nil {
			return err
		}
		cfg, err := s.load()
		if err != nil {
			return err
		}
		status, err := fetch(cmd.Context(), cfg, args)
		if err != nil {
			return err
		}
		return output.write(cmd, status, func() error { return status.WriteText(cmd.OutOrStdout(), time.Now()) })
	}
	return cmd, s
}

// output is how an answer is shown.
type output string

// outputFlag adds --output to a command.
func outputFlag(cmd *cobra.Command) *output {
	o := output("text")
	cmd.Flags().StringVarP((*string)(&o), "output", "o", "text", "text, json or yaml")
	complete := cobra.FixedCompletions([]string{"text", "json", "yaml"}, cobra.ShellCompDirectiveNoFileComp)
	_ = cmd.RegisterFlagCompletionFunc("output", complete) //nolint:errcheck // the flag is there: it was made above
	return &o
}

func (o output) check() error {
	if o != "text" && o != "json" && o != "yaml" {
		return fmt.Errorf("--output %q: choose text, json or yaml", string(o))
	}
	return nil
}

// write shows a value to a program, or for people by text.
func (o output) write(cmd *cobra.Command, value any, text func() error) error {
	switch o {
	case "json":
		return pages.JSON(cmd.OutOrStdout(), value)
	case "yaml":
		return pages.YAML(cmd.OutOrStdout(), value)
	}
	return text()
}
