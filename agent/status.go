package agent

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"runtime/metrics"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/limits"
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
	// Stuck are the roles whose filesystem does not answer or can't be found. What
	// Roles says of them is what it last was.
	Stuck []StuckRole `json:"stuck,omitempty"`
	// Filesystems are those of the roles, each once.
	Filesystems []FilesystemStatus `json:"filesystems"`
	// Pods are those that the kubelet counts, with what each uses.
	Pods []ephemeral.Usage `json:"pods,omitempty"`
	// MeasuredAt is when it was last found out who there is, nil before the first
	// time. Figures have their own times.
	MeasuredAt *time.Time `json:"measuredAt,omitempty"`
	// MeasureSeconds is how long that took.
	MeasureSeconds float64 `json:"measureSeconds,omitempty"`
	// FiguresSince is before when all that containers wrote is in their figures; nil
	// while one is missing.
	FiguresSince *time.Time `json:"figuresSince,omitempty"`
	// Problem says why the figures are not whole, empty if they are.
	Problem string `json:"problem,omitempty"`
	// Snapshotter is about the split snapshotter, nil if none is configured.
	Snapshotter *SnapshotterStatus `json:"snapshotter,omitempty"`
	// Limits is about limits of writable layers, nil if none are kept.
	Limits *limits.Status `json:"limits,omitempty"`
	// Reclaim is about what reclaims and evicts, nil where that is not configured.
	Reclaim *ReclaimStatus `json:"reclaim,omitempty"`
	// CRIO is about mode crio, nil in other modes.
	CRIO   *CRIOStatus    `json:"crio,omitempty"`
	Proxy  proxy.Counters `json:"proxy"`
	Memory MemoryStatus   `json:"memory"`
}

// StuckRole is a role that nothing new is known of.
type StuckRole struct {
	Role   fsstats.Role `json:"role"`
	Since  time.Time    `json:"since"`
	Reason string       `json:"reason"`
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
	Account
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
			Account:    p.accounts[place.Filesystem.Device],
		})
	}
	return out
}

// stuckRoles lists the roles of a picture that nothing new is known of.
func stuckRoles(p *picture) (out []StuckRole) {
	for _, s := range p.stuck {
		out = append(out, StuckRole{Role: s.Role, Since: s.ProblemSince, Reason: s.Problem.Error()})
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
		out.Printf("Who is there was found out %s ago in %s.\n", now.Sub(*s.MeasuredAt).Round(time.Second), time.Duration(s.MeasureSeconds*float64(time.Second)).Round(time.Millisecond))
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
	if s.Limits != nil {
		writeLimits(out, *s.Limits)
	}
	if s.CRIO != nil {
		s.CRIO.writeText(out)
	}
	if s.Reclaim != nil {
		s.Reclaim.writeText(out, now)
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
	for _, r := range s.Stuck {
		out.Printf("! %s: nothing new for %s: %s\n", r.Role, now.Sub(r.Since).Round(time.Second), r.Reason)
	}

	for _, fs := range s.Filesystems {
		roles := make([]string, len(fs.Roles))
		for i, r := range fs.Roles {
			roles[i] = string(r)
		}
		out.Printf("\nDevice %s (%s), %s on %s: %s\n", fs.Device, fs.Source, fs.Type, fs.Mountpoint, strings.Join(roles, ", "))
		out.Printf("  capacity %s, used %s, available %s, %s\n",
			page.Bytes(fs.CapacityBytes), page.Bytes(fs.UsedBytes), page.Bytes(fs.AvailableBytes), inodes(fs.Filesystem))
		if err := fs.Account.writeText(out, now); err != nil {
			return err
		}
	}
	if err := s.writePods(out); err != nil {
		return err
	}
	return out.Err()
}

// shown is how many folders and pods are named one by one on a page.
const shown = 3

// writeText prints who holds what.
func (a Account) writeText(out *page.Writer, now time.Time) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	tw := page.NewWriter(table)
	for _, c := range a.Classes {
		note := ""
		if c.Unmeasured > 0 {
			note = fmt.Sprintf("  + %d not measured", c.Unmeasured)
		}
		tw.Printf("  %s\t%s\t%d inodes\t%s\n", c.Class, page.Bytes(c.Bytes), c.Inodes, note)
	}
	rest, inodes := page.Bytes(unsigned(a.UnattributedBytes)), "-"
	if a.UnattributedBytes < 0 {
		rest = "-" + page.Bytes(unsigned(-a.UnattributedBytes))
	}
	if a.UnattributedInodes != nil {
		inodes = fmt.Sprintf("%d inodes", *a.UnattributedInodes)
	}
	tw.Printf("  not attributed\t%s\t%s\t\n", rest, inodes)
	if err := table.Flush(); err != nil {
		return err
	}
	for _, k := range a.Known[:min(len(a.Known), shown)] {
		out.Printf("    of that in %s, which belongs to no pod: %s, %d inodes\n", k.Path, page.Bytes(k.Bytes), k.Inodes)
	}
	if n := len(a.Known) - shown; n > 0 {
		out.Printf("    and %d more folders (--output json has all)\n", n)
	}
	if a.UnattributedBytes < 0 {
		out.Printf("    below zero: files share extents, or something was deleted since it was measured\n")
	}
	if a.ReservedBytes > 0 {
		out.Printf("  %s more can be written by root only\n", page.Bytes(a.ReservedBytes))
	}
	if a.Oldest != nil {
		out.Printf("  all figures are of %s ago or later", now.Sub(*a.Oldest).Round(time.Second))
		if a.Partial > 0 {
			out.Printf(", %d of them lower bounds", a.Partial)
		}
		out.Printf("\n")
	}
	return nil
}

// writePods prints the pods that hold most.
func (s Status) writePods(out *page.Writer) error {
	if len(s.Pods) == 0 {
		return nil
	}
	held := func(u ephemeral.Usage) (sum uint64) {
		for _, on := range u.HeldOn {
			sum = saturatingAdd(sum, on.Bytes)
		}
		return sum
	}
	pods := slices.SortedStableFunc(slices.Values(s.Pods), func(a, b ephemeral.Usage) int { return cmp.Compare(held(b), held(a)) })
	out.Printf("\n")
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	tw := page.NewWriter(table)
	tw.Printf("POD THAT HOLDS MOST\tHOLDS\tTHE KUBELET COUNTS\n")
	for _, p := range pods[:min(len(pods), shown)] {
		counts := "nothing of it"
		if p.Kubelet != nil {
			counts = page.Bytes(p.Kubelet.Bytes)
		}
		note := ""
		if p.Unknown > 0 {
			note = fmt.Sprintf("  + %d not measured", p.Unknown)
		}
		tw.Printf("%s/%s\t%s\t%s%s\n", p.Namespace, p.Name, page.Bytes(held(p)), counts, note)
	}
	return table.Flush()
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
