package kubelet

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// Limits of what is read from a file. A real one has a few kB.
const (
	maxFileBytes = 1 << 20
	maxNodes     = 100_000 // after aliases were followed
	maxDepth     = 200
)

// kind of a node, by the names of JSON.
type kind string

const (
	null    kind = "null"
	boolean kind = "a boolean"
	number  kind = "a number"
	text    kind = "a string"
	list    kind = "a list"
	object  kind = "a map"
)

// node is a JSON value that knows where it was written. The kubelet turns its
// files into JSON before it decodes them, so what they mean is JSON.
type node struct {
	kind kind
	// text is that of a string, the literal of a number, true or false.
	text  string
	items []*node
	// entries may have one name twice (JSON files only).
	entries []entry
	from    Origin
}

type entry struct {
	key   string
	value *node
}

// get gives the value of the last entry with this very name, or nil.
func (n *node) get(key string) *node {
	for _, e := range slices.Backward(n.entries) {
		if e.key == key {
			return e.value
		}
	}
	return nil
}

func (n *node) set(key string, value *node) {
	for i := range n.entries {
		if n.entries[i].key == key {
			n.entries[i].value = value
			return
		}
	}
	n.entries = append(n.entries, entry{key, value})
}

func (n *node) remove(key string) {
	n.entries = slices.DeleteFunc(n.entries, func(e entry) bool { return e.key == key })
}

// FileError says what is wrong with a file of the kubelet's.
type FileError struct {
	// Path is as the kubelet sees it.
	Path string
	// Line counts from 1; 0 means that the fault is that of the file as a whole.
	Line int
	// Key is the path of the key in the file, or empty.
	Key string
	Err error
}

// Error gives "path:line: key: what is wrong".
func (e *FileError) Error() string {
	out := e.Path + ":"
	if e.Line > 0 {
		out += strconv.Itoa(e.Line) + ":"
	}
	if e.Key != "" {
		out += " " + e.Key + ":"
	}
	return out + " " + e.Err.Error()
}

// Unwrap gives the fault without its place.
func (e *FileError) Unwrap() error { return e.Err }

// file is a configuration file before it is decoded.
type file struct {
	source Source
	data   []byte
}

func (f file) fault(line int, key, format string, args ...any) error {
	return &FileError{Path: f.source.Path, Line: line, Key: key, Err: fmt.Errorf(format, args...)}
}

// Names that every file of the kubelet's must have.
const (
	apiVersion = "kubelet.config.k8s.io/v1beta1"
	kindName   = "KubeletConfiguration"
)

// tree reads the file. Like the kubelet it takes what begins with { for JSON and
// anything else for YAML, of which the first document counts. In a drop-in a
// repeated key is a fault; in the file of --config the last one wins.
func (f file) tree() (*node, error) {
	if len(f.data) == 0 {
		return nil, f.fault(0, "", "the file is empty, which the kubelet refuses")
	}
	strict := f.source.Kind == DropIn
	var root *node
	var err error
	if bytes.HasPrefix(bytes.TrimLeftFunc(f.data, unicode.IsSpace), []byte("{")) {
		root, err = f.json(strict)
	} else {
		root, err = f.yaml(strict)
	}
	if err != nil {
		return nil, err
	}
	if root.kind != object {
		return nil, f.fault(root.from.Line, "", "the file must hold a map, not %s", root.kind)
	}
	for _, want := range []entry{{key: "apiVersion", value: &node{text: apiVersion}}, {key: "kind", value: &node{text: kindName}}} {
		switch got := root.get(want.key); {
		case got == nil:
			return nil, f.fault(0, "", "no %s; the kubelet wants %s: %s", want.key, want.key, want.value.text)
		case got.kind != text || got.text != want.value.text:
			return nil, f.fault(got.from.Line, want.key, "is %s, not %s", shown(got.text), want.value.text)
		}
	}
	return root, nil
}

// reader turns the nodes of one file into ours.
type reader struct {
	file
	strict bool
	nodes  int
}

