// Package keeper is the loop that keeps a node's disks from filling up: observe, decide, act, record. It decides nothing itself: that
// is engine's, and what is picked is engine/garbage's. It deletes nothing itself: that is done by whoever is behind [Reclaimer] and
// [Evictor]. What is here is the order of things:
//
//   - A glance at the filesystems ten times a second, and more often the sooner a threshold may be met; a pass when something moves
//     towards one, or the engine's rest is over.
//   - In a pass with pressure: the reclaim of the plan, step by step; then a new look, and only if that was not enough, an eviction.
//   - What is short elsewhere has its reclaim in the same pass: a pod that is on its way out of one disk takes minutes, and holds up none
//     of another.
//   - One action at a time. An eviction that is under way keeps others from beginning, and no pass from deciding and recording.
//   - Between passes, collection of images and dead containers as the kubelet does it, but exact and at once.
//
// It imports engine and what is below it, and nothing else of this module. Only agent may import it.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
)

const (
	// glancePeriod is how often the filesystems are glanced at; one glance is a statfs(2) for each, some microseconds.
	glancePeriod = 100 * time.Millisecond
	// glanceLeast is how often that is while a disk fills up so fast that a threshold may be met before the next glance.
	glanceLeast = 5 * time.Millisecond
	// collectPeriod is how often images and dead containers are collected while nothing is short.
	collectPeriod = 10 * time.Second
	// fruitlessPeriod is how often that is for what was looked for and not found, or could not be: on a node of many images, all of
	// them in use, looking is work for containerd.
	fruitlessPeriod = time.Minute
	// blindRest is how long it is until the next look after one that failed: a disk may be filling up.
	blindRest = time.Second
	// retries is how often in a row a plan that did not hold is made anew before pods may go for it.
	retries = 3
	// rankedFor is how old a ranking may be when a pod goes by it: deleting takes minutes, and who was greedy then may be gone.
	rankedFor = 10 * time.Second
	// leastLead and mostLead bound how long before a threshold is met a reclaim is begun, when it is known how long deletions take; it is
	// known for leadFor. The first one on a disk that has just begun to fill up takes longest.
	leastLead, mostLead = 500 * time.Millisecond, 10 * time.Second
	leadFor             = 30 * time.Second
	// trendApart is how far apart the glances are by whose speeds it is seen that a threshold is about to be met.
	trendApart = 50 * time.Millisecond
	// firstPause is the rest after an eviction that failed; it doubles with each up to lastPause.
	firstPause, lastPause = time.Second, time.Minute
)

// Want is what one kind of reclaim is asked for.
type Want struct {
	// Signal is what is short, or what is looked after without pressure.
	Signal engine.Signal
	// NeedBytes is how much is to come free, garbage.Everything for all that can.
	NeedBytes int64
	// Pressure says that a threshold is met, not only that it is time to tidy up.
	Pressure bool
}

// ErrUnknown says that a fact is missing without which nobody can say what may go, as while the runtime does not answer: a plan was
// not wrong, but there is none.
var ErrUnknown = errors.New("it is not known what may go")

// Reclaimer does one kind of reclaim.
type Reclaimer interface {
	// Plan picks, and changes nothing. The step has its items. It may be called by several at a time. An error wraps [ErrUnknown] if
	// nobody knows what may go; of another kind it is as one of Run.
	Plan(ctx context.Context, want Want) (record.Step, error)
	// Run carries a step out that was planned for want and returns it with what came of each item. It checks each item again just
	// before it goes. An error wraps [ErrUnknown] if that is why.
	Run(ctx context.Context, want Want, step record.Step) (record.Step, error)
}

// ErrGone says that a pod is there no more, without anybody having had to end it.
var ErrGone = errors.New("it went by itself")

// Evictor ends pods.
type Evictor interface {
	// Evict ends a pod and returns when it is gone, or when it is clear that it stays, with the reason. hard says that it goes for a
	// hard threshold or a limit of its own; by the grace period alone that can't be told, which is 0 for soft thresholds, too.
	// An error wraps [ErrGone] if it was gone before it was told to go. gainedBytes is by how much more is available now where it had
	// to come free, nil if that was not measured.
	Evict(ctx context.Context, e engine.Eviction, hard bool) (gainedBytes *int64, _ error)
}

