package kubelet

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A program that does not tell its version otherwise is asked, but only if nobody but root can have put it there.
func TestVersionIsAskedOfRootsProgramOnly(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: only root's programs are asked")
	}
	for _, tc := range []struct {
		name       string
		attributes *syscall.SysProcAttr
		change     func(t *testing.T, program string)
		refused    string
	}{
		{name: "root's own"},
		{name: "another mount namespace, as a container has", attributes: &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}, refused: "another mnt namespace"},
		{name: "another user", attributes: &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}, refused: "does not run as root"},
		{name: "others may write", change: func(t *testing.T, program string) {
			t.Helper()
			if err := os.Chmod(program, 0o757); err != nil {
				t.Fatal(err)
			}
		}, refused: "others than root may write"},
		{name: "another owner", change: func(t *testing.T, program string) {
			t.Helper()
			if err := os.Chown(program, 65534, 0); err != nil {
				t.Fatal(err)
			}
		}, refused: "others than root may write"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "cleave-kubelet-")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := os.RemoveAll(dir); err != nil {
					t.Error(err)
				}
			})
			if err := os.Chmod(dir, 0o755); err != nil { // for the other user
				t.Fatal(err)
			}
			cmd := standAsKubelet(t, dir, tc.attributes)
			if tc.change != nil {
				tc.change(t, filepath.Join(dir, "kubelet"))
			}
			s, err := Reader{}.Read(cmd.pid())
			if err != nil {
				t.Fatal(err)
			}
			v, err := Reader{}.AskVersion(t.Context(), s)
			switch {
			case tc.refused == "":
				if err != nil || v.Text != "v1.36.3" || v.Minor != 36 {
					t.Errorf("got %v, %v", v, err)
				}
			case !errors.Is(err, ErrNotAsked) || !strings.Contains(err.Error(), tc.refused):
				t.Errorf("got %v, want %q", err, tc.refused)
			}
			other := s
			other.StartTicks++
			if _, err := (Reader{}).AskVersion(t.Context(), other); tc.refused == "" && !errors.Is(err, ErrGone) {
				t.Errorf("of a process that is another by now: %v", err)
			}
			cmd.end(t)
			if _, err := (Reader{}).AskVersion(t.Context(), s); !errors.Is(err, ErrGone) {
				t.Errorf("after its end: %v", err)
			}
		})
	}
}
