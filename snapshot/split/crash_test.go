package split

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/fsstats/quota"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/snapshot/split/fault"
	"github.com/cleave-cri/cleave/snapshot/split/trash"
)

// crashEnv makes the test binary a child that works until it dies: the point,
// a colon, and which time.
const crashEnv = "CLEAVE_TEST_CRASH"

// crashMain is the child's main function.
func crashMain() {
	point, times, ok := strings.Cut(os.Getenv(crashEnv), ":")
	if !ok {
		return
	}
	err := crashChild(fault.Point(point), times, os.Getenv(crashEnv+"_OPTIONS"))
	fmt.Fprintln(os.Stderr, "the child came to its end:", err)
	os.Exit(3)
}

func crashChild(point fault.Point, times, encoded string) error {
	left, err := strconv.Atoi(times)
	if err != nil {
		return err
	}
	var paths [3]string
	if err := json.Unmarshal([]byte(encoded), &paths); err != nil {
		return err
	}
	o := crashOptions(paths)
	switch point {
	case fault.BallastReleased:
		o.BallastBytes = ballastToRelease
	case fault.CreateMarked:
		o.ProjectQuota, o.ledger = true, newBulkLedger().on
	}
	var mu sync.Mutex
	o.faults = func(p fault.Point) {
		mu.Lock()
		defer mu.Unlock()
		if p != point {
			return
		}
		if left--; left == 0 {
			if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
			select {}
		}
	}
	return crashWork(context.Background(), o, point)
}

func crashOptions(paths [3]string) Options {
	return Options{
		ImageRoot: paths[0], ContainerRoot: paths[1], Database: paths[2],
		DatabaseBytes: 1 << 20, BallastBytes: 64 << 10, AnyContainerd: true, DeletionRate: -1, UsageMaxAge: -1,
		SyncOnCommit: true, Log: zap.NewNop(),
	}
}

// ballastToRelease is the ballast of the child that dies when it has given it up.
const ballastToRelease = 2 << 20

// crashWork makes, commits and removes snapshots until the child dies. It says on
// its output what it was told has happened ("+") and what it is about to take
// away ("-").
func crashWork(ctx context.Context, o Options, point fault.Point) error {
	if point == fault.InitMarked || point == fault.InitWritten {
		return Init(ctx, o)
	}
	if point == fault.SweepMoving {
		// Something for the sweep: what crashes leave.
		for _, name := range []string{"new-A", "new-B", "21"} {
			if err := os.MkdirAll(filepath.Join(o.ContainerRoot, snapshotsDir, name, upperName), 0o700); err != nil {
				return err
			}
		}
		if err := os.Chmod(filepath.Join(o.ContainerRoot, snapshotsDir, "21"), 0o700|os.ModeSticky); err != nil {
			return err
		}
	}
	s, err := Open(ctx, o)
	if err != nil {
		return err
	}
	parent := ""
	count := 100
	if point == fault.BallastReleased {
		count *= 10
	}
	for n := 100; n < 100+count; n++ {
		key := fmt.Sprintf("k8s.io/%d/extract-%d-x %s", n, n, layerDigest(n))
		mounts, err := s.Prepare(ctx, key, parent, snapshots.WithLabels(map[string]string{snapshots.LabelSnapshotRef: layerDigest(n)}))
		if err != nil {
			return err
		}
		upper := mounts[0].Source
		if mounts[0].Type != "bind" {
			upper = option(mounts, "upperdir")
		}
		if err := os.WriteFile(filepath.Join(upper, "content"), []byte(layerName(n)), 0o600); err != nil {
			return err
		}
		if err := s.Commit(ctx, layerName(n), key); err != nil {
			return err
		}
		fmt.Println("+" + layerName(n))
		parent = layerName(n)
		var opts []snapshots.Opt
		if point == fault.BallastReleased {
			// Labels are part of the database, whose space this uses up.
			opts = append(opts, snapshots.WithLabels(map[string]string{"x": string(make([]byte, 30_000))}))
		}
		mounts, err = s.Prepare(ctx, containerKey(n), parent, opts...)
		if err != nil {
			return err
		}
		fmt.Println("+" + containerKey(n))
		for i := range 20 {
			if err := os.WriteFile(filepath.Join(option(mounts, "upperdir"), fmt.Sprint(i)), make([]byte, 5000), 0o600); err != nil {
				return err
			}
		}
		if n%2 == 0 && point != fault.BallastReleased {
			fmt.Println("-" + containerKey(n))
			if err := s.Remove(ctx, containerKey(n)); err != nil {
				return err
			}
		}
		if point == fault.UsageMeasured || point == fault.TrashDeleting {
			if err := s.WaitIdle(ctx); err != nil {
				return err
			}
		}
	}
	return s.Close()
}

// TestCrash kills a process at each step of its work, some times each, and
// then looks what is left: nothing that is on record may be lost, nothing that is not may
// stay, and no bytes.
func TestCrash(t *testing.T) {
	t.Parallel()
	for _, point := range fault.Points() {
		t.Run(string(point), func(t *testing.T) {
			t.Parallel()
			for _, times := range []int{1, 3} {
				if times > 1 && (strings.HasPrefix(string(point), "init-") || point == fault.BallastReleased) {
					continue // they come once
				}
				crashOnce(t, point, times)
			}
		})
	}
}

