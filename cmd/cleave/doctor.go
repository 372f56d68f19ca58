package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/doctor"
)

func doctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check the node and say what to do",
		Long: `Check what cleave needs on this node, each with pass, warn or fail, the reason
and the remedy. Nothing is changed. The exit code is 1 if a check fails.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd)
	output := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := output.check(); err != nil {
			return err
		}
		cfg, err := s.load()
		if err != nil {
			return err
		}
		results, err := agent.Examine(cmd.Context(), cfg)
		if err != nil {
			return err
		}
		err = output.write(cmd, results, func() error { return doctor.Write(cmd.OutOrStdout(), results) })
		if err == nil && doctor.Worst(results) == doctor.Fail {
			err = errors.New("doctor: at least one check failed")
		}
		return err
	}
	return cmd
}
