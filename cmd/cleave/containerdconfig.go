package main

import (
	"errors"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
)

func containerdConfigCommand() *cobra.Command {
	var write, remove bool
	var target ctdconfig.Target
	var dropIn string
	var unpacks int
	cmd := &cobra.Command{
		Use:   "containerd-config",
		Short: "Print or install the containerd configuration for the split snapshotter",
		Long: `Print the containerd configuration that the split snapshotter needs, and what
stands against it. With --write it is put in place as a drop-in: only if
containerd then has just these values and all others as before. A second run
changes nothing. With --remove the drop-in is taken away, if it is still as
written. containerd takes neither up before its next restart.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd, "state-dir")
	cmd.Flags().BoolVar(&write, "write", false, "install the drop-in; what it replaces is kept in the state folder")
	cmd.Flags().BoolVar(&remove, "remove", false, "take the drop-in away")
	cmd.Flags().StringVar(&target.MainFile, "containerd-config", ctdconfig.DefaultMainFile, "containerd's main configuration `file`")
	cmd.Flags().StringVar(&target.Containerd, "containerd", "containerd", "containerd's `program`, which is asked for its configuration")
	cmd.Flags().StringVar(&dropIn, "drop-in", "", "the `file` to write; conf.d/99-cleave-snapshotter.toml beside the main file if not given")
	cmd.Flags().IntVar(&unpacks, "max-concurrent-unpacks", 0, "how many layers of an image containerd unpacks at a time; 0 leaves what is configured")
	cmd.MarkFlagsMutuallyExclusive("write", "remove")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if dropIn == "" {
			dropIn = ctdconfig.DropInBeside(target.MainFile)
		}
		if remove {
			removed, err := ctdconfig.Remove(dropIn)
			if err != nil {
				return err
			}
			return ctdconfig.TellRemoved(cmd.OutOrStdout(), dropIn, removed)
		}
		cfg, err := s.load()
		if err != nil {
			return err
		}
		options, err := snapshotter.ContainerdOptions(cfg, dropIn, unpacks)
		if err != nil {
			return err
		}
		target.BackupDir = filepath.Join(cfg.StateDir, "containerd-config")
		if write {
			plan, err := ctdconfig.Write(cmd.Context(), target, options)
			if err != nil {
				return err
			}
			return plan.TellWritten(cmd.OutOrStdout())
		}
		plan, err := ctdconfig.Examine(cmd.Context(), target, options)
		if err != nil {
			return err
		}
		return errors.Join(plan.Print(cmd.OutOrStdout()), plan.Err())
	}
	return cmd
}
