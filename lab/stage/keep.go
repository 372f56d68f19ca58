package stage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/scenario"
)

// aboutFile has what is known of a lab, in its folder.
const aboutFile = "lab.json"

// About is a lab that is kept.
type About struct {
	Dir    string
	MadeAt time.Time
	Title  string
	Layout string
	Mode   string
	// Kubelet says that a real one is there; the node is in namespaces of its own then.
	Kubelet bool
	Disks   []DiskAbout
	// Where its parts are reached.
	Containerd, Listen, Control, Config, Kubeconfig, Snapshotter string
	// Programs are the folders for PATH.
	Programs []string
	// Pids are of the processes that it can't be without.
	Pids map[string]int
}

// DiskAbout is one of its filesystems.
type DiskAbout struct {
	Name, FS, Path, Device string
	SizeBytes              int64
	Roles                  []string
}

// About describes the node.
func (s *Stage) About() About {
	cfg := s.Node.Cleave.Config()
	a := About{
		Dir: s.run.Dir(), MadeAt: time.Now().UTC().Truncate(time.Second), Title: s.Scenario.Title, Layout: Layout(s.Scenario.Layout), Mode: string(s.Mode),
		Containerd: s.Node.Runtime.Endpoint(), Listen: s.Node.Cleave.Endpoint(), Control: cfg.Control.Endpoint.Path(), Config: s.Node.Cleave.ConfigFile(),
		Programs: []string{filepath.Dir(s.o.Programs.Cleave), filepath.Dir(s.o.Programs.Containerd)},
		Pids:     map[string]int{"containerd": s.Node.Runtime.PID()},
	}
	if s.Kubelet != nil {
		a.Kubelet, a.Kubeconfig = true, s.Kubelet.Kubeconfig()
		a.Pids["kubelet"] = s.Kubelet.PID()
		maps.Copy(a.Pids, s.Plane.PIDs())
	} else {
		a.Kubeconfig = s.Deputy.Kubeconfig()
		a.Pids["kubelet's deputy"] = s.Deputy.PID()
	}
	if s.split() {
		a.Snapshotter = cfg.Snapshotter.StatusEndpoint.Path()
		a.Pids["snapshotter"] = s.Node.Split.PID()
	}
	for _, f := range s.Scenario.Filesystems {
		d := s.Node.Disks[f.Name]
		a.Disks = append(a.Disks, DiskAbout{Name: f.Name, FS: string(d.FS()), Path: d.Path(), Device: d.Device(), SizeBytes: f.SizeBytes, Roles: roles(s.Scenario.Layout, f.Name)})
	}
	return a
}

func roles(l scenario.Layout, filesystem string) (out []string) {
	for _, r := range []struct{ name, on string }{{"nodefs", l.NodeFS}, {"imagefs", l.ImageFS}, {"containerfs", l.ContainerFS}} {
		if r.on == filesystem {
			out = append(out, r.name)
		}
	}
	return out
}

// Keep leaves the node running until `cleave lab down`.
func (s *Stage) Keep(ctx context.Context) (About, error) {
	a := s.About()
	text, err := json.MarshalIndent(a, "", "  ")
	if err != nil {
		return a, fmt.Errorf("keep the lab: %w", err)
	}
	if err := os.WriteFile(filepath.Join(a.Dir, aboutFile), append(text, '\n'), 0o600); err != nil {
		return a, fmt.Errorf("keep the lab: %w", err)
	}
	return a, s.run.Keep(ctx)
}

// Kept lists the labs that are kept. One of which nothing is known any more has
// only its folder.
func Kept() ([]About, error) {
	dirs, err := janitor.Kept(janitor.Options{})
	if err != nil {
		return nil, err
	}
	var out []About
	for _, dir := range dirs {
		text, err := os.ReadFile(filepath.Join(dir, aboutFile))
		if errors.Is(err, os.ErrNotExist) {
			continue // somebody else's: the demo's
		}
		if err != nil {
			return nil, fmt.Errorf("read about the lab in %s: %w", dir, err)
		}
		a := About{}
		if json.Unmarshal(text, &a) != nil {
			a = About{}
		}
		a.Dir = dir
		out = append(out, a)
	}
	return out, nil
}

// Broken are the processes of a lab that have ended.
func (a About) Broken() (out []string) {
	for _, name := range slices.Sorted(maps.Keys(a.Pids)) {
		if !a.alive(a.Pids[name]) {
			out = append(out, name)
		}
	}
	return out
}

// alive says whether a process is one of the lab's.
func (a About) alive(pid int) bool {
	// The mark by which the janitor knows its own: the number may be another's by now.
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	return err == nil && strings.Contains(string(environ), a.Dir)
}

// inside are the arguments that run a command where the node is.
func (a About) inside(command []string) ([]string, error) {
	if !a.Kubelet {
		return command, nil
	}
	for _, name := range slices.Sorted(maps.Keys(a.Pids)) {
		if pid := a.Pids[name]; a.alive(pid) {
			return append([]string{"nsenter", fmt.Sprintf("--target=%d", pid), "--mount", "--net", "--ipc"}, command...), nil
		}
	}
	return nil, errors.New("none of the lab's processes lives, so there is no way into it: take it down with `cleave lab down`")
}

