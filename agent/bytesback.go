package agent

import (
	"context"
	"errors"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/kube/evict"
)

const (
	// bytesWait is how long the containers of a pod that is gone may take to be removed. The kubelet does it as soon as it sees that the
	// pod is deleted; what it is late with is no reason to call the eviction a failure.
	bytesWait = 10 * time.Second
	// bytesEvery is how often the runtime is asked meanwhile.
	bytesEvery = 250 * time.Millisecond
)

// bytesBack waits until the runtime has no container of a pod any more, and says by how much more is available then.
type bytesBack struct {
	runtime runtimeapi.RuntimeServiceClient
	// available asks for what is available on the filesystem that the pod went for; before is what was when it was told to go.
	available func() (uint64, error)
	before    uint64
}

var _ evict.Bytes = bytesBack{}

// Await implements [evict.Bytes]. What others write and delete meanwhile counts, too. It is no error if containers stay: then nothing is
// measured.
func (b bytesBack) Await(ctx context.Context, uid string) (evict.Released, error) {
	limit, cancel := context.WithTimeout(ctx, bytesWait)
	defer cancel()
	for {
		list, err := b.runtime.ListContainers(limit, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{LabelSelector: map[string]string{labelPodUID: uid}}})
		if err == nil && len(list.GetContainers()) == 0 {
			break
		}
		timer := time.NewTimer(bytesEvery)
		select {
		case <-timer.C:
		case <-limit.Done():
			timer.Stop()
			if errors.Is(ctx.Err(), context.Canceled) {
				return evict.Released{}, ctx.Err()
			}
			return evict.Released{}, nil // also at the end of the time for the whole eviction: the pod is gone
		}
	}
	now, err := b.available()
	if err != nil {
		return evict.Released{}, nil //nolint:nilerr // the pod is gone; only what came of it is not known
	}
	return evict.Released{Bytes: now - min(b.before, now), Measured: true}, nil
}
