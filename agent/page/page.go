// Package page writes pages of text for people, such as `cleave status`. It
// imports nothing of ours.
package page

import (
	"fmt"
	"io"
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
