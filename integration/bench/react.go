package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/events"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/enclave"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
	"github.com/cleave-cri/cleave/lab/runtime"
)

// The node that is attacked: images and writable layers on one disk, the
// kubelet's folder on another (layout dedicated).
const (
	reactDisk      = "images"
	reactDiskBytes = 8 << 30
	reactThreshold = "10%"
	// reactImages are unused, each with a few large files.
	reactImages     = 8
	reactFiles      = 2
	reactImageBytes = 512 << 20
	// reactNeed is how many of them have to go, reactSpareBytes how much is to be
	// left then: more than the margin by which cleave frees more, so that nobody
	// is right to delete one more.
	reactNeed       = 4
	reactSpareBytes = reactImageBytes / 10 * 7
	// reactChunk is what the attacker writes to one file.
	reactChunk = 64 << 20
	// reactRounds is how often each is attacked.
	reactRounds = 3

	// reactRest is how long nothing must have been deleted until a round is over:
	// longer than the kubelet's 10 s between two looks.
	reactRest = 13 * time.Second
	// reactLimit bounds a round.
	reactLimit = 4 * time.Minute
	// blindLimit bounds the wait until cleave would delete images: it has to have
	// seen the calls of two minutes.
	blindLimit = 4 * time.Minute
)

// The innocent writer writes a file of innocentFileBytes over and over again,
// like a log that is rotated.
const (
	innocentBlockBytes = 16 << 10
	innocentFileBytes  = 4 << 20
	innocentEvery      = 5 * time.Millisecond
)

// reaction is what one round came to.
//
// The line is what the one who is measured wants to be available: the kubelet its
// threshold, cleave its own, which lies above it. The line is crossed at the moment
// when the disk would have been below it if nothing had been deleted: what others
// took since the attack began is more than there was above the line. So a deletion
// that was foreseen has a time below 0, and a disk that never fell below the line
// was relieved after none.
//
// A deletion is beyond need (excess) if the disk would have stayed above the line without
// it, and without those after it that were beyond need, until the attack had ended:
// what the attack wrote after a deletion counts as needed. Those are the last ones;
// excessByUs of them may be cleave's.
type reaction struct {
	crossed               time.Time
	firstAction, relieved time.Duration
	deletions             []deletion
	excess, excessByUs    int
	// least is the least that was available, in bytes.
	least           int64
	enospc, written int
}

// deletion is an image that went, when, what was available just before, and who
// says that it deleted it.
type deletion struct {
	image     int
	after     time.Duration // since the line was crossed
	available int64
	by        string
	// decided is what cleave decided, and when: after the line was crossed.
	decided string
}

// deleted counts the images that somebody deleted.
func (r reaction) deleted(by string) (n int) {
	for _, d := range r.deletions {
		if d.by == by {
			n++
		}
	}
	return n
}

// apartForReact puts this program where a kubelet can run, with all that is
// fetched and built outside.
func apartForReact() (inside bool, status int, _ error) {
	return enclave.Apart(func() error {
		_, err := reactPeers(context.Background()) //nolint:forbidigo // called by main
		return err
	})
}

// peers are the paths of what a node is made of.
type peers struct{ containerd, shim, kubelet string }

func reactPeers(ctx context.Context) (peers, error) {
	paths, err := bin.Get(ctx, os.Stderr, "containerd", "shim", "kubelet")
	if err != nil {
		return peers{}, err
	}
	return peers{paths[0], paths[1], paths[2]}, nil
}

