package reclaim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
)

// Reasons why an image stays.
var (
	errPinned      = errors.New("it is pinned")
	errInUse       = errors.New("it is in use")
	errNotPullable = errors.New("it can't be pulled again")
	errYoung       = errors.New("it is too young")
	errGone        = errors.New("it is not there any more")
	errChanged     = errors.New("it is not what it was")
)

// ImageFacts is what the runtime's own store knows of an image, beyond the CRI.
type ImageFacts struct {
	// Names are all names of the image, in the form "registry/repository:tag" or
	// with a digest.
	Names []string
	// Pinned images are never deleted; a sandbox's image is one.
	Pinned bool
	// NotPullable says why the image can't be pulled again; empty if it can.
	NotPullable string
	// Users are those that use the image, in any namespace, by the CRI or not.
	Users []string
}

// ImageStore is the runtime's own store.
type ImageStore interface {
	// Image reads anew what the store knows of an image, by all names that the CRI
	// has for it. Some may be missing in the store: a removal that was broken off
	// leaves an image with the rest.
	Image(ctx context.Context, names []string) (ImageFacts, error)
	// Ready says whether what is deleted now comes free: while a snapshotter is
	// away, containerd forgets a layer and its files stay (CTD-63).
	Ready(ctx context.Context) error
	// Collect deletes what nothing refers to any more, and returns when that is
	// done.
	Collect(ctx context.Context) error
}

// ImageLock serialises the deletion of an image with calls that need it. It is
// proxy/imagelock.
type ImageLock interface {
	// Named says why an image must stay because of calls that named it.
	Named(names []string) error
	// Delete does that too, and else holds such calls up until release.
	Delete(names []string) (release func(), err error)
}

// Memory is what is remembered of images between two looks.
type Memory interface {
	// Look remembers what is listed and who uses it (garbage.Images.Look).
	Look(list []garbage.Listed, users []garbage.ImageUser, began, now time.Time) (garbage.Images, map[string]bool)
}

// Images deletes unused images through the CRI.
type Images struct {
	Site
	CRI     runtimeapi.ImageServiceClient
	Runtime runtimeapi.RuntimeServiceClient
	Store   ImageStore
	Lock    ImageLock
	Memory  Memory

	mu sync.Mutex
	// refused are the images that had to stay when they were about to go, by id.
	refused map[string]refusal // guarded by mu
	// volumes are the images that are mounted into a container, by its id: they
	// do not change while it lives.
	volumes map[string][]string // guarded by mu
}

// refusedFor is for how long an image is not picked again that had to stay when it
// was about to go: what a choice is made from may say something else about it for
// as long, and each plan would end with it.
const refusedFor = time.Minute

// refusal is why an image stays, and since when.
type refusal struct {
	at  time.Time
	why error
}

// ImageInventory is what a choice is made from, besides what the CRI tells. It
// may be some seconds old: what has changed since is found out before an image
// goes.
type ImageInventory struct {
	// Facts of each image by id. An image without stays.
	Facts map[string]ImageFacts
	// Layers are those of each image by id that take space on the filesystem
	// in question, blobs included.
	Layers map[string][]garbage.Layer
}

// Choice reads what there is to pick from.
func (x *Images) Choice(ctx context.Context, policy garbage.ImagePolicy, inventory ImageInventory, needBytes int64) (record.ImageChoice, error) {
	began := time.Now()
	list, err := x.list(ctx)
	if err != nil {
		return record.ImageChoice{}, err
	}
	users, err := x.users(ctx)
	if err != nil {
		return record.ImageChoice{}, err
	}
	listed := make([]garbage.Listed, 0, len(list))
	for _, image := range list {
		listed = append(listed, garbage.Listed{ID: image.GetId(), SizeBytes: int64(min(image.GetSize(), 1<<62)), Pinned: image.GetPinned()})
	}
	users = byID(users, list)
	c := record.ImageChoice{Policy: policy, Layers: inventory.Layers, NeedBytes: needBytes, Began: began, Kept: map[string]string{}}
	c.Known, c.InUse = x.Memory.Look(listed, users, began, time.Now())
	for _, image := range list {
		id := image.GetId()
		if c.InUse[id] || image.GetPinned() {
			continue
		}
		facts, ok := inventory.Facts[id]
		err := x.refusal(id)
		switch {
		case err != nil:
		case !ok:
			err = errors.New("containerd's store does not have it")
		default:
			err = stays(facts, x.Lock.Named(slices.Concat(namesOf(image), facts.Names)))
		}
		if err != nil {
			c.InUse[id], c.Kept[id] = true, err.Error()
		}
	}
	return c, nil
}

