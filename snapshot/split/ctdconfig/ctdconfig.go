// Package ctdconfig makes the containerd configuration that cleave needs: a drop-in
// file for the split snapshotter, and one that moves containerd's socket. Each is
// planned purely from what containerd's configuration is now, and changes nothing
// else.
//
// It knows containerd's configuration and nothing of the snapshotter itself.
// cmd may import it; it imports nothing of ours.
package ctdconfig

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// Snapshotter is the name under which containerd knows the split snapshotter.
// It can't be "overlayfs": two plugins of one name end containerd (CTD-36).
const Snapshotter = "cleave"

// Usual places.
const (
	DefaultMainFile = "/etc/containerd/config.toml"
	DefaultDropIn   = "/etc/containerd/conf.d/99-cleave-snapshotter.toml"
)

// The versions of containerd's configuration that are understood. Version 2 has
// the CRI in one plugin, 3 in several; 4 moves the server's own keys, which are
// none of ours (containerd 2.4, cmd/containerd/server/config).
const (
	oldestVersion = 2
	newestVersion = 4
	// oldestDumped is the oldest that a supported containerd itself speaks: 2.0
	// speaks 3. One that speaks 2 is a 1.x, where a drop-in replaces a plugin's
	// whole section instead of adding to it.
	oldestDumped = 3
	// oldestWritten is the oldest that a drop-in is written in; see versionFor.
	oldestWritten = 3
)

// Options are what the drop-in shall say.
type Options struct {
	// Address is the absolute path of the snapshotter's socket.
	Address string
	// ImageRoot is the absolute path of the folder for image layers. containerd
	// tells it to the kubelet as the image filesystem (CTD-4).
	ImageRoot string
	// Platform is what images are unpacked for, such as "linux/amd64".
	Platform string
	// RemapIDs declares that the snapshotter maps user and group ids at the
	// mount, so that a pod with a user namespace needs no copy of its image
	// (CTD-30).
	RemapIDs bool
	// Rebase declares that layers may be unpacked side by side (CTD-34).
	Rebase bool
	// MaxConcurrentUnpacks is how many layers of an image containerd unpacks at
	// a time. 0 leaves what is configured; containerd's default is 1.
	MaxConcurrentUnpacks int
	// DropIn is the absolute path of the file to write.
	DropIn string
}

// Facts are what a plan is made from.
type Facts struct {
	// Dump is what `containerd config dump` prints: all files put together, in
	// the newest version that this containerd speaks.
	Dump []byte
	// MainPath is the absolute path of the main file, Main its content.
	MainPath string
	Main     []byte
	// DropIn is what there is at Options.DropIn, nil if nothing.
	DropIn []byte
}

// Plan says what is to be done. It is a value: making one changes nothing.
type Plan struct {
	// Path and Content are the file to write.
	Path    string
	Content []byte
	// Unchanged says that the file has this content already.
	Unchanged bool
	// Replaces says that another file of ours is there.
	Replaces bool
	// ImportLine is the line that the main file needs, so that it reads the
	// drop-in; empty if it reads it. ImportHint says where the line belongs.
	ImportLine, ImportHint string
	// Conflicts are what forbids writing. An empty list allows it.
	Conflicts []Conflict
	// Notes are for people: what will be different and is not obvious.
	Notes []string
}

// Conflict is something in containerd's configuration that forbids the
// snapshotter.
type Conflict struct {
	// Key is where in containerd's configuration, Reason what is wrong there,
	// Remedy what to do about it.
	Key, Reason, Remedy string
}

// String gives all of it in one line.
func (c Conflict) String() string { return c.Key + ": " + c.Reason + ": " + c.Remedy }

// ErrConflict says that a plan can't be carried out.
var ErrConflict = errors.New("containerd's configuration does not allow it")

// Err is nil if the plan may be carried out, else [ErrConflict] with all that
// forbids it, a line each.
func (p Plan) Err() error {
	if len(p.Conflicts) == 0 && p.ImportLine == "" {
		return nil
	}
	var lines []string
	for _, c := range p.Conflicts {
		lines = append(lines, "  "+c.String())
	}
	if p.ImportLine != "" {
		lines = append(lines, "  "+p.ImportHint+":", "    "+p.ImportLine)
	}
	return fmt.Errorf("%w:\n%s", ErrConflict, strings.Join(lines, "\n"))
}

// SyntaxError is a file that is no TOML.
type SyntaxError struct {
	File string
	// Line and Column count from 1; 0 means that no place is known.
	Line, Column int
	Message      string
}

// Error gives "file:line:column: message".
func (e SyntaxError) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("%s: %s", e.File, e.Message)
	}
	return fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, e.Message)
}

