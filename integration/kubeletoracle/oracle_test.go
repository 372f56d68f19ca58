package kubeletoracle

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/kubelet/eviction"

	"github.com/cleave-cri/cleave/engine"
)

const interval = 10 * time.Second

var (
	steps = flag.Int("steps", 10_000, "how many passes to compare, at least")
	seed  = flag.Uint64("seed", 1, "where to begin; each scenario has the next number")
)

// TestEvictionManager holds the kubelet profile against the kubelet's own
// eviction manager.
func TestEvictionManager(t *testing.T) {
	done := tally{}
	number := *seed
	for ; done.steps < *steps; number++ {
		sc := newScenario(number)
		if difference := play(t, &sc, &done); difference != "" {
			small, why := shrink(t, sc, difference)
			t.Fatalf("kubelet and engine differ in the scenario of -seed %d: %s\ncut down it is\n%s\nand says: %s", number, difference, text(t, small), why)
		}
	}
	done.ranked = nil // two thousand UIDs say nothing
	t.Logf("%d passes in scenarios %d to %d: %+v", done.steps, *seed, number-1, done)
	if *steps >= 10_000 {
		done.check(t)
	}
}

// tally counts what scenarios led to, so that a run that never got anywhere
// interesting is not taken for a proof.
type tally struct {
	steps, blind, limits, reclaims, resolved, evictions, ties, choices, pressured, admitted, rejected int
	layouts                                                                                           map[engine.Layout]int
	// ranked counts by UID in how many orders of both a pod was.
	ranked map[string]int
}

func (c *tally) check(t *testing.T) {
	t.Helper()
	for name, count := range map[string]int{
		"passes without figures": c.blind, "evictions over a limit": c.limits, "reclaims": c.reclaims,
		"reclaims that were enough": c.resolved, "evictions": c.evictions, "evictions among equals": c.ties,
		"choices among thresholds": c.choices, "passes under pressure": c.pressured, "pods admitted under pressure": c.admitted, "pods rejected": c.rejected,
	} {
		if count < 20 {
			t.Errorf("only %d %s in %d passes: the scenarios no longer show anything about them", count, name, c.steps)
		}
	}
	for _, layout := range []engine.Layout{engine.Single, engine.Dedicated, engine.Split, engine.Odd, engine.Inert} {
		if c.layouts[layout] < 20 {
			t.Errorf("only %d passes with the layout %q", c.layouts[layout], layout)
		}
	}
}

// play runs one scenario under both and returns the first difference.
func play(t *testing.T, sc *scenario, done *tally) (difference string) {
	t.Helper()
	if err := gates(sc); err != nil {
		t.Fatal(err)
	}
	var enforce []string
	if sc.Settings.EnforcePods {
		enforce = []string{"pods"}
	}
	theirs, err := eviction.ParseThresholdConfig(enforce, sc.Settings.Hard, sc.Settings.Soft, sc.Settings.SoftGrace, sc.Settings.MinReclaim)
	if err != nil {
		t.Fatal(err)
	}
	// In its first pass the kubelet completes the list while it goes through
	// it (THR-23). What it sees then depends on whether Go had room in the
	// list's array or moved it; TestFirstPassDependsOnRoom shows that. Here
	// there is room.
	theirs = slices.Grow(theirs, 4)
	ours, err := engine.Parse(sc.Settings)
	if err != nil {
		t.Fatal(err)
	}
	config := engine.Config{
		Thresholds: ours, TransitionPeriod: sc.TransitionPeriod, MaxPodGraceSeconds: sc.MaxPodGraceSeconds,
		LimitIsolation: sc.LimitIsolation, NoSeparateDiskGC: sc.NoSeparateDiskGC, MemoryVolumesByKernel: sc.MemoryByKernel,
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		defer func() {
			stop()
			<-time.After(time.Minute) // it does not look at its context while it waits for evicted pods
			synctest.Wait()
		}()
		k := newKubelet(ctx, sc, theirs)
		var state engine.State
		for i, st := range sc.Steps {
			if i == 0 {
				k.start(st)
			} else {
				wait := engine.NextPass(len(k.did.kills), sc.Steps[i-1].CleanUp, interval)
				// A nanosecond short of it nothing may have begun.
				passes := k.passes
				k.did = pass{}
				<-time.After(wait - 1)
				synctest.Wait()
				if k.passes != passes {
					difference = fmt.Sprintf("step %d: the kubelet looked again earlier than %s after the last pass", i, wait)
					return
				}
				k.step, k.measured = st, 0
				<-time.After(1)
			}
			synctest.Wait()
			done.steps++
			if difference = compare(k, config, &state, &st, done); difference != "" {
				difference = fmt.Sprintf("step %d: %s", i, difference)
				return
			}
		}
	})
	return difference
}

