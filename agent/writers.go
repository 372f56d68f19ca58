package agent

import (
	"bytes"
	"errors"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/fsstats/hint"
	"github.com/cleave-cri/cleave/fsstats/index"
)

const (
	// maxWriting is how many open files of one container are looked at for those
	// that it writes to.
	maxWriting = 256
	// cgroupRoot is where cgroups are mounted.
	cgroupRoot = "/sys/fs/cgroup"
	// maxProcesses is how many processes of one container are looked at: a
	// container with more is one that forks without end.
	maxProcesses = 4096
	// hintAge is how long a hint may be used again: a container's is asked for
	// itself and for its pod.
	hintAge = 500 * time.Millisecond
)

// writers tells from counters of the kernel which containers may have written, and
// which processes they have. Its methods may be called from several goroutines.
type writers struct {
	// root is [cgroupRoot], procs is /proc.
	root, procs string

	mu sync.Mutex
	// groups are the cgroups of running containers, by ID; guarded by mu.
	groups map[string]group
	// pods are the containers of each pod, by UID; guarded by mu.
	pods map[string][]string
	// hints are the last ones, by container; guarded by mu.
	hints map[string]lastHint
	// layers are the folders of writable layers, by container; guarded by mu.
	layers map[string]string
}

// group is where a container's processes are.
type group struct {
	pid int // the first of them
	// folder is its folder, empty where the container has none of its own.
	folder string
	// unified says that it is of version 2.
	unified bool
}

type lastHint struct {
	counter uint64
	ok      bool
	at      time.Time
}

func newWriters() *writers {
	return &writers{root: cgroupRoot, procs: "/proc", groups: map[string]group{}, pods: map[string][]string{}, hints: map[string]lastHint{}}
}

