package crio

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// KSS-18: a split that can't be told is loud: in the status, in a metric and in an event on the node.
func TestKSS18_ASplitThatIsNotToldIsLoud(t *testing.T) {
	if !long() {
		t.Skip("takes a minute, and unit tests show each part: `make test-crio` runs it")
	}
	c := start(t, options{settings: map[string]any{"featureGates": map[string]bool{"PodAndContainerStatsFromCRI": true}}})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	eventually(ctx, t, "the status says so", func() error {
		s, err := c.node.Cleave.Status(ctx)
		switch {
		case err != nil:
			return err
		case s.CRIO == nil || s.CRIO.Kubelet.Told == nil || s.CRIO.Kubelet.Told.Split:
			return fmt.Errorf("it is %+v", s.CRIO)
		case !slices.ContainsFunc(s.CRIO.Problems, func(p string) bool { return strings.Contains(p, "PodAndContainerStatsFromCRI") }):
			return fmt.Errorf("problems are %q", s.CRIO.Problems)
		}
		return nil
	})
	metrics, err := c.node.Cleave.Metrics(ctx)
	if err != nil || !strings.Contains(metrics, "\ncleave_kubelet_told_split 0\n") || strings.Contains(metrics, "\ncleave_kubelet_problems 0\n") {
		t.Errorf("%v, metrics are\n%s", err, metrics)
	}
	eventually(ctx, t, "there is an event on the node", func() error {
		list, err := c.plane.Client().EventsV1().Events(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool {
			return e.Reason == "DisksUnseen" && e.Regarding.Kind == "Node" && strings.Contains(e.Note, "PodAndContainerStatsFromCRI")
		}) {
			return fmt.Errorf("there are %d others", len(list.Items))
		}
		return nil
	})
}
