package report

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Controller is what events name as the one who reports.
const Controller = "cleave-cri.github.io/cleave"

// Reason is an event's, one word of a closed set.
type Reason string

// The reasons. Those of the kubelet's have other names, so that nobody takes ours for its own (EVT-n).
const (
	// DisksUnseen: the kubelet does not see the disks as they are. On the node.
	DisksUnseen Reason = "DisksUnseen"
	// ThresholdMet: a filesystem is short of bytes or inodes. On the node.
	ThresholdMet Reason = "DiskThresholdMet"
	// Evicting: a pod is told to go. On the pod.
	Evicting Reason = "DiskEvicting"
	// EvictionRefused: a disruption budget keeps a pod. On the pod.
	EvictionRefused Reason = "DiskEvictionRefused"
	// HeldFire: nobody is evicted, although something is short. On the node.
	HeldFire Reason = "DiskEvictionHeld"
	// ImagesRemoved: images were removed. On the node.
	ImagesRemoved Reason = "DiskImagesRemoved"
)

// What an event's action says was done.
var actions = map[Reason]string{
	ThresholdMet: "Watching", Evicting: "Evicting", EvictionRefused: "Evicting", HeldFire: "Holding", ImagesRemoved: "Reclaiming",
}

const (
	// maxNote is the API's limit of a note, in bytes (pkg/apis/core/validation/events.go).
	maxNote = 1024
	// window is how long the same event counts as one.
	window = 10 * time.Minute
	// sayAgain is the least time between two messages to the API server about one event.
	sayAgain = time.Minute
	// maxWaiting bounds events that are not said yet, maxKnown those that may be counted on.
	maxWaiting, maxKnown = 256, 1024
	// perMinute and atOnce bound events of this node as a whole; series that go on are among them.
	perMinute, atOnce = 30, 20
)

// EventAPI is what events need of the API server; kube.Client is one.
type EventAPI interface {
	CreateEvent(ctx context.Context, e *eventsv1.Event) error
	PatchEvent(ctx context.Context, e *eventsv1.Event) error
}

// Event is something to tell.
type Event struct {
	Reason Reason
	// Warning says that somebody should look.
	Warning bool
	// Pod is what it is about; nil means the node.
	Pod *PodRef
	// About tells apart what is not one event that counts although reason and pod are the same, such as a filesystem's name.
	About string
	// Note is for people, with the figures.
	Note string
}

// PodRef names a pod.
type PodRef struct{ Namespace, Name, UID string }

// Events tells events. Those that are alike, but for their figures, become one that counts; of too many some are dropped.
type Events struct {
	api  EventAPI
	node string

	mu      sync.Mutex
	known   map[key]*told // guarded by mu
	waiting []*told       // guarded by mu; each at most once
	dropped uint64        // guarded by mu
	failed  uint64        // guarded by mu
	last    error         // guarded by mu
	wake    chan struct{}
}

// key is what events have in common that become one.
type key struct {
	reason  Reason
	warning bool
	about   string
	pod     PodRef
}

// told is an event that is told, or to be told.
type told struct {
	event   eventsv1.Event
	first   time.Time
	seen    time.Time // the last time that it happened
	said    time.Time // the last time that the API server was told; zero before
	count   int32
	queued  bool
	refused bool // the API server does not want it
}

// EventCounters say what became of events.
type EventCounters struct {
	// Waiting are not told yet, Dropped never will be because there were too many, and Failed were not taken by the API server.
	Waiting int    `json:"waiting"`
	Dropped uint64 `json:"dropped"`
	Failed  uint64 `json:"failed"`
	// Problem is the last failure, empty if the last one was taken.
	Problem string `json:"problem,omitempty"`
}

// NewEvents prepares them; Run tells them.
func NewEvents(api EventAPI, node string) *Events {
	return &Events{api: api, node: node, known: map[key]*told{}, wake: make(chan struct{}, 1)}
}

