// Package handover passes a process's open sockets to a new process of the same
// program, so that at no moment nobody listens. The old process goes on with
// the calls that it has; only one of the two takes new ones.
//
// It knows files and processes, nothing of what they are for. Only agent may
// import it.
package handover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// environment is the variable that tells a successor which files it was given:
// names, each with "=" and its note if it has one, separated by commas, in the
// order of their descriptors from 3 on. The last is the pipe on which it says
// that it is ready.
const environment = "CLEAVE_HANDOVER"

const (
	firstDescriptor = 3
	readyName       = "ready"
	readyMessage    = "ready\n"
)

// startTimeout bounds how long a successor may take until it is ready.
const startTimeout = 30 * time.Second

// Inheritance is what a predecessor has left.
type Inheritance struct {
	files     map[string]File
	ready     *os.File
	inherited bool
}

// Inherit takes over the files that a predecessor passed. Without a predecessor
// it returns an empty Inheritance. It may be called once in a process's life.
func Inherit() (*Inheritance, error) {
	value, ok := os.LookupEnv(environment)
	if !ok {
		return &Inheritance{}, nil
	}
	// The children of this process are not successors.
	if err := os.Unsetenv(environment); err != nil {
		return nil, fmt.Errorf("take over from the old process: %w", err)
	}
	in := &Inheritance{files: map[string]File{}, inherited: true}
	for i, entry := range strings.Split(value, ",") {
		name, note, _ := strings.Cut(entry, "=")
		// This process's own children shall not keep the sockets open.
		unix.CloseOnExec(firstDescriptor + i)
		f := os.NewFile(uintptr(firstDescriptor+i), name)
		if f == nil {
			return nil, fmt.Errorf("take over from the old process: descriptor %d for %q is not open", firstDescriptor+i, name)
		}
		if name == readyName {
			in.ready = f
			continue
		}
		in.files[name] = File{Name: name, Note: note, File: f}
	}
	if in.ready == nil {
		return nil, fmt.Errorf("take over from the old process: %s=%q names no %q", environment, value, readyName)
	}
	return in, nil
}

// Inherited reports whether there was a predecessor.
func (in *Inheritance) Inherited() bool { return in.inherited }

// Take returns an inherited file with its note and gives up its ownership; nil
// if there is none of that name.
func (in *Inheritance) Take(name string) (_ *os.File, note string) {
	f := in.files[name]
	delete(in.files, name)
	return f.File, f.Note
}

// Done tells the predecessor that this process takes calls now, and closes the
// files that nobody took. It does nothing without a predecessor.
func (in *Inheritance) Done() error {
	var errs []error
	for _, f := range in.files {
		errs = append(errs, f.File.Close())
	}
	in.files = nil
	if in.ready != nil {
		if _, err := io.WriteString(in.ready, readyMessage); err != nil {
			errs = append(errs, fmt.Errorf("tell the old process that this one is ready: %w", err))
		}
		errs = append(errs, in.ready.Close())
		in.ready = nil
	}
	return errors.Join(errs...)
}

// File is an open file with the name by which the successor finds it.
type File struct {
	Name string
	// Note is what the successor has to know of it, without commas.
	Note string
	File *os.File
}

// entry is the file's part of the environment variable.
func (f File) entry() string {
	if f.Note == "" {
		return f.Name
	}
	return f.Name + "=" + f.Note
}

// Duplicate returns a second descriptor of an open socket, to be passed on.
//
// It is not the File method of package net: exec takes the descriptor by
// os.File.Fd, which would make the one open socket that both descriptors stand
// for blocking, so that this process's Accept could never be interrupted again
// (os, file_unix.go: net_newUnixFile).
func Duplicate(name string, socket syscall.Conn) (File, error) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return File{}, fmt.Errorf("duplicate the %s socket: %w", name, err)
	}
	var fd int
	var dupErr error
	if err := raw.Control(func(s uintptr) { fd, dupErr = unix.FcntlInt(s, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return File{}, fmt.Errorf("duplicate the %s socket: %w", name, err)
	}
	if dupErr != nil {
		return File{}, fmt.Errorf("duplicate the %s socket: %w", name, dupErr)
	}
	return File{Name: name, File: os.NewFile(uintptr(fd), name)}, nil
}

// Start runs a successor with this process's arguments and environment, passes
// the files on, and waits until it is ready. If it ends before, or is not ready
// within 30 s, it is killed and an error returned; the caller then goes on as if
// nothing had happened. The caller keeps its own descriptors.
func Start(ctx context.Context, executable string, args []string, files []File) (*Successor, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("start a successor: %w", err)
	}
	if slices.ContainsFunc(files, func(f File) bool {
		return f.Name == readyName || strings.ContainsAny(f.Name, ",=") || strings.Contains(f.Note, ",")
	}) {
		return nil, fmt.Errorf("start a successor: a file has a reserved name or note")
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start a successor: %w", err)
	}
	defer func() { _ = read.Close() }() //nolint:errcheck // nothing is lost with it

	// The successor outlives ctx and this process.
	cmd := exec.Command(executable, args...) //nolint:noctx,gosec // our own program with our own arguments
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	names := make([]string, 0, len(files)+1)
	for _, f := range files {
		names = append(names, f.entry())
		cmd.ExtraFiles = append(cmd.ExtraFiles, f.File)
	}
	cmd.ExtraFiles = append(cmd.ExtraFiles, write)
	cmd.Env = append(os.Environ(), environment+"="+strings.Join(append(names, readyName), ","))
	err = cmd.Start()
	closeErr := write.Close()
	if err != nil {
		return nil, fmt.Errorf("start a successor from %s: %w", executable, err)
	}
	if closeErr != nil {
		return nil, errors.Join(fmt.Errorf("start a successor: %w", closeErr), cmd.Process.Kill(), cmd.Wait())
	}

	limit := time.Now().Add(startTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(limit) {
		limit = d
	}
	if err := read.SetReadDeadline(limit); err != nil {
		return nil, errors.Join(fmt.Errorf("wait for the successor: %w", err), cmd.Process.Kill(), cmd.Wait())
	}
	// After the limit is set, for that would overwrite it.
	stop := context.AfterFunc(ctx, func() { _ = read.SetReadDeadline(time.Now()) }) //nolint:errcheck // then the limit ends it
	defer stop()
	message := make([]byte, len(readyMessage))
	_, err = io.ReadFull(read, message)
	if err == nil && ctx.Err() != nil {
		// Ready, but this process was told to stop meanwhile, and so is it.
		err = ctx.Err()
	}
	if err != nil || string(message) != readyMessage {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("it ended before it was ready; its messages say why")
		}
		killErr := cmd.Process.Kill()
		if errors.Is(killErr, os.ErrProcessDone) {
			killErr = nil
		}
		waitErr := cmd.Wait()
		return nil, errors.Join(fmt.Errorf("wait for the successor (pid %d): %w", cmd.Process.Pid, err), killErr, waitErr)
	}
	return &Successor{PID: cmd.Process.Pid, cmd: cmd}, nil
}

// Successor is a process that has taken over. It may outlive this one.
type Successor struct {
	// PID is its number.
	PID int

	cmd *exec.Cmd
}

// Wait returns when the successor has ended, which may be long after this process
// should have: nil if it was told to or had a successor of its own, else how.
func (s *Successor) Wait() error {
	if err := s.cmd.Wait(); err != nil {
		return fmt.Errorf("the new process (pid %d) has ended: %w", s.PID, err)
	}
	return nil
}
