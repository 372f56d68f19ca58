package crio

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/moby/sys/atomicwriter"
	"github.com/moby/sys/mountinfo"
	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/proxy/criocompat"
)

// Sources are what a Keeper asks. All are required.
type Sources struct {
	// Kubelet reads who a process is that asks for the disks. An error that is ErrStranger says that it is no kubelet whose runtime
	// cleave is. With any other it may be one; then PID and StartTicks are set as far as they are known.
	Kubelet func(ctx context.Context, pid int32) (Kubelet, error)
	// Running lists the kubelets of this node whose runtime cleave is, and those of which that can't be told.
	Running func(ctx context.Context) ([]Kubelet, error)
	// Disks says where things lie now. It does not block.
	Disks func() Disks
	// Driver says how containers' cgroups are made.
	Driver func(ctx context.Context) (criocompat.Driver, error)
	// Mounted lists the devices of the mount table, as [Disk] names them.
	Mounted func() ([]string, error)
	// Summary reads what the kubelet with this process ID reports of the runtime's disks. An error that is ErrNotAllowed says that
	// it can't be known.
	Summary func(ctx context.Context, pid int32) (Figures, error)
	// Tell takes the problems each time that they are others than before; nil tells nobody. It does not block.
	Tell func(problems []string)
	// Capacity is that of a device, in bytes; false while it is not known. It does not block.
	Capacity func(device string) (uint64, bool)
}

// ErrStranger says that a process is no kubelet whose runtime cleave is: a cAdvisor of its own, somebody with curl, the kubelet of
// another runtime. What it is told changes nothing for the node's kubelet.
var ErrStranger = errors.New("it is no kubelet whose runtime is cleave")

// Mounted lists the devices in this process's mount table.
func Mounted() ([]string, error) {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	var devices []string
	for _, m := range mounts {
		devices = append(devices, fmt.Sprintf("%d:%d", m.Major, m.Minor))
	}
	slices.Sort(devices)
	return slices.Compact(devices), nil
}

// Keeper tells a kubelet about the node's disks and keeps in mind what it told, in a file that lasts as long as the boot, so that a
// cleave that is started anew contradicts no kubelet. It implements [criocompat.Informer].
type Keeper struct {
	sources Sources
	path    string
	log     *zap.Logger

	mu       sync.Mutex
	told     *Told          // guarded by mu; nil while nobody was told anything
	missed   map[int32]miss // guarded by mu; kubelets that did not ask, by process
	problems []string       // guarded by mu; of the last look at the running kubelets
	summary  looked         // guarded by mu; of the kubelet that was told
}

// miss is a kubelet that runs and has not asked.
type miss struct {
	kubelet Kubelet
	since   time.Time
}

var _ criocompat.Informer = (*Keeper)(nil)

// NewKeeper returns a keeper that remembers what path holds: a file in a folder that is empty after a boot. One that can't be read
// is told and counts as none.
func NewKeeper(path string, sources Sources, log *zap.Logger) *Keeper {
	k := &Keeper{sources: sources, path: path, log: log, missed: map[int32]miss{}}
	told, err := readTold(path)
	if err != nil {
		log.Warn("what the kubelet was told about its disks can't be read; restart the kubelet if it reports none", zap.Error(err))
	}
	k.told = told
	return k
}

// recordVersion is the version of the file's form.
const recordVersion = 1

type record struct {
	Version int   `json:"version"`
	Told    *Told `json:"told"`
}

func readTold(path string) (*Told, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("read %s: it has version %d, this cleave knows %d", path, r.Version, recordVersion)
	}
	if t := r.Told; t == nil || !t.Images.complete() || !t.Containers.complete() {
		return nil, fmt.Errorf("read %s: it does not say what was told", path)
	}
	return r.Told, nil
}

func (k *Keeper) write(t Told) error {
	text, err := json.MarshalIndent(record{Version: recordVersion, Told: &t}, "", "  ")
	if err != nil {
		return err
	}
	return atomicwriter.WriteFile(k.path, append(text, '\n'), 0o600)
}

// Info implements [criocompat.Informer].
func (k *Keeper) Info(ctx context.Context, pid int32) (criocompat.Info, error) {
	driver, err := k.sources.Driver(ctx)
	if err != nil {
		return criocompat.Info{}, fmt.Errorf("ask the runtime how it makes cgroups: %w", err)
	}
	disks, err := k.waitForDisks(ctx)
	if err != nil {
		return criocompat.Info{}, err
	}
	mounted, err := k.sources.Mounted()
	if err != nil {
		return criocompat.Info{}, err
	}
	kubelet, err := k.sources.Kubelet(ctx, pid)
	if err != nil {
		kubelet.PID = pid
		kubelet.Refused = fmt.Sprintf("it is not known what process %d is (%v): no split is reported to it", pid, err)
	}
	told := decide(kubelet, disks, mounted)
	if errors.Is(err, ErrStranger) {
		k.log.Info("somebody who is not the kubelet asked for the disks and was told of one", zap.Int32("pid", pid), zap.Error(err))
		return told.info(driver), nil
	}

	// Whoever may be the kubelet has now been told this, and ImageFsInfo must not contradict it.
	k.mu.Lock()
	k.told = &told
	if err := k.write(told); err != nil {
		k.log.Error("what the kubelet was told is not written down; if cleave is started anew, restart the kubelet too", zap.Error(err))
	}
	k.mu.Unlock()
	if told.Unsplit != "" {
		k.log.Error("the kubelet is told of one disk though there are two", zap.Int32("pid", pid), zap.String("reason", told.Unsplit))
	}
	return told.info(driver), nil
}

// mountGrace is how long a kubelet's question waits for a folder that is configured and not there.
const mountGrace = 20 * time.Second

