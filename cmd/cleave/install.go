package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent/installer"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
	"github.com/cleave-cri/cleave/systemd/install"
)

func installCommand() *cobra.Command {
	var yes, resume, revert, redirect bool
	var snapshotter string
	var target ctdconfig.Target
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Put cleave between the kubelet and containerd on this node",
		Long: `Show what there is to do on this node, as diffs of files and actions on units in
their order; with --yes, do it. After each step that matters it looks whether the
node works. If a step fails, all is taken back, and every file is as it was
before. After a power cut, --resume does the rest and --revert takes it back.

In mode observe the kubelet is left alone, and with --redirect too: containerd
moves to another socket, and cleave listens where it did. The split snapshotter is set up with
--snapshotter split, after ` + "`cleave snapshotter init`" + `.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd, "mode")
	cmd.Flags().BoolVar(&yes, "yes", false, "do it, and don't only show it")
	cmd.Flags().BoolVar(&resume, "resume", false, "do the rest of what was broken off")
	cmd.Flags().BoolVar(&revert, "revert", false, "take back what was broken off")
	cmd.Flags().StringVar(&snapshotter, "snapshotter", "", "split: have containerd use the split snapshotter")
	cmd.Flags().BoolVar(&redirect, "redirect", false, "take containerd's place on its own socket, so that the kubelet and all others stay as they are")
	cmd.Flags().StringVar(&target.MainFile, "containerd-config", ctdconfig.DefaultMainFile, "containerd's main configuration `file`")
	cmd.Flags().StringVar(&target.Containerd, "containerd", "containerd", "containerd's `program`, which is asked for its configuration")
	cmd.MarkFlagsMutuallyExclusive("resume", "revert")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if snapshotter != "" && snapshotter != "split" {
			return fmt.Errorf("--snapshotter %q: only split is possible", snapshotter)
		}
		if (resume || revert) && !yes {
			return errors.New("--resume and --revert change the node: give --yes too")
		}
		cfg, configured, err := s.loadForInstall()
		if err != nil {
			return err
		}
		in, err := installer.New(configured, cmd.OutOrStdout())
		if err != nil {
			return err
		}
		switch {
		case resume:
			return in.Resume(cmd.Context())
		case revert:
			return in.Revert(cmd.Context())
		}
		_, statErr := os.Stat(s.path)
		plan, err := in.Plan(cmd.Context(), installer.Options{
			Mode: cfg.Mode, Split: snapshotter != "", Redirect: redirect, ConfigPath: s.path, HasConfig: statErr == nil, Containerd: target,
		})
		if err != nil {
			return err
		}
		return showAndRun(cmd, in, plan, yes)
	}
	return cmd
}

// loadForInstall returns the configuration with the flags, and as it is in the
// file.
func (s *settings) loadForInstall() (wanted, configured config.Config, _ error) {
	wanted, err := s.load()
	if err != nil {
		return config.Config{}, config.Config{}, err
	}
	configured, err = config.Load(s.path)
	if errors.Is(err, config.ErrMissing) {
		configured, err = config.Default(), nil
	}
	return wanted, configured, err
}

// showAndRun shows a plan, and carries it out with --yes.
func showAndRun(cmd *cobra.Command, in *installer.Installer, plan install.Plan, yes bool) error {
	if err := plan.Write(cmd.OutOrStdout()); err != nil {
		return err
	}
	if !yes {
		_, err := fmt.Fprintln(cmd.OutOrStdout(), "Nothing was changed. Give --yes to do this.")
		return err
	}
	if err := in.Run(cmd.Context(), plan); err != nil {
		return err
	}
	_, err := fmt.Fprintln(cmd.OutOrStdout(), "Done.")
	return err
}
