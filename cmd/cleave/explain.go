package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/explain"
)

func explainCommand() *cobra.Command {
	var pod string
	cmd := &cobra.Command{
		Use:   "explain [FILE | POD]",
		Short: "Say why recorded decisions are what they are, or who would be evicted next",
		Long: `Say in sentences what was short, what was reclaimed, who went, and why that pod
and not another one, with figures and the names of rules (docs/engine.md). FILE
has records, as "cleave simulate --record" and the flight recorder write them.

Without a file the cleave that is running is asked: who would go first on each
filesystem if it were short and nothing could be reclaimed, or where POD, by name
or namespace/name, stands and why. Nothing is changed.`,
		Args: cobra.MaximumNArgs(1),
	}
	s := settingsFlags(cmd, "control")
	cmd.Flags().StringVar(&pod, "pod", "", "only what is about this pod: `name` or namespace/name")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			_, err := os.Stat(args[0])
			switch {
			case err == nil:
				return orInterrupted(cmd.Context(), func() error { return explain.Explain(cmd.OutOrStdout(), args[0], pod) })
			case pod != "" || !errors.Is(err, fs.ErrNotExist):
				return fmt.Errorf("explain records: %w", err)
			}
			pod = args[0]
		}
		cfg, err := s.load()
		if err != nil {
			return err
		}
		answer, err := agent.Explain(cmd.Context(), cfg.Control.Endpoint.Path(), agent.ExplainRequest{Pod: pod})
		if err != nil && len(args) > 0 {
			err = fmt.Errorf("%q is no file here, and as a pod: %w", args[0], err)
		}
		if err != nil {
			return err
		}
		return answer.WriteText(cmd.OutOrStdout(), time.Now())
	}
	return cmd
}

func replayCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "replay FILE",
		Short: "Make recorded decisions again and show what is different",
		Long: `Make all decisions of a file of records again, from what they were made from.
The engine that wrote them comes to the same; another version may not, and then
the differences are shown and the exit code is 1.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return orInterrupted(cmd.Context(), func() error { return explain.Replay(cmd.OutOrStdout(), args[0]) })
		},
	}
}
