package agent

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"runtime/metrics"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/proxy"
)

// Status is the answer of the control socket to GET /v1/status.
type Status struct {
	// Version is cleave's own.
	Version string `json:"version"`
	Mode    string `json:"mode"`
	PID     int    `json:"pid"`
	// StartedAt is when this process started.
	StartedAt time.Time     `json:"startedAt"`
	Listen    string        `json:"listen"`
	Runtime   RuntimeStatus `json:"runtime"`
	// Layout is how nodefs, imagefs and containerfs share filesystems.
	Layout fsstats.LayoutKind `json:"layout"`
	// Roles say which path is for what, and where it is.
	Roles []fsstats.Place `json:"roles"`
	// Filesystems are those of the roles, each once.
	Filesystems []FilesystemStatus `json:"filesystems"`
	// MeasuredAt is when the last measurement ended, nil before the first.
	MeasuredAt *time.Time `json:"measuredAt,omitempty"`
	// MeasureSeconds is how long it took.
	MeasureSeconds float64 `json:"measureSeconds,omitempty"`
	// Problem says why the figures are not whole, empty if they are.
	Problem string `json:"problem,omitempty"`
	// Snapshotter is about the split snapshotter, nil if none is configured.
	Snapshotter *SnapshotterStatus `json:"snapshotter,omitempty"`
	// CRIO is about mode crio, nil in other modes.
	CRIO   *CRIOStatus    `json:"crio,omitempty"`
	Proxy  proxy.Counters `json:"proxy"`
	Memory MemoryStatus   `json:"memory"`
}

// SnapshotterStatus says in short how the split snapshotter is; its own status
// has the figures.
type SnapshotterStatus struct {
	// Endpoint is its status socket.
	Endpoint string `json:"endpoint"`
	// Problems are what keeps it from working, each with what to do, none if all
	// is well.
	Problems []string `json:"problems,omitempty"`
	// Away are roots of it that are not there or not the right ones.
	Away []RootAway `json:"away,omitempty"`
}

// RootAway is a root of the split snapshotter that is not there, or is not the
// right one: what is at its path now says nothing about where layers are.
type RootAway struct {
	Path   string `json:"path"`
	Reason string `json:"reason"`
	Remedy string `json:"remedy"`
}

// snapshotterTimeout bounds the question to the snapshotter, so that one that
// hangs does not hold up the page that says so.
const snapshotterTimeout = 2 * time.Second

func snapshotterStatus(ctx context.Context, endpoint config.Endpoint) *SnapshotterStatus {
	ctx, cancel := context.WithTimeout(ctx, snapshotterTimeout)
	defer cancel()
	s := &SnapshotterStatus{Endpoint: endpoint.String()}
	status, err := snapshotter.FetchStatus(ctx, endpoint.Path())
	if err != nil {
		s.Problems = []string{err.Error()}
		return s
	}
	s.Problems = status.Problems()
	for _, r := range status.Store.Fence.Reasons {
		if r.Root != "" { // else it is about no root
			s.Away = append(s.Away, RootAway{Path: r.Root, Reason: r.What, Remedy: r.Remedy})
		}
	}
	return s
}

// withoutRootsAway takes back what was made out from roots that are away: the
// place that they have now is that of whatever is below them.
func (s *Status) withoutRootsAway() {
	if s.Snapshotter == nil || len(s.Snapshotter.Away) == 0 {
		return
	}
	s.Layout = fsstats.LayoutUnknown
	s.Roles = slices.Clone(s.Roles)
	for i := range s.Roles {
		for _, away := range s.Snapshotter.Away {
			if rel, err := filepath.Rel(away.Path, s.Roles[i].Configured); err == nil && filepath.IsLocal(rel) {
				s.Roles[i].Note = away.Reason
			}
		}
	}
}

// MemoryStatus is about cleave's own memory, in bytes.
type MemoryStatus struct {
	// HeapBytes is what the heap holds now, dead objects not yet collected
	// included.
	HeapBytes uint64 `json:"heapBytes"`
	// AllocatedBytes is what was ever allocated on the heap.
	AllocatedBytes uint64 `json:"allocatedBytes"`
}

// memoryStatus asks the Go runtime, without stopping it.
func memoryStatus() MemoryStatus {
	samples := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(samples)
	return MemoryStatus{HeapBytes: samples[0].Value.Uint64(), AllocatedBytes: samples[1].Value.Uint64()}
}

// RuntimeStatus is about the container runtime behind the proxy.
type RuntimeStatus struct {
	Endpoint string `json:"endpoint"`
	// Name and Version are as the runtime says them, empty while unreachable.
	Name    string `json:"name,omitempty"`
	Version string `json:"version,omitempty"`
	// Error says why it can't be reached, empty if it can.
	Error string `json:"error,omitempty"`
}

// FilesystemStatus is one filesystem and what is on it.
type FilesystemStatus struct {
	fsstats.Filesystem
	Roles []fsstats.Role `json:"roles"`
	// Classes add up to what is used: the largest first, at the end what
	// belongs to nothing that was measured.
	Classes []ClassUsage `json:"classes"`
}

