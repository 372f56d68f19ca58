package index

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/need"
)

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(m.Run())
}

// statfs is what the kernel says of a path's filesystem.
func statfs(path string) (Space, error) {
	s := Space{FS: "disk", At: time.Now()}
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return Space{}, fmt.Errorf("statfs %s: %w", path, err)
	}
	s.UsedBytes = int64(st.Blocks-st.Bfree) * st.Bsize
	if st.Files > 0 {
		used := int64(st.Files - st.Ffree)
		s.UsedInodes = &used
	}
	return s, nil
}

// du gives what du says of a folder: bytes and inodes.
func du(path string) (sums [2]int64, err error) {
	for i, unit := range []string{"--block-size=1", "--inodes"} {
		out, err := exec.Command("du", unit, "-s", "-x", path).Output()
		if err != nil {
			return sums, fmt.Errorf("du %s: %w", path, err)
		}
		if sums[i], err = strconv.ParseInt(strings.Fields(string(out))[0], 10, 64); err != nil {
			return sums, err
		}
	}
	return sums, nil
}

// TestIndexEqualsDuAtQuiescence: whatever was done to the files, and while the
// index was measuring them, at rest each figure is what du says, to the byte, and
// the sums are what statfs says.
func TestIndexEqualsDuAtQuiescence(t *testing.T) {
	t.Parallel()
	for _, fs := range []disk.FS{disk.Ext4, disk.XFS, disk.Btrfs} {
		t.Run(string(fs), func(t *testing.T) {
			t.Parallel()
			need.Loop(t)
			need.Tools(t, "mkfs."+string(fs))
			d, err := disk.Make(t.Context(), need.Lab(t).Dir(), disk.Spec{Name: "d", SizeBytes: 1 << 30, FS: fs})
			if err != nil {
				t.Fatal(err)
			}
			runs := 0
			rapid.Check(t, func(rt *rapid.T) {
				runs++
				root := filepath.Join(d.Path(), fmt.Sprint("run", runs))
				if err := quiesce(t.Context(), rt, root); err != nil {
					rt.Fatal(err)
				}
				if err := os.RemoveAll(root); err != nil {
					rt.Fatal(err)
				}
			})
		})
	}
}

func quiesce(ctx context.Context, rt *rapid.T, root string) (err error) {
	// b's folder is inside a's.
	paths := map[string]string{"a": filepath.Join(root, "a"), "b": filepath.Join(root, "a", "inside"), "c": filepath.Join(root, "c")}
	var owners []Owner
	for id, path := range paths {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		owners = append(owners, Owner{Kind: "container", ID: id, Parts: []Part{{"writable", path}}})
	}
	var writes atomic.Uint64
	x, err := New(Options{
		Space:  statfs,
		Period: 2 * time.Millisecond, HotEvery: time.Millisecond, SuspectEvery: 2 * time.Millisecond, SuspectMax: 10 * time.Millisecond,
		ProveEvery: 5 * time.Millisecond, MaxAge: 100 * time.Millisecond, CorePercent: 100,
		Written: func(_ Kind, id string) (uint64, bool) {
			switch id {
			case "a": // always: it is brought up to date as often as can be
				return writes.Add(1), true
			case "b": // at random
				return writes.Load() / 16, true
			}
			return 0, false
		},
	})
	if err != nil {
		return err
	}
	if err := x.SetOwners(owners); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- x.Run(ctx) }()
	defer func() {
		cancel()
		err = errors.Join(err, <-ended)
	}()

	for range rapid.IntRange(1, 40).Draw(rt, "operations") {
		if err := operate(rt, paths[rapid.SampledFrom([]string{"a", "b", "c"}).Draw(rt, "owner")]); err != nil {
			return err
		}
	}
	top, err := os.Open(root)
	if err != nil {
		return err
	}
	if err := errors.Join(unix.Syncfs(int(top.Fd())), top.Close()); err != nil {
		return err
	}

	want := map[string][2]int64{}
	for id, path := range paths {
		if want[id], err = du(path); err != nil {
			return err
		}
	}
	want["a"] = [2]int64{want["a"][0] - want["b"][0], want["a"][1] - want["b"][1]}
	deadline := time.NewTimer(20 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		got, v := map[string][2]int64{}, x.View()
		equal := true
		for id := range paths {
			o, _ := v.Owner("container", id)
			if f := o.Parts[0].Figure; f != nil {
				got[id] = [2]int64{f.Bytes, f.Inodes}
			}
			equal = equal && got[id] == want[id]
		}
		for _, a := range v.Filesystems {
			if a.OwnedBytes+a.UnattributedBytes != a.UsedBytes {
				return fmt.Errorf("owned %d + unattributed %d are not used %d", a.OwnedBytes, a.UnattributedBytes, a.UsedBytes)
			}
		}
		if equal {
			return nil
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			return fmt.Errorf("20 s after the last change the index says %v, du %v", got, want)
		}
	}
}

// operate does something to the files of a folder. Files with several names begin
// with an l, and stay where they are: one that is in two owners' folders counts
// for both.
func operate(rt *rapid.T, dir string) error {
	name := func(letter string) string {
		return filepath.Join(dir, letter+rapid.SampledFrom([]string{"0", "1", "2"}).Draw(rt, "name"))
	}
	size := rapid.SampledFrom([]int{0, 1, 4096, 70_000, 1 << 20}).Draw(rt, "size")
	allowed := func(err error) error {
		for _, fine := range []error{os.ErrNotExist, os.ErrExist, unix.ENOTEMPTY, unix.EISDIR, unix.ENOTDIR} {
			if errors.Is(err, fine) {
				return nil
			}
		}
		return err
	}
	switch rapid.IntRange(0, 9).Draw(rt, "operation") {
	case 0:
		return allowed(os.WriteFile(name("f"), make([]byte, size), 0o600))
	case 1: // append
		f, err := os.OpenFile(name("f"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
		if err != nil {
			return allowed(err)
		}
		_, err = f.Write(make([]byte, size))
		return errors.Join(err, f.Close())
	case 2:
		return allowed(os.Truncate(name("f"), int64(size)))
	case 3: // sparse
		return allowed(os.Truncate(name("f"), 1<<40))
	case 4:
		return allowed(os.Remove(name("f")))
	case 5:
		one := name("l")
		if err := os.WriteFile(one, make([]byte, size), 0o600); err != nil {
			return allowed(err)
		}
		return allowed(os.Link(one, name("ln")))
	case 6:
		return allowed(os.Symlink(strings.Repeat("x", min(size+1, 1000)), name("s")))
	case 7: // a folder with files
		sub := name("d")
		for i := range 5 {
			if err := os.MkdirAll(filepath.Join(sub, "deeper"), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(sub, "deeper", fmt.Sprint(i)), make([]byte, size), 0o600); err != nil {
				return err
			}
		}
		return nil
	case 8:
		return os.RemoveAll(name("d"))
	default: // from one owner to another
		return allowed(os.Rename(name("f"), filepath.Join(filepath.Dir(dir), "f9")))
	}
}
