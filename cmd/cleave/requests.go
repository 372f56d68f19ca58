package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/config"
)

func requestsCommand() *cobra.Command {
	return showCommand("requests", "Show what workloads on this node request of ephemeral storage, the most they used, and what they should request",
		func(ctx context.Context, cfg config.Config) (page, error) {
			return agent.FetchRequests(ctx, cfg.Control.Endpoint.Path())
		}, "control")
}
