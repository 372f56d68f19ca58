package agent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/decide"
	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/agent/keeper"
	"github.com/cleave-cri/cleave/agent/lastlogs"
	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/agent/peaks"
	"github.com/cleave-cri/cleave/agent/pressure"
	"github.com/cleave-cri/cleave/agent/standalone"
	"github.com/cleave-cri/cleave/agent/stock"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/kube/evict"
	"github.com/cleave-cri/cleave/kube/report"
	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/proxy/imagelock"
	"github.com/cleave-cri/cleave/reclaim"
	"github.com/cleave-cri/cleave/reclaim/ctdstore"
	"github.com/cleave-cri/cleave/reclaim/seen"
)

const (
	// kubeletEvery is how often it is looked for the kubelet and its settings.
	kubeletEvery = 10 * time.Second
	// kubeletEarly is how often while none is known in the first minute: at a node's start the kubelet comes after cleave.
	kubeletEarly = time.Second
	// saveEvery is how often it is written down which images were seen and named.
	saveEvery = 30 * time.Second
	// imagesEvery is how often images are looked at while their disk is not short: to know when each was used last.
	imagesEvery = time.Minute
	// pagePeriod is how often the kubelet is asked for its pods, which the API server mostly tells sooner.
	pagePeriod = 30 * time.Second
	// apiSilent is how long nothing may come from the API server before the kubelet's page counts; it has something to say each minute.
	apiSilent = 2 * time.Minute
	// podsMaxAge is for how long pods may be ranked and evicted by what was known of them.
	podsMaxAge = 5 * time.Minute
	// takeOverEvery is how often it is looked whether the process before this one has stopped acting.
	takeOverEvery = 200 * time.Millisecond
	// flightGrace is how long the end waits for the last records to be written.
	flightGrace = 2 * time.Second
)

// decisions are what reclaims and evicts, and what that goes by besides the observer.
type decisions struct {
	cfg      config.Config
	observer *observer
	keeper   *keeper.Keeper
	names    *imagelock.Book
	images   *seen.Store
	peaks    *peaks.Store
	removal  *reclaim.Images
	stock    *stock.Stock
	space    *signalSpace
	log      *zap.Logger
	// standalone ends pods where the API server is not asked to.
	standalone standalone.Evictor
	// reading is held by who reads the logs of a pod that goes.
	reading atomic.Bool
	// explaining is held by who looks for what holds space that did not come free.
	explaining atomic.Bool

	// left are the pods that are not ranked, and why.
	left atomic.Pointer[[]string]
	// picked are the layers of each image of the last plan.
	picked  atomic.Pointer[map[string][]garbage.Layer]
	kubelet atomic.Pointer[kubelet.Settings]
	cluster atomic.Pointer[cluster]
	// pressure is what the last pass came to, nil before it; book is the keeper's own, for the next.
	pressure atomic.Pointer[pressure.Picture]
	book     pressure.Book
	// acts says that this process is the one that deletes and evicts, not the one before or after it.
	acts atomic.Bool

	// opening is held by who opens the files of recorder and kept, for which nobody waits who only writes to them.
	opening sync.Mutex
	// recorder is nil while another process records, kept, which takes the ends of logs, before the first.
	recorder atomic.Pointer[flight.Recorder]
	kept     atomic.Pointer[lastlogs.Keeper]
}

