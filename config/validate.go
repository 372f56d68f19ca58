package config

import (
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/config/strict"
)

// Limits of values; see the fields of Config.
const (
	minPeriod        = time.Second
	minMemoryBytes   = 32 << 20
	maxNamespace     = 76
	maxPathBytes     = 4095 // PATH_MAX without the zero byte (limits.h)
	minCorePercent   = 1
	maxCorePercent   = 100
	minUsageAge      = time.Second
	maxUsageAge      = time.Hour
	namespacePattern = `^[A-Za-z0-9]+([._-][A-Za-z0-9]+)*$`
)

// MinLayerBytes is the least limit of a writable layer that makes sense: a container
// can't start in less.
const MinLayerBytes = 1 << 20

// Validate looks at every field; the error is nil or Faults with all that is
// wrong, without places. Nothing outside of c is looked at: whether sockets and
// folders exist is the business of who uses them.
func (c Config) Validate() error {
	if faults := c.faults(); len(faults) > 0 {
		return faults
	}
	return nil
}

// ValidatePassthrough looks at what `cleave serve --passthrough` uses: the
// sockets of runtime and cleave, and the log. The rest may be wrong.
func (c Config) ValidatePassthrough() error {
	c.Mode = ModeCRI // it has no meaning there
	used := []string{"runtime.endpoint", "listen.endpoint", "log.level", "log.format"}
	faults := slices.DeleteFunc(c.faults(), func(f Fault) bool { return !slices.Contains(used, f.Key) })
	if len(faults) > 0 {
		return faults
	}
	return nil
}

// crioSockets are the spellings of the one socket that mode crio can have.
var crioSockets = []string{listenCRIO.Path(), "/var" + listenCRIO.Path()}

