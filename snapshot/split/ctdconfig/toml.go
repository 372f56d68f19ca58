package ctdconfig

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// tree is a decoded TOML table. Its methods take the path of a key and say
// whether there is a value of the kind asked for.
type tree map[string]any

func (t tree) value(path ...string) any {
	var v any = map[string]any(t)
	for _, name := range path {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[name]
	}
	return v
}

// table returns nil if there is none.
func (t tree) table(path ...string) tree {
	if m, ok := t.value(path...).(map[string]any); ok {
		return m
	}
	return nil
}

// list returns nil if there is none.
func (t tree) list(path ...string) []any {
	if l, ok := t.value(path...).([]any); ok {
		return l
	}
	return nil
}

func (t tree) text(path ...string) (string, bool) {
	s, ok := t.value(path...).(string)
	return s, ok
}

func (t tree) boolean(path ...string) (value, ok bool) {
	value, ok = t.value(path...).(bool)
	return value, ok
}

func (t tree) integer(path ...string) (int, bool) {
	n, ok := t.value(path...).(int64)
	return int(n), ok
}

func (t tree) texts(path ...string) []string {
	var out []string
	for _, v := range t.list(path...) {
		if s, ok := v.(string); ok {
			out = append(out, s)
		}
	}
	return out
}

func anys(list []string) []any {
	out := make([]any, len(list))
	for i, s := range list {
		out[i] = s
	}
	return out
}

// key writes the path of a plugin's key as TOML does.
func key(plugin string, path ...string) string {
	return "plugins." + quote(plugin) + "." + strings.Join(path, ".")
}

// unpackEntries is the list unpack_config to write, each entry as TOML lines.
// A list in a drop-in replaces the one before, and any list replaces the
// built-in one (CTD-51). So all that are in effect are repeated, overlayfs is
// kept for whatever still uses it, and ours comes last.
func unpackEntries(effective tree, platform string) ([][]string, error) {
	var entries [][]string
	for i, v := range effective.list("plugins", pluginTransfer, "unpack_config") {
		entry, ok := v.(map[string]any)
		if !ok {
			return nil, fmt.Errorf("copy %s: entry %d is no table", key(pluginTransfer, "unpack_config"), i+1)
		}
		if entry["snapshotter"] == Snapshotter && entry["platform"] == platform {
			continue
		}
		lines, err := encodeTable(entry)
		if err != nil {
			return nil, fmt.Errorf("copy %s: entry %d: %w", key(pluginTransfer, "unpack_config"), i+1, err)
		}
		entries = append(entries, lines)
	}
	// Naming a snapshotter that is disabled would keep the transfer plugin, and
	// with it the CRI, from starting.
	builtIn := effective.value("plugins", pluginTransfer, "unpack_config") == nil
	if builtIn && !slices.Contains(effective.texts("disabled_plugins"), pluginOverlay) {
		entries = append(entries, unpackEntry(platform, overlayfs))
	}
	return append(entries, unpackEntry(platform, Snapshotter)), nil
}

func unpackEntry(platform, snapshotter string) []string {
	// In the order of encodeTable, so that a second plan is the same.
	return []string{"differ = " + quote(differ), "platform = " + quote(platform), "snapshotter = " + quote(snapshotter)}
}

// encodeTable writes a table of plain values, those that say nothing left out.
func encodeTable(t map[string]any) ([]string, error) {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(t)) {
		var text string
		switch v := t[name].(type) {
		case string:
			if v == "" {
				continue
			}
			text = quote(v)
		case bool:
			if !v {
				continue
			}
			text = "true"
		case int64:
			text = strconv.FormatInt(v, 10)
		case []any:
			if len(v) == 0 {
				continue
			}
			all := make([]string, len(v))
			for i, e := range v {
				s, ok := e.(string)
				if !ok {
					return nil, fmt.Errorf("%s holds %v, which is no text", name, e)
				}
				all[i] = quote(s)
			}
			text = "[" + strings.Join(all, ", ") + "]"
		default:
			return nil, fmt.Errorf("%s is %v, of a kind that is not known there", name, v)
		}
		lines = append(lines, bareOrQuoted(name)+" = "+text)
	}
	return lines, nil
}

func bareOrQuoted(name string) string {
	if name != "" && strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") == "" {
		return name
	}
	return quote(name)
}

// quote writes a TOML basic string (toml.io/en/v1.0.0#string).
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case isControl(r):
			fmt.Fprintf(&b, `\u%04X`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// content writes the drop-in.
func content(version int, o Options, unpack [][]string) []byte {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	capabilities := make([]string, 0, len(o.capabilities()))
	for _, c := range o.capabilities() {
		capabilities = append(capabilities, quote(c))
	}
	line("# The split snapshotter for containerd. `cleave containerd-config --remove` takes it away again.")
	line("version = %d", version)
	line("")
	line("[proxy_plugins.%s]", Snapshotter)
	line("type = \"snapshot\"")
	line("address = %s", quote(o.Address))
	line("capabilities = [%s]", strings.Join(capabilities, ", "))
	line("")
	line("# What containerd names as the image filesystem.")
	line("[proxy_plugins.%s.exports]", Snapshotter)
	line("root = %s", quote(o.ImageRoot))
	line("")
	line("# One snapshotter for all pods: of others' containers containerd reports 0 bytes.")
	line("[plugins.%s]", quote(pluginImages))
	line("snapshotter = %s", quote(Snapshotter))
	line("")
	if o.MaxConcurrentUnpacks > 0 {
		line("# How many layers of an image are unpacked at a time.")
		line("[plugins.%s]", quote(pluginTransfer))
		line("max_concurrent_unpacks = %d", o.MaxConcurrentUnpacks)
		line("")
	}
	line("# This list replaces containerd's own, so it repeats what was in effect when it was written.")
	for i, entry := range unpack {
		if i > 0 {
			line("")
		}
		line("[[plugins.%s.unpack_config]]", quote(pluginTransfer))
		for _, l := range entry {
			line("%s", l)
		}
	}
	text := b.String()
	return []byte(mark + checksum(text) + "\n" + text)
}
