// Package reclaimtest has what tests of deletions need: a runtime in memory, and
// a suite of what must hold that this runtime passes like a real one. Only tests
// may import it.
package reclaimtest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/reclaim"
)

// Runtime is a runtime, its store and its filesystem, in memory. It deletes what
// it is told to, in use or not, as containerd does (KSS-22).
type Runtime struct {
	Images     Images
	Containers Containers

	mu         sync.Mutex
	available  int64                             // guarded by mu
	late       []late                            // guarded by mu; space that comes later
	images     map[string]*image                 // guarded by mu
	containers map[string]*container             // guarded by mu
	sandboxes  map[string]*runtimeapi.PodSandbox // guarded by mu
	before     func(call string) error           // guarded by mu
	calls      []string                          // guarded by mu
	held       string                            // guarded by mu
	number     int                               // guarded by mu
	delay      time.Duration                     // guarded by mu
	notReady   error                             // guarded by mu
}

type late struct {
	bytes int64
	at    time.Time
}

type image struct {
	names       []string
	layers      []garbage.Layer
	pinned      bool
	notPullable string
	users       []string
}

type container struct {
	listed  *runtimeapi.Container
	volumes []string
	logPath string
	bytes   int64
}

// Images and Containers are the services of the CRI; what is not implemented
// panics.
type (
	Images struct {
		runtimeapi.ImageServiceClient
		r *Runtime
	}
	Containers struct {
		runtimeapi.RuntimeServiceClient
		r *Runtime
	}
)

// NewRuntime returns one with nothing in it.
func NewRuntime() *Runtime {
	r := &Runtime{available: 1 << 40, images: map[string]*image{}, containers: map[string]*container{}, sandboxes: map[string]*runtimeapi.PodSandbox{}}
	r.Images.r, r.Containers.r = r, r
	return r
}

// Before makes f be called before each call that changes something, with its
// name and what it is about, such as "RemoveImage sha256:1". Its error is the
// answer.
func (r *Runtime) Before(f func(call string) error) { r.set(func() { r.before = f }) }

// Late makes space come free so long after the deletion.
func (r *Runtime) Late(d time.Duration) { r.set(func() { r.delay = d }) }

// Hold says who holds what comes late.
func (r *Runtime) Hold(who string) { r.set(func() { r.held = who }) }

// Away makes the snapshotter not answer.
func (r *Runtime) Away(err error) { r.set(func() { r.notReady = err }) }

// NotPullable makes an image one that was imported.
func (r *Runtime) NotPullable(id string) {
	r.set(func() { r.images[id].notPullable = "it was imported" })
}

// UsedBy makes somebody use an image whom the CRI does not know.
func (r *Runtime) UsedBy(id, who string) {
	r.set(func() { r.images[id].users = append(r.images[id].users, who) })
}

// Tag gives an image a name.
func (r *Runtime) Tag(id, name string) {
	r.set(func() { r.images[id].names = append(r.images[id].names, name) })
}

// Mount makes a container have a volume that is an image.
func (r *Runtime) Mount(containerID, image string) {
	r.set(func() { r.containers[containerID].volumes = append(r.containers[containerID].volumes, image) })
}

// SetState changes a container's state; SetLog the path of its log; SetBytes what
// it has.
func (r *Runtime) SetState(id string, s runtimeapi.ContainerState) {
	r.set(func() { r.containers[id].listed.State = s })
}

// SetLog sets the path of a container's log.
func (r *Runtime) SetLog(id, path string) { r.set(func() { r.containers[id].logPath = path }) }

// SetBytes sets what a container has.
func (r *Runtime) SetBytes(id string, bytes int64) { r.set(func() { r.containers[id].bytes = bytes }) }

// SetCreated sets when a container was made.
func (r *Runtime) SetCreated(id string, t time.Time) {
	r.set(func() { r.containers[id].listed.CreatedAt = t.UnixNano() })
}

// EndSandbox makes a sandbox not ready.
func (r *Runtime) EndSandbox(id string) {
	r.set(func() { r.sandboxes[id].State = runtimeapi.PodSandboxState_SANDBOX_NOTREADY })
}

// SandboxOf is the sandbox of a container.
func (r *Runtime) SandboxOf(id string) (out string) {
	r.set(func() { out = r.containers[id].listed.GetPodSandboxId() })
	return out
}

// Calls are those that changed something.
func (r *Runtime) Calls() (out []string) {
	r.set(func() { out = slices.Clone(r.calls) })
	return out
}

