// Package installer is what `cleave install`, `cleave uninstall` and `cleave
// bypass` do on a real node: it finds out what systemd/install has to know, and
// does what that wants done. cmd may import it.
package installer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/snapshotter"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
	"github.com/cleave-cri/cleave/systemd"
	"github.com/cleave-cri/cleave/systemd/install"
	"github.com/cleave-cri/cleave/systemd/install/endpoint"
	"github.com/cleave-cri/cleave/systemd/install/transaction"
)

// stateName is the folder below the state folder for the journal.
const stateName = "install"

// crioEndpoint is what a kubelet has to be told in mode crio, to the letter: by
// this text it chooses how it measures (KSS-1).
const crioEndpoint = "unix:///var/run/crio/crio.sock"

// Options are what shall be.
type Options struct {
	// Mode is cri, crio or observe.
	Mode config.Mode
	// Split has containerd use the split snapshotter.
	Split bool
	// ConfigPath is cleave's configuration file, HasConfig whether it is there.
	ConfigPath string
	HasConfig  bool
	// Redirect has cleave take containerd's place on its socket.
	Redirect bool
	// Containerd is containerd's configuration; only with Split or Redirect.
	Containerd ctdconfig.Target
}

// Installer works on this node.
type Installer struct {
	cfg  config.Config
	node node
	out  io.Writer
}

// bootedMark is there where systemd is what runs the node (sd_booted(3)).
const bootedMark = "/run/systemd/system"

// New returns an installer that tells people on out what it does.
func New(cfg config.Config, out io.Writer) (*Installer, error) {
	return newInstaller(cfg, out, bootedMark)
}

func newInstaller(cfg config.Config, out io.Writer, booted string) (*Installer, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("it changes files in /etc and restarts services: run it as root")
	}
	if _, err := os.Stat(booted); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("this node is not run by systemd, and nothing was changed.\n%s", byHand(cfg))
	}
	return &Installer{cfg: cfg, node: node{cfg: cfg}, out: out}, nil
}

// byHand is what to do where the node is not understood.
func byHand(cfg config.Config) string {
	return fmt.Sprintf(`By hand:
  1. have your service manager run "cleave serve" as root, after containerd and before the kubelet, restarted whenever it ends
  2. give the kubelet containerRuntimeEndpoint: %s in its configuration (or --container-runtime-endpoint), and restart it
  3. look at "cleave doctor"
To go back, give the kubelet %s again, restart it, then end cleave.`, cfg.Listen.Endpoint, cfg.Runtime.Endpoint)
}

func (i *Installer) installer() install.Installer {
	return install.Installer{
		Place:     transaction.Place{Dir: filepath.Join(i.cfg.StateDir, stateName), Root: "/"},
		Performer: i.node,
		Tell:      func(line string) { fmt.Fprintln(i.out, line) },
	}
}

// Plan says what an install does. It changes nothing.
func (i *Installer) Plan(ctx context.Context, o Options) (install.Plan, error) {
	if err := i.installer().Ready(); err != nil {
		return install.Plan{}, err
	}
	if installed, err := i.installer().Installed(); err != nil || installed != nil {
		if err == nil {
			err = fmt.Errorf("%w: to change something, uninstall it first, or change %s and reload cleave.service", install.ErrInstalled, o.ConfigPath)
		}
		return install.Plan{}, err
	}
	cfg := i.cfg
	cfg.Mode = o.Mode
	cfg.Settle()
	w := install.Wish{
		Root: "/", Mode: string(o.Mode), Runtime: cfg.Runtime.Endpoint.Path(), Endpoint: cfg.Listen.Endpoint.String(),
		Setting:    systemd.Setting{Listen: cfg.Listen.Endpoint.Path(), HostMounts: o.Mode == config.ModeCRIO},
		ConfigPath: o.ConfigPath, Example: config.Example(), ConfiguredMode: string(i.cfg.Mode),
	}
	if o.Mode == config.ModeCRIO {
		w.Endpoint = crioEndpoint
	}
	if o.Split || o.Redirect {
		w.ContainerdUnit = "containerd.service"
	}
	var err error
	if w.Executable, err = executable(); err != nil {
		return install.Plan{}, err
	}
	if o.Mode != config.ModeObserve {
		if w.Kubelet, err = i.kubelet(ctx, cfg); err != nil {
			return install.Plan{}, err
		}
	}
	if o.Redirect {
		if err := i.redirect(ctx, o, &w); err != nil {
			return install.Plan{}, err
		}
	}
	if o.Split {
		if err := i.split(ctx, o, &w); err != nil {
			return install.Plan{}, err
		}
	}
	if w.States, err = i.node.states(ctx); err != nil {
		return install.Plan{}, err
	}
	return install.Make(w)
}

