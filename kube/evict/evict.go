package evict

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/cleave-cri/cleave/kube"
)

// The limits of a hard eviction's patience with disruption budgets. The kubelet, which goes for the same pods with its next
// threshold, asks no budget at all.
const (
	// MaxRefusals is how often a budget may refuse.
	MaxRefusals = 3
	// MaxRefused is how long it may.
	MaxRefused = 10 * time.Second
)

const (
	// firstPause is the rest after a refusal or a failure; it doubles up to lastPause.
	firstPause, lastPause = 500 * time.Millisecond, 4 * time.Second
	// lastCalls is how long the last calls may take.
	lastCalls = 15 * time.Second
	// lookEvery is the time between two questions whether a pod is gone.
	lookEvery = time.Second
	// bareWait and graceShare say how long a pod may take to go: the time that it has to end, once and a half, and what the
	// kubelet needs besides (SYN-35, SYN-37).
	bareWait = 40 * time.Second
)

// Errors that callers can tell apart. In none of these cases has a pod been evicted, but for ErrStays.
var (
	// ErrProtected says that the pod is never evicted (SYN-33).
	ErrProtected = errors.New("the pod is protected")
	// ErrNotThis says that there is no pod of that UID (any more), whatever has its name now.
	ErrNotThis = errors.New("the pod is not there any more")
	// ErrBudget says that a disruption budget refuses.
	ErrBudget = errors.New("a disruption budget refuses")
	// ErrDenied says that the identity lacks the right.
	ErrDenied = errors.New("not allowed to")
	// ErrUnknown says that a fact is missing.
	ErrUnknown = errors.New("not known enough")
	// ErrUnreachable says that the API server did not answer to the point.
	ErrUnreachable = errors.New("the API server does not answer")
	// ErrStays says that the pod was evicted but is still there.
	ErrStays = errors.New("the pod was evicted but does not go")
)

// API is what an eviction asks of the API server; [kube.Client] is one.
type API interface {
	// ServiceAccount says that the identity is not the node's own.
	ServiceAccount() bool
	Pod(ctx context.Context, namespace, name string) (*kube.Pod, error)
	EvictPod(ctx context.Context, namespace, name, uid string, graceSeconds int64) error
	DeletePod(ctx context.Context, namespace, name, uid string, graceSeconds int64) error
}

// Released is what came free of a pod.
type Released struct {
	// Bytes are those that its filesystem got back, as far as they were measured.
	Bytes uint64 `json:"bytes"`
	// Measured says whether they were.
	Measured bool `json:"measured"`
}

// Bytes waits until a pod's containers are gone from the runtime and their bytes are back, or ctx ends.
type Bytes interface {
	Await(ctx context.Context, uid string) (Released, error)
}

// Order says who is to be evicted and how.
type Order struct {
	// Pod is the one, as it was ranked.
	Pod kube.Pod
	// Hard is an eviction for a hard threshold or a local limit: 1 s of grace (SYN-29), and budgets are asked but not waited for.
	Hard bool
	// MaxGraceSeconds is evictionMaxPodGracePeriod, for soft ones.
	MaxGraceSeconds int32
}

// GraceSeconds is how long the pod gets: by the kubelet's rules (SYN-29), at least 1 s (SYN-30).
func (o Order) GraceSeconds() int64 {
	if o.Hard {
		return 1
	}
	grace := int64(o.MaxGraceSeconds)
	if own := o.Pod.GraceSeconds; own != nil {
		grace = min(grace, *own)
	}
	return max(1, grace)
}

// Way is how the pod was told to go.
type Way string

// The ways. Empty means that it was not told.
const (
	ByEviction Way = "eviction"
	ByDeletion Way = "deletion"
	// Already means that it was on its way when it was looked at.
	Already Way = "already terminating"
)

// Outcome is what happened, for the record and for metrics.
type Outcome struct {
	Way          Way   `json:"way,omitempty"`
	GraceSeconds int64 `json:"graceSeconds"`
	// Calls counts evictions and deletions that were asked for, Refusals those that a budget refused.
	Calls    int `json:"calls"`
	Refusals int `json:"refusals"`
	// CalledAt is when the first was asked for, AcceptedAt when one was granted, GoneAt when the API server had no such pod any
	// more. Nil means that it did not come to it, or that it is not known.
	CalledAt   *time.Time `json:"calledAt,omitempty"`
	AcceptedAt *time.Time `json:"acceptedAt,omitempty"`
	GoneAt     *time.Time `json:"goneAt,omitempty"`
	// Released is what came free, nil if nobody measured.
	Released *Released `json:"released,omitempty"`
	// Why says why it was a deletion, empty otherwise.
	Why string `json:"why,omitempty"`
}

