package kubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cleave-cri/cleave/doctor"
)

// firstSplit is the first minor version that may be told of a split (KSS-2).
const firstSplit = 32

// ProvedWithCRIO says whether mode crio was run with a kubelet of this version, so that it may be told of a split (KSS-2;
// docs/compatibility.md).
func (v Version) ProvedWithCRIO() bool {
	return v.Known() && v.Major == 1 && v.Minor >= provedFrom && v.Minor <= provedTo
}

// ProvedRange names the versions that mode crio was run with, for people.
func ProvedRange() string {
	if provedFrom == provedTo {
		return fmt.Sprintf("v1.%d", provedTo)
	}
	return fmt.Sprintf("v1.%d to v1.%d", provedFrom, provedTo)
}

// crioSuffix is what the kubelet looks for in the endpoint (KSS-1).
const crioSuffix = "run/crio/crio.sock"

// Found is the check that a kubelet was found, from what Find returned.
func Found(s Settings, err error) doctor.Result {
	var inFile *FileError
	switch {
	case errors.Is(err, ErrNotRunning):
		return doctor.Passed("no kubelet runs here; what it would have to be checked for is not looked at")
	case errors.Is(err, ErrSeveral):
		return doctor.Warned(err.Error(), "give the one that is meant cleave's socket; nothing about kubelets is checked until then")
	case errors.Is(err, ErrGone):
		return doctor.Warned(err.Error(), "the kubelet is being restarted; run `cleave doctor` again")
	case errors.As(err, &inFile):
		return doctor.Warned(err.Error(), "correct the file: the kubelet would not start with it again")
	case err != nil:
		return doctor.Warned(err.Error(), "run `cleave doctor` as root, in the host's PID namespace")
	}
	reason := fmt.Sprintf("process %d, %s, since %s", s.PID, s.Version, s.Started.Format("2006-01-02 15:04:05"))
	if changed := s.ChangedSince(); len(changed) > 0 {
		return doctor.Warned(fmt.Sprintf("%s; but %s changed since, so it may run with other settings than those that are checked here", reason, strings.Join(changed, ", ")),
			"restart the kubelet")
	}
	if len(s.UnknownFlags) > 0 {
		reason += "; not known here: " + strings.Join(s.UnknownFlags, ", ")
	}
	return doctor.Passed("%s", reason)
}

// Checks are those about a kubelet that was found.
func Checks(s Settings, f Facts) []doctor.Check {
	check := func(name string, judge func(Settings, Facts) doctor.Result) doctor.Check {
		return doctor.Check{Name: name, Run: func(context.Context) doctor.Result { return judge(s, f) }}
	}
	return []doctor.Check{
		check("mode cri", ModeCRI),
		check("mode crio", ModeCRIO),
		check("kubelet's thresholds", Thresholds),
		check("disk of pod logs", PodLogs),
		check("kubeadm", Kubeadm),
		check("SELinux labels", Labels),
	}
}