// parse decodes a file into a tree.
func parse(name string, text []byte) (tree, error) {
	var t tree
	err := toml.Unmarshal(text, &t)
	if err == nil {
		return t, nil
	}
	out := SyntaxError{File: name, Message: strings.TrimPrefix(err.Error(), "toml: ")}
	var at *toml.DecodeError
	if errors.As(err, &at) {
		out.Line, out.Column = at.Position()
	}
	return nil, out
}

// Make plans the drop-in. The error is a [SyntaxError], or says which option or
// version can't be worked with.
func Make(f Facts, o Options) (Plan, error) {
	if err := o.check(); err != nil {
		return Plan{}, err
	}
	effective, err := parse("containerd config dump", f.Dump)
	if err != nil {
		return Plan{}, err
	}
	main, err := parse(f.MainPath, f.Main)
	if err != nil {
		return Plan{}, err
	}
	version, err := versionFor(f.MainPath, main, effective)
	if err != nil {
		return Plan{}, err
	}
	unpack, err := unpackEntries(effective, o.Platform)
	if err != nil {
		return Plan{}, err
	}
	p := Plan{Path: o.DropIn, Content: content(version, o, unpack)}
	p.Conflicts = conflicts(effective, f.DropIn, o)
	p.Notes = notes(effective, o)
	p.ImportLine, p.ImportHint = importLine(f.MainPath, main, o.DropIn)
	switch state, _ := inspect(f.DropIn); {
	case slices.Equal(f.DropIn, p.Content):
		p.Unchanged = true
		// That it is there does not say that it has its effect.
		without, err := Verify(f.Dump, f.Dump, o)
		if err != nil {
			return Plan{}, err
		}
		if len(p.Conflicts) > 0 {
			without = nil // what is wrong was said better
		}
		for _, w := range without {
			p.Conflicts = append(p.Conflicts, Conflict{o.DropIn, "the file is there and has no effect: " + w, "take that away, or give the drop-in a name that comes later"})
		}
	case state == foreign:
		p.Conflicts = append(p.Conflicts, Conflict{o.DropIn, "the file is there and was not written by cleave", "move it away"})
	case state != absent:
		p.Replaces = true
	}
	return p, nil
}

func (o Options) check() error {
	for _, p := range []struct{ name, value string }{{"socket", o.Address}, {"image root", o.ImageRoot}, {"drop-in", o.DropIn}} {
		if !filepath.IsAbs(p.value) || strings.ContainsFunc(p.value, isControl) {
			return fmt.Errorf("plan containerd's configuration: the %s %q must be an absolute path without control characters", p.name, p.value)
		}
	}
	if o.Platform == "" || strings.ContainsFunc(o.Platform, isControl) {
		return fmt.Errorf("plan containerd's configuration: platform %q: name one such as linux/amd64", o.Platform)
	}
	if o.MaxConcurrentUnpacks < 0 {
		return fmt.Errorf("plan containerd's configuration: %d layers at a time: choose 1 or more, or 0 to leave it as it is", o.MaxConcurrentUnpacks)
	}
	return nil
}

// versionFor chooses the version to write in: that of the main file, so that
// both look alike and go back to an older containerd together. Beside a main
// file of version 2 it is 3: of version 2 containerd reads the snapshotter only
// from a file that also lists runtimes (containerd 2.4, plugins/cri/images,
// migrateConfig), and it converts each file before it puts them together.
func versionFor(path string, main, effective tree) (int, error) {
	dumped, _ := effective.integer("version")
	version, given := main.integer("version")
	switch {
	case dumped < oldestDumped:
		return 0, fmt.Errorf("this containerd speaks configuration version %d: containerd before 2.0 is not supported: upgrade containerd", dumped)
	case dumped > newestVersion:
		return 0, fmt.Errorf("this containerd speaks configuration version %d, and this cleave knows up to %d: upgrade cleave", dumped, newestVersion)
	case !given:
		return 0, fmt.Errorf("%s has no version, which means version 1: add `version = %d` as its first line if it is written so, or renew it with `containerd config migrate`", path, oldestDumped)
	case version < oldestVersion:
		return 0, fmt.Errorf("%s has version %d, which containerd 2 does not read well: renew it with `containerd config migrate`", path, version)
	case version > dumped:
		return 0, fmt.Errorf("%s has version %d, and this containerd speaks up to %d: it would not start with that file", path, version, dumped)
	}
	return max(version, oldestWritten), nil
}

