package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/du"
	"github.com/cleave-cri/cleave/config"
)

func duCommand() *cobra.Command {
	var request du.Request
	cmd, s := showOf("du POD[/CONTAINER]", "Find the largest folders and files of a pod, deleted ones that are open too", cobra.ExactArgs(1),
		func(ctx context.Context, cfg config.Config, args []string) (page, error) {
			request.Pod, request.Container, _ = strings.Cut(args[0], "/")
			return agent.FetchLargest(ctx, cfg.Control.Endpoint.Path(), request)
		}, "control")
	cmd.Long = `Look through the writable layers, volumes and logs of a pod, or the writable layer
and logs of one container, and list what takes most; POD is its name or UID. The
running cleave looks, so only root can ask. It follows no symlink, leaves other
filesystems out, and keeps to a budget: what it could not look at in time is told,
and the figures are then lower bounds. Names that are no text are shown with \x.`
	flags := cmd.Flags()
	flags.StringVarP(&request.Namespace, "namespace", "n", "", "the pod's namespace, needed where several have one of that name")
	flags.IntVar(&request.Most, "top", du.DefaultMost, "how many folders and files to list of each place")
	flags.BoolVar(&request.ByInodes, "inodes", false, "look for what takes inodes, not space")
	flags.DurationVar(&request.Limit, "limit", du.DefaultLimit, "how long to look at most")
	flags.IntVar(&request.EntriesPerSecond, "entries-per-second", du.DefaultEntriesPerSecond, "how many files to look at in a second at most")
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		cfg, err := s.load()
		if err != nil || len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names, err := agent.PodNames(cmd.Context(), cfg.Control.Endpoint.Path())
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	return cmd
}