// Tell takes an event and never waits.
func (e *Events) Tell(v Event) {
	e.mu.Lock()
	e.tellLocked(v, time.Now())
	e.mu.Unlock()
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// Counters says how it goes.
func (e *Events) Counters() EventCounters {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := EventCounters{Waiting: len(e.waiting), Dropped: e.dropped, Failed: e.failed}
	if e.last != nil {
		c.Problem = e.last.Error()
	}
	return c
}

func (e *Events) tellLocked(v Event, now time.Time) {
	k := key{reason: v.Reason, warning: v.Warning, about: v.About}
	if v.Pod != nil {
		k.pod = *v.Pod
	}
	t := e.known[k]
	if t != nil && now.Sub(t.first) < window && !t.refused {
		t.count++
		t.seen = now
		if t.said.IsZero() {
			t.event.Note = shorten(v.Note) // later the API server takes no other
		}
	} else {
		if len(e.waiting) >= maxWaiting {
			e.dropped++
			return
		}
		e.forgetLocked(now)
		t = &told{event: e.make(v, now), first: now, seen: now, count: 1}
		e.known[k] = t
	}
	if !t.queued && len(e.waiting) < maxWaiting {
		t.queued = true
		e.waiting = append(e.waiting, t)
	}
}

// forgetLocked makes room.
func (e *Events) forgetLocked(now time.Time) {
	if len(e.known) < maxKnown {
		return
	}
	for k, t := range e.known {
		if !t.queued && now.Sub(t.first) >= window {
			delete(e.known, k)
		}
	}
	for k, t := range e.known {
		if len(e.known) < maxKnown {
			return
		}
		if !t.queued {
			delete(e.known, k) // it begins anew if it happens again
		}
	}
}

func (e *Events) make(v Event, now time.Time) eventsv1.Event {
	random := make([]byte, 8)
	_, _ = rand.Read(random) // it never fails (crypto/rand)
	regarding := corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: e.node, UID: types.UID(e.node)}
	namespace, name := metav1.NamespaceDefault, e.node
	if v.Pod != nil {
		regarding = corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: v.Pod.Namespace, Name: v.Pod.Name, UID: types.UID(v.Pod.UID)}
		namespace, name = v.Pod.Namespace, v.Pod.Name
	}
	kind := corev1.EventTypeNormal
	if v.Warning {
		kind = corev1.EventTypeWarning
	}
	const longest = 253 - 1 - 16 // of a name, less ours
	return eventsv1.Event{
		TypeMeta:            metav1.TypeMeta{APIVersion: "events.k8s.io/v1", Kind: "Event"},
		ObjectMeta:          metav1.ObjectMeta{Namespace: namespace, Name: strings.TrimRight(name[:min(len(name), longest)], ".-") + "." + hex.EncodeToString(random)},
		EventTime:           metav1.NewMicroTime(now),
		ReportingController: Controller, ReportingInstance: ("cleave-" + e.node)[:min(len("cleave-"+e.node), 128)],
		Action: actions[v.Reason], Reason: string(v.Reason), Regarding: regarding, Type: kind, Note: shorten(v.Note),
	}
}

// shorten cuts a note to what the API takes.
func shorten(s string) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= maxNote {
		return s
	}
	cut := maxNote - len("…")
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}

// Run tells events until ctx ends.
func (e *Events) Run(ctx context.Context) error {
	budget := float64(atOnce)
	filled := time.Now()
	for {
		now := time.Now()
		budget = min(atOnce, budget+now.Sub(filled).Minutes()*perMinute)
		filled = now
		t, wait := e.next(now)
		if t != nil && budget >= 1 {
			budget--
			e.say(ctx, t)
			continue
		}
		if t != nil {
			wait = time.Minute / perMinute
			e.putBack(t)
		}
		if err := e.sleep(ctx, wait); err != nil {
			return err
		}
	}
}

// sleep waits for news, or for so long; 0 means for news alone.
func (e *Events) sleep(ctx context.Context, d time.Duration) error {
	var ring <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		ring = timer.C
	}
	select {
	case <-ring:
	case <-e.wake:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// next takes the first event that may be told now, or says how long until one may.
func (e *Events) next(now time.Time) (*told, time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var wait time.Duration
	for i, t := range e.waiting {
		due := t.said.Add(sayAgain)
		if t.said.IsZero() || !now.Before(due) {
			e.waiting = append(e.waiting[:i:i], e.waiting[i+1:]...)
			t.queued = false
			return t, 0
		}
		if left := due.Sub(now); wait == 0 || left < wait {
			wait = left
		}
	}
	return nil, wait
}

func (e *Events) putBack(t *told) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !t.queued {
		t.queued = true
		e.waiting = append([]*told{t}, e.waiting...)
	}
}

// say tells one event. One that the API server does not take is not tried again: the next of its kind is.
func (e *Events) say(ctx context.Context, t *told) {
	e.mu.Lock()
	event, again := t.event, !t.said.IsZero()
	if t.count > 1 {
		event.Series = &eventsv1.EventSeries{Count: t.count, LastObservedTime: metav1.NewMicroTime(t.seen)}
	}
	t.said = time.Now()
	e.mu.Unlock()
	var err error
	if again {
		err = e.api.PatchEvent(ctx, &event)
	} else {
		err = e.api.CreateEvent(ctx, &event)
	}
	if ctx.Err() != nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last = nil
	if err != nil {
		e.failed++
		e.last = fmt.Errorf("tell event %s: %w", event.Reason, err)
		// One that is gone, or never came to be, begins anew.
		t.refused = !again || apierrors.IsNotFound(err)
	}
}
