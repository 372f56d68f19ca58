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
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
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
	for i := range calls {
		for j := range ways {
			// Each way comes as often after each other one.
			w := ways[(i+j)%len(ways)]
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
	peers, err := bin.Get(ctx, os.Stderr, "containerd", "shim")
	if err != nil {
		return err
	}
	n, err := node.Start(ctx, run, node.Options{Containerd: peers[0], Shim: peers[1], Cleave: cleave, Configure: quiet})
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

// beside starts the other build in front of a runtime.
func (b bed) beside(ctx context.Context, name, runtime string) (*node.Cleave, error) {
	c, err := b.Another(b.also, name+"-also", func(cfg *config.Config) {
		cfg.Runtime.Endpoint = config.Endpoint(runtime)
		quiet(cfg, nil)
	})
	if err != nil {
		return nil, err
	}
	return c, c.Start(ctx)
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
	ways, stop, err := n.openWays(ctx, name, n.Runtime.Socket(), n.Cleave.Socket())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if err := interleave(ctx, ways, calls, do); err != nil {
		return err
	}
	reportWays(name, ways)
	return nil
}

// openWays connects to a runtime directly, through cleave, and through the two
// relays that it is compared with, which it starts. The first way is the direct
// one. The function that it returns ends all of it.
func (b bed) openWays(ctx context.Context, name, runtime, cleave string) (_ []*way, stop func() error, err error) {
	var stops []func() error
	stop = func() error {
		var errs []error
		for _, s := range slices.Backward(stops) {
			errs = append(errs, s())
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, stop())
		}
	}()
	typed, plain := filepath.Join(b.Run.Dir(), name+"-typed.sock"), filepath.Join(b.Run.Dir(), name+"-bytes.sock")
	sockets := []struct{ name, path string }{{"direct", runtime}, {"cleave", cleave}, {"typed relay", typed}, {"byte relay", plain}}
	for helper, socket := range map[string]string{helperRelay: typed, helperBytes: plain} {
		end, err := startHelper(ctx, b.Run.Env(), socket, helper, runtime, socket)
		if err != nil {
			return nil, nil, err
		}
		stops = append(stops, end)
	}
	if b.also != "" {
		c, err := b.beside(ctx, name, runtime)
		if err != nil {
			return nil, nil, err
		}
		stops = append(stops, func() error { return c.Stop(context.WithoutCancel(ctx)) })
		sockets = append(sockets, struct{ name, path string }{"also", c.Socket()})
	}
	var ways []*way
	for _, s := range sockets {
		w, err := dialWay(s.name, s.path)
		if err != nil {
			return nil, nil, err
		}
		stops = append(stops, w.conn.Close)
		ways = append(ways, w)
	}
	return ways, stop, nil
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

// benchMemory makes many calls and looks at cleave's own memory.
func benchMemory(ctx context.Context, n bed, scale float64) (err error) {
	w, err := dialWay("cleave", n.Cleave.Socket())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.conn.Close()) }()
	s, err := n.Cleave.Status(ctx)
	if err != nil {
		return err
	}
	var after [2]float64
	for i, calls := range []int{10_000, 90_000} {
		for range int(float64(calls) * scale) {
			if err := version(ctx, w.conn); err != nil {
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
	ways, stop, err := n.openWays(ctx, "large", replaySocket, c.Socket())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if err := interleave(ctx, ways, int(1000*scale), listContainers); err != nil {
		return err
	}
	reportWays("proxy.list500k", ways)
	return reportAllocation(ctx, c, ways[1].conn)
}

// reportAllocation tells how much cleave allocates for a small and for a large
// answer, and what it holds after many large ones.
func reportAllocation(ctx context.Context, c *node.Cleave, conn *grpc.ClientConn) error {
	const calls = 500
	for _, kind := range []struct {
		name string
		do   call
	}{{"small", version}, {"500k", listContainers}} {
		before, err := c.Status(ctx)
		if err != nil {
			return err
		}
		for range calls {
			if err := kind.do(ctx, conn); err != nil {
				return err
			}
		}
		after, err := c.Status(ctx)
		if err != nil {
			return err
		}
		report("proxy.allocated_per_call."+kind.name, float64(after.Memory.AllocatedBytes-before.Memory.AllocatedBytes)/calls/1024, "KiB")
	}
	s, err := c.Status(ctx)
	if err != nil {
		return err
	}
	resident, err := anonymousMiB(s.PID)
	if err != nil {
		return err
	}
	report("proxy.rss_anon_after_large", resident, "MiB")
	return nil
}
