package main

import (
	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/explain"
)

func explainCommand() *cobra.Command {
	var pod string
	cmd := &cobra.Command{
		Use:   "explain FILE",
		Short: "Say why recorded decisions are what they are",
		Long: `Say in sentences what was short, what was reclaimed, who went, and why that pod
and not another one, with figures and the names of rules (docs/engine.md). FILE
has records, as "cleave simulate --record" writes them.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return explain.Explain(cmd.OutOrStdout(), args[0], pod)
		},
	}
	cmd.Flags().StringVar(&pod, "pod", "", "only what is about this pod: `name` or namespace/name")
	return cmd
}

func replayCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "replay FILE",
		Short: "Make recorded decisions again and show what is different",
		Long: `Make all decisions of a file of records again, from what they were made from.
The engine that wrote them comes to the same; another version may not, and then
the differences are shown and the exit code is 1.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return explain.Replay(cmd.OutOrStdout(), args[0])
		},
	}
}
