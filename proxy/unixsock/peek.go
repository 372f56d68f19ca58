package unixsock

import (
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"
)

// ErrUndecided says that as many bytes as were to be looked at are there and
// did not suffice.
var ErrUndecided = errors.New("the first bytes don't tell")

// Peek looks at the first bytes that the other end sends, and leaves them to be
// read by whoever gets the connection (recv(2), MSG_PEEK). It calls enough with
// what has arrived so far, at most limit bytes, again whenever there is more,
// until that returns true. The read deadline of the connection holds.
//
// The error is io.EOF if the other end hung up without a word, [ErrUndecided], or
// that of the system, os.ErrDeadlineExceeded and net.ErrClosed among them.
func Peek(conn *net.UnixConn, limit int, enough func(first []byte) bool) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("look at the first bytes: %w", err)
	}
	buf := make([]byte, limit)
	var peekErr error
	// Go's poller tells changes, not states: after a false the function is
	// called when more has come, not at once for what it has seen already.
	err = raw.Read(func(fd uintptr) bool {
		for {
			n, _, err := unix.Recvfrom(int(fd), buf, unix.MSG_PEEK|unix.MSG_DONTWAIT)
			switch {
			case errors.Is(err, unix.EINTR):
				continue
			case errors.Is(err, unix.EAGAIN):
				return false
			case err != nil:
				peekErr = err
				return true
			case n == 0:
				peekErr = io.EOF
				return true
			case enough(buf[:n]):
				return true
			case n == limit:
				peekErr = ErrUndecided
				return true
			default:
				return false
			}
		}
	})
	if err = errors.Join(err, peekErr); err != nil {
		return fmt.Errorf("look at the first bytes: %w", err)
	}
	return nil
}
