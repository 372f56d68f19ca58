package pressure

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats"
)

var start = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// pass is what is left after a pass at a time, with so much available on images' disk and these thresholds met.
func pass(after time.Duration, available uint64, met ...engine.Threshold) record.Record {
	size := uint64(10 << 30)
	now := start.Add(after)
	r := record.Record{Config: engine.Config{TransitionPeriod: 5 * time.Minute}, Input: engine.Input{Now: now, Summary: &engine.Summary{
		NodeFS:  &engine.FSStats{Time: now, AvailableBytes: &size, CapacityBytes: &size},
		ImageFS: &engine.FSStats{Time: now, AvailableBytes: &available, CapacityBytes: &size},
	}}}
	for _, t := range met {
		r.Next.Met = append(r.Next.Met, engine.MetThreshold{Threshold: t})
	}
	return r
}

func gib(n int64) engine.Value {
	return engine.Value{Quantity: resource.NewQuantity(n<<30, resource.BinarySI)}
}

func TestEachFilesystemForItself(t *testing.T) {
	t.Parallel()
	hard := engine.Threshold{Signal: engine.ImageFSAvailable, Value: gib(1)}
	soft := engine.Threshold{Signal: engine.ImageFSAvailable, Value: gib(2), Grace: time.Minute}
	inodes := engine.Threshold{Signal: engine.ImageFSInodesFree, Value: gib(1)}
	var b Book
	for _, step := range []struct {
		name        string
		r           record.Record
		short, hard bool
		text        string
	}{
		{"enough", pass(0, 9<<30), false, false, "9.0Gi of 10.0Gi left"},
		{"short for a soft one, whose grace runs", pass(time.Second, 3<<29, soft), true, false, "imagefs.available < 2Gi for 1m0s: 1.5Gi of 10.0Gi left"},
		{"short for a hard one, too", pass(10*time.Second, 1<<29, soft, hard), true, true, "imagefs.available < 1Gi: 512.0Mi of 10.0Gi left"},
		{"for the soft one alone again", pass(20*time.Second, 3<<29, soft), true, true, "imagefs.available < 2Gi for 1m0s: 1.5Gi"},
		{"enough, but not for long", pass(time.Minute, 9<<30), true, true, "9.0Gi of 10.0Gi left; it was short at 12:00:20, and has to be well for 5m0s"},
		{"the hard one's time is over", pass(5*time.Minute+10*time.Second, 9<<30), true, false, "9.0Gi"},
		{"all is over", pass(5*time.Minute+20*time.Second, 9<<30), false, false, "9.0Gi of 10.0Gi left"},
		{"inodes", pass(6*time.Minute, 9<<30, inodes), true, true, "imagefs.inodesFree < 1Gi: 0 of 0 inodes left"},
		{"the clock was set back", pass(0, 9<<30), false, false, "9.0Gi of 10.0Gi left"},
	} {
		p := b.Passed(step.r)
		if len(p.Filesystems) != 2 || p.Filesystems[0].Role != fsstats.NodeFS || p.Filesystems[1].Role != fsstats.ImageFS || !p.At.Equal(step.r.Input.Now) {
			t.Fatalf("%s: %+v", step.name, p)
		}
		if other := p.Filesystems[0]; other.Short || other.Hard {
			t.Errorf("%s: the other filesystem is %+v", step.name, other)
		}
		f := p.Filesystems[1]
		if f.Short != step.short || f.Hard != step.hard || !strings.HasPrefix(f.Text, step.text) || (len(p.Hard()) > 0) != step.hard {
			t.Errorf("%s: %+v, want %t, %t, %q", step.name, f, step.short, step.hard, step.text)
		}
	}
	if p := b.Passed(record.Record{Input: engine.Input{Now: start}}); len(p.Filesystems) != 0 {
		t.Errorf("without figures: %+v", p)
	}
}