// compare takes the engine through one step and says how the kubelet differs.
func compare(k *kubelet, config engine.Config, state *engine.State, st *step, done *tally) string {
	in := engine.Input{Now: time.Now(), Layout: st.Layout, Pods: st.Pods, Summary: st.Summary}
	next, d := config.Sync(*state, in)
	*state = next
	if d.Outcome == engine.Off {
		if !k.did.at.IsZero() {
			return "the kubelet has something to do, the engine has not"
		}
	} else if !k.did.at.Equal(in.Now) {
		return fmt.Sprintf("the kubelet's pass was at %s, not at %s", k.did.at, in.Now)
	}
	if next.Layout != nil {
		if done.layouts == nil {
			done.layouts = map[engine.Layout]int{}
		}
		done.layouts[next.Layout.Layout()]++
	}
	if got, want := k.conditions(), next.Conditions; !slices.Equal(got, want) {
		return fmt.Sprintf("conditions: kubelet %v, engine %v", got, want)
	}
	admitted, rule := next.Admit(engine.Newcomer{Critical: st.Newcomer.Pod.Critical(), BestEffort: st.Newcomer.BestEffort, ToleratesMemoryPressure: st.Newcomer.Tolerates})
	if got := k.admits(&st.Newcomer); got != admitted {
		return fmt.Sprintf("admission of %+v: kubelet %t, engine %t by %s", st.Newcomer, got, admitted, rule)
	}
	if len(next.Conditions) > 0 {
		done.pressured++
		if admitted {
			done.admitted++
		} else {
			done.rejected++
		}
	}
	switch d.Outcome {
	case engine.Pressure:
		done.choices += min(1, len(d.Choices)-1)
		return comparePressure(k, config, next, in, d, st.After, done)
	case engine.OverLimit:
		done.limits++
		return compareLimits(k, d)
	case engine.Blind:
		done.blind++
		fallthrough
	default:
		if k.did.resource != "" || len(k.did.reclaim) > 0 || len(k.did.kills) > 0 {
			return fmt.Sprintf("the engine ends with %s by %s, the kubelet did %+v", d.Outcome, d.Rule, k.did)
		}
		return ""
	}
}

func compareLimits(k *kubelet, d engine.Decision) string {
	if k.did.resource != "" || len(k.did.reclaim) > 0 {
		return fmt.Sprintf("over limits the kubelet also reclaims: %+v", k.did)
	}
	kills := slices.Clone(k.did.kills)
	slices.SortFunc(kills, func(a, b kill) int { return strings.Compare(a.uid, b.uid) })
	if len(kills) != len(d.Limits) {
		return fmt.Sprintf("over limits: kubelet %+v, engine %+v", kills, d.Limits)
	}
	for i, e := range d.Limits {
		got := kills[i]
		limit := e.Limit
		if got.uid != e.UID || got.grace != e.GraceSeconds || !strings.Contains(got.message, limit.String()) || !strings.Contains(got.message, e.Subject) ||
			len(got.annotations) != 0 || len(got.status.Conditions) != 0 || e.Disrupts {
			return fmt.Sprintf("over a limit: kubelet %+v, engine %+v", got, e)
		}
		kind := map[engine.Cause]string{engine.EmptyDirLimit: "EmptyDir", engine.PodLimit: "Pod", engine.ContainerLimit: "Container"}[e.Cause]
		if !strings.Contains(got.message, kind+" ") {
			return fmt.Sprintf("over a limit: kubelet %q, engine %+v", got.message, e)
		}
	}
	return ""
}

// comparePressure accepts what the kubelet did if it is what one of the
// choices leads to.
func comparePressure(k *kubelet, config engine.Config, s engine.State, in engine.Input, d engine.Decision, after *engine.Summary, done *tally) string {
	var why []string
	for _, alternative := range config.Alternatives(s, in, d) {
		difference := compareChoice(k, config, s, in, alternative, after, done)
		if difference == "" {
			return ""
		}
		why = append(why, fmt.Sprintf("with %s: %s", alternative.Threshold, difference))
	}
	return strings.Join(why, "; ")
}