// ModeCRI says whether the kubelet's calls reach cleave, and what it makes of the
// answers.
func ModeCRI(s Settings, f Facts) doctor.Result {
	endpoint := SocketPath(s.RuntimeEndpoint.Value)
	images := SocketPath(s.EffectiveImageEndpoint())
	old := s.Version.Known() && !s.Version.AtLeast(1, firstSplit)
	oneDisk := f.NodeFS != nil && f.ImageFS != nil && f.NodeFS.Device == f.ImageFS.Device
	switch {
	case old && !oneDisk:
		reason := fmt.Sprintf("kubelet %s takes a split filesystem for one of images and acts on the wrong disk (KSS-2)", s.Version)
		remedy := fmt.Sprintf("upgrade the kubelet to 1.%d or later, or use mode observe", firstSplit)
		if f.Mode != "cri" {
			return doctor.Passed("would not work here: %s", reason)
		}
		return doctor.Failed(reason, remedy)
	case f.Mode != "cri":
		return doctor.Passed("possible here; cleave is configured for mode %s", f.Mode)
	case withoutVar(endpoint) != withoutVar(f.Socket):
		return doctor.Warned(fmt.Sprintf("the kubelet asks %s (%s), not cleave: it sees nothing of what cleave corrects", shown(s.RuntimeEndpoint.Value), s.RuntimeEndpoint.From),
			fmt.Sprintf("set containerRuntimeEndpoint: unix://%s in its configuration and restart it", f.Socket))
	case withoutVar(images) != withoutVar(f.Socket):
		return doctor.Warned(fmt.Sprintf("imageServiceEndpoint is %s (%s): the kubelet asks there about the image filesystem, past cleave", shown(s.ImageEndpoint.Value), s.ImageEndpoint.From),
			"take imageServiceEndpoint out of its configuration and restart it")
	case !s.Version.Known():
		return doctor.Warned(fmt.Sprintf("the kubelet's version can't be read from its program; one before 1.%d would take a split filesystem for one of images (KSS-2)", firstSplit),
			"make sure that it is not older, with `kubelet --version`")
	}
	return doctor.Passed("the kubelet asks cleave (%s)", s.RuntimeEndpoint.From)
}

// ModeCRIO says whether mode crio works here, and if not, why not.
func ModeCRIO(s Settings, f Facts) doctor.Result {
	var against, remedies []string
	no := func(remedy, format string, args ...any) {
		against = append(against, fmt.Sprintf(format, args...))
		if remedy != "" && !slices.Contains(remedies, remedy) {
			remedies = append(remedies, remedy)
		}
	}
	uses := strings.HasSuffix(s.RuntimeEndpoint.Value, crioSuffix)

	switch {
	case !s.Version.Known():
		no("", "the kubelet's version can't be read from its program")
	case !s.Version.AtLeast(1, firstSplit):
		no("upgrade the kubelet", "kubelet %s is older than 1.%d (KSS-2)", s.Version, firstSplit)
	case !s.Version.ProvedWithCRIO():
		no("use a kubelet that the mode was run with", "the mode was not run with kubelet %s, only with %s", s.Version, ProvedRange())
	}
	fromCRI, known := s.Gate(GateStatsFromCRI)
	switch {
	case !known:
		no("set the feature gate "+GateStatsFromCRI+" to false", "whether the feature gate %s is off is not known", GateStatsFromCRI)
	case fromCRI:
		no("set the feature gate "+GateStatsFromCRI+" to false", "the feature gate %s is on (%s), which keeps the kubelet from its split figures (KSS-1)", GateStatsFromCRI, s.gateFrom(GateStatsFromCRI))
	}
	if separate, known := s.Gate(GateSeparateDiskGC); known && !separate {
		no("set the feature gate "+GateSeparateDiskGC+" to true", "the feature gate %s is off (%s): a kubelet that sees a split evicts nothing then (LAY-14)", GateSeparateDiskGC, s.gateFrom(GateSeparateDiskGC))
	}
	if !s.LocalStorageCapacityIsolation.Value {
		no("set localStorageCapacityIsolation to true", "localStorageCapacityIsolation is false (%s): the kubelet measures no disk then (OBS-12)", s.LocalStorageCapacityIsolation.From)
	}
	if s.ImageEndpoint.Value != "" && withoutVar(SocketPath(s.ImageEndpoint.Value)) != withoutVar(crioSocket) {
		no("take imageServiceEndpoint out", "imageServiceEndpoint is %s (%s): the kubelet asks there about the image filesystem", shown(s.ImageEndpoint.Value), s.ImageEndpoint.From)
	}
	if len(f.RunsCRIO) > 0 {
		no("mode crio is for nodes without CRI-O", "a real CRI-O runs on this node (process %d)", f.RunsCRIO[0])
	}
	for _, socket := range f.Sockets {
		if socket.Path != crioSocket || socket.Owner == "cleave" || len(f.RunsCRIO) > 0 {
			continue
		}
		no("stop what listens on "+crioSocket, "%s is in use by %s", crioSocket, cmp.Or(socket.Owner, "a process that is not known"))
	}
	if f.VarRunIsRun != nil && !*f.VarRunIsRun {
		no("make /var/run a link to /run", "/var/run is not /run: the kubelet asks %s about the storage and can't be told otherwise (KSS-4)", crioSocket)
	}
	if f.Mode == "crio" && !uses {
		no("set containerRuntimeEndpoint: unix:///"+crioSuffix, "the kubelet's endpoint is %s (%s), which does not end in %s (KSS-1)", shown(s.RuntimeEndpoint.Value), s.RuntimeEndpoint.From, crioSuffix)
	}

	switch {
	case len(against) == 0 && f.Mode != "crio":
		return doctor.Passed("possible here; cleave is configured for mode %s", f.Mode)
	case len(against) == 0:
		return doctor.Passed("the kubelet takes its figures from cleave as from CRI-O")
	case f.Mode == "crio":
		return doctor.Failed(strings.Join(against, "; "), remedy(remedies, "use mode cri"))
	case uses && fromCRI && len(f.RunsCRIO) == 0:
		// What is left of the mode after an upgrade of the kubelet.
		return doctor.Failed(strings.Join(against, "; ")+"; yet its endpoint ends in "+crioSuffix+", so that it ranks for a split that it does not see (LAY-15)",
			remedy(remedies, "give the kubelet another endpoint"))
	}
	return doctor.Passed("would not work here: %s", strings.Join(against, "; "))
}

