package store

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/snapshot/inventory"
)

// Taken is what something takes on one filesystem.
type Taken struct {
	// Filesystem is its device, "major:minor".
	Filesystem string `json:"filesystem"`
	Bytes      int64  `json:"bytes"`
	Inodes     int64  `json:"inodes"`
}

// Sum is what something takes on all filesystems. With Unknown parts it is a lower
// bound.
type Sum struct {
	Filesystems []Taken `json:"filesystems"`
	Unknown     int     `json:"unknownParts,omitempty"`
}

func sumOf(a inventory.Amount) Sum {
	s := Sum{Filesystems: make([]Taken, len(a.PerFilesystem)), Unknown: a.Unknown}
	for i, f := range a.PerFilesystem {
		s.Filesystems[i] = Taken(f)
	}
	return s
}

// TotalBytes is what it takes on all filesystems together, as far as that is known.
func (s Sum) TotalBytes() int64 { return s.bytes() }

func (s Sum) bytes() (sum int64) {
	for _, t := range s.Filesystems {
		sum += t.Bytes
	}
	return sum
}

// String writes the bytes for people; "at least" if parts are unknown.
func (s Sum) String() string {
	text := page.Bytes(uint64(max(0, s.bytes())))
	if s.Unknown > 0 {
		return "≥" + text
	}
	return text
}

// Images is the answer of `cleave images`.
type Images struct {
	// At is when the reading of the store began.
	At     time.Time `json:"at"`
	Images []Image   `json:"images"`
	// Total is what all layers, blobs and downloads take; Duplicate what
	// compressed layers take that are there unpacked too.
	Total     Sum `json:"total"`
	Duplicate Sum `json:"duplicate"`
	// Problems say what is missing in the figures.
	Problems []string `json:"problems,omitempty"`
}

// Image is an image with what it takes.
type Image struct {
	ID        string   `json:"id"`
	Namespace string   `json:"namespace"`
	Names     []string `json:"names"`
	// ReportedBytes is what the CRI reports, Nominal what its layers and blobs
	// take, Exclusive what comes free if it alone is removed.
	ReportedBytes int64 `json:"reportedBytes"`
	Nominal       Sum   `json:"nominal"`
	Exclusive     Sum   `json:"exclusive"`
	Duplicate     Sum   `json:"duplicate"`
	Pinned        bool  `json:"pinned"`
	// Repullable says whether it can be had again; NotRepullable why not.
	Repullable    bool   `json:"repullable"`
	NotRepullable string `json:"notRepullable,omitempty"`
	Users         []User `json:"users"`
}

// User is somebody who uses an image.
type User struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	ID        string `json:"id"`
}

func imagesOf(p *inventory.Picture, problems []error) Images {
	list := Images{At: p.At, Images: make([]Image, len(p.Images)), Total: sumOf(p.Total), Duplicate: sumOf(p.Duplicate), Problems: problemsOf(p, problems)}
	for i := range p.Images {
		from := &p.Images[i]
		image := Image{
			ID: from.ID, Namespace: from.Namespace, Names: from.Names, ReportedBytes: from.ReportedBytes,
			Nominal: sumOf(from.Nominal), Exclusive: sumOf(from.Exclusive), Duplicate: sumOf(from.Duplicate),
			Pinned: from.Pinned, Repullable: from.Repullable, NotRepullable: from.NotRepullable, Users: make([]User, len(from.Users)),
		}
		for j, u := range from.Users {
			image.Users[j] = User{Kind: string(u.Kind), Namespace: u.Namespace, ID: u.ID}
		}
		list.Images[i] = image
	}
	slices.SortStableFunc(list.Images, func(a, b Image) int { return int(min(1, max(-1, b.Exclusive.bytes()-a.Exclusive.bytes()))) })
	return list
}

// maxProblems is how many of the same kind are told one by one.
const maxProblems = 5

func problemsOf(p *inventory.Picture, problems []error) (out []string) {
	for _, u := range p.Unread {
		out = append(out, "not read: "+u)
	}
	if p.Unsettled {
		out = append(out, "the store was changing while it was read: figures may be off")
	}
	for i, err := range problems {
		if i == maxProblems {
			out = append(out, fmt.Sprintf("and %d more", len(problems)-i))
			break
		}
		out = append(out, err.Error())
	}
	return out
}

// short makes a digest or key fit in a line.
func short(id string) string {
	id = strings.TrimPrefix(id, "sha256:")
	if len(id) > 12 && !strings.ContainsAny(id, "/.: ") {
		return id[:12]
	}
	return id
}

// name is the one of an image's names that says most to people: a tag.
func (i Image) name() string {
	for _, n := range i.Names {
		if !strings.Contains(n, "@") && !strings.HasPrefix(n, "sha256:") {
			return n
		}
	}
	for _, n := range i.Names {
		if at, _, ok := strings.Cut(n, "@"); ok {
			return at
		}
	}
	return "-"
}

