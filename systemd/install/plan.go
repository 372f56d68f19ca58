// Package install puts cleave on a node and takes it away again: which files are
// changed and which units started, in which order, as a plan that is a value and
// can be shown; and how it is carried out, so that all of it is done or nothing.
//
// What it has to know of a node is handed in, and what it has to do beside
// changing files goes through the interfaces [Units] and
// [transaction.Performer]. agent supplies both; of this module it imports systemd
// and what is below itself.
package install

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cleave-cri/cleave/systemd"
	"github.com/cleave-cri/cleave/systemd/install/endpoint"
	"github.com/cleave-cri/cleave/systemd/install/transaction"
)

// The verbs of actions.
const (
	VerbDaemonReload = "daemon-reload"
	VerbEnable       = "enable"
	VerbDisable      = "disable"
	VerbStart        = "start"
	VerbStop         = "stop"
	VerbRestart      = "restart"
	// VerbCheck looks whether something works, and waits some time for it: see
	// the words that can follow it.
	VerbCheck = "check"
	// VerbRelease removes the split snapshotter's snapshots through containerd.
	VerbRelease = "release-snapshots"
)

// What can be checked.
const (
	// CheckCleave: a call through cleave's socket, whose path follows, is answered
	// by the runtime.
	CheckCleave = "cleave"
	// CheckRuntime: the runtime itself answers on the socket whose path follows.
	CheckRuntime = "runtime"
	// CheckSnapshotter: the split snapshotter runs and may write.
	CheckSnapshotter = "snapshotter"
	// CheckKubelet: a kubelet runs, with the endpoint that follows, as the unit
	// that follows that, and goes on running.
	CheckKubelet = "kubelet"
)

// Purposes of edits.
const (
	purposeUnit       = "unit"
	purposeConfig     = "config"
	purposeContainerd = "containerd"
	purposeRedirect   = "redirect"
	purposeKubelet    = "kubelet"
)

// UnitState is how a unit is.
type UnitState struct{ Enabled, Active bool }

// Wish is what shall be, and what is known of the node. It is a plain value.
type Wish struct {
	// Root is where the node's files are; "/".
	Root string
	// Mode is cri, crio or observe.
	Mode string
	// Kubelet is how the node's kubelet is told its runtime. In mode observe it is
	// left alone.
	Kubelet endpoint.Finding
	// Endpoint is what the kubelet shall be told.
	Endpoint string
	// Runtime is the path of the runtime's own socket.
	Runtime string
	// Executable is the path of the program.
	Executable string
	// Setting is what the units have to know.
	Setting systemd.Setting
	// ConfigPath is cleave's configuration file, Example what is written if there
	// is none, ConfiguredMode the mode of the one that is there.
	ConfigPath     string
	Example        []byte
	ConfiguredMode string
	// ContainerdUnit is the unit to restart, ContainerdPath and ContainerdDropIn
	// the file that it needs; only with the split snapshotter.
	ContainerdUnit   string
	ContainerdPath   string
	ContainerdDropIn []byte
	// Redirect has cleave take containerd's place; nil leaves that where it is.
	Redirect *Redirect
	// Notes are for people.
	Notes []string
	// States are how cleave's units are now; one that is missing is neither.
	States map[string]UnitState
}

// Redirect is how containerd's socket moves: the kubelet, and whoever else knows
// it, stays as it is and reaches cleave.
type Redirect struct {
	// From is the path of containerd's socket before, To after.
	From, To string
	// Path and DropIn are the file that containerd needs for it.
	Path   string
	DropIn []byte
}

// Plan is what is done, in this order. It is a value: making one changes nothing.
type Plan struct {
	Steps []transaction.Step
	// Notes are for people: what is not obvious, and what is theirs to do.
	Notes []string
	// note goes into the record.
	note map[string]string
	kind string
	// leave are folders that the install had made.
	leave []string
}

// Empty says that there is nothing to do.
func (p Plan) Empty() bool { return len(p.Steps) == 0 }

