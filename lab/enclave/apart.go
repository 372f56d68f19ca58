package enclave

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/lab/flock"
)

// apartEnv tells a process that it is the one inside; the value is the process that started it.
const apartEnv = "CLEAVE_LAB_APART"

// aside are the folders of which a program that is apart gets empty ones of its own: sockets at fixed paths, such as CRI-O's and
// NRI's, and logs at fixed paths, such as the kubelet's /var/log/containers.
var aside = []string{"/run", "/var/log"}

// Address is the machine's address for a program that is apart, on its loopback: a kubelet and an API server refuse 127.0.0.1.
const Address = "10.253.0.1"

// Apart puts this program into namespaces of its own: mounts, network (loopback only) and System V IPC, with an empty /run,
// /var/log and /var/lib/kubelet. It starts the program again, inside, and returns true there; outside it returns false when that has ended, and its
// status to exit with. prepare runs outside before that: what needs the machine's network belongs there.
//
// It must be called by main or TestMain, right after janitor.Main. Mounts and interfaces made inside go with the last process
// inside.
func Apart(prepare func() error) (inside bool, status int, _ error) {
	if os.Getenv(apartEnv) != "" {
		// What is started from here, such as a shell, is no second one inside.
		return true, 0, errors.Join(os.Unsetenv(apartEnv), furnish())
	}
	if err := prepare(); err != nil {
		return false, 1, err
	}
	child := exec.Command("/proc/self/exe", os.Args[1:]...)
	child.Args[0] = os.Args[0]
	child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr
	child.Env = append(os.Environ(), fmt.Sprintf("%s=%d", apartEnv, os.Getpid()))
	// Go makes the copied mounts private before the program begins. The one inside goes with the one outside, whatever ends that.
	child.SysProcAttr = &syscall.SysProcAttr{
		Unshareflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
		Pdeathsig:    syscall.SIGKILL,
	}
	// The kernel sends that signal at the end of the thread that started it.
	started, ended := make(chan error), make(chan error, 1)
	go func() { _ = onThread(func() error { return start(child, started, ended) }) }() //nolint:errcheck // it says so on the channels
	if err := <-started; err != nil {
		return false, 1, fmt.Errorf("start this program in namespaces of its own: %w", err)
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	for {
		select {
		case s := <-signals:
			_ = child.Process.Signal(s) //nolint:errcheck // it may have ended in this moment
		case err := <-ended:
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				return false, 1, fmt.Errorf("wait for this program in namespaces of its own: %w", err)
			}
			if code := child.ProcessState.ExitCode(); code >= 0 {
				return false, code, nil
			}
			return false, 1, fmt.Errorf("this program in namespaces of its own: %s", child.ProcessState)
		}
	}
}

// cgroups is where what an enclave has in common with others is mounted, by each version of cgroups.
const cgroups = "/sys/fs/cgroup"

// Alone waits until nobody else on this machine is so, and calls waiting once if it has to. It is for who starts a kubelet: cgroups are
// no part of an enclave, so each kubelet's cAdvisor sees the pods of all, and asks its own CRI-O about each, which does not know them;
// starting takes most of a minute then, and figures of pods come late. It ends when what is returned is closed, or with this process.
func Alone(ctx context.Context, waiting func()) (io.Closer, error) {
	lock, err := flock.TakeFolder(ctx, cgroups, waiting)
	if err != nil {
		return nil, fmt.Errorf("be the only one with a kubelet: %w", err)
	}
	return lock, nil
}

func start(cmd *exec.Cmd, started, ended chan<- error) error {
	err := cmd.Start()
	started <- err
	if err == nil {
		ended <- cmd.Wait()
	}
	return nil
}

// furnish makes the namespaces of this process usable.
func furnish() error {
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("set the loopback of the own network up: %w", err)
	}
	if err := addAddress("lo:1", Address); err != nil {
		return fmt.Errorf("give the own network the address %s: %w", Address, err)
	}
	if err := leaveOthers(); err != nil {
		return err
	}
	for _, dir := range aside {
		if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
			return fmt.Errorf("get an empty %s: %w", dir, &os.PathError{Op: "mount", Path: dir, Err: err})
		}
	}
	return emptyBeside("/var/lib", "kubelet")
}

// emptyBeside gives this program an empty folder of its own in a folder whose other contents stay as they are, whether or not the
// machine has one of that name: a kubelet makes /var/lib/kubelet/device-plugins whatever its root directory is.
func emptyBeside(dir, empty string) error {
	fault := func(err error) error { return fmt.Errorf("get an empty %s: %w", filepath.Join(dir, empty), err) }
	const before = "/run/cleave-lab-before" // /run is this program's own by now
	if err := os.Mkdir(before, 0o755); err != nil {
		return fault(err)
	}
	if err := unix.Mount(dir, before, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fault(&os.PathError{Op: "mount", Path: before, Err: err})
	}
	entries, err := os.ReadDir(before)
	if err != nil {
		return fault(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fault(&os.PathError{Op: "mount", Path: dir, Err: err})
	}
	for _, e := range entries {
		from, to := filepath.Join(before, e.Name()), filepath.Join(dir, e.Name())
		switch {
		case e.Name() == empty:
		case e.Type()&os.ModeSymlink != 0:
			target, err := os.Readlink(from)
			if err := errors.Join(err, os.Symlink(target, to)); err != nil {
				return fault(err)
			}
		case e.IsDir():
			if err := os.Mkdir(to, 0o755); err != nil {
				return fault(err)
			}
			if err := unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
				return fault(&os.PathError{Op: "mount", Path: to, Err: err})
			}
		}
	}
	if err := unix.Unmount(before, unix.MNT_DETACH); err != nil {
		return fault(&os.PathError{Op: "unmount", Path: before, Err: err})
	}
	if err := os.Remove(before); err != nil {
		return fault(err)
	}
	if err := os.Mkdir(filepath.Join(dir, empty), 0o755); err != nil {
		return fault(err)
	}
	return nil
}

// leaveOthers takes copies of other runs' mounts away, of loop devices and of overlays on them: they would keep the devices busy
// after the others have unmounted them. What these processes see of a lab is their own.
func leaveOthers() error {
	mounts, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		theirs := strings.HasPrefix(i.Source, "/dev/loop") || i.FSType == "overlay" || strings.HasPrefix(i.Mountpoint, os.TempDir()+"/")
		return !theirs || i.Mountpoint == "/", false
	})
	if err != nil {
		return fmt.Errorf("list the mounts that came along: %w", err)
	}
	for _, m := range slices.Backward(mounts) {
		// One below another that was detached is gone with it.
		if err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("leave a mount that came along: %w", &os.PathError{Op: "unmount", Path: m.Mountpoint, Err: err})
		}
	}
	return nil
}

// addAddress gives an interface's alias an IPv4 address (netdevice(7)).
func addAddress(alias, address string) (err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { err = errors.Join(err, os.NewSyscallError("close", unix.Close(fd))) }()
	request, err := unix.NewIfreq(alias)
	if err != nil {
		return err
	}
	if err := request.SetInet4Addr(net.ParseIP(address).To4()); err != nil {
		return err
	}
	return os.NewSyscallError("ioctl SIOCSIFADDR", unix.IoctlIfreq(fd, unix.SIOCSIFADDR, request))
}
