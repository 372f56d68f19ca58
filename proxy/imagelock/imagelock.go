// Package imagelock keeps images that somebody is about to use from being
// deleted. It notes which images callers of the CRI name, and serialises a
// deletion with the calls that make a container of the same image: containerd
// removes an image that is in use without asking, and between the kubelet's
// ImageStatus and its CreateContainer nothing shows that it will be (KSS-22).
//
// It holds names in memory and reads requests. Only agent may import it, which
// hands it to whoever deletes.
package imagelock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// maxNames bounds what is remembered; a kubelet names some hundred. Beyond
	// it every image counts as named.
	maxNames = 10_000
)

var (
	// ErrNamed says that a call named the image lately, or does now.
	ErrNamed = errors.New("it was named by a call lately")
	// ErrBlind says that not all calls of the last minutes were seen.
	ErrBlind = errors.New("not all calls of the last minutes were seen")
	// errDeleting is the answer for a container whose image is being deleted for
	// longer than a call can be held up.
	errDeleting = errors.New("its image is being deleted; call again")
)

// Mention is an image's name as a call spoke it.
type Mention struct {
	Name   string
	Method string
	At     time.Time
}

// Book is what calls have named. Its methods may be called from several
// goroutines.
type Book struct {
	mu sync.Mutex
	// named are mentions by name as spoken; inFlight counts the calls that are
	// being made.
	named map[string]*entry // guarded by mu
	// deleting are the deletions under way.
	deleting map[*deletion]struct{} // guarded by mu
	// blindUntil: before it, no image is known not to have been named.
	blindUntil time.Time // guarded by mu
}

type entry struct {
	Mention
	inFlight int
}

type deletion struct {
	names map[string]bool // as keys returns them
	ids   []string        // hexadecimal digits of image ids
	done  chan struct{}
}

// New returns an empty book. What was named before is not known: until Window
// has passed, or Restore tells, no image may be deleted.
func New() *Book {
	return &Book{named: map[string]*entry{}, deleting: map[*deletion]struct{}{}, blindUntil: time.Now().Add(Window)}
}

// Restore adds what a predecessor saw. complete says that it saw all calls until
// there were no more, because it was the only way to the runtime and has ended
// in order. Mentions of the future are taken for ones of now.
func (b *Book) Restore(list []Mention, complete bool) {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range list {
		if m.At.After(now) {
			m.At = now
		}
		if now.Sub(m.At) < Window {
			b.noteLocked(m)
		}
	}
	if complete {
		b.blindUntil = time.Time{}
	}
}

