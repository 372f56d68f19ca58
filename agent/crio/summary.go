package crio

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"
)

// Figures are what a kubelet's summary says of the runtime's disks: capacities in bytes, 0 where it says none.
type Figures struct {
	ImagesBytes, ContainersBytes uint64
	// Alike says that both are the same in every figure, with something used: it is one disk, twice.
	Alike bool
}

// ErrNotAllowed says that a kubelet does not show its summary to cleave. What it would show is not known then.
var ErrNotAllowed = errors.New("the kubelet does not show its summary")

const (
	// summaryGrace is how long a kubelet has, after it was told of the disks, until its summary has to be right: it measures once in
	// 10 s and asks the runtime each minute at most. Later it is how long it has to be wrong: a busy kubelet may not answer in time.
	summaryGrace = 90 * time.Second
	// summaryPeriod is how often a summary that was right is looked at again: it fails altogether after some changes of mounts (KSS-19).
	summaryPeriod = 5 * time.Minute
	// summaryTimeout bounds one look.
	summaryTimeout = 5 * time.Second
	// sameShare is how far two capacities of one disk may be apart: a disk may grow between two looks.
	sameShare = 0.01
)

// looked is what is known of the summary of one kubelet.
type looked struct {
	kubelet Kubelet
	// since is when it was first looked at, at when last, rightAt when it was last right; zero before.
	since, at, rightAt time.Time
	// wrongFrom is when the row of looks began in which it was wrong; zero if the last one was not.
	wrongFrom time.Time
	// wrong says what was wrong the last time, and unknown why it could not be looked at.
	wrong, unknown string
}

// due says whether it is time to look.
func (l looked) due(now time.Time) bool {
	starting := l.rightAt.IsZero() && (l.unknown == "" || now.Sub(l.since) < summaryGrace)
	return l.at.IsZero() || l.wrong != "" || starting || now.Sub(l.at) >= summaryPeriod
}

// problem says what is wrong for longer than a start takes, for people; empty if nothing is.
func (l looked) problem(now time.Time) string {
	from := l.wrongFrom
	if l.rightAt.IsZero() {
		from = l.since
	}
	if l.wrong == "" || now.Sub(from) < summaryGrace {
		return ""
	}
	return fmt.Sprintf("the summary of the kubelet (pid %d) is not right: %s: restart the kubelet; if that does not help, its log says why", l.kubelet.PID, l.wrong)
}

// next is what is known after a look.
func (l looked) next(now time.Time, told Told, capacity func(device string) (uint64, bool), got Figures, err error) looked {
	l.at, l.wrong, l.unknown = now, "", ""
	switch {
	case errors.Is(err, ErrNotAllowed):
		l.unknown = err.Error()
	case err != nil:
		l.wrong = err.Error()
	default:
		if l.wrong = differs(told, capacity, got); l.wrong == "" {
			l.rightAt = now
		}
	}
	switch {
	case l.wrong == "":
		l.wrongFrom = time.Time{}
	case l.wrongFrom.IsZero():
		l.wrongFrom = now
	}
	return l
}

// differs says in what a summary is not what the kubelet was told, empty if in nothing. A disk whose capacity is not known is not
// compared.
func differs(told Told, capacity func(device string) (uint64, bool), got Figures) string {
	if !told.Split {
		return differsIn("imageFs", told.Images, capacity, got.ImagesBytes)
	}
	if wrong := differsIn("imageFs", told.Images, capacity, got.ImagesBytes); wrong != "" {
		return wrong
	}
	if wrong := differsIn("containerFs", told.Containers, capacity, got.ContainersBytes); wrong != "" {
		return wrong
	}
	if got.Alike { // two disks of one size
		return fmt.Sprintf("it gives imageFs and containerFs the same figures, and %s and %s are two disks", told.Images.Mountpoint, told.Containers.Mountpoint)
	}
	return ""
}

func differsIn(name string, d Disk, capacity func(device string) (uint64, bool), got uint64) string {
	want, ok := capacity(d.Device)
	switch {
	case !ok:
		return ""
	case got == 0:
		return fmt.Sprintf("it has no %s, which is %s", name, d.Mountpoint)
	case math.Abs(float64(got)-float64(want)) > sameShare*float64(want):
		return fmt.Sprintf("it gives %s %d bytes, and %s has %d", name, got, d.Mountpoint, want)
	}
	return ""
}

// lookAtSummary asks one kubelet for its summary if that is due.
func (k *Keeper) lookAtSummary(ctx context.Context, now time.Time, told Told) {
	k.mu.Lock()
	l := k.summary
	k.mu.Unlock()
	if !l.kubelet.same(told.Kubelet) || l.since.IsZero() {
		l = looked{kubelet: told.Kubelet, since: now}
	}
	if l.due(now) {
		limited, cancel := context.WithTimeout(ctx, summaryTimeout)
		got, err := k.sources.Summary(limited, told.Kubelet.PID)
		cancel()
		if ctx.Err() != nil {
			return
		}
		l = l.next(now, told, k.sources.Capacity, got, err)
	}
	k.mu.Lock()
	k.summary = l
	k.mu.Unlock()
}

// SummaryStatus is what is known of the summary of the kubelet that was told of the disks.
type SummaryStatus struct {
	// RightAt is when it last had the disks' figures, nil if not yet.
	RightAt *time.Time `json:"rightAt,omitempty"`
	// Wrong says in what it is not right at the moment; it is a problem only if it stays so.
	Wrong string `json:"wrong,omitempty"`
	// Unknown says why it can't be looked at.
	Unknown string `json:"unknown,omitempty"`
}

func (l looked) status() *SummaryStatus {
	if l.at.IsZero() {
		return nil
	}
	s := &SummaryStatus{Wrong: l.wrong, Unknown: l.unknown}
	if !l.rightAt.IsZero() {
		s.RightAt = &l.rightAt
	}
	return s
}
