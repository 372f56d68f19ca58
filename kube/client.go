package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/transport"
)

const (
	// callLimit bounds one call, but for watches: a hard eviction has no time for a server that does not answer.
	callLimit = 5 * time.Second
	// listLimit bounds the list of this node's pods.
	listLimit = 30 * time.Second
	// maxAnswer bounds an answer: 250 pods of 1 MiB, more than the API server stores.
	maxAnswer = 256 << 20
	// queriesPerSecond and queriesAtOnce bound what this node asks of the API server, whatever happens here.
	queriesPerSecond, queriesAtOnce = 10, 30
)

// ConnectOptions say as whom to talk to the API server.
type ConnectOptions struct {
	// Kubeconfig is a file such as the kubelet's, with the node's identity. Its certificate and token are read anew when their
	// files change. Empty means the service account of the pod that this process runs in.
	Kubeconfig string
	// ServiceAccount says that the kubeconfig is a service account's, or somebody else's who is not the node.
	ServiceAccount bool
	// Node is the name of this node. Required.
	Node string
	// UserAgent is what the API server's audit log shows.
	UserAgent string
}

// Client asks the API server for what cleave needs, and for nothing else. It holds no state but connections.
type Client struct {
	node           string
	serviceAccount bool
	core           rest.Interface
}

// coreV1 is the group and version of pods and nodes.
var coreV1 = schema.GroupVersion{Version: "v1"}

// NewClient prepares a client. Nothing is asked yet.
func NewClient(o ConnectOptions) (*Client, error) {
	if o.Node == "" {
		return nil, errors.New("prepare a client of the API server: the name of this node is not known")
	}
	c := &Client{node: o.Node, serviceAccount: o.Kubeconfig == "" || o.ServiceAccount}
	var cfg *rest.Config
	var err error
	if o.Kubeconfig == "" {
		cfg, err = rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("find the service account of this pod: %w; outside of a pod, name a kubeconfig", err)
		}
	} else {
		if _, err := os.Stat(o.Kubeconfig); err != nil {
			return nil, fmt.Errorf("read a kubeconfig: %w", err)
		}
		cfg, err = clientcmd.BuildConfigFromFlags("", o.Kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("read kubeconfig %s: %w", o.Kubeconfig, err)
		}
	}
	return newClient(c, cfg, o.UserAgent)
}

// NewClientFor is NewClient for a configuration of client-go's. serviceAccount says that it is the identity of one, which may
// set taints where it has the right to; a node's own identity never may (NodeRestriction).
func NewClientFor(cfg *rest.Config, node string, serviceAccount bool) (*Client, error) {
	return newClient(&Client{node: node, serviceAccount: serviceAccount}, rest.CopyConfig(cfg), cfg.UserAgent)
}

func newClient(c *Client, cfg *rest.Config, agent string) (*Client, error) {
	scheme := apiruntime.NewScheme()
	scheme.AddKnownTypeWithName(coreV1.WithKind("Pod"), &wirePod{})
	scheme.AddKnownTypeWithName(coreV1.WithKind("PodList"), &wirePodList{})
	metav1.AddToGroupVersion(scheme, coreV1)
	cfg.APIPath, cfg.GroupVersion = "/api", &coreV1
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	cfg.ContentType, cfg.AcceptContentTypes = apiruntime.ContentTypeJSON, apiruntime.ContentTypeJSON
	cfg.UserAgent = agent
	cfg.QPS, cfg.Burst, cfg.RateLimiter = queriesPerSecond, queriesAtOnce, nil
	cfg.Timeout = 0 // it would end watches; each call has its own
	if file := cfg.BearerTokenFile; file != "" {
		// By itself client-go reads the file once a minute, also after a 401.
		cfg.BearerToken, cfg.BearerTokenFile = "", ""
		cfg.Wrap(transport.ResettableTokenSourceWrapTransport(transport.NewCachedFileTokenSource(file)))
	}
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return bounded{next} })
	cfg.WarningHandler = rest.NoWarnings{}
	var err error
	if c.core, err = rest.RESTClientFor(cfg); err != nil {
		return nil, fmt.Errorf("prepare a client of the API server: %w", err)
	}
	return c, nil
}

// bounded fails answers that are larger than anything that was asked for. Watches go on for ever by design, one object at a time,
// which client-go bounds.
type bounded struct{ next http.RoundTripper }

// RoundTrip implements [http.RoundTripper].
func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := b.next.RoundTrip(r)
	if err == nil && r.URL.Query().Get("watch") == "" {
		answer.Body = &boundedBody{ReadCloser: answer.Body, left: maxAnswer}
	}
	return answer, err
}

type boundedBody struct {
	io.ReadCloser
	left int64
}

var errTooLarge = fmt.Errorf("the answer is larger than %d MiB", maxAnswer>>20)

// Read implements [io.Reader].
func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errTooLarge
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// Node is the name of this node.
func (c *Client) Node() string { return c.node }

// ServiceAccount says whether the identity is a service account's, not the node's.
func (c *Client) ServiceAccount() bool { return c.serviceAccount }

// ofThisNode is on every question for pods: no other node's are ever asked for, and the Node authorizer allows no other question.
func (c *Client) ofThisNode(o metav1.ListOptions) metav1.ListOptions {
	o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", c.node).String()
	return o
}

func (c *Client) listPods(ctx context.Context, o metav1.ListOptions) (*wirePodList, error) {
	ctx, cancel := context.WithTimeout(ctx, listLimit)
	defer cancel()
	var out wirePodList
	o = c.ofThisNode(o)
	err := c.core.Get().Resource("pods").VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0).Do(ctx).Into(&out)
	return &out, err
}