func (r *reader) make(k kind, s string, line int) (*node, error) {
	if r.nodes++; r.nodes > maxNodes {
		return nil, r.fault(line, "", "more than %d values; aliases (*) that multiply?", maxNodes)
	}
	return &node{kind: k, text: s, from: Origin{Kind: r.source.Kind, Name: r.source.Path, Line: line}}, nil
}

func (f file) yaml(strict bool) (*node, error) {
	var doc yaml.Node
	err := yaml.NewDecoder(bytes.NewReader(f.data)).Decode(&doc)
	switch {
	case errors.Is(err, io.EOF):
		return &node{kind: null}, nil
	case err != nil:
		line, message := 0, strings.TrimPrefix(err.Error(), "yaml: ")
		if m := regexp.MustCompile(`^line (\d+): (?s)(.*)$`).FindStringSubmatch(message); m != nil {
			if n, err := strconv.Atoi(m[1]); err == nil {
				line, message = n, m[2]
			}
		}
		return nil, f.fault(line, "", "not YAML: %s", message)
	case len(doc.Content) == 0:
		return &node{kind: null}, nil
	}
	r := &reader{file: f, strict: strict}
	return r.fromYAML(doc.Content[0], 0)
}

func (r *reader) fromYAML(n *yaml.Node, depth int) (*node, error) {
	if depth > maxDepth {
		return nil, r.fault(n.Line, "", "nested more than %d deep", maxDepth)
	}
	switch n.Kind {
	case yaml.AliasNode:
		return r.fromYAML(n.Alias, depth+1)
	case yaml.SequenceNode:
		out, err := r.make(list, "", n.Line)
		for _, c := range n.Content {
			if err != nil {
				return nil, err
			}
			var item *node
			item, err = r.fromYAML(c, depth+1)
			out.items = append(out.items, item)
		}
		return out, err
	case yaml.MappingNode:
		return r.mapping(n, depth)
	}
	k, s, err := scalar(n)
	if err != nil {
		return nil, r.fault(n.Line, "", "%w", err)
	}
	return r.make(k, s, n.Line)
}

func (r *reader) mapping(n *yaml.Node, depth int) (*node, error) {
	out, err := r.make(object, "", n.Line)
	if err != nil {
		return nil, err
	}
	written := map[string]int{}
	put := func(key string, value *node) { out.set(key, value) }
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		for k.Kind == yaml.AliasNode {
			k = k.Alias
		}
		if k.Kind == yaml.ScalarNode && k.Value == "<<" && k.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) == 0 && (k.Tag == "" || k.Tag == "!" || k.ShortTag() == "!!merge") {
			// What is merged in stands where the merge key stands: later keys win.
			if err := r.mergeKey(v, depth, put); err != nil {
				return nil, err
			}
			continue
		}
		if k.Kind != yaml.ScalarNode {
			return nil, r.fault(k.Line, "", "a key must be a name")
		}
		kind, key, err := scalar(k)
		if err != nil {
			return nil, r.fault(k.Line, "", "%w", err)
		}
		if kind == null {
			return nil, r.fault(k.Line, "", "a key must be a name, not %q", k.Value)
		}
		if before := written[key]; before > 0 && r.strict {
			return nil, r.fault(k.Line, key, "is given twice, first on line %d, which the kubelet refuses in a drop-in", before)
		}
		written[key] = k.Line
		value, err := r.fromYAML(v, depth+1)
		if err != nil {
			return nil, err
		}
		put(key, value)
	}
	return out, nil
}

// mergeKey puts what << names, a map or a list of maps of which the first wins.
func (r *reader) mergeKey(v *yaml.Node, depth int, put func(string, *node)) error {
	merged, err := r.fromYAML(v, depth+1)
	if err != nil {
		return err
	}
	all := []*node{merged}
	if merged.kind == list {
		all = slices.Clone(merged.items)
		slices.Reverse(all)
	}
	for _, m := range all {
		if m.kind != object {
			return r.fault(v.Line, "", "<< must name a map or a list of maps")
		}
		for _, e := range m.entries {
			put(e.key, e.value)
		}
	}
	return nil
}

// The words of YAML 1.1, by which the kubelet reads.
var words = func() map[string]*node {
	out := map[string]*node{}
	add := func(k kind, s string, list ...string) {
		for _, word := range list {
			out[word] = &node{kind: k, text: s}
		}
	}
	add(boolean, "true", "y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON")
	add(boolean, "false", "n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF")
	add(null, "", "", "~", "null", "Null", "NULL")
	return out
}()

