package install

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/cleave-cri/cleave/systemd/install/transaction"
)

const (
	kindInstall   = "cleave install"
	kindUninstall = "cleave uninstall"
	// recordName is the record of what is installed.
	recordName = "installed.json"
)

// Errors that callers can tell apart.
var (
	// ErrInstalled says that cleave was installed already.
	ErrInstalled = errors.New("cleave is installed on this node already")
	// ErrNotInstalled says that there is nothing to take away.
	ErrNotInstalled = errors.New("cleave was not installed on this node by `cleave install`")
)

// Installer carries plans out.
type Installer struct {
	// Place is where the journal is, and the node's root.
	Place transaction.Place
	// Performer does what is no change of a file.
	Performer transaction.Performer
	// Tell gets a line for people at each step.
	Tell func(string)
}

// Installed returns the record of what is installed; nil if nothing is.
func (i Installer) Installed() (*transaction.Record, error) {
	return transaction.ReadRecord(i.Place, recordName)
}

// Ready is why nothing can be planned now: an earlier install or uninstall was broken
// off ([transaction.ErrUnfinished], with what to do), or one is under way
// ([transaction.ErrBusy]).
func (i Installer) Ready() error {
	kind, err := transaction.Unfinished(i.Place)
	if err == nil && kind != "" {
		err = fmt.Errorf("%s: %w", kind, transaction.ErrUnfinished)
	}
	return explain(err)
}

