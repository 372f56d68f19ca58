package main

import (
	"github.com/spf13/cobra"
)

func configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print the effective configuration",
		Long: `Print the configuration as cleave would use it: the defaults, overridden by the
file, overridden by flags. The output is a valid configuration file.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := s.load()
		if err != nil {
			return err
		}
		text, err := cfg.YAML()
		if err != nil {
			return err
		}
		_, err = cmd.OutOrStdout().Write(text)
		return err
	}
	return cmd
}
