package reclaim_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats/walk"
	"github.com/cleave-cri/cleave/reclaim"
	"github.com/cleave-cri/cleave/reclaim/reclaimtest"
)

const (
	uidA = "11111111-2222-3333-4444-55555555aaaa"
	uidB = "11111111-2222-3333-4444-55555555bbbb"
	podA = "default_app-a_" + uidA
	podB = "default_app-b_" + uidB
)

// write makes a file of 16 KiB, each a minute younger than the one before.
func write(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, make([]byte, 16<<10), 0o600); err != nil {
		t.Fatal(err)
	}
}

// logDir is a pods' log directory with these files, the later the younger.
func logDir(t *testing.T, files ...string) string {
	t.Helper()
	dir := t.TempDir()
	for i, f := range files {
		path := filepath.Join(dir, f)
		write(t, path)
		at := time.Date(2026, 1, 1, 0, i, 0, 0, time.UTC)
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func names(t *testing.T, dir, sub string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, sub))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// tree lists all files.
func tree(t *testing.T, dir string) (out []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		out = append(out, strings.TrimPrefix(path, dir))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// logs is an executor on a folder, with pod A gone and pod B alive.
func logs(dir string) (*reclaim.Logs, *reclaimtest.Fates, *reclaimtest.Runtime) {
	r := reclaimtest.NewRuntime()
	fates := &reclaimtest.Fates{}
	fates.Set(uidA, garbage.Gone)
	fates.Set(uidB, garbage.Alive)
	return &reclaim.Logs{Site: reclaim.Site{Space: &onDisk{dir: dir}}, Runtime: r.Containers, Pods: fates, Dir: dir}, fates, r
}

// onDisk counts what a folder has: files of the filesystem's other users do not
// matter.
type onDisk struct{ dir string }

func (d *onDisk) AvailableBytes(ctx context.Context) (int64, error) {
	u, err := walk.Measure(ctx, d.dir, walk.Options{})
	return 1<<40 - u.Bytes, err
}

func pickLogs(t *testing.T, x *reclaim.Logs, need int64) (record.Step, []reclaim.Left) {
	t.Helper()
	choice, left, err := x.Choice(t.Context(), need)
	if err != nil {
		t.Fatal(err)
	}
	return record.Step{Kind: engine.OldLogs, Logs: &choice, Items: choice.Items()}, left
}

func paths(step record.Step) (out []string) {
	for _, i := range step.Items {
		out = append(out, i.ID)
	}
	return out
}

// All logs of a pod that is gone go, and rotated ones of a living one but the
// newest and those at work.
func TestLogsThatGo(t *testing.T) {
	t.Parallel()
	app := podB + "/app/"
	dir := logDir(t,
		podA+"/app/0.log", podA+"/app/0.log.20260101-000000.gz", podA+"/side/1.log",
		app+"0.log.20260101-000000.gz", app+"0.log.20260101-000100.gz", app+"0.log.20260101-000200", app+"0.log",
		app+"1.log.20260101-000300", app+"1.log.20260101-000400", app+"1.log.20260101-000400.tmp", app+"1.log.20260101-000500", app+"1.log",
		app+"2.log.20260101-000600", app+"2.log",
	)
	x, _, _ := logs(dir)
	step, left := pickLogs(t, x, garbage.Everything)
	want := []string{podA, app + "0.log.20260101-000000.gz", app + "0.log.20260101-000100.gz", app + "1.log.20260101-000300"}
	if diff := cmp.Diff(want, paths(step)); diff != "" || len(left) > 0 {
		t.Fatalf("picked (-want +got), left %v:\n%s", left, diff)
	}
	before := tree(t, dir)
	if _, err := x.Check(t.Context(), step); err != nil || !slices.Equal(before, tree(t, dir)) {
		t.Errorf("a dry run: %v", err)
	}
	done, err := x.Run(t.Context(), step)
	if err != nil {
		t.Fatalf("%+v: %v", done.Items, err)
	}
	reclaimtest.Exact(t, done)
	if diff := cmp.Diff([]string{podB}, names(t, dir, "")); diff != "" {
		t.Error(diff)
	}
	if got := names(t, dir, app); !slices.Equal(got, []string{
		"0.log", "0.log.20260101-000200", "1.log", "1.log.20260101-000400", "1.log.20260101-000400.tmp", "1.log.20260101-000500", "2.log", "2.log.20260101-000600",
	}) {
		t.Errorf("left: %v", got)
	}
	if step, _ := pickLogs(t, x, garbage.Everything); len(step.Items) > 0 {
		t.Errorf("a second plan: %v", paths(step))
	}
}

// LOG-14: the clock went back an hour, so the newest has a name that is older.
func TestRotatedLogsWhenTheClockGoesBack(t *testing.T) {
	t.Parallel()
	app := podB + "/app/"
	dir := logDir(t, app+"0.log.20261025-025900", app+"0.log.20261025-025800", app+"0.log.20261025-021000", app+"0.log")
	x, _, _ := logs(dir)
	step, _ := pickLogs(t, x, garbage.Everything)
	if diff := cmp.Diff([]string{app + "0.log.20261025-025800"}, paths(step)); diff != "" {
		t.Errorf("picked (-want +got):\n%s", diff)
	}
}

// GAP-37: what the kubelet has not made is never deleted, and no link is followed.
func TestUnknownThingsAmongLogsStay(t *testing.T) {
	t.Parallel()
	outside := t.TempDir()
	write(t, filepath.Join(outside, "app", "0.log.20260101-000000"))
	write(t, filepath.Join(outside, "app", "0.log.20260101-000100"))
	for name, make := range map[string]func(t *testing.T, dir string){
		"a folder without a UID":        func(t *testing.T, dir string) { write(t, filepath.Join(dir, "backup", "app", "0.log")) },
		"a folder of no namespace":      func(t *testing.T, dir string) { write(t, filepath.Join(dir, "_a_"+uidA, "app", "0.log")) },
		"a UID that is none":            func(t *testing.T, dir string) { write(t, filepath.Join(dir, "ns_a_everything", "app", "0.log")) },
		"a file in a pod's folder":      func(t *testing.T, dir string) { write(t, filepath.Join(dir, podA, "core.1234")) },
		"a file beside logs":            func(t *testing.T, dir string) { write(t, filepath.Join(dir, podA, "app", "heap.hprof")) },
		"a folder beside logs":          func(t *testing.T, dir string) { write(t, filepath.Join(dir, podA, "app", "old", "0.log")) },
		"a pod's folder that is a link": func(t *testing.T, dir string) { link(t, outside, filepath.Join(dir, podA)) },
		"a living pod's that is one":    func(t *testing.T, dir string) { link(t, outside, filepath.Join(dir, podB)) },
		"a container's folder is a link": func(t *testing.T, dir string) {
			mkdir(t, filepath.Join(dir, podB))
			link(t, filepath.Join(outside, "app"), filepath.Join(dir, podB, "app"))
		},
		"a dead container's is a link": func(t *testing.T, dir string) {
			mkdir(t, filepath.Join(dir, podA))
			link(t, filepath.Join(outside, "app"), filepath.Join(dir, podA, "app"))
		},
		"a log that is a link": func(t *testing.T, dir string) {
			mkdir(t, filepath.Join(dir, podA, "app"))
			link(t, filepath.Join(outside, "app", "0.log.20260101-000000"), filepath.Join(dir, podA, "app", "0.log"))
		},
		"a rotated log that is a link": func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, podB, "app", "0.log.20260101-000100"))
			link(t, filepath.Join(outside, "app", "0.log.20260101-000000"), filepath.Join(dir, podB, "app", "0.log.20260101-000000"))
		},
		"a file among pods": func(t *testing.T, dir string) { write(t, filepath.Join(dir, "README")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			make(t, dir)
			before := append(tree(t, dir), tree(t, outside)...)
			x, _, _ := logs(dir)
			step, left := pickLogs(t, x, garbage.Everything)
			if len(step.Items) > 0 || len(left) == 0 {
				t.Errorf("picked %v, left %v", paths(step), left)
			}
			// A plan that has it all the same.
			step.Logs.Gone = append(step.Logs.Gone, garbage.LogFile{Path: podA}, garbage.LogFile{Path: "backup"}, garbage.LogFile{Path: "."}, garbage.LogFile{Path: "../" + filepath.Base(outside)})
			step.Logs.Rotated = append(step.Logs.Rotated, garbage.LogFile{Path: podB + "/app/0.log.20260101-000000"}, garbage.LogFile{Path: podB + "/../../" + filepath.Base(outside)})
			for _, item := range step.Logs.Items() {
				one := step
				one.Items = []record.Item{item}
				if _, err := x.Run(t.Context(), one); !errors.Is(err, reclaim.ErrSurprise) {
					t.Errorf("%s: %v", item.ID, err)
				}
			}
			if diff := cmp.Diff(before, append(tree(t, dir), tree(t, outside)...)); diff != "" {
				t.Errorf("files (-before +after):\n%s", diff)
			}
		})
	}
}

