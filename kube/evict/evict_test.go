package evict

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/cleave-cri/cleave/kube"
)

// fakeAPI is a server with one pod. Its answers to evictions and deletions come in turn, the last one for good; nil lets the pod go.
type fakeAPI struct {
	pod       *kube.Pod
	get       error
	evictions []error
	deletions []error
	// slow is how long each eviction takes, lingers how long a pod that was told to go is still there.
	slow, lingers time.Duration

	// node is the node's own identity, which may not ask about pods that are gone.
	node bool

	calls []string
	gone  time.Time
}

func (f *fakeAPI) ServiceAccount() bool { return !f.node }

var pods = schema.GroupResource{Resource: "pods"}

func (f *fakeAPI) Pod(_ context.Context, namespace, name string) (*kube.Pod, error) {
	if f.get != nil {
		return nil, f.get
	}
	if f.pod == nil || !f.gone.IsZero() && !time.Now().Before(f.gone) || f.pod.Namespace != namespace || f.pod.Name != name {
		if f.node {
			return nil, errNoRight
		}
		return nil, apierrors.NewNotFound(pods, name)
	}
	p := *f.pod
	p.Terminating = p.Terminating || !f.gone.IsZero()
	return &p, nil
}

func (f *fakeAPI) EvictPod(ctx context.Context, _, _, uid string, grace int64) error {
	return f.call(ctx, "evict", uid, grace, &f.evictions)
}

func (f *fakeAPI) DeletePod(ctx context.Context, _, _, uid string, grace int64) error {
	return f.call(ctx, "delete", uid, grace, &f.deletions)
}

var errLost = errors.New("the answer is lost")

func (f *fakeAPI) call(ctx context.Context, verb, uid string, grace int64, answers *[]error) error {
	f.calls = append(f.calls, verb)
	if grace < 1 {
		return errors.New("a pod without grace is forgotten while it still runs")
	}
	if f.slow > 0 {
		timer := time.NewTimer(f.slow)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if uid != f.pod.APIUID {
		return apierrors.NewConflict(pods, f.pod.Name, errors.New("the UID in the precondition does not match"))
	}
	var err error
	if len(*answers) > 0 {
		err = (*answers)[0]
		if len(*answers) > 1 {
			*answers = (*answers)[1:]
		}
	}
	if err == nil || errors.Is(err, errLost) {
		f.gone = time.Now().Add(f.lingers)
	}
	return err
}

func budget(code int32, reason metav1.StatusReason) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: code, Reason: reason, Message: "Cannot evict pod as it would violate the pod's disruption budget.",
		Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause}}},
	}}
}

var (
	errRefused  = budget(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests)
	errDisorder = budget(http.StatusForbidden, metav1.StatusReasonForbidden)
	errBusy     = apierrors.NewTooManyRequests("too many requests", 1)
	errSeveral  = &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: 500, Message: "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."}}
	errDown     = errors.New("dial tcp: connection refused")
	errNoRight  = apierrors.NewForbidden(pods, "p", errors.New("may not"))
	errNobody   = apierrors.NewUnauthorized("who are you?")
)

func pod(change ...func(*kube.Pod)) kube.Pod {
	p := kube.Pod{UID: "u", APIUID: "u", Namespace: "n", Name: "p"}
	for _, c := range change {
		c(&p)
	}
	return p
}

func grace(seconds int64) func(*kube.Pod) { return func(p *kube.Pod) { p.GraceSeconds = &seconds } }

