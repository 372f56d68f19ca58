// Package top is `cleave top`: a node's disks on one screen, with what holds most
// of them, what would be deleted first and which pods would go. View is made of what the control socket
// answers and is pure; Terminal keeps a screen up to date. It may import agent;
// only cmd may import it.
package top

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/fsstats"
)

// View is what is shown.
type View struct {
	At      time.Time          `json:"at"`
	Version string             `json:"version"`
	Mode    string             `json:"mode"`
	Layout  fsstats.LayoutKind `json:"layout"`
	// Outcome is how the last look at the disks ended, empty where cleave does not reclaim or has not looked.
	Outcome string `json:"outcome,omitempty"`
	// Reclaims says whether this cleave reclaims: without that there are neither marks nor candidates.
	Reclaims    bool         `json:"reclaims"`
	Filesystems []Filesystem `json:"filesystems"`
	// Holders are who holds bytes, the largest first, each once for each filesystem.
	Holders []Holder `json:"holders"`
	// Next is what would be deleted first, by signal, those that are met or come soonest first.
	Next []Candidate `json:"next"`
	// Leaving are the UIDs of pods that are on their way out.
	Leaving []string `json:"leaving,omitempty"`
	// Problems are what keeps figures or decisions from being whole.
	Problems []string `json:"problems,omitempty"`
}

// Filesystem is one, with the thresholds on it.
type Filesystem struct {
	Device     string         `json:"device"`
	Type       string         `json:"type"`
	Mountpoint string         `json:"mountpoint"`
	Roles      []fsstats.Role `json:"roles"`
	// Stuck says that it does not answer, so that all of this is what it last was.
	Stuck             bool   `json:"stuck,omitempty"`
	CapacityBytes     uint64 `json:"capacityBytes"`
	UsedBytes         uint64 `json:"usedBytes"`
	AvailableBytes    uint64 `json:"availableBytes"`
	UnattributedBytes int64  `json:"unattributedBytes"`
	// InodesTotal and InodesFree are nil where there is no limit of them.
	InodesTotal *uint64 `json:"inodesTotal,omitempty"`
	InodesFree  *uint64 `json:"inodesFree,omitempty"`
	Marks       []Mark  `json:"marks,omitempty"`
	// Next are the pods that would go first if it were short and nothing could be reclaimed; nil where that is not known.
	Next *agent.NextPods `json:"next,omitempty"`
}

// Mark is a threshold on a filesystem.
type Mark struct {
	Signal engine.Signal `json:"signal"`
	// Text is the threshold for people.
	Text string `json:"text"`
	// Least is what has to be available: bytes, or inodes by the signal.
	Least uint64 `json:"least"`
	// GraceSeconds is how long it has to be met; 0 for one that acts at once.
	GraceSeconds float64 `json:"graceSeconds,omitempty"`
	Met          bool    `json:"met,omitempty"`
	// InSeconds is when it will be met at the present speed, nil if not within a day.
	InSeconds *float64 `json:"inSeconds,omitempty"`
}

// Holder is somebody who holds bytes on a filesystem.
type Holder struct {
	// Kind is "pod", a kind of owner as `cleave status` and /v1/usage have them, or "not attributed".
	Kind string `json:"kind"`
	// Name is namespace/name of a pod, else what identifies one of its kind; empty where there is one of a kind.
	Name   string `json:"name,omitempty"`
	Device string `json:"device"`
	Bytes  uint64 `json:"bytes"`
	// AtLeast says that it is a lower bound: something has no figure yet, or one that is not whole.
	AtLeast bool `json:"atLeast,omitempty"`
}

// Candidate is something that would be deleted if a signal were short.
type Candidate struct {
	// Signals are those for which it would go.
	Signals []engine.Signal `json:"signals"`
	Kind    engine.Reclaim  `json:"kind"`
	ID      string          `json:"id"`
	Rule    string          `json:"rule"`
	// ExpectedBytes is what comes free, nil while that is not known.
	ExpectedBytes *int64 `json:"expectedBytes,omitempty"`
}

// notAttributed is the kind of what is used and owned by nobody.
const notAttributed = "not attributed"

