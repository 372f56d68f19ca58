package unixsock

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

const patience = time.Minute

// ends returns both ends of a connection.
func ends(t *testing.T) (client, server *net.UnixConn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // it has done its work
	if client, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"}); err != nil {
		t.Fatal(err)
	}
	if server, err = l.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(client.Close(), server.Close()) }) //nolint:errcheck // end of test
	if err := errors.Join(client.SetDeadline(time.Now().Add(patience)), server.SetDeadline(time.Now().Add(patience))); err != nil {
		t.Fatal(err)
	}
	return client, server
}

// Bytes that come one by one are seen as they come, and all are still there to read.
func TestPeekLeavesTheBytes(t *testing.T) {
	t.Parallel()
	client, server := ends(t)
	const text = "hello"
	seen := make(chan string, 100)
	done := make(chan error, 1)
	go func() {
		done <- Peek(server, 64, func(first []byte) bool {
			seen <- string(first)
			return len(first) == len(text)
		})
	}()
	calls := 0
	for i := range text {
		if _, err := client.Write([]byte{text[i]}); err != nil {
			t.Fatal(err)
		}
		for got := ""; got != text[:i+1]; calls++ {
			select {
			case got = <-seen:
			case <-time.After(patience):
				t.Fatalf("%q was not seen", text[:i+1])
			}
		}
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if calls > 2*len(text) {
		t.Errorf("%d looks at %d bytes: it does not wait", calls, len(text))
	}
	read := make([]byte, len(text))
	if _, err := io.ReadFull(server, read); err != nil || string(read) != text {
		t.Errorf("read %q, %v", read, err)
	}
}

func TestPeekEnds(t *testing.T) {
	t.Parallel()
	never := func([]byte) bool { return false }
	for name, tc := range map[string]struct {
		do   func(client, server *net.UnixConn) error
		want error
	}{
		"hung up without a word": {func(client, _ *net.UnixConn) error { return client.Close() }, io.EOF},
		"too much": {func(client, _ *net.UnixConn) error {
			_, err := client.Write([]byte("1234567890"))
			return err
		}, ErrUndecided},
		"silent": {func(_, server *net.UnixConn) error { return server.SetReadDeadline(time.Now()) }, os.ErrDeadlineExceeded},
		"closed": {func(_, server *net.UnixConn) error { return server.Close() }, net.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client, server := ends(t)
			if err := tc.do(client, server); err != nil {
				t.Fatal(err)
			}
			if err := Peek(server, 8, never); !errors.Is(err, tc.want) {
				t.Errorf("%v, want %v", err, tc.want)
			}
		})
	}
}

// Half a word and then a closed side: the deadline ends the wait, and until then the
// same bytes are not looked at over and over.
func TestPeekAfterHalfAWord(t *testing.T) {
	t.Parallel()
	client, server := ends(t)
	if _, err := client.Write([]byte("ha")); err != nil {
		t.Fatal(err)
	}
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if err := server.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	looks := 0
	err := Peek(server, 8, func([]byte) bool { looks++; return false })
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v, want %v", err, os.ErrDeadlineExceeded)
	}
	if looks > 5 {
		t.Errorf("%d looks at two bytes", looks)
	}
}
