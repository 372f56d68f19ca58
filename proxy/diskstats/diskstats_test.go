package diskstats

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// fixed is a source with facts that do not change.
type fixed struct {
	facts  *Facts
	wanted int
}

func (f *fixed) Facts() *Facts { return f.facts }
func (f *fixed) Wanted()       { f.wanted++ }

var (
	measured = time.Unix(1700000000, 5)
	sampled  = time.Unix(1700000007, 0)
)

func used(bytes, inodes uint64) *Usage { return &Usage{Bytes: bytes, Inodes: inodes, At: measured} }

func entry(mountpoint string, at time.Time, bytes, inodes uint64) *runtimeapi.FilesystemUsage {
	return &runtimeapi.FilesystemUsage{
		Timestamp:  at.UnixNano(),
		FsId:       &runtimeapi.FilesystemIdentifier{Mountpoint: mountpoint},
		UsedBytes:  &runtimeapi.UInt64Value{Value: bytes},
		InodesUsed: &runtimeapi.UInt64Value{Value: inodes},
	}
}

func split() *Facts {
	total, free := uint64(1000), uint64(900)
	return &Facts{
		Images:     Store{Mountpoint: "/images", Device: "8:1", Used: used(100, 10), Whole: Usage{Bytes: 150, Inodes: 15, At: measured}},
		Containers: Store{Mountpoint: "/containers", Device: "8:17", Used: used(20, 2), Whole: Usage{Bytes: 30, Inodes: 3, At: measured}},
		Devices:    map[string]string{"/images": "8:1", "/containers": "8:17", "/also/images": "8:1"},
		Layers: map[string]Layer{
			"known":    {Mountpoint: "/containers", Used: used(5, 1), CapacityBytes: 4096, InodesTotal: &total, InodesFree: &free},
			"unsure":   {Mountpoint: "/containers"},
			"noinodes": {Mountpoint: "/containers", Used: used(5, 1), CapacityBytes: 4096},
		},
	}
}

func single() *Facts {
	f := split()
	f.Containers.Mountpoint, f.Containers.Device = "/images", "8:1"
	return f
}

func unmeasured(f *Facts) *Facts {
	f.Images.Used, f.Containers.Used = nil, nil
	return f
}

func guessed(f *Facts) *Facts {
	f.Images.Guessed, f.Containers.Guessed = true, true
	return f
}

