package kubeletapi

import (
	"encoding/binary"
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

const podList = `{"kind":"PodList","items":[]}`

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
		switch r.URL.Path {
		case "/stats/summary":
			fmt.Fprint(w, summary)
		case "/pods":
			fmt.Fprint(w, podList)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}
	plain, secure := httptest.NewServer(http.HandlerFunc(answers)), httptest.NewTLSServer(http.HandlerFunc(answers))
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"node":`) }))
	failing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }))
	elsewhere := httptest.NewServer(http.RedirectHandler(plain.URL+"/stats/summary", http.StatusFound))
	for _, s := range []*httptest.Server{plain, secure, broken, failing, elsewhere} {
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
		}(), want: ErrNoCredentials},
		{name: "a key with a passphrase", settings: func() kubelet.Settings {
			s := kubeletOf(t, secure, false)
			key := write("client.pem", "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
			s.Kubeconfig.Value = write("kubeconfig", fmt.Sprintf("{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: c}}], "+
				"clusters: [{name: c, cluster: {server: \"https://192.0.2.1\"}}], users: [{name: c, user: {client-certificate: %q, client-key: %q}}]}", key, key))
			return s
		}(), want: ErrNoCredentials},
		{name: "no server", settings: closed, want: ErrNoServer},
		{name: "another process listens there", settings: another, want: ErrNoServer},
		{name: "half an answer", settings: kubeletOf(t, broken, true), fails: true},
		{name: "it sends elsewhere", settings: kubeletOf(t, elsewhere, true), fails: true},
		{name: "an error", settings: kubeletOf(t, failing, true), fails: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			pods, podsErr := tc.client.Pods(t.Context(), tc.settings)
			s, err := tc.client.Summary(t.Context(), tc.settings)
			if tc.want != nil || tc.fails {
				if err == nil || tc.want != nil && (!errors.Is(err, tc.want) || !errors.Is(podsErr, tc.want)) {
					t.Errorf("got %v and %v, want %v", err, podsErr, tc.want)
				}
				return
			}
			if err := errors.Join(err, podsErr); err != nil || string(pods) != podList {
				t.Fatalf("pods %q, %v", pods, err)
			}
			if s.Node.Runtime == nil || *s.Node.Runtime.ImageFs.CapacityBytes != 1000 || *s.Node.Runtime.ContainerFs.CapacityBytes != 2000 {
				t.Errorf("got %+v", s.Node.Runtime)
			}
		})
	}
}

// Credentials go to the kubelet alone: not to who listens on its port of another address, and not to a proxy that the environment names.
func TestNobodyElseIsAsked(t *testing.T) {
	t.Parallel()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, summary) }))
	if err := server.Listener.Close(); err != nil {
		t.Fatal(err)
	}
	server.Listener = listener
	server.StartTLS()
	t.Cleanup(server.Close)
	s := kubeletOf(t, server, false)
	for _, address := range []string{"", "0.0.0.0", "127.0.0.1", "::", "::1", "127.0.0.3"} {
		s.Address.Value = address
		if _, err := (Client{}).Summary(t.Context(), s); !errors.Is(err, ErrNoServer) {
			t.Errorf("at %q, where it does not listen: %v", address, err)
		}
	}
	s.Address.Value = "127.0.0.2"
	if _, err := (Client{}).Summary(t.Context(), s); err != nil {
		t.Errorf("where it listens: %v", err)
	}
	config, err := Client{}.reach(s)
	if err != nil {
		t.Fatal(err)
	}
	if config.Proxy == nil {
		t.Fatal("a proxy is taken from the environment")
	}
	if proxy, err := config.Proxy(nil); proxy != nil || err != nil {
		t.Errorf("by way of %v, %v", proxy, err)
	}
}

func TestParseLocal(t *testing.T) {
	t.Parallel()
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the texts are those of a machine with the other order of bytes")
	}
	for text, want := range map[string]string{
		"0100007F:280A":                         "127.0.0.1:10250",
		"00000000:2907":                         "0.0.0.0:10503",
		"00000000000000000000000001000000:280A": "[::1]:10250",
		"0000000000000000FFFF00000100007F:280A": "[::ffff:127.0.0.1]:10250",
		"":                                      "", ":": "", "0100007F": "", "0100007:280A": "", "0100007F00:280A": "", "0100007G:280A": "", "0100007F:1280A": "",
	} {
		got, ok := parseLocal(text)
		if ok != (want != "") || ok && got.String() != want {
			t.Errorf("%q is %v, %v, want %q", text, got, ok, want)
		}
	}
}
