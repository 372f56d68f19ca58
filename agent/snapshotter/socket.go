package snapshotter

import (
	"errors"
	"fmt"
	"net"

	"github.com/coreos/go-systemd/v22/activation"

	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// socket is a listener and what is known of its file.
type socket struct {
	*net.UnixListener
	path string
	// id is nil if the file belongs to the service manager.
	id *unixsock.ID
}

// remove takes the file away if it is ours and still that of this socket.
func (s socket) remove() error {
	if s.id == nil {
		return nil
	}
	return unixsock.Remove(s.path, *s.id)
}

// sockets are listeners by path.
type sockets map[string]*net.UnixListener

// offeredSockets takes the sockets that the service manager listens on for this
// process (sd_listen_fds(3)). With them containerd's calls wait while the
// snapshotter restarts, instead of failing.
func offeredSockets() (sockets, error) {
	out := sockets{}
	for _, f := range activation.Files(true) {
		l, err := net.FileListener(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, errors.Join(fmt.Errorf("take the socket %s from the service manager: %w", f.Name(), err), out.close())
		}
		ul, ok := l.(*net.UnixListener)
		if !ok {
			return nil, errors.Join(fmt.Errorf("take the socket %s from the service manager: it is no unix socket", f.Name()), l.Close(), out.close())
		}
		ul.SetUnlinkOnClose(false)
		out[ul.Addr().String()] = ul
	}
	return out, nil
}

// takeOrListen returns the offered socket of a path, or makes one.
func (s sockets) takeOrListen(path string) (socket, error) {
	if l, ok := s[path]; ok {
		delete(s, path)
		return socket{UnixListener: l, path: path}, nil
	}
	if err := unixsock.EnsureFolder(path); err != nil {
		return socket{}, err
	}
	l, err := unixsock.Listen(path, unixsock.RootOnly)
	if err != nil {
		return socket{}, err
	}
	id, err := unixsock.IDOf(path)
	if err != nil {
		return socket{}, errors.Join(err, l.Close())
	}
	return socket{UnixListener: l, path: path, id: &id}, nil
}

// close closes the sockets that nobody took.
func (s sockets) close() error {
	var errs []error
	for _, l := range s {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}
