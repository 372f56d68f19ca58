package snapshot

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	storeevents "github.com/containerd/containerd/api/events"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	"github.com/containerd/containerd/api/types"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cleave-cri/cleave/snapshot/inventory"
)

// changes collects what events told since it was asked last. There are none for
// leases, downloads, views and labels, and none for content that the collector
// removes (CTD-92).
type changes struct {
	mu sync.Mutex
	// following says that events come in; guarded by mu.
	following bool
	// generation counts events, stream counts streams of them; guarded by mu.
	generation, stream uint64
	// snapshots are those that events were about; guarded by mu.
	snapshots map[place]map[string]bool
	// ready is closed while following; guarded by mu.
	ready chan struct{}
}

func newChanges() *changes {
	return &changes{snapshots: map[place]map[string]bool{}, ready: make(chan struct{})}
}

// taken is what was told until some moment.
type taken struct {
	// snapshots have changed since the moment before.
	snapshots map[place]map[string]bool
	// generation and stream are those of the moment: what was read in another
	// stream is out of date. following is false if nothing is told now.
	generation, stream uint64
	following          bool
}

// take returns what changed, and forgets it.
func (c *changes) take() taken {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := taken{snapshots: c.snapshots, generation: c.generation, stream: c.stream, following: c.following}
	c.snapshots = map[place]map[string]bool{}
	return t
}

// same says whether nothing has come since, without a gap.
func (c *changes) same(generation uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.following && c.generation == generation
}

// Mark is a moment in what containerd told.
type Mark struct{ generation uint64 }

// Mark is this moment.
func (r *Reader) Mark() Mark {
	r.changes.mu.Lock()
	defer r.changes.mu.Unlock()
	return Mark{generation: r.changes.generation}
}

// Since says that no event has told of a change since a mark. It is false
// without [Reader.Follow], which it can't know then.
func (r *Reader) Since(m Mark) bool { return r.changes.same(m.generation) }

// follow says whether events come in from now on. Between two streams anything
// may have happened.
func (c *changes) follow(following bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.generation++
	if c.following == following {
		return
	}
	c.following = following
	if following {
		c.stream++
		close(c.ready)
	} else {
		c.ready = make(chan struct{})
		c.snapshots = map[place]map[string]bool{}
	}
}

func (c *changes) whenReady() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ready
}

// tell takes an event in.
func (c *changes) tell(namespace string, event *anypb.Any) {
	message, err := event.UnmarshalNew()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.generation++
	if err != nil {
		return // of a kind that we don't know; something has changed
	}
	changed := func(snapshotter, key string) {
		at := place{namespace, snapshotter}
		if c.snapshots[at] == nil {
			c.snapshots[at] = map[string]bool{}
		}
		c.snapshots[at][key] = true
	}
	switch e := message.(type) {
	case *storeevents.SnapshotPrepare:
		changed(e.GetSnapshotter(), e.GetKey())
	case *storeevents.SnapshotCommit:
		changed(e.GetSnapshotter(), e.GetKey())
		changed(e.GetSnapshotter(), e.GetName())
	case *storeevents.SnapshotRemove:
		changed(e.GetSnapshotter(), e.GetKey())
	}
}

const (
	// markTopic is the topic of the event by which a stream is known to have
	// begun: containerd does not say so.
	markTopic = "/cleave/following"
	// markEvery is how often it is sent until it arrives.
	markEvery = 50 * time.Millisecond
	// followAgain is the pause before another try when the stream has ended.
	followAgain = time.Second
	// markNamespace is where the event is sent, which needs one.
	markNamespace = "cleave"
)

// followed are the topics that say something about the store (CTD-90).
var followed = []string{`topic~="^/(snapshot|images|content|containers|sandboxes|namespaces)/"`}

// Follow takes containerd's events in, until ctx ends: it returns nil then. When
// the stream breaks, because containerd restarts, it begins another one, and the
// next reading reads everything. It is for one caller.
func (r *Reader) Follow(ctx context.Context) error {
	for ctx.Err() == nil {
		_ = r.follow(ctx) //nolint:errcheck // it is tried again, and readings don't rely on it meanwhile
		r.changes.follow(false)
		timer := time.NewTimer(followAgain)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
	return nil
}

// follow takes one stream of events in.
func (r *Reader) follow(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	client := eventsapi.NewEventsClient(r.conn)
	mark := markTopic + "/" + rand.Text()
	stream, err := client.Subscribe(ctx, &eventsapi.SubscribeRequest{Filters: append([]string{`topic=="` + mark + `"`}, followed...)})
	if err != nil {
		cancel()
		return fmt.Errorf("subscribe to containerd's events: %w", err)
	}
	arrived := make(chan struct{})
	var marking errgroup.Group
	marking.Go(func() error { return r.mark(ctx, mark, arrived) })
	defer func() {
		cancel()
		err = errors.Join(err, marking.Wait())
	}()
	following := false
	for {
		var e *types.Envelope
		if e, err = stream.Recv(); err != nil {
			return fmt.Errorf("receive containerd's events: %w", err)
		}
		switch {
		case e.GetTopic() == mark && following: // one more was on its way
		case e.GetTopic() == mark:
			following = true
			close(arrived)
			r.changes.follow(true)
		default:
			r.changes.tell(e.GetNamespace(), e.GetEvent())
		}
	}
}

// mark sends an event until it arrives.
func (r *Reader) mark(ctx context.Context, topic string, arrived <-chan struct{}) error {
	event := &anypb.Any{TypeUrl: string((&emptypb.Empty{}).ProtoReflect().Descriptor().FullName())}
	if value, err := proto.Marshal(&emptypb.Empty{}); err == nil {
		event.Value = value
	}
	tick := time.NewTicker(markEvery)
	defer tick.Stop()
	for {
		if _, err := eventsapi.NewEventsClient(r.conn).Publish(withNamespace(ctx, markNamespace), &eventsapi.PublishRequest{Topic: topic, Event: event}); err != nil {
			return fmt.Errorf("mark the beginning of containerd's events: %w", err)
		}
		select {
		case <-arrived:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// followTimeout bounds the wait for the first event of a reading that follows
// events only while it runs.
const followTimeout = 5 * time.Second

// ReadContents reads a store once, and follows its events only meanwhile; for a
// command.
func ReadContents(ctx context.Context, conn grpc.ClientConnInterface) (*inventory.Contents, error) {
	r := NewReader(conn)
	following, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- r.Follow(following) }()
	timer := time.NewTimer(followTimeout)
	select {
	case <-r.changes.whenReady():
	case <-timer.C: // it goes without, and says that it may be unsettled
	case <-ctx.Done():
	}
	timer.Stop()
	c, err := r.Read(ctx)
	cancel()
	return c, errors.Join(err, <-ended)
}
