package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
)

func handoverCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "handover",
		Short: "Replace the running cleave by a new process, losing no call",
		Long: `Let the running cleave start a new process of its program, with the configuration
as it is now, which takes over the sockets. It returns when the new process
answers, or with the reason why none does; then the old one goes on. systemctl
reload cleave does the same.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd, "control")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := s.load()
		if err != nil {
			return err
		}
		pid, err := agent.AskHandover(cmd.Context(), cfg.Control.Endpoint.Path())
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "Process %d serves now; the old one ends when its calls are answered.\n", pid)
		return err
	}
	return cmd
}
