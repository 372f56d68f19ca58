package garbage

import (
	"slices"
	"strings"
	"testing"
	"time"

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

func TestOptionRenameFirst_GAP34(t *testing.T) {
	t.Parallel()
	others := []string{"0.log.1", "0.log.2", "0.log.3", "0.log.4"}
	for _, first := range []bool{false, true} {
		got := LogPolicy{MaxSizeBytes: 1, MaxFiles: 5, RenameFirst: first}.Plan(others)
		want := Rotation{RenameFirst: first, Excess: []string{"0.log.1"}, Compress: []string{"0.log.2", "0.log.3", "0.log.4"}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
}

func TestLogBudget_GAP36(t *testing.T) {
	t.Parallel()
	pod := func(uid string, written int64, rotated ...int64) PodLogs {
		p := PodLogs{UID: uid, WrittenBytes: written}
		for i, bytes := range rotated {
			p.Rotated = append(p.Rotated, LogFile{Path: uid + string(rune('1'+i)), Bytes: bytes, WrittenAt: at("12:00:00").Add(time.Duration(i) * time.Minute)})
		}
		return p
	}
	for _, tc := range []struct {
		name   string
		pods   []PodLogs
		budget int64
		want   string
	}{
		{"all fit", []PodLogs{pod("a", 10, 10), pod("b", 10)}, 30, ""},
		{"the oldest of the largest go", []PodLogs{pod("a", 10, 20, 20, 20), pod("b", 10)}, 50, "a1 a2"},
		{"what one does not need is shared", []PodLogs{pod("a", 0, 30, 30), pod("b", 0, 30, 30), pod("c", 10)}, 90, "a1 b1"},
		{"a small one loses nothing", []PodLogs{pod("a", 0, 50, 50), pod("b", 0, 1, 1)}, 60, "a1"},
		{"what is written to stays", []PodLogs{pod("a", 100), pod("b", 100)}, 10, ""},
		{"no budget", []PodLogs{pod("a", 1, 1)}, 0, "a1"},
	} {
		var got []string
		for _, f := range LogBudget(tc.pods, tc.budget) {
			got = append(got, f.Path)
		}
		if s := strings.Join(got, " "); s != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, s, tc.want)
		}
	}
}
