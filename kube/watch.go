package kube

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// SourceAPIServer is the name of [Watch] as a source.
const SourceAPIServer = "API server"

// Watch knows this node's pods from the API server: client-go's reflector, which lists, watches, and begins again after a lost
// connection, a 410 or an expired token, with a store of our own below it that keeps a [Pod] of each pod and nothing else.
type Watch struct {
	client *Client

	mu sync.Mutex
	// guarded by mu
	pods  map[string]*Pod // by namespace/name: the API server has one of each name
	odd   map[string]string
	alive time.Time // when the server last told anything
	list  string    // why there is no list
	watch string    // why there is no watch
	whole bool      // a list has come
}

var _ Source = (*Watch)(nil)

// NewWatch prepares it; Run fills it.
func NewWatch(c *Client) *Watch {
	return &Watch{client: c, pods: map[string]*Pod{}, odd: map[string]string{}}
}

// Run watches until ctx ends.
func (w *Watch) Run(ctx context.Context) error {
	quiet := logr.Discard() // what goes wrong is in the snapshot
	ctx = klog.NewContext(ctx, quiet)
	r := cache.NewReflectorWithOptions(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (apiruntime.Object, error) {
			list, err := w.client.listPods(ctx, o)
			w.heard(&w.list, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			events, err := w.client.watchPods(ctx, o)
			w.heard(&w.watch, err)
			if err != nil {
				return nil, err
			}
			return w.listen(events), nil
		},
	}, &wirePod{}, (*watchStore)(w), cache.ReflectorOptions{
		Name: "cleave", Logger: &quiet,
		// A node's view must be back soon after its API server is; one node asks little.
		Backoff: &wait.Backoff{Duration: 500 * time.Millisecond, Cap: 10 * time.Second, Steps: 6, Factor: 2, Jitter: 0.5},
	})
	r.RunWithContext(ctx)
	return context.Cause(ctx)
}

// heard notes that the server answered one of its two questions, or why it did not.
func (w *Watch) heard(question *string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case err == nil:
		w.alive, *question = time.Now(), ""
	case apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.IsInvalid(err):
		// The reflector lists anew. A server that knows no lists by way of a watch calls them invalid.
	default:
		*question = fmt.Sprintf("ask the API server for this node's pods: %v", err)
	}
}

// listen passes events on and notes that they came. A bookmark comes about once a minute.
func (w *Watch) listen(in watch.Interface) watch.Interface {
	return watch.Filter(in, func(e watch.Event) (watch.Event, bool) {
		if e.Type == watch.Error {
			w.heard(&w.watch, apierrors.FromObject(e.Object))
		} else {
			w.heard(&w.watch, nil)
		}
		return e, true
	})
}

// Pods implements [Source].
func (w *Watch) Pods() Snapshot {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := Snapshot{Source: SourceAPIServer, Problem: cmp.Or(w.list, w.watch)}
	if !w.whole {
		return s
	}
	s.AsOf = w.alive
	s.Pods = make([]*Pod, 0, len(w.pods))
	for _, p := range w.pods {
		s.Pods = append(s.Pods, p)
	}
	if s.Problem == "" && len(w.odd) > 0 {
		list := make([]string, 0, len(w.odd))
		for _, why := range w.odd {
			list = append(list, why)
		}
		s.Problem = "left out: " + problems(list)
	}
	return s
}

// watchStore is Watch as the reflector fills it.
type watchStore Watch

var _ cache.ReflectorStore = (*watchStore)(nil)

// Add implements [cache.ReflectorStore].
func (s *watchStore) Add(obj any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.putLocked(obj)
}

// Update implements [cache.ReflectorStore].
func (s *watchStore) Update(obj any) error { return s.Add(obj) }

// Delete implements [cache.ReflectorStore].
func (s *watchStore) Delete(obj any) error {
	w, ok := obj.(*wirePod)
	if !ok {
		return fmt.Errorf("a %T is no pod", obj)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pods, w.key())
	delete(s.odd, w.key())
	return nil
}

// Replace implements [cache.ReflectorStore].
func (s *watchStore) Replace(list []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.pods)
	clear(s.odd)
	for _, obj := range list {
		if err := s.putLocked(obj); err != nil {
			return err
		}
	}
	s.whole = true
	return nil
}

// Resync implements [cache.ReflectorStore].
func (s *watchStore) Resync() error { return nil }

func (p *wirePod) key() string { return p.Metadata.Namespace + "/" + p.Metadata.Name }

func (s *watchStore) putLocked(obj any) error {
	w, ok := obj.(*wirePod)
	if !ok {
		return fmt.Errorf("a %T is no pod", obj)
	}
	key := w.key()
	delete(s.pods, key)
	delete(s.odd, key)
	switch p, err := w.pod(); {
	case err != nil:
		s.odd[key] = err.Error()
	case w.Spec.NodeName != s.client.node:
		// A server that does not know the selector would answer with all nodes' pods.
		s.odd[key] = fmt.Sprintf("pod %s is on node %q", p, w.Spec.NodeName)
	default:
		s.pods[key] = p
	}
	return nil
}
