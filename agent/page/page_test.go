package page

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

func TestName(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, in, want string }{
		{"plain", "/var/log/pods/a b", "/var/log/pods/a b"},
		{"letters", "größe-日本", "größe-日本"},
		{"no UTF-8", "a\xff\xfeb", `a\xff\xfeb`},
		{"half a letter", "a\xc3", `a\xc3`},
		{"line break", "a\nb\tc", `a\nb\tc`},
		{"terminal", "\x1b[2Jx\x7f", `\x1b[2Jx\x7f`},
		{"other direction", "a\u202egpj.exe", `a\u202egpj.exe`},
		{"backslash", `a\xff`, `a\\xff`},
		{"replacement letter itself", "\ufffd", "\ufffd"},
		{"nothing", "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if got := Name(tc.in); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// FuzzName: no two names look alike, and none has anything that changes a terminal.
func FuzzName(f *testing.F) {
	f.Add("a\xff", `a\xff`)
	f.Add("\n", `\n`)
	f.Fuzz(func(t *testing.T, a, b string) {
		if a != b && Name(a) == Name(b) {
			t.Errorf("%q and %q are both %s", a, b, Name(a))
		}
		if strings.ContainsFunc(Name(a), func(r rune) bool { return r < ' ' || r == 0x7f }) {
			t.Errorf("%q has control characters", Name(a))
		}
	})
}

func TestYAML(t *testing.T) {
	t.Parallel()
	type inner struct {
		Text  string  `json:"text"`
		Bytes uint64  `json:"bytes"`
		Part  float64 `json:"part"`
	}
	value := struct {
		B     string  `json:"b"`
		A     []inner `json:"a"`
		Empty []int   `json:"empty"`
		Yes   bool    `json:"yes"`
	}{B: "<yes>\n2", A: []inner{{"no", 1<<64 - 1, 0.5}, {"123", 0, 1e21}, {"größe \"x\": #", 7, 0}}, Yes: true}
	var out strings.Builder
	if err := YAML(&out, value); err != nil {
		t.Fatal(err)
	}
	want := `b: |-
  <yes>
  2
a:
  - text: "no"
    bytes: 18446744073709551615
    part: 0.5
  - text: "123"
    bytes: 0
    part: 1e+21
  - text: 'größe "x": #'
    bytes: 7
    part: 0
empty: null
"yes": true
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
	// What is read back is what JSON would have given.
	var fromYAML, fromJSON map[string]any
	if err := yaml.Unmarshal([]byte(out.String()), &fromYAML); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &fromJSON); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(fromJSON, fromYAML); diff != "" {
		t.Error(diff)
	}
}