// set says which containers run, with their first process, and whose they are. One
// whose group is known already is not looked at again.
func (w *writers) set(pids map[string]int, pods map[string][]string) {
	w.mu.Lock()
	known := w.groups
	w.mu.Unlock()
	groups := make(map[string]group, len(pids))
	for id, pid := range pids {
		if g, ok := known[id]; ok && g.pid == pid {
			groups[id] = g
			continue
		}
		if g, ok := w.find(pid); ok {
			groups[id] = g
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.groups, w.pods = groups, pods
	for id := range w.hints {
		if _, ok := groups[id]; !ok {
			delete(w.hints, id)
		}
	}
}

// find finds the group of a process (cgroups(7), /proc/PID/cgroup). A process in
// the root cgroup, where everybody is, has none of its own.
func (w *writers) find(pid int) (group, bool) {
	content, err := os.ReadFile(filepath.Join(w.procs, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return group{}, false // it has ended
	}
	g := group{pid: pid}
	for line := range bytes.Lines(content) {
		fields := strings.SplitN(strings.TrimSpace(string(line)), ":", 3)
		if len(fields) != 3 || fields[2] == "/" || fields[2] == "" || strings.Contains(fields[2], "..") {
			continue
		}
		name := strings.TrimPrefix(fields[1], "name=")
		folder := filepath.Join(w.root, name, fields[2])
		if _, err := os.Stat(filepath.Join(folder, "cgroup.procs")); err != nil {
			continue
		}
		switch {
		case fields[0] == "0" && fields[1] == "":
			if _, err := os.Stat(filepath.Join(folder, "cgroup.controllers")); err == nil {
				return group{pid: pid, folder: folder, unified: true}, true
			}
		case g.folder == "":
			g.folder = folder
		}
	}
	return g, true
}

// written is the index's hint: of a container, or of all containers of a pod.
func (w *writers) written(kind index.Kind, id string) (counter uint64, ok bool) {
	switch kind {
	case owners.Container, owners.Sandbox:
		return w.hint(id)
	case owners.Pod:
	default:
		return 0, false
	}
	w.mu.Lock()
	containers := w.pods[id]
	w.mu.Unlock()
	sum := fnv.New64a()
	for _, c := range containers {
		n, known := w.hint(c)
		ok = ok || known
		sum.Write(strconv.AppendUint([]byte{' '}, n, 16))
	}
	return sum.Sum64(), ok
}

func (w *writers) hint(id string) (counter uint64, ok bool) {
	w.mu.Lock()
	g, there := w.groups[id]
	last := w.hints[id]
	w.mu.Unlock()
	switch {
	case !there:
		return 0, false
	case !last.at.IsZero() && time.Since(last.at) < hintAge:
		return last.counter, last.ok
	case g.unified:
		counter, ok = hint.OfCgroup(g.folder)
	default:
		counter, ok = hint.OfProcesses(w.processes(g))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hints[id] = lastHint{counter, ok, time.Now()}
	return counter, ok
}

// setLayers says where the writable layers are that are walked, by container.
func (w *writers) setLayers(layers map[string]string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.layers = layers
}

// writing is the index's hint which files of its layer a container has open to
// write to (proc_pid_fd(5), proc_pid_fdinfo(5)). A file of a volume has a name in
// the layer that leads to nothing, or to what the volume's folder covers.
func (w *writers) writing(kind index.Kind, id string) (paths []string) {
	if kind != owners.Container {
		return nil
	}
	w.mu.Lock()
	layer := w.layers[id]
	w.mu.Unlock()
	if layer == "" {
		return nil
	}
	left := maxWriting
	for _, pid := range w.processesOf(id) {
		folder := filepath.Join(w.procs, strconv.Itoa(pid))
		names, err := namesIn(filepath.Join(folder, "fd"), left)
		if err != nil {
			continue // it has ended
		}
		for _, fd := range names {
			file, err := os.Readlink(filepath.Join(folder, "fd", fd))
			if err != nil || !filepath.IsAbs(file) || strings.HasSuffix(file, " (deleted)") {
				continue
			}
			if path := filepath.Join(layer, file); w.opensToWrite(folder, fd) && !slices.Contains(paths, path) {
				paths = append(paths, path)
			}
		}
		if left -= len(names); left <= 0 {
			break
		}
	}
	return paths
}

func (w *writers) opensToWrite(process, fd string) bool {
	content, err := os.ReadFile(filepath.Join(process, "fdinfo", fd))
	if err != nil {
		return false
	}
	_, rest, found := strings.Cut("\n"+string(content), "\nflags:")
	if !found {
		return false
	}
	line, _, _ := strings.Cut(rest, "\n")
	flags, err := strconv.ParseUint(strings.TrimSpace(line), 8, 64)
	return err == nil && flags&syscall.O_ACCMODE != syscall.O_RDONLY
}

// namesIn lists some of what is in a folder.
func namesIn(folder string, most int) (_ []string, err error) {
	f, err := os.Open(folder)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	names, err := f.Readdirnames(most)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}

// processesOf lists the processes of a running container.
func (w *writers) processesOf(id string) []int {
	w.mu.Lock()
	g, there := w.groups[id]
	w.mu.Unlock()
	if !there {
		return nil
	}
	return w.processes(g)
}

// processes lists those of a cgroup and of the cgroups that it has made below.
func (w *writers) processes(g group) (pids []int) {
	if g.folder == "" {
		return w.descendants(g.pid)
	}
	_ = filepath.WalkDir(g.folder, func(path string, d fs.DirEntry, err error) error { //nolint:errcheck // what has gone meanwhile has no processes
		if err != nil || !d.IsDir() {
			return nil //nolint:nilerr // as above
		}
		content, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if err != nil {
			return nil //nolint:nilerr // as above
		}
		pids = append(pids, numbers(content)...)
		if len(pids) > maxProcesses {
			return fs.SkipAll
		}
		return nil
	})
	return pids[:min(len(pids), maxProcesses)]
}

// descendants lists a process and its children's children (proc_pid_task(5),
// children).
func (w *writers) descendants(pid int) []int {
	pids := []int{pid}
	for i := 0; i < len(pids) && len(pids) < maxProcesses; i++ {
		tasks, err := filepath.Glob(filepath.Join(w.procs, strconv.Itoa(pids[i]), "task", "*", "children"))
		if err != nil {
			break
		}
		for _, path := range tasks {
			if content, err := os.ReadFile(path); err == nil {
				pids = append(pids, numbers(content)...)
			}
		}
	}
	return pids[:min(len(pids), maxProcesses)]
}

func numbers(content []byte) (out []int) {
	for _, word := range strings.Fields(string(content)) {
		if n, err := strconv.Atoi(word); err == nil && n > 0 {
			out = append(out, n)
		}
	}
	return out
}