// Remains waits until nothing is left of a pod and what it had has come back, and says whether it has; false if that is not known.
type Remains func(ctx context.Context) bool

// Parts are what a keeper is made of. Look, Glance, Config and Log are required.
type Parts struct {
	// Decider is the name under which decisions are recorded.
	Decider string
	// Look says what there is now. The filesystems' figures are asked for anew; pods' may be some seconds old and say so.
	Look func(ctx context.Context) (engine.Input, error)
	// Glance sees what is available on the filesystems, and nothing else.
	Glance func(ctx context.Context) (engine.Observations, error)
	// Config says how to decide about what was seen: thresholds depend on capacities and on the kubelet's settings, which both may
	// change. An error means that nothing is decided; it is told.
	Config func(in engine.Input) (Setup, error)
	// Reclaimers are those that there are, by kind; a kind without one is passed over, and told.
	Reclaimers map[engine.Reclaim]Reclaimer
	// Collectors tidy up while nothing is short, one after the other.
	Collectors []Collector
	// Evictor ends pods; nil reports only.
	Evictor Evictor
	// Remains finds what a pod has that is about to go; nil for nobody can.
	Remains func(e engine.Eviction) Remains
	// Record takes what was decided and done; nil for nowhere. acted says that something was deleted or ended.
	Record func(r record.Record, acted bool)
	// Passed is told of every pass when it is over, also of those that are no news to Record; nil for nobody. It must not wait.
	Passed func(r record.Record)
	// Observe decides and records, and does nothing.
	Observe bool
	// State is what an earlier keeper left; the zero State is that of one that never looked.
	State engine.State
	Log   *zap.Logger
}

// Setup is how to decide.
type Setup struct {
	Config engine.Config
	// Overlaps are thresholds of ours that are not above the kubelet's. They are not among Config.Thresholds.
	Overlaps []engine.Overlap
	// Missing are signals for which nothing can be derived at the moment.
	Missing []engine.Signal
}

// Collector is a reclaim that takes place without pressure.
type Collector interface {
	// Name is for people, such as "images".
	Name() string
	// Plan picks what is due, and changes nothing. No items mean that nothing is; then a step without kind says that it was not
	// looked for, which costs nothing and is asked again soon.
	Plan(ctx context.Context) (record.Step, error)
	// Run is as that of a [Reclaimer].
	Run(ctx context.Context, step record.Step) (record.Step, error)
}

// Keeper is the loop. Its methods may be called from several goroutines.
type Keeper struct {
	parts Parts

	// acting is held by whoever deletes, in a pass, or one item that is tidied up.
	acting turn
	// collecting is held by whoever tidies up, from the plan to the end; acting may be taken while it is held.
	collecting turn
	// evicted is received from when an eviction has ended.
	evicted chan departure
	// arrived is received from when nothing is left of a pod that was evicted, and its space is back.
	arrived chan string

	mu     sync.Mutex
	status Status // guarded by mu
	// last is what the last pass saw and left; guarded by mu; nil before it, and while nothing can be decided.
	last *record.Record

	// Used by the one goroutine of Run only.
	state     engine.State
	lines     []line
	leaving   map[string]departure
	surprises int
	// held is why nobody is evicted for a reclaim that is not done, in the last pass.
	held string
	// outrun says that in the last pass all came free that was asked for, and is used already.
	outrun bool
	said   string
	// failures counts evictions that failed in a row; until notBefore no other begins.
	failures  int
	notBefore time.Time
	// fruitless is when each collector last looked in vain, by its name.
	fruitless map[string]time.Time
	// config is that of the last pass, trend what the last glances have seen.
	config engine.Config
	trend  engine.Trend
	// lasted is how long each thing took that was deleted in the last reclaim, which ended at measured.
	lasted   time.Duration
	measured time.Time
	// empty is when each kind of reclaim last had nothing; a deletion or the end of a pod forgets it.
	empty map[errand]time.Time
	// undone is why each kind of reclaim was not done the last time, as it was logged.
	undone map[errand]string
}

