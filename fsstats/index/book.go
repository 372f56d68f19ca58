package index

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// reason is why a part is measured, the most urgent first.
type reason int

const (
	first    reason = iota // it has no figure that counts
	updating               // its owner may have written something, and its tree is remembered
	hot                    // its owner may have written something
	suspect                // something has changed on its filesystem
	refresh                // its figure is getting old
)

// Shares of CorePercent, and what first figures may take instead of it. What
// bringing figures up to date takes is taken from hotShare.
const (
	hotShare      = 0.90
	updatingShare = 0.75
	suspectShare  = 0.08
	firstPercent  = 25.0
)

// entryCost is what looking at an inode in memory takes of a processor, for
// measurements that don't know what they have taken.
const entryCost = 2 * time.Microsecond

// book is what is known and decided: no clock, no files. Times come as arguments.
type book struct {
	opt    Options
	owners map[owner]*ownerState
	parts  map[Key]*part
	// spaces are the filesystems that parts are on.
	spaces map[FS]*space
	// kept are figures of a state file that nobody has asked for yet.
	kept       map[Key]keptPart
	keptSpaces map[FS]keptSpace
	problem    string
	entries    Entries
	// asked is when filesystems were last asked about.
	asked time.Time
	// placing says that it is being asked where parts are.
	placing bool
	// rest is until when nothing is measured for a reason, so that measuring
	// takes no more than its share.
	rest [refresh + 1]time.Time
}

type owner struct {
	Kind Kind
	ID   string
}

type ownerState struct {
	rank int
	// counter is the last hint, counted how many changes of it were seen.
	counter uint64
	known   bool
	// writes counts how often the counter has moved.
	writes uint64
}

// part is what is known of a part.
type part struct {
	key     Key
	path    string // empty: its figures are given
	without []string
	fs      FS
	// lost says that it has to be asked where it is; placeAsked is when it last
	// was.
	lost       bool
	placeAsked time.Time
	// gone says that its folder is not there. It is not measured then; asking
	// where it is finds it again.
	gone   bool
	figure *Figure
	// stale says that the figure is shown and does not count as measured.
	stale bool
	// interval is the time to the next measurement as a suspect, doubt what is
	// enough of it while its filesystem is overdrawn.
	interval, doubt time.Duration
	// growth is by how much the last two figures differ, in bytes per second.
	growth float64
	// writes is the owner's when the last measurement was begun, seen when the
	// figure was.
	writes, seen uint64
	// memory is what is remembered of the tree, nil for nothing; updated is when the
	// figure was last brought up to date by it, or began to have it.
	memory  Memory
	folders int // in it, when that was last known
	updated time.Time
	problem string
	tried   time.Time // when the last measurement ended, good or bad
	running map[reason]time.Time
}

// space is a filesystem.
type space struct {
	last Space
	// changed is when something was last seen to have changed.
	changed time.Time
	// overdrawn says that the parts on it hold more than is used on it.
	overdrawn bool
	problem   string
}

func newBook(opt Options) *book {
	return &book{opt: opt, owners: map[owner]*ownerState{}, parts: map[Key]*part{}, spaces: map[FS]*space{}}
}

func (b *book) setOwners(owners []Owner) error {
	var errs []error
	seen, seenOwners, paths := map[Key]bool{}, map[owner]bool{}, map[string]Key{}
	for _, o := range owners {
		who := owner{o.Kind, o.ID}
		seenOwners[who] = true
		if b.owners[who] == nil {
			b.owners[who] = &ownerState{}
		}
		b.owners[who].rank = o.Rank
		for _, p := range o.Parts {
			key := Key{o.Kind, o.ID, p.Name}
			path := p.Path
			if path != "" {
				path = filepath.Clean(path)
				if !filepath.IsAbs(path) {
					errs = append(errs, fmt.Errorf("%s: the path %q is not absolute", key, p.Path))
					continue
				}
				if other, taken := paths[path]; taken {
					errs = append(errs, fmt.Errorf("%s: %s has the same path %s", key, other, path))
					continue
				}
				paths[path] = key
			}
			if seen[key] {
				errs = append(errs, fmt.Errorf("%s is named twice", key))
				continue
			}
			seen[key] = true
			b.keep(key, path)
		}
	}
	maps.DeleteFunc(b.parts, func(k Key, _ *part) bool { return !seen[k] })
	maps.DeleteFunc(b.owners, func(o owner, _ *ownerState) bool { return !seenOwners[o] })
	b.nest()
	b.forgetSpaces()
	return errors.Join(errs...)
}

