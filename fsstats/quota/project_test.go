package quota_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/fsstats/quota"
	"github.com/cleave-cri/cleave/fsstats/quota/quotatest"
	"github.com/cleave-cri/cleave/lab/du"
)

// mountsEnv names mounted filesystems for the tests of this file, as NAME=PATH with commas between: ext4 and xfs with
// project quota, counting (ext4 that counts and does not enforce), ext4-plain and xfs-plain without. `make test-quota-vm`
// sets it in the guest that it boots, whose kernel has project quota.
const mountsEnv = "CLEAVE_QUOTA_MOUNTS"

func mounts(t *testing.T) map[string]string {
	t.Helper()
	value := os.Getenv(mountsEnv)
	if value == "" {
		t.Skip("needs filesystems mounted with project quota: `make test-quota-vm` boots a guest that has them")
	}
	paths := map[string]string{}
	for pair := range strings.SplitSeq(value, ",") {
		name, path, _ := strings.Cut(pair, "=")
		paths[name] = path
	}
	return paths
}

// eachQuota runs a test on each filesystem with project quota, in a folder of its own there. overLimit is what a writer
// is told there.
func eachQuota(t *testing.T, test func(t *testing.T, dir string, overLimit error)) {
	t.Helper()
	paths := mounts(t)
	for name, overLimit := range map[string]error{"ext4": syscall.EDQUOT, "xfs": syscall.ENOSPC} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp(paths[name], "test-")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := os.RemoveAll(dir); err != nil {
					t.Error(err)
				}
			})
			test(t, dir, overLimit)
		})
	}
}

// TestQuotaKernelKeepsTheContract: the same contract that the fake keeps.
func TestQuotaKernelKeepsTheContract(t *testing.T) {
	eachQuota(t, func(t *testing.T, dir string, _ error) {
		quotatest.Ledger(t, func(t *testing.T) quotatest.Bench {
			b := kernelBench{fs: open(t, dir), dir: filepath.Join(dir, "bench")}
			if err := os.Mkdir(b.dir, 0o700); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { b.empty(t) })
			// The folder, and 64 KiB that a filesystem may add for its own blocks.
			return quotatest.Bench{Ledger: b.fs, Write: b.write, Remove: b.remove, SlackBytes: 64 << 10}
		})
	})
}

// kernelBench writes files into a folder per project.
type kernelBench struct {
	fs  *quota.FS
	dir string
}

func (b kernelBench) of(id uint32) string { return filepath.Join(b.dir, fmt.Sprint(id)) }

func (b kernelBench) write(t testing.TB, id uint32, bytes uint64) error {
	t.Helper()
	tree := b.of(id)
	if err := os.Mkdir(tree, 0o700); err == nil {
		if err := quota.SetProject(tree, id, true); err != nil {
			t.Fatal(err)
		}
	} else if !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(tree)
	if err != nil {
		t.Fatal(err)
	}
	return write(t, false, filepath.Join(tree, fmt.Sprint(len(entries))), bytes)
}

func (b kernelBench) remove(t testing.TB, id uint32) {
	t.Helper()
	if err := os.RemoveAll(b.of(id)); err != nil {
		t.Fatal(err)
	}
	waitUsage(t, b.fs, id, 0)
}

// waitUsage waits until a project has so many inodes: xfs takes away what was removed a moment later.
func waitUsage(t testing.TB, fs *quota.FS, id uint32, inodes uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute) // also called by a cleanup
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		p, err := fs.Project(id)
		if err != nil {
			t.Fatal(err)
		}
		if p.Usage.Inodes == inodes {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("project %d still has %+v, want %d inodes", id, p.Usage, inodes)
		}
	}
}

func (b kernelBench) empty(t testing.TB) {
	t.Helper()
	if err := os.RemoveAll(b.dir); err != nil {
		t.Error(err)
	}
	for from := uint32(1000); ; {
		p, found, err := b.fs.NextProject(from)
		if err != nil {
			t.Error(err)
		}
		if err != nil || !found || p.ID > 1999 {
			return
		}
		if err := b.fs.SetLimit(p.ID, quota.Limit{}); err != nil {
			t.Error(err)
		}
		waitUsage(t, b.fs, p.ID, 0)
		from = p.ID + 1
	}
}

func TestQuotaAssign(t *testing.T) {
	eachQuota(t, func(t *testing.T, dir string, _ error) {
		testAssign(t, open(t, dir), dir, t.TempDir())
	})
}