func TestT2_ImageFsInfoNamesBothFilesystems(t *testing.T) {
	t.Parallel()
	type info = runtimeapi.ImageFsInfoResponse
	list := func(e ...*runtimeapi.FilesystemUsage) []*runtimeapi.FilesystemUsage { return e }
	cases := []struct {
		name     string
		facts    *Facts
		upstream *info
		want     *info
	}{
		{
			"containerd as it is, split", split(),
			&info{ImageFilesystems: list(entry("/images", sampled, 4951261692, 255210))},
			&info{ImageFilesystems: list(entry("/images", measured, 100, 10)), ContainerFilesystems: list(entry("/containers", measured, 20, 2))},
		}, {
			"containerd as it is, one filesystem: same mountpoint in both", single(),
			&info{ImageFilesystems: list(entry("/images", sampled, 4951261692, 255210))},
			&info{ImageFilesystems: list(entry("/images", measured, 100, 10)), ContainerFilesystems: list(entry("/images", measured, 20, 2))},
		}, {
			"not yet measured: the runtime's one figure stands for both", unmeasured(split()),
			&info{ImageFilesystems: list(entry("/images", sampled, 4951261692, 255210))},
			&info{ImageFilesystems: list(entry("/images", sampled, 4951261692, 255210)), ContainerFilesystems: list(entry("/containers", sampled, 4951261692, 255210))},
		}, {
			"empty answer, not yet measured: what the filesystems hold", unmeasured(split()),
			&info{},
			&info{ImageFilesystems: list(entry("/images", measured, 150, 15)), ContainerFilesystems: list(entry("/containers", measured, 30, 3))},
		}, {
			"nil figures", unmeasured(split()),
			&info{ImageFilesystems: list(&runtimeapi.FilesystemUsage{Timestamp: 7, FsId: &runtimeapi.FilesystemIdentifier{Mountpoint: "/images"}})},
			&info{ImageFilesystems: list(entry("/images", measured, 150, 15)), ContainerFilesystems: list(entry("/containers", measured, 30, 3))},
		}, {
			"nil fs_id and a nil entry behind it", split(),
			&info{ImageFilesystems: list(&runtimeapi.FilesystemUsage{}, nil, entry("/other", sampled, 1, 1))},
			&info{
				ImageFilesystems:     list(entry("/images", measured, 100, 10), entry("/other", sampled, 1, 1)),
				ContainerFilesystems: list(entry("/containers", measured, 20, 2)),
			},
		}, {
			"filled rightly by the runtime itself: unchanged", split(),
			&info{ImageFilesystems: list(entry("/also/images", sampled, 1, 1)), ContainerFilesystems: list(entry("/containers", sampled, 2, 2))},
			nil,
		}, {
			"one filesystem under two names: one name, the runtime's figures", single(),
			&info{ImageFilesystems: list(entry("/images", sampled, 1, 1)), ContainerFilesystems: list(entry("/also/images", sampled, 2, 2))},
			&info{ImageFilesystems: list(entry("/images", sampled, 1, 1)), ContainerFilesystems: list(entry("/images", sampled, 2, 2))},
		}, {
			"filled with a path that nobody knows: not taken for wrong", split(),
			&info{ImageFilesystems: list(entry("/images", sampled, 1, 1)), ContainerFilesystems: list(entry("/new", sampled, 2, 2))},
			nil,
		}, {
			"only guessed where: the runtime's own mountpoint goes first", guessed(unmeasured(split())),
			&info{ImageFilesystems: list(entry("/custom", sampled, 5, 5))},
			&info{ImageFilesystems: list(entry("/custom", sampled, 5, 5)), ContainerFilesystems: list(entry("/custom", sampled, 5, 5))},
		}, {
			"only guessed where, and the runtime says nothing", guessed(unmeasured(split())),
			&info{},
			&info{ImageFilesystems: list(entry("/images", measured, 150, 15)), ContainerFilesystems: list(entry("/containers", measured, 30, 3))},
		}, {
			"only guessed where, and the runtime fills both: unchanged", guessed(unmeasured(split())),
			&info{ImageFilesystems: list(entry("/images", sampled, 1, 1)), ContainerFilesystems: list(entry("/containers", sampled, 2, 2))},
			nil,
		}, {
			"filled wrongly by device", split(),
			&info{ImageFilesystems: list(entry("/images", sampled, 1, 1)), ContainerFilesystems: list(entry("/also/images", sampled, 2, 2))},
			&info{ImageFilesystems: list(entry("/images", measured, 100, 10)), ContainerFilesystems: list(entry("/containers", measured, 20, 2))},
		},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := &info{}
			changed := apply(t, tc.facts, runtimeapi.ImageService_ImageFsInfo_FullMethodName, tc.upstream, got)
			if !changed {
				got = nil
			}
			if diff := cmp.Diff(tc.want, got, protocmp.Transform()); diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}
		})
	}
}

// apply runs an encoded message through the rewrite of a method.
func apply(t *testing.T, facts *Facts, method string, in, out proto.Message) (changed bool) {
	t.Helper()
	raw, err := proto.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	better, err := Rewrites(&fixed{facts: facts})[method](t.Context(), raw)
	if err != nil {
		t.Fatal(err)
	}
	if better == nil {
		return false
	}
	if err := proto.Unmarshal(better, out); err != nil {
		t.Fatal(err)
	}
	return true
}