// benchReact fills a disk as fast as the machine writes, once with the kubelet
// on containerd itself and once with cleave in between, and measures who does
// what when.
func benchReact(ctx context.Context, cleave string, scale float64, only []string) error {
	cleave, err := filepath.Abs(cleave)
	if err != nil {
		return err
	}
	rounds := max(int(reactRounds*scale), 1)
	fmt.Fprintf(os.Stderr, "bench-react: %d attacks on the kubelet alone and %d with cleave, some 10 minutes; it writes up to %d GiB at a time\n", rounds, rounds, reactDiskBytes>>30)
	images, err := reactImagesOf()
	if err != nil {
		return err
	}
	for _, side := range []string{"kubelet", "cleave"} {
		if !slices.Contains(only, side) {
			continue
		}
		all, err := reactSide(ctx, side, cleave, images, rounds)
		if err != nil {
			return fmt.Errorf("%s: %w", side, err)
		}
		reportReactions(side, all)
	}
	return nil
}

// reportReactions prints the slowest round's times, and the sums of what should
// not have been.
func reportReactions(side string, all []reaction) {
	name := "react."
	if side != "cleave" {
		name += side + "."
	}
	var worst reaction
	for i, r := range all {
		fmt.Fprintf(os.Stderr, "bench-react: %s, attack %d: first deletion %d ms after the threshold was crossed, relieved after %d ms, %d MiB were the least, %d images deleted by cleave, %d by the kubelet and %d by both, %d beyond need, the innocent writer had %d ENOSPC in %d writes\n",
			side, i+1, r.firstAction.Milliseconds(), r.relieved.Milliseconds(), r.least>>20, r.deleted(byCleave), r.deleted(byKubelet), r.deleted(byBoth), r.excess, r.enospc, r.written)
		for _, d := range r.deletions {
			fmt.Fprintf(os.Stderr, "bench-react:   after %6d ms, with %5d MiB available, %s deleted image %d%s\n", d.after.Milliseconds(), d.available>>20, d.by, d.image, d.decided)
		}
		if i == 0 || r.firstAction > worst.firstAction {
			worst.firstAction = r.firstAction
		}
		worst.relieved = max(worst.relieved, r.relieved)
		worst.excess += r.excess
		worst.excessByUs += r.excessByUs
		worst.enospc += r.enospc
	}
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	report(name+"first_action_ms", ms(worst.firstAction), "ms")
	report(name+"relieved_ms", ms(worst.relieved), "ms")
	report(name+"excess_deletions", float64(worst.excess), "images")
	if side == "cleave" {
		report(name+"excess_by_cleave", float64(worst.excessByUs), "images")
	}
	report(name+"innocent_enospc", float64(worst.enospc), "errors")
}

// target is a node that is attacked.
type target struct {
	side    string
	node    *node.Node
	kubelet *kube.Kubelet
	client  *pod.Client
	images  []v1.Image
	// ctl is the folder by which the attacker is told, line what has to be
	// available on the disk.
	ctl  string
	line int64
}

func reactSide(ctx context.Context, side, cleave string, images []v1.Image, rounds int) (_ []reaction, err error) {
	paths, err := reactPeers(ctx)
	if err != nil {
		return nil, err
	}
	run, err := janitor.Start(ctx, janitor.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, run.Close(context.WithoutCancel(ctx))) }()
	t := &target{side: side, images: images, ctl: filepath.Join(run.Dir(), "ctl")}
	if err := os.Mkdir(t.ctl, 0o755); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.stop(context.WithoutCancel(ctx))) }()
	if err := t.start(ctx, run, paths, cleave); err != nil {
		return nil, errors.Join(err, t.logs())
	}
	var all []reaction
	for range rounds {
		r, err := t.round(ctx)
		if err != nil {
			return nil, errors.Join(err, t.logs())
		}
		all = append(all, r)
	}
	return all, nil
}