// Make plans an install. Errors say what stands against it.
func Make(w Wish) (Plan, error) {
	p := &planner{root: w.Root, plan: Plan{kind: kindInstall, Notes: slices.Concat(w.Kubelet.Notes, w.Notes)}}
	if err := p.units(w); err != nil {
		return Plan{}, err
	}
	if w.ContainerdDropIn != nil {
		p.bringUp([]string{systemd.SnapshotterSocket, systemd.SnapshotterService}, w.States, check(CheckSnapshotter))
	}
	if w.Redirect != nil && w.Kubelet.Service != "" {
		p.add(transaction.Step{Title: "look whether the kubelet goes on with the runtime itself", Undo: check(CheckKubelet, w.Kubelet.Endpoint, w.Kubelet.Service)})
	}
	if err := p.containerd(w); err != nil {
		return Plan{}, err
	}
	p.bringUp([]string{systemd.Socket, systemd.Service}, w.States, check(CheckCleave, w.Setting.Listen))
	switch {
	case w.Redirect != nil && w.Kubelet.Service != "":
		p.add(transaction.Step{Title: "look whether the kubelet goes on with cleave", Do: check(CheckKubelet, w.Kubelet.Endpoint, w.Kubelet.Service)})
	case w.Redirect == nil && w.Mode != "observe":
		if err := p.kubelet(w); err != nil {
			return Plan{}, err
		}
	}
	p.plan.note = map[string]string{
		"mode": w.Mode, "kubelet": w.Kubelet.Service, "endpoint": w.Kubelet.Endpoint,
	}
	return p.plan, nil
}

type planner struct {
	root string
	plan Plan
}

func (p *planner) add(s transaction.Step) { p.plan.Steps = append(p.plan.Steps, s) }

func do(verb string, args ...string) []transaction.Action {
	return []transaction.Action{{Verb: verb, Args: args}}
}

func check(what string, args ...string) []transaction.Action {
	return do(VerbCheck, append([]string{what}, args...)...)
}

// units writes what is missing of units and configuration, and makes systemd read
// it.
func (p *planner) units(w Wish) error {
	units, err := systemd.Units(w.Executable)
	if err != nil {
		return err
	}
	dropIns, err := systemd.DropIns(w.Setting)
	if err != nil {
		return err
	}
	var edits []transaction.Edit
	for _, f := range units {
		packaged, err := readFile(w.Root, filepath.Join(systemd.VendorDir, f.Name))
		if err != nil {
			return err
		}
		if packaged != nil && string(*packaged) == string(f.Content) {
			own, err := readFile(w.Root, filepath.Join(systemd.AdminDir, f.Name))
			if err != nil {
				return err
			}
			if own == nil {
				continue // the package brought it
			}
		}
		edits = append(edits, newFile(filepath.Join(systemd.AdminDir, f.Name), f.Content, purposeUnit))
	}
	for _, f := range dropIns {
		edits = append(edits, newFile(filepath.Join(systemd.AdminDir, f.Name), f.Content, purposeUnit))
	}
	flags, err := systemd.PassthroughFlags(w.Setting.Listen, w.Runtime)
	if err != nil {
		return err
	}
	if flags != nil {
		edits = append(edits, newFile(systemd.PassthroughFile, flags, purposeConfig))
	}
	config, err := p.config(w)
	if err != nil {
		return err
	}
	if config != nil {
		edits = append(edits, *config)
	}
	var steps []transaction.Step
	for _, e := range edits {
		s, err := p.edit(e)
		if err != nil {
			return err
		}
		if s != nil {
			steps = append(steps, *s)
		}
	}
	if len(steps) == 0 {
		return nil
	}
	// Going back, systemd reads its units when all are as they were.
	read := append(do(VerbDaemonReload), takeUp(w.States)...)
	if w.Redirect != nil && w.States[systemd.SnapshotterService].Active {
		// It asks containerd where its configuration says.
		read = append(read, do(VerbRestart, systemd.SnapshotterService)...)
	}
	p.add(transaction.Step{Title: "let systemd read its units as they were", Undo: read})
	p.plan.Steps = append(p.plan.Steps, steps...)
	p.add(transaction.Step{Title: "let systemd read its units", Do: read})
	return nil
}