var (
	errNotFinite = errors.New("is no number that the kubelet can take")
	plainFloat   = regexp.MustCompile(`^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$`)
	notFinite    = regexp.MustCompile(`^([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$`)
)

// scalar says what a plain or quoted word is by the rules of YAML 1.1, which the
// kubelet's library follows: yes is a boolean there, and 010 is eight.
func scalar(n *yaml.Node) (kind, string, error) {
	if n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) != 0 {
		return text, n.Value, nil
	}
	if n.Style&yaml.TaggedStyle != 0 {
		switch n.ShortTag() {
		case "!!str":
			return text, n.Value, nil
		case "!!bool", "!!int", "!!float", "!!null", "!!timestamp":
		default:
			return "", "", fmt.Errorf("tag %s is not supported here", shown(n.Tag))
		}
	}
	s := n.Value
	if word := words[s]; word != nil {
		return word.kind, word.text, nil
	}
	if notFinite.MatchString(s) {
		return "", "", fmt.Errorf("%s %w", s, errNotFinite)
	}
	if s[0] != '.' && s[0] != '+' && s[0] != '-' && (s[0] < '0' || s[0] > '9') {
		return text, s, nil
	}
	if s[0] == '.' {
		if f, err := strconv.ParseFloat(s, 64); err == nil {
			return floating(f)
		}
		return text, s, nil
	}
	if isTimestamp(s) {
		return text, s, nil
	}
	plain := strings.ReplaceAll(s, "_", "")
	if i, err := strconv.ParseInt(plain, 0, 64); err == nil {
		return number, strconv.FormatInt(i, 10), nil
	}
	if u, err := strconv.ParseUint(plain, 0, 64); err == nil {
		return number, strconv.FormatUint(u, 10), nil
	}
	if plainFloat.MatchString(plain) {
		if f, err := strconv.ParseFloat(plain, 64); err == nil {
			return floating(f)
		}
	}
	return text, s, nil
}

func isTimestamp(s string) bool {
	if len(s) < 5 || s[4] != '-' {
		return false
	}
	for _, format := range []string{"2006-1-2T15:4:5.999999999Z07:00", "2006-1-2t15:4:5.999999999Z07:00", "2006-1-2 15:4:5.999999999", "2006-1-2"} {
		if _, err := time.Parse(format, s); err == nil {
			return true
		}
	}
	return false
}

// floating writes a number as JSON does: 85.0 becomes 85.
func floating(f float64) (kind, string, error) {
	if math.IsInf(f, 0) || math.IsNaN(f) {
		return "", "", errNotFinite
	}
	out, err := json.Marshal(f)
	return number, string(out), err
}

// json reads a JSON file token by token, to know the lines.
func (f file) json(strict bool) (*node, error) {
	r := &reader{file: f, strict: strict}
	d := json.NewDecoder(bytes.NewReader(f.data))
	d.UseNumber()
	lines := &lineCounter{data: f.data, line: 1}
	root, err := r.fromJSON(d, lines, 0)
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, f.fault(lines.at(d), "", "not JSON: something stands after the end of the map")
	}
	return root, nil
}

// lineCounter counts lines up to the decoder's place, which only moves on.
type lineCounter struct {
	data   []byte
	offset int
	line   int
}

func (c *lineCounter) at(d *json.Decoder) int {
	to := min(int(d.InputOffset()), len(c.data))
	c.line += bytes.Count(c.data[c.offset:to], []byte("\n"))
	c.offset = to
	return c.line
}

func (r *reader) fromJSON(d *json.Decoder, lines *lineCounter, depth int) (*node, error) {
	token, err := d.Token()
	line := lines.at(d)
	if err != nil {
		return nil, r.fault(line, "", "not JSON: %w", err)
	}
	if depth > maxDepth {
		return nil, r.fault(line, "", "nested more than %d deep", maxDepth)
	}
	switch v := token.(type) {
	case nil:
		return r.make(null, "", line)
	case bool:
		return r.make(boolean, strconv.FormatBool(v), line)
	case string:
		return r.make(text, v, line)
	case json.Number:
		return r.jsonNumber(v.String(), line)
	case json.Delim:
		if v == '[' {
			return r.jsonList(d, lines, line, depth)
		}
		return r.jsonObject(d, lines, line, depth)
	}
	return nil, r.fault(line, "", "not JSON")
}

