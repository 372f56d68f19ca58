package kube

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// SourceKubelet is the name of [KubeletPods] as a source.
const SourceKubelet = "kubelet"

// kubeletLongestRest is the most time between two questions while there is no answer: each may make the kubelet ask the API server
// whether we may.
const kubeletLongestRest = 5 * time.Minute

// KubeletPodsOptions say how the kubelet is asked.
type KubeletPodsOptions struct {
	// Ask gives what the kubelet has at /pods, as it is. It has to know that nobody else is asked: a stranger would decide who is
	// evicted. Required.
	Ask func(context.Context) ([]byte, error)
	// Every is the time between two questions; it doubles with each that has no answer. Required.
	Every time.Duration
}

// KubeletPods knows the pods of the kubelet itself: also those that the API server could not tell about, and static ones with
// their UIDs. A kubelet that was just started may not have all of them yet.
type KubeletPods struct {
	o KubeletPodsOptions

	mu   sync.Mutex
	last Snapshot // guarded by mu
}

var _ Source = (*KubeletPods)(nil)

// NewKubeletPods prepares it; Run fills it.
func NewKubeletPods(o KubeletPodsOptions) (*KubeletPods, error) {
	if o.Ask == nil || o.Every <= 0 {
		return nil, errors.New("ask the kubelet for its pods: how, or how often, is not said")
	}
	return &KubeletPods{o: o, last: Snapshot{Source: SourceKubelet}}, nil
}

// Run asks until ctx ends.
func (k *KubeletPods) Run(ctx context.Context) error {
	pause := k.o.Every
	for {
		if pause = min(2*pause, max(kubeletLongestRest, k.o.Every)); k.ask(ctx) {
			pause = k.o.Every
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
	}
}

// ask asks once and says whether there was an answer.
func (k *KubeletPods) ask(ctx context.Context) bool {
	began := time.Now()
	pods, odd, err := k.fetch(ctx)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.last.Problem = ""
	switch {
	case err != nil:
		k.last.Problem = fmt.Sprintf("ask the kubelet for its pods: %v", err)
		return false
	case len(odd) > 0:
		k.last.Problem = "left out: " + problems(odd)
	}
	k.last.Pods, k.last.AsOf = pods, began
	return true
}

func (k *KubeletPods) fetch(ctx context.Context) (pods []*Pod, odd []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*callLimit)
	defer cancel()
	data, err := k.o.Ask(ctx)
	if err != nil {
		return nil, nil, err
	}
	wire, err := readPods(data)
	if err != nil {
		return nil, nil, fmt.Errorf("read its answer: %w", err)
	}
	pods = make([]*Pod, 0, len(wire))
	for i := range wire {
		p, err := wire[i].pod()
		if err != nil {
			odd = append(odd, err.Error())
			continue
		}
		pods = append(pods, p)
	}
	return pods, odd, nil
}

// Pods implements [Source].
func (k *KubeletPods) Pods() Snapshot {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.last
}
