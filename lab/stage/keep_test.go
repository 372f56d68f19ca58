package stage

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
