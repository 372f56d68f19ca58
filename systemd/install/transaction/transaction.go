// Package transaction changes files and runs actions in an order, so that it is
// all done or nothing is: each step can be taken back, a failure takes back those
// before it, and after a power cut the rest can be done or all be taken back.
//
// What makes that possible: everything that needs space is written before
// anything is changed. A file is changed by exchanging it with the new one, which
// lies beside it already; so taking it back needs no space, is one system call,
// and brings back the very file: its bytes, owner, mode and attributes.
//
// It knows files and the names of actions, nothing of what they are for. Only
// install may import it; it imports nothing of ours.
package transaction

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"
)

// Errors that callers can tell apart.
var (
	// ErrBusy says that another process is at it.
	ErrBusy = errors.New("another cleave install or uninstall is running")
	// ErrUnfinished says that an earlier one was broken off.
	ErrUnfinished = errors.New("an earlier one was broken off")
	// ErrChanged says that a file is not as it was when the plan was made.
	ErrChanged = errors.New("the file was changed meanwhile")
)

// undoTimeout bounds the taking back of one step.
const undoTimeout = 5 * time.Minute

// Step is one step. It has an edit, or actions, or both; going forward the edit
// comes first, going back it comes last.
type Step struct {
	// Title says for people what the step does.
	Title string `json:"title"`
	// Edit is a change of a file.
	Edit *Edit `json:"edit,omitempty"`
	// Do are the actions of going forward, Undo those of going back. Each has to
	// be harmless when it is done twice.
	Do   []Action `json:"do,omitempty"`
	Undo []Action `json:"undo,omitempty"`
}

// Action is something to be done that is no edit.
type Action struct {
	// Verb and Args are for the [Performer].
	Verb string   `json:"verb"`
	Args []string `json:"args,omitempty"`
}

// String is for people.
func (a Action) String() string { return strings.Join(append([]string{a.Verb}, a.Args...), " ") }

// Performer performs actions.
type Performer interface {
	Perform(ctx context.Context, a Action) error
}

// Edit is a change of one file.
type Edit struct {
	// Path is absolute.
	Path string `json:"path"`
	// Before and After are the whole file; nil means that there is none, which is
	// another thing than an empty one.
	Before *[]byte `json:"before"`
	After  *[]byte `json:"after"`
	// Mode is that of a new file; a changed one keeps its owner, mode and
	// attributes.
	Mode uint32 `json:"mode"`
	// Purpose is a word for whoever reads the record of a finished transaction.
	Purpose string `json:"purpose,omitempty"`
	// Old and New are the piece of text that the edit is about, if it is about one.
	Old string `json:"old,omitempty"`
	New string `json:"new,omitempty"`
}

// Reversed is the edit that takes this one back.
func (e Edit) Reversed() Edit {
	e.Before, e.After = e.After, e.Before
	e.Old, e.New = e.New, e.Old
	return e
}

// Record is a transaction as it is written down.
type Record struct {
	// Version is that of the format.
	Version int `json:"version"`
	// Kind is a word, such as install.
	Kind  string `json:"kind"`
	Steps []Step `json:"steps"`
	// Made are the folders that were made for the files, outer ones first.
	Made []string `json:"made,omitempty"`
	// Leave are folders of an earlier transaction that go at the end of this one,
	// if they are empty then.
	Leave []string `json:"leave,omitempty"`
	// Note is the caller's.
	Note map[string]string `json:"note,omitempty"`
}

const version = 1

// Failure is how a transaction failed.
type Failure struct {
	// Step is the title of the step that failed, Err why.
	Step string
	Err  error
	// Left is what could not be taken back; none if all is as it was before.
	Left []error
}

// Error says all of it.
func (f *Failure) Error() string {
	text := fmt.Sprintf("%s: %v", f.Step, f.Err)
	if len(f.Left) == 0 {
		return text + "; every file is as it was before"
	}
	text += "; not all of it could be taken back:"
	for _, err := range f.Left {
		text += "\n  " + err.Error()
	}
	return text
}

// Unwrap gives the reason.
func (f *Failure) Unwrap() error { return f.Err }

