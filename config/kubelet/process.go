package kubelet

import (
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Errors that callers can tell apart.
var (
	// ErrNotRunning says that no process is a kubelet.
	ErrNotRunning = errors.New("no kubelet runs on this node")
	// ErrSeveral says that several are, and which one is meant can't be told.
	ErrSeveral = errors.New("several kubelets run on this node")
	// ErrGone says that the process ended, or another took its number, while it
	// was looked at.
	ErrGone = errors.New("the process ended while it was looked at")
	// ErrEmbedded says that the kubelet is part of another program, which has it
	// in its own process: its settings can't be read from there.
	ErrEmbedded = errors.New("the kubelet is part of another program, whose arguments are not the kubelet's")
)

const (
	// ticksPerSecond is USER_HZ, in which /proc gives times; 100 on all of
	// Linux's platforms that cleave is built for.
	ticksPerSecond = 100
	// maxArgsBytes bounds argv: the kernel allows a quarter of the stack's limit,
	// usually 2 MiB (execve(2)).
	maxArgsBytes = 4 << 20
	maxStatBytes = 1 << 16
	// attempts is how often a kubelet that is being restarted is tried.
	attempts = 3
)

// Reader reads processes below Proc.
type Reader struct {
	// Proc is where the proc file system is; /proc if empty.
	Proc string
}

// Choice says which kubelet is meant.
type Choice struct {
	// PID names the process; needed when its name is not kubelet. 0 means any.
	PID int
	// Endpoints are cleave's own CRI sockets, as paths. Of several kubelets the
	// one that uses one of them is meant.
	Endpoints []string
}

func (r Reader) path(elements ...string) string {
	proc := r.Proc
	if proc == "" {
		proc = "/proc"
	}
	return filepath.Join(append([]string{proc}, elements...)...)
}

// Find reads the settings of the kubelet that choice means.
//
// Errors are ErrNotRunning, ErrSeveral, ErrGone, ErrEmbedded, a FileError (see
// errors.As) if a file of the kubelet's is wrong, and those of the system.
func (r Reader) Find(ctx context.Context, choice Choice) (Settings, error) {
	var err error
	for range attempts {
		var s Settings
		if s, err = r.find(ctx, choice); !errors.Is(err, ErrGone) {
			return s, err
		}
		if ctx.Err() != nil {
			return Settings{}, ctx.Err()
		}
	}
	return Settings{}, err
}

func (r Reader) find(ctx context.Context, choice Choice) (Settings, error) {
	if choice.PID != 0 {
		return r.Read(choice.PID)
	}
	pids, err := r.Named(ctx, "kubelet")
	switch {
	case err != nil:
		return Settings{}, err
	case len(pids) == 0:
		return Settings{}, ErrNotRunning
	case len(pids) == 1:
		return r.Read(pids[0])
	}
	var ours []Settings
	var seen []string
	for _, pid := range pids {
		s, err := r.Read(pid)
		switch {
		case errors.Is(err, ErrGone):
			return Settings{}, err
		case err != nil:
			seen = append(seen, fmt.Sprintf("process %d (%v)", pid, err))
			continue
		}
		seen = append(seen, fmt.Sprintf("process %d with %s", pid, s.RuntimeEndpoint.Value))
		if r.uses(s, choice.Endpoints) {
			ours = append(ours, s)
		}
	}
	if len(ours) == 1 {
		return ours[0], nil
	}
	which := "none of them uses a socket of cleave's"
	if len(ours) > 1 {
		which = fmt.Sprintf("%d of them use a socket of cleave's", len(ours))
	}
	return Settings{}, fmt.Errorf("%w, and %s: %s", ErrSeveral, which, strings.Join(seen, ", "))
}

// Uses says whether all that the kubelet asks of a runtime, images included,
// goes to one of the sockets.
func (r Reader) Uses(s Settings, sockets []string) bool {
	return r.uses(s, sockets) && r.isOne(s.PID, SocketPath(s.EffectiveImageEndpoint()), sockets)
}

// uses says whether the kubelet's runtime endpoint is one of the sockets.
func (r Reader) uses(s Settings, sockets []string) bool {
	return r.isOne(s.PID, SocketPath(s.RuntimeEndpoint.Value), sockets)
}

// isOne says whether a path as a process has it is one of the sockets. It may
// have other mounts, so the files count, not their names.
func (r Reader) isOne(pid int, path string, sockets []string) bool {
	if path == "" {
		return false
	}
	theirs, theirErr := r.statInRoot(pid, path)
	for _, socket := range sockets {
		ours, err := os.Stat(socket)
		switch {
		case theirErr == nil && err == nil:
			if os.SameFile(theirs, ours) {
				return true
			}
		case theirErr != nil && err != nil:
			// Neither is there yet: cleave is not running.
			if withoutVar(path) == withoutVar(socket) {
				return true
			}
		}
	}
	return false
}

func (r Reader) statInRoot(pid int, path string) (fs.FileInfo, error) {
	t, err := openRoot(r.path(strconv.Itoa(pid), "root"), "/")
	if err != nil {
		return nil, err
	}
	defer t.close() //nolint:errcheck // only read
	return t.stat(path)
}

// withoutVar takes /var/run for /run, which it usually is a link to.
func withoutVar(path string) string {
	path = filepath.Clean(path)
	if rest, ok := strings.CutPrefix(path, "/var/run/"); ok {
		return "/run/" + rest
	}
	return path
}

// SocketPath is the path in an endpoint as the kubelet takes it: unix:///path,
// or /path. Empty if it is not a unix socket.
func SocketPath(endpoint string) string {
	if strings.HasPrefix(endpoint, "/") {
		return filepath.Clean(endpoint)
	}
	if rest, ok := strings.CutPrefix(endpoint, "unix://"); ok && strings.HasPrefix(rest, "/") {
		return filepath.Clean(rest)
	}
	return ""
}

// Named lists the node's own processes whose argv[0] has this base name, in the
// order of their numbers. What runs in pods is left out: there anybody may call
// himself so, and name files that it takes a gibibyte to read. A kubelet runs as
// root, and in the PID namespace of the node, as CRI-O and cleave do.
func (r Reader) Named(ctx context.Context, name string) ([]int, error) {
	entries, err := os.ReadDir(r.path())
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var out []int
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid <= 0 {
			continue
		}
		args, err := r.args(pid)
		// A process that went away is none of ours; a kernel thread and a zombie
		// have no arguments.
		if err == nil && len(args) > 0 && filepath.Base(args[0]) == name && r.ofNode(pid) {
			out = append(out, pid)
		}
	}
	slices.Sort(out)
	return out, nil
}

