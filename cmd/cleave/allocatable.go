package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
)

func allocatableCommand() *cobra.Command {
	var kubeconfig string
	cmd := &cobra.Command{
		Use:   "allocatable",
		Short: "Explain what pods can request of this node, and what the kernel enforces",
		Long: `Compute from the kubelet's settings what pods can request of memory, of
ephemeral storage and of each filesystem, term by term; compare it with what the
node publishes and with the limit that the pods' cgroup really has; say what
somebody should look at. Nothing is changed. docs/kube.md explains the terms.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd, "runtime-endpoint", "listen", "control")
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "`file` with which the API server is asked what the node publishes; the kubelet's own by default")
	output := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := output.check(); err != nil {
			return err
		}
		cfg, err := s.load()
		if err != nil {
			return err
		}
		// A report comes also with settings that are wrong.
		report, err := agent.Allocatable(cmd.Context(), cfg, kubeconfig)
		if len(report.Resources) == 0 {
			return err
		}
		return errors.Join(output.write(cmd, report, func() error { return report.WriteText(cmd.OutOrStdout(), time.Now()) }), err)
	}
	return cmd
}
