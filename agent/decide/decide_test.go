package decide

import (
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/kube"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func api(pods ...*kube.Pod) kube.Snapshot {
	return kube.Snapshot{Source: kube.SourceAPIServer, AsOf: noon.Add(-time.Minute), Pods: pods}
}

func files(names ...string) kube.Snapshot {
	return kube.Snapshot{Source: kube.SourceManifests, AsOf: noon.Add(-time.Second), Static: names}
}

func pod(uid, name string) *kube.Pod {
	return &kube.Pod{UID: uid, APIUID: uid, Namespace: "shop", Name: name, Phase: "Running"}
}

// Only where nothing is missing may what is not known count as gone (CGC-4): its dead containers and logs go.
func TestCGC4_WhoIsNotKnownIsGoneOnlyIfAllAreKnown(t *testing.T) {
	t.Parallel()
	problem := api(pod("1", "web"))
	problem.Problem = "left out: pod shop/odd can't be read"
	old := api(pod("1", "web"))
	old.AsOf = noon.Add(-6 * time.Minute)
	for name, tc := range map[string]struct {
		sources []kube.Snapshot
		want    bool
	}{
		"no source":                         {nil, false},
		"all well":                          {[]kube.Snapshot{api(pod("1", "web")), files()}, true},
		"the API server has not answered":   {[]kube.Snapshot{{Source: kube.SourceAPIServer}, files()}, false},
		"files have not been read":          {[]kube.Snapshot{api(pod("1", "web")), {Source: kube.SourceManifests}}, false},
		"a pod was left out":                {[]kube.Snapshot{problem, files()}, false},
		"the API server answered long ago":  {[]kube.Snapshot{old, files()}, false},
		"the kubelet may not be asked":      {[]kube.Snapshot{api(pod("1", "web")), {Source: kube.SourceKubelet, Problem: "not allowed"}, files()}, true},
		"the kubelet alone is known":        {[]kube.Snapshot{{Source: kube.SourceKubelet, AsOf: noon, Pods: []*kube.Pod{pod("1", "web")}}}, false},
		"the kubelet beside an old server":  {[]kube.Snapshot{old, {Source: kube.SourceKubelet, AsOf: noon, Pods: []*kube.Pod{pod("1", "web")}}, files()}, false},
		"a static pod with its mirror":      {[]kube.Snapshot{api(pod("1", "etcd-n1")), files("shop/etcd-n1")}, true},
		"a static pod that nobody mirrors":  {[]kube.Snapshot{api(pod("1", "web")), files("shop/etcd-n1")}, false},
		"a static pod of another namespace": {[]kube.Snapshot{api(pod("1", "etcd-n1")), files("system/etcd-n1")}, false},
	} {
		var static []string
		for _, s := range tc.sources {
			static = append(static, s.Static...)
		}
		view := kube.Merge(tc.sources...)
		got := Complete(view, static, noon, 5*time.Minute)
		if got != tc.want {
			t.Errorf("%s: complete %v, want %v", name, got, tc.want)
		}
		fates := Fates(view, got)
		if fates.SourcesReady != tc.want || fates.Synced != tc.want {
			t.Errorf("%s: %+v", name, fates)
		}
	}
}

