package bin

import (
	"cmp"
	"fmt"
	"time"
)

// A group is one folder of integration/toolchain: a Go module that pins what its binaries are built from.
type group struct {
	name string
	// module is the pinned module whose version the binaries report.
	module string
	// versionVars are the linker variables that get the version; %s is replaced by the pinned version.
	versionVars []string
	binaries    []binary
	// older says that only the compatibility matrix runs it; who asks for the usual peers does not get it.
	older bool
}

// A binary is one program of a group.
type binary struct {
	// name is the name that callers ask for.
	name string
	// file is the file's name, which some programs are known by; empty means name.
	file string
	// alias is a shorter name that callers may use; may be empty.
	alias string
	pkg   string
	// test builds the package's test binary (critest is one).
	test bool
	// cold is about how long a build takes on two cores with no build cache.
	cold time.Duration
}

// fileName is the name of the program in the cache.
func (b binary) fileName() string { return cmp.Or(b.file, b.name) }

// olderKubelet is the recipe of a kubelet of an older minor version, such as 1.34.
func olderKubelet(minor string) group {
	return group{
		name:        "kubernetes-" + minor,
		module:      "k8s.io/kubernetes",
		versionVars: kubernetesVersion(),
		binaries:    []binary{{name: "kubelet-" + minor, file: "kubelet", pkg: "k8s.io/kubernetes/cmd/kubelet", cold: 255 * time.Second}},
		older:       true,
	}
}

func kubernetesVersion() []string {
	return []string{"k8s.io/component-base/version.gitVersion=%s", "k8s.io/client-go/pkg/version.gitVersion=%s"}
}

// recipes says how each real peer is built. Versions are not here: they are in each folder's go.mod.
func recipes() []group {
	return []group{
		{
			name:        "containerd",
			module:      "github.com/containerd/containerd/v2",
			versionVars: []string{"github.com/containerd/containerd/v2/version.Version=%s"},
			binaries: []binary{
				{name: "containerd", pkg: "github.com/containerd/containerd/v2/cmd/containerd", cold: 75 * time.Second},
				{name: "ctr", pkg: "github.com/containerd/containerd/v2/cmd/ctr", cold: 20 * time.Second},
				{name: "containerd-shim-runc-v2", alias: "shim", pkg: "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", cold: 10 * time.Second},
			},
		},
		{
			name:        "crictl",
			module:      "sigs.k8s.io/cri-tools",
			versionVars: []string{"sigs.k8s.io/cri-tools/pkg/version.Version=%s"},
			binaries: []binary{
				{name: "crictl", pkg: "sigs.k8s.io/cri-tools/cmd/crictl", cold: 50 * time.Second},
				{name: "critest", pkg: "sigs.k8s.io/cri-tools/cmd/critest", test: true, cold: 25 * time.Second},
			},
		},
		{
			name:        "kubernetes",
			module:      "k8s.io/kubernetes",
			versionVars: kubernetesVersion(),
			binaries: []binary{
				{name: "kubelet", pkg: "k8s.io/kubernetes/cmd/kubelet", cold: 255 * time.Second},
				{name: "kube-apiserver", alias: "apiserver", pkg: "k8s.io/kubernetes/cmd/kube-apiserver", cold: 100 * time.Second},
			},
		},
		olderKubelet("1.34"),
		olderKubelet("1.35"),
		olderKubelet("1.36"),
		{
			name:        "containerd-older",
			module:      "github.com/containerd/containerd/v2",
			versionVars: []string{"github.com/containerd/containerd/v2/version.Version=%s"},
			binaries: []binary{
				{name: "containerd-older", file: "containerd", pkg: "github.com/containerd/containerd/v2/cmd/containerd", cold: 75 * time.Second},
				{name: "shim-older", file: "containerd-shim-runc-v2", pkg: "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", cold: 10 * time.Second},
			},
			older: true,
		},
		{
			name:   "etcd",
			module: "go.etcd.io/etcd/server/v3",
			binaries: []binary{
				{name: "etcd", pkg: "go.etcd.io/etcd/server/v3", cold: 40 * time.Second},
			},
		},
		{
			name:   "lint",
			module: "github.com/golangci/golangci-lint/v2",
			binaries: []binary{
				{name: "golangci-lint", pkg: "github.com/golangci/golangci-lint/v2/cmd/golangci-lint", cold: 110 * time.Second},
			},
		},
		{
			name:   "nfpm",
			module: "github.com/goreleaser/nfpm/v2",
			binaries: []binary{
				{name: "nfpm", pkg: "github.com/goreleaser/nfpm/v2/cmd/nfpm", cold: 2 * time.Minute},
			},
		},
		{
			name:   "gotestsum",
			module: "gotest.tools/gotestsum",
			binaries: []binary{
				{name: "gotestsum", pkg: "gotest.tools/gotestsum", cold: 10 * time.Second},
			},
		},
	}
}

// Names lists everything that can be asked for, in the order of the recipes.
func Names() []string { return names(func(group) bool { return true }) }

// Usual lists what is not only for the compatibility matrix.
func Usual() []string { return names(func(g group) bool { return !g.older }) }

func names(wanted func(group) bool) []string {
	var names []string
	for _, g := range recipes() {
		if !wanted(g) {
			continue
		}
		for _, b := range g.binaries {
			names = append(names, b.name)
		}
	}
	return names
}

func find(name string) (group, binary, error) {
	for _, g := range recipes() {
		for _, b := range g.binaries {
			if name == b.name || (b.alias != "" && name == b.alias) {
				return g, b, nil
			}
		}
	}
	return group{}, binary{}, fmt.Errorf("find a recipe for %q: there is none; known are %v", name, Names())
}
