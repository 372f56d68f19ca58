package agent

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/kube/evict"
)

// goingRuntime has a container of a pod until some time, and answers with an error until another.
type goingRuntime struct {
	runtimeapi.RuntimeServiceClient
	answers, empty time.Time
}

func (r goingRuntime) ListContainers(_ context.Context, q *runtimeapi.ListContainersRequest, _ ...grpc.CallOption) (*runtimeapi.ListContainersResponse, error) {
	switch now := time.Now(); {
	case q.GetFilter().GetLabelSelector()["io.kubernetes.pod.uid"] != "u":
		return &runtimeapi.ListContainersResponse{}, nil
	case now.Before(r.answers):
		return nil, errors.New("busy")
	case now.Before(r.empty):
		return &runtimeapi.ListContainersResponse{Containers: []*runtimeapi.Container{{Id: "c"}}}, nil
	}
	return &runtimeapi.ListContainersResponse{}, nil
}

// An eviction ends when the pod's containers are gone, not when the API server says that the pod is; one whose containers stay is none
// that failed.
func TestBytesAreBack(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name           string
		answers, empty time.Duration
		available      uint64
		broken         error
		want           evict.Released
		after          time.Duration
	}{
		{"gone at once", 0, 0, 700, nil, evict.Released{Bytes: 600, Measured: true}, 0},
		{"gone after a while", 0, 3 * time.Second, 700, nil, evict.Released{Bytes: 600, Measured: true}, 3 * time.Second},
		{"a runtime that is busy says nothing", 2 * time.Second, 0, 700, nil, evict.Released{Bytes: 600, Measured: true}, 2 * time.Second},
		{"others wrote more", 0, 0, 50, nil, evict.Released{Measured: true}, 0},
		{"the disk does not answer", 0, 0, 0, errors.New("stuck"), evict.Released{}, 0},
		{"they stay", 0, time.Hour, 700, nil, evict.Released{}, bytesWait},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				b := bytesBack{runtime: goingRuntime{answers: began.Add(tc.answers), empty: began.Add(tc.empty)}, available: func() (uint64, error) { return tc.available, tc.broken }, before: 100}
				got, err := b.Await(t.Context(), "u")
				if got != tc.want || err != nil || time.Since(began) != tc.after {
					t.Errorf("after %s: %+v, %v; want %+v after %s", time.Since(began), got, err, tc.want, tc.after)
				}
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				b.runtime = goingRuntime{empty: time.Now().Add(time.Hour)}
				if _, err := b.Await(ctx, "u"); !errors.Is(err, context.Canceled) {
					t.Errorf("at the end: %v", err)
				}
				// A pod that took nearly all the time that there is went all the same.
				ctx, cancel = context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if got, err := b.Await(ctx, "u"); got.Measured || err != nil {
					t.Errorf("when the time is over: %+v, %v", got, err)
				}
			})
		})
	}
}
