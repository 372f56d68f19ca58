package deputy

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// maxBody bounds what a caller sends.
const maxBody = 4 << 20

// cluster is what an API server knows of one node. Its methods may be called from
// several goroutines.
type cluster struct {
	// added is called for each new pod, by its key.
	added func(key string)

	mu sync.Mutex
	// guarded by mu
	version int64
	pods    map[string]*corev1.Pod // by namespace/name; a pod is replaced, never changed
	events  map[string]*eventsv1.Event
	node    corev1.Node
	// history is what happened, for watches, the oldest first.
	history []change
	// news is closed at each change, and made anew.
	news chan struct{}
}

// change is one event of a watch.
type change struct {
	version int64
	Type    string
	Object  *corev1.Pod
}

// mostHistory bounds what a watch can be told late; one that is later lists anew.
const mostHistory = 4096

func newCluster() *cluster {
	return &cluster{
		pods: map[string]*corev1.Pod{}, events: map[string]*eventsv1.Event{}, news: make(chan struct{}), version: 1,
		node: corev1.Node{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
			ObjectMeta: metav1.ObjectMeta{Name: NodeName, UID: newUID(), CreationTimestamp: metav1.Now(), ResourceVersion: "1"},
			Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Deputy"}}},
		},
	}
}

// newUID makes a random UUID, as the API server makes UIDs.
func newUID() types.UID {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return types.UID(fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]))
}

func key(namespace, name string) string { return namespace + "/" + name }

// pod is a pod as it is now, nil if there is none.
func (c *cluster) pod(key string) *corev1.Pod {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pods[key]
}

// changed is closed at the next change.
func (c *cluster) changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.news
}

// update replaces a pod by a changed copy, if it still is the one of that UID.
func (c *cluster) update(key string, uid types.UID, do func(*corev1.Pod)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.pods[key]; old != nil && old.UID == uid {
		pod := old.DeepCopy()
		do(pod)
		c.pods[key] = pod
		c.tellLocked("MODIFIED", pod)
	}
}

// remove forgets a pod.
func (c *cluster) remove(key string, uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if pod := c.pods[key]; pod != nil && pod.UID == uid {
		delete(c.pods, key)
		c.tellLocked("DELETED", pod.DeepCopy())
	}
}

func (c *cluster) tellLocked(kind string, pod *corev1.Pod) {
	c.version++
	pod.ResourceVersion = strconv.FormatInt(c.version, 10)
	c.history = append(c.history, change{c.version, kind, pod})
	if len(c.history) > mostHistory {
		c.history = slices.Clone(c.history[len(c.history)-mostHistory/2:])
	}
	close(c.news)
	c.news = make(chan struct{})
}

// handler answers what cleave and the lab ask. ctx ends watches.
func (c *cluster) handler(ctx context.Context) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, "ok") })
	mux.HandleFunc("GET /api/v1/pods", func(w http.ResponseWriter, r *http.Request) { c.list(ctx, w, r) })
	mux.HandleFunc("POST /api/v1/namespaces/{namespace}/pods", c.create)
	mux.HandleFunc("GET /api/v1/namespaces/{namespace}/pods/{name}", c.get)
	mux.HandleFunc("DELETE /api/v1/namespaces/{namespace}/pods/{name}", func(w http.ResponseWriter, r *http.Request) {
		var o metav1.DeleteOptions
		if r.ContentLength != 0 && !read(w, r, &o) {
			return
		}
		c.end(w, r, &o, "")
	})
	mux.HandleFunc("POST /api/v1/namespaces/{namespace}/pods/{name}/eviction", func(w http.ResponseWriter, r *http.Request) {
		var e policyv1.Eviction
		if read(w, r, &e) {
			c.end(w, r, e.DeleteOptions, "EvictionByEvictionAPI")
		}
	})
	mux.HandleFunc("GET /api/v1/nodes/{name}", func(w http.ResponseWriter, _ *http.Request) {
		c.mu.Lock()
		defer c.mu.Unlock()
		answer(w, http.StatusOK, c.node)
	})
	mux.HandleFunc("PATCH /api/v1/nodes/{name}", c.patchNode)
	mux.HandleFunc("PATCH /api/v1/nodes/{name}/status", c.patchNode)
	const events = "/apis/events.k8s.io/v1/namespaces/{namespace}/events"
	mux.HandleFunc("POST "+events, c.createEvent)
	mux.HandleFunc("PATCH "+events+"/{name}", c.patchEvent)
	mux.HandleFunc("GET "+events, c.listEvents)
	mux.HandleFunc("POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews", func(w http.ResponseWriter, r *http.Request) {
		var review authorizationv1.SelfSubjectAccessReview
		if read(w, r, &review) {
			review.Status.Allowed = true // it knows no roles
			answer(w, http.StatusCreated, review)
		}
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fail(w, http.StatusNotFound, metav1.StatusReasonNotFound, "the lab's deputy does not know "+r.URL.Path)
	})
	return mux
}

