package agent

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/agent/decide"
	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/agent/peaks"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/kube"
)

// pathRequests is where the control socket answers with [Requests].
const pathRequests = "/v1/requests"

const (
	// peaksEvery is how often it is looked what pods use: as often as the figure of one that writes can change.
	peaksEvery = time.Second
	// savePeaksEvery is how often peaks are written down, if there are new ones.
	savePeaksEvery = 30 * time.Second
)

// watchPeaks remembers what pods use until ctx ends.
func (d *decisions) watchPeaks(ctx context.Context) {
	look, save := time.NewTicker(peaksEvery), time.NewTicker(savePeaksEvery)
	defer look.Stop()
	defer save.Stop()
	var last *picture
	for {
		select {
		case <-ctx.Done():
			if err := d.peaks.Save(); err != nil {
				d.log.Warn("the peaks of workloads are not written down", zap.Error(err))
			}
			return
		case now := <-look.C:
			if p := d.observer.newest.Load(); p != last {
				last = p
				d.peaks.Add(uses(p.held, d.cluster.Load().view()), now)
			}
		case <-save.C:
			if err := d.peaks.Save(); err != nil {
				d.log.Warn("the peaks of workloads are not written down", zap.Error(err))
			}
		}
	}
}

// uses puts together what pods use and what is known of them. Who is not known, or not measured, is left out.
func uses(held []ephemeral.Pod, view kube.View) (out []peaks.Use) {
	for _, pod := range held {
		known, ok := view.Pod(pod.UID, pod.Namespace, pod.Name)
		measured := ephemeral.Of(pod)
		if !ok || len(known.Pod.Faults) > 0 || measured.Kubelet == nil {
			continue
		}
		spec := decide.Pod(known.Pod, false)
		u := peaks.Use{Workload: cmp.Or(known.Pod.Owner, "Pod "+known.Pod.String()), Bytes: measured.Kubelet.Bytes, Containers: map[string]uint64{}}
		if requests(&spec) {
			request := spec.Request(engine.EphemeralStorage)
			bytes := request.Value()
			u.RequestBytes = &bytes
		}
		if limit := spec.Limit(); limit != nil {
			bytes := limit.Value()
			u.LimitBytes = &bytes
		}
		for _, c := range pod.Containers {
			for _, part := range []*ephemeral.Use{c.Layer, c.LogFiles} {
				if part != nil && c.Running {
					u.Containers[c.Name] += part.Bytes
				}
			}
		}
		out = append(out, u)
	}
	return out
}

// requests says whether any container says what ephemeral storage it requests.
func requests(p *engine.Pod) bool {
	return slices.ContainsFunc(slices.Concat(p.Containers, p.InitContainers), func(c engine.Container) bool { return c.Requests.EphemeralStorage != nil })
}

// Requests are what workloads on this node request of ephemeral storage, what they use, and what they should request.
type Requests []Request

// Request is one workload's.
type Request struct {
	peaks.Workload
	Suggestion peaks.Suggestion `json:"suggestion"`
}

func (d *decisions) requests(context.Context) (any, error) {
	if d == nil {
		return nil, errNoReclaim
	}
	out := Requests{}
	for _, w := range d.peaks.List() {
		out = append(out, Request{Workload: w, Suggestion: w.Suggest()})
	}
	return out, nil
}

// FetchRequests asks the cleave that is running for workloads' requests. It returns [ErrNotRunning] if none answers on the socket.
func FetchRequests(ctx context.Context, socket string) (r Requests, err error) {
	err = control.Ask(ctx, socket, http.MethodGet, pathRequests, &r)
	return r, asked("ask what workloads request and use", socket, err)
}

// WriteText prints them for people.
func (r Requests) WriteText(w io.Writer, now time.Time) error {
	out := page.NewWriter(w)
	if len(r) == 0 {
		out.Printf("No workload was seen yet, or the API server is not known.\n")
		return out.Err()
	}
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	line := func(columns ...string) { fmt.Fprintln(table, strings.Join(columns, "\t")) }
	line("WORKLOAD", "PODS", "REQUEST", "LIMIT", "PEAK", "SEEN FOR", "SUGGESTION")
	amount := func(n *int64) string {
		if n == nil {
			return "-"
		}
		return page.Bytes(positive(*n))
	}
	for _, x := range r {
		line(page.Name(x.Name), fmt.Sprint(x.Pods), amount(x.RequestBytes), amount(x.LimitBytes), page.Bytes(x.PeakBytes), span(max(0, x.LastSeen.Sub(x.FirstSeen))), x.advice())
		if x.Suggestion.Verdict == peaks.Keep || len(x.Containers) < 2 {
			continue
		}
		for _, name := range slices.Sorted(maps.Keys(x.Containers)) {
			line("  container "+page.Name(name), "", "", "", page.Bytes(x.Containers[name]), "", "")
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for row := range strings.Lines(text.String()) {
		out.Printf("%s\n", strings.TrimRight(row, " \n"))
	}
	return out.Err()
}

func (x Request) advice() string {
	request := "request " + page.Bytes(positive(x.Suggestion.RequestBytes))
	if l := x.Suggestion.LimitBytes; l != nil && *l != *x.LimitBytes {
		request += ", limit " + page.Bytes(positive(*l))
	}
	switch x.Suggestion.Verdict {
	case peaks.Set:
		return request + ": without one it is among the first to go"
	case peaks.Raise:
		return request + ": it used more than it requests"
	case peaks.RaiseLimit:
		return request + ": it came near its limit"
	case peaks.Lower:
		return request + " would do"
	default:
		return "fits"
	}
}

// span is a time for people, in one unit.
func span(d time.Duration) string {
	switch {
	case d >= 48*time.Hour:
		return fmt.Sprintf("%dd", d/(24*time.Hour))
	case d >= 2*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	case d >= 2*time.Minute:
		return fmt.Sprintf("%dm", d/time.Minute)
	default:
		return fmt.Sprintf("%ds", d/time.Second)
	}
}
