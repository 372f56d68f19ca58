package integration

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	_ "k8s.io/cri-api/pkg/apis/runtime/v1" // registers the messages looked up by name

	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/proxy/proxytest"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// TestEveryMethodEqualsContainerd calls every method of the CRI, and one that
// does not exist, directly and through cleave, with a running pod on the node.
func TestEveryMethodEqualsContainerd(t *testing.T) {
	t.Parallel()
	n := startNode(t, node.Options{})
	ctx := bounded(t)
	c := dial(t, n.Runtime.Endpoint())
	id := startWriter(ctx, t, n, c, "equal", "sleep 1000")
	passthrough, err := n.Passthrough(ctx, cleaveBinary(t))
	if err != nil {
		t.Fatal(err)
	}
	stopAtEnd(t, passthrough)
	direct, err := proxytest.Dial(n.Runtime.Socket())
	if err != nil {
		t.Fatal(err)
	}
	through, err := proxytest.Dial(passthrough.Socket())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = direct.Close(), through.Close() }) //nolint:errcheck // end of test

	calls := proxytest.EveryCRIMethod()
	calls = append(calls,
		proxytest.Call{Method: "/runtime.v1.RuntimeService/NotYetInvented", Requests: [][]byte{{}, {}, {}}},
		proxytest.Call{Method: "/future.v9.Service/MadeUp", Requests: [][]byte{{}, {}, {}}},
		proxytest.Call{Method: "/runtime.v1.RuntimeService/ContainerStatus", Requests: [][]byte{append([]byte{0x0a, 64}, id...)}},
		proxytest.Call{Method: "/runtime.v1.RuntimeService/ContainerStatus", Requests: [][]byte{{0xff, 0xff}}},
		// A number of messages that the method does not take.
		proxytest.Call{Method: "/runtime.v1.RuntimeService/Version"},
		proxytest.Call{Method: "/runtime.v1.RuntimeService/Version", Requests: [][]byte{{}, {}}},
		proxytest.Call{Method: "/runtime.v1.ImageService/ImageFsInfo"},
		proxytest.Call{Method: "/runtime.v1.ImageService/ImageFsInfo", Requests: [][]byte{{}, {}, {}}},
		proxytest.Call{Method: "/runtime.v1.RuntimeService/GetContainerEvents"},
		proxytest.Call{Method: "/runtime.v1.RuntimeService/StreamContainers"},
		proxytest.Call{Method: "/runtime.v1.RuntimeService/StreamContainers", Requests: [][]byte{{}, {}}},
		// Not of the CRI at all: containerd's own services pass as well.
		proxytest.Call{Method: "/containerd.services.version.v1.Version/Version", Requests: [][]byte{{}}},
		proxytest.Call{Method: "/containerd.services.namespaces.v1.Namespaces/List", Requests: [][]byte{{}}},
		proxytest.Call{Method: "/grpc.health.v1.Health/Check", Requests: [][]byte{{}}},
	)
	for i, call := range calls {
		t.Run(fmt.Sprintf("%d%s", i, strings.ReplaceAll(call.Method, "/", "_")), func(t *testing.T) {
			call.Metadata = metadata.MD{"x-test": {"1"}}
			if strings.HasSuffix(call.Method, "/GetContainerEvents") {
				call.Deadline = 300 * time.Millisecond // it has no end of its own
				proxytest.Do(ctx, direct, call)        // each event is told once; take those of the start
			}
			want := proxytest.Do(ctx, direct, call)
			got := proxytest.Do(ctx, through, call)
			if strings.HasPrefix(call.Method, "/runtime.v1.") {
				want.Answers, got.Answers = stable(t, call.Method, want.Answers), stable(t, call.Method, got.Answers)
			}
			if want.Code == codes.DeadlineExceeded && got.Code == codes.DeadlineExceeded {
				// Caller and runtime both watch the deadline; who says so first
				// differs from call to call, and so does the wording.
				want.Message, want.Details, got.Message, got.Details = "", nil, "", nil
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("through cleave differs from direct (-direct +through):\n%s", diff)
			}
		})
	}
}

