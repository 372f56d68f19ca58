package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
)

func sizeOf(m proto.Message) int { return proto.Size(m) }

// way is one way to the runtime.
type way struct {
	name string
	conn *grpc.ClientConn
	took []time.Duration
}

func dialWay(name, socket string) (*way, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)))
	if err != nil {
		return nil, err
	}
	return &way{name: name, conn: conn}, nil
}

// p50 is the median.
func (w *way) p50() time.Duration {
	slices.Sort(w.took)
	return w.took[len(w.took)/2]
}

// call is what is measured.
type call func(ctx context.Context, conn *grpc.ClientConn) error

func version(ctx context.Context, conn *grpc.ClientConn) error {
	_, err := runtimeapi.NewRuntimeServiceClient(conn).Version(ctx, &runtimeapi.VersionRequest{})
	return err
}

func listContainers(ctx context.Context, conn *grpc.ClientConn) error {
	_, err := runtimeapi.NewRuntimeServiceClient(conn).ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	return err
}

// interleave makes calls in turn on all ways, so that whatever else the
// machine does meets them alike.
func interleave(ctx context.Context, ways []*way, calls int, do call) error {
	for _, w := range ways {
		w.took = w.took[:0]
		for range max(calls/20, 3) { // warm up
			if err := do(ctx, w.conn); err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
		}
	}
	for range calls {
		for _, w := range ways {
			began := time.Now()
			if err := do(ctx, w.conn); err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
			w.took = append(w.took, time.Since(began))
		}
	}
	return nil
}

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// reportWays prints the medians, and what the ways cost over the first, which
// is the direct one.
func reportWays(name string, ways []*way) {
	direct := ways[0].p50()
	report(name+".direct_p50", microseconds(direct), "us")
	for _, w := range ways[1:] {
		prefix := name
		if w.name != "cleave" {
			prefix += "." + strings.ReplaceAll(w.name, " ", "_")
		}
		report(prefix+".added_p50", microseconds(w.p50()-direct), "us")
		report(prefix+".ratio_p50", float64(w.p50())/float64(direct), "x")
	}
}

func benchProxy(ctx context.Context, cleave, also string, scale float64, only []string) (err error) {
	if cleave, err = filepath.Abs(cleave); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "bench-proxy: a private containerd, cleave and a typed relay in front of it; some 2 minutes")
	run, err := janitor.Start(ctx, janitor.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, run.Close(context.WithoutCancel(ctx))) }()
	n, err := node.Start(ctx, run, node.Options{Cleave: cleave, Configure: quiet})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close(context.WithoutCancel(ctx))) }()

	parts := []struct {
		name string
		do   func(context.Context, bed, float64) error
	}{{"version", benchVersion}, {"list100", benchList}, {"memory", benchMemory}, {"list500k", benchLargeAnswer}}
	for _, part := range parts {
		if !slices.Contains(only, part.name) {
			continue
		}
		if err := part.do(ctx, bed{Node: n, also: also}, scale); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return nil
}

// bed is what the parts are measured on.
type bed struct {
	*node.Node
	// also is another build of cleave, empty if there is none.
	also string
}

// beside starts the other build in front of a runtime and adds it to the ways.
// The function that it returns ends it.
func (b bed) beside(ctx context.Context, name string, runtime string, sockets map[string]string, order []string) ([]string, func() error, error) {
	if b.also == "" {
		return order, func() error { return nil }, nil
	}
	c, err := b.Another(b.also, name+"-also", func(cfg *config.Config) {
		cfg.Runtime.Endpoint = config.Endpoint(runtime)
		quiet(cfg, nil)
	})
	if err != nil {
		return nil, nil, err
	}
	if err := c.Start(ctx); err != nil {
		return nil, nil, err
	}
	sockets["also"] = c.Socket()
	return append(order, "also"), func() error { return c.Stop(context.WithoutCancel(ctx)) }, nil
}

// quiet keeps measuring out of the way of being measured: the usual period.
func quiet(cfg *config.Config, _ map[string]*disk.Disk) {
	d := config.Default()
	cfg.Measure = d.Measure
}

func benchVersion(ctx context.Context, n bed, scale float64) error {
	return benchRealRuntime(ctx, n, "proxy.version", int(10000*scale), version)
}

// benchList lists 100 containers as a kubelet makes them.
func benchList(ctx context.Context, n bed, scale float64) error {
	if err := makeContainers(ctx, n, 100); err != nil {
		return err
	}
	return benchRealRuntime(ctx, n, "proxy.list100", int(2000*scale), listContainers)
}

