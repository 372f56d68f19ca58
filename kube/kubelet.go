package kube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"sync"
	"time"
)

// SourceKubelet is the name of [KubeletPods] as a source.
const SourceKubelet = "kubelet"

// maxKubeletAnswer bounds the answer of the kubelet.
const maxKubeletAnswer = 64 << 20

// KubeletPodsOptions say where the kubelet is and who asks.
type KubeletPodsOptions struct {
	// URL of the page: "https://127.0.0.1:10250/pods", or "http://127.0.0.1:10255/pods" where the kubelet has its read-only port,
	// on which nobody is asked who they are. Required.
	URL string
	// CAFile has the certificates by which the kubelet's is judged; for one that signs its own that is
	// /var/lib/kubelet/pki/kubelet.crt. Required for https: a stranger on the port would decide who is evicted.
	CAFile string
	// ServerName is the name in the kubelet's certificate, usually the node's; empty means the URL's.
	ServerName string
	// CertFile and KeyFile identify who asks, as the kubelet's kubeconfig does; or TokenFile does. All are read anew for each new
	// connection or question.
	CertFile, KeyFile, TokenFile string
	// Every is the time between two questions. Required.
	Every time.Duration
}

// KubeletPods knows the pods of the kubelet itself: also those that the API server could not tell about, and static ones with
// their UIDs.
type KubeletPods struct {
	o      KubeletPodsOptions
	client *http.Client

	mu   sync.Mutex
	last Snapshot // guarded by mu
}

var _ Source = (*KubeletPods)(nil)

// NewKubeletPods prepares it; Run fills it.
func NewKubeletPods(o KubeletPodsOptions) (*KubeletPods, error) {
	u, err := url.Parse(o.URL)
	switch {
	case err != nil:
		return nil, fmt.Errorf("ask the kubelet for its pods: %w", err)
	case o.Every <= 0:
		return nil, errors.New("ask the kubelet for its pods: how often is not said")
	case u.Scheme == "https" && o.CAFile == "":
		return nil, fmt.Errorf("ask the kubelet for its pods at %s: name the file with the certificate by which it is known", o.URL)
	case u.Scheme == "http" && (o.TokenFile != "" || o.CertFile != ""):
		return nil, fmt.Errorf("ask the kubelet for its pods at %s: a token or a certificate needs https", o.URL)
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("ask the kubelet for its pods at %q: it is no address of a page", o.URL)
	}
	k := &KubeletPods{o: o, last: Snapshot{Source: SourceKubelet}}
	transport := &http.Transport{Proxy: nil, DisableKeepAlives: true, ForceAttemptHTTP2: false, ResponseHeaderTimeout: callLimit}
	if u.Scheme == "https" {
		transport.TLSClientConfig = &tls.Config{
			MinVersion: tls.VersionTLS12, ServerName: o.ServerName,
			// The check is made below, with the file as it is at that time.
			InsecureSkipVerify:   true, //nolint:gosec // VerifyConnection checks
			VerifyConnection:     k.verify(u.Hostname()),
			GetClientCertificate: k.certificate,
		}
	}
	k.client = &http.Client{
		Transport: transport, Timeout: 2 * callLimit,
		CheckRedirect: func(*http.Request, []*http.Request) error { return errors.New("the kubelet sends elsewhere") },
	}
	return k, nil
}

// verify checks the kubelet's certificate by the file as it is now: the kubelet renews it.
func (k *KubeletPods) verify(host string) func(tls.ConnectionState) error {
	return func(s tls.ConnectionState) error {
		text, err := os.ReadFile(k.o.CAFile)
		if err != nil {
			return fmt.Errorf("read the certificate by which the kubelet is known: %w", err)
		}
		roots, others := x509.NewCertPool(), x509.NewCertPool()
		if !roots.AppendCertsFromPEM(text) {
			return fmt.Errorf("%s has no certificate", k.o.CAFile)
		}
		for _, c := range s.PeerCertificates[1:] {
			others.AddCert(c)
		}
		name := k.o.ServerName
		if name == "" {
			name = host
		}
		_, err = s.PeerCertificates[0].Verify(x509.VerifyOptions{DNSName: name, Roots: roots, Intermediates: others})
		return err
	}
}

func (k *KubeletPods) certificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	if k.o.CertFile == "" {
		return &tls.Certificate{}, nil
	}
	c, err := tls.LoadX509KeyPair(k.o.CertFile, k.o.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("read this node's certificate: %w", err)
	}
	return &c, nil
}

// Run asks until ctx ends.
func (k *KubeletPods) Run(ctx context.Context) error {
	tick := time.NewTicker(k.o.Every)
	defer tick.Stop()
	for {
		k.ask(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (k *KubeletPods) ask(ctx context.Context) {
	began := time.Now()
	pods, odd, err := k.fetch(ctx)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.last.Problem = ""
	switch {
	case err != nil:
		k.last.Problem = fmt.Sprintf("ask the kubelet for its pods: %v", err)
		return
	case len(odd) > 0:
		k.last.Problem = "left out: " + problems(odd)
	}
	k.last.Pods, k.last.AsOf = pods, began
}

func (k *KubeletPods) fetch(ctx context.Context) (pods []*Pod, odd []string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, k.o.URL, nil)
	if err != nil {
		return nil, nil, err
	}
	if k.o.TokenFile != "" {
		token, err := os.ReadFile(k.o.TokenFile)
		if err != nil {
			return nil, nil, err
		}
		request.Header.Set("Authorization", "Bearer "+string(token))
	}
	answer, err := k.client.Do(request)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, answer.Body.Close()) }()
	if answer.StatusCode != http.StatusOK {
		return nil, nil, fmt.Errorf("it answers %s", answer.Status)
	}
	data, err := io.ReadAll(io.LimitReader(answer.Body, maxKubeletAnswer+1))
	switch {
	case err != nil:
		return nil, nil, err
	case len(data) > maxKubeletAnswer:
		return nil, nil, fmt.Errorf("its answer is larger than %d MiB", maxKubeletAnswer>>20)
	}
	wire, err := readPods(data)
	if err != nil {
		return nil, nil, fmt.Errorf("read its answer: %w", err)
	}
	pods = make([]*Pod, 0, len(wire))
	for i := range wire {
		p, err := wire[i].pod()
		if err != nil {
			odd = append(odd, err.Error())
			continue
		}
		pods = append(pods, p)
	}
	return pods, odd, nil
}

// Pods implements [Source].
func (k *KubeletPods) Pods() Snapshot {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.last
}
