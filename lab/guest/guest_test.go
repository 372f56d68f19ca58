package guest

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/lab/disk"
)

func TestVerdict(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, said string
		want       verdict
		found      bool
	}{
		{"passed", "PASS\n\nGUEST-EXIT 0 0\n", verdict{"PASS\n", 0, 0}, true},
		{"command failed", "FAIL\n\nGUEST-EXIT 1 0\n", verdict{"FAIL\n", 1, 0}, true},
		{"results did not fit", "\nGUEST-EXIT 0 2\n", verdict{"", 0, 2}, true},
		{"nothing said", "", verdict{said: ""}, false},
		{"cut off", "PASS\n\nGUEST-EXIT 0", verdict{said: "PASS\n\nGUEST-EXIT 0"}, false},
		{"no number", "\nGUEST-EXIT x 0\n", verdict{said: "\nGUEST-EXIT x 0\n"}, false},
		{"the command imitates it and hangs", "GUEST-EXIT 0 0\nmore\n", verdict{said: "GUEST-EXIT 0 0\nmore\n"}, false},
		{"the command imitates it and fails", "GUEST-EXIT 0 0\n\nGUEST-EXIT 1 0\n", verdict{"GUEST-EXIT 0 0\n", 1, 0}, true},
		{"not at a line's beginning", "x GUEST-EXIT 0 0\n", verdict{said: "x GUEST-EXIT 0 0\n"}, false},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, found := parseVerdict(tc.said)
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(verdict{})); diff != "" || found != tc.found {
				t.Errorf("found %v, want %v; -want +got:\n%s", found, tc.found, diff)
			}
		})
	}
}

func FuzzVerdict(f *testing.F) {
	f.Add("PASS\n\nGUEST-EXIT 0 0\n")
	f.Add("GUEST-EXIT 0 0\nGUEST-EXIT 1 0")
	f.Fuzz(func(t *testing.T, said string) {
		v, found := parseVerdict(said)
		if !strings.HasPrefix(said, v.said) {
			t.Errorf("%q became %q", said, v.said)
		}
		if rest := said[len(v.said):]; found && !strings.Contains(rest, exitLine) {
			t.Errorf("a verdict %+v was read from %q", v, rest)
		}
	})
}

func TestFilesGoInAndOut(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, bytes.Repeat([]byte("x"), 5000), 0o600); err != nil {
		t.Fatal(err)
	}
	m := machine{dir: dir, Options: Options{
		Command: "exit 0",
		Files:   map[string]File{"bin/program": {Path: program}, "etc/text": {Content: []byte("text"), Mode: 0o600}},
	}}
	if err := m.pack(m.at("in.tar")); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(m.at("in.tar")); err != nil || info.Size()%4096 != 0 {
		t.Fatalf("the tar is no whole number of sectors: %v, %v", info, err)
	}
	out := filepath.Join(dir, "output")
	if err := unpack(m.at("in.tar"), out); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{"run": len("#!/bin/sh\nexit 0\n"), "bin/program": 5000, "etc/text": 4} {
		info, err := os.Stat(filepath.Join(out, name))
		if err != nil || info.Size() != int64(want) {
			t.Errorf("%s: %v, %v, want %d bytes", name, info, err, want)
		}
	}
}

// TestUnpackStaysInItsFolder: the guest runs whatever a test gives it, and its tar is read as root.
func TestUnpackStaysInItsFolder(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name    string
		headers []tar.Header
		refused bool
	}{
		{"a parent", []tar.Header{{Typeflag: tar.TypeReg, Name: "../escaped"}}, true},
		{"an absolute path", []tar.Header{{Typeflag: tar.TypeReg, Name: "/escaped"}}, true},
		{"a symlink is not made", []tar.Header{
			{Typeflag: tar.TypeSymlink, Name: "link", Linkname: ".."},
			{Typeflag: tar.TypeReg, Name: "link/inside"},
		}, false},
		{"a device is not made", []tar.Header{{Typeflag: tar.TypeChar, Name: "null", Devmajor: 1, Devminor: 3}}, false},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			var content bytes.Buffer
			w := tar.NewWriter(&content)
			for _, h := range tc.headers {
				if err := w.WriteHeader(&h); err != nil {
					t.Fatal(err)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(dir, "tar")
			if err := os.WriteFile(file, content.Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
			err := unpack(file, filepath.Join(dir, "output"))
			if (err != nil) != tc.refused {
				t.Errorf("refused: %v, want %v", err, tc.refused)
			}
			entries, err := os.ReadDir(dir)
			if err != nil || len(entries) != 2 {
				t.Errorf("beside tar and output there is %v (%v)", entries, err)
			}
			if info, err := os.Lstat(filepath.Join(dir, "output", "null")); err == nil {
				t.Errorf("a device was made: %v", info.Mode())
			}
		})
	}
}

