package imagelock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	id       = "sha256:5f4d0b5c6a7e8f901234567890abcdef5f4d0b5c6a7e8f901234567890abcdef"
	manifest = "sha256:00000000000000000000000000000000000000000000000000000000000000aa"
)

// all are the names of the image that tests delete.
var all = []string{id, "docker.io/library/app:latest", "docker.io/library/app:v2", "registry.example:5000/team/app:v2", "docker.io/library/app@" + manifest}

// seeing is a book that has seen everything.
func seeing() *Book {
	b := New()
	b.Restore(nil, true)
	return b
}

func encoded(t *testing.T, m proto.Message) []byte {
	t.Helper()
	out, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func image(name string) *runtimeapi.ImageSpec { return &runtimeapi.ImageSpec{Image: name} }

// call is one call that names an image in some way.
func calls(t *testing.T, name string) map[string][]byte {
	return map[string][]byte{
		runtimeapi.ImageService_ImageStatus_FullMethodName: encoded(t, &runtimeapi.ImageStatusRequest{Image: image(name)}),
		runtimeapi.ImageService_PullImage_FullMethodName:   encoded(t, &runtimeapi.PullImageRequest{Image: image(name)}),
		runtimeapi.RuntimeService_CreateContainer_FullMethodName: encoded(t, &runtimeapi.CreateContainerRequest{Config: &runtimeapi.ContainerConfig{
			Image: &runtimeapi.ImageSpec{Image: "other", UserSpecifiedImage: name},
		}}),
		runtimeapi.RuntimeService_CreateContainer_FullMethodName + " with an image volume": encoded(t, &runtimeapi.CreateContainerRequest{Config: &runtimeapi.ContainerConfig{
			Image: image("other"), Mounts: []*runtimeapi.Mount{{}, {Image: image(name)}},
		}}),
	}
}

func (b *Book) called(t *testing.T, ctx context.Context, what string, request []byte) (func(), error) {
	t.Helper()
	method, _, _ := strings.Cut(what, " ")
	fn := b.Holds()[method]
	if fn == nil {
		t.Fatalf("%s is not seen", method)
	}
	return fn(ctx, request)
}

// Each way of naming an image keeps it for two minutes after the call has ended.
func TestNamedImagesStay(t *testing.T) {
	t.Parallel()
	for _, name := range []string{id, strings.TrimPrefix(id, "sha256:"), "5f4d0b5c6a7e", "app", "library/app", "docker.io/app", "index.docker.io/library/app:v2", "app:v2", "app:v9@" + manifest, "elsewhere/app@" + manifest, "registry.example:5000/team/app:v2"} {
		for what, request := range calls(t, name) {
			synctest.Test(t, func(t *testing.T) {
				b := seeing()
				ended, err := b.called(t, t.Context(), what, request)
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Hour) //nolint:forbidigo // virtual time
				if _, err := b.Delete(all); !errors.Is(err, ErrNamed) || !strings.Contains(err.Error(), "under way") {
					t.Errorf("%s of %s is under way: %v", what, name, err)
				}
				ended()
				time.Sleep(Window - time.Second) //nolint:forbidigo // virtual time
				if err := b.Named(all); !errors.Is(err, ErrNamed) || !strings.Contains(err.Error(), "1m59s ago") {
					t.Errorf("%s of %s just before the end of its time: %v", what, name, err)
				}
				time.Sleep(time.Second) //nolint:forbidigo // virtual time
				release, err := b.Delete(all)
				if err != nil {
					t.Fatalf("%s of %s after its time: %v", what, name, err)
				}
				release()
			})
		}
	}
}

