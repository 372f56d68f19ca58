package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/handover"
	"github.com/cleave-cri/cleave/agent/upstream"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// socket is a socket that this process listens on.
type socket struct {
	*net.UnixListener
	// path and id are those of its file. Whatever else comes to stand at the
	// path is not cleave's and is left alone.
	path string
	id   unixsock.ID
	// made says that this process made it and did not inherit it.
	made bool
	// kept says that its file is the service manager's, which goes on listening
	// when no cleave does: connections wait there for the next.
	kept bool
}

// keptMark stands behind the id in the note of a kept socket.
const keptMark = " kept"

// note is what a successor has to know of the socket.
func (s *socket) note() string {
	if s.kept {
		return s.id.String() + keptMark
	}
	return s.id.String()
}

// takeOrListen returns the predecessor's socket if it is the one at path, or
// the service manager's, and otherwise makes one there: the path was changed in the configuration, or the
// file was taken away from under the predecessor. What is inherited and not used
// goes to a.left.
func (a *agent) takeOrListen(inherited *handover.Inheritance, name, path string, access unixsock.Access) (*socket, error) {
	old, err := takeSocket(inherited, name)
	if err != nil {
		return nil, err
	}
	if old != nil {
		if now, err := unixsock.IDOf(path); err == nil && now == old.id {
			old.path = path // which may be spelled another way now
			return old, nil
		}
		a.left = append(a.left, old)
	}
	if l := a.offered.Take(path); l != nil {
		id, err := unixsock.IDOf(path)
		if err != nil {
			return nil, errors.Join(err, l.Close())
		}
		return &socket{UnixListener: l, path: path, id: id, kept: true}, nil
	}
	return newSocket(path, access)
}

// takeSocket returns a socket of the predecessor, nil if there is none.
func takeSocket(inherited *handover.Inheritance, name string) (*socket, error) {
	f, note := inherited.Take(name)
	if f == nil {
		return nil, nil
	}
	l, err := net.FileListener(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("take over the %s socket: %w", name, err)
	}
	note, kept := strings.CutSuffix(note, keptMark)
	id, err := unixsock.ParseID(note)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("take over the %s socket: %w", name, err), l.Close())
	}
	ul, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("take over the %s socket: it is a %s socket", name, l.Addr().Network()), l.Close())
	}
	return &socket{UnixListener: ul, path: ul.Addr().String(), id: id, kept: kept}, nil
}

func newSocket(path string, access unixsock.Access) (*socket, error) {
	if err := unixsock.EnsureFolder(path); err != nil {
		return nil, err
	}
	l, err := unixsock.Listen(path, access)
	if err != nil {
		return nil, err
	}
	id, err := unixsock.IDOf(path)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &socket{UnixListener: l, path: path, id: id, made: true}, nil
}

// sockets are those that this process serves on.
func (a *agent) sockets() []*socket {
	var all []*socket
	for _, s := range []*socket{a.listen, a.control} {
		if s != nil {
			all = append(all, s)
		}
	}
	return all
}

// removeFiles takes the files of sockets away, as far as they are still theirs.
// The sockets have to be open, so that nobody else's can have their inodes.
func removeFiles(sockets []*socket) error {
	var errs []error
	for _, s := range sockets {
		if !s.kept {
			errs = append(errs, unixsock.Remove(s.path, s.id))
		}
	}
	return errors.Join(errs...)
}

// giveUp takes away what this process made, because it won't serve.
func (a *agent) giveUp() error {
	var errs []error
	for _, s := range a.sockets() {
		if s.made {
			errs = append(errs, removeFiles([]*socket{s}))
		}
		errs = append(errs, s.Close())
	}
	for _, s := range a.left {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// refuseOffered closes what the service manager offers and the configuration does
// not want. The manager goes on listening there, and who connects waits in vain.
func (a *agent) refuseOffered() {
	for path := range a.offered {
		a.log.Warn("the service manager listens on a socket that the configuration does not name, and who connects there gets no answer: "+
			"make ListenStream of cleave.socket and listen.endpoint the same, then restart cleave.socket", zap.String("socket", path))
	}
	if err := a.offered.Close(); err != nil {
		a.log.Warn("a socket of the service manager stays open", zap.Error(err))
	}
	a.offered = nil
}

// removeLeft takes away the files of sockets that the predecessor had and this
// process does not serve on, now that it serves on its own.
func (a *agent) removeLeft() {
	err := removeFiles(a.left)
	for _, s := range a.left {
		err = errors.Join(err, s.Close())
	}
	if err != nil {
		a.log.Warn("a socket of the old process stays", zap.Error(err))
	}
	a.left = nil
}

// dialRuntime connects to the runtime, for the proxy and for the agent's own
// questions. It refuses a runtime.endpoint that leads to cleave itself, by a
// symlink or a mount: one call would go round without end.
func (a *agent) dialRuntime(ctx context.Context) (net.Conn, error) {
	if err := a.notOurs(); err != nil {
		return nil, err
	}
	conn, err := upstream.Plain(a.cfg.Runtime.Endpoint.Path())(ctx)
	if err == nil {
		a.followAccess()
	}
	return conn, err
}

// notOurs returns an error if runtime.endpoint leads to a socket of cleave.
func (a *agent) notOurs() error {
	id, err := unixsock.Reached(a.cfg.Runtime.Endpoint.Path())
	if err != nil {
		return nil // it leads nowhere; the dial says why
	}
	for _, s := range a.sockets() {
		if s.id == id {
			return fmt.Errorf("runtime.endpoint %s leads to cleave's own socket %s: set it to containerd's",
				a.cfg.Runtime.Endpoint, s.path)
		}
	}
	return nil
}

// followAccess gives cleave's socket the owner and mode of the runtime's, which
// may have come after it. It is called at each connect to the runtime.
func (a *agent) followAccess() {
	if !a.listening.Load() {
		return
	}
	access, err := unixsock.AccessOf(a.cfg.Runtime.Endpoint.Path())
	if err == nil {
		err = access.Apply(a.listen.path, a.listen.id)
	}
	if err != nil {
		a.log.Warn("the socket's owner and mode don't follow the runtime's", zap.Error(err))
	}
}
