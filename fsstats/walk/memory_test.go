package walk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/need"
)

const manyFolders = 10_000

// remember walks a tree of which a memory must be made.
func remember(t testing.TB, root string, opt Options) *Memory {
	t.Helper()
	u, m, err := Remember(t.Context(), root, opt, manyFolders)
	must(t, err)
	if m == nil {
		t.Fatalf("nothing was remembered of %s: %+v", root, u)
	}
	return m
}

// TestAgainEqualsDu: whatever was done to a tree, a look at what has changed gives
// what du says, to the byte, or says that it can't.
func TestAgainEqualsDu(t *testing.T) {
	t.Parallel()
	for _, fs := range disk.Filesystems() {
		t.Run(string(fs), func(t *testing.T) {
			t.Parallel()
			need.Loop(t)
			need.Tools(t, "mkfs."+string(fs))
			d, err := disk.Make(t.Context(), need.Lab(t).Dir(), disk.Spec{Name: "d", SizeBytes: 1 << 30, FS: fs})
			must(t, err)
			runs, looks, forgotten := 0, 0, 0
			rapid.Check(t, func(rt *rapid.T) {
				runs++
				root := filepath.Join(d.Path(), fmt.Sprint("run", runs))
				must(t, os.MkdirAll(filepath.Join(root, "d0", "d1"), 0o755))
				m := remember(t, root, Options{})
				for range rapid.IntRange(1, 8).Draw(rt, "rounds") {
					for range rapid.IntRange(0, 12).Draw(rt, "operations") {
						if err := change(rt, root); err != nil {
							rt.Fatal(err)
						}
					}
					top, err := os.Open(root)
					must(t, err)
					must(t, errors.Join(unix.Syncfs(int(top.Fd())), top.Close()))
					looks++
					got, err := m.Again(t.Context(), Options{}, nil)
					if errors.Is(err, ErrForgotten) {
						forgotten++
						m = remember(t, root, Options{})
						continue
					}
					if err != nil {
						rt.Fatal(err)
					}
					bytes, inodes := du(t, root)
					if got.Bytes != bytes || got.Inodes != inodes {
						rt.Fatalf("a look at what has changed says %d bytes and %d inodes, du %d and %d", got.Bytes, got.Inodes, bytes, inodes)
					}
					u, err := Measure(t.Context(), root, Options{})
					must(t, err)
					if u.Bytes != bytes || u.Inodes != inodes {
						rt.Fatalf("a walk says %d bytes and %d inodes, du %d and %d", u.Bytes, u.Inodes, bytes, inodes)
					}
				}
				must(t, os.RemoveAll(root))
			})
			if looks < 100 || forgotten > looks/2 {
				t.Errorf("of %d looks %d gave up: this test shows little", looks, forgotten)
			}
		})
	}
}

// change does something to a tree of a few names.
func change(rt *rapid.T, root string) error {
	folder := filepath.Join(root, rapid.SampledFrom([]string{"", "d0", "d0/d1", "d2", "d0/d2/d0"}).Draw(rt, "folder"))
	name := func(letter, label string) string {
		return filepath.Join(folder, letter+rapid.SampledFrom([]string{"0", "1", "2"}).Draw(rt, label))
	}
	size := rapid.SampledFrom([]int{0, 1, 4096, 70_000, 1 << 20}).Draw(rt, "size")
	var err error
	switch rapid.IntRange(0, 11).Draw(rt, "operation") {
	case 0, 1:
		err = os.WriteFile(name("f", "name"), make([]byte, size), 0o600)
	case 2, 3: // in place, which moves no time of a directory
		f, errOpen := os.OpenFile(name("f", "name"), os.O_WRONLY|os.O_APPEND, 0o600)
		if errOpen != nil {
			err = errOpen
			break
		}
		_, err = f.Write(make([]byte, size))
		err = errors.Join(err, f.Close())
	case 4:
		err = os.Truncate(name("f", "name"), int64(size))
	case 5:
		err = os.Remove(name("f", "name"))
	case 6: // one more name for a file, in the same folder or elsewhere
		err = os.Link(name("f", "name"), filepath.Join(root, "d0", "l"+fmt.Sprint(size)))
	case 7:
		err = os.Symlink(strings.Repeat("x", min(size+1, 1000)), name("s", "name"))
	case 8: // folders in folders, with a file in each
		for at := name("d", "name"); at != folder; at = filepath.Dir(at) {
			err = errors.Join(os.MkdirAll(filepath.Join(at, "d0"), 0o755), os.WriteFile(filepath.Join(at, "d0", "f0"), make([]byte, size), 0o600))
		}
	case 9:
		err = os.RemoveAll(name("d", "name"))
	case 10: // a file or a folder goes elsewhere
		err = os.Rename(name(rapid.SampledFrom([]string{"f", "d"}).Draw(rt, "kind"), "name"), filepath.Join(root, "d2", fmt.Sprint("d", size%3)))
	default:
		err = os.Remove(filepath.Join(root, "d0", "l"+fmt.Sprint(size)))
	}
	for _, fine := range []error{os.ErrNotExist, os.ErrExist, unix.ENOTEMPTY, unix.EISDIR, unix.ENOTDIR, unix.EINVAL} {
		if errors.Is(err, fine) {
			return nil
		}
	}
	return err
}

