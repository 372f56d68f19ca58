package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/config"
)

func planCommand() *cobra.Command {
	return showCommand("plan", "Show what would be reclaimed now if a filesystem were short, and by which rule",
		func(ctx context.Context, cfg config.Config) (page, error) {
			return agent.FetchPlan(ctx, cfg.Control.Endpoint.Path())
		}, "control")
}
