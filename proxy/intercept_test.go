package proxy_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/proxy/proxytest"
)

// fate is a function that answers with a word, or fails in some way.
type fate func(context.Context, []byte) ([]byte, error)

func says(word string) fate {
	return func(_ context.Context, in []byte) ([]byte, error) { return append([]byte(word+" "), in...), nil }
}

func leaves(context.Context, []byte) ([]byte, error) { return nil, nil }
func errs(context.Context, []byte) ([]byte, error)   { return []byte("no"), errors.New("bug") }
func panics(context.Context, []byte) ([]byte, error) { panic("bug") }

// What fails on a request lets the caller's bytes pass, in a unary call and in
// each way of streaming.
func TestRequestsThatAreChanged(t *testing.T) {
	t.Parallel()
	for _, method := range []string{
		"/runtime.v1.RuntimeService/RunPodSandbox",      // one request, one answer
		"/runtime.v1.RuntimeService/StreamPodSandboxes", // one request, many answers
		"/future.v9.Service/NotYetInvented",             // many each way
	} {
		for name, tc := range map[string]struct {
			fn     fate
			reason string
			want   string
		}{
			"changed":   {says("better"), "", "better request"},
			"unchanged": {leaves, "", "request"},
			"error":     {errs, "request error", "request"},
			"panic":     {panics, "request panic", "request"},
		} {
			t.Run(name+strings.ReplaceAll(method, "/", "_"), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, proxy.Config{Requests: map[string]proxy.RequestFunc{method: proxy.RequestFunc(tc.fn)}})
				want := proxytest.Do(t.Context(), w.direct, proxytest.Call{Method: method, Requests: [][]byte{[]byte(tc.want)}})
				got := proxytest.Do(t.Context(), w.through, proxytest.Call{Method: method, Requests: [][]byte{[]byte("request")}})
				if diff := cmp.Diff(want, got); diff != "" || got.Code != codes.OK {
					t.Errorf("what the runtime got (-want +got):\n%s", diff)
				}
				var fallbacks []proxy.Fallback
				if tc.reason != "" {
					fallbacks = []proxy.Fallback{{Method: method, Reason: tc.reason, Count: 1}}
				}
				if diff := cmp.Diff(fallbacks, w.server.Counters().Fallbacks); diff != "" {
					t.Errorf("fallbacks (-want +got):\n%s", diff)
				}
			})
		}
	}
}

func TestGates(t *testing.T) {
	t.Parallel()
	const method = "/runtime.v1.RuntimeService/CreateContainer"
	for name, tc := range map[string]struct {
		gate    proxy.GateFunc
		code    codes.Code
		message string
		counted int
	}{
		"open":       {func(context.Context) error { return nil }, codes.OK, "", 0},
		"error":      {func(context.Context) error { return errors.New("not registered") }, codes.Unavailable, "cleave: not registered", 0},
		"own status": {func(context.Context) error { return status.Error(codes.Aborted, "so") }, codes.Aborted, "so", 0},
		"panic":      {func(context.Context) error { panic("bug") }, codes.OK, "", 1},
		"bounded": {func(ctx context.Context) error {
			if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) > proxy.GateLimit {
				return errors.New("no limit")
			}
			return nil
		}, codes.OK, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, proxy.Config{Gates: map[string]proxy.GateFunc{method: tc.gate}})
			got := proxytest.Do(t.Context(), w.through, proxytest.Call{Method: method, Requests: [][]byte{[]byte("request")}})
			if got.Code != tc.code || got.Message != tc.message {
				t.Errorf("%v %q, want %v %q", got.Code, got.Message, tc.code, tc.message)
			}
			if reached := got.Header.Get("echo-method") != nil; reached != (tc.code == codes.OK) {
				t.Errorf("the call reached the runtime: %v", reached)
			}
			if got := w.server.Counters().Fallbacks; len(got) != tc.counted || tc.counted == 1 && got[0].Reason != "gate panic" {
				t.Errorf("counted %v", got)
			}
		})
	}
}

// A caller that gives up while its call waits at a gate gets its own status.
func TestCallerLeavesAtTheGate(t *testing.T) {
	t.Parallel()
	const method = "/runtime.v1.RuntimeService/CreateContainer"
	waits := make(chan struct{}, 1)
	w := newWorld(t, proxy.Config{Gates: map[string]proxy.GateFunc{method: func(ctx context.Context) error {
		waits <- struct{}{}
		<-ctx.Done()
		return errors.New("not registered")
	}}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan proxytest.Outcome)
	go func() { done <- proxytest.Do(ctx, w.through, proxytest.Call{Method: method, Requests: [][]byte{{}}}) }()
	<-waits
	cancel()
	if got := <-done; got.Code != codes.Canceled {
		t.Errorf("%v %q, want Canceled", got.Code, got.Message)
	}
}

// An answer that must not pass unchanged does not, however its interceptor fails.
func TestFallbacks(t *testing.T) {
	t.Parallel()
	const method = "/runtime.v1.ImageService/ImageFsInfo"
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	for name, tc := range map[string]struct {
		fn, fallback fate
		want         string
	}{
		"not needed":        {says("better"), says("kept"), "better \x00request"},
		"nothing to say":    {leaves, says("kept"), "\x00request"},
		"error":             {errs, says("kept"), "kept \x00request"},
		"panic":             {panics, says("kept"), "kept \x00request"},
		"slow":              {func(context.Context, []byte) ([]byte, error) { <-hang; return nil, nil }, says("kept"), "kept \x00request"},
		"both panic":        {panics, panics, "\x00request"},
		"fallback has none": {errs, leaves, "\x00request"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, proxy.Config{
				Interceptors: map[string]proxy.AnswerFunc{method: proxy.AnswerFunc(tc.fn)},
				Fallbacks:    map[string]proxy.AnswerFunc{method: proxy.AnswerFunc(tc.fallback)},
			})
			got := proxytest.Do(t.Context(), w.through, proxytest.Call{Method: method, Requests: [][]byte{[]byte("request")}})
			if len(got.Answers) != 1 || string(got.Answers[0]) != tc.want {
				t.Errorf("got %q, want %q", got.Answers, tc.want)
			}
		})
	}
}

