package play

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/engine/sim"
	"github.com/cleave-cri/cleave/lab/scenario"
	"github.com/cleave-cri/cleave/lab/stage"
	"github.com/cleave-cri/cleave/lab/writer"
)

const (
	// decisionsLimit bounds the wait for cleave's first decision.
	decisionsLimit = 90 * time.Second
	// lookEvery is how often it is looked what cleave says.
	lookEvery = 500 * time.Millisecond
	// tellEvery is how often progress is shown.
	tellEvery = 5 * time.Second
)

// run is one scenario on its way.
type run struct {
	*scenario.Scenario
	*progress
	dir   string
	stage *stage.Stage
	t0    time.Time

	mu sync.Mutex
	// guarded by mu
	names        map[types.UID]string // of pods, by UID
	unattributed map[string]int64
	openDeleted  map[string]int64
	least        map[string]int64
	said         map[string]bool
	layout       string
	hostLack     map[string]time.Duration
	evicted      map[types.UID]bool // by a real kubelet
	kubelets     []sim.Event        // what that did
	pressed      bool               // it says that its node is short of disk space
}

// awaitDecisions waits until cleave decides about the disks: it has found its
// kubelet, its filesystems and its pods' API server.
func (r *run) awaitDecisions(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, decisionsLimit)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	var known time.Time // when it knew whose settings hold, not another lab's on this machine
	for {
		s, err := r.stage.Node.Cleave.Status(ctx)
		if known.IsZero() && err == nil && s.Reclaim != nil && s.Reclaim.KubeletPID == r.stage.KubeletPID() {
			known = time.Now()
		}
		if err == nil && r.stage.Profile == sim.KubeletProfile && s.FiguresSince != nil {
			r.step("the kubelet decides, cleave has figures")
			return nil
		}
		if !known.IsZero() && err == nil && s.Reclaim.LookedAt != nil && s.Reclaim.LookedAt.After(known) && s.Reclaim.Problem == "" && s.FiguresSince != nil {
			r.step("cleave decides: %s", strings.Join(s.Reclaim.Thresholds, ", "))
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			problem := ""
			if err == nil && s.Reclaim != nil {
				problem = fmt.Sprintf("it knows of kubelet %d; %s", s.Reclaim.KubeletPID, s.Reclaim.Problem)
			}
			return fmt.Errorf("cleave does not decide about the disks: %w (%s)\n%s", errors.Join(ctx.Err(), err), problem, r.stage.Node.Cleave.LogTail(20))
		}
	}
}

// perform plays the scenario for as long as it lasts.
func (r *run) perform(ctx context.Context) error {
	r.names, r.unattributed, r.openDeleted, r.least = map[types.UID]string{}, map[string]int64{}, map[string]int64{}, map[string]int64{}
	r.said, r.hostLack, r.evicted = map[string]bool{}, map[string]time.Duration{}, map[types.UID]bool{}
	r.t0 = time.Now()
	scene, cancel := context.WithTimeout(ctx, r.Lasts)
	defer cancel()
	group, scene := errgroup.WithContext(scene)
	for i := range r.Pods {
		group.Go(func() error { return r.pod(scene, &r.Pods[i]) })
	}
	for _, h := range r.Host {
		group.Go(func() error { return r.host(scene, h) })
	}
	for _, f := range r.Faults {
		group.Go(func() error { return r.fault(ctx, scene, f) })
	}
	group.Go(func() error { r.watch(scene); return nil })
	if err := group.Wait(); err != nil {
		return err
	}
	return ctx.Err()
}

// until waits for a moment after the beginning; false if the scene ends before.
func (r *run) until(ctx context.Context, at time.Duration) bool {
	return rest(ctx, time.Until(r.t0.Add(at)))
}

