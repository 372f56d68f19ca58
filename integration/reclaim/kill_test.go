package reclaim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/agent/stock"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/reclaim"
	"github.com/cleave-cri/cleave/reclaim/ctdstore"
	"github.com/cleave-cri/cleave/reclaim/reclaimtest"
	"github.com/cleave-cri/cleave/reclaim/seen"
)

const (
	// killsEnv is how many times the long form kills.
	killsEnv = "CLEAVE_RECLAIM_KILLS"
	// childEnv is the state folder of a process that only reclaims; in it is what
	// it needs to know.
	childEnv  = "CLEAVE_RECLAIM_CHILD"
	childFile = "child.json"
)

// childConfig is what such a process needs to know.
type childConfig struct{ Endpoint, Snapshotter, Disk string }

// child deletes all images that may go, one step after the other, and remembers
// and records what it does as the agent would.
func child(ctx context.Context, dir string) (err error) {
	text, err := os.ReadFile(filepath.Join(dir, childFile))
	if err != nil {
		return err
	}
	var c childConfig
	if err := json.Unmarshal(text, &c); err != nil {
		return err
	}
	client, err := pod.Dial(c.Endpoint)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	memory, err := seen.Open(dir)
	if err != nil {
		return err
	}
	if memory.Note() != "" {
		return errors.New(memory.Note())
	}
	recorder, err := flight.Open(filepath.Join(dir, flight.FileName), 1<<20)
	if err != nil {
		return err
	}
	if recorder.Note() != "" {
		return errors.New(recorder.Note())
	}
	defer func() { err = errors.Join(err, recorder.Close(ctx), memory.Save(nil, true), memory.Close()) }()
	all := stock.New(client.Conn())
	x := &reclaim.Images{
		Site: reclaim.Site{Space: space{fsstats.NewProber(), c.Disk}}, CRI: client.Images, Runtime: client.Runtime,
		Store: ctdstore.New(client.Conn(), namespace, c.Snapshotter), Lock: reclaimtest.Unlocked{}, Memory: memory,
	}
	for {
		p, err := all.Picture(ctx, 0, nil)
		if err != nil {
			return err
		}
		f, err := fsstats.NewProber().FilesystemOf(c.Disk)
		if err != nil {
			return err
		}
		inventory := stock.For(p, namespace, f.Device.String())
		choice, err := x.Choice(ctx, garbage.ImagePolicy{Options: garbage.Cleave()}, inventory, 1<<20)
		if err != nil {
			return err
		}
		step := record.Step{Kind: engine.UnusedImages, Images: &choice, Items: choice.Items()}
		if len(step.Items) == 0 {
			return nil
		}
		step, err = x.Run(ctx, step)
		recorder.Append(record.Record{Decider: "child", Steps: []record.Step{step}}, true)
		if err := errors.Join(err, memory.Save(nil, false)); err != nil {
			return err
		}
	}
}

// A process that deletes is killed at any moment: nothing goes that should not,
// its files are whole, and the next run completes.
func TestKilledMidPlan(t *testing.T) {
	t.Parallel()
	kills := 3
	if v := os.Getenv(killsEnv); v != "" {
		var err error
		if kills, err = strconv.Atoi(v); err != nil || kills < 1 {
			t.Fatalf("%s=%q is no number", killsEnv, v)
		}
	}
	n := start(t, disk.Ext4, "overlayfs", 1<<30)
	w := n.world(t)
	keep := map[string]bool{}
	pinned := w.Pull(t, "registry.example/kill/pinned:1", garbage.Layer{ID: "kill-0", Bytes: 64 << 10})
	w.Pin(t, pinned)
	runs := w.Pull(t, "registry.example/kill/runs:1", reclaimtest.Runs, garbage.Layer{ID: "kill-1", Bytes: 64 << 10})
	container := w.Run(t, "uid-kill", "app", runs)
	for _, i := range n.list(t) {
		keep[i.GetId()] = true // pause, too
	}
	dir := t.TempDir()
	text, err := json.Marshal(childConfig{Endpoint: n.Runtime.Endpoint(), Snapshotter: "overlayfs", Disk: n.Disks[layersOn].Path()})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, childFile), text, 0o600); err != nil {
		t.Fatal(err)
	}
	whole := time.Second // how long a run takes
	killed := 0
	for i := range kills {
		for j := range 5 {
			w.Pull(t, fmt.Sprintf("registry.example/kill/image-%d:1", j), garbage.Layer{ID: fmt.Sprintf("kill-%d", j), Bytes: 64 << 10}, garbage.Layer{ID: fmt.Sprintf("own-%d-%d", i, j), Bytes: 512 << 10})
		}
		if n.runChild(t, dir, rand.N(whole)) {
			killed++
		}
		for id := range keep {
			if !n.has(t, id) {
				t.Fatalf("run %d: %s went", i, id)
			}
		}
		began := time.Now()
		if n.runChild(t, dir, patience) {
			t.Fatalf("run %d: the one after the kill did not end", i)
		}
		whole = max(time.Since(began), 100*time.Millisecond)
		if left := n.list(t); len(left) != len(keep) {
			t.Fatalf("run %d: %d images are left, want %d", i, len(left), len(keep))
		}
		n.readable(t, filepath.Join(dir, flight.FileName))
	}
	t.Logf("%d of %d runs were killed before their end", killed, kills)
	if out, err := n.client.Exec(bounded(t), container, "/bin/echo", "alive"); err != nil || out != "alive\n" {
		t.Errorf("the container: %q, %v", out, err)
	}
}

// runChild runs a process that reclaims, and kills it after a time. It says
// whether it had to be killed.
func (n *realNode) runChild(t *testing.T, dir string, after time.Duration) (killed bool) {
	t.Helper()
	var out strings.Builder
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	cmd.Env = append(n.Run.Env(), childEnv+"="+dir)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(after, func() { _ = cmd.Process.Kill() }) //nolint:errcheck // it may have ended
	defer timer.Stop()
	err := cmd.Wait()
	if cmd.ProcessState.ExitCode() == -1 {
		return true
	}
	if err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	return false
}

func (n *realNode) has(t *testing.T, id string) bool {
	t.Helper()
	for _, i := range n.list(t) {
		if i.GetId() == id {
			return true
		}
	}
	return false
}

// readable reads all records of a flight recorder.
func (n *realNode) readable(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read
	lines, err := flight.Lines(f, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	records := 0
	for reader := record.NewReader(lines); ; records++ {
		if _, err := reader.Next(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if records == 0 {
		t.Error("nothing is recorded")
	}
}