// errand is a kind of reclaim for what is short.
type errand struct {
	signal engine.Signal
	kind   engine.Reclaim
}

// turn is taken by one at a time. Who waits for it can be cancelled, unlike with a mutex.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

// take waits for the turn; the error is ctx's.
func (t turn) take(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t turn) try() bool {
	select {
	case t <- struct{}{}:
		return true
	default:
		return false
	}
}

func (t turn) give() { <-t }

// departure is a pod that was told to go.
type departure struct {
	eviction engine.Eviction
	told     time.Time
	signal   engine.Signal
	// had is what it had where space is short, nil while unknown; available is what was left there before.
	had       *int64
	available int64
	// gained is what came back, as far as it was measured.
	gained *int64
	err    error
}

// New returns a keeper, which does nothing until [Keeper.Run].
func New(p Parts) *Keeper {
	return &Keeper{
		parts: p, state: p.State, acting: newTurn(), collecting: newTurn(), evicted: make(chan departure), arrived: make(chan string), leaving: map[string]departure{},
		fruitless: map[string]time.Time{}, empty: map[errand]time.Time{}, undone: map[errand]string{},
	}
}

// line is an amount below which something happens.
type line struct {
	signal engine.Signal
	// at is the amount, seen what was available in the last pass.
	at, seen int64
}

// near says that a pass should not wait: more than a quarter of the way to a line is gone since the last pass, or all of it.
func near(lines []line, now engine.Observations) bool {
	return slices.ContainsFunc(lines, func(l line) bool {
		o, ok := now[l.signal]
		return ok && (o.Available < l.at || o.Available < l.seen-(l.seen-l.at)/4)
	})
}

// Run looks after the disks until ctx ends. It returns when what it has begun has ended.
func (k *Keeper) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	ended, stop := context.WithCancel(ctx)
	defer stop()
	glance := time.NewTimer(glancePeriod)
	defer glance.Stop()
	var last glimpse
	next, collect := time.Now(), time.Now().Add(collectPeriod)
	var passed time.Time
	for {
		now := time.Now()
		if !now.Before(next) {
			next = now.Add(k.pass(ended, &running))
			passed = now
		}
		if !now.Before(collect) {
			k.collect(ended)
			collect = time.Now().Add(collectPeriod)
		}
		select {
		case <-ctx.Done():
			return
		case d := <-k.evicted:
			if k.left(d); d.err == nil {
				next = time.Now()
			}
		case uid := <-k.arrived:
			k.state = k.state.Arrived(uid)
			if len(k.state.Met) > 0 {
				next = time.Now()
			}
		case <-glance.C:
			wait := glancePeriod
			// One that can't be had says nothing; the next pass finds out why.
			if seen, err := k.parts.Glance(ended); err == nil {
				this := glimpse{time.Now(), seen}
				if near(k.lines, seen) || k.comes(this) && this.at.Sub(passed) >= engine.ShortestRest {
					next = this.at
				}
				wait, last = soon(k.lines, last, this), this
			}
			glance.Reset(wait)
		}
	}
}

// glimpse is what was seen, and when.
type glimpse struct {
	at   time.Time
	seen engine.Observations
}

// soon is when to glance again: at half of the time until a line is met at the speed between two glimpses, from glanceLeast to
// glancePeriod.
func soon(lines []line, before, now glimpse) time.Duration {
	wait := glancePeriod
	for _, l := range lines {
		was, ok := before.seen[l.signal]
		is, ok2 := now.seen[l.signal]
		if fell := was.Available - is.Available; ok && ok2 && fell > 0 && is.Available >= l.at {
			left := float64(is.Available-l.at) / float64(fell) * float64(now.at.Sub(before.at))
			wait = min(wait, time.Duration(min(left, float64(time.Minute))/2))
		}
	}
	return max(wait, glanceLeast)
}

