package agent

import (
	"maps"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/fsstats/orphan"
)

// TestWhenOpenFilesAreLookedAt: a gap that has grown or shrunk, and stays so; not
// more often than each 10 s.
func TestWhenOpenFilesAreLookedAt(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	type step struct {
		second int
		gap    int64
		want   bool
	}
	found := &orphan.Report{Sums: map[orphan.Place]orphan.Sum{{Holder: "c", Device: fsstats.Device{Major: 8}}: {Bytes: 1, Files: 1}}}
	cases := []struct {
		name   string
		report *orphan.Report
		steps  []step
	}{
		{"nothing moves", nil, []step{{0, 100 * mib, false}, {60, 101 * mib, false}, {3600, 100 * mib, false}}},
		{"it grows", nil, []step{{0, 200 * mib, false}, {1, 200 * mib, false}, {2, 200 * mib, true}}},
		{"it shrinks", nil, []step{{0, 10 * mib, false}, {2, 10 * mib, true}}},
		{"it grows and is owned a moment later: somebody was being measured", nil, []step{{0, 200 * mib, false}, {1, 100 * mib, false}, {2, 200 * mib, false}, {4, 200 * mib, true}}},
		{"something was found, and has stayed for long", found, []step{{60, 100 * mib, false}, {299, 100 * mib, false}, {300, 100 * mib, true}}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b := newOpenBook(nil, nil)
			began := time.Unix(1_000_000, 0)
			b.gaps, b.report = map[index.FS]int64{"fs": 100 * mib}, tc.report
			if tc.report != nil {
				b.searched = began
			}
			for _, s := range tc.steps {
				if got := b.due(began.Add(time.Duration(s.second)*time.Second), map[index.FS]int64{"fs": s.gap}); got != s.want {
					t.Errorf("after %d s with %d MiB: %v, want %v", s.second, s.gap/mib, got, s.want)
				}
			}
		})
	}
	b := newOpenBook(nil, nil)
	b.searched = time.Unix(1_000_000, 0)
	b.gaps = map[index.FS]int64{}
	for second, want := range map[int]bool{3: false, 9: false, 10: true} {
		b.moved = b.searched
		if got := b.due(b.searched.Add(time.Duration(second)*time.Second), map[index.FS]int64{"fs": 1 << 40}); got != want {
			t.Errorf("%d s after the last search: %v, want %v", second, got, want)
		}
	}
}

// TestADeviceNumberThatIsUsedAgain: what is found now is on the filesystem that has the
// number now.
func TestADeviceNumberThatIsUsedAgain(t *testing.T) {
	t.Parallel()
	known := map[index.FS]fsstats.Filesystem{}
	for second := range int64(20) { // by chance the last of two would be found in half of all tries
		known[index.FS(rune('a'+second))] = fsstats.Filesystem{Device: fsstats.Device{Major: 8}, MeasuredAt: time.Unix(second, 0)}
	}
	known["other"] = fsstats.Filesystem{Device: fsstats.Device{Major: 9}}
	got := newestOf(known)
	if want := (map[fsstats.Device]index.FS{{Major: 8}: "t", {Major: 9}: "other"}); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