// start starts everything but the attack.
func (t *target) start(ctx context.Context, run *janitor.Run, paths peers, cleave string) (err error) {
	o := node.Options{
		Containerd: paths.containerd, Shim: paths.shim,
		// Nothing is kept for root: else root would write on where others can't.
		Disks: []disk.Spec{{Name: reactDisk, SizeBytes: reactDiskBytes, MkfsArgs: []string{"-m", "0"}}},
		Runtime: func(r *runtime.Options, disks map[string]*disk.Disk) {
			r.Root = filepath.Join(disks[reactDisk].Path(), "containerd")
		},
	}
	if t.side == "cleave" {
		o.Cleave = cleave
		o.Configure = func(cfg *config.Config, _ map[string]*disk.Disk) {
			cfg.Measure = config.Default().Measure
			cfg.Filesystems.NodeFS, cfg.Filesystems.Logs = filepath.Join(run.Dir(), "kubelet", "root"), filepath.Join(run.Dir(), "kubelet", "pods")
			cfg.Reclaim.Enabled = true
		}
		for _, dir := range []string{"root", "pods"} {
			if err := os.MkdirAll(filepath.Join(run.Dir(), "kubelet", dir), 0o755); err != nil {
				return err
			}
		}
	}
	if t.node, err = node.Start(ctx, run, o); err != nil {
		return err
	}
	if t.client, err = pod.Dial(t.node.Runtime.Endpoint()); err != nil {
		return err
	}
	endpoint := t.node.Runtime.Endpoint()
	if t.node.Cleave != nil {
		endpoint = t.node.Cleave.Endpoint()
	}
	if t.kubelet, err = kube.NewKubelet(nil, kube.KubeletOptions{
		Binary: paths.kubelet, Dir: filepath.Join(run.Dir(), "kubelet"), Env: run.Env(), Endpoint: endpoint, Containerd: t.node.Runtime.Socket(), Cgroup: run.Cgroup(),
		Settings: map[string]any{
			"evictionHard": map[string]string{"imagefs.available": reactThreshold}, "imageMinimumGCAge": "1ms",
			"imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99, // only pressure removes images
		},
	}); err != nil {
		return err
	}
	if t.line, err = t.threshold(); err != nil {
		return err
	}
	for i, image := range t.images {
		if _, err := t.node.Registry.Push(ctx, reactRef(i), image); err != nil {
			return err
		}
	}
	if err := t.writeAttacker(); err != nil || t.node.Cleave == nil {
		return err
	}
	// Without its own kubelet cleave may have found another one on this machine.
	if err := t.kubelet.Start(ctx); err != nil {
		return err
	}
	return errors.Join(t.node.Cleave.Stop(ctx), t.node.Cleave.Start(ctx))
}

// stop ends what start began.
func (t *target) stop(ctx context.Context) error {
	var errs []error
	if t.kubelet != nil {
		errs = append(errs, t.kubelet.Stop(ctx))
	}
	if t.client != nil {
		errs = append(errs, t.client.Close())
	}
	if t.node != nil {
		errs = append(errs, t.node.Close(ctx))
	}
	return errors.Join(errs...)
}

// logs are the ends of the programs' logs, for whoever looks for what went wrong.
func (t *target) logs() error {
	var text strings.Builder
	if t.kubelet != nil {
		fmt.Fprintf(&text, "kubelet's log:\n%s\n", t.kubelet.LogTail())
	}
	if t.node != nil && t.node.Cleave != nil {
		fmt.Fprintf(&text, "cleave's log:\n%s\n", t.node.Cleave.LogTail(40))
	}
	return errors.New(text.String())
}

// disk is where the disk is mounted.
func (t *target) disk() string { return t.node.Disks[reactDisk].Path() }

// threshold is what the one who is measured wants to be available: the kubelet
// its own, cleave a margin more.
func (t *target) threshold() (int64, error) {
	list, err := engine.Parse(engine.Settings{Hard: map[string]string{string(engine.ImageFSAvailable): reactThreshold}})
	if err != nil {
		return 0, err
	}
	capacity, available, err := space(t.disk())
	if err != nil {
		return 0, err
	}
	if t.side == "cleave" {
		var missing []engine.Signal
		list, missing = engine.DefaultMargin().Above(list, engine.Dedicated, engine.Observations{engine.ImageFSAvailable: {Available: available, Capacity: capacity}})
		if len(missing) > 0 {
			return 0, fmt.Errorf("no threshold for %v", missing)
		}
	}
	line := list[0].Value.Of(capacity)
	return line.Value(), nil
}

