package runtime

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// config writes the configuration of a containerd that shares nothing with another one on the machine.
func (o Options) config() string {
	var b strings.Builder
	section := func(name string, lines ...string) {
		fmt.Fprintf(&b, "\n[%s]\n", name)
		for _, l := range lines {
			fmt.Fprintln(&b, l)
		}
	}
	// plugin begins a plugin's table, or with a name after the id one of its sub-tables.
	plugin := func(id string, lines ...string) {
		id, sub, _ := strings.Cut(id, " ")
		section(strings.TrimSuffix("plugins.'"+id+"'."+sub, "."), lines...)
	}
	set := func(key, value string) string { return key + " = " + quote(value) }
	at := func(elements ...string) string { return filepath.Join(append([]string{o.Dir}, elements...)...) }

	fmt.Fprintf(&b, "version = %d\n", o.ConfigVersion)
	fmt.Fprintln(&b, set("root", o.Root))
	fmt.Fprintln(&b, set("state", at("state")))
	fmt.Fprintln(&b, set("temp", at("tmp")))
	fmt.Fprintf(&b, "imports = [%s]\n", quoteAll(o.Imports))
	// What a test never uses: they would look at system paths, or only make the start longer.
	disabled := []string{
		"io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
		"io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
	}
	if o.ConfigVersion == newestConfig {
		disabled = append(disabled, "io.containerd.image-verifier.v1.bindir")
	}
	fmt.Fprintf(&b, "disabled_plugins = [%s]\n", quoteAll(disabled))
	if o.ConfigVersion < newestConfig {
		// Servers are plugins only since version 4. Shims have their sockets in /run/containerd/s, which no setting changes.
		section("grpc", set("address", at(socketName)))
		section("ttrpc", set("address", at(socketName+".ttrpc")))
		section("debug", set("level", o.LogLevel), set("address", at("debug.sock")))
		// Without it there is no CRI.
		plugin("io.containerd.image-verifier.v1.bindir", set("bin_dir", at("verifiers")))
	} else {
		section("debug", set("level", o.LogLevel))
		plugin("io.containerd.server.v1.grpc", set("address", at(socketName)))
		plugin("io.containerd.server.v1.ttrpc", set("address", at(socketName+".ttrpc")))
		plugin("io.containerd.server.v1.debug", set("address", at("debug.sock")))
		plugin("io.containerd.shim.v1.manager", set("socket_dir", at("s")))
	}
	plugin("io.containerd.internal.v1.opt", set("path", at("opt")))
	plugin("io.containerd.nri.v1.nri",
		set("socket_path", at(nriName)), set("plugin_path", at("nri", "plugins")), set("plugin_config_path", at("nri", "conf.d")))

	plugin("io.containerd.cri.v1.images", set("snapshotter", o.Snapshotter))
	plugin("io.containerd.cri.v1.images pinned_images", set("sandbox", o.SandboxImage))
	plugin("io.containerd.cri.v1.images registry", set("config_path", o.CertsDir))
	plugin("io.containerd.transfer.v1.local", set("config_path", o.CertsDir))
	for _, s := range slices.Sorted(maps.Keys(o.SnapshotterRoots)) {
		plugin("io.containerd.snapshotter.v1."+s, set("root_path", o.SnapshotterRoots[s]))
	}

	plugin("io.containerd.cri.v1.runtime",
		// Without CAP_SYS_RESOURCE lowering oom_score_adj fails, and with it every sandbox.
		"restrict_oom_score_adj = true",
		"netns_mounts_under_state_dir = true",
		fmt.Sprintf("cdi_spec_dirs = [%s]", quote(at("cdi"))))
	plugin("io.containerd.cri.v1.runtime cni",
		fmt.Sprintf("bin_dirs = [%s]", quote(o.CNIBinDir)), set("conf_dir", o.CNIConfDir))
	plugin("io.containerd.cri.v1.runtime containerd", `default_runtime_name = "runc"`)
	plugin("io.containerd.cri.v1.runtime containerd.runtimes.runc", `runtime_type = "io.containerd.runc.v2"`)
	plugin("io.containerd.cri.v1.runtime containerd.runtimes.runc.options", set("Root", at("runc")))
	plugin("io.containerd.grpc.v1.cri", `stream_server_address = "127.0.0.1"`, `stream_server_port = "0"`)

	if o.ExtraConfig != "" {
		fmt.Fprintf(&b, "\n%s\n", o.ExtraConfig)
	}
	return b.String()
}

// quote writes a TOML basic string. Paths with control characters are refused before (see Options.check).
func quote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}

func quoteAll(all []string) string {
	quoted := make([]string, len(all))
	for i, s := range all {
		quoted[i] = quote(s)
	}
	return strings.Join(quoted, ", ")
}
