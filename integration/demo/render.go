package main

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
)

// pageColumns is the widest line that is printed.
const pageColumns = 100

// intro says what is about to happen.
func intro(keep bool) string {
	end := "At the end, after Ctrl-C or a crash too, all of it is taken down again. KEEP=1 leaves it running."
	if keep {
		end = "At the end it is left running, and you are told how to talk to it and how to take it down."
	}
	return "cleave demo: 12 to 25 seconds, because containerd looks at sizes every 10 s only\n\n" + paragraph("", "A node with two disks (ext4 on loop devices) and a real, unmodified containerd of its own, with "+
		"cleave's snapshotter below and cleave in front. Three pods write known amounts through cleave. Then containerd is asked "+
		"what takes how much and where, directly and through cleave, and both are compared with du.") +
		paragraph("", "The layout is split (KEP-4191): image layers on one disk; what containers write on the other, with the "+
			"kubelet's folder and the logs. containerd alone can't part images from writable layers, nor say that they are.") +
		paragraph("", end) + "\n"
}

// render writes the whole report.
func (r report) render() string {
	var b strings.Builder
	b.WriteString(heading("What was written where, by du"))
	b.WriteString(r.writtenTable())
	b.WriteString(heading("writable_layer, right after everything was written"))
	b.WriteString(layerTable(r.atOnce))
	b.WriteString(heading(fmt.Sprintf("writable_layer, %s later", seconds(r.later))))
	b.WriteString(layerTable(r.layers))
	b.WriteString(heading("On which disk the writable layers are"))
	b.WriteString(r.placeTable())
	b.WriteString("\n")
	for _, text := range r.explainLayers() {
		b.WriteString(paragraph("- ", text))
	}
	b.WriteString(heading("ImageFsInfo, what the kubelet asks about disks"))
	b.WriteString(r.fsInfoTable())
	b.WriteString("\n")
	for _, text := range r.explainFsInfo() {
		b.WriteString(paragraph("- ", text))
	}
	return b.String()
}

func (r report) writtenTable() string {
	t := newTable("WHAT", "WRITTEN BY THE PODS", "DISK", "BYTES", "INODES")
	for _, l := range r.layers {
		t.row("writable layer of "+l.name, l.wrote, r.diskOf(l.upper), l.du.size(), l.du.count())
	}
	for _, m := range []struct {
		what, wrote, disk string
		amount            amount
	}{
		{"layers of the pause containers", "", nodeDisk, r.sandboxes},
		{"image layers, unpacked", "", imagesDisk, r.imageLayers},
		{"content store: layers as pulled", "", imagesDisk, r.content},
		{"volumes (emptyDir)", fmt.Sprintf("%d MiB", r.volumeMiB), nodeDisk, r.volumes},
		{"logs", fmt.Sprintf("%d lines", r.logLines), nodeDisk, r.logs},
	} {
		t.row(m.what, m.wrote, m.disk, m.amount.size(), m.amount.count())
	}
	for _, d := range r.disks {
		t.row("all of "+d.device+", by statfs", "", d.name, d.used.size(), d.used.count())
	}
	return t.String()
}

func layerTable(layers []layer) string {
	t := newTable("CONTAINER", "DU SAYS", "CONTAINERD, ASKED DIRECTLY", "THROUGH CLEAVE")
	for _, l := range layers {
		t.row(l.name, l.du.String(), l.direct.String(), l.through.String())
	}
	return t.String()
}

func (r report) placeTable() string {
	t := newTable("CONTAINER", "ITS FOLDER IS ON", "CONTAINERD SAYS", "THROUGH CLEAVE")
	for _, l := range r.layers {
		t.row(l.name, r.diskOf(l.upper), r.diskOf(l.direct.mountpoint), r.diskOf(l.through.mountpoint))
	}
	return t.String()
}

func (r report) fsInfoTable() string {
	t := newTable("", "CONTAINERD, ASKED DIRECTLY", "THROUGH CLEAVE")
	for _, list := range []struct {
		name            string
		direct, through []figure
	}{
		{"image_filesystems", r.direct.images, r.through.images},
		{"container_filesystems", r.direct.containers, r.through.containers},
	} {
		for i := range max(len(list.direct), len(list.through), 1) {
			direct, through := entry(list.direct, i), entry(list.through, i)
			t.row(list.name, direct.orEmptyList(), through.orEmptyList())
			if direct.mountpoint != "" || through.mountpoint != "" {
				t.row("", r.short(direct.mountpoint), r.short(through.mountpoint))
			}
		}
	}
	return t.String()
}

func entry(list []figure, i int) figure {
	if i < len(list) {
		return list[i]
	}
	return figure{}
}

func (a amount) size() string   { return page.Bytes(a.bytes) }
func (a amount) count() string  { return fmt.Sprint(a.inodes) }
func (a amount) String() string { return fmt.Sprintf("%s, %s", a.size(), plural(a.inodes, "inode")) }

func (f figure) String() string {
	switch {
	case !f.given:
		return "not given"
	case f.blind() && f.amount == (amount{}):
		return "0 bytes at timestamp 0"
	case f.blind():
		return f.amount.String() + ", timestamp 0"
	}
	return f.amount.String()
}

func (f figure) orEmptyList() string {
	if !f.given && f.mountpoint == "" {
		return "(empty list)"
	}
	return f.String()
}

// short leaves out what all paths begin with.
func (r report) short(path string) string { return strings.Replace(path, r.dir+"/", "…/", 1) }

func plural(n uint64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

func heading(text string) string {
	return "\n" + text + "\n" + strings.Repeat("-", min(len(text), pageColumns)) + "\n"
}

// paragraph breaks a text into lines; the first begins with mark.
func paragraph(mark, text string) string {
	var b strings.Builder
	line := mark
	empty := true
	for word := range strings.FieldsSeq(text) {
		switch {
		case empty:
			line += word
		case len([]rune(line))+1+len([]rune(word)) > pageColumns:
			b.WriteString(line + "\n")
			line = strings.Repeat(" ", len(mark)) + word
		default:
			line += " " + word
		}
		empty = false
	}
	return b.String() + line + "\n"
}

// table is text in columns.
type table struct {
	b strings.Builder
	w *tabwriter.Writer
}

func newTable(head ...string) *table {
	t := &table{}
	t.w = tabwriter.NewWriter(&t.b, 0, 0, 3, ' ', 0)
	t.row(head...)
	return t
}

func (t *table) row(cells ...string) { fmt.Fprintln(t.w, strings.Join(cells, "\t")) }

func (t *table) String() string {
	_ = t.w.Flush() //nolint:errcheck // it writes to memory
	var b strings.Builder
	for line := range strings.Lines(t.b.String()) {
		b.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	return b.String()
}
