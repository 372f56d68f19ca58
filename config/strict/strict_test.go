package strict

import (
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// TestKeys: what is no mapping of names, each once, is a fault with its place;
// the rest is visited all the same.
func TestKeys(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, text, visited, faults string }{
		{"good", "a: 1\nb: 2\n", "a b", ""},
		{"twice", "a: 1\na: 2\nb: 3\n", "a b", "f:2:1: a: is given twice, first on line 1"},
		{"a list", "- a\n", "", "f:1:1: the file must be keys with values below them (key: value), not a list"},
		{"a key that is none", "? [x]\n: 1\nb: 2\n", "b", "f:1:3: a key must be a name, not a list"},
		{"an anchor", "&x a: 1\nb: 2\n", "b", "f:1:1: anchors and aliases (& and *) are not supported"},
		{"a tag", "!x a: 1\n", "", "f:1:1: tags (!) are not supported"},
		{"two documents", "a: 1\n---\nb: 2\n", "a", "f:2:1: a second document starts here; the file must hold one"},
		{"no YAML", "a: b: c\n", "", "f:1:1: not YAML: mapping values are not allowed in this context"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p := &Parser{File: "f"}
			var visited []string
			if root := p.Document([]byte(tc.text)); root != nil {
				p.Keys(root, "", "the file", func(key, _ *yaml.Node, path string) {
					if path != key.Value {
						t.Errorf("path %s of %s", path, key.Value)
					}
					visited = append(visited, key.Value)
				})
			}
			if got := strings.Join(visited, " "); got != tc.visited {
				t.Errorf("visited %q, want %q", got, tc.visited)
			}
			if got := p.Faults.Sorted().Error(); got != tc.faults {
				t.Errorf("faults %q, want %q", got, tc.faults)
			}
		})
	}
}

func TestClosest(t *testing.T) {
	t.Parallel()
	known := []string{"endpoint", "period", "on"}
	for key, want := range map[string]string{"endpiont": "endpoint", "Period": "period", "perod": "period", "no": "on", "something": "", "xy": ""} {
		if got := Closest(key, known); got != want {
			t.Errorf("%s: %q, want %q", key, got, want)
		}
	}
}
