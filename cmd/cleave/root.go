package main

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cleave-cri/cleave/config"
)

func root() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cleave",
		Short: "Split the disk of a Kubernetes node into what it really is",
		Long: `cleave stands between the kubelet and containerd. It passes every CRI call
through untouched and tells the truth about filesystems: where image layers,
writable layers and logs really are, and what they really take.`,
		SilenceUsage:      true,
		SilenceErrors:     true,
		DisableAutoGenTag: true,
	}
	cmd.AddCommand(serveCommand(), statusCommand(), configCommand(), doctorCommand(), versionCommand(), handoverCommand(),
		installCommand(), uninstallCommand(), bypassCommand(),
		snapshotterCommand(), containerdConfigCommand(),
		imagesCommand(), orphansCommand(), allocatableCommand(), requestsCommand(), planCommand(), gcCommand(), duCommand(),
		simulateCommand(), labCommand(), explainCommand(), replayCommand(), timelineCommand(), topCommand(), dumpCommand())
	cmd.AddCommand(moreCommands()...)
	return cmd
}

// settings are the configuration file and the flags that override it.
type settings struct {
	path  string
	flags *pflag.FlagSet
	over  config.Config
}

// settingsFlags adds the flags of a command that works by the configuration:
// --config, and those named, which override it. No name stands for all.
func settingsFlags(cmd *cobra.Command, names ...string) *settings {
	s := &settings{flags: cmd.Flags()}
	s.flags.StringVar(&s.path, "config", config.DefaultPath, "configuration `file`; without one there the defaults hold")
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	all.Var(&s.over.Runtime.Endpoint, "runtime-endpoint", "the container runtime's CRI socket, unix:///path or /path")
	all.Var(&s.over.Listen.Endpoint, "listen", "the socket that cleave makes for the kubelet")
	all.Var(&s.over.Control.Endpoint, "control", "the socket on which cleave answers its own commands")
	all.StringVar(&s.over.StateDir, "state-dir", "", "`folder` for what must outlast a restart")
	all.StringVar((*string)(&s.over.Mode), "mode", "", "what cleave is towards the kubelet: cri, crio or observe")
	all.StringVar(&s.over.Log.Level, "log-level", "", "debug, info, warn or error")
	all.StringVar(&s.over.Log.Format, "log-format", "", "json or console")
	all.VisitAll(func(f *pflag.Flag) {
		if len(names) == 0 || slices.Contains(names, f.Name) {
			s.flags.AddFlag(f)
		}
	})
	return s
}

// load returns the effective configuration: the file, or the defaults where no
// file was named and none is at the usual place, overridden by flags.
func (s *settings) load() (config.Config, error) {
	cfg, err := config.Load(s.path)
	if errors.Is(err, config.ErrMissing) && !s.flags.Changed("config") {
		cfg, err = config.Default(), nil
	}
	if errors.Is(err, config.ErrMissing) {
		return config.Config{}, fmt.Errorf("%w: write one (`cleave config` prints the defaults), or leave --config out", err)
	}
	if err != nil {
		return config.Config{}, err
	}
	s.override(&cfg)
	if err := cfg.Validate(); err != nil {
		return config.Config{}, fmt.Errorf("configuration after the flags: %w", err)
	}
	return cfg, nil
}

func (s *settings) override(cfg *config.Config) {
	set := map[string]func(){
		"runtime-endpoint": func() { cfg.Runtime.Endpoint = s.over.Runtime.Endpoint },
		"listen":           func() { cfg.Listen.Endpoint = s.over.Listen.Endpoint },
		"control":          func() { cfg.Control.Endpoint = s.over.Control.Endpoint },
		"state-dir":        func() { cfg.StateDir = s.over.StateDir },
		"mode":             func() { cfg.Mode = s.over.Mode },
		"log-level":        func() { cfg.Log.Level = s.over.Log.Level },
		"log-format":       func() { cfg.Log.Format = s.over.Log.Format },
	}
	for name, apply := range set {
		if s.flags.Changed(name) {
			apply()
		}
	}
	cfg.Settle()
}

// loadPassingFaults is load, but a file that is wrong counts as none: for the way
// out when something is wrong.
func (s *settings) loadPassingFaults() (config.Config, error) {
	cfg, err := s.load()
	var faults config.Faults
	if errors.As(err, &faults) {
		return config.Default(), nil
	}
	return cfg, err
}