// keep makes sure that there is a part at a path.
func (b *book) keep(key Key, path string) {
	p := b.parts[key]
	if p != nil && p.path == path {
		return
	}
	p = &part{key: key, path: path, lost: path != "", interval: b.opt.SuspectEvery, doubt: b.opt.HotEvery, running: map[reason]time.Time{}}
	b.parts[key] = p
	kept, ok := b.kept[key]
	if !ok || kept.Path != path {
		return
	}
	delete(b.kept, key)
	figure := kept.Figure
	p.figure, p.fs, p.tried = &figure, kept.FS, figure.Finished
	p.interval = max(min(kept.Interval, b.opt.SuspectMax), b.opt.SuspectEvery)
}

// nest finds out for each part which others are below it. A part whose tree has
// another border than before is measured again.
func (b *book) nest() {
	inside := map[Key][]string{}
	var open []*part // those that the path at hand may be below of, the outermost first
	byPath := slices.SortedFunc(maps.Values(b.parts), func(x, y *part) int {
		return slices.Compare(strings.Split(x.path, "/"), strings.Split(y.path, "/"))
	})
	for _, p := range byPath {
		if p.path == "" {
			continue
		}
		for len(open) > 0 && !isBelow(p.path, open[len(open)-1].path) {
			open = open[:len(open)-1]
		}
		if len(open) > 0 {
			above := open[len(open)-1].key
			inside[above] = append(inside[above], p.path)
		}
		open = append(open, p)
	}
	for key, p := range b.parts {
		if !slices.Equal(p.without, inside[key]) {
			p.without, p.stale = inside[key], true
		}
	}
}

func isBelow(path, above string) bool {
	rest, ok := strings.CutPrefix(path, above)
	return above == "/" || ok && strings.HasPrefix(rest, "/")
}

// forgetSpaces drops filesystems that no part is on.
func (b *book) forgetSpaces() {
	used := map[FS]bool{}
	for _, p := range b.parts {
		used[p.fs] = true
	}
	maps.DeleteFunc(b.spaces, func(fs FS, _ *space) bool { return !used[fs] })
}

func (b *book) forgetPlaces() {
	for _, p := range b.parts {
		p.lost, p.placeAsked = p.path != "", time.Time{}
	}
	b.asked = time.Time{}
}

// question is one about the filesystem of a path.
type question struct {
	path string
	// fs is the one that is known to be there, empty if it is asked where a part is.
	fs  FS
	key Key
}

// placeEvery is how often it is asked where a part is whose path does not answer.
const placeEvery = 10 * time.Second

// placeQuestions gives the parts of which it has to be asked where they are. There
// are none while an earlier round is under way.
func (b *book) placeQuestions(now time.Time) (out []question) {
	if b.placing {
		return nil
	}
	for _, key := range b.keys() {
		p := b.parts[key]
		if p.lost && (p.placeAsked.IsZero() || now.Sub(p.placeAsked) >= placeEvery) {
			out = append(out, question{path: p.path, key: key})
		}
	}
	b.placing = len(out) > 0
	return out
}

