package top

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/keeper"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
)

var update = flag.Bool("update", false, "write testdata anew")

var now = time.Unix(1_800_000_000, 0)

func ptr[T any](v T) *T { return &v }

func threshold(signal engine.Signal, value string, grace time.Duration) engine.Threshold {
	t := engine.Threshold{Signal: signal, Grace: grace}
	if share, ok := strings.CutSuffix(value, "%"); ok {
		var percent float32
		if _, err := fmt.Sscan(share, &percent); err != nil {
			panic(err)
		}
		t.Value.Share = percent / 100
		return t
	}
	q, err := engine.ParseQuantity(value)
	if err != nil {
		panic(err)
	}
	t.Value.Quantity = &q
	return t
}

// node is one with images on a disk that runs short, writable layers on one that already is, and a pod's name that is no text.
func node() (agent.Status, agent.Usage, agent.Plan) {
	root := fsstats.Filesystem{
		Device: fsstats.Device{Major: 8, Minor: 1}, Type: "ext4", Mountpoint: "/",
		CapacityBytes: 64 << 30, UsedBytes: 22 << 30, FreeBytes: 42 << 30, AvailableBytes: 39 << 30, InodesTotal: ptr(uint64(4 << 20)), InodesFree: ptr(uint64(100_000)),
	}
	images := fsstats.Filesystem{
		Device: fsstats.Device{Minor: 42}, Type: "btrfs", Mountpoint: "/images",
		CapacityBytes: 100 << 30, UsedBytes: 80 << 30, FreeBytes: 20 << 30, AvailableBytes: 20 << 30,
	}
	layers := fsstats.Filesystem{
		Device: fsstats.Device{Major: 8, Minor: 17}, Type: "xfs", Mountpoint: "/var/lib/containers",
		CapacityBytes: 50 << 30, UsedBytes: 47 << 30, FreeBytes: 3 << 30, AvailableBytes: 3 << 30, InodesTotal: ptr(uint64(1000)), InodesFree: ptr(uint64(990)),
	}
	imagesSoft, imagesHard := threshold(engine.ImageFSAvailable, "25%", 90*time.Second), threshold(engine.ImageFSAvailable, "15%", 0)
	layersHard, inodesHard := threshold(engine.ContainerFSAvailable, "5Gi", 0), threshold(engine.NodeFSInodesFree, "5%", 0)
	s := agent.Status{
		Version: "1.2.3", Mode: "cri", Layout: fsstats.LayoutSeparate, MeasuredAt: ptr(now.Add(-time.Second)),
		Filesystems: []agent.FilesystemStatus{
			{Filesystem: root, Roles: []fsstats.Role{fsstats.NodeFS, fsstats.Logs}, Account: agent.Account{UnattributedBytes: 12 << 30, Known: []agent.KnownUsage{{Path: "/var/log/pods/lost", Bytes: 2 << 30}}}},
			{Filesystem: images, Roles: []fsstats.Role{fsstats.ImageFS, fsstats.Content}, Account: agent.Account{UnattributedBytes: -4096}},
			{Filesystem: layers, Roles: []fsstats.Role{fsstats.ContainerFS}},
		},
		Stuck: []agent.StuckRole{{Role: fsstats.ContainerFS, Since: now.Add(-7 * time.Second), Reason: "it does not answer"}},
		Pods: []ephemeral.Usage{
			{Namespace: "shop", Name: "web-7d4b9", UID: "u1", HeldOn: []ephemeral.Use{{Device: "8:1", Bytes: 3 << 30}, {Device: "8:17", Bytes: 30 << 30}}},
			{Namespace: "shop", Name: "small\x1b[2J", UID: "u2", HeldOn: []ephemeral.Use{{Device: "8:1", Bytes: 5 << 20}}, Unknown: 1},
		},
		Reclaim: &agent.ReclaimStatus{Status: keeper.Status{
			LookedAt: ptr(now.Add(-time.Second)), Outcome: engine.Pressure, Threshold: layersHard.String(),
			Thresholds: []string{"memory.available < 100Mi", inodesHard.String(), layersHard.String(), imagesHard.String(), imagesSoft.String(), "containerfs.inodesFree: none"},
			Coming:     []engine.Coming{{Threshold: imagesHard, In: 12*time.Minute + 400*time.Millisecond}},
			Leaving:    []string{"u9"},
			Overlaps:   []string{"nodefs.available < 1Gi"},
		}, Next: []agent.NextPods{
			{Signal: engine.NodeFSInodesFree, Threshold: inodesHard.String(), Met: true, Count: 7, Pods: []agent.NextPod{
				{Namespace: "shop", Name: "small\x1b[2J", UID: "u2", Used: ptr(int64(4711)), Why: "It uses 4711 inodes."}, {Namespace: "shop", Name: "new", UID: "u3", Why: "There are no figures of it."},
			}},
			{Signal: engine.ImageFSAvailable, Threshold: imagesHard.String(), Nobody: "none of them has anything there"},
			{Signal: engine.ContainerFSAvailable, Threshold: layersHard.String(), Met: true, Count: 1, Pods: []agent.NextPod{{Namespace: "shop", Name: "web-7d4b9", UID: "u1", Used: ptr(int64(30 << 30)), Why: "It uses 30.0Gi."}}},
		}},
	}
	part := func(device string, bytes int64) []agent.PartUsage {
		return []agent.PartUsage{{Name: "files", Device: device, Figure: &index.Figure{Bytes: bytes}}}
	}
	u := agent.Usage{Owners: []agent.OwnerUsage{
		{Kind: "container", ID: "c1", Parts: part("8:17", 30<<30)}, // the pod's
		{Kind: "pod", ID: "u1", Parts: part("8:1", 3<<30)},
		{Kind: "pod", ID: "gone-1", Parts: part("8:1", 1<<30)},
		{Kind: "image layer", ID: "cleave/7 größe-日本", Parts: part("0:42", 9<<30)},
		{Kind: "content store", Parts: append(part("0:42", 40<<30), agent.PartUsage{Name: "ingests", Device: "0:42"})},
		{Kind: "folder of nobody", ID: "/var/log/pods/lost", Parts: part("8:1", 2<<30)},
		{Kind: "kubelet", Parts: []agent.PartUsage{{Name: "files"}}}, // not measured yet
	}}
	image := func(id string, bytes int64) record.Item {
		return record.Item{ID: id, Rule: "IGC-8", ExpectedBytes: &bytes}
	}
	plan := agent.Plan{
		{Signal: engine.NodeFSAvailable, Steps: []record.Step{{Kind: engine.OldLogs, Items: []record.Item{{ID: "/var/log/pods/a/0.log.gz", Rule: "rotated"}}}}},
		{Signal: engine.ImageFSAvailable, Steps: []record.Step{
			{Kind: engine.DeadContainers, Items: []record.Item{image("0123456789abcdef", 1<<20)}},
			{Kind: engine.UnusedImages, Items: []record.Item{image("registry.example/shop/web@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 3<<30), image("registry.example/b:1", 1<<30)}},
		}},
		{Signal: engine.ContainerFSAvailable, Steps: []record.Step{{Kind: engine.DeadContainers, Items: []record.Item{image("0123456789abcdef", 1<<20)}}}, Problem: "images: the store is not read yet"},
	}
	return s, u, plan
}

// compare holds text against a file of testdata.
func compare(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got), -update writes it anew:\n%s", path, diff)
	}
}

// TestPictures: what people see of one node, on two sizes of terminals, with colours, and where there is no terminal.
func TestPictures(t *testing.T) {
	t.Parallel()
	s, u, plan := node()
	view := New(s, u, plan, now)
	for _, tc := range []struct {
		name          string
		width, height int
		colour        bool
	}{
		{"80x24.txt", 80, 24, false}, {"80x24-colour.txt", 80, 24, true}, {"200x50.txt", 200, 50, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			compare(t, tc.name, strings.Join(view.Screen(tc.width, tc.height, tc.colour), "\n")+"\n")
		})
	}
	t.Run("page.txt", func(t *testing.T) {
		t.Parallel()
		var out strings.Builder
		if err := view.WriteText(&out, now); err != nil {
			t.Fatal(err)
		}
		compare(t, "page.txt", out.String())
	})
	t.Run("view.json", func(t *testing.T) {
		t.Parallel()
		var out bytes.Buffer
		if err := page.JSON(&out, view); err != nil {
			t.Fatal(err)
		}
		compare(t, "view.json", out.String())
		var back View
		if err := json.Unmarshal(out.Bytes(), &back); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(view.Filesystems, back.Filesystems); diff != "" {
			t.Error(diff)
		}
	})
}

