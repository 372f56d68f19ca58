// Package rights checks for `cleave doctor` what this identity may do at the API server, and says which feature each missing right
// costs. It asks (SelfSubjectAccessReview) and tries nothing. It imports kube and doctor; agent may import it.
package rights

import (
	"context"
	"fmt"
	"strings"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cleave-cri/cleave/doctor"
)

// Feature is something that needs rights.
type Feature string

// The features, each with the sentence of what is lost without it.
const (
	Pods       Feature = "pods"
	Soft       Feature = "soft evictions"
	Hard       Feature = "hard evictions against budgets"
	Events     Feature = "events"
	Conditions Feature = "conditions"
	Taint      Feature = "taint"
	Compare    Feature = "node's figures"
)

var losses = map[Feature]string{
	Pods:       "pods are known from the kubelet and static files only",
	Soft:       "nothing is evicted softly, and hard evictions ask no disruption budget",
	Hard:       "a pod that a disruption budget protects is not evicted, however full a disk is",
	Events:     "nobody is told by events",
	Conditions: "the node has no condition for each filesystem",
	Taint:      "new pods are scheduled to a node whose disk is full",
	Compare:    "`cleave allocatable` can't compare with what the node publishes",
}

// Right is one that a feature needs.
type Right struct {
	Verb, Group, Resource, Subresource string
	// Named rights are needed for this node's own object alone; Selected ones for this node's pods alone.
	Named, Selected bool
	// Namespaced objects are in any namespace.
	Features []Feature
}

// All are the rights that deploy/rbac.yaml gives; a test compares them.
func All() []Right {
	return []Right{
		{Verb: "list", Resource: "pods", Selected: true, Features: []Feature{Pods}},
		{Verb: "watch", Resource: "pods", Selected: true, Features: []Feature{Pods}},
		// Without a last look at a pod nothing is evicted.
		{Verb: "get", Resource: "pods", Features: []Feature{Soft, Hard}},
		{Verb: "create", Resource: "pods", Subresource: "eviction", Features: []Feature{Soft}},
		{Verb: "delete", Resource: "pods", Features: []Feature{Hard}},
		{Verb: "create", Group: "events.k8s.io", Resource: "events", Features: []Feature{Events}},
		{Verb: "patch", Group: "events.k8s.io", Resource: "events", Features: []Feature{Events}},
		{Verb: "get", Resource: "nodes", Named: true, Features: []Feature{Taint, Compare}},
		{Verb: "patch", Resource: "nodes", Subresource: "status", Named: true, Features: []Feature{Conditions}},
		{Verb: "patch", Resource: "nodes", Named: true, Features: []Feature{Taint}},
	}
}

// String is the right as people name it: "create pods/eviction".
func (r Right) String() string {
	name := r.Resource
	if r.Subresource != "" {
		name += "/" + r.Subresource
	}
	if r.Group != "" {
		name += "." + r.Group
	}
	return r.Verb + " " + name
}

// Asker asks the API server; kube.Client is one.
type Asker interface {
	May(ctx context.Context, what authorizationv1.ResourceAttributes) (bool, error)
	Node() string
	ServiceAccount() bool
}

// attributes is the question for a right.
func (r Right) attributes(node string) authorizationv1.ResourceAttributes {
	a := authorizationv1.ResourceAttributes{Verb: r.Verb, Group: r.Group, Version: "v1", Resource: r.Resource, Subresource: r.Subresource}
	if r.Named {
		a.Name = node
	}
	if r.Selected {
		a.FieldSelector = &authorizationv1.FieldSelectorAttributes{
			Requirements: []metav1.FieldSelectorRequirement{{Key: "spec.nodeName", Operator: metav1.FieldSelectorOpIn, Values: []string{node}}},
		}
	}
	return a
}

// Missing is what this identity may not do. A node's own identity is not asked about what it never may, nor about single pods:
// the Node authorizer knows those by their names only.
func Missing(ctx context.Context, c Asker) ([]Right, error) {
	var out []Right
	for _, r := range All() {
		if !c.ServiceAccount() && r.ofAccount() {
			continue
		}
		may, err := c.May(ctx, r.attributes(c.Node()))
		if err != nil {
			return nil, fmt.Errorf("ask whether cleave may %s: %w", r, err)
		}
		if !may {
			out = append(out, r)
		}
	}
	return out, nil
}

func (r Right) ofAccount() bool {
	return r.Verb == "patch" && r.Resource == "nodes" && r.Subresource == "" || r.Resource == "pods" && !r.Selected
}

// Check is the check of `cleave doctor`.
func Check(c Asker) doctor.Check {
	return doctor.Check{Name: "rights at API server", Run: func(ctx context.Context) doctor.Result {
		missing, err := Missing(ctx, c)
		return judge(missing, c.ServiceAccount(), err)
	}}
}

func judge(missing []Right, serviceAccount bool, err error) doctor.Result {
	if err != nil {
		return doctor.Warned(err.Error()+"; nothing is known about rights", "look whether the API server can be reached, and whether the identity is still valid")
	}
	if len(missing) == 0 && !serviceAccount {
		return doctor.Passed("the node's own identity may do all but set taints, which it never may")
	}
	if len(missing) == 0 {
		return doctor.Passed("the service account may do all that cleave does")
	}
	lost := map[Feature][]string{}
	var order []Feature
	for _, r := range missing {
		for _, f := range r.Features {
			if lost[f] == nil {
				order = append(order, f)
			}
			lost[f] = append(lost[f], r.String())
		}
	}
	parts := make([]string, 0, len(order))
	for _, f := range order {
		parts = append(parts, fmt.Sprintf("%s (not allowed to %s)", losses[f], strings.Join(lost[f], ", ")))
	}
	return doctor.Warned(strings.Join(parts, "; "), "apply deploy/rbac.yaml, or leave out what is not wanted")
}
