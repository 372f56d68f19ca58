package engine

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestEveryRuleIsShown holds the list of the kubelet's rules and the tests
// together. A rule is shown by a test that has it in its name, as in
// TestRANK16_…, or in the name of a case, as in "RANK-16: …". Or
// testdata/elsewhere.txt says why not.
func TestEveryRuleIsShown(t *testing.T) {
	t.Parallel()
	rules := lines(t, "testdata/rules.txt")
	elsewhere := map[string]bool{}
	for _, line := range lines(t, "testdata/elsewhere.txt") {
		rule, reason, _ := strings.Cut(line, " ")
		if len(strings.Fields(reason)) < 3 {
			t.Errorf("testdata/elsewhere.txt gives no reason for %s", rule)
		}
		if !slices.Contains(rules, rule) {
			t.Errorf("testdata/elsewhere.txt has %s, which is no rule", rule)
		}
		elsewhere[rule] = true
	}
	shown := shownRules(t, "*_test.go", "garbage/*_test.go")
	for _, rule := range rules {
		switch {
		case !shown[rule] && !elsewhere[rule]:
			t.Errorf("no test shows %s, and testdata/elsewhere.txt does not say why", rule)
		case shown[rule] && elsewhere[rule]:
			t.Errorf("%s is shown by a test, and testdata/elsewhere.txt says that it is not", rule)
		}
	}
	for rule := range shown {
		if !slices.Contains(rules, rule) && regexp.MustCompile(`^(THR|SYN|REC|RANK|LSE|ACC|IGC|CGC|CON|ADM|NAL|LAY|OBS|SIG|LOG)-`).MatchString(rule) {
			t.Errorf("a test shows %s, which is no rule", rule)
		}
	}
	if len(rules) < 200 || len(shown) < 150 {
		t.Errorf("%d rules and %d shown: something is not read", len(rules), len(shown))
	}
}

// lines are a file's, without empty ones and comments.
func lines(t *testing.T, file string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			out = append(out, line)
		}
	}
	return out
}

// shownRules reads the names of tests, and the names of cases: texts that
// begin with a rule and a colon, or name further ones after a comma or
// semicolon.
func shownRules(t *testing.T, patterns ...string) map[string]bool {
	t.Helper()
	inName := regexp.MustCompile(`([A-Z]{3,4})(\d+)(?:_|$)`)
	inCase := regexp.MustCompile(`(?:^|[,;] )([A-Z]{3,4}-\d+)\b`)
	out := map[string]bool{}
	for _, pattern := range patterns {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(parsed, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.FuncDecl:
					if name, ok := strings.CutPrefix(n.Name.Name, "Test"); ok {
						for _, m := range inName.FindAllStringSubmatch(name, -1) {
							out[m[1]+"-"+m[2]] = true
						}
					}
				case *ast.BasicLit:
					text, err := strconv.Unquote(n.Value)
					if n.Kind != token.STRING || err != nil || !regexp.MustCompile(`^[A-Z]{3,4}-\d+[:,;]`).MatchString(text) {
						return true
					}
					for _, m := range inCase.FindAllStringSubmatch(text, -1) {
						out[m[1]] = true
					}
				}
				return true
			})
		}
	}
	return out
}