// age makes files as old as if nobody had written to them for a minute.
func age(t testing.TB, paths ...string) {
	t.Helper()
	for _, path := range paths {
		then := time.Now().Add(-time.Minute)
		must(t, os.Chtimes(path, then, then))
	}
}

// TestAgainLooksAtWhatHasChanged: in a tree of 100 folders with 20 files in each
// nothing but directories is looked at, and what was written to; a file that nobody
// wrote to for long is found if somebody names it.
func TestAgainLooksAtWhatHasChanged(t *testing.T) {
	t.Parallel()
	root := tempDir(t)
	for i := range 100 {
		folder := filepath.Join(root, fmt.Sprint("d", i))
		must(t, os.Mkdir(folder, 0o755))
		for j := range 20 {
			write(t, filepath.Join(folder, fmt.Sprint("f", j)), 10)
			age(t, filepath.Join(folder, fmt.Sprint("f", j)))
		}
	}
	m := remember(t, root, Options{})
	if m.Folders() != 101 {
		t.Errorf("%d folders are remembered, want 101", m.Folders())
	}
	again := func(look ...string) Fresh {
		t.Helper()
		f, err := m.Again(t.Context(), Options{}, look)
		must(t, err)
		return f
	}
	settled := func() Fresh { // until no directory is as young as the clock's tick
		t.Helper()
		for {
			if f := again(); f.Looked == 101 {
				return f
			}
		}
	}
	before := settled()
	bytes, inodes := du(t, root)
	if before.Bytes != bytes || before.Inodes != inodes {
		t.Fatalf("%+v, du says %d bytes, %d inodes", before, bytes, inodes)
	}

	cold := filepath.Join(root, "d7", "f3")
	must(t, os.Truncate(cold, 0))
	write(t, cold, 1<<20)
	if f := again(); f.Bytes != before.Bytes {
		t.Errorf("a file that was cold was found without a look at it: %+v, before %+v", f, before)
	}
	f := again("d7/f3", "d7/none", "none/f", "d7")
	bytes, _ = du(t, root)
	if f.Bytes != bytes || f.Looked > 101+100+21 {
		t.Errorf("with the file named: %+v, want %d bytes, and no more inodes than those of two folders", f, bytes)
	}
	write(t, cold, 2<<20) // it is known to be written to now
	f = again()
	bytes, _ = du(t, root)
	if f.Bytes != bytes || f.Looked > 102+100 {
		t.Errorf("the second time: %+v, want %d bytes after a look at one file more", f, bytes)
	}
}

// TestALinkFromElsewhereEndsTheMemory: a file that counted where nobody looks again
// gets a second name; one that has both names in one place does not disturb.
func TestALinkFromElsewhereEndsTheMemory(t *testing.T) {
	t.Parallel()
	root := tempDir(t)
	for _, d := range []string{"a", "b"} {
		must(t, os.Mkdir(filepath.Join(root, d), 0o755))
	}
	write(t, filepath.Join(root, "a", "f"), 10_000)
	m := remember(t, root, Options{})
	// From now on the clock has moved: a is not read again for its own youth.
	for {
		_, err := m.Again(t.Context(), Options{}, nil)
		must(t, err)
		if m.tree.children[0].changed != 0 && m.tree.children[1].changed != 0 {
			break
		}
	}
	write(t, filepath.Join(root, "b", "g"), 10_000)
	must(t, os.Link(filepath.Join(root, "b", "g"), filepath.Join(root, "b", "h")))
	f, err := m.Again(t.Context(), Options{}, nil)
	must(t, err)
	if bytes, inodes := du(t, root); f.Bytes != bytes || f.Inodes != inodes {
		t.Errorf("%+v, du says %d bytes, %d inodes", f, bytes, inodes)
	}
	age(t, filepath.Join(root, "a", "f"))
	_, err = m.Again(t.Context(), Options{}, nil)
	must(t, err)
	m.tree.children[0].live, m.tree.children[1].live, m.lives = nil, nil, 0 // as after half a minute
	must(t, os.Link(filepath.Join(root, "a", "f"), filepath.Join(root, "b", "f")))
	m.tree.children[0].changed, m.tree.children[1].changed = m.changedOf(t, root, 0), 0
	if _, err := m.Again(t.Context(), Options{}, nil); !errors.Is(err, ErrForgotten) {
		t.Errorf("error %v, want ErrForgotten", err)
	}
	if _, err := m.Again(t.Context(), Options{}, nil); !errors.Is(err, ErrForgotten) {
		t.Errorf("the second time: error %v, want ErrForgotten", err)
	}
}