// openDecisions makes what reclaims and evicts, where that is configured.
func (a *agent) openDecisions(c *proxy.Config) error {
	if !a.cfg.Reclaim.Enabled {
		return nil
	}
	remembered, err := seen.Open(a.cfg.StateDir)
	if err != nil {
		return fmt.Errorf("remember images: %w", err)
	}
	d := &decisions{cfg: a.cfg, observer: a.observer, names: imagelock.New(), images: remembered, log: a.log.Named("reclaim")}
	if note := remembered.Note(); note != "" {
		d.log.Warn("what was known of images is lost, so none goes early", zap.String("reason", note))
	}
	if d.peaks, err = peaks.Open(a.cfg.StateDir); err != nil {
		return errors.Join(err, remembered.Close())
	}
	if note := d.peaks.Note(); note != "" {
		d.log.Warn("what workloads used is lost", zap.String("reason", note))
	}
	list, complete := remembered.Mentions()
	mentions := make([]imagelock.Mention, 0, len(list))
	for _, m := range list {
		mentions = append(mentions, imagelock.Mention{Name: m.Name, At: m.At})
	}
	d.names.Restore(mentions, complete)
	if c.Holds == nil {
		c.Holds = map[string]proxy.HoldFunc{}
	}
	for method, hold := range d.names.Holds() {
		c.Holds[method] = hold
	}
	snapshotter := "overlayfs"
	if a.cfg.Snapshotter.Enabled() {
		snapshotter = splitSnapshotter
	}
	runtime := runtimeapi.NewRuntimeServiceClient(a.upstream)
	d.standalone = standalone.Evictor{Runtime: runtime}
	d.stock = stock.New(a.upstream)
	d.space = &signalSpace{free: d.free}
	site := reclaim.Site{Space: d.space, Holders: holders{d}}
	d.removal = &reclaim.Images{Site: site, CRI: runtimeapi.NewImageServiceClient(a.upstream), Runtime: runtime, Store: ctdstore.New(a.upstream, a.cfg.Runtime.Namespace, snapshotter), Lock: d.names, Memory: remembered}
	containers := &reclaim.Containers{Site: site, Runtime: runtime, Pods: d, LogDir: a.cfg.Filesystems.Logs}
	logs := &reclaim.Logs{Site: site, Runtime: runtime, Pods: d, Dir: a.cfg.Filesystems.Logs}
	parts := keeper.Parts{
		Decider: "cleave", Look: d.look, Glance: d.glance, Config: d.config, Record: d.record, Passed: d.passed,
		Observe: a.cfg.Mode == config.ModeObserve, Log: d.log,
		Reclaimers: map[engine.Reclaim]keeper.Reclaimer{
			engine.DeadContainers: containerReclaimer{d, containers}, engine.UnusedImages: imageReclaimer{d}, engine.OldLogs: logReclaimer{d, logs},
		},
		Collectors: []keeper.Collector{&imageCollector{d: d, since: time.Now()}, containerCollector{d, containers}},
	}
	if a.cfg.Reclaim.Evict {
		parts.Evictor = d
		parts.Remains = d.remainsOf
	}
	d.openAdmission(c)
	d.keeper = keeper.New(parts)
	a.decisions = d
	return nil
}

// splitSnapshotter is the name that containerd knows the split snapshotter by.
const splitSnapshotter = "cleave"

// run decides until ctx ends.
func (d *decisions) run(ctx context.Context) error {
	var parts sync.WaitGroup
	parts.Go(func() {
		if d.takeOver(ctx) {
			d.keeper.Run(ctx)
			d.acts.Store(false)
		}
	})
	parts.Go(func() { d.keepUp(ctx, &parts) })
	parts.Go(func() { d.watchPeaks(ctx) })
	parts.Go(func() {
		if err := d.stock.Run(ctx); err != nil {
			d.log.Warn("containerd's store is not followed any more", zap.Error(err))
		}
	})
	parts.Wait()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), flightGrace)
	defer cancel()
	// Calls that are being answered may still name images.
	err := errors.Join(d.save(false), d.images.Close(), d.peaks.Close())
	d.opening.Lock() // a log may still be read
	defer d.opening.Unlock()
	if r := d.recorder.Load(); r != nil {
		err = errors.Join(err, r.Close(closing))
	}
	if k := d.kept.Load(); k != nil {
		err = errors.Join(err, k.Close())
	}
	return err
}

// takeOver waits until the process before this one has stopped acting, which it tells by giving up the flight recorder: two at once,
// of which neither knows what the other does, would evict two pods for one shortage. It returns false if ctx ends before.
func (d *decisions) takeOver(ctx context.Context) bool {
	look := time.NewTicker(takeOverEvery)
	defer look.Stop()
	for errors.Is(d.openRecorder(), flight.ErrLocked) { // without a recorder for another reason it goes on; keepUp tells
		select {
		case <-ctx.Done():
			return false
		case <-look.C:
		}
	}
	if _, err := d.openKept(); err != nil { // now, while there is space for it
		d.log.Warn("the logs of evicted pods will not be kept", zap.Error(err))
	}
	d.acts.Store(true)
	return true
}