// New makes a view of answers of the control socket.
func New(s agent.Status, u agent.Usage, plan agent.Plan, now time.Time) View {
	v := View{At: now, Version: s.Version, Mode: s.Mode, Layout: s.Layout, Reclaims: s.Reclaim != nil, Problems: problems(s, now)}
	var coming []engine.Coming
	var thresholds []string
	if r := s.Reclaim; r != nil {
		coming, thresholds, v.Leaving = r.Coming, r.Thresholds, r.Leaving
		if r.LookedAt != nil {
			v.Outcome = strings.TrimSuffix(string(r.Outcome)+", "+r.Threshold, ", ")
		}
	}
	for _, f := range s.Filesystems {
		shown := filesystem(f, s.Stuck, thresholds, coming)
		if s.Reclaim != nil {
			shown.Next = nextOn(f.Roles, s.Reclaim.Next)
		}
		v.Filesystems = append(v.Filesystems, shown)
	}
	v.Holders = holders(s, u)
	v.Next = candidates(plan, v.Filesystems)
	for _, p := range plan {
		if p.Problem != "" {
			v.Problems = append(v.Problems, fmt.Sprintf("it is not known what would go for %s: %s", p.Signal, p.Problem))
		}
	}
	return v
}

// problems are those that a status has.
func problems(s agent.Status, now time.Time) (out []string) {
	if s.Runtime.Error != "" {
		out = append(out, "the runtime can't be reached: "+s.Runtime.Error)
	}
	switch {
	case s.MeasuredAt == nil:
		out = append(out, "nothing was measured yet")
	case s.Problem != "":
		out = append(out, "figures are incomplete: "+s.Problem)
	}
	for _, r := range s.Stuck {
		out = append(out, fmt.Sprintf("%s: nothing new for %s: %s", r.Role, now.Sub(r.Since).Round(time.Second), r.Reason))
	}
	if s.Snapshotter != nil {
		for _, p := range s.Snapshotter.Problems {
			out = append(out, "split snapshotter: "+p)
		}
	}
	if r := s.Reclaim; r != nil {
		if r.Problem != "" {
			out = append(out, "nothing is decided: "+r.Problem)
		}
		if r.Held != "" {
			out = append(out, "nobody is evicted yet: "+r.Held)
		}
		for _, o := range r.Overlaps {
			out = append(out, "nobody is evicted by a threshold that is not above the kubelet's: "+o)
		}
	}
	return out
}

func filesystem(f agent.FilesystemStatus, stuck []agent.StuckRole, thresholds []string, coming []engine.Coming) Filesystem {
	out := Filesystem{
		Device: f.Device.String(), Type: f.Type, Mountpoint: f.Mountpoint, Roles: f.Roles,
		CapacityBytes: f.CapacityBytes, UsedBytes: f.UsedBytes, AvailableBytes: f.AvailableBytes, UnattributedBytes: f.UnattributedBytes,
		InodesTotal: f.InodesTotal, InodesFree: f.InodesFree,
	}
	out.Stuck = slices.ContainsFunc(stuck, func(s agent.StuckRole) bool { return slices.Contains(f.Roles, s.Role) })
	for _, text := range thresholds {
		t, ok := readThreshold(text)
		role, what, _ := strings.Cut(string(t.Signal), ".")
		if !ok || !slices.Contains(f.Roles, fsstats.Role(role)) {
			continue
		}
		capacity, available := f.CapacityBytes, f.AvailableBytes
		if what == "inodesFree" {
			if f.InodesTotal == nil || f.InodesFree == nil {
				continue // it can't be met
			}
			capacity, available = *f.InodesTotal, *f.InodesFree
		}
		least := t.Value.Of(clamped(capacity))
		m := Mark{Signal: t.Signal, Text: text, Least: positive(least.Value()), GraceSeconds: t.Grace.Seconds()}
		m.Met = available < m.Least
		for _, c := range coming {
			if c.Threshold.String() == text {
				in := c.In.Seconds()
				m.InSeconds = &in
			}
		}
		out.Marks = append(out.Marks, m)
	}
	return out
}

// nextOn are the pods of the filesystem that has these roles; nil if nothing is known of them.
func nextOn(roles []fsstats.Role, all []agent.NextPods) *agent.NextPods {
	for i := range all {
		if role, _, _ := strings.Cut(string(all[i].Signal), "."); slices.Contains(roles, fsstats.Role(role)) {
			return &all[i]
		}
	}
	return nil
}

// readThreshold reads what [engine.Threshold.String] writes. One that can't be met is none.
func readThreshold(text string) (t engine.Threshold, ok bool) {
	signal, value, ok := strings.Cut(text, " < ")
	if !ok {
		return t, false
	}
	value, grace, soft := strings.Cut(value, " for ")
	if soft {
		d, err := time.ParseDuration(grace)
		if err != nil {
			return t, false
		}
		t.Grace = d
	}
	share, isShare := strings.CutSuffix(value, "%")
	if isShare {
		var percent float64
		if _, err := fmt.Sscanf(share, "%g", &percent); err != nil {
			return t, false
		}
		t.Value.Share = float32(percent / 100)
	} else {
		q, err := engine.ParseQuantity(value)
		if err != nil {
			return t, false
		}
		t.Value.Quantity = &q
	}
	t.Signal = engine.Signal(signal)
	return t, true
}