// executable is this program, if nobody but root can put another in its place.
func executable() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", err
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return "", err
	}
	for at := path; ; at = filepath.Dir(at) {
		info, err := os.Stat(at)
		if err != nil {
			return "", err
		}
		if others := info.Mode().Perm()&0o022 != 0; !rootOwns(info) || others {
			return "", fmt.Errorf("the units would run %s as root, and others than root may write to %s: move the program to %s first", path, at, systemd.Executable)
		}
		if at == "/" {
			return path, nil
		}
	}
}

// kubelet finds out how the kubelet is told its runtime, and holds that against
// the kubelet that runs.
func (i *Installer) kubelet(ctx context.Context, cfg config.Config) (endpoint.Finding, error) {
	f, err := endpoint.Find("/")
	if errors.Is(err, endpoint.ErrUnknown) {
		return f, fmt.Errorf("%w\nNothing was changed. %s", err, byHand(cfg))
	}
	if err != nil {
		return f, err
	}
	s, err := kubelet.Reader{}.Find(ctx, kubelet.Choice{Endpoints: []string{cfg.Listen.Endpoint.Path()}})
	switch {
	case errors.Is(err, kubelet.ErrNotRunning), errors.Is(err, kubelet.ErrEmbedded):
		f.Notes = append(f.Notes, "the kubelet's files say "+f.Endpoint+"; that could not be compared with a kubelet that runs")
	case err != nil:
		return f, fmt.Errorf("look at the kubelet that runs: %w", err)
	case endpoint.Socket(s.RuntimeEndpoint.Value) != endpoint.Socket(f.Endpoint):
		return f, fmt.Errorf("the kubelet runs with %s (%s), and its files say %s (%s): restart it if they were changed; else: %w\n%s",
			s.RuntimeEndpoint.Value, s.RuntimeEndpoint.From, f.Endpoint, f.Shape, endpoint.ErrUnknown, byHand(cfg))
	}
	switch told := endpoint.Socket(f.Endpoint); told {
	case endpoint.Socket(cfg.Runtime.Endpoint.Path()), endpoint.Socket(cfg.Listen.Endpoint.Path()):
		return f, nil
	default:
		return f, fmt.Errorf("the kubelet uses %s, and runtime.endpoint of cleave's configuration is %s: make them the same first", f.Endpoint, cfg.Runtime.Endpoint)
	}
}

// split plans containerd's part.
func (i *Installer) split(ctx context.Context, o Options, w *install.Wish) error {
	s := i.cfg.Snapshotter
	if !s.Enabled() || !o.HasConfig {
		return fmt.Errorf("%w, in %s; then run `cleave snapshotter init`", snapshotter.ErrNotConfigured, o.ConfigPath)
	}
	if _, err := os.Stat(s.Database); err != nil {
		return fmt.Errorf("the snapshotter's roots are not prepared (%w): run `cleave snapshotter init` first", err)
	}
	options, err := snapshotter.ContainerdOptions(i.cfg, ctdconfig.DropInBeside(o.Containerd.MainFile), 0)
	if err != nil {
		return err
	}
	plan, err := ctdconfig.Examine(ctx, o.Containerd, options)
	if err == nil {
		err = plan.Err()
	}
	if err != nil {
		return err
	}
	w.ContainerdPath, w.ContainerdDropIn = plan.Path, plan.Content
	w.Notes = append(w.Notes, plan.Notes...)
	w.Setting.Roots = []string{filepath.Clean(s.ImageRoot), filepath.Clean(s.ContainerRoot)}
	w.Setting.SnapshotterSockets = []string{s.Endpoint.Path(), s.StatusEndpoint.Path()}
	return nil
}

// redirect plans that cleave takes containerd's place.
func (i *Installer) redirect(ctx context.Context, o Options, w *install.Wish) error {
	if o.Mode == config.ModeCRIO {
		return fmt.Errorf("--redirect leaves the kubelet's endpoint as it is, and in mode crio it has to be %s: choose one of the two", crioEndpoint)
	}
	r, plan, err := ctdconfig.ExamineRedirect(ctx, o.Containerd, ctdconfig.RedirectBeside(o.Containerd.MainFile))
	if err == nil {
		err = plan.Err()
	}
	if err != nil {
		return err
	}
	if told := i.cfg.Runtime.Endpoint.Path(); endpoint.Socket(told) != endpoint.Socket(r.From) {
		return fmt.Errorf("containerd listens on %s, and runtime.endpoint of cleave's configuration is %s: make them the same first", r.From, told)
	}
	if k := w.Kubelet; k.Service != "" && endpoint.Socket(k.Endpoint) != endpoint.Socket(r.From) {
		return fmt.Errorf("the kubelet is told %s (%s), and would not reach cleave at %s: give it that first, or leave --redirect out", k.Endpoint, k.Shape, r.From)
	}
	moved := i.cfg
	moved.Mode, moved.Listen.Endpoint, moved.Runtime.Endpoint = o.Mode, config.Endpoint(r.From), config.Endpoint(r.To)
	if err := moved.Validate(); err != nil {
		return fmt.Errorf("the configuration as it would be: %w", err)
	}
	stranded, err := strandedShims("/proc", r)
	if err != nil {
		return fmt.Errorf("%w: nothing was changed, because it is not known whether containers would be lost sight of", err)
	}
	if len(stranded) > 0 {
		return fmt.Errorf("shims run that tell containerd on another socket what happens to their containers, where it does not listen:\n  %s\n"+
			"Nothing was changed. Drain the node (kubectl drain --ignore-daemonsets), remove the pods that are left (crictl rmp -fa), then try again",
			strings.Join(stranded, "\n  "))
	}
	w.Redirect = &install.Redirect{From: r.From, To: r.To, Path: plan.Path, DropIn: plan.Content}
	w.Runtime, w.Setting.Listen, w.Setting.FolderMode = r.To, r.From, folderMode(filepath.Dir(r.From))
	w.Notes = append(w.Notes, "containerd is restarted, and does not answer for some seconds; containers go on",
		"whoever wants containerd itself finds it on "+r.To)
	return nil
}

