package criocompat

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/net/http2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what a test waits for.
const patience = time.Minute

// node answers like a node; err, if set, instead.
type node struct {
	info Info
	err  error
	// known are containers by alias; all counts questions.
	mu    sync.Mutex
	known map[string]Container // guarded by mu
	all   atomic.Int64
	// hang lets Container wait for its context.
	hang bool
	// asked are the processes that asked for the disks.
	asked []int32 // guarded by mu
}

func (n *node) Info(_ context.Context, pid int32) (Info, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked = append(n.asked, pid)
	return n.info, n.err
}

func (n *node) Container(ctx context.Context, alias string) (Container, error) {
	n.all.Add(1)
	if n.hang {
		<-ctx.Done()
		return Container{}, fmt.Errorf("ask containerd: %w", ctx.Err())
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	c, ok := n.known[alias]
	if !ok {
		return c, ErrUnknown
	}
	return c, nil
}

func (n *node) add(c Container) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.known == nil {
		n.known = map[string]Container{}
	}
	n.known[Alias(c.Name)] = c
}

// house is a server behind a real socket. Connections that were told to be gRPC
// come out of grpc.
type house struct {
	*Server
	path string
	grpc chan *net.UnixConn
}

func start(t *testing.T, n *node, l limits) *house {
	t.Helper()
	h := &house{
		Server: newServer(Config{Informer: n, Registry: n}, l),
		path:   filepath.Join(t.TempDir(), "s"),
		grpc:   make(chan *net.UnixConn, 16),
	}
	socket, err := net.ListenUnix("unix", &net.UnixAddr{Name: h.path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := socket.AcceptUnix()
			if err != nil {
				return
			}
			admitted := h.Admit(conn)
			all.Go(func() {
				if admitted(ctx) {
					h.grpc <- conn
				}
			})
		}
	})
	t.Cleanup(func() {
		stop()
		if err := socket.Close(); err != nil {
			t.Error(err)
		}
		all.Wait()
		end, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := h.Shutdown(end); err != nil {
			t.Error(err)
		}
		close(h.grpc)
		for conn := range h.grpc {
			_ = conn.Close() //nolint:errcheck // end of test
		}
	})
	return h
}

func (h *house) dial(t *testing.T) *net.UnixConn {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: h.path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) //nolint:errcheck // end of test
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// get asks as cAdvisor does.
func (h *house) get(t *testing.T, path string) (status int, body string) {
	t.Helper()
	transport := &http.Transport{
		DisableCompression: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", h.path)
		},
	}
	defer transport.CloseIdleConnections()
	answer, err := (&http.Client{Transport: transport, Timeout: patience}).Get("http://crio" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close() //nolint:errcheck // read to its end
	all, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(all)
}

func write(t *testing.T, conn net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(conn, s); err != nil {
		t.Fatal(err)
	}
}

// closed waits until the other end closes a connection, and returns what it said.
func closed(t *testing.T, conn net.Conn) string {
	t.Helper()
	said, err := io.ReadAll(conn)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("the connection is still open")
	}
	return string(said) // a reset is as good an end as any
}

func split() Info {
	return Info{StorageDriver: "overlay", StorageRoot: "/containers", StorageImage: "/images", CgroupDriver: Systemd}
}

func TestInfoAndContainer(t *testing.T) {
	t.Parallel()
	n := &node{info: split()}
	n.add(Container{Name: "one", PID: 7, Image: "busybox", CreatedTime: 5, LogPath: "/l", Root: "/r", IP: "10.0.0.1", IPs: []string{"10.0.0.1"}})
	h := start(t, n, usual)
	status, body := h.get(t, "/info")
	if want := `{"storage_driver":"overlay","storage_root":"/containers","storage_image":"/images","cgroup_driver":"systemd"}`; status != http.StatusOK || body != want {
		t.Errorf("/info: %d %s, want %s", status, body, want)
	}
	status, body = h.get(t, "/containers/"+Alias("one"))
	// cAdvisor writes into labels, so they must not be null.
	want := `{"name":"one","pid":7,"image":"busybox","created_time":5,"labels":{},"annotations":{},"log_path":"/l","root":"/r",` +
		`"ip_address":"10.0.0.1","ip_addresses":["10.0.0.1"]}`
	if status != http.StatusOK || body != want {
		t.Errorf("/containers: %d %s, want %s", status, body, want)
	}
	for _, path := range []string{"/", "/config", "/info/", "/containers/", "/containers/x", "/containers/" + someID, "/containers/" + Alias("one") + "/x", "/pause/" + Alias("one")} {
		if status, _ := h.get(t, path); status != http.StatusNotFound {
			t.Errorf("GET %s: %d, want 404", path, status)
		}
	}
	got := h.Status()
	wantStatus := Status{Requests: 10, Unknown: 4, Infos: []InfoCall{{At: got.Infos[0].At, PID: int32(os.Getpid()), Answer: &n.info}}}
	if diff := cmp.Diff(wantStatus, got); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	if len(n.asked) != 1 || n.asked[0] != int32(os.Getpid()) {
		t.Errorf("asked by %v, want this process, %d", n.asked, os.Getpid())
	}
}