// Options are an Evictor's. The zero value is the usual one.
type Options struct {
	// NoDirectDeletion keeps hard evictions from deleting a pod that a budget protects: they end in ErrBudget. The kubelet then
	// evicts it, or another one, when its own threshold is met.
	NoDirectDeletion bool
	// Bytes waits for a pod's bytes; nil means that nobody does.
	Bytes Bytes
}

// Evictor evicts pods, for any number of callers at a time.
type Evictor struct {
	api API
	o   Options
}

// New makes an Evictor.
func New(api API, o Options) *Evictor { return &Evictor{api: api, o: o} }

// attempt is one eviction on its way.
type attempt struct {
	*Evictor
	order Order
	out   Outcome
	// unheard is the way of a call whose answer never came: it may have been done.
	unheard Way
	// direct says why the pod is deleted, once it is.
	direct string
}

func (a *attempt) accepted(way Way) {
	a.out.Way, a.out.AcceptedAt = way, now()
	if way == ByDeletion {
		a.out.Why = a.direct
	}
}

// Evict evicts one pod and waits until it and its bytes are gone. What happened is in the outcome also if there is an error.
func (e *Evictor) Evict(ctx context.Context, o Order) (Outcome, error) {
	a := &attempt{Evictor: e, order: o, out: Outcome{GraceSeconds: o.GraceSeconds()}}
	if err := a.check(); err != nil {
		return a.out, err
	}
	if err := a.evict(ctx); err != nil {
		return a.out, fmt.Errorf("evict pod %s: %w", &o.Pod, err)
	}
	if err := a.await(ctx); err != nil {
		return a.out, fmt.Errorf("evict pod %s: %w", &o.Pod, err)
	}
	return a.out, nil
}

// check looks at the order alone.
func (a *attempt) check() error {
	p := &a.order.Pod
	switch why := p.Protected(); {
	case why != "":
		return fmt.Errorf("evict pod %s: %w: %s", p, ErrProtected, why)
	case p.APIUID == "" || p.UID == "":
		return fmt.Errorf("evict pod %s: %w: it has no UID at the API server", p, ErrUnknown)
	case p.APIUID != p.UID:
		return fmt.Errorf("evict pod %s: %w: it stands for another pod", p, ErrProtected)
	}
	return nil
}

// evict asks until the pod is on its way, or nothing more can be done.
func (a *attempt) evict(ctx context.Context) error {
	// What is begun before the deadline may end after it, the deletion too.
	ctx, cancel := context.WithTimeout(ctx, MaxRefused+lastCalls)
	defer cancel()
	deadline := time.Now().Add(MaxRefused)
	pause := firstPause
	for {
		err := a.again(ctx)
		if err == nil && a.out.Way != "" {
			return nil
		}
		if err == nil {
			err = a.ask(ctx)
		}
		switch {
		case err == nil:
			return nil
		case errors.Is(err, ErrBudget) && !a.order.Hard:
			return err
		case errors.Is(err, ErrBudget) || errors.Is(err, errNoEviction):
			if a.direct == "" && a.mayDelete(err, deadline) {
				a.direct = err.Error()
				continue
			}
			if a.o.NoDirectDeletion && (errors.Is(err, errNoEviction) || a.out.Refusals >= MaxRefusals) {
				return err
			}
		case !errors.Is(err, ErrUnreachable):
			return err
		}
		if !time.Now().Before(deadline) {
			return err
		}
		if waitErr := rest(ctx, pause); waitErr != nil {
			return errors.Join(err, waitErr)
		}
		pause = min(2*pause, lastPause)
	}
}

// mayDelete says whether a hard eviction stops asking for leave.
func (a *attempt) mayDelete(err error, deadline time.Time) bool {
	if !a.order.Hard || a.o.NoDirectDeletion {
		return false
	}
	return errors.Is(err, errNoEviction) || a.out.Refusals >= MaxRefusals || !time.Now().Before(deadline)
}

// missing says whether the API server has no such pod. It tells a node's own identity only about pods of that node that it knows,
// and forbids it to ask about any other (plugin/pkg/auth/authorizer/node): after an eviction that is the same.
func (a *attempt) missing(err error) bool {
	return apierrors.IsNotFound(err) || a.out.Calls > 0 && apierrors.IsForbidden(err) && !a.api.ServiceAccount()
}