// comes says that a threshold will be met before what is deleted now would be gone, at the speeds between glances.
func (k *Keeper) comes(now glimpse) bool {
	if len(k.config.Thresholds) == 0 || !k.config.Options.Forecast {
		return false
	}
	for _, list := range k.trend {
		if now.at.Sub(list[len(list)-1].At) < trendApart {
			return false
		}
	}
	for signal, o := range now.seen {
		o.Time = now.at // of one moment for all
		now.seen[signal] = o
	}
	k.trend = k.trend.Add(now.seen, now.at)
	return len(k.config.Coming(k.trend, k.state, now.seen, now.at, k.config.Horizon)) > 0
}

// comesBy is comes with what a pass sees.
func (k *Keeper) comesBy(in engine.Input) bool {
	if in.Summary == nil || !k.config.Options.Forecast {
		return false
	}
	seen := in.Summary.Observe()
	return len(k.config.Coming(k.trend.Add(seen, in.Now), k.state, seen, in.Now, k.config.Horizon)) > 0
}

// leading is c that looks as far ahead as a deletion takes on this node, if that is known.
func (k *Keeper) leading(c engine.Config) engine.Config {
	if c.Horizon > 0 && time.Since(k.measured) < leadFor {
		c.Horizon = min(max(k.lasted, leastLead), mostLead)
	}
	return c
}

// pass looks, decides, acts and records. It returns when to look again at the latest.
func (k *Keeper) pass(ctx context.Context, running *sync.WaitGroup) time.Duration {
	if k.acting.take(ctx) != nil {
		return engine.LongestRest
	}
	defer k.acting.give()
	in, setup, err := k.look(ctx)
	if ctx.Err() != nil {
		return engine.LongestRest
	}
	if err != nil {
		k.lines = nil // they are of another time; each glance would be near them
		k.blind(err)
		return blindRest
	}
	setup.Config = k.leading(setup.Config)
	k.config = setup.Config
	before, trend := k.state, k.state.Trend
	if k.comesBy(in) {
		before.Trend = k.trend // glances see it sooner than passes
	}
	r := record.Record{Format: record.Format, Engine: engine.Version, Decider: k.parts.Decider, Config: setup.Config, State: before, Input: in}
	k.state, r.Decision = setup.Config.Sync(before, in)
	r.Next = k.state
	if setup.Config.Options.Forecast && in.Summary != nil {
		k.state.Trend = trend.Add(in.Summary.Observe(), in.Now) // what is to come within the day is not told by one second
	}
	acted := k.carryOut(ctx, setup.Config, &r, running)
	k.note(setup, in, r, acted)
	k.elsewhere(ctx, r)
	if k.parts.Passed != nil {
		k.parts.Passed(r)
	}
	if in.Summary == nil {
		return engine.LongestRest
	}
	seen := in.Summary.Observe()
	k.lines = linesOf(setup.Config, seen)
	if r.After != nil { // what was short is a line again, from here on
		k.lines = linesOf(setup.Config, r.After.Observe())
	}
	switch {
	case k.held != "" && k.surprises > retries:
		return blindRest
	case k.surprises > 0, k.outrun, r.Decision.Hold != nil && r.Decision.Hold.Late:
		return engine.ShortestRest
	}
	return setup.Config.Rest(k.state.Trend, k.state, seen, in.Now)
}

func (k *Keeper) look(ctx context.Context) (engine.Input, Setup, error) {
	in, err := k.parts.Look(ctx)
	if err != nil {
		return engine.Input{}, Setup{}, fmt.Errorf("look at the node: %w", err)
	}
	setup, err := k.parts.Config(in)
	if err != nil {
		return engine.Input{}, Setup{}, fmt.Errorf("find out from when on a disk is short: %w", err)
	}
	return in, setup, nil
}

// linesOf are the amounts at which thresholds are met that are not.
func linesOf(c engine.Config, seen engine.Observations) []line {
	var lines []line
	for _, t := range c.Thresholds {
		o, ok := seen[t.Signal]
		if !ok || t.Inert {
			continue
		}
		at := t.Value.Of(o.Capacity)
		if o.Available >= at.Value() {
			lines = append(lines, line{t.Signal, at.Value(), o.Available})
		}
	}
	return lines
}

