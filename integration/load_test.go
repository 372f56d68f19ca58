package integration

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
)

// handoversEnv is set to long by `make test-handover`: all of what is promised
// instead of a part of it.
const handoversEnv = "CLEAVE_HANDOVERS"

// often is how often cleave is replaced or killed under load, and how many calls
// are made in all.
func often() (times int, calls int64) {
	if os.Getenv(handoversEnv) == "long" {
		return 20, 10_000
	}
	return 5, 2_000
}

const callers = 8

// lost is a call that failed.
type lost struct {
	began, ended time.Time
	method       string
	err          error
}

func (l lost) String() string {
	return fmt.Sprintf("%s, %s after its beginning: %v", l.method, l.ended.Sub(l.began).Round(time.Millisecond), l.err)
}

// load makes calls without pause: callers with a connection of their own, as a
// kubelet has one, each taking all methods in turn. Version and ListPodSandbox
// are forwarded as frames; ImageFsInfo and ListContainerStats are answers that cleave corrects.
type load struct {
	served [callers]atomic.Int64
	done   atomic.Bool
	wait   sync.WaitGroup

	mu   sync.Mutex
	lost []lost // guarded by mu
}

func startLoad(ctx context.Context, t *testing.T, endpoint string) *load {
	t.Helper()
	l := &load{}
	for i := range callers {
		c := dial(t, endpoint)
		l.wait.Go(func() { l.call(ctx, c, &l.served[i]) })
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) call(ctx context.Context, c *pod.Client, served *atomic.Int64) {
	for n := 0; !l.done.Load() && ctx.Err() == nil; n++ {
		one := lost{began: time.Now()}
		switch n % 4 {
		case 0:
			one.method = "Version"
			_, one.err = c.Runtime.Version(ctx, versionRequest)
		case 1:
			one.method = "ImageFsInfo"
			_, one.err = c.Images.ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
		case 2:
			one.method = "ListPodSandbox"
			_, one.err = c.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		default:
			one.method = "ListContainerStats"
			_, one.err = c.Runtime.ListContainerStats(ctx, &runtimeapi.ListContainerStatsRequest{})
		}
		if one.err == nil {
			served.Add(1)
			continue
		}
		one.ended = time.Now()
		l.mu.Lock()
		l.lost = append(l.lost, one)
		l.mu.Unlock()
	}
}

// end lets all callers end.
func (l *load) end() {
	l.done.Store(true)
	l.wait.Wait()
}

func (l *load) total() (n int64) {
	for i := range l.served {
		n += l.served[i].Load()
	}
	return n
}

// goOn waits until each caller has had so many more answers.
func (l *load) goOn(ctx context.Context, t *testing.T, answers int64) {
	t.Helper()
	var from [callers]int64
	for i := range l.served {
		from[i] = l.served[i].Load()
	}
	eventually(ctx, t, "every caller has answers", func() (string, bool) {
		for i := range l.served {
			if n := l.served[i].Load() - from[i]; n < answers {
				return fmt.Sprintf("caller %d has %d of %d; lost: %v", i, n, answers, l.failures()), false
			}
		}
		return "", true
	})
}

func (l *load) failures() []lost {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]lost(nil), l.lost...)
}

// watchEvents listens to containers' events, again whenever the stream has ended,
// and counts the streams. A stream ends with Unavailable and with nothing else.
func watchEvents(ctx context.Context, t *testing.T, endpoint string) (streams *atomic.Int64) {
	t.Helper()
	c := dial(t, endpoint)
	streams = &atomic.Int64{}
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(ctx)
	t.Cleanup(func() { cancel(); <-ended })
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			stream, err := c.Runtime.GetContainerEvents(ctx, eventsRequest)
			if err == nil {
				streams.Add(1)
			}
			for err == nil {
				_, err = stream.Recv()
			}
			if ctx.Err() == nil && codeOf(err) != codes.Unavailable {
				t.Errorf("a stream of events ended with %v, want Unavailable", err)
				return
			}
		}
	}()
	return streams
}

