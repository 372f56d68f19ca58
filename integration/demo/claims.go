package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cleave-cri/cleave/engine/sim"
)

// claim is something that the demo says about cleave, and whether it held.
type claim struct {
	what string
	// wrong says what was seen instead, empty if the claim held.
	wrong string
}

// claims checks what the demo shows.
func (r report) claims() []claim {
	out := []claim{
		listClaim("the list of image filesystems", r.through.images, r.imageLayers.plus(r.content)),
		listClaim("the list of container filesystems", r.through.containers, r.writable()),
	}
	out = append(out,
		placeClaim("the list of image filesystems", r.diskOf(entry(r.through.images, 0).mountpoint), imagesDisk),
		placeClaim("the list of container filesystems", r.diskOf(entry(r.through.containers, 0).mountpoint), nodeDisk))
	for _, l := range r.layers {
		out = append(out, placeClaim("what "+l.name+" has written", r.diskOf(l.upper), nodeDisk))
		c := claim{what: fmt.Sprintf("the figure of %s is what du says, within 1 %% or 64Ki", l.name)}
		if !l.through.near(l.du.bytes) {
			c.wrong = fmt.Sprintf("%s, but du says %s", l.through, l.du)
		}
		out = append(out, c)
		c = claim{what: fmt.Sprintf("the layer of %s is on a filesystem of that list", l.name)}
		if m := entry(r.through.containers, 0).mountpoint; l.through.mountpoint == "" || l.through.mountpoint != m {
			c.wrong = fmt.Sprintf("%q, but the list has %q", l.through.mountpoint, m)
		}
		out = append(out, c)
	}
	return out
}

// expected checks what the scenario expects of a real node, besides what the report
// is about.
func (d *demo) expected(status string) []claim {
	var out []claim
	if d.scenario.Lab != nil {
		for _, text := range d.scenario.Lab.Says {
			c := claim{what: fmt.Sprintf("cleave status says %q", text)}
			if !strings.Contains(status, text) {
				c.wrong = "it does not"
			}
			out = append(out, c)
		}
	}
	left := d.scenario.Expect[string(sim.CleaveProfile)].AvailableAtLeast
	for _, name := range slices.Sorted(maps.Keys(left)) {
		want := amount{bytes: uint64(max(0, left[name]))}
		c := claim{what: fmt.Sprintf("at least %s are left on the disk %s", want.size(), name)}
		if have, err := available(d.node.Disks[name].Path()); err != nil || have.bytes < want.bytes {
			c.wrong = fmt.Sprintf("%s, %v", have.size(), err)
		}
		out = append(out, c)
	}
	return out
}

// placeClaim is that something is on a disk, or says that it is.
func placeClaim(what, disk, want string) claim {
	c := claim{what: what + " is on the disk " + want}
	if disk != want {
		c.wrong = fmt.Sprintf("it is on %q", disk)
	}
	return c
}

// listClaim is that a list has an entry, complete and right.
func listClaim(name string, list []figure, want amount) claim {
	c := claim{what: name + " is not empty, complete, and what du says"}
	f := entry(list, 0)
	switch {
	case len(list) == 0:
		c.wrong = "it is empty"
	case !f.given || f.timestamp <= 0 || f.mountpoint == "":
		c.wrong = fmt.Sprintf("a field is missing: %s on %q at %d", f, f.mountpoint, f.timestamp)
	case !near(f.bytes, want.bytes):
		c.wrong = fmt.Sprintf("%s, but du says %s", f, want)
	}
	return c
}

func renderClaims(claims []claim) string {
	var b strings.Builder
	b.WriteString(heading("Checked, of the answers through cleave"))
	for _, c := range claims {
		if c.wrong == "" {
			b.WriteString(paragraph("  ok     ", c.what))
		} else {
			b.WriteString(paragraph("  WRONG  ", c.what+": "+c.wrong))
		}
	}
	return b.String() + "\n"
}

// failed is the error if a claim did not hold.
func failed(claims []claim) error {
	var wrong []string
	for _, c := range claims {
		if c.wrong != "" {
			wrong = append(wrong, c.what)
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	return errors.New("what it claims did not hold: " + strings.Join(wrong, "; "))
}