// Plugins that are looked at, by their names in what containerd prints.
const (
	pluginImages   = "io.containerd.cri.v1.images"
	pluginRuntime  = "io.containerd.cri.v1.runtime"
	pluginTransfer = "io.containerd.transfer.v1.local"
	pluginOverlay  = "io.containerd.snapshotter.v1.overlayfs"
	pluginErofs    = "io.containerd.snapshotter.v1.erofs"
	pluginCRI      = "io.containerd.grpc.v1.cri"

	differ    = "walking"
	overlayfs = "overlayfs"
)

// needed are plugins without which pods can't run on the snapshotter, or its
// owner can't talk to containerd.
var needed = []string{
	pluginCRI, pluginImages, pluginRuntime, pluginTransfer,
	"io.containerd.differ.v1." + differ,
	"io.containerd.service.v1.snapshots-service", "io.containerd.service.v1.introspection-service",
	"io.containerd.grpc.v1.snapshots", "io.containerd.grpc.v1.leases", "io.containerd.grpc.v1.introspection",
	"io.containerd.metadata.v1.bolt", "io.containerd.gc.v1.scheduler",
}

// conflicts lists what in the effective configuration forbids the snapshotter.
func conflicts(effective tree, dropIn []byte, o Options) []Conflict {
	var out []Conflict
	for _, id := range effective.texts("disabled_plugins") {
		if slices.Contains(needed, id) {
			out = append(out, Conflict{"disabled_plugins", id + " is disabled and is needed", "take it out of the list"})
		}
	}
	if there := effective.table("proxy_plugins", Snapshotter); there != nil && !ours(there, dropIn) && !same(there, o) {
		out = append(out, Conflict{
			"proxy_plugins." + Snapshotter,
			fmt.Sprintf("there is a proxy plugin of this name with other values (%s)", describe(there)),
			"take it out of the configuration, or make the values those of `cleave containerd-config`",
		})
	}
	// containerd counts the default snapshotter's containers only, and reports
	// all others as empty (CTD-14).
	for _, at := range []struct {
		plugin string
		path   []string
	}{{pluginRuntime, []string{"containerd", "runtimes"}}, {pluginImages, []string{"runtime_platforms"}}} {
		handlers := effective.table(append([]string{"plugins", at.plugin}, at.path...)...)
		for _, name := range slices.Sorted(maps.Keys(handlers)) {
			if sn, _ := handlers.text(name, "snapshotter"); sn != "" && sn != Snapshotter {
				out = append(out, Conflict{
					key(at.plugin, append(at.path, name, "snapshotter")...),
					fmt.Sprintf("is %q: containerd reports 0 bytes for containers of a snapshotter that is not the default", sn),
					"take the key out, so that all runtimes use one snapshotter",
				})
			}
		}
	}
	// Both make containerd pull by an older path, which does not read
	// unpack_config and does not unpack side by side (CTD-52).
	if v, ok := effective.boolean("plugins", pluginImages, "disable_snapshot_annotations"); ok && !v {
		out = append(out, Conflict{key(pluginImages, "disable_snapshot_annotations"), "is false, which makes containerd pull images by its older path", "take the key out or set it to true"})
	}
	if v, _ := effective.boolean("plugins", pluginImages, "discard_unpacked_layers"); v {
		out = append(out, Conflict{key(pluginImages, "discard_unpacked_layers"), "is true, which makes containerd pull images by its older path", "take the key out or set it to false"})
	}
	return out
}

// ours reports whether a proxy plugin is just what our own drop-in says.
func ours(there tree, dropIn []byte) bool {
	if state, _ := inspect(dropIn); state != written {
		return false
	}
	own, err := parse("", dropIn)
	if err != nil {
		return false
	}
	return describe(there) == describe(own.table("proxy_plugins", Snapshotter))
}

// same reports whether a proxy plugin is what we would write.
func same(there tree, o Options) bool {
	return describe(there) == describe(tree{
		"type": "snapshot", "address": o.Address, "exports": map[string]any{"root": o.ImageRoot}, "capabilities": anys(o.capabilities()),
	})
}

// describe writes a proxy plugin's values in a fixed form.
func describe(plugin tree) string {
	kind, _ := plugin.text("type")
	address, _ := plugin.text("address")
	platform, _ := plugin.text("platform")
	capabilities := plugin.texts("capabilities")
	slices.Sort(capabilities)
	parts := []string{"type " + cmp.Or(kind, "none"), "address " + cmp.Or(address, "none"), "capabilities " + cmp.Or(strings.Join(capabilities, " "), "none")}
	if platform != "" {
		parts = append(parts, "platform "+platform)
	}
	exports := plugin.table("exports")
	for _, name := range slices.Sorted(maps.Keys(exports)) {
		// containerd adds the address itself when it prints.
		if name != "address" {
			parts = append(parts, fmt.Sprintf("%s %v", name, exports[name]))
		}
	}
	return strings.Join(parts, ", ")
}

