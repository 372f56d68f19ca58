package explain

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/agent/page"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/record"
)

// ErrDifferent says that this engine would decide something else than was
// recorded.
var ErrDifferent = errors.New("this engine decides otherwise")

// Explain writes the sentences of all records of a file, or of those about a
// pod, each on one line: nothing in the file changes the terminal. A record that is cut off at the end of the file is told of and is no
// error.
func Explain(w io.Writer, file, pod string) error {
	out := page.NewWriter(w)
	told := 0
	err := each(out, file, func(r record.Record, line int) error {
		sentences := Sentences(r, pod)
		if len(sentences) > 0 {
			if told++; told > 1 {
				out.Printf("\n")
			}
			out.Printf("%d. %s\n", line, page.Name(sentences[0]))
		}
		for _, s := range sentences[min(1, len(sentences)):] {
			out.Printf("   %s\n", page.Name(s))
		}
		return nil
	})
	if err == nil && told == 0 {
		err = fmt.Errorf("explain %s: there is no record%s", file, about(pod))
	}
	return errors.Join(err, out.Err())
}

func about(pod string) string {
	if pod == "" {
		return ""
	}
	return fmt.Sprintf(" with a pod %q; write name or namespace/name", pod)
}

// Replay makes all decisions of a file again and writes where this engine comes
// to something else; that is ErrDifferent.
func Replay(w io.Writer, file string) error {
	out := page.NewWriter(w)
	records, different, older := 0, 0, 0
	err := each(out, file, func(r record.Record, line int) error {
		if !r.Pass() && len(r.Steps) == 0 {
			return nil // nothing was decided
		}
		records++
		if r.Engine != engine.Version {
			older++
		}
		differences, err := record.Replay(r)
		if err != nil {
			return err
		}
		if len(differences) > 0 {
			different++
			out.Printf("record %d, engine %d, %s: %d differences\n", line, r.Engine, page.Name(r.Decider), len(differences))
		}
		for _, d := range differences {
			out.Printf("  %s\n", page.Name(fmt.Sprint(d)))
		}
		return nil
	})
	if err == nil {
		out.Printf("%d decisions made again, %d otherwise", records, different)
		if older > 0 {
			out.Printf("; %d are of another engine than %d", older, engine.Version)
		}
		out.Printf("\n")
	}
	if err == nil && different > 0 {
		err = fmt.Errorf("replay %s: %w in %d of %d records", file, ErrDifferent, different, records)
	}
	return errors.Join(err, out.Err())
}

// each reads a file record by record.
func each(out *page.Writer, file string, visit func(r record.Record, line int) error) error {
	f, err := os.Open(file)
	if err != nil {
		return fmt.Errorf("read records: %w", err)
	}
	lines, err := linesOf(f)
	reader := record.NewReader(lines)
	for err == nil {
		var r record.Record
		if r, err = reader.Next(); err == nil {
			err = visit(r, reader.Line())
		}
	}
	switch {
	case errors.Is(err, io.EOF):
		err = nil
	case errors.Is(err, record.ErrTruncated):
		out.Printf("%s: the last record is not whole and is left out\n", file)
		err = nil
	default:
		err = fmt.Errorf("%s: %w", file, err)
	}
	return errors.Join(err, f.Close())
}

// linesOf are the records in a file, which may be a flight recorder's.
func linesOf(f *os.File) (io.Reader, error) {
	if !flight.Is(f) {
		return f, nil
	}
	info, err := f.Stat()
	if err != nil {
		return f, err
	}
	return flight.Lines(f, info.Size())
}