func rest(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// pod makes a pod, and as its controller makes it anew where it has one.
func (r *run) pod(ctx context.Context, p *scenario.Pod) error {
	if !r.until(ctx, p.Starts) {
		return nil
	}
	spec, err := podOf(p, r.stage.Node.Cleave.Binary(), r.notes())
	if err != nil {
		return err
	}
	for {
		made, err := r.stage.API.Create(ctx, spec)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		r.mu.Lock()
		r.names[made.UID] = p.Name
		r.mu.Unlock()
		if p.AnewAfter == nil {
			return nil
		}
		for gone := false; !gone; {
			if !rest(ctx, lookEvery) {
				return nil
			}
			now, err := r.stage.API.Pod(ctx, p.Namespace, p.Name)
			gone = apierrors.IsNotFound(err) || err == nil && now.UID != made.UID
			evicted := false
			if err == nil && !gone {
				_, evicted = evictedByKubelet(now)
			}
			if evicted {
				// A controller's new pod has another name, and the old one stays; here both have one.
				r.heedKubelet(ctx)
				if err := r.stage.API.Delete(ctx, p.Namespace, p.Name, 0); err != nil && !apierrors.IsNotFound(err) && ctx.Err() == nil {
					return err
				}
			}
		}
		r.step("%s is gone and is made anew", p.Name)
		if !rest(ctx, *p.AnewAfter) {
			return nil
		}
	}
}

// host writes outside of all pods.
func (r *run) host(ctx context.Context, h scenario.HostProcess) error {
	dir := filepath.Join(r.stage.Node.Disks[h.Filesystem].Path(), "host")
	return writer.Run(ctx, h.Write, dir, h.Name, func(noSpace time.Duration) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.hostLack[h.Name] = noSpace
	})
}

// fault makes something go wrong. What was taken away comes back also if the scene
// ends before its time.
func (r *run) fault(ctx, scene context.Context, f scenario.Fault) error {
	if !r.until(scene, f.From) {
		return nil
	}
	r.step("%s %s", f.Kind, f.On)
	n := r.stage.Node
	var back func(context.Context) error
	switch f.Kind {
	case scenario.ContainerdKilled:
		if err := n.Runtime.Kill(); err != nil {
			return err
		}
		back = n.Runtime.Start
	case scenario.SnapshotterKilled:
		if err := n.Split.Signal(ctx, syscall.SIGKILL); err != nil {
			return err
		}
		back = func(ctx context.Context) error { return n.Split.Start(ctx) }
	case scenario.RootUnmounted:
		attach, err := n.Disks[f.On].Detach(ctx)
		if err != nil {
			return err
		}
		back = attach
	case scenario.DiskFull:
		return r.stage.Fill(f.On)
	}
	r.until(scene, f.Until)
	if err := back(ctx); err != nil {
		return fmt.Errorf("end %q: %w", f.Kind, err)
	}
	r.step("%s: over", f.Kind)
	return nil
}