func compareChoice(k *kubelet, config engine.Config, s engine.State, in engine.Input, d engine.Decision, after *engine.Summary, done *tally) string {
	if want := string(d.Threshold.Signal.Resource()); k.did.resource != want {
		return fmt.Sprintf("short of: kubelet %q, engine %q", k.did.resource, want)
	}
	if !slices.Equal(k.did.reclaim, d.Reclaim) {
		return fmt.Sprintf("reclaim: kubelet %v, engine %v", k.did.reclaim, d.Reclaim)
	}
	resolved, still := config.Resolved(s, d, after)
	if resolved {
		if len(k.did.kills) > 0 {
			return fmt.Sprintf("the engine has reclaimed enough, the kubelet kills %+v", k.did.kills)
		}
		done.resolved++
		return ""
	}
	if d.NoVictim == "SYN-24" {
		if len(k.did.kills) > 0 {
			return fmt.Sprintf("the engine has nobody to rank, the kubelet kills %+v", k.did.kills)
		}
		return ""
	}
	group := map[string]int{}
	for _, r := range d.Ranking {
		group[r.UID] = r.Group
	}
	last, first := 0, ""
	for _, pod := range k.did.order {
		uid := string(pod.UID)
		g, ok := group[uid]
		if !ok || g < last {
			return fmt.Sprintf("ranking, still below %v: kubelet %v, engine %+v", still, names(k.did.order), d.Ranking)
		}
		last = g
		if config.EvictionOf(in, d, uid) != nil && first == "" {
			first = uid
		}
	}
	if done.ranked == nil {
		done.ranked = map[string]int{}
	}
	for uid := range group {
		done.ranked[uid]++
	}
	if d.Victim == nil {
		if len(k.did.kills) > 0 {
			return fmt.Sprintf("the engine has no victim, the kubelet kills %+v", k.did.kills)
		}
		return ""
	}
	if len(k.did.kills) != 1 {
		return fmt.Sprintf("the engine kills one, the kubelet %d", len(k.did.kills))
	}
	got := k.did.kills[0]
	if got.uid != first || group[d.Victim.UID] != group[first] {
		return fmt.Sprintf("victim: kubelet %s, engine %s", got.uid, d.Victim.UID)
	}
	if difference := compareEviction(&got, config.EvictionOf(in, d, first), d.Threshold.Signal.Resource()); difference != "" {
		return difference
	}
	done.evictions++
	if d.Victim.UID != first {
		done.ties++
	}
	done.reclaims += min(1, len(d.Reclaim))
	return ""
}

func compareEviction(got *kill, e *engine.Eviction, what engine.Resource) string {
	annotations := map[string]string{}
	if e.Explained {
		var containers, usage []string
		for _, o := range e.Offenders {
			containers = append(containers, o.Name)
			usage = append(usage, o.Usage.String())
		}
		annotations["offending_containers"] = strings.Join(containers, ",")
		annotations["offending_containers_usage"] = strings.Join(usage, ",")
		annotations["starved_resource"] = string(what)
		if e.PodOffends != nil {
			annotations["offending_pod"] = e.PodOffends.Name
			annotations["offending_pod_usage"] = e.PodOffends.Usage.String()
		}
	}
	if fmt.Sprint(got.annotations) != fmt.Sprint(annotations) {
		return fmt.Sprintf("annotations: kubelet %v, engine %v", got.annotations, annotations)
	}
	limit := e.Limit
	figures := fmt.Sprintf(": %s, available: %s.", limit.String(), available(e, what))
	if got.grace != e.GraceSeconds || !strings.Contains(got.message, figures) {
		return fmt.Sprintf("eviction: kubelet %+v, engine %+v", got, e)
	}
	for _, o := range e.Offenders {
		if !strings.Contains(got.message, fmt.Sprintf(" %s was using %s, request is %s,", o.Name, o.Usage.String(), o.Request.String())) {
			return fmt.Sprintf("message: kubelet %q, engine %+v", got.message, o)
		}
	}
	if got.status.Phase != corev1.PodFailed || got.status.Reason != "Evicted" || e.Disrupts != (len(got.status.Conditions) == 1 && got.status.Conditions[0].Type == corev1.DisruptionTarget) {
		return fmt.Sprintf("status: kubelet %+v, engine %+v", got.status, e)
	}
	return ""
}

func names(pods []*corev1.Pod) []string {
	var out []string
	for _, p := range pods {
		out = append(out, string(p.UID))
	}
	return out
}
