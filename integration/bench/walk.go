package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	continuity "github.com/containerd/continuity/fs"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/fsstats/walk"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
)

// The tree that is walked: on ext4, every inode in memory.
const (
	walkFolders        = 2_000
	walkFilesPerFolder = 100
	walkDiskBytes      = 3 << 30
	walkRounds         = 15
)

// walker is one way to measure a tree. It returns bytes, and inodes where it
// counts them.
type walker struct {
	name string
	do   func(ctx context.Context, root string) (bytes, inodes int64, err error)
	took []time.Duration
}

func benchWalk(ctx context.Context, scale float64) (err error) {
	run, err := janitor.Start(ctx, janitor.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, run.Close(context.WithoutCancel(ctx))) }()
	d, err := disk.Make(ctx, run.Dir(), disk.Spec{Name: "tree", SizeBytes: walkDiskBytes, MkfsArgs: []string{"-N", "400000"}})
	if err != nil {
		return err
	}
	root := filepath.Join(d.Path(), "tree")
	fmt.Fprintf(os.Stderr, "bench-walk: %d files in %d folders on ext4, all in memory, measured in six ways one after the other, again and again; a minute\n",
		walkFolders*walkFilesPerFolder, walkFolders)
	if err := makeFiles(ctx, root, walkFolders, walkFilesPerFolder); err != nil {
		return err
	}
	ours := func(workers int) func(context.Context, string) (int64, int64, error) {
		return func(ctx context.Context, root string) (int64, int64, error) {
			u, err := walk.Measure(ctx, root, walk.Options{Workers: workers})
			return u.Bytes, u.Inodes, err
		}
	}
	one := &walker{name: "one_worker", do: ours(1)}
	two := &walker{name: "two_workers", do: ours(2)}
	containerd := &walker{name: "containerd", do: func(ctx context.Context, root string) (int64, int64, error) {
		u, err := continuity.DiskUsage(ctx, root)
		return u.Size, u.Inodes, err
	}}
	ways := []*walker{one, two, containerd, {name: "walkdir_lstat", do: walkDir}, {name: "du", do: du}, {name: "floor", do: leastCalls}}

	var allocs uint64
	rounds := max(int(walkRounds*scale), 3)
	for round := range rounds + 1 { // the first one only warms up
		var bytes, inodes int64
		for i, way := range ways {
			var before, after goruntime.MemStats
			goruntime.ReadMemStats(&before)
			began := time.Now()
			b, n, err := way.do(ctx, root)
			took := time.Since(began)
			goruntime.ReadMemStats(&after)
			if err != nil {
				return fmt.Errorf("%s: %w", way.name, err)
			}
			if i == 0 {
				bytes, inodes = b, n
			}
			if b != bytes || n != 0 && n != inodes {
				return fmt.Errorf("%s counts %d bytes and %d inodes, %s %d and %d: a figure of a wrong sum means nothing",
					way.name, b, n, one.name, bytes, inodes)
			}
			if round == 0 {
				continue
			}
			way.took = append(way.took, took)
			if way == one {
				allocs += after.Mallocs - before.Mallocs
			}
		}
	}
	const entries = walkFolders * (walkFilesPerFolder + 1)
	report("walk.one_worker.ratio", medianRatio(one, containerd), "of containerd's")
	report("walk.two_workers.ratio", medianRatio(two, containerd), "of containerd's")
	report("walk.one_worker.over_floor", medianRatio(one, leaf(ways, "floor")), "of the system calls alone")
	report("walk.allocs_per_file", float64(allocs)/float64(rounds)/float64(walkFolders*walkFilesPerFolder), "allocations")
	for _, way := range ways {
		report("walk."+way.name, float64(median(way.took).Nanoseconds())/entries, "ns/file")
	}
	return nil
}

func leaf(ways []*walker, name string) *walker {
	return ways[slices.IndexFunc(ways, func(w *walker) bool { return w.name == name })]
}

