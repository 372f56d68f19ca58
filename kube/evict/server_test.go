package evict

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	restclient "k8s.io/client-go/rest"

	"github.com/cleave-cri/cleave/kube"
)

// TestServersThatAreNone: what answers in an API server's place, by mistake or while one starts, gets no pod evicted, and what it says
// is taken for no leave to delete one.
func TestServersThatAreNone(t *testing.T) {
	t.Parallel()
	other := `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p","namespace":"n","uid":%q},"spec":{"containers":[{"name":"c"}]}}`
	for _, tc := range []struct {
		name   string
		answer http.HandlerFunc
		want   error
	}{
		{"a page", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>welcome</html>") }, ErrUnreachable},
		{"nothing", func(http.ResponseWriter, *http.Request) {}, ErrUnreachable},
		{"half a pod", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, other[:60], "u") }, ErrUnreachable},
		{"another kind", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"kind":"Status","status":"Success"}`) }, ErrUnreachable},
		{"a pod without a UID", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, other, "") }, ErrUnreachable},
		{"a pod of another UID", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, other, "v") }, ErrNotThis},
		{"not found, said by no API server", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no route", http.StatusNotFound) }, ErrNotThis},
		{"a gateway", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "bad gateway", http.StatusBadGateway) }, ErrUnreachable},
		{"hangs up", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, ErrUnreachable},
		{"never answers", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, ErrUnreachable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var changes atomic.Int64
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method != http.MethodGet {
					changes.Add(1)
				}
				w.Header().Set("Content-Type", "application/json")
				tc.answer(w, r)
			}))
			t.Cleanup(s.Close)
			client, err := kube.NewClientFor(&restclient.Config{Host: s.URL}, "node-1", true)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			out, err := New(client, Options{}).Evict(ctx, Order{Pod: pod(), Hard: true})
			if !errors.Is(err, tc.want) || out.Way != "" || out.Calls != 0 || changes.Load() != 0 || strings.Contains(fmt.Sprint(err), "welcome") {
				t.Errorf("%+v after %d changes, %v", out, changes.Load(), err)
			}
		})
	}
}