// The kubelet has no disks for its whole life then, so it must be an error to it:
// cAdvisor looks at the body only, which must not be JSON.
func TestInfoWithoutAnswer(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"the layout is not known yet", `{"storage_root":"/"}`, "null", "1"} {
		h := start(t, &node{err: errors.New(text)}, usual)
		status, body := h.get(t, "/info")
		if status != http.StatusServiceUnavailable || !strings.Contains(body, text) {
			t.Errorf("%d %q, want 503 with the reason", status, body)
		}
		var info Info
		if err := json.NewDecoder(strings.NewReader(body)).Decode(&info); err == nil {
			t.Errorf("cAdvisor takes %q for an answer", body)
		}
		if calls := h.Status().Infos; len(calls) != 1 || calls[0].Answer != nil || calls[0].Error != text {
			t.Errorf("remembered %+v", calls)
		}
	}
}

func TestOnlyTheLastCallsAreKept(t *testing.T) {
	t.Parallel()
	s := New(Config{Informer: &node{}})
	defer shutdown(t, s)
	for range callsKept + 3 {
		s.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/info", nil))
	}
	if got := s.Status(); len(got.Infos) != callsKept || got.Requests != callsKept+3 {
		t.Errorf("%d calls kept of %d", len(got.Infos), got.Requests)
	}
}

func shutdown(t *testing.T, s *Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		t.Error(err)
	}
}

// A gRPC connection comes through with every byte, however it is cut.
func TestConnectionsAreToldApart(t *testing.T) {
	t.Parallel()
	h := start(t, &node{info: split()}, usual)
	brief := usual
	brief.say = time.Second // for what has no end
	impatient := start(t, &node{info: split()}, brief)
	for _, cut := range []int{0, 1, 3, 23} {
		conn := h.dial(t)
		all := http2.ClientPreface + "and more"
		write(t, conn, all[:cut])
		// What came so far must not have been decided on.
		if got := len(h.grpc); got != 0 {
			t.Fatalf("decided on %d bytes", cut)
		}
		write(t, conn, all[cut:])
		select {
		case got := <-h.grpc:
			read := make([]byte, len(all))
			if err := got.SetDeadline(time.Now().Add(patience)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(got, read); err != nil || string(read) != all {
				t.Errorf("read %q, %v", read, err)
			}
			_ = got.Close() //nolint:errcheck // end of test
		case <-time.After(patience):
			t.Fatalf("cut at %d: not told to be gRPC", cut)
		}
	}
	for _, first := range []string{
		"POST /info HTTP/1.1\r\nHost: x\r\n\r\n", "PRI * HTTP/1.1\r\nHost: x\r\n\r\n", "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
		"HEAD /info HTTP/1.0\r\n\r\n", "GET /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n",
	} {
		conn := impatient.dial(t)
		write(t, conn, first)
		if said := closed(t, conn); !strings.Contains(said, " 404 ") {
			t.Errorf("%q is answered %q, want 404", first, said)
		}
	}
	for _, first := range []string{"\x16\x03\x01\x00\x00", "garbage\r\n\r\n", "GET /info\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSX\r\n\r\n", "GET /" + strings.Repeat("x", 20<<10) + " HTTP/1.1\r\n\r\n"} {
		conn := impatient.dial(t)
		_, _ = io.WriteString(conn, first) //nolint:errcheck // it may be refused before its end
		if said := closed(t, conn); said != "" && !strings.Contains(said, " 40") && !strings.Contains(said, " 431 ") && !strings.Contains(said, " 505 ") {
			t.Errorf("%.40q is answered %q", first, said)
		}
	}
	h.settle(t)
	impatient.settle(t)
}

// settle waits until no connection is waited for any more: the server notes that
// after it has closed one.
func (h *house) settle(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for h.Status().Waiting != 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%d connections are still waited for", h.Status().Waiting)
		}
	}
}