// TestEvict: who goes by which way after how many calls and seconds, and who stays.
func TestEvict(t *testing.T) {
	t.Parallel()
	critical := kube.SystemCritical
	cases := []struct {
		name  string
		order Order
		// now changes the pod as the API server has it.
		now   func(*kube.Pod)
		api   fakeAPI
		o     Options
		want  error
		way   Way
		calls string
		// after is the time until the pod was told to go, or until it was given up.
		after time.Duration
	}{
		{name: "soft", order: Order{Pod: pod()}, way: ByEviction, calls: "evict"},
		{name: "hard", order: Order{Pod: pod(), Hard: true}, way: ByEviction, calls: "evict"},
		{name: "soft, a budget refuses", order: Order{Pod: pod()}, api: fakeAPI{evictions: []error{errRefused}}, want: ErrBudget, calls: "evict"},
		{name: "soft, a budget in disorder refuses", order: Order{Pod: pod()}, api: fakeAPI{evictions: []error{errDisorder}}, want: ErrBudget, calls: "evict"},
		{name: "soft, several budgets", order: Order{Pod: pod()}, api: fakeAPI{evictions: []error{errSeveral}}, want: ErrBudget, calls: "evict"},
		{name: "hard, a budget gives way", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errRefused, errRefused, nil}}, way: ByEviction, calls: "evict evict evict", after: 1500 * time.Millisecond},
		{name: "hard, a budget refuses three times", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errRefused}}, way: ByDeletion, calls: "evict evict evict delete", after: 1500 * time.Millisecond},
		{name: "hard, a budget in disorder", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errDisorder}}, way: ByDeletion, calls: "evict evict evict delete", after: 1500 * time.Millisecond},
		{name: "hard, a budget refuses slowly", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errRefused}, slow: 5 * time.Second}, way: ByDeletion, calls: "evict evict delete", after: 15500 * time.Millisecond},
		{name: "hard, several budgets", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errSeveral}}, way: ByDeletion, calls: "evict delete"},
		{name: "hard, no direct deletion", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errRefused}}, o: Options{NoDirectDeletion: true}, want: ErrBudget, calls: "evict evict evict", after: 1500 * time.Millisecond},
		{name: "soft, without the right", order: Order{Pod: pod()}, api: fakeAPI{evictions: []error{errNoRight}}, want: ErrDenied, calls: "evict"},
		{name: "hard, without the right to evict", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errNoRight}}, way: ByDeletion, calls: "evict delete"},
		{name: "hard, with no right at all", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errNoRight}, deletions: []error{errNoRight}}, want: ErrDenied, calls: "evict delete"},
		{name: "hard, an expired token is no leave to delete", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errNobody}}, want: ErrDenied, calls: "evict"},
		{name: "without the right to look", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{get: errNoRight}, want: ErrDenied},
		{name: "the server is busy, which is no refusal", order: Order{Pod: pod()}, api: fakeAPI{evictions: []error{errBusy, nil}}, way: ByEviction, calls: "evict evict", after: 500 * time.Millisecond},
		{name: "the server is down for good", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{get: errDown}, want: ErrUnreachable, after: 11500 * time.Millisecond},
		{name: "busy for good is no leave to delete", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errBusy}}, want: ErrUnreachable, calls: "evict evict evict evict evict evict", after: 11500 * time.Millisecond},
		{name: "the answer is lost, the pod goes", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errLost}}, way: ByEviction, calls: "evict", after: 500 * time.Millisecond},
		{name: "the answer is lost, the pod takes its time", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{evictions: []error{errLost}, lingers: 3 * time.Second}, way: ByEviction, calls: "evict", after: 500 * time.Millisecond},
		{name: "as the node itself", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{node: true, lingers: 3 * time.Second}, way: ByEviction, calls: "evict"},
		{name: "as the node itself, the answer is lost", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{node: true, evictions: []error{errLost}}, way: ByEviction, calls: "evict", after: 500 * time.Millisecond},
		{name: "as the node itself, not to be seen", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{node: true, get: errNoRight}, want: ErrDenied},
		{name: "on its way already", order: Order{Pod: pod()}, now: func(p *kube.Pod) { p.Terminating = true }, want: ErrStays, way: Already},
		{name: "a successor of the same name", order: Order{Pod: pod()}, now: func(p *kube.Pod) { p.UID, p.APIUID = "v", "v" }, want: ErrNotThis},
		{name: "critical by now", order: Order{Pod: pod()}, now: func(p *kube.Pod) { p.Priority = &critical }, want: ErrProtected},
		{name: "critical", order: Order{Pod: pod(func(p *kube.Pod) { p.Priority = &critical }), Hard: true}, want: ErrProtected},
		{name: "static", order: Order{Pod: pod(func(p *kube.Pod) { p.Static = true }), Hard: true}, want: ErrProtected},
		{name: "mirror", order: Order{Pod: pod(func(p *kube.Pod) { p.Mirror = true }), Hard: true}, want: ErrProtected},
		{name: "of two UIDs", order: Order{Pod: pod(func(p *kube.Pod) { p.APIUID = "v" }), Hard: true}, want: ErrProtected},
		{name: "without a UID", order: Order{Pod: pod(func(p *kube.Pod) { p.UID, p.APIUID = "", "" }), Hard: true}, want: ErrUnknown},
		{name: "does not go", order: Order{Pod: pod(), Hard: true}, api: fakeAPI{lingers: time.Hour}, want: ErrStays, way: ByEviction, calls: "evict"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				api := tc.api
				p := pod()
				if tc.now != nil {
					tc.now(&p)
				}
				api.pod = &p
				began := time.Now()
				out, err := New(&api, tc.o).Evict(t.Context(), tc.order)
				if !errors.Is(err, tc.want) || out.Way != tc.way || strings.Join(api.calls, " ") != tc.calls {
					t.Fatalf("%q by %q (%v); want %q by %q (%v)", api.calls, out.Way, err, tc.calls, tc.way, tc.want)
				}
				ended := time.Now()
				if out.AcceptedAt != nil {
					ended = *out.AcceptedAt
				}
				if got := ended.Sub(began); got != tc.after && out.Way != Already {
					t.Errorf("after %s, want %s", got, tc.after)
				}
				if (out.Way == ByDeletion) != (out.Why != "") {
					t.Errorf("the reason of %q is %q", out.Way, out.Why)
				}
				if tc.want == nil && out.GoneAt == nil {
					t.Error("when it was gone is not said")
				}
				if n := strings.Count(tc.calls, "evict") + strings.Count(tc.calls, "delete"); out.Calls != n {
					t.Errorf("%d calls counted, %d made", out.Calls, n)
				}
			})
		})
	}
}

