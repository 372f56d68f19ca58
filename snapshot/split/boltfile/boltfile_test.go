package boltfile

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestModesWhateverTheUmask is not parallel: the umask is the process's. A part
// that makes a socket sets it to 0777 for a moment.
func TestModesWhateverTheUmask(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	ballast := NewBallast(path, 4<<10)
	old := unix.Umask(0o777)
	lock, err := TakeLock(path)
	fillErr := ballast.Fill()
	unix.Umask(old)
	if err != nil || fillErr != nil {
		t.Fatal(err, fillErr)
	}
	defer lock.Close() //nolint:errcheck // of a test
	for _, name := range []string{path + ".lock", ballast.Path()} {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has the mode %v", name, info.Mode())
		}
	}
}
