package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/agent/decide"
	"github.com/cleave-cri/cleave/agent/keeper"
	"github.com/cleave-cri/cleave/agent/stock"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/reclaim"
	"github.com/cleave-cri/cleave/snapshot/inventory"
)

var errNoKubelet = errors.New("the kubelet's settings are not known")

// errPastCleave: between ImageStatus and CreateContainer only the calls show that an image will be used (KSS-22).
var errPastCleave = errors.New("no image goes: the kubelet is being restarted or asks past cleave, so it is not known which images it is about to use")

// noPlan marks an error of a plan as one for which no pod goes: what it would have picked may be enough. So it is with images and dead
// containers, which the kubelet deletes by itself, too. Logs are deleted by nobody else: pods don't live on for a folder that can't be read.
func noPlan(err error) (record.Step, error) {
	return record.Step{}, fmt.Errorf("%w: %w", keeper.ErrUnknown, err)
}

// pictureMaxAge is how old a picture of the store may be that events have told of changes since, if it has all images: in each
// deletion all is looked at again.
const pictureMaxAge = 5 * time.Second

// settings are the kubelet's.
func (d *decisions) settings() (kubelet.Settings, error) {
	s := d.kubelet.Load()
	if s == nil {
		return kubelet.Settings{}, errNoKubelet
	}
	return *s, nil
}

// unknown marks errors that mean that the runtime does not answer, and not that something is other than planned.
func unknown(step record.Step, err error) (record.Step, error) {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return step, fmt.Errorf("%w: %w", keeper.ErrUnknown, err)
	default:
		return step, err
	}
}

// containerReclaimer reclaims dead containers and sandboxes.
type containerReclaimer struct {
	d *decisions
	x *reclaim.Containers
}

var _ keeper.Reclaimer = containerReclaimer{}

// Plan implements [keeper.Reclaimer].
func (r containerReclaimer) Plan(ctx context.Context, want keeper.Want) (record.Step, error) {
	s, err := r.d.settings()
	if err != nil {
		return noPlan(err)
	}
	choice, err := r.x.Choice(ctx, decide.Containers(s), r.d.bytesOf(want.Signal), want.Pressure)
	if err != nil {
		return noPlan(err)
	}
	return record.Step{Kind: engine.DeadContainers, Containers: &choice, Items: choice.Items()}, nil
}

// Run implements [keeper.Reclaimer].
func (r containerReclaimer) Run(ctx context.Context, want keeper.Want, step record.Step) (record.Step, error) {
	r.d.space.of(want.Signal)
	return unknown(r.x.Run(ctx, step))
}

// imageReclaimer reclaims unused images.
type imageReclaimer struct{ d *decisions }

var _ keeper.Reclaimer = imageReclaimer{}

// Plan implements [keeper.Reclaimer].
func (r imageReclaimer) Plan(ctx context.Context, want keeper.Want) (record.Step, error) {
	s, err := r.d.settings()
	if err != nil {
		return noPlan(err)
	}
	choice, err := r.d.imageChoice(ctx, s, roleOf(want.Signal), want.NeedBytes)
	if err != nil {
		return noPlan(err)
	}
	return record.Step{Kind: engine.UnusedImages, Images: &choice, Items: choice.Items()}, nil
}

// Run implements [keeper.Reclaimer].
func (r imageReclaimer) Run(ctx context.Context, want keeper.Want, step record.Step) (record.Step, error) {
	r.d.space.of(want.Signal)
	return unknown(r.d.removeImages(ctx, step))
}

// imageChoice reads what there is to pick from: layers and blobs as far as they are on the filesystem of a role.
func (d *decisions) imageChoice(ctx context.Context, s kubelet.Settings, role fsstats.Role, needBytes int64) (record.ImageChoice, error) {
	choice, err := d.allImages(ctx, s, role, needBytes)
	if (kubelet.Reader{}).Uses(s, d.endpoints()) {
		return choice, err
	}
	return leftToKubelet(choice, err, s)
}

// leftToKubelet is what may go where cleave must not delete images: none if there are none, else an error. Such images are the kubelet's to
// delete, which it does from its own threshold on, and no pod goes before: so that is not held up for ever.
func leftToKubelet(choice record.ImageChoice, err error, s kubelet.Settings) (record.ImageChoice, error) {
	if err == nil && len(choice.Items()) == 0 {
		return choice, nil
	}
	return record.ImageChoice{}, fmt.Errorf("%w: process %d had the runtime %q; set containerRuntimeEndpoint to cleave's socket, and no imageServiceEndpoint", errPastCleave, s.PID, s.RuntimeEndpoint.Value)
}

func (d *decisions) allImages(ctx context.Context, s kubelet.Settings, role fsstats.Role, needBytes int64) (record.ImageChoice, error) {
	place, ok := d.observer.newest.Load().layout.Get(role)
	if !ok || place.Missing {
		return record.ImageChoice{}, fmt.Errorf("where %s is is not known", role)
	}
	listing, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answer, err := d.removal.CRI.ListImages(listing, &runtimeapi.ListImagesRequest{})
	if err != nil {
		return record.ImageChoice{}, fmt.Errorf("list images: %w", err)
	}
	picture, err := d.stock.Picture(listing, pictureMaxAge, func(p *inventory.Picture) bool {
		return !slices.ContainsFunc(answer.GetImages(), func(i *runtimeapi.Image) bool {
			_, ok := p.Image(inventory.Key{Namespace: d.cfg.Runtime.Namespace, ID: i.GetId()})
			return !ok
		})
	})
	if err != nil {
		return record.ImageChoice{}, err
	}
	choices := stock.For(picture, d.cfg.Runtime.Namespace, place.Filesystem.Device.String())
	d.picked.Store(&choices.Layers)
	return d.removal.Choice(ctx, decide.Images(s), choices, needBytes)
}