// TestScreenFits: no terminal is too small, and no line is wider than it or has what would change it.
func TestScreenFits(t *testing.T) {
	t.Parallel()
	s, u, plan := node()
	for _, view := range []View{New(s, u, plan, now), New(agent.Status{}, agent.Usage{}, nil, now)} {
		for width := 1; width < 220; width += 3 {
			for _, height := range []int{1, 2, 5, 10, 24, 100} {
				lines := view.Screen(width, height, false)
				if len(lines) > height {
					t.Fatalf("%dx%d: %d lines", width, height, len(lines))
				}
				for _, l := range lines {
					if n := len([]rune(l)); n > width {
						t.Fatalf("%dx%d: a line of %d: %q", width, height, n, l)
					}
					if strings.ContainsFunc(l, func(r rune) bool { return r < ' ' || r == 0x7f }) {
						t.Fatalf("a line has control characters: %q", l)
					}
				}
			}
		}
	}
}

// TestSmallScreens: a title has at least one row below it.
func TestSmallScreens(t *testing.T) {
	t.Parallel()
	s, u, plan := node()
	view := New(s, u, plan, now)
	for height := 1; height < 40; height++ {
		lines := view.Screen(80, height, false)
		last := strings.TrimSpace(lines[len(lines)-1])
		if strings.HasPrefix(last, "HOLDS") || strings.HasPrefix(last, "FREES") || last == "" && height > 6 {
			t.Errorf("%d lines end with %q", height, last)
		}
		if i := slices.IndexFunc(lines, func(l string) bool { return strings.Contains(l, "FREES ") }); i >= 0 && lines[i-2] == "" {
			t.Errorf("%d lines have a section without rows", height)
		}
	}
}

