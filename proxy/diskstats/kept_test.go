package diskstats

import (
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

type (
	info  = runtimeapi.ImageFsInfoResponse
	usage = runtimeapi.FilesystemUsage
)

func list(e ...*usage) []*usage { return e }

// configured are facts of a node with two disks of which no more is known than their places.
func configured() *Facts {
	return &Facts{
		Images:     Store{Mountpoint: "/c/images", Device: "8:1", Whole: Usage{Bytes: 1000, Inodes: 100, At: measured}},
		Containers: Store{Mountpoint: "/c/containers", Device: "8:17", Whole: Usage{Bytes: 2000, Inodes: 200, At: measured}},
	}
}

// empty are facts of a node that was not looked at.
func empty() *Facts { return &Facts{Images: Store{Guessed: true}, Containers: Store{Guessed: true}} }

// ask makes the answer for one of the runtime's, nil to be asked without one.
func ask(t *testing.T, k *Kept, upstream *info) *info {
	t.Helper()
	if upstream == nil {
		out, err := k.Fallback(t.Context(), []byte("whatever"))
		if err != nil {
			t.Fatal(err)
		}
		return decoded(t, out)
	}
	in, err := proto.Marshal(upstream)
	if err != nil {
		t.Fatal(err)
	}
	out, err := k.Rewrite(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	if out == nil {
		return upstream
	}
	return decoded(t, out)
}

func decoded(t *testing.T, b []byte) *info {
	t.Helper()
	m := &info{}
	if err := proto.Unmarshal(b, m); err != nil {
		t.Fatal(err)
	}
	return m
}

func TestImageFsInfoIsNeverEmpty(t *testing.T) {
	t.Parallel()
	containerd := &info{ImageFilesystems: list(entry("/images", sampled, 4951261692, 255210))}
	fresh := &info{ImageFilesystems: list(entry("/images", measured, 100, 10)), ContainerFilesystems: list(entry("/containers", measured, 20, 2))}
	roots := &info{ImageFilesystems: list(entry("/c/images", measured, 1000, 100)), ContainerFilesystems: list(entry("/c/containers", measured, 2000, 200))}
	both := func(e *usage) *info {
		return &info{ImageFilesystems: list(e), ContainerFilesystems: list(e)}
	}
	unsplit, unsplitPlaces := split(), configured()
	unsplit.Containers, unsplitPlaces.Containers = unsplit.Images, unsplitPlaces.Images
	for name, tc := range map[string]struct {
		facts    *Facts
		upstream *info
		want     *info
	}{
		"containerd as it is":                  {split(), containerd, fresh},
		"containerd says nothing":              {split(), &info{}, fresh},
		"no answer that can be read":           {split(), nil, fresh},
		"not yet looked at, an answer":         {configured(), &info{ImageFilesystems: list(entry("/elsewhere", sampled, 5, 5))}, &info{ImageFilesystems: list(entry("/c/images", sampled, 5, 5)), ContainerFilesystems: list(entry("/c/containers", sampled, 5, 5))}},
		"not yet looked at, an empty answer":   {configured(), &info{}, roots},
		"not yet looked at, no answer":         {configured(), nil, roots},
		"nil figures":                          {configured(), both(&usage{Timestamp: 7, FsId: &runtimeapi.FilesystemIdentifier{Mountpoint: "/c/images"}}), roots},
		"one filesystem":                       {single(), containerd, &info{ImageFilesystems: list(entry("/images", measured, 100, 10)), ContainerFilesystems: list(entry("/images", measured, 20, 2))}},
		"told unsplit":                         {unsplit, containerd, both(entry("/images", measured, 100, 10))},
		"told unsplit, no answer":              {unsplitPlaces, nil, both(entry("/c/images", measured, 1000, 100))},
		"filled by the runtime itself":         {split(), &info{ImageFilesystems: list(entry("/images", sampled, 1, 1)), ContainerFilesystems: list(entry("/containers", sampled, 2, 2))}, &info{ImageFilesystems: list(entry("/images", sampled, 1, 1)), ContainerFilesystems: list(entry("/containers", sampled, 2, 2))}},
		"filled with a path that nobody knows": {split(), &info{ImageFilesystems: list(entry("/new", sampled, 1, 1)), ContainerFilesystems: list(entry("/new", sampled, 2, 2))}, fresh},
		"filled wrongly by device":             {split(), both(entry("/images", sampled, 1, 1)), fresh},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := ask(t, Keep(&fixed{facts: tc.facts}), tc.upstream)
			if diff := cmp.Diff(tc.want, got, protocmp.Transform()); diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}
		})
	}
}

