package crio

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/kube"
)

// evictBenchEnv asks how long it takes from the moment in which a disk falls below a threshold to the eviction call, and says for how
// many evictions; `make bench-evict` sets it.
const evictBenchEnv = "CLEAVE_BENCH_EVICT"

// TestBenchEvict fills a disk by a pod, again and again. The moment of crossing is seen by statfs(2), a thousand times a second; that of
// the call is the API server's, from its audit log, on the same clock.
func TestBenchEvict(t *testing.T) {
	if os.Getenv(evictBenchEnv) == "" {
		t.Skip("some minutes of measuring: `make bench-evict` does it")
	}
	rounds, err := strconv.Atoi(os.Getenv(evictBenchEnv))
	if err != nil || rounds < 1 || rounds > 25 { // cleave evicts at most 30 in an hour
		t.Fatalf("%s is %q, not a number from 1 to 25: %v", evictBenchEnv, os.Getenv(evictBenchEnv), err)
	}
	c := start(t, options{
		mode: config.ModeCRI, audit: true, settings: eviction(map[string]string{"nodefs.available": "75%"}),
		cleave: func(cfg *config.Config) { cfg.Reclaim.Enabled, cfg.Reclaim.Evict = true, true },
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience+time.Duration(rounds)*time.Minute)
	defer cancel()
	if _, err := c.plane.Run(ctx, innocent()); err != nil {
		t.Fatal(err)
	}
	var took []time.Duration
	for round := range rounds {
		d, err := c.evictOne(ctx, t, fmt.Sprintf("writer-%d", round))
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("round %d: %s", round, d)
		took = append(took, d)
	}
	c.stillRuns(ctx, t, "innocent")
	slices.Sort(took)
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	fmt.Printf("BENCH evict.call_ms %.0f ms\nBENCH evict.call_max_ms %.0f ms\n", ms(took[len(took)/2]), ms(took[len(took)-1]))
}

// evictOne has a pod fill the disk and returns the time from crossing to the call.
func (c *cluster) evictOne(ctx context.Context, t *testing.T, name string) (time.Duration, error) {
	t.Helper()
	var threshold uint64
	err := until(ctx, "cleave is calm", func() error {
		s, err := c.node.Cleave.Status(ctx)
		if err == nil && (s.Reclaim == nil || s.Reclaim.Outcome != "calm" || s.Reclaim.Problem != "") {
			err = fmt.Errorf("its status is %+v", s.Reclaim)
		}
		if err != nil {
			return err
		}
		threshold = 0
		for _, text := range s.Reclaim.Thresholds {
			var bytes uint64
			for _, signal := range []string{"nodefs", "containerfs"} { // one disk: whichever is first
				if _, err := fmt.Sscanf(text, signal+".available < %d", &bytes); err == nil {
					threshold = max(threshold, bytes)
				}
			}
		}
		if threshold == 0 {
			return fmt.Errorf("its thresholds are %q", s.Reclaim.Thresholds)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	disk := c.node.Disks[diskContainers].Path()
	available, err := availableBytes(disk)
	if err != nil {
		return 0, err
	}
	// To a little below cleave's threshold, and not to the kubelet's, which is 39 MiB below that.
	const slack, chunk = 12, 10
	mebibytes := (available-threshold)>>20 + slack
	write := fmt.Sprintf("while [ ! -e /go ]; do sleep 0.1; done; n=0; while [ $n -lt %d ]; do dd if=/dev/zero bs=1M count=%d 2>/dev/null >>/f; n=$((n+%d)); sleep 0.1; done; sleep 100000",
		mebibytes, chunk, chunk)
	if _, err := c.plane.Run(ctx, script(name, write)); err != nil {
		return 0, err
	}
	if _, err := c.plane.Exec(ctx, name, "touch", "/go"); err != nil {
		return 0, err
	}
	crossed, err := crossing(ctx, disk, threshold)
	if err != nil {
		return 0, err
	}
	var byKubelet error
	err = until(ctx, "the writer is gone", func() error {
		p, err := c.plane.Pod(ctx, name)
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		case evicted(p):
			byKubelet = fmt.Errorf("the kubelet was first: %s", p.Status.Message)
			return nil
		}
		return errors.New("it is there")
	})
	if err := errors.Join(err, byKubelet); err != nil {
		return 0, err
	}
	called, err := evictionCall(c.plane.AuditLog(), name)
	return called.Sub(crossed), err
}

// crossing is when a filesystem was first seen to have less than so much available.
func crossing(ctx context.Context, path string, threshold uint64) (time.Time, error) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		switch available, err := availableBytes(path); {
		case err != nil:
			return time.Time{}, err
		case available < threshold:
			return time.Now(), nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("wait for less than %d bytes: %w", threshold, ctx.Err())
		}
	}
}

func availableBytes(path string) (uint64, error) {
	var fs unix.Statfs_t
	err := unix.Statfs(path, &fs)
	return fs.Bavail * uint64(fs.Bsize), err //nolint:gosec // not below zero
}

// evictionCall is when the API server was first asked to evict a pod.
func evictionCall(auditLog, pod string) (_ time.Time, err error) {
	f, err := os.Open(auditLog)
	if err != nil {
		return time.Time{}, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e struct {
			Verb                     string
			RequestURI               string
			RequestReceivedTimestamp time.Time
		}
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return time.Time{}, err
		}
		if e.Verb == "create" && strings.HasSuffix(e.RequestURI, "/"+kube.Namespace+"/pods/"+pod+"/eviction") {
			return e.RequestReceivedTimestamp, nil
		}
	}
	return time.Time{}, errors.Join(lines.Err(), fmt.Errorf("nobody asked to evict pod %s", pod))
}
