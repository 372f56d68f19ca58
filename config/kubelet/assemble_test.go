package kubelet

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// written are files in memory.
type written struct {
	base   string
	folder []string
}

func (w written) config(name string) (file, error) {
	return file{source: Source{Kind: File, Path: name}, data: []byte(w.base)}, nil
}

func (w written) dropIns(folder string) ([]file, error) {
	var out []file
	for i, text := range w.folder {
		out = append(out, file{source: Source{Kind: DropIn, Path: fmt.Sprintf("%s/%d.conf", folder, i)}, data: []byte(text)})
	}
	return out, nil
}

const head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"

func TestAssembleEvictionHard(t *testing.T) {
	t.Parallel()
	all := defaultHard()
	cases := []struct {
		name  string
		args  []string
		files written
		want  map[string]string
	}{
		{"no file, no defaults (THR-14)", nil, written{}, nil},
		{"drop-ins alone have no defaults either (THR-14)", []string{"--config-dir=/d"}, written{folder: []string{head}}, nil},
		{"a file that says nothing", []string{"--config=/c"}, written{base: head}, all},
		{"a file that says null", []string{"--config=/c"}, written{base: head + "evictionHard:\n"}, all},
		{"a file that says nothing is wanted (THR-15)", []string{"--config=/c"}, written{base: head + "evictionHard: {}\n"}, map[string]string{}},
		{"one signal disables the rest (THR-15)", []string{"--config=/c"}, written{base: head + "evictionHard: {memory.available: 500Mi}\n"},
			map[string]string{"memory.available": "500Mi"}},
		{"merging adds the rest (THR-15, THR-16)", []string{"--config=/c"},
			written{base: head + "mergeDefaultEvictionSettings: true\nevictionHard: {imagefs.available: 0%}\n"},
			map[string]string{"memory.available": "100Mi", "nodefs.available": "10%", "nodefs.inodesFree": "5%", "imagefs.available": "0%", "imagefs.inodesFree": "5%"}},
		{"a drop-in overlays the defaults (THR-17)", []string{"--config=/c", "--config-dir=/d"},
			written{base: head, folder: []string{head + "evictionHard: {memory.available: 500Mi, nodefs.available: null}\n"}},
			map[string]string{"memory.available": "500Mi", "nodefs.inodesFree": "5%", "imagefs.available": "15%", "imagefs.inodesFree": "5%"}},
		{"merging in a drop-in comes too late (THR-17)", []string{"--config=/c", "--config-dir=/d"},
			written{base: head + "evictionHard: {memory.available: 1Gi}\n", folder: []string{head + "mergeDefaultEvictionSettings: true\n"}},
			map[string]string{"memory.available": "1Gi"}},
		{"the flag replaces all (THR-18)", []string{"--config=/c", "--eviction-hard=nodefs.available<1Gi", "--eviction-hard=imagefs.available<2Gi"}, written{base: head},
			map[string]string{"nodefs.available": "1Gi", "imagefs.available": "2Gi"}},
		{"an empty flag removes all (THR-18)", []string{"--config=/c", "--eviction-hard="}, written{base: head}, map[string]string{}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s, err := assemble(tc.args, tc.files)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, s.EvictionHard.Values()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestAssembleOrigins: whoever reads a finding has to know which line to change.
func TestAssembleOrigins(t *testing.T) {
	t.Parallel()
	s, err := assemble([]string{"--config", "/etc/k.yaml", "--config_dir=/d", "--image-gc-high-threshold", "70", "--feature-gates=A=true", "--unheard-of", "x"}, written{
		base:   head + "imageGCLowThresholdPercent: 60\nevictionHard:\n  nodefs.available: 20%\n  imagefs.available: 5%\nfeatureGates: {B: true}\npodLogsDir: logs\n",
		folder: []string{head + "evictionHard:\n  imagefs.available: 7%\n", `{"kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1",` + "\n" + `"cgroupDriver": "systemd"}`},
	})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{
		"high":    s.ImageGCHighPercent.From.String(),
		"low":     s.ImageGCLowPercent.From.String(),
		"nodefs":  s.EvictionHard.Entries["nodefs.available"].From.String(),
		"imagefs": s.EvictionHard.Entries["imagefs.available"].From.String(),
		"gate A":  s.FeatureGates.Entries["A"].From.String(),
		"gate B":  s.FeatureGates.Entries["B"].From.String(),
		"driver":  s.CgroupDriver.From.String(),
		"age":     s.ImageMinimumGCAge.From.String(),
		"soft":    s.EvictionSoft.From.String(),
		"logs":    s.PodLogsDir.From.String() + " " + s.PodLogsDir.Value,
		"unknown": fmt.Sprint(s.UnknownFlags),
	}
	want := map[string]string{
		"high": "flag --image-gc-high-threshold", "low": "/etc/k.yaml:3", "nodefs": "/etc/k.yaml:5", "imagefs": "/d/0.conf:4",
		"gate A": "flag --feature-gates", "gate B": "/etc/k.yaml:7", "driver": "/d/1.conf:2", "age": "the kubelet's default", "soft": "not set",
		"logs": "/etc/k.yaml:8 /etc/logs", "unknown": "[--unheard-of]",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestAssembleDefaults(t *testing.T) {
	t.Parallel()
	s, err := assemble(nil, written{})
	if err != nil {
		t.Fatal(err)
	}
	standard := func(v int32) Setting[int32] { return Setting[int32]{v, Origin{Kind: Default}} }
	for name, pair := range map[string][2]Setting[int32]{
		"dead containers": {standard(-1), s.MaxDeadContainers}, "dead per container": {standard(1), s.MaxDeadPerContainer},
		"high": {standard(85), s.ImageGCHighPercent}, "low": {standard(80), s.ImageGCLowPercent}, "log files": {standard(5), s.ContainerLogMaxFiles},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: got %+v, want %+v", name, pair[1], pair[0])
		}
	}
	if s.EvictionPressureTransition.Value != 5*time.Minute || s.RootDir.Value != "/var/lib/kubelet" || !s.LocalStorageCapacityIsolation.Value {
		t.Errorf("got %+v", s)
	}
}

// TestFaults: what the kubelet would refuse says where.
func TestFaults(t *testing.T) {
	t.Parallel()
	deep := strings.Repeat("[", 20_000)
	bomb := "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
	for c := 'b'; c < 'j'; c++ {
		bomb += fmt.Sprintf("%c: &%c [%s]\n", c, c, strings.TrimSuffix(strings.Repeat("*"+string(c-1)+",", 10), ","))
	}
	cases := []struct {
		name  string
		args  []string
		files written
		want  string
	}{
		{"empty", nil, written{base: ""}, "/c: the file is empty"},
		{"no kind", nil, written{base: "apiVersion: kubelet.config.k8s.io/v1beta1\n"}, "/c: no kind"},
		{"other kind", nil, written{base: "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: Pod\n"}, `/c:2: kind: is "Pod"`},
		{"not YAML", nil, written{base: head + "a: [\n"}, "/c:3: not YAML"},
		{"not JSON", nil, written{base: "{\n\"a\": 1,\n}"}, "not JSON"},
		{"a list", nil, written{base: "- a\n"}, "/c:1: the file must hold a map"},
		{"wrong type", nil, written{base: head + "evictionHard:\n  nodefs.available: 10\n"}, `/c:4: evictionHard.nodefs.available: must be a string, not "10"`},
		{"wrong duration", nil, written{base: head + "imageMinimumGCAge: 5\n"}, "/c:3: imageMinimumGCAge: must be a duration"},
		{"too large", nil, written{base: head + "imageGCHighThresholdPercent: 3000000000\n"}, "/c:3: imageGCHighThresholdPercent: \"3000000000\" is not a whole number"},
		{"twice in a drop-in", []string{"--config-dir=/d"}, written{base: head, folder: []string{head + "cgroupRoot: a\ncgroupRoot: b\n"}}, "/d/0.conf:4: cgroupRoot: is given twice, first on line 3"},
		{"aliases that multiply", nil, written{base: bomb}, "aliases (*) that multiply"},
		{"an alias of itself", nil, written{base: head + "a: &a [*a]\n"}, "/c:3:"},
		{"deep JSON", nil, written{base: `{"a":` + deep}, "nested more than 200 deep"},
		{"flag without value", []string{"--eviction-hard"}, written{base: head}, "flag needs an argument"},
		{"flag with a wrong value", []string{"--image-gc-high-threshold=x"}, written{base: head}, "--image-gc-high-threshold"},
		{"not a flag", []string{"server"}, written{base: head}, `"server" is no flag`},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := assemble(append([]string{"--config=/c"}, tc.args...), tc.files)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
			var inFile *FileError
			if strings.HasPrefix(tc.want, "/") != errors.As(err, &inFile) && !strings.Contains(tc.name, "JSON") && !strings.Contains(tc.name, "multiply") {
				t.Errorf("the error's type is %T", err)
			}
		})
	}
}

func TestGate(t *testing.T) {
	t.Parallel()
	at := func(minor int, gates map[string]bool) Settings {
		s := Settings{FeatureGates: Map[bool]{Entries: map[string]Setting[bool]{}}}
		if minor > 0 {
			s.Version = Version{Major: 1, Minor: minor, Text: fmt.Sprintf("v1.%d.0", minor)}
		}
		for k, v := range gates {
			s.FeatureGates.Entries[k] = Setting[bool]{Value: v}
		}
		return s
	}
	cases := []struct {
		name      string
		s         Settings
		on, known bool
	}{
		{"default of 1.37", at(37, nil), false, true},
		{"set by name", at(37, map[string]bool{GateStatsFromCRI: true}), true, true},
		{"set by name, version unknown", at(0, map[string]bool{GateStatsFromCRI: false}), false, true},
		{"all betas of 1.37", at(37, map[string]bool{"AllBeta": true}), true, true},
		{"all betas of 1.36, where it is alpha", at(36, map[string]bool{"AllBeta": true}), false, true},
		{"all alphas of 1.36", at(36, map[string]bool{"AllAlpha": true}), true, true},
		{"by name against all", at(37, map[string]bool{"AllBeta": true, GateStatsFromCRI: false}), false, true},
		{"version unknown", at(0, nil), false, false},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if on, known := tc.s.Gate(GateStatsFromCRI); on != tc.on || known != tc.known {
				t.Errorf("got %v, %v, want %v, %v", on, known, tc.on, tc.known)
			}
		})
	}
}