// Transaction is one that is under way. It holds the lock until it is closed.
type Transaction struct {
	store  *store
	record Record
	states []state
	tell   func(string)
}

// state is how far a step is, as a byte in the file of progress.
type state byte

const (
	waiting state = '.'
	begun   state = '>'
	done    state = '+'
	undoing state = '<'
	undone  state = '-'
)

// Place is where a transaction works.
type Place struct {
	// Dir is the folder for the lock, the journal and records; made if missing.
	Dir string
	// Root is put before each path of an edit; usually "/".
	Root string
}

// Begin prepares a transaction: takes the lock, writes the journal, and lays
// every new file beside the one that it will take the place of. Nothing has
// changed then. tell gets a line for people at each step.
//
// Errors are ErrBusy, ErrUnfinished, ErrChanged, and those of the system, such
// as a full disk or one that is read-only.
func Begin(p Place, r Record, tell func(string)) (*Transaction, error) {
	s, err := openStore(p)
	if err != nil {
		return nil, err
	}
	t := &Transaction{store: s, record: r, tell: tell}
	t.record.Version = version
	if err := t.begin(); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return t, nil
}

func (t *Transaction) begin() error {
	switch kind, err := t.store.unfinished(); {
	case err != nil:
		return err
	case kind != "":
		return fmt.Errorf("%s: %w", kind, ErrUnfinished)
	}
	paths := map[string]bool{}
	for _, s := range t.record.Steps {
		if s.Edit == nil {
			continue
		}
		full, err := t.store.at(s.Edit.Path)
		if err != nil {
			return err
		}
		if paths[full] {
			return fmt.Errorf("%s is changed by two steps: a file can be changed by one only", s.Edit.Path)
		}
		paths[full] = true
		now, err := t.store.read(s.Edit.Path)
		if err != nil {
			return err
		}
		if !same(now, s.Edit.Before) {
			return fmt.Errorf("%s: %w: make the plan again", s.Edit.Path, ErrChanged)
		}
		t.record.Made = append(t.record.Made, t.store.missing(filepath.Dir(s.Edit.Path), t.record.Made)...)
	}
	t.states = bytesOf(waiting, len(t.record.Steps))
	if err := t.store.writeJournal(t.record, t.states); err != nil {
		return errors.Join(err, t.store.dropJournal())
	}
	if err := t.stage(); err != nil {
		return errors.Join(err, t.clear())
	}
	return nil
}

func bytesOf(s state, n int) []state {
	out := make([]state, n)
	for i := range out {
		out[i] = s
	}
	return out
}

// Resume opens a transaction that was broken off; nil if there is none.
func Resume(p Place, tell func(string)) (*Transaction, error) {
	s, err := openStore(p)
	if err != nil {
		return nil, err
	}
	r, states, err := s.readJournal()
	if err != nil || r == nil {
		return nil, errors.Join(err, s.close())
	}
	return &Transaction{store: s, record: *r, states: states, tell: tell}, nil
}

// Record is what the transaction does.
func (t *Transaction) Record() Record { return t.record }

// Close gives the lock back. What is not finished stays so.
func (t *Transaction) Close() error { return t.store.close() }

// stage lays the new files beside the old ones. What lies there already from
// before a power cut is looked at.
func (t *Transaction) stage() error {
	for _, dir := range t.record.Made {
		if err := t.store.mkdir(dir); err != nil {
			return err
		}
	}
	for i, s := range t.record.Steps {
		if s.Edit == nil || s.Edit.After == nil || t.states[i] != waiting {
			continue
		}
		now, err := t.store.read(s.Edit.Path)
		if err != nil {
			return err
		}
		if same(now, s.Edit.After) {
			continue // exchanged just before the power cut
		}
		if err := t.store.stage(*s.Edit); err != nil {
			return err
		}
	}
	return nil
}

