package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cleave-cri/cleave/integration/documented"
)

var update = flag.Bool("update", false, "write docs/cli.md anew")

const docs = "../../docs"

// TestReferenceIsTrue: docs/cli.md is what the commands say of themselves.
func TestReferenceIsTrue(t *testing.T) {
	t.Parallel()
	path := filepath.Join(docs, "cli.md")
	want := reference(root())
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil { //nolint:gosec // a page for everybody
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("docs/cli.md is not what the commands say, go test ./cmd/cleave -update writes it (-commands +page):\n%s", diff)
	}
}

// commands lists all that people can call, in the order of their names.
func commands(cmd *cobra.Command) (out []*cobra.Command) {
	for _, c := range cmd.Commands() {
		if c.Hidden || c.Name() == "help" || c.Name() == "completion" {
			continue
		}
		if c.Runnable() {
			out = append(out, c)
		}
		out = append(out, commands(c)...)
	}
	return out
}

// reference is the page of all commands.
func reference(root *cobra.Command) string {
	var b strings.Builder
	b.WriteString("# Commands\n\nWritten from what the commands say of themselves (`go test ./cmd/cleave -update`). `cleave COMMAND --help` says the same.\n\n")
	all := commands(root)
	b.WriteString("| command | does |\n| --- | --- |\n")
	for _, c := range all {
		fmt.Fprintf(&b, "| [`%s`](#%s) | %s |\n", c.CommandPath(), strings.ReplaceAll(c.CommandPath(), " ", "-"), c.Short)
	}
	for _, c := range all {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n```\n%s\n```\n", c.CommandPath(), strings.TrimSpace(firstOf(c.Long, c.Short)), c.UseLine())
		if c.Example != "" {
			fmt.Fprintf(&b, "\nFor instance:\n\n```\n%s\n```\n", strings.TrimRight(c.Example, "\n"))
		}
		var flags strings.Builder
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden && f.Name != "help" {
				fmt.Fprintf(&flags, "| %s | %s |\n", flagName(f), flagUsage(f))
			}
		})
		if flags.Len() > 0 {
			fmt.Fprintf(&b, "\n| flag | meaning |\n| --- | --- |\n%s", flags.String())
		}
	}
	return b.String()
}

func firstOf(texts ...string) string {
	return texts[slices.IndexFunc(texts, func(s string) bool { return s != "" })]
}

func flagName(f *pflag.Flag) string {
	kind, _ := pflag.UnquoteUsage(f)
	name := "--" + f.Name
	if f.Shorthand != "" {
		name = "-" + f.Shorthand + ", " + name
	}
	if kind != "" {
		name += " " + kind
	}
	return "`" + name + "`"
}

func flagUsage(f *pflag.Flag) string {
	_, usage := pflag.UnquoteUsage(f)
	usage = strings.ReplaceAll(usage, "|", `\|`)
	switch f.DefValue {
	case "", "false", "0", "0s", "[]":
		return usage
	default:
		return usage + " (default `" + f.DefValue + "`)"
	}
}

// TestDocsNameCommandsThatThereAre: each command line in the docs is one that cleave understands: its commands, flags and values.
func TestDocsNameCommandsThatThereAre(t *testing.T) {
	t.Parallel()
	found := 0
	pages, err := documented.Pages("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range documented.Lines(string(text)) {
			found++
			if err := understood(line); err != nil {
				t.Errorf("%s: %q: %v", strings.TrimPrefix(page, "../../"), line, err)
			}
		}
	}
	if found < 80 {
		t.Errorf("only %d command lines were found: what finds them is broken", found)
	}
	for _, wrong := range []string{"cleave stat", "cleave status --nothing", "cleave du a b", "cleave du --top many x"} {
		if understood(wrong) == nil {
			t.Errorf("%q is taken for one that there is", wrong)
		}
	}
}

// Placeholders stand for values: POD, NAME=VALUE, and what is optional in brackets.
var (
	optional = regexp.MustCompile(`\[([^\[\]]*)\]`)
	choice   = regexp.MustCompile(`(\S+?)\|\S+`)
)

// understood says whether cleave would take a command line, without running it.
func understood(line string) error {
	for optional.MatchString(line) {
		line = optional.ReplaceAllString(line, "$1")
	}
	line = choice.ReplaceAllString(line, "$1")
	args := strings.Fields(line)[1:]
	cmd := root()
	cmd.SetOut(io.Discard)
	if len(args) == 0 {
		return nil
	}
	found, rest, err := cmd.Find(args)
	if err != nil {
		return err
	}
	if found == cmd {
		return fmt.Errorf("there is no command %s", args[0])
	}
	rest = slices.DeleteFunc(rest, func(s string) bool { return s == "…" || s == "..." })
	if err := found.ParseFlags(rest); err != nil {
		return err
	}
	operands := found.Flags().Args()
	if len(operands) == 0 {
		return nil // a sentence about the command
	}
	return found.ValidateArgs(operands)
}