// folderMode is the mode of a folder as systemd wants it; empty if there is none.
func folderMode(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%04o", info.Mode().Perm())
}

// Run carries out a plan.
func (i *Installer) Run(ctx context.Context, p install.Plan) error { return i.installer().Run(ctx, p) }

// Resume does the rest of what was broken off.
func (i *Installer) Resume(ctx context.Context) error {
	return orNothing(i.installer().Resume(ctx))
}

// Revert takes back what was broken off.
func (i *Installer) Revert(ctx context.Context) error {
	return orNothing(i.installer().Revert(ctx))
}

func orNothing(found bool, err error) error {
	if err == nil && !found {
		return errors.New("nothing was broken off")
	}
	return err
}

// UninstallPlan says what an uninstall does. It refuses while any container uses
// the split snapshotter. It changes nothing.
func (i *Installer) UninstallPlan(ctx context.Context) (install.Plan, error) {
	if err := i.installer().Ready(); err != nil {
		return install.Plan{}, err // before containerd is asked, which may not answer then
	}
	inUse, err := i.inUse(ctx)
	if err != nil {
		return install.Plan{}, err
	}
	return i.installer().Undo(inUse)
}

// Purge takes away what the split snapshotter has on its roots, and its database;
// with dry it only says what. See [split.Purge] for what it refuses.
func (i *Installer) Purge(ctx context.Context, dry bool) error {
	list, err := snapshotter.Purge(ctx, i.cfg, zap.NewNop(), dry)
	if err != nil {
		return err
	}
	verb := "deleted"
	if dry {
		verb = "to be deleted"
	}
	for _, path := range list {
		fmt.Fprintf(i.out, "%s: %s\n", verb, path)
	}
	return nil
}

// ShowPurge says what a purge takes away after an uninstall: until then the
// snapshotter runs, and nobody else may look.
func (i *Installer) ShowPurge() error {
	s := i.cfg.Snapshotter
	if !s.Enabled() {
		return fmt.Errorf("nothing to purge: %w", snapshotter.ErrNotConfigured)
	}
	fmt.Fprintf(i.out, "Then, if no snapshot is left: delete all that the split snapshotter has in %s and %s, and its database %s.\n", s.ImageRoot, s.ContainerRoot, s.Database)
	return nil
}

// inUse asks containerd, if it was told to use the split snapshotter.
func (i *Installer) inUse(ctx context.Context) ([]string, error) {
	r, err := i.installer().Installed()
	if err != nil || r == nil {
		return nil, err
	}
	for _, s := range r.Steps {
		if s.Edit != nil && filepath.Base(s.Edit.Path) == filepath.Base(ctdconfig.DefaultDropIn) {
			st, err := i.node.store()
			if err != nil {
				return nil, err
			}
			inUse, err := st.containers(ctx)
			return inUse, errors.Join(err, st.close())
		}
	}
	return nil, nil
}

// Bypass puts the pass-through in cleave's place, or cleave back.
func (i *Installer) Bypass(ctx context.Context, off bool) error {
	actions := []transaction.Action{{Verb: install.VerbStart, Args: []string{systemd.Passthrough}}}
	if off {
		actions = []transaction.Action{
			{Verb: verbResetFailed, Args: []string{systemd.Service}},
			{Verb: install.VerbStart, Args: []string{systemd.Socket}},
			{Verb: install.VerbStart, Args: []string{systemd.Service}},
		}
	}
	actions = append(actions, transaction.Action{Verb: install.VerbCheck, Args: []string{install.CheckCleave, i.cfg.Listen.Endpoint.Path()}})
	for _, a := range actions {
		fmt.Fprintln(i.out, a)
		if err := i.node.Perform(ctx, a); err != nil {
			return fmt.Errorf("%s: %w", a, err)
		}
	}
	return nil
}

// trimmed is what a program said, for a message.
func trimmed(out []byte) string { return strings.TrimSpace(string(out)) }