// stays is why an image stays; nil if it may go.
func stays(f ImageFacts, named error) error {
	switch {
	case f.Pinned:
		return errPinned
	case len(f.Users) > 0:
		return fmt.Errorf("%w by %s", errInUse, f.Users[0])
	case f.NotPullable != "":
		return fmt.Errorf("%w: %s", errNotPullable, f.NotPullable)
	default:
		return named
	}
}

// byID names users' images by id, which a container may know by another name.
func byID(users []garbage.ImageUser, list []*runtimeapi.Image) []garbage.ImageUser {
	ids := map[string]string{}
	for _, image := range list {
		for _, name := range namesOf(image) {
			ids[name] = image.GetId()
		}
	}
	id := func(name string) string {
		if known, ok := ids[name]; ok {
			return known
		}
		return name
	}
	for i := range users {
		users[i].ImageID = id(users[i].ImageID)
		for j, v := range users[i].Volumes {
			users[i].Volumes[j] = id(v)
		}
	}
	return users
}

// namesOf are all names that the CRI has for an image, its id first.
func namesOf(image *runtimeapi.Image) []string {
	return slices.Concat([]string{image.GetId()}, image.GetRepoTags(), image.GetRepoDigests())
}

func (x *Images) list(ctx context.Context) ([]*runtimeapi.Image, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answer, err := x.CRI.ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return answer.GetImages(), nil
}