// carryOut does what a decision wants and notes it in the record. It says whether anything was deleted or ended.
func (k *Keeper) carryOut(ctx context.Context, c engine.Config, r *record.Record, running *sync.WaitGroup) (acted bool) {
	d := r.Decision
	if k.held, k.outrun = "", false; d.Outcome != engine.Pressure {
		k.surprises = 0 // no plan is to be made anew
	}
	switch d.Outcome {
	case engine.OverLimit:
		for _, e := range d.Limits {
			acted = k.evict(ctx, r, e, running) || acted
		}
	case engine.Foreseen:
		acted, _ = k.reclaim(ctx, r) //nolint:errcheck // what could not be done now is tried when it is short, and was told
	case engine.Pressure:
		var err error
		acted, err = k.reclaim(ctx, r)
		if err != nil && ctx.Err() != nil {
			return acted
		}
		if errors.Is(err, ErrUnknown) || err != nil && k.surprises < retries {
			k.surprises++
			k.held = err.Error()
			return acted // nobody goes for a plan that did not hold, or for want of one
		}
		k.surprises = 0
		if len(d.Reclaim) > 0 && !k.parts.Observe && k.enough(ctx, c, r) {
			return acted
		}
		if k.outrun = err == nil && d.NeedBytes != nil && promised(r.Steps) >= *d.NeedBytes; k.outrun {
			return acted // others have used it already: there may be more to delete
		}
		if d.Victim == nil || acted && time.Since(r.Input.Now) > rankedFor {
			return acted // the next pass, within a second or so, ranks anew
		}
		for _, e := range append([]engine.Eviction{*d.Victim}, d.Further...) {
			acted = k.evict(ctx, r, e, running) || acted
		}
	}
	return acted
}

// elsewhere reclaims what is short on other filesystems than the one that a pass was about, by the figures of now. Nobody is evicted for it:
// its turn comes when the first one is not short any more, or less so.
func (k *Keeper) elsewhere(ctx context.Context, first record.Record) {
	c, state, ok := first.Config.Elsewhere(first.State, first.Decision) // from before the pass: what that saw is news
	if !ok || ctx.Err() != nil {
		return
	}
	in, err := k.parts.Look(ctx)
	if err != nil {
		return // the next pass tells
	}
	in.Pods, state.Freed = nil, k.state.Freed
	r := record.Record{Format: record.Format, Engine: engine.Version, Decider: k.parts.Decider, Config: c, State: state, Input: in}
	r.Next, r.Decision = c.Sync(state, in)
	if r.Decision.Outcome != engine.Pressure {
		return
	}
	acted, _ := k.reclaim(ctx, &r) //nolint:errcheck // it holds up nobody, and was told
	k.besides(r, acted)
}

// enough looks again after a reclaim and says whether pods may live.
func (k *Keeper) enough(ctx context.Context, c engine.Config, r *record.Record) bool {
	after, err := k.parts.Look(ctx)
	if err == nil {
		r.After = after.Summary
	}
	r.Verdict = &record.Verdict{Freed: k.state.Freed}
	r.Verdict.Resolved, r.Verdict.Still = c.Resolved(k.state, r.Decision, r.After)
	return r.Verdict.Resolved
}

