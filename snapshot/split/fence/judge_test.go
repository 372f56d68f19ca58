package fence

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

func TestJudge(t *testing.T) {
	t.Parallel()
	want := Want{Identity: "ID", Role: Image, MustBeMount: true, Recorded: Recorded{UUID: "uuid", BootID: "boot", Device: 1}}
	good := Seen{Path: "/i", Marker: Marker{Format: 1, Identity: "ID", Role: Image}, UUID: "uuid", BootID: "boot", Device: 1, IsMount: true}
	for _, tc := range []struct {
		name   string
		change func(*Want, *Seen)
		reason string // part of the one reason; empty: none
	}{
		{"right", func(*Want, *Seen) {}, ""},
		{"after a reboot with another number", func(_ *Want, s *Seen) { s.BootID, s.Device = "next", 7 }, ""},
		{"attached anew in the same boot", func(_ *Want, s *Seen) { s.Device = 7 }, ""},
		{"no UUID, same number", func(w *Want, s *Seen) { w.Recorded.UUID, s.UUID = "", "" }, ""},
		{"no UUID, another number in the same boot", func(w *Want, s *Seen) { w.Recorded.UUID, s.UUID, s.Device = "", "", 7 }, "within one boot"},
		{"no UUID, another number in another boot", func(w *Want, s *Seen) { w.Recorded.UUID, s.UUID, s.Device, s.BootID = "", "", 7, "next" }, ""},
		{"a kernel that now tells the UUID", func(w *Want, _ *Seen) { w.Recorded.UUID = "" }, ""},
		{"another UUID", func(_ *Want, s *Seen) { s.UUID = "other" }, "UUID other"},
		{"UUID gone", func(_ *Want, s *Seen) { s.UUID, s.UUIDErr = "", errors.New("why") }, "no UUID (why)"},
		{"missing", func(_ *Want, s *Seen) { s.OpenErr = fs.ErrNotExist }, "does not exist"},
		{"closed to us", func(_ *Want, s *Seen) { s.OpenErr = fs.ErrPermission }, "can't be opened"},
		{"not a mount", func(_ *Want, s *Seen) { s.IsMount = false }, "not a mount point"},
		{"not a mount, and need not be", func(w *Want, s *Seen) { s.IsMount, w.MustBeMount = false, false }, ""},
		{"mounts unknown", func(_ *Want, s *Seen) { s.IsMount, s.MountErr = false, errors.New("why") }, "can't be told"},
		{"no marker", func(_ *Want, s *Seen) { s.MarkerErr = fs.ErrNotExist }, "has no"},
		{"marker unreadable", func(_ *Want, s *Seen) { s.MarkerErr = errors.New("why") }, "can't be read"},
		{"marker of another format", func(_ *Want, s *Seen) { s.Marker.Format = 2 }, "format 2"},
		{"another's", func(_ *Want, s *Seen) { s.Marker.Identity = "other" }, "belongs to snapshotter other"},
		{"nobody's", func(_ *Want, s *Seen) { s.Marker.Identity = "" }, "belongs to snapshotter (none)"},
		{"swapped", func(_ *Want, s *Seen) { s.Marker.Role = Container }, "this is the container root"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w, s := want, good
			tc.change(&w, &s)
			reason, wrong := Judge(w, s)
			if tc.reason == "" {
				if wrong {
					t.Errorf("reason: %v", reason)
				}
				return
			}
			if !wrong || !strings.Contains(reason.What, tc.reason) || reason.Remedy == "" || reason.Root != "/i" {
				t.Errorf("reason %+v, want one with %q", reason, tc.reason)
			}
			if err := error(&Closed{[]Reason{reason}}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.reason) {
				t.Errorf("as an error: %v", err)
			}
		})
	}
}

func TestMountTable(t *testing.T) {
	t.Parallel()
	table := filepath.Join(t.TempDir(), "mountinfo")
	content := "1 0 8:1 / / rw - ext4 /dev/a rw\n" +
		"2 1 8:2 / /a\\040b\\134 rw shared:1 - ext4 /dev/b rw\n" +
		"3 1 0:9 / /x rw - overlay overlay rw,lowerdir=" + strings.Repeat("/l:", 50_000) + "\n" +
		"4 1 8:3 / /x rw - ext4 /dev/c rw\n"
	if err := os.WriteFile(table, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	mounts, err := readMounts(table)
	if err != nil || len(mounts) != 4 || mounts[1].mountpoint != `/a b\` || mounts[3].device != "8:3" {
		t.Fatalf("%+v, %v", mounts, err)
	}
	for _, tc := range []struct {
		name      string
		own, host []mountLine
		path      string
		id        uint64
		want      bool
	}{
		{"same", mounts, mounts, "/x", 4, true},
		{"covered by another", mounts, mounts, "/x", 3, false},
		{"kernel without IDs", mounts, mounts, "/x", 0, true},
		{"not on the host", mounts, mounts[:1], "/x", 4, false},
		{"another on the host", mounts, mounts[:3], "/x", 4, false},
		{"a path that begins alike", mounts, mounts, "/", 4, false},
		{"no mount", mounts, mounts, "/y", 1, false},
	} {
		if got := sameMount(tc.own, tc.host, tc.path, tc.id); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestMarkerRoundTrip(t *testing.T) {
	t.Parallel()
	root, err := rootdir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close() //nolint:errcheck // of a test
	if _, err := ReadMarker(root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("before: %v", err)
	}
	for _, identity := range []string{"one", "two"} {
		if err := WriteMarker(root, identity, Container); err != nil {
			t.Fatal(err)
		}
		if m, err := ReadMarker(root); err != nil || m.Identity != identity || m.Role != Container || m.Format != markerFormat {
			t.Errorf("%+v, %v", m, err)
		}
	}
}