func TestCTD10_13_14_WritableLayerIsRightOrLeftOut(t *testing.T) {
	t.Parallel()
	zero := func() *runtimeapi.FilesystemUsage {
		return &runtimeapi.FilesystemUsage{
			FsId:      &runtimeapi.FilesystemIdentifier{Mountpoint: "/images"},
			UsedBytes: &runtimeapi.UInt64Value{}, InodesUsed: &runtimeapi.UInt64Value{},
		}
	}
	noFilesystem := entry("", sampled, 0, 0)
	cases := []struct {
		name, id   string
		upstream   *runtimeapi.FilesystemUsage
		want       *runtimeapi.FilesystemUsage
		unchanged  bool
		wantsFacts bool
	}{
		{name: "good figure, wrong filesystem", id: "known", upstream: entry("/images", sampled, 7, 3), want: entry("/containers", sampled, 7, 3)},
		{name: "good figure, right filesystem", id: "known", upstream: entry("/containers", sampled, 7, 3), unchanged: true},
		{name: "CTD-10 before the first sample", id: "known", upstream: zero(), want: entry("/containers", measured, 5, 1)},
		{name: "CTD-14 another snapshotter", id: "known", upstream: noFilesystem, want: entry("/containers", measured, 5, 1)},
		{name: "no figure at all", id: "known", want: entry("/containers", measured, 5, 1)},
		{name: "CTD-13 and not measured: left out", id: "unsure", upstream: zero(), wantsFacts: true},
		{name: "CTD-10 and unknown: left out", id: "new", upstream: zero(), wantsFacts: true},
		{name: "good figure of a container not known yet", id: "new", upstream: entry("/images", sampled, 7, 3), unchanged: true, wantsFacts: true},
	}
	stats := func(id string, u *runtimeapi.FilesystemUsage) *runtimeapi.ContainerStats {
		return &runtimeapi.ContainerStats{Attributes: &runtimeapi.ContainerAttributes{Id: id}, WritableLayer: u}
	}
	pod := func(s *runtimeapi.ContainerStats) *runtimeapi.PodSandboxStats {
		return &runtimeapi.PodSandboxStats{Linux: &runtimeapi.LinuxPodSandboxStats{Containers: []*runtimeapi.ContainerStats{s}}}
	}
	shapes := []struct {
		method string
		wrap   func(*runtimeapi.ContainerStats) proto.Message
	}{
		{runtimeapi.RuntimeService_ContainerStats_FullMethodName, func(s *runtimeapi.ContainerStats) proto.Message {
			return &runtimeapi.ContainerStatsResponse{Stats: s}
		}},
		{runtimeapi.RuntimeService_ListContainerStats_FullMethodName, func(s *runtimeapi.ContainerStats) proto.Message {
			return &runtimeapi.ListContainerStatsResponse{Stats: []*runtimeapi.ContainerStats{s}}
		}},
		{runtimeapi.RuntimeService_StreamContainerStats_FullMethodName, func(s *runtimeapi.ContainerStats) proto.Message {
			return &runtimeapi.StreamContainerStatsResponse{ContainerStats: []*runtimeapi.ContainerStats{s}}
		}},
		{runtimeapi.RuntimeService_PodSandboxStats_FullMethodName, func(s *runtimeapi.ContainerStats) proto.Message {
			return &runtimeapi.PodSandboxStatsResponse{Stats: pod(s)}
		}},
		{runtimeapi.RuntimeService_ListPodSandboxStats_FullMethodName, func(s *runtimeapi.ContainerStats) proto.Message {
			return &runtimeapi.ListPodSandboxStatsResponse{Stats: []*runtimeapi.PodSandboxStats{pod(s)}}
		}},
		{runtimeapi.RuntimeService_StreamPodSandboxStats_FullMethodName, func(s *runtimeapi.ContainerStats) proto.Message {
			return &runtimeapi.StreamPodSandboxStatsResponse{PodSandboxStats: []*runtimeapi.PodSandboxStats{pod(s)}}
		}},
	}
	for _, tc := range cases {
		for _, shape := range shapes {
			t.Run(tc.name+shape.method, func(t *testing.T) {
				t.Parallel()
				source := &fixed{facts: split()}
				in := shape.wrap(stats(tc.id, tc.upstream))
				raw, err := proto.Marshal(in)
				if err != nil {
					t.Fatal(err)
				}
				better, err := Rewrites(source)[shape.method](t.Context(), raw)
				if err != nil {
					t.Fatal(err)
				}
				if (source.wanted > 0) != tc.wantsFacts {
					t.Errorf("asked for new facts %d times, want asked: %v", source.wanted, tc.wantsFacts)
				}
				if (better == nil) != tc.unchanged {
					t.Fatalf("changed: %v, want %v", better != nil, !tc.unchanged)
				}
				if tc.unchanged {
					return
				}
				got := in.ProtoReflect().New().Interface()
				if err := proto.Unmarshal(better, got); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(shape.wrap(stats(tc.id, tc.want)), got, protocmp.Transform()); diff != "" {
					t.Errorf("answer (-want +got):\n%s", diff)
				}
			})
		}
	}
}