// Run goes forward. If a step fails, or ctx ends, all steps are taken back, and
// the error is a [Failure]. After success keepAs is the name of the record in the
// folder; empty keeps none. forget is the name of a record that goes, just before
// the journal does.
func (t *Transaction) Run(ctx context.Context, p Performer, keepAs, forget string) error {
	for i := range t.record.Steps {
		if t.states[i] == undoing || t.states[i] == undone {
			return t.fail(ctx, p, "go on with what was broken off", errors.New("it was being taken back"))
		}
	}
	if err := t.stage(); err != nil {
		return t.fail(ctx, p, "prepare the files", err)
	}
	for i, s := range t.record.Steps {
		if t.states[i] == done {
			continue
		}
		if s.Edit != nil || len(s.Do) > 0 {
			t.tell(s.Title)
		}
		err := ctx.Err()
		if err == nil {
			err = t.mark(i, begun)
		}
		if err == nil {
			err = t.forward(ctx, p, s)
		}
		if err == nil {
			err = t.mark(i, done)
		}
		if err != nil {
			return t.fail(ctx, p, s.Title, err)
		}
	}
	return t.finish(keepAs, forget)
}

func (t *Transaction) forward(ctx context.Context, p Performer, s Step) error {
	if s.Edit != nil {
		if err := t.store.apply(*s.Edit); err != nil {
			return err
		}
	}
	for _, a := range s.Do {
		if err := p.Perform(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

func (t *Transaction) fail(ctx context.Context, p Performer, title string, err error) error {
	t.tell("failed: " + err.Error())
	return &Failure{Step: title, Err: err, Left: t.Revert(ctx, p)}
}

// Revert takes back all steps that were begun, the last first, also when ctx has
// ended. What can't be taken back is returned, and the others are all the same.
func (t *Transaction) Revert(ctx context.Context, p Performer) (left []error) {
	for i := len(t.record.Steps) - 1; i >= 0; i-- {
		s := t.record.Steps[i]
		if t.states[i] == waiting || t.states[i] == undone {
			continue
		}
		if err := t.mark(i, undoing); err != nil {
			t.tell("the journal can't be written: " + err.Error())
		}
		if s.Edit != nil || len(s.Undo) > 0 {
			t.tell("taking back: " + s.Title)
		}
		if err := t.backward(ctx, p, s); err != nil {
			left = append(left, err)
			continue
		}
		if err := t.mark(i, undone); err != nil {
			t.tell("the journal can't be written: " + err.Error())
		}
	}
	if len(left) > 0 {
		return left // the journal stays, so that it can be tried again
	}
	if err := t.clear(); err != nil {
		left = append(left, err)
	}
	return left
}

func (t *Transaction) backward(ctx context.Context, p Performer, s Step) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	for _, a := range s.Undo {
		if err := p.Perform(ctx, a); err != nil {
			return fmt.Errorf("take back %q: %s: %w", s.Title, a, err)
		}
	}
	if s.Edit != nil {
		if err := t.store.apply(s.Edit.Reversed()); err != nil {
			return fmt.Errorf("take back %q: %w", s.Title, err)
		}
	}
	return nil
}

// mark writes down how far a step is; the file of progress has its size already.
func (t *Transaction) mark(i int, s state) error {
	t.states[i] = s
	return t.store.mark(i, s)
}

// finish takes away what lies beside the files, and the journal.
func (t *Transaction) finish(keepAs, forget string) error {
	var errs []error
	for _, s := range t.record.Steps {
		if s.Edit != nil {
			errs = append(errs, t.store.unstage(*s.Edit))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	t.store.rmdirs(t.record.Leave)
	if forget != "" {
		if err := t.store.forget(forget); err != nil {
			return err
		}
	}
	if keepAs == "" {
		return t.store.dropJournal()
	}
	return t.store.keepJournal(keepAs)
}

// clear takes away what was prepared, because all is as it was before.
func (t *Transaction) clear() error {
	var errs []error
	for _, s := range t.record.Steps {
		if s.Edit != nil {
			errs = append(errs, t.store.unstage(*s.Edit))
		}
	}
	t.store.rmdirs(t.record.Made)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return t.store.dropJournal()
}

// same compares two files' contents, nil being no file.
func same(a, b *[]byte) bool {
	if a == nil || b == nil {
		return a == b
	}
	return bytes.Equal(*a, *b)
}
