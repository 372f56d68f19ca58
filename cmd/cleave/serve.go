package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/config"
)

func serveCommand() *cobra.Command {
	var passthrough bool
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve the CRI to the kubelet",
		Long: `Serve the CRI on cleave's socket and pass every call on to the runtime's.

SIGTERM ends it: calls in flight have 10 seconds, then they get Unavailable.
SIGHUP hands over to a new process of the same program, with the configuration
as it then is: no call is lost, and the old process ends when the calls that it
had are answered, after 15 minutes at the latest.`,
		Args: cobra.NoArgs,
	}
	s := settingsFlags(cmd)
	cmd.Flags().BoolVar(&passthrough, "passthrough", false, "serve without configuration file, corrections and measuring; only --listen, --runtime-endpoint and the --log flags count")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		load := s.load
		if passthrough {
			load = s.loadPassthrough
		}
		cfg, err := load()
		if err != nil {
			return err
		}
		log, err := agent.NewLog(cfg.Log)
		if err != nil {
			return err
		}
		defer func() { _ = log.Sync() }() //nolint:errcheck // nobody reads it
		// A log whose reader is gone is no reason to end.
		signal.Ignore(syscall.SIGPIPE)
		executable, err := os.Executable()
		if err != nil {
			return err
		}
		handover := make(chan os.Signal, 1)
		signal.Notify(handover, syscall.SIGHUP)
		defer signal.Stop(handover)
		return agent.Serve(cmd.Context(), cfg, agent.Options{
			Version: version, Passthrough: passthrough, Handover: handover,
			Executable: executable, Args: os.Args[1:], Log: log,
		})
	}
	return cmd
}

// loadPassthrough returns the defaults and the flags, whatever file there is.
func (s *settings) loadPassthrough() (config.Config, error) {
	if s.flags.Changed("config") {
		return config.Config{}, errors.New("--passthrough reads no configuration file: leave --config out")
	}
	cfg := config.Default()
	s.override(&cfg)
	if err := cfg.ValidatePassthrough(); err != nil {
		return config.Config{}, fmt.Errorf("flags: %w", err)
	}
	return cfg, nil
}
