package inside

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/fsstats/quota"
	"github.com/cleave-cri/cleave/lab/du"
	"github.com/cleave-cri/cleave/snapshot/split"
)

// quotaEnv is set where the node keeps limits; its value is what a writer over one is told.
const quotaEnv = "CLEAVE_INSIDE_QUOTA"

const (
	// layerLimitBytes is the limit that the host's test configures.
	layerLimitBytes = 32 << 20
	// roundBytes is how much more of it a filesystem may make, or count for its own blocks.
	roundBytes = 64 << 10
)

var statusSocket = config.Default().Snapshotter.StatusEndpoint.Path()

// limitsNow are the kernel's accounts, by the names of snapshots, which are those of containers and sandboxes.
func limitsNow(ctx context.Context) (map[string]split.LayerLimit, error) {
	list, err := snapshotter.FetchLimits(ctx, statusSocket)
	byName := map[string]split.LayerLimit{}
	for _, l := range list {
		byName[l.Name] = l
	}
	return byName, err
}

// accountOf waits until a container has its limit, and returns its account.
func accountOf(t *testing.T, p crictlPod) (l split.LayerLimit) {
	t.Helper()
	eventually(t, "the container has its limit", func() error {
		now, err := limitsNow(t.Context())
		if l = now[p.container]; err == nil && (l.LimitBytes < layerLimitBytes || l.LimitBytes > layerLimitBytes+roundBytes) {
			err = fmt.Errorf("its account is %+v of %d", l, len(now))
		}
		return err
	})
	return l
}

// write writes so many MiB to a file in the container, to its disk, and returns what dd says.
func (p crictlPod) write(t *testing.T, file string, mib int) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	// Of busybox: conv=fsync writes out before dd ends, so that it hears of all errors.
	out, err := exec.CommandContext(ctx, "crictl", "exec", p.container, "dd", "if=/dev/zero", "of="+file, "bs=1048576", fmt.Sprintf("count=%d", mib), "conv=fsync").CombinedOutput()
	return string(out), err
}

// writes is write that must succeed.
func (p crictlPod) writes(t *testing.T, file string, mib int) {
	t.Helper()
	if out, err := p.write(t, file, mib); err != nil {
		t.Errorf("%d MiB to %s: %v: %s", mib, file, err, out)
	}
}

// isHeld is write that must fail by the limit, which lets no more than that through.
func (p crictlPod) isHeld(t *testing.T) {
	t.Helper()
	out, err := p.write(t, "/big", 2*layerLimitBytes>>20)
	if err == nil || !strings.Contains(out, os.Getenv(quotaEnv)) {
		t.Errorf("writing twice the limit gave %v: %s", err, out)
	}
	if size := number(t, p.exec(t, "stat", "-c", "%s", "/big")); size > layerLimitBytes+roundBytes || size < layerLimitBytes/2 {
		t.Errorf("%d bytes were written", size)
	}
}

// usageOf is what the snapshotter says of a snapshot.
func usageOf(ctx context.Context, name string) (split.SnapshotUsage, error) {
	list, err := snapshotter.FetchUsage(ctx, statusSocket)
	for _, u := range list {
		if u.Name == name && u.Kind == "writable" {
			return u, err
		}
	}
	return split.SnapshotUsage{}, errors.Join(fmt.Errorf("snapshot %s has no usage", name), err)
}

