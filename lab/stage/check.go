package stage

import (
	"debug/elf"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/distribution/reference"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/cleave-cri/cleave/config/strict"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/scenario"
)

const (
	// mostLasts is the longest that a scenario may last on a real node, where nobody
	// can make time pass.
	mostLasts = time.Hour
	// mostImageBytes bounds what all images take, since they are made in memory.
	mostImageBytes = 1 << 30
	// mostImageFiles bounds their files, for the same reason.
	mostImageFiles = 100_000
	// spareBytes is what a node needs besides its disks: logs, records, programs' own
	// files.
	spareBytes = 128 << 20
)

// least is the smallest filesystem that is made of each type.
func least(fs disk.FS) int64 {
	switch fs {
	case disk.XFS:
		return 300 << 20
	case disk.Btrfs:
		return 256 << 20
	default:
		return 32 << 20
	}
}

// Playable says what of a scenario can't be had on a real node: all of it, joined.
func Playable(s *scenario.Scenario, standard disk.FS) error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if s.Lasts > mostLasts {
		fault("lasts: %s is longer than %s, and here time passes by itself", s.Lasts, mostLasts)
	}
	for _, f := range s.Filesystems {
		fs := typeOf(f, standard)
		if f.SizeBytes < least(fs) {
			fault("filesystems.%s: %s is too small for %s, which wants at least %s", f.Name, strict.FormatBytes(f.SizeBytes), fs, strict.FormatBytes(least(fs)))
		}
		if f.Inodes > 0 && fs != disk.Ext4 {
			fault("filesystems.%s: only ext4 has a number of inodes that can be chosen; give type: ext4, or leave inodes out", f.Name)
		}
		if f.FreesAfter > 0 {
			fault("filesystems.%s: freesAfter is for the simulator; a real filesystem takes its own time", f.Name)
		}
	}
	if l := s.Layout; l.ContainerFS != l.ImageFS && l.ImageFS == l.NodeFS {
		fault("layout: images with the node and containers apart is none of the four layouts")
	}
	images, files := int64(0), int64(0)
	for _, i := range s.Images {
		for _, l := range i.Layers {
			images, files = saturated(images, l.Bytes), saturated(files, l.Inodes)
		}
		if i.ReportedBytes > 0 {
			fault("images.%s: reported is for the simulator; containerd says by itself what an image takes", i.Name)
		}
	}
	if images > mostImageBytes {
		fault("images: they take %s, and the lab makes at most %s", strict.FormatBytes(images), strict.FormatBytes(mostImageBytes))
	}
	if files > mostImageFiles {
		fault("images: they have more than %d files, and the lab makes no more", mostImageFiles)
	}
	if s.PullBytesPerSecond > 0 {
		fault("pullBytesPerSecond is for the simulator; the lab's registry is on the same machine")
	}
	if len(s.Cleave.Options) > 0 || s.Cleave.OwnerPerHour > 0 || s.Cleave.PerHour > 0 || s.Cleave.LogBudgetBytes > 0 {
		fault("cleave: options, logBudget, ownerPerHour and perHour are for the simulator; a real cleave has no such settings")
	}
	for _, p := range s.Pods {
		if p.Static {
			fault("pods.%s: static pods are for the simulator", p.Name)
		}
		if p.PodLevelMemoryBytes > 0 {
			fault("pods.%s: podLevelMemory is for the simulator", p.Name)
		}
	}
	split := s.Layout.ContainerFS != s.Layout.ImageFS
	for i, f := range s.Faults {
		switch f.Kind {
		case scenario.ContainerdKilled, scenario.RootUnmounted, scenario.DiskFull:
		case scenario.SnapshotterKilled:
			if !split {
				fault("faults[%d]: there is a snapshotter of its own in the layouts split and separate only", i)
			}
		default:
			fault("faults[%d]: %q is for the simulator; the lab can do %q, %q, %q and %q", i, f.Kind,
				scenario.ContainerdKilled, scenario.SnapshotterKilled, scenario.RootUnmounted, scenario.DiskFull)
		}
	}
	faults = append(faults, names(s)...)
	if len(faults) > 0 {
		return fmt.Errorf("this scenario can't be played on a real node:\n%w", errors.Join(faults...))
	}
	return nil
}