// questions gives the filesystems that have to be asked about now.
func (b *book) questions(now time.Time) (out []question) {
	if now.Sub(b.asked) < b.opt.Period {
		return nil
	}
	b.asked = now
	best := map[FS]*part{}
	for _, key := range b.keys() {
		p := b.parts[key]
		if p.path != "" && b.spaces[p.fs] != nil && (best[p.fs] == nil || p.betterToAsk(best[p.fs])) {
			best[p.fs] = p
		}
	}
	for _, fs := range slices.Sorted(maps.Keys(best)) {
		out = append(out, question{path: best[fs].path, fs: fs, key: best[fs].key})
	}
	return out
}

// betterToAsk says whether p's path is more likely to be there in a moment than
// q's.
func (p *part) betterToAsk(q *part) bool {
	if good := p.problem == "" && !p.lost; good != (q.problem == "" && !q.lost) {
		return good
	}
	return len(p.path) < len(q.path)
}

func (b *book) keys() []Key { return slices.SortedFunc(maps.Keys(b.parts), Key.compare) }

// answer takes the answer to a question.
func (b *book) answer(q question, got Space, err error, now time.Time) {
	if q.fs == "" {
		b.answerPlace(q, got, err, now)
		return
	}
	s := b.spaces[q.fs]
	switch {
	case s == nil:
	case err != nil:
		s.problem = err.Error()
		if p := b.parts[q.key]; p != nil && p.path == q.path && errors.Is(err, fs.ErrNotExist) {
			p.isGone(err, now)
			b.asked = time.Time{} // another one is asked next
		}
	case got.FS != q.fs: // something else is mounted there now
		for _, p := range b.parts {
			if p.fs == q.fs && p.path != "" {
				p.lost, p.placeAsked = true, time.Time{}
			}
		}
	default:
		s.problem = ""
		b.noteSpace(got)
		b.weigh(got.FS)
	}
}

// overdraft is by how many bytes parts may hold more than is used on their
// filesystem before that is a reason to look again.
const overdraft = 1 << 20

// weigh finds out whether a filesystem is overdrawn. Then something was measured
// while it moved, such as a file that was renamed during a walk and counted twice,
// or is gone since; or files share extents, so this makes the next measurements
// come sooner only until they have found nothing.
func (b *book) weigh(fs FS) {
	s, held := b.spaces[fs], int64(0)
	for _, p := range b.parts {
		if p.fs == fs && p.figure != nil {
			held += p.figure.Bytes
		}
	}
	before := s.overdrawn
	s.overdrawn = held > s.last.UsedBytes+overdraft
	if before && !s.overdrawn {
		for _, p := range b.parts {
			if p.fs == fs {
				p.doubt = b.opt.HotEvery
			}
		}
	}
}

func (b *book) answerPlace(q question, got Space, err error, now time.Time) {
	p := b.parts[q.key]
	if p == nil || p.path != q.path {
		return
	}
	p.placeAsked = now
	switch {
	case errors.Is(err, fs.ErrNotExist):
		p.isGone(err, now)
		return
	case err != nil:
		p.problem = err.Error()
		return
	}
	if p.gone || p.fs != "" && p.fs != got.FS {
		p.stale, p.interval = true, b.opt.SuspectEvery // it is another folder now
	}
	p.lost, p.gone, p.fs, p.problem = false, false, got.FS, ""
	b.noteSpace(got)
	b.forgetSpaces()
}

// isGone notes that a part's folder is not there.
func (p *part) isGone(err error, now time.Time) {
	p.lost, p.gone, p.placeAsked = true, true, now
	p.problem = err.Error()
	if p.figure != nil {
		p.problem = "it is gone: " + p.problem
	}
}

// noteSpace takes what is used on a filesystem.
func (b *book) noteSpace(got Space) {
	s := b.spaces[got.FS]
	if s == nil {
		// What was measured before a restart is as good as it was if nothing has
		// moved since. Otherwise nothing is known of before.
		s = &space{last: got, changed: got.At}
		if kept, ok := b.keptSpaces[got.FS]; ok && kept.Space.sameUse(got) {
			s.changed = kept.Changed
		}
		delete(b.keptSpaces, got.FS)
		b.spaces[got.FS] = s
		return
	}
	if !s.last.sameUse(got) {
		s.changed = got.At
	}
	s.last = got
}