func median(took []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(took))
	return sorted[len(sorted)/2]
}

// medianRatio compares what two ways took in the same rounds: what slows the
// machine down for a second slows both.
func medianRatio(a, b *walker) float64 {
	ratios := make([]float64, len(a.took))
	for i := range a.took {
		ratios[i] = float64(a.took[i]) / float64(b.took[i])
	}
	slices.Sort(ratios)
	return ratios[len(ratios)/2]
}

// makeFiles makes folders with files of 16 bytes each.
func makeFiles(ctx context.Context, root string, folders, files int) error {
	const atOnce = 4
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for i := range folders {
		g.Go(func() error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			folder := filepath.Join(root, fmt.Sprintf("folder-%05d", i))
			if err := os.MkdirAll(folder, 0o755); err != nil {
				return err
			}
			for j := range files {
				if err := os.WriteFile(filepath.Join(folder, fmt.Sprintf("file-%05d", j)), []byte("sixteen bytes ok"), 0o600); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	unix.Sync() // so that all blocks are allocated
	return nil
}

// walkDir is how one does it with the standard library.
func walkDir(_ context.Context, root string) (bytes, inodes int64, err error) {
	err = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("no attributes of %s", path)
		}
		bytes += st.Blocks * 512
		inodes++
		return nil
	})
	return bytes, inodes, err
}

func du(ctx context.Context, root string) (bytes, inodes int64, err error) {
	out, err := exec.CommandContext(ctx, "du", "-s", "-x", "--block-size=1", root).Output()
	if err != nil {
		return 0, 0, err
	}
	bytes, err = strconv.ParseInt(strings.Fields(string(out))[0], 10, 64)
	return bytes, 0, err
}

// leastCalls makes the system calls that no walk can do without, one for each
// entry and four for each folder, without the Go scheduler and without looking
// at anything but blocks: what is above it is ours. It knows the tree's shape.
func leastCalls(_ context.Context, root string) (bytes, inodes int64, err error) {
	top, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, 0, err
	}
	defer unix.Close(top) //nolint:errcheck // only read
	var (
		empty  byte
		buffer [2][32 << 10]byte
		stx    unix.Statx_t
	)
	look := func(at int, name *byte, flags int) error {
		_, _, errno := unix.RawSyscall6(unix.SYS_STATX, uintptr(at), uintptr(unsafe.Pointer(name)), uintptr(flags),
			unix.STATX_NLINK|unix.STATX_BLOCKS, uintptr(unsafe.Pointer(&stx)), 0)
		if errno != 0 {
			return errno
		}
		bytes += int64(stx.Blocks) * 512
		inodes++
		return nil
	}
	var visit func(fd, level int) error
	visit = func(fd, level int) error {
		b := buffer[level][:]
		for {
			n, _, errno := unix.RawSyscall(unix.SYS_GETDENTS64, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
			if errno != 0 {
				return errno
			}
			if n == 0 {
				return nil
			}
			for at := 0; at < int(n); {
				size := int(b[at+16]) | int(b[at+17])<<8
				name := b[at+19 : at+size]
				at += size
				if name[0] == '.' && (name[1] == 0 || name[1] == '.' && name[2] == 0) {
					continue
				}
				if err := look(fd, &name[0], unix.AT_SYMLINK_NOFOLLOW); err != nil {
					return err
				}
				if level > 0 {
					continue
				}
				sub, _, errno := unix.RawSyscall6(unix.SYS_OPENAT, uintptr(fd), uintptr(unsafe.Pointer(&name[0])), unix.O_RDONLY|unix.O_DIRECTORY, 0, 0, 0)
				if errno != 0 {
					return errno
				}
				if err := errors.Join(visit(int(sub), level+1), unix.Close(int(sub))); err != nil {
					return err
				}
			}
		}
	}
	if err := look(top, &empty, unix.AT_EMPTY_PATH); err != nil {
		return 0, 0, err
	}
	return bytes, inodes, visit(top, 0)
}