func (r *Runtime) set(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

func (r *Runtime) changes(call string) error {
	r.mu.Lock()
	f := r.before
	r.calls = append(r.calls, call)
	r.mu.Unlock()
	if f != nil {
		return f(call)
	}
	return nil
}

func (r *Runtime) idLocked() string {
	r.number++
	return fmt.Sprintf("sha256:%064x", r.number)
}

// Pull adds an image.
func (r *Runtime) Pull(name string, layers ...garbage.Layer) (id string) {
	r.set(func() {
		id = r.idLocked()
		r.images[id] = &image{names: []string{name, name + "@" + id}, layers: layers}
	})
	return id
}

// Pin pins an image.
func (r *Runtime) Pin(id string) { r.set(func() { r.images[id].pinned = true }) }

// RunContainer adds a container that runs, in a sandbox of its own.
func (r *Runtime) RunContainer(uid, name, imageID string) (id string) {
	r.set(func() {
		box := r.idLocked()[7:]
		id = r.idLocked()[7:]
		labels := map[string]string{"io.kubernetes.pod.uid": uid, "io.kubernetes.container.name": name}
		now := time.Now().UnixNano()
		r.sandboxes[box] = &runtimeapi.PodSandbox{Id: box, Metadata: &runtimeapi.PodSandboxMetadata{Uid: uid}, Labels: labels, CreatedAt: now}
		r.containers[id] = &container{listed: &runtimeapi.Container{
			Id: id, PodSandboxId: box, Labels: labels, CreatedAt: now, State: runtimeapi.ContainerState_CONTAINER_RUNNING,
			Image: &runtimeapi.ImageSpec{Image: imageID}, ImageRef: imageID, ImageId: imageID,
		}}
	})
	return id
}

// Inventory is what reclaim.Images.Choice needs.
func (r *Runtime) Inventory() reclaim.ImageInventory {
	r.mu.Lock()
	defer r.mu.Unlock()
	inv := reclaim.ImageInventory{Facts: map[string]reclaim.ImageFacts{}, Layers: map[string][]garbage.Layer{}}
	for id, i := range r.images {
		inv.Facts[id] = i.facts()
		inv.Layers[id] = append([]garbage.Layer{}, i.layers...)
	}
	return inv
}

func (i *image) facts() reclaim.ImageFacts {
	return reclaim.ImageFacts{Names: slices.Clone(i.names), Pinned: i.pinned, NotPullable: i.notPullable, Users: slices.Clone(i.users)}
}

// Image implements [reclaim.ImageStore].
func (r *Runtime) Image(_ context.Context, names []string) (reclaim.ImageFacts, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := r.images[names[0]]; i != nil {
		return i.facts(), nil
	}
	return reclaim.ImageFacts{}, status.Error(codes.NotFound, "no such image")
}

// Ready implements [reclaim.ImageStore].
func (r *Runtime) Ready(context.Context) (err error) {
	r.set(func() { err = r.notReady })
	return err
}

// Collect implements [reclaim.ImageStore].
func (r *Runtime) Collect(context.Context) error { return nil }

// AvailableBytes implements [reclaim.Space].
func (r *Runtime) AvailableBytes(context.Context) (int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.late = slices.DeleteFunc(r.late, func(l late) bool {
		if l.at.After(now) {
			return false
		}
		r.available += l.bytes
		return true
	})
	return r.available, nil
}

func (r *Runtime) freeLocked(bytes int64) {
	r.late = append(r.late, late{bytes, time.Now().Add(r.delay)})
}

// ListImages implements the CRI.
func (s Images) ListImages(context.Context, *runtimeapi.ListImagesRequest, ...grpc.CallOption) (*runtimeapi.ListImagesResponse, error) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	out := &runtimeapi.ListImagesResponse{}
	for _, id := range slices.Sorted(maps.Keys(s.r.images)) {
		out.Images = append(out.Images, s.r.listedLocked(id))
	}
	return out, nil
}

func (r *Runtime) listedLocked(id string) *runtimeapi.Image {
	i := r.images[id]
	if i == nil {
		return nil
	}
	return &runtimeapi.Image{Id: id, RepoTags: slices.Clone(i.names[:1]), RepoDigests: slices.Clone(i.names[1:]), Pinned: i.pinned, Size: 1}
}

// ImageStatus implements the CRI.
func (s Images) ImageStatus(_ context.Context, in *runtimeapi.ImageStatusRequest, _ ...grpc.CallOption) (*runtimeapi.ImageStatusResponse, error) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	return &runtimeapi.ImageStatusResponse{Image: s.r.listedLocked(in.GetImage().GetImage())}, nil
}

// RemoveImage implements the CRI.
func (s Images) RemoveImage(_ context.Context, in *runtimeapi.RemoveImageRequest, _ ...grpc.CallOption) (*runtimeapi.RemoveImageResponse, error) {
	id := in.GetImage().GetImage()
	if err := s.r.changes("RemoveImage " + id); err != nil {
		return nil, err
	}
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	gone := s.r.images[id]
	delete(s.r.images, id)
	if gone == nil {
		return &runtimeapi.RemoveImageResponse{}, nil
	}
	for _, l := range gone.layers {
		shared := false
		for _, other := range s.r.images {
			shared = shared || slices.ContainsFunc(other.layers, func(o garbage.Layer) bool { return o.ID == l.ID })
		}
		if !shared {
			s.r.freeLocked(l.Bytes)
		}
	}
	return &runtimeapi.RemoveImageResponse{}, nil
}

