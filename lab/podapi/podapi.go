// Package podapi makes, finds and deletes pods at an API server of the lab: the kubelet's deputy (lab/deputy) or a real one
// (lab/plane). It speaks plain HTTP and JSON: client-go's typed clients bring all of the Kubernetes API along, and the program that
// is shipped has this package in it.
//
// For the lab.
package podapi

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// callLimit bounds one call.
const callLimit = 30 * time.Second

// Access is how an API server is reached: a deputy, or a real one of the lab.
type Access struct {
	Server, Token string
	// CertPEM is the server's certificate; empty for a server on the lab's own loopback that signs a new one at each start, and is
	// not asked for it.
	CertPEM []byte
}

// ReadKubeconfig reads what a lab's kubeconfig says.
func ReadKubeconfig(file string) (Access, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return Access{}, fmt.Errorf("read how the lab's API server is reached: %w", err)
	}
	var k struct {
		Clusters []struct {
			Cluster struct {
				Server string `yaml:"server"`
				Data   string `yaml:"certificate-authority-data"`
			} `yaml:"cluster"`
		} `yaml:"clusters"`
		Users []struct {
			User struct {
				Token string `yaml:"token"`
			} `yaml:"user"`
		} `yaml:"users"`
	}
	if err := yaml.Unmarshal(text, &k); err != nil || len(k.Clusters) != 1 || len(k.Users) != 1 {
		return Access{}, fmt.Errorf("read how the lab's API server is reached: %s has not one cluster and one user: %w", file, err)
	}
	cert, err := base64.StdEncoding.DecodeString(k.Clusters[0].Cluster.Data)
	if err != nil {
		return Access{}, fmt.Errorf("read how the lab's API server is reached: %s: %w", file, err)
	}
	return Access{Server: k.Clusters[0].Cluster.Server, Token: k.Users[0].User.Token, CertPEM: cert}, nil
}

// Client makes and deletes pods at an API server. Errors are those of
// k8s.io/apimachinery/pkg/api/errors where the server gave one.
type Client struct {
	access Access
	http   *http.Client
}

// NewClient prepares a client. Close ends it.
func NewClient(a Access) *Client {
	secure := &tls.Config{MinVersion: tls.VersionTLS12}
	if len(a.CertPEM) > 0 {
		secure.RootCAs = x509.NewCertPool()
		secure.RootCAs.AppendCertsFromPEM(a.CertPEM)
	} else {
		secure.InsecureSkipVerify = true //nolint:gosec // see Access: nobody else is on that loopback
	}
	transport := &http.Transport{TLSClientConfig: secure}
	return &Client{access: a, http: &http.Client{Transport: transport}}
}

func podPath(namespace, name string) string {
	path := "/api/v1/namespaces/" + namespace + "/pods"
	if name != "" {
		path += "/" + name
	}
	return path
}

// Access is how the server is reached.
func (c *Client) Access() Access { return c.access }

// Ready says whether the server answers calls, as it says itself.
func (c *Client) Ready(ctx context.Context) error {
	if err := c.call(ctx, http.MethodGet, "/readyz", nil, nil); err != nil {
		return fmt.Errorf("ask the API server whether it is ready: %w", err)
	}
	return nil
}

// Node is a node as it is now.
func (c *Client) Node(ctx context.Context, name string) (*corev1.Node, error) {
	out := &corev1.Node{}
	if err := c.call(ctx, http.MethodGet, "/api/v1/nodes/"+name, nil, out); err != nil {
		return nil, fmt.Errorf("get node %s: %w", name, err)
	}
	return out, nil
}

// EnsureNamespace makes a namespace if it is not there.
func (c *Client) EnsureNamespace(ctx context.Context, name string) error {
	namespace := &corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := c.call(ctx, http.MethodPost, "/api/v1/namespaces", namespace, nil); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make namespace %s: %w", name, err)
	}
	return nil
}

// Create makes a pod and returns it as the server has it.
func (c *Client) Create(ctx context.Context, pod *corev1.Pod) (*corev1.Pod, error) {
	out := &corev1.Pod{}
	if err := c.call(ctx, http.MethodPost, podPath(pod.Namespace, ""), pod, out); err != nil {
		return nil, fmt.Errorf("create pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return out, nil
}

// Pod is a pod as it is now.
func (c *Client) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	out := &corev1.Pod{}
	if err := c.call(ctx, http.MethodGet, podPath(namespace, name), nil, out); err != nil {
		return nil, fmt.Errorf("get pod %s/%s: %w", namespace, name, err)
	}
	return out, nil
}

// Pods are all pods.
func (c *Client) Pods(ctx context.Context) ([]corev1.Pod, error) {
	var out corev1.PodList
	if err := c.call(ctx, http.MethodGet, "/api/v1/pods", nil, &out); err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	return out.Items, nil
}

// Delete tells a pod to go.
func (c *Client) Delete(ctx context.Context, namespace, name string, graceSeconds int64) error {
	o := metav1.DeleteOptions{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "DeleteOptions"}, GracePeriodSeconds: &graceSeconds}
	if err := c.call(ctx, http.MethodDelete, podPath(namespace, name), o, nil); err != nil {
		return fmt.Errorf("delete pod %s/%s: %w", namespace, name, err)
	}
	return nil
}

// Events are those of a namespace.
func (c *Client) Events(ctx context.Context, namespace string) ([]eventsv1.Event, error) {
	var out eventsv1.EventList
	if err := c.call(ctx, http.MethodGet, "/apis/events.k8s.io/v1/namespaces/"+namespace+"/events", nil, &out); err != nil {
		return nil, fmt.Errorf("list events: %w", err)
	}
	return out.Items, nil
}

// Close ends idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

func (c *Client) call(ctx context.Context, method, path string, body, out any) (err error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	var content io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return err
		}
		content = bytes.NewReader(data)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.access.Server+path, content)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+c.access.Token)
	request.Header.Set("Accept", "application/json")
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := c.http.Do(request)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, response.Body.Close()) }()
	data, err := io.ReadAll(io.LimitReader(response.Body, 64<<20))
	if err != nil {
		return err
	}
	if response.StatusCode >= http.StatusBadRequest {
		var status metav1.Status
		if json.Unmarshal(data, &status) != nil || status.Kind != "Status" {
			return fmt.Errorf("the API server answers %s", response.Status)
		}
		return &apierrors.StatusError{ErrStatus: status}
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(data, out)
}
