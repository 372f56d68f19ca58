// Package activation takes the unix sockets that the service manager listens on
// for this process (sd_listen_fds(3)). With them callers' connections wait while
// the process restarts, instead of being refused. agent and agent/snapshotter may
// import it; it imports nothing of ours.
package activation

import (
	"errors"
	"fmt"
	"net"

	"github.com/coreos/go-systemd/v22/activation"
)

// Sockets are listeners by the path they were bound to.
type Sockets map[string]*net.UnixListener

// Offered takes the sockets. It may be called once in a process's life; the
// children of this process don't get them. Closing a listener leaves its file,
// which is the service manager's.
func Offered() (Sockets, error) {
	out := Sockets{}
	for _, f := range activation.Files(true) {
		l, err := net.FileListener(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, errors.Join(fmt.Errorf("take the socket %s from the service manager: %w", f.Name(), err), out.Close())
		}
		ul, ok := l.(*net.UnixListener)
		if !ok {
			return nil, errors.Join(fmt.Errorf("take the socket %s from the service manager: it is no unix socket", f.Name()), l.Close(), out.Close())
		}
		ul.SetUnlinkOnClose(false)
		out[ul.Addr().String()] = ul
	}
	return out, nil
}

// Take returns the socket of a path and gives up its ownership; nil if none was
// offered.
func (s Sockets) Take(path string) *net.UnixListener {
	l := s[path]
	delete(s, path)
	return l
}

// Close closes the sockets that nobody took.
func (s Sockets) Close() error {
	var errs []error
	for _, l := range s {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}
