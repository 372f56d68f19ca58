package ctdconfig

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"
)

// DropInBeside is the usual drop-in for a main file.
func DropInBeside(mainFile string) string {
	return filepath.Join(filepath.Dir(mainFile), "conf.d", filepath.Base(DefaultDropIn))
}

// Print writes the plan as the file that it would put in place, with remarks on
// top for people.
func (p Plan) Print(w io.Writer) error {
	var b strings.Builder
	state := "is not there yet"
	switch {
	case p.Unchanged:
		state = "is there already"
	case p.Replaces:
		state = "would replace what cleave wrote there before"
	}
	fmt.Fprintf(&b, "# %s (%s)\n", p.Path, state)
	for _, n := range p.Notes {
		fmt.Fprintf(&b, "# Note: %s.\n", n)
	}
	b.Write(p.Content)
	_, err := io.WriteString(w, b.String())
	return err
}

// TellWritten says what Write has done and what is to do now.
func (p Plan) TellWritten(w io.Writer) error {
	var b strings.Builder
	if p.Unchanged {
		fmt.Fprintf(&b, "%s is as it should be; nothing was changed.\n", p.Path)
	} else {
		fmt.Fprintf(&b, "%s is written. Start `cleave snapshotter`, then restart containerd.\n", p.Path)
	}
	for _, n := range p.Notes {
		fmt.Fprintf(&b, "Note: %s.\n", n)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// TellRemoved says what Remove has done and what is to do now.
func TellRemoved(w io.Writer, path string, removed bool) error {
	if !removed {
		_, err := fmt.Fprintf(w, "%s is not there; nothing was changed.\n", path)
		return err
	}
	_, err := fmt.Fprintf(w, "%s is removed. Remove the pods on the snapshotter, then restart containerd; until then it goes on as before.\n", path)
	return err
}
