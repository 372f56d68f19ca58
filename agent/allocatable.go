package agent

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/cleave-cri/cleave/agent/upstream"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/doctor"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/kube/allocatable"
	"github.com/cleave-cri/cleave/kube/allocatable/cgroup"
	"github.com/cleave-cri/cleave/kube/rights"
	"github.com/cleave-cri/cleave/proxy/unixsock"
	"github.com/cleave-cri/cleave/snapshot"
)

// Allocatable gathers what there is to know about Node Allocatable on this node and explains it. kubeconfig says as whom to ask the
// API server what the node publishes; empty means as the kubelet does. Nothing on the node is changed.
func Allocatable(ctx context.Context, cfg config.Config, kubeconfig string) (allocatable.Report, error) {
	reader := kubelet.Reader{}
	s, err := reader.Find(ctx, kubelet.Choice{Endpoints: []string{cfg.Listen.Endpoint.Path(), crioEndpoint}})
	if err != nil {
		return allocatable.Report{}, fmt.Errorf("read the settings of the kubelet: %w", err)
	}
	in := allocatable.Input{Settings: allocatableSettings(s)}
	var unknown []string
	if in.MemoryBytes, in.HugePagesBytes, err = nodeMemory("/"); err != nil {
		return allocatable.Report{}, err
	}
	if in.Filesystems, err = nodeFilesystems(ctx, cfg); err != nil {
		unknown = append(unknown, fmt.Sprintf("the filesystems could not be looked at: %v", err))
	}
	if in.Capacity, in.Published, err = publishedAmounts(ctx, cmp.Or(kubeconfig, s.Kubeconfig.Value), s); err != nil {
		unknown = append(unknown, err.Error())
	}
	lookAtCgroups(ctx, cfg, s, &in)
	report, err := allocatable.Explain(in)
	report.Unknown = append(unknown, report.Unknown...)
	return report, err
}

// allocatableSettings takes the kubelet's settings over, with where they stand.
func allocatableSettings(s kubelet.Settings) allocatable.Settings {
	entries := func(m kubelet.Map[string]) map[string]allocatable.Setting {
		out := map[string]allocatable.Setting{}
		for name, e := range m.Entries {
			out[name] = allocatable.Setting{Text: e.Value, From: e.From.String()}
		}
		return out
	}
	return allocatable.Settings{
		KubeReserved: entries(s.KubeReserved), SystemReserved: entries(s.SystemReserved), Hard: entries(s.EvictionHard),
		IgnoreEviction: s.AllocatableIgnoresEviction.Value, Enforce: s.EnforceNodeAllocatable.Value,
		KubeCgroup: s.KubeReservedCgroup.Value, SystemCgroup: s.SystemReservedCgroup.Value,
	}
}

// nodeMemory is the machine's memory and the part of it that is huge pages, as cAdvisor reads them: MemTotal of /proc/meminfo in
// KiB, and the pools of all sizes.
func nodeMemory(root string) (total, huge uint64, _ error) {
	text, err := os.ReadFile(filepath.Join(root, "proc/meminfo"))
	if err != nil {
		return 0, 0, fmt.Errorf("read how much memory there is: %w", err)
	}
	for line := range bytes.Lines(text) {
		words := strings.Fields(string(line))
		if len(words) < 2 || words[0] != "MemTotal:" {
			continue
		}
		if total, err = strconv.ParseUint(words[1], 10, 54); err != nil {
			return 0, 0, fmt.Errorf("read how much memory there is: %w", err)
		}
	}
	if total == 0 {
		return 0, 0, errors.New("read how much memory there is: /proc/meminfo does not say")
	}
	pools, err := filepath.Glob(filepath.Join(root, "sys/kernel/mm/hugepages/hugepages-*kB"))
	if err != nil {
		return 0, 0, err
	}
	for _, pool := range pools {
		name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(pool), "hugepages-"), "kB")
		size, err := strconv.ParseUint(name, 10, 32)
		if err != nil {
			continue
		}
		text, err := os.ReadFile(filepath.Join(pool, "nr_hugepages"))
		if err != nil {
			return 0, 0, fmt.Errorf("read how many huge pages there are: %w", err)
		}
		count, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
		if err != nil {
			return 0, 0, fmt.Errorf("read how many huge pages there are: %w", err)
		}
		huge += size * count << 10
	}
	return total << 10, huge, nil
}

// nodeFilesystems are those of nodefs, imagefs and containerfs, each once.
func nodeFilesystems(ctx context.Context, cfg config.Config) ([]allocatable.Filesystem, error) {
	conn, err := upstream.Connect(cfg.Runtime.Endpoint.Path(), upstream.Plain(cfg.Runtime.Endpoint.Path()))
	if err != nil {
		return nil, err
	}
	store := snapshot.NewStore(conn, cfg.Runtime.Namespace).ReadOnce()
	o, err := newObserver(cfg, observed{store: store, filesystems: fsstats.NewProber(), mountpoints: mountpoints(conn)}, zap.NewNop())
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	layout, _, err := layoutNow(ctx, cfg.Control.Endpoint.Path(), o)
	out := byDevice(layout)
	if len(out) > 0 {
		err = nil // what is known of it is enough
	}
	return out, errors.Join(err, conn.Close())
}

// byDevice groups the roles that thresholds are about by filesystem, in the order of the roles.
func byDevice(layout fsstats.Layout) []allocatable.Filesystem {
	var out []allocatable.Filesystem
	at := map[fsstats.Device]int{}
	for _, role := range []fsstats.Role{fsstats.NodeFS, fsstats.ImageFS, fsstats.ContainerFS} {
		place, ok := layout.Get(role)
		if !ok || place.Missing {
			continue
		}
		fs := place.Filesystem
		i, seen := at[fs.Device]
		if !seen {
			i = len(out)
			at[fs.Device] = i
			out = append(out, allocatable.Filesystem{Device: fs.Device.String(), CapacityBytes: fs.CapacityBytes})
		}
		out[i].Roles = append(out[i].Roles, string(role))
	}
	return out
}

