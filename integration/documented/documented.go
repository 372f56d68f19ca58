// Package documented finds the command lines that the documentation has people type, or speaks of, so that tests can hold it to what
// cleave understands (cmd/cleave) and run them (integration/lab).
package documented

import (
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
)

// Pages are the files that people read, below the checkout, without the page of all commands, which is written from them.
func Pages(checkout string) ([]string, error) {
	out := []string{filepath.Join(checkout, "README.md"), filepath.Join(checkout, "CONTRIBUTING.md")}
	err := filepath.WalkDir(filepath.Join(checkout, "docs"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && filepath.Ext(path) == ".md" && d.Name() != "cli.md" {
			out = append(out, path)
		}
		return err
	})
	return out, err
}

// aCommand finds what docs have people type, or speak of, in code.
var aCommand = regexp.MustCompile(`(?m)^(?:\s*(?:[$#] )?(?:sudo )?(?:bin/)?)(cleave(?: [^\n]*)?)|` + "`" + `(?:sudo )?(?:bin/)?(cleave [a-z][^` + "`" + `\n]*)` + "`")

// afterIt begins what follows a command on its line.
var afterIt = regexp.MustCompile(` (#|\||>|&&|;)|;`)

// Lines gives what is typed in a page's blocks of code, and what stands in code within a sentence.
func Lines(text string) (out []string) {
	inCode := false
	for line := range strings.Lines(text) {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			inCode = !inCode
			continue
		}
		for _, m := range aCommand.FindAllStringSubmatch(line, -1) {
			switch {
			case inCode && m[1] != "":
				out = append(out, strings.TrimSpace(afterIt.Split(m[1], 2)[0]))
			case !inCode && m[2] != "":
				out = append(out, m[2])
			}
		}
	}
	return out
}
