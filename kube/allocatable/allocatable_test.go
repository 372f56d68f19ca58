package allocatable

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/engine"
)

const gi = int64(1) << 30

func set(pairs ...string) map[string]Setting {
	out := map[string]Setting{}
	for i := 0; i < len(pairs); i += 2 {
		out[pairs[i]] = Setting{pairs[i+1], "/var/lib/kubelet/config.yaml:7"}
	}
	return out
}

func ptr[T any](v T) *T { return &v }

// example is the node of 32Gi that the platform's documentation reckons with.
func example() Input {
	return Input{
		Settings: Settings{
			KubeReserved: set("memory", "2Gi"), SystemReserved: set("memory", "1Gi"), Hard: set("memory.available", "100Mi"), Enforce: []string{"pods"},
		},
		MemoryBytes: uint64(32 * gi),
	}
}

// TestTheDocumentedNode: 32Gi make 28.9Gi, and the pods' cgroup has 29Gi, with the reason (NAL-8).
func TestTheDocumentedNode(t *testing.T) {
	t.Parallel()
	in := example()
	in.Published = &Amounts{MemoryBytes: ptr(int64(31033655296))}
	in.Pods = &Cgroup{Path: "/kubepods", Exists: ptr(true), LimitBytes: ptr(uint64(31138512896))}
	r, err := Explain(in)
	if err != nil {
		t.Fatal(err)
	}
	memory := r.Resources[0]
	if memory.AllocatableBytes != 31033655296 || memory.WithheldBytes != 3172<<20 || memory.EnforcedBytes == nil || *memory.EnforcedBytes != 31138512896 || len(r.Findings) != 0 {
		t.Errorf("%+v\n%+v", memory, r.Findings)
	}
	var out strings.Builder
	if err := r.WriteText(&out, time.Time{}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"= allocatable                   31033655296     28.9Gi",
		"node publishes                  31033655296     28.9Gi  the same",
		"pods' cgroup, by settings       31138512896       29Gi",
		"pods' cgroup, really            31138512896       29Gi  /kubepods",
		"is limited to 29Gi, not to 28.9Gi: the kubelet leaves the part of evictions out there (NAL-7). When all pods together use more than 28.9Gi it evicts (THR-19), and at 29Gi the kernel kills (NAL-8)",
		"- kube-reserved                  2147483648        2Gi  2Gi (/var/lib/kubelet/config.yaml:7)",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, &out)
		}
	}
}