// publishedAmounts asks the API server for this node.
func publishedAmounts(ctx context.Context, kubeconfig string, s kubelet.Settings) (capacity, published *allocatable.Amounts, _ error) {
	if kubeconfig == "" {
		return nil, nil, errors.New("the API server is not asked: the kubelet has no --kubeconfig; name one")
	}
	client, err := nodeClient(kubeconfig, s)
	if err != nil {
		return nil, nil, err
	}
	node, err := client.NodeObject(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("ask the API server what node %s publishes: %w", client.Node(), err)
	}
	return amountsOf(node.Status.Capacity), amountsOf(node.Status.Allocatable), nil
}

// nodeClient asks the API server as a kubeconfig says, about the node of a kubelet. One that is not the kubelet's own is taken for a
// service account's.
func nodeClient(kubeconfig string, s kubelet.Settings) (*kube.Client, error) {
	node, err := nodeName(s)
	if err != nil {
		return nil, err
	}
	return kube.NewClient(kube.ConnectOptions{Kubeconfig: kubeconfig, ServiceAccount: kubeconfig != s.Kubeconfig.Value, Node: node, UserAgent: "cleave"})
}

// nodeName is what the kubelet calls its node: what it was told, or the host's name, in lower case.
func nodeName(s kubelet.Settings) (string, error) {
	name := s.NodeName.Value
	if name == "" {
		host, err := os.Hostname()
		if err != nil {
			return "", fmt.Errorf("find the name of this node: %w", err)
		}
		name = host
	}
	return strings.ToLower(strings.TrimSpace(name)), nil
}

// rightsChecks are about what cleave may do at the API server: as configured, or as the kubelet. A kubelet without a kubeconfig may
// nothing.
func rightsChecks(configured string, s kubelet.Settings) []doctor.Check {
	kubeconfig := cmp.Or(configured, s.Kubeconfig.Value)
	if kubeconfig == "" {
		return nil
	}
	client, err := nodeClient(kubeconfig, s)
	if err != nil {
		return []doctor.Check{{Name: "rights at API server", Run: func(context.Context) doctor.Result {
			return doctor.Warned(err.Error(), "run `cleave doctor` where the kubelet's files are")
		}}}
	}
	return []doctor.Check{rights.Check(client)}
}

func amountsOf(list corev1.ResourceList) *allocatable.Amounts {
	get := func(name corev1.ResourceName) *int64 {
		q, ok := list[name]
		if !ok {
			return nil
		}
		bytes := q.Value()
		return &bytes
	}
	return &allocatable.Amounts{MemoryBytes: get(corev1.ResourceMemory), EphemeralStorageBytes: get(corev1.ResourceEphemeralStorage)}
}

// lookAtCgroups reads the cgroups of pods and daemons, and what daemons use.
func lookAtCgroups(ctx context.Context, cfg config.Config, s kubelet.Settings, in *allocatable.Input) {
	r := cgroup.System()
	in.Pods = r.Read(cgroup.Pods(s.CgroupDriver.Value, s.CgroupRoot.Value))
	if in.Pods.Exists != nil && !*in.Pods.Exists {
		// Since 1.36 the kubelet takes the runtime's driver, whatever it is told.
		other := map[bool]string{true: "cgroupfs", false: "systemd"}[s.CgroupDriver.Value == "systemd"]
		if c := r.Read(cgroup.Pods(other, s.CgroupRoot.Value)); c.Exists != nil && *c.Exists {
			in.Pods = c
		}
	}
	named := func(path string) *allocatable.Cgroup {
		if path == "" {
			return nil
		}
		if strings.HasSuffix(path, ".slice") {
			path = cgroup.Slice(filepath.Base(path))
		}
		return r.Read(path)
	}
	in.KubeCgroup, in.SystemCgroup = named(s.KubeReservedCgroup.Value), named(s.SystemReservedCgroup.Value)

	// The kubelet and the runtime are in cgroups of their own, or nothing can be said about what they use.
	daemons := map[string]uint64{}
	for _, pid := range []int{s.PID, peerOf(ctx, cfg.Runtime.Endpoint.Path())} {
		text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cgroup"))
		path := r.Of(text)
		if pid <= 0 || err != nil || path == "" || path == "/" {
			return
		}
		c := r.Read(path)
		if c.UsedBytes == nil {
			return
		}
		daemons[path] = *c.UsedBytes
	}
	var kubeUsed, inSystem uint64
	const system = "/system.slice"
	for path, used := range daemons {
		kubeUsed += used
		if strings.HasPrefix(path, system+"/") {
			inSystem += used
		}
	}
	in.KubeUsedBytes = &kubeUsed
	if c := r.Read(system); c.UsedBytes != nil {
		rest := *c.UsedBytes - min(*c.UsedBytes, inSystem)
		in.SystemUsedBytes = &rest
	}
}

// peerOf is the process that listens on a socket, 0 if it is not known.
func peerOf(ctx context.Context, socket string) int {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return 0
	}
	defer conn.Close() //nolint:errcheck // nothing was sent
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		return 0
	}
	peer, err := unixsock.PeerOf(unix)
	if err != nil || peer.PID < 0 || int64(peer.PID) > math.MaxInt32 {
		return 0
	}
	return int(peer.PID)
}
