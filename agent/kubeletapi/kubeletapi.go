// Package kubeletapi asks the node's kubelet, on its own server, what it reports. It knows nothing of what cleave thinks of the
// answer. Only agent may import it.
package kubeletapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"github.com/cleave-cri/cleave/config/kubelet"
)

var (
	// ErrNotAllowed says that the kubelet does not answer us, though it is there.
	ErrNotAllowed = errors.New("the kubelet does not allow it")
	// ErrNoCredentials says that there are none that can be used for asking it.
	ErrNoCredentials = errors.New("there are no credentials to ask with")
	// ErrNoServer says that the kubelet listens on no port that is known.
	ErrNoServer = errors.New("the kubelet's server is not there")
)

// maxAnswerBytes is the largest answer that is read; a summary of 110 pods has some 500 kB.
const maxAnswerBytes = 64 << 20

// Client asks one kubelet. The zero value of both fields is of use.
type Client struct {
	// TokenFile holds a token that may get nodes/stats and nodes/pods (nodes/proxy before Kubernetes 1.33), for kubelets that ask the API server about each call. Empty means that the
	// kubelet's own credentials are tried.
	TokenFile string
	// Proc is where the proc file system is; /proc if empty.
	Proc string
}

// Summary is /stats/summary of the kubelet with these settings.
//
// It asks only an address and port on which that very process listens, so credentials reach nobody else. Errors are ErrNoServer,
// ErrNoCredentials, ErrNotAllowed, and whatever keeps an answer from coming or from being understood.
func (c Client) Summary(ctx context.Context, s kubelet.Settings) (stats.Summary, error) {
	var out stats.Summary
	data, err := c.get(ctx, s, "/stats/summary")
	if err == nil {
		if err = json.Unmarshal(data, &out); err != nil {
			err = fmt.Errorf("understand its answer: %w", err)
		}
	}
	if err != nil {
		return stats.Summary{}, fmt.Errorf("ask the kubelet (pid %d) for its summary: %w", s.PID, err)
	}
	return out, nil
}

// Pods is /pods of the kubelet with these settings, as it is, under the same conditions as Summary.
func (c Client) Pods(ctx context.Context, s kubelet.Settings) ([]byte, error) {
	return c.get(ctx, s, "/pods")
}

func (c Client) get(ctx context.Context, s kubelet.Settings, path string) (_ []byte, err error) {
	config, err := c.reach(s)
	if err != nil {
		return nil, err
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoCredentials, err)
	}
	defer client.CloseIdleConnections()
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return errors.New("it sends elsewhere") }
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, config.Host+path, nil)
	if err != nil {
		return nil, err
	}
	answer, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, answer.Body.Close()) }()
	switch answer.StatusCode {
	case http.StatusOK:
	case http.StatusUnauthorized, http.StatusForbidden:
		return nil, fmt.Errorf("%w (%s)", ErrNotAllowed, answer.Status)
	default:
		return nil, fmt.Errorf("it answers %s", answer.Status)
	}
	data, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswerBytes+1))
	if len(data) > maxAnswerBytes {
		return nil, fmt.Errorf("its answer is larger than %d MiB", maxAnswerBytes>>20)
	}
	return data, err
}

// reach says how the kubelet is reached: without credentials on its read-only port if it has one, else by TLS.
func (c Client) reach(s kubelet.Settings) (*rest.Config, error) {
	open, err := listening(c.Proc, s.PID)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoServer, err)
	}
	address := host(s.Address.Value)
	if port := s.ReadOnlyPort.Value; listens(open[port], address) {
		return &rest.Config{Host: "http://" + net.JoinHostPort(address, strconv.Itoa(int(port))), Proxy: noProxy}, nil
	}
	port := s.Port.Value
	if !listens(open[port], address) {
		return nil, fmt.Errorf("%w: it does not listen on %s", ErrNoServer, net.JoinHostPort(address, strconv.Itoa(int(port))))
	}
	config := &rest.Config{Proxy: noProxy}
	switch {
	case c.TokenFile != "":
		config.BearerTokenFile = c.TokenFile
	case s.Kubeconfig.Value != "":
		own, err := clientcmd.BuildConfigFromFlags("", s.Kubeconfig.Value)
		if err == nil {
			err = rest.LoadTLSFiles(own) // given by name, client-go would watch them in the background
		}
		if err != nil {
			return nil, fmt.Errorf("%w: use the kubelet's own, %s: %w", ErrNoCredentials, s.Kubeconfig.Value, err)
		}
		config.BearerToken, config.BearerTokenFile = own.BearerToken, own.BearerTokenFile
		config.TLSClientConfig = own.TLSClientConfig
	}
	config.Host = "https://" + net.JoinHostPort(address, strconv.Itoa(int(port)))
	// The kubelet's certificate is usually its own; that it is the kubelet who listens is known from the kernel.
	config.Insecure, config.CAFile, config.CAData, config.ServerName = true, "", nil, ""
	return config, nil
}

// noProxy keeps the environment out: a proxy would be another listener, and the certificate is not looked at.
func noProxy(*http.Request) (*url.URL, error) { return nil, nil }

// listens says whether a process that listens on addresses is reached at another: on the very address, or on all. Somebody else may
// listen on the same port of another one.
func listens(on []netip.Addr, address string) bool {
	to, err := netip.ParseAddr(address)
	return err == nil && slices.ContainsFunc(on, func(a netip.Addr) bool { return a.IsUnspecified() || a.Unmap() == to.Unmap() })
}

// host is the address to connect to for one that is listened on.
func host(address string) string {
	ip := net.ParseIP(address)
	switch {
	case ip == nil, ip.Equal(net.IPv4zero):
		return "127.0.0.1"
	case ip.Equal(net.IPv6zero):
		return "::1"
	}
	return address
}