// When there is nothing fresh the last good answer goes out as it was, times
// included: figures must not look younger than they are.
func TestImageFsInfoKeepsTheLastGoodAnswer(t *testing.T) {
	t.Parallel()
	source := &fixed{facts: split()}
	k := Keep(source)
	good := ask(t, k, &info{ImageFilesystems: list(entry("/images", sampled, 5, 5))})
	source.facts = empty() // the observer's process has lost what it knew, say
	for range 2 {
		for name, upstream := range map[string]*info{"an empty answer": {}, "no answer": nil, "half an answer": {ImageFilesystems: list(&usage{})}} {
			if diff := cmp.Diff(good, ask(t, k, upstream), protocmp.Transform()); diff != "" {
				t.Errorf("%s (-last good +got):\n%s", name, diff)
			}
		}
	}
	// And a fresh one when there is one again.
	facts := split()
	facts.Images.Used = &Usage{Bytes: 7, Inodes: 7, At: measured.Add(time.Minute)}
	source.facts = facts
	if got := ask(t, k, &info{}); got.GetImageFilesystems()[0].GetUsedBytes().GetValue() != 7 {
		t.Errorf("an old answer stays: %v", got)
	}
}

// A kubelet that was told of one disk is not reminded of two by an answer to its predecessor, nor the other way round.
func TestKSS18_AnAnswerToAnotherKubeletIsNotKept(t *testing.T) {
	t.Parallel()
	for name, facts := range map[string][2]*Facts{"two, then one": {split(), single()}, "one, then two": {single(), split()}} {
		source := &fixed{facts: facts[0]}
		k := Keep(source)
		ask(t, k, &info{})
		source.facts = facts[1]
		got := ask(t, k, nil) // the runtime is away
		v := view{Facts: facts[1]}
		if !v.good(got) {
			t.Errorf("%s: it says %v", name, got)
		}
	}
}

// Without any knowledge at all nothing is made up.
func TestImageFsInfoOfWhichNothingIsKnown(t *testing.T) {
	t.Parallel()
	k := Keep(&fixed{facts: empty()})
	if out, err := k.Fallback(t.Context(), nil); out != nil || err == nil {
		t.Errorf("%q, %v", out, err)
	}
	if out, err := k.Rewrite(t.Context(), []byte{0xff}); out != nil || err == nil {
		t.Errorf("garbage: %q, %v", out, err)
	}
}

// The last good answer is read while it is replaced.
func TestKeptIsShared(t *testing.T) {
	t.Parallel()
	k := Keep(&steady{split()})
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 100 {
				ask(t, k, &info{})
				ask(t, k, nil)
			}
		})
	}
	all.Wait()
}

// steady is a source that may be asked from anywhere.
type steady struct{ facts *Facts }

func (s *steady) Facts() *Facts { return s.facts }
func (*steady) Wanted()         {}

// Whatever the runtime says, both lists have a complete entry, of two filesystems.
func FuzzKept(f *testing.F) {
	for _, m := range []*info{{}, {ImageFilesystems: list(entry("/images", sampled, 1, 1))}, {ImageFilesystems: list(&usage{}, nil), ContainerFilesystems: list(entry("/x", sampled, 1, 1))}} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		k := Keep(&steady{split()})
		out, err := k.Rewrite(t.Context(), answer)
		if err != nil {
			if out, err = k.Fallback(t.Context(), answer); err != nil {
				t.Fatal(err)
			}
		}
		if out == nil {
			out = answer
		}
		m := decoded(t, out)
		v := view{Facts: split()}
		if !v.good(m) {
			t.Errorf("%v", m)
		}
	})
}
