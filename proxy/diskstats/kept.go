package diskstats

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Kept is ImageFsInfo for a kubelet whose figures come from cAdvisor, mode crio.
// There an empty list or a nil figure blinds the kubelet for memory too, so the
// runtime's own answer, which has no filesystem of containers, never passes: when
// there is no fresh one the last good one goes out, with the time of its
// measurement, and before there was one what the facts name, with all that those
// filesystems hold (KSS-3).
//
// Both lists name one mountpoint if images and containers are on one filesystem by
// the facts, and two if not.
type Kept struct {
	source Source
	last   atomic.Pointer[runtimeapi.ImageFsInfoResponse] // never changed once it is here
}

// Keep returns a Kept that has nothing yet.
func Keep(source Source) *Kept { return &Kept{source: source} }

// errNothing says that neither a fresh nor an old answer is there.
var errNothing = errors.New("nobody knows where images and containers are")

// Rewrite is the interceptor of ImageFsInfo, in place of the one in [Rewrites].
func (k *Kept) Rewrite(_ context.Context, answer []byte) ([]byte, error) {
	m := &runtimeapi.ImageFsInfoResponse{}
	if err := proto.Unmarshal(answer, m); err != nil {
		return nil, fmt.Errorf("decode %s: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	v := view{Facts: k.source.Facts(), strict: true}
	changed := fixImageFsInfo(m, &v)
	if v.missed {
		k.source.Wanted()
	}
	if !v.good(m) {
		return k.old()
	}
	k.last.Store(m)
	if !changed {
		return nil, nil
	}
	return encodeInfo(m)
}

// Fallback is for answers that Rewrite could not be asked about.
func (k *Kept) Fallback(context.Context, []byte) ([]byte, error) { return k.old() }

// old returns the answer without the runtime's.
func (k *Kept) old() ([]byte, error) {
	v := view{Facts: k.source.Facts(), strict: true}
	// Another kubelet may have been told otherwise since, and then it is not good any more.
	if m := k.last.Load(); m != nil && v.good(m) {
		return encodeInfo(m)
	}
	m := &runtimeapi.ImageFsInfoResponse{}
	fixImageFsInfo(m, &v)
	if !v.good(m) {
		return nil, errNothing
	}
	return encodeInfo(m)
}

// good reports whether an answer has what cAdvisor's kubelet needs.
func (v *view) good(m *runtimeapi.ImageFsInfoResponse) bool {
	image, container := first(m.GetImageFilesystems()), first(m.GetContainerFilesystems())
	if blind(image) || blind(container) {
		return false
	}
	if v.Images.Device == "" || v.Containers.Device == "" {
		return true // nobody knows
	}
	one := image.GetFsId().GetMountpoint() == container.GetFsId().GetMountpoint()
	return one == (v.Images.Device == v.Containers.Device)
}

func encodeInfo(m *runtimeapi.ImageFsInfoResponse) ([]byte, error) {
	encoded, err := proto.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	return encoded, nil
}
