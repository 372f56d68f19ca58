package report

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// NodeAPI is what conditions and the taint need of the API server; kube.Client is one.
type NodeAPI interface {
	NodeObject(ctx context.Context) (*corev1.Node, error)
	PatchCondition(ctx context.Context, c corev1.NodeCondition) error
	DropCondition(ctx context.Context, kind corev1.NodeConditionType) error
	PatchTaints(ctx context.Context, resourceVersion string, taints []corev1.Taint) error
}

// Filesystem names what a condition is about.
type Filesystem string

// The filesystems of a node.
const (
	NodeFS      Filesystem = "NodeFS"
	ImageFS     Filesystem = "ImageFS"
	ContainerFS Filesystem = "ContainerFS"
)

// Condition is the type of the node's condition for a filesystem. The kubelet has one for all of them (GAP-39) and leaves others
// alone.
func (f Filesystem) Condition() corev1.NodeConditionType {
	return corev1.NodeConditionType("Cleave" + string(f) + "Pressure")
}

const (
	// heartbeat is how often a condition is written that has not changed.
	heartbeat = 5 * time.Minute
	// restAfterDenial is how long nothing is tried after the right was missing.
	restAfterDenial = 10 * time.Minute
)

// Conditions writes a condition for each filesystem. Without the right to it switches itself off for a while. Its methods are for
// one caller at a time.
type Conditions struct {
	api NodeAPI

	mu      sync.Mutex
	off     time.Time // guarded by mu: not tried before
	written map[Filesystem]corev1.NodeCondition
	problem error // guarded by mu
}

// NewConditions prepares them.
func NewConditions(api NodeAPI) *Conditions {
	return &Conditions{api: api, written: map[Filesystem]corev1.NodeCondition{}}
}

// Problem is why nothing is written, nil if all is well.
func (c *Conditions) Problem() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.problem
}

// Set writes that a filesystem is under pressure, or is not, with the figures. It asks the API server only if something changed,
// or if it was not told for a while.
func (c *Conditions) Set(ctx context.Context, f Filesystem, pressure bool, message string) error {
	c.mu.Lock()
	old, was := c.written[f]
	off := time.Now().Before(c.off)
	problem := c.problem
	c.mu.Unlock()
	if off {
		return problem
	}
	now := metav1.Now()
	n := corev1.NodeCondition{Type: f.Condition(), Status: corev1.ConditionFalse, Reason: "EnoughSpace", Message: shorten(message), LastHeartbeatTime: now, LastTransitionTime: now}
	if pressure {
		n.Status, n.Reason = corev1.ConditionTrue, "LittleSpace"
	}
	if was && old.Status == n.Status {
		n.LastTransitionTime = old.LastTransitionTime
		if now.Sub(old.LastHeartbeatTime.Time) < heartbeat {
			return nil
		}
	}
	err := c.api.PatchCondition(ctx, n)
	if err != nil {
		err = fmt.Errorf("write condition %s of the node: %w", n.Type, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.problem = err
	switch {
	case err == nil:
		c.written[f] = n
	case denied(err):
		c.off = time.Now().Add(restAfterDenial)
	}
	return err
}

// Clear takes the conditions of all filesystems away, also those of an earlier process: nobody keeps them up any more.
func (c *Conditions) Clear(ctx context.Context) error {
	node, err := c.api.NodeObject(ctx)
	if err != nil {
		return fmt.Errorf("look for conditions of the node: %w", err)
	}
	var errs []error
	for _, f := range []Filesystem{NodeFS, ImageFS, ContainerFS} {
		if slices.ContainsFunc(node.Status.Conditions, func(n corev1.NodeCondition) bool { return n.Type == f.Condition() }) {
			errs = append(errs, c.api.DropCondition(ctx, f.Condition()))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("take conditions of the node away: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.written)
	return nil
}

func denied(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) }

// TaintKey is the key of the taint, with the effect NoSchedule. It is not the kubelet's: the node controller takes that away when
// the kubelet's condition does not say so.
const TaintKey = "cleave-cri.github.io/disk-pressure"

// ErrIdentity says that this identity can't set taints, whatever rights it has.
var ErrIdentity = errors.New("a node's own identity may not change its taints (NodeRestriction): a service account is needed")

// attempts is how often the list of taints is read anew when somebody else changed the node meanwhile.
const attempts = 5

// Taint sets the taint that keeps new pods from a node, or takes it away. Other taints stay.
func Taint(ctx context.Context, api NodeAPI, serviceAccount, on bool) error {
	if !serviceAccount {
		return fmt.Errorf("taint the node: %w", ErrIdentity)
	}
	var err error
	for range attempts {
		var node *corev1.Node
		node, err = api.NodeObject(ctx)
		if err != nil {
			break
		}
		ours := func(t corev1.Taint) bool { return t.Key == TaintKey && t.Effect == corev1.TaintEffectNoSchedule }
		if slices.ContainsFunc(node.Spec.Taints, ours) == on {
			return nil
		}
		taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), ours)
		if on {
			now := metav1.Now()
			taints = append(taints, corev1.Taint{Key: TaintKey, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &now})
		}
		if err = api.PatchTaints(ctx, node.ResourceVersion, taints); !apierrors.IsConflict(err) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("taint the node: %w", err)
	}
	return nil
}
