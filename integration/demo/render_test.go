package main

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files anew")

const mib = 1 << 20

// seen is a run with all blind spots, with figures made up for the test.
func seen() report {
	given := func(bytes, inodes uint64) figure {
		return figure{amount: amount{bytes, inodes}, given: true, timestamp: 1, mountpoint: "/lab/1/images/fs/layers"}
	}
	onNode := func(bytes, inodes uint64) figure {
		f := given(bytes, inodes)
		f.mountpoint = "/lab/1/node/fs"
		return f
	}
	blind := figure{given: true, mountpoint: "/lab/1/images/fs/layers"}
	layers := func(small, churn figure, smallThrough, churnThrough figure) []layer {
		const upper = "/lab/1/node/fs/writable/snapshots/7/diff"
		return []layer{
			{name: "small", wrote: "5 MiB", upper: upper, du: amount{5 * mib, 5}, direct: small, through: smallThrough},
			{name: "churn", wrote: "60 MiB, 3000 files, some come and go", churn: true, upper: upper, du: amount{72 * mib, 3100}, direct: churn, through: churnThrough},
		}
	}
	return report{
		dir:        "/lab/1",
		atOnce:     layers(blind, blind, figure{}, figure{}),
		layers:     layers(given(5*mib, 5), blind, onNode(5*mib, 5), onNode(72*mib, 3050)),
		later:      10300 * time.Millisecond,
		directKnew: 9250 * time.Millisecond, throughKnew: 310 * time.Millisecond,
		direct:      fsInfo{images: []figure{given(19*mib, 511)}},
		through:     fsInfo{images: []figure{given(20*mib, 512)}, containers: []figure{onNode(79*mib, 3061)}},
		imageLayers: amount{12 * mib, 500}, content: amount{8 * mib, 12}, sandboxes: amount{2 * mib, 6},
		volumes: amount{10 * mib, 10}, logs: amount{181248, 6}, volumeMiB: 10, logLines: 4000,
		disks: []filesystem{
			{name: "images", device: "/dev/loop0", path: "/lab/1/images/fs", used: amount{103 * mib, 5780}},
			{name: "node", device: "/dev/loop1", path: "/lab/1/node/fs", used: amount{11 * mib, 33}},
		},
	}
}

// lucky is a run on which containerd looked just in time and was not disturbed.
func lucky() report {
	r := seen()
	for i := range r.layers {
		r.layers[i].direct = r.layers[i].through
		r.layers[i].direct.mountpoint = r.direct.images[0].mountpoint
	}
	r.atOnce = r.layers
	r.direct.images[0].amount = amount{91 * mib, 3700}
	r.direct.containers = r.through.containers
	return r
}

// broken is a run on which cleave was wrong.
func broken() report {
	r := seen()
	r.throughKnew, r.directKnew = 0, 0
	r.layers[0].through = figure{}
	r.layers[1].through.mountpoint = "/elsewhere"
	r.through.containers = nil
	r.direct.images[0].amount.bytes = 99 * mib
	return r
}

func TestRender(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		report report
	}{{"seen", seen()}, {"lucky", lucky()}, {"broken", broken()}} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := intro(tc.name == "lucky") + tc.report.render() + renderClaims(tc.report.claims())
			golden := filepath.Join("testdata", tc.name+".golden")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil { //nolint:gosec // read by all
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("(-want +got), -update writes it anew:\n%s", diff)
			}
			for line := range strings.Lines(got) {
				if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > pageColumns {
					t.Errorf("%d columns: %s", n, line)
				}
			}
		})
	}
}

// TestClaims shows that the demo fails when cleave is wrong.
func TestClaims(t *testing.T) {
	t.Parallel()
	if err := failed(seen().claims()); err != nil {
		t.Error(err)
	}
	for _, tc := range []struct {
		name   string
		change func(*report)
		want   string
	}{
		{"no image list", func(r *report) { r.through.images = nil }, "the list of image filesystems"},
		{"no container list", func(r *report) { r.through.containers = nil }, "the list of container filesystems"},
		{"no timestamp", func(r *report) { r.through.images[0].timestamp = 0 }, "the list of image filesystems"},
		{"no mountpoint", func(r *report) { r.through.containers[0].mountpoint = "" }, "the list of container filesystems"},
		{"sum too large", func(r *report) { r.through.containers[0].bytes += 2 * mib }, "the list of container filesystems"},
		{"layer not given", func(r *report) { r.layers[0].through.given = false }, "the figure of small"},
		{"layer at timestamp 0", func(r *report) { r.layers[1].through.timestamp = 0 }, "the figure of churn"},
		{"more than 64Ki from little", func(r *report) { r.layers[0].through.bytes -= 70 << 10 }, "the figure of small"},
		{"more than 1 % from much", func(r *report) { r.layers[1].through.bytes += mib }, "the figure of churn"},
		{"layer elsewhere", func(r *report) { r.layers[0].through.mountpoint = "/x" }, "the layer of small"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := seen()
			tc.change(&r)
			if err := failed(r.claims()); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q named", err, tc.want)
			}
		})
	}
	for name, change := range map[string]func(*report){
		"64Ki from little": func(r *report) { r.layers[0].through.bytes -= 64 << 10 },
		"half a percent":   func(r *report) { r.layers[1].through.bytes += 360 << 10 },
	} {
		r := seen()
		change(&r)
		if err := failed(r.claims()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestDone shows when one has asked long enough.
func TestDone(t *testing.T) {
	t.Parallel()
	r := seen()
	for _, tc := range []struct {
		name   string
		knew   time.Duration
		layers []layer
		since  time.Duration
		want   bool
	}{
		{"containerd has not looked", 0, r.layers, 8 * time.Second, false},
		{"both know", 5 * time.Second, r.layers, 7 * time.Second, true},
		{"cleave does not know", 5 * time.Second, r.atOnce, 17 * time.Second, false},
		{"nothing comes any more", 0, r.atOnce, 26 * time.Second, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if got := done(report{directKnew: tc.knew}, tc.layers, tc.since); got != tc.want {
				t.Errorf("got %t", got)
			}
		})
	}
}
