// Package janitor gives a lab run one folder for everything that it makes, and sees to it that all of it goes away:
// processes, mounts, loop devices, cgroups, files. A second process, the janitor, holds one end of a pipe whose other
// end is the run's. When the run closes it, or dies of whatever cause, SIGKILL included, the janitor cleans up. What
// even a janitor could not clean (both killed) the next run does at its start.
//
// The janitor is the program itself, started again: main, or TestMain, calls Main before anything else.
package janitor

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cleave-cri/cleave/lab/flock"
	"github.com/cleave-cri/cleave/lab/sweep"
)

const (
	// janitorEnv tells a process that it is a janitor; the value is the run's folder.
	janitorEnv = "CLEAVE_LAB_JANITOR"
	// cgroupPrefix begins the name of every run's cgroup.
	cgroupPrefix = "cleave-lab-"
	// keepByte in the pipe tells the janitor to go and leave everything as it is.
	keepByte = 'k'
	// readyByte is what the janitor says once it holds the pipe.
	readyByte = 'r'

	lockFile   = "lock"
	keepFile   = "keep"
	reportFile = "janitor.log"

	startLimit = 20 * time.Second
	cleanLimit = 2 * time.Minute
)

// Options of a run. The zero value is good.
type Options struct {
	// Base is the folder that holds the runs' folders; empty means cleave-lab in the temporary folder. It must be short:
	// a socket's path has 107 bytes.
	Base string
	// Log gets a line for each stale run that is cleaned at the start; nil means nobody is told.
	Log io.Writer
}

// Run is a lab run. All that it makes must lie in Dir, and all that it starts must carry Env.
type Run struct {
	dir    string
	pipe   *os.File
	lock   *os.File
	child  *exec.Cmd
	closed bool
}

// Main turns this process into a janitor if it was started as one, and does not return then. Otherwise it does
// nothing. It must be the first call of main or TestMain.
func Main() {
	dir := os.Getenv(janitorEnv)
	if dir == "" {
		return
	}
	// Ctrl-C in a terminal, the end of a session and a reader that has gone are for the run, not for its janitor.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE)
	if err := watch(dir); err != nil {
		//nolint:errcheck // the run reads it if it is still there; otherwise nobody is left to tell
		_ = os.WriteFile(filepath.Join(dir, reportFile), []byte(err.Error()+"\n"), 0o600)
		os.Exit(1) //nolint:forbidigo // this is the janitor's main
	}
	os.Exit(0) //nolint:forbidigo // this is the janitor's main
}