// playableBy says what of a scenario can't be had with a real kubelet: all of it, joined.
func playableBy(s *scenario.Scenario, profile sim.Profile) error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if profile == sim.CleaveProfile && s.Cleave.LastResort != nil {
		fault("cleave.lastResort: a real kubelet goes by the thresholds that cleave reads, and would evict here")
	}
	for _, p := range s.Pods {
		for _, c := range p.Containers {
			if c.RestartsAfter != nil {
				fault("pods.%s.%s: restartsAfter: a real kubelet waits for ten seconds, then longer and longer", p.Name, c.Name)
			}
		}
	}
	if len(faults) > 0 {
		return fmt.Errorf("this scenario can't be played with a real kubelet, leave --kubelet out:\n%w", errors.Join(faults...))
	}
	return nil
}

// own are files and folders of a lab, beside those of its disks.
var own = []string{"account.kubeconfig", "certs", "cleave", "ctd", "janitor.log", "keep", "kubelet", aboutFile, "lock", "notes", "passthrough", "plane", "tmp"}

// names says which names can't be those of folders, or of what Kubernetes names so.
func names(s *scenario.Scenario) (faults []error) {
	check := func(where, what, name string, rule func(string) []string) {
		for _, text := range rule(name) {
			faults = append(faults, fmt.Errorf("%s: the %s %q can't be had on a real node: %s", where, what, name, text))
		}
	}
	element := func(name string) []string {
		if name != filepath.Base(name) {
			return []string{"it must have no slash, as it names a folder"}
		}
		return nil
	}
	for _, f := range s.Filesystems {
		check("filesystems."+f.Name, "name", f.Name, func(name string) []string {
			if strings.Contains(name, ":") {
				return []string{"it must have no colon, at which overlayfs takes paths apart"}
			}
			return element(name)
		})
		if slices.Contains(own, f.Name) {
			faults = append(faults, fmt.Errorf("filesystems.%s: the lab has something else of that name: choose another", f.Name))
		}
	}
	pulled := map[string]string{}
	for _, i := range s.Images {
		where, ref := "images."+i.Name, Reference(i.Name)
		check(where, "name", i.Name, func(string) []string {
			if named, err := reference.ParseNormalizedNamed(ref); err != nil || named.String() != ref {
				return []string{"a registry has letters, digits and single dots, dashes and underscores between them in names"}
			}
			return nil
		})
		if other, ok := pulled[ref]; ok {
			faults = append(faults, fmt.Errorf("%s: a registry knows no capital letters, so this is the image %q: choose another name", where, other))
		}
		pulled[ref] = i.Name
	}
	for _, h := range s.Host {
		check("host."+h.Name, "name", h.Name, element)
	}
	for _, p := range s.Pods {
		where := "pods." + p.Name
		check(where, "name", p.Name, validation.IsDNS1123Subdomain)
		check(where, "namespace", p.Namespace, validation.IsDNS1123Label)
		for _, v := range p.Volumes {
			check(where+".volumes."+v.Name, "name", v.Name, func(name string) []string {
				if strings.HasPrefix(name, "lab-") {
					return []string{"what begins with lab- is the lab's own"}
				}
				return validation.IsDNS1123Label(name)
			})
		}
		for _, c := range p.Containers {
			check(where+".containers."+c.Name, "name", c.Name, validation.IsDNS1123Label)
		}
	}
	return faults
}

// saturated is a sum, as far as an int64 goes. None is negative.
func saturated(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// room says whether the machine has space for the disks, should they fill up.
func room(dir string, s *scenario.Scenario) error {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return fmt.Errorf("look for space: %w", err)
	}
	want := int64(spareBytes)
	for _, f := range s.Filesystems {
		want = saturated(want, f.SizeBytes)
	}
	have := int64(st.Bavail) * st.Bsize //nolint:gosec // of a real disk
	if have < want {
		return fmt.Errorf("the disks may grow to %s, and %s has %s left: free some, or set TMPDIR to a short path on another disk",
			strict.FormatBytes(want), dir, strict.FormatBytes(have))
	}
	return nil
}

// Programs are the programs that a node runs, as paths.
type Programs struct {
	// Cleave is this program, or another build of it. It must be static: it is also
	// what containers run.
	Cleave string
	// Containerd, Shim and Runc are containerd's.
	Containerd, Shim, Runc string
	// Dir is a folder in which programs are looked for before PATH; empty for none.
	Dir string

	// kubelet, apiserver and etcd are looked for if there is to be a real kubelet.
	kubelet, apiserver, etcd string
}

