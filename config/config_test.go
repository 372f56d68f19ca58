package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/config/strict"
)

func TestExampleIsTheDefault(t *testing.T) {
	t.Parallel()
	got, err := Parse("example.yaml", Example())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Default(), got); diff != "" {
		t.Errorf("(-default +example):\n%s", diff)
	}
}

func TestExampleHasEveryKeyOnceAndInOrder(t *testing.T) {
	t.Parallel()
	var got []string
	for line := range strings.Lines(string(Example())) {
		if key, _, ok := strings.Cut(strings.TrimSpace(line), ":"); ok && !strings.Contains(key, "#") {
			got = append(got, key)
		}
	}
	var want []string
	var list func(section)
	list = func(s section) {
		for _, f := range s {
			want = append(want, f.key)
			list(f.sub)
		}
	}
	list(schema(new(Config)))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("keys (-schema +example):\n%s", diff)
	}
}

// TestEveryFieldIsInTheSchema sets every field to another value and looks whether
// the file keeps it.
func TestEveryFieldIsInTheSchema(t *testing.T) {
	t.Parallel()
	c := Default()
	var change func(v reflect.Value)
	change = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				change(v.Field(i))
			}
		case reflect.String:
			v.SetString(v.String() + "/x")
		case reflect.Bool:
			v.SetBool(!v.Bool())
		case reflect.Slice:
			v.Set(reflect.Append(v, reflect.ValueOf("x")))
		default:
			v.SetInt(v.Int() + 1)
		}
	}
	change(reflect.ValueOf(&c).Elem())
	// These can't have just any value.
	c.Version, c.Mode, c.Runtime.Namespace, c.Log = Version, ModeObserve, "other", Log{"warn", "console"}
	c.Filesystems.ImageFS, c.Filesystems.ContainerFS = "/images", "/layers"
	c.Snapshotter.ImageRoot, c.Snapshotter.ContainerRoot = "/images", "/layers"
	c.Limits.WritableLayerBytes = 1 << 30
	c.Metrics.Address, c.Reclaim.EvictBy = "[::1]:9753", EvictStandalone
	text, err := c.YAML()
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse("config.yaml", text)
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if diff := cmp.Diff(c, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestYAML(t *testing.T) {
	t.Parallel()
	got, err := Default().YAML()
	if err != nil {
		t.Fatal(err)
	}
	want := `version: 1
mode: cri
runtime:
    endpoint: unix:///run/containerd/containerd.sock
    namespace: k8s.io
listen:
    endpoint: unix:///run/cleave/cleave.sock
control:
    endpoint: unix:///run/cleave/control.sock
crio:
    nriEndpoint: unix:///run/nri/nri.sock
    kubeletTokenFile: ""
reclaim:
    enabled: false
    evict: false
    evictBy: kubernetes
    keepLogs: false
    kubeconfig: ""
kube:
    admission: false
    conditions: false
    events: false
    taint: false
stateDir: /var/lib/cleave
filesystems:
    nodefs: /var/lib/kubelet
    logs: /var/log/pods
    imagefs: ""
    containerfs: ""
measure:
    period: 10s
    maxCorePercent: 5
memory:
    limit: 128Mi
log:
    level: info
    format: json
metrics:
    address: ""
limits:
    writableLayer: 0
    fromPods: false
snapshotter:
    imageRoot: ""
    containerRoot: ""
    database: /var/lib/cleave/snapshotter/metadata.db
    endpoint: unix:///run/cleave/snapshotter.sock
    statusEndpoint: unix:///run/cleave/snapshotter-status.sock
    requireMountpoints: false
    namespaces: [k8s.io]
    remapIDs: true
    parallelUnpack: true
    syncOnCommit: false
    mountOptions: []
    projectQuota: false
    usageMaxAge: 10s
    deletionsPerSecond: 20000
    cleanupMaxPercent: 10
`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseValues(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, in string
		change   func(c *Config)
	}{
		{"version alone", "version: 1", func(*Config) {}},
		{"document marks", "---\nversion: 1\n...\n", func(*Config) {}},
		{"section with nothing in it", "version: 1\nfilesystems:\n  # imagefs: /x\nlog:\n", func(*Config) {}},
		{"JSON", `{"version": 1, "mode": "observe", "log": {"level": "debug"}}`, func(c *Config) {
			c.Mode, c.Log.Level = ModeObserve, "debug"
		}},
		{"socket without scheme", "version: 1\nlisten: {endpoint: /x/y.sock}", func(c *Config) { c.Listen.Endpoint = "/x/y.sock" }},
		{"namespace that looks like a number", "version: 1\nruntime: {namespace: '123'}", func(c *Config) { c.Runtime.Namespace = "123" }},
		{"long duration", "version: 1\nmeasure: {period: 1m30s, maxCorePercent: 100}", func(c *Config) {
			c.Measure = Measure{90 * time.Second, 100}
		}},
		{"no memory limit", "version: 1\nmemory: {limit: 0}", func(c *Config) { c.Memory.LimitBytes = 0 }},
		{"least memory limit", "version: 1\nmemory: {limit: 32Mi}", func(c *Config) { c.Memory.LimitBytes = 33554432 }},
		{"memory as a plain number", "version: 1\nmemory: {limit: 134217729}", func(c *Config) { c.Memory.LimitBytes = 134217729 }},
		{"memory as text", "version: 1\nmemory: {limit: '1.5Gi'}", func(c *Config) { c.Memory.LimitBytes = 1610612736 }},
		{"memory with an exponent", "version: 1\nmemory: {limit: 1e9}", func(c *Config) { c.Memory.LimitBytes = 1_000_000_000 }},
		{"lists", "version: 1\nsnapshotter:\n  namespaces:\n  - k8s.io\n  - '123'\n  mountOptions: [volatile, xino=on]\n", func(c *Config) {
			c.Snapshotter.Namespaces, c.Snapshotter.MountOptions = []string{"k8s.io", "123"}, []string{"volatile", "xino=on"}
		}},
		{"empty list", "version: 1\nsnapshotter: {namespaces: []}", func(c *Config) { c.Snapshotter.Namespaces = nil }},
		{"yes and no", "version: 1\nsnapshotter: {remapIDs: false, syncOnCommit: true}", func(c *Config) { c.Snapshotter.RemapIDs, c.Snapshotter.SyncOnCommit = false, true }},
		{"kube", "version: 1\nreclaim: {enabled: true, kubeconfig: /k}\nkube: {admission: true, conditions: true, events: true, taint: true}", func(c *Config) {
			c.Reclaim.Enabled, c.Reclaim.Kubeconfig = true, "/k"
			c.Kube = Kube{Admission: true, Conditions: true, Events: true, Taint: true}
		}},
		{"limits", "version: 1\nlimits: {writableLayer: 10Gi}\nsnapshotter: {imageRoot: /a, containerRoot: /b, projectQuota: true}", func(c *Config) {
			c.Limits.WritableLayerBytes = 10 << 30
			c.Snapshotter.ImageRoot, c.Snapshotter.ContainerRoot, c.Snapshotter.ProjectQuota = "/a", "/b", true
		}},
		{"limits of pods", "version: 1\nreclaim: {enabled: true}\nlimits: {fromPods: true}\nsnapshotter: {imageRoot: /a, containerRoot: /b, projectQuota: true}", func(c *Config) {
			c.Limits.FromPods, c.Reclaim.Enabled = true, true
			c.Snapshotter.ImageRoot, c.Snapshotter.ContainerRoot, c.Snapshotter.ProjectQuota = "/a", "/b", true
		}},
		{"roots side by side", "version: 1\nsnapshotter: {imageRoot: /data/a, containerRoot: /data/ab}", func(c *Config) {
			c.Snapshotter.ImageRoot, c.Snapshotter.ContainerRoot = "/data/a", "/data/ab"
		}},
		{"path with spaces and umlauts", "version: 1\nfilesystems: {imagefs: /mnt/my disk/ü}", func(c *Config) { c.Filesystems.ImageFS = "/mnt/my disk/ü" }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			want := Default()
			tc.change(&want)
			got, err := Parse("config.yaml", []byte(tc.in))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseFaults(t *testing.T) {
	t.Parallel()
	long := "/" + strings.Repeat("x", 107)
	for _, tc := range []struct {
		name, in string
		want     []string
	}{
		{"empty", "", []string{"c.yaml:1:1: version: is missing; write version: 1"}},
		{"comments alone", "# nothing\n", []string{"c.yaml:1:1: version: is missing; write version: 1"}},
		{"no version", "\nmode: cri\n", []string{"c.yaml:2:1: version: is missing; write version: 1"}},
		{"newer version says just that", "version: 2\nnew: thing\n", []string{"c.yaml:1:10: version: is 2, but this cleave knows version 1 only"}},
		{"version as text", "version: '1'\n", []string{`c.yaml:1:10: version: must be a whole number, not "1"`}},
		{"list", "- version: 1\n", []string{"c.yaml:1:1: the file must be keys with values below them (key: value), not a list"}},
		{"text", "hello\n", []string{`c.yaml:1:1: the file must be keys with values below them (key: value), not "hello"`}},
		{"unknown key, spelled nearly right", "version: 1\nmeasure:\n  perod: 10s\n", []string{`c.yaml:3:3: measure.perod: unknown key; did you mean "period"?`}},
		{"unknown key, letter case", "version: 1\nstatedir: /x\n", []string{`c.yaml:2:1: statedir: unknown key; did you mean "stateDir"?`}},
		{"unknown key, of another section", "version: 1\nendpoint: /x\n", []string{`c.yaml:2:1: endpoint: unknown key; there is runtime.endpoint, listen.endpoint, control.endpoint, snapshotter.endpoint`}},
		{"unknown key, unlike any", "version: 1\nlog: {colour: red}\n", []string{`c.yaml:2:7: log.colour: unknown key; log has level, format`}},
		{"unknown key, strange", "version: 1\n\"a\\nb\": 1\n", []string{`c.yaml:2:1: "a\nb": unknown key; the file has version, mode, runtime, listen, control, crio, reclaim, kube, stateDir, filesystems, measure, memory, log, metrics, limits, snapshotter`}},
		{"key twice", "version: 1\nmode: cri\nmode: cri\n", []string{"c.yaml:3:1: mode: is given twice, first on line 2"}},
		{"section twice", "version: 1\nlog: {level: info}\nlog: {format: json}\n", []string{"c.yaml:3:1: log: is given twice, first on line 2"}},
		{"number for text", "version: 1\nruntime:\n  namespace: 5\n", []string{`c.yaml:3:14: runtime.namespace: must be text, not "5": put it in quotes if it is meant so`}},
		{"text for a number", "version: 1\nmeasure: {maxCorePercent: many}\n", []string{`c.yaml:2:27: measure.maxCorePercent: must be a whole number, not "many"`}},
		{"fraction for a whole number", "version: 1\nmeasure: {maxCorePercent: 5.5}\n", []string{`c.yaml:2:27: measure.maxCorePercent: must be a whole number, not "5.5"`}},
		{"list for a value", "version: 1\nmode: [cri]\n", []string{"c.yaml:2:7: mode: must be one value, not a list"}},
		{"value for a section", "version: 1\nlog: info\n", []string{`c.yaml:2:6: log: this must be keys with values below them (key: value), not "info"`}},
		{"no value", "version: 1\nmode:\n", []string{"c.yaml:2:6: mode: has no value; leave the key out for the default"}},
		{"duration without unit", "version: 1\nmeasure:\n  period: 10\n", []string{`c.yaml:3:11: measure.period: must be a duration with a unit, such as 10s, not "10"`}},
		{"duration of a day", "version: 1\nmeasure:\n  period: 1d\n", []string{`c.yaml:3:11: measure.period: must be a duration, such as 10s or 1m30s, not "1d"`}},
		{"duration too short", "version: 1\nmeasure:\n  period: 999ms\n", []string{"c.yaml:3:11: measure.period: must be at least 1s, not 999ms"}},
		{"duration negative", "version: 1\nmeasure:\n  period: -10s\n", []string{"c.yaml:3:11: measure.period: must be at least 1s, not -10s"}},
		{"share of a core", "version: 1\nmeasure:\n  maxCorePercent: 0\n", []string{"c.yaml:3:19: measure.maxCorePercent: must be from 1 to 100, not 0"}},
		{"quantity bad", "version: 1\nmemory:\n  limit: 128 megs\n", []string{`c.yaml:3:10: memory.limit: "128 megs" must be a number of bytes, such as 128Mi, 1Gi or 134217728`}},
		{"quantity in milli", "version: 1\nmemory:\n  limit: 128m\n", []string{`c.yaml:3:10: memory.limit: "128m" is in thousandths of a byte; Mi is for mebibytes`}},
		{"quantity too small", "version: 1\nmemory:\n  limit: 31Mi\n", []string{"c.yaml:3:10: memory.limit: must be at least 32Mi, or 0 for no limit, not 31Mi"}},
		{"quantity negative", "version: 1\nmemory:\n  limit: -1Gi\n", []string{`c.yaml:3:10: memory.limit: "-1Gi" is negative`}},
		{"quantity of another kind", "version: 1\nmemory:\n  limit: true\n", []string{`c.yaml:3:10: memory.limit: "true" must be a number of bytes, such as 128Mi, 1Gi or 134217728`}},
		{"mode crio on another socket", "version: 1\nmode: crio\nlisten: {endpoint: /run/cleave/other.sock}\n", []string{
			`c.yaml:3:20: listen.endpoint: "unix:///run/cleave/other.sock": in mode crio it has to be unix:///run/crio/crio.sock, the one place where a kubelet looks for CRI-O; leave the key out`,
		}},
		{"mode unknown", "version: 1\nmode: docker\n", []string{`c.yaml:2:7: mode: must be cri, crio or observe, not "docker"`}},
		{"log", "version: 1\nlog:\n  level: warning\n  format: text\n", []string{
			`c.yaml:3:10: log.level: must be debug, info, warn or error, not "warning"`,
			`c.yaml:4:11: log.format: must be json or console, not "text"`,
		}},
		{"endpoints", "version: 1\nruntime:\n  endpoint: tcp://1.2.3.4:5\nlisten:\n  endpoint: unix://run/x.sock\ncontrol:\n  endpoint: " + long + "\n", []string{
			`c.yaml:3:13: runtime.endpoint: "tcp://1.2.3.4:5": only unix sockets are possible, not "tcp": write unix:///path or /path`,
			`c.yaml:5:13: listen.endpoint: "unix://run/x.sock": the path must be absolute: unix:/// has three slashes`,
			`c.yaml:7:13: control.endpoint: "` + long[:60] + `"…: the path has 108 bytes, but the kernel takes only 107 for a socket`,
		}},
		{"endpoint used twice", "version: 1\nlisten:\n  endpoint: /run/containerd//containerd.sock\n", []string{
			`c.yaml:3:13: listen.endpoint: "unix:///run/containerd//containerd.sock" is also runtime.endpoint; each needs its own socket`,
		}},
		{"endpoint that is another's default", "version: 1\nruntime:\n  endpoint: /run/cleave/control.sock\n", []string{
			`c.yaml:3:13: control.endpoint: "unix:///run/cleave/control.sock" is also runtime.endpoint; each needs its own socket`,
		}},
		{"paths", "version: 1\nstateDir: /..//\nfilesystems:\n  nodefs: ''\n  logs: var/log\n  imagefs: \"/a\\0b\"\n", []string{
			"c.yaml:2:11: stateDir: must not be the root directory",
			"c.yaml:4:11: filesystems.nodefs: must not be empty; leave the key out for the default",
			`c.yaml:5:9: filesystems.logs: "var/log" must be an absolute path`,
			`c.yaml:6:12: filesystems.imagefs: "/a\x00b": control characters are not allowed`,
		}},
		{"namespace", "version: 1\nruntime: {namespace: k8s..io}\n", []string{
			`c.yaml:2:22: runtime.namespace: "k8s..io" is no containerd namespace: letters, digits and single . _ - between them, 76 at most`,
		}},
		{"several faults in the order of the file", "version: 1\nmod: cri\nmeasure:\n  period: 5\n  maxCorePercent: 500\nlog: {level: loud}\n", []string{
			`c.yaml:2:1: mod: unknown key; did you mean "mode"?`,
			`c.yaml:4:11: measure.period: must be a duration with a unit, such as 5s, not "5"`,
			"c.yaml:5:19: measure.maxCorePercent: must be from 1 to 100, not 500",
			`c.yaml:6:14: log.level: must be debug, info, warn or error, not "loud"`,
		}},
		{"list of the wrong kinds", "version: 1\nsnapshotter:\n  namespaces: [5, [a], b, null, b, ../x]\n  mountOptions: volatile\n", []string{
			`c.yaml:3:16: snapshotter.namespaces: must be text, not "5": put it in quotes if it is meant so`,
			"c.yaml:3:19: snapshotter.namespaces: must be one value, not a list",
			"c.yaml:3:27: snapshotter.namespaces: has no value; leave the key out for the default",
			`c.yaml:3:33: snapshotter.namespaces: "b" is listed twice`,
			`c.yaml:4:17: snapshotter.mountOptions: must be a list, such as [a, b], not "volatile"`,
		}},
		{"list without a value", "version: 1\nsnapshotter:\n  namespaces:\n", []string{
			"c.yaml:3:14: snapshotter.namespaces: has no value; leave the key out for the default, or write [] for an empty list",
		}},
		{"alias in a list", "version: 1\nsnapshotter:\n  namespaces: [&a b, *a]\n", []string{
			"c.yaml:3:16: snapshotter.namespaces: anchors and aliases (& and *) are not supported",
			"c.yaml:3:22: snapshotter.namespaces: anchors and aliases (& and *) are not supported",
		}},
		{"yes for true", "version: 1\nsnapshotter: {remapIDs: 'true', syncOnCommit: 1}\n", []string{
			`c.yaml:2:25: snapshotter.remapIDs: must be true or false, not "true"`,
			`c.yaml:2:47: snapshotter.syncOnCommit: must be true or false, not "1"`,
		}},
		{"one root", "version: 1\nsnapshotter:\n  imageRoot: /images\n", []string{
			"c.yaml:3:14: snapshotter.containerRoot: is missing, and imageRoot is given: the snapshotter needs both, or none if it is not used",
		}},
		{"one folder for both", "version: 1\nsnapshotter:\n  imageRoot: /data/x/\n  containerRoot: /data//x\n", []string{
			`c.yaml:4:18: snapshotter.containerRoot: "/data//x" is also imageRoot; each needs its own folder`,
		}},
		{"a limit that nobody keeps", "version: 1\nlimits:\n  writableLayer: 1Gi\nsnapshotter: {imageRoot: /a, containerRoot: /b}\n", []string{
			"c.yaml:3:18: limits.writableLayer: the kernel keeps limits by project quota: set snapshotter.projectQuota too, and the snapshotter's roots",
		}},
		{"limits of pods that nobody keeps", "version: 1\nreclaim: {enabled: true}\nlimits: {fromPods: true}\n", []string{
			"c.yaml:3:20: limits.fromPods: the kernel keeps limits by project quota: set snapshotter.projectQuota too, and the snapshotter's roots",
		}},
		{"limits of pods that nobody knows", "version: 1\nlimits: {fromPods: true}\nsnapshotter: {imageRoot: /a, containerRoot: /b, projectQuota: true}\n", []string{
			"c.yaml:2:20: limits.fromPods: pods' limits are known only where reclaim.enabled is set",
		}},
		{"events without reclaim", "version: 1\nkube: {events: true}\n", []string{
			"c.yaml:2:16: kube.events: goes by the thresholds of reclaim: set reclaim.enabled too",
		}},
		{"a taint as the node", "version: 1\nreclaim: {enabled: true}\nkube: {taint: true}\n", []string{
			"c.yaml:3:15: kube.taint: a kubelet may not change its node's taints: set reclaim.kubeconfig to a service account's",
		}},
		{"a limit of a few bytes", "version: 1\nlimits: {writableLayer: 100}\nsnapshotter: {imageRoot: /a, containerRoot: /b, projectQuota: true}\n", []string{
			"c.yaml:2:25: limits.writableLayer: must be at least 1Mi, or 0 for no limit, not 100",
		}},
		{"nested roots", "version: 1\nsnapshotter:\n  imageRoot: /data/a/../b/c\n  containerRoot: /data/b\n", []string{
			`c.yaml:3:14: snapshotter.imageRoot: "/data/a/../b/c" is inside containerRoot; neither may be inside the other`,
		}},
		{"roots that overlayfs can't mount, database in a root", "version: 1\nsnapshotter:\n  imageRoot: /a,b\n  containerRoot: /data/x/..\n  database: /data/db\n", []string{
			`c.yaml:3:14: snapshotter.imageRoot: "/a,b" has a comma, colon or backslash, which the mount options of overlayfs can't hold`,
			`c.yaml:5:13: snapshotter.database: "/data/db" is inside containerRoot; put it outside of both, best on a third filesystem`,
		}},
		{"snapshotter's values", "version: 1\nsnapshotter:\n  imageRoot: /\n  containerRoot: x\n  database: /var/lib/\n  statusEndpoint: /run/cleave/control.sock\n" +
			"  namespaces: [a b]\n  mountOptions: ['a,b', upperdir=/x]\n  usageMaxAge: 61m\n  deletionsPerSecond: -1\n  cleanupMaxPercent: 0\n", []string{
			"c.yaml:3:14: snapshotter.imageRoot: must not be the root directory",
			`c.yaml:4:18: snapshotter.containerRoot: "x" must be an absolute path`,
			`c.yaml:5:13: snapshotter.database: "/var/lib/" names a folder, not a file`,
			`c.yaml:6:19: snapshotter.statusEndpoint: "unix:///run/cleave/control.sock" is also control.endpoint; each needs its own socket`,
			`c.yaml:7:15: snapshotter.namespaces: "a b" is no containerd namespace: letters, digits and single . _ - between them, 76 at most`,
			`c.yaml:8:17: snapshotter.mountOptions: "a,b" is no single mount option`,
			`c.yaml:8:17: snapshotter.mountOptions: "upperdir=/x": the snapshotter sets upperdir itself`,
			"c.yaml:9:16: snapshotter.usageMaxAge: must be from 1s to 1h0m0s, not 1h1m0s",
			"c.yaml:10:23: snapshotter.deletionsPerSecond: must be 1 or more, or 0 for no limit, not -1",
			"c.yaml:11:22: snapshotter.cleanupMaxPercent: must be from 1 to 100, not 0",
		}},
		{"second document", "version: 1\n---\nversion: 1\n", []string{"c.yaml:2:1: a second document starts here; the file must hold one"}},
		{"broken second document", "version: 1\n---\nx: [\n", []string{"c.yaml:3:1: not YAML: did not find expected node content"}},
		{"anchor and alias", "version: 1\nlisten: &a\n  endpoint: /x\ncontrol: *a\n", []string{
			"c.yaml:2:9: listen: anchors and aliases (& and *) are not supported",
			"c.yaml:4:10: control: anchors and aliases (& and *) are not supported",
		}},
		{"merge key", "version: 1\n<<: {mode: cri}\n", []string{
			`c.yaml:2:1: "<<": unknown key; the file has version, mode, runtime, listen, control, crio, reclaim, kube, stateDir, filesystems, measure, memory, log, metrics, limits, snapshotter`,
		}},
		{"tag", "version: 1\nmode: !!str cri\n", []string{"c.yaml:2:7: mode: tags (!) are not supported"}},
		{"list as a key", "version: 1\n? [a]\n: b\n", []string{"c.yaml:2:3: a key must be a name, not a list"}},
		{"syntax: tab", "version: 1\nlog:\n\tlevel: info\n", []string{"c.yaml:3:2: not YAML: found character that cannot start any token"}},
		{"syntax: not UTF-8", "version: \xff\xfe\n", []string{"c.yaml:1:1: not YAML: invalid leading UTF-8 octet"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := Parse("c.yaml", []byte(tc.in))
			var faults Faults
			if !errors.As(err, &faults) {
				t.Fatalf("error = %v (%T), want Faults", err, err)
			}
			if diff := cmp.Diff(tc.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("faults (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(Config{}, got); diff != "" {
				t.Errorf("a configuration came along (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseIsNotBlownUp(t *testing.T) {
	t.Parallel()
	var bomb strings.Builder
	bomb.WriteString("version: 1\na0: &a0 [x,x,x,x,x,x,x,x,x,x]\n")
	for i := range 30 {
		fmt.Fprintf(&bomb, "a%d: &a%d [%s]\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i), 10), ","))
	}
	for _, tc := range []struct{ name, in string }{
		{"aliases of aliases", bomb.String()},
		{"deep lists", "version: 1\nlog: " + strings.Repeat("[", 20_000)},
		{"deep mappings", "version: 1\nlog: " + strings.Repeat("{a: ", 20_000)},
		{"large", "version: 1\n#" + strings.Repeat("x", maxFileBytes)},
		{"huge exponent", "version: 1\nmemory: {limit: 1e1000000000}"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if _, err := Parse("c.yaml", []byte(tc.in)); err == nil {
				t.Error("accepted")
			}
		})
	}
}

// TestLoadWaitsForNobody: a named pipe has no writer, perhaps for ever.
func TestLoadWaitsForNobody(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{path, os.DevNull} {
		done := make(chan error, 1)
		go func() { _, err := Load(path); done <- err }()
		select {
		case err := <-done:
			if err == nil || !strings.Contains(err.Error(), "not a regular file") || !strings.Contains(err.Error(), path) {
				t.Errorf("%s: %v", path, err)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: it waits", path)
		}
	}
}

// TestValidatePassthrough: what does not count there is not looked at.
func TestValidatePassthrough(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name   string
		change func(*Config)
		want   string // the key at fault, empty for none
	}{
		{"defaults", func(*Config) {}, ""},
		{"mode", func(c *Config) { c.Mode = ModeCRIO }, ""},
		{"state folder", func(c *Config) { c.StateDir = "relative" }, ""},
		{"where control would be", func(c *Config) { c.Listen = Listen{c.Control.Endpoint} }, ""},
		{"listens on the runtime's", func(c *Config) { c.Listen = Listen{c.Runtime.Endpoint} }, "listen.endpoint"},
		{"relative runtime", func(c *Config) { c.Runtime.Endpoint = "x" }, "runtime.endpoint"},
		{"log level", func(c *Config) { c.Log.Level = "loud" }, "log.level"},
		{"log format", func(c *Config) { c.Log.Format = "xml" }, "log.format"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := Default()
			tc.change(&c)
			err := c.ValidatePassthrough()
			if tc.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var faults Faults
			if !errors.As(err, &faults) || len(faults) != 1 || faults[0].Key != tc.want {
				t.Errorf("got %v, want one fault of %s", err, tc.want)
			}
		})
	}
}

func TestLoad(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good.yaml"), filepath.Join(dir, "bad.yaml")
	for path, text := range map[string]string{good: "version: 1\nmode: observe\n", bad: "version: 1\nmode: none\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	got, err := Load(good)
	if err != nil {
		t.Fatal(err)
	}
	if got.Mode != ModeObserve {
		t.Errorf("mode = %q, want observe", got.Mode)
	}

	missing := filepath.Join(dir, "missing.yaml")
	_, err = Load(missing)
	if !errors.Is(err, ErrMissing) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing file: %v, want ErrMissing and fs.ErrNotExist", err)
	}
	if want := fmt.Sprintf("read config %q: config file does not exist", missing); err == nil || err.Error() != want {
		t.Errorf("missing file: %v, want %s", err, want)
	}

	_, err = Load(bad)
	if want := bad + `:2:7: mode: must be cri, crio or observe, not "none"`; err == nil || err.Error() != want {
		t.Errorf("bad file: %v, want %s", err, want)
	}
	var faults Faults
	if errors.Is(err, ErrMissing) || !errors.As(err, &faults) {
		t.Errorf("bad file: %T, want Faults and not ErrMissing", err)
	}

	_, err = Load(dir)
	if err == nil || errors.Is(err, ErrMissing) || errors.As(err, &faults) {
		t.Errorf("a folder: %v, want neither ErrMissing nor Faults", err)
	}
}

func TestValidateAfterFlags(t *testing.T) {
	t.Parallel()
	if err := Default().Validate(); err != nil {
		t.Errorf("the default is refused: %v", err)
	}
	c := Default()
	c.Version, c.Mode, c.StateDir, c.Listen.Endpoint, c.Log.Level = 3, "", "state\xff", "x", ""
	want := []string{
		"version: is 3, but this cleave knows version 1 only",
		`mode: must be cri, crio or observe, not ""`,
		`listen.endpoint: "x": the path must be absolute: write unix:///path or /path`,
		`stateDir: "state\xff" must be an absolute path`,
		`log.level: must be debug, info, warn or error, not ""`,
	}
	err := c.Validate()
	if err == nil {
		t.Fatal("accepted")
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}
	if err := (Config{}).Validate(); err == nil {
		t.Error("the zero Config is accepted")
	}
}

func TestParseEndpoint(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, in, want, wantErr string
	}{
		{"with scheme", "unix:///run/x.sock", "/run/x.sock", ""},
		{"path", "/run/x.sock", "/run/x.sock", ""},
		{"path with a scheme inside", "/run/tcp://x.sock", "/run/tcp://x.sock", ""},
		{"longest", "/" + strings.Repeat("x", 106), "/" + strings.Repeat("x", 106), ""},
		{"longest with scheme", "unix:///" + strings.Repeat("x", 106), "/" + strings.Repeat("x", 106), ""},
		{"empty", "", "", `"": a socket is needed: write unix:///path or /path`},
		{"scheme alone", "unix://", "", `"unix://": the path must be absolute: unix:/// has three slashes`},
		{"scheme and one slash", "unix:/run/x", "", `"unix:/run/x": the path must be absolute: write unix:///path or /path`},
		{"relative", "run/x.sock", "", `"run/x.sock": the path must be absolute: write unix:///path or /path`},
		{"abstract", "@cleave", "", `"@cleave": the path must be absolute: write unix:///path or /path`},
		{"two slashes", "unix://run/x.sock", "", `"unix://run/x.sock": the path must be absolute: unix:/// has three slashes`},
		{"tcp", "tcp://127.0.0.1:80", "", `"tcp://127.0.0.1:80": only unix sockets are possible, not "tcp": write unix:///path or /path`},
		{"scheme in capitals", "UNIX:///x", "", `"UNIX:///x": only unix sockets are possible, not "UNIX": write unix:///path or /path`},
		{"folder", "/run/", "", `"/run/": this names a folder, not a socket`},
		{"root", "unix:///", "", `"unix:///": this names a folder, not a socket`},
		{"dots", "/run/..", "", `"/run/..": this names a folder, not a socket`},
		{"zero byte", "/run/\x00", "", `"/run/\x00": control characters are not allowed`},
		{"not UTF-8", "/run/\xff", "", `"/run/\xff": this is not UTF-8`},
		{"too long", "/" + strings.Repeat("x", 107), "", `"/` + strings.Repeat("x", 59) + `"…: the path has 108 bytes, but the kernel takes only 107 for a socket`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := ParseEndpoint(tc.in)
			message := ""
			if err != nil {
				message = err.Error()
			}
			if diff := cmp.Diff([]string{tc.want, tc.wantErr}, []string{got.Path(), message}); diff != "" {
				t.Errorf("path and error (-want +got):\n%s", diff)
			}
			flag := Endpoint("/before")
			if err := flag.Set(tc.in); (err != nil) != (tc.wantErr != "") {
				t.Errorf("Set: %v", err)
			} else if err != nil && flag != "/before" {
				t.Errorf("Set failed and changed the flag to %q", flag)
			}
		})
	}
}

func TestParseBytes(t *testing.T) {
	t.Parallel()
	const bad = "must be a number of bytes, such as 128Mi, 1Gi or 134217728"
	for _, tc := range []struct {
		in      string
		want    int64
		wantErr string
	}{
		{"0", 0, ""}, {"-0", 0, ""}, {"1", 1, ""}, {"+5", 5, ""}, {"128Mi", 134217728, ""}, {"1.5Gi", 1610612736, ""},
		{"1k", 1000, ""}, {"2M", 2_000_000, ""}, {"3G", 3_000_000_000, ""}, {"1Ki", 1024, ""}, {"1Ti", 1 << 40, ""},
		{"1Pi", 1 << 50, ""}, {"7Ei", 7 << 60, ""}, {"9E", 9e18, ""}, {"1e3", 1000, ""}, {"1E3", 1000, ""}, {"15e-1", 0, "is not a whole number of bytes"},
		{"1e-100000000", 0, "is not a whole number of bytes"},
		{"1000u", 0, "is not a whole number of bytes"}, {"1000n", 0, "is not a whole number of bytes"}, {".5Ki", 512, ""}, {"5.", 5, ""}, {"0.125Ki", 128, ""},
		{"-1Gi", 0, "is negative"}, {"-0.5", 0, "is negative"}, {"9223372036854775807", 1<<63 - 1, ""}, {"9223372036854775.807k", 1<<63 - 1, ""},
		{"9223372036854775808", 0, "is more than 2^63-1 bytes"}, {"8Ei", 0, "is more than 2^63-1 bytes"}, {"10E", 0, "is more than 2^63-1 bytes"},
		{"9223372036854775807.5", 0, "is more than 2^63-1 bytes"}, {"1e19", 0, "is more than 2^63-1 bytes"}, {"1e99", 0, "is more than 2^63-1 bytes"},
		{"9007199254740992Ki", 0, "is more than 2^63-1 bytes"}, {"9007199254740991Ki", 1<<63 - 1024, ""}, {"1e4294967296", 0, bad}, {"1e-99999999999999999999", 0, "is not a whole number of bytes"},
		{"0e9", 0, ""}, {"0e9999999", 0, bad}, {"128m", 0, "is in thousandths of a byte; Mi is for mebibytes"}, {"0.5", 0, "is not a whole number of bytes"},
		{"0.999999999", 0, "is not a whole number of bytes"}, {"0.9999999999", 0, bad}, {"0.9999999999999Ki", 0, bad},
		{"", 0, bad}, {".", 0, bad}, {"Mi", 0, bad}, {"1 Mi", 0, bad}, {"1MB", 0, bad}, {"1K", 0, bad}, {"1mi", 0, bad}, {"1KiB", 0, bad},
		{"--1", 0, bad}, {"1.2.3", 0, bad}, {"1e", 0, bad}, {"1e+", 0, bad}, {"0x10", 0, bad}, {"1_000", 0, bad}, {"1/2", 0, bad}, {"٣", 0, bad},
		{"+-1", 0, bad}, {"1-2", 0, bad},
	} {
		t.Run(tc.in, func(t *testing.T) {
			t.Parallel()
			got, err := ParseBytes(tc.in)
			message := ""
			if err != nil {
				message = strings.TrimPrefix(err.Error(), fmt.Sprintf("%q ", tc.in))
			}
			if got != tc.want || message != tc.wantErr {
				t.Errorf("ParseBytes(%q) = %d, %q; want %d, %q", tc.in, got, message, tc.want, tc.wantErr)
			}
		})
	}
}

func FuzzParseBytes(f *testing.F) {
	for _, s := range []string{"128Mi", "1e3", "-5", "1.5Gi", "9223372036854775807", "1e-3", "E", "1E", "8Ei", "0.9999999999Ki", "1e4294967296"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseBytes(s)
		if err != nil {
			return
		}
		if n < 0 {
			t.Errorf("%q is %d", s, n)
		}
		again, err := ParseBytes(strict.FormatBytes(n))
		if err != nil || again != n {
			t.Errorf("%q is %d, written as %q, which is %d, %v", s, n, strict.FormatBytes(n), again, err)
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add(Example())
	f.Add([]byte("version: 1\n"))
	f.Add([]byte("version: 1\nlog: {level: debug}\n---\n"))
	f.Add([]byte("version: 1\na: &a [*a]\n? [x]\n: !!binary aGk=\n"))
	f.Add([]byte("version: 1\nruntime: {namespace: '0x1'}\nfilesystems: {imagefs: \"/\\u2028 # ' \\\" \"}\nmemory: {limit: 1e9}\n"))
	f.Add([]byte("version: 1\nsnapshotter: {namespaces: [], mountOptions: [' a', \"\\n\"], imageRoot: /a, containerRoot: /b}\n"))
	f.Add([]byte("\xff\xfev\x00:\x00"))
	f.Add([]byte("version: 1\nmeasure: {period: 1h2m3.004005006s}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("c.yaml", data)
		if err != nil {
			var faults Faults
			if !errors.As(err, &faults) || len(faults) == 0 {
				t.Fatalf("error %v is no Faults", err)
			}
			for _, fault := range faults {
				if fault.Line < 1 || fault.Column < 1 || fault.Message == "" {
					t.Errorf("fault %+v has no place or message", fault)
				}
			}
			return
		}
		if err := c.Validate(); err != nil {
			t.Errorf("accepted, and then refused: %v", err)
		}
		text, err := c.YAML()
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse("again.yaml", text)
		if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		if diff := cmp.Diff(c, again); diff != "" {
			t.Errorf("changed by writing and reading (-before +after):\n%s", diff)
		}
	})
}

// In mode crio the socket is where a kubelet looks for CRI-O, unless somebody named another, which is a fault.
func TestKSS4_ModeCRIOHasItsOneSocket(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		text string
		want Endpoint
	}{
		"left out":          {"version: 1\nmode: crio\n", "/run/crio/crio.sock"},
		"by its other name": {"version: 1\nmode: crio\nlisten: {endpoint: /var/run/crio/crio.sock}\n", "/var/run/crio/crio.sock"},
		"another mode":      {"version: 1\nmode: cri\n", "/run/cleave/cleave.sock"},
	} {
		c, err := Parse("c.yaml", []byte(tc.text))
		if err != nil || c.Listen.Endpoint != tc.want {
			t.Errorf("%s: %v, %v; want %v", name, c.Listen.Endpoint, err, tc.want)
		}
	}
}
