package agent

import (
	"context"
	"time"

	"github.com/cleave-cri/cleave/agent/du"
	"github.com/cleave-cri/cleave/agent/keeper"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/fsstats/remains"
)

const (
	// findTime is how long an eviction waits for the folders of its pod to be found.
	findTime = 500 * time.Millisecond
	// remainsWait is how long what is left of a pod is looked at: as long as its space is waited for.
	remainsWait = 30 * time.Second
	// remainsEvery is the time between two looks.
	remainsEvery = 500 * time.Millisecond
)

// remainsOf is for [keeper.Parts.Remains]. It is nil if one of the pod's folders is not known, or what type of filesystem they are on, or
// if it does not answer soon.
func (d *decisions) remainsOf(e engine.Eviction) keeper.Remains {
	f, err := d.free(roleOf(engine.Signal(e.Cause)))
	settles, ok := remains.Settles(f.Type)
	if err != nil || !ok {
		return nil
	}
	goes, stays := foldersOf(d.observer.surveyed.Load(), e)
	found := make(chan keeper.Remains, 1)
	go func() { // ends when the filesystem answers; one of an eviction
		folders, err := remains.Find(f.Mountpoint, goes, stays)
		if err != nil {
			found <- nil
			return
		}
		found <- remaining{folders.Gone, settles}.gone
	}()
	timer := time.NewTimer(findTime)
	defer timer.Stop()
	select {
	case r := <-found:
		return r
	case <-timer.C:
		return nil
	}
}

// foldersOf lists the folders in which a pod has what comes free when it goes: its layers and the volumes that are its own, which go, and its
// logs, whose folder the kubelet removes a minute later. Not those on which something is mounted, which is not deleted or is no disk. It
// lists none if they are not all known.
func foldersOf(s *survey, e engine.Eviction) (goes, stays []string) {
	who, err := podNamed(s, du.Request{Namespace: e.Namespace, Pod: e.UID})
	if err != nil || who.uid != e.UID || len(who.containers) == 0 {
		return nil, nil
	}
	uppers := map[string]string{} // by container
	for _, l := range s.layers {
		uppers[l.layer.ContainerID] = l.folders.Upper
	}
	for _, c := range who.containers {
		if uppers[c.ID] == "" {
			return nil, nil
		}
		goes = append(goes, uppers[c.ID])
	}
	for _, p := range s.folders.Pods {
		for _, v := range p.Volumes {
			if p.UID == who.uid && !v.Mounted {
				goes = append(goes, v.Path)
			}
		}
	}
	for _, l := range s.folders.Logs {
		if l.UID == who.uid {
			stays = append(stays, l.Path)
		}
	}
	return goes, stays
}

// remaining is what a pod had where space is short when it was told to go.
type remaining struct {
	// allGone says whether it is gone.
	allGone func() (bool, error)
	// settles is how long its space may take to come back after that.
	settles time.Duration
}

// gone waits until nothing is left and the space has come back. It is false where that is not known, or did not happen in time: then it
// may still come.
func (r remaining) gone(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, remainsWait)
	defer cancel()
	for {
		answer, unknown := make(chan bool, 1), make(chan struct{})
		go func() { // ends when the filesystem answers; one at most of an eviction
			is, err := r.allGone()
			if err != nil {
				close(unknown)
				return
			}
			answer <- is
		}()
		select {
		case is := <-answer:
			if is {
				return sleep(ctx, r.settles, nil)
			}
		case <-unknown:
			return false
		case <-ctx.Done():
			return false
		}
		if !sleep(ctx, remainsEvery, nil) {
			return false
		}
	}
}