// reclaim carries out the kinds of a decision in their order, until as much as it needs has come free. Its error says that a plan did
// not hold; what came free until then counts.
func (k *Keeper) reclaim(ctx context.Context, r *record.Record) (acted bool, _ error) {
	d := r.Decision
	var freed, coming int64
	available := int64(-1)
	if r.Input.Summary != nil {
		if o, ok := r.Input.Summary.Observe()[d.Threshold.Signal]; ok {
			available = o.Available
		}
	}
	var failed error
	// Before a pod goes all is tried. Else, with passes a second apart, what had nothing is asked as often as the kubelet asks (REC-9).
	noneGoes := d.Victim == nil || k.parts.Observe || k.parts.Evictor == nil || len(k.leaving) > 0 || time.Now().Before(k.notBefore)
	for _, kind := range d.Reclaim {
		this := errand{d.Threshold.Signal, kind}
		if last, ok := k.empty[this]; ok && noneGoes && time.Since(last) < collectPeriod {
			continue
		}
		want := Want{Signal: d.Threshold.Signal, NeedBytes: garbage.Everything, Pressure: true}
		if d.NeedBytes != nil {
			if want.NeedBytes = *d.NeedBytes - freed; want.NeedBytes <= 0 {
				break
			}
		}
		step, did, err := k.step(ctx, kind, want)
		acted = acted || did
		if delete(k.empty, this); err == nil && len(step.Items) == 0 {
			k.empty[this] = time.Now()
		}
		if did {
			clear(k.empty)
		}
		if step.Kind != "" {
			r.Steps = append(r.Steps, step)
		}
		freed += freedBy(step)
		coming += comingFrom(step)
		if err == nil {
			delete(k.undone, this)
			continue
		}
		failed = errors.Join(failed, err)
		if text := err.Error(); text != k.undone[this] { // passes are a second apart, and the log is on a full disk
			k.undone[this] = text
			k.parts.Log.Warn("a reclaim is not done, or not to its end", zap.String("kind", string(kind)), zap.Error(err))
		}
	}
	if coming > 0 && available >= 0 && d.Threshold.Signal.Resource() == engine.EphemeralStorage {
		k.state = k.state.Freeing(d.Threshold.Signal, coming, available+freed, time.Now())
	}
	return acted, failed
}

// step plans and carries out one kind of reclaim.
func (k *Keeper) step(ctx context.Context, kind engine.Reclaim, want Want) (_ record.Step, acted bool, _ error) {
	reclaimer := k.parts.Reclaimers[kind]
	if reclaimer == nil {
		return record.Step{}, false, fmt.Errorf("reclaim %s: this cleave can't", kind)
	}
	step, err := reclaimer.Plan(ctx, want)
	if err != nil {
		return record.Step{Kind: kind}, false, fmt.Errorf("plan to reclaim %s: %w", kind, err)
	}
	if k.parts.Observe || len(step.Items) == 0 {
		return step, false, nil
	}
	began := time.Now()
	step, err = reclaimer.Run(ctx, want, step)
	if n := deleted(step); n > 0 {
		k.lasted, k.measured = max(time.Since(began)/time.Duration(n), k.lasted/2), time.Now()
	}
	return step, gone(step), err
}

func deleted(step record.Step) (n int) {
	for _, i := range step.Items {
		if i.ActualBytes != nil {
			n++
		}
	}
	return n
}

// gone says whether anything of a step was deleted.
func gone(step record.Step) bool { return deleted(step) > 0 }

func freedBy(step record.Step) (bytes int64) {
	for _, i := range step.Items {
		if i.ActualBytes != nil {
			bytes += max(0, *i.ActualBytes)
		}
	}
	return bytes
}

// comingFrom is what a step has set free that had not come when it ended, and may come yet. What others took meanwhile is not.
func comingFrom(step record.Step) (bytes int64) {
	for _, i := range step.Items {
		if i.ActualBytes != nil && i.ExpectedBytes != nil && !i.OthersWrote {
			bytes += max(0, *i.ExpectedBytes-max(0, *i.ActualBytes))
		}
	}
	return bytes
}

// promised is what items that went were expected to free.
func promised(steps []record.Step) (bytes int64) {
	for _, step := range steps {
		for _, i := range step.Items {
			if i.ActualBytes != nil && i.ExpectedBytes != nil {
				bytes += *i.ExpectedBytes
			}
		}
	}
	return bytes
}