// stable re-encodes answers without what differs between any two calls: times
// and momentary readings.
func stable(t *testing.T, method string, answers [][]byte) [][]byte {
	t.Helper()
	name := strings.TrimPrefix(method, "/")
	service, short, _ := strings.Cut(name, "/")
	desc, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service))
	if err != nil {
		t.Fatal(err)
	}
	sd, ok := desc.(protoreflect.ServiceDescriptor)
	if !ok {
		t.Fatalf("%s is no service", service)
	}
	m := sd.Methods().ByName(protoreflect.Name(short))
	if m == nil {
		return answers
	}
	mt, err := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
	if err != nil {
		t.Fatal(err)
	}
	out := make([][]byte, 0, len(answers))
	for _, raw := range answers {
		message := mt.New().Interface()
		if err := proto.Unmarshal(raw, message); err != nil {
			t.Fatalf("decode an answer of %s: %v", method, err)
		}
		still(t, message.ProtoReflect())
		again, err := proto.MarshalOptions{Deterministic: true}.Marshal(message)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, again)
	}
	return out
}

// moving are the fields that differ between any two calls.
var moving = map[protoreflect.Name]bool{
	"timestamp": true, "cpu": true, "memory": true, "process": true, "io": true, "network": true, "swap": true,
	"value": true, "url": true,
}

func still(t *testing.T, m protoreflect.Message) {
	t.Helper()
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case moving[f.Name()]:
			m.Clear(f)
		case f.IsMap():
		case f.IsList() && f.Message() != nil:
			for i := range v.List().Len() {
				still(t, v.List().Get(i).Message())
			}
			inOrder(t, v.List())
		case !f.IsList() && f.Message() != nil:
			still(t, v.Message())
		}
		return true
	})
}

// inOrder sorts a list that containerd makes from a map.
func inOrder(t *testing.T, list protoreflect.List) {
	t.Helper()
	type item struct {
		value protoreflect.Value
		key   string
	}
	items := make([]item, list.Len())
	for i := range items {
		v := list.Get(i)
		key, err := proto.MarshalOptions{Deterministic: true}.Marshal(v.Message().Interface())
		if err != nil {
			t.Fatal(err)
		}
		items[i] = item{v, string(key)}
	}
	slices.SortFunc(items, func(a, b item) int { return strings.Compare(a.key, b.key) })
	for i, it := range items {
		list.Set(i, it.value)
	}
}

// TestT22_LargeAnswersThroughTheProgram sends answers of the sizes at which
// others broke through a real cleave process.
func TestT22_LargeAnswersThroughTheProgram(t *testing.T) {
	t.Parallel()
	_, c := beforeEcho(t)
	ctx, conn := bounded(t), rawDial(t, c)
	for _, size := range []int{4195017, 8398577, 16777216, 16944430, 64 << 20} {
		got := proxytest.Do(ctx, conn, proxytest.Call{
			Method: "/runtime.v1.RuntimeService/ListContainers", Requests: [][]byte{{}},
			Metadata: metadata.MD{proxytest.AnswerBytes: {strconv.Itoa(size)}},
		})
		if got.Code != codes.OK || len(got.Answers) != 1 || len(got.Answers[0]) != size {
			t.Errorf("an answer of %d bytes: code %v %s, %d answers", size, got.Code, got.Message, len(got.Answers))
		}
	}
}

// TestRuntimeKilledUnderCallers kills containerd and starts it again, 20 times,
// under 8 callers: they see Unavailable and nothing else, and every time all of
// them are served again.
func TestRuntimeKilledUnderCallers(t *testing.T) {
	t.Parallel()
	n := startNode(t, node.Options{})
	ctx := bounded(t)
	rounds := 20

	var mu sync.Mutex
	served := make([]int, 8)
	failed := map[string]int{}
	stop := make(chan struct{})
	var callers sync.WaitGroup
	for i := range served {
		c := dial(t, n.Cleave.Endpoint())
		callers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				_, err := c.Runtime.Version(ctx, versionRequest)
				mu.Lock()
				if err == nil {
					served[i]++
				} else {
					failed[codeOf(err).String()]++
				}
				mu.Unlock()
			}
		})
	}
	for round := range rounds {
		if err := n.Runtime.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := n.Runtime.Start(ctx); err != nil {
			t.Fatal(err)
		}
		back := time.Now()
		mu.Lock()
		before := append([]int(nil), served...)
		mu.Unlock()
		eventually(ctx, t, fmt.Sprintf("round %d: every caller is served", round), func() (string, bool) {
			mu.Lock()
			defer mu.Unlock()
			for i := range served {
				if served[i] == before[i] {
					return fmt.Sprintf("caller %d is not; failures %v", i, failed), false
				}
			}
			return "", true
		})
		if round == 0 {
			// A new event stream is accepted soon after the runtime is back.
			acceptEvents(ctx, t, n, back)
		}
	}
	close(stop)
	callers.Wait()
	delete(failed, codes.Unavailable.String())
	if len(failed) > 0 {
		t.Errorf("callers saw more than Unavailable: %v", failed)
	}
	t.Logf("%d rounds, calls served %v", rounds, served)
}