// TestGrace has the kubelet's rules (SYN-29, SYN-30).
func TestGrace(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		o    Order
		want int64
	}{
		{"hard", Order{Pod: pod(grace(300)), Hard: true, MaxGraceSeconds: 60}, 1},
		{"the pod's is shorter", Order{Pod: pod(grace(30)), MaxGraceSeconds: 60}, 30},
		{"the node's is shorter", Order{Pod: pod(grace(300)), MaxGraceSeconds: 60}, 60},
		{"the pod has none", Order{Pod: pod(), MaxGraceSeconds: 60}, 60},
		{"the kubelet's default of 0", Order{Pod: pod(grace(30))}, 1},
		{"less than 0 does not defer to the pod", Order{Pod: pod(grace(30)), MaxGraceSeconds: -1}, 1},
		{"a pod without any time", Order{Pod: pod(grace(0)), MaxGraceSeconds: 60}, 1},
	} {
		if got := tc.o.GraceSeconds(); got != tc.want {
			t.Errorf("%s: %d s, want %d s", tc.name, got, tc.want)
		}
	}
}

// released lets bytes come free after a while.
type released struct {
	after time.Duration
	gone  *time.Time
}

func (r released) Await(ctx context.Context, uid string) (Released, error) {
	timer := time.NewTimer(r.after)
	defer timer.Stop()
	select {
	case <-timer.C:
		*r.gone = time.Now()
		return Released{Bytes: uint64(len(uid)), Measured: true}, nil
	case <-ctx.Done():
		return Released{}, ctx.Err()
	}
}

// TestBytesAreAwaited: an eviction is over when its bytes are back, or says that they are not.
func TestBytesAreAwaited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := pod()
		var at time.Time
		began := time.Now()
		out, err := New(&fakeAPI{pod: &p, lingers: 2 * time.Second}, Options{Bytes: released{7 * time.Second, &at}}).Evict(t.Context(), Order{Pod: p, Hard: true})
		if err != nil || out.Released == nil || out.Released.Bytes != 1 || time.Since(began) < 9*time.Second {
			t.Errorf("after %s: %+v, %v", time.Since(began), out, err)
		}
		out, err = New(&fakeAPI{pod: &p}, Options{Bytes: released{time.Hour, &at}}).Evict(t.Context(), Order{Pod: p, Hard: true})
		if !errors.Is(err, context.DeadlineExceeded) || out.Released != nil || out.GoneAt == nil {
			t.Errorf("bytes that stay: %+v, %v", out, err)
		}
	})
}
