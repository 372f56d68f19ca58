package quota_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/cleave-cri/cleave/lab/janitor"
)

// writerEnv makes this program a writer: FILE,BYTES. It exits with the number of the error that it gets.
const writerEnv = "CLEAVE_QUOTA_WRITER"

func TestMain(m *testing.M) {
	if job := os.Getenv(writerEnv); job != "" {
		os.Exit(int(writer(job)))
	}
	janitor.Main()
	os.Exit(m.Run())
}

// writer makes a file and fills it, to the disk: xfs counts what is promised to a delayed write, ext4 does too.
func writer(job string) syscall.Errno {
	const unknown = 255
	path, count, _ := strings.Cut(job, ",")
	left, err := strconv.ParseUint(count, 10, 64)
	if err != nil {
		return unknown
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	chunk := make([]byte, 64<<10)
	for ; err == nil && left > 0; left -= uint64(len(chunk)) {
		_, err = file.Write(chunk)
	}
	if err == nil {
		err = errors.Join(file.Sync(), file.Close())
	}
	var errno syscall.Errno
	if err != nil && !errors.As(err, &errno) {
		return unknown
	}
	return errno
}

// write lets another process write a file, as a container's would be: without CAP_SYS_RESOURCE, unless it is to be
// privileged.
func write(t testing.TB, privileged bool, path string, bytes uint64) error {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	command := []string{"setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource", self}
	if privileged {
		command = []string{self}
	}
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s,%d", writerEnv, path, bytes))
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 0 && exit.ExitCode() < 255 {
		return syscall.Errno(exit.ExitCode())
	}
	if err != nil {
		t.Fatalf("let another process write: %v\n%s", err, out)
	}
	return nil
}
