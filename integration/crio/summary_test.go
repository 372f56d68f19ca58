package crio

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/node"
)

func TestUp(t *testing.T) {
	c := start(t, options{})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	p, err := c.plane.Run(ctx, kube.PodSpec{Name: "writer", Image: node.BusyboxImage, Command: []string{"sh", "-c", "dd if=/dev/zero of=/f bs=1M count=20; sleep 1000"}})
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.plane.Exec(ctx, p.Name, "ls", "-l", "/f")
	t.Log(out, err)
	time.Sleep(70 * time.Second)
	s, err := c.kubelet.Summary(context.Background())
	j, _ := json.MarshalIndent(map[string]any{"r": s.Node.Runtime, "p": s.Pods}, "", " ")
	t.Logf("%s %v", j, err)
	st, err := c.node.Cleave.Status(ctx)
	j, _ = json.MarshalIndent(st, "", " ")
	t.Logf("%s %v", j, err)
	t.Log(c.kubelet.LogTail())
	t.Log(c.node.Cleave.LogTail(30))
}
