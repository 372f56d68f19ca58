package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent/dump"
	"github.com/cleave-cri/cleave/config"
)

func dumpCommand() *cobra.Command {
	o := dump.Options{Version: version}
	cmd := &cobra.Command{
		Use:   "dump [FILE]",
		Short: "Write one file for a bug report, without secrets",
		Long: `Write a compressed tar archive with versions, the effective configuration, status,
usage, metrics, what doctor finds, and the last decisions of the flight recorder;
with --journal also what cleave's units logged. FILE is a new one that only root
may read, - is standard output. A part that can't be had is left out, and index.txt
says why, so that it works with no cleave running too.

Tokens, passwords, keys, kubeconfigs and the logs of evicted pods are not in it.
Names of pods, images, folders and the node are: look through it before it goes
to somebody.`,
		Args: cobra.MaximumNArgs(1),
	}
	s := settingsFlags(cmd, "control", "state-dir")
	cmd.Flags().IntVar(&o.Records, "records", dump.DefaultRecords, "how many of the last decisions to take")
	cmd.Flags().DurationVar(&o.JournalSince, "journal", 0, "take the journal's lines of cleave no older than this too, such as 24h; 0 for none")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if o.Records < 0 || o.JournalSince < 0 || o.JournalSince > 0 && o.JournalSince < time.Second {
			return fmt.Errorf("--records %d, --journal %s: give a count from 0 on, and 0 or at least 1s", o.Records, o.JournalSince)
		}
		o.Config, o.ConfigProblem = s.load()
		if o.ConfigProblem != nil {
			o.Config = config.Default()
			s.override(&o.Config)
		}
		name := ""
		if len(args) > 0 {
			name = args[0]
		}
		if name == "-" {
			return dump.Write(cmd.Context(), cmd.OutOrStdout(), o)
		}
		name, err := dump.Create(cmd.Context(), name, o)
		if err == nil {
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s\n", name)
		}
		return err
	}
	return cmd
}