// TestNextPodsGiveWay: on a screen that is too small for all, holders and what would be deleted are shown, not who would be evicted.
func TestNextPodsGiveWay(t *testing.T) {
	t.Parallel()
	s, u, plan := node()
	view := New(s, u, plan, now)
	for height, want := range map[int]bool{24: false, 40: true} {
		screen := strings.Join(view.Screen(120, height, false), "\n")
		if got := strings.Contains(screen, "  pods that would go first: shop/web-7d4b9 (30.0Gi)\n"); got != want || !strings.Contains(screen, "HOLDS") || !strings.Contains(screen, "FREES") {
			t.Errorf("%d lines:\n%s", height, screen)
		}
	}
}

// TestNoReclaim: where cleave does not reclaim there are figures, no marks, and the reason.
func TestNoReclaim(t *testing.T) {
	t.Parallel()
	s, u, _ := node()
	s.Reclaim = nil
	screen := strings.Join(New(s, u, nil, now).Screen(200, 50, false), "\n")
	if !strings.Contains(screen, "this cleave does not reclaim (reclaim.enabled)") || strings.Contains(screen, "<") || strings.Contains(screen, "|") {
		t.Error(screen)
	}
}

// TestThresholdsAreRead: marks are what the engine writes.
func TestThresholdsAreRead(t *testing.T) {
	t.Parallel()
	for _, want := range []engine.Threshold{
		threshold(engine.NodeFSAvailable, "10%", 0),
		threshold(engine.NodeFSAvailable, "12.5%", 2*time.Minute),
		threshold(engine.ImageFSInodesFree, "5%", time.Hour+time.Second),
		threshold(engine.ContainerFSAvailable, "1.5Gi", 0),
		threshold(engine.ContainerFSAvailable, "100M", 90*time.Second),
	} {
		got, ok := readThreshold(want.String())
		if !ok || !got.Same(want) {
			t.Errorf("%s: got %v, %t", want, got, ok)
		}
	}
	for _, none := range []string{"", "containerfs.available: none", "nodefs.available < ", "nodefs.available < x%", "nodefs.available < 1Gi for ever"} {
		if got, ok := readThreshold(none); ok {
			t.Errorf("%q is read as %s", none, got)
		}
	}
}

// TestMarksAndBars: where a threshold is drawn is where the bar is when it is met.
func TestMarksAndBars(t *testing.T) {
	t.Parallel()
	f := Filesystem{CapacityBytes: 1000, Marks: []Mark{{Signal: engine.NodeFSAvailable, Least: 250}, {Signal: engine.NodeFSAvailable, Least: 500, GraceSeconds: 1}, {Signal: engine.NodeFSInodesFree, Least: 900}}}
	for _, tc := range []struct {
		name            string
		used, available uint64
		want            string
	}{
		{"empty", 0, 1000, "..........:....|....   0%"},
		{"half, with a reserve", 400, 500, "########~~:....|....  50%"},
		{"just before", 751, 249, "##########:####|....  75%"},
		{"full", 1000, 0, "##########:####|#### 100%"},
		{"more available than there is", 0, 2000, "..........:....|....   0%"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := f.bar("space ", 20+len("  space  [] 100%"), f.CapacityBytes, tc.used, tc.available, "available").text
			if got := strings.NewReplacer("  space  [", "", "]", "").Replace(got); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// TestNobodyThere: without a cleave that runs it is said what to do.
func TestNobodyThere(t *testing.T) {
	t.Parallel()
	source := Source{Socket: filepath.Join(t.TempDir(), "none.sock")}
	if _, err := source.Fetch(t.Context()); !errors.Is(err, agent.ErrNotRunning) || !strings.Contains(err.Error(), "cleave serve") {
		t.Errorf("got %v", err)
	}
}
