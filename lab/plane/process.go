package plane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cleave-cri/cleave/lab/runtime"
)

const (
	// startLimit bounds the wait for a program to answer, on a machine with much else to do.
	// The kubelet's cAdvisor looks at all containers of the machine first, and asks for up to 15 s about each one of another lab.
	startLimit = 4 * time.Minute
	// stopLimit is how long a program has after SIGTERM.
	stopLimit = 20 * time.Second
)

// process is one program that may be started again. Its methods are for one caller at a time.
type process struct {
	binary string
	args   []string
	env    []string
	log    string

	cmd *exec.Cmd
	end chan struct{} // closed when cmd has ended
}

// pid is the process started last, 0 while none was.
func (p *process) pid() int {
	if p.cmd == nil {
		return 0
	}
	return p.cmd.Process.Pid
}

func (p *process) name() string { return filepath.Base(p.binary) }

// start starts the program and waits until answers says so.
func (p *process) start(ctx context.Context, answers func(context.Context) error) error {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("start %s: %w", p.name(), err)
	}
	cmd := exec.Command(p.binary, p.args...) //nolint:gosec,noctx // a program that the caller names; it outlives ctx
	cmd.Env, cmd.Stdout, cmd.Stderr = p.env, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := errors.Join(cmd.Start(), log.Close()); err != nil {
		return fmt.Errorf("start %s: %w", p.name(), err)
	}
	end := make(chan struct{})
	p.cmd, p.end = cmd, end
	// Ends with the process, which stop or the run's janitor ends.
	go func() {
		_ = cmd.Wait() //nolint:errcheck // how it ended is in its log
		close(end)
	}()
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := answers(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-end:
			return fmt.Errorf("%s ended at its start with %s:\n%s", p.name(), cmd.ProcessState, p.tail())
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer: %w (%w)\n%s", p.name(), ctx.Err(), err, p.tail())
		}
	}
}

// signal sends a signal and waits for the end of the process.
func (p *process) signal(ctx context.Context, s syscall.Signal) error {
	if p.cmd == nil {
		return nil
	}
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name(), err)
	}
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	select {
	case <-p.end:
		return nil
	case <-ctx.Done():
		err := p.cmd.Process.Kill()
		<-p.end
		return errors.Join(fmt.Errorf("stop %s: it did not end: %w; killed", p.name(), ctx.Err()), err)
	}
}

func (p *process) stop(ctx context.Context) error { return p.signal(ctx, syscall.SIGTERM) }

func (p *process) tail() string { return runtime.Tail(p.log, 30) }