// takeUp has a cleave that runs already work by what its files say now. Its
// socket can be made anew only while it does not run.
func takeUp(states map[string]UnitState) []transaction.Action {
	if !states[systemd.Service].Active {
		return nil
	}
	units := []string{systemd.Service}
	if states[systemd.Socket].Active {
		units = []string{systemd.Socket, systemd.Service}
	}
	out := do(VerbStop, units...)
	if states[systemd.Socket].Active {
		out = append(out, do(VerbStart, systemd.Socket)...)
	}
	return append(out, do(VerbStart, systemd.Service)...)
}

func newFile(path string, content []byte, purpose string) transaction.Edit {
	return transaction.Edit{Path: path, After: &content, Mode: 0o644, Purpose: purpose}
}

// edit makes a step of an edit whose Before is not known yet; nil if the file is
// so already.
func (p *planner) edit(e transaction.Edit) (*transaction.Step, error) {
	now, err := readFile(p.root, e.Path)
	if err != nil {
		return nil, err
	}
	e.Before = now
	if now != nil && string(*now) == string(*e.After) {
		return nil, nil
	}
	verb := "change"
	if now == nil {
		verb = "write"
	}
	return &transaction.Step{Title: verb + " " + e.Path, Edit: &e}, nil
}

// config gives the configuration file the mode, and where cleave takes
// containerd's place the two endpoints, and nothing else.
func (p *planner) config(w Wish) (*transaction.Edit, error) {
	now, err := readFile(w.Root, w.ConfigPath)
	if err != nil {
		return nil, err
	}
	text := w.Example
	if now != nil {
		text = *now
	}
	var values []setting
	if now == nil || w.ConfiguredMode != w.Mode {
		values = append(values, setting{key: "mode", value: w.Mode})
	}
	if r := w.Redirect; r != nil {
		values = append(values, setting{"runtime", "endpoint", "unix://" + r.To}, setting{"listen", "endpoint", "unix://" + r.From})
	}
	if len(values) == 0 {
		return nil, nil
	}
	for _, v := range values {
		if text, err = v.put(text); err != nil {
			return nil, fmt.Errorf("%s: %w", w.ConfigPath, err)
		}
	}
	e := newFile(w.ConfigPath, text, purposeConfig)
	return &e, nil
}

// containerd has containerd use the split snapshotter, or listen elsewhere, or
// both at one restart.
func (p *planner) containerd(w Wish) error {
	var edits []transaction.Edit
	var without, with []string
	before, after := w.Runtime, w.Runtime
	if r := w.Redirect; r != nil {
		// systemd takes a path away from whoever listens there.
		if w.States[systemd.Socket].Active || w.States[systemd.Service].Active {
			return fmt.Errorf("cleave runs already, and would take containerd's socket before that has moved: `systemctl stop %s %s` first", systemd.Socket, systemd.Service)
		}
		edits = append(edits, newFile(r.Path, r.DropIn, purposeRedirect))
		before, after = r.From, r.To
		without, with = append(without, "listen on "+r.From), append(with, "listen on "+r.To)
	}
	// Last, so that going back it is the first: its snapshots are removed through
	// containerd while that is where cleave's configuration says, a power cut later too.
	if w.ContainerdDropIn != nil {
		edits = append(edits, newFile(w.ContainerdPath, w.ContainerdDropIn, purposeContainerd))
		without, with = append(without, "do without the split snapshotter"), append(with, "use the split snapshotter")
	}
	var steps []transaction.Step
	for _, e := range edits {
		s, err := p.edit(e)
		if err != nil {
			return err
		}
		if s != nil {
			steps = append(steps, *s)
		}
	}
	if len(steps) == 0 {
		return nil
	}
	restart := func(socket string) []transaction.Action {
		return append(do(VerbRestart, w.ContainerdUnit), check(CheckRuntime, socket)...)
	}
	p.add(transaction.Step{Title: "have containerd " + strings.Join(without, " and "), Undo: restart(before)})
	p.plan.Steps = append(p.plan.Steps, steps...)
	p.add(transaction.Step{Title: "have containerd " + strings.Join(with, " and "), Do: restart(after)})
	return nil
}

