// Package explain shows recorded decisions: in sentences why they are what they
// are, and whether this engine would decide the same again. It is what `cleave
// explain` and `cleave replay` do. Of ours it imports records, the flight
// recorder that has them, the engine and pages of text.
package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
)

// others is how many pods that did not go are explained unless one is asked
// for.
const others = 5

// Sentences explain a record. With a pod's name, "name" or "namespace/name", the
// sentences about pods are about that one; there are none if the pod is not in
// the record.
func Sentences(r record.Record, pod string) []string {
	if gone := r.Departure; gone != nil {
		name := gone.Namespace + "/" + gone.Name
		if pod != "" && pod != gone.UID && pod != gone.Name && pod != name {
			return nil
		}
		what, text := departureText(r)
		is := map[string]string{"gone": "is gone", "stays": "stays"}[what]
		return []string{fmt.Sprintf("%s, %s: %s, evicted by %s, %s, %s", r.Input.Now.UTC().Format(time.RFC3339), r.Decider, name, gone.Cause, is, text)}
	}
	t := newTeller(r)
	if pod != "" {
		for uid := range t.pods {
			if t.called(uid, pod) {
				t.only = append(t.only, uid)
			}
		}
		slices.Sort(t.only)
		if len(t.only) == 0 {
			return nil
		}
	}
	if c := r.Collection; c != nil {
		asked := ""
		if c.Asked {
			asked = " because somebody asked"
		}
		t.say("%s, %s: nothing was short; %s were tidied up%s.", r.Input.Now.UTC().Format(time.RFC3339), r.Decider, c.Name, asked)
		t.reclaimed()
		return t.out
	}
	t.cause()
	t.reclaimed()
	t.went()
	return t.out
}

// IfShort explains a decision that nobody made, of [engine.Config.IfShort]: who would go if that filesystem were short and nothing could
// be reclaimed. With a pod's name, as in [Sentences], it is about that one, and there are none if it is not ranked.
func IfShort(r record.Record, pod string) []string {
	t := newTeller(r)
	if t.would = true; pod != "" {
		for _, ranked := range r.Decision.Ranking {
			if t.called(ranked.UID, pod) {
				t.only = append(t.only, ranked.UID)
			}
		}
		if len(t.only) == 0 {
			return nil
		}
	}
	d := r.Decision
	var o engine.Observation
	if r.Input.Summary != nil {
		o = r.Input.Summary.Observe()[d.Threshold.Signal]
	}
	want := d.Threshold.Value.Of(o.Capacity)
	state := "has"
	if o.Available < want.Value() {
		state = "is short and has"
	}
	t.say("%s %s %s available of %s; the threshold is %s, %s.", d.Threshold.Signal, state, amount(d.Threshold.Signal, o.Available),
		amount(d.Threshold.Signal, o.Capacity), amount(d.Threshold.Signal, want.Value()), kindOf(d.Threshold))
	t.went()
	return t.out
}

// Standing says what puts a pod where it is in the ranking of a record; empty for one that is not in it.
func Standing(r record.Record, uid string) string {
	t := newTeller(r)
	for _, ranked := range r.Decision.Ranking {
		if ranked.UID == uid {
			return t.standing(ranked)
		}
	}
	return ""
}

// Nobody says why a decision has no victim; empty if it has one.
func Nobody(d engine.Decision) string {
	if d.Victim != nil {
		return ""
	}
	return noVictim(d)
}

func newTeller(r record.Record) teller {
	t := teller{r: r, pods: map[string]*engine.Pod{}}
	for i := range r.Input.Pods {
		t.pods[r.Input.Pods[i].UID] = &r.Input.Pods[i]
	}
	return t
}

func kindOf(t engine.Threshold) string {
	if t.Hard() {
		return "a hard one"
	}
	return fmt.Sprintf("one that has to be met for %s", t.Grace)
}

type teller struct {
	r    record.Record
	pods map[string]*engine.Pod
	only []string
	// would says that nobody goes: it is told who would.
	would bool
	out   []string
}

func (t *teller) say(format string, args ...any) { t.out = append(t.out, fmt.Sprintf(format, args...)) }