// sameUse says whether as much is used in s as in t.
func (s Space) sameUse(t Space) bool {
	return s.UsedBytes == t.UsedBytes && equalInodes(s.UsedInodes, t.UsedInodes)
}

func equalInodes(a, b *int64) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

// gateOpen says whether something may have changed on a part's filesystem since
// all of it was last measured. Bringing a figure up to date closes no gate.
func (b *book) gateOpen(p *part) bool {
	s := b.spaces[p.fs]
	return s != nil && (p.figure == nil || !s.changed.Before(p.figure.ProvenAt()))
}

// unmoved is until when a part's figure is known to be as good as when it was made.
func (b *book) unmoved(p *part) time.Time {
	switch s := b.spaces[p.fs]; {
	case p.figure == nil:
		return time.Time{}
	case p.path == "" || s == nil || p.stale || p.lost || b.gateOpen(p) || s.last.At.Before(p.figure.Finished):
		return p.figure.Finished
	default:
		return s.last.At
	}
}

// hintsWanted gives the owners of whom it matters whether they have written.
func (b *book) hintsWanted() []owner {
	wanted := map[owner]bool{}
	for _, p := range b.parts {
		if p.path != "" && b.gateOpen(p) {
			wanted[owner{p.key.Kind, p.key.ID}] = true
		}
	}
	return slices.SortedFunc(maps.Keys(wanted), func(x, y owner) int {
		return cmp.Or(cmp.Compare(x.Kind, y.Kind), cmp.Compare(x.ID, y.ID))
	})
}

func (b *book) hint(who owner, counter uint64, ok bool) {
	o := b.owners[who]
	if o == nil {
		return
	}
	if ok && (!o.known || o.counter != counter) {
		o.writes++
	}
	o.counter, o.known = counter, ok
}

// job is a measurement.
type job struct {
	subject Subject
	why     reason
	fs      FS
	// writes is the owner's when it was begun.
	writes uint64
	// memory is what is to be brought up to date, figure the one of before.
	memory Memory
	figure Figure
}

// urgency is what due says of a part.
type urgency struct {
	part *part
	why  reason
	at   time.Time // from when on
}

// due says why and from when on a part has to be measured.
func (b *book) due(p *part) (urgency, bool) {
	if p.path == "" || p.gone || p.fs == "" || b.spaces[p.fs] == nil {
		return urgency{}, false
	}
	if p.figure == nil || p.stale {
		at := time.Time{}
		if p.problem != "" { // not again and again
			at = p.tried.Add(p.interval)
		}
		return urgency{p, first, at}, true
	}
	if b.gateOpen(p) {
		o := b.owners[owner{p.key.Kind, p.key.ID}]
		switch {
		case o != nil && o.known && o.writes > p.writes && p.memory != nil:
			return urgency{p, hot, p.tried.Add(b.opt.ProveEvery)}, true
		case o != nil && o.known && o.writes > p.writes:
			return urgency{p, hot, p.tried.Add(b.opt.HotEvery)}, true
		default:
			return urgency{p, suspect, p.tried.Add(b.patience(p))}, true
		}
	}
	return b.old(p), true
}

// patience is the time from a part's last measurement to the next one as a suspect.
func (b *book) patience(p *part) time.Duration {
	if b.spaces[p.fs].overdrawn {
		return min(p.doubt, p.interval)
	}
	return p.interval
}

// behind says from when on a figure has to be brought up to date. ok is false if it
// has not.
func (b *book) behind(p *part) (u urgency, ok bool) {
	o, s := b.owners[owner{p.key.Kind, p.key.ID}], b.spaces[p.fs]
	if p.memory == nil || p.stale || o == nil || !o.known || o.writes <= p.seen || s.changed.Before(p.figure.Started) {
		return urgency{}, false
	}
	return urgency{p, updating, p.updated.Add(b.opt.HotEvery)}, true
}