// evict tells a pod to go, in a goroutine of its own that Run waits for, and says whether it did. A pod that is on its way is not
// told again, and while one is, no other is.
func (k *Keeper) evict(ctx context.Context, r *record.Record, e engine.Eviction, running *sync.WaitGroup) bool {
	if k.parts.Observe || k.parts.Evictor == nil || len(k.leaving) > 0 && !together(r.Decision, k.leaving, e.UID) {
		return false
	}
	if _, ok := k.leaving[e.UID]; ok || time.Now().Before(k.notBefore) {
		return false
	}
	done := record.Evicted{UID: e.UID, At: time.Now()}
	d := departure{eviction: e, told: done.At, signal: r.Decision.Threshold.Signal, available: e.Available}
	if r.Decision.Outcome == engine.Pressure && d.signal.Resource() == engine.EphemeralStorage {
		for i := range r.Decision.Ranking {
			if ranked := &r.Decision.Ranking[i]; ranked.UID == e.UID {
				bytes := ranked.Usage.Value()
				d.had, done.ExpectedBytes = &bytes, &bytes
			}
		}
	}
	r.Evicted = append(r.Evicted, done)
	k.leaving[e.UID] = d
	k.state = k.state.Evicted(e, done.At)
	k.parts.Log.Warn("a pod is evicted", zap.String("pod", e.Namespace+"/"+e.Name), zap.String("uid", e.UID), zap.String("cause", string(e.Cause)))
	hard := r.Decision.Outcome == engine.OverLimit || r.Decision.Threshold.Hard()
	running.Add(1)
	go func() { // ends with the eviction; Run waits for it
		defer running.Done()
		var remains Remains
		if k.parts.Remains != nil && d.had != nil {
			remains = k.parts.Remains(e)
		}
		d.gained, d.err = k.parts.Evictor.Evict(ctx, e, hard)
		select {
		case k.evicted <- d:
		case <-ctx.Done():
			return
		}
		if d.err != nil && !errors.Is(d.err, ErrGone) || remains == nil || !remains(ctx) {
			return
		}
		select {
		case k.arrived <- e.UID:
		case <-ctx.Done():
		}
	}()
	return true
}

// together says whether a pod goes in one decision with those that are on their way.
func together(d engine.Decision, leaving map[string]departure, uid string) bool {
	var group []string
	for _, e := range d.Limits {
		group = append(group, e.UID)
	}
	if d.Victim != nil {
		group = append(group, d.Victim.UID)
		for _, e := range d.Further {
			group = append(group, e.UID)
		}
	}
	for l := range leaving {
		if !slices.Contains(group, l) {
			return false
		}
	}
	return slices.Contains(group, uid)
}

// left notes that a pod is gone, or stays. One that stays did not go: the bounds of evictions are for those that do, and else some
// failures would forbid all evictions of the next hour.
func (k *Keeper) left(d departure) {
	uid := d.eviction.UID
	delete(k.leaving, uid)
	clear(k.empty)
	if k.parts.Record != nil {
		k.parts.Record(d.recorded(k.parts.Decider), true)
	}
	byItself := errors.Is(d.err, ErrGone)
	if d.err != nil {
		k.state.Gone = slices.DeleteFunc(slices.Clone(k.state.Gone), func(g engine.Departure) bool { return g.UID == uid })
	}
	if d.err != nil && !byItself {
		pause := firstPause << min(k.failures, 6)
		k.failures++
		k.notBefore = time.Now().Add(min(pause, lastPause))
		k.parts.Log.Error("a pod that was evicted stays", zap.String("uid", uid), zap.Error(d.err))
		k.mu.Lock()
		defer k.mu.Unlock()
		k.status.Counts.EvictionsFailed++
		return
	}
	k.failures = 0
	if byItself { // whoever lists pods will see it in a moment
		k.notBefore = time.Now().Add(firstPause)
	}
	if d.had != nil && !slices.ContainsFunc(k.state.Freed, func(f engine.Freed) bool { return f.Of == uid }) {
		k.state = k.state.FreeingOf(uid, d.signal, *d.had, d.available, time.Now())
	}
}

// recorded is how the end of an eviction is written down.
func (d departure) recorded(decider string) record.Record {
	e := d.eviction
	gone := record.Departure{UID: e.UID, Namespace: e.Namespace, Name: e.Name, Cause: e.Cause, Told: d.told, ExpectedBytes: d.had, ActualBytes: d.gained}
	if d.err != nil && !errors.Is(d.err, ErrGone) {
		gone.Error = d.err.Error()
	}
	return record.Record{Format: record.Format, Engine: engine.Version, Decider: decider, Input: engine.Input{Now: time.Now()}, Departure: &gone}
}