// Run carries out a plan of [Make] or [Installer.Undo]. If a step fails, all is as
// it was before ([transaction.Failure]).
func (i Installer) Run(ctx context.Context, p Plan) (err error) {
	installed, err := i.Installed()
	if err != nil {
		return err
	}
	switch {
	case p.kind == kindInstall && installed != nil:
		return ErrInstalled
	case p.kind == kindUninstall && installed == nil:
		return ErrNotInstalled
	}
	t, err := transaction.Begin(i.Place, transaction.Record{Kind: p.kind, Steps: p.Steps, Note: p.note, Leave: p.leave}, i.Tell)
	if err != nil {
		return explain(err)
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	return i.run(ctx, t, p.kind)
}

func explain(err error) error {
	if errors.Is(err, transaction.ErrUnfinished) {
		return fmt.Errorf("%w: `cleave install --yes --resume` does the rest of it, `cleave install --yes --revert` takes it all back", err)
	}
	return err
}

func (i Installer) run(ctx context.Context, t *transaction.Transaction, kind string) error {
	if kind == kindInstall {
		return t.Run(ctx, i.Performer, recordName, "")
	}
	return t.Run(ctx, i.Performer, "", recordName)
}

// Resume does the rest of what was broken off, by a power cut for example. It
// reports whether there was anything.
func (i Installer) Resume(ctx context.Context) (found bool, err error) {
	t, err := transaction.Resume(i.Place, i.Tell)
	if err != nil || t == nil {
		return false, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	return true, i.run(ctx, t, t.Record().Kind)
}

// Revert takes back what was broken off. It reports whether there was anything. An
// uninstall whose record is gone was done, and only its journal goes.
func (i Installer) Revert(ctx context.Context) (found bool, err error) {
	t, err := transaction.Resume(i.Place, i.Tell)
	if err != nil || t == nil {
		return false, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	if kind := t.Record().Kind; kind == kindUninstall {
		if installed, err := i.Installed(); err != nil || installed == nil {
			if err == nil {
				i.Tell("the uninstall was done")
				err = i.run(ctx, t, kind)
			}
			return true, err
		}
	}
	if left := t.Revert(ctx, i.Performer); len(left) > 0 {
		return true, fmt.Errorf("not all of it could be taken back; it can be tried again: %w", errors.Join(left...))
	}
	return true, nil
}

// Undo plans an uninstall, from the record of the install and the files as they
// are now. A file that is as the install left it becomes, byte for byte, what it
// was before. In one that was changed since only the kubelet's endpoint is set
// back. inUse are the containers that use the split snapshotter: with any it is
// refused.
func (i Installer) Undo(inUse []string) (Plan, error) {
	if err := i.Ready(); err != nil {
		return Plan{}, err
	}
	r, err := i.Installed()
	if err != nil {
		return Plan{}, err
	}
	if r == nil {
		return Plan{}, ErrNotInstalled
	}
	if err := refused("containers use the split snapshotter; remove their pods first (kubectl drain), then try again", inUse); err != nil {
		return Plan{}, err
	}
	p := Plan{kind: kindUninstall, leave: r.Made}
	var reasons []string
	for n := len(r.Steps) - 1; n >= 0; n-- {
		s := r.Steps[n]
		step := transaction.Step{Title: "undo: " + s.Title, Do: s.Undo, Undo: s.Do}
		if s.Edit != nil {
			if s.Edit.Purpose == purposeContainerd {
				p.Steps = append(p.Steps, transaction.Step{Title: "remove the split snapshotter's snapshots through containerd", Do: do(VerbRelease)})
			}
			edit, note, err := i.reverse(*s.Edit)
			if err != nil {
				reasons = append(reasons, err.Error())
				continue
			}
			if note != "" {
				p.Notes = append(p.Notes, note)
			}
			step.Edit = edit
		}
		if step.Edit != nil || len(step.Do) > 0 || len(step.Undo) > 0 {
			p.Steps = append(p.Steps, step)
		}
	}
	return p, refused("files were changed since the install", reasons)
}

// reverse is the edit that takes one of the install's back; nil if there is
// nothing to do, with a note for people if that is not what they expect.
func (i Installer) reverse(e transaction.Edit) (_ *transaction.Edit, note string, _ error) {
	now, err := transaction.Read(i.Place, e.Path)
	if err != nil {
		return nil, "", err
	}
	back := e.Reversed()
	switch {
	case equal(now, e.After):
		return &back, "", nil
	case equal(now, e.Before):
		return nil, "", nil
	case now == nil:
		return nil, e.Path + " is gone already", nil
	case e.Purpose == purposeRedirect:
		return nil, "", fmt.Errorf("%s is not as cleave wrote it, and containerd listens where it says: look at it, and take out what was added", e.Path)
	case e.Purpose == purposeContainerd:
		return nil, "", fmt.Errorf("%s is not as cleave wrote it: look at it, and take it away or write it anew with `cleave containerd-config --write`", e.Path)
	case e.Purpose == purposeKubelet:
		return setBack(e, string(*now))
	}
	return nil, e.Path + " was changed since the install and is left as it is", nil
}

// setBack sets just the endpoint back in a file that was changed since.
func setBack(e transaction.Edit, now string) (*transaction.Edit, string, error) {
	switch n := strings.Count(now, e.New); {
	case n == 0:
		return nil, e.Path + " does not name cleave's socket any more and is left as it is", nil
	case n > 1:
		return nil, "", fmt.Errorf("%s names cleave's socket %d times: set it back to %s yourself", e.Path, n, e.Old)
	case e.Before == nil:
		return nil, "", fmt.Errorf("%s was written by cleave and has something else in it now: move that to a file of its own and take this one away", e.Path)
	}
	var after string
	if e.Old != "" {
		after = strings.Replace(now, e.New, e.Old, 1)
	} else {
		for line := range strings.Lines(now) {
			if !strings.Contains(line, e.New) {
				after += line
			}
		}
	}
	before, text := []byte(now), []byte(after)
	return &transaction.Edit{Path: e.Path, Before: &before, After: &text, Mode: e.Mode, Purpose: e.Purpose, Old: e.New, New: e.Old}, "", nil
}

func equal(a, b *[]byte) bool {
	if a == nil || b == nil {
		return a == b
	}
	return string(*a) == string(*b)
}
