package main

import (
	"context"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/agent/lastlogs"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/explain"
)

func timelineCommand() *cobra.Command {
	var since time.Duration
	var pod string
	var logs bool
	cmd, _ := showOf("timeline [FILE]", "Show what was decided, deleted and evicted, in order", cobra.MaximumNArgs(1),
		func(ctx context.Context, cfg config.Config, args []string) (page, error) {
			var from time.Time
			if since > 0 {
				from = time.Now().Add(-since)
			}
			if logs {
				return lastlogs.ReadFile(filepath.Join(cfg.StateDir, lastlogs.FileName), from, pod)
			}
			file := filepath.Join(cfg.StateDir, flight.FileName)
			if len(args) > 0 {
				file = args[0]
			}
			var shown explain.Timeline
			err := orInterrupted(ctx, func() (err error) {
				shown, err = explain.ReadTimeline(file, from, pod)
				return err
			})
			if err != nil {
				return nil, err
			}
			return shown, nil
		}, "state-dir")
	cmd.Long = `Show what cleave decided about the disks, what it deleted and whom it evicted, the
oldest first: of the flight recorder in the state folder, or of FILE, which may be
one that "cleave simulate --record" writes. "cleave explain" says why.`
	cmd.Flags().DurationVar(&since, "since", 0, "only what is no older, such as 2h; 0 for all")
	cmd.Flags().StringVar(&pod, "pod", "", "only what is about this pod: `name`, namespace/name or UID")
	cmd.Flags().BoolVar(&logs, "logs", false, "the last lines of evicted pods' logs instead, where reclaim.keepLogs keeps them; they may hold secrets")
	return cmd
}
