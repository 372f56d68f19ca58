package engine

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
)

const (
	gib = int64(1) << 30
	mib = int64(1) << 20
)

func q(text string) *resource.Quantity {
	v := resource.MustParse(text)
	return &v
}

func TestSIG1_NineSignals(t *testing.T) {
	t.Parallel()
	want := []Signal{
		"memory.available", "allocatableMemory.available", "nodefs.available", "containerfs.available", "imagefs.available",
		"nodefs.inodesFree", "containerfs.inodesFree", "imagefs.inodesFree", "pid.available",
	}
	if diff := cmp.Diff(want, Signals()); diff != "" {
		t.Error(diff)
	}
	for _, s := range []Signal{"", "nodefs", "NodeFS.available", "nodefs.inodesfree", "disk.available"} {
		if s.Valid() || s.Resource() != "" || s.Condition() != "" {
			t.Errorf("%q passes for a signal", s)
		}
	}
}

func TestSIG2_OnlyLessThan(t *testing.T) {
	t.Parallel()
	for _, signal := range Signals() {
		th := Threshold{Signal: signal, Value: Value{Quantity: q("10")}}
		for available, want := range map[int64]bool{9: true, 10: false, 11: false} {
			if got := th.met(Observation{Available: available, Capacity: 100}, false); got != want {
				t.Errorf("%s with %d available: met is %t", th, available, got)
			}
		}
	}
}

func TestSIG3_NobodyCanRequestInodes(t *testing.T) {
	t.Parallel()
	pod := Pod{Containers: []Container{{Requests: Amounts{EphemeralStorage: q("1Gi"), Memory: q("1Gi")}}}, Overhead: Amounts{EphemeralStorage: q("1Gi")}}
	for _, r := range []Resource{Inodes, PIDs} {
		if got := pod.Request(r); !got.IsZero() {
			t.Errorf("request of %s is %s", r, &got)
		}
	}
}

