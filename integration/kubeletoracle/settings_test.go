package kubeletoracle

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/klog/v2"
	kubeletconfig "k8s.io/kubelet/config/v1beta1"
	"k8s.io/kubernetes/cmd/kubelet/app"
	"k8s.io/kubernetes/cmd/kubelet/app/options"
	"sigs.k8s.io/yaml"

	settings "github.com/cleave-cri/cleave/config/kubelet"
)

var nodes = flag.Int("nodes", 2000, "how many kubelets with settings of their own to compare")

// gatesAtStart are the kubelet's gates before any kubelet set some: they are
// global, and stay set.
var gatesAtStart = utilfeature.DefaultMutableFeatureGate.DeepCopy()

// TestSettings holds our reading of a kubelet's arguments, file and drop-ins
// against the kubelet's own command, which is run up to the validation of what
// it has read: there it fails, because of a flag that each of them has.
func TestSettings(t *testing.T) {
	logsapi.ReapplyHandling = logsapi.ReapplyHandlingIgnoreUnchanged
	silence(t)
	folder := t.TempDir()
	t.Chdir(folder) // to come back in the end; each node has a working folder of its own
	good, refused, withFile, withDropIns := 0, map[string]int{}, 0, 0
	for number := *seed; number < *seed+uint64(*nodes); number++ {
		n := newNode(t, folder, number)
		want, theirErr := n.kubelet()
		if errors.Is(theirErr, errNoDump) {
			t.Fatalf("-seed %d: %v\n%s", number, theirErr, n)
		}
		got, ourErr := n.cleave()
		if (theirErr == nil) != (ourErr == nil) {
			t.Fatalf("-seed %d: the kubelet says %v, cleave %v\n%s", number, theirErr, ourErr, n)
		}
		if theirErr != nil {
			refused[place(ourErr)]++
			continue
		}
		good++
		if n.file != "" {
			withFile++
		}
		if len(n.dropIns) > 0 {
			withDropIns++
		}
		if got != want {
			t.Fatalf("-seed %d: the kubelet has\n%s\ncleave\n%s\n%s", number, want, got, n)
		}
	}
	t.Logf("%d sets of settings are equal, %d with a file and %d with drop-ins; refused %v", good, withFile, withDropIns, refused)
	if *nodes >= 500 && (good < *nodes/3 || withFile < *nodes/5 || withDropIns < *nodes/8 || refused["in a file"] < *nodes/50 || refused["in a flag"] < *nodes/100) {
		t.Error("the settings no longer show much")
	}
}

func place(err error) string {
	var inFile *settings.FileError
	if errors.As(err, &inFile) {
		return "in a file"
	}
	return "in a flag"
}

// TestGates holds what we say of the gates that nobody set by name.
func TestGates(t *testing.T) {
	for _, set := range []map[string]bool{
		{}, {"AllBeta": true}, {"AllBeta": false}, {"AllAlpha": true},
		{settings.GateStatsFromCRI: true}, {settings.GateStatsFromCRI: false, "AllBeta": true}, {settings.GateSeparateDiskGC: false},
	} {
		theirs := gatesAtStart.DeepCopy()
		// A gate may depend on one that this leaves off; the two that are asked
		// about don't.
		err := theirs.SetFromMap(set)
		ours := settings.Settings{Version: settings.Version{Major: 1, Minor: 37, Text: "v1.37.2"}, FeatureGates: settings.Map[bool]{Entries: map[string]settings.Setting[bool]{}}}
		for name, on := range set {
			ours.FeatureGates.Entries[name] = settings.Setting[bool]{Value: on}
		}
		if err != nil {
			t.Logf("%v: the kubelet would not start: %v", set, err)
			continue
		}
		for _, gate := range []string{settings.GateStatsFromCRI, settings.GateSeparateDiskGC} {
			on, known := ours.Gate(gate)
			found := false
			for name := range theirs.GetAll() {
				found = found || string(name) == gate
			}
			if !found {
				t.Errorf("kubelet v1.37.2 has no gate %s", gate)
			}
			want := slices.Contains(enabled(theirs), gate)
			if !known || on != want {
				t.Errorf("%v: %s is %v in the kubelet, cleave says %v (known: %v)", set, gate, want, on, known)
			}
		}
	}
}