// keepUp finds the kubelet and the API server, opens the recorder, and writes down what is remembered, now and then until ctx ends.
func (d *decisions) keepUp(ctx context.Context, parts *sync.WaitGroup) {
	save := time.NewTicker(saveEvery)
	defer save.Stop()
	said, early := "", time.Now().Add(time.Minute)
	for {
		problem := ""
		recorder := d.openRecorder()
		if errors.Is(recorder, flight.ErrLocked) {
			recorder = nil // takeOver waits for it
		}
		if err := errors.Join(d.findKubelet(ctx), d.connect(ctx, parts), recorder); err != nil {
			problem = err.Error()
		}
		if problem != said && problem != "" && ctx.Err() == nil {
			d.log.Warn("not all that decisions need is there", zap.String("problem", problem))
		}
		said = problem
		rest := kubeletEvery
		if d.kubelet.Load() == nil && time.Now().Before(early) {
			rest = kubeletEarly
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(rest):
		case <-save.C:
			if err := d.save(false); err != nil {
				d.log.Warn("which images were seen and named is not written down", zap.Error(err))
			}
		}
	}
}

func (d *decisions) save(complete bool) error {
	mentions := d.names.Mentions()
	list := make([]seen.Mention, 0, len(mentions))
	for _, m := range mentions {
		list = append(list, seen.Mention{Name: m.Name, At: m.At})
	}
	return d.images.Save(list, complete)
}

// findKubelet reads what the kubelet runs with, if it is another one than before. One that does not use cleave's sockets is the node's
// as long as there is no other.
func (d *decisions) findKubelet(ctx context.Context) error {
	reader := kubelet.Reader{}
	old := d.kubelet.Load()
	alive := old != nil && runs(old)
	if alive && reader.Uses(*old, d.endpoints()) {
		return nil
	}
	s, err := reader.Find(ctx, kubelet.Choice{Endpoints: d.endpoints()})
	if errors.Is(err, kubelet.ErrNotRunning) && old != nil || err != nil && alive {
		return nil // it is being restarted, or which one is meant can't be told: what it had holds
	}
	if err != nil {
		return fmt.Errorf("find the kubelet: %w", err)
	}
	d.kubelet.Store(&s)
	return nil
}

// openRecorder opens it if it is not open. The error wraps flight.ErrLocked while another process has it.
func (d *decisions) openRecorder() error {
	d.opening.Lock()
	defer d.opening.Unlock()
	if d.recorder.Load() != nil {
		return nil
	}
	r, err := flight.Open(filepath.Join(d.cfg.StateDir, flight.FileName), flight.SizeBytes)
	if err != nil {
		return fmt.Errorf("record decisions: %w", err)
	}
	if note := r.Note(); note != "" {
		d.log.Warn("earlier records are lost", zap.String("reason", note))
	}
	d.recorder.Store(r)
	return nil
}

func (d *decisions) record(r record.Record, acted bool) {
	for _, e := range newsOf(r, !d.reportsOnly()) {
		d.tell(e)
	}
	if recorder := d.recorder.Load(); recorder != nil {
		recorder.Append(r, acted)
	}
}

// tell tells the cluster, if it is known and wants to hear.
func (d *decisions) tell(e report.Event) {
	if c := d.cluster.Load(); c != nil {
		c.teller.tell(e)
	}
}

// free asks the kernel about the filesystem of a role, now.
func (d *decisions) free(role fsstats.Role) (fsstats.Filesystem, error) {
	p := d.observer.newest.Load()
	place, ok := p.layout.Get(role)
	if !ok || place.Missing {
		return fsstats.Filesystem{}, fmt.Errorf("where %s is is not known", role)
	}
	for _, s := range p.stuck {
		if s.Role == role {
			return fsstats.Filesystem{}, fmt.Errorf("%s does not answer: %w", role, s.Problem)
		}
	}
	f, err := d.observer.filesystems.FilesystemOf(place.Path)
	if err == nil && f.Device != place.Filesystem.Device {
		err = fmt.Errorf("%s is another filesystem now", place.Path)
	}
	return f, err
}

