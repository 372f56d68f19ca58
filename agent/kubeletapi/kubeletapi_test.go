package kubeletapi

import (
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/cleave-cri/cleave/config/kubelet"
)

const summary = `{"node":{"runtime":{"imageFs":{"capacityBytes":1000},"containerFs":{"capacityBytes":2000}}}}`

// kubeletOf are the settings of a kubelet that is this test, with its servers.
func kubeletOf(t *testing.T, server *httptest.Server, readOnly bool) kubelet.Settings {
	t.Helper()
	address, ok := server.Listener.Addr().(*net.TCPAddr)
	if !ok {
		t.Fatal("no TCP address")
	}
	s := kubelet.Settings{PID: os.Getpid()}
	port := kubelet.Setting[int32]{Value: int32(address.Port)} //nolint:gosec // a port
	if s.Port = port; readOnly {
		s.Port, s.ReadOnlyPort = kubelet.Setting[int32]{Value: 1}, port
	}
	return s
}

func TestSummary(t *testing.T) {
	t.Parallel()
	answers := func(w http.ResponseWriter, r *http.Request) {
		if r.TLS != nil && r.Header.Get("Authorization") != "Bearer may" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		if r.URL.Path != "/stats/summary" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		fmt.Fprint(w, summary)
	}
	plain, secure := httptest.NewServer(http.HandlerFunc(answers)), httptest.NewTLSServer(http.HandlerFunc(answers))
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"node":`) }))
	failing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }))
	for _, s := range []*httptest.Server{plain, secure, broken, failing} {
		t.Cleanup(s.Close)
	}
	write := func(name, content string) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	kubeconfig := func(token string) string {
		// An authority that has nothing to do with the kubelet's own certificate.
		authority := write("ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw})))
		return write("kubeconfig", fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: "https://192.0.2.1", certificate-authority: %q}}]
users: [{name: c, user: {token: %q}}]
contexts: [{name: c, context: {cluster: c, user: c}}]
`, authority, token))
	}
	own := func(token string) kubelet.Settings {
		s := kubeletOf(t, secure, false)
		s.Kubeconfig.Value = kubeconfig(token)
		return s
	}
	closed := kubeletOf(t, plain, true)
	closed.ReadOnlyPort.Value = 0
	another := kubeletOf(t, plain, true)
	another.PID = os.Getppid()
	for _, tc := range []struct {
		name     string
		settings kubelet.Settings
		client   Client
		want     error // nil means a summary
		fails    bool
	}{
		{name: "read-only port", settings: kubeletOf(t, plain, true)},
		{name: "its own credentials", settings: own("may")},
		{name: "its own credentials, not enough", settings: own("other"), want: ErrNotAllowed},
		{name: "a token", settings: own("other"), client: Client{TokenFile: write("token", "may")}},
		{name: "no credentials", settings: kubeletOf(t, secure, false), want: ErrNotAllowed},
		{name: "a kubeconfig that is missing", settings: func() kubelet.Settings {
			s := kubeletOf(t, secure, false)
			s.Kubeconfig.Value = "/nowhere/kubeconfig"
			return s
		}(), fails: true},
		{name: "no server", settings: closed, want: ErrNoServer},
		{name: "another process listens there", settings: another, want: ErrNoServer},
		{name: "half an answer", settings: kubeletOf(t, broken, true), fails: true},
		{name: "an error", settings: kubeletOf(t, failing, true), fails: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s, err := tc.client.Summary(t.Context(), tc.settings)
			if tc.want != nil || tc.fails {
				if err == nil || tc.want != nil && !errors.Is(err, tc.want) {
					t.Errorf("got %v, want %v", err, tc.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if s.Node.Runtime == nil || *s.Node.Runtime.ImageFs.CapacityBytes != 1000 || *s.Node.Runtime.ContainerFs.CapacityBytes != 2000 {
				t.Errorf("got %+v", s.Node.Runtime)
			}
		})
	}
}