func (t *teller) called(uid, name string) bool {
	p := t.pods[uid]
	return p != nil && (p.Name == name || p.Namespace+"/"+p.Name == name)
}

func (t *teller) name(uid string) string {
	p := t.pods[uid]
	if p == nil {
		return uid
	}
	return strings.TrimPrefix(p.Namespace+"/"+p.Name, "/")
}

// amount writes a number of a signal's unit.
func amount(s engine.Signal, n int64) string {
	switch s.Resource() {
	case engine.Inodes:
		return fmt.Sprintf("%d inodes", n)
	case engine.PIDs:
		return fmt.Sprintf("%d processes", n)
	default:
		if n < 0 {
			return "-" + page.Bytes(uint64(-n))
		}
		return page.Bytes(uint64(n))
	}
}

// cause says what was short.
func (t *teller) cause() {
	d, at := t.r.Decision, t.r.Input.Now.UTC().Format(time.RFC3339)
	switch d.Outcome {
	case engine.Pressure, engine.Foreseen:
		var o engine.Observation
		if t.r.Input.Summary != nil {
			o = t.r.Input.Summary.Observe()[d.Threshold.Signal]
		}
		want := d.Threshold.Value.Of(o.Capacity)
		kind := "a hard threshold"
		if !d.Threshold.Hard() {
			kind = fmt.Sprintf("a soft threshold that was met for %s", d.Threshold.Grace)
		}
		if d.Outcome == engine.Foreseen {
			when := "soon" // a record that does not say when is no reason to say nothing
			if len(d.Coming) > 0 {
				when = "in " + d.Coming[0].In.Round(time.Second).String()
			}
			t.say("%s, %s: %s of %s had %s available and was falling; %s it would be below %s, %s (Forecast).", at, t.r.Decider, d.Threshold.Signal,
				amount(d.Threshold.Signal, o.Capacity), amount(d.Threshold.Signal, o.Available), when, amount(d.Threshold.Signal, want.Value()), kind)
			return
		}
		t.say("%s, %s: %s had %s available of %s, less than %s, %s (%s).", at, t.r.Decider, d.Threshold.Signal, amount(d.Threshold.Signal, o.Available),
			amount(d.Threshold.Signal, o.Capacity), amount(d.Threshold.Signal, want.Value()), kind, d.Rule)
		if others := len(d.Due) - 1; others > 0 {
			why := "the kubelet could have taken any of those (SYN-20)"
			if len(d.Choices) == 1 {
				why = "this one is the most urgent"
			}
			t.say("%d more thresholds were due; %s.", others, why)
		}
	case engine.OverLimit:
		t.say("%s, %s: %d pods used more than their own limits; they go, and thresholds wait for the next pass (SYN-18).", at, t.r.Decider, len(d.Limits))
	default:
		t.say("%s, %s: %s (%s).", at, t.r.Decider, d.Outcome, d.Rule)
	}
}

// reclaimed says what was deleted and whether it was enough.
func (t *teller) reclaimed() {
	d := t.r.Decision
	if d.Outcome == engine.Pressure && len(d.Reclaim) == 0 {
		t.say("There was nothing to reclaim first on that filesystem (REC-8).")
	}
	for _, s := range t.r.Steps {
		var expected, actual int64
		failed, known := 0, false
		for _, item := range s.Items {
			if item.ExpectedBytes != nil {
				expected += *item.ExpectedBytes
			}
			if item.ActualBytes != nil {
				actual += *item.ActualBytes
				known = true
			}
			if item.Error != "" {
				failed++
			}
		}
		sentence := fmt.Sprintf("Reclaim of %s: nothing could go.", s.Kind)
		if n := len(s.Items); n > 0 {
			sentence = fmt.Sprintf("Reclaim of %s: %d picked (%s), expected %s", s.Kind, n, items(s.Items), page.Bytes(uint64(max(0, expected))))
			if known {
				sentence += ", came free " + page.Bytes(uint64(max(0, actual)))
			}
			if failed > 0 {
				sentence += fmt.Sprintf("; %d could not be deleted", failed)
			}
			sentence += "."
		}
		t.say("%s", sentence)
	}
	switch v := t.r.Verdict; {
	case v == nil:
	case v.Resolved:
		t.say("After that it was enough, so nobody had to go (%s).", t.ruleOfVerdict())
	default:
		still := make([]string, len(v.Still))
		for i, th := range v.Still {
			still[i] = th.String()
		}
		t.say("After that it was not enough: %s (%s).", strings.Join(still, ", "), t.ruleOfVerdict())
	}
}