func (c Config) faults() Faults {
	var out Faults
	fault := func(key, format string, args ...any) {
		out = append(out, Fault{Key: key, Message: fmt.Sprintf(format, args...)})
	}

	if c.Version != Version {
		fault("version", "%s", versionMessage(c.Version))
	}
	switch c.Mode {
	case ModeCRI, ModeObserve:
	case ModeCRIO:
		if p := path.Clean(c.Listen.Endpoint.Path()); !slices.Contains(crioSockets, p) {
			fault("listen.endpoint", "%s: in mode crio it has to be %s, the one place where a kubelet looks for CRI-O; leave the key out",
				strict.Shown(c.Listen.Endpoint.String()), listenCRIO)
		}
	default:
		fault("mode", "%s", oneOf(string(c.Mode), string(ModeCRI), string(ModeCRIO), string(ModeObserve)))
	}

	endpoints := []struct {
		key string
		e   Endpoint
	}{
		{"runtime.endpoint", c.Runtime.Endpoint},
		{"listen.endpoint", c.Listen.Endpoint},
		{"control.endpoint", c.Control.Endpoint},
		{"crio.nriEndpoint", c.CRIO.NRIEndpoint},
		{"snapshotter.endpoint", c.Snapshotter.Endpoint},
		{"snapshotter.statusEndpoint", c.Snapshotter.StatusEndpoint},
	}
	for i, at := range endpoints {
		if message := at.e.fault(); message != "" {
			fault(at.key, "%s: %s", strict.Shown(string(at.e)), message)
			continue
		}
		for _, other := range endpoints[:i] {
			if path.Clean(at.e.Path()) == path.Clean(other.e.Path()) {
				fault(at.key, "%s is also %s; each needs its own socket", strict.Shown(at.e.String()), other.key)
				out[len(out)-1].Other = other.key
			}
		}
	}
	if message := namespaceFault(c.Runtime.Namespace); message != "" {
		fault("runtime.namespace", "%s", message)
	}

	for _, p := range []struct {
		key, value          string
		mayBeEmpty, notRoot bool
	}{
		{"stateDir", c.StateDir, false, true},
		{"filesystems.nodefs", c.Filesystems.NodeFS, false, false},
		{"filesystems.logs", c.Filesystems.Logs, false, false},
		{"filesystems.imagefs", c.Filesystems.ImageFS, true, false},
		{"filesystems.containerfs", c.Filesystems.ContainerFS, true, false},
		{"crio.kubeletTokenFile", c.CRIO.KubeletTokenFile, true, true},
		{"reclaim.kubeconfig", c.Reclaim.Kubeconfig, true, true},
		{"snapshotter.imageRoot", c.Snapshotter.ImageRoot, true, true},
		{"snapshotter.containerRoot", c.Snapshotter.ContainerRoot, true, true},
		{"snapshotter.database", c.Snapshotter.Database, false, true},
	} {
		switch message := textFault(p.value); {
		case p.value == "" && p.mayBeEmpty:
		case p.value == "":
			fault(p.key, "must not be empty; leave the key out for the default")
		case !strings.HasPrefix(p.value, "/"):
			fault(p.key, "%s must be an absolute path", strict.Shown(p.value))
		case len(p.value) > maxPathBytes:
			fault(p.key, "the path has %d bytes, but the kernel takes only %d", len(p.value), maxPathBytes)
		case message != "":
			fault(p.key, "%s: %s", strict.Shown(p.value), message)
		case p.notRoot && path.Clean(p.value) == "/":
			fault(p.key, "must not be the root directory")
		}
	}

	if c.Measure.Period < minPeriod {
		fault("measure.period", "must be at least %v, not %v", minPeriod, c.Measure.Period)
	}
	if p := c.Measure.MaxCorePercent; p < minCorePercent || p > maxCorePercent {
		fault("measure.maxCorePercent", "must be from %d to %d, not %d", minCorePercent, maxCorePercent, p)
	}
	if l := c.Memory.LimitBytes; l != 0 && l < minMemoryBytes {
		fault("memory.limit", "must be at least %s, or 0 for no limit, not %s", strict.FormatBytes(minMemoryBytes), strict.FormatBytes(l))
	}
	if at := c.Metrics.Address; at != "" {
		if a, err := netip.ParseAddrPort(at); err != nil || a.Port() == 0 {
			fault("metrics.address", "%s: want an IP address and a port, as 127.0.0.1:9753", strict.Shown(at))
		}
	}
	if message := oneOf(string(c.Reclaim.EvictBy), string(EvictByKubernetes), string(EvictStandalone)); message != "" {
		fault("reclaim.evictBy", "%s", message)
	}
	if message := oneOf(c.Log.Level, "debug", "info", "warn", "error"); message != "" {
		fault("log.level", "%s", message)
	}
	if message := oneOf(c.Log.Format, "json", "console"); message != "" {
		fault("log.format", "%s", message)
	}
	switch l := c.Limits.WritableLayerBytes; {
	case l == 0:
	case l < MinLayerBytes:
		fault("limits.writableLayer", "must be at least %s, or 0 for no limit, not %s", strict.FormatBytes(MinLayerBytes), strict.FormatBytes(l))
	case !c.Snapshotter.ProjectQuota || !c.Snapshotter.Enabled():
		fault("limits.writableLayer", "the kernel keeps limits by project quota: set snapshotter.projectQuota too, and the snapshotter's roots")
		out[len(out)-1].Other = "snapshotter.projectQuota"
	}
	switch {
	case !c.Limits.FromPods:
	case !c.Snapshotter.ProjectQuota || !c.Snapshotter.Enabled():
		fault("limits.fromPods", "the kernel keeps limits by project quota: set snapshotter.projectQuota too, and the snapshotter's roots")
		out[len(out)-1].Other = "snapshotter.projectQuota"
	case !c.Reclaim.Enabled:
		fault("limits.fromPods", "pods' limits are known only where reclaim.enabled is set")
		out[len(out)-1].Other = "reclaim.enabled"
	}
	for _, option := range []struct {
		key string
		on  bool
	}{{"admission", c.Kube.Admission}, {"conditions", c.Kube.Conditions}, {"events", c.Kube.Events}, {"taint", c.Kube.Taint}} {
		if option.on && !c.Reclaim.Enabled {
			fault("kube."+option.key, "goes by the thresholds of reclaim: set reclaim.enabled too")
			out[len(out)-1].Other = "reclaim.enabled"
		}
	}
	if c.Kube.Taint && c.Reclaim.Kubeconfig == "" {
		fault("kube.taint", "a kubelet may not change its node's taints: set reclaim.kubeconfig to a service account's")
		out[len(out)-1].Other = "reclaim.kubeconfig"
	}
	out = append(out, c.Snapshotter.faults()...)
	return out
}

