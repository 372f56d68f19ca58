package kubeletoracle

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/kubernetes/pkg/kubelet/eviction"
	evictionapi "k8s.io/kubernetes/pkg/kubelet/eviction/api"

	"github.com/cleave-cri/cleave/engine"
)

// TestParser holds the reading of thresholds against the kubelet's own: what
// is an error and of which class, and what the rest comes to in bytes.
func TestParser(t *testing.T) {
	t.Parallel()
	d := dice{rand.New(rand.NewPCG(*seed, 7))}
	good, classes := 0, map[error]int{}
	for range 5 * *steps {
		s := d.texts()
		ours, err := engine.Parse(s)
		var enforce []string
		if s.EnforcePods {
			enforce = []string{"none", "pods"}
		}
		theirs, want := eviction.ParseThresholdConfig(enforce, s.Hard, s.Soft, s.SoftGrace, s.MinReclaim)
		if want != nil {
			class := classOf(want)
			if class == nil || !errors.Is(err, class) {
				t.Fatalf("%s: kubelet %v, engine %v", text(t, s), want, err)
			}
			classes[class]++
			continue
		}
		if err != nil {
			t.Fatalf("%s: the kubelet accepts it, the engine says %v", text(t, s), err)
		}
		good++
		var got, expected []string
		for _, o := range ours {
			got = append(got, describe(o))
		}
		for _, k := range theirs {
			expected = append(expected, describeKubelet(k))
		}
		slices.Sort(got)
		slices.Sort(expected)
		if !slices.Equal(got, expected) {
			t.Fatalf("%s: kubelet %v, engine %v", text(t, s), expected, got)
		}
	}
	t.Logf("%d accepted, refused %v", good, classes)
	if good < 100 || len(classes) < 9 {
		t.Errorf("%d accepted and %d classes of error: the texts no longer show much", good, len(classes))
	}
}

// capacities are where shares show their rounding.
var capacities = []int64{0, 1, 107374182400, 34359738368, 6553600, 1<<63 - 1, -1, 999999999999999}

func describe(t engine.Threshold) string {
	out := fmt.Sprintf("%s %s", t.Signal, t.Grace)
	for _, c := range capacities {
		v := t.Value.Of(c)
		out += " " + v.AsDec().String()
		if t.MinReclaim != nil {
			r := t.MinReclaim.Of(c)
			out += "+" + r.AsDec().String()
		}
	}
	return out
}

func describeKubelet(t evictionapi.Threshold) string {
	out := fmt.Sprintf("%s %s", t.Signal, t.GracePeriod)
	for _, c := range capacities {
		q := resource.NewQuantity(c, resource.BinarySI)
		out += " " + evictionapi.GetThresholdQuantity(t.Value, q).AsDec().String()
		if t.MinReclaim != nil {
			out += "+" + evictionapi.GetThresholdQuantity(*t.MinReclaim, q).AsDec().String()
		}
	}
	return out
}

// classOf is our class of one of the kubelet's errors, which have only text.
func classOf(err error) error {
	for fragment, class := range map[string]error{
		"unsupported eviction signal":    engine.ErrUnknownSignal,
		"strconv.ParseFloat":             engine.ErrBadPercentage,
		"must be >= 0%":                  engine.ErrNegativeShare,
		"must be <= 100%":                engine.ErrShareAbove100,
		"quantities must match":          engine.ErrBadQuantity,
		"unable to parse quantity":       engine.ErrBadQuantity,
		"must be positive: ":             engine.ErrNotPositive,
		"time: ":                         engine.ErrBadDuration,
		"invalid eviction grace period":  engine.ErrNegative,
		"negative eviction minimum":      engine.ErrNegative,
		"grace period must be specified": engine.ErrNoGracePeriod,
	} {
		if strings.Contains(err.Error(), fragment) {
			return class
		}
	}
	return nil
}

// texts are settings, most of them right.
func (d dice) texts() engine.Settings {
	value := func() string {
		if d.chance(85) {
			return pick(d, "10%", "5%", "10Gi", "500Mi", "1", "0.5", "15%", "99.9%", "33.333%", "1e9", "100M", "12345678901234567890", "1n", "7e-1%")
		}
		return pick(d, "", "%", "%%", "5%%", "+5%", "-1%", "-0%", "0%", "100%", "0.0%", "100.0%", "100.1%", "101%", "NaN%", "Inf%", "-Inf%", "1e39%", "1e-50%",
			"0x1p3%", "0x_1p3%", "1_0%", " 5%", "5 %", "abc", "-1Mi", "0", "-0", "0Gi", "1e1000", "1Gi ", "1gi", ".5", "5.", "1E3", "1e", "--1", "9223372036854775808", "200%")
	}
	grace := func() string {
		if d.chance(85) {
			return pick(d, "30s", "1m30s", "0", "0s", "1h", "1.5s")
		}
		return pick(d, "", "30", "-1s", "-0s", "1d", "abc", "1s ", "9999999h")
	}
	signal := func() string {
		if d.chance(97) {
			return string(pick(d, engine.Signals()...))
		}
		return pick(d, "", "nodefs", "NodeFs.available", "nodefs.available ", "memory")
	}
	s := engine.Settings{Hard: map[string]string{}, Soft: map[string]string{}, SoftGrace: map[string]string{}, MinReclaim: map[string]string{}, EnforcePods: d.chance(50)}
	for range d.IntN(4) {
		s.Hard[signal()] = value()
	}
	for range d.IntN(3) {
		s.Soft[signal()] = value()
	}
	for key := range maps.Keys(s.Soft) {
		if d.chance(95) {
			s.SoftGrace[key] = grace()
		}
	}
	for range d.IntN(2) {
		s.MinReclaim[signal()] = value()
	}
	return s
}