// filesystemsOf lists the filesystems of a picture, each once, in the order in
// which the roles name them.
func filesystemsOf(p *picture) []FilesystemStatus {
	var out []FilesystemStatus
	for _, place := range p.layout.Places {
		i := slices.IndexFunc(out, func(f FilesystemStatus) bool { return f.Device == place.Filesystem.Device })
		if i >= 0 {
			out[i].Roles = append(out[i].Roles, place.Role)
			continue
		}
		out = append(out, FilesystemStatus{
			Filesystem: place.Filesystem,
			Roles:      []fsstats.Role{place.Role},
			Classes:    p.classes[place.Filesystem.Device],
		})
	}
	return out
}

// WriteText prints a status for people.
func (s Status) WriteText(w io.Writer, now time.Time) error {
	out := page.NewWriter(w)
	out.Printf("cleave %s, mode %s, pid %d, up %s\n", s.Version, s.Mode, s.PID, now.Sub(s.StartedAt).Round(time.Second))
	runtime := fmt.Sprintf("%s %s", s.Runtime.Name, s.Runtime.Version)
	if s.Runtime.Error != "" {
		runtime = "UNREACHABLE: " + s.Runtime.Error
	}
	out.Printf("  listens on %s\n  runtime is %s (%s)\n", s.Listen, s.Runtime.Endpoint, runtime)
	out.Printf("  %d calls, %d in flight, %d connections\n", s.Proxy.Calls, s.Proxy.CallsInFlight, s.Proxy.Connections)
	for _, f := range s.Proxy.Fallbacks {
		out.Printf("  ! %d answers of %s went through uncorrected (%s)\n", f.Count, f.Method, f.Reason)
	}
	out.Printf("\nLayout: %s (%s)\n", s.Layout, s.explainLayout())
	switch {
	case s.MeasuredAt == nil:
		out.Printf("Not measured yet.\n")
	default:
		out.Printf("Measured %s ago in %s.\n", now.Sub(*s.MeasuredAt).Round(time.Second), time.Duration(s.MeasureSeconds*float64(time.Second)).Round(time.Millisecond))
	}
	if s.Problem != "" {
		out.Printf("! Figures are incomplete: %s\n", s.Problem)
	}
	if s.Snapshotter != nil {
		if len(s.Snapshotter.Problems) == 0 {
			out.Printf("The split snapshotter works (`cleave snapshotter status` has its figures).\n")
		}
		for _, p := range s.Snapshotter.Problems {
			out.Printf("! Split snapshotter: %s\n", p)
		}
	}
	if s.CRIO != nil {
		s.CRIO.writeText(out)
	}

	out.Printf("\n")
	// Paths are long and stand last; figures are told once for each filesystem, below.
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	tw := page.NewWriter(table)
	tw.Printf("ROLE\tDEVICE\tPATH\n")
	for _, r := range s.Roles {
		tw.Printf("%s\t%s\t%s\n", r.Role, r.Filesystem.Device, r.Reported)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, r := range s.Roles {
		if r.Note != "" {
			out.Printf("! %s: %s\n", r.Role, r.Note)
		}
	}

	for _, fs := range s.Filesystems {
		roles := make([]string, len(fs.Roles))
		for i, r := range fs.Roles {
			roles[i] = string(r)
		}
		out.Printf("\nDevice %s (%s), %s on %s: %s\n", fs.Device, fs.Source, fs.Type, fs.Mountpoint, strings.Join(roles, ", "))
		out.Printf("  capacity %s, used %s, available %s, %s\n",
			page.Bytes(fs.CapacityBytes), page.Bytes(fs.UsedBytes), page.Bytes(fs.AvailableBytes), inodes(fs.Filesystem))
		classes := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
		cw := page.NewWriter(classes)
		for _, c := range fs.Classes {
			note := ""
			if c.Unmeasured > 0 {
				note = fmt.Sprintf("  + %d not measured", c.Unmeasured)
			}
			cw.Printf("  %s\t%s\t%d inodes\t%s\n", c.Class, page.Bytes(c.Bytes), c.Inodes, note)
		}
		if err := classes.Flush(); err != nil {
			return err
		}
	}
	return out.Err()
}

func (s Status) explainLayout() string {
	if s.Snapshotter != nil && len(s.Snapshotter.Away) > 0 {
		return s.Snapshotter.Away[0].Path + ": " + s.Snapshotter.Away[0].Reason
	}
	switch s.Layout {
	case fsstats.LayoutSingle:
		return "images, writable layers and the kubelet's files share one filesystem"
	case fsstats.LayoutDedicated:
		return "images and writable layers share a filesystem of their own"
	case fsstats.LayoutSplit:
		return "images are apart, writable layers are with the kubelet's files"
	case fsstats.LayoutSeparate:
		return "images, writable layers and the kubelet's files are on filesystems of their own"
	case fsstats.LayoutUnknown:
	}
	return "a role's filesystem is not known"
}

func inodes(fs fsstats.Filesystem) string {
	used, ok := fs.InodesUsed()
	if !ok {
		return "inodes without limit"
	}
	return fmt.Sprintf("inodes used %d of %d", used, *fs.InodesTotal)
}
