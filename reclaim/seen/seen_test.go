package seen

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/reclaim/slotfile"
)

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() }) //nolint:errcheck // a temporary file's
	return s
}

func look(s *Store, ids ...string) garbage.Images {
	var list []garbage.Listed
	for _, id := range ids {
		list = append(list, garbage.Listed{ID: id, SizeBytes: 7, Pinned: id == "pinned"})
	}
	now := time.Now()
	images, _ := s.Look(list, []garbage.ImageUser{{ImageID: "used"}}, now, now)
	return images
}

func TestTimesOutlastRestarts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := open(t, dir)
		began := time.Now()
		look(s, "used", "unused", "pinned", "goes")
		if err := s.Save([]Mention{{Name: "app:1", At: began}}, true); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour) //nolint:forbidigo // time is the bubble's
		s = open(t, dir)
		if list, complete := s.Mentions(); !complete || len(list) != 1 || list[0].Name != "app:1" || !list[0].At.Equal(began) {
			t.Errorf("mentions %v, %t", list, complete)
		}
		images := look(s, "used", "unused", "pinned", "new")
		if got := images["unused"]; !got.FirstSeen.Equal(began) || !got.LastUsed.IsZero() || got.ID != "unused" || got.SizeBytes != 7 {
			t.Errorf("unused: %+v", got)
		}
		if got := images["used"]; !got.FirstSeen.Equal(began) || !got.LastUsed.Equal(time.Now()) {
			t.Errorf("used: %+v", got)
		}
		if got := images["new"]; !got.FirstSeen.Equal(time.Now()) {
			t.Errorf("new: %+v", got)
		}
		if !images["pinned"].Pinned || len(images) != 4 {
			t.Errorf("%+v", images)
		}
	})
}

// A clock that jumps back a day makes nothing older, and nothing wait for a day.
func TestClockJumpsBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	now := time.Now()
	tomorrow := now.Add(24 * time.Hour).Round(0)
	s.images["seen"] = garbage.Image{ID: "seen", FirstSeen: tomorrow, LastUsed: tomorrow}
	if err := s.Save(nil, false); err != nil {
		t.Fatal(err)
	}
	got := look(open(t, dir), "seen")["seen"]
	if age := time.Since(got.FirstSeen); age < 0 || age > time.Minute {
		t.Errorf("after a restart it is %s old", age)
	}
	if got.LastUsed.After(time.Now()) {
		t.Errorf("it will be used %s", got.LastUsed)
	}
	// The clock jumps in the life of the process, after it read the file.
	s.images["seen"] = garbage.Image{ID: "seen", FirstSeen: tomorrow}
	if age := time.Since(look(s, "seen")["seen"].FirstSeen); age < 0 || age > time.Minute {
		t.Errorf("it is %s old", age)
	}
}

func TestFilesThatAreNotUnderstood(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(t *testing.T, path string){
		"rubbish": func(t *testing.T, path string) {
			if err := os.WriteFile(path, bytes.Repeat([]byte("x"), 2*slotBytes), 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"another version": func(t *testing.T, path string) { save(t, path, []byte("{}"), version+1) },
		"no JSON":         func(t *testing.T, path string) { save(t, path, []byte("{"), version) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			spoil(t, filepath.Join(dir, FileName))
			s := open(t, dir)
			if !strings.Contains(s.Note(), "begins anew") {
				t.Errorf("it says %q", s.Note())
			}
			if age := time.Since(look(s, "a")["a"].FirstSeen); age > time.Minute {
				t.Errorf("it is %s old", age)
			}
			if _, complete := s.Mentions(); complete {
				t.Error("it says that all calls were seen")
			}
			if err := s.Save(nil, true); err != nil {
				t.Fatal(err)
			}
			if again := open(t, dir); again.Note() != "" || len(again.images) != 1 {
				t.Errorf("the next time: %q, %v", again.Note(), again.images)
			}
		})
	}
	if s := open(t, t.TempDir()); s.Note() != "" {
		t.Errorf("a new file: %q", s.Note())
	}
}

func save(t *testing.T, path string, value []byte, version uint32) {
	t.Helper()
	f, err := slotfile.Open(path, slotBytes)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // written with Save
	if _, _, err := f.Load(); err != nil {
		t.Fatal(err)
	}
	if err := f.Save(value, version); err != nil {
		t.Fatal(err)
	}
}

// Of more images than there is room for, the oldest are remembered: the others
// count as new after a restart, which keeps them.
func TestTooManyImages(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	began := time.Now().Add(-time.Hour)
	for i := range 20_000 {
		id := fmt.Sprintf("sha256:%064d", i)
		s.images[id] = garbage.Image{ID: id, FirstSeen: began.Add(time.Duration(i) * time.Millisecond)}
	}
	if err := s.Save(nil, true); err != nil {
		t.Fatal(err)
	}
	got := open(t, dir).images
	if len(got) < 5000 || len(got) == 20_000 {
		t.Errorf("%d are remembered", len(got))
	}
	if _, ok := got[fmt.Sprintf("sha256:%064d", 0)]; !ok {
		t.Error("the oldest is not")
	}
}
