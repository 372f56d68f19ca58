package installer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/agent/upstream"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/systemd"
	"github.com/cleave-cri/cleave/systemd/install"
	"github.com/cleave-cri/cleave/systemd/install/endpoint"
	"github.com/cleave-cri/cleave/systemd/install/transaction"
)

const (
	verbResetFailed = "reset-failed"

	// commandTimeout bounds a systemctl: a service has 90 s to start and as long
	// to stop (systemd-system.conf(5), DefaultTimeoutStartSec).
	commandTimeout = 4 * time.Minute
	// checkTimeout bounds a check, checkPause is the pause between two looks.
	checkTimeout = 2 * time.Minute
	checkPause   = time.Second
	// steady is for how long a kubelet has to run: one that can't reach its
	// runtime ends some seconds after its start.
	steady = 15 * time.Second
)

// node performs actions on this node.
type node struct{ cfg config.Config }

var _ transaction.Performer = node{}

// Perform does what an action says, and returns when it is done.
func (n node) Perform(ctx context.Context, a transaction.Action) error {
	switch a.Verb {
	case install.VerbCheck:
		return n.check(ctx, a.Args)
	case install.VerbRelease:
		st, err := n.store()
		if err != nil {
			return err
		}
		return errors.Join(st.release(ctx), st.close())
	}
	_, err := systemctl(ctx, append([]string{a.Verb}, a.Args...)...)
	return err
}

func systemctl(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "systemctl", args...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, trimmed(out))
	}
	return trimmed(out), nil
}

// states asks how cleave's units are.
func (n node) states(ctx context.Context) (map[string]install.UnitState, error) {
	out := map[string]install.UnitState{}
	for _, unit := range []string{systemd.Service, systemd.Socket, systemd.SnapshotterService, systemd.SnapshotterSocket} {
		p, err := properties(ctx, unit, "ActiveState", "UnitFileState")
		if err != nil {
			return nil, err
		}
		out[unit] = install.UnitState{Active: p["ActiveState"] == "active", Enabled: p["UnitFileState"] == "enabled"}
	}
	return out, nil
}

func properties(ctx context.Context, unit string, names ...string) (map[string]string, error) {
	text, err := systemctl(ctx, "show", "--property="+strings.Join(names, ","), unit)
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for line := range strings.SplitSeq(text, "\n") {
		if name, value, ok := strings.Cut(line, "="); ok {
			out[name] = value
		}
	}
	return out, nil
}

func (n node) check(ctx context.Context, args []string) error {
	var look func(context.Context) error
	switch args[0] {
	case install.CheckCleave, install.CheckRuntime:
		look = answers(args[1])
	case install.CheckSnapshotter:
		look = func(ctx context.Context) error {
			_, err := snapshotter.FetchStatus(ctx, n.cfg.Snapshotter.StatusEndpoint.Path())
			return err
		}
	case install.CheckKubelet:
		look = kubeletRuns(args[1], args[2])
	default:
		return fmt.Errorf("there is no check of the name %q", args[0])
	}
	return until(ctx, look)
}

// until looks again and again, until all is well or the time is over.
func until(ctx context.Context, look func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	pause := time.NewTicker(checkPause)
	defer pause.Stop()
	for {
		err := look(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not within %s: %w", checkTimeout, err)
		case <-pause.C:
		}
	}
}

// answers reports whether the runtime answers by way of a socket.
func answers(socket string) func(context.Context) error {
	return func(ctx context.Context) (err error) {
		conn, err := upstream.Connect(socket, upstream.Plain(socket))
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, conn.Close()) }()
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err = runtimeapi.NewRuntimeServiceClient(conn).Version(ctx, &runtimeapi.VersionRequest{}, grpc.WaitForReady(true))
		return err
	}
}

// kubeletRuns reports whether the same kubelet has been running for some time,
// with an endpoint.
func kubeletRuns(told, service string) func(context.Context) error {
	var since time.Time
	var pid string
	return func(ctx context.Context) error {
		p, err := properties(ctx, service, "ActiveState", "MainPID")
		if err != nil {
			return err
		}
		if p["ActiveState"] != "active" || p["MainPID"] != pid {
			since, pid = time.Now(), p["MainPID"]
		}
		if p["ActiveState"] != "active" {
			return fmt.Errorf("%s is %s", service, p["ActiveState"])
		}
		s, err := kubelet.Reader{}.Find(ctx, kubelet.Choice{Endpoints: []string{endpoint.Socket(told)}})
		if err != nil && !errors.Is(err, kubelet.ErrEmbedded) && !(errors.Is(err, kubelet.ErrNotRunning) && service != "kubelet.service") {
			return err
		}
		if err == nil && s.RuntimeEndpoint.Value != told {
			return fmt.Errorf("the kubelet runs with %s (%s), and should with %s", s.RuntimeEndpoint.Value, s.RuntimeEndpoint.From, told)
		}
		if ran := time.Since(since); ran < steady {
			return fmt.Errorf("%s has been running for %s only", service, ran.Round(time.Second))
		}
		return nil
	}
}

// rootOwns reports whether a file belongs to root.
func rootOwns(info os.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && st.Uid == 0
}
