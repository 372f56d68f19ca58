package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"
)

// server answers as an API server would, or as nobody should.
type server struct {
	*httptest.Server

	mu      sync.Mutex
	list    func(w http.ResponseWriter) // guarded by mu
	asked   []string                    // guarded by mu
	streams chan chan string            // one of events for each watch
	auth    []string                    // guarded by mu
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{streams: make(chan chan string, 16)}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

// ServeHTTP implements [http.Handler].
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.asked = append(s.asked, r.URL.RequestURI())
	s.auth = append(s.auth, r.Header.Get("Authorization"))
	list := s.list
	s.mu.Unlock()
	q := r.URL.Query()
	switch {
	case q.Get("watch") == "":
		list(w)
	case q.Get("sendInitialEvents") != "":
		// An older API server: client-go lists then.
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
	default:
		w.Header().Set("Content-Type", "application/json")
		flusher, ok := w.(http.Flusher)
		if !ok {
			return
		}
		flusher.Flush()
		events := make(chan string, 16)
		select {
		case s.streams <- events:
		default: // nobody in the test talks to it
		}
		for {
			select {
			case e, open := <-events:
				if !open {
					return
				}
				fmt.Fprintln(w, e)
				flusher.Flush()
			case <-r.Context().Done():
				return
			}
		}
	}
}

func (s *server) answer(list func(w http.ResponseWriter)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = list
}

func podJSON(name, uid string) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":%q,"namespace":"n","uid":%q,"resourceVersion":"5"},"spec":{"nodeName":"node-1","containers":[{"name":"c"}]}}`, name, uid)
}

func pods(list ...string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"apiVersion":"v1","kind":"PodList","metadata":{"resourceVersion":"5"},"items":[%s]}`, strings.Join(list, ","))
	}
}

func status(code int, reason string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"message":"no","code":%d}`, reason, code)
	}
}

// start runs a Watch until the test ends.
func start(t *testing.T, cfg *rest.Config) *Watch {
	t.Helper()
	client, err := NewClientFor(cfg, "node-1", true)
	if err != nil {
		t.Fatal(err)
	}
	w := NewWatch(client)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		_ = w.Run(ctx) //nolint:errcheck // the context's
		close(done)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

// patience bounds waits; what is waited for takes a second.
const patience = 2 * time.Minute

// waitFor waits until a source is as ok wants it.
func waitFor(t *testing.T, what string, s Source, ok func(Snapshot) bool) Snapshot {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		got := s.Pods()
		if ok(got) {
			return got
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: it does not come to that, but is %+v", what, got)
		}
	}
}

func has(names ...string) func(Snapshot) bool {
	return func(s Snapshot) bool {
		found := map[string]bool{}
		for _, p := range s.Pods {
			found[p.Name+" "+p.UID] = true
		}
		for _, name := range names {
			if !found[name] {
				return false
			}
		}
		return len(found) == len(names) && !s.AsOf.IsZero()
	}
}

// TestWatchFollows: what comes, changes and goes is seen, a lost watch and a 410 begin anew, and only this node is asked for.
func TestWatchFollows(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	s.answer(pods(podJSON("a", "1"), podJSON("b", "2")))
	w := start(t, &rest.Config{Host: s.URL})
	waitFor(t, "the list", w, has("a 1", "b 2"))
	events := <-s.streams
	events <- `{"type":"ADDED","object":` + podJSON("c", "3") + `}`
	waitFor(t, "a new pod", w, has("a 1", "b 2", "c 3"))
	events <- `{"type":"DELETED","object":` + podJSON("a", "1") + `}`
	events <- `{"type":"MODIFIED","object":` + podJSON("b", "successor") + `}`
	waitFor(t, "a pod that went, and one of the same name", w, has("b successor", "c 3"))
	before := w.Pods().AsOf
	events <- `{"type":"BOOKMARK","object":{"apiVersion":"v1","kind":"Pod","metadata":{"resourceVersion":"9"}}}`
	waitFor(t, "a bookmark", w, func(s Snapshot) bool { return s.AsOf.After(before) && len(s.Pods) == 2 })

	s.answer(pods(podJSON("d", "4")))
	events <- `{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","message":"too old","code":410}}`
	got := waitFor(t, "410 Gone", w, has("d 4"))
	if got.Problem != "" {
		t.Errorf("a 410 is a problem: %s", got.Problem)
	}
	close(<-s.streams)
	events = <-s.streams
	events <- `{"type":"ADDED","object":` + podJSON("e", "5") + `}`
	waitFor(t, "after a watch that ended", w, has("d 4", "e 5"))

	s.mu.Lock()
	defer s.mu.Unlock()
	for _, uri := range s.asked {
		if !strings.Contains(uri, "fieldSelector=spec.nodeName%3Dnode-1") || !strings.HasPrefix(uri, "/api/v1/pods?") {
			t.Errorf("asked %s", uri)
		}
	}
}