func (t *teller) ruleOfVerdict() string {
	if t.r.Config.Options.JudgeOwnFilesystem {
		return "JudgeOwnFilesystem"
	}
	return "REC-6"
}

// items lists a few things with their rules.
func items(list []record.Item) string {
	var parts []string
	for i, item := range list {
		if i == 3 {
			parts = append(parts, fmt.Sprintf("%d more", len(list)-i))
			break
		}
		parts = append(parts, item.ID+" by "+item.Rule)
	}
	return strings.Join(parts, ", ")
}

// went says who went and why, who not and why not.
func (t *teller) went() {
	d := t.r.Decision
	for _, e := range d.Limits {
		if t.about(e.UID) {
			t.say("%s goes: %s of %s is above its limit of %s (LSE-11).", t.name(e.UID), e.Cause, cmp.Or(e.Subject, "the pod"), page.Bytes(uint64(e.Limit.Value())))
		}
	}
	if h := d.Hold; h != nil {
		t.say("Since %s %s less became available, and %s of that is nobody's%s.", h.Since.UTC().Format(time.TimeOnly), page.Bytes(uint64(max(0, h.GrewBytes))), page.Bytes(uint64(max(0, h.NobodysBytes))), suspects(h.Who))
	}
	for _, b := range d.Barred {
		if t.about(b.UID) {
			t.say("%s does not go before %s: %s, %d of %s went within the hour (BreakStorms).", t.name(b.UID), b.Until.UTC().Format(time.TimeOnly), b.Why, b.Went, cmp.Or(b.Owner, "all pods"))
		}
	}
	if d.Outcome != engine.Pressure {
		return
	}
	if d.Victim == nil {
		sentence := "No pod was to go: %s."
		if t.would {
			sentence = "No pod would go: %s."
		}
		t.say(sentence, noVictim(d))
		return
	}
	place := func(uid string) int {
		return slices.IndexFunc(d.Ranking, func(r engine.Ranked) bool { return r.UID == uid })
	}
	i := place(d.Victim.UID)
	if i < 0 {
		return
	}
	victim := d.Ranking[i]
	lives := t.r.Verdict != nil && t.r.Verdict.Resolved
	if t.about(victim.UID) {
		verb := "goes"
		switch {
		case lives:
			verb = "would have been next"
		case t.would:
			verb = "would go first"
		}
		t.say("%s %s: it is number %d of %d. %s", t.name(victim.UID), verb, i+1, len(d.Ranking), t.standing(victim))
		if victim.Measured && !victim.Exceeds {
			t.out[len(t.out)-1] = strings.TrimSuffix(t.out[len(t.out)-1], ".") + "; no pod that may go stands before it."
		}
	}
	shown := 0
	for j, o := range d.Ranking {
		if j == i || !t.about(o.UID) || len(t.only) == 0 && shown == others {
			continue
		}
		shown++
		t.say("Not %s, number %d: %s", t.name(o.UID), j+1, t.why(victim, o, j < i))
	}
	if left := len(d.Ranking) - 1 - shown; left > 0 && len(t.only) == 0 {
		t.say("%d more pods come after these; --pod NAME tells why.", left)
	}
	for _, e := range t.r.Evicted {
		if t.about(e.UID) && e.ExpectedBytes != nil && e.ActualBytes != nil {
			t.say("With %s %s were expected to come free, and %s did.", t.name(e.UID), page.Bytes(uint64(max(0, *e.ExpectedBytes))), page.Bytes(uint64(max(0, *e.ActualBytes))))
		}
	}
}

func (t *teller) about(uid string) bool { return len(t.only) == 0 || slices.Contains(t.only, uid) }