// Mentions are those within Window, by name.
func (b *Book) Mentions() []Mention {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []Mention
	for _, e := range b.named {
		if e.inFlight > 0 {
			out = append(out, Mention{Name: e.Name, Method: e.Method, At: now})
		} else if now.Sub(e.At) < Window {
			out = append(out, e.Mention)
		}
	}
	slices.SortFunc(out, func(a, b Mention) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// Hold has the form of the proxy's HoldFunc.
type Hold = func(ctx context.Context, request []byte) (ended func(), err error)

// Holds returns what to do with calls, by full method name: all are noted, and
// wait while an image that they name is being deleted.
func (b *Book) Holds() map[string]Hold {
	return map[string]Hold{
		runtimeapi.ImageService_ImageStatus_FullMethodName: func(ctx context.Context, request []byte) (func(), error) {
			var r runtimeapi.ImageStatusRequest
			if proto.Unmarshal(request, &r) != nil {
				return nil, nil // the runtime's to refuse
			}
			// After a deletion it tells the kubelet to pull. If that takes too
			// long, the question is asked all the same.
			const method = "ImageStatus"
			names := namesOf(r.GetImage())
			ended, err := b.wait(ctx, method, names)
			if err != nil {
				ended = b.hold(method, names)
			}
			return ended, nil
		},
		runtimeapi.ImageService_PullImage_FullMethodName: func(ctx context.Context, request []byte) (func(), error) {
			var r runtimeapi.PullImageRequest
			if proto.Unmarshal(request, &r) != nil {
				return nil, nil
			}
			return b.wait(ctx, "PullImage", namesOf(r.GetImage()))
		},
		runtimeapi.RuntimeService_CreateContainer_FullMethodName: func(ctx context.Context, request []byte) (func(), error) {
			var r runtimeapi.CreateContainerRequest
			if proto.Unmarshal(request, &r) != nil {
				return nil, nil
			}
			names := namesOf(r.GetConfig().GetImage())
			for _, m := range r.GetConfig().GetMounts() {
				names = append(names, namesOf(m.GetImage())...)
			}
			return b.wait(ctx, "CreateContainer", names)
		},
	}
}

func namesOf(s *runtimeapi.ImageSpec) []string {
	return slices.DeleteFunc([]string{s.GetImage(), s.GetUserSpecifiedImage(), s.GetImageRef()}, func(n string) bool { return n == "" })
}

// hold notes names as named by a call that is being made.
func (b *Book) hold(method string, names []string) (ended func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.holdLocked(method, names)
}

func (b *Book) holdLocked(method string, names []string) (ended func()) {
	now := time.Now()
	held := make([]*entry, 0, len(names))
	for _, n := range names {
		if e := b.noteLocked(Mention{Name: n, Method: method, At: now}); e != nil {
			e.inFlight++
			held = append(held, e)
		}
	}
	return sync.OnceFunc(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, e := range held {
			e.inFlight--
			e.At = time.Now() // the window begins when the call has ended
		}
	})
}

// wait is hold as soon as none of the images is being deleted.
func (b *Book) wait(ctx context.Context, method string, names []string) (ended func(), err error) {
	for {
		b.mu.Lock()
		d := b.deletionLocked(names)
		if d == nil {
			ended := b.holdLocked(method, names)
			b.mu.Unlock()
			return ended, nil
		}
		b.mu.Unlock()
		select {
		case <-d.done:
		case <-ctx.Done():
			return nil, fmt.Errorf("%s of %q: %w", method, names, errDeleting)
		}
	}
}

func (b *Book) deletionLocked(names []string) *deletion {
	for d := range b.deleting {
		if slices.ContainsFunc(names, d.means) {
			return d
		}
	}
	return nil
}

// noteLocked remembers a mention. nil means that it is one too many, and that
// because of it every image counts as named for a while.
func (b *Book) noteLocked(m Mention) *entry {
	e := b.named[m.Name]
	if e == nil {
		if len(b.named) >= maxNames {
			maps.DeleteFunc(b.named, func(_ string, e *entry) bool { return e.inFlight == 0 && m.At.Sub(e.At) >= Window })
		}
		if len(b.named) >= maxNames {
			b.blindUntil = m.At.Add(Window)
			return nil
		}
		e = &entry{}
		b.named[m.Name] = e
	}
	e.Mention = m
	return e
}

// Named says why an image must stay, by all the names that it has: its id, tags
// and digests. The error wraps ErrNamed or ErrBlind.
func (b *Book) Named(names []string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.namedLocked(newDeletion(names))
}

func (b *Book) namedLocked(d *deletion) error {
	now := time.Now()
	if left := b.blindUntil.Sub(now); left > 0 {
		return fmt.Errorf("%w; they will be in %s", ErrBlind, left.Round(time.Second))
	}
	var newest *entry
	for _, e := range b.named {
		if (e.inFlight > 0 || now.Sub(e.At) < Window) && d.means(e.Name) && (newest == nil || newest.inFlight == 0 && e.At.After(newest.At) || e.inFlight > 0) {
			newest = e
		}
	}
	switch {
	case newest == nil:
		return nil
	case newest.inFlight > 0:
		return fmt.Errorf("%w: %s of %q is under way", ErrNamed, newest.Method, newest.Name)
	default:
		return fmt.Errorf("%w: %s of %q, %s ago", ErrNamed, newest.Method, newest.Name, now.Sub(newest.At).Round(time.Second))
	}
}

// Delete lets the caller delete the image with these names, unless it must stay
// (see Named). Until release is called, calls that name it wait.
func (b *Book) Delete(names []string) (release func(), err error) {
	d := newDeletion(names)
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.namedLocked(d); err != nil {
		return nil, err
	}
	b.deleting[d] = struct{}{}
	return sync.OnceFunc(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.deleting, d)
		close(d.done)
	}), nil
}

func newDeletion(names []string) *deletion {
	d := &deletion{names: map[string]bool{}, done: make(chan struct{})}
	for _, n := range names {
		for _, k := range keys(n) {
			d.names[k] = true
		}
		if hex := strings.TrimPrefix(n, algorithm); isHex(hex) {
			d.ids = append(d.ids, hex)
		}
	}
	return d
}

// means says whether a name that somebody spoke may stand for the image.
func (d *deletion) means(spoken string) bool {
	if slices.ContainsFunc(keys(spoken), func(k string) bool { return d.names[k] }) {
		return true
	}
	// containerd takes any unique beginning of an id for it (containerd,
	// internal/cri/store/image: Get).
	hex := strings.TrimPrefix(spoken, algorithm)
	return isHex(hex) && slices.ContainsFunc(d.ids, func(id string) bool { return strings.HasPrefix(id, hex) })
}

const algorithm = "sha256:"

func isHex(s string) bool {
	return s != "" && strings.Trim(s, "0123456789abcdef") == ""
}

// keys are what two names of one image have in common, as containerd reads them:
// docker.io and library are what a short name means, latest is what no tag means,
// and beside a digest a tag means nothing. A digest alone is a key, too.
func keys(name string) []string {
	name, digest, _ := strings.Cut(name, "@")
	name = strings.TrimPrefix(strings.TrimPrefix(name, "index."), "docker.io/")
	name = strings.TrimPrefix(name, "library/")
	slash := strings.LastIndexByte(name, '/')
	colon := strings.LastIndexByte(name[slash+1:], ':')
	if digest != "" {
		if colon >= 0 {
			name = name[:slash+1+colon]
		}
		return []string{name + "@" + digest, digest}
	}
	if colon < 0 {
		name += ":latest"
	}
	return []string{name}
}