func (o Options) capabilities() []string {
	var out []string
	if o.RemapIDs {
		out = append(out, "remap-ids", "only-remap-ids")
	}
	if o.Rebase {
		out = append(out, "rebase")
	}
	return out
}

// notes says what changes for people who look elsewhere.
func notes(effective tree, o Options) []string {
	var out []string
	if sn, _ := effective.text("plugins", pluginImages, "snapshotter"); sn != "" && sn != Snapshotter {
		out = append(out, fmt.Sprintf("containers on snapshotter %q stay there until they are replaced, and containerd reports 0 bytes for them meanwhile; images are unpacked again on first use: drain the node before the restart of containerd", sn))
	}
	if reason := olderPull(effective); reason != "" {
		out = append(out, reason+": containerd pulls by its older path, where max_concurrent_unpacks does not count")
	}
	if o.MaxConcurrentUnpacks > 1 && !o.Rebase {
		out = append(out, "several unpacks at a time change nothing within one image, because the snapshotter does not declare rebase")
	}
	if effective.value("plugins", pluginTransfer, "unpack_config") == nil && effective.table("plugins", pluginErofs) != nil {
		out = append(out, "containerd's own entry for images in EROFS form is not kept, because unpack_config replaces the built-in list; add it to the main file's unpack_config if you use such images")
	}
	return out
}

// olderPull says what makes containerd pull by its older path, besides the keys
// that are conflicts (containerd 2.4, internal/cri/config, CheckLocalImagePullConfigs).
func olderPull(effective tree) string {
	if v, known := effective.boolean("plugins", pluginImages, "use_local_image_pull"); v {
		return "use_local_image_pull is true"
	} else if !known {
		return "" // an older containerd, which has one path only
	}
	for _, name := range []string{"mirrors", "configs", "auths"} {
		if len(effective.table("plugins", pluginImages, "registry", name)) > 0 {
			return "registry." + name + " is set"
		}
	}
	if n, ok := effective.integer("plugins", pluginImages, "max_concurrent_downloads"); ok && n != 3 {
		return fmt.Sprintf("max_concurrent_downloads of %s is %d", pluginImages, n)
	}
	if v, _ := effective.boolean("plugins", pluginImages, "image_pull_with_sync_fs"); v {
		return "image_pull_with_sync_fs is true"
	}
	return ""
}

// importLine says which line the main file needs to read the drop-in. Only what
// a file itself lists is read; the pattern that `config dump` shows by default
// is not (containerd 2.4, LoadConfigWithPlugins).
func importLine(mainPath string, main tree, dropIn string) (line, hint string) {
	imports := main.texts("imports")
	for _, pattern := range imports {
		if imported(mainPath, pattern, dropIn) {
			return "", ""
		}
	}
	all := make([]string, 0, len(imports)+1)
	for _, i := range append(slices.Clone(imports), filepath.Join(filepath.Dir(dropIn), "*.toml")) {
		all = append(all, quote(i))
	}
	line = "imports = [" + strings.Join(all, ", ") + "]"
	if len(imports) > 0 || main.value("imports") != nil {
		return line, mainPath + " does not import the drop-in: replace its line of imports by this one"
	}
	return line, mainPath + " imports no drop-ins: add this line below `version`, before the first table"
}

// imported reports whether an entry of a file's imports names a path
// (containerd 2.4, resolveImports).
func imported(file, pattern, path string) bool {
	pattern = filepath.Clean(pattern)
	if !filepath.IsAbs(pattern) {
		pattern = filepath.Join(filepath.Dir(file), pattern)
	}
	if !strings.Contains(pattern, "*") {
		return pattern == filepath.Clean(path)
	}
	ok, err := filepath.Match(pattern, filepath.Clean(path))
	return err == nil && ok
}

// The first line of a drop-in ends in the checksum of all that follows it.
const mark = "# Written by `cleave containerd-config --write`; sha256 of what follows: "

// state is whose a file is.
type state int

const (
	absent state = iota
	// foreign: not written by us.
	foreign
	// edited: written by us and changed since.
	edited
	// written: as we wrote it.
	written
)

func inspect(file []byte) (state, string) {
	if file == nil {
		return absent, ""
	}
	first, rest, _ := strings.Cut(string(file), "\n")
	sum, ok := strings.CutPrefix(first, mark)
	switch {
	case !ok:
		return foreign, ""
	case sum != checksum(rest):
		return edited, rest
	default:
		return written, rest
	}
}

func checksum(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }
