package agent

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/agent/du"
	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/snapshot"
)

func layerAt(class snapshot.Class, id, upper string) surveyed {
	return surveyed{layerState: layerState{layer: snapshot.Layer{Class: class, ContainerID: id}, folders: snapshot.Folders{Upper: upper}}}
}

// twoPods is a node with the pod "web" in two namespaces, one of them made twice, and the folders of a pod that is gone.
func twoPods() *survey {
	now := time.Now()
	return &survey{
		readAt: now, asked: true,
		workloads: workloads{
			sandboxes: []ephemeral.Sandbox{
				{ID: "s0", Namespace: "default", Name: "web", UID: "old", CreatedAt: now.Add(-time.Hour)},
				{ID: "s1", Namespace: "default", Name: "web", UID: "u1", Ready: true, CreatedAt: now},
				{ID: "s2", Namespace: "other", Name: "web", UID: "u2", Ready: true, CreatedAt: now},
			},
			containers: []ephemeral.Container{
				{ID: "c0", Name: "app", SandboxID: "s0"},
				{ID: "c1", Name: "app", SandboxID: "s1"}, {ID: "c2", Name: "app", SandboxID: "s1", Running: true},
				{ID: "c3", Name: "sidecar", SandboxID: "s1", Running: true}, {ID: "c4", Name: "app", SandboxID: "s2", Running: true},
			},
		},
		layers: []surveyed{
			layerAt(snapshot.Container, "c0", "/u/c0"), layerAt(snapshot.Container, "c1", "/u/c1"), layerAt(snapshot.Container, "c2", "/u/c2"),
			layerAt(snapshot.Container, "c3", "/u/c3"), layerAt(snapshot.Container, "c4", "/u/c4"), layerAt(snapshot.Sandbox, "s1", "/u/s1"),
			layerAt(snapshot.Image, "", "/u/image"), layerAt(snapshot.Container, "c5", ""),
		},
		folders: owners.Folders{
			Pods: []owners.PodFolder{
				{UID: "u1", Path: "/pods/u1", Volumes: []owners.VolumeFolder{
					{Plugin: owners.PluginEmptyDir, Name: "cache", Path: "/pods/u1/volumes/cache"},
					{Plugin: owners.PluginEmptyDir, Name: "memory", Path: "/pods/u1/volumes/memory", Mounted: true},
					{Plugin: "kubernetes.io~local-volume", Name: "data", Path: "/pods/u1/volumes/data", Mounted: true, Source: "/mnt/data"},
				}},
				{UID: "u2", Path: "/pods/u2"},
			},
			Logs: []owners.LogFolder{{UID: "u1", Path: "/logs/u1", Containers: []string{"app", "sidecar"}}, {UID: "gone", Path: "/logs/gone"}},
		},
	}
}

func TestPlacesOfAPod(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		r    du.Request
		uid  string
		want []du.Place
	}{
		{"pod in a namespace", du.Request{Pod: "web", Namespace: "default"}, "u1", []du.Place{
			{What: "writable layer", Container: "app", Path: "/u/c1"}, {What: "writable layer", Container: "app", Path: "/u/c2"},
			{What: "writable layer", Container: "sidecar", Path: "/u/c3"}, {What: "sandbox's writable layer", Path: "/u/s1"},
			{What: "logs", Container: "app", Path: "/logs/u1/app"}, {What: "logs", Container: "sidecar", Path: "/logs/u1/sidecar"},
			{What: "other logs", Path: "/logs/u1", Without: []string{"/logs/u1/app", "/logs/u1/sidecar"}},
			{What: "volume cache", Path: "/pods/u1/volumes/cache"}, {What: "local volume data", Path: "/mnt/data"},
			{What: "pod's other files", Path: "/pods/u1", Without: []string{"/pods/u1/volumes/cache"}},
		}},
		{"container", du.Request{Pod: "web", Namespace: "default", Container: "sidecar"}, "u1", []du.Place{
			{What: "writable layer", Container: "sidecar", Path: "/u/c3"}, {What: "logs", Container: "sidecar", Path: "/logs/u1/sidecar"},
		}},
		{"by UID", du.Request{Pod: "u2"}, "u2", []du.Place{
			{What: "writable layer", Container: "app", Path: "/u/c4"}, {What: "pod's other files", Path: "/pods/u2"},
		}},
		{"only folders are left", du.Request{Pod: "gone"}, "gone", []du.Place{{What: "other logs", Path: "/logs/gone"}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := twoPods()
			who, err := podNamed(s, tc.r)
			if err != nil || who.uid != tc.uid {
				t.Fatalf("got %q, %v, want %q", who.uid, err, tc.uid)
			}
			if diff := cmp.Diff(tc.want, placesOf(s, who, tc.r.Container)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestPodsThatCantBeTold(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		s    *survey
		r    du.Request
		want string
	}{
		{"in two namespaces", twoPods(), du.Request{Pod: "web"}, "default, other: choose one with --namespace"},
		{"nobody", twoPods(), du.Request{Pod: "db", Namespace: "default"}, `"db": there is none of that name or UID in namespace default`},
		{"no such container", twoPods(), du.Request{Pod: "u1", Container: "db"}, "but: app, sidecar"},
		{"container of one that is gone", twoPods(), du.Request{Pod: "gone", Container: "app"}, "only folders are left"},
		{"not surveyed yet", &survey{}, du.Request{Pod: "web"}, "ask again"},
		{"too much", twoPods(), du.Request{Pod: "web", Most: 1000}, "1000 is not above 0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			l := &largest{survey: func() *survey { return tc.s }}
			if _, err := l.find(t.Context(), tc.r); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q in it", err, tc.want)
			}
		})
	}
}

// Over the control socket, with this process's own deleted file.
func TestLargestOverTheSocket(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "big"), make([]byte, 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	deleted, err := os.Create(filepath.Join(t.TempDir(), "deleted"))
	if err != nil {
		t.Fatal(err)
	}
	defer deleted.Close() //nolint:errcheck // it is deleted
	if _, err := deleted.Write(make([]byte, 3<<20)); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(deleted.Name()); err != nil {
		t.Fatal(err)
	}
	s := twoPods()
	s.layers = []surveyed{layerAt(snapshot.Container, "c4", dir)}
	l := &largest{
		survey: func() *survey { return s }, where: func(string) (fsstats.Filesystem, error) { return fsstats.Filesystem{}, os.ErrNotExist },
		processes: func(id string) []int {
			if id != "c4" {
				t.Errorf("processes of %s are asked for", id)
			}
			return []int{os.Getpid()}
		},
	}
	server := controlServer(answers{metrics: http.NotFoundHandler(), largest: l.find, handOver: func(context.Context) (any, error) { return nil, nil }})
	report, err := FetchLargest(t.Context(), onSocket(t, server.Handler), du.Request{Pod: "u2", Container: "app"})
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Places) != 1 || len(report.Places[0].Files) != 1 || report.Places[0].Files[0].Path != "/big" {
		t.Errorf("places: %+v", report.Places)
	}
	found := false
	for _, f := range report.Open {
		found = found || f.Name == deleted.Name() && f.PID == os.Getpid() && f.Container == "app" && f.Bytes >= 3<<20
	}
	if !found {
		t.Errorf("the deleted file is not there: %+v", report.Open)
	}
}
