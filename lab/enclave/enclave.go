// Package enclave gives programs of a lab run a network and System V IPC of their own: loopback, ports, interfaces, packet
// filter, shared memory. They share none of it with the machine or with another run, and all of it goes away with them.
//
// For integration tests and the lab. It needs root, and nsenter in PATH.
package enclave

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Enclave is a network and an IPC namespace. They exist as long as they are bound to files, whether or not a process is in
// them.
type Enclave struct {
	dir string

	mu        sync.Mutex
	forwards  []net.Listener        // guarded by mu
	open      map[net.Conn]struct{} // guarded by mu; nil after Close
	following sync.WaitGroup        // the goroutines that carry connections
}

// New makes an enclave, with its loopback up and no other interface, and binds it to files in dir, which must not exist. In
// a run's folder it is cleaned with the run.
func New(dir string) (_ *Enclave, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("make an enclave: %w", err)
		}
	}()
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	e := &Enclave{dir: dir, open: map[net.Conn]struct{}{}}
	for _, path := range []string{e.net(), e.ipc()} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return nil, err
		}
	}
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWIPC); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if err := loopbackUp(); err != nil {
			return err
		}
		if err := unix.Mount("/proc/thread-self/ns/net", e.net(), "", unix.MS_BIND, ""); err != nil {
			return &os.PathError{Op: "mount", Path: e.net(), Err: err}
		}
		if err := unix.Mount("/proc/thread-self/ns/ipc", e.ipc(), "", unix.MS_BIND, ""); err != nil {
			return errors.Join(&os.PathError{Op: "mount", Path: e.ipc(), Err: err}, unmount(e.net()))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return e, nil
}

func (e *Enclave) net() string { return filepath.Join(e.dir, "net") }
func (e *Enclave) ipc() string { return filepath.Join(e.dir, "ipc") }

// Args are the arguments that run a program in the enclave: the first of them starts, and becomes, the program.
func (e *Enclave) Args(program string, args ...string) []string {
	return append([]string{"nsenter", "--net=" + e.net(), "--ipc=" + e.ipc(), program}, args...)
}

// Wrap writes a script with the program's own name into dir that becomes the program, in the enclave.
func (e *Enclave) Wrap(dir, program string) (string, error) {
	args := e.Args(program)
	nsenter, err := exec.LookPath(args[0])
	if err != nil {
		return "", fmt.Errorf("wrap %s: %w", program, err)
	}
	args[0] = nsenter
	script := filepath.Join(dir, filepath.Base(program))
	text := "#!/bin/sh\nexec '" + strings.Join(args, "' '") + "' \"$@\"\n"
	if err := os.WriteFile(script, []byte(text), 0o700); err != nil {
		return "", fmt.Errorf("wrap %s: %w", program, err)
	}
	return script, nil
}

// Forward makes a TCP address of the machine reachable under the same address in the enclave, until Close.
func (e *Enclave) Forward(address string) error {
	var listener net.Listener
	err := onThread(func() error {
		if err := e.enter(); err != nil {
			return err
		}
		var err error
		listener, err = net.Listen("tcp", address)
		return err
	})
	if err != nil {
		return fmt.Errorf("forward %s into an enclave: %w", address, err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.forwards = append(e.forwards, listener)
	e.following.Go(func() {
		for {
			inside, err := listener.Accept()
			if err != nil {
				return // closed
			}
			e.following.Go(func() { e.carry(inside, address) })
		}
	})
	return nil
}

// carry connects a connection from inside with the address outside.
func (e *Enclave) carry(inside net.Conn, address string) {
	defer e.forget(inside)
	if !e.remember(inside) {
		return
	}
	outside, err := net.Dial("tcp", address)
	if err != nil {
		return // the caller sees its connection closed
	}
	defer e.forget(outside)
	if !e.remember(outside) {
		return
	}
	var back sync.WaitGroup
	back.Go(func() { pour(inside, outside) })
	pour(outside, inside)
	back.Wait()
}

// pour copies one direction and passes its end on.
func pour(to, from net.Conn) {
	_, _ = io.Copy(to, from) //nolint:errcheck // how a connection ends is the business of its two ends
	if half, ok := to.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite() //nolint:errcheck // as above
	}
}

// remember notes a connection for Close. It says no when that has been.
func (e *Enclave) remember(c net.Conn) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.open == nil {
		return false
	}
	e.open[c] = struct{}{}
	return true
}

func (e *Enclave) forget(c net.Conn) {
	_ = c.Close() //nolint:errcheck // both ends have had their say
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.open, c)
}

// Close ends the forwarding and gives the enclave up: it is gone when the last process in it is.
func (e *Enclave) Close() error {
	var errs []error
	e.mu.Lock()
	for _, l := range e.forwards {
		errs = append(errs, l.Close())
	}
	for c := range e.open {
		errs = append(errs, c.Close())
	}
	e.forwards, e.open = nil, nil
	e.mu.Unlock()
	e.following.Wait()
	for _, path := range []string{e.net(), e.ipc()} {
		errs = append(errs, unmount(path), os.Remove(path))
	}
	return errors.Join(append(errs, os.Remove(e.dir))...)
}

func unmount(path string) error {
	if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil {
		return &os.PathError{Op: "unmount", Path: path, Err: err}
	}
	return nil
}

// enter puts the calling thread into the enclave's network.
func (e *Enclave) enter() (err error) {
	file, err := os.Open(e.net())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return os.NewSyscallError("setns", unix.Setns(int(file.Fd()), unix.CLONE_NEWNET))
}

// onThread runs do on a thread of its own, which ends with it, so that no other goroutine ever runs in the wrong namespace.
func onThread(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread with the goroutine
		done <- do()
	}()
	return <-done
}

// loopbackUp sets the loopback of the calling thread's namespace up (netdevice(7)).
func loopbackUp() (err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { err = errors.Join(err, os.NewSyscallError("close", unix.Close(fd))) }()
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(syscall.IFF_UP | syscall.IFF_RUNNING)
	return os.NewSyscallError("ioctl SIOCSIFFLAGS", unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request))
}
