package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/explain"
)

// pathExplain says who would go, and why: an [ExplainRequest], answered with an [Explained].
const pathExplain = "/v1/explain"

// NextPods are those that would go first if a filesystem were short and nothing could be reclaimed.
type NextPods struct {
	// Signal is the one of the filesystem's thresholds that is most urgent, Threshold that one for people.
	Signal    engine.Signal `json:"signal"`
	Threshold string        `json:"threshold"`
	// Met says that it is met already.
	Met bool `json:"met,omitempty"`
	// Pods are those that may go, first to go first; at most shownPods of them, and Count all.
	Pods  []NextPod `json:"pods,omitempty"`
	Count int       `json:"count,omitempty"`
	// Nobody says why none goes, whatever Pods are; empty if the first of them would.
	Nobody string `json:"nobody,omitempty"`
}

// NextPod is one of them.
type NextPod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	// Used is what it has there, in bytes or inodes as the signal counts; nil while that is not known.
	Used *int64 `json:"used,omitempty"`
	// Why says what puts it in its place.
	Why string `json:"why"`
}

// next says it for each filesystem, as the engine ranks.
func next(records []record.Record) (out []NextPods) {
	for _, r := range records {
		d := r.Decision
		n := NextPods{Signal: d.Threshold.Signal, Threshold: d.Threshold.String(), Nobody: explain.Nobody(d)}
		if o, ok := r.Input.Summary.Observe()[n.Signal]; ok {
			want := d.Threshold.Value.Of(o.Capacity)
			n.Met = want.Cmp(*resource.NewQuantity(o.Available, resource.BinarySI)) > 0
		}
		pods := map[string]*engine.Pod{}
		for i := range r.Input.Pods {
			pods[r.Input.Pods[i].UID] = &r.Input.Pods[i]
		}
		for _, ranked := range d.Ranking {
			pod := pods[ranked.UID]
			if ranked.Critical || r.Config.Options.OnlyWhoHelps && ranked.Usage.Sign() <= 0 || pod == nil {
				continue
			}
			if n.Count++; n.Count > shownPods {
				continue
			}
			p := NextPod{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Why: explain.Standing(r, pod.UID)}
			if ranked.Measured {
				used := ranked.Usage.Value()
				p.Used = &used
			}
			n.Pods = append(n.Pods, p)
		}
		out = append(out, n)
	}
	return out
}

// shownNext is how many pods a line names.
const shownNext = 3

// writeText prints one line.
func (n NextPods) writeText(out *page.Writer) {
	state := "if " + n.Threshold
	if n.Met {
		state = n.Threshold + " is met"
	}
	if n.Nobody != "" {
		out.Printf("  %s: no pod would go: %s\n", state, n.Nobody)
		return
	}
	if len(n.Pods) == 0 {
		return
	}
	names := make([]string, 0, shownNext)
	for _, p := range n.Pods[1:min(len(n.Pods), shownNext)] {
		names = append(names, page.Name(p.Namespace+"/"+p.Name))
	}
	if more := n.Count - 1 - len(names); more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	then := ""
	if len(names) > 0 {
		then = " Then " + strings.Join(names, ", ") + "."
	}
	out.Printf("  %s, %s would go first. %s%s\n", state, page.Name(n.Pods[0].Namespace+"/"+n.Pods[0].Name), n.Pods[0].Why, then)
}

// reportsOnly is what is said where nobody is evicted.
const reportsOnly = "cleave only reports: nobody is evicted while reclaim.evict is off, or in mode observe."

func (d *decisions) reportsOnly() bool {
	return !d.cfg.Reclaim.Evict || d.cfg.Mode == config.ModeObserve
}

// ExplainRequest asks who would go.
type ExplainRequest struct {
	// Pod asks about one, by name or namespace/name; empty for those that would go first.
	Pod string `json:"pod,omitempty"`
}

// Explained says for each filesystem who would go if it were short, and why.
type Explained struct {
	// At is when that was seen which it is said by.
	At time.Time `json:"at"`
	// ReportsOnly says that cleave evicts nobody, whatever is short.
	ReportsOnly bool          `json:"reportsOnly,omitempty"`
	Filesystems []ExplainedOn `json:"filesystems"`
}

// ExplainedOn is one filesystem.
type ExplainedOn struct {
	Signal    engine.Signal `json:"signal"`
	Threshold string        `json:"threshold"`
	Sentences []string      `json:"sentences"`
}

func (d *decisions) explain(_ context.Context, r ExplainRequest) (any, error) {
	if d == nil {
		return nil, errNoReclaim
	}
	records := d.keeper.IfShort()
	if len(records) == 0 {
		if problem := d.keeper.Status().Problem; problem != "" {
			return nil, fmt.Errorf("nothing is decided: %s", problem)
		}
		return nil, errors.New("nothing is known yet about the disks and their thresholds")
	}
	out := Explained{At: records[0].Input.Now, ReportsOnly: d.reportsOnly()}
	for _, short := range records {
		if s := explain.IfShort(short, r.Pod); len(s) > 0 {
			out.Filesystems = append(out.Filesystems, ExplainedOn{Signal: short.Decision.Threshold.Signal, Threshold: short.Decision.Threshold.String(), Sentences: s})
		}
	}
	if len(out.Filesystems) > 0 {
		return out, nil
	}
	if left := d.left.Load(); left != nil {
		about := func(l string) bool {
			name, _, _ := strings.Cut(l, ": ")
			_, short, _ := strings.Cut(name, "/")
			return name == r.Pod || short == r.Pod
		}
		if i := slices.IndexFunc(*left, about); i >= 0 {
			return nil, fmt.Errorf("it is not ranked, so it is never evicted by cleave: %s", (*left)[i])
		}
	}
	return nil, fmt.Errorf("no pod %q is ranked: it has ended, or is none of this node; write name or namespace/name", r.Pod)
}

// Explain asks the cleave that is running who would go if a filesystem were short. It returns [ErrNotRunning] if none answers on the
// socket.
func Explain(ctx context.Context, socket string, r ExplainRequest) (e Explained, err error) {
	err = control.Send(ctx, socket, http.MethodPost, pathExplain, r, &e)
	return e, asked("ask who would be evicted", socket, err)
}

// WriteText prints it for people.
func (e Explained) WriteText(w io.Writer, now time.Time) error {
	out := page.NewWriter(w)
	out.Printf("Who would go if a filesystem were short and nothing could be reclaimed, by what was seen %s ago:\n", now.Sub(e.At).Round(time.Second))
	if e.ReportsOnly {
		out.Printf("%s\n", reportsOnly)
	}
	for _, f := range e.Filesystems {
		for i, s := range f.Sentences {
			indent := "  "
			if i == 0 {
				out.Printf("\n")
				indent = ""
			}
			out.Printf("%s%s\n", indent, s)
		}
	}
	return out.Err()
}