// again looks at the pod once more, just before acting: it may be another one by now, or have become protected.
func (a *attempt) again(ctx context.Context) error {
	p := &a.order.Pod
	found, err := a.api.Pod(ctx, p.Namespace, p.Name)
	switch {
	case a.missing(err) && a.unheard != "", err == nil && found.Terminating && found.APIUID == p.APIUID && a.unheard != "":
		a.accepted(a.unheard)
		return nil
	case apierrors.IsNotFound(err):
		return ErrNotThis
	case kube.Denied(err):
		return fmt.Errorf("%w look at it again (get pods): %w", ErrDenied, err)
	case err != nil:
		return fmt.Errorf("%w: %w", ErrUnreachable, err)
	case found.APIUID != p.APIUID:
		return fmt.Errorf("%w: another one has its name", ErrNotThis)
	}
	if why := found.Protected(); why != "" {
		return fmt.Errorf("%w: %s", ErrProtected, why)
	}
	if found.Terminating {
		a.out.Way = Already
	}
	return nil
}

// errNoEviction says that asking for leave leads nowhere.
var errNoEviction = errors.New("the eviction can't be asked for")

// ask makes one call: an eviction, or a deletion if there is a reason for it.
func (a *attempt) ask(ctx context.Context) error {
	p := &a.order.Pod
	if a.out.CalledAt == nil {
		a.out.CalledAt = now()
	}
	a.out.Calls++
	way, call := ByEviction, a.api.EvictPod
	if a.direct != "" {
		way, call = ByDeletion, a.api.DeletePod
	}
	err := call(ctx, p.Namespace, p.Name, p.APIUID, a.out.GraceSeconds)
	switch {
	case err == nil:
		a.accepted(way)
		return nil
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%w: %w", ErrNotThis, err)
	case apierrors.IsConflict(err):
		// If it is the UID's, the next look says so.
		return fmt.Errorf("%w to the point: %w", ErrUnreachable, err)
	case way == ByEviction && refused(err):
		a.out.Refusals++
		return fmt.Errorf("%w: %w", ErrBudget, err)
	case way == ByEviction && severalBudgets(err):
		if !a.order.Hard {
			return fmt.Errorf("%w: %w", ErrBudget, err)
		}
		return fmt.Errorf("%w: %w", errNoEviction, err)
	case kube.Denied(err) && way == ByEviction && apierrors.IsForbidden(err) && a.order.Hard:
		return fmt.Errorf("%w: %w pods/eviction (create): %w", errNoEviction, ErrDenied, err)
	case kube.Denied(err):
		return fmt.Errorf("%w %s: %w", ErrDenied, way, err)
	}
	a.unheard = way
	return fmt.Errorf("%w: %w", ErrUnreachable, err)
}

// refused says whether a budget refused. The API server answers 429 then, or 403 when the budget's own figures are in disorder, and
// names the cause; a 429 without it comes from a server that has too much to do, a 403 without it is a missing right
// (pkg/registry/core/pod/storage/eviction.go).
func refused(err error) bool { return apierrors.HasStatusCause(err, policyv1.DisruptionBudgetCause) }

// severalBudgets says whether more than one budget selects the pod: the API server knows no answer to that but 500 and this
// sentence.
func severalBudgets(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Code == http.StatusInternalServerError && strings.Contains(err.Error(), "more than one PodDisruptionBudget")
}

// await waits for the pod to go, then for its bytes.
func (a *attempt) await(ctx context.Context) error {
	limit := bareWait + time.Duration(a.out.GraceSeconds)*3*time.Second/2
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	p := &a.order.Pod
	var last error
	for {
		found, err := a.api.Pod(ctx, p.Namespace, p.Name)
		if a.missing(err) || err == nil && found.APIUID != p.APIUID {
			break
		}
		last = err
		if waitErr := rest(ctx, lookEvery); waitErr != nil {
			return fmt.Errorf("%w within %s: %w", ErrStays, limit, errors.Join(last, waitErr))
		}
	}
	a.out.GoneAt = now()
	if a.o.Bytes == nil {
		return nil
	}
	released, err := a.o.Bytes.Await(ctx, p.UID)
	if err != nil {
		return fmt.Errorf("wait for its bytes: %w", err)
	}
	a.out.Released = &released
	return nil
}

func now() *time.Time { t := time.Now(); return &t }

// rest waits for a while.
func rest(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
