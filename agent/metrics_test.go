package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/keeper"
	imagestore "github.com/cleave-cri/cleave/agent/store"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/web"
)

func use(bytes uint64) *ephemeral.Use {
	return &ephemeral.Use{Device: "8:1", Bytes: bytes, Inodes: 1, At: time.Now()}
}

// crowded is a node with so many running containers, five in each pod, a volume in each pod, and a dead container beside each tenth.
func crowded(containers int) *picture {
	_, _, p := deciding(oneDisk())
	p.measuredAt, p.cost = time.Now(), 20*time.Millisecond
	oldest := time.Now().Add(-3 * time.Second)
	p.accounts = map[fsstats.Device]Account{p.layout.Places[0].Filesystem.Device: {
		Classes: []ClassUsage{{Class: classContainers, Bytes: 1000, Inodes: 10}, {Class: classOpen, Bytes: 5}, {Class: classLogs, Bytes: 100, Inodes: 3}},
		Oldest:  &oldest, UnattributedBytes: 12,
	}}
	for i := range containers {
		if i%5 == 0 {
			n := i / 5
			p.held = append(p.held, ephemeral.Pod{
				Namespace: fmt.Sprintf("namespace-of-team-%d", n%7), Name: fmt.Sprintf("deployment-with-a-name-%d-7d9f8b6c5d-%05d", n, n), UID: fmt.Sprintf("%08d-1111-2222-3333-444444444444", n),
				Volumes: []ephemeral.VolumeUse{{Counted: true, EmptyDir: true, Name: "cache", Use: use(uint64(100 * n))}, {Counted: true, Name: "conf", Use: use(7)}}, LogFiles: use(3),
			})
		}
		pod := &p.held[len(p.held)-1]
		name := fmt.Sprintf("container-%d", i%5)
		pod.Containers = append(pod.Containers, ephemeral.ContainerUse{Name: name, Running: true, Layer: use(uint64(1000 * i)), LogFiles: use(50), OpenDeleted: []ephemeral.Use{*use(1), *use(2)}})
		if i%10 == 0 {
			pod.Containers = append(pod.Containers, ephemeral.ContainerUse{Name: name, Layer: use(5), LogFiles: use(50)}, ephemeral.ContainerUse{Name: "job", Layer: use(9)})
		}
	}
	for _, pod := range p.held {
		p.pods = append(p.pods, ephemeral.Of(pod))
	}
	return p
}

// node500 are the values of a node with 500 containers and something of everything.
func node500() func() web.Values {
	p := crowded(500)
	var calls proxy.Counters
	for i := range 34 {
		calls.Methods = append(calls.Methods, proxy.MethodCalls{Method: fmt.Sprintf("ListSomething%d", i), ByCode: map[string]int64{"OK": 5, "NotFound": 1}, Within: make([]int64, len(proxy.LatencyBounds())+1)})
	}
	var images []imagestore.Image
	for i := range 300 {
		images = append(images, imagestore.Image{ID: fmt.Sprint(i), Names: []string{fmt.Sprintf("registry.example.org/team/some/application-%d:v1.2.3", i)}})
	}
	now := time.Now()
	return func() web.Values {
		v := web.Values{Version: "v1", Filesystems: filesystemValues(p, now), Images: imageValues(images), Proxy: proxyValues(calls), Survey: surveyValues(p, index.Entries{}, now)}
		v.Containers, v.Pods = ownerValues(p)
		v.Reclaim = reclaimValues(&ReclaimStatus{}, now)
		return v
	}
}