// space asks the kernel about a filesystem.
func space(path string) (capacity, available int64, _ error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(path, &st); err != nil {
		return 0, 0, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize, nil //nolint:gosec // of a disk of some GiB
}

// repository is an image's, reactRef its name.
func repository(i int) string { return fmt.Sprintf("registry.example/bench/react-%d", i) }
func reactRef(i int) string   { return repository(i) + ":1" }

// reactImagesOf builds the images. Compressed they are small, so that a node's
// disk has nothing of them but the files.
func reactImagesOf() ([]v1.Image, error) {
	images := make([]v1.Image, reactImages)
	for i := range images {
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return zeros(i), nil }, tarball.WithCompressedCaching, tarball.WithCompressionLevel(1))
		if err != nil {
			return nil, err
		}
		if images[i], err = mutate.AppendLayers(empty.Image, layer); err != nil {
			return nil, err
		}
	}
	return images, nil
}

// zeros is the tar file of an image with a few large files.
func zeros(image int) io.ReadCloser {
	r, w := io.Pipe()
	go func() { // ends with the file, or when its reader is closed
		out := tar.NewWriter(w)
		block := make([]byte, 1<<20)
		var err error
		for f := 0; f < reactFiles && err == nil; f++ {
			err = out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("image-%d/file-%d", image, f), Mode: 0o644, Size: reactImageBytes / reactFiles})
			for n := 0; n < reactImageBytes/reactFiles && err == nil; n += len(block) {
				_, err = out.Write(block)
			}
		}
		_ = w.CloseWithError(errors.Join(err, out.Close()))
	}()
	return r
}

// writeAttacker writes the file of a static pod that writes into its own layer,
// as many chunks as the file go says, and does not give up when the disk is full.
func (t *target) writeAttacker() error {
	script := fmt.Sprintf(`while :; do
  until [ -e /ctl/go ]; do usleep 2000; done
  n=$(cat /ctl/go); i=0
  while [ $i -lt $n ]; do
    if dd if=/dev/zero of=/fill.$i bs=1M count=%d 2>/dev/null; then i=$((i+1)); else usleep 5000; fi
  done
  touch /ctl/done
  while [ -e /ctl/go ]; do usleep 20000; done
  rm -f /fill.*; rm /ctl/done
done`, reactChunk>>20)
	text, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": "attacker"},
		"spec": map[string]any{
			"hostNetwork": true, "terminationGracePeriodSeconds": 1,
			"containers": []any{map[string]any{
				"name": "main", "image": node.BusyboxImage, "imagePullPolicy": "IfNotPresent", "command": []string{"sh", "-c", script},
				"volumeMounts": []any{map[string]any{"name": "ctl", "mountPath": "/ctl"}},
			}},
			"volumes": []any{map[string]any{"name": "ctl", "hostPath": map[string]any{"path": t.ctl}}},
		},
	})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(t.kubelet.Manifests(), "attacker.json"), text, 0o600)
}