func TestCON1_OneConditionForAllDisks(t *testing.T) {
	t.Parallel()
	want := map[Condition]int{DiskPressure: 6, MemoryPressure: 2, PIDPressure: 1}
	got := map[Condition]int{}
	for _, s := range Signals() {
		got[s.Condition()]++
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTHR1_Pairs(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, text, separator string
		want                  map[string]string
	}{
		{"last value counts", "nodefs.available<10%,nodefs.available<5%", "<", map[string]string{"nodefs.available": "5%"}},
		{"blanks", " nodefs.available < 10% , imagefs.available<15%", "<", map[string]string{"nodefs.available": "10%", "imagefs.available": "15%"}},
		{"empty pairs", ",,nodefs.available=1m,", "=", map[string]string{"nodefs.available": "1m"}},
		{"nothing", "", "<", map[string]string{}},
		{"second separator", "a=b=c", "=", map[string]string{"a": "b=c"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := ParsePairs(tc.text, tc.separator)
			if diff := cmp.Diff(tc.want, got); err != nil || diff != "" {
				t.Errorf("%v\n%s", err, diff)
			}
		})
	}
	if _, err := ParsePairs("nodefs.available<10%,imagefs.available", "<"); err == nil || !strings.Contains(err.Error(), `"imagefs.available"`) {
		t.Errorf("a pair without separator: %v", err)
	}
}

// parse reads one hard threshold.
func parse(t *testing.T, text string) (*Threshold, error) {
	t.Helper()
	list, err := Parse(Settings{Hard: map[string]string{"nodefs.available": text}})
	if err != nil || len(list) == 0 {
		return nil, err
	}
	return &list[0], nil
}

func TestTHR_ValueGrammar(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		text string
		err  error
		// of is the amount at a capacity of 1000.
		of string
	}{
		{"THR-4: all trailing signs go", "5%%", nil, "50"},
		{"THR-4: plus", "+5%", nil, "50"},
		{"THR-4: exponent", "5e0%", nil, "50"},
		{"THR-4: hex; of 8 % in 32 bits there are 79, THR-8", "0x1p3%", nil, "79"},
		{"THR-4: nothing before the sign", "%", ErrBadPercentage, ""},
		{"THR-4: blank before", " 5%", ErrBadPercentage, ""},
		{"THR-4: blank between", "5 %", ErrBadPercentage, ""},
		{"THR-4: too large for 32 bits", "1e39%", ErrBadPercentage, ""},
		{"THR-5: 0% is no threshold", "0%", nil, ""},
		{"THR-5: 100% is no threshold", "100%", nil, ""},
		{"THR-6: other spelling of 0", "0.0%", nil, "0"},
		{"THR-6: other spelling of 100", "100.0%", nil, "1000"},
		{"THR-6: below 0", "-1%", ErrNegativeShare, ""},
		{"THR-6: above 100", "101%", ErrShareAbove100, ""},
		{"THR-6: infinite", "Inf%", ErrShareAbove100, ""},
		{"THR-6: NaN passes, and is far below anything", "NaN%", nil, "-9223372036854775808"},
		{"THR-7: quantity", "100Mi", nil, "104857600"},
		{"THR-7: half a byte", "0.5", nil, "0.5"},
		{"THR-7: zero", "0", ErrNotPositive, ""},
		{"THR-7: negative", "-1Mi", ErrNotPositive, ""},
		{"THR-7: not a number", "abc", ErrBadQuantity, ""},
		{"THR-7: empty", "", ErrBadQuantity, ""},
		{"THR-7: an exponent that nobody can write out", "1e99999999999", ErrBadQuantity, ""},
		{"THR-7: a share of nothing that nobody can write out", "1e-100000000", ErrBadQuantity, ""},
		{"THR-7: plus and zeros do not hide it", "9E+00999999999", ErrBadQuantity, ""},
		{"THR-9: 0 does not switch off", "0Gi", ErrNotPositive, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := parse(t, tc.text)
			if !errors.Is(err, tc.err) {
				t.Fatalf("error %v, want %v", err, tc.err)
			}
			if err != nil {
				var at *SettingError
				if !errors.As(err, &at) || at.Setting != "evictionHard" || at.Signal != "nodefs.available" || at.Text != tc.text {
					t.Errorf("%v does not say where", err)
				}
				return
			}
			if got == nil {
				if tc.of != "" {
					t.Errorf("no threshold, want %s", tc.of)
				}
				return
			}
			if of := got.Value.Of(1000); of.AsDec().String() != tc.of {
				t.Errorf("comes to %s, want %q", of.AsDec(), tc.of)
			}
		})
	}
}

func TestTHR6_NotANumberIsNeverMet(t *testing.T) {
	t.Parallel()
	nan, err := parse(t, "NaN%")
	if err != nil {
		t.Fatal(err)
	}
	full, err := parse(t, "100.0%")
	if err != nil {
		t.Fatal(err)
	}
	for available, fullMet := range map[int64]bool{0: true, 999: true, 1000: false} {
		o := Observation{Available: available, Capacity: 1000}
		if nan.met(o, false) {
			t.Errorf("NaN%% is met with %d available", available)
		}
		if got := full.met(o, false); got != fullMet {
			t.Errorf("100.0%% with %d of 1000 available: met is %t", available, got)
		}
	}
}

func TestTHR8_SharesHave32Bits(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		text           string
		capacity, want int64
	}{
		{"10%", 107374182400, 10737418400},
		{"15%", 214748364800, 32212256000},
		{"1%", 107374182400, 1073741800},
		{"5%", 6553600, 327680},
		{"5%", 34359738368, 1717986944},
	} {
		th, err := parse(t, tc.text)
		if err != nil {
			t.Fatal(err)
		}
		if got := th.Value.Of(tc.capacity); got.Value() != tc.want {
			t.Errorf("%s of %d is %s, want %d", tc.text, tc.capacity, &got, tc.want)
		}
	}
	for f, want := range map[float64]int64{math.NaN(): math.MinInt64, math.Inf(1): math.MinInt64, 1e300: math.MinInt64, -1.9: -1, 1.9: 1} {
		if got := truncate(f); got != want {
			t.Errorf("%g is truncated to %d, want %d", f, got, want)
		}
	}
}

