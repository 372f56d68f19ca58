package proxy

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
)

// inside is how the frame relay reaches the grpc server in the same process: a
// listener whose connections are pairs of sockets. Pipes in memory would not do:
// they keep nothing, so two sides that both write before they read wait for each
// other forever.
type inside struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

var _ net.Listener = (*inside)(nil)

func newInside() *inside {
	return &inside{conns: make(chan net.Conn), done: make(chan struct{})}
}

// dial returns a connection to the server; the error is net.ErrClosed or the
// system's.
func (i *inside) dial() (net.Conn, error) {
	here, there, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("connect to cleave's own server: %w", err)
	}
	select {
	case i.conns <- there:
		return here, nil
	case <-i.done:
		return nil, errors.Join(net.ErrClosed, here.Close(), there.Close())
	}
}

func socketPair() (a, b net.Conn, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	if a, err = connOf(fds[0]); err != nil {
		return nil, nil, errors.Join(err, syscall.Close(fds[1]))
	}
	if b, err = connOf(fds[1]); err != nil {
		return nil, nil, errors.Join(err, a.Close())
	}
	return a, b, nil
}

// connOf makes a connection of a descriptor, which it takes over.
func connOf(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "socketpair")
	conn, err := net.FileConn(f)
	if closeErr := f.Close(); closeErr != nil && err == nil {
		err = errors.Join(closeErr, conn.Close())
	}
	if err != nil {
		return nil, err
	}
	return conn, nil
}

// Accept implements [net.Listener].
func (i *inside) Accept() (net.Conn, error) {
	select {
	case conn := <-i.conns:
		return conn, nil
	case <-i.done:
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener].
func (i *inside) Close() error {
	i.once.Do(func() { close(i.done) })
	return nil
}

// Addr implements [net.Listener].
func (i *inside) Addr() net.Addr { return &net.UnixAddr{Name: "inside", Net: "pipe"} }
