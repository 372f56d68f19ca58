package engine

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/engine/garbage"
)

// full is a node with 500 pods of two containers and one emptyDir each, under
// pressure on each disk.
func full() (Config, Input) {
	r := rand.New(rand.NewPCG(1, 2))
	in := Input{Now: start, Layout: &Detected{}, Summary: &Summary{}}
	for i := range 500 {
		uid := fmt.Sprintf("pod-%03d", i)
		p := Pod{UID: uid, Priority: ptr(int32(r.IntN(3))), Volumes: []Volume{{Name: "v", Kind: EmptyDirDisk, SizeLimit: q("100Gi")}}}
		st := PodStats{UID: uid, Volumes: []VolumeStats{{Name: "v", FSStats: FSStats{UsedBytes: bytes(r.Int64N(gib)), InodesUsed: bytes(5)}}}}
		for _, name := range []string{"a", "b"} {
			p.Containers = append(p.Containers, Container{
				Name: name, Requests: Amounts{EphemeralStorage: q("1Gi"), Memory: q("128Mi")}, Limits: Amounts{EphemeralStorage: q("100Gi")},
			})
			st.Containers = append(st.Containers, ContainerStats{
				Name: name, RootFS: &FSStats{UsedBytes: bytes(r.Int64N(4 * gib)), InodesUsed: bytes(9)}, Logs: &FSStats{UsedBytes: bytes(r.Int64N(gib)), InodesUsed: bytes(2)},
			})
		}
		st.EphemeralStorage = &FSStats{UsedBytes: bytes(8 * gib)}
		in.Pods = append(in.Pods, p)
		in.Summary.Pods = append(in.Summary.Pods, st)
	}
	in.Summary.NodeFS, in.Summary.ImageFS, in.Summary.ContainerFS = disk(gib), disk(gib), disk(gib)
	return Config{LimitIsolation: true}, in
}

// imagesOfANode are a runtime's 1 000, half of them in use by 1 000 containers.
func imagesOfANode() (list []garbage.Listed, users []garbage.ImageUser) {
	for i := range 1000 {
		list = append(list, garbage.Listed{ID: fmt.Sprintf("sha256:%064d", i), SizeBytes: int64(i)})
		users = append(users, garbage.ImageUser{ImageID: list[i/2].ID})
	}
	return list, users
}

// BenchmarkDecision is one whole pass: observe, limits, ranking, victim, and
// for its reclaim a look at the images and the plan to delete half of those
// that are unused.
func BenchmarkDecision(b *testing.B) {
	config, in := full()
	parsed, err := Parse(Settings{Hard: map[string]string{"nodefs.available": "10%", "imagefs.available": "15%", "nodefs.inodesFree": "5%"}})
	if err != nil {
		b.Fatal(err)
	}
	config.Thresholds = parsed
	state, d := config.Sync(State{}, in)
	if d.Victim == nil || len(d.Reclaim) != 2 {
		b.Fatalf("%+v", d)
	}
	list, users := imagesOfANode()
	known, _ := garbage.Images(nil).Look(list, users, start.Add(-time.Hour), start.Add(-time.Hour))
	b.ReportAllocs()
	for b.Loop() {
		config.Sync(state, in)
		known, inUse := known.Look(list, users, start, start)
		if plan := (garbage.ImagePolicy{}).ForSpace(known.Unused(inUse), 187_500, start); len(plan.Remove) < 100 {
			b.Fatal(len(plan.Remove))
		}
	}
}