func TestValuesOfOwners(t *testing.T) {
	t.Parallel()
	containers, pods := ownerValues(crowded(11))
	if len(containers) != 11 || len(pods) != 3 {
		t.Fatalf("%d containers, %d pods", len(containers), len(pods))
	}
	ptr := func(n uint64) *uint64 { return &n }
	uid := func(n int) string { return fmt.Sprintf("%08d-1111-2222-3333-444444444444", n) }
	// The first is the one of which a dead instance counts for the one that runs; the dead "job" has no series.
	want := web.Container{
		Namespace: "namespace-of-team-2", Pod: "deployment-with-a-name-2-7d9f8b6c5d-00002", UID: uid(2), Container: "container-0",
		RootFSBytes: ptr(10_000 + 5), LogsBytes: ptr(50), OpenDeletedBytes: ptr(3),
	}
	if diff := cmp.Diff(want, containers[0]); diff != "" {
		t.Error(diff)
	}
	for _, c := range containers {
		if c.Container == "job" {
			t.Errorf("one that has ended has series: %+v", c)
		}
	}
	wantPod := web.Pod{
		Namespace: "namespace-of-team-1", Pod: "deployment-with-a-name-1-7d9f8b6c5d-00001", UID: uid(1),
		HeldBytes: 5000 + 6000 + 7000 + 8000 + 9000 + 5*3 + 100 + 7, EmptyDirBytes: ptr(100), LogsBytes: ptr(3 + 5*50), KubeletBytes: ptr(35_000 + 5*50 + 100 + 7 + 3),
	}
	if diff := cmp.Diff(wantPod, pods[0]); diff != "" {
		t.Error(diff)
	}
}

// What is not known has no series.
func TestValuesOfFilesystems(t *testing.T) {
	t.Parallel()
	p, now := crowded(5), time.Now()
	got := filesystemValues(p, now)
	if len(got) != len(p.layout.Places) {
		t.Fatalf("%+v", got)
	}
	f := got[0]
	if f.UnattributedBytes == nil || *f.UnattributedBytes != 12 || f.OpenDeletedBytes == nil || *f.OpenDeletedBytes != 5 || f.OldestSeconds == nil || *f.OldestSeconds < 3 || len(f.Classes) != 3 || f.Stuck {
		t.Errorf("%+v", f)
	}
	account := p.accounts[p.layout.Places[0].Filesystem.Device]
	account.Unmeasured = 1
	p.accounts[p.layout.Places[0].Filesystem.Device] = account
	p.stuck = []fsstats.Standing{{Role: p.layout.Places[0].Role, Problem: errors.New("hangs")}}
	if f := filesystemValues(p, now)[0]; f.UnattributedBytes != nil || f.Unmeasured != 1 || !f.Stuck {
		t.Errorf("with something that is not measured: %+v", f)
	}
	p.readAt = time.Time{}
	if f := filesystemValues(p, now)[0]; f.OpenDeletedBytes != nil || len(f.Classes) > 0 || f.CapacityBytes == 0 {
		t.Errorf("before anything is known: %+v", f)
	}
}

func TestValuesOfReclaim(t *testing.T) {
	t.Parallel()
	now := time.Now()
	looked := now.Add(-10 * time.Second)
	threshold := func(s engine.Signal) engine.Threshold { return engine.Threshold{Signal: s} }
	s := &ReclaimStatus{Status: keeper.Status{
		LookedAt: &looked,
		Coming: []engine.Coming{
			{Threshold: threshold(engine.NodeFSAvailable), In: time.Minute}, {Threshold: threshold(engine.NodeFSAvailable), In: time.Hour}, {Threshold: threshold(engine.ImageFSAvailable), In: time.Second},
		},
		Counts: keeper.Counts{
			Outcomes: map[engine.Outcome]int64{engine.Calm: 3}, Causes: map[engine.Cause]int64{"nodefs.available": 2}, EvictionsFailed: 1,
			Rules: []keeper.RuleCount{{Kind: engine.UnusedImages, Rule: "GAP-25", Deleted: 4, Failed: 1, ExpectedBytes: 100, GainedBytes: 99}},
		},
	}}
	want := &web.Reclaim{
		Decisions: map[string]int64{string(engine.Calm): 3}, Evictions: map[string]int64{"nodefs.available": 2}, EvictionsFailed: 1,
		Deletions: []web.Deletion{{Kind: string(engine.UnusedImages), Rule: "GAP-25", Count: 4, Failed: 1, ExpectedBytes: 100, GainedBytes: 99}},
		Forecast:  map[string]float64{"nodefs.available": 50, "imagefs.available": 0},
	}
	if diff := cmp.Diff(want, reclaimValues(s, now)); diff != "" {
		t.Error(diff)
	}
	s.Problem = "the kubelet is not there"
	if v := reclaimValues(s, now); !v.Blind || len(v.Forecast) > 0 {
		t.Errorf("blind: %+v", v)
	}
}