// testNode is a kubelet's command line and files, in a folder of its own.
type testNode struct {
	dir     string
	args    []string
	file    string
	dropIns map[string]string
}

func (n *testNode) String() string {
	out := "arguments:\n"
	for _, a := range n.args {
		out += fmt.Sprintf("  %q\n", a)
	}
	if n.file != "" {
		out += "file:\n" + n.file + "\n"
	}
	for _, name := range slices.Sorted(maps.Keys(n.dropIns)) {
		out += "drop-in " + name + ":\n" + n.dropIns[name] + "\n"
	}
	return out
}

// silence keeps the deprecation of nearly every flag from the terminal.
func silence(t *testing.T) {
	t.Helper()
	nowhere, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	before := os.Stderr
	os.Stderr = nowhere
	t.Cleanup(func() {
		os.Stderr = before
		if err := nowhere.Close(); err != nil {
			t.Error(err)
		}
	})
}

// dumped is a log sink that keeps the line in which the kubelet tells what it
// has read.
type dumped struct {
	logr.LogSink
	config *string
}

func (d dumped) Init(logr.RuntimeInfo)          {}
func (d dumped) Enabled(int) bool               { return true }
func (d dumped) Error(error, string, ...any)    {}
func (d dumped) WithValues(...any) logr.LogSink { return d }
func (d dumped) WithName(string) logr.LogSink   { return d }
func (d dumped) WithCallDepth(int) logr.LogSink { return d }
func (d dumped) Info(_ int, message string, facts ...any) {
	if message == "Effective KubeletConfiguration" && len(facts) == 2 {
		*d.config = fmt.Sprint(facts[1])
	}
}

// errNoDump says that this test no longer sees what the kubelet has read.
var errNoDump = errors.New("the kubelet did not log its configuration")

// kubelet says what the kubelet's own command makes of the node.
func (n *testNode) kubelet() (string, error) {
	var config string
	// The command turns contextual logging off for the line that matters.
	klog.SetLoggerWithOptions(logr.New(dumped{config: &config}), klog.ContextualLogger(true))
	cmd := app.NewKubeletCommand(context.Background())
	cmd.SetArgs(n.args)
	cmd.SilenceErrors = true
	err := cmd.Execute()
	if err == nil || !strings.HasPrefix(err.Error(), "failed to validate kubelet configuration") {
		if err == nil {
			err = errors.New("the kubelet came through its validation")
		}
		return "", err
	}
	if config == "" {
		return "", errNoDump
	}
	var c kubeletconfig.KubeletConfiguration
	if err := yaml.UnmarshalStrict([]byte(config), &c); err != nil {
		return "", fmt.Errorf("read the kubelet's dump: %w", err)
	}
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.SetNormalizeFunc(cliflag.WordSepNormalizeFunc)
	other := options.NewKubeletFlags()
	other.AddFlags(flags)
	forConfig, err := options.NewKubeletConfiguration()
	if err != nil {
		return "", err
	}
	options.AddKubeletConfigFlags(flags, forConfig)
	options.AddGlobalFlags(flags)
	if err := flags.Parse(n.args); err != nil {
		return "", err
	}
	root, err := filepath.Abs(other.RootDirectory)
	if err != nil {
		return "", err
	}
	return lines(
		c.ContainerRuntimeEndpoint, c.ImageServiceEndpoint, root, c.PodLogsDir, c.StaticPodPath,
		c.Address, c.Port, c.ReadOnlyPort,
		c.EvictionHard, c.EvictionSoft, c.EvictionSoftGracePeriod, c.EvictionMinimumReclaim, *c.MergeDefaultEvictionSettings,
		c.EvictionPressureTransitionPeriod.Duration, c.EvictionMaxPodGracePeriod, other.ExperimentalNodeAllocatableIgnoreEvictionThreshold,
		*c.ImageGCHighThresholdPercent, *c.ImageGCLowThresholdPercent, c.ImageMinimumGCAge.Duration, c.ImageMaximumGCAge.Duration,
		other.MinimumGCAge.Duration, other.MaxPerPodContainerCount, other.MaxContainerCount,
		c.ContainerLogMaxSize, *c.ContainerLogMaxFiles, c.FeatureGates, c.CgroupDriver, c.CgroupRoot, c.SystemReservedCgroup, c.KubeReservedCgroup,
		c.SystemReserved, c.KubeReserved, c.EnforceNodeAllocatable, *c.LocalStorageCapacityIsolation,
	), nil
}