func remedy(list []string, otherwise string) string {
	if len(list) == 0 {
		return otherwise
	}
	return strings.Join(list, "; ") + "; or " + otherwise
}

// gateFrom says where a gate's value comes from.
func (s Settings) gateFrom(name string) Origin {
	for _, candidate := range []string{name, "AllBeta", "AllAlpha"} {
		if set, ok := s.FeatureGates.Entries[candidate]; ok {
			return set.From
		}
	}
	return standardOrigin
}

// Thresholds says which disks the kubelet does not watch, and which of its
// thresholds can't work.
func Thresholds(s Settings, f Facts) doctor.Result {
	var broken, doubtful []string
	if missing := unwatched(s, f); len(missing) > 0 {
		why := fmt.Sprintf("evictionHard (%s) replaces the kubelet's defaults (THR-15, THR-18)", s.EvictionHard.From)
		switch {
		case !s.EvictionHard.From.IsSet():
			why = "evictionHard is not set, and without a file of --config there are no defaults (THR-14)"
		case s.MergeDefaultEviction.Value && s.MergeDefaultEviction.From.Kind == DropIn:
			why = fmt.Sprintf("evictionHard (%s) replaces the defaults; mergeDefaultEvictionSettings has no effect in a drop-in (%s; THR-17)", s.EvictionHard.From, s.MergeDefaultEviction.From)
		}
		doubtful = append(doubtful, fmt.Sprintf("nothing is evicted for %s: %s", strings.Join(missing, ", "), why))
	}
	for _, setting := range []struct {
		name string
		m    Map[string]
	}{{"evictionHard", s.EvictionHard}, {"evictionSoft", s.EvictionSoft}} {
		for _, signal := range setting.m.Keys() {
			e := setting.m.Entries[signal]
			what := fmt.Sprintf("%s %s<%s (%s)", setting.name, signal, e.Value, e.From)
			if _, ok := s.EvictionSoftGracePeriod.Entries[signal]; !ok && setting.name == "evictionSoft" && e.Value != "0%" && e.Value != "100%" {
				broken = append(broken, what+": has no evictionSoftGracePeriod, the kubelet would not start with it again (THR-10)")
			}
			disk, inodes, isDisk := f.diskOf(signal)
			if !isDisk {
				if !isSignal(signal) {
					broken = append(broken, what+": there is no such signal, the kubelet would not start with it again")
				}
				continue
			}
			if strings.HasPrefix(signal, "containerfs.") {
				doubtful = append(doubtful, what+": the kubelet replaces it by that of another filesystem (THR-20)")
				continue
			}
			capacity, attainable, known := measure(disk, inodes)
			v, err := judge(e.Value, capacity, attainable)
			switch {
			case err != nil:
				broken = append(broken, fmt.Sprintf("%s: %v, the kubelet would not start with it again", what, err))
			case !known:
			case v == always:
				broken = append(broken, fmt.Sprintf("%s: is met even when the disk is empty, where %s of %s are available", what, amount(attainable, inodes), amount(capacity, inodes)))
			case v == never && e.From.Kind != Default && (!inodes || disk.Inodes != nil):
				doubtful = append(doubtful, what+": can't be met")
			}
		}
	}
	if s.EvictionPressureTransition.Value == 0 {
		doubtful = append(doubtful, fmt.Sprintf("evictionPressureTransitionPeriod is 0 (%s): pods are evicted, but DiskPressure is never reported (SYN-13)", s.EvictionPressureTransition.From))
	}
	const remedy = "correct it in the kubelet's configuration and restart the kubelet; docs/kubelet.md says how"
	switch all := strings.Join(append(broken, doubtful...), "; "); {
	case len(broken) > 0:
		return doctor.Failed(all, remedy)
	case len(doubtful) > 0:
		return doctor.Warned(all, remedy)
	}
	return doctor.Passed("every disk is watched, and each threshold can be met (%s)", s.EvictionHard.From)
}