// faults are those of the snapshotter that are not of one path or socket alone.
func (s Snapshotter) faults() Faults {
	var out Faults
	fault := func(key, format string, args ...any) {
		out = append(out, Fault{Key: "snapshotter." + key, Message: fmt.Sprintf(format, args...)})
	}
	switch image, container := path.Clean(s.ImageRoot), path.Clean(s.ContainerRoot); {
	case s.ImageRoot == "" && s.ContainerRoot == "":
	case s.ImageRoot == "":
		fault("imageRoot", "is missing, and containerRoot is given: the snapshotter needs both, or none if it is not used")
		out[len(out)-1].Other = "snapshotter.containerRoot"
	case s.ContainerRoot == "":
		fault("containerRoot", "is missing, and imageRoot is given: the snapshotter needs both, or none if it is not used")
		out[len(out)-1].Other = "snapshotter.imageRoot"
	case image == container:
		fault("containerRoot", "%s is also imageRoot; each needs its own folder", strict.Shown(s.ContainerRoot))
	case strings.HasPrefix(container, image+"/"):
		fault("containerRoot", "%s is inside imageRoot; neither may be inside the other", strict.Shown(s.ContainerRoot))
	case strings.HasPrefix(image, container+"/"):
		fault("imageRoot", "%s is inside containerRoot; neither may be inside the other", strict.Shown(s.ImageRoot))
	}
	roots := []struct{ key, path string }{{"imageRoot", s.ImageRoot}, {"containerRoot", s.ContainerRoot}}
	for _, r := range roots {
		if strings.ContainsAny(r.path, `,:\`) {
			fault(r.key, "%s has a comma, colon or backslash, which the mount options of overlayfs can't hold", strict.Shown(r.path))
		}
	}
	if strings.HasSuffix(s.Database, "/") {
		fault("database", "%s names a folder, not a file", strict.Shown(s.Database))
	}
	for _, r := range roots {
		if r.path != "" && strings.HasPrefix(path.Clean(s.Database)+"/", path.Clean(r.path)+"/") {
			fault("database", "%s is inside %s; put it outside of both, best on a third filesystem", strict.Shown(s.Database), r.key)
		}
	}
	for _, ns := range s.Namespaces {
		if message := namespaceFault(ns); message != "" {
			fault("namespaces", "%s", message)
		}
	}
	for _, o := range s.MountOptions {
		name, _, _ := strings.Cut(o, "=")
		switch {
		case o == "" || strings.ContainsAny(o, ",") || textFault(o) != "":
			fault("mountOptions", "%s is no single mount option", strict.Shown(o))
		case slices.Contains(ownMountOptions, name):
			fault("mountOptions", "%s: the snapshotter sets %s itself", strict.Shown(o), name)
		}
	}
	if s.UsageMaxAge < minUsageAge || s.UsageMaxAge > maxUsageAge {
		fault("usageMaxAge", "must be from %v to %v, not %v", minUsageAge, maxUsageAge, s.UsageMaxAge)
	}
	if s.DeletionsPerSecond < 0 {
		fault("deletionsPerSecond", "must be 1 or more, or 0 for no limit, not %d", s.DeletionsPerSecond)
	}
	if p := s.CleanupMaxPercent; p < 1 || p > 100 {
		fault("cleanupMaxPercent", "must be from 1 to 100, not %d", p)
	}
	return out
}

// ownMountOptions are those of overlay that say which layers are mounted.
var ownMountOptions = []string{"lowerdir", "upperdir", "workdir", "datadir", "lowerdir+", "datadir+", "uidmap", "gidmap", "ro", "rw", "remount", "bind"}

// namespaceFault is the rule of containerd's identifiers; it refuses others.
func namespaceFault(namespace string) string {
	if len(namespace) <= maxNamespace && regexp.MustCompile(namespacePattern).MatchString(namespace) {
		return ""
	}
	return fmt.Sprintf("%s is no containerd namespace: letters, digits and single . _ - between them, %d at most", strict.Shown(namespace), maxNamespace)
}

// oneOf says that value is none of known, or nothing if it is.
func oneOf(value string, known ...string) string {
	if slices.Contains(known, value) {
		return ""
	}
	last := len(known) - 1
	return fmt.Sprintf("must be %s or %s, not %s", strings.Join(known[:last], ", "), known[last], strict.Shown(value))
}
