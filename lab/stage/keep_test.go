package stage

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Without the addresses of the lab, what a shell starts would ask the machine's own containerd.
func TestNoShellInALabOfWhichNothingIsKnown(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	dir := filepath.Join(os.TempDir(), "cleave-lab", "0a1b2c3d")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"keep": "", "lock": "", aboutFile: `{"containerd": `} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	err := Shell(t.Context(), []string{"true"}, strings.NewReader(""), io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "nothing is known any more of the lab in "+dir) {
		t.Errorf("%v", err)
	}
}

// Ctrl-C in a terminal reaches the command by itself; what it makes of it is its own business.
func TestShellLeavesInterruptsToItsCommand(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	dir := filepath.Join(os.TempDir(), "cleave-lab", "0a1b2c3d")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"keep": "", "lock": "", aboutFile: `{"Containerd": "unix:///none"}`} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	in, answer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ctx, interrupt := context.WithCancel(t.Context())
	var out bytes.Buffer
	ended := make(chan error, 1)
	go func() { ended <- Shell(ctx, []string{"sh", "-c", "read line && echo got $line"}, in, &out, io.Discard) }()
	interrupt()
	select {
	case err := <-ended:
		t.Fatalf("the command ended with the interrupt: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	if _, err := answer.WriteString("it\n"); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil || out.String() != "got it\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
	var code CommandError
	if err := Shell(t.Context(), []string{"sh", "-c", "exit 7"}, nil, io.Discard, io.Discard); !errors.As(err, &code) || code.Code != 7 {
		t.Errorf("a command that ended with 7 gave %v", err)
	}
	if err := Shell(t.Context(), []string{"sh", "-c", "kill -9 $$"}, nil, io.Discard, io.Discard); err == nil || errors.As(err, &code) {
		t.Errorf("a command that was killed gave %v", err)
	}
}
