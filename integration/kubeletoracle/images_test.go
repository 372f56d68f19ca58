package kubeletoracle

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/trace/noop"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	statsapi "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
	"k8s.io/kubernetes/pkg/kubelet/container"
	"k8s.io/kubernetes/pkg/kubelet/images"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/engine/garbage"
)

// imageNode is the kubelet's image garbage collector and the node that it
// sees. A runtime has many more methods; those would fail at the nil below.
type imageNode struct {
	container.Runtime

	listed []garbage.Listed
	users  []garbage.ImageUser
	fs     statsapi.FsStats
	fails  map[string]bool

	looks   []time.Time
	removed []string // tried, in order
	freed   int64
	events  []string
	tidied  bool
}

func (n *imageNode) ListImages(context.Context) ([]container.Image, error) {
	var out []container.Image
	for _, l := range n.listed {
		out = append(out, container.Image{ID: l.ID, Size: l.SizeBytes, Pinned: l.Pinned})
	}
	return out, nil
}

func (n *imageNode) GetPods(context.Context, bool) ([]*container.Pod, error) {
	n.looks = append(n.looks, time.Now())
	pod := &container.Pod{ID: "pod"}
	for i, u := range n.users {
		pod.Containers = append(pod.Containers, &container.Container{ID: container.ContainerID{ID: fmt.Sprint(i)}, ImageID: u.ImageID})
	}
	return []*container.Pod{pod}, nil
}

func (n *imageNode) GetContainerStatus(_ context.Context, _ types.UID, id container.ContainerID) (*container.Status, error) {
	var i int
	if _, err := fmt.Sscan(id.ID, &i); err != nil {
		return nil, err
	}
	out := &container.Status{}
	for _, v := range n.users[i].Volumes {
		out.Mounts = append(out.Mounts, container.Mount{Image: &runtimeapi.ImageSpec{Image: v}})
	}
	return out, nil
}

func (n *imageNode) RemoveImage(_ context.Context, image container.ImageSpec) error {
	n.removed = append(n.removed, image.Image)
	if n.fails[image.Image] {
		return errors.New("as if it could not be removed")
	}
	n.listed = slices.DeleteFunc(n.listed, func(l garbage.Listed) bool {
		if l.ID == image.Image {
			n.freed += l.SizeBytes
		}
		return l.ID == image.Image
	})
	return nil
}

func (n *imageNode) ImageFsStats(context.Context) (*statsapi.FsStats, *statsapi.FsStats, error) {
	return &n.fs, nil, nil
}

func (n *imageNode) Event(runtime.Object, string, string, string) {}

func (n *imageNode) Eventf(_ runtime.Object, _, reason, _ string, args ...any) {
	n.events = append(n.events, reason+": "+fmt.Sprint(args...))
}

func (n *imageNode) AnnotatedEventf(runtime.Object, map[string]string, string, string, string, ...any) {
}

// TestImageGC holds the selection of images against the kubelet's own image
// garbage collector: detection, age, space, delete-all, failing removals.
func TestImageGC(t *testing.T) {
	t.Parallel()
	count := imageTally{}
	number := *seed
	for ; count.runs < *steps/5; number++ {
		var difference string
		synctest.Test(t, func(t *testing.T) { difference = playImages(t, number, &count) })
		if difference != "" {
			t.Fatalf("kubelet and engine differ in the images of -seed %d: %s", number, difference)
		}
	}
	t.Logf("%+v", count)
	if *steps < 10_000 {
		return
	}
	for name, n := range map[string]int{"removals by age": count.aged, "removals for space": count.space, "ties": count.ties, "failed removals": count.failed, "runs that freed too little": count.short, "runs without capacity": count.blind} {
		if n < 20 {
			t.Errorf("only %d %s", n, name)
		}
	}
}

type imageTally struct{ runs, aged, space, ties, failed, short, blind int }

func playImages(t *testing.T, number uint64, count *imageTally) string {
	d := dice{rand.New(rand.NewPCG(number, 8))}
	policy := garbage.ImagePolicy{
		HighPercent: pick(d, 85, 85, 100, 50, 0), MinAge: pick(d, 0, 2*time.Minute, 10*time.Minute), MaxAge: pick(d, 0, 0, 30*time.Minute, time.Hour),
	}
	policy.LowPercent = pick(d, policy.HighPercent, policy.HighPercent*9/10, 0)
	node := &imageNode{}
	ctx, stop := context.WithCancel(klog.NewContext(t.Context(), logr.Discard()))
	defer func() { stop(); synctest.Wait() }()
	tidy := func(context.Context, []string, time.Time) { node.tidied = true }
	manager, err := images.NewImageGCManager(node, node, []images.PostImageGCHook{tidy}, node, nil, images.ImageGCPolicy{
		HighThresholdPercent: policy.HighPercent, LowThresholdPercent: policy.LowPercent, MinAge: policy.MinAge, MaxAge: policy.MaxAge,
	}, noop.NewTracerProvider())
	if err != nil {
		t.Fatal(err)
	}
	kubeletStart := time.Now()
	known := garbage.Images{}
	see := func() {
		for _, at := range node.looks {
			known, _ = known.Look(node.listed, node.users, at, at)
		}
		node.looks = nil
	}
	manager.Start(ctx)
	synctest.Wait()
	see()
	for i := range 30 {
		d.changeImages(node)
		<-time.After(pick(d, time.Second, 30*time.Second, time.Minute, 5*time.Minute, 20*time.Minute))
		synctest.Wait()
		see()
		node.removed, node.freed, node.events, node.tidied = nil, 0, nil, false
		began := time.Now()
		var inUse map[string]bool
		known, inUse = known.Look(node.listed, node.users, began, began)
		periodic := d.chance(70)
		sizes := map[string]int64{}
		for _, l := range node.listed {
			sizes[l.ID] = l.SizeBytes
		}
		if periodic {
			err = manager.GarbageCollect(ctx, kubeletStart)
		} else {
			err = manager.DeleteUnusedImages(ctx)
		}
		node.looks = nil
		if difference := judgeImages(policy, known.Unused(inUse), node, began, kubeletStart, periodic, err, count); difference != "" {
			return fmt.Sprintf("run %d, periodic %t, %+v: %s", i, periodic, policy, difference)
		}
		for _, id := range node.removed {
			if !node.fails[id] {
				delete(known, id)
			}
		}
		count.runs++
	}
	return ""
}