func (i Image) use() string {
	if len(i.Users) == 0 {
		return "-"
	}
	counts := map[string]int{}
	var kinds []string
	for _, u := range i.Users {
		if counts[u.Kind] == 0 {
			kinds = append(kinds, u.Kind)
		}
		counts[u.Kind]++
	}
	slices.Sort(kinds)
	for j, k := range kinds {
		kinds[j] = fmt.Sprintf("%d %s", counts[k], k)
	}
	return strings.Join(kinds, ", ")
}

// WriteText writes the list for people.
func (l Images) WriteText(w io.Writer, _ time.Time) error {
	out := page.NewWriter(w)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	tw := page.NewWriter(table)
	tw.Printf("ID\tTAKES\tFREES ALONE\tPACKED TOO\tPINNED\tPULLABLE\tUSED BY\tNAME\n")
	for _, i := range l.Images {
		pinned, pullable := "-", "no"
		if i.Pinned {
			pinned = "pinned"
		}
		if i.Repullable {
			pullable = "yes"
		}
		tw.Printf("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", short(i.ID), i.Nominal, i.Exclusive, i.Duplicate, pinned, pullable, i.use(), i.name())
	}
	if err := table.Flush(); err != nil {
		return err
	}
	out.Printf("\n%d images. All layers, blobs and downloads take %s, of which %s are packed layers that are there unpacked too.\n", len(l.Images), l.Total, l.Duplicate)
	for _, t := range l.Total.Filesystems {
		out.Printf("  device %s: %s, %d inodes\n", t.Filesystem, page.Bytes(uint64(max(0, t.Bytes))), t.Inodes)
	}
	if l.Total.Unknown > 0 {
		out.Printf("  %d parts are not measured here, layers of containers among them\n", l.Total.Unknown)
	}
	for _, p := range l.Problems {
		out.Printf("! %s\n", p)
	}
	return out.Err()
}

// Orphans is the answer of `cleave orphans`.
type Orphans struct {
	At      time.Time `json:"at"`
	Orphans []Orphan  `json:"orphans"`
	// Unread says what could not be read; then there are no orphans, because an
	// owner could be there.
	Unread   bool     `json:"unread"`
	Problems []string `json:"problems,omitempty"`
}

// Orphan is something that nobody owns.
type Orphan struct {
	Kind      inventory.OrphanKind `json:"kind"`
	Namespace string               `json:"namespace,omitempty"`
	ID        string               `json:"id"`
	// Proof says by what facts nobody owns it.
	Proof string `json:"proof"`
	// Since is when it was made or last written, nil if that is not known.
	Since *time.Time `json:"since,omitempty"`
	// Bytes is what it takes, nil if that is not known.
	Bytes *int64 `json:"bytes,omitempty"`
}

func orphansOf(p *inventory.Picture, orphans []inventory.Orphan, problems []error) Orphans {
	list := Orphans{At: p.At, Orphans: make([]Orphan, len(orphans)), Unread: len(p.Unread) > 0, Problems: problemsOf(p, problems)}
	for i, from := range orphans {
		o := Orphan{Kind: from.Kind, Namespace: from.Namespace, ID: from.ID, Proof: from.Proof}
		if !from.Since.IsZero() {
			o.Since = &from.Since
		}
		if from.Takes.Unknown == 0 && from.Kind != inventory.OrphanMount {
			bytes := from.Takes.Bytes()
			o.Bytes = &bytes
		}
		list.Orphans[i] = o
	}
	return list
}

// WriteText writes the list for people.
func (l Orphans) WriteText(w io.Writer, now time.Time) error {
	out := page.NewWriter(w)
	var known int64
	for _, o := range l.Orphans {
		bytes, age := "size unknown", ""
		if o.Bytes != nil {
			bytes = page.Bytes(uint64(max(0, *o.Bytes)))
			known += max(0, *o.Bytes)
		}
		if o.Kind == inventory.OrphanMount {
			bytes = "no bytes of its own"
		}
		if o.Since != nil {
			age = ", " + now.Sub(*o.Since).Round(time.Second).String() + " old"
		}
		where := ""
		if o.Namespace != "" {
			where = " in namespace " + o.Namespace
		}
		out.Printf("%s %s%s: %s%s\n  %s\n", o.Kind, o.ID, where, bytes, age, o.Proof)
	}
	switch {
	case l.Unread:
		out.Printf("Nothing is called an orphan while a part of the store can't be read: its owner could be there.\n")
	case len(l.Orphans) == 0:
		out.Printf("Everything has an owner.\n")
	default:
		out.Printf("\n%d orphans, at least %s. Nothing was removed.\n", len(l.Orphans), page.Bytes(uint64(known)))
	}
	for _, p := range l.Problems {
		out.Printf("! %s\n", p)
	}
	return out.Err()
}