// waitForDisks waits until it is known where things are. A kubelet that has to wait starts a little later; one that gets no answer
// has no figures for the rest of its life.
func (k *Keeper) waitForDisks(ctx context.Context) (Disks, error) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	began := time.Now()
	for {
		// A disk that is mounted while the node starts may be some seconds late, and what is told now holds for the kubelet's life.
		if d := k.sources.Disks(); d.Known && (!d.Missing || time.Since(began) >= mountGrace) {
			return d, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return Disks{}, errors.New("it is not known where images and containers are: start the runtime, or set filesystems.imagefs and " +
				"filesystems.containerfs in the configuration; then restart the kubelet")
		}
	}
}

// Named returns what to name to the kubelet now in place of where things are: what it was told and can measure.
func (k *Keeper) Named(now Disks) (images, containers Disk, problems []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	t := k.told
	switch {
	case t == nil:
		return now.Images, now.Containers, nil
	case !now.Known:
		return t.Images, t.Containers, nil
	}
	images, first := t.pinned(t.Images, now.Images, "images")
	if t.Unsplit != "" {
		return images, images, nonEmpty(first) // why containers are not named is said elsewhere
	}
	containers, second := t.pinned(t.Containers, now.Containers, "containers")
	if !t.Split {
		containers = images // one disk was named, and one is named on
	}
	return images, containers, nonEmpty(first, second)
}

func nonEmpty(texts ...string) []string {
	return slices.DeleteFunc(texts, func(t string) bool { return t == "" })
}

const (
	// askGrace is how long a kubelet may run before it has to have asked: it asks in its first seconds.
	askGrace = 20 * time.Second
	// WatchPeriod is how often the running kubelets are looked at.
	WatchPeriod = 5 * time.Second
)

// Watch looks at the running kubelets until ctx ends: each has to have asked for its disks after it started (KSS-18).
func (k *Keeper) Watch(ctx context.Context) {
	tick := time.NewTicker(WatchPeriod)
	defer tick.Stop()
	for {
		k.look(ctx, time.Now())
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (k *Keeper) look(ctx context.Context, now time.Time) {
	running, err := k.sources.Running(ctx)
	if ctx.Err() != nil {
		return
	}
	var problems []string
	if err != nil {
		problems = append(problems, fmt.Sprintf("look for the kubelet: %v", err))
	}
	told := k.newest(running)
	if told != nil && slices.ContainsFunc(running, told.Kubelet.same) {
		k.lookAtSummary(ctx, now, *told)
	} else if err == nil {
		k.mu.Lock()
		k.summary = looked{} // of one that has ended
		k.mu.Unlock()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	missed := map[int32]miss{}
	for _, r := range running {
		if k.told != nil && k.told.Kubelet.same(r) {
			if k.told.Unsplit != "" {
				problems = append(problems, fmt.Sprintf("the kubelet (pid %d) is told of one disk though there are two: %s", r.PID, k.told.Unsplit))
			}
			if k.told.Kubelet.OtherMounts {
				problems = append(problems, fmt.Sprintf("the kubelet (pid %d) is in another mount namespace than cleave: it does not see the roots that cleave "+
					"makes for containers on overlayfs, takes their writable layers for empty, and limits and evicts by that: run both in one mount namespace", r.PID))
			}
			if wrong := k.summary.problem(now); wrong != "" && k.summary.kubelet.same(r) {
				problems = append(problems, wrong)
			}
			continue
		}
		if r.Unread {
			continue // it may be another runtime's
		}
		m, ok := k.missed[r.PID]
		if !ok || !m.kubelet.same(r) {
			m = miss{kubelet: r, since: now}
		}
		missed[r.PID] = m
		if now.Sub(m.since) >= askGrace {
			problems = append(problems, fmt.Sprintf("the kubelet (pid %d) has not asked cleave for its disks: it started before cleave, or it does not "+
				"take cleave for CRI-O; it has no disk figures until it is restarted (its containerRuntimeEndpoint has to be unix:///var/run/crio/crio.sock)", r.PID))
		}
	}
	k.missed = missed
	slices.Sort(problems)
	if !slices.Equal(problems, k.problems) {
		for _, p := range problems {
			k.log.Warn("the kubelet does not see the disks as they are", zap.String("problem", p))
		}
		if len(problems) == 0 {
			k.log.Info("the kubelet sees the disks as they are")
		}
		if k.sources.Tell != nil {
			k.sources.Tell(slices.Clone(problems))
		}
	}
	k.problems = problems
}

// newest is what was told to one of the running kubelets if that is known, else what was told last. While one cleave takes over from
// another, a kubelet may have asked the old one after the new one had read the file.
func (k *Keeper) newest(running []Kubelet) *Told {
	k.mu.Lock()
	told := k.told
	k.mu.Unlock()
	if len(running) == 0 || told != nil && slices.ContainsFunc(running, told.Kubelet.same) {
		return told
	}
	written, err := readTold(k.path)
	if err != nil || written == nil || !slices.ContainsFunc(running, written.Kubelet.same) {
		return told
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.told == told { // nobody has asked meanwhile
		k.told = written
	}
	return k.told
}

// Status is what a keeper knows, for people.
type Status struct {
	// Told is what the kubelet was told, nil while none has asked.
	Told *Told `json:"told,omitempty"`
	// Summary is about what that kubelet reports, nil before the first look.
	Summary *SummaryStatus `json:"summary,omitempty"`
	// Problems are what keeps a kubelet from seeing the disks as they are, each with what to do.
	Problems []string `json:"problems,omitempty"`
}

// Status returns what is known now. It does not block.
func (k *Keeper) Status() Status {
	k.mu.Lock()
	defer k.mu.Unlock()
	return Status{Told: k.told, Summary: k.summary.status(), Problems: slices.Clone(k.problems)}
}