func TestTHR2_UnknownSignalInAnySetting(t *testing.T) {
	t.Parallel()
	bad := map[string]string{"disk.available": "1s"}
	_, err := Parse(Settings{Hard: bad, Soft: bad, SoftGrace: bad, MinReclaim: bad})
	if !errors.Is(err, ErrUnknownSignal) {
		t.Fatalf("got %v", err)
	}
	for _, setting := range []string{"evictionHard", "evictionSoft", "evictionSoftGracePeriod", "evictionMinimumReclaim"} {
		if want := setting + `["disk.available"]: "1s" is no such signal`; !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %s", err, want)
		}
	}
}

func TestTHR10_SoftNeedsGrace(t *testing.T) {
	t.Parallel()
	soft := map[string]string{"nodefs.available": "10%"}
	for _, tc := range []struct {
		name, grace string
		err         error
		want        time.Duration
	}{
		{"with unit", "1m30s", nil, 90 * time.Second},
		{"0 alone", "0", nil, 0},
		{"no unit", "30", ErrBadDuration, 0},
		{"negative", "-1s", ErrNegative, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := Parse(Settings{Soft: soft, SoftGrace: map[string]string{"nodefs.available": tc.grace}})
			if !errors.Is(err, tc.err) || errors.Is(err, ErrNoGracePeriod) {
				t.Fatalf("error %v, want %v", err, tc.err)
			}
			if err == nil && got[0].Grace != tc.want {
				t.Errorf("grace %s, want %s", got[0].Grace, tc.want)
			}
		})
	}
	if _, err := Parse(Settings{Soft: soft}); !errors.Is(err, ErrNoGracePeriod) {
		t.Errorf("no grace at all: %v", err)
	}
	if _, err := Parse(Settings{Soft: soft, SoftGrace: map[string]string{"imagefs.available": "1m"}}); !errors.Is(err, ErrNoGracePeriod) {
		t.Errorf("grace of another signal: %v", err)
	}
	if got, err := Parse(Settings{SoftGrace: map[string]string{"imagefs.available": "1m"}}); err != nil || len(got) != 0 {
		t.Errorf("grace without a threshold: %v, %v", got, err)
	}
	if _, err := Parse(Settings{Soft: map[string]string{"nodefs.available": "0%"}}); err != nil {
		t.Errorf("a soft threshold that is none asks for grace: %v", err)
	}
}

func TestTHR11_ZeroGraceIsHard(t *testing.T) {
	t.Parallel()
	got, err := Parse(Settings{Soft: map[string]string{"nodefs.available": "10%"}, SoftGrace: map[string]string{"nodefs.available": "0s"}})
	if err != nil || len(got) != 1 || !got[0].Hard() {
		t.Errorf("%v, %v", got, err)
	}
}

func TestTHR12_MinReclaim(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]error{"0": nil, "500Mi": nil, "200%": nil, "0%": ErrNotPositive, "-1%": ErrNotPositive, "-1": ErrNegative, "x": ErrBadQuantity, "x%": ErrBadPercentage} {
		if _, err := Parse(Settings{MinReclaim: map[string]string{"nodefs.available": text}}); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", text, err, want)
		}
	}
	got, err := Parse(Settings{
		Hard: map[string]string{"nodefs.available": "10Gi"}, Soft: map[string]string{"nodefs.available": "20Gi"},
		SoftGrace: map[string]string{"nodefs.available": "1m"}, MinReclaim: map[string]string{"nodefs.available": "500Mi"},
	})
	if err != nil || len(got) != 2 || got[0].MinReclaim == nil || got[1].MinReclaim == nil {
		t.Fatalf("%v, %v", got, err)
	}
	for available, want := range map[int64]bool{11261706239: true, 11261706240: false} {
		if met := got[0].met(Observation{Available: available, Capacity: 100 * gib}, true); met != want {
			t.Errorf("%d available: still to resolve is %t", available, met)
		}
	}
	double := Threshold{Value: Value{Quantity: q("1")}, MinReclaim: &Value{Share: 2}}
	if double.met(Observation{Available: 201, Capacity: 100}, true) || !double.met(Observation{Available: 200, Capacity: 100}, true) {
		t.Error("a minimum reclaim of 200% is not one of twice the capacity")
	}
}