// judgeImages says how one run of the kubelet's is not what we select.
func judgeImages(policy garbage.ImagePolicy, unused []garbage.Image, node *imageNode, began, kubeletStart time.Time, periodic bool, ran error, count *imageTally) string {
	ours := slices.Clone(unused)
	// Equal images go in any order: take the kubelet's.
	place := func(id string) int {
		if i := slices.Index(node.removed, id); i >= 0 {
			return i
		}
		return len(node.removed)
	}
	slices.SortStableFunc(ours, func(a, b garbage.Image) int {
		if !a.Equal(b) {
			return 0
		}
		return place(a.ID) - place(b.ID)
	})
	for i := range ours {
		if ours[i].ID != unused[i].ID {
			count.ties++
			break
		}
	}
	var tried []string
	var failure error
	freed := int64(0)
	try := func(image garbage.Image) bool {
		tried = append(tried, image.ID)
		if node.fails[image.ID] {
			failure = errors.New("not removed")
			count.failed++
			return false
		}
		return true
	}
	need := garbage.Need{Over: true, Bytes: garbage.Everything}
	var blind error
	if periodic {
		var aged []garbage.Image
		aged, ours = policy.TooOld(ours, began, kubeletStart)
		for _, image := range aged {
			try(image)
		}
		count.aged += len(aged)
		if failure != nil {
			need = garbage.Need{}
		} else {
			need, blind = policy.Need(node.fs.AvailableBytes, node.fs.CapacityBytes)
		}
	}
	if need.Over && failure == nil && blind == nil {
		plan := policy.ForSpace(ours, need.Bytes, began)
		for _, image := range append(slices.Clone(plan.Remove), plan.Reserve...) {
			if try(image) {
				freed += image.SizeBytes
				count.space++
				if freed >= need.Bytes {
					break
				}
			}
		}
	}
	if !slices.Equal(tried, node.removed) {
		return fmt.Sprintf("removed: kubelet %v, engine %v of %+v, need %+v", node.removed, tried, ours, need)
	}
	tidy, outcome := need.Judge(freed, failure)
	if !periodic && errors.Is(outcome, garbage.ErrFreedTooLittle) {
		outcome = nil // delete-all asks for more than there is
	}
	if blind != nil {
		count.blind++
		outcome = blind
	}
	if (outcome == nil) != (ran == nil) || tidy != node.tidied {
		return fmt.Sprintf("outcome: kubelet %v (tidied %t), engine %v (%t)", ran, node.tidied, outcome, tidy)
	}
	want := ""
	switch {
	case errors.Is(outcome, garbage.ErrFreedTooLittle):
		count.short++
		want = fmt.Sprintf("FreeDiskSpaceFailed: %s", ran)
		if !strings.Contains(want, fmt.Sprintf("(%d%% of ", need.UsedPercent)) || !strings.Contains(want, fmt.Sprintf("(freed %d bytes)", freed)) {
			return fmt.Sprintf("kubelet says %q, engine %v", ran, outcome)
		}
	case blind != nil:
		want = fmt.Sprintf("InvalidDiskCapacity: %s", ran)
	}
	if got := strings.Join(node.events, "; "); got != want {
		return fmt.Sprintf("events: kubelet %q, engine %q", got, want)
	}
	return ""
}

// changeImages pulls, uses, drops and breaks some images.
func (d dice) changeImages(n *imageNode) {
	have := map[string]bool{}
	for _, l := range n.listed {
		have[l.ID] = true
	}
	for i := range 12 {
		id := fmt.Sprintf("sha256:%02d", i)
		if !have[id] && d.chance(35) {
			n.listed = append(n.listed, garbage.Listed{ID: id, SizeBytes: int64(d.IntN(5)) * gib, Pinned: d.chance(10)})
		}
	}
	n.listed = slices.DeleteFunc(n.listed, func(garbage.Listed) bool { return d.chance(3) })
	for i := range n.listed {
		if d.chance(3) {
			n.listed[i].Pinned = !n.listed[i].Pinned
		}
	}
	n.users = nil
	for range d.IntN(4) {
		u := garbage.ImageUser{ImageID: fmt.Sprintf("sha256:%02d", d.IntN(14))}
		if d.chance(30) {
			u.Volumes = []string{fmt.Sprintf("sha256:%02d", d.IntN(14)), "by-tag"}
		}
		n.users = append(n.users, u)
	}
	n.fails = map[string]bool{}
	if d.chance(15) {
		n.fails[fmt.Sprintf("sha256:%02d", d.IntN(12))] = true
	}
	n.fs = statsapi.FsStats{
		CapacityBytes:  maybe(d, 3, pick(d, uint64(capacity), uint64(capacity), 10000, 0)),
		AvailableBytes: maybe(d, 3, pick(d, 1600, 1599, uint64(16642998272), uint64(capacity)/2, 0, uint64(12*gib), uint64(200*gib))),
	}
}