func suspects(list []engine.Suspect) string {
	if len(list) == 0 {
		return ""
	}
	names := make([]string, len(list))
	for i, s := range list {
		names[i] = fmt.Sprintf("%s with %s", s.Name, page.Bytes(uint64(max(0, s.Bytes))))
	}
	return "; known outside of pods: " + strings.Join(names, ", ")
}

func noVictim(d engine.Decision) string {
	switch d.NoVictim {
	case "SYN-24":
		return "there was no pod to choose from (SYN-24)"
	case "SYN-28":
		return "none of the pods may ever go (SYN-28)"
	case "HoldFire":
		if d.Hold.OnlyLate() {
			return "what grew last may be another pod's than the first one's, and is accounted for in a moment (HoldFire)"
		}
		return "most of what grew belongs to no pod, and evicting would not stop it (HoldFire)"
	case "AwaitFreed":
		return fmt.Sprintf("%s were set free and are still to arrive (AwaitFreed)", page.Bytes(uint64(max(0, d.AwaitedBytes))))
	case "OnlyWhoHelps":
		return "none of them has anything there, as far as is known (OnlyWhoHelps)"
	case "BreakStorms":
		return "those that would be next were evicted too often lately (BreakStorms)"
	default:
		return d.NoVictim
	}
}

// standing says what put a pod where it is.
func (t *teller) standing(r engine.Ranked) string {
	s := t.r.Decision.Threshold.Signal
	if !r.Measured {
		return "There are no figures of it, and such pods go first (RANK-8)."
	}
	if r.Exceeds && t.lessBytes() {
		return fmt.Sprintf("It uses %s, more than it requests (RANK-9), at priority %d; what counts is that number less the bytes that it requests, %d (RANK-16).", amount(s, r.Usage.Value()), r.Priority, r.Over.Value())
	}
	if r.Exceeds {
		return fmt.Sprintf("It uses %s, %s more than it requests (RANK-9), at priority %d.", amount(s, r.Usage.Value()), amount(s, r.Over.Value()), r.Priority)
	}
	return fmt.Sprintf("It uses %s, which is not more than it requests, at priority %d.", amount(s, r.Usage.Value()), r.Priority)
}

// lessBytes says whether inodes were ranked less a request of bytes, which no
// number of inodes is above.
func (t *teller) lessBytes() bool {
	return t.r.Decision.Threshold.Signal.Resource() == engine.Inodes && !t.r.Config.Options.InodesByInodes
}

// why says by which rule a pod stands behind the victim, or stands before it
// and stays.
func (t *teller) why(victim, o engine.Ranked, before bool) string {
	s := t.r.Decision.Threshold.Signal
	usage := amount(s, o.Usage.Value())
	switch {
	case o.Critical:
		return "it never goes: static, mirror or of system-critical priority (SYN-33)."
	case before && slices.ContainsFunc(t.r.Decision.Barred, func(b engine.Bar) bool { return b.UID == o.UID }):
		return "its owner's pods were evicted too often lately (BreakStorms)."
	case before:
		return "it has nothing there, as far as is known; nothing would come free (OnlyWhoHelps)."
	case !victim.Measured && o.Measured:
		return "there are figures of it, and pods without go first (RANK-8)."
	case victim.Exceeds && !o.Exceeds:
		return fmt.Sprintf("it uses %s, not more than it requests (RANK-9).", usage)
	case o.Priority != victim.Priority:
		return fmt.Sprintf("its priority is %d, that of %s %d (RANK-10).", o.Priority, t.name(victim.UID), victim.Priority)
	case o.Group != victim.Group && t.lessBytes():
		return fmt.Sprintf("it uses %s; less the bytes that it requests that is %d, of %s %d (RANK-16).", usage, o.Over.Value(), t.name(victim.UID), victim.Over.Value())
	case o.Group != victim.Group:
		return fmt.Sprintf("it uses %s, %s above its request; %s is %s above (RANK-11).", usage, amount(s, o.Over.Value()), t.name(victim.UID), amount(s, victim.Over.Value()))
	default:
		return "it stands equal; among equals the UID decides, in the kubelet chance (RANK-12)."
	}
}