// Clients that say nothing, or half a thing, are closed in time.
func TestSilentAndHalf(t *testing.T) {
	t.Parallel()
	l := usual
	l.say = 50 * time.Millisecond
	h := start(t, &node{info: split()}, l)
	for _, first := range []string{"", "P", http2.ClientPreface[:20], "GET /info HT", "GET /info HTTP/1.1\r\nHost: x\r\n"} {
		conn := h.dial(t)
		write(t, conn, first)
		closed(t, conn)
	}
	conn := h.dial(t)
	write(t, conn, "PRI")
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	closed(t, conn)
	h.settle(t)
	if got := len(h.grpc); got != 0 {
		t.Errorf("%d taken for gRPC", got)
	}
}

// A thousand connections that say nothing, and as many that say half, hinder
// neither a kubelet that makes calls nor its cAdvisor; the oldest go first.
func TestIdleConnectionsHinderNobody(t *testing.T) {
	t.Parallel()
	l := usual
	l.say = patience // it is the number that bounds them here
	h := start(t, &node{info: split()}, l)
	var idle []net.Conn
	for i := range 1000 {
		conn := h.dial(t)
		if i%2 == 0 {
			_, _ = io.WriteString(conn, "GET /info HTTP/1.1\r\n") //nolint:errcheck // it may have had to make room
		}
		idle = append(idle, conn)
	}
	kubelet := h.dial(t)
	write(t, kubelet, http2.ClientPreface)
	select {
	case conn := <-h.grpc:
		_ = conn.Close() //nolint:errcheck // end of test
	case <-time.After(patience):
		t.Fatal("the kubelet's connection is not served")
	}
	if status, _ := h.get(t, "/info"); status != http.StatusOK {
		t.Errorf("/info: %d", status)
	}
	gone := make(chan struct{}, len(idle))
	for _, conn := range idle {
		go func() {
			_, _ = io.Copy(io.Discard, conn) //nolint:errcheck // a reset is as good an end as any
			gone <- struct{}{}
		}()
	}
	for range 1000 - l.waiting {
		select {
		case <-gone:
		case <-time.After(patience):
			t.Fatal("silent connections are still open")
		}
	}
	for _, conn := range idle {
		_ = conn.Close() //nolint:errcheck // end of test
	}
	for range l.waiting {
		<-gone
	}
	if got := h.Status(); got.Waiting > l.waiting || got.Dropped < int64(1000-l.waiting) {
		t.Errorf("%d connections are waited for, %d were dropped", got.Waiting, got.Dropped)
	}
}

// The proxy's end is not held up by a silent connection for the whole time.
func TestSilentConnectionWhenItEnds(t *testing.T) {
	t.Parallel()
	l := usual
	l.say, l.closing = time.Hour, time.Millisecond
	s := newServer(Config{}, l)
	defer shutdown(t, s)
	client, server := pair(t)
	defer client.Close() //nolint:errcheck // end of test
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan bool)
	go func() { done <- s.Admit(server)(ctx) }()
	stop()
	select {
	case admitted := <-done:
		if admitted {
			t.Error("a silent connection was admitted")
		}
	case <-time.After(patience):
		t.Fatal("Admit goes on")
	}
}

// pair returns the ends of a connection.
func pair(t testing.TB) (client, server *net.UnixConn) {
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
	return client, server
}

// Kubelets up to 1.36 ask for a container once, when its cgroup is just made
// (KSS-9): the question waits for the container.
func TestQuestionWaitsForItsContainer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{}
		s := New(Config{Informer: n, Registry: n})
		defer shutdown(t, s)
		w := httptest.NewRecorder()
		done := make(chan time.Duration)
		began := time.Now()
		go func() {
			s.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/containers/"+Alias("late"), nil))
			done <- time.Since(began)
		}()
		synctest.Wait()
		late := time.AfterFunc(time.Second, func() { n.add(Container{Name: "late"}) })
		defer late.Stop()
		took := <-done
		if w.Code != http.StatusOK || took < time.Second || took > time.Second+pauseMax {
			t.Errorf("%d %s after %s", w.Code, w.Body, took)
		}
	})
}

