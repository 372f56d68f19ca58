package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/config"
)

func gcCommand() *cobra.Command {
	var request agent.CollectRequest
	cmd := showCommand("gc", "Collect dead containers and unused images now, by the kubelet's marks and ages",
		func(ctx context.Context, cfg config.Config) (page, error) {
			return agent.Collect(ctx, cfg.Control.Endpoint.Path(), request)
		}, "control")
	cmd.Flags().BoolVar(&request.DryRun, "dry-run", false, "only say what would be deleted")
	return cmd
}
