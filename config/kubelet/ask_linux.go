package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	// askTimeout is how long a kubelet's program may take to say its version; it takes a tenth of a second.
	askTimeout = 10 * time.Second
	// maxVersionBytes bounds what it says.
	maxVersionBytes = 1 << 10
)

// ErrNotAsked says that a program is not run, because it may be somebody else's than the node's administrator's.
var ErrNotAsked = errors.New("its program is not run to ask for the version")

// answerText is what `kubelet --version` prints.
var answerText = regexp.MustCompile(`^Kubernetes (v[^\s]+)\n?$`)

// AskVersion runs the program of a kubelet once more, with --version, and returns what it says: for programs that were built
// without their version where [Reader.Read] looks (-trimpath).
//
// The program gets cleave's own rights, so it has to be the administrator's: the process runs as root in cleave's own mount, PID
// and user namespace, which no container does, and the file is root's and writable by nobody else. Otherwise, or if it can't be
// told, nothing is run and the error is ErrNotAsked. ErrGone says that the process ended meanwhile.
func (r Reader) AskVersion(ctx context.Context, s Settings) (_ Version, err error) {
	fail := func(err error) (Version, error) {
		return Version{}, fmt.Errorf("ask the kubelet, process %d, for its version: %w", s.PID, err)
	}
	if r.Proc != "" {
		return fail(fmt.Errorf("%w: it is not of this system", ErrNotAsked))
	}
	program, err := os.Open(r.path(strconv.Itoa(s.PID), "exe"))
	if err != nil {
		return fail(gone(err))
	}
	defer program.Close() //nolint:errcheck // only read
	if err := r.mayAsk(s.PID, program); err != nil {
		return fail(err)
	}
	// All of that was about this process only if it still is the same.
	if ticks, err := r.Started(s.PID); err != nil || ticks != s.StartTicks {
		return fail(ErrGone)
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	// By the descriptor it is the file that was looked at.
	cmd := exec.CommandContext(ctx, "/proc/self/fd/"+strconv.Itoa(int(program.Fd())), "--version")
	cmd.Args[0], cmd.Env, cmd.Dir = "kubelet", []string{}, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = time.Second
	var said limited
	cmd.Stdout = &said
	if err := cmd.Run(); err != nil {
		return fail(err)
	}
	m := answerText.FindSubmatch(said)
	if m == nil {
		return fail(fmt.Errorf("it says %q", string(said)))
	}
	v := parseVersion(string(m[1]))
	if !v.Known() {
		return fail(fmt.Errorf("it says %q", string(said)))
	}
	return v, nil
}

// limited keeps the beginning of what is written to it.
type limited []byte

func (l *limited) Write(p []byte) (int, error) {
	*l = append(*l, p[:min(len(p), maxVersionBytes-len(*l))]...)
	return len(p), nil
}

// mayAsk says why a process's program must not be run, nil if it may.
func (r Reader) mayAsk(pid int, program *os.File) error {
	for _, namespace := range []string{"mnt", "pid", "user"} {
		theirs, err := os.Readlink(r.path(strconv.Itoa(pid), "ns", namespace))
		if err != nil {
			return fmt.Errorf("%w: %w", ErrNotAsked, gone(err))
		}
		ours, err := os.Readlink(r.path("self", "ns", namespace))
		if err != nil {
			return fmt.Errorf("%w: %w", ErrNotAsked, err)
		}
		if theirs != ours {
			return fmt.Errorf("%w: it runs in another %s namespace", ErrNotAsked, namespace)
		}
	}
	ids, err := r.userIDs(pid)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotAsked, err)
	}
	for _, id := range ids {
		if id != "0" {
			return fmt.Errorf("%w: it does not run as root", ErrNotAsked)
		}
	}
	info, err := program.Stat()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotAsked, err)
	}
	const othersWrite = 0o022
	switch stat, ok := info.Sys().(*syscall.Stat_t); {
	case !ok || !info.Mode().IsRegular():
		return fmt.Errorf("%w: it is no file", ErrNotAsked)
	case stat.Uid != 0 || info.Mode().Perm()&othersWrite != 0:
		return fmt.Errorf("%w: others than root may write to it", ErrNotAsked)
	}
	return nil
}

// userIDs are the real, effective, saved and filesystem user ID of a process (proc_pid_status(5)).
func (r Reader) userIDs(pid int) ([]string, error) {
	f, err := os.Open(filepath.Join(r.path(strconv.Itoa(pid)), "status"))
	if err != nil {
		return nil, gone(err)
	}
	defer f.Close() //nolint:errcheck // only read
	data, err := readAll(f, maxStatBytes)
	if err != nil {
		return nil, gone(err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "Uid:"); ok {
			return strings.Fields(rest), nil
		}
	}
	return nil, errors.New("its status in /proc names no user")
}
