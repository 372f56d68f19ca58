package sweep

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// A process as /proc shows it at one moment.
type process struct {
	pid, parent int
	// start is the start time in clock ticks since boot: with the pid it names one process for good.
	start   uint64
	zombie  bool
	args    []string
	mark    string
	cgroups []string
}

// Processes ends every process of the scope: those marked with a folder in it, containerd shims whose -address lies
// in it, those in its cgroup, and all their descendants. Shims go last, because a container's process that loses its
// shim is no longer known as ours. The caller and its ancestors are never touched.
func Processes(ctx context.Context, s Scope) error {
	left := make(map[string]bool)
	// A process shows no environment for a moment while it starts another program, so one empty look is not enough.
	quiet := 0
	err := until(ctx, func() (string, error) {
		all, err := processes()
		if err != nil {
			return "", err
		}
		mine := s.choose(all)
		if len(mine) == 0 {
			if quiet++; quiet == 2 {
				return "", nil
			}
			return "look again for processes of " + s.Dir, nil
		}
		quiet = 0
		for _, p := range mine {
			for _, dir := range p.cgroups {
				left[dir] = true
			}
		}
		others := slices.DeleteFunc(slices.Clone(mine), func(p process) bool { return s.shim(p) })
		if len(others) == 0 {
			others = mine
		}
		for _, p := range others {
			if err := end(p); err != nil {
				return "", err
			}
		}
		return fmt.Sprintf("end %d processes of %s, the first is pid %d", len(mine), s.Dir, mine[0].pid), nil
	})
	if err != nil {
		return err
	}
	return removeContainerCgroups(left)
}

// choose returns the processes of the scope that still run.
func (s Scope) choose(all map[int]process) []process {
	spared := map[int]bool{}
	for pid := os.Getpid(); pid > 0 && !spared[pid]; pid = all[pid].parent {
		spared[pid] = true
	}
	verdict := make(map[int]bool)
	var belongs func(pid int) bool
	belongs = func(pid int) bool {
		p, ok := all[pid]
		if !ok || spared[pid] {
			return false
		}
		if v, known := verdict[pid]; known {
			return v
		}
		verdict[pid] = false // a pid reused in the middle of the snapshot could make a circle
		verdict[pid] = s.marks(p) || belongs(p.parent)
		return verdict[pid]
	}
	var mine []process
	for pid, p := range all {
		if belongs(pid) && !p.zombie {
			mine = append(mine, p)
		}
	}
	slices.SortFunc(mine, func(a, b process) int { return a.pid - b.pid })
	return mine
}

// marks tells whether the process itself carries a sign of the scope.
func (s Scope) marks(p process) bool {
	if p.mark != "" && s.holds(p.mark) || s.shim(p) {
		return true
	}
	return s.Cgroup != "" && slices.ContainsFunc(p.cgroups, func(path string) bool {
		_, name, _ := strings.Cut(path, ":")
		return name == "/"+s.Cgroup || strings.HasPrefix(name, "/"+s.Cgroup+"/")
	})
}

// shim tells whether the process is a containerd shim of a containerd in the scope.
func (s Scope) shim(p process) bool {
	i := slices.Index(p.args, "-address")
	return i > 0 && i+1 < len(p.args) && slices.Contains(p.args, "-namespace") && s.holds(p.args[i+1])
}

// end kills one process, unless its pid has gone to another one in the meantime.
func end(p process) error {
	handle, err := os.FindProcess(p.pid) // by pidfd: what is checked below is what is killed
	if err != nil {
		return fmt.Errorf("open process %d: %w", p.pid, err)
	}
	defer func() { _ = handle.Release() }() //nolint:errcheck // nothing to do about a handle that does not close
	now, err := readProcess(p.pid)
	if err != nil || now.start != p.start {
		return nil //nolint:nilerr // gone, which is what we want
	}
	if err := handle.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill process %d: %w", p.pid, err)
	}
	return nil
}

func processes() (map[int]process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	all := make(map[int]process)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if p, err := readProcess(pid); err == nil {
			all[pid] = p
		}
	}
	return all, nil
}

// readProcess reads one process. An error means that it is gone: files that we may not read count as empty.
func readProcess(pid int) (process, error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return process{}, fmt.Errorf("read process %d: %w", pid, err)
	}
	// The second field is the program's name in parentheses and may hold anything, so fields count from the last ")".
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 {
		return process{}, fmt.Errorf("read process %d: %q has too few fields", pid, stat)
	}
	parent, err := strconv.Atoi(fields[1])
	if err != nil {
		return process{}, fmt.Errorf("read the parent of process %d: %w", pid, err)
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return process{}, fmt.Errorf("read the start of process %d: %w", pid, err)
	}
	p := process{pid: pid, parent: parent, start: start, zombie: fields[0] == "Z" || fields[0] == "X"}
	p.args = list(filepath.Join(dir, "cmdline"), "\x00")
	for _, v := range list(filepath.Join(dir, "environ"), "\x00") {
		if value, ok := strings.CutPrefix(v, MarkEnv+"="); ok {
			p.mark = value
		}
	}
	for _, line := range list(filepath.Join(dir, "cgroup"), "\n") {
		// hierarchy:controllers:path
		if _, rest, ok := strings.Cut(line, ":"); ok {
			p.cgroups = append(p.cgroups, rest)
		}
	}
	return p, nil
}

func list(path, separator string) []string {
	content, err := os.ReadFile(path)
	if err != nil || len(content) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(content), separator), separator)
}
