// Package bin gives tests, the demo and the Makefile the real peers as binaries: containerd, its shim, crictl, critest,
// the kubelet, and so on, each built from the versions that the modules in integration/toolchain pin.
//
// A binary is built when first asked for and kept outside the checkout, in a folder whose name carries a hash of
// everything that decides what comes out, so that a second checkout finds it and a changed pin never finds an old one.
// Only code in integration and tests may import this package: what cleave ships builds nothing.
package bin

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/lab/cachedir"
	"github.com/cleave-cri/cleave/lab/flock"
)

// ownModule is the first line of our go.mod: how a checkout is recognised.
const ownModule = "module github.com/cleave-cri/cleave"

// progressEvery is how often a running build says that it is still at work.
const progressEvery = 15 * time.Second

// Path returns the absolute path of one binary and builds it if the cache lacks it; it says so on standard error.
// name is one of Names or a short form such as shim or apiserver.
func Path(ctx context.Context, name string) (string, error) {
	paths, err := Get(ctx, os.Stderr, name)
	if err != nil {
		return "", err
	}
	return paths[0], nil
}

// Get returns the absolute paths of the named binaries, in the order asked for, and builds those that the cache lacks.
// Progress goes to progress. Several processes may ask for the same binary at once: one builds, the others wait.
func Get(ctx context.Context, progress io.Writer, names ...string) ([]string, error) {
	root, err := checkout()
	if err != nil {
		return nil, err
	}
	cache, err := cachedir.For("toolchain")
	if err != nil {
		return nil, err
	}
	wanted := make(map[string][]binary)
	paths := make([]string, 0, len(names))
	dirs := make(map[string]string)
	for _, name := range names {
		g, b, err := find(name)
		if err != nil {
			return nil, err
		}
		if dirs[g.name] == "" {
			key, err := cacheKey(root, g)
			if err != nil {
				return nil, err
			}
			dirs[g.name] = filepath.Join(cache, g.name+"-"+key)
		}
		wanted[g.name] = append(wanted[g.name], b)
		paths = append(paths, filepath.Join(dirs[g.name], b.fileName()))
	}
	for _, g := range recipes() {
		if len(wanted[g.name]) == 0 {
			continue
		}
		if err := ensure(ctx, progress, root, dirs[g.name], g, wanted[g.name]); err != nil {
			return nil, err
		}
	}
	return paths, nil
}

// Version is the version that a binary is built from, such as v1.37.2.
func Version(name string) (string, error) {
	root, err := checkout()
	if err != nil {
		return "", err
	}
	g, _, err := find(name)
	if err != nil {
		return "", err
	}
	return pinned(root, g)
}

// checkout finds the checkout that the working directory lies in.
func checkout() (string, error) {
	wd, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the checkout: %w", err)
	}
	for dir := wd; ; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil {
			first, _, _ := strings.Cut(string(mod), "\n")
			if strings.TrimSpace(first) == ownModule {
				return dir, nil
			}
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("find the checkout: no go.mod with %q at or above %s; run this inside a checkout of cleave", ownModule, wd)
		}
	}
}

func moduleDir(root string, g group) string {
	return filepath.Join(root, "integration", "toolchain", g.name)
}