// benchRealRuntime compares the ways to a real containerd.
func benchRealRuntime(ctx context.Context, n bed, name string, calls int, do call) (err error) {
	relaySocket := filepath.Join(n.Run.Dir(), name+"-typed.sock")
	stop, err := startHelper(ctx, n.Run.Env(), relaySocket, helperRelay, n.Runtime.Socket(), relaySocket)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	sockets := map[string]string{"direct": n.Runtime.Socket(), "cleave": n.Cleave.Socket(), "typed relay": relaySocket}
	order, stopBeside, err := n.beside(ctx, name, n.Runtime.Socket(), sockets, []string{"direct", "cleave", "typed relay"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopBeside()) }()
	ways, closeWays, err := openWays(sockets, order...)
	if err != nil {
		return err
	}
	defer closeWays()
	if err := interleave(ctx, ways, calls, do); err != nil {
		return err
	}
	reportWays(name, ways)
	return nil
}

func openWays(sockets map[string]string, order ...string) (ways []*way, closeAll func(), _ error) {
	closeAll = func() {
		for _, w := range ways {
			_ = w.conn.Close() //nolint:errcheck // the end
		}
	}
	for _, name := range order {
		w, err := dialWay(name, sockets[name])
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		ways = append(ways, w)
	}
	return ways, closeAll, nil
}

func makeContainers(ctx context.Context, n bed, count int) error {
	c, err := pod.Dial(n.Runtime.Endpoint())
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() //nolint:errcheck // the end
	if _, err := c.Pull(ctx, node.BusyboxImage); err != nil {
		return err
	}
	p, err := c.Run(ctx, n.PodSpec("bench"))
	if err != nil {
		return err
	}
	for i := range count {
		name := "container-" + strconv.Itoa(i)
		if _, err := p.Create(ctx, pod.ContainerSpec{
			Name: name, Image: node.BusyboxImage, Command: []string{"/bin/true"},
			Labels: kubeletLabels(name, i), Annotations: kubeletAnnotations(),
		}); err != nil {
			return err
		}
	}
	return nil
}

// benchMemory makes many calls of all sizes and looks at cleave's own memory.
func benchMemory(ctx context.Context, n bed, scale float64) error {
	ways, closeWays, err := openWays(map[string]string{"cleave": n.Cleave.Socket()}, "cleave")
	if err != nil {
		return err
	}
	defer closeWays()
	s, err := n.Cleave.Status(ctx)
	if err != nil {
		return err
	}
	var after [2]float64
	for i, calls := range []int{10_000, 90_000} {
		for range int(float64(calls) * scale) {
			if err := version(ctx, ways[0].conn); err != nil {
				return err
			}
		}
		if after[i], err = anonymousMiB(s.PID); err != nil {
			return err
		}
	}
	report("proxy.rss_anon", after[1], "MiB")
	report("proxy.rss_anon_growth", after[1]-after[0], "MiB")
	return nil
}

// anonymousMiB is the memory of a process that no file backs (proc_pid_status(5)).
func anonymousMiB(pid int) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kib, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 64)
			return kib / 1024, err
		}
	}
	return 0, fmt.Errorf("no RssAnon of process %d", pid)
}

// benchLargeAnswer measures an answer of half a megabyte from a runtime that
// does nothing else.
func benchLargeAnswer(ctx context.Context, n bed, scale float64) (err error) {
	replaySocket := filepath.Join(n.Run.Dir(), "replay.sock")
	stopReplay, err := startHelper(ctx, n.Run.Env(), replaySocket, helperReplay, replaySocket)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopReplay()) }()
	relaySocket := filepath.Join(n.Run.Dir(), "typed-replay.sock")
	stopRelay, err := startHelper(ctx, n.Run.Env(), relaySocket, helperRelay, replaySocket, relaySocket)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopRelay()) }()
	c, err := n.Another(n.Cleave.Binary(), "large", func(cfg *config.Config) {
		cfg.Runtime.Endpoint = config.Endpoint(replaySocket)
		quiet(cfg, nil)
	})
	if err != nil {
		return err
	}
	if err := c.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Stop(context.WithoutCancel(ctx))) }()
	sockets := map[string]string{"direct": replaySocket, "cleave": c.Socket(), "typed relay": relaySocket}
	order, stopBeside, err := n.beside(ctx, "large", replaySocket, sockets, []string{"direct", "cleave", "typed relay"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopBeside()) }()
	ways, closeWays, err := openWays(sockets, order...)
	if err != nil {
		return err
	}
	defer closeWays()
	if err := interleave(ctx, ways, int(1000*scale), listContainers); err != nil {
		return err
	}
	reportWays("proxy.list500k", ways)
	return nil
}
