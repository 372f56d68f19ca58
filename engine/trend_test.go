package engine

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// filling is a node whose nodefs has so many MiB available, one sample every so
// many milliseconds.
func filling(t *testing.T, every int, available ...int64) (*node, Trend, Observations, time.Time) {
	t.Helper()
	n := newNode(t, "nodefs.available<10Gi").with(Cleave()).settled(Detected{ImageApart: true})
	var trend Trend
	var seen Observations
	now := start
	for i, v := range available {
		now = start.Add(time.Duration(i*every) * time.Millisecond)
		s := Summary{NodeFS: disk(v * mib).at(now)}
		seen = s.Observe()
		trend = trend.Add(seen, now)
		n.State, _ = n.Sync(n.State, Input{Now: now, Layout: &n.layout, Summary: &s})
	}
	return n, trend, seen, now
}

func TestRestByForecast(t *testing.T) {
	t.Parallel()
	const line = 10 * 1024
	for _, tc := range []struct {
		name      string
		every     int
		available []int64
		want      time.Duration
	}{
		{"nothing moves", 10_000, []int64{50_000, 50_000, 50_000}, LongestRest},
		{"first look", 10_000, []int64{50_000}, LongestRest},
		{"it gets better", 10_000, []int64{20_000, 50_000}, LongestRest},
		{"slow", 10_000, []int64{50_000, 49_990}, LongestRest},
		{"6 s away", 1000, []int64{line + 700, line + 600}, 3 * time.Second},
		{"a burst after calm counts", 1000, []int64{line + 2000, line + 2000, line + 2000, line + 1000}, 500 * time.Millisecond},
		{"no shorter than that", 100, []int64{line + 2000, line + 10}, ShortestRest},
		{"met", 1000, []int64{line + 100, line - 1}, time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n, trend, seen, now := filling(t, tc.every, tc.available...)
			if got := n.Rest(trend, n.State, seen, now); got != tc.want {
				t.Errorf("%s, want %s", got, tc.want)
			}
		})
	}
	soft := newNode(t, "", "nodefs.available<10Gi", "nodefs.available=1m").settled(Detected{})
	soft.disk(0, gib)
	if got := soft.Rest(nil, soft.State, nil, start.Add(59_700*time.Millisecond)); got != 300*time.Millisecond {
		t.Errorf("grace is over in 300 ms, rest %s", got)
	}
}

func TestComingByForecast(t *testing.T) {
	t.Parallel()
	const line = 10 * 1024
	steady := []int64{line + 900, line + 800, line + 700, line + 600, line + 500}
	burst := []int64{line + 900, line + 900, line + 900, line + 900, line + 500}
	for _, tc := range []struct {
		name      string
		available []int64
		horizon   time.Duration
		want      time.Duration
	}{
		{"within", steady, 5 * time.Second, 5 * time.Second},
		{"beyond", steady, 4999 * time.Millisecond, 0},
		{"one burst is no trend", burst, time.Hour, 0},
		{"too few to tell", steady[:4], time.Hour, 0},
		{"it is here", []int64{line, line - 1, line - 2, line - 3, line - 4}, time.Hour, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n, trend, seen, now := filling(t, 1000, tc.available...)
			got := n.Coming(trend, n.State, seen, now, tc.horizon)
			switch {
			case tc.want == 0 && len(got) > 0:
				t.Errorf("%+v", got)
			case tc.want > 0 && (len(got) != 1 || got[0].In != tc.want || len(got[0].Reclaim) == 0):
				t.Errorf("%+v, want in %s", got, tc.want)
			}
		})
	}
}

// What is remembered is what a record of it says, and a record has no monotonic clock.
func TestTrendIsAsInARecord(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for _, at := range []time.Time{now, {}} {
		got := Trend{}.Add(Observations{NodeFSAvailable: {Available: 1, Time: at}}, now)[NodeFSAvailable]
		if len(got) != 1 || got[0].At != now.Round(0) {
			t.Errorf("%v, want %v", got, now.Round(0))
		}
	}
}

func TestTrendForgetsAndBeginsAnew(t *testing.T) {
	t.Parallel()
	var trend Trend
	add := func(seconds int, v int64) {
		at := start.Add(time.Duration(seconds) * time.Second)
		trend = trend.Add(Observations{NodeFSAvailable: {Available: v, Time: at}}, at)
	}
	for i := range 20 {
		add(i, int64(i))
	}
	if got := trend[NodeFSAvailable]; len(got) != remembered || got[0].Available != 12 {
		t.Errorf("%v", got)
	}
	before := trend
	add(19, 99) // the same moment again
	if got := trend[NodeFSAvailable]; len(got) != remembered || got[7].Available != 19 {
		t.Errorf("%v", got)
	}
	add(-100, 5) // the clock was set back
	if got := trend[NodeFSAvailable]; len(got) != 1 || len(before[NodeFSAvailable]) != remembered {
		t.Errorf("%v", got)
	}
	trend = before.Add(Observations{NodeFSAvailable: {Available: 5, Capacity: 7, Time: start.Add(time.Minute)}}, start.Add(time.Minute))
	if got := trend[NodeFSAvailable]; len(got) != 1 {
		t.Errorf("another size, and the past still counts: %v", got)
	}
	if trend = trend.Add(Observations{}, start); len(trend) != 0 {
		t.Errorf("not seen and remembered: %v", trend)
	}
}

