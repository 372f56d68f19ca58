package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/runtime"
)

// SplitOptions put a node on the split snapshotter.
type SplitOptions struct {
	// Images and Containers are the names of the disks for the two roots.
	Images, Containers string
	// Database is the name of the disk for the database; empty means none of its
	// own.
	Database string
	// Binary is the program for the snapshotter, if it is another than
	// Options.Cleave: one with fault points.
	Binary string
	// MaxConcurrentUnpacks is how many layers of an image containerd unpacks at a
	// time; 0 leaves its default.
	MaxConcurrentUnpacks int
}

// Split is a `cleave snapshotter` of one's own: the real program in a process.
// Its methods are for one caller at a time.
type Split struct {
	binary string
	env    []string
	cfg    config.Config
	file   string
	log    string
	around []string // the command that starts the program, and its arguments

	cmd *exec.Cmd     // the process started last, nil while none was
	end chan struct{} // closed when cmd has ended
}

// configureSplit gives a configuration the snapshotter's section for a node.
func configureSplit(cfg *config.Config, dir string, disks map[string]*disk.Disk, o SplitOptions) error {
	for _, name := range []string{o.Images, o.Containers, cmp.Or(o.Database, o.Images)} {
		if disks[name] == nil {
			return fmt.Errorf("put the node on the split snapshotter: there is no disk %q", name)
		}
	}
	s := &cfg.Snapshotter
	s.UsageMaxAge = time.Second // tests wait for figures
	s.ImageRoot = filepath.Join(disks[o.Images].Path(), "layers")
	s.ContainerRoot = filepath.Join(disks[o.Containers].Path(), "writable")
	s.Database = filepath.Join(dir, "db", "metadata.db")
	if o.Database != "" {
		s.Database = filepath.Join(disks[o.Database].Path(), "db", "metadata.db")
	}
	s.Endpoint = config.Endpoint(filepath.Join(dir, "s.sock"))
	s.StatusEndpoint = config.Endpoint(filepath.Join(dir, "t.sock"))
	return nil
}

// newSplit makes the roots, the database, and containerd's drop-in, by the
// commands that an operator uses. Nothing is started.
func newSplit(ctx context.Context, c *Cleave, containerd string, ctd *runtime.Containerd, env []string, o SplitOptions) (*Split, error) {
	s := &Split{binary: cmp.Or(o.Binary, c.binary), env: env, cfg: c.cfg, file: c.ConfigFile(), log: filepath.Join(filepath.Dir(c.log), "snapshotter.log")}
	for _, root := range []string{s.cfg.Snapshotter.ImageRoot, s.cfg.Snapshotter.ContainerRoot} {
		if err := os.MkdirAll(root, 0o700); err != nil {
			return nil, fmt.Errorf("make the snapshotter's root: %w", err)
		}
	}
	if _, err := s.Run(ctx, "snapshotter", "init"); err != nil {
		return nil, err
	}
	_, err := s.Run(ctx, "containerd-config", "--write", "--containerd", containerd,
		"--containerd-config", ctd.ConfigFile(), "--drop-in", dropIn(ctd), "--max-concurrent-unpacks", strconv.Itoa(o.MaxConcurrentUnpacks))
	return s, err
}

// dropIns is the pattern that a containerd's configuration imports, dropIn the
// file for the snapshotter.
func dropIns(dir string) string { return filepath.Join(dir, "conf.d", "*.toml") }

func dropIn(ctd *runtime.Containerd) string {
	return filepath.Join(ctd.Dir(), "conf.d", "99-cleave-snapshotter.toml")
}

// Run runs a command of cleave with the node's configuration and returns what it
// prints. The error has that too.
func (s *Split) Run(ctx context.Context, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, s.binary, append(args, "--config", s.file)...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("cleave %v: %w\n%s", args, err, out)
	}
	return string(out), nil
}

// Within makes a command start the program from now on: it gets the program and
// its arguments as its last arguments, and has to become the program. None means
// that the program is started itself.
func (s *Split) Within(command ...string) { s.around = command }

// Start starts the process and waits until it answers. env is added to its
// environment, as KEY=value, for this one start.
func (s *Split) Start(ctx context.Context, env ...string) error {
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("start the snapshotter: %w", err)
	}
	command := append(slices.Clone(s.around), s.binary, "snapshotter", "--config", s.file)
	cmd := exec.Command(command[0], command[1:]...) //nolint:gosec,noctx // our own program; it outlives ctx
	cmd.Env, cmd.Stdout, cmd.Stderr = append(slices.Clone(s.env), env...), log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := errors.Join(cmd.Start(), log.Close()); err != nil {
		return fmt.Errorf("start the snapshotter: %w", err)
	}
	end := make(chan struct{})
	s.cmd, s.end = cmd, end
	// Ends with the process, which Stop or the run's janitor ends.
	go func() {
		_ = cmd.Wait() //nolint:errcheck // how it ended is in its log
		close(end)
	}()
	return s.wait(ctx, "answer", func(st snapshotter.Status) bool { return st.PID == cmd.Process.Pid })
}

// Ended is closed when the process started last has ended.
func (s *Split) Ended() <-chan struct{} { return s.end }

// PID is the process started last, 0 while none was.
func (s *Split) PID() int {
	if s.cmd == nil {
		return 0
	}
	return s.cmd.Process.Pid
}

// WaitKnown waits until the snapshotter knows this containerd and that has
// compared its snapshots with the snapshotter's.
func (s *Split) WaitKnown(ctx context.Context, containerd int) error {
	return s.wait(ctx, "know containerd", func(st snapshotter.Status) bool {
		return st.Containerd.PokedAt != nil && int(st.Containerd.PID) == containerd
	})
}

func (s *Split) wait(ctx context.Context, what string, ok func(snapshotter.Status) bool) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		st, err := s.Status(ctx)
		if err == nil && ok(st) {
			return nil
		}
		select {
		case <-tick.C:
		case <-s.end:
			return fmt.Errorf("the snapshotter ended at its start:\n%s", s.LogTail(20))
		case <-ctx.Done():
			return fmt.Errorf("the snapshotter does not %s: %w (%+v, %w)\n%s", what, ctx.Err(), st.Containerd, err, s.LogTail(20))
		}
	}
}

// Status asks the snapshotter.
func (s *Split) Status(ctx context.Context) (snapshotter.Status, error) {
	return snapshotter.FetchStatus(ctx, s.cfg.Snapshotter.StatusEndpoint.Path())
}

// Signal sends a signal and waits for the end of the process.
func (s *Split) Signal(ctx context.Context, sig syscall.Signal) error {
	if s.cmd == nil {
		return nil
	}
	if err := s.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop the snapshotter: %w", err)
	}
	select {
	case <-s.end:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the snapshotter (pid %d) to end: %w", s.cmd.Process.Pid, ctx.Err())
	}
}

// Stop ends the process with SIGTERM and waits for it.
func (s *Split) Stop(ctx context.Context) error { return s.Signal(ctx, syscall.SIGTERM) }

// Config is the configuration that it runs with.
func (s *Split) Config() config.Config { return s.cfg }

// Binary is the path of the program.
func (s *Split) Binary() string { return s.binary }

// LogFile is the path of its log.
func (s *Split) LogFile() string { return s.log }

// LogTail returns the last lines of the log, or says why it can't.
func (s *Split) LogTail(lines int) string { return runtime.Tail(s.log, lines) }
