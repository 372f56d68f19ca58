package split

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/janitor"
)

// The main goroutine stays on the process's first thread. containerd's mount package changes the working folder of the thread that it
// mounts on and gives that up, which Go can't do with the first one: it would keep a test's filesystem busy for ever.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	janitor.Main()
	crashMain()
	os.Exit(run(m))
}

// run gives the tests temporary folders in memory where it can: they make some
// ten thousand transactions, each of which is synced. What depends on a real
// filesystem has disks of its own.
func run(m *testing.M) (code int) {
	if os.Geteuid() == 0 {
		lab, err := janitor.Start(context.Background(), janitor.Options{})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() {
			if err := lab.Close(context.Background()); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = 1
			}
		}()
		dir := filepath.Join(lab.Dir(), "tmp")
		if err := errors.Join(os.Mkdir(dir, 0o755), unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1g"), os.Setenv("TMPDIR", dir)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	before := goleak.IgnoreCurrent()
	code = m.Run()
	if code == 0 {
		if err := goleak.Find(before); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	return code
}