// cacheKey hashes what decides the result: the pins, the recipe and the compiler.
func cacheKey(root string, g group) (string, error) {
	h := sha256.New()
	for _, file := range []string{"go.mod", "go.sum"} {
		content, err := os.ReadFile(filepath.Join(moduleDir(root, g), file))
		if err != nil {
			return "", fmt.Errorf("hash the pins of %s: %w", g.name, err)
		}
		fmt.Fprintf(h, "%s %d\n", file, len(content))
		h.Write(content)
	}
	for _, b := range g.binaries {
		fmt.Fprintln(h, b.fileName(), b.pkg, b.test)
	}
	fmt.Fprintln(h, g.versionVars, buildArgs("", nil), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

// ensure builds those of the binaries that dir lacks, under a lock that other processes respect.
func ensure(ctx context.Context, progress io.Writer, root, dir string, g group, binaries []binary) (err error) {
	if len(missing(dir, binaries)) == 0 {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the cache folder for %s: %w", g.name, err)
	}
	lock, err := flock.Take(ctx, dir+".lock", func() {
		fmt.Fprintf(progress, "toolchain: waiting for another process that builds %s\n", g.name)
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()

	todo := missing(dir, binaries)
	if len(todo) == 0 {
		return nil
	}
	version, err := pinned(root, g)
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(dir, "build-")
	if err != nil {
		return fmt.Errorf("make a folder to build %s in: %w", g.name, err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }() //nolint:forbidigo // a folder made above, with our compiler's output in it

	var plain, tests []binary
	for _, b := range todo {
		if b.test {
			tests = append(tests, b)
		} else {
			plain = append(plain, b)
		}
	}
	var flags []string
	for _, v := range g.versionVars {
		flags = append(flags, "-X "+fmt.Sprintf(v, version))
	}
	say := announce(progress, g, version, todo)
	if len(plain) > 0 {
		args := append([]string{"build"}, buildArgs(tmp+string(filepath.Separator), flags)...)
		for _, b := range plain {
			args = append(args, b.pkg)
		}
		if err := goTool(ctx, progress, moduleDir(root, g), say, args); err != nil {
			return err
		}
	}
	for _, b := range tests {
		args := append([]string{"test", "-c"}, buildArgs(filepath.Join(tmp, b.name), flags)...)
		if err := goTool(ctx, progress, moduleDir(root, g), say, append(args, b.pkg)); err != nil {
			return err
		}
	}
	for _, b := range todo {
		built := b.name
		if !b.test {
			built = programName(b.pkg)
		}
		if err := os.Rename(filepath.Join(tmp, built), filepath.Join(dir, b.fileName())); err != nil {
			return fmt.Errorf("keep %s in the cache: %w", b.name, err)
		}
	}
	say("built")
	return nil
}

var majorVersion = regexp.MustCompile(`^v[0-9]+$`)

// programName is the file name that go build gives a package: its last path element that is no major version.
func programName(pkg string) string {
	name := filepath.Base(pkg)
	if majorVersion.MatchString(name) {
		name = filepath.Base(filepath.Dir(pkg))
	}
	return name
}

// buildArgs are the arguments that all builds share. Stripped and without cgo: small, and they run in any root tree.
func buildArgs(out string, linkerFlags []string) []string {
	return []string{"-mod=readonly", "-buildvcs=false", "-ldflags", strings.Join(append([]string{"-s", "-w"}, linkerFlags...), " "), "-o", out}
}

func missing(dir string, binaries []binary) []binary {
	var todo []binary
	for _, b := range binaries {
		if info, err := os.Stat(filepath.Join(dir, b.fileName())); err != nil || !info.Mode().IsRegular() {
			todo = append(todo, b)
		}
	}
	return todo
}

// pinned reads the version that a group's go.mod requires.
func pinned(root string, g group) (string, error) {
	file := filepath.Join(moduleDir(root, g), "go.mod")
	mod, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("read the pinned version of %s: %w", g.module, err)
	}
	m := regexp.MustCompile(`(?m)^\s*(?:require )?` + regexp.QuoteMeta(g.module) + ` (v\S+)`).FindSubmatch(mod)
	if m == nil {
		return "", fmt.Errorf("read the pinned version of %s: %s does not require it", g.module, file)
	}
	return string(m[1]), nil
}

// announce says what is built and how long that usually takes, and returns a function for further lines.
func announce(progress io.Writer, g group, version string, todo []binary) func(string) {
	var names []string
	var cold time.Duration
	for _, b := range todo {
		names = append(names, b.name)
		cold += b.cold
	}
	what := strings.Join(names, ", ")
	start := time.Now()
	fmt.Fprintf(progress, "toolchain: building %s %s from Go modules; about %s the first time on two cores, then it is cached\n", what, version, cold)
	return func(state string) {
		fmt.Fprintf(progress, "toolchain: %s %s, %s\n", what, state, time.Since(start).Round(time.Second))
	}
}

// goTool runs the go command in a module's folder, and shows its output only when it fails.
func goTool(ctx context.Context, progress io.Writer, dir string, say func(string), args []string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	// GOFLAGS and GOWORK of whoever calls must not change what is built.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "PWD="+dir)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run the go command: %w; Go must be in PATH", err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			if err == nil {
				return nil
			}
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return fmt.Errorf("go %s in %s: %w\n%s", strings.Join(args, " "), dir, err, strings.TrimSpace(output.String()))
		case <-tick.C:
			say("still building")
		}
	}
}