// TestFilesystems: each disk has a line of its own; what the node publishes is of nodefs alone (NAL-5, NAL-9).
func TestFilesystems(t *testing.T) {
	t.Parallel()
	in := Input{
		Settings: Settings{
			KubeReserved: set("ephemeral-storage", "1Gi"), SystemReserved: set("ephemeral-storage", "1Gi"), Enforce: []string{"pods"},
			Hard: set("nodefs.available", "10%", "imagefs.available", "15%", "containerfs.available", "90%"),
		},
		MemoryBytes: uint64(gi),
		Filesystems: []Filesystem{
			{Roles: []string{"nodefs", "containerfs"}, Device: "8:1", CapacityBytes: 107374182400},
			{Roles: []string{"imagefs"}, Device: "8:2", CapacityBytes: 200 << 30},
		},
	}
	r, err := Explain(in)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int64{}
	for _, res := range r.Resources {
		got[res.Name] = res.AllocatableBytes
	}
	want := map[string]int64{
		"memory": gi, "ephemeral-storage": 94489280352,
		"filesystem of nodefs, containerfs (8:1)": 94489280352,
		"filesystem of imagefs (8:2)":             200*gi - 32212256000, // 15 % in 32 bits; exactly it would be 32212254720
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if !strings.Contains(strings.Join(r.Resources[1].Notes, " "), "NAL-5, GAP-40") {
		t.Errorf("notes: %q", r.Resources[1].Notes)
	}
}

// TestFindings: what somebody should look at is found, and nothing else.
func TestFindings(t *testing.T) {
	t.Parallel()
	full := func(change func(*Input)) Input {
		in := example()
		in.Published, in.Capacity = &Amounts{MemoryBytes: ptr(int64(31033655296))}, &Amounts{MemoryBytes: ptr(32 * gi)}
		in.Pods = &Cgroup{Path: "/kubepods", Exists: ptr(true), LimitBytes: ptr(uint64(31138512896))}
		in.KubeUsedBytes, in.SystemUsedBytes = ptr(uint64(1<<30)), ptr(uint64(1<<30))
		change(&in)
		return in
	}
	for _, tc := range []struct {
		name   string
		change func(*Input)
		want   []string
	}{
		{"nothing", func(*Input) {}, nil},
		{"the kernel rounds to pages", func(in *Input) { in.Pods.LimitBytes = ptr(uint64(31138512896 - 4095)) }, nil},
		{"not known is not wrong", func(in *Input) {
			in.Published, in.Pods, in.KubeUsedBytes, in.SystemUsedBytes = nil, nil, nil, nil
		}, nil},
		{"no such cgroup", func(in *Input) { in.Pods = &Cgroup{Path: "/x", Exists: ptr(false)} }, nil},
		{"other settings are in force", func(in *Input) { *in.Published.MemoryBytes = 30 * gi }, []string{"the node publishes 30Gi (32212254720 bytes) of allocatable memory, and its settings make 28.9Gi (31033655296 bytes)"}},
		{"the machine grew", func(in *Input) {
			*in.Published.MemoryBytes, *in.Capacity.MemoryBytes = 12*gi, 16*gi
		}, []string{"the node publishes a capacity of 16Gi"}},
		{"no limit on the pods", func(in *Input) { in.Pods.LimitBytes = nil }, []string{"/kubepods has no limit, and the kubelet's settings make one of 29Gi"}},
		{"another limit on the pods", func(in *Input) { *in.Pods.LimitBytes = uint64(20 * gi) }, []string{"is limited to 20Gi"}},
		{"pods are not enforced", func(in *Input) { in.Settings.Enforce, in.Pods.LimitBytes = []string{"none"}, nil }, []string{"does not name pods"}},
		{"an old limit stays", func(in *Input) { in.Settings.Enforce = nil }, []string{"a limit of earlier settings stays", "does not name pods"}},
		{"none and others", func(in *Input) { in.Settings.Enforce = []string{"none", "pods"} }, []string{"none together with others"}},
		{"system-reserved is enforced", func(in *Input) {
			in.Settings.Enforce, in.Settings.SystemCgroup = []string{"pods", "system-reserved"}, "/system.slice"
			in.SystemCgroup = &Cgroup{Path: "/system.slice", Exists: ptr(true)}
		}, []string{"system-reserved is enforced: what is reserved becomes the most that these daemons get. Under load they starve for CPU, and when they need more memory the kernel kills one of them"}},
		{"the compressible part alone", func(in *Input) {
			in.Settings.Enforce, in.Settings.SystemCgroup = []string{"pods", "system-reserved-compressible"}, "/system.slice"
		}, nil},
		{"both", func(in *Input) {
			in.Settings.Enforce, in.Settings.KubeCgroup = []string{"pods", "kube-reserved", "kube-reserved-compressible"}, "/kube.slice"
		}, []string{"kube-reserved and kube-reserved-compressible", "kube-reserved is enforced"}},
		{"without its cgroup's name", func(in *Input) { in.Settings.Enforce = []string{"pods", "kube-reserved-compressible"} }, []string{"kubeReservedCgroup is not set"}},
		{"without its cgroup", func(in *Input) {
			in.Settings.Enforce, in.Settings.KubeCgroup = []string{"pods", "kube-reserved-compressible"}, "/kube.slice"
			in.KubeCgroup = &Cgroup{Path: "/kube.slice", Exists: ptr(false)}
		}, []string{"there is no cgroup /kube.slice"}},
		{"daemons use more", func(in *Input) { *in.KubeUsedBytes = 3 << 30 }, []string{"the kubelet and the runtime use 3Gi (3221225472 bytes) of memory now, and kube-reserved is 2Gi"}},
		{"nothing is reserved", func(in *Input) {
			in.Settings.SystemReserved = nil
			in.Pods.LimitBytes = ptr(uint64(30 * gi))
			*in.Published.MemoryBytes = 30*gi - 100<<20
		}, []string{"other daemons use 1Gi"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r, err := Explain(full(tc.change))
			if err != nil {
				t.Fatal(err)
			}
			ok := len(r.Findings) == len(tc.want)
			for i := range tc.want {
				ok = ok && strings.Contains(r.Findings[i].Text, tc.want[i])
			}
			if !ok {
				t.Errorf("found %+v, want %q", r.Findings, tc.want)
			}
		})
	}
}

// TestNoKubeletStarts: settings with which none does are errors that name them.
func TestNoKubeletStarts(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, want string
		change     func(*Input)
	}{
		{"no amount", `kube-reserved of memory is "much" (/var/lib/kubelet/config.yaml:7)`, func(in *Input) { in.Settings.KubeReserved = set("memory", "much") }},
		{"less than nothing", `NAL-10`, func(in *Input) { in.Settings.SystemReserved = set("memory", "-1Gi") }},
		{"an amount without end", `is no amount`, func(in *Input) { in.Settings.SystemReserved = set("memory", "1e999999999") }},
		{"a threshold", `evictionHard[memory.available] is "110%"`, func(in *Input) { in.Settings.Hard = set("memory.available", "110%") }},
		{"a threshold of nothing", `evictionHard`, func(in *Input) { in.Settings.Hard = set("memory.available", "0") }},
	} {
		in := example()
		tc.change(&in)
		if _, err := Explain(in); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
}

// TestSameAsTheEngine: the figures are those of the engine, whose own are compared with the kubelet's code.
func TestSameAsTheEngine(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same each time
	amounts := []string{"", "0", "1", "100Mi", "1Gi", "2500M", "1.5Gi", "1e9", "40Gi", "500m"}
	thresholds := []string{"", "100Mi", "5%", "0%", "100%", "12.5%", "0.1%", "1Gi", "3%", "33.3%", "60Gi"}
	pick := func(from []string) string { return from[random.IntN(len(from))] }
	for i := range 5000 {
		capacity := uint64(random.Int64N(200 * gi))
		disk := uint64(random.Int64N(2000 * gi))
		huge := uint64(random.Int64N(3)) << 30
		s := Settings{KubeReserved: map[string]Setting{}, SystemReserved: map[string]Setting{}, Hard: map[string]Setting{}, Enforce: []string{"pods"}, IgnoreEviction: random.IntN(5) == 0}
		var e engine.Reservation
		reserve := func(name string, ours map[string]Setting, theirs *resource.Quantity) {
			if text := pick(amounts); text != "" {
				ours[name] = Setting{Text: text}
				*theirs = resource.MustParse(text)
			}
		}
		reserve(memory, s.KubeReserved, &e.KubeReserved.Memory)
		reserve(memory, s.SystemReserved, &e.SystemReserved.Memory)
		reserve(storage, s.KubeReserved, &e.KubeReserved.EphemeralStorage)
		reserve(storage, s.SystemReserved, &e.SystemReserved.EphemeralStorage)
		hard := map[string]string{}
		for _, signal := range []string{memorySignal, nodefsSignal, "imagefs.available"} {
			if text := pick(thresholds); text != "" {
				hard[signal], s.Hard[signal] = text, Setting{Text: text}
			}
		}
		parsed, err := engine.Parse(engine.Settings{Hard: hard})
		if err != nil {
			t.Fatal(err)
		}
		if !s.IgnoreEviction {
			e.Hard = parsed
		}
		e.HugePages = *resource.NewQuantity(int64(huge), resource.BinarySI)
		total := engine.NodeResources{Memory: *resource.NewQuantity(int64(capacity), resource.BinarySI), EphemeralStorage: *resource.NewQuantity(int64(disk), resource.BinarySI)}
		want, limit := e.Allocatable(total), e.Enforced(total)
		r, err := Explain(Input{Settings: s, MemoryBytes: capacity, HugePagesBytes: huge, Filesystems: []Filesystem{{Roles: []string{"nodefs"}, CapacityBytes: disk}}})
		if err != nil {
			t.Fatal(err)
		}
		ours := fmt.Sprint(r.Resources[0].AllocatableBytes, *r.Resources[0].EnforcedBytes, r.Resources[1].AllocatableBytes)
		theirs := fmt.Sprint(want.Memory.Value(), limit.Value(), want.EphemeralStorage.Value())
		if ours != theirs {
			t.Fatalf("step %d: %+v of %d and %d: %s, the engine has %s", i, s, capacity, disk, ours, theirs)
		}
	}
}
