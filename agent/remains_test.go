package agent

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cleave-cri/cleave/engine"
)

func TestFoldersOfAPodThatGoes(t *testing.T) {
	t.Parallel()
	s := twoPods()
	for uid, want := range map[string]struct{ goes, stays []string }{
		"u1":   {[]string{"/u/c1", "/u/c2", "/u/c3", "/pods/u1/volumes/cache"}, []string{"/logs/u1"}},
		"u2":   {[]string{"/u/c4"}, nil},
		"web":  {}, // a name
		"gone": {}, // nobody knows what it ran
		"new":  {},
	} {
		if goes, stays := foldersOf(s, engine.Eviction{UID: uid}); !slices.Equal(goes, want.goes) || !slices.Equal(stays, want.stays) {
			t.Errorf("%s has %q and %q, want %q and %q", uid, goes, stays, want.goes, want.stays)
		}
	}
	s.layers[1].folders.Upper = ""
	if goes, stays := foldersOf(s, engine.Eviction{UID: "u1"}); goes != nil || stays != nil {
		t.Errorf("one layer is not known, and it has %q and %q", goes, stays)
	}
}

func TestRemainsAreWaitedFor(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name          string
		goes, settles time.Duration
		hangs, fails  bool
		want          bool
		after         time.Duration
	}{
		{"gone before", 0, 2 * time.Second, false, false, true, 2 * time.Second},
		{"gone at last", 2200 * time.Millisecond, 3 * time.Second, false, false, true, 5500 * time.Millisecond},
		{"it stays", time.Hour, 0, false, false, false, remainsWait},
		{"it goes too late to settle", 29 * time.Second, 3 * time.Second, false, false, false, remainsWait},
		{"the disk hangs", 0, 0, true, false, false, remainsWait},
		{"nobody knows", 0, 0, false, true, false, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				began, answers := time.Now(), make(chan struct{})
				r := remaining{settles: tc.settles, allGone: func() (bool, error) {
					switch {
					case tc.hangs:
						<-answers
					case tc.fails:
						return true, errors.New("no such mount")
					}
					return time.Since(began) >= tc.goes, nil
				}}
				got := r.gone(ctx)
				if took := time.Since(began); got != tc.want || took != tc.after {
					t.Errorf("gone: %v after %s, want %v after %s", got, took, tc.want, tc.after)
				}
				close(answers)
				if stop(); r.gone(ctx) {
					t.Error("it is told to be gone at the end")
				}
			})
		})
	}
}
