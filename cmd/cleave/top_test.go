package main

import (
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/agent/top"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats"
)

// answering is a control socket with these answers.
func answering(t *testing.T, answers map[string]any) (socket string) {
	t.Helper()
	routes := map[string]control.Func{}
	for path, value := range answers {
		routes["GET "+path] = control.Without(func(context.Context) (any, error) { return value, nil })
	}
	socket = filepath.Join(t.TempDir(), "control.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := control.Server(routes)
	ended := make(chan error, 1)
	go func() { ended <- control.Serve(server, l) }()
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return socket
}

// TestTopWithoutTerminal: what is no terminal gets tables, JSON or YAML, once and without anything that moves a cursor.
func TestTopWithoutTerminal(t *testing.T) {
	t.Parallel()
	frees := int64(1 << 30)
	socket := answering(t, map[string]any{
		"/v1/status": agent.Status{
			Version: "1.2.3", Mode: "cri", Reclaim: &agent.ReclaimStatus{},
			Filesystems: []agent.FilesystemStatus{{
				Filesystem: fsstats.Filesystem{Device: fsstats.Device{Major: 8, Minor: 1}, CapacityBytes: 4 << 30, AvailableBytes: 1 << 30, Mountpoint: "/"},
				Roles:      []fsstats.Role{fsstats.NodeFS}, Account: agent.Account{UnattributedBytes: 2 << 30},
			}},
		},
		"/v1/usage": agent.Usage{},
		"/v1/plan": agent.Plan{{Signal: engine.NodeFSAvailable, Steps: []record.Step{
			{Kind: engine.UnusedImages, Items: []record.Item{{ID: "registry.example/web:1", Rule: "IGC-8", ExpectedBytes: &frees}}},
		}}},
	})
	text, err := run(t, "top", "--control", socket)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"8:1     4.0Gi", "not attributed", "registry.example/web:1", "! nothing was measured yet"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in:\n%s", want, text)
		}
	}
	if strings.Contains(text, "\x1b") {
		t.Errorf("it moves the cursor: %q", text)
	}
	text, err = run(t, "top", "--control", socket, "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var view top.View
	if err := json.Unmarshal([]byte(text), &view); err != nil || len(view.Filesystems) != 1 || len(view.Next) != 1 || *view.Next[0].ExpectedBytes != frees {
		t.Errorf("got %v from %s", err, text)
	}
	text, err = run(t, "top", "--control", socket, "-o", "yaml")
	var read map[string]any
	if err != nil || yaml.Unmarshal([]byte(text), &read) != nil || read["version"] != "1.2.3" {
		t.Errorf("got %v, %s", err, text)
	}
	if _, err := run(t, "top", "--control", socket, "-o", "xml"); err == nil {
		t.Error("no error for an output that there is not")
	}
}
