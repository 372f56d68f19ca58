package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/doctor"
)

func doctorCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check the node and say what to do",
		Long: `Check what cleave needs on this node, each with pass, warn or fail, the reason
and the remedy. Nothing is changed. The exit code is 1 if a check fails.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd)
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if output != "text" && output != "json" {
			return fmt.Errorf("--output %q: choose text or json", output)
		}
		cfg, err := s.load()
		if err != nil {
			return err
		}
		results, err := agent.Examine(cmd.Context(), cfg)
		if err != nil {
			return err
		}
		if output == "json" {
			err = printJSON(cmd, results)
		} else {
			err = doctor.Write(cmd.OutOrStdout(), results)
		}
		if err == nil && doctor.Worst(results) == doctor.Fail {
			err = errors.New("doctor: at least one check failed")
		}
		return err
	}
	return cmd
}
