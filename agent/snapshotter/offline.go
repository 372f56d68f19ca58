package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/snapshot/split"
)

// Init makes the roots of a configuration those of a new snapshotter.
func Init(ctx context.Context, cfg config.Config, log *zap.Logger) error {
	o, err := StoreOptions(cfg, log)
	if err != nil {
		return err
	}
	return split.Init(ctx, o)
}

// Unpin lets the store of a configuration take another containerd. The
// snapshotter must not run.
func Unpin(ctx context.Context, cfg config.Config, log *zap.Logger) error {
	o, err := StoreOptions(cfg, log)
	if err != nil {
		return err
	}
	return split.Unpin(ctx, o)
}

// Examination is what a check of the store found, and what a repair did.
type Examination struct {
	Found split.Report `json:"found"`
	// Moved went to the trash; After is what a second check found. Both are
	// empty without a repair.
	Moved []split.Folder `json:"moved,omitempty"`
	After *split.Report  `json:"after,omitempty"`
}

// ErrFindings says that a check found something.
var ErrFindings = errors.New("the snapshotter's store is not as it should be")

// Err is [ErrFindings] unless all is well, in the end.
func (e Examination) Err() error {
	last := e.Found
	if e.After != nil {
		last = *e.After
	}
	if last.Clean() {
		return nil
	}
	return fmt.Errorf("%w: %d findings", ErrFindings, len(last.Findings))
}

// Examine checks the store of a configuration while the snapshotter does not
// run. show is called with what was found before anything is repaired; its error
// ends it.
func Examine(ctx context.Context, cfg config.Config, log *zap.Logger, repair bool, show func(Examination) error) (Examination, error) {
	o, err := StoreOptions(cfg, log)
	if err != nil {
		return Examination{}, err
	}
	var e Examination
	if e.Found, err = split.Check(ctx, o); err != nil {
		return e, err
	}
	if err := show(e); err != nil {
		return e, err
	}
	if !repair || len(e.Found.Plan) == 0 {
		return e, nil
	}
	if e.Moved, err = split.Repair(ctx, o, e.Found.Plan); err != nil {
		return e, err
	}
	after, err := split.Check(ctx, o)
	e.After = &after
	return e, err
}

// WriteFound writes for people what a check found.
func (e Examination) WriteFound(w io.Writer) error {
	var b strings.Builder
	r := e.Found
	fmt.Fprintf(&b, "%d snapshots, %d folders, %d entries in the trash\n", r.Snapshots, r.Folders, r.Trash)
	for _, f := range r.Findings {
		fmt.Fprintf(&b, "%s\n", f)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	if r.Clean() {
		b.WriteString("all is as it should be\n")
	}
	for _, f := range r.Plan {
		fmt.Fprintf(&b, "a repair would move folder %s of the %s root to the trash\n", f.Name, f.Root)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteRepaired writes for people what a repair did.
func (e Examination) WriteRepaired(w io.Writer) error {
	if e.After == nil {
		return nil
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d folders were moved to the trash; the next start deletes them\n", len(e.Moved))
	for _, f := range e.After.Findings {
		fmt.Fprintf(&b, "still: %s\n", f)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Purge takes away what the snapshotter has on its roots, and its database; with
// dry it only says what.
func Purge(ctx context.Context, cfg config.Config, log *zap.Logger, dry bool) ([]string, error) {
	o, err := StoreOptions(cfg, log)
	if err != nil {
		return nil, err
	}
	return split.Purge(ctx, o, dry)
}
