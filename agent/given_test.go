package agent

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/snapshot"
	"github.com/cleave-cri/cleave/snapshot/split"
)

func TestFigureOf(t *testing.T) {
	t.Parallel()
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	for name, tc := range map[string]struct {
		in   split.SnapshotFigure
		want index.Figure
	}{
		"walked":                {split.SnapshotFigure{Bytes: 5, Inodes: 2, Started: at(1), Finished: at(2), How: "walk"}, index.Figure{Bytes: 5, Inodes: 2, Started: at(1), Finished: at(2), How: "walk"}},
		"nothing changed since": {split.SnapshotFigure{Bytes: 5, Started: at(1), Finished: at(2), StillAt: at(9)}, index.Figure{Bytes: 5, Started: at(9), Finished: at(9)}},
		"a layer":               {split.SnapshotFigure{Bytes: 5, Finished: at(2)}, index.Figure{Bytes: 5, Started: at(2), Finished: at(2)}},
	} {
		if diff := cmp.Diff(tc.want, figureOf(tc.in)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// The split snapshotter's own figures count for its layers and for no other's, and while it does not answer containerd's do.
func TestTheSnapshottersOwnFigures(t *testing.T) {
	t.Parallel()
	x, err := index.New(index.Options{Space: func(string) (index.Space, error) { return index.Space{}, errors.New("not asked") }})
	if err != nil {
		t.Fatal(err)
	}
	layers := []surveyed{
		{layerState: layerState{layer: snapshot.Layer{Snapshotter: "cleave", Key: "a", Class: snapshot.Container, ContainerID: "a"}}, given: true, theirs: true},
		{layerState: layerState{layer: snapshot.Layer{Snapshotter: "overlayfs", Key: "a", Class: snapshot.Image}}, given: true},
	}
	var owners []index.Owner
	for i := range layers {
		layers[i].key = layers[i].snapshot(true).Key()
		owners = append(owners, index.Owner{Kind: layers[i].key.Kind, ID: layers[i].key.ID, Parts: []index.Part{{Name: layers[i].key.Part}}})
	}
	if err := x.SetOwners(owners); err != nil {
		t.Fatal(err)
	}
	var fails error
	b := newGivenBook(usageStore{7}, func(context.Context) (map[string]index.Figure, error) {
		return map[string]index.Figure{"a": {Bytes: 5, Started: time.Now(), Finished: time.Now()}}, fails
	}, time.Second, 0, x, func() {})
	expect := func(own, other int64) {
		t.Helper()
		b.round(t.Context(), &survey{layers: layers})
		for i, want := range []int64{own, other} {
			if p := figuresOf(x.View())[layers[i].key]; p.Figure == nil || p.Figure.Bytes != want {
				t.Errorf("layer %d has %+v, want %d bytes", i, p.Figure, want)
			}
		}
	}
	expect(5, 7)
	fails = errors.New("it is away")
	b.figures = map[layerID]index.Figure{}
	expect(7, 7)
}

// TestTheClockWasSetBackSinceAFigureWasGiven: the next one counts, though its time is an
// earlier one.
func TestTheClockWasSetBackSinceAFigureWasGiven(t *testing.T) {
	t.Parallel()
	l := surveyed{layerState: layerState{layer: snapshot.Layer{Snapshotter: "cleave", Key: "a", Class: snapshot.Container, ContainerID: "a"}}, given: true, theirs: true}
	l.key = l.snapshot(true).Key()
	x, err := index.New(index.Options{Space: func(string) (index.Space, error) { return index.Space{}, errors.New("not asked") }})
	if err != nil {
		t.Fatal(err)
	}
	if err := x.SetOwners([]index.Owner{{Kind: l.key.Kind, ID: l.key.ID, Parts: []index.Part{{Name: l.key.Part}}}}); err != nil {
		t.Fatal(err)
	}
	at, bytes := time.Now().Add(time.Hour), int64(5) // before it was set back
	b := newGivenBook(usageStore{7}, func(context.Context) (map[string]index.Figure, error) {
		if bytes == 0 {
			return nil, errors.New("it is away")
		}
		return map[string]index.Figure{"a": {Bytes: bytes, Started: at, Finished: at}}, nil
	}, time.Minute, time.Minute, x, func() {})
	expect := func(want int64) {
		t.Helper()
		b.round(t.Context(), &survey{layers: []surveyed{l}})
		if p := figuresOf(x.View())[l.key]; p.Figure == nil || p.Figure.Bytes != want || p.Figure.Finished.After(time.Now()) {
			t.Errorf("figure %+v, want %d bytes and a time that is not to come", p.Figure, want)
		}
	}
	expect(7) // nobody can say how old the other one is
	b.figures[layerID{"cleave", "a", time.Time{}}] = index.Figure{Bytes: 5, Started: at, Finished: at}
	at, bytes = time.Now(), 6
	expect(6)
	b.figures[layerID{"cleave", "a", time.Time{}}] = index.Figure{Bytes: 5, Started: at.Add(time.Hour), Finished: at.Add(time.Hour)}
	bytes = 0 // then containerd is asked
	expect(7)
}

// usageStore is a store that has one figure for all.
type usageStore struct{ bytes int64 }

func (usageStore) Inventory(context.Context) (snapshot.Inventory, error) {
	return snapshot.Inventory{}, errors.New("not asked")
}

func (usageStore) Folders(context.Context, snapshot.Layer) (snapshot.Folders, error) {
	return snapshot.Folders{}, errors.New("not asked")
}

func (s usageStore) Usage(context.Context, snapshot.Layer) (snapshot.Usage, error) {
	return snapshot.Usage{Bytes: s.bytes}, nil
}
