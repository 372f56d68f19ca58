package crio

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/node"
)

// part is something on a node that can be started anew.
type part struct {
	name    string
	restart func(context.Context, *cluster) error
}

func parts() []part {
	return []part{
		{"kubelet", func(ctx context.Context, c *cluster) error {
			return errors.Join(c.kubelet.Kill(ctx), c.kubelet.Start(ctx))
		}},
		{"containerd", func(ctx context.Context, c *cluster) error { return c.node.Runtime.Restart(ctx) }},
		{"cleave", func(ctx context.Context, c *cluster) error {
			return errors.Join(c.node.Cleave.Signal(ctx, syscall.SIGKILL), c.node.Cleave.WaitGone(ctx), c.node.Cleave.Start(ctx))
		}},
	}
}

// orders are all orders of some parts.
func orders(all []part) [][]part {
	if len(all) == 0 {
		return [][]part{nil}
	}
	var out [][]part
	for i, first := range all {
		rest := append(append([]part{}, all[:i]...), all[i+1:]...)
		for _, order := range orders(rest) {
			out = append(out, append([]part{first}, order...))
		}
	}
	return out
}

// Whatever is started anew under running pods, in whatever order: no pod notices, and the kubelet's figures are right again. The
// kubelet asks for its disks only at its start (KSS-18), so a cleave that is new must not contradict the old one.
func TestKSS18_RestartsUnderRunningPods(t *testing.T) {
	c := start(t, options{})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for name, mebibytes := range map[string]int{"one": 10, "two": 3} {
		_, err := c.plane.Run(ctx, kube.PodSpec{Name: name, Image: node.BusyboxImage, Command: []string{"sh", "-c",
			fmt.Sprintf("dd if=/dev/zero of=/f bs=1M count=%d; while :; do date >/alive; sleep 1; done", mebibytes)}})
		if err != nil {
			t.Fatal(err)
		}
	}
	all := orders(parts())
	if !long() {
		// Each part once first and once last; the rest is for the long run.
		all = [][]part{all[1], all[3]}
	}
	for _, order := range all {
		var names []string
		for _, p := range order {
			names = append(names, p.name)
			if err := p.restart(ctx, c); err != nil {
				t.Fatalf("start %s anew: %v", p.name, err)
			}
		}
		eventually(ctx, t, "the figures are right after "+strings.Join(names, ", "), func() error { return c.summaryIsRight(ctx) })
		for _, name := range []string{"one", "two"} {
			c.stillRuns(ctx, t, name)
		}
		if on, err := c.pressure(ctx); on || err != nil {
			t.Errorf("after %v: pressure is %v, %v", names, on, err)
		}
		status, err := c.node.Cleave.Status(ctx)
		if err != nil || len(status.CRIO.Problems) > 0 {
			t.Errorf("after %v: cleave says %+v, %v", names, status.CRIO, err)
		}
	}
}