// system makes a root that passes for a whole one.
func system(t *testing.T, cache, release string) System {
	t.Helper()
	s := cached(cache, kernel{pkg: kernelPrefix + release, version: "6.1.1-3"})
	if err := os.MkdirAll(filepath.Dir(s.image), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{s.image, s.kernel} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func TestOptionsThatAreRefused(t *testing.T) {
	t.Parallel()
	whole := system(t, t.TempDir(), "1-cloud")
	long := strings.Repeat("d", maxSerialBytes+1)
	tests := []struct {
		name    string
		o       Options
		refused string
	}{
		{"good", Options{System: whole, Command: "true", Files: map[string]File{"a/b": {}}, Disks: []disk.Spec{{Name: "d1"}}}, ""},
		{"no command", Options{System: whole}, "no command"},
		{"no root", Options{Command: "true"}, "guest.Root"},
		{"file outside", Options{System: whole, Command: "true", Files: map[string]File{"../a": {}}}, "clean path"},
		{"file in the place of the command", Options{System: whole, Command: "true", Files: map[string]File{"run": {}}}, "not run or out"},
		{"two contents", Options{System: whole, Command: "true", Files: map[string]File{"a": {Path: "/a", Content: []byte("b")}}}, "not both"},
		{"disk in the place of the results", Options{System: whole, Command: "true", Disks: []disk.Spec{{Name: "out"}}}, `"out"`},
		{"disk twice", Options{System: whole, Command: "true", Disks: []disk.Spec{{Name: "d"}, {Name: "d"}}}, `"d"`},
		{"disk whose name is cut off", Options{System: whole, Command: "true", Disks: []disk.Spec{{Name: long}}}, "at most 20"},
		{"disk whose name is an option", Options{System: whole, Command: "true", Disks: []disk.Spec{{Name: "d,readonly=on"}}}, "letters"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			err := tc.o.check()
			if tc.refused == "" && err != nil || tc.refused != "" && (err == nil || !strings.Contains(err.Error(), tc.refused)) {
				t.Errorf("got %v, want an error with %q", err, tc.refused)
			}
		})
	}
}

func TestNewestCachedRoot(t *testing.T) {
	t.Parallel()
	cache := t.TempDir()
	if s, ok := newestCached(cache); ok {
		t.Errorf("an empty cache gave %v", s)
	}
	now := time.Now()
	for i, release := range []string{"6.1.0-9-cloud-amd64", "6.1.0-57-cloud-amd64", "6.1.0-10-cloud-amd64"} {
		s := system(t, cache, release)
		at := now.Add(-time.Duration(i) * time.Hour)
		if release == "6.1.0-57-cloud-amd64" {
			at = now.Add(time.Hour)
		}
		if err := os.Chtimes(s.image, at, at); err != nil {
			t.Fatal(err)
		}
	}
	if s, ok := newestCached(cache); !ok || s.Version != "6.1.0-57-cloud-amd64" {
		t.Errorf("got %v, %v; want the one made last", s, ok)
	}
	other := filepath.Join(cache, "0123456789abcdef_6.1.1-3_6.1.0-99-cloud-amd64")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(other, imageFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if s, ok := newestCached(cache); !ok || s.Version != "6.1.0-57-cloud-amd64" {
		t.Errorf("got %v, %v; the root of another recipe was taken", s, ok)
	}
}

func TestKernelOfThePackageLists(t *testing.T) {
	t.Parallel()
	const lists = `Package: linux-image-cloud-amd64
Version: 6.1.1-3
Provides: linux-latest-modules-6.1.0-5-cloud-amd64, wireguard-modules (= 1.0.0)
Depends: linux-image-6.1.0-5-cloud-amd64 (= 6.1.1-3)
`
	m := kernelDepends.FindStringSubmatch(lists)
	if m == nil {
		t.Fatal("no kernel was found")
	}
	k := kernel{pkg: m[1], version: m[2]}
	if want := (kernel{"linux-image-6.1.0-5-cloud-amd64", "6.1.1-3"}); k != want || k.release() != "6.1.0-5-cloud-amd64" {
		t.Errorf("got %v (%s), want %v", k, k.release(), want)
	}
}
