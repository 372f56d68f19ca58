package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
)

func allocatableCommand() *cobra.Command {
	var output, kubeconfig string
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
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if output != "text" && output != "json" {
			return fmt.Errorf("--output %q: choose text or json", output)
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
		if output == "json" {
			return errors.Join(printJSON(cmd, report), err)
		}
		return errors.Join(report.WriteText(cmd.OutOrStdout(), time.Now()), err)
	}
	return cmd
}