// round pulls what is missing, attacks, and waits until all is calm again.
func (t *target) round(ctx context.Context) (_ reaction, err error) {
	ctx, cancel := context.WithTimeout(ctx, reactLimit+blindLimit)
	defer cancel()
	for i := range t.images {
		if _, err := t.client.Pull(ctx, reactRef(i)); err != nil {
			return reaction{}, err
		}
	}
	// The kubelet removes only images that it has seen before, and looks for them
	// when it starts and then every five minutes.
	if err := errors.Join(t.kubelet.Stop(ctx), t.kubelet.Start(ctx)); err != nil {
		return reaction{}, err
	}
	if err := t.ready(ctx); err != nil {
		return reaction{}, err
	}
	syscall.Sync()
	// The kubelet's first look at the disks has been; whatever starts up has.
	if err := rest(ctx, 12*time.Second); err != nil {
		return reaction{}, err
	}
	_, available, err := space(t.disk())
	if err != nil {
		return reaction{}, err
	}
	kubeletLine, err := (&target{side: "kubelet", node: t.node}).threshold()
	if err != nil {
		return reaction{}, err
	}
	chunks := (available - kubeletLine + reactNeed*reactImageBytes - reactSpareBytes) / reactChunk

	began := time.Now()
	watch, err := t.watch(ctx)
	if err != nil {
		return reaction{}, err
	}
	if err := t.tell("go", fmt.Sprint(chunks)); err != nil {
		return reaction{}, errors.Join(err, watch.stop())
	}
	err = watch.calm(ctx, t)
	err = errors.Join(err, watch.stop())
	if err != nil {
		return reaction{}, err
	}
	r, err := watch.judge(t)
	if err != nil {
		return reaction{}, err
	}
	if err := t.who(r.deletions, began, r.crossed); err != nil {
		return reaction{}, err
	}
	for _, d := range r.deletions[len(r.deletions)-r.excess:] {
		if d.by != byKubelet {
			r.excessByUs++
		}
	}
	// The attacker takes everything back.
	if err := os.Remove(filepath.Join(t.ctl, "go")); err != nil {
		return reaction{}, err
	}
	return r, untilTrue(ctx, "the attacker takes its files back", func(context.Context) error {
		if _, err := os.Stat(filepath.Join(t.ctl, "done")); !errors.Is(err, os.ErrNotExist) {
			return errors.New("it has not")
		}
		return nil
	})
}

// Who deleted an image.
const (
	byCleave  = "cleave"
	byKubelet = "the kubelet"
	byBoth    = "cleave or the kubelet"
)

// who finds out who deleted images since a moment: what cleave deleted stands in
// its flight recorder, and what the kubelet asked to be removed in its log.
func (t *target) who(list []deletion, since, crossed time.Time) error {
	ids := map[string]record.Record{}
	if err := t.recorded(since, ids); err != nil {
		return err
	}
	text, err := os.ReadFile(t.kubelet.LogFile())
	if err != nil {
		return err
	}
	for i := range list {
		id, err := t.images[list[i].image].ConfigName()
		if err != nil {
			return err
		}
		r, ours := ids[id.String()]
		theirs := t.askedByKubelet(text, id.String(), since)
		if ours {
			list[i].decided = fmt.Sprintf(", %s, decided after %d ms", r.Decision.Outcome, r.Input.Now.Sub(crossed).Milliseconds())
		}
		switch {
		case ours && theirs:
			list[i].by = byBoth
		case ours:
			list[i].by = byCleave
		case theirs:
			list[i].by = byKubelet
		default:
			list[i].by = "somebody"
		}
	}
	return nil
}

// recorded adds the images that cleave's records say it deleted since a moment.
func (t *target) recorded(since time.Time, ids map[string]record.Record) (err error) {
	if t.node.Cleave == nil {
		return nil
	}
	f, err := os.Open(filepath.Join(t.node.Cleave.Config().StateDir, flight.FileName))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	lines, err := flight.Lines(f, flight.SizeBytes)
	if err != nil {
		return err
	}
	for reader := record.NewReader(lines); ; {
		r, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read cleave's records: %w", err)
		}
		if r.Input.Now.Before(since) {
			continue
		}
		for _, step := range r.Steps {
			for _, item := range step.Items {
				if item.ActualBytes != nil {
					ids[item.ID] = r
				}
			}
		}
	}
}

