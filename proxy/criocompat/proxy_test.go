package criocompat_test

import (
	"context"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/proxy/criocompat"
	"github.com/cleave-cri/cleave/proxy/proxytest"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

const patience = time.Minute

// informed answers /info and knows no container.
type informed struct{ criocompat.Registry }

func (informed) Info(context.Context, int32) (criocompat.Info, error) {
	return criocompat.Info{StorageDriver: "overlay", StorageRoot: "/containers"}, nil
}

// One socket carries all calls of the CRI, each as if made directly, and the
// questions of cAdvisor between them. A connection that says nothing does not hold
// up the proxy's end.
func TestOneSocketForBoth(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	upstream, path := filepath.Join(dir, "runtime.sock"), filepath.Join(dir, "crio.sock")
	small := criocompat.New(criocompat.Config{Informer: informed{}, Registry: informed{}})
	server, err := proxy.New(proxy.Config{Upstream: upstream, Admit: small.Admit})
	if err != nil {
		t.Fatal(err)
	}
	runtime := proxytest.NewEchoRuntime()
	var served sync.WaitGroup
	behind, front := listen(t, upstream), listen(t, path)
	served.Go(func() { _ = runtime.Serve(behind) }) //nolint:errcheck // ends with Stop
	served.Go(func() {
		if err := server.Serve(front); err != nil {
			t.Error(err)
		}
	})
	direct, err := proxytest.Dial(upstream)
	if err != nil {
		t.Fatal(err)
	}
	through, err := proxytest.Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	cadvisor := &http.Client{Timeout: patience, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
	}}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, call := range proxytest.EveryCRIMethod() {
		want, got := proxytest.Do(ctx, direct, call), proxytest.Do(ctx, through, call)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-directly +through cleave):\n%s", call.Method, diff)
		}
		answer, err := cadvisor.Get("http://crio/info")
		if err != nil {
			t.Fatalf("after %s: %v", call.Method, err)
		}
		if err := answer.Body.Close(); err != nil || answer.StatusCode != http.StatusOK {
			t.Errorf("/info after %s: %s, %v", call.Method, answer.Status, err)
		}
	}
	silent, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close() //nolint:errcheck // end of test
	for _, end := range []func() error{
		direct.Close, through.Close,
		func() error { return server.Drain(ctx) },
		func() error { return small.Shutdown(ctx) },
	} {
		if err := end(); err != nil {
			t.Error(err)
		}
	}
	if ctx.Err() != nil {
		t.Error("the end took too long")
	}
	runtime.Stop()
	served.Wait()
}

func listen(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := unixsock.Listen(path, unixsock.RootOnly)
	if err != nil {
		t.Fatal(err)
	}
	return l
}
