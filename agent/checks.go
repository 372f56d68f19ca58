package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/upstream"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/doctor"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/proxy/unixsock"
	"github.com/cleave-cri/cleave/snapshot"
)

// Examine runs all checks of `cleave doctor` for a configuration. Nothing on
// the node is changed, and no running cleave is needed.
func Examine(ctx context.Context, cfg config.Config) ([]doctor.Result, error) {
	conn, err := upstream.Connect(cfg.Runtime.Endpoint.Path(), upstream.Plain(cfg.Runtime.Endpoint.Path()))
	if err != nil {
		return nil, err
	}
	runtime, own, control := cfg.Runtime.Endpoint.Path(), cfg.Listen.Endpoint.Path(), cfg.Control.Endpoint.Path()
	results := doctor.Run(ctx, []doctor.Check{
		{Name: "root", Run: checkRoot},
		unixsock.CheckAnswers("runtime socket", "the container runtime", runtime, "start it, or set runtime.endpoint", doctor.Fail),
	})
	store := snapshot.NewStore(conn, cfg.Runtime.Namespace).ReadOnce()
	var checks []doctor.Check
	// What the runtime would have to tell is not asked if it does not answer.
	if results[len(results)-1].Level == doctor.Pass {
		checks = append(checks, store.Checks()...)
	}
	checks = append(checks,
		unixsock.CheckAnswers("cleave socket", "cleave", own, "start `cleave serve`", doctor.Warn),
		unixsock.CheckAnswers("control socket", "cleave", control, "start `cleave serve`", doctor.Warn),
		unixsock.CheckSameAccess("socket access", own, runtime),
		doctor.Check{Name: "cleave to runtime", Run: func(ctx context.Context) doctor.Result { return checkThrough(ctx, own) }},
	)
	var split *SnapshotterStatus
	if cfg.Snapshotter.Enabled() {
		split = snapshotterStatus(ctx, cfg.Snapshotter.StatusEndpoint)
		checks = append(checks, doctor.Check{Name: "split snapshotter", Run: func(context.Context) doctor.Result { return judgeSnapshotter(split) }})
	}
	checks = append(checks, doctor.Check{Name: "layout", Run: func(ctx context.Context) doctor.Result {
		if split != nil && len(split.Away) > 0 {
			return judgeAway(split.Away[0])
		}
		return checkLayout(ctx, control, newObserver(cfg, observed{store: store, filesystems: fsstats.NewProber(), mountpoints: mountpoints(conn)}, zap.NewNop()))
	}})
	results = append(results, doctor.Run(ctx, checks)...)
	return results, conn.Close()
}

func checkRoot(context.Context) doctor.Result {
	if os.Geteuid() != 0 {
		return doctor.Failed("not root: most of what follows can't be looked at", "run `cleave doctor` as root")
	}
	return doctor.Passed("running as root")
}

// checkThrough calls the runtime by way of cleave's own socket.
func checkThrough(ctx context.Context, socket string) doctor.Result {
	conn, err := upstream.Connect(socket, upstream.Plain(socket))
	if err != nil {
		return doctor.Failed(err.Error(), "start `cleave serve`")
	}
	s := runtimeStatus(ctx, conn, socket)
	if err := conn.Close(); err != nil {
		return doctor.Failed(err.Error(), "start `cleave serve`")
	}
	if s.Error != "" {
		return doctor.Warned("the runtime does not answer through cleave: "+s.Error, "start `cleave serve` and the runtime")
	}
	return doctor.Passed("%s %s answers through cleave", s.Name, s.Version)
}

// checkLayout takes the layout from the cleave that runs; without one it finds it
// out by an observer of its own.
func checkLayout(ctx context.Context, control string, o *observer) doctor.Result {
	status, err := FetchStatus(ctx, control)
	if err == nil {
		return judgeLayout(fsstats.Layout{Places: status.Roles}, status.Problem)
	}
	if !errors.Is(err, ErrNotRunning) {
		return doctor.Failed(err.Error(), "look at the log of `cleave serve`")
	}
	layout, err := o.locate(ctx)
	switch {
	case errors.Is(err, errNotSaid):
		return doctor.Warned("the layout is not known: "+err.Error(), "start the runtime, or set filesystems.imagefs in the configuration")
	case err != nil:
		return doctor.Failed(err.Error(), "correct the paths under filesystems in the configuration")
	}
	return judgeLayout(layout, "")
}

func judgeSnapshotter(s *SnapshotterStatus) doctor.Result {
	if len(s.Problems) == 0 {
		return doctor.Passed("its roots are the right ones, containerd is recognised")
	}
	return doctor.Failed(strings.Join(s.Problems, "; "), "`cleave snapshotter status` says more")
}

// judgeAway is the judgement of a layout of which a root is away.
func judgeAway(away RootAway) doctor.Result {
	return doctor.Failed(fmt.Sprintf("it can't be told while a root of the split snapshotter is away: %s: %s", away.Path, away.Reason), away.Remedy)
}

func judgeLayout(layout fsstats.Layout, problem string) doctor.Result {
	kind := layout.Kind()
	var places, notes []string
	for _, p := range layout.Places {
		places = append(places, fmt.Sprintf("%s on %s", p.Role, p.Filesystem.Device))
		if p.Note != "" {
			notes = append(notes, fmt.Sprintf("%s: %s", p.Role, p.Note))
		}
	}
	if problem != "" {
		notes = append(notes, problem)
	}
	switch {
	case kind == fsstats.LayoutUnknown:
		return doctor.Failed("the filesystem of a role is not known", "correct the paths under filesystems in the configuration")
	case len(notes) > 0:
		return doctor.Warned(fmt.Sprintf("%s (%s); %s", kind, strings.Join(places, ", "), strings.Join(notes, "; ")),
			"correct the paths under filesystems in the configuration, or make the missing folders")
	default:
		return doctor.Passed("%s (%s)", kind, strings.Join(places, ", "))
	}
}
