package snapshotter

import (
	"errors"
	"net"

	"github.com/cleave-cri/cleave/proxy/unixsock"
	"github.com/cleave-cri/cleave/systemd/activation"
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

// takeOrListen returns the socket of a path that the service manager offers, or
// makes one. With the manager's, containerd's calls wait while the snapshotter
// restarts, instead of failing.
func takeOrListen(offered activation.Sockets, path string) (socket, error) {
	if l := offered.Take(path); l != nil {
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