// diskSignals are those that keep a disk from filling up.
func diskSignals() []string {
	return []string{"nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree"}
}

// isSignal is about the signals that are no disk's (SIG-1).
func isSignal(s string) bool {
	return slices.Contains([]string{"memory.available", "allocatableMemory.available", "pid.available"}, s)
}

// unwatched lists the disk signals for which nothing is evicted. On one disk a
// threshold of either name watches it.
func unwatched(s Settings, f Facts) []string {
	watched := func(signal string) bool {
		for _, m := range []Map[string]{s.EvictionHard, s.EvictionSoft} {
			if e, ok := m.Entries[signal]; ok && e.Value != "0%" && e.Value != "100%" {
				return true
			}
		}
		return false
	}
	oneDisk := f.NodeFS != nil && f.ImageFS != nil && f.NodeFS.Device == f.ImageFS.Device
	var out []string
	for _, signal := range diskSignals() {
		disk, inodes, _ := f.diskOf(signal)
		if inodes && disk != nil && disk.Inodes == nil {
			continue // it can't run out of them
		}
		name, kind, _ := strings.Cut(signal, ".")
		other := map[string]string{"nodefs": "imagefs.", "imagefs": "nodefs."}[name] + kind
		if !watched(signal) && !(oneDisk && watched(other)) {
			out = append(out, signal)
		}
	}
	return out
}

// diskOf says which filesystem a signal is about, if any; disk is nil if nothing
// is known about it.
func (f Facts) diskOf(signal string) (disk *Disk, inodes, ok bool) {
	name, kind, _ := strings.Cut(signal, ".")
	if kind != "available" && kind != "inodesFree" {
		return nil, false, false
	}
	switch name {
	case "nodefs":
		disk = f.NodeFS
	case "imagefs":
		disk = f.ImageFS
	case "containerfs":
	default:
		return nil, false, false
	}
	return disk, kind == "inodesFree", true
}

func measure(d *Disk, inodes bool) (capacity, attainable uint64, known bool) {
	switch {
	case d == nil:
		return 0, 0, false
	case !inodes:
		return d.CapacityBytes, d.AttainableBytes, true
	case d.Inodes == nil:
		return 0, 0, true // the kubelet takes this for 0 of 0 (OBS-11)
	}
	return *d.Inodes, *d.Inodes, true
}

// amount writes a figure for people.
func amount(n uint64, inodes bool) string {
	if inodes {
		return fmt.Sprintf("%d inodes", n)
	}
	const gib = 1 << 30
	return fmt.Sprintf("%.1f GiB", float64(n)/gib)
}

