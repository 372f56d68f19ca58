// Package fence decides whether the two roots of the split snapshotter are
// really those that its database is about. A root that is not mounted, another
// disk in its place, or a database of another node would otherwise make the next
// cleanup delete everything (CTD-62).
//
// Three facts must agree: the random identity in the database with the marker
// file in each root; the UUID of each root's filesystem with the one recorded;
// and, where that is configured, that each root is a mount point. Device
// numbers are only compared on filesystems without UUID, and only within one
// boot: they change over reboots.
//
// It imports rootdir. Only snapshot/split and the packages below it may import
// it.
package fence

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// Role says what a root is for.
type Role string

// The two roots.
const (
	Image     Role = "image"
	Container Role = "container"
)

// MarkerName is the file in each root that says whose it is.
const MarkerName = "cleave-root.json"

// markerFormat is the version of the marker file's form.
const markerFormat = 1

// markerLimit is the longest marker file that is read, in bytes.
const markerLimit = 4 << 10

// Marker is the content of the marker file.
type Marker struct {
	Format   int    `json:"format"`
	Identity string `json:"identity"`
	Role     Role   `json:"role"`
	// Note is for whoever finds the file.
	Note string `json:"note"`
}

// WriteMarker puts the marker in place, synced.
func WriteMarker(root *rootdir.Root, identity string, role Role) error {
	content, err := json.MarshalIndent(Marker{
		Format: markerFormat, Identity: identity, Role: role,
		Note: "This folder belongs to cleave's snapshotter. Without this file, unchanged, it deletes nothing here and refuses to work.",
	}, "", "  ")
	if err != nil {
		return err
	}
	return root.WriteFile(MarkerName, append(content, '\n'), 0o600)
}

// ReadMarker reads the marker. A missing one is fs.ErrNotExist.
func ReadMarker(root *rootdir.Root) (Marker, error) {
	content, err := root.ReadFile(MarkerName, markerLimit)
	if err != nil {
		return Marker{}, err
	}
	var m Marker
	if err := json.Unmarshal(content, &m); err != nil {
		return Marker{}, fmt.Errorf("read the marker %s/%s: %w", root.Path(), MarkerName, err)
	}
	return m, nil
}

// Recorded is what the database knows of a root's filesystem.
type Recorded struct {
	// UUID is the filesystem's, as hex digits; empty: it has none.
	UUID string `json:"uuid,omitempty"`
	// BootID is the boot in which Device was seen.
	BootID string `json:"bootId"`
	// Device is st_dev of the root.
	Device uint64 `json:"device"`
}

// Want is what a root must be.
type Want struct {
	Identity string
	Role     Role
	// MustBeMount: the root must be a mount point.
	MustBeMount bool
	Recorded    Recorded
}

// Seen is what was found at a root's path. An error says why a fact is missing.
type Seen struct {
	Path      string
	OpenErr   error
	Marker    Marker
	MarkerErr error
	// UUID is empty where the filesystem has none.
	UUID    string
	UUIDErr error
	BootID  string
	Device  uint64
	// IsMount: the root is a mount point, in the host's table of mounts too.
	IsMount  bool
	MountErr error
}

// Reason is why a root is not the right one, and what to do about it.
type Reason struct {
	Root   string `json:"root"`
	What   string `json:"what"`
	Remedy string `json:"remedy"`

	// hangs: the root does not answer; busy: another snapshotter has it.
	hangs, busy bool
}

func (r Reason) String() string { return fmt.Sprintf("%s: %s; %s", r.Root, r.What, r.Remedy) }