// old is the urgency of a figure that is getting old: half of its time is for the
// refresh to come to it.
func (b *book) old(p *part) urgency {
	return urgency{p, refresh, p.tried.Add(b.opt.MaxAge / 2)}
}

// next gives what is to be begun now, and how long there is nothing else to do. On
// each filesystem one part is measured at a time for each reason, so that a large
// tree holds up only its equals; for the refresh one on all, save that one which
// takes longer than all of them may holds up its own filesystem only.
func (b *book) next(now time.Time) (jobs []job, wait time.Duration) {
	wait = b.asked.Add(b.opt.Period).Sub(now)
	var all []urgency
	for _, p := range b.parts {
		u, ok := b.due(p)
		if !ok {
			continue
		}
		all = append(all, u)
		if u, ok := b.behind(p); ok {
			all = append(all, u)
		}
		if u.why == suspect { // it may become old while it waits its turn
			all = append(all, b.old(p))
		}
	}
	slices.SortFunc(all, b.compare)
	type lane struct {
		fs  FS
		why reason
	}
	everywhere := lane{why: refresh}
	laneOf := func(p *part, why reason, began time.Time) lane {
		if why == refresh && now.Sub(began) <= b.opt.MaxAge/4 {
			return everywhere
		}
		return lane{p.fs, why}
	}
	busy := map[lane]bool{}
	for _, p := range b.parts {
		for why, began := range p.running {
			busy[laneOf(p, why, began)] = true
		}
	}
	for _, u := range all {
		if busy[laneOf(u.part, u.why, now)] || busy[lane{u.part.fs, u.why}] || u.part.isMeasured(u.why) {
			continue
		}
		at := u.at
		if rest := b.rest[u.why]; at.Before(rest) {
			at = rest
		}
		if at.After(now) {
			wait = min(wait, at.Sub(now))
			continue
		}
		busy[laneOf(u.part, u.why, now)] = true
		jobs = append(jobs, b.begin(u, now))
	}
	return jobs, max(wait, time.Millisecond)
}

// isMeasured says whether a part is being measured for a reason, or for another
// that is as quick. While it is measured its figure may be brought up to date.
func (p *part) isMeasured(why reason) bool {
	slow := func(r reason) bool { return r == refresh }
	apart := func(r reason) bool { return r == updating }
	for running := range p.running {
		if running == why || slow(running) == slow(why) && apart(running) == apart(why) {
			return true
		}
	}
	return false
}

// compare orders by urgency; within one, by what is known to matter most.
func (b *book) compare(x, y urgency) int {
	rank := func(p *part) int {
		if o := b.owners[owner{p.key.Kind, p.key.ID}]; o != nil {
			return o.rank
		}
		return 0
	}
	c := cmp.Compare(x.why, y.why)
	switch {
	case c != 0:
	case x.why == first:
		c = cmp.Or(cmp.Compare(rank(y.part), rank(x.part)), x.at.Compare(y.at))
	case x.why == refresh, x.why == updating: // each in its turn
		c = x.at.Compare(y.at)
	default:
		c = cmp.Or(cmp.Compare(y.part.growth, x.part.growth), cmp.Compare(rank(y.part), rank(x.part)), x.at.Compare(y.at))
	}
	return cmp.Or(c, x.part.key.compare(y.part.key))
}

func (b *book) begin(u urgency, now time.Time) job {
	p := u.part
	p.running[u.why] = now
	j := job{
		subject: Subject{Key: p.key, Path: p.path, Without: p.without},
		why:     u.why,
		fs:      p.fs,
	}
	if o := b.owners[owner{p.key.Kind, p.key.ID}]; o != nil {
		j.writes = o.writes
	}
	switch {
	case u.why == updating:
		j.memory, j.figure = p.memory, *p.figure
	case u.why == hot, p.memory != nil:
		j.subject.RememberFolders = b.roomFor(p, now)
	}
	if u.why == refresh {
		j.subject.EntriesPerSecond = b.refreshPace()
	}
	if u.why == first {
		p.stale = false // what changes its borders from now on makes it so again
	}
	return j
}

