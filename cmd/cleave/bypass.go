package main

import (
	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent/installer"
)

func bypassCommand() *cobra.Command {
	var off bool
	cmd := &cobra.Command{
		Use:   "bypass",
		Short: "Pass calls through and do nothing else, or go back to cleave with --off",
		Long: `Put cleave-passthrough.service in the place of cleave.service: calls go to the
runtime as they are, with no configuration, no corrections and no measuring. It is
what systemd does by itself when cleave can't be started. Calls in flight have 10
seconds; then the kubelet connects anew. --off puts cleave back.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd, onlyConfig)
	cmd.Flags().BoolVar(&off, "off", false, "end the pass-through and start cleave again")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := s.loadPassingFaults()
		if err != nil {
			return err
		}
		in, err := installer.New(cfg, cmd.OutOrStdout())
		if err != nil {
			return err
		}
		return in.Bypass(cmd.Context(), off)
	}
	return cmd
}
