// Command matrix takes the outcomes of a run of the compatibility matrix into the record that is kept with the code, and writes
// the page that people read:
//
//	go run ./integration/matrix NEW.jsonl
//
// `make matrix` runs the cells and then this.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/cleave-cri/cleave/integration/matrix/cell"
)

// The files in the checkout.
const (
	recordFile = "integration/matrix/outcomes.jsonl"
	pageFile   = "docs/compatibility.md"
)

func main() {
	if err := run(os.Args[1:], ".", os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "matrix:", err)
		os.Exit(1)
	}
}

// run takes the outcomes of a file into the record of a checkout.
func run(args []string, checkout string, out io.Writer) error {
	if len(args) != 1 {
		return errors.New("say which outcomes to take over: matrix NEW.jsonl")
	}
	cells, err := cell.All()
	if err != nil {
		return err
	}
	newer, err := cell.Read(args[0])
	if err != nil {
		return err
	}
	if len(newer) == 0 {
		return fmt.Errorf("%s has no outcome: no cell was run", args[0])
	}
	record := filepath.Join(checkout, recordFile)
	older, err := cell.Read(record)
	if err != nil {
		return err
	}
	all := cell.Merge(cells, older, newer)
	text, err := cell.Encode(all)
	if err != nil {
		return err
	}
	if err := write(record, text); err != nil {
		return err
	}
	if err := write(filepath.Join(checkout, pageFile), []byte(cell.Page(cells, all))); err != nil {
		return err
	}
	passed := 0
	for _, o := range all {
		if o.Passed {
			passed++
		}
	}
	fmt.Fprintf(out, "matrix: %d cells, %d run, %d passed; see %s\n", len(cells), len(all), passed, pageFile)
	return nil
}

// write writes a file unless it is as wanted.
func write(path string, text []byte) error {
	if is, err := os.ReadFile(path); err == nil && bytes.Equal(is, text) {
		return nil
	}
	return os.WriteFile(path, text, 0o644)
}