// roomFor is how many directories of a part may be remembered. What is remembered
// of trees that nobody has written to for long is forgotten.
func (b *book) roomFor(p *part, now time.Time) int {
	room := b.opt.MostFolders
	for _, other := range b.parts {
		if other == p || other.memory == nil {
			continue
		}
		if now.Sub(other.updated) > b.opt.SuspectMax && len(other.running) == 0 {
			other.memory = nil
			continue
		}
		room -= other.folders
	}
	return max(room, 0)
}

// refreshPace is how many entries a second bring all parts round in a quarter of
// MaxAge.
func (b *book) refreshPace() int {
	inodes := int64(0)
	for _, p := range b.parts {
		if p.path != "" && p.figure != nil {
			inodes += p.figure.Inodes
		}
	}
	quarter := max(b.opt.MaxAge.Seconds()/4, 0.001)
	return max(b.opt.RefreshEntriesPerSecond, int(float64(inodes)/quarter))
}

// drop forgets a measurement that was called back.
func (b *book) drop(j job) {
	if p := b.parts[j.subject.Key]; p != nil {
		delete(p.running, j.why)
	}
}

// finish takes a measurement's result.
func (b *book) finish(r result, now time.Time) {
	p := b.parts[r.job.subject.Key]
	b.charge(r, now)
	if p == nil || p.path != r.job.subject.Path {
		return // it went away meanwhile
	}
	delete(p.running, r.job.why)
	if r.job.why == updating {
		b.acceptUpdate(p, r, now)
		return
	}
	if r.err != nil {
		p.problem, p.tried = r.err.Error(), now
		if r.job.why == first && p.figure != nil {
			p.stale = true
		}
		p.slower(b.opt)
		if errors.Is(r.err, fs.ErrNotExist) {
			p.isGone(r.err, now)
		}
		return
	}
	if p.fs != r.job.fs || !slices.Equal(p.without, r.job.subject.Without) {
		p.stale = true // measured, but not what it is now
	}
	if p.figure != nil && r.figure.ProvenAt().Before(p.figure.ProvenAt()) {
		return // the slow one was overtaken
	}
	b.accept(p, r, now)
}

// acceptUpdate takes a figure that was brought up to date.
func (b *book) acceptUpdate(p *part, r result, now time.Time) {
	if p.memory == nil || p.memory != r.job.memory {
		return // it was measured meanwhile
	}
	p.updated = now
	if r.err != nil || p.fs != r.job.fs || !slices.Equal(p.without, r.job.subject.Without) {
		p.memory = nil // the next measurement says what is wrong, if anything is
		return
	}
	b.show(p, r)
	if f := p.figure; f.Bytes != r.job.figure.Bytes || f.Inodes != r.job.figure.Inodes {
		p.growth = growth(r.job.figure, *f)
	}
}

// show makes a result the part's figure, and keeps what is remembered with it.
func (b *book) show(p *part, r result) {
	f := r.figure
	p.memory, p.folders, p.seen = f.Memory, 0, r.job.writes
	if p.memory != nil {
		p.folders = p.memory.Folders()
	}
	f.Memory = nil
	p.figure = &f
}

// growth is by how much a figure grew, in bytes per second.
func growth(before, after Figure) float64 {
	return float64(after.Bytes-before.Bytes) / max(after.Finished.Sub(before.Finished).Seconds(), 0.001)
}

// accept replaces a part's figure.
func (b *book) accept(p *part, r result, now time.Time) {
	before, f := p.figure, r.figure
	p.tried, p.writes = now, r.job.writes
	if s := b.spaces[p.fs]; s != nil && s.overdrawn && before != nil {
		p.doubt = min(2*p.doubt, b.opt.SuspectMax)
	}
	if f.Partial && before != nil && !before.Partial && f.Bytes <= before.Bytes {
		// A lower bound below what is known is worth less than that.
		p.problem = "it could be read in part only"
		p.slower(b.opt)
		return
	}
	p.problem = ""
	if f.Partial {
		p.problem = "it could be read in part only"
	}
	b.show(p, r)
	p.updated = now
	switch {
	case before == nil:
	case before.Bytes == f.Bytes && before.Inodes == f.Inodes:
		p.growth = 0
		p.slower(b.opt)
	default:
		p.growth = growth(*before, f)
		p.interval = b.opt.SuspectEvery
	}
}