func TestOtherImagesGo(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"app:v1", "team/app", "docker.io/team/app:v2", "registry.example:5000/app:v2", "5f4e", "registry.example/team/app:v2", "", "sha256:"} {
		b := seeing()
		for what, request := range calls(t, name) {
			if _, err := b.called(t, t.Context(), what, request); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := b.Delete(all); err != nil {
			t.Errorf("%q keeps it: %v", name, err)
		}
	}
	// What can't be read is the runtime's to refuse.
	b := seeing()
	for method, fn := range b.Holds() {
		if ended, err := fn(t.Context(), []byte("\xff\xff")); ended != nil || err != nil {
			t.Errorf("%s: %v", method, err)
		}
	}
}

// KSS-22: a container is not made while its image is being deleted, and not
// refused because of it either, unless that takes long.
func TestDeletionAndCallsAreSerialised(t *testing.T) {
	t.Parallel()
	for what, request := range calls(t, "app:v2") {
		synctest.Test(t, func(t *testing.T) {
			b := seeing()
			release, err := b.Delete(all)
			if err != nil {
				t.Fatal(err)
			}
			made := false
			go func() {
				ended, err := b.called(t, t.Context(), what, request)
				if err != nil {
					t.Error(err)
				}
				made = true
				ended()
			}()
			time.Sleep(time.Hour) //nolint:forbidigo // virtual time
			synctest.Wait()
			if made {
				t.Errorf("%s did not wait", what)
			}
			release()
			release() // once more does no harm
			synctest.Wait()
			if !made {
				t.Errorf("%s waits for ever", what)
			}
		})
		synctest.Test(t, func(t *testing.T) {
			b := seeing()
			if _, err := b.Delete(all); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			_, err := b.called(t, ctx, what, request)
			if ask := strings.Contains(what, "ImageStatus"); ask != (err == nil) {
				t.Errorf("%s that waited too long: %v", what, err)
			}
		})
	}
}

func TestNothingGoesBeforeAllIsSeen(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := New()
		if _, err := b.Delete(all); !errors.Is(err, ErrBlind) {
			t.Errorf("just started: %v", err)
		}
		time.Sleep(Window) //nolint:forbidigo // virtual time
		if _, err := b.Delete(all); err != nil {
			t.Errorf("after %s: %v", Window, err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		b := seeing()
		if _, err := b.called(t, t.Context(), "/runtime.v1.ImageService/ImageStatus", calls(t, "app")["/runtime.v1.ImageService/ImageStatus"]); err != nil {
			t.Fatal(err)
		}
		list := b.Mentions()
		list = append(list, Mention{Name: "from the future", At: time.Now().Add(24 * time.Hour)}, Mention{Name: "old", At: time.Now().Add(-Window)})
		next := New()
		next.Restore(list, true)
		if err := next.Named(all); !errors.Is(err, ErrNamed) {
			t.Errorf("what a predecessor saw: %v", err)
		}
		if err := next.Named([]string{"old:latest"}); err != nil {
			t.Error(err)
		}
		time.Sleep(Window) //nolint:forbidigo // virtual time
		if err := next.Named([]string{"from the future:latest"}); err != nil {
			t.Errorf("a clock that jumped back: %v", err)
		}
		incomplete := New()
		incomplete.Restore(nil, false)
		if err := incomplete.Named(all); !errors.Is(err, ErrBlind) {
			t.Errorf("a predecessor that crashed: %v", err)
		}
	})
}

// Many names use no more memory than the limit, and lose no image its guard.
func TestTooManyNames(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := seeing()
		for i := range maxNames + 10 {
			b.hold("ImageStatus", []string{fmt.Sprintf("image-%d", i)})()
		}
		if len(b.named) > maxNames {
			t.Errorf("%d are remembered", len(b.named))
		}
		if err := b.Named(all); !errors.Is(err, ErrBlind) {
			t.Errorf("names were forgotten: %v", err)
		}
		time.Sleep(Window) //nolint:forbidigo // virtual time
		b.hold("ImageStatus", []string{"another"})()
		if err := b.Named(all); err != nil || len(b.named) != 1 {
			t.Errorf("%v, %d are remembered", err, len(b.named))
		}
	})
}