// holders lists who holds bytes. Pods are taken whole, with their containers' layers and deleted files that they have open.
func holders(s agent.Status, u agent.Usage) []Holder {
	out := []Holder{}
	known := map[string]bool{} // UIDs
	for _, p := range s.Pods {
		known[p.UID] = true
		for _, on := range p.HeldOn {
			out = append(out, Holder{Kind: "pod", Name: p.Namespace + "/" + p.Name, Device: on.Device, Bytes: on.Bytes, AtLeast: p.Unknown > 0})
		}
	}
	for _, o := range u.Owners {
		kind := o.Kind
		switch kind {
		case string(owners.Container), string(owners.Sandbox):
			continue // their pod has them
		case string(owners.Pod):
			if known[o.ID] {
				continue
			}
			kind = "pod that is gone"
		}
		on := map[string]*Holder{}
		var devices []string
		whole := true
		for _, p := range o.Parts {
			if p.Figure == nil {
				whole = whole && p.Gone
				continue
			}
			if on[p.Device] == nil {
				on[p.Device] = &Holder{Kind: kind, Name: o.ID, Device: p.Device}
				devices = append(devices, p.Device)
			}
			on[p.Device].Bytes += positive(p.Figure.Bytes)
			on[p.Device].AtLeast = on[p.Device].AtLeast || p.Figure.Partial
		}
		for _, device := range devices {
			h := *on[device]
			h.AtLeast = h.AtLeast || !whole
			out = append(out, h)
		}
	}
	for _, f := range s.Filesystems {
		rest := f.UnattributedBytes
		for _, k := range f.Known { // they have lines of their own
			rest -= clamped(k.Bytes)
		}
		out = append(out, Holder{Kind: notAttributed, Device: f.Device.String(), Bytes: positive(rest)})
	}
	out = slices.DeleteFunc(out, func(h Holder) bool { return h.Bytes == 0 })
	slices.SortFunc(out, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Device, b.Device))
	})
	return out
}

// candidates puts a plan in one list: each thing once, those for the signal first that is nearest to its threshold.
func candidates(plan agent.Plan, filesystems []Filesystem) []Candidate {
	out := []Candidate{}
	// urgency is 0 for what is met, else the seconds until it will be; what is not coming is last.
	urgency := func(signal engine.Signal) float64 {
		least := math.Inf(1)
		for _, f := range filesystems {
			for _, m := range f.Marks {
				switch {
				case m.Signal != signal:
				case m.Met:
					least = 0
				case m.InSeconds != nil:
					least = min(least, *m.InSeconds)
				}
			}
		}
		return least
	}
	plan = slices.Clone(plan)
	slices.SortStableFunc(plan, func(a, b agent.Planned) int { return cmp.Compare(urgency(a.Signal), urgency(b.Signal)) })
	type thing struct {
		kind engine.Reclaim
		id   string
	}
	at := map[thing]int{}
	for _, p := range plan {
		for _, step := range p.Steps {
			for _, item := range step.Items {
				key := thing{step.Kind, item.ID}
				if i, there := at[key]; there {
					if !slices.Contains(out[i].Signals, p.Signal) {
						out[i].Signals = append(out[i].Signals, p.Signal)
					}
					continue
				}
				at[key] = len(out)
				out = append(out, Candidate{Signals: []engine.Signal{p.Signal}, Kind: step.Kind, ID: item.ID, Rule: item.Rule, ExpectedBytes: item.ExpectedBytes})
			}
		}
	}
	return out
}

// positive is n, 0 for what is below.
func positive(n int64) uint64 { return uint64(max(n, 0)) }

// clamped is n as far as an int64 goes.
func clamped(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// planEvery is how often it is asked what would go: making that plan costs more than the figures do.
const planEvery = 10 * time.Second

// Source asks a running cleave for views.
type Source struct {
	// Socket is its control socket.
	Socket string

	plan   agent.Plan
	planAt time.Time
	// problem says why the last plan could not be had.
	problem error
}

// Fetch asks for a view.
func (s *Source) Fetch(ctx context.Context) (View, error) {
	status, err := agent.FetchStatus(ctx, s.Socket)
	if err != nil {
		return View{}, err
	}
	usage, err := agent.FetchUsage(ctx, s.Socket)
	if err != nil {
		return View{}, err
	}
	if status.Reclaim == nil {
		s.plan, s.problem = nil, nil
	} else if time.Since(s.planAt) >= planEvery {
		s.plan, s.problem = agent.FetchPlan(ctx, s.Socket)
		s.planAt = time.Now()
	}
	v := New(status, usage, s.plan, time.Now())
	if s.problem != nil {
		v.Problems = append(v.Problems, s.problem.Error())
	}
	return v, nil
}
