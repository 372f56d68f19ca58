package main

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/config"
)

func snapshotterCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "snapshotter",
		Short: "Serve the split snapshotter to containerd",
		Long: `Serve the split snapshotter: image layers on one filesystem, everything that is
written to on another, as the section snapshotter of the configuration says.
containerd is told by ` + "`cleave containerd-config`" + `.

It serves reads whatever happens. Layers are made only while both roots are the
right ones, and deleted only for the containerd that they belong to. SIGTERM
ends it; pods run on, and containerd goes on with the next start.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd, "runtime-endpoint", "log-level", "log-format")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, log, end, err := s.loadWithLog()
		if err != nil {
			return err
		}
		defer end()
		// A log whose reader is gone is no reason to end.
		signal.Ignore(syscall.SIGPIPE)
		return snapshotter.Serve(cmd.Context(), cfg, snapshotter.Options{Version: version, Log: log.Named("snapshotter")})
	}
	cmd.AddCommand(snapshotterInitCommand(), snapshotterStatusCommand(), snapshotterCheckCommand(),
		snapshotterConfirmCommand(), snapshotterUnpinCommand())
	return cmd
}

// offlineCommand is a command that works on the store itself, while the
// snapshotter does not run.
func offlineCommand(use, short, long string, run func(cmd *cobra.Command, cfg config.Config, log *zap.Logger) error) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Long: long, Args: cobra.NoArgs}
	s := settingsFlags(cmd, "log-level", "log-format")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, log, end, err := s.loadWithLog()
		if err != nil {
			return err
		}
		defer end()
		return run(cmd, cfg, log)
	}
	return cmd
}

func snapshotterInitCommand() *cobra.Command {
	return offlineCommand("init", "Prepare two empty roots and a database for the split snapshotter",
		`Make the roots of the configuration those of a new snapshotter: both must exist
and be empty. It is done once; a start never does it by itself, so that a root
that is not mounted is never taken for a new one.`,
		func(cmd *cobra.Command, cfg config.Config, log *zap.Logger) error {
			if err := snapshotter.Init(cmd.Context(), cfg, log); err != nil {
				return err
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s and %s are prepared. Start `cleave snapshotter`.\n", cfg.Snapshotter.ImageRoot, cfg.Snapshotter.ContainerRoot)
			return err
		})
}

func snapshotterStatusCommand() *cobra.Command {
	return showCommand("status", "Show what the running snapshotter holds and whether it may write and delete",
		func(ctx context.Context, cfg config.Config) (page, error) {
			return snapshotter.FetchStatus(ctx, cfg.Snapshotter.StatusEndpoint.Path())
		}, onlyConfig)
}

// onlyConfig is the name of no flag: --config alone counts.
const onlyConfig = "-"

func snapshotterConfirmCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "confirm",
		Short: "Let the running snapshotter do the clean-up that its alarm holds up",
		Long: `A clean-up that would take an unusual share of the folders is held up, because
then something else is probably wrong: a database restored from an older copy, a
disk of another node. ` + "`cleave snapshotter status -o json`" + ` lists the folders. This
lets it take just those.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd, onlyConfig)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := s.load()
		if err != nil {
			return err
		}
		if err := snapshotter.ConfirmCleanup(cmd.Context(), cfg.Snapshotter.StatusEndpoint.Path()); err != nil {
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), "The clean-up is done; what it took is in the trash and is deleted now.")
		return err
	}
	return cmd
}

func snapshotterCheckCommand() *cobra.Command {
	var repair bool
	var output *output
	cmd := offlineCommand("check", "Compare both roots with the database while the snapshotter does not run",
		`Compare both roots with the database. Nothing is changed, save with --repair:
then folders that nobody owns are moved to the trash, after they were shown. The
exit code is 1 if something is not as it should be. It refuses while the
snapshotter runs.`,
		func(cmd *cobra.Command, cfg config.Config, log *zap.Logger) error {
			show := func(e snapshotter.Examination) error { return e.WriteFound(cmd.OutOrStdout()) }
			if *output != "text" {
				show = func(snapshotter.Examination) error { return nil }
			}
			e, err := snapshotter.Examine(cmd.Context(), cfg, log, repair, show)
			if err != nil {
				return err
			}
			err = output.write(cmd, e, func() error { return e.WriteRepaired(cmd.OutOrStdout()) })
			return errors.Join(err, e.Err())
		})
	output = outputFlag(cmd)
	cmd.Flags().BoolVar(&repair, "repair", false, "move folders that nobody owns to the trash")
	cmd.PreRunE = func(*cobra.Command, []string) error { return output.check() }
	return cmd
}

func snapshotterUnpinCommand() *cobra.Command {
	return offlineCommand("unpin", "Let the store take another containerd, after the old one is gone for good",
		`Forget which containerd the snapshots belong to; the next one that is met is
taken for it. That one removes all snapshots that it does not know, so this is
for a node whose containerd was set up anew. It refuses while the snapshotter
runs.`,
		func(cmd *cobra.Command, cfg config.Config, log *zap.Logger) error {
			if err := snapshotter.Unpin(cmd.Context(), cfg, log); err != nil {
				return err
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "The next containerd that is met is taken for the owner of all snapshots, and removes those that it does not know.")
			return err
		})
}

// loadWithLog is load with the log that is configured; end writes its last lines.
func (s *settings) loadWithLog() (cfg config.Config, log *zap.Logger, end func(), _ error) {
	cfg, err := s.load()
	if err != nil {
		return config.Config{}, nil, nil, err
	}
	log, err = agent.NewLog(cfg.Log)
	if err != nil {
		return config.Config{}, nil, nil, err
	}
	return cfg, log, func() { _ = log.Sync() }, nil //nolint:errcheck // nobody reads it
}