// TestWatchInTrouble: whatever the API server answers, what was known stays known, gets older, and the reason is said; before the
// first answer nothing is known.
func TestWatchInTrouble(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		answer  func(http.ResponseWriter)
		problem string
	}{
		{"forbidden", status(403, "Forbidden"), "no"},
		{"expired token", status(401, "Unauthorized"), "no"},
		{"overloaded", status(429, "TooManyRequests"), "no"},
		{"broken", status(500, "InternalError"), "no"},
		{"a page", func(w http.ResponseWriter) { fmt.Fprint(w, "<html>") }, "API server"},
		{"garbage", func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"kind":"PodList","apiVersion":"v1","items":[{"metadata":7}]}`)
		}, "API server"},
		{"another kind", func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"kind":"NodeList","apiVersion":"v1","items":[]}`)
		}, "API server"},
		{"half an answer", func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "1000")
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"kind":"PodList"`)
		}, "API server"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			s.answer(tc.answer)
			w := start(t, &rest.Config{Host: s.URL})
			got := waitFor(t, "from the beginning", w, func(s Snapshot) bool { return strings.Contains(s.Problem, tc.problem) })
			if !got.AsOf.IsZero() || len(got.Pods) > 0 {
				t.Errorf("something is known: %+v", got)
			}
			s.answer(pods(podJSON("a", "1")))
			good := waitFor(t, "once it answers", w, has("a 1"))
			if good.Problem != "" {
				t.Errorf("problem %q", good.Problem)
			}
			s.answer(tc.answer)
			(<-s.streams) <- `{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","message":"too old","code":410}}`
			got = waitFor(t, "later", w, func(s Snapshot) bool { return strings.Contains(s.Problem, tc.problem) })
			if !has("a 1")(got) || got.AsOf.Before(good.AsOf) {
				t.Errorf("what was known is lost: %+v", got)
			}
		})
	}
}

// TestWatchLeavesOthersOut: a server that does not know selectors gives this node no other node's pods.
func TestWatchLeavesOthersOut(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	s.answer(pods(podJSON("a", "1"), strings.ReplaceAll(podJSON("b", "2"), "node-1", "node-2"), podJSON("c", "")))
	got := waitFor(t, "the list", start(t, &rest.Config{Host: s.URL}), has("a 1"))
	if !strings.Contains(got.Problem, `n/b is on node "node-2"`) && !strings.Contains(got.Problem, "n/c has no UID") {
		t.Errorf("problem %q", got.Problem)
	}
}

// TestClocksThatDiffer: how old something is goes by this machine's clock alone, whatever time the API server thinks it is.
func TestClocksThatDiffer(t *testing.T) {
	t.Parallel()
	for _, year := range []string{"1970", "2200"} {
		t.Run(year, func(t *testing.T) {
			t.Parallel()
			there := fmt.Sprintf(`"metadata":{"creationTimestamp":"%[1]s-01-01T00:00:00Z","deletionTimestamp":"%[1]s-01-01T00:00:01Z",`, year)
			s := newServer(t)
			s.answer(func(w http.ResponseWriter) {
				w.Header().Set("Date", "Wed, 01 Jan "+year+" 00:00:00 GMT")
				pods(strings.Replace(podJSON("a", "1"), `"metadata":{`, there, 1))(w)
			})
			before := time.Now()
			got := waitFor(t, "the list", start(t, &rest.Config{Host: s.URL}), has("a 1"))
			if got.AsOf.Before(before) || got.AsOf.After(time.Now()) || got.Problem != "" || !got.Pods[0].Terminating {
				t.Errorf("it is known from %s, by a clock that was at %s: %+v", got.AsOf, before, got)
			}
		})
	}
}

