package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/config"
)

func statusCommand() *cobra.Command {
	return showCommand("status", "Show where images, writable layers and logs are and what they take",
		func(ctx context.Context, cfg config.Config) (page, error) {
			return agent.FetchStatus(ctx, cfg.Control.Endpoint.Path())
		}, "control")
}

// page is what a status command shows: as JSON, or for people.
type page interface {
	WriteText(w io.Writer, now time.Time) error
}

// showCommand is a command that asks a running process and shows its answer. flags
// are those that override the configuration.
func showCommand(use, short string, fetch func(context.Context, config.Config) (page, error), flags ...string) *cobra.Command {
	var output string
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs}
	s := settingsFlags(cmd, flags...)
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := s.load()
		if err != nil {
			return err
		}
		if output != "text" && output != "json" {
			return fmt.Errorf("--output %q: choose text or json", output)
		}
		status, err := fetch(cmd.Context(), cfg)
		if err != nil {
			return err
		}
		if output == "json" {
			return printJSON(cmd, status)
		}
		return status.WriteText(cmd.OutOrStdout(), time.Now())
	}
	return cmd
}

func printJSON(cmd *cobra.Command, value any) error {
	encoder := json.NewEncoder(cmd.OutOrStdout())
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}
