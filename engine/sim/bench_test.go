package sim

import (
	"fmt"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
)

const gib = 1 << 30

// busy is a node of 100 pods that write to their layers, logs and volumes, and
// 200 images, for a long time.
func busy(t testing.TB, lasts time.Duration) *World {
	t.Helper()
	w := &World{
		Lasts: lasts, Filesystems: []Filesystem{
			{Name: "root", CapacityBytes: 200 * gib, Inodes: 13_000_000, UsedBytes: 20 * gib},
			{Name: "images", CapacityBytes: 500 * gib, Inodes: 33_000_000},
		},
		Image: 1, Container: 1, Kubelet: kubelet(t, map[string]string{"nodefs.available": "10%", "imagefs.available": "15%", "nodefs.inodesFree": "5%"}),
		Cleave: Cleave{Options: engine.Cleave()},
	}
	for i := range 200 {
		w.Images = append(w.Images, Image{Name: fmt.Sprintf("image-%03d", i), Layers: []Layer{
			{ID: fmt.Sprintf("base-%d", i%10), Bytes: gib / 4, Inodes: 5000}, {ID: fmt.Sprintf("own-%d", i), Bytes: gib / 2, Inodes: 9000},
		}})
	}
	anew := time.Minute
	for i := range 100 {
		name := fmt.Sprintf("pod-%03d", i)
		w.Pods = append(w.Pods, Pod{
			Spec: engine.Pod{Name: name, Owner: name, Volumes: []engine.Volume{{Name: "v", Kind: engine.EmptyDirDisk}}, Containers: []engine.Container{{Name: "c"}}},
			Anew: &anew,
			Containers: []Container{{Name: "c", Image: i, Writers: []Writer{
				{To: WritableLayer, BytesPerSecond: int64(1+i%7) << 14, InodesPerSecond: 1}, {To: Log, BytesPerSecond: int64(1+i%5) << 12},
				{To: Volume, Volume: "v", BytesPerSecond: int64(1+i%3) << 13},
			}}},
		})
	}
	return w
}

func kubelet(t testing.TB, hard map[string]string) Kubelet {
	t.Helper()
	thresholds, err := engine.Parse(engine.Settings{Hard: hard})
	if err != nil {
		t.Fatal(err)
	}
	return Kubelet{
		Config: engine.Config{Thresholds: thresholds, TransitionPeriod: 5 * time.Minute, LimitIsolation: true},
		Images: garbage.ImagePolicy{HighPercent: 85, LowPercent: 80, MinAge: 2 * time.Minute}, Logs: garbage.LogPolicy{MaxSizeBytes: 10 << 20, MaxFiles: 5},
	}
}

// BenchmarkSteps plays a busy node under both profiles; a step is 100 ms of
// virtual time with all that happens in it.
func BenchmarkSteps(b *testing.B) {
	for _, profile := range []Profile{KubeletProfile, CleaveProfile} {
		b.Run(string(profile), func(b *testing.B) {
			w := busy(b, time.Hour)
			steps := 0
			for b.Loop() {
				r, err := Play(w, profile)
				if err != nil {
					b.Fatal(err)
				}
				steps += r.Steps
			}
			b.ReportMetric(float64(steps)/b.Elapsed().Minutes(), "steps/min")
		})
	}
}