// TestQuotaIsChosen: what a filesystem can do depends on how it is mounted, and is told without a change to it.
func TestQuotaIsChosen(t *testing.T) {
	paths := mounts(t)
	tests := []struct {
		name          string
		usage, limits string // what the reason says; empty: supported
		best          quota.Feature
	}{
		{"ext4", "", "", quota.ProjectUsage},
		{"xfs", "", "", quota.ProjectUsage},
		{"counting", "", "not held to limits", quota.ProjectUsage},
		{"ext4-plain", "tune2fs", "tune2fs", ""},
		{"xfs-plain", "first mount", "first mount", quota.Bulkstat},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			fs := open(t, paths[tc.name])
			before := changed(t, fs.Path())
			for feature, why := range map[quota.Feature]string{quota.ProjectUsage: tc.usage, quota.ProjectLimits: tc.limits} {
				err := fs.Supports(feature)
				t.Logf("%s: %v", feature, err)
				if why == "" && err != nil || why != "" && (!errors.Is(err, quota.ErrNotSupported) || !strings.Contains(err.Error(), why)) {
					t.Errorf("%s: got %v, want a reason with %q", feature, err, why)
				}
			}
			if best, err := quota.Best(fs); best != tc.best {
				t.Errorf("the best is %q (%v), want %q", best, err, tc.best)
			}
			if after := changed(t, fs.Path()); after != before {
				t.Errorf("%s became %s", before, after)
			}
			if tc.limits != "" {
				if err := fs.SetLimit(1000, quota.Limit{Bytes: 1 << 20}); !errors.Is(err, quota.ErrNotSupported) {
					t.Errorf("a limit that nobody would enforce was taken: %v", err)
				}
			}
		})
	}
}

// TestQuotaLimitOnAContainersLayer is what the hard limit is for: a snapshot's tree with an overlay on it, and whoever
// writes through that is stopped, while a neighbour on the same filesystem is not.
func TestQuotaLimitOnAContainersLayer(t *testing.T) {
	eachQuota(t, func(t *testing.T, dir string, overLimit error) {
		const mib = 1 << 20
		filesystem := open(t, dir)
		a := assigner(t, filesystem, quota.Range{First: 3000, Last: 3009}, nil)
		lower := t.TempDir()
		if err := os.WriteFile(filepath.Join(lower, "of-the-image"), make([]byte, 2*mib), 0o600); err != nil {
			t.Fatal(err)
		}
		merged := map[string]string{}
		for _, name := range []string{"one", "neighbour"} {
			tree := snapshot(t, dir, name)
			assign(t, a, name)
			at := t.TempDir()
			options := "lowerdir=" + lower + ",upperdir=" + filepath.Join(tree, "fs") + ",workdir=" + filepath.Join(tree, "work")
			if err := unix.Mount("overlay", at, "overlay", 0, options); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := unix.Unmount(at, 0); err != nil {
					t.Error(err)
				}
			})
			merged[name] = at
		}
		if p, err := a.SetLimit("one", quota.Limit{Bytes: 8 * mib}); err != nil || p.Limit.Bytes != 8*mib {
			t.Fatalf("got %+v, %v", p, err)
		}
		appendTo(t, filepath.Join(merged["one"], "of-the-image"), 1)
		if p, err := a.Project("one"); err != nil || p.Usage.Bytes < 2*mib || p.Usage.Bytes > 3*mib {
			t.Errorf("a file of 2 MiB that was copied up counts as %+v, %v", p, err)
		}
		for _, privileged := range []bool{false, true} {
			mapped := filepath.Join(merged["one"], "mapped")
			err := writeMapped(t, privileged, mapped, 64*mib)
			t.Logf("64 MiB stored into a mapped file, with CAP_SYS_RESOURCE %v, gave %v", privileged, err)
			if !privileged && !errors.Is(err, syscall.EFAULT) {
				t.Errorf("64 MiB stored into a mapped file gave %v, want a fault", err)
			}
			if err := os.Remove(mapped); err != nil {
				t.Fatal(err)
			}
		}
		if err := write(t, false, filepath.Join(merged["one"], "big"), 64*mib); !errors.Is(err, overLimit) {
			t.Errorf("64 MiB into 8 MiB gave %v, want %v", err, overLimit)
		}
		if p, err := a.Project("one"); err != nil || p.Usage.Bytes > 8*mib {
			t.Errorf("it takes %+v, %v", p, err)
		}
		if err := write(t, false, filepath.Join(merged["neighbour"], "big"), 16*mib); err != nil {
			t.Errorf("the neighbour: %v", err)
		}
		var fs unix.Statfs_t
		if err := unix.Statfs(filepath.Join(dir, "one", "fs"), &fs); err != nil || fs.Blocks*uint64(fs.Bsize) != 8*mib {
			t.Errorf("statfs of the layer says %d bytes (%v), want the limit", fs.Blocks*uint64(fs.Bsize), err)
		}
		// Through the overlay privileged containers are held back too. Who writes beside it, root on the node, is held
		// back by xfs only (the package's comment).
		if err := write(t, true, filepath.Join(merged["one"], "privileged"), 16*mib); !errors.Is(err, overLimit) {
			t.Errorf("a writer with CAP_SYS_RESOURCE in the container got %v, want %v", err, overLimit)
		}
		err := write(t, true, filepath.Join(dir, "one", "fs", "beside"), 16*mib)
		if onExt4 := errors.Is(overLimit, syscall.EDQUOT); onExt4 && err != nil || !onExt4 && !errors.Is(err, overLimit) {
			t.Errorf("a writer with CAP_SYS_RESOURCE on the node got %v", err)
		}

		// A restart finds the limit, and takes it away.
		again := assigner(t, filesystem, quota.Range{First: 3000, Last: 3009}, nil)
		if p, err := again.Project("one"); err != nil || p.Limit.Bytes != 8*mib {
			t.Errorf("after a restart: %+v, %v", p, err)
		}
		if _, err := again.SetLimit("one", quota.Limit{}); err != nil {
			t.Error(err)
		}
		if err := write(t, false, filepath.Join(merged["one"], "after"), 32*mib); err != nil {
			t.Errorf("without a limit: %v", err)
		}
	})
}

