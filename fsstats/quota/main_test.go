package quota_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/cleave-cri/cleave/lab/janitor"
)

// writerEnv makes this program a writer: FILE,BYTES, and ,mapped if it is to store into a mapped file. It exits with the
// number of the error that it gets.
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
	count, mapped := strings.CutSuffix(count, ",mapped")
	left, err := strconv.ParseUint(count, 10, 64)
	if err != nil {
		return unknown
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err == nil && mapped {
		return store(file, int(left))
	}
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

// store maps a file and stores into each of its pages. The kernel says by SIGBUS that there is no room for one, whatever
// the reason: that is EFAULT here.
func store(file *os.File, bytes int) (errno syscall.Errno) {
	defer func() {
		if recover() != nil {
			errno = syscall.EFAULT
		}
	}()
	debug.SetPanicOnFault(true)
	if err := file.Truncate(int64(bytes)); err != nil {
		return syscall.EIO
	}
	memory, err := syscall.Mmap(int(file.Fd()), 0, bytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return syscall.EIO
	}
	for at := 0; at < bytes; at += os.Getpagesize() {
		memory[at] = 1
	}
	return 0
}

// writeMapped is write by stores into a mapped file.
func writeMapped(t testing.TB, privileged bool, path string, bytes uint64) error {
	t.Helper()
	return letWrite(t, privileged, fmt.Sprintf("%s,%d,mapped", path, bytes))
}

// write lets another process write a file, as a container's would be: without CAP_SYS_RESOURCE, unless it is to be
// privileged.
func write(t testing.TB, privileged bool, path string, bytes uint64) error {
	t.Helper()
	return letWrite(t, privileged, fmt.Sprintf("%s,%d", path, bytes))
}

func letWrite(t testing.TB, privileged bool, job string) error {
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
	cmd.Env = append(os.Environ(), writerEnv+"="+job)
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
