// Package page writes pages of text for people, such as `cleave status`. It
// imports nothing of ours.
package page

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Bytes writes an amount with a binary unit, as Kubernetes does: "1.5Gi".
func Bytes(n uint64) string {
	units := []string{"", "Ki", "Mi", "Gi", "Ti", "Pi"}
	value, unit := float64(n), 0
	for value >= 1024 && unit < len(units)-1 {
		value /= 1024
		unit++
	}
	if unit == 0 {
		return fmt.Sprintf("%d", n)
	}
	return fmt.Sprintf("%.1f%s", value, units[unit])
}

// Writer remembers the first error, so that a page of output has one place that
// asks for it.
type Writer struct {
	w   io.Writer
	err error
}

// NewWriter returns a Writer to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Write implements [io.Writer].
func (w *Writer) Write(b []byte) (int, error) {
	if w.err != nil {
		return 0, w.err
	}
	n, err := w.w.Write(b)
	w.err = err
	return n, err
}

// Printf formats and writes. Its error is kept for [Writer.Err].
func (w *Writer) Printf(format string, args ...any) {
	_, _ = fmt.Fprintf(w, format, args...) // the error is kept in w
}

// Err is the first error, nil if there was none.
func (w *Writer) Err() error { return w.err }

// Name writes the name of a file, or a path, as one piece of text: what is no UTF-8 or can't be printed as Go writes it in a string
// ("\xff", "\n"), and a backslash twice, so that no two names look alike and none changes the terminal.
func Name(name string) string {
	var b strings.Builder
	for len(name) > 0 {
		r, size := utf8.DecodeRuneInString(name)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, name[0])
		case r == '\\':
			b.WriteString(`\\`)
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		name = name[size:]
	}
	return b.String()
}

// JSON writes a value as JSON for people and programs.
func JSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}

// YAML writes a value as YAML, with the keys that it has in JSON, in their order.
func YAML(w io.Writer, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil { // JSON is YAML
		return fmt.Errorf("make YAML of JSON: %w", err)
	}
	unflow(&document)
	encoder := yaml.NewEncoder(w)
	encoder.SetIndent(2)
	return errors.Join(encoder.Encode(&document), encoder.Close())
}

// unflow forgets how a document was written, so that it is written as YAML mostly is.
func unflow(n *yaml.Node) {
	n.Style = 0
	if n.Kind == yaml.ScalarNode && n.Tag == "!!str" {
		switch strings.ToLower(n.Value) {
		case "y", "n", "yes", "no", "on", "off": // truth to readers of YAML 1.1
			n.Style = yaml.DoubleQuotedStyle
		}
		if strings.Contains(n.Value, "\n") {
			n.Style = yaml.LiteralStyle
		}
	}
	for _, child := range n.Content {
		unflow(child)
	}
}