func acceptEvents(ctx context.Context, t *testing.T, n *node.Node, back time.Time) {
	t.Helper()
	c := dial(t, n.Cleave.Endpoint())
	stream, err := c.Runtime.GetContainerEvents(ctx, eventsRequest)
	if err != nil {
		t.Fatalf("event stream %s after the runtime came back: %v", time.Since(back), err)
	}
	// A pod's coming is told on it.
	p, err := c.Run(ctx, n.PodSpec("events"))
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil {
		t.Fatalf("event stream %s after the runtime came back: %v", time.Since(back), err)
	}
	if err := p.Remove(ctx); err != nil {
		t.Error(err)
	}
	// The stream ends with the runtime, with the runtime's own code.
	if err := n.Runtime.Kill(); err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = stream.Recv()
	}
	if codeOf(err) != codes.Unavailable {
		t.Errorf("the event stream ended with %v, want Unavailable", err)
	}
	if err := n.Runtime.Start(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestAbandonedStreamsLeaveNoDescriptor opens 200 event streams on connections
// that just go away.
func TestAbandonedStreamsLeaveNoDescriptor(t *testing.T) {
	t.Parallel()
	n := startNode(t, node.Options{})
	ctx := bounded(t)
	s, err := n.Cleave.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	before := descriptors(t, s.PID)
	for range 10 {
		c, err := pod.Dial(n.Cleave.Endpoint())
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			if _, err := c.Runtime.GetContainerEvents(ctx, eventsRequest); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(ctx, t, "abandoned streams", func() (string, bool) {
		s, err := n.Cleave.Status(ctx)
		if err != nil {
			return err.Error(), false
		}
		now := descriptors(t, s.PID)
		return fmt.Sprintf("%d calls in flight, %d connections, %d descriptors (before: %d)", s.Proxy.CallsInFlight, s.Proxy.Connections, now, before),
			s.Proxy.CallsInFlight == 0 && s.Proxy.Connections == 0 && now <= before+2
	})
}

// TestSocketFollowsTheRuntimesAccess: the runtime comes after cleave, with an
// owner and mode of its own, and may come back with others.
func TestSocketFollowsTheRuntimesAccess(t *testing.T) {
	t.Parallel()
	need.Root(t)
	run := need.Lab(t)
	ctx := bounded(t)
	socket := filepath.Join(run.Dir(), "echo.sock")
	c := startAlone(t, run, socket)
	if got, err := unixsock.AccessOf(c.Socket()); err != nil || got != unixsock.RootOnly {
		t.Errorf("without a runtime: %v %v, want %v", got, err, unixsock.RootOnly)
	}
	for _, want := range []unixsock.Access{{UID: 0, GID: 1234, Mode: 0o660}, {UID: 4321, GID: 0, Mode: 0o600}} {
		l, err := unixsock.Listen(socket, want)
		if err != nil {
			t.Fatal(err)
		}
		echo := proxytest.NewEchoRuntime()
		var served sync.WaitGroup
		served.Go(func() { _ = echo.Serve(l) }) //nolint:errcheck // ends with Stop
		eventually(ctx, t, "the socket's access", func() (string, bool) {
			got, err := unixsock.AccessOf(c.Socket())
			return fmt.Sprint(got, err), err == nil && got == want
		})
		echo.Stop()
		served.Wait()
	}
}

// TestFiftyHandoversInARow sends SIGHUP again and again, faster than a process
// can start.
func TestFiftyHandoversInARow(t *testing.T) {
	t.Parallel()
	need.Root(t)
	ctx := bounded(t)
	c := startAlone(t, need.Lab(t), "/nonexistent/runtime.sock")
	before, err := c.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		if err := c.Signal(ctx, syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		if _, err := dial(t, c.Endpoint()).Runtime.Version(ctx, versionRequest); codeOf(err) != codes.Unavailable || !strings.Contains(err.Error(), "/nonexistent/runtime.sock") {
			t.Fatalf("a call in between: %v", err)
		}
	}
	eventually(ctx, t, "a successor", func() (string, bool) {
		s, err := c.Status(ctx)
		return fmt.Sprintf("process %d, %v", s.PID, err), err == nil && s.PID != before.PID
	})
}