// users are the containers of the CRI in any state, each of their names for an
// image as a user of its own.
func (x *Images) users(ctx context.Context) ([]garbage.ImageUser, error) {
	listing, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answer, err := x.Runtime.ListContainers(listing, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	var users []garbage.ImageUser
	alive := map[string]bool{}
	for _, c := range answer.GetContainers() {
		alive[c.GetId()] = true
		volumes, err := x.volumesOf(ctx, c.GetId())
		if err != nil {
			return nil, err
		}
		for _, name := range []string{c.GetImageId(), c.GetImageRef(), c.GetImage().GetImage()} {
			if name != "" {
				users = append(users, garbage.ImageUser{ImageID: name, Volumes: slices.Clone(volumes)})
			}
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for id := range x.volumes {
		if !alive[id] {
			delete(x.volumes, id)
		}
	}
	return users, nil
}

func (x *Images) volumesOf(ctx context.Context, container string) ([]string, error) {
	x.mu.Lock()
	known, ok := x.volumes[container]
	x.mu.Unlock()
	if ok {
		return known, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answer, err := x.Runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: container})
	if status.Code(err) == codes.NotFound {
		return nil, nil // removed meanwhile
	}
	if err != nil {
		return nil, fmt.Errorf("look at container %s: %w", container, err)
	}
	images := []string{}
	for _, m := range answer.GetStatus().GetMounts() {
		for _, name := range []string{m.GetImage().GetImage(), m.GetImage().GetImageRef()} {
			if name != "" {
				images = append(images, name)
			}
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.volumes == nil {
		x.volumes = map[string][]string{}
	}
	x.volumes[container] = images
	return images, nil
}

// Check looks whether a step could be carried out now, and deletes nothing.
func (x *Images) Check(ctx context.Context, step record.Step) (record.Step, error) {
	return check(ctx, step, x.examine(step))
}

// Run deletes the images of a step. The returned step says what came of each; it
// is good also beside an error.
func (x *Images) Run(ctx context.Context, step record.Step) (record.Step, error) {
	return x.run(ctx, step, x.examine(step))
}

func (x *Images) examine(step record.Step) examine {
	return func(ctx context.Context, item record.Item) (_ removal, err error) {
		defer func() { x.refuse(item.ID, err) }()
		choice := step.Images
		if choice == nil {
			return removal{}, errors.New("the step has no choice of images")
		}
		known, ok := choice.Known[item.ID]
		if !ok {
			return removal{}, errors.New("it is not among the images that were picked from")
		}
		if age := time.Since(known.FirstSeen); age < choice.Policy.MinAge {
			return removal{}, fmt.Errorf("%w: it was first seen %s ago", errYoung, age.Round(time.Second))
		}
		ask, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		if err := x.Store.Ready(ask); err != nil {
			return removal{}, fmt.Errorf("what is deleted now would not come free: %w", err)
		}
		// First the lock, then the look: from here on nobody begins to use it
		// through the proxy.
		image, err := x.status(ask, known.ID)
		if err != nil {
			return removal{}, err
		}
		facts, err := x.Store.Image(ask, namesOf(image))
		if err != nil {
			return removal{}, fmt.Errorf("look at it in containerd's store: %w", err)
		}
		names := slices.Concat(namesOf(image), facts.Names)
		release, err := x.Lock.Delete(names)
		if err != nil {
			return removal{}, err
		}
		defer func() {
			if err != nil {
				release()
			}
		}()
		if err := x.unused(ask, known.ID, names); err != nil {
			return removal{}, err
		}
		return removal{
			what:    "image",
			delete:  func(ctx context.Context) error { return x.remove(ctx, known.ID) },
			hurry:   x.Store.Collect,
			release: release,
		}, nil
	}
}

// refuse remembers that an image has to stay, if that is why it could not go.
func (x *Images) refuse(id string, why error) {
	if !errors.Is(why, errPinned) && !errors.Is(why, errInUse) && !errors.Is(why, errNotPullable) && !errors.Is(why, errChanged) {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.refused == nil {
		x.refused = map[string]refusal{}
	}
	for other, r := range x.refused {
		if time.Since(r.at) >= refusedFor {
			delete(x.refused, other)
		}
	}
	x.refused[id] = refusal{time.Now(), why}
}

// refusal is why an image had to stay in the last minute; nil if it had not to.
func (x *Images) refusal(id string) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if r, ok := x.refused[id]; ok && time.Since(r.at) < refusedFor {
		return fmt.Errorf("it could not go at %s: %w", r.at.UTC().Format(time.TimeOnly), r.why)
	}
	return nil
}

// unused is nil if an image is what it was and nobody uses it.
func (x *Images) unused(ctx context.Context, id string, names []string) error {
	image, err := x.status(ctx, id)
	if err != nil {
		return err
	}
	if image.GetPinned() {
		return errPinned
	}
	facts, err := x.Store.Image(ctx, namesOf(image))
	if err != nil {
		return fmt.Errorf("look at it in containerd's store: %w", err)
	}
	for _, name := range slices.Concat(namesOf(image), facts.Names) {
		if !slices.Contains(names, name) {
			return fmt.Errorf("%w: it has got the name %q", errChanged, name)
		}
	}
	if err := stays(facts, nil); err != nil {
		return err
	}
	users, err := x.users(ctx)
	if err != nil {
		return err
	}
	for _, u := range users {
		if slices.Contains(names, u.ImageID) || slices.ContainsFunc(u.Volumes, func(v string) bool { return slices.Contains(names, v) }) {
			return fmt.Errorf("%w by a container", errInUse)
		}
	}
	return nil
}

func (x *Images) status(ctx context.Context, id string) (*runtimeapi.Image, error) {
	answer, err := x.CRI.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: id}})
	if err != nil {
		return nil, fmt.Errorf("look at it: %w", err)
	}
	switch got := answer.GetImage(); {
	case got == nil:
		return nil, errGone
	case got.GetId() != id:
		return nil, fmt.Errorf("%w: the runtime calls it %s", errChanged, got.GetId())
	default:
		return got, nil
	}
}

// remove deletes an image by its id: all its tags go, and the runtime returns
// when its garbage is collected (CTD-82).
func (x *Images) remove(ctx context.Context, id string) error {
	if _, err := x.CRI.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: id}}); err != nil {
		return fmt.Errorf("remove the image: %w", err)
	}
	_, err := x.status(ctx, id)
	switch {
	case errors.Is(err, errGone):
		return nil
	case err != nil:
		return fmt.Errorf("it was removed, and then: %w", err)
	default:
		return fmt.Errorf("%w: the runtime removed it and has it still", ErrSurprise)
	}
}