// jsonNumber keeps a number as it is written, but for drop-ins, which the
// kubelet decodes and encodes again before it looks at them.
func (r *reader) jsonNumber(s string, line int) (*node, error) {
	if _, err := strconv.ParseInt(s, 10, 64); err != nil && r.strict {
		f, err := strconv.ParseFloat(s, 64)
		if err != nil {
			return nil, r.fault(line, "", "%s %w", shown(s), errNotFinite)
		}
		_, s, err = floating(f)
		if err != nil {
			return nil, r.fault(line, "", "%s %w", shown(s), err)
		}
	}
	return r.make(number, s, line)
}

func (r *reader) jsonList(d *json.Decoder, lines *lineCounter, line, depth int) (*node, error) {
	out, err := r.make(list, "", line)
	for err == nil && d.More() {
		var item *node
		item, err = r.fromJSON(d, lines, depth+1)
		out.items = append(out.items, item)
	}
	if err == nil {
		err = r.closing(d, lines)
	}
	return out, err
}

func (r *reader) jsonObject(d *json.Decoder, lines *lineCounter, line, depth int) (*node, error) {
	out, err := r.make(object, "", line)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for d.More() {
		token, err := d.Token()
		key, ok := token.(string)
		if err != nil || !ok {
			return nil, r.fault(lines.at(d), "", "not JSON: %w", cmpErr(err, "a key must be a name"))
		}
		if seen[key] && r.strict {
			return nil, r.fault(lines.at(d), key, "is given twice, which the kubelet refuses in a drop-in")
		}
		seen[key] = true
		value, err := r.fromJSON(d, lines, depth+1)
		if err != nil {
			return nil, err
		}
		out.entries = append(out.entries, entry{key, value})
	}
	return out, r.closing(d, lines)
}

func (r *reader) closing(d *json.Decoder, lines *lineCounter) error {
	if _, err := d.Token(); err != nil {
		return r.fault(lines.at(d), "", "not JSON: %w", err)
	}
	return nil
}

func cmpErr(err error, otherwise string) error {
	if err != nil {
		return err
	}
	return errors.New(otherwise)
}

// merge lays a drop-in over what there is: JSON merge patch (RFC 7396), by which
// null takes a key away.
func merge(base, patch *node) *node {
	if patch.kind != object {
		return patch
	}
	if base == nil || base.kind != object {
		return pruned(patch)
	}
	out := *base
	out.entries = slices.Clone(base.entries)
	out.from = patch.from
	for _, e := range patch.entries {
		if e.value.kind == null {
			out.remove(e.key)
			continue
		}
		out.set(e.key, merge(out.get(e.key), e.value))
	}
	return &out
}

// pruned leaves out the entries that are null.
func pruned(n *node) *node {
	switch n.kind {
	case object:
		out := *n
		out.entries = nil
		for _, e := range n.entries {
			if e.value.kind != null {
				out.entries = append(out.entries, entry{e.key, pruned(e.value)})
			}
		}
		return &out
	case list:
		out := *n
		out.items = nil
		for _, item := range n.items {
			out.items = append(out.items, pruned(item))
		}
		return &out
	}
	return n
}

// sorted gives the entries in the order of their names, as encoding/json writes
// a map.
func (n *node) sorted() []entry {
	byName := map[string]*node{}
	for _, e := range n.entries {
		byName[e.key] = e.value
	}
	var out []entry
	for _, key := range slices.Sorted(maps.Keys(byName)) {
		out = append(out, entry{key, byName[key]})
	}
	return out
}

// shown quotes a value for a message, cut to a readable length.
func shown(s string) string {
	const most = 60
	if len(s) > most {
		return fmt.Sprintf("%q…", strings.ToValidUTF8(s[:most], ""))
	}
	return fmt.Sprintf("%q", s)
}
