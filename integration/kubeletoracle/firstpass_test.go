package kubeletoracle

import (
	"slices"
	"testing"
	"testing/synctest"

	"k8s.io/kubernetes/pkg/kubelet/eviction"
	evictionapi "k8s.io/kubernetes/pkg/kubelet/eviction/api"

	"github.com/cleave-cri/cleave/engine"
)

// TestFirstPassDependsOnRoom shows what THR-23 leaves open. A threshold that
// somebody wrote for containerfs is overwritten in its place and counts so in
// the first pass already, unless others had to be added before it and Go had
// to move the list for that: then the first pass still goes by what was
// written. The engine takes the first for the rule.
func TestFirstPassDependsOnRoom(t *testing.T) {
	settings := engine.Settings{Hard: map[string]string{"containerfs.inodesFree": "100.0%"}}
	free, all := uint64(4_000_000), uint64(6_553_600)
	sc := scenario{Settings: settings, TransitionPeriod: interval, Steps: []step{{
		Layout:  &engine.Detected{},
		Summary: &engine.Summary{ContainerFS: &engine.FSStats{InodesFree: &free, Inodes: &all}},
	}}}
	if err := gates(&sc); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		fit  func([]evictionapi.Threshold) []evictionapi.Threshold
		want int
	}{
		{"room for more", func(l []evictionapi.Threshold) []evictionapi.Threshold { return slices.Grow(l, 4) }, 0},
		{"no room", func(l []evictionapi.Threshold) []evictionapi.Threshold { return slices.Clip(l) }, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			thresholds, err := eviction.ParseThresholdConfig(nil, settings.Hard, nil, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				k := newKubelet(t.Context(), &sc, tc.fit(thresholds))
				k.start(sc.Steps[0])
				synctest.Wait()
				if got := k.conditions(); len(got) != tc.want {
					t.Errorf("the kubelet reports %v, want %d conditions", got, tc.want)
				}
			})
		})
	}
}
