package ctdconfig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"
)

// dumpTimeout bounds one `containerd config dump`, which takes milliseconds.
const dumpTimeout = 20 * time.Second

// maxFileBytes is the largest file that is read; a real one has some kB.
const maxFileBytes = 4 << 20

// Target is the configuration that is looked at and changed.
type Target struct {
	// Containerd is the program whose configuration it is: a path, or a name to
	// look for in PATH.
	Containerd string
	// MainFile is containerd's main configuration file.
	MainFile string
	// BackupDir is the folder that keeps what is replaced; made if missing. It
	// is outside of containerd's folders, where it might be imported.
	BackupDir string
}

// Examine makes the plan for what is configured now. It changes nothing.
func Examine(ctx context.Context, t Target, o Options) (Plan, error) {
	_, p, err := examine(ctx, t, o)
	return p, err
}

func examine(ctx context.Context, t Target, o Options) (dump []byte, _ Plan, _ error) {
	f, err := t.facts(ctx, o.DropIn)
	if err != nil {
		return nil, Plan{}, err
	}
	p, err := Make(f, o)
	return f.Dump, p, err
}

// facts reads what a plan is made from.
func (t Target) facts(ctx context.Context, dropIn string) (Facts, error) {
	f := Facts{}
	var err error
	if f.MainPath, err = filepath.Abs(t.MainFile); err != nil {
		return f, fmt.Errorf("find containerd's configuration: %w", err)
	}
	f.Main, err = readFile(f.MainPath)
	if errors.Is(err, fs.ErrNotExist) {
		return f, fmt.Errorf("read containerd's configuration: %w: write one with `version = %d` and `imports = [%s]`, or name yours with --containerd-config",
			err, oldestDumped, quote(filepath.Join(filepath.Dir(dropIn), "*.toml")))
	}
	if err != nil {
		return f, fmt.Errorf("read containerd's configuration: %w", err)
	}
	// Before containerd itself is asked, which says less well what is wrong.
	if _, err := parse(f.MainPath, f.Main); err != nil {
		return f, fmt.Errorf("read containerd's configuration: %w", err)
	}
	if f.DropIn, err = readFile(dropIn); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return f, fmt.Errorf("read the drop-in: %w", err)
	}
	f.Dump, err = t.dump(ctx)
	return f, err
}

