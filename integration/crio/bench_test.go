package crio

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/node"
)

// benchEnv asks for the figures of what the modes cost, and says for how long each is measured, such as 3m; `make bench-crio` sets
// it.
const benchEnv = "CLEAVE_BENCH_CRIO"

const (
	// benchPods is how many pods are idle meanwhile.
	benchPods = 30
	// benchSettle is how long a node is left alone after its last pod has started: what a start leaves to do is no cost of idling.
	benchSettle = 20 * time.Second
)

// cores is what programs take of one core.
type cores struct{ kubelet, cleave, containerd float64 }

// What the kubelet and cleave take of a core in each mode with idle pods, beside a kubelet that asks containerd itself. Each phase has
// a node of its own, with the settings of production.
func TestBenchCRIO(t *testing.T) {
	if os.Getenv(benchEnv) == "" {
		t.Skip("some minutes of measuring: `make bench-crio` does it")
	}
	period, err := time.ParseDuration(os.Getenv(benchEnv))
	if err != nil || period < time.Second {
		t.Fatalf("%s is %q, not a time of a second or more: %v", benchEnv, os.Getenv(benchEnv), err)
	}
	got := map[string]cores{}
	for _, phase := range []struct {
		name string
		o    options
	}{
		{"direct", options{direct: true, mode: config.ModeCRI}},
		{"cri", options{mode: config.ModeCRI}},
		{"crio", options{mode: config.ModeCRIO}},
	} {
		t.Run(phase.name, func(t *testing.T) {
			got[phase.name] = idleCost(t, phase.o, period)
		})
	}
	if t.Failed() {
		return
	}
	report := func(name string, value float64, unit string) { fmt.Printf("BENCH %s %.4g %s\n", name, value, unit) }
	for _, name := range []string{"direct", "cri", "crio"} {
		report(name+".kubelet.core_percent", 100*got[name].kubelet, "%")
		if name != "direct" {
			report(name+".cleave.core_percent", 100*got[name].cleave, "%")
		}
		report(name+".containerd.core_percent", 100*got[name].containerd, "%")
	}
	for _, name := range []string{"cri", "crio"} {
		report(name+".total.ratio", (got[name].kubelet+got[name].cleave)/got["direct"].kubelet, "ratio")
	}
}

// idleCost runs a node with idle pods and returns what its programs take meanwhile.
func idleCost(t *testing.T, o options, period time.Duration) cores {
	t.Helper()
	// The lab's own settings are for figures within seconds. These are the defaults.
	o.cleave = func(cfg *config.Config) { cfg.Measure = config.Default().Measure }
	o.settings = map[string]any{"nodeStatusReportFrequency": "5m", "nodeStatusUpdateFrequency": "10s", "syncFrequency": "1m"}
	c := start(t, o)
	ctx, cancel := context.WithTimeout(t.Context(), period+3*patience)
	defer cancel()
	if o.direct {
		if err := c.node.Cleave.Stop(ctx); err != nil {
			t.Fatal(err)
		}
	}
	pods, podsCtx := errgroup.WithContext(ctx)
	pods.SetLimit(5)
	for n := range benchPods {
		pods.Go(func() error {
			_, err := c.plane.Run(podsCtx, kube.PodSpec{Name: fmt.Sprintf("idle-%d", n), Image: node.BusyboxImage, Command: []string{"sleep", "100000"}})
			return err
		})
	}
	if err := pods.Wait(); err != nil {
		t.Fatal(err)
	}
	pass(ctx, t, benchSettle)
	began, before := time.Now(), c.spent(ctx, t, o)
	pass(ctx, t, period)
	after, took := c.spent(ctx, t, o), time.Since(began)
	for n := range benchPods {
		c.stillRuns(ctx, t, fmt.Sprintf("idle-%d", n))
	}
	share := func(from, to time.Duration) float64 { return float64(to-from) / float64(took) }
	return cores{
		kubelet: share(before.kubelet, after.kubelet), cleave: share(before.cleave, after.cleave), containerd: share(before.containerd, after.containerd),
	}
}

// spending is the processor time that programs have taken since they were started.
type spending struct{ kubelet, cleave, containerd time.Duration }

// spent reads it. The snapshotter counts as cleave in each mode, but not where the kubelet is on containerd: there nobody's figures
// ask for it.
func (c *cluster) spent(ctx context.Context, t *testing.T, o options) spending {
	t.Helper()
	of := func(pid int) time.Duration {
		d, err := processorTime(pid)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	s := spending{kubelet: of(c.kubelet.PID()), containerd: of(c.node.Runtime.PID())}
	if !o.direct {
		status, err := c.node.Cleave.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		s.cleave = of(status.PID) + of(c.node.Split.PID())
	}
	return s
}

// processorTime is the time that a process has run, in user mode and in the kernel (proc_pid_stat(5): utime and stime, in hundredths
// of a second on every architecture of ours).
func processorTime(pid int) (time.Duration, error) {
	path := fmt.Sprintf("/proc/%d/stat", pid)
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	// The second field is the name, in brackets, and may have anything in it.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	const utime, stime = 14 - 3, 15 - 3
	if len(fields) <= stime {
		return 0, fmt.Errorf("read %s: it has %d fields after the name", path, len(fields))
	}
	var ticks time.Duration
	for _, i := range []int{utime, stime} {
		n, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read %s: %w", path, err)
		}
		ticks += time.Duration(n)
	}
	return ticks * 10 * time.Millisecond, nil
}

// pass lets time go by: what is measured is what happens in it.
func pass(ctx context.Context, t *testing.T, d time.Duration) {
	t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		t.Fatal(ctx.Err())
	}
}