func TestUnknownContainer(t *testing.T) {
	t.Parallel()
	for _, hang := range []bool{false, true} {
		t.Run(fmt.Sprintf("containerd hangs %v", hang), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := &node{hang: hang}
				s := New(Config{Informer: n, Registry: n})
				defer shutdown(t, s)
				began := time.Now()
				w := httptest.NewRecorder()
				s.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/containers/"+Alias("never"), nil))
				// 404 also where containerd did not answer: with anything else cAdvisor
				// gives the container up for good.
				if w.Code != http.StatusNotFound || time.Since(began) != usual.hold {
					t.Errorf("%d after %s, want 404 after %s", w.Code, time.Since(began), usual.hold)
				}
				if got := n.all.Load(); got > int64(usual.hold/pauseMax)+10 {
					t.Errorf("the registry was asked %d times", got)
				}
			})
		})
	}
}

// More questions for unknown containers than are held are answered at once, and
// known ones meanwhile as well.
func TestHeldQuestionsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{}
		n.add(Container{Name: "known"})
		l := usual
		l.holds = 8
		s := newServer(Config{Informer: n, Registry: n}, l)
		defer shutdown(t, s)
		ask := func(id string) (int, time.Duration) {
			began := time.Now()
			w := httptest.NewRecorder()
			s.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/containers/"+Alias(id), nil))
			return w.Code, time.Since(began)
		}
		var held sync.WaitGroup
		for i := range l.holds {
			held.Go(func() { ask(fmt.Sprint("unknown", i)) })
		}
		synctest.Wait()
		if code, took := ask("one more"); code != http.StatusNotFound || took != 0 {
			t.Errorf("one too many: %d after %s", code, took)
		}
		if code, took := ask("known"); code != http.StatusOK || took != 0 {
			t.Errorf("a known one: %d after %s", code, took)
		}
		held.Wait()
		if got := s.Status().Unknown; got != int64(l.holds)+1 {
			t.Errorf("%d unknown", got)
		}
	})
}

func TestRequestsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &node{hang: true}
		l := usual
		l.requests = 2
		s := newServer(Config{Informer: n, Registry: n}, l)
		defer shutdown(t, s)
		var held sync.WaitGroup
		for i := range l.requests {
			held.Go(func() {
				s.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/containers/"+Alias(fmt.Sprint(i)), nil))
			})
		}
		synctest.Wait()
		w := httptest.NewRecorder()
		s.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/info", nil))
		if w.Code != http.StatusServiceUnavailable {
			t.Errorf("one too many: %d", w.Code)
		}
		held.Wait()
	})
}

// Whatever a client sends, the connection is sorted or closed, and HTTP that is
// answered is answered with a status.
func FuzzFirstBytes(f *testing.F) {
	f.Add([]byte("GET /info HTTP/1.1\r\nHost: crio\r\n\r\n"))
	f.Add([]byte("GET /containers/" + Alias("x") + " HTTP/1.1\r\nHost: crio\r\n\r\n"))
	f.Add([]byte(http2.ClientPreface))
	f.Add([]byte("PRI * HTTP/2.0\r\n"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, first []byte) {
		l := usual
		l.hold, l.closing = time.Millisecond, time.Millisecond
		n := &node{info: split()}
		s := newServer(Config{Informer: n, Registry: n}, l)
		defer shutdown(t, s)
		client, server := pair(t)
		defer client.Close() //nolint:errcheck // end of test
		if err := client.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = client.Write(first) //nolint:errcheck // it may be closed meanwhile
			_ = client.CloseWrite()    //nolint:errcheck // as above
		}()
		ctx, stop := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer stop()
		if s.Admit(server)(ctx) {
			defer server.Close() //nolint:errcheck // end of test
			if !strings.HasPrefix(string(first), http2.ClientPreface) {
				t.Errorf("%q was taken for gRPC", first)
			}
			return
		}
		answer, err := http.ReadResponse(bufio.NewReader(client), nil)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%q: neither answered nor closed", first)
		}
		if err == nil {
			_ = answer.Body.Close() //nolint:errcheck // end of test
		}
	})
}