// watch looks at what cleave says until the scene ends.
func (r *run) watch(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	told, last := time.Now(), ""
	for {
		if s, err := r.stage.Node.Cleave.Status(ctx); err == nil {
			r.heed(ctx, s)
			r.heedKubelet(ctx)
			if line := r.line(s); line != last && time.Since(told) >= tellEvery {
				r.step("%s", line)
				told, last = time.Now(), line
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// heed keeps what of a status counts.
func (r *run) heed(ctx context.Context, s agent.Status) {
	deleted := r.deleted(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.Layout != "" {
		r.layout = string(s.Layout)
	}
	for _, f := range r.Filesystems {
		path := r.stage.Node.Disks[f.Name].Path()
		for _, have := range s.Filesystems {
			// A kubelet mounts its folder on itself.
			if have.Mountpoint == path || strings.HasPrefix(have.Mountpoint, path+"/") {
				r.unattributed[f.Name] = max(r.unattributed[f.Name], have.UnattributedBytes)
			}
		}
		var st syscall.Statfs_t
		if syscall.Statfs(path, &st) == nil {
			left := int64(st.Bavail) * st.Bsize //nolint:gosec // of a small disk
			if before, ok := r.least[f.Name]; !ok || left < before {
				r.least[f.Name] = left
			}
		}
	}
	if r.Lab != nil && len(r.Lab.Says) > 0 {
		var page bytes.Buffer
		if s.WriteText(&page, time.Now()) == nil {
			for _, text := range r.Lab.Says {
				r.said[text] = r.said[text] || strings.Contains(page.String(), text)
			}
		}
	}
	for name, bytes := range deleted {
		r.openDeleted[name] = max(r.openDeleted[name], bytes)
	}
}

// deleted is what pods hold in files that are deleted and open, as cleave says.
func (r *run) deleted(ctx context.Context) map[string]int64 {
	if r.Lab == nil || len(r.Lab.OpenDeletedAtLeast) == 0 {
		return nil
	}
	usage, err := r.stage.Node.Cleave.Usage(ctx)
	pods, podsErr := r.stage.API.Pods(ctx)
	if err != nil || podsErr != nil {
		return nil // the next look tells
	}
	podOf := map[string]string{}
	for _, p := range pods {
		for _, c := range p.Status.ContainerStatuses {
			_, id, _ := strings.Cut(c.ContainerID, "://")
			podOf[id] = p.Name
		}
	}
	out := map[string]int64{}
	for _, o := range usage.Owners {
		for _, p := range o.Parts {
			if o.Kind == string(owners.Container) && strings.HasPrefix(p.Name, owners.OpenDeleted) && p.Figure != nil {
				out[podOf[o.ID]] += p.Figure.Bytes
			}
		}
	}
	return out
}

// line is a status in one line.
func (r *run) line(s agent.Status) string {
	var parts []string
	for _, f := range r.Filesystems {
		var st syscall.Statfs_t
		if syscall.Statfs(r.stage.Node.Disks[f.Name].Path(), &st) == nil {
			parts = append(parts, fmt.Sprintf("%s %d %% full", f.Name, 100-100*st.Bavail/max(1, st.Blocks)))
		}
	}
	if s.Reclaim != nil {
		parts = append(parts, fmt.Sprintf("cleave: %s, %d deleted, %d evicted", cmp.Or(string(s.Reclaim.Outcome), "blind"), s.Reclaim.Counts.Deleted, s.Reclaim.Counts.Evicted))
	}
	return strings.Join(parts, "; ")
}

// facts look at what came of it, when the scene is over.
func (r *run) facts(ctx context.Context) (*facts, error) {
	status, err := r.stage.Node.Cleave.Status(ctx)
	if err != nil {
		return nil, err
	}
	r.heedKubelet(ctx)
	// What was decided last is in the file when the process has ended.
	if err := r.stage.Node.Cleave.Stop(ctx); err != nil {
		return nil, err
	}
	var records []record.Record
	if r.stage.Profile == sim.CleaveProfile {
		if records, err = r.records(); err != nil {
			return nil, err
		}
	}
	f := &facts{result: &sim.Result{Profile: r.stage.Profile}, layout: r.layout, unattributed: r.unattributed, openDeleted: r.openDeleted, said: r.said}
	f.result.Events, f.result.Evicted, f.deadRemoved = tell(records, r.t0, func(uid string) string { return cmp.Or(r.names[types.UID(uid)], uid) })
	for _, e := range r.kubelets {
		f.result.Events = append(f.result.Events, e)
		if e.What == sim.PodEvicted {
			f.result.Evicted = append(f.result.Evicted, e.Subject)
		}
	}
	slices.SortStableFunc(f.result.Events, func(a, b sim.Event) int { return cmp.Compare(a.At, b.At) })
	there, err := r.stage.Listed(ctx)
	if err != nil {
		return nil, err
	}
	for _, i := range r.Images {
		if _, was := r.stage.Images[i.Name]; was && !there[i.Name] {
			f.result.ImagesRemoved = append(f.result.ImagesRemoved, i.Name)
		}
	}
	if status.Reclaim != nil {
		// Tidying up without pressure is counted, and not recorded.
		others := len(f.result.ImagesRemoved) + count(f.result.Events, sim.LogRemoved)
		f.deadRemoved = max(f.deadRemoved, int(status.Reclaim.Counts.Deleted)-others)
	}
	for _, fs := range r.Filesystems {
		var st syscall.Statfs_t
		if err := syscall.Statfs(r.stage.Node.Disks[fs.Name].Path(), &st); err != nil {
			return nil, fmt.Errorf("measure filesystem %s: %w", fs.Name, err)
		}
		left := int64(st.Bavail) * st.Bsize //nolint:gosec // of a small disk
		f.result.Filesystems = append(f.result.Filesystems, sim.FilesystemResult{Name: fs.Name, AvailableBytes: left, LeastAvailable: min(left, r.least[fs.Name])})
	}
	for _, h := range r.Host {
		f.result.Host = append(f.result.Host, sim.HostResult{Name: h.Name, NoSpace: r.hostLack[h.Name]})
	}
	return f, r.podFacts(ctx, f)
}

func count(events []sim.Event, what sim.What) (n int) {
	for _, e := range events {
		if e.What == what {
			n++
		}
	}
	return n
}

func (r *run) podFacts(ctx context.Context, f *facts) error {
	noted, err := writer.Noted(r.notes())
	if err != nil {
		return err
	}
	pods, err := r.stage.API.Pods(ctx)
	if err != nil {
		return err
	}
	f.running, f.logs = map[string]bool{}, map[string]int64{}
	uids := map[string]types.UID{}
	for _, p := range pods {
		uids[p.Name] = p.UID
		f.running[p.Name] = p.DeletionTimestamp == nil && len(p.Status.ContainerStatuses) == len(p.Spec.Containers)
		for _, c := range p.Status.ContainerStatuses {
			f.running[p.Name] = f.running[p.Name] && c.Ready
		}
	}
	for i := range r.Pods {
		p := &r.Pods[i]
		out := sim.PodResult{Name: p.Name, Runs: f.running[p.Name]}
		for _, c := range p.Containers {
			out.NoSpace = max(out.NoSpace, noted[p.Name+"."+c.Name])
		}
		for _, name := range f.result.Evicted {
			if name == p.Name {
				out.Evictions++
			}
		}
		f.result.Pods = append(f.result.Pods, out)
		if uid, ok := uids[p.Name]; ok {
			if f.logs[p.Name], err = allocated(filepath.Join(r.stage.PodsDir(), fmt.Sprintf("%s_%s_%s", p.Namespace, p.Name, uid))); err != nil {
				return err
			}
		}
	}
	return nil
}

// allocated is what the files below a folder take.
func allocated(dir string) (bytes int64, _ error) {
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // rotated away, or the pod is evicted and still known
		}
		if err != nil {
			return err
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if st, ok := info.Sys().(*syscall.Stat_t); err == nil && ok {
			bytes += st.Blocks * 512
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("measure logs: %w", err)
	}
	return bytes, nil
}

// records are what cleave's flight recorder has.
func (r *run) records() (out []record.Record, err error) {
	file, err := os.Open(filepath.Join(r.stage.Node.Cleave.Config().StateDir, flight.FileName))
	if err != nil {
		return nil, fmt.Errorf("read what cleave decided: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return nil, fmt.Errorf("read what cleave decided: %w", err)
	}
	lines, err := flight.Lines(file, info.Size())
	if err != nil {
		return nil, fmt.Errorf("read what cleave decided: %w", err)
	}
	reader := record.NewReader(lines)
	for {
		one, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read what cleave decided: record %d: %w", reader.Line(), err)
		}
		out = append(out, one)
	}
}
