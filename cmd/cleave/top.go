package main

import (
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent/top"
)

func topCommand() *cobra.Command {
	var noColour bool
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch the disks: how full, who holds most, what would go first",
		Long: `Show each filesystem as a bar with the thresholds on it, the biggest holders and
what cleave would delete first, anew each second, until q or Ctrl-C. In a bar # is
used, ~ is kept for root, . is available; | is where a threshold acts, : where one
begins to wait. What is no terminal gets tables, once. Colours are left out with
--no-color, or where NO_COLOR is set.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd, "control")
	output := outputFlag(cmd)
	cmd.Flags().BoolVar(&noColour, "no-color", false, "no colours")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := output.check(); err != nil {
			return err
		}
		cfg, err := s.load()
		if err != nil {
			return err
		}
		source := top.Source{Socket: cfg.Control.Endpoint.Path()}
		if screen, ok := top.Drawable(cmd.OutOrStdout(), os.Getenv("TERM")); ok && *output == "text" {
			return top.Terminal{Out: screen, Keys: top.Keys, Colour: !noColour && os.Getenv("NO_COLOR") == ""}.Show(cmd.Context(), source.Fetch)
		}
		view, err := source.Fetch(cmd.Context())
		if err != nil {
			return err
		}
		return output.write(cmd, view, func() error { return view.WriteText(cmd.OutOrStdout(), time.Now()) })
	}
	return cmd
}
