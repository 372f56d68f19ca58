package garbage

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLOG3_LOG4_WhenALogIsRotated(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name        string
		max, length int64
		want        bool
	}{
		{"LOG-4: a byte short", 10485760, 10485759, false},
		{"LOG-4: at the maximum", 10485760, 10485760, true},
		{"LOG-3: always", 0, 0, true},
		{"LOG-3: never", -1, 1 << 40, false},
	} {
		if got := (LogPolicy{MaxSizeBytes: tc.max}).Due(tc.length); got != tc.want {
			t.Errorf("%s: due is %t", tc.name, got)
		}
	}
}

func TestLOG6_LOG7_LOG8_LOG10_LOG11_Rotation(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		max    int
		others []string
		want   Rotation
	}{
		{"LOG-6: half-written and already compressed ones", 5, []string{"0.log.2.tmp", "0.log.1", "0.log.1.gz", "0.log.3"}, Rotation{
			Stale: []string{"0.log.2.tmp", "0.log.1"}, Excess: []string{}, Compress: []string{"0.log.3"},
		}},
		{"LOG-7: four rotated of five, LOG-10: steady state", 5, []string{"0.log.4", "0.log.1.gz", "0.log.3.gz", "0.log.2.gz"}, Rotation{
			Excess: []string{"0.log.1.gz"}, Compress: []string{"0.log.4"},
		}},
		{"LOG-10: two files, nothing is ever compressed", 2, []string{"0.log.1"}, Rotation{Excess: []string{"0.log.1"}}},
		{"LOG-11, LOG-8: compression stands before the log is renamed", 5, []string{"0.log.1", "0.log.2"}, Rotation{Excess: []string{}, Compress: []string{"0.log.1", "0.log.2"}}},
		{"LOG-14: after the clock went back the later file goes first", 3, []string{"0.log.20261025-015000", "0.log.20261025-011000"}, Rotation{
			Excess: []string{"0.log.20261025-011000"}, Compress: []string{"0.log.20261025-015000"},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tc.want, LogPolicy{MaxFiles: tc.max}.Plan(tc.others)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestLOG16_LogsOfARemovedContainer(t *testing.T) {
	t.Parallel()
	names := []string{"0.log", "0.log.1", "0.log.2.gz", "1.log", "10.log"}
	if diff := cmp.Diff(names[:3], LogPolicy{}.Removed("0.log", names)); diff != "" {
		t.Error(diff)
	}
	if got := (LogPolicy{MaxSizeBytes: -1}).Removed("0.log", names); got != nil {
		t.Errorf("LOG-3: with rotation off %v goes", got)
	}
}

func TestRotatedLogs_GAP1(t *testing.T) {
	t.Parallel()
	files := []LogFile{{"b", 5, at("10:02:00")}, {"a", 3, at("10:01:00")}, {"d", 9, at("10:03:00")}, {"c", 4, at("10:02:00")}}
	for need, want := range map[int64]int{-1: 0, 0: 0, 1: 1, 3: 1, 4: 2, 8: 2, 9: 3, 12: 3, 13: 4, 1000: 4} {
		got := RotatedLogs(files, need)
		if len(got) != want {
			t.Errorf("need %d: %v", need, got)
		}
		for i, f := range got {
			if f.Path != string(rune('a'+i)) {
				t.Errorf("need %d: order %v", need, got)
			}
		}
		slices.Reverse(files) // their order does not matter
	}
}