func TestTHR13_OneOfEachInAStatedOrder(t *testing.T) {
	t.Parallel()
	s := Settings{
		Hard:      map[string]string{"pid.available": "100", "imagefs.available": "15%", "nodefs.available": "10%", "memory.available": "100Mi"},
		Soft:      map[string]string{"nodefs.available": "20%", "memory.available": "200Mi"},
		SoftGrace: map[string]string{"nodefs.available": "1m", "memory.available": "1m"},
	}
	want := "memory.available < 100Mi; memory.available < 200Mi for 1m0s; nodefs.available < 10%; nodefs.available < 20% for 1m0s; imagefs.available < 15%; pid.available < 100"
	for range 50 { // maps have another order each time
		list, err := Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, th := range list {
			got = append(got, th.String())
		}
		if strings.Join(got, "; ") != want {
			t.Fatalf("got  %s\nwant %s", strings.Join(got, "; "), want)
		}
	}
}

func TestTHR19_AllocatableMemory(t *testing.T) {
	t.Parallel()
	s := Settings{
		Hard: map[string]string{"memory.available": "100Mi", "nodefs.available": "10%"}, Soft: map[string]string{"memory.available": "1Gi"},
		SoftGrace: map[string]string{"memory.available": "1m"}, MinReclaim: map[string]string{"memory.available": "1Mi"}, EnforcePods: true,
	}
	list, err := Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	var found []Threshold
	for _, th := range list {
		if th.Signal == AllocatableMemoryAvailable {
			found = append(found, th)
		}
	}
	if len(found) != 1 || found[0].Value.String() != "100Mi" || !found[0].Hard() || found[0].MinReclaim == nil {
		t.Errorf("got %v", found)
	}
	s.EnforcePods = false
	if list, err = Parse(s); err != nil || len(list) != 3 {
		t.Errorf("without enforcement: %v, %v", list, err)
	}
}

// FuzzParse looks for texts that end the program, or that are neither an error
// nor a usable threshold.
func FuzzParse(f *testing.F) {
	for _, text := range []string{"10%", "5%%", "0%", "NaN%", "-Inf%", "0x1p-2%", "10Gi", "0.5", "1e1000", "12345678901234567890Ei", "-0", ""} {
		f.Add("nodefs.available", text, "30s", text)
	}
	f.Fuzz(func(t *testing.T, signal, value, grace, reclaim string) {
		s := Settings{
			Hard: map[string]string{signal: value}, Soft: map[string]string{signal: value},
			SoftGrace: map[string]string{signal: grace}, MinReclaim: map[string]string{signal: reclaim}, EnforcePods: true,
		}
		list, err := Parse(s)
		if err != nil {
			if list != nil {
				t.Errorf("both %v and %v", list, err)
			}
			var at *SettingError
			if !errors.As(err, &at) {
				t.Errorf("%v does not say where", err)
			}
			return
		}
		for _, th := range list {
			if !th.Signal.Valid() || th.Grace < 0 || !th.Same(th) && th.Value.Share == th.Value.Share {
				t.Errorf("unusable: %+v", th)
			}
			for _, o := range []Observation{{}, {Available: -1, Capacity: math.MaxInt64}, {Available: math.MinInt64, Capacity: math.MinInt64}, {Available: gib, Capacity: 2 * gib}} {
				if th.met(o, false) && th.MinReclaim != nil && th.MinReclaim.Quantity != nil && !th.met(o, true) {
					t.Errorf("%v is met at %+v, but not with its minimum reclaim", th, o)
				}
			}
		}
	})
}