// watch waits for the run's end and cleans up after it. Descriptors: 3 the pipe, 4 the lock, 5 where to say ready.
func watch(dir string) error {
	pipe, ready := os.NewFile(3, "pipe"), os.NewFile(5, "ready")
	if _, err := ready.Write([]byte{readyByte}); err != nil {
		return fmt.Errorf("tell the run that its janitor is ready: %w", err)
	}
	if err := ready.Close(); err != nil {
		return fmt.Errorf("tell the run that its janitor is ready: %w", err)
	}
	word := make([]byte, 1)
	n, err := pipe.Read(word)
	if n == 1 && word[0] == keepByte {
		return nil
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("wait for the end of the run: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanLimit) //nolint:forbidigo // called by the janitor's main
	defer cancel()
	return clean(ctx, dir)
}

// Start makes a run: it cleans what dead runs have left, makes the folder and starts the janitor. ctx bounds only the
// start.
func Start(ctx context.Context, o Options) (*Run, error) {
	if os.Getenv(janitorEnv) != "" {
		return nil, errors.New("start a lab run: this process was started as a janitor; call janitor.Main first in main or TestMain")
	}
	base, err := o.base()
	if err != nil {
		return nil, err
	}
	baseLock, err := flock.Take(ctx, filepath.Join(base, lockFile), nil)
	if err != nil {
		return nil, err
	}
	stale, err := claimStale(base)
	if err != nil {
		return nil, errors.Join(err, baseLock.Close())
	}
	run, err := makeRun(ctx, base)
	if err := errors.Join(err, baseLock.Close()); err != nil {
		return nil, err
	}
	for _, s := range stale {
		err := errors.Join(clean(ctx, s.dir), s.lock.Close())
		if o.Log == nil {
			continue
		}
		if err != nil {
			fmt.Fprintf(o.Log, "lab: clean what an earlier run left in %s: %v; it will be tried again\n", s.dir, err)
		} else {
			fmt.Fprintf(o.Log, "lab: cleaned what an earlier run left in %s\n", s.dir)
		}
	}
	if err := run.hire(ctx); err != nil {
		cleaned := clean(context.WithoutCancel(ctx), run.dir)
		return nil, errors.Join(err, cleaned, run.lock.Close())
	}
	return run, nil
}

func makeRun(ctx context.Context, base string) (*Run, error) {
	id := make([]byte, 4)
	if _, err := rand.Read(id); err != nil {
		return nil, fmt.Errorf("name the lab run: %w", err)
	}
	run := &Run{dir: filepath.Join(base, hex.EncodeToString(id))}
	if err := os.Mkdir(run.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the run's folder: %w", err)
	}
	var err error
	if run.lock, err = flock.Take(ctx, filepath.Join(run.dir, lockFile), nil); err != nil {
		return nil, err // a later run takes the empty folder for a stale one
	}
	return run, nil
}

// hire starts the janitor and waits until it holds the pipe.
func (r *Run) hire(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	theirs, ours, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make the janitor's pipe: %w", err)
	}
	heard, said, err := os.Pipe()
	if err != nil {
		return errors.Join(fmt.Errorf("make the janitor's pipe: %w", err), theirs.Close(), ours.Close())
	}
	child := exec.Command("/proc/self/exe")
	child.Args = []string{"cleave-lab-janitor", r.dir}
	child.Dir = "/"
	// A program built with the race detector would wait a second at its end, and every Close with it.
	child.Env = append(os.Environ(), janitorEnv+"="+r.dir, "GORACE=atexit_sleep_ms=0")
	child.ExtraFiles = []*os.File{theirs, r.lock, said}
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	startErr := child.Start()
	err = errors.Join(theirs.Close(), said.Close())
	if startErr != nil {
		return errors.Join(fmt.Errorf("start the janitor: %w", startErr), err, ours.Close(), heard.Close())
	}
	word := make([]byte, 1)
	if deadline, ok := ctx.Deadline(); ok {
		err = errors.Join(err, heard.SetReadDeadline(deadline))
	}
	if n, readErr := heard.Read(word); n != 1 || word[0] != readyByte {
		err = errors.Join(err, fmt.Errorf("wait for the janitor: %w; is janitor.Main the first call of main or TestMain?", errors.Join(readErr, ctx.Err())))
	}
	if err = errors.Join(err, heard.Close()); err != nil {
		_ = child.Process.Kill() //nolint:errcheck // it may have gone by itself
		_ = child.Wait()         //nolint:errcheck // killed: its status says nothing
		return errors.Join(err, ours.Close())
	}
	r.pipe, r.child = ours, child
	return nil
}

// Dir is the run's folder. It is short enough for sockets some levels below it.
func (r *Run) Dir() string { return r.dir }

// ID is the run's name: eight hexadecimal digits.
func (r *Run) ID() string { return filepath.Base(r.dir) }

// Cgroup is the run's own cgroup, without a leading slash. CRI wants "/" + Cgroup() as cgroup_parent.
func (r *Run) Cgroup() string { return scope(r.dir).Cgroup }

// Env is the environment for what the run starts: this process's, and the mark by which the janitor knows its own.
func (r *Run) Env() []string { return append(os.Environ(), sweep.MarkEnv+"="+r.dir) }

// Close ends and removes everything in the run and waits until that is done. What could not be removed is in the
// error, and left for the next run. A second call does nothing.
func (r *Run) Close(ctx context.Context) error {
	if r.closed {
		return nil
	}
	r.closed = true
	return errors.Join(r.dismiss(ctx), r.lock.Close())
}

// Keep leaves everything running and in place, also for later runs, until Clean is called with the run's folder.
func (r *Run) Keep(ctx context.Context) error {
	if r.closed {
		return errors.New("keep the lab run: it is closed")
	}
	if err := os.WriteFile(filepath.Join(r.dir, keepFile), nil, 0o600); err != nil {
		return fmt.Errorf("keep the lab run: %w", err)
	}
	if _, err := r.pipe.Write([]byte{keepByte}); err != nil {
		return fmt.Errorf("send the janitor away: %w", err)
	}
	r.closed = true
	return errors.Join(r.dismiss(ctx), r.lock.Close())
}

// dismiss closes the pipe and waits for the janitor's end.
func (r *Run) dismiss(ctx context.Context) error {
	if err := r.pipe.Close(); err != nil {
		return fmt.Errorf("close the janitor's pipe: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- r.child.Wait() }()
	select {
	case <-ctx.Done():
		return fmt.Errorf("wait for the janitor to clean %s: %w; it goes on by itself", r.dir, ctx.Err())
	case err := <-done:
		if err == nil {
			return nil
		}
		report, readErr := os.ReadFile(filepath.Join(r.dir, reportFile))
		if readErr != nil {
			return fmt.Errorf("clean %s: the janitor ended with %w and left no report", r.dir, err)
		}
		return fmt.Errorf("clean %s: %s", r.dir, strings.TrimSpace(string(report)))
	}
}

// Kept lists the folders of the runs that were kept.
func Kept(o Options) ([]string, error) {
	base, err := o.base()
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(base, "*", keepFile))
	if err != nil {
		return nil, fmt.Errorf("list kept lab runs: %w", err)
	}
	dirs := make([]string, 0, len(files))
	for _, f := range files {
		if dir := filepath.Dir(f); isKept(dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs, nil
}

// Left lists the folders of runs that are not kept: those that somebody has, a live run or its janitor at work, and those that
// nobody has and that could not be cleaned.
func Left(ctx context.Context, o Options) (had, stale []string, err error) {
	base, err := o.base()
	if err != nil {
		return nil, nil, err
	}
	baseLock, err := flock.Take(ctx, filepath.Join(base, lockFile), nil) // nobody begins meanwhile
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, baseLock.Close()) }()
	claims, err := claimStale(base)
	if err != nil {
		return nil, nil, err
	}
	for _, c := range claims {
		stale = append(stale, c.dir)
		err = errors.Join(err, c.lock.Close())
	}
	entries, readErr := os.ReadDir(base)
	for _, e := range entries {
		dir := filepath.Join(base, e.Name())
		if !isKept(dir) && isRun(e) && !slices.Contains(stale, dir) {
			had = append(had, dir)
		}
	}
	return had, stale, errors.Join(err, readErr)
}

// Clean ends and removes a kept run.
func Clean(ctx context.Context, dir string) (err error) {
	if _, err := os.Stat(filepath.Join(dir, keepFile)); err != nil {
		return fmt.Errorf("clean the lab run in %s: it is not a run that was kept: %w", dir, err)
	}
	lock, err := flock.Take(ctx, filepath.Join(dir, lockFile), nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	return clean(ctx, dir)
}

// clean ends everything in the run and removes it. The files stay, with what the janitor knows, if something resists.
func clean(ctx context.Context, dir string) error {
	s := scope(dir)
	if err := sweep.All(ctx, s); err != nil {
		return err
	}
	// Whatever ends this now, from here on the folder is one that the next run cleans: the mark goes first, the lock last.
	if err := os.Remove(filepath.Join(dir, keepFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("clean the lab run in %s: %w", dir, err)
	}
	return sweep.Files(s)
}

func scope(dir string) sweep.Scope {
	return sweep.Scope{Dir: dir, Cgroup: cgroupPrefix + filepath.Base(dir), Last: lockFile}
}

type claim struct {
	dir  string
	lock *os.File
}

// claimStale takes the lock of every run that nobody holds and nobody wanted kept.
func claimStale(base string) ([]claim, error) {
	entries, err := os.ReadDir(base)
	if err != nil {
		return nil, fmt.Errorf("look for stale lab runs: %w", err)
	}
	var claims []claim
	for _, e := range entries {
		dir := filepath.Join(base, e.Name())
		if !isRun(e) {
			continue
		}
		if isKept(dir) {
			continue
		}
		lock, err := openLock(dir)
		if err != nil {
			continue // cleaned by its own janitor in this moment
		}
		if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
			_ = lock.Close() //nolint:errcheck // a live run's; we only looked
			continue
		}
		claims = append(claims, claim{dir, lock})
	}
	return claims, nil
}

// isKept says whether somebody wanted a run kept. One without a lock is half removed, and its mark goes for nothing.
func isKept(dir string) bool {
	_, marked := os.Lstat(filepath.Join(dir, keepFile))
	_, locked := os.Lstat(filepath.Join(dir, lockFile))
	return marked == nil && !errors.Is(locked, os.ErrNotExist)
}

// isRun says by its name whether a folder is a run's.
func isRun(e os.DirEntry) bool {
	id, err := hex.DecodeString(e.Name())
	return err == nil && len(id) == 4 && e.IsDir()
}

// openLock opens a run's lock. A run without one is being removed by its janitor, which would stumble over a new file in
// it; or that janitor was killed, so after its time the lock is made again.
func openLock(dir string) (*os.File, error) {
	path := filepath.Join(dir, lockFile)
	lock, err := os.OpenFile(path, os.O_RDWR, 0)
	if !errors.Is(err, os.ErrNotExist) {
		return lock, err
	}
	info, statErr := os.Lstat(dir)
	if statErr != nil || time.Since(info.ModTime()) < cleanLimit {
		return nil, err
	}
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
}

// base makes the folder of all runs and checks that it is ours: in a temporary folder others could have made it.
func (o Options) base() (string, error) {
	base := o.Base
	if base == "" {
		base = filepath.Join(os.TempDir(), "cleave-lab")
	}
	if err := os.MkdirAll(base, 0o700); err != nil {
		return "", fmt.Errorf("make the folder for lab runs: %w", err)
	}
	info, err := os.Lstat(base)
	if err != nil {
		return "", fmt.Errorf("check the folder for lab runs: %w", err)
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || int(owner.Uid) != os.Geteuid() {
		return "", fmt.Errorf("check the folder for lab runs: %s is no folder of ours; remove it or set TMPDIR", base)
	}
	resolved, err := filepath.EvalSymlinks(base)
	if err != nil {
		return "", fmt.Errorf("check the folder for lab runs: %w", err)
	}
	return filepath.Abs(resolved)
}
