package du

import (
	"os"
	"path/filepath"
	"testing"
)

func TestMeasureCountsAnInodeOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	for _, folder := range []string{a, b} {
		if err := os.Mkdir(folder, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(a, "file"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(a, "file"), filepath.Join(b, "link")); err != nil {
		t.Fatal(err)
	}
	usedBytes, inodes, err := Measure(t.Context(), a, b)
	if err != nil {
		t.Fatal(err)
	}
	if inodes != 3 || usedBytes < 1<<20 || usedBytes > 1<<20+64<<10 {
		t.Errorf("%d bytes, %d inodes, want 1 MiB and two folders, 3 inodes", usedBytes, inodes)
	}
	if _, _, err := Measure(t.Context(), filepath.Join(dir, "missing")); err == nil {
		t.Error("a folder that never was is measured without an error")
	}
}

func TestOnlyGone(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, in string
		want     bool
	}{
		{"nothing was said", "", false},
		{"files have gone", "du: cannot access '/a': No such file or directory\ndu: cannot access '/b': No such file or directory\n", true},
		{"something else too", "du: cannot access '/a': No such file or directory\ndu: cannot read directory '/b': Permission denied\n", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if got := onlyGone(tc.in); got != tc.want {
				t.Errorf("got %t", got)
			}
		})
	}
}