// TestHandoverLosesNothing hands cleave over again and again under load, with a
// pull of 60 s and a stop of 30 s in flight.
func TestHandoverLosesNothing(t *testing.T) {
	t.Parallel()
	times, calls := often()
	n := startNode(t, node.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	pushSlow(ctx, t, n, slowImage)
	c := dial(t, n.Cleave.Endpoint())
	id := startWriter(ctx, t, n, c, "stubborn", stubborn)
	waitForFile(ctx, t, c, id, "/ready")
	pull, stop := longCalls(ctx, t, n, id)
	streams := watchEvents(ctx, t, n.Cleave.Endpoint())
	l := startLoad(ctx, t, n.Cleave.Endpoint())
	var fresh sync.WaitGroup
	fresh.Go(func() { // a connection for each call
		for !l.done.Load() {
			fresh, err := pod.Dial(n.Cleave.Endpoint())
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := fresh.Runtime.Version(ctx, versionRequest); err != nil {
				t.Errorf("a call on a fresh connection was lost: %v", err)
			}
			if err := fresh.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	var olds []func(context.Context) error
	for i := range times {
		before := streams.Load()
		waitOld, err := n.Cleave.HandOver(ctx)
		if err != nil {
			t.Fatalf("handover %d: %v", i, err)
		}
		olds = append(olds, waitOld)
		l.goOn(ctx, t, calls/int64(times)/callers)
		eventually(ctx, t, "the events resume", func() (string, bool) { return "", streams.Load() > before || t.Failed() })
	}
	l.end()
	fresh.Wait()
	if err := <-stop; err != nil {
		t.Errorf("the stop of %s was lost: %v", stopTime, err)
	}
	if err := <-pull; err != nil {
		t.Errorf("the pull of %s was lost: %v", pullTime, err)
	}
	for _, waitOld := range olds {
		if err := waitOld(ctx); err != nil {
			t.Errorf("an old process stays: %v", err)
		}
	}
	for _, one := range l.failures() {
		t.Errorf("lost: %v", one)
	}
	if got := l.total(); got < calls {
		t.Errorf("only %d calls were made, want %d", got, calls)
	}
	t.Logf("%d calls of %d callers across %d handovers, none lost; %d streams of events", l.total(), callers, times, streams.Load())
}

// TestKillLosesOnlyWhatIsInFlight ends cleave with SIGKILL again and again under
// load, and starts it again, while the socket is held as systemd holds it: each
// call that is lost was in flight then and ended with Unavailable; no other is.
func TestKillLosesOnlyWhatIsInFlight(t *testing.T) {
	t.Parallel()
	times, calls := often()
	n := startNode(t, node.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	if err := n.Cleave.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if err := n.Cleave.Hold(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Cleave.Release(); err != nil {
			t.Error(err)
		}
	})
	if err := n.Cleave.Start(ctx); err != nil {
		t.Fatal(err)
	}
	l := startLoad(ctx, t, n.Cleave.Endpoint())
	type death struct{ from, to time.Time }
	var deaths []death
	puller := dial(t, n.Cleave.Endpoint())
	pushSlow(ctx, t, n, slowImage)
	for range times {
		pulled := make(chan error, 1)
		go func() {
			_, err := puller.Pull(ctx, slowImage) // goes on with what the last one left
			pulled <- err
		}()
		l.goOn(ctx, t, calls/int64(times)/callers)
		var d death
		d.from = time.Now()
		if err := n.Cleave.Kill(ctx); err != nil {
			t.Fatal(err)
		}
		d.to = time.Now()
		deaths = append(deaths, d)
		if err := <-pulled; codeOf(err) != codes.Unavailable {
			t.Errorf("the pull in flight ended with %v, want Unavailable", err)
		}
		// Nobody serves, and callers wait at the socket.
		if err := n.Cleave.Start(ctx); err != nil {
			t.Fatal(err)
		}
	}
	l.goOn(ctx, t, 10)
	l.end()
	failures := l.failures()
	for _, one := range failures {
		if codeOf(one.err) != codes.Unavailable {
			t.Errorf("lost, and not with Unavailable: %v", one)
		}
		inFlight := false
		for _, d := range deaths {
			inFlight = inFlight || one.began.Before(d.to) && one.ended.After(d.from)
		}
		if !inFlight {
			t.Errorf("lost while cleave was not killed: %v", one)
		}
	}
	if most := callers * times; len(failures) > most {
		t.Errorf("%d calls were lost in %d deaths, and %d callers had no more than one each in flight", len(failures), times, callers)
	}
	if got := l.total(); got < calls {
		t.Errorf("only %d calls were answered, want %d", got, calls)
	}
	t.Logf("%d calls of %d callers across %d deaths, %d lost, each in flight then", l.total(), callers, times, len(failures))
}