func mkdir(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
}

func link(t *testing.T, to, path string) {
	t.Helper()
	if err := os.Symlink(to, path); err != nil {
		t.Fatal(err)
	}
}

// Between the plan and the act things happen.
func TestLogStepsThatDoNotHold(t *testing.T) {
	t.Parallel()
	old := podB + "/app/0.log.20260101-000000"
	for name, tc := range map[string]struct {
		item   string
		happen func(t *testing.T, dir string, f *reclaimtest.Fates, r *reclaimtest.Runtime)
	}{
		"the pod is alive": {podA, func(_ *testing.T, _ string, f *reclaimtest.Fates, _ *reclaimtest.Runtime) { f.Set(uidA, garbage.Alive) }},
		"the pod ended":    {podA, func(_ *testing.T, _ string, f *reclaimtest.Fates, _ *reclaimtest.Runtime) { f.Set(uidA, garbage.Ended) }},
		"a container of it is there": {podA, func(_ *testing.T, _ string, _ *reclaimtest.Fates, r *reclaimtest.Runtime) {
			r.RunContainer(uidA, "app", "image")
		}},
		"it was written to": {podA, func(t *testing.T, dir string, _ *reclaimtest.Fates, _ *reclaimtest.Runtime) {
			write(t, filepath.Join(dir, podA, "app", "0.log"))
		}},
		"something unknown came": {podA, func(t *testing.T, dir string, _ *reclaimtest.Fates, _ *reclaimtest.Runtime) {
			write(t, filepath.Join(dir, podA, "app", "x"))
		}},
		"the file is gone": {old, func(t *testing.T, dir string, _ *reclaimtest.Fates, _ *reclaimtest.Runtime) {
			if err := os.Remove(filepath.Join(dir, old)); err != nil {
				t.Fatal(err)
			}
		}},
		"the file became a link": {old, func(t *testing.T, dir string, _ *reclaimtest.Fates, _ *reclaimtest.Runtime) {
			if err := os.Rename(filepath.Join(dir, old), filepath.Join(dir, "saved")); err != nil {
				t.Fatal(err)
			}
			link(t, filepath.Join(dir, "saved"), filepath.Join(dir, old))
		}},
		"it is being compressed": {old, func(t *testing.T, dir string, _ *reclaimtest.Fates, _ *reclaimtest.Runtime) {
			write(t, filepath.Join(dir, old+".tmp"))
		}},
		"it is the newest now": {old, func(t *testing.T, dir string, _ *reclaimtest.Fates, _ *reclaimtest.Runtime) {
			if err := os.Remove(filepath.Join(dir, podB+"/app/0.log.20260101-000100")); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := logDir(t, podA+"/app/0.log", old, podB+"/app/0.log.20260101-000100", podB+"/app/0.log")
			x, fates, r := logs(dir)
			step, _ := pickLogs(t, x, garbage.Everything)
			if !slices.Contains(paths(step), tc.item) {
				t.Fatalf("picked %v", paths(step))
			}
			step.Items = slices.DeleteFunc(step.Items, func(i record.Item) bool { return i.ID != tc.item })
			tc.happen(t, dir, fates, r)
			before := tree(t, dir)
			if _, err := x.Run(t.Context(), step); !errors.Is(err, reclaim.ErrSurprise) {
				t.Errorf("run: %v", err)
			}
			if diff := cmp.Diff(before, tree(t, dir)); diff != "" {
				t.Errorf("files (-before +after):\n%s", diff)
			}
		})
	}
	x, _, _ := logs(filepath.Join(t.TempDir(), "missing"))
	if _, _, err := x.Choice(t.Context(), 1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no pods' log directory: %v", err)
	}
}