// ofNode says whether a process is root in this process's PID and user namespace.
func (r Reader) ofNode(pid int) bool {
	for _, namespace := range []string{"pid", "user"} {
		ours, err := os.Readlink(r.path("self", "ns", namespace))
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without it
		}
		theirs, theirErr := os.Readlink(r.path(strconv.Itoa(pid), "ns", namespace))
		if err != nil || theirErr != nil || ours != theirs {
			return false
		}
	}
	ids, err := r.userIDs(pid)
	return err == nil && len(ids) > 1 && ids[1] == "0" // the effective one
}

func (r Reader) args(pid int) ([]string, error) {
	f, err := os.Open(r.path(strconv.Itoa(pid), "cmdline"))
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	data, err := readAll(f, maxArgsBytes)
	if err != nil {
		return nil, err
	}
	return splitArgs(data), nil
}

// splitArgs reads /proc/PID/cmdline: each argument ends with a zero byte, and an
// empty one is an argument too.
func splitArgs(data []byte) []string {
	if len(data) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(data), "\x00"), "\x00")
}

// Read reads the settings of one process, which the caller knows to be a kubelet,
// or hyperkube running one.
func (r Reader) Read(pid int) (Settings, error) {
	s, err := r.read(pid)
	if err != nil {
		return Settings{}, fmt.Errorf("read the settings of the kubelet, process %d: %w", pid, err)
	}
	return s, nil
}

