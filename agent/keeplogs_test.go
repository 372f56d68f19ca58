package agent

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/lastlogs"
	"github.com/cleave-cri/cleave/agent/standalone"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/reclaim/reclaimtest"
)

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// standing is what decides on a node without an API server, where the runtime has a pod with UID u1 that writes logs.
func standing(t *testing.T) (*decisions, *reclaimtest.Runtime, engine.Eviction) {
	t.Helper()
	d, _, _ := deciding(oneDisk())
	d.cfg.Reclaim = config.Reclaim{Enabled: true, Evict: true, EvictBy: config.EvictStandalone, KeepLogs: true}
	d.cfg.StateDir, d.cfg.Filesystems.Logs = t.TempDir(), t.TempDir()
	runtime := reclaimtest.NewRuntime()
	runtime.RunContainer("u1", "app", runtime.Pull("app:1"))
	d.standalone = standalone.Evictor{Runtime: runtime.Containers}
	sandboxes, err := runtime.Containers.ListPodSandbox(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	m := sandboxes.GetItems()[0].GetMetadata()
	t.Cleanup(func() {
		if kept := d.kept.Load(); kept != nil {
			if err := kept.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return d, runtime, engine.Eviction{UID: m.GetUid(), Namespace: m.GetNamespace(), Name: m.GetName()}
}

func keptLogs(t *testing.T, d *decisions) (out map[string]string) {
	t.Helper()
	f, err := os.Open(filepath.Join(d.cfg.StateDir, lastlogs.FileName))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read
	list, err := lastlogs.Read(f)
	if err != nil {
		t.Fatal(err)
	}
	out = map[string]string{}
	for _, l := range list {
		out[l.Container+" "+filepath.Base(l.File)] = string(l.Text)
	}
	return out
}

// A pod that is evicted through the runtime is gone, and the ends of its newest logs are kept; a log that is a link is not followed.
func TestStandaloneEvictionKeepsLogs(t *testing.T) {
	t.Parallel()
	d, runtime, e := standing(t)
	folder := filepath.Join(d.cfg.Filesystems.Logs, strings.Join([]string{e.Namespace, e.Name, e.UID}, "_"))
	long := strings.Repeat("0123456789abcde\n", 2*lastlogs.MaxBytes/16)
	writeFile(t, filepath.Join(folder, "app", "9.log"), "the newest but one")
	writeFile(t, filepath.Join(folder, "app", "10.log"), long)
	writeFile(t, filepath.Join(folder, "app", "11.log.20260101-000000"), "rotated")
	writeFile(t, filepath.Join(folder, "quiet", "0.log"), "")
	secret := filepath.Join(t.TempDir(), "shadow")
	writeFile(t, secret, "secret")
	if err := errors.Join(os.Mkdir(filepath.Join(folder, "sly"), 0o755), os.Symlink(secret, filepath.Join(folder, "sly", "0.log"))); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Evict(t.Context(), e, true); err != nil {
		t.Fatal(err)
	}
	if calls := strings.Join(runtime.Calls(), "\n"); !strings.Contains(calls, "RemovePodSandbox") {
		t.Errorf("calls:\n%s", calls)
	}
	want := map[string]string{"app 10.log": long[len(long)-lastlogs.MaxBytes:], "quiet 0.log": ""}
	if diff := cmp.Diff(want, keptLogs(t, d)); diff != "" {
		t.Error(diff)
	}
}

// An eviction goes on where no log can be kept.
func TestEvictionWithoutLogs(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*decisions){
		"no logs":              func(*decisions) {},
		"no folder":            func(d *decisions) { d.cfg.Filesystems.Logs = "/does/not/exist" },
		"no state folder":      func(d *decisions) { d.cfg.StateDir = "/does/not/exist" },
		"another one is stuck": func(d *decisions) { d.reading.Store(true) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, runtime, e := standing(t)
			spoil(d)
			if _, err := d.Evict(t.Context(), e, true); err != nil {
				t.Error(err)
			}
			if calls := strings.Join(runtime.Calls(), "\n"); !strings.Contains(calls, "RemovePodSandbox") {
				t.Errorf("calls:\n%s", calls)
			}
		})
	}
}

// Without an API server the runtime's pods are ranked, if cleave is to end them through it.
func TestPodsOfTheRuntime(t *testing.T) {
	t.Parallel()
	d, _, _ := deciding(oneDisk())
	now := time.Now()
	d.observer.surveyed.Store(&survey{readAt: now, asked: true, workloads: workloads{
		sandboxes: []ephemeral.Sandbox{
			{ID: "s1", UID: "u1", Namespace: "default", Name: "app", Ready: true}, {ID: "s2", UID: "u2", Namespace: "default", Name: "ended"},
			{ID: "s3", UID: "u3", Namespace: "kube-system", Name: "dns", Ready: true}, {ID: "s4", UID: "u4", Namespace: "default", Name: "file", Ready: true, Static: true},
		},
		containers: []ephemeral.Container{{ID: "c1", Name: "web", SandboxID: "s1", Running: true}, {ID: "c2", Name: "old", SandboxID: "s1"}},
	}})
	if pods, _ := d.pods(now); len(pods) > 0 {
		t.Errorf("without being told to: %+v", pods)
	}
	d.cfg.Reclaim.EvictBy = config.EvictStandalone
	want := []engine.Pod{
		{UID: "u1", Namespace: "default", Name: "app", Containers: []engine.Container{{Name: "web"}}},
		{UID: "u4", Namespace: "default", Name: "file", Static: true},
	}
	pods, _ := d.pods(now)
	if diff := cmp.Diff(want, pods); diff != "" {
		t.Error(diff)
	}
}