// CGC-5: what has ended is still in the API; what is being deleted lives until its containers have ended.
func TestCGC5_Fates(t *testing.T) {
	t.Parallel()
	running, done, failed, leaving := pod("1", "a"), pod("2", "b"), pod("3", "c"), pod("4", "d")
	done.Phase, failed.Phase, leaving.Terminating = "Succeeded", "Failed", true
	got := Fates(kube.Merge(api(running, done, failed, leaving)), true).Fate
	want := map[string]garbage.PodFate{"1": garbage.Alive, "2": garbage.Ended, "3": garbage.Ended, "4": garbage.Alive}
	for uid, fate := range want {
		if got[uid] != fate {
			t.Errorf("pod %s: %q, want %q", uid, got[uid], fate)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%v", got)
	}
}

// SYN-4: active pods are ranked. Who is known badly, from long ago or without a UID is not, and is named.
func TestSYN4_WhoIsRanked(t *testing.T) {
	t.Parallel()
	done, odd, nameless := pod("2", "done"), pod("3", "odd"), pod("", "nameless")
	done.Phase, odd.Faults = "Failed", []string{"its request is no quantity"}
	pods, left := Pods(kube.Merge(api(pod("1", "web"), done, odd, nameless)), noon, 5*time.Minute)
	if len(pods) != 1 || pods[0].UID != "1" || len(left) != 2 {
		t.Errorf("ranked %+v, left %q", pods, left)
	}
	pods, left = Pods(kube.Merge(api(pod("1", "web"))), noon.Add(10*time.Minute), 5*time.Minute)
	if len(pods) != 0 || len(left) != 1 {
		t.Errorf("of long ago: ranked %+v, left %q", pods, left)
	}
	// RANK-10 and SYN-33: a name in a file protects whoever has it.
	pods, _ = Pods(kube.Merge(api(pod("1", "etcd-n1")), files("shop/etcd-n1")), noon, 5*time.Minute)
	if len(pods) != 1 || !pods[0].Static || !pods[0].Critical() {
		t.Errorf("a static pod by name: %+v", pods)
	}
}

// LSE-8: what is not requested stays unknown and is not zero.
func TestLSE8_APodKeepsWhatItSays(t *testing.T) {
	t.Parallel()
	q, priority, grace := resource.MustParse("2Gi"), int32(7), int64(9)
	p := pod("1", "web")
	p.Owner, p.Priority, p.GraceSeconds, p.Mirror = "ReplicaSet shop/web", &priority, &grace, true
	p.Containers = []kube.Container{{Name: "app", Requests: kube.Amounts{EphemeralStorage: &q}}, {Name: "plain"}}
	p.InitContainers = []kube.Container{{Name: "proxy", Sidecar: true, Limits: kube.Amounts{EphemeralStorage: &q}}}
	p.Volumes = []kube.Volume{{Name: "cache", Kind: kube.EmptyDirDisk, SizeLimit: &q}}
	got := Pod(p, false)
	if got.UID != "1" || got.Owner != p.Owner || *got.Priority != 7 || *got.GraceSeconds != 9 || !got.Mirror || got.Static {
		t.Errorf("%+v", got)
	}
	if r := got.Containers[0].Requests.EphemeralStorage; r == nil || r.Cmp(q) != 0 {
		t.Errorf("the request is %v", r)
	}
	if c := got.Containers[1]; c.Requests.EphemeralStorage != nil || c.Limits.EphemeralStorage != nil {
		t.Errorf("%+v", c)
	}
	if c := got.InitContainers[0]; !c.Sidecar || c.Limits.EphemeralStorage == nil {
		t.Errorf("%+v", c)
	}
	if v := got.Volumes; len(v) != 1 || v[0].Kind != engine.EmptyDirDisk || v[0].SizeLimit == nil {
		t.Errorf("%+v", v)
	}
	if !Pod(p, true).Static {
		t.Error("a file makes a pod of that name, and it is not static")
	}
	for ours, theirs := range map[kube.VolumeKind]engine.VolumeKind{
		kube.EmptyDirDisk: engine.EmptyDirDisk, kube.ConfigMap: engine.ConfigMap, kube.GitRepo: engine.GitRepo,
		kube.HostPath: engine.HostPath, kube.EmptyDirMemory: engine.EmptyDirMemory,
	} {
		if engine.VolumeKind(ours) != theirs {
			t.Errorf("kind %q of volumes is %q to the engine", ours, theirs)
		}
	}
}

// ACC-3: dead containers don't count. A figure that is missing stays so.
func TestACC3_PodStats(t *testing.T) {
	t.Parallel()
	use := func(bytes uint64) *ephemeral.Use {
		return &ephemeral.Use{Device: "8:1", Bytes: bytes, Inodes: 1, At: noon}
	}
	got := PodStats(ephemeral.Pod{
		UID: "1",
		Containers: []ephemeral.ContainerUse{
			{Name: "app", Running: true, Layer: use(5), LogFiles: use(2)},
			{Name: "dead", Layer: use(100)},
			{Name: "new", Running: true},
		},
		Volumes: []ephemeral.VolumeUse{{Name: "cache", Counted: true, Use: use(3)}, {Name: "unmeasured", Counted: true}},
	})
	if got.UID != "1" || len(got.Containers) != 2 || len(got.Volumes) != 1 {
		t.Fatalf("%+v", got)
	}
	if app := got.Containers[0]; *app.RootFS.UsedBytes != 5 || *app.Logs.UsedBytes != 2 || *app.RootFS.InodesUsed != 1 || !app.RootFS.Time.Equal(noon) {
		t.Errorf("%+v", app)
	}
	if c := got.Containers[1]; c.RootFS != nil || c.Logs != nil {
		t.Errorf("%+v", c)
	}
	if e := got.EphemeralStorage; e == nil || *e.UsedBytes != 10 {
		t.Errorf("the pod as a whole: %+v", e)
	}
	if e := PodStats(ephemeral.Pod{UID: "2"}).EphemeralStorage; e != nil {
		t.Errorf("of a pod without figures: %+v", e)
	}
}

// ACC-16, T14: deleted files that are open count where they lie, and not to what the kubelet says the pod uses.
func TestACC16_DeletedFilesThatAreOpenCountForTheRanking(t *testing.T) {
	t.Parallel()
	on := func(device string, bytes uint64) *ephemeral.Use {
		return &ephemeral.Use{Device: device, Bytes: bytes, Inodes: 1, At: noon}
	}
	got := PodStats(ephemeral.Pod{UID: "1", Containers: []ephemeral.ContainerUse{
		{Name: "app", Running: true, Layer: on("8:17", 5), LogFiles: on("8:1", 2), OpenDeleted: []ephemeral.Use{*on("8:17", 8<<30), *on("8:1", 1<<30)}},
		{Name: "bare", Running: true, OpenDeleted: []ephemeral.Use{*on("8:1", 7)}},
		{Name: "dead", Layer: on("8:17", 100), OpenDeleted: []ephemeral.Use{*on("8:17", 9)}},
	}})
	if len(got.Containers) != 2 {
		t.Fatalf("%+v", got)
	}
	app, bare := got.Containers[0], got.Containers[1]
	if *app.RootFS.UsedBytes != 8<<30+5 || *app.RootFS.InodesUsed != 2 || *app.Logs.UsedBytes != 1<<30+2 || bare.RootFS != nil || *bare.Logs.UsedBytes != 7 {
		t.Errorf("%+v", got.Containers)
	}
	if e := got.EphemeralStorage; e == nil || *e.UsedBytes != 7 {
		t.Errorf("the pod as a whole: %+v", e)
	}
}

func TestLAY_WhatIsDetected(t *testing.T) {
	t.Parallel()
	dev := func(minor uint32) fsstats.Filesystem {
		return fsstats.Filesystem{Device: fsstats.Device{Major: 8, Minor: minor}}
	}
	layout := func(node, images, containers uint32) fsstats.Layout {
		return fsstats.Layout{Places: []fsstats.Place{
			{Role: fsstats.NodeFS, Filesystem: dev(node)}, {Role: fsstats.ImageFS, Filesystem: dev(images)}, {Role: fsstats.ContainerFS, Filesystem: dev(containers)},
		}}
	}
	for name, tc := range map[string]struct {
		layout fsstats.Layout
		want   engine.Layout
	}{
		"one disk":         {layout(1, 1, 1), engine.Single},
		"two disks":        {layout(1, 2, 2), engine.Dedicated},
		"images apart":     {layout(1, 2, 1), engine.Split},
		"three disks":      {layout(1, 2, 3), engine.Separate},
		"containers alone": {layout(1, 1, 3), engine.ContainersAlone},
	} {
		got := Detected(tc.layout)
		if got == nil || Layout(*got) != tc.want {
			t.Errorf("%s: %+v, want %s", name, got, tc.want)
		}
	}
	gone := layout(1, 1, 1)
	gone.Places[1].Missing = true
	if got := Detected(gone); got != nil {
		t.Errorf("with a place that is missing: %+v", got)
	}
	if got := Detected(fsstats.Layout{}); got != nil {
		t.Errorf("with no places: %+v", got)
	}
}

// SIG: inodes that the kernel does not count have no figures, and free ones beyond the total are no negative use.
func TestFilesystem(t *testing.T) {
	t.Parallel()
	f := fsstats.Filesystem{AvailableBytes: 1, CapacityBytes: 3, UsedBytes: 2, MeasuredAt: noon}
	if got := Filesystem(f); *got.AvailableBytes != 1 || *got.CapacityBytes != 3 || *got.UsedBytes != 2 || got.Inodes != nil || got.InodesFree != nil || !got.Time.Equal(noon) {
		t.Errorf("%+v", got)
	}
	total, free := uint64(5), uint64(9)
	f.InodesTotal, f.InodesFree = &total, &free
	if got := Filesystem(f); *got.Inodes != 5 || *got.InodesFree != 9 || *got.InodesUsed != 0 {
		t.Errorf("%+v", got)
	}
}

func settings(hard map[string]string) kubelet.Settings {
	s := kubelet.Settings{EvictionHard: kubelet.Map[string]{Entries: map[string]kubelet.Setting[string]{}}}
	for signal, value := range hard {
		s.EvictionHard.Entries[signal] = kubelet.Setting[string]{Value: value}
	}
	return s
}

// Ours lie above the kubelet's; one that can't is left out, so that nobody goes by it.
func TestBeside(t *testing.T) {
	t.Parallel()
	one := engine.Detected{}
	theirs, err := Thresholds(settings(map[string]string{"nodefs.available": "10%", "imagefs.available": "15%"}), one.Layout())
	if err != nil {
		t.Fatal(err)
	}
	const capacity = 100 << 30
	seen := engine.Observations{}
	for _, s := range []engine.Signal{engine.NodeFSAvailable, engine.ImageFSAvailable, engine.ContainerFSAvailable} {
		seen[s] = engine.Observation{Available: 50 << 30, Capacity: capacity, Time: noon}
	}
	ours, overlaps, missing := Beside(theirs, one, seen)
	if len(ours) == 0 || len(overlaps) != 0 || len(missing) != 0 {
		t.Fatalf("%v, overlaps %v, missing %v", ours, overlaps, missing)
	}
	for _, o := range ours {
		if at := o.Value.Of(capacity); at.Value() <= capacity*15/100 {
			t.Errorf("%s begins at %d, not above the kubelet's 15%%", o, at.Value())
		}
	}
	_, _, missing = Beside(theirs, one, engine.Observations{})
	if !slices.Contains(missing, engine.NodeFSAvailable) {
		t.Errorf("nothing is seen, and missing is %v", missing)
	}
	if _, err := Thresholds(settings(map[string]string{"nodefs.available": "many"}), one.Layout()); err == nil {
		t.Error("a threshold that is none is read")
	}
}

func TestPoliciesAreTheKubelets(t *testing.T) {
	t.Parallel()
	var s kubelet.Settings
	s.ImageGCHighPercent.Value, s.ImageGCLowPercent.Value = 70, 60
	s.ImageMinimumGCAge.Value, s.ImageMaximumGCAge.Value = time.Minute, time.Hour
	if p := Images(s); p.HighPercent != 70 || p.LowPercent != 60 || p.MinAge != time.Minute || p.MaxAge != time.Hour || p.Options != garbage.Cleave() {
		t.Errorf("%+v", p)
	}
	s.MinimumContainerTTL.Value, s.MaxDeadPerContainer.Value, s.MaxDeadContainers.Value = time.Second, 2, -1
	if p := Containers(s); p.MinAge != time.Second || p.PerContainer != 2 || p.Total != -1 || !p.NoneUnderPressure {
		t.Errorf("%+v", p)
	}
	s.EvictionPressureTransition.Value, s.EvictionMaxPodGraceSeconds.Value = 5*time.Minute, 30
	// Limits of their own are the kubelet's to watch over.
	if c := Config(s, nil); c.TransitionPeriod != 5*time.Minute || c.MaxPodGraceSeconds != 30 || c.LimitIsolation || c.Options != engine.Cleave() {
		t.Errorf("%+v", c)
	}
}