// bringUp enables and starts units, as far as they are not.
func (p *planner) bringUp(units []string, states map[string]UnitState, checks []transaction.Action) {
	for _, u := range units {
		if !states[u].Enabled {
			p.add(transaction.Step{Title: "enable " + u, Do: do(VerbEnable, u), Undo: do(VerbDisable, u)})
		}
	}
	var started []string
	for _, u := range units {
		if !states[u].Active {
			// A service and the socket that would start it again end in one go.
			started = append(started, u)
			stopped := slices.Clone(started)
			if u == systemd.Service {
				stopped = append(stopped, systemd.Passthrough) // which may have taken its place
			}
			p.add(transaction.Step{Title: "start " + u, Do: do(VerbStart, u), Undo: do(VerbStop, stopped...)})
		}
	}
	p.add(transaction.Step{Title: "look whether it answers: " + checks[0].Args[0], Do: checks})
}

// kubelet tells the kubelet cleave's socket, and restarts it.
func (p *planner) kubelet(w Wish) error {
	changes, err := w.Kubelet.Set(w.Endpoint)
	if err != nil {
		return err
	}
	if len(changes) == 0 {
		return nil
	}
	var reload []transaction.Action
	if w.Kubelet.InUnit {
		reload = do(VerbDaemonReload)
	}
	restart := func(endpoint string) []transaction.Action {
		return slices.Concat(reload, do(VerbRestart, w.Kubelet.Service), check(CheckKubelet, endpoint, w.Kubelet.Service))
	}
	p.add(transaction.Step{Title: "have the kubelet use the runtime itself again", Undo: restart(w.Kubelet.Endpoint)})
	for _, c := range changes {
		after := []byte(c.After)
		s, err := p.edit(transaction.Edit{Path: c.Path, After: &after, Mode: 0o644, Purpose: purposeKubelet, Old: c.Old, New: c.New})
		if err != nil {
			return err
		}
		if s == nil {
			continue
		}
		if was := s.Edit.Before; (was == nil) != (c.Before == nil) || was != nil && string(*was) != *c.Before {
			return fmt.Errorf("%s: %w: make the plan again", c.Path, transaction.ErrChanged)
		}
		p.add(*s)
	}
	p.add(transaction.Step{Title: "have the kubelet use cleave", Do: restart(w.Endpoint)})
	return nil
}

// Write shows a plan: each file as a diff, each action in a line.
func (p Plan) Write(w io.Writer) error {
	var b strings.Builder
	n := 0
	for _, s := range p.Steps {
		if s.Edit == nil && len(s.Do) == 0 {
			continue // for going back only
		}
		n++
		fmt.Fprintf(&b, "%d. %s\n", n, s.Title)
		if s.Edit != nil {
			b.WriteString(showEdit(*s.Edit))
		}
		for _, a := range s.Do {
			fmt.Fprintf(&b, "   %s\n", showAction(a))
		}
	}
	for _, note := range p.Notes {
		fmt.Fprintf(&b, "Note: %s.\n", note)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func showAction(a transaction.Action) string {
	if a.Verb == VerbCheck || a.Verb == VerbRelease {
		return a.String()
	}
	return "systemctl " + a.String()
}

func showEdit(e transaction.Edit) string {
	name := func(side string, text *[]byte) string {
		if text == nil {
			return "/dev/null"
		}
		return side + e.Path
	}
	text := func(b *[]byte) string {
		if b == nil {
			return ""
		}
		return string(*b)
	}
	var out strings.Builder
	for line := range strings.Lines(fmt.Sprintf("--- %s\n+++ %s\n%s", name("a", e.Before), name("b", e.After), diff(text(e.Before), text(e.After)))) {
		out.WriteString("   " + line)
	}
	return out.String()
}

// readFile reads a file of the node; nil if there is none.
func readFile(root, path string) (*[]byte, error) {
	return transaction.Read(transaction.Place{Root: root}, path)
}

// refused is an error that tells all that forbids a plan; nil if nothing does.
func refused(what string, reasons []string) error {
	if len(reasons) == 0 {
		return nil
	}
	return errors.New(what + ":\n  " + strings.Join(reasons, "\n  "))
}