// Write makes the plan and puts its file in place. Then it looks whether
// containerd now has what was planned and all else as before; if not, it puts
// back what was there and says what differs. The error is [ErrConflict] if the
// plan may not be carried out.
func Write(ctx context.Context, t Target, o Options) (Plan, error) {
	before, p, err := examine(ctx, t, o)
	if err != nil {
		return p, err
	}
	if err := p.Err(); err != nil {
		return p, err
	}
	if p.Unchanged {
		return p, nil
	}
	if p.Replaces {
		if err := t.backup(p.Path); err != nil {
			return p, err
		}
	}
	old, err := readFile(p.Path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return p, fmt.Errorf("read the drop-in: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(p.Path), 0o755); err != nil {
		return p, fmt.Errorf("make the folder of drop-ins: %w", err)
	}
	if err := replaceFile(p.Path, p.Content); err != nil {
		return p, err
	}
	if err := t.verify(ctx, before, o); err != nil {
		undo := func() error { return removeFile(p.Path) }
		if old != nil {
			undo = func() error { return replaceFile(p.Path, old) }
		}
		return p, errors.Join(err, undo())
	}
	return p, nil
}

func (t Target) verify(ctx context.Context, before []byte, o Options) error {
	after, err := t.dump(ctx)
	if err != nil {
		return fmt.Errorf("with the drop-in: %w; it was taken away again", err)
	}
	differences, err := Verify(before, after, o)
	if err != nil {
		return err
	}
	if len(differences) > 0 {
		return fmt.Errorf("%w: with the drop-in containerd's configuration is not what was planned, so it was taken away again:\n  %s",
			ErrConflict, strings.Join(differences, "\n  "))
	}
	return nil
}

// Verify compares two outputs of `containerd config dump`, from before and
// after a drop-in, and says what is not as it should be: our values, and
// everything else unchanged.
func Verify(before, after []byte, o Options) ([]string, error) {
	old, err := parse("containerd config dump, before", before)
	if err != nil {
		return nil, err
	}
	now, err := parse("containerd config dump, after", after)
	if err != nil {
		return nil, err
	}
	var out []string
	if there := now.table("proxy_plugins", Snapshotter); !same(there, o) {
		out = append(out, fmt.Sprintf("proxy_plugins.%s is (%s): another file sets it later", Snapshotter, describe(there)))
	}
	if sn, _ := now.text("plugins", pluginImages, "snapshotter"); sn != Snapshotter {
		out = append(out, fmt.Sprintf("%s is %q: another file sets it later", key(pluginImages, "snapshotter"), sn))
	}
	if !slices.ContainsFunc(now.list("plugins", pluginTransfer, "unpack_config"), func(v any) bool {
		e, ok := v.(map[string]any)
		return ok && e["snapshotter"] == Snapshotter && e["platform"] == o.Platform
	}) {
		out = append(out, key(pluginTransfer, "unpack_config")+" has no entry for the snapshotter: another file sets it later")
	}
	if n, _ := now.integer("plugins", pluginTransfer, "max_concurrent_unpacks"); o.MaxConcurrentUnpacks > 0 && n != o.MaxConcurrentUnpacks {
		out = append(out, fmt.Sprintf("%s is %d: another file sets it later", key(pluginTransfer, "max_concurrent_unpacks"), n))
	}
	for _, t := range []tree{old, now} {
		delete(t, "imports") // a list of patterns, which the drop-in does not change
		delete(t.table("proxy_plugins"), Snapshotter)
		if len(t.table("proxy_plugins")) == 0 {
			delete(t, "proxy_plugins")
		}
		delete(t.table("plugins", pluginImages), "snapshotter")
		delete(t.table("plugins", pluginTransfer), "unpack_config")
		if o.MaxConcurrentUnpacks > 0 {
			delete(t.table("plugins", pluginTransfer), "max_concurrent_unpacks")
		}
	}
	return append(out, compare("", old, now)...), nil
}

// compare lists the keys whose values differ.
func compare(path string, old, now tree) []string {
	names := map[string]bool{}
	for _, t := range []tree{old, now} {
		for name := range t {
			names[name] = true
		}
	}
	var out []string
	for name := range names {
		at := strings.TrimPrefix(path+"."+bareOrQuoted(name), ".")
		a, aTable := old[name].(map[string]any)
		b, bTable := now[name].(map[string]any)
		switch {
		case aTable && bTable:
			out = append(out, compare(at, a, b)...)
		case !reflect.DeepEqual(old[name], now[name]):
			out = append(out, fmt.Sprintf("%s would become %v, and was %v", at, now[name], old[name]))
		}
	}
	slices.Sort(out)
	return out
}

// ErrNotOurs says that a file is not removed, because it is not what cleave
// wrote.
var ErrNotOurs = errors.New("the file is not as cleave wrote it")

// Remove takes the drop-in away, and reports whether there was one. One that
// was not written by cleave, or was changed since, stays: [ErrNotOurs].
func Remove(path string) (bool, error) {
	file, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("remove the drop-in: %w", err)
	}
	switch state, _ := inspect(file); state {
	case foreign, absent:
		return false, fmt.Errorf("remove %s: %w: it was not written by cleave; look at it and remove it by hand", path, ErrNotOurs)
	case edited:
		return false, fmt.Errorf("remove %s: %w: it was changed since; look at it and remove it by hand", path, ErrNotOurs)
	case written:
	}
	return true, removeFile(path)
}

func (t Target) dump(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, dumpTimeout)
	defer cancel()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, t.Containerd, "--config", t.MainFile, "config", "dump")
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("ask containerd for its configuration: %w: name the program with --containerd", err)
	}
	if err != nil {
		return nil, fmt.Errorf("ask containerd for its configuration (%s): %w\n%s", cmd, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}

// backup copies a file into the backup folder, named by its content, so that
// none is ever overwritten by another.
func (t Target) backup(path string) error {
	old, err := readFile(path)
	if err != nil {
		return fmt.Errorf("back up the drop-in: %w", err)
	}
	if err := os.MkdirAll(t.BackupDir, 0o700); err != nil {
		return fmt.Errorf("make the folder of backups: %w", err)
	}
	name := filepath.Base(path) + "." + checksum(string(old))[:12]
	return replaceFile(filepath.Join(t.BackupDir, name), old)
}

// readFile reads a regular file; a missing one is fs.ErrNotExist.
func readFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	if info.Size() > maxFileBytes {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, maxFileBytes)
	}
	text, err := os.ReadFile(path)
	if err == nil && text == nil {
		text = []byte{}
	}
	return text, err
}

// replaceFile writes a file in one step: whoever reads it sees the old or the
// new one, also after a power cut.
func replaceFile(path string, content []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*.tmp")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write %s: %w", path, err), ignoreMissing(os.Remove(f.Name())))
		}
	}()
	_, err = f.Write(content)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove the drop-in: %w", err)
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("sync the folder %s: %w", path, err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync the folder %s: %w", path, err)
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