// TestQuotaAgreesWithDu: to the byte and the inode, and on xfs with a bulk reading too.
func TestQuotaAgreesWithDu(t *testing.T) {
	eachQuota(t, func(t *testing.T, dir string, _ error) {
		filesystem := open(t, dir)
		a := assigner(t, filesystem, quota.Range{First: 5000, Last: 5009}, nil)
		tree := snapshot(t, dir, "tree")
		id := assign(t, a, "tree")
		for i := range 500 {
			folder := filepath.Join(tree, "fs", fmt.Sprint(i%20))
			if err := os.MkdirAll(folder, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(folder, fmt.Sprint(i)), make([]byte, 37*i), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		file := filepath.Join(tree, "fs", "0", "0")
		err := errors.Join(os.Link(file, filepath.Join(tree, "fs", "link")), os.Symlink("0/0", filepath.Join(tree, "fs", "symlink")),
			unix.Mknod(filepath.Join(tree, "fs", "whiteout"), unix.S_IFCHR, 0), os.Truncate(file, 1<<30))
		if err != nil {
			t.Fatal(err)
		}
		flush(t, dir)
		bytes, inodes, err := du.Measure(t.Context(), tree)
		if err != nil {
			t.Fatal(err)
		}
		want := quota.Usage{Bytes: bytes, Inodes: inodes}
		if p, err := a.Project("tree"); err != nil || p.Usage != want {
			t.Errorf("the kernel counts %+v (%v), du %+v", p.Usage, err, want)
		}
		if filesystem.Supports(quota.Bulkstat) == nil {
			bulk, err := filesystem.BulkUsage(t.Context())
			if err != nil || bulk[id] != (quota.Bulk{Usage: want}) {
				t.Errorf("a bulk reading counts %+v (%v), du %+v", bulk[id], err, want)
			}
		}
	})
}

// TestQuotaOfTreesThatAreGone: their limits keep their IDs in use until Tidy, which takes nothing from those that live.
func TestQuotaOfTreesThatAreGone(t *testing.T) {
	eachQuota(t, func(t *testing.T, dir string, _ error) {
		filesystem := open(t, dir)
		ids := quota.Range{First: 4000, Last: 4001}
		a := assigner(t, filesystem, ids, nil)
		for _, name := range []string{"lives", "gone"} {
			snapshot(t, dir, name)
			assign(t, a, name)
			if _, err := a.SetLimit(name, quota.Limit{Bytes: 8 << 20}); err != nil {
				t.Fatal(err)
			}
		}
		held, err := os.Create(filepath.Join(dir, "gone", "fs", "open"))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(filepath.Join(dir, "gone")); err != nil {
			t.Fatal(err)
		}
		waitUsage(t, filesystem, 4001, 3) // the file keeps the two folders above it
		snapshot(t, dir, "new")
		if _, err := a.Assign(t.Context(), "new"); !errors.Is(err, quota.ErrRangeUsed) {
			t.Errorf("with both in use: %v", err)
		}
		if cleared, err := a.Tidy(t.Context()); err != nil || cleared != nil {
			t.Errorf("while a deleted file is open %v were cleared, %v", cleared, err)
		}
		if err := held.Close(); err != nil {
			t.Fatal(err)
		}
		waitUsage(t, filesystem, 4001, 0)
		if cleared, err := a.Tidy(t.Context()); err != nil || !slices.Equal(cleared, []uint32{4001}) {
			t.Errorf("%v were cleared, %v, want 4001", cleared, err)
		}
		if id := assign(t, a, "new"); id != 4001 {
			t.Errorf("got %d", id)
		}
		if p, err := a.Project("new"); err != nil || p.Limit != (quota.Limit{}) {
			t.Errorf("the new tree has %+v, %v", p, err)
		}
		if p, err := a.Project("lives"); err != nil || p.Limit.Bytes != 8<<20 {
			t.Errorf("the one that lives has %+v, %v", p, err)
		}
		if err := filesystem.SetLimit(4000, quota.Limit{}); err != nil {
			t.Error(err)
		}
	})
}