// TestServerThatHangs: one that takes questions and never answers holds nobody up for longer than a call may take, and what was known
// stays known, and gets older.
func TestServerThatHangs(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	hang := make(chan struct{})
	s.answer(pods(podJSON("a", "1")))
	w := start(t, &rest.Config{Host: s.URL})
	known := waitFor(t, "the list", w, has("a 1"))
	asked := make(chan struct{}, 16)
	s.answer(func(http.ResponseWriter) { asked <- struct{}{}; <-hang })
	defer close(hang)
	events := <-s.streams
	events <- `{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","message":"too old","code":410}}`
	<-asked // for a list
	client, err := NewClientFor(&rest.Config{Host: s.URL}, "node-1", true)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := client.Pod(t.Context(), "n", "a"); !errors.Is(err, context.DeadlineExceeded) || Denied(err) {
		t.Errorf("of a pod it is said %+v, %v", p, err)
	}
	if got := w.Pods(); !has("a 1")(got) || got.AsOf.Before(known.AsOf) || time.Since(got.AsOf) < callLimit {
		t.Errorf("after that is known %+v", got)
	}
}

// TestTokenFileIsReadAnew: a service account's token is replaced in its file long before it expires.
func TestTokenFileIsReadAnew(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("first"), 0o600); err != nil {
		t.Fatal(err)
	}
	var rejected int
	s.answer(func(w http.ResponseWriter) {
		// client-go believes in a token that it has just read: it reads again after the second refusal.
		if rejected++; rejected == 2 {
			s.answer(pods(podJSON("a", "1")))
		}
		if err := os.WriteFile(token, []byte("second"), 0o600); err != nil {
			t.Error(err)
		}
		status(401, "Unauthorized")(w)
	})
	waitFor(t, "with the second token", start(t, &rest.Config{Host: s.URL, BearerTokenFile: token}), has("a 1"))
	s.mu.Lock()
	defer s.mu.Unlock()
	if first, last := s.auth[0], s.auth[len(s.auth)-1]; first != "Bearer first" || last != "Bearer second" {
		t.Errorf("asked with %q, in the end with %q", first, last)
	}
}

