package rights

import (
	"context"
	"errors"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"

	"github.com/cleave-cri/cleave/doctor"
)

// fakeAsker allows all but some.
type fakeAsker struct {
	denies  []string
	account bool
	err     error
	asked   []authorizationv1.ResourceAttributes
}

func (f *fakeAsker) Node() string         { return "node-1" }
func (f *fakeAsker) ServiceAccount() bool { return f.account }

func (f *fakeAsker) May(_ context.Context, a authorizationv1.ResourceAttributes) (bool, error) {
	f.asked = append(f.asked, a)
	name := Right{Verb: a.Verb, Group: a.Group, Resource: a.Resource, Subresource: a.Subresource}.String()
	for _, d := range f.denies {
		if d == name {
			return false, f.err
		}
	}
	return true, f.err
}

func TestCheck(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		asker fakeAsker
		level doctor.Level
		want  string
	}{
		{"all", fakeAsker{account: true}, doctor.Pass, "all that cleave does"},
		{"no evictions", fakeAsker{account: true, denies: []string{"create pods/eviction"}}, doctor.Warn, "nothing is evicted softly, and hard evictions ask no disruption budget (not allowed to create pods/eviction)"},
		{"no events", fakeAsker{account: true, denies: []string{"create events.events.k8s.io", "patch events.events.k8s.io"}}, doctor.Warn, "(not allowed to create events.events.k8s.io, patch events.events.k8s.io)"},
		{"a node's identity", fakeAsker{denies: []string{"patch nodes", "delete pods"}}, doctor.Pass, "all but set taints"},
		{"a node's identity without pods", fakeAsker{denies: []string{"list pods"}}, doctor.Warn, "pods are known from the kubelet and static files only"},
		{"no answer", fakeAsker{account: true, err: errors.New("dial: refused")}, doctor.Warn, "nothing is known about rights"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := Check(&tc.asker).Run(t.Context())
			if got.Level != tc.level || !strings.Contains(got.Reason, tc.want) || (got.Remedy == "") != (tc.level == doctor.Pass) {
				t.Errorf("got %+v, want %s with %q", got, tc.level, tc.want)
			}
			for _, a := range tc.asker.asked {
				if a.Resource == "pods" && (a.Verb == "list" || a.Verb == "watch") && a.FieldSelector == nil {
					t.Errorf("asked whether it may %s all pods", a.Verb)
				}
				if a.Resource == "nodes" && a.Name != "node-1" {
					t.Errorf("asked about node %q", a.Name)
				}
			}
		})
	}
}

// TestEveryRightHasAFeature: a right that nothing is lost without is one too many.
func TestEveryRightHasAFeature(t *testing.T) {
	t.Parallel()
	seen := map[Feature]bool{}
	for _, r := range All() {
		if len(r.Features) == 0 {
			t.Errorf("%s is for nothing", r)
		}
		for _, f := range r.Features {
			seen[f] = true
		}
	}
	for f := range losses {
		if !seen[f] {
			t.Errorf("%s needs no right", f)
		}
	}
}