func (r Reader) read(pid int) (Settings, error) {
	before, err := r.Started(pid)
	if err != nil {
		return Settings{}, err
	}
	args, err := r.args(pid)
	if err != nil {
		return Settings{}, gone(err)
	}
	if len(args) == 0 {
		return Settings{}, ErrGone // a zombie; a kernel thread has a number but never is a kubelet
	}
	if args, err = kubeletArgs(args); err != nil {
		return Settings{}, err
	}
	tree, err := r.rootOf(pid)
	if err != nil {
		return Settings{}, gone(err)
	}
	defer tree.close() //nolint:errcheck // only read
	s, err := assemble(args, tree)
	version := r.version(pid)
	// Only if the process is still the same, all of that was about it.
	if after, againErr := r.Started(pid); againErr != nil || after != before {
		return Settings{}, ErrGone
	}
	if err != nil {
		return Settings{}, err
	}
	s.PID, s.StartTicks, s.Version = pid, before, version
	s.RootDir.Value = filepath.Clean(tree.abs(s.RootDir.Value))
	if s.Kubeconfig.Value != "" {
		s.Kubeconfig.Value = filepath.Clean(tree.abs(s.Kubeconfig.Value))
	}
	if s.Started, err = r.timeOf(before); err != nil {
		return Settings{}, err
	}
	return s, nil
}

// gone tells a process that ended from other errors.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return ErrGone
	}
	return err
}

// kubeletArgs are the kubelet's own arguments out of argv.
func kubeletArgs(argv []string) ([]string, error) {
	name, rest := filepath.Base(argv[0]), argv[1:]
	// A process may write its own title over argv, as k3s does: one string.
	word, _, _ := strings.Cut(name, " ")
	for _, program := range []string{"k3s", "rke2", "k0s", "microk8s", "minikube"} {
		if word == program || strings.HasPrefix(word, program+"-") {
			return nil, fmt.Errorf("%w: %s; look at what it is told by its own configuration", ErrEmbedded, word)
		}
	}
	if name != "kubelet" && len(rest) > 0 && rest[0] == "kubelet" {
		rest = rest[1:] // hyperkube kubelet --flags
	}
	return rest, nil
}

func (r Reader) rootOf(pid int) (*root, error) {
	dir := r.path(strconv.Itoa(pid), "root")
	cwd, err := os.Readlink(r.path(strconv.Itoa(pid), "cwd"))
	if err != nil {
		return nil, err
	}
	// The kernel names the folder from our root; after chroot(2) that is not the
	// kubelet's.
	if top, err := os.Readlink(dir); err == nil && top != "/" {
		if rest, ok := strings.CutPrefix(cwd, top+"/"); ok {
			cwd = "/" + rest
		}
	}
	return openRoot(dir, cwd)
}