func (p *part) slower(opt Options) { p.interval = min(2*p.interval, opt.SuspectMax) }

// charge notes what a measurement has cost, and has the next one for its reason
// wait accordingly.
func (b *book) charge(r result, now time.Time) {
	cost := r.figure.Cost
	if cost == 0 {
		took := r.figure.Finished.Sub(r.figure.Started)
		looked := r.looked
		if r.job.why != updating {
			looked += r.figure.Inodes
		}
		cost = min(took, time.Duration(looked)*entryCost+50*time.Microsecond)
	}
	// Of the time from its beginning, cost may be percent.
	rest := func(percent float64) time.Duration { return time.Duration(float64(cost)*100/percent) - cost }
	percent := b.opt.CorePercent
	b.entries.Update += r.looked
	switch r.job.why {
	case updating:
		b.rest[updating] = now.Add(rest(percent * updatingShare))
		if b.rest[hot].Before(now) {
			b.rest[hot] = now
		}
		b.rest[hot] = b.rest[hot].Add(rest(percent * hotShare))
		return
	case first:
		percent = firstPercent
		b.entries.First += r.figure.Inodes
	case hot:
		percent *= hotShare
		b.entries.Hot += r.figure.Inodes
	case suspect:
		percent *= suspectShare
		b.entries.Suspect += r.figure.Inodes
	case refresh:
		b.entries.Refresh += r.figure.Inodes
		return // it has a pace of its own
	}
	b.rest[r.job.why] = now.Add(rest(percent))
}

// give takes a figure that somebody else measured, and says whether it is news.
func (b *book) give(key Key, fs FS, f Figure) bool {
	p := b.parts[key]
	if p == nil || p.path != "" || p.figure != nil && *p.figure == f && p.fs == fs && p.problem == "" {
		return false
	}
	p.fs, p.figure, p.problem = fs, &f, ""
	return true
}

// measuring tells what is being measured, for people.
func (b *book) measuring() (out []string) {
	for _, key := range b.keys() {
		if len(b.parts[key].running) > 0 {
			out = append(out, b.parts[key].path)
		}
	}
	return out
}

// view makes a value of all that is known.
func (b *book) view(now time.Time, known map[FS][]Known) *View {
	v := &View{At: now, Problem: b.problem, Entries: b.entries}
	byFS := map[FS][]held{}
	for _, key := range b.keys() {
		p := b.parts[key]
		if n := len(v.Owners); n == 0 || v.Owners[n-1].Kind != key.Kind || v.Owners[n-1].ID != key.ID {
			v.Owners = append(v.Owners, OwnerView{Kind: key.Kind, ID: key.ID})
		}
		o := &v.Owners[len(v.Owners)-1]
		pv := PartView{Name: key.Part, Path: p.path, FS: p.fs, Figure: p.figure, Unmoved: b.unmoved(p), Gone: p.gone, Problem: p.problem}
		for why, began := range p.running {
			if why == refresh {
				continue
			}
			if pv.Measuring.IsZero() || began.Before(pv.Measuring) {
				pv.Measuring = began
			}
		}
		o.Parts = append(o.Parts, pv)
		if p.fs != "" {
			byFS[p.fs] = append(byFS[p.fs], held{key, p.figure})
		}
	}
	for _, fs := range slices.Sorted(maps.Keys(b.spaces)) {
		s := b.spaces[fs]
		a := attribute(s.last, byFS[fs], known[fs])
		a.Problem = s.problem
		v.Filesystems = append(v.Filesystems, a)
	}
	return v
}