// removeImages carries a step out and tells the cluster what came of it. What was a surprise is not in the last picture of the store.
func (d *decisions) removeImages(ctx context.Context, step record.Step) (record.Step, error) {
	step, err := d.removal.Run(ctx, step)
	if err != nil {
		d.stock.Forget(ctx)
	}
	if e := removedEvent(step); e != nil {
		d.tell(*e)
	}
	return step, err
}

// logReclaimer reclaims logs of pods that are gone, and rotated logs.
type logReclaimer struct {
	d *decisions
	x *reclaim.Logs
}

var _ keeper.Reclaimer = logReclaimer{}

// Plan implements [keeper.Reclaimer].
func (r logReclaimer) Plan(ctx context.Context, want keeper.Want) (record.Step, error) {
	if !r.d.shared(roleOf(want.Signal), fsstats.Logs) {
		return record.Step{Kind: engine.OldLogs}, nil // on a disk of their own they would go for nothing
	}
	choice, _, err := r.x.Choice(ctx, want.NeedBytes)
	if err != nil {
		return record.Step{}, err
	}
	return record.Step{Kind: engine.OldLogs, Logs: &choice, Items: choice.Items()}, nil
}

// Run implements [keeper.Reclaimer].
func (r logReclaimer) Run(ctx context.Context, want keeper.Want, step record.Step) (record.Step, error) {
	r.d.space.of(want.Signal)
	return unknown(r.x.Run(ctx, step))
}

// imageCollector collects unused images while nothing is short, by the kubelet's marks and ages (IGC-9 ff.). It is for one caller at
// a time.
type imageCollector struct {
	d *decisions
	// since is from when on this process has watched images: none goes for its age before that has lasted as long (IGC-12).
	since time.Time
	// choice reads what there is to pick from; nil means decisions.imageChoice.
	choice func(ctx context.Context, s kubelet.Settings, role fsstats.Role, needBytes int64) (record.ImageChoice, error)
	looked time.Time
}

var _ keeper.Collector = (*imageCollector)(nil)

func (c *imageCollector) choose(ctx context.Context, s kubelet.Settings, needBytes int64) (record.ImageChoice, error) {
	if c.choice != nil {
		return c.choice(ctx, s, fsstats.ImageFS, needBytes)
	}
	return c.d.imageChoice(ctx, s, fsstats.ImageFS, needBytes)
}

// Name implements [keeper.Collector].
func (*imageCollector) Name() string { return "unused images" }

// Plan implements [keeper.Collector]. Images that are too old go first, and what that leaves to free the next time.
func (c *imageCollector) Plan(ctx context.Context) (record.Step, error) {
	s, err := c.d.settings()
	if err != nil {
		return record.Step{}, err
	}
	f, err := c.d.free(fsstats.ImageFS)
	if err != nil {
		return record.Step{}, err
	}
	policy := decide.Images(s)
	need, err := policy.Need(&f.AvailableBytes, &f.CapacityBytes)
	if err != nil {
		return record.Step{}, err
	}
	now := time.Now()
	due := now.Sub(c.looked) >= imagesEvery
	over := policy.Runs() && need.Over
	if !over && !due {
		return record.Step{}, nil
	}
	c.looked = now
	if step, err := c.aged(ctx, s); err != nil || len(step.Items) > 0 || !over {
		return step, err
	}
	choice, err := c.choose(ctx, s, need.Bytes)
	if err != nil {
		return record.Step{}, err
	}
	return record.Step{Kind: engine.UnusedImages, Images: &choice, Items: choice.Items()}, nil
}

// aged picks the images that are too old. They are looked at in any case, so that it is known when each was used last; who
// shares what with whom is asked for only if one may be.
func (c *imageCollector) aged(ctx context.Context, s kubelet.Settings) (record.Step, error) {
	seen, err := c.d.removal.Choice(ctx, decide.Images(s), reclaim.ImageInventory{}, garbage.Everything)
	if err != nil {
		return record.Step{}, err
	}
	for key := range seen.Kept { // all that no container uses, because nothing else is known of it here
		delete(seen.InUse, key)
	}
	if seen.ByAge = &c.since; len(seen.TooOld()) == 0 {
		return record.Step{}, nil
	}
	choice, err := c.choose(ctx, s, garbage.Everything)
	if err != nil {
		return record.Step{}, err
	}
	choice.ByAge = &c.since
	return record.Step{Kind: engine.UnusedImages, Images: &choice, Items: choice.Items()}, nil
}

// Run implements [keeper.Collector].
func (c *imageCollector) Run(ctx context.Context, step record.Step) (record.Step, error) {
	c.d.space.of(engine.ImageFSAvailable)
	return c.d.removeImages(ctx, step)
}

// containerCollector collects dead containers while nothing is short.
type containerCollector struct {
	d *decisions
	x *reclaim.Containers
}

var _ keeper.Collector = containerCollector{}

// Name implements [keeper.Collector].
func (containerCollector) Name() string { return "dead containers" }

// Plan implements [keeper.Collector].
func (c containerCollector) Plan(ctx context.Context) (record.Step, error) {
	return containerReclaimer(c).Plan(ctx, keeper.Want{Signal: engine.ContainerFSAvailable})
}

// Run implements [keeper.Collector].
func (c containerCollector) Run(ctx context.Context, step record.Step) (record.Step, error) {
	c.d.space.of(engine.ContainerFSAvailable)
	return c.x.Run(ctx, step)
}
