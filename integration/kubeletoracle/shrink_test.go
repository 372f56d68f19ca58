package kubeletoracle

import (
	"encoding/json"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/engine"
)

// available prints as the kubelet's messages do: bytes in powers of two, the
// rest in powers of ten.
func available(e *engine.Eviction, what engine.Resource) string {
	format := resource.BinarySI
	if what == engine.Inodes || what == engine.PIDs {
		format = resource.DecimalSI
	}
	return resource.NewQuantity(e.Available, format).String()
}

// shrink cuts a scenario down while kubelet and engine still differ in it.
func shrink(t *testing.T, sc scenario, difference string) (scenario, string) {
	t.Helper()
	for again := true; again; {
		again = false
		for _, cut := range cuts(&sc) {
			small := clone(t, &sc)
			cut(&small)
			// What the kubelet picks is partly random: give it some goes.
			for range 3 {
				if d := play(t, &small, &tally{}); d != "" {
					sc, difference, again = small, d, true
					break
				}
			}
			if again {
				break
			}
		}
	}
	return sc, difference
}

func clone(t *testing.T, sc *scenario) scenario {
	t.Helper()
	text, err := json.Marshal(sc)
	if err != nil {
		t.Fatal(err)
	}
	var out scenario
	if err := json.Unmarshal(text, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// text is a value without all that it leaves unsaid.
func text(t *testing.T, v any) string {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var tree any
	if err := json.Unmarshal(raw, &tree); err != nil {
		t.Fatal(err)
	}
	var said func(any) (any, bool)
	said = func(v any) (any, bool) {
		switch v := v.(type) {
		case nil:
			return nil, false
		case bool:
			return v, v
		case string:
			return v, v != ""
		case []any:
			for i := range v {
				v[i], _ = said(v[i])
			}
			return v, len(v) > 0
		case map[string]any:
			for key, value := range v {
				if left, ok := said(value); ok {
					v[key] = left
				} else {
					delete(v, key)
				}
			}
			return v, len(v) > 0
		default:
			return v, true
		}
	}
	tree, _ = said(tree)
	out, err := json.MarshalIndent(tree, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// cuts lists what could be left out of a scenario, the most first.
func cuts(sc *scenario) []func(*scenario) {
	var out []func(*scenario)
	for n := len(sc.Steps) / 2; n > 0; n /= 2 {
		for i := 0; i+n <= len(sc.Steps); i += n {
			out = append(out, func(s *scenario) { s.Steps = slices.Delete(s.Steps, i, i+n) })
		}
	}
	for i, st := range sc.Steps {
		if !st.Newcomer.Pod.Static {
			out = append(out, func(s *scenario) { s.Steps[i].Newcomer = newcomer{Pod: engine.Pod{Static: true}} })
		}
		for n := (len(st.Pods) + 1) / 2; n > 0; n /= 2 {
			for j := 0; j+n <= len(st.Pods); j += n {
				out = append(out, func(s *scenario) { s.Steps[i].Pods = slices.Delete(s.Steps[i].Pods, j, j+n) })
			}
			if n == 1 {
				break
			}
		}
		if st.Summary != nil {
			for _, forget := range []func(*engine.Summary) bool{
				func(f *engine.Summary) bool { had := f.Memory != nil; f.Memory = nil; return had },
				func(f *engine.Summary) bool { had := f.AllocatableMemory != nil; f.AllocatableMemory = nil; return had },
				func(f *engine.Summary) bool { had := f.Processes != nil; f.Processes = nil; return had },
				func(f *engine.Summary) bool { had := f.NodeFS != nil; f.NodeFS = nil; return had },
				func(f *engine.Summary) bool { had := f.ImageFS != nil; f.ImageFS = nil; return had },
				func(f *engine.Summary) bool { had := f.ContainerFS != nil; f.ContainerFS = nil; return had },
			} {
				if probe := *st.Summary; forget(&probe) {
					out = append(out, func(s *scenario) { forget(s.Steps[i].Summary) })
				}
			}
			for j := range st.Summary.Pods {
				out = append(out, func(s *scenario) { s.Steps[i].Summary.Pods = slices.Delete(s.Steps[i].Summary.Pods, j, j+1) })
			}
		}
		for j := range st.Pods {
			if len(st.Pods[j].Volumes) > 0 {
				out = append(out, func(s *scenario) { s.Steps[i].Pods[j].Volumes = nil })
			}
			if len(st.Pods[j].InitContainers) > 0 {
				out = append(out, func(s *scenario) { s.Steps[i].Pods[j].InitContainers = nil })
			}
			for c := range st.Pods[j].Containers {
				out = append(out, func(s *scenario) {
					s.Steps[i].Pods[j].Containers = slices.Delete(s.Steps[i].Pods[j].Containers, c, c+1)
				})
			}
		}
	}
	for _, setting := range []func(*scenario) map[string]string{
		func(s *scenario) map[string]string { return s.Settings.Hard },
		func(s *scenario) map[string]string { return s.Settings.Soft },
		func(s *scenario) map[string]string { return s.Settings.MinReclaim },
	} {
		for key := range setting(sc) {
			out = append(out, func(s *scenario) { delete(setting(s), key) })
		}
	}
	return out
}