// Started reads when a process started, in 1/100 s since boot, which together with
// its number names it for good: field 22
// of /proc/PID/stat. The name before it may hold anything, brackets too.
func (r Reader) Started(pid int) (uint64, error) {
	f, err := os.Open(r.path(strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, gone(err)
	}
	defer f.Close() //nolint:errcheck // only read
	data, err := readAll(f, maxStatBytes)
	if err != nil {
		return 0, gone(err)
	}
	return parseStarted(string(data))
}

func parseStarted(stat string) (uint64, error) {
	end := strings.LastIndexByte(stat, ')')
	fields := strings.Fields(stat[end+1:])
	const starttime = 22 - 3 // the first field after the name is the third
	if end < 0 || len(fields) <= starttime {
		return 0, errors.New("its stat file in /proc is not as proc(5) says")
	}
	ticks, err := strconv.ParseUint(fields[starttime], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("its time of start in /proc: %w", err)
	}
	return ticks, nil
}

// timeOf turns ticks since boot into a time of day.
func (r Reader) timeOf(ticks uint64) (time.Time, error) {
	f, err := os.Open(r.path("stat"))
	if err != nil {
		return time.Time{}, fmt.Errorf("time of boot: %w", err)
	}
	defer f.Close()                       //nolint:errcheck // only read
	data, err := readAll(f, maxFileBytes) // a line for each processor and interrupt
	if err != nil {
		return time.Time{}, fmt.Errorf("time of boot: %w", err)
	}
	for line := range strings.Lines(string(data)) {
		if text, ok := strings.CutPrefix(line, "btime "); ok {
			boot, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
			if err != nil {
				return time.Time{}, fmt.Errorf("time of boot: %w", err)
			}
			const longest = 1 << 62 / int64(time.Second) * ticksPerSecond
			if ticks > uint64(longest) {
				return time.Time{}, errors.New("time of start: out of range")
			}
			return time.Unix(boot, 0).Add(time.Duration(ticks) * (time.Second / ticksPerSecond)), nil
		}
	}
	return time.Time{}, errors.New("time of boot: no btime in /proc/stat")
}

// Version is that of a kubelet.
type Version struct {
	Major, Minor, Patch int
	// Text is the whole version, such as "v1.37.2-gke.100"; empty if unknown.
	Text string
}

// Known says whether the version is known. An unknown one is not an old one.
func (v Version) Known() bool { return v.Text != "" }

// String gives Text, or says that the version is unknown.
func (v Version) String() string {
	if !v.Known() {
		return "unknown version"
	}
	return v.Text
}

// AtLeast says whether v is known to be major.minor or later.
func (v Version) AtLeast(major, minor int) bool {
	return v.Known() && (v.Major > major || v.Major == major && v.Minor >= minor)
}

var (
	versionText = regexp.MustCompile(`^v(\d{1,4})\.(\d{1,4})\.(\d{1,4})([-+].*)?$`)
	// stampedVersion is how Kubernetes' own build writes its version in.
	stampedVersion = regexp.MustCompile(`-X[ =]['"]?k8s\.io/component-base/version\.gitVersion=([^\s'"]+)`)
)

// version asks the program itself, without running it: Go writes its modules and
// how it was built into it. Programs built with -trimpath leave out the latter,
// and a Kubernetes built from its own tree has no module version before Go 1.24;
// then nothing is known.
func (r Reader) version(pid int) Version {
	info, err := buildinfo.ReadFile(r.path(strconv.Itoa(pid), "exe"))
	if err != nil {
		return Version{}
	}
	return versionOf(info)
}

func versionOf(info *buildinfo.BuildInfo) Version {
	for _, setting := range info.Settings {
		if setting.Key != "-ldflags" {
			continue
		}
		if m := stampedVersion.FindStringSubmatch(setting.Value); m != nil {
			if v := parseVersion(m[1]); v.Known() {
				return v
			}
		}
	}
	const kubernetes = "k8s.io/kubernetes"
	if info.Main.Path == kubernetes {
		return parseVersion(info.Main.Version)
	}
	for _, dep := range info.Deps {
		if dep.Path != kubernetes {
			continue
		}
		if dep.Replace != nil {
			dep = dep.Replace
		}
		return parseVersion(dep.Version)
	}
	return Version{}
}

// parseVersion reads "v1.37.2". What Go makes up for untagged trees
// (v0.0.0-date-commit) is no version.
func parseVersion(s string) Version {
	m := versionText.FindStringSubmatch(s)
	if m == nil || m[1] == "0" {
		return Version{}
	}
	v := Version{Text: s}
	for i, to := range []*int{&v.Major, &v.Minor, &v.Patch} {
		n, err := strconv.Atoi(m[i+1])
		if err != nil {
			return Version{}
		}
		*to = n
	}
	return v
}