// TestKubeletPods: the kubelet's page is read, and what it can't say leaves what was known as it was. While it does not answer it is
// asked less and less often.
func TestKubeletPods(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		page := func(list ...string) (string, error) {
			return `{"apiVersion":"v1","kind":"PodList","items":[` + strings.Join(list, ",") + "]}", nil
		}
		var answer atomic.Pointer[func() (string, error)]
		says := func(f func() (string, error)) { answer.Store(&f) }
		says(func() (string, error) { return page(podJSON("a", "1"), podJSON("b", "")) })
		var asked atomic.Int64
		k, err := NewKubeletPods(KubeletPodsOptions{Every: 10 * time.Second, Ask: func(context.Context) ([]byte, error) {
			asked.Add(1)
			text, err := (*answer.Load())()
			return []byte(text), err
		}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- k.Run(ctx) }()
		synctest.Wait()
		got := k.Pods()
		if !has("a 1")(got) || !strings.Contains(got.Problem, "n/b has no UID") || got.Source != SourceKubelet {
			t.Fatalf("got %+v", got)
		}
		<-time.After(5 * time.Second) // not at the moments at which it asks
		for _, broken := range []struct{ text, problem string }{
			{"", "it does not allow it"}, {`{"kind":"PodList","items":[{"metadata":{"name":7}}]}`, "read its answer"}, {`{"kind":"Status"}`, "read its answer"}, {"<html>", "read its answer"},
		} {
			if says(func() (string, error) { return broken.text, nil }); broken.text == "" {
				says(func() (string, error) { return "", errors.New(broken.problem) })
			}
			<-time.After(kubeletLongestRest)
			synctest.Wait()
			if s := k.Pods(); !has("a 1")(s) || !s.AsOf.Equal(got.AsOf) || !strings.Contains(s.Problem, "ask the kubelet for its pods: "+broken.problem) {
				t.Errorf("after %q is known %+v", broken.text, s)
			}
		}
		before := asked.Load()
		<-time.After(10 * kubeletLongestRest)
		if synctest.Wait(); asked.Load()-before != 10 {
			t.Errorf("it was asked %d times while it did not answer", asked.Load()-before)
		}
		says(func() (string, error) { return page(podJSON("c", "3")) })
		<-time.After(kubeletLongestRest + time.Minute)
		before = asked.Load()
		<-time.After(time.Minute)
		if synctest.Wait(); asked.Load()-before != 6 || !has("c 3")(k.Pods()) || k.Pods().Problem != "" {
			t.Errorf("asked %d times in a minute, it is known %+v", asked.Load()-before, k.Pods())
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	for _, o := range []KubeletPodsOptions{{Every: time.Second}, {Ask: func(context.Context) ([]byte, error) { return nil, nil }}} {
		if _, err := NewKubeletPods(o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}

// fatPod is a pod such as a mesh and an operator make it: 30 KiB of JSON.
func fatPod(i int) string {
	env := make([]map[string]string, 150)
	for j := range env {
		env[j] = map[string]string{"name": fmt.Sprintf("VARIABLE_%d", j), "value": strings.Repeat("v", 60)}
	}
	container := func(name string) map[string]any {
		return map[string]any{"name": name, "image": "registry.example/" + name, "env": env, "resources": map[string]any{
			"requests": map[string]string{"memory": "64Mi", "cpu": "100m", "ephemeral-storage": "1Gi"}, "limits": map[string]string{"memory": "128Mi", "ephemeral-storage": "2Gi"}}}
	}
	pod := map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{
			"name": fmt.Sprintf("pod-%d", i), "namespace": "n", "uid": fmt.Sprintf("00000000-0000-0000-0000-%012d", i), "resourceVersion": "5",
			"annotations":     map[string]string{"big": strings.Repeat("a", 4000)},
			"managedFields":   []any{map[string]any{"manager": "m", "fieldsV1": map[string]any{"f:spec": strings.Repeat("f", 6000)}}},
			"ownerReferences": []any{map[string]any{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": fmt.Sprintf("web-%d", i/10), "uid": "x", "controller": true}},
		},
		"spec": map[string]any{
			"nodeName": "node-1", "priority": 0, "containers": []any{container("main"), container("proxy")}, "initContainers": []any{container("init")},
			"volumes": []any{map[string]any{"name": "data", "emptyDir": map[string]any{}}, map[string]any{"name": "token", "projected": map[string]any{}}},
		},
		"status": map[string]any{"phase": "Running", "qosClass": "Burstable"},
	}
	text, err := json.Marshal(pod)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// BenchmarkThousandPods says what 1 000 pods take of the heap once they are known: make bench-kube.
func BenchmarkThousandPods(b *testing.B) {
	const count = 1000
	list := make([]string, 0, count)
	for i := range count {
		list = append(list, fatPod(i))
	}
	var wire int
	for _, p := range list {
		wire += len(p)
	}
	for b.Loop() {
		list := list
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Get("watch") != "" {
				w.WriteHeader(http.StatusUnprocessableEntity)
				return
			}
			pods(list...)(w)
		}))
		client, err := NewClientFor(&rest.Config{Host: server.URL}, "node-1", true)
		if err != nil {
			b.Fatal(err)
		}
		w := NewWatch(client)
		before := heap()
		ctx, cancel := context.WithCancel(b.Context())
		done := make(chan struct{})
		go func() {
			_ = w.Run(ctx) //nolint:errcheck // the context's
			close(done)
		}()
		for len(w.Pods().Pods) < count {
			runtime.Gosched()
		}
		after := heap()
		b.ReportMetric(float64(after-before), "heap-bytes")
		b.ReportMetric(float64(wire), "wire-bytes")
		cancel()
		<-done
		server.Close()
		runtime.KeepAlive(w)
	}
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