const shimName = "containerd-shim-runc-v2"

// Find fills in what is not given: this program itself, the others from Dir and
// PATH, the shim also from beside containerd. withKubelet looks for the kubelet and
// its API server, too.
func (p Programs) Find(withKubelet bool) (Programs, error) {
	var err error
	if withKubelet {
		for _, want := range []struct {
			to   *string
			name string
		}{{&p.kubelet, "kubelet"}, {&p.apiserver, "kube-apiserver"}, {&p.etcd, "etcd"}} {
			if *want.to, err = p.look(want.name); err != nil {
				return p, fmt.Errorf("a real kubelet needs kubelet, kube-apiserver and etcd, and there is no %s in PATH: name the folder that has it with --bin-dir", want.name)
			}
		}
	}
	if p.Cleave == "" {
		if p.Cleave, err = os.Executable(); err != nil {
			return p, fmt.Errorf("find this program: %w", err)
		}
	}
	if p.Containerd, err = p.find(p.Containerd, "containerd"); err != nil {
		return p, err
	}
	if beside := filepath.Join(filepath.Dir(p.Containerd), shimName); p.Shim == "" && isFile(beside) {
		p.Shim = beside
	}
	if p.Shim, err = p.find(p.Shim, shimName); err != nil {
		return p, err
	}
	if p.Runc, err = p.find(p.Runc, "runc"); err != nil {
		return p, err
	}
	if filepath.Base(p.Runc) != "runc" {
		return p, fmt.Errorf("--runc %s: containerd starts a program that is called runc; make a link of that name", p.Runc)
	}
	for _, tool := range []string{"mount", "umount"} {
		if _, err := exec.LookPath(tool); err != nil {
			return p, fmt.Errorf("there is no %s in PATH: install the package mount", tool)
		}
	}
	return p, static(p.Cleave)
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// look finds a program in Dir or PATH.
func (p Programs) look(name string) (string, error) {
	if path := filepath.Join(p.Dir, name); p.Dir != "" && isFile(path) {
		return filepath.Abs(path)
	}
	found, err := exec.LookPath(name)
	if err != nil {
		return "", err
	}
	return filepath.Abs(found)
}

func (p Programs) find(path, name string) (string, error) {
	if path == "" {
		found, err := p.look(name)
		if err != nil {
			return "", fmt.Errorf("there is no %s in PATH: install it, or name it with --%s", name, flagOf(name))
		}
		return found, nil
	}
	if !isFile(path) {
		return "", fmt.Errorf("--%s %s: there is no such program", flagOf(name), path)
	}
	return filepath.Abs(path)
}

func flagOf(name string) string {
	if name == shimName {
		return "shim"
	}
	return name
}

// runcDir is the folder of runc, for PATH; empty while it is not known.
func (p Programs) runcDir() string {
	if p.Runc == "" {
		return ""
	}
	return filepath.Dir(p.Runc)
}

// static says whether a program runs in a container that has no libraries.
func static(path string) (err error) {
	file, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("look at %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	for _, p := range file.Progs {
		if p.Type == elf.PT_INTERP {
			return fmt.Errorf("%s needs libraries, and containers of the lab run it and have none: build it with `make build`", path)
		}
	}
	return nil
}

// Machine says what the machine lacks for a lab, one thing a time.
func Machine(types []disk.FS) error {
	if os.Geteuid() != 0 {
		return errors.New("the lab makes filesystems and runs containers: run it as root")
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		return fmt.Errorf("there are no loop devices: load the module (modprobe loop): %w", err)
	}
	for _, fs := range types {
		if _, err := exec.LookPath("mkfs." + string(fs)); err != nil {
			return fmt.Errorf("there is no mkfs.%s in PATH: install it (e2fsprogs, xfsprogs or btrfs-progs)", fs)
		}
	}
	return nil
}

// Types are the types of a scenario's filesystems.
func Types(s *scenario.Scenario, standard disk.FS) []disk.FS {
	var out []disk.FS
	for _, f := range s.Filesystems {
		out = append(out, typeOf(f, standard))
	}
	return out
}
