package kube

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/cleave-cri/cleave/lab/plane"
	"github.com/cleave-cri/cleave/lab/podapi"
)

// ControlPlaneOptions say what to run.
type ControlPlaneOptions = plane.Options

// ControlPlane is an etcd and an API server on the loopback, with one node. Whoever has the token may do everything.
type ControlPlane struct {
	// ControlPlane is nil for one that was started by others.
	*plane.ControlPlane

	token, host string
	node        string
	rest        *rest.Config
	client      *kubernetes.Clientset
}

// StartControlPlane starts both and returns when the API server is ready.
func StartControlPlane(ctx context.Context, o ControlPlaneOptions) (*ControlPlane, error) {
	started, err := plane.Start(ctx, o)
	if err != nil {
		return nil, err
	}
	c, err := Connect(started.Access().Server, started.Access().Token, NodeName)
	if err != nil {
		return nil, errors.Join(err, started.Close(context.WithoutCancel(ctx)))
	}
	c.ControlPlane = started
	return c, nil
}

// As is the configuration of a client with a token.
func (c *ControlPlane) As(token string) *rest.Config {
	cfg := c.REST()
	cfg.BearerToken = token
	return cfg
}

// AsNode is the configuration of a client with the identity of the lab's node, as its kubelet has it.
func (c *ControlPlane) AsNode() *rest.Config { return c.As(c.NodeToken()) }

// Connect returns the control plane that answers at a URL, such as one of systemd's in a guest. Close ends nothing of it. Pods
// are made for the node of that name.
func Connect(url, token, node string) (*ControlPlane, error) {
	c := &ControlPlane{host: url, token: token, node: node, rest: &rest.Config{
		Host: url, BearerToken: token, QPS: 100, Burst: 200,
		TLSClientConfig: rest.TLSClientConfig{Insecure: true}, // it signs its own certificate, on the loopback
	}}
	var err error
	if c.client, err = kubernetes.NewForConfig(c.rest); err != nil {
		return nil, fmt.Errorf("make a client of the API server: %w", err)
	}
	return c, nil
}

// Client is a client that may do everything.
func (c *ControlPlane) Client() kubernetes.Interface { return c.client }

// REST is the configuration of that client, for streams.
func (c *ControlPlane) REST() *rest.Config { return rest.CopyConfig(c.rest) }

// WriteKubeconfig writes a file with which a kubelet or kubectl reaches the API server.
func (c *ControlPlane) WriteKubeconfig(path string) error {
	return plane.WriteKubeconfig(path, podapi.Access{Server: c.host, Token: c.token})
}

// Close ends both programs.
func (c *ControlPlane) Close(ctx context.Context) error {
	if c.ControlPlane == nil {
		return nil
	}
	return c.ControlPlane.Close(ctx)
}