// askedByKubelet says whether the kubelet's log tells of the removal of an image
// since a moment.
func (t *target) askedByKubelet(log []byte, id string, since time.Time) bool {
	for line := range bytes.Lines(log) {
		if !bytes.Contains(line, []byte("Removing image to free bytes")) || !bytes.Contains(line, []byte(id)) {
			continue
		}
		// klog's head: "I1130 19:57:07.123456".
		if len(line) < 21 {
			continue
		}
		at, err := time.ParseInLocation("20060102 15:04:05.000000", strconv.Itoa(since.Year())+string(line[1:21]), time.Local)
		if err == nil && !at.Before(since) {
			return true
		}
	}
	return false
}

// tell writes a file for the attacker, whole or not at all.
func (t *target) tell(name, text string) error {
	path := filepath.Join(t.ctl, name)
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// ready waits until the attacker runs, and until cleave would delete all images
// if it had to.
func (t *target) ready(ctx context.Context) error {
	if err := untilTrue(ctx, "the attacker runs", func(ctx context.Context) error {
		answer, err := t.client.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
		if err != nil {
			return err
		}
		for _, c := range answer.GetContainers() {
			if c.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING {
				return nil
			}
		}
		return errors.New("no container runs")
	}); err != nil || t.node.Cleave == nil {
		return err
	}
	return untilTrue(ctx, "cleave would delete the images", func(ctx context.Context) error {
		plan, err := agent.FetchPlan(ctx, t.node.Cleave.Config().Control.Endpoint.Path())
		if err != nil {
			return err
		}
		for _, p := range plan {
			if p.Signal != engine.ImageFSAvailable {
				continue
			}
			items := 0
			for _, s := range p.Steps {
				if s.Kind == engine.UnusedImages {
					items = len(s.Items)
				}
			}
			if items != len(t.images) {
				return fmt.Errorf("it would delete %d: %s", items, p.Problem)
			}
			return nil
		}
		return errors.New("it has no plan for the disk")
	})
}

// watcher sees what happens in a round.
type watcher struct {
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu sync.Mutex
	// samples are what was available, whenever that changed; guarded by mu.
	samples []sample
	// gone are the names of images that went; guarded by mu.
	gone []goneName
	// enospc of written writes of the innocent failed; guarded by mu.
	enospc, written int
	// errs are what went wrong; guarded by mu.
	errs []error
}

type sample struct {
	at        time.Time
	available int64
}

type goneName struct {
	at   time.Time
	name string
}

// watch begins: it follows containerd's events, looks at the disk each
// millisecond, and writes as the innocent does.
func (t *target) watch(ctx context.Context) (*watcher, error) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := eventsapi.NewEventsClient(t.client.Conn()).Subscribe(ctx, &eventsapi.SubscribeRequest{Filters: []string{`topic=="/images/delete"`}})
	if err != nil {
		cancel()
		return nil, fmt.Errorf("follow containerd's events: %w", err)
	}
	w := &watcher{cancel: cancel}
	w.running.Go(func() {
		for {
			event, err := stream.Recv()
			if err != nil {
				w.fail(ctx, err)
				return
			}
			var deleted events.ImageDelete
			if body := event.GetEvent(); body == nil || proto.Unmarshal(body.GetValue(), &deleted) != nil {
				w.fail(ctx, errors.New("an event of containerd can't be read"))
				return
			}
			w.mu.Lock()
			w.gone = append(w.gone, goneName{event.GetTimestamp().AsTime(), deleted.GetName()})
			w.mu.Unlock()
		}
	})
	w.running.Go(func() {
		w.fail(ctx, every(ctx, time.Millisecond, func() error {
			_, available, err := space(t.disk())
			w.mu.Lock()
			defer w.mu.Unlock()
			if n := len(w.samples); err == nil && (n == 0 || w.samples[n-1].available != available) {
				w.samples = append(w.samples, sample{time.Now(), available})
			}
			return err
		}))
	})
	w.running.Go(func() { w.fail(ctx, w.write(ctx, filepath.Join(t.disk(), "innocent"))) })
	return w, nil
}

