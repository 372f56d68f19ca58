package agent

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/kube/report"
)

// noted keeps events.
type noted struct {
	mu    sync.Mutex
	notes []string
}

func (n *noted) Tell(e report.Event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.notes = append(n.notes, string(e.Reason)+": "+e.Note)
}

func (*noted) Run(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

// KSS-18: what keeps the kubelet from seeing its disks is told the cluster as soon as there is somebody to tell it to, and what was
// over by then is not.
func TestKSS18_WhatTheKubeletDoesNotSeeIsAnEvent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var away atomic.Bool
		away.Store(true)
		to := &noted{}
		n := newNodeEvents("/run/cleave/cleave.sock", zap.NewNop())
		var asked atomic.Int64
		n.kubelet = func(context.Context) (kubelet.Settings, error) {
			asked.Add(1)
			if away.Load() {
				return kubelet.Settings{}, kubelet.ErrNotRunning
			}
			return kubelet.Settings{}, nil
		}
		n.connect = func(kubelet.Settings) (events, error) { return to, nil }
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); n.run(ctx) }()
		synctest.Wait()
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		if asked.Load() != 0 {
			t.Errorf("it was looked for %d times without anything to tell", asked.Load())
		}
		n.tell([]string{"it was told of one disk"})
		n.tell([]string{"it has not asked", "another"})
		away.Store(false)
		time.Sleep(eventsEvery + time.Second) //nolint:forbidigo // in synctest
		n.tell(nil)
		time.Sleep(time.Minute) //nolint:forbidigo // in synctest
		n.tell([]string{"its summary is wrong"})
		synctest.Wait()
		stop()
		<-ended
		want := []string{"DisksUnseen: it has not asked", "DisksUnseen: another", "DisksUnseen: its summary is wrong"}
		if !slices.Equal(to.notes, want) {
			t.Errorf("told %q, want %q", to.notes, want)
		}
	})
}

func TestWithoutAnAPIServerNobodyIsTold(t *testing.T) {
	t.Parallel()
	n := newNodeEvents("/run/cleave/cleave.sock", zap.NewNop())
	if _, err := n.connect(kubelet.Settings{PID: 7}); err == nil || errors.Is(err, kubelet.ErrNotRunning) {
		t.Errorf("a kubelet without a kubeconfig: %v", err)
	}
}