// cleave says what our reader makes of it.
func (n *testNode) cleave() (string, error) {
	s, err := settings.Reader{Proc: filepath.Join(n.dir, "proc")}.Find(context.Background(), settings.Choice{})
	if err != nil {
		return "", err
	}
	return lines(
		s.RuntimeEndpoint.Value, s.ImageEndpoint.Value, s.RootDir.Value, s.PodLogsDir.Value, s.StaticPodPath.Value,
		s.Address.Value, s.Port.Value, s.ReadOnlyPort.Value,
		s.EvictionHard.Values(), s.EvictionSoft.Values(), s.EvictionSoftGracePeriod.Values(), s.EvictionMinimumReclaim.Values(), s.MergeDefaultEviction.Value,
		s.EvictionPressureTransition.Value, s.EvictionMaxPodGraceSeconds.Value, s.AllocatableIgnoresEviction.Value,
		s.ImageGCHighPercent.Value, s.ImageGCLowPercent.Value, s.ImageMinimumGCAge.Value, s.ImageMaximumGCAge.Value,
		s.MinimumContainerTTL.Value, s.MaxDeadPerContainer.Value, s.MaxDeadContainers.Value,
		s.ContainerLogMaxSize.Value, s.ContainerLogMaxFiles.Value, s.FeatureGates.Values(), s.CgroupDriver.Value, s.CgroupRoot.Value, s.SystemReservedCgroup.Value, s.KubeReservedCgroup.Value,
		s.SystemReserved.Values(), s.KubeReserved.Values(), s.EnforceNodeAllocatable.Value, s.LocalStorageCapacityIsolation.Value,
	), nil
}

func lines(values ...any) string {
	names := []string{
		"runtime endpoint", "image endpoint", "root", "pod logs", "static pods",
		"address", "port", "read-only port",
		"hard", "soft", "soft grace", "minimum reclaim", "merge",
		"transition", "max grace", "ignore eviction",
		"gc high", "gc low", "image min age", "image max age",
		"container ttl", "dead per container", "dead",
		"log size", "log files", "gates", "driver", "cgroup root", "system reserved cgroup", "kube reserved cgroup",
		"system reserved", "kube reserved", "enforce", "isolation",
	}
	var out strings.Builder
	for i, v := range values {
		fmt.Fprintf(&out, "  %s: %#v\n", names[i], plain(v))
	}
	return out.String()
}

// plain makes no difference between what is empty and what is not there: the
// kubelet's dump makes none either.
func plain(v any) any {
	switch v := v.(type) {
	case map[string]string:
		return fmt.Sprintf("%q", v)
	case map[string]bool:
		return fmt.Sprint(v)
	case []string:
		return fmt.Sprintf("%q", v)
	case time.Duration:
		return v.String()
	}
	return v
}

