package deputy

import (
	"context"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/kube/evict"
	"github.com/cleave-cri/cleave/kube/rights"
	"github.com/cleave-cri/cleave/lab/podapi"
)

// server serves a cluster whose pods go as soon as they are told to, and gives the
// lab's client and cleave's.
func server(t *testing.T) (*cluster, *podapi.Client, *kube.Client) {
	t.Helper()
	c := newCluster()
	ctx, cancel := context.WithCancel(t.Context())
	c.added = func(key string) {
		go func() { // ends with the test
			for {
				news := c.changed()
				if p := c.pod(key); p == nil || p.DeletionTimestamp != nil {
					if p != nil {
						c.remove(key, p.UID)
					}
					return
				}
				select {
				case <-news:
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	identity, err := newIdentity()
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(guarded(identity.Token, c.handler(ctx)))
	if s.TLS, err = identity.tls(); err != nil {
		t.Fatal(err)
	}
	s.StartTLS()
	t.Cleanup(func() { cancel(); s.Close() })
	file := filepath.Join(t.TempDir(), kubeconfigFile)
	text := kubeconfig(s.Listener.Addr().String(), identity)
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	access, err := podapi.ReadKubeconfig(file)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := kube.NewClient(kube.ConnectOptions{Kubeconfig: file, Node: NodeName})
	if err != nil {
		t.Fatal(err)
	}
	mine := podapi.NewClient(access)
	t.Cleanup(mine.Close)
	return c, mine, theirs
}

func somePod(name string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: "i"}}}}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// What cleave asks an API server the deputy answers as one does: its pods are
// known by a watch, an eviction ends the pod of that UID and no other.
func TestCleaveTakesItForAnAPIServer(t *testing.T) {
	t.Parallel()
	c, mine, theirs := server(t)
	watch := kube.NewWatch(theirs)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- watch.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}()
	eventually(t, "the list of no pods is known", func() bool { return !watch.Pods().AsOf.IsZero() })
	made, err := mine.Create(t.Context(), somePod("web"))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pod is known", func() bool { return len(watch.Pods().Pods) == 1 })
	known := *watch.Pods().Pods[0]
	if problem := watch.Pods().Problem; problem != "" || known.UID != string(made.UID) {
		t.Errorf("%+v, %s", known, problem)
	}
	if err := theirs.EvictPod(t.Context(), "default", "web", "another", 1); !apierrors.IsConflict(err) {
		t.Errorf("another pod's eviction: %v", err)
	}
	if c.pod("default/web") == nil {
		t.Fatal("it went")
	}
	outcome, err := evict.New(theirs, evict.Options{}).Evict(t.Context(), evict.Order{Pod: known, Hard: true})
	if err != nil || outcome.Way != evict.ByEviction {
		t.Errorf("%+v, %v", outcome, err)
	}
	eventually(t, "nobody is known", func() bool { return len(watch.Pods().Pods) == 0 })
	if _, err := theirs.Pod(t.Context(), "default", "web"); !apierrors.IsNotFound(err) {
		t.Error(err)
	}
	missing, err := rights.Missing(t.Context(), theirs)
	if err != nil || len(missing) > 0 {
		t.Errorf("missing rights %v, %v", missing, err)
	}
}

// Whoever has not the token gets nothing: who makes pods is root.
func TestTheTokenIsNeeded(t *testing.T) {
	t.Parallel()
	_, mine, _ := server(t)
	thief := podapi.NewClient(podapi.Access{Server: mine.Access().Server, CertPEM: mine.Access().CertPEM, Token: "guess"})
	defer thief.Close()
	if _, err := thief.Pods(t.Context()); !apierrors.IsUnauthorized(err) {
		t.Error(err)
	}
}

func TestWhatIsRefused(t *testing.T) {
	t.Parallel()
	_, mine, _ := server(t)
	if _, err := mine.Create(t.Context(), somePod("a")); err != nil {
		t.Fatal(err)
	}
	if _, err := mine.Create(t.Context(), somePod("a")); !apierrors.IsAlreadyExists(err) {
		t.Errorf("one of that name is there: %v", err)
	}
	empty := somePod("b")
	empty.Spec.Containers = nil
	if _, err := mine.Create(t.Context(), empty); !apierrors.IsInvalid(err) {
		t.Errorf("no containers: %v", err)
	}
	if err := mine.Delete(t.Context(), "default", "none", 1); !apierrors.IsNotFound(err) {
		t.Errorf("no such pod: %v", err)
	}
	if err := mine.EnsureNamespace(t.Context(), "other"); !apierrors.IsNotFound(err) {
		t.Errorf("what it does not know: %v", err)
	}
}