// onlyThoseOnRecord looks whose the project IDs are that inodes of the container root's disk have.
func onlyThoseOnRecord(t *testing.T, s *Snapshotter) {
	t.Helper()
	list, err := s.Limits(t.Context())
	if err != nil || len(list) < 8 {
		t.Fatalf("limits %+v, %v", list, err)
	}
	filesystem, err := quota.Open(s.opts.ContainerRoot)
	if err != nil {
		t.Fatal(err)
	}
	defer filesystem.Close() //nolint:errcheck // only asked
	eventually(t, "no inode has a project ID of nobody", func() bool {
		used, err := filesystem.BulkUsage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		delete(used, 0)
		for _, l := range list {
			delete(used, l.Project)
		}
		return len(used) == 0
	})
}

func crashOnce(t *testing.T, point fault.Point, times int) {
	t.Helper()
	o := folders(t)
	if point == fault.BallastReleased {
		o.Database, o.BallastBytes = filepath.Join(smallDisk(t), "state", "split.db"), ballastToRelease
	}
	if point == fault.CreateMarked {
		disks, _ := onDisks(t, disk.XFS, 0, 0)
		o.ContainerRoot, o.ProjectQuota, o.ledger = disks.ContainerRoot, true, newBulkLedger().on
	}
	paths := [3]string{o.ImageRoot, o.ContainerRoot, o.Database}
	isInit := strings.HasPrefix(string(point), "init-")
	// What must be there after the crash, by name, with a file that it must have.
	files := map[string]string{}
	if !isInit {
		s := initialised(t, o)
		for n := range 12 { // what a crash must not touch; the next ID is 21
			name, upper := addLayer(t, s, n, "")
			files[name] = filepath.Join(upper, fmt.Sprintf("layer-%d", n))
		}
		for n := range 8 {
			key, upper := addContainer(t, s, n, "")
			files[key] = filepath.Join(upper, "written")
			if err := os.WriteFile(files[key], []byte(key), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		settle(t, s)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if point == fault.BallastReleased {
		fillUp(t, filepath.Dir(filepath.Dir(o.Database)))
	}
	encoded, err := json.Marshal(paths)
	if err != nil {
		t.Fatal(err)
	}
	var output, told strings.Builder
	child := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^$")
	child.Env = append(os.Environ(), fmt.Sprintf("%s=%s:%d", crashEnv, point, times), crashEnv+"_OPTIONS="+string(encoded))
	child.Stderr, child.Stdout = &output, &told
	err = child.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		t.Fatalf("the child ended with %v", err)
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	if !ok || !status.Signaled() || status.Signal() != syscall.SIGKILL {
		t.Fatalf("the child was not killed at %s, time %d: %v: %s", point, times, err, output.String())
	}

	if isInit {
		if _, err := Open(t.Context(), o); !errors.Is(err, ErrNotInitialised) {
			t.Fatalf("half an initialisation: %v", err)
		}
		if err := Init(t.Context(), o); err != nil {
			t.Fatalf("initialise again: %v", err)
		}
	}
	s := opened(t, o)
	settle(t, s)
	st, err := s.Status(t.Context())
	if err != nil || st.Alarm != nil || st.Fence.Closed {
		t.Fatalf("after the crash: %+v, %v", st, err)
	}
	if point == fault.CreateMarked {
		onlyThoseOnRecord(t, s)
	}
	// What was there before is there, and all that the child was told is done.
	for line := range strings.Lines(told.String()) {
		name := strings.TrimSpace(line[1:])
		if line[0] == '-' {
			delete(files, name)
		} else {
			files[name] = ""
		}
	}
	there := map[string]bool{}
	if err := s.Walk(t.Context(), func(_ context.Context, info snapshots.Info) error {
		there[info.Name] = true
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for name, file := range files {
		if !there[name] {
			t.Errorf("snapshot %s is lost", name)
		}
		if file != "" && !exists(file) {
			t.Errorf("snapshot %s has lost its file %s", name, file)
		}
	}
	// No layer of the child is half there.
	if err := s.Walk(t.Context(), func(ctx context.Context, info snapshots.Info) error {
		if info.Kind != snapshots.KindCommitted {
			return nil
		}
		mounts, err := s.View(ctx, "view of "+info.Name, info.Name)
		if err != nil {
			return err
		}
		lower := mounts[0].Source
		if mounts[0].Type != "bind" {
			lower, _, _ = strings.Cut(option(mounts, "lowerdir"), ":")
		}
		content, err := os.ReadFile(filepath.Join(lower, "content"))
		if err != nil || string(content) != info.Name {
			t.Errorf("layer %s holds %q, %v", info.Name, content, err)
		}
		return s.Remove(ctx, "view of "+info.Name)
	}, "name~=\"^k8s.io/1[0-9][0-9]/\""); err != nil {
		t.Fatal(err)
	}
	settle(t, s)
	mustBeClean(t, s, o)

	// Everything can be removed, and then nothing is left.
	s = opened(t, o)
	for range 200 {
		var names []string
		if err := s.Walk(t.Context(), func(_ context.Context, info snapshots.Info) error {
			names = append(names, info.Name)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if len(names) == 0 {
			break
		}
		for _, name := range names {
			_ = s.Remove(t.Context(), name) //nolint:errcheck // parents go in a later round
		}
	}
	settle(t, s)
	mustBeClean(t, s, o)
	for _, root := range []string{o.ImageRoot, o.ContainerRoot} {
		var left []string
		if err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
			if rel, relErr := filepath.Rel(root, path); relErr == nil && rel != "." && !trash.IsSlot(filepath.Base(rel)) {
				left = append(left, rel)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"cleave-root.json", "empty", "snapshots", "trash"}, left); diff != "" {
			t.Errorf("left in %s (-want +got)\n%s", root, diff)
		}
	}
}

// smallDisk mounts a small filesystem in memory.
func smallDisk(t *testing.T) string {
	t.Helper()
	at := t.TempDir()
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, "size=16m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return at
}