// newNode makes a node out of a number: always the same.
func newNode(t *testing.T, folder string, number uint64) *testNode {
	t.Helper()
	d := dice{rand.New(rand.NewPCG(number, 11))}
	n := &testNode{dir: filepath.Join(folder, strconv.FormatUint(number, 10)), dropIns: map[string]string{}}
	if err := os.Mkdir(n.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chdir(n.dir); err != nil {
		t.Fatal(err)
	}
	write := func(name, content string) {
		path := filepath.Join(n.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// What keeps the kubelet from running.
	n.args = append(n.args, "--event-burst=-1")
	if d.chance(80) {
		n.file = d.document()
		write("etc/kubelet.yaml", n.file)
		n.flag(d, "config", pick(d, "etc/kubelet.yaml", "./etc/../etc/kubelet.yaml", filepath.Join(n.dir, "etc/kubelet.yaml")))
	}
	if d.chance(60) {
		if err := os.MkdirAll(filepath.Join(n.dir, "etc/conf.d"), 0o755); err != nil {
			t.Fatal(err)
		}
		for i := range d.IntN(4) {
			name := fmt.Sprintf(pick(d, "%d.conf", "%d-b.conf", "sub/%d.conf", "%d.conf.d/x.conf", "%d.yaml", "%dconf"), 9+i)
			n.dropIns[name] = d.document()
			write("etc/conf.d/"+name, n.dropIns[name])
		}
		if d.chance(8) {
			if err := os.Symlink(filepath.Join(n.dir, "etc/kubelet.yaml"), filepath.Join(n.dir, "etc/conf.d/99-link.conf")); err != nil {
				t.Fatal(err)
			}
			n.dropIns["99-link.conf"] = "-> etc/kubelet.yaml"
		}
		if err := os.Symlink("conf.d", filepath.Join(n.dir, "etc/link.d")); err != nil {
			t.Fatal(err)
		}
		folder := "etc/conf.d"
		if d.chance(15) {
			folder = pick(d, "etc/link.d", "etc/link.d/", "etc/nowhere", "etc/conf.d/", filepath.Join(n.dir, "etc/conf.d"))
		}
		n.flag(d, "config-dir", folder)
	}
	for range d.IntN(5) {
		n.setting(d)
	}
	for _, noise := range [][]string{{"--v=0"}, {"-v", "0"}, {"-v0"}, {"--fail-swap-on"}, {"--fail-swap-on=false"}, {"--node-labels", "a=b"}, {"--hostname-override", "--config"}, {"--register-node=0"}} {
		if d.chance(10) {
			n.args = append(n.args, noise...)
		}
	}

	write("proc/42/cmdline", "/usr/bin/kubelet\x00"+strings.Join(n.args, "\x00")+"\x00")
	write("proc/42/stat", "42 (kubelet) S 1 42 42 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 9 0 12345 1 1 1")
	write("proc/42/status", "Name:\tkubelet\nUid:\t0\t0\t0\t0\n")
	write("proc/stat", "cpu 1 2 3\nbtime 1700000000\n")
	for link, to := range map[string]string{"root": "/", "cwd": n.dir} {
		if err := os.Symlink(to, filepath.Join(n.dir, "proc/42", link)); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

func (n *testNode) flag(d dice, name, value string) {
	if d.chance(10) {
		name = strings.ReplaceAll(name, "-", "_")
	}
	if d.chance(50) {
		n.args = append(n.args, "--"+name+"="+value)
	} else {
		n.args = append(n.args, "--"+name, value)
	}
}

// setting adds a flag that sets something.
func (n *testNode) setting(d dice) {
	bad := d.chance(6)
	switch d.IntN(10) {
	case 0, 1:
		name := pick(d, "eviction-hard", "eviction-soft")
		value := pick(d, "", "memory.available<1Gi", "nodefs.available<10%,imagefs.available<15%", " nodefs.available < 5% ,", ",,", "a<b<c", "x<")
		if bad {
			value = pick(d, "memory.available=1Gi", "nodefs.available", "a<b,c")
		}
		n.flag(d, name, value)
	case 2:
		name := pick(d, "eviction-soft-grace-period", "eviction-minimum-reclaim", "system-reserved", "kube-reserved")
		value := pick(d, "", "memory.available=1m", "cpu=1,memory=1Gi", " a = b ", "a=b=c")
		if bad {
			value = pick(d, "a<b", "cpu")
		}
		n.flag(d, name, value)
	case 3:
		name := pick(d, "eviction-pressure-transition-period", "minimum-image-ttl-duration", "minimum-container-ttl-duration")
		value := pick(d, "0", "0s", "5m", "1h30m", "-1s")
		if bad {
			value = pick(d, "", "5", "1d", "x")
		}
		n.flag(d, name, value)
	case 4:
		name := pick(d, "eviction-max-pod-grace-period", "image-gc-high-threshold", "image-gc-low-threshold", "container-log-max-files", "port", "read-only-port",
			"maximum-dead-containers", "maximum-dead-containers-per-container")
		value := pick(d, "0", "-1", "90", "0x10", "1_0", "010")
		if bad {
			value = pick(d, "", "1.5", "abc", "3000000000")
		}
		n.flag(d, name, value)
	case 5:
		name := pick(d, "local-storage-capacity-isolation", "experimental-allocatable-ignore-eviction")
		value := pick(d, "true", "false", "1", "0", "T")
		if bad {
			value = pick(d, "", "yes", "2")
		}
		switch {
		case d.chance(30):
			n.args = append(n.args, "--"+name)
		default:
			n.args = append(n.args, "--"+name+"="+value)
		}
	case 6:
		n.flag(d, pick(d, "container-runtime-endpoint", "image-service-endpoint", "root-dir", "pod-manifest-path", "container-log-max-size", "cgroup-driver", "cgroup-root"),
			pick(d, "", "unix:///run/crio/crio.sock", "/a/b/../c", "rel/ative", "systemd", "20Mi"))
	case 7:
		value := pick(d, "pods", "", "none", "pods,system-reserved", `"pods"`)
		if bad {
			value = pick(d, `"pods`, "\n")
		}
		n.flag(d, "enforce-node-allocatable", value)
	case 8:
		value := d.gate() + "=" + pick(d, "true", "false", "1", " F ")
		if d.chance(40) {
			value += "," + d.gate() + "=false"
		}
		if bad {
			value = pick(d, d.gate(), d.gate()+"=", d.gate()+"=yes")
		}
		n.flag(d, "feature-gates", value)
	default:
		if bad {
			n.args = append(n.args, pick(d, "positional", "--eviction-hard"))
		}
	}
}

func (d dice) gate() string {
	return pick(d, settings.GateStatsFromCRI, settings.GateSeparateDiskGC, "LocalStorageCapacityIsolationFSQuotaMonitoring", "QOSReserved")
}

// document is a file of the kubelet's, mostly right.
func (d dice) document() string {
	asJSON := d.chance(25)
	pairs := []string{`"apiVersion": "kubelet.config.k8s.io/v1beta1"`, `"kind": "KubeletConfiguration"`}
	if d.chance(2) {
		pairs = pairs[1:]
	} else if d.chance(2) {
		pairs[1] = pick(d, `"kind": "CredentialProviderConfig"`, `"kind": "Pod"`, `"kind": ""`)
	}
	for range d.IntN(7) {
		pairs = append(pairs, d.pair(asJSON))
	}
	if asJSON {
		out := "{\n  " + strings.Join(pairs, ",\n  ") + "\n}"
		if d.chance(3) {
			out = pick(d, out+"}", strings.Replace(out, ",", "", 1), out+"\n\n", "\n \t"+out, "[]", "{}")
		}
		return out
	}
	out := strings.Join(pairs, "\n") + "\n"
	if d.chance(4) {
		out = pick(d, "---\n"+out, out+"---\nother: document\n", "# comment\n"+out, "", "# only a comment\n", "- a\n- b\n", out+"\t: x\n", "a: &a [*a]\n"+out, "%YAML 1.1\n---\n"+out)
	}
	return out
}

// pair is one key with its value, in JSON's form or, outside of JSON, in one of
// YAML's.
func (d dice) pair(asJSON bool) string {
	word := func(words ...string) string {
		w := pick(d, words...)
		if asJSON || d.chance(50) {
			return fmt.Sprintf("%q", w)
		}
		return w
	}
	odd := func(good string) string {
		if d.chance(3) {
			return pick(d, "null", `""`, "[]", "{}", "true", "17", "1.5", `"x"`)
		}
		return good
	}
	mapping := func(separator string, keys []string, value func() string) string {
		var pairs []string
		for range d.IntN(4) {
			pairs = append(pairs, fmt.Sprintf("%q: %s", pick(d, keys...), odd(value())))
		}
		return "{" + strings.Join(pairs, separator) + "}"
	}
	signals := []string{"memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree"}
	var key, value string
	switch d.IntN(11) {
	case 0, 1, 2:
		key = pick(d, "evictionHard", "evictionHard", "evictionSoft", "evictionMinimumReclaim")
		value = mapping(", ", signals, func() string {
			if d.chance(20) {
				return "null"
			}
			return word("10%", "0%", "100Mi", "1.5Gi")
		})
	case 3:
		key = "evictionSoftGracePeriod"
		value = mapping(", ", signals, func() string { return word("30s", "1m30s") })
	case 4:
		key = pick(d, "mergeDefaultEvictionSettings", "mergeDefaultEvictionSettings", "localStorageCapacityIsolation")
		value = pick(d, "true", "false")
		if !asJSON && d.chance(30) {
			value = pick(d, "yes", "No", "on", "OFF", "y", "n", "True", "tRUE", "~")
		}
	case 5:
		key = pick(d, "evictionPressureTransitionPeriod", "imageMinimumGCAge", "imageMaximumGCAge")
		value = word("0s", "5m0s", "1h", "2m30s", "5m")
		if d.chance(5) {
			value = pick(d, "5", `"5"`, `"1d"`, "0", "null")
		}
	case 6:
		key = pick(d, "evictionMaxPodGracePeriod", "imageGCHighThresholdPercent", "imageGCLowThresholdPercent", "containerLogMaxFiles", "port", "readOnlyPort")
		value = pick(d, "0", "30", "90", "-1", "7")
		if d.chance(10) {
			value = pick(d, "85.0", "1e1", "3000000000", "1.5", `"5"`)
		}
		if !asJSON && d.chance(15) {
			value = pick(d, "0x10", "010", "1_000", "+5", "0b11", "0o17", "1e400", "-0x1", ".5e1", "12:30", ".inf", "2001-01-02")
		}
	case 7:
		key = pick(d, "containerRuntimeEndpoint", "imageServiceEndpoint", "containerLogMaxSize", "cgroupDriver", "cgroupRoot", "systemReservedCgroup", "kubeReservedCgroup", "podLogsDir", "staticPodPath")
		value = word("unix:///run/x.sock", "/var/log/x", "logs/here", "systemd", "20Mi", "../up")
		if !asJSON && d.chance(10) {
			value = pick(d, "!!str 5", "'it''s'", "2001-01-02", "12:30:00", ".", "-", "+", "0x", "1_", "0b2", "1e", "<<", "1.2.3", `"\u00e9"`, "no way")
			if value == "-" {
				value = "-x"
			}
		}
	case 8:
		key = pick(d, "systemReserved", "kubeReserved")
		value = mapping(", ", []string{"cpu", "memory", "ephemeral-storage", "pid"}, func() string { return word("1Gi", "100m", "1000Mi") })
	case 9:
		key = "featureGates"
		value = mapping(", ", []string{settings.GateStatsFromCRI, settings.GateSeparateDiskGC, "QOSReserved"}, func() string { return pick(d, "true", "false") })
	default:
		key = "enforceNodeAllocatable"
		value = pick(d, "[]", `["pods"]`, `["none"]`, `["pods", "system-reserved"]`, "null", `[""]`)
	}
	value = odd(value)
	if d.chance(5) {
		key = strings.ToUpper(key[:1]) + key[1:]
	}
	if !asJSON && d.chance(50) {
		return key + ": " + value
	}
	return fmt.Sprintf("%q: %s", key, value)
}

func enabled(gates interface {
	GetAll() map[featuregate.Feature]featuregate.FeatureSpec
	Enabled(featuregate.Feature) bool
}) []string {
	var out []string
	for name := range gates.GetAll() {
		if gates.Enabled(name) {
			out = append(out, string(name))
		}
	}
	return out
}
