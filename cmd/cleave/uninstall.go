package main

import (
	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent/installer"
)

func uninstallCommand() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Take cleave off this node, leaving every file as it was",
		Long: `Show what ` + "`cleave install`" + ` did and how it is taken back; with --yes, do it: the
kubelet goes back to the runtime first, then cleave ends. In files that were
changed since the install only the kubelet's endpoint is set back.

It refuses while any container uses the split snapshotter, and removes that one's
snapshots through containerd. Its roots and the state folder stay.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd, onlyConfig)
	cmd.Flags().BoolVar(&yes, "yes", false, "do it, and don't only show it")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		_, configured, err := s.loadForInstall()
		if err != nil {
			return err
		}
		in, err := installer.New(configured, cmd.OutOrStdout())
		if err != nil {
			return err
		}
		plan, err := in.UninstallPlan(cmd.Context())
		if err != nil {
			return err
		}
		return showAndRun(cmd, in, plan, yes)
	}
	return cmd
}
