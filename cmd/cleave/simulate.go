package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/simulate"
)

func simulateCommand() *cobra.Command {
	var o simulate.Options
	var recordTo string
	cmd := &cobra.Command{
		Use:   "simulate FILE",
		Short: "Play a scenario in virtual time and show who would be evicted",
		Long: `Play a scenario file (docs/examples) in virtual time: what fills up, what is
removed, who is evicted, who had no space and for how long. Nothing on this
machine is looked at or changed. The exit code is 1 if something comes out
otherwise than the file expects.`,
		Args: cobra.ExactArgs(1),
	}
	cmd.Flags().StringVar(&o.Profile, "profile", "cleave", "whose decisions: kubelet, or cleave with the kubelet as last resort")
	cmd.Flags().BoolVar(&o.Compare, "compare", false, "play both profiles and show the difference")
	cmd.Flags().BoolVar(&o.JSON, "json", false, "all that happened, as JSON")
	cmd.Flags().StringVar(&recordTo, "record", "", "write what was decided to this new `file`, for explain and replay")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if recordTo == "" {
			return orInterrupted(cmd.Context(), func() error { return simulate.Run(cmd.OutOrStdout(), args[0], o) })
		}
		file, err := os.OpenFile(recordTo, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if err != nil {
			return fmt.Errorf("write records: %w", err)
		}
		buffered := bufio.NewWriter(file)
		o.Record = buffered
		err = orInterrupted(cmd.Context(), func() error {
			return errors.Join(simulate.Run(cmd.OutOrStdout(), args[0], o), buffered.Flush())
		})
		err = errors.Join(err, file.Close())
		if err != nil && !errors.Is(err, simulate.ErrUnexpected) {
			err = errors.Join(err, os.Remove(recordTo)) // nothing whole is in it
		}
		return err
	}
	return cmd
}