// TestQuotaNode is a course over a node whose containers have a limit of 32 MiB each, by the configuration.
func TestQuotaNode(t *testing.T) {
	inGuest(t)
	if os.Getenv(quotaEnv) == "" {
		t.Skip("needs a node that keeps limits: `make test-quota-vm` boots one")
	}
	waitForImages(t, cleaveSocket)
	over, beside := runPod(t, "over"), runPod(t, "beside")
	first, second := accountOf(t, over), accountOf(t, beside)
	if first.Project == second.Project || first.Project == 0 {
		t.Fatalf("both have the project %d", first.Project)
	}
	t.Run("over its limit it is held, and nobody else notices", func(t *testing.T) {
		over.isHeld(t)
		beside.writes(t, "/mine", 16)
		run(t, "dd", "if=/dev/zero", "of=/mnt/containers/kubelet/other", "bs=1M", "count=64", "conv=fsync")
		over.exec(t, "rm", "/big")
		over.writes(t, "/small", 8)
		over.exec(t, "rm", "/small")
		over.isHeld(t)
	})
	t.Run("the figure is the kernel's count, and right", func(t *testing.T) {
		eventually(t, "the figure of the layer", func() error {
			u, err := usageOf(t.Context(), beside.container)
			if err != nil {
				return err
			}
			bytes, inodes, err := du.Measure(t.Context(), u.Folder)
			if err == nil && (u.Figure == nil || u.Figure.How != split.HowQuota || uint64(u.Figure.Bytes) != bytes || uint64(u.Figure.Inodes) != inodes) {
				err = fmt.Errorf("du says %d bytes, %d inodes; the snapshotter %+v, %s", bytes, inodes, u.Figure, u.Problem)
			}
			return err
		})
	})
	t.Run("cleave's status counts both", func(t *testing.T) {
		eventually(t, "the status", func() error {
			s, err := agent.FetchStatus(t.Context(), config.Default().Control.Endpoint.Path())
			if err == nil && (s.Limits == nil || s.Limits.Limited != 2 || s.Limits.Without != 0 || s.Limits.Problem != "") {
				err = fmt.Errorf("it is %+v", s.Limits)
			}
			return err
		})
	})
	t.Run("limits survive restarts", func(t *testing.T) {
		for _, how := range []func(){
			func() { run(t, "systemctl", "restart", "cleave-snapshotter") },
			func() { kill(t, number(t, property(t, "cleave-snapshotter", "MainPID"))) },
		} {
			// Without the agent nobody would set them again.
			run(t, "systemctl", "stop", "cleave")
			how()
			eventually(t, "the accounts are what they were", func() error {
				now, err := limitsNow(t.Context())
				for name, was := range map[string]split.LayerLimit{over.container: first, beside.container: second} {
					if is := now[name]; err == nil && (is.Project != was.Project || is.LimitBytes != was.LimitBytes) {
						err = fmt.Errorf("%+v became %+v", was, is)
					}
				}
				return err
			})
			run(t, "systemctl", "start", "cleave")
			eventually(t, "the pods answer", func() error {
				return exec.CommandContext(t.Context(), "crictl", "exec", over.container, "true").Run()
			})
			over.isHeld(t)
			beside.writes(t, "/mine", 16)
		}
	})
	t.Run("an ID is given again only when its layer is gone", func(t *testing.T) { testReuse(t, over, beside, first) })
	t.Run("crashes leave no ID and no limit behind", func(t *testing.T) { testCrashes(t, beside, second) })
	t.Run("the last ones go", func(t *testing.T) {
		beside.remove(t)
		onlyKnownProjects(t)
	})
}

// account reads what the kernel has of a project.
func account(t *testing.T, id uint32) quota.Project {
	t.Helper()
	fs, err := quota.Open("/mnt/containers")
	if err != nil {
		t.Fatal(err)
	}
	defer fs.Close() //nolint:errcheck // only asked
	p, err := fs.Project(id)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// testReuse removes a pod of which a file is still open: its ID is in use until that is closed.
func testReuse(t *testing.T, over, beside crictlPod, was split.LayerLimit) {
	u, err := usageOf(t.Context(), over.container)
	if err != nil {
		t.Fatal(err)
	}
	held, err := os.Open(filepath.Join(u.Folder, "diff", "big"))
	if err != nil {
		t.Fatal(err)
	}
	over.remove(t)
	eventually(t, "its folder is gone", func() error {
		if _, err := os.Stat(u.Folder); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s: %w", u.Folder, err)
		}
		return nil
	})
	next := runPod(t, "next")
	if l := accountOf(t, next); l.Project == was.Project {
		t.Errorf("a new layer got project %d, of which a file is open", was.Project)
	}
	next.isHeld(t)
	beside.writes(t, "/mine", 16)
	if p := account(t, was.Project); p.Usage.Inodes == 0 || p.Limit.Bytes == 0 {
		t.Errorf("while its file is open the account of project %d is %+v", was.Project, p)
	}
	if err := held.Close(); err != nil {
		t.Error(err)
	}
	next.remove(t)
	eventually(t, "the account is empty", func() error {
		if p := account(t, was.Project); p != (quota.Project{ID: was.Project}) {
			return fmt.Errorf("it is %+v", p)
		}
		return nil
	})
	again := runPod(t, "again")
	accountOf(t, again)
	// The pod has two layers, and the lowest IDs that are free: that of the sandbox before may not be yet.
	now, err := limitsNow(t.Context())
	if now[again.sandbox].Project != was.Project && now[again.container].Project != was.Project {
		t.Errorf("project %d is free, and the new pod has %+v and %+v, %v", was.Project, now[again.sandbox], now[again.container], err)
	}
	if l := now[again.sandbox]; l.LimitBytes != 0 {
		t.Errorf("a sandbox has a limit: %+v", l)
	}
	again.isHeld(t)
	again.remove(t)
}