// Write shows a lab and how it is used.
func (a About) Write(w io.Writer) {
	kubelet := ""
	if a.Kubelet {
		kubelet = ", a real kubelet"
	}
	fmt.Fprintf(w, "lab %s: layout %s, mode %s%s, made %s\n\n", filepath.Base(a.Dir), a.Layout, a.Mode, kubelet, a.MadeAt.Local().Format(time.DateTime))
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, d := range a.Disks {
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%s\n", d.Name, page.Bytes(uint64(max(0, d.SizeBytes))), d.FS, d.Device, strings.Join(d.Roles, ", "), d.Path)
	}
	_ = t.Flush() //nolint:errcheck // lines for people
	if broken := a.Broken(); len(broken) > 0 {
		fmt.Fprintf(w, "\n! has ended: %s; take the lab down with `cleave lab down`\n", strings.Join(broken, ", "))
	}
}

// Hints say what can be done with a lab that is up.
func (a About) Hints(w io.Writer) {
	crictl := "crictl --runtime-endpoint " + a.Listen + " ps"
	if a.Kubelet {
		// The node is in namespaces of its own, and that socket at a fixed path there.
		crictl = "cleave lab shell -- crictl ps"
	}
	fmt.Fprintf(w, `
  cleave lab shell                          a shell in which crictl, ctr and cleave mean this lab
  cleave status --control %s
  %s
  cleave lab down                           ends it and removes everything
`, a.Control, crictl)
}

// down ends and removes all labs that are kept, and what labs have left that were
// killed. It returns the folders of the former.
func down(ctx context.Context, log io.Writer) ([]string, error) {
	kept, err := Kept()
	if err != nil {
		return nil, err
	}
	var gone []string
	var errs []error
	for _, a := range kept {
		if err := janitor.Clean(ctx, a.Dir); err != nil {
			errs = append(errs, err)
			continue
		}
		gone = append(gone, a.Dir)
	}
	_, dead, err := janitor.Left(ctx, janitor.Options{})
	if err != nil {
		return gone, errors.Join(append(errs, err)...)
	}
	// A run's start cleans what dead ones have left; it is closed at once.
	run, err := janitor.Start(ctx, janitor.Options{Log: log})
	if err != nil {
		return gone, errors.Join(append(errs, err)...)
	}
	errs = append(errs, run.Close(ctx))
	for _, dir := range dead {
		if _, err := os.Lstat(dir); err == nil {
			errs = append(errs, fmt.Errorf("something of an earlier lab is left in %s: remove what resists, and try again", dir))
		}
	}
	had, _, err := janitor.Left(ctx, janitor.Options{})
	for _, dir := range had {
		if !slices.Contains(dead, dir) {
			fmt.Fprintf(log, "left alone: %s is being made, played or tested with, or its janitor is still cleaning\n", dir)
		}
	}
	return gone, errors.Join(append(errs, err)...)
}

// ErrNone says that no lab is up.
var ErrNone = errors.New("no lab is up: make one with `cleave lab up`")

// CommandError says that a command in the lab's shell ended with a code other than 0. It has said why itself.
type CommandError struct{ Code int }

// Error implements error.
func (e CommandError) Error() string { return fmt.Sprintf("the command ended with %d", e.Code) }

// Shell runs a command, or a shell, in which the usual tools mean the lab.
func Shell(ctx context.Context, command []string, in io.Reader, out, errOut io.Writer) error {
	kept, err := Kept()
	if err != nil {
		return err
	}
	if len(kept) == 0 {
		return ErrNone
	}
	a := kept[0]
	if a.Containerd == "" { // what asks for no address may reach another containerd
		return fmt.Errorf("nothing is known any more of the lab in %s: `cleave lab down` ends it", a.Dir)
	}
	if len(command) == 0 {
		shell := os.Getenv("SHELL")
		if shell == "" {
			shell = "/bin/sh"
		}
		command = []string{shell}
	}
	name := command[0]
	if command, err = a.inside(command); err != nil {
		return err
	}
	// Ctrl-C is for the command, which the terminal gives it too, and not the end of ctx. Who wants this program to end
	// wants the command to, and a shell takes no SIGTERM.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), command[0], command[1:]...) //nolint:gosec // what the user asks for
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, errOut
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM)
	defer func() { signal.Stop(asked); close(asked) }()
	cmd.Env = append(os.Environ(),
		"PATH="+strings.Join(append(a.Programs, os.Getenv("PATH")), ":"),
		"CLEAVE_LAB="+a.Dir, "CLEAVE_CONFIG="+a.Config, "CLEAVE_CONTROL="+a.Control,
		"CONTAINER_RUNTIME_ENDPOINT="+a.Listen, "IMAGE_SERVICE_ENDPOINT="+a.Listen,
		"CONTAINERD_ADDRESS="+strings.TrimPrefix(a.Containerd, "unix://"), "CONTAINERD_NAMESPACE=k8s.io",
		"KUBECONFIG="+a.Kubeconfig, "PS1=(cleave lab) \\w # ",
	)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	go func() {
		for range asked {
			_ = cmd.Process.Signal(syscall.SIGHUP) //nolint:errcheck // it may have gone by itself
		}
	}()
	err = cmd.Wait()
	var ended *exec.ExitError
	if errors.As(err, &ended) && ended.Exited() {
		return CommandError{Code: ended.ExitCode()}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