// look is what the keeper decides by.
func (d *decisions) look(context.Context) (engine.Input, error) {
	p := d.observer.newest.Load()
	in := engine.Input{Now: time.Now(), Layout: decide.Detected(p.layout), Summary: &engine.Summary{}}
	if in.Layout == nil {
		return in, errors.New("it is not known how filesystems are shared")
	}
	used := map[fsstats.Role]uint64{}
	for role, to := range map[fsstats.Role]**engine.FSStats{
		fsstats.NodeFS: &in.Summary.NodeFS, fsstats.ImageFS: &in.Summary.ImageFS, fsstats.ContainerFS: &in.Summary.ContainerFS,
	} {
		f, err := d.free(role)
		if err != nil {
			return in, err
		}
		*to = decide.Filesystem(f)
		used[role] = f.UsedBytes
	}
	if in.Now.Sub(p.readAt) > podsMaxAge {
		return in, nil // what pods had then says nothing about who has it now: nobody is ranked, images may go
	}
	for _, pod := range p.held {
		in.Summary.Pods = append(in.Summary.Pods, decide.PodStats(pod))
	}
	for signal, role := range rolesOfSignals() {
		place, _ := p.layout.Get(role)
		if account, ok := p.accounts[place.Filesystem.Device]; ok {
			in.Unattributed = append(in.Unattributed, engine.Unattributed{Signal: signal, Bytes: nobodys(used[role], account)})
		}
	}
	var left []string
	in.Pods, left = d.pods(in.Now)
	d.left.Store(&left)
	return in, nil
}

// nobodys is how much of what is used now nobody is known to have. The account is a little older: what was written since, and what has no
// figure yet, is nobody's until it is measured, so that no pod goes for bytes of which it is not known whose they are.
func nobodys(usedBytes uint64, a Account) int64 {
	return max(signed(usedBytes)-signed(a.OwnedBytes), 0)
}

// pods are those that may be ranked; left are the others, and why.
func (d *decisions) pods(now time.Time) (pods []engine.Pod, left []string) {
	c := d.cluster.Load()
	if c == nil && d.cfg.Reclaim.EvictBy == config.EvictStandalone {
		w := d.observer.surveyed.Load().workloads
		return decide.Sandboxes(ephemeral.Current(w.sandboxes), w.containers), nil
	}
	return decide.Pods(c.view(), now, podsMaxAge)
}

func rolesOfSignals() map[engine.Signal]fsstats.Role {
	return map[engine.Signal]fsstats.Role{
		engine.NodeFSAvailable: fsstats.NodeFS, engine.ImageFSAvailable: fsstats.ImageFS, engine.ContainerFSAvailable: fsstats.ContainerFS,
	}
}

// roleOf is the filesystem that a signal is about.
func roleOf(s engine.Signal) fsstats.Role {
	switch s {
	case engine.ImageFSAvailable, engine.ImageFSInodesFree:
		return fsstats.ImageFS
	case engine.ContainerFSAvailable, engine.ContainerFSInodesFree:
		return fsstats.ContainerFS
	default:
		return fsstats.NodeFS
	}
}

func (d *decisions) glance(context.Context) (engine.Observations, error) {
	s := &engine.Summary{}
	for role, to := range map[fsstats.Role]**engine.FSStats{fsstats.NodeFS: &s.NodeFS, fsstats.ImageFS: &s.ImageFS, fsstats.ContainerFS: &s.ContainerFS} {
		f, err := d.free(role)
		if err != nil {
			return nil, err
		}
		*to = decide.Filesystem(f)
	}
	return s.Observe(), nil
}

func (d *decisions) config(in engine.Input) (keeper.Setup, error) {
	s := d.kubelet.Load()
	if s == nil {
		return keeper.Setup{}, errors.New("the kubelet's thresholds are not known: no kubelet was found")
	}
	theirs, err := decide.Thresholds(*s, in.Layout.Layout())
	if err != nil {
		return keeper.Setup{}, err
	}
	ours, overlaps, missing := decide.Beside(theirs, *in.Layout, in.Summary.Observe())
	return keeper.Setup{Config: decide.Config(*s, ours), Overlaps: overlaps, Missing: missing}, nil
}

// Pods implements [reclaim.PodFates].
func (d *decisions) Pods(context.Context) (garbage.Pods, error) {
	c := d.cluster.Load()
	if c == nil {
		return decide.Fates(kube.View{}, false), nil
	}
	view := c.view()
	return decide.Fates(view, decide.Complete(view, c.static.Pods().Static, time.Now(), podsMaxAge)), nil
}

// runs says whether the kubelet is the process that s was read from.
func runs(s *kubelet.Settings) bool {
	ticks, err := kubelet.Reader{}.Started(s.PID)
	return err == nil && ticks == s.StartTicks
}

// endpoints are cleave's sockets.
func (d *decisions) endpoints() []string {
	return []string{d.cfg.Listen.Endpoint.Path(), crioEndpoint}
}

