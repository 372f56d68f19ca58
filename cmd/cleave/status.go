package main

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
)

func statusCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show where images, writable layers and logs are and what they take",
		Args:  cobra.NoArgs,
	}
	s := settingsFlags(cmd)
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := s.load()
		if err != nil {
			return err
		}
		if output != "text" && output != "json" {
			return fmt.Errorf("--output %q: choose text or json", output)
		}
		status, err := agent.FetchStatus(cmd.Context(), cfg.Control.Endpoint.Path())
		if err != nil {
			return err
		}
		if output == "json" {
			return printJSON(cmd, status)
		}
		return status.WriteText(cmd.OutOrStdout(), time.Now())
	}
	return cmd
}

func printJSON(cmd *cobra.Command, value any) error {
	encoder := json.NewEncoder(cmd.OutOrStdout())
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}