// Judge compares what was seen with what must be. It gives the first thing that
// is wrong, in the order in which somebody would look: the others mostly follow
// from it. wrong is false if the root is the right one.
func Judge(w Want, s Seen) (reason Reason, wrong bool) {
	because := func(remedy, what string, args ...any) (Reason, bool) {
		return Reason{Root: s.Path, What: fmt.Sprintf(what, args...), Remedy: remedy}, true
	}
	mount := fmt.Sprintf("mount the %s filesystem there; it is noticed without a restart", w.Role)
	switch {
	case errors.Is(s.OpenErr, fs.ErrNotExist):
		return because(mount, "the %s root does not exist", w.Role)
	case s.OpenErr != nil:
		return because(remedy(s.OpenErr, w.Role, mount), "the %s root can't be opened: %v", w.Role, s.OpenErr)
	case w.MustBeMount && s.MountErr != nil:
		return because("make /proc/1/mountinfo readable", "it can't be told whether the %s root is a mount point: %v", w.Role, s.MountErr)
	case w.MustBeMount && !s.IsMount:
		return because(mount+", or allow a plain folder in the configuration", "the %s root is not a mount point of the host", w.Role)
	case errors.Is(s.MarkerErr, fs.ErrNotExist):
		return because(mount+", or initialise empty roots", "the %s root has no %s: it is not mounted, or it is another disk", w.Role, MarkerName)
	case s.MarkerErr != nil:
		return because(remedy(s.MarkerErr, w.Role, "restore the file from a backup of this node"), "the marker of the %s root can't be read: %v", w.Role, s.MarkerErr)
	case s.Marker.Format != markerFormat:
		return because("use the cleave that wrote it", "the marker of the %s root has format %d, this cleave knows %d", w.Role, s.Marker.Format, markerFormat)
	case s.Marker.Identity != w.Identity:
		return because("mount the right disk, or give the database that belongs to these roots",
			"the %s root belongs to snapshotter %s, the database to %s", w.Role, short(s.Marker.Identity), short(w.Identity))
	case s.Marker.Role != w.Role:
		return because("swap the two roots in the configuration or the mounts", "this is the %s root, configured as the %s root", s.Marker.Role, w.Role)
	case w.Recorded.UUID != "" && s.UUID == "":
		return because(mount, "the filesystem has no UUID (%v), the %s root's has %s", orNone(s.UUIDErr), w.Role, w.Recorded.UUID)
	case w.Recorded.UUID != "" && s.UUID != w.Recorded.UUID:
		return because("mount the right disk; if this is a copy that shall replace it, give the copy the UUID of the original",
			"the filesystem has the UUID %s, the %s root's has %s", s.UUID, w.Role, w.Recorded.UUID)
	case w.Recorded.UUID == "" && s.UUID == "" && s.BootID == w.Recorded.BootID && s.Device != w.Recorded.Device:
		return because("mount the right disk, or restart the machine if it was attached anew",
			"the device number changed from %d to %d within one boot, and the filesystem has no UUID to know it by", w.Recorded.Device, s.Device)
	}
	return Reason{}, false
}

// Unfit is why a root can't be used, with what to do about it.
type Unfit struct {
	What, Remedy string

	// busy: another snapshotter has it.
	busy bool
}

func (u *Unfit) Error() string { return u.What + ": " + u.Remedy }

// remedies are by the kernel's error number, where that says what to do.
var remedies = []struct {
	errs   []error
	remedy string // %s is the role
}{
	{[]error{syscall.ENOTDIR, syscall.ELOOP}, "make it a folder, or correct the path in the configuration"},
	{[]error{syscall.EACCES, syscall.EPERM}, "let root read and write it: look at its mode, its attributes (lsattr) and the security modules"},
	{[]error{syscall.EROFS}, "mount the %s filesystem writable; if the kernel made it read-only, its log says why"},
	{[]error{syscall.ENOSPC, syscall.EDQUOT}, "make some room on the %s filesystem"},
	{[]error{syscall.EIO, syscall.EUCLEAN, syscall.ENODATA, syscall.ENXIO, syscall.ENODEV, syscall.ESHUTDOWN}, "look at the kernel's log and check the disk of the %s filesystem"},
	{[]error{syscall.ENOTCONN, syscall.ESTALE, syscall.ETIMEDOUT, syscall.EHOSTDOWN, syscall.EHOSTUNREACH}, "its server is gone: start that, and mount the %s filesystem anew"},
	{[]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM}, "give the process more open files or memory"},
	{[]error{errors.ErrUnsupported}, "use Linux 5.6 or newer, and a filesystem that overlayfs can work on"},
	{[]error{syscall.ENOENT}, "restore what is missing from a backup of this node, or mount the right disk"},
}

// remedy chooses what to do by the kernel's error number; otherwise is for all
// others.
func remedy(err error, role Role, otherwise string) string {
	for _, r := range remedies {
		if slices.ContainsFunc(r.errs, func(e error) bool { return errors.Is(err, e) }) {
			return strings.ReplaceAll(r.remedy, "%s", string(role))
		}
	}
	return otherwise
}

func short(identity string) string {
	if identity == "" {
		return "(none)"
	}
	return identity[:min(len(identity), 12)]
}

func orNone(err error) string {
	if err == nil {
		return "none is set"
	}
	return err.Error()
}

// Closed is the error of everything that the fence refuses. It is an
// errdefs.ErrFailedPrecondition.
type Closed struct{ Reasons []Reason }

func (c *Closed) Error() string {
	text := make([]string, len(c.Reasons))
	for i, r := range c.Reasons {
		text[i] = r.String()
	}
	return "nothing is written or deleted: " + strings.Join(text, "; ")
}

// Unwrap makes it a failed precondition for containerd, an [ErrNoAnswer] if a
// root hangs, and an [ErrBusy] if another snapshotter has one.
func (c *Closed) Unwrap() []error {
	is := []error{errdefs.ErrFailedPrecondition}
	if slices.ContainsFunc(c.Reasons, func(r Reason) bool { return r.hangs }) {
		is = append(is, ErrNoAnswer)
	}
	if slices.ContainsFunc(c.Reasons, func(r Reason) bool { return r.busy }) {
		is = append(is, ErrBusy)
	}
	return is
}