// list answers a list, or a watch.
func (c *cluster) list(ctx context.Context, w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if q.Get("sendInitialEvents") == "true" {
		// As a server of old: client-go lists then.
		fail(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "sendInitialEvents is not known")
		return
	}
	if q.Get("watch") != "" && q.Get("watch") != "0" {
		c.watch(ctx, w, r)
		return
	}
	c.mu.Lock()
	list := corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, ListMeta: metav1.ListMeta{ResourceVersion: strconv.FormatInt(c.version, 10)}, Items: []corev1.Pod{}}
	for _, key := range slices.Sorted(maps.Keys(c.pods)) {
		list.Items = append(list.Items, *c.pods[key])
	}
	c.mu.Unlock()
	answer(w, http.StatusOK, list)
}

// bookmarkEvery is how often a watch hears that it is alive.
const bookmarkEvery = 30 * time.Second

func (c *cluster) watch(ctx context.Context, w http.ResponseWriter, r *http.Request) {
	seen, err := strconv.ParseInt(r.URL.Query().Get("resourceVersion"), 10, 64)
	if err != nil {
		seen = 0
	}
	c.mu.Lock()
	late := len(c.history) > 0 && seen < c.history[0].version-1
	c.mu.Unlock()
	if late {
		fail(w, http.StatusGone, metav1.StatusReasonExpired, "the watch is too late: list anew")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	out, flusher := json.NewEncoder(w), http.NewResponseController(w)
	bookmark := time.NewTicker(bookmarkEvery)
	defer bookmark.Stop()
	for {
		c.mu.Lock()
		news, version := c.news, c.version
		var changes []change
		for _, h := range c.history {
			if h.version > seen {
				changes = append(changes, h)
			}
		}
		c.mu.Unlock()
		seen = version
		for _, h := range changes {
			if err := out.Encode(map[string]any{"type": h.Type, "object": h.Object}); err != nil {
				return // nobody listens any more
			}
		}
		if err := flusher.Flush(); err != nil {
			return
		}
		select {
		case <-news:
		case <-bookmark.C:
			mark := map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"resourceVersion": strconv.FormatInt(seen, 10)}}
			if err := out.Encode(map[string]any{"type": "BOOKMARK", "object": mark}); err != nil {
				return
			}
		case <-r.Context().Done():
			return
		case <-ctx.Done():
			return
		}
	}
}

func (c *cluster) create(w http.ResponseWriter, r *http.Request) {
	var pod corev1.Pod
	if !read(w, r, &pod) {
		return
	}
	pod.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	pod.Namespace, pod.UID, pod.CreationTimestamp = r.PathValue("namespace"), newUID(), metav1.Now()
	pod.Spec.NodeName = NodeName
	pod.Status = corev1.PodStatus{Phase: corev1.PodPending, QOSClass: corev1.PodQOSBestEffort}
	if pod.Name == "" || len(pod.Spec.Containers) == 0 {
		fail(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "a pod needs a name and a container")
		return
	}
	id := key(pod.Namespace, pod.Name)
	c.mu.Lock()
	_, there := c.pods[id]
	if !there {
		c.pods[id] = &pod
		c.tellLocked("ADDED", &pod)
	}
	c.mu.Unlock()
	if there {
		fail(w, http.StatusConflict, metav1.StatusReasonAlreadyExists, "pod "+id+" is there already")
		return
	}
	c.added(id)
	answer(w, http.StatusCreated, c.pod(id))
}

func (c *cluster) get(w http.ResponseWriter, r *http.Request) {
	id := key(r.PathValue("namespace"), r.PathValue("name"))
	if pod := c.pod(id); pod != nil {
		answer(w, http.StatusOK, pod)
		return
	}
	fail(w, http.StatusNotFound, metav1.StatusReasonNotFound, "there is no pod "+id)
}