// PodLogs says whether the kubelet watches the disk that pods log to: it only
// looks at that of its root folder (OBS-3).
func PodLogs(s Settings, f Facts) doctor.Result {
	switch {
	case f.NodeFS == nil || f.Logs == nil:
		why := "the filesystems could not be looked at"
		if f.SameMounts != nil && !*f.SameMounts {
			why = "the kubelet has other mounts than this process"
		}
		return doctor.Passed("not checked: %s", why)
	case f.NodeFS.Device == f.Logs.Device:
		return doctor.Passed("%s and %s are on one filesystem, %s", s.PodLogsDir.Value, s.RootDir.Value, f.Logs.Device)
	case f.ImageFS != nil && f.ImageFS.Device == f.Logs.Device:
		return doctor.Warned(fmt.Sprintf("%s is on %s as images are; the kubelet counts logs as if they were on %s (%s)", s.PodLogsDir.Value, f.Logs.Device, f.NodeFS.Device, s.RootDir.Value),
			"put podLogsDir on the filesystem of the kubelet's root folder")
	}
	return doctor.Warned(fmt.Sprintf("%s is on %s, the kubelet's root folder %s on %s: nobody notices when logs fill their disk", s.PodLogsDir.Value, f.Logs.Device, s.RootDir.Value, f.NodeFS.Device),
		"put podLogsDir on the filesystem of the kubelet's root folder, or watch it by other means")
}

// Kubeadm says whether kubeadm will refuse for having found two runtimes.
func Kubeadm(s Settings, f Facts) doctor.Result {
	var found []string
	for _, socket := range f.Sockets {
		found = append(found, socket.Path)
	}
	if len(found) < 2 {
		return doctor.Passed("finds one runtime at most")
	}
	if !f.Kubeadm {
		return doctor.Passed("is not used here; it would find several runtimes: %s", strings.Join(found, ", "))
	}
	return doctor.Warned("finds several runtimes and refuses to choose: "+strings.Join(found, ", "),
		fmt.Sprintf("call it with --cri-socket %s, or write that as nodeRegistration.criSocket in its configuration", cmp.Or(s.RuntimeEndpoint.Value, "unix:///PATH")))
}

// Labels says whether SELinux would keep pods and the kubelet from cleave's
// files.
func Labels(_ Settings, f Facts) doctor.Result {
	if !f.SELinux.Enabled {
		return doctor.Passed("not checked: SELinux is not in use here")
	}
	var wrong, remedies []string
	for _, l := range f.SELinux.Labels {
		switch {
		case l.Err != nil:
			wrong = append(wrong, fmt.Sprintf("%s: %v", l.Path, l.Err))
		case typeOf(l.Label) != typeOf(l.ModelLabel):
			wrong = append(wrong, fmt.Sprintf("%s is %s, but %s is %s", l.Path, cmp.Or(l.Label, "without a label"), l.Model, cmp.Or(l.ModelLabel, "without a label")))
			remedies = append(remedies, fmt.Sprintf("semanage fcontext -a -e %s %s && restorecon -R %s", l.Model, l.Path, l.Path))
		}
	}
	switch {
	case len(wrong) == 0:
		return doctor.Passed("%d of cleave's paths have the types of the runtime's", len(f.SELinux.Labels))
	case f.SELinux.Enforcing:
		return doctor.Failed(strings.Join(wrong, "; "), strings.Join(append(remedies, "then restart cleave"), "; "))
	}
	return doctor.Warned(strings.Join(wrong, "; ")+"; SELinux only complains about it (permissive)", strings.Join(append(remedies, "then restart cleave"), "; "))
}

// typeOf is the type in a label user:role:type:level, which is what policies are
// about.
func typeOf(label string) string {
	parts := strings.SplitN(label, ":", 4)
	if len(parts) < 3 {
		return label
	}
	return parts[2]
}