// onlyKnownProjects waits until the filesystem has accounts of those layers only that are on record.
func onlyKnownProjects(t *testing.T) {
	t.Helper()
	fs, err := quota.Open("/mnt/containers")
	if err != nil {
		t.Fatal(err)
	}
	defer fs.Close() //nolint:errcheck // only asked
	eventually(t, "there are accounts of nobody but the layers on record", func() error {
		now, err := limitsNow(t.Context())
		if err != nil {
			return err
		}
		known := map[uint32]bool{}
		for _, l := range now {
			known[l.Project] = true
		}
		for from := uint32(1); ; {
			p, found, err := fs.NextProject(from)
			if err != nil || !found {
				return err
			}
			if !known[p.ID] {
				return fmt.Errorf("%+v is of no layer", p)
			}
			from = p.ID + 1
		}
	})
}

// testCrashes kills the snapshotter at each step of making a layer that has to do with its project ID.
func testCrashes(t *testing.T, beside crictlPod, was split.LayerLimit) {
	const dropIn = "/run/systemd/system/cleave-snapshotter.service.d/fault.conf"
	if err := os.MkdirAll(filepath.Dir(dropIn), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, point := range []string{"create-marked", "create-made", "create-renamed", "create-committed"} {
		t.Run(point, func(t *testing.T) {
			content := "[Service]\nExecStart=\nExecStart=/usr/local/bin/cleave-faultpoints snapshotter\nEnvironment=CLEAVE_FAULT=" + point + "\n"
			if err := os.WriteFile(dropIn, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			run(t, "systemctl", "daemon-reload")
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			// It dies of the first snapshot that it makes, which may be the one of the poke, so this may fail.
			_ = exec.CommandContext(ctx, "systemctl", "restart", "cleave-snapshotter").Run() //nolint:errcheck // see above
			out, err := exec.CommandContext(ctx, "ctr", "--namespace", "k8s.io", "snapshots", "--snapshotter", "cleave", "prepare", "crash-"+point).CombinedOutput()
			if err == nil {
				t.Fatalf("a snapshot was made by a snapshotter that dies of it: %s", out)
			}
			eventually(t, "the snapshotter has died", func() error {
				if n, state := property(t, "cleave-snapshotter", "NRestarts"), property(t, "cleave-snapshotter", "ActiveState"); n == "0" && state == "active" {
					return errors.New("it has not")
				}
				return nil
			})
			if err := os.Remove(dropIn); err != nil {
				t.Fatal(err)
			}
			run(t, "systemctl", "daemon-reload")
			run(t, "systemctl", "reset-failed", "cleave-snapshotter")
			run(t, "systemctl", "restart", "cleave-snapshotter")
			eventually(t, "the snapshotter has nothing to complain of", func() error {
				s, err := snapshotter.FetchStatus(t.Context(), statusSocket)
				if err == nil && (len(s.Problems()) > 0 || s.Store.Alarm != nil) {
					err = fmt.Errorf("%q", s.Problems())
				}
				return err
			})
			onlyKnownProjects(t)
			if is := account(t, was.Project); is.Limit.Bytes != was.LimitBytes {
				t.Errorf("the neighbour's limit %+v became %+v", was, is)
			}
			beside.writes(t, "/mine", 16)
			p := runPod(t, "after-"+point)
			accountOf(t, p)
			p.isHeld(t)
			p.remove(t)
		})
	}
}