// FuzzAssemble: no file and no argument makes us panic or hang, and what is
// accepted has an origin for each value.
func FuzzAssemble(f *testing.F) {
	f.Add("--config=/c\x00--config-dir=/d", head+"evictionHard: {a: b}\n", head+"evictionHard: {a: null}\n")
	f.Add("--eviction-hard=a<b", `{"kind":"KubeletConfiguration","apiVersion":"kubelet.config.k8s.io/v1beta1","featureGates":{"A":true}}`, "")
	f.Add("--config=/c", head+"x: &x {<<: *x}\n", "")
	f.Add("-v\x002\x00--enforce-node-allocatable=\"", "", "\t")
	f.Fuzz(func(t *testing.T, args, base, dropIn string) {
		s, err := assemble(splitArgs([]byte(args)), written{base: base, folder: []string{dropIn}})
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without words")
			}
			return
		}
		for name, from := range map[string]Origin{
			"endpoint": s.RuntimeEndpoint.From, "root": s.RootDir.From, "logs": s.PodLogsDir.From, "transition": s.EvictionPressureTransition.From,
			"high": s.ImageGCHighPercent.From, "driver": s.CgroupDriver.From, "enforce": s.EnforceNodeAllocatable.From, "isolation": s.LocalStorageCapacityIsolation.From,
		} {
			if !from.IsSet() {
				t.Errorf("%s comes from nowhere", name)
			}
		}
		for signal, v := range s.EvictionHard.Entries {
			if !v.From.IsSet() {
				t.Errorf("evictionHard %q comes from nowhere", signal)
			}
		}
	})
}