// Two interceptors of one answer: one that fails does not undo the other.
func TestChain(t *testing.T) {
	t.Parallel()
	const method = "/runtime.v1.RuntimeService/PodSandboxStats"
	for name, tc := range map[string]struct {
		first, second fate
		want          string
		counted       bool
	}{
		"both":         {says("a"), says("b"), "b a \x00request", false},
		"first only":   {says("a"), leaves, "a \x00request", false},
		"second only":  {leaves, says("b"), "b \x00request", false},
		"neither":      {leaves, leaves, "\x00request", false},
		"first errs":   {errs, says("b"), "b \x00request", true},
		"second errs":  {says("a"), errs, "a \x00request", true},
		"both err":     {errs, errs, "\x00request", true},
		"nothing left": {leaves, errs, "\x00request", true},
		"three, the middle errs": {
			fate(proxy.Chain(proxy.AnswerFunc(says("a")), errs)), says("c"), "c a \x00request", true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, proxy.Config{Interceptors: map[string]proxy.AnswerFunc{
				method: proxy.Chain(proxy.AnswerFunc(tc.first), proxy.AnswerFunc(tc.second)),
			}})
			got := proxytest.Do(t.Context(), w.through, proxytest.Call{Method: method, Requests: [][]byte{[]byte("request")}})
			if len(got.Answers) != 1 || string(got.Answers[0]) != tc.want {
				t.Errorf("got %q, want %q", got.Answers, tc.want)
			}
			fallbacks := w.server.Counters().Fallbacks
			if (len(fallbacks) == 1 && fallbacks[0].Reason == "error") != tc.counted {
				t.Errorf("counted %v", fallbacks)
			}
		})
	}
}

// A call with a hold is made with the caller's own bytes, and the hold learns of
// its end, however that comes about.
func TestHolds(t *testing.T) {
	t.Parallel()
	const method = "/runtime.v1.RuntimeService/CreateContainer"
	var ended atomic.Int32
	end := func() { ended.Add(1) }
	for name, tc := range map[string]struct {
		hold    proxy.HoldFunc
		code    codes.Code
		message string
		counted int
		ended   int32
	}{
		"made":          {func(_ context.Context, r []byte) (func(), error) { return end, wrongRequest(r) }, codes.OK, "", 0, 1},
		"nobody to end": {func(context.Context, []byte) (func(), error) { return nil, nil }, codes.OK, "", 0, 0},
		"error":         {func(context.Context, []byte) (func(), error) { return nil, errors.New("being deleted") }, codes.Unavailable, "cleave: being deleted", 0, 0},
		"own status":    {func(context.Context, []byte) (func(), error) { return nil, status.Error(codes.Aborted, "so") }, codes.Aborted, "so", 0, 0},
		"panic":         {func(context.Context, []byte) (func(), error) { panic("bug") }, codes.OK, "", 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			ended.Store(0)
			w := newWorld(t, proxy.Config{Holds: map[string]proxy.HoldFunc{method: tc.hold}})
			call := proxytest.Call{Method: method, Requests: [][]byte{[]byte("request")}}
			want := proxytest.Do(t.Context(), w.direct, call)
			got := proxytest.Do(t.Context(), w.through, call)
			if tc.code == codes.OK {
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			} else if got.Code != tc.code || got.Message != tc.message {
				t.Errorf("answered %v %q", got.Code, got.Message)
			}
			if n := len(w.server.Counters().Fallbacks); n != tc.counted {
				t.Errorf("counted: %v", w.server.Counters().Fallbacks)
			}
			if n := ended.Load(); n != tc.ended {
				t.Errorf("ended %d times", n)
			}
		})
	}
}

func wrongRequest(r []byte) error {
	if string(r) != "request" {
		return fmt.Errorf("it got %q", r)
	}
	return nil
}

// Two holds on one call: the second is asked only if the first lets it pass, and both hear of its end, the second first.
func TestHoldsInARow(t *testing.T) {
	t.Parallel()
	refused := errors.New("no")
	for _, tc := range []struct {
		name          string
		first, second error
		quiet         bool
		want          []string
	}{
		{"both let it pass", nil, nil, false, []string{"first", "second", "second ended", "first ended"}},
		{"neither has to know of the end", nil, nil, true, []string{"first", "second"}},
		{"the first refuses", refused, nil, false, []string{"first"}},
		{"the second refuses", nil, refused, false, []string{"first", "second", "first ended"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var got []string
			hold := func(name string, err error) proxy.HoldFunc {
				return func(context.Context, []byte) (func(), error) {
					got = append(got, name)
					if err != nil || tc.quiet {
						return nil, err
					}
					return func() { got = append(got, name+" ended") }, nil
				}
			}
			ended, err := proxy.ChainHolds(hold("first", tc.first), hold("second", tc.second))(t.Context(), nil)
			if err == nil {
				ended()
			}
			if !slices.Equal(got, tc.want) || (err == nil) != (tc.first == nil && tc.second == nil) || err != nil && !errors.Is(err, refused) {
				t.Errorf("%q, %v; want %q", got, err, tc.want)
			}
		})
	}
}