// write is the innocent writer.
func (w *watcher) write(ctx context.Context, path string) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(path)) }()
	block := bytes.Repeat([]byte{'x'}, innocentBlockBytes)
	var at int64
	return every(ctx, innocentEvery, func() error {
		if at >= innocentFileBytes {
			if err := f.Truncate(0); err != nil {
				return err
			}
			at = 0
		}
		n, err := f.WriteAt(block, at)
		at += int64(n)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.written++
		if errors.Is(err, syscall.ENOSPC) {
			w.enospc++
			return nil
		}
		return err
	})
}

func (w *watcher) fail(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.errs = append(w.errs, err)
}

func (w *watcher) stop() error {
	w.cancel()
	w.running.Wait()
	return errors.Join(w.errs...)
}

// calm waits until the attacker has written everything, the disk has enough
// room, and nobody has deleted anything for a while.
func (w *watcher) calm(ctx context.Context, t *target) error {
	return untilTrue(ctx, "all is calm again", func(context.Context) error {
		_, available, err := space(t.disk())
		if err != nil {
			return err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(w.errs) > 0 {
			return nil
		}
		_, err = os.Stat(filepath.Join(t.ctl, "done"))
		switch {
		case err != nil:
			return fmt.Errorf("the attacker is at work, %d MiB are available, %d names of images went", available>>20, len(w.gone))
		case available < t.line:
			return fmt.Errorf("%d MiB are available, %d are wanted, %d names of images went", available>>20, t.line>>20, len(w.gone))
		case len(w.gone) > 0 && time.Since(w.gone[len(w.gone)-1].at) < reactRest || time.Since(w.samples[0].at) < reactRest:
			return errors.New("it was not calm for long enough")
		}
		return nil
	})
}

// judge says what a round came to.
func (w *watcher) judge(t *target) (r reaction, _ error) {
	_, available, err := space(t.disk())
	if err != nil {
		return r, err
	}
	r.enospc, r.written = w.enospc, w.written
	first, least := w.samples[0], w.samples[0].available
	taken, crossed := int64(0), time.Time{}
	for i, s := range w.samples {
		least = min(least, s.available)
		if i > 0 {
			taken += max(0, w.samples[i-1].available-s.available)
		}
		if crossed.IsZero() && first.available-taken < t.line {
			crossed = s.at
		}
	}
	r.least, r.crossed = least, crossed
	if len(w.gone) == 0 || crossed.IsZero() {
		return r, fmt.Errorf("the attack was no danger, or nothing was deleted: it took %d MiB of %d, %d names of images went, %d MiB are available",
			taken>>20, first.available>>20, len(w.gone), available>>20)
	}
	for i, s := range w.samples {
		if s.available < t.line && i+1 < len(w.samples) {
			r.relieved = w.samples[i+1].at.Sub(crossed)
		}
	}
	for i := range t.images {
		at := slices.IndexFunc(w.gone, func(g goneName) bool { return strings.HasPrefix(g.name, repository(i)) })
		if at < 0 {
			continue
		}
		d := deletion{image: i, after: w.gone[at].at.Sub(crossed)}
		for _, s := range w.samples {
			if s.at.Before(w.gone[at].at) {
				d.available = s.available
			}
		}
		r.deletions = append(r.deletions, d)
	}
	slices.SortFunc(r.deletions, func(a, b deletion) int { return cmp.Compare(a.after, b.after) })
	r.firstAction = r.deletions[0].after
	for range r.deletions {
		if available -= reactImageBytes; available >= t.line {
			r.excess++
		}
	}
	return r, nil
}

// every does something at a pace until ctx ends or it fails.
func every(ctx context.Context, pace time.Duration, do func() error) error {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for {
		if err := do(); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// rest lets time go by.
func rest(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// untilTrue waits until try succeeds.
func untilTrue(ctx context.Context, what string, try func(context.Context) error) error {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, err)
		}
	}
}