// ListContainers implements the CRI.
func (s Containers) ListContainers(_ context.Context, in *runtimeapi.ListContainersRequest, _ ...grpc.CallOption) (*runtimeapi.ListContainersResponse, error) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	out := &runtimeapi.ListContainersResponse{}
	for _, id := range slices.Sorted(maps.Keys(s.r.containers)) {
		c := s.r.containers[id].listed
		if box := in.GetFilter().GetPodSandboxId(); box == "" || box == c.GetPodSandboxId() {
			out.Containers = append(out.Containers, c)
		}
	}
	return out, nil
}

// ContainerStatus implements the CRI.
func (s Containers) ContainerStatus(_ context.Context, in *runtimeapi.ContainerStatusRequest, _ ...grpc.CallOption) (*runtimeapi.ContainerStatusResponse, error) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	c := s.r.containers[in.GetContainerId()]
	if c == nil {
		return nil, status.Error(codes.NotFound, "no such container")
	}
	st := &runtimeapi.ContainerStatus{Id: c.listed.GetId(), State: c.listed.GetState(), LogPath: c.logPath}
	for _, v := range c.volumes {
		st.Mounts = append(st.Mounts, &runtimeapi.Mount{Image: &runtimeapi.ImageSpec{Image: v}})
	}
	return &runtimeapi.ContainerStatusResponse{Status: st}, nil
}

// StopContainer implements the CRI.
func (s Containers) StopContainer(_ context.Context, in *runtimeapi.StopContainerRequest, _ ...grpc.CallOption) (*runtimeapi.StopContainerResponse, error) {
	if err := s.r.changes("StopContainer " + in.GetContainerId()); err != nil {
		return nil, err
	}
	s.r.SetState(in.GetContainerId(), runtimeapi.ContainerState_CONTAINER_EXITED)
	return &runtimeapi.StopContainerResponse{}, nil
}

// RemoveContainer implements the CRI.
func (s Containers) RemoveContainer(_ context.Context, in *runtimeapi.RemoveContainerRequest, _ ...grpc.CallOption) (*runtimeapi.RemoveContainerResponse, error) {
	if err := s.r.changes("RemoveContainer " + in.GetContainerId()); err != nil {
		return nil, err
	}
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	if c := s.r.containers[in.GetContainerId()]; c != nil {
		s.r.freeLocked(c.bytes)
		delete(s.r.containers, in.GetContainerId())
	}
	return &runtimeapi.RemoveContainerResponse{}, nil
}

// ListPodSandbox implements the CRI.
func (s Containers) ListPodSandbox(context.Context, *runtimeapi.ListPodSandboxRequest, ...grpc.CallOption) (*runtimeapi.ListPodSandboxResponse, error) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	out := &runtimeapi.ListPodSandboxResponse{}
	for _, id := range slices.Sorted(maps.Keys(s.r.sandboxes)) {
		out.Items = append(out.Items, s.r.sandboxes[id])
	}
	return out, nil
}

// StopPodSandbox implements the CRI.
func (s Containers) StopPodSandbox(_ context.Context, in *runtimeapi.StopPodSandboxRequest, _ ...grpc.CallOption) (*runtimeapi.StopPodSandboxResponse, error) {
	return &runtimeapi.StopPodSandboxResponse{}, s.r.changes("StopPodSandbox " + in.GetPodSandboxId())
}

// RemovePodSandbox implements the CRI; containers go with their sandbox.
func (s Containers) RemovePodSandbox(_ context.Context, in *runtimeapi.RemovePodSandboxRequest, _ ...grpc.CallOption) (*runtimeapi.RemovePodSandboxResponse, error) {
	if err := s.r.changes("RemovePodSandbox " + in.GetPodSandboxId()); err != nil {
		return nil, err
	}
	s.r.set(func() {
		delete(s.r.sandboxes, in.GetPodSandboxId())
		maps.DeleteFunc(s.r.containers, func(_ string, c *container) bool { return c.listed.GetPodSandboxId() == in.GetPodSandboxId() })
	})
	return &runtimeapi.RemovePodSandboxResponse{}, nil
}

// Remove removes an image behind everybody's back.
func Remove(ctx context.Context, r *Runtime, id string) error {
	_, err := r.Images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: id}})
	return err
}

// Exit makes a container exit, and its sandbox end.
func (r *Runtime) Exit(id string) {
	r.SetState(id, runtimeapi.ContainerState_CONTAINER_EXITED)
	r.EndSandbox(r.SandboxOf(id))
}

// Holder is what Hold said.
func (r *Runtime) Holder() (who string) {
	r.set(func() { who = r.held })
	return who
}