// A page of 500 containers is whole and not too large.
func TestMetricsOf500Containers(t *testing.T) {
	t.Parallel()
	handler, err := web.Metrics(node500())
	if err != nil {
		t.Fatal(err)
	}
	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	text := answer.Body.String()
	if n := strings.Count(text, "cleave_container_rootfs_bytes{"); n != 500 {
		t.Errorf("%d containers", n)
	}
	if len(text) > 2<<20 {
		t.Errorf("%d bytes, want 2 MiB at most", len(text))
	}
}

// BenchmarkMetrics is one answer with 500 containers, from the picture to the text.
func BenchmarkMetrics(b *testing.B) {
	handler, err := web.Metrics(node500())
	if err != nil {
		b.Fatal(err)
	}
	var size int
	b.ReportAllocs()
	for b.Loop() {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequestWithContext(b.Context(), http.MethodGet, "/metrics", nil))
		size = answer.Body.Len()
	}
	b.ReportMetric(float64(size), "page-bytes")
}

// Images are looked at only while somebody asks, and not all the time then.
func TestImagesAreLookedAtOnRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var looks atomic.Int64
		var fail atomic.Bool
		b := newImageBook(func(context.Context) (imagestore.Images, error) {
			looks.Add(1)
			if fail.Load() {
				return imagestore.Images{}, errors.New("containerd is away")
			}
			small, large := imagestore.Image{ID: "small"}, imagestore.Image{ID: "large"}
			large.Exclusive.Filesystems = []imagestore.Taken{{Bytes: 5}}
			return imagestore.Images{Images: []imagestore.Image{small, large}}, nil
		}, zap.NewNop())
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go b.run(ctx)
		time.Sleep(time.Hour) //nolint:forbidigo // in synctest
		if looks.Load() != 0 || b.images() != nil {
			t.Fatalf("%d looks without a question", looks.Load())
		}
		synctest.Wait()
		if list := b.images(); len(list) != 2 || list[0].ID != "large" {
			t.Fatalf("%+v", list)
		}
		for range 60 {
			b.images()
			time.Sleep(time.Second) //nolint:forbidigo // in synctest
		}
		if looks.Load() != 1 {
			t.Errorf("%d looks in a minute", looks.Load())
		}
		fail.Store(true)
		for range 40 {
			b.images()
			time.Sleep(15 * time.Second) //nolint:forbidigo // in synctest
		}
		if list := b.images(); list != nil {
			t.Errorf("old figures are told for ever: %+v", list)
		}
	})
}

// Metrics are on the network where an address is named, as soon as it is free, until the end.
func TestMetricsOnTheNetwork(t *testing.T) {
	t.Parallel()
	before, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := before.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- serveMetrics(ctx, address, node500(), zap.NewNop()) }()
	if err := before.Close(); err != nil { // as the process before lets go of it
		t.Fatal(err)
	}
	deadline := time.Now().Add(time.Minute)
	for {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(request)
		if err == nil {
			text, readErr := io.ReadAll(answer.Body)
			if err := errors.Join(readErr, answer.Body.Close()); err != nil || !strings.Contains(string(text), "cleave_container_rootfs_bytes{") {
				t.Errorf("%v:\n%.500s", err, text)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