// changedOf gives the time of change of a child as it is now.
func (m *Memory) changedOf(t testing.TB, root string, child int) int64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(filepath.Join(root, unix.ByteSliceToString(m.tree.children[child].name)), &st))
	return st.Ctim.Nano()
}

func TestTreesOfWhichNothingIsRemembered(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		make    func(t *testing.T, root string)
		folders int
	}{
		{"too deep", func(t *testing.T, root string) { makeChain(t, root, "d", mostLevels) }, manyFolders},
		{"too many directories", func(t *testing.T, root string) { makeChain(t, root, "d", 10) }, 10},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			root := tempDir(t)
			tc.make(t, root)
			u, m, err := Remember(t.Context(), root, Options{}, tc.folders)
			must(t, err)
			if bytes, inodes := du(t, root); m != nil || u.Bytes != bytes || u.Inodes != inodes {
				t.Errorf("memory %v, usage %+v; want none, and what du says: %d bytes, %d inodes", m, u, bytes, inodes)
			}
		})
	}
}

// TestAgainFindsNewBorders: the root replaced by another folder, and a tree that
// has become too large for its memory.
func TestAgainFindsNewBorders(t *testing.T) {
	t.Parallel()
	root := filepath.Join(tempDir(t), "tree")
	must(t, os.Mkdir(root, 0o755))
	_, m, err := Remember(t.Context(), root, Options{}, 3)
	must(t, err)
	makeChain(t, root, "d", 3)
	if _, err := m.Again(t.Context(), Options{}, nil); !errors.Is(err, ErrForgotten) {
		t.Errorf("too many directories: error %v, want ErrForgotten", err)
	}
	m = remember(t, root, Options{})
	must(t, os.Rename(root, root+".old"))
	must(t, os.Mkdir(root, 0o755))
	if _, err := m.Again(t.Context(), Options{}, nil); !errors.Is(err, ErrForgotten) {
		t.Errorf("another root: error %v, want ErrForgotten", err)
	}
	m = remember(t, root, Options{})
	must(t, os.Remove(root))
	if _, err := m.Again(t.Context(), Options{}, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no root: error %v, want that it does not exist", err)
	}
}

// TestAgainLeavesOutWhatAWalkDoes: folders that others count, and what is mounted
// on a folder that was known.
func TestAgainLeavesOutWhatAWalkDoes(t *testing.T) {
	t.Parallel()
	need.Root(t)
	root := filepath.Join(need.Lab(t).Dir(), "tree")
	for _, d := range []string{"mine", "theirs", "covered"} {
		must(t, os.MkdirAll(filepath.Join(root, d), 0o755))
		write(t, filepath.Join(root, d, "f"), 100_000)
	}
	opt := Options{Without: []string{filepath.Join(root, "theirs")}}
	m := remember(t, root, opt)
	check := func(when string) {
		t.Helper()
		f, err := m.Again(t.Context(), opt, nil)
		must(t, err)
		u, err := Measure(t.Context(), root, opt)
		must(t, err)
		if f.Bytes != u.Bytes || f.Inodes != u.Inodes {
			t.Errorf("%s: %+v, a walk says %d bytes, %d inodes", when, f, u.Bytes, u.Inodes)
		}
	}
	check("at first")
	write(t, filepath.Join(root, "theirs", "g"), 100_000)
	write(t, filepath.Join(root, "mine", "g"), 100_000)
	check("after writes")
	covered := filepath.Join(root, "covered")
	must(t, unix.Mount("tmpfs", covered, "tmpfs", 0, ""))
	check("with a mount")
	must(t, unix.Unmount(covered, 0))
	m = remember(t, root, opt)
	check("after the mount")
}
