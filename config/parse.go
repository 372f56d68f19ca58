package config

import (
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/cleave-cri/cleave/config/strict"
)

// Parse reads a configuration from data; keys that are not in it have their
// defaults. name stands for the file in messages.
//
// Whatever is wrong is an error of type Faults, which has all faults: syntax,
// unknown and repeated keys, wrong types, values that Validate refuses, a second
// document. Anchors, aliases, merge keys and explicit tags are refused, so that
// the file is what it looks like. If the version is not the known one, only that
// is reported, because everything else may mean something else there.
func Parse(name string, data []byte) (Config, error) {
	p := &parser{Parser: strict.Parser{File: name}, places: map[string]place{}}
	c := p.parse(data)
	if len(p.Faults) > 0 {
		return Config{}, p.Faults.Sorted()
	}
	return c, nil
}

// parser collects what is wrong with one file.
type parser struct {
	strict.Parser
	// places is where each key's value was seen.
	places map[string]place
}

type place struct {
	line, column int
	bad          bool // a fault was reported there already
}

func (p *parser) parse(data []byte) Config {
	start := &yaml.Node{Line: 1, Column: 1}
	if len(data) > maxFileBytes {
		p.Fault(start, "", "the file is larger than %s", strict.FormatBytes(maxFileBytes))
		return Config{}
	}
	c := Default()
	root := p.Document(data)
	switch {
	case len(p.Faults) > 0:
		return Config{}
	case root == nil || strict.IsNull(root):
		p.Fault(start, "version", "is missing; write version: %d", Version)
		return Config{}
	case !p.version(root):
		return Config{}
	}
	all := schema(&c)
	p.section(root, all, all, "")
	c.Settle()
	p.validate(c)
	return c
}

// version looks for a known version before anything else is looked at.
func (p *parser) version(root *yaml.Node) bool {
	if root.Kind != yaml.MappingNode {
		return true // section says what is wrong
	}
	for i := 0; i+1 < len(root.Content); i += 2 {
		if root.Content[i].Value != "version" {
			continue
		}
		n, got := root.Content[i+1], 0
		if n.Kind != yaml.ScalarNode || (intValue{&got}).decode(n) != nil {
			return true
		}
		if got != Version {
			p.Fault(n, "version", "%s", versionMessage(got))
			return false
		}
		return true
	}
	p.Fault(root, "version", "is missing; write version: %d", Version)
	return false
}

func versionMessage(got int) string {
	return fmt.Sprintf("is %d, but this cleave knows version %d only", got, Version)
}

// section decodes the mapping n. path is that of n, empty for the whole file;
// all is the schema of the whole file.
func (p *parser) section(n *yaml.Node, s, all section, path string) {
	if !p.Plain(n, path) || (path != "" && strict.IsNull(n)) {
		return
	}
	what := "the file"
	if path != "" {
		what = "this"
	}
	p.Keys(n, path, what, func(key, value *yaml.Node, keyPath string) {
		f, ok := s.find(key.Value)
		if !ok {
			p.Fault(key, keyPath, "unknown key%s", hint(key.Value, s, all, path))
			return
		}
		before := len(p.Faults)
		switch {
		case f.sub != nil:
			p.section(value, f.sub, all, keyPath)
		case f.list != nil:
			p.list(value, f.list, keyPath)
		default:
			p.value(value, f.value, keyPath)
		}
		p.places[keyPath] = place{line: value.Line, column: value.Column, bad: len(p.Faults) > before}
	})
}

func (p *parser) value(n *yaml.Node, v value, path string) {
	switch {
	case !p.Plain(n, path):
	case n.Kind != yaml.ScalarNode:
		p.Fault(n, path, "must be one value, not %s", strict.KindOf(n))
	case strict.IsNull(n):
		p.Fault(n, path, "has no value; leave the key out for the default")
	default:
		if err := v.decode(n); err != nil {
			p.Fault(n, path, "%s", err)
		}
	}
}

// list decodes a list of texts, each once; an empty one is nil.
func (p *parser) list(n *yaml.Node, to *[]string, path string) {
	switch {
	case !p.Plain(n, path):
		return
	case strict.IsNull(n):
		p.Fault(n, path, "has no value; leave the key out for the default, or write [] for an empty list")
		return
	case n.Kind != yaml.SequenceNode:
		p.Fault(n, path, "must be a list, such as [a, b], not %s", strict.KindOf(n))
		return
	}
	var list []string
	for _, element := range n.Content {
		var text string
		before := len(p.Faults)
		p.value(element, textValue{&text}, path)
		switch {
		case len(p.Faults) > before:
		case slices.Contains(list, text):
			p.Fault(element, path, "%s is listed twice", strict.Shown(text))
		default:
			list = append(list, text)
		}
	}
	*to = list
}

// validate adds what Validate says, at the places of the file.
func (p *parser) validate(c Config) {
	for _, f := range c.faults() {
		at, ok := p.places[f.Key]
		if !ok {
			at, ok = p.places[f.Other]
		}
		if !ok {
			at = place{line: 1, column: 1}
		}
		if at.bad {
			continue
		}
		f.File, f.Line, f.Column = p.File, at.line, at.column
		p.Faults = append(p.Faults, f)
	}
}

func (s section) find(key string) (field, bool) {
	for _, f := range s {
		if f.key == key {
			return f, true
		}
	}
	return field{}, false
}

// hint says which key may have been meant: one of this section that is spelled
// much alike, or one of another section with this very name.
func hint(key string, s, all section, path string) string {
	known := make([]string, len(s))
	for i, f := range s {
		known[i] = f.key
	}
	if best := strict.Closest(key, known); best != "" {
		return fmt.Sprintf("; did you mean %q?", best)
	}
	var elsewhere []string
	for _, f := range all {
		if f.key == key {
			elsewhere = append(elsewhere, f.key)
		}
		if _, ok := f.sub.find(key); ok {
			elsewhere = append(elsewhere, f.key+"."+key)
		}
	}
	if len(elsewhere) > 0 {
		return "; there is " + strings.Join(elsewhere, ", ")
	}
	where := "the file"
	if path != "" {
		where = path
	}
	return fmt.Sprintf("; %s has %s", where, strings.Join(known, ", "))
}