// TestForecastOnOldFigures_GAP28: images go once for what one look foresees, not
// again and again for as long as nobody measures anew.
func TestForecastOnOldFigures_GAP28(t *testing.T) {
	t.Parallel()
	const line = 10 * 1024
	n, _, _, now := filling(t, 1000, line+6*1024, line+5*1024, line+4*1024, line+3*1024, line+2*1024, line+1024)
	s := Summary{NodeFS: disk((line + 1024) * mib).at(now)}
	for _, later := range []time.Duration{0, time.Second, 30 * time.Second, 4 * time.Minute, time.Hour, 10 * time.Hour} {
		var d Decision
		n.State, d = n.Sync(n.State, Input{Now: now.Add(later), Layout: &n.layout, Summary: &s})
		if d.Outcome != Calm || len(d.Reclaim) > 0 || d.NeedBytes != nil {
			t.Errorf("%s later, same figures: %s, %v", later, d.Outcome, d.Reclaim)
		}
	}
	// A new figure does not revive a trend of ten hours ago.
	now = now.Add(10 * time.Hour)
	s = Summary{NodeFS: disk((line + 1023) * mib).at(now)}
	_, d := n.Sync(n.State, Input{Now: now, Layout: &n.layout, Summary: &s})
	if wantOutcome(t, d, Calm); len(d.Coming) > 0 {
		t.Errorf("%+v", d.Coming)
	}
}

// TestForecastEndsWithTheFill: a fill that was fast and has ended is not coming,
// whatever the middle of the speeds remembered is.
func TestForecastEndsWithTheFill(t *testing.T) {
	t.Parallel()
	n := newNode(t, "nodefs.available<10Gi").with(Cleave()).settled(Detected{ImageApart: true})
	var trend Trend
	for i, available := range []int64{20, 18, 16, 14, 12, 12} {
		now := start.Add(time.Duration(i) * time.Second)
		seen := Observations{NodeFSAvailable: {Available: available * gib, Capacity: 100 * gib, Time: now}}
		trend = trend.Add(seen, now)
		coming := n.Coming(trend, n.State, seen, now, time.Minute)
		if want := i == 4; len(coming) > 0 != want {
			t.Errorf("look %d: %+v of %v", i, coming, trend[NodeFSAvailable])
		}
	}
}

// TestForecastSurvivesAWrongDate: one figure of tomorrow is not taken, those
// after it are.
func TestForecastSurvivesAWrongDate(t *testing.T) {
	t.Parallel()
	var trend Trend
	n := newNode(t, "nodefs.available<10Gi").with(Cleave()).settled(Detected{ImageApart: true})
	for i := range 8 {
		now := start.Add(time.Duration(i) * time.Second)
		o := Observation{Available: int64(20-i) * gib, Capacity: 100 * gib, Time: now}
		if i == 1 {
			o.Time = now.Add(24 * time.Hour)
		}
		seen := Observations{NodeFSAvailable: o}
		trend = trend.Add(seen, now)
		coming := n.Coming(trend, n.State, seen, now, time.Minute)
		if want := i >= 5; len(coming) > 0 != want {
			t.Errorf("look %d: %+v of %v", i, coming, trend[NodeFSAvailable])
		}
	}
	// Where the clock was set back, it goes on from there.
	back := start.Add(-time.Hour)
	if trend = trend.Add(Observations{NodeFSAvailable: {Available: gib, Capacity: 100 * gib, Time: back}}, back); len(trend[NodeFSAvailable]) != 1 {
		t.Errorf("%v", trend)
	}
	ahead := Observations{NodeFSAvailable: {Available: 1, Capacity: 100 * gib, Time: start}}
	if got := trend.Add(ahead, back)[NodeFSAvailable]; len(got) != 1 || got[0].Available != gib {
		t.Errorf("a figure of a time to come was taken: %v", got)
	}
}

func TestPropertyRestIsAlwaysBounded(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		config := anyConfig(t)
		var state State
		var trend Trend
		for range rapid.IntRange(1, 6).Draw(t, "passes") {
			in := anyInput(t)
			seen := in.Summary.Observe()
			state, _ = config.Sync(state, in)
			trend = trend.Add(seen, in.Now)
			if rest := config.Rest(trend, state, seen, in.Now); rest < ShortestRest || rest > LongestRest {
				t.Fatalf("rest %s", rest)
			}
			for _, c := range config.Coming(trend, state, seen, in.Now, time.Minute) {
				if c.In < 0 || c.In > time.Minute || !c.Threshold.Hard() {
					t.Fatalf("%+v", c)
				}
			}
		}
	})
	if got := until(Threshold{Value: Value{Share: float32(math.NaN())}}, Observation{Available: 1, Capacity: 1}, 1); got != math.MaxInt64 {
		t.Errorf("NaN comes in %s", got)
	}
}
