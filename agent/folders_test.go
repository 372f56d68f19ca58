package agent

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
)

// makeFolders makes folders below a fresh one.
func makeFolders(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestFoldersOfPods(t *testing.T) {
	t.Parallel()
	dir := makeFolders(t,
		"k/pods/u/volumes/kubernetes.io~empty-dir/cache", "k/pods/u/volumes/kubernetes.io~empty-dir/memory",
		"k/pods/u/volumes/kubernetes.io~csi/claim/mount", "k/pods/u/volumes/kubernetes.io~local-volume/near",
		"k/pods/w", "data/near",
		"logs/n_p_u/c1", "logs/n_p_u/c2", "logs/lost")
	at := func(name string) string { return filepath.Join(dir, name) }
	// Neither a file nor a symlink is a folder of the kubelet's.
	if err := errors.Join(os.WriteFile(at("k/pods/file"), nil, 0o600), os.Symlink(at("data"), at("k/pods/link")), os.Symlink(at("data"), at("logs/a_b_c"))); err != nil {
		t.Fatal(err)
	}
	node, elsewhere, memory := fsstats.Device{Major: 8, Minor: 1}, fsstats.Device{Major: 8, Minor: 99}, fsstats.Device{Minor: 7}
	volumes := at("k/pods/u/volumes") + "/"
	table := func() ([]fsstats.Mount, error) {
		return []fsstats.Mount{
			{Device: node, Mountpoint: "/", Root: "/"},
			{Device: memory, Mountpoint: volumes + "kubernetes.io~empty-dir/memory", Root: "/"},
			{Device: elsewhere, Mountpoint: volumes + "kubernetes.io~csi/claim/mount", Root: "/"},
			{Device: node, Mountpoint: volumes + "kubernetes.io~local-volume/near", Root: at("data/near")},
		}, nil
	}
	got, err := listFolders(at("k"), at("logs"), map[fsstats.Device]bool{node: true}, table)
	if err != nil {
		t.Fatal(err)
	}
	want := owners.Folders{
		KubeletRoot: at("k"), LogRoot: at("logs"),
		Pods: []owners.PodFolder{
			{UID: "u", Path: at("k/pods/u"), Volumes: []owners.VolumeFolder{
				{Plugin: "kubernetes.io~csi", Name: "claim", Path: volumes + "kubernetes.io~csi/claim", Mounted: true},
				{Plugin: "kubernetes.io~empty-dir", Name: "cache", Path: volumes + "kubernetes.io~empty-dir/cache"},
				{Plugin: "kubernetes.io~empty-dir", Name: "memory", Path: volumes + "kubernetes.io~empty-dir/memory", Mounted: true},
				{Plugin: "kubernetes.io~local-volume", Name: "near", Path: volumes + "kubernetes.io~local-volume/near", Mounted: true, Source: at("data/near")},
			}},
			{UID: "w", Path: at("k/pods/w")},
		},
		Logs: []owners.LogFolder{{Path: at("logs/lost")}, {UID: "u", Path: at("logs/n_p_u"), Containers: []string{"c1", "c2"}}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestFoldersThatAreNotThere: a node on which no pod ever ran.
func TestFoldersThatAreNotThere(t *testing.T) {
	t.Parallel()
	none := func() ([]fsstats.Mount, error) { return nil, nil }
	for _, root := range []string{"", filepath.Join(t.TempDir(), "missing")} {
		got, err := listFolders(root, root, nil, none)
		if diff := cmp.Diff(owners.Folders{KubeletRoot: root, LogRoot: root}, got); diff != "" || err != nil {
			t.Errorf("%q: %v, (-want +got):\n%s", root, err, diff)
		}
	}
}

// TestLogFilesAsTheKubeletCountsThem: ACC-9, ACC-15, ACC-18.
func TestLogFilesAsTheKubeletCountsThem(t *testing.T) {
	t.Parallel()
	dir := makeFolders(t, "sub")
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(
		os.WriteFile(at("0.log"), make([]byte, 5000), 0o600),
		os.Link(at("0.log"), at("0.log.again")),
		os.Symlink(at("0.log"), at("link")),
		os.WriteFile(at("sub/large"), make([]byte, 1<<20), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	one, _, err := eachFile(dir, []string{"0.log"})
	if err != nil || one < 5000 {
		t.Fatalf("%d bytes for a file of 5000, %v", one, err)
	}
	s := newSeenFiles(index.Walk)
	key := index.Key{Kind: owners.Pod, ID: "u", Part: owners.ContainerLogs("c")}
	whole, err := s.Measure(t.Context(), index.Subject{Key: key, Path: dir})
	if err != nil || whole.Bytes < 1<<20 || whole.Inodes != 5 {
		t.Fatalf("the whole is %+v, %v, want the large file, a folder and all else", whole, err)
	}
	got, ok := s.of(key)
	if !ok || got.Bytes != 2*one || got.Inodes != 3 || !got.Finished.Equal(whole.Finished) {
		t.Errorf("the kubelet's count is %+v (%v), want %d bytes in 3 files: each name for itself, the link as nothing, the sub-directory not at all", got, ok, 2*one)
	}
	// One that has gone since it was listed is no reason to know nothing (ACC-11 is
	// the kubelet's own way).
	if bytes, inodes, err := eachFile(dir, []string{"0.log", "gone"}); err != nil || bytes != one || inodes != 1 {
		t.Errorf("%d bytes, %d files, %v beside one that is gone", bytes, inodes, err)
	}
	s.forget(func(index.Key) bool { return false })
	if _, ok := s.of(key); ok {
		t.Error("a part that is gone is still known")
	}
}