// end marks a pod for deletion. cause is the reason of a condition that says so,
// empty for none.
func (c *cluster) end(w http.ResponseWriter, r *http.Request, o *metav1.DeleteOptions, cause string) {
	id := key(r.PathValue("namespace"), r.PathValue("name"))
	pod := c.pod(id)
	if pod == nil {
		fail(w, http.StatusNotFound, metav1.StatusReasonNotFound, "there is no pod "+id)
		return
	}
	if o != nil && o.Preconditions != nil && o.Preconditions.UID != nil && *o.Preconditions.UID != pod.UID {
		fail(w, http.StatusConflict, metav1.StatusReasonConflict, fmt.Sprintf("pod %s has UID %s, not %s", id, pod.UID, *o.Preconditions.UID))
		return
	}
	grace := int64(30)
	switch {
	case o != nil && o.GracePeriodSeconds != nil:
		grace = *o.GracePeriodSeconds
	case pod.Spec.TerminationGracePeriodSeconds != nil:
		grace = *pod.Spec.TerminationGracePeriodSeconds
	}
	c.update(id, pod.UID, func(p *corev1.Pod) {
		if p.DeletionTimestamp == nil {
			now := metav1.Now()
			p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &now, &grace
		}
		if cause != "" {
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: cause})
		}
	})
	answer(w, http.StatusCreated, metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusSuccess})
}

// patchNode merges conditions by their type and replaces taints: all that anybody
// patches.
func (c *cluster) patchNode(w http.ResponseWriter, r *http.Request) {
	var patch struct {
		Spec *struct {
			Taints []corev1.Taint `json:"taints"`
		} `json:"spec"`
		Status struct {
			Conditions []struct {
				corev1.NodeCondition
				Patch string `json:"$patch"`
			} `json:"conditions"`
		} `json:"status"`
	}
	if !read(w, r, &patch) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if patch.Spec != nil {
		c.node.Spec.Taints = patch.Spec.Taints
	}
	for _, p := range patch.Status.Conditions {
		c.node.Status.Conditions = slices.DeleteFunc(c.node.Status.Conditions, func(old corev1.NodeCondition) bool { return old.Type == p.Type })
		if p.Patch != "delete" {
			c.node.Status.Conditions = append(c.node.Status.Conditions, p.NodeCondition)
		}
	}
	c.version++
	c.node.ResourceVersion = strconv.FormatInt(c.version, 10)
	answer(w, http.StatusOK, c.node)
}

// mostEvents bounds the events that are kept.
const mostEvents = 1000

func (c *cluster) createEvent(w http.ResponseWriter, r *http.Request) {
	var e eventsv1.Event
	if !read(w, r, &e) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.events) >= mostEvents {
		fail(w, http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, "there are too many events")
		return
	}
	c.events[e.Name] = &e
	answer(w, http.StatusCreated, e)
}

func (c *cluster) patchEvent(w http.ResponseWriter, r *http.Request) {
	var patch eventsv1.Event
	if !read(w, r, &patch) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.events[r.PathValue("name")]
	if old == nil {
		fail(w, http.StatusNotFound, metav1.StatusReasonNotFound, "there is no such event")
		return
	}
	e := old.DeepCopy()
	e.Series = patch.Series
	c.events[e.Name] = e
	answer(w, http.StatusOK, e)
}

func (c *cluster) listEvents(w http.ResponseWriter, _ *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := eventsv1.EventList{TypeMeta: metav1.TypeMeta{APIVersion: "events.k8s.io/v1", Kind: "EventList"}}
	for _, name := range slices.Sorted(maps.Keys(c.events)) {
		list.Items = append(list.Items, *c.events[name])
	}
	answer(w, http.StatusOK, list)
}

func read(w http.ResponseWriter, r *http.Request, to any) bool {
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(to); err != nil {
		fail(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, "read the request: "+err.Error())
		return false
	}
	return true
}

func answer(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body) //nolint:errcheck // who asked may have gone
}

// fail answers as an API server does, so that clients can tell classes apart.
func fail(w http.ResponseWriter, code int, reason metav1.StatusReason, message string) {
	answer(w, code, metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure,
		Code: int32(code), Reason: reason, Message: message, //nolint:gosec // a status of HTTP
	})
}
