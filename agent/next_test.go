package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/agent/keeper"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
)

// shortNode decides about a node with one disk of 100 GiB, of which 40 are left: twelve pods, one after the other with more, one of
// which never goes, and one that has nothing.
func shortNode(t *testing.T) *decisions {
	t.Helper()
	size, left := uint64(100<<30), uint64(40<<30)
	disk := &engine.FSStats{Time: time.Now(), AvailableBytes: &left, CapacityBytes: &size}
	in := engine.Input{Now: time.Now(), Layout: &engine.Detected{}, Summary: &engine.Summary{NodeFS: disk, ImageFS: disk, ContainerFS: disk}}
	for i := range 13 {
		used, uid := uint64(i)<<30, fmt.Sprintf("uid-%02d", i)
		in.Pods = append(in.Pods, engine.Pod{UID: uid, Namespace: "shop", Name: fmt.Sprintf("web-%d\x1b[2J", i), Static: i == 12, Containers: []engine.Container{{Name: "c"}}})
		in.Summary.Pods = append(in.Summary.Pods, engine.PodStats{UID: uid, Containers: []engine.ContainerStats{{Name: "c", RootFS: &engine.FSStats{UsedBytes: &used}}}})
	}
	c := engine.Config{Options: engine.Cleave(), Thresholds: []engine.Threshold{{Signal: engine.NodeFSAvailable, Value: engine.Value{Quantity: resource.NewQuantity(10<<30, resource.BinarySI)}}}}
	d := &decisions{cfg: config.Config{Reclaim: config.Reclaim{Enabled: true}}, log: zap.NewNop()}
	passed := make(chan struct{}, 16)
	d.keeper = keeper.New(keeper.Parts{
		Look:   func(context.Context) (engine.Input, error) { return in, nil },
		Glance: func(context.Context) (engine.Observations, error) { return in.Summary.Observe(), nil },
		Config: func(engine.Input) (keeper.Setup, error) { return keeper.Setup{Config: c}, nil },
		Passed: func(record.Record) {
			select {
			case passed <- struct{}{}:
			default:
			}
		},
		Log: zap.NewNop(),
	})
	if got := d.keeper.IfShort(); got != nil {
		t.Errorf("before it has looked: %+v", got)
	}
	done := make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	go func() { defer close(done); d.keeper.Run(ctx) }()
	<-passed
	stop()
	<-done
	return d
}

// The pods that would go next are those that may go, at most ten, each with why; on a page it is one line.
func TestTheNextPodsToGo(t *testing.T) {
	t.Parallel()
	s := shortNode(t).status()
	if len(s.Next) != 1 || !s.ReportsOnly {
		t.Fatalf("%+v", s)
	}
	n := s.Next[0]
	if n.Count != 11 || len(n.Pods) != shownPods || n.Met || n.Nobody != "" || n.Threshold != "nodefs.available < 10Gi" {
		t.Fatalf("%+v", n)
	}
	for i, p := range n.Pods {
		if want := int64(11-i) << 30; p.UID != fmt.Sprintf("uid-%02d", 11-i) || p.Used == nil || *p.Used != want || !strings.Contains(p.Why, "RANK-9") {
			t.Errorf("number %d is %+v", i, p)
		}
	}
	var text strings.Builder
	s.writeText(page.NewWriter(&text), time.Now())
	want := "  if nodefs.available < 10Gi, shop/web-11\\x1b[2J would go first. It uses 11.0Gi, 11.0Gi more than it requests (RANK-9), at priority 0." +
		" Then shop/web-10\\x1b[2J, shop/web-9\\x1b[2J, 8 more.\n  cleave only reports: nobody is evicted"
	if !strings.Contains(text.String(), want) {
		t.Errorf("%s", &text)
	}
}

// Each pod of the node has an answer: where it stands, or why it is not ranked.
func TestExplainAPod(t *testing.T) {
	t.Parallel()
	d := shortNode(t)
	d.left.Store(&[]string{"shop/old: known from 6m0s ago"})
	for _, tc := range []struct{ pod, want string }{
		{"", "would go first"},
		{"web-3\x1b[2J", "number 10: it uses 3.0Gi"},
		{"shop/web-12\x1b[2J", "it never goes"},
		{"old", "never evicted by cleave: shop/old: known from 6m0s ago"},
		{"shop/old", "known from 6m0s ago"},
		{"shop/none", `no pod "shop/none" is ranked`},
	} {
		answer, err := d.explain(t.Context(), ExplainRequest{Pod: tc.pod})
		got := fmt.Sprint(err)
		if e, ok := answer.(Explained); ok {
			var text strings.Builder
			if err := e.WriteText(&text, time.Now()); err != nil {
				t.Fatal(err)
			}
			got = text.String()
		}
		if !strings.Contains(got, tc.want) {
			t.Errorf("%q: %s", tc.pod, got)
		}
	}
	if _, err := (*decisions)(nil).explain(t.Context(), ExplainRequest{}); !errors.Is(err, errNoReclaim) {
		t.Errorf("without decisions: %v", err)
	}
}
