package enclave_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/lab/enclave"
	"github.com/cleave-cri/cleave/lab/need"
)

func newEnclave(t *testing.T) (*enclave.Enclave, string) {
	t.Helper()
	need.Root(t)
	need.Tools(t, "nsenter")
	dir := filepath.Join(t.TempDir(), "enclave")
	e, err := enclave.New(dir)
	if err != nil {
		t.Fatal(err)
	}
	return e, dir
}

func closeAtEnd(t *testing.T, e *enclave.Enclave) {
	t.Helper()
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
}

func output(t *testing.T, argv ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", argv, err, out)
	}
	return string(out)
}

// A program in it has loopback and nothing else, and stays the process that
// was started.
func TestEnclaveHasOnlyLoopback(t *testing.T) {
	t.Parallel()
	e, _ := newEnclave(t)
	closeAtEnd(t, e)
	wrapped, err := e.Wrap(t.TempDir(), "/bin/cat")
	if err != nil {
		t.Fatal(err)
	}
	if filepath.Base(wrapped) != "cat" {
		t.Errorf("the wrapper of cat is %s", wrapped)
	}
	addresses := regexp.MustCompile(`\d+\.\d+\.\d+\.\d+`).FindAllString(output(t, wrapped, "/proc/self/net/fib_trie"), -1)
	if !slices.Contains(addresses, "127.0.0.1") {
		t.Errorf("loopback is not up; addresses are %v", addresses)
	}
	for _, a := range addresses {
		if !strings.HasPrefix(a, "127.") && a != "0.0.0.0" {
			t.Errorf("the enclave knows address %s", a)
		}
	}
}

// The same address can be listened on outside and inside, and Forward is the
// only way from one to the other.
func TestForward(t *testing.T) {
	t.Parallel()
	e, _ := newEnclave(t)
	closeAtEnd(t, e)
	need.Tools(t, "busybox")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "outside") })) //nolint:errcheck // the test sees it
	t.Cleanup(server.Close)
	host, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	get := e.Args("busybox", "sh", "-c", "printf 'GET / HTTP/1.0\\r\\n\\r\\n' | busybox nc -w 5 "+host+" "+port)
	if out, err := exec.CommandContext(t.Context(), get[0], get[1:]...).CombinedOutput(); err == nil {
		t.Errorf("the machine's loopback is reachable from inside without Forward: %s", out)
	}
	if err := e.Forward(server.Listener.Addr().String()); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if got := output(t, get...); !strings.HasSuffix(got, "outside") {
			t.Errorf("through Forward: %q", got)
		}
	}
	if err := e.Forward(server.Listener.Addr().String()); err == nil {
		t.Error("an address was forwarded twice")
	}
}

// Close ends connections that are open, and leaves no file or mount.
func TestClose(t *testing.T) {
	t.Parallel()
	e, dir := newEnclave(t)
	need.Tools(t, "busybox")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() }) //nolint:errcheck // end of test
	if err := e.Forward(listener.Addr().String()); err != nil {
		t.Fatal(err)
	}
	host, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	nc := e.Args("busybox", "nc", host, port)
	cmd := exec.CommandContext(t.Context(), nc[0], nc[1:]...)
	stdin, err := cmd.StdinPipe() // held open, so that nc waits for the other end
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stdin.Close() }) //nolint:errcheck // end of test
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	conn, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) //nolint:errcheck // end of test
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the connection is still open")
	}
	if err := cmd.Wait(); err != nil {
		t.Logf("nc: %v", err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", dir, err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), dir) {
		t.Error("a mount is left")
	}
}

// Shared memory made inside is not the machine's, and goes away.
func TestSharedMemoryIsItsOwn(t *testing.T) {
	t.Parallel()
	e, _ := newEnclave(t)
	closeAtEnd(t, e)
	need.Tools(t, "ipcmk", "ipcs")
	id := strings.TrimSpace(output(t, e.Args("ipcmk", "-M", "4097")...))
	if !strings.HasPrefix(id, "Shared memory id:") {
		t.Fatalf("ipcmk: %s", id)
	}
	if out := output(t, e.Args("ipcs", "-m")...); !strings.Contains(out, " 4097 ") {
		t.Errorf("inside there is no segment:\n%s", out)
	}
	if out := output(t, "ipcs", "-m"); strings.Contains(out, " 4097 ") {
		t.Errorf("the segment is the machine's:\n%s", out)
	}
}