// collect tidies up without pressure. It stops when something moves towards a threshold.
func (k *Keeper) collect(ctx context.Context) {
	if k.parts.Observe || k.state.Layout == nil || len(k.state.Met) > 0 {
		return // it is a matter of the thresholds then, or nothing is known
	}
	if !k.collecting.try() {
		return // somebody does so
	}
	defer k.collecting.give()
	calm := func() bool {
		seen, err := k.parts.Glance(ctx)
		return err == nil && !near(k.lines, seen)
	}
	for _, c := range k.parts.Collectors {
		if last, ok := k.fruitless[c.Name()]; ok && time.Since(last) < fruitlessPeriod {
			continue
		}
		step, err := k.collectOne(ctx, c, true, calm)
		delete(k.fruitless, c.Name())
		if err != nil || step.Kind != "" && len(step.Items) == 0 {
			k.fruitless[c.Name()] = time.Now()
		}
		k.tidied(c, step, false)
		if err != nil && ctx.Err() == nil {
			k.parts.Log.Warn("tidying up did not come to its end", zap.String("what", c.Name()), zap.Error(err))
		}
		if !calm() {
			return
		}
	}
}

// collectOne plans, and carries out if it may, one item after the other: a pass that has to act gets in between. It stops when
// further says so, or when as much has come free as was to. Preconditions: k.collecting is held.
func (k *Keeper) collectOne(ctx context.Context, c Collector, run bool, further func() bool) (record.Step, error) {
	step, err := c.Plan(ctx)
	if err != nil || !run {
		return step, err
	}
	items := step.Items
	need, limited := step.Need()
	for i := range items {
		if i > 0 && (!further() || limited && freedBy(step) >= need) {
			break
		}
		one := step
		one.Items = items[i : i+1]
		if one, err = k.collectItem(ctx, c, one); len(one.Items) == 1 {
			items[i] = one.Items[0]
		}
		if err != nil {
			break
		}
	}
	return step, err
}

func (k *Keeper) collectItem(ctx context.Context, c Collector, one record.Step) (record.Step, error) {
	if err := k.acting.take(ctx); err != nil {
		return one, err
	}
	defer k.acting.give()
	return c.Run(ctx, one)
}

// ErrObserves says that a keeper only looks on.
var ErrObserves = errors.New("nothing is deleted in mode observe: ask for a dry run")

// Collect tidies up now, or with dryRun says what it would do. The steps are what was picked, and what came of it. A keeper that
// observes does only the latter, and else returns [ErrObserves].
func (k *Keeper) Collect(ctx context.Context, dryRun bool) (steps []record.Step, _ error) {
	if k.parts.Observe && !dryRun {
		return nil, ErrObserves
	}
	if err := k.collecting.take(ctx); err != nil {
		return nil, err
	}
	defer k.collecting.give()
	always := func() bool { return true }
	var failed error
	for _, c := range k.parts.Collectors {
		step, err := k.collectOne(ctx, c, !dryRun, always)
		if !dryRun {
			k.tidied(c, step, true)
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", c.Name(), err))
		}
		if step.Kind != "" {
			steps = append(steps, step)
		}
	}
	return steps, failed
}

// Plan says what would be reclaimed if a signal were short by needBytes now; garbage.Everything for all that can go. Nothing is changed.
func (k *Keeper) Plan(ctx context.Context, signal engine.Signal, layout engine.Layout, needBytes int64) (steps []record.Step, _ error) {
	var failed error
	left := needBytes
	for _, kind := range engine.ReclaimFor(signal, layout) {
		reclaimer := k.parts.Reclaimers[kind]
		if reclaimer == nil || left <= 0 {
			continue
		}
		step, err := reclaimer.Plan(ctx, Want{Signal: signal, NeedBytes: left, Pressure: true})
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		steps = append(steps, step)
		for _, i := range step.Items {
			if i.ExpectedBytes != nil && left != garbage.Everything {
				left -= *i.ExpectedBytes
			}
		}
	}
	return steps, failed
}
