package main

import (
	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/play"
	"github.com/cleave-cri/cleave/lab/stage"
)

func labCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "A whole split node on this machine, on loop devices, to look at and to break",
		Long: `Make a node of its own on this machine: filesystems on loop devices, a private
containerd, cleave in front of it, and a stand-in for the kubelet or, with
--kubelet, a real one. It shares nothing with a containerd or a kubelet that runs
here. It needs root, containerd, runc and mkfs; docs/lab.md says more.`,
	}
	cmd.AddCommand(labUpCommand(), labDownCommand(), labRunCommand(), labListCommand(), labShellCommand())
	return cmd
}

// labFlags are the flags of commands that make a node.
func labFlags(cmd *cobra.Command) *stage.Options {
	o := &stage.Options{FS: disk.Ext4, Mode: config.ModeCRI}
	f := cmd.Flags()
	f.StringVar((*string)(&o.FS), "fs", string(o.FS), "type of filesystems: ext4, xfs or btrfs")
	f.StringVar((*string)(&o.Mode), "mode", string(o.Mode), "what cleave is: cri, crio (needs --kubelet) or observe")
	f.BoolVar(&o.Kubelet, "kubelet", false, "a real kubelet with etcd and kube-apiserver, not a stand-in")
	f.StringVar(&o.Programs.Dir, "bin-dir", "", "`folder` in which programs are looked for before PATH")
	f.StringVar(&o.Programs.Containerd, "containerd", "", "`path` of containerd; else the one in PATH")
	f.StringVar(&o.Programs.Shim, "shim", "", "`path` of containerd-shim-runc-v2; else the one beside containerd, or in PATH")
	f.StringVar(&o.Programs.Runc, "runc", "", "`path` of runc; else the one in PATH")
	f.StringVar(&o.Programs.Cleave, "cleave", "", "`path` of another build of cleave to try; else this one")
	return o
}

func labUpCommand() *cobra.Command {
	var sizes stage.Sizes
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Make a node and leave it running",
		Args:  cobra.NoArgs,
	}
	o := labFlags(cmd)
	f := cmd.Flags()
	f.StringVar(&sizes.Layout, "layout", "split", "single, dedicated, split or separate")
	f.StringVar(&sizes.Node, "size", "1Gi", "size of the node's filesystem")
	f.StringVar(&sizes.Images, "images-size", "1Gi", "size of the images' filesystem, if it is another")
	f.StringVar(&sizes.Containers, "containers-size", "1Gi", "size of the containers' filesystem, if it is another")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if here, err := stage.Enter(*o); err != nil || !here {
			return err
		}
		return stage.Up(cmd.Context(), cmd.OutOrStdout(), sizes, *o)
	}
	return cmd
}

func labDownCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "End the node and remove everything, also what a killed lab has left",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return stage.Down(cmd.Context(), cmd.OutOrStdout())
		},
	}
}

func labRunCommand() *cobra.Command {
	var o play.Options
	cmd := &cobra.Command{
		Use:   "run SCENARIO",
		Short: "Play a scenario on a real node and say whether it came out as it expects",
		Long: `Make the node that a scenario file describes (docs/lab), let happen on it what the
file says, in real time, and compare what cleave did with what the file expects.
The exit code is 1 if something came out otherwise. Everything is removed again.

The same file is played by "cleave simulate" in virtual time.`,
		Args: cobra.ExactArgs(1),
	}
	made := labFlags(cmd)
	cmd.Flags().StringVar((*string)(&made.Profile), "profile", string(sim.CleaveProfile), "who decides: cleave, or kubelet, beside which cleave only tells the truth (needs --kubelet)")
	cmd.Flags().BoolVar(&o.AgainstSim, "against-sim", false, "play it in the simulator, too, and fail where that evicts others or removes other images")
	cmd.Flags().BoolVar(&o.Keep, "keep", false, "leave the node running; `cleave lab down` ends it")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if here, err := stage.Enter(*made); err != nil || !here {
			return err
		}
		o.Stage = *made
		return play.Run(cmd.Context(), cmd.OutOrStdout(), args[0], o)
	}
	return cmd
}

func labListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List the nodes that are up",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return stage.List(cmd.OutOrStdout()) },
	}
}

func labShellCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "shell [-- COMMAND...]",
		Short: "A shell in which crictl, ctr and cleave mean the node that is up",
		RunE: func(cmd *cobra.Command, args []string) error {
			return stage.Shell(cmd.Context(), args, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	return cmd
}