// shared says whether two roles are on one filesystem.
func (d *decisions) shared(a, b fsstats.Role) bool {
	layout := d.observer.newest.Load().layout
	at, okA := layout.Get(a)
	with, okB := layout.Get(b)
	return okA && okB && !at.Missing && !with.Missing && at.Filesystem.Device == with.Filesystem.Device
}

// Evict implements [keeper.Evictor].
func (d *decisions) Evict(ctx context.Context, e engine.Eviction, hard bool) (gainedBytes *int64, _ error) {
	d.keepLogs(ctx, e)
	if d.cfg.Reclaim.EvictBy == config.EvictStandalone {
		return nil, d.standalone.Evict(ctx, e, hard)
	}
	c, s := d.cluster.Load(), d.kubelet.Load()
	if c == nil || s == nil {
		return nil, errors.New("evict a pod: the API server is not known")
	}
	if !runs(s) {
		// The API server would mark one pod after the other, and none would end.
		return nil, fmt.Errorf("evict %s/%s: the kubelet (process %d) does not run, and nobody else ends a pod", e.Namespace, e.Name, s.PID)
	}
	known, ok := c.view().Pod(e.UID, e.Namespace, e.Name)
	if !ok {
		return nil, fmt.Errorf("evict %s/%s: the API server knows no pod with UID %s", e.Namespace, e.Name, e.UID)
	}
	ref := report.PodRef{Namespace: e.Namespace, Name: e.Name, UID: e.UID}
	d.tell(report.Event{Reason: report.Evicting, Warning: true, Pod: &ref, Note: evictionNote(e, hard)})
	evictor := evict.New(c.client, evict.Options{Bytes: d.bytesBack(engine.Signal(e.Cause))})
	outcome, err := evictor.Evict(ctx, evict.Order{Pod: *known.Pod, Hard: hard, MaxGraceSeconds: s.EvictionMaxPodGraceSeconds.Value})
	if errors.Is(err, evict.ErrBudget) {
		d.tell(report.Event{Reason: report.EvictionRefused, Warning: true, Pod: &ref, Note: err.Error()})
	}
	if err == nil {
		d.log.Info("a pod was evicted and is gone", zap.String("pod", e.Namespace+"/"+e.Name), zap.Any("outcome", outcome))
	}
	if errors.Is(err, evict.ErrNotThis) {
		err = fmt.Errorf("%w: %w", keeper.ErrGone, err)
	}
	if r := outcome.Released; r != nil && r.Measured {
		gained := int64(min(r.Bytes, 1<<62)) //nolint:gosec // bounded
		gainedBytes = &gained
	}
	return gainedBytes, err
}

// bytesBack waits for the bytes of a pod that goes for a signal, nil if nothing is known of its filesystem now.
func (d *decisions) bytesBack(signal engine.Signal) evict.Bytes {
	before, err := d.free(roleOf(signal))
	if err != nil {
		return nil
	}
	return bytesBack{runtime: d.standalone.Runtime, before: before.AvailableBytes, available: func() (uint64, error) {
		f, err := d.free(roleOf(signal))
		return f.AvailableBytes, err
	}}
}

// bytesOf is what containers and sandboxes have on the filesystem of a signal, by id.
func (d *decisions) bytesOf(s engine.Signal) map[string]int64 {
	place, ok := d.observer.newest.Load().layout.Get(roleOf(s))
	out := map[string]int64{}
	if !ok {
		return out
	}
	fs := fsOf(place.Filesystem)
	for _, o := range d.observer.index.View().Owners {
		if o.Kind != owners.Container && o.Kind != owners.Sandbox {
			continue
		}
		if part, ok := o.Part(owners.Layer); ok && part.Figure != nil && part.FS == fs {
			out[o.ID] = part.Figure.Bytes
		}
	}
	return out
}

// signalSpace is the filesystem of the signal that a plan is carried out for. They are carried out one after the other.
type signalSpace struct {
	free func(fsstats.Role) (fsstats.Filesystem, error)
	role atomic.Pointer[fsstats.Role]
}

var _ reclaim.Space = (*signalSpace)(nil)

func (s *signalSpace) of(signal engine.Signal) { role := roleOf(signal); s.role.Store(&role) }

// AvailableBytes implements [reclaim.Space].
func (s *signalSpace) AvailableBytes(context.Context) (int64, error) {
	role := s.role.Load()
	if role == nil {
		return 0, errors.New("it is not known which filesystem is meant")
	}
	f, err := s.free(*role)
	return int64(min(f.AvailableBytes, 1<<62)), err //nolint:gosec // bounded
}