func (c *Client) watchPods(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o = c.ofThisNode(o)
	o.Watch = true
	return c.core.Get().Resource("pods").VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0).Watch(ctx)
}

// call makes one request and reads the answer, if out is not nil. It never tries again by itself: whoever calls knows what a
// second time means.
func call(ctx context.Context, r *rest.Request, body, out any) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return err
		}
		r = r.Body(data)
	}
	answer := r.MaxRetries(0).Do(ctx)
	// Only Error reads the status in an answer; Raw leaves it at the number.
	if err := answer.Error(); err != nil || out == nil {
		return err
	}
	data, err := answer.Raw()
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, out); err != nil {
		return fmt.Errorf("read the API server's answer: %w", err)
	}
	return nil
}

// Pod asks for one pod as it is now.
func (c *Client) Pod(ctx context.Context, namespace, name string) (*Pod, error) {
	var w wirePod
	if err := call(ctx, c.core.Get().Namespace(namespace).Resource("pods").Name(name), nil, &w); err != nil {
		return nil, err
	}
	return w.pod()
}

// EvictPod asks for the eviction of the pod of that UID and no other. The API server asks the pod's disruption budgets.
// graceSeconds must be at least 1: with 0 the API server would forget the pod at once, while its containers still run.
func (c *Client) EvictPod(ctx context.Context, namespace, name, uid string, graceSeconds int64) error {
	body := policyv1.Eviction{
		TypeMeta:      metav1.TypeMeta{APIVersion: "policy/v1", Kind: "Eviction"},
		ObjectMeta:    metav1.ObjectMeta{Name: name, Namespace: namespace},
		DeleteOptions: deleteOptions(uid, graceSeconds),
	}
	return call(ctx, c.core.Post().Namespace(namespace).Resource("pods").Name(name).SubResource("eviction"), body, nil)
}

// DeletePod deletes the pod of that UID and no other; no disruption budget is asked. graceSeconds is as for EvictPod.
func (c *Client) DeletePod(ctx context.Context, namespace, name, uid string, graceSeconds int64) error {
	return call(ctx, c.core.Delete().Namespace(namespace).Resource("pods").Name(name), deleteOptions(uid, graceSeconds), nil)
}

func deleteOptions(uid string, graceSeconds int64) *metav1.DeleteOptions {
	id := types.UID(uid)
	graceSeconds = max(1, graceSeconds)
	return &metav1.DeleteOptions{
		TypeMeta:           metav1.TypeMeta{APIVersion: "v1", Kind: "DeleteOptions"},
		GracePeriodSeconds: &graceSeconds,
		Preconditions:      &metav1.Preconditions{UID: &id},
	}
}

// NodeObject is this node as the API server has it.
func (c *Client) NodeObject(ctx context.Context) (*corev1.Node, error) {
	var out corev1.Node
	if err := call(ctx, c.core.Get().Resource("nodes").Name(c.node), nil, &out); err != nil {
		return nil, err
	}
	return &out, nil
}

// PatchCondition sets one condition of this node and leaves the others alone: they are merged by their type.
func (c *Client) PatchCondition(ctx context.Context, condition corev1.NodeCondition) error {
	body := map[string]any{"status": map[string]any{"conditions": []corev1.NodeCondition{condition}}}
	return call(ctx, c.core.Patch(types.StrategicMergePatchType).Resource("nodes").Name(c.node).SubResource("status"), body, nil)
}

// DropCondition takes a condition of this node away.
func (c *Client) DropCondition(ctx context.Context, kind corev1.NodeConditionType) error {
	body := map[string]any{"status": map[string]any{"conditions": []any{map[string]any{"type": kind, "$patch": "delete"}}}}
	return call(ctx, c.core.Patch(types.StrategicMergePatchType).Resource("nodes").Name(c.node).SubResource("status"), body, nil)
}

// PatchTaints replaces the taints of this node, if it is still of that resource version: the list can't be merged.
func (c *Client) PatchTaints(ctx context.Context, resourceVersion string, taints []corev1.Taint) error {
	body := map[string]any{
		"metadata": map[string]any{"resourceVersion": resourceVersion},
		"spec":     map[string]any{"taints": taints},
	}
	return call(ctx, c.core.Patch(types.MergePatchType).Resource("nodes").Name(c.node), body, nil)
}

const eventsPath = "/apis/events.k8s.io/v1/namespaces"

// CreateEvent writes a new event.
func (c *Client) CreateEvent(ctx context.Context, e *eventsv1.Event) error {
	return call(ctx, c.core.Post().AbsPath(eventsPath, e.Namespace, "events"), e, nil)
}

// PatchEvent says how often an event has happened by now; nothing else of one can be changed.
func (c *Client) PatchEvent(ctx context.Context, e *eventsv1.Event) error {
	body := map[string]any{"series": e.Series}
	return call(ctx, c.core.Patch(types.StrategicMergePatchType).AbsPath(eventsPath, e.Namespace, "events", e.Name), body, nil)
}

// May asks whether this identity may do something. An error means that it is not known.
func (c *Client) May(ctx context.Context, what authorizationv1.ResourceAttributes) (bool, error) {
	body := authorizationv1.SelfSubjectAccessReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "authorization.k8s.io/v1", Kind: "SelfSubjectAccessReview"},
		Spec:     authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &what},
	}
	var out authorizationv1.SelfSubjectAccessReview
	if err := call(ctx, c.core.Post().AbsPath("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"), body, &out); err != nil {
		return false, err
	}
	if out.Status.EvaluationError != "" && !out.Status.Allowed {
		return false, fmt.Errorf("the API server can't tell: %s", out.Status.EvaluationError)
	}
	return out.Status.Allowed, nil
}

// Denied says whether an error means that the identity lacks a right, or that nobody knows it (any more).
func Denied(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) }
