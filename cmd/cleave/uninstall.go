package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent/installer"
	"github.com/cleave-cri/cleave/systemd/install"
)

func uninstallCommand() *cobra.Command {
	var yes, purge bool
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Take cleave off this node, leaving every file as it was",
		Long: `Show what ` + "`cleave install`" + ` did and how it is taken back; with --yes, do it: the
kubelet goes back to the runtime first, then cleave ends. In files that were
changed since the install only the kubelet's endpoint is set back.

It refuses while any container uses the split snapshotter, and removes that one's
snapshots through containerd. Its roots stay until --purge, the state folder stays.
--purge takes away what the snapshotter made on its roots, and its database: with
the uninstall or any time later, but not while a snapshot is left, on another disk,
or beside anything that no snapshotter made.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd, onlyConfig)
	cmd.Flags().BoolVar(&yes, "yes", false, "do it, and don't only show it")
	cmd.Flags().BoolVar(&purge, "purge", false, "delete what the split snapshotter has on its roots too")
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
		switch {
		case purge && errors.Is(err, install.ErrNotInstalled):
			// It was uninstalled before.
			if err := in.Purge(cmd.Context(), !yes); err != nil || yes {
				return err
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "Nothing was changed. Give --yes to do this.")
			return err
		case err != nil:
			return err
		case purge:
			// Before anything is done: can it be done?
			if err := in.ShowPurge(); err != nil {
				return err
			}
		}
		if err := showAndRun(cmd, in, plan, yes); err != nil || !purge || !yes {
			return err
		}
		return in.Purge(cmd.Context(), false)
	}
	return cmd
}