func TestCTD16_DiskMetrics(t *testing.T) {
	t.Parallel()
	labels := []string{"pod", "ns", "name", "id", "image"}
	metric := func(name string, value uint64, at time.Time) *runtimeapi.Metric {
		l := append([]string(nil), labels...)
		if name != metricLastSeen {
			l = append(l, "/")
		}
		return &runtimeapi.Metric{Name: name, Timestamp: at.UnixNano(), MetricType: runtimeapi.MetricType_GAUGE, LabelValues: l, Value: &runtimeapi.UInt64Value{Value: value}}
	}
	seen := metric(metricLastSeen, 1, sampled)
	cases := []struct {
		name, id   string
		have, want []*runtimeapi.Metric
	}{
		{
			"inodes_total is the container's own count, usage that of the whole disk", "known",
			[]*runtimeapi.Metric{seen, metric(metricUsageBytes, 4000, sampled), metric(metricLimitBytes, 4096, sampled), metric(metricInodesTotal, 1, sampled), metric(metricInodesFree, 899, sampled)},
			[]*runtimeapi.Metric{seen, metric(metricUsageBytes, 5, measured), metric(metricLimitBytes, 4096, sampled), metric(metricInodesTotal, 1000, measured), metric(metricInodesFree, 899, sampled)},
		}, {
			"no disk metrics at all", "known",
			[]*runtimeapi.Metric{seen},
			[]*runtimeapi.Metric{seen, metric(metricUsageBytes, 5, measured), metric(metricLimitBytes, 4096, measured), metric(metricInodesFree, 900, measured), metric(metricInodesTotal, 1000, measured)},
		}, {
			"no limit of inodes", "noinodes",
			[]*runtimeapi.Metric{seen, metric(metricUsageBytes, 5, sampled), metric(metricLimitBytes, 4096, sampled), metric(metricInodesTotal, 1, sampled)},
			[]*runtimeapi.Metric{seen, metric(metricUsageBytes, 5, sampled), metric(metricLimitBytes, 4096, sampled)},
		}, {
			"not measured: as it is", "unsure",
			[]*runtimeapi.Metric{seen, metric(metricUsageBytes, 7, sampled)}, nil,
		},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			wrap := func(m []*runtimeapi.Metric) *runtimeapi.ListPodSandboxMetricsResponse {
				return &runtimeapi.ListPodSandboxMetricsResponse{PodMetrics: []*runtimeapi.PodSandboxMetrics{{
					ContainerMetrics: []*runtimeapi.ContainerMetrics{{ContainerId: tc.id, Metrics: m}},
				}}}
			}
			got := &runtimeapi.ListPodSandboxMetricsResponse{}
			if !apply(t, split(), runtimeapi.RuntimeService_ListPodSandboxMetrics_FullMethodName, wrap(tc.have), got) {
				if tc.want != nil {
					t.Fatal("unchanged")
				}
				return
			}
			if diff := cmp.Diff(wrap(tc.want), got, protocmp.Transform()); diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFieldsOfANewerCRISurvive(t *testing.T) {
	t.Parallel()
	future := protowire.AppendString(protowire.AppendTag(nil, 9999, protowire.BytesType), "from the future")
	image := entry("/images", sampled, 1, 1)
	image.ProtoReflect().SetUnknown(future)
	in := &runtimeapi.ImageFsInfoResponse{ImageFilesystems: []*runtimeapi.FilesystemUsage{image}}
	in.ProtoReflect().SetUnknown(future)
	out := &runtimeapi.ImageFsInfoResponse{}
	if !apply(t, split(), runtimeapi.ImageService_ImageFsInfo_FullMethodName, in, out) {
		t.Fatal("unchanged")
	}
	for what, m := range map[string]proto.Message{"answer": out, "image entry": out.GetImageFilesystems()[0]} {
		if got := m.ProtoReflect().GetUnknown(); !cmp.Equal([]byte(got), future) {
			t.Errorf("unknown fields of the %s: %q, want %q", what, got, future)
		}
	}
}

// FuzzRewrites sends arbitrary upstream bytes through every interceptor: none
// panics, and what comes out of ImageFsInfo can't crash or blind a kubelet (T2).
func FuzzRewrites(f *testing.F) {
	f.Add([]byte{}, true)
	raw, err := proto.Marshal(&runtimeapi.ImageFsInfoResponse{ImageFilesystems: []*runtimeapi.FilesystemUsage{{}, entry("/images", sampled, 1, 1)}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw, false)
	f.Fuzz(func(t *testing.T, answer []byte, isMeasured bool) {
		facts := split()
		if !isMeasured {
			facts = unmeasured(facts)
		}
		for method, fn := range Rewrites(&fixed{facts: facts}) {
			better, err := fn(context.Background(), answer)
			if method != runtimeapi.ImageService_ImageFsInfo_FullMethodName || err != nil {
				continue
			}
			if better == nil {
				better = answer
			}
			var info runtimeapi.ImageFsInfoResponse
			if err := proto.Unmarshal(better, &info); err != nil {
				t.Fatalf("undecodable answer: %v", err)
			}
			for name, list := range map[string][]*runtimeapi.FilesystemUsage{"image": info.GetImageFilesystems(), "container": info.GetContainerFilesystems()} {
				if len(list) == 0 {
					t.Errorf("the %s list is empty", name)
				}
				for _, e := range list {
					if blind(e) {
						t.Errorf("the %s list holds %v", name, e)
					}
				}
			}
		}
	})
}

// TestNoPlaceIsMadeUp: while cleave knows no place, at the start beside a disk
// that does not answer, what the runtime says goes out, and nothing is invented
// beside it.
func TestNoPlaceIsMadeUp(t *testing.T) {
	t.Parallel()
	nothing := &Facts{Images: Store{Guessed: true}, Containers: Store{Guessed: true}}
	own := entry("/var/lib/containerd", sampled, 7, 1)
	cases := []struct {
		name      string
		in, wants *runtimeapi.ImageFsInfoResponse
	}{
		{"the runtime knows images", &runtimeapi.ImageFsInfoResponse{ImageFilesystems: []*runtimeapi.FilesystemUsage{own}},
			&runtimeapi.ImageFsInfoResponse{ImageFilesystems: []*runtimeapi.FilesystemUsage{own}, ContainerFilesystems: []*runtimeapi.FilesystemUsage{own}}},
		{"the runtime knows nothing", &runtimeapi.ImageFsInfoResponse{}, &runtimeapi.ImageFsInfoResponse{}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := proto.CloneOf(tc.in)
			fixImageFsInfo(got, &view{Facts: nothing})
			if diff := cmp.Diff(tc.wants, got, protocmp.Transform()); diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}
		})
	}
}
