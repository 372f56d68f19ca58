// Package distro sees to the programs that tests and the demo take from the distribution: runc, a static busybox, the
// filesystem tools, CNI plugins, a C compiler for the race detector, and in a set of its own what boots a guest. As root on
// a Debian machine it installs what is missing.
package distro

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	"github.com/cleave-cri/cleave/lab/busybox"
)

// A need is one thing that must be there and the package that brings it.
type need struct {
	pkg     string
	what    string
	present func() bool
}

// A Set is what one kind of targets needs.
type Set string

const (
	// Tests is what `make test` and the demo need.
	Tests Set = "tests"
	// Guest is what booting a guest needs besides: some 400 MB, so only the targets that boot one ask for it.
	Guest Set = "guest"
)

func (s Set) needs() []need {
	if s == Guest {
		return []need{
			{"qemu-system-x86", "qemu-system-x86_64", command("qemu-system-x86_64")},
			{"seabios", "the guest's firmware", func() bool { return exists("/usr/share/seabios/bios-256k.bin") }},
			{"mmdebstrap", "mmdebstrap", command("mmdebstrap")},
			{"e2fsprogs", "mke2fs", command("mke2fs")},
			{"xfsprogs", "mkfs.xfs", command("mkfs.xfs")},
			{"debian-archive-keyring", "the distribution's keys", func() bool { return exists("/usr/share/keyrings/debian-archive-keyring.gpg") }},
		}
	}
	return []need{
		{"runc", "runc", command("runc")},
		{"busybox-static", "a statically linked busybox", staticBusybox},
		{"e2fsprogs", "mkfs.ext4", command("mkfs.ext4")},
		{"xfsprogs", "mkfs.xfs", command("mkfs.xfs")},
		{"btrfs-progs", "mkfs.btrfs", command("mkfs.btrfs")},
		{"mount", "losetup", command("losetup")},
		{"util-linux", "nsenter, ipcmk", func() bool { return command("nsenter")() && command("ipcmk")() }},
		{"containernetworking-plugins", "CNI plugins", func() bool { return exists("/usr/lib/cni/ptp") && exists("/usr/lib/cni/portmap") }},
		{"iptables", "iptables", command("iptables")},
		{"systemd", "systemd-analyze", command("systemd-analyze")},
		{"gcc", "a C compiler", command("gcc")},
		{"libc6-dev", "the C library's headers", func() bool { return exists("/usr/include/stdlib.h") }},
	}
}

func command(name string) func() bool {
	return func() bool {
		_, err := exec.LookPath(name)
		return err == nil
	}
}

func staticBusybox() bool {
	_, err := busybox.Find()
	return err == nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Missing lists the packages that bring what is not there.
func (s Set) Missing() []string {
	var pkgs []string
	for _, n := range s.needs() {
		if !n.present() {
			pkgs = append(pkgs, n.pkg)
		}
	}
	return pkgs
}

// Ensure installs what is missing. Where it can't (not root, no apt-get) the error is one line that names the packages.
func (s Set) Ensure(ctx context.Context, progress io.Writer) error {
	pkgs := s.Missing()
	if len(pkgs) == 0 {
		return nil
	}
	byHand := "install them first: apt-get install " + strings.Join(pkgs, " ")
	if os.Geteuid() != 0 {
		return fmt.Errorf("find packages that %s need: %s missing and we are not root; %s", s.who(), strings.Join(pkgs, ", "), byHand)
	}
	if !command("apt-get")() {
		return fmt.Errorf("find packages that %s need: %s missing and there is no apt-get; install the same with your distribution's tool", s.who(), strings.Join(pkgs, ", "))
	}
	fmt.Fprintf(progress, "deps: installing %s with apt-get; about a minute\n", strings.Join(pkgs, " "))
	install := append([]string{"install", "-y", "-q", "--no-install-recommends"}, pkgs...)
	if err := aptGet(ctx, install...); err != nil {
		// A new machine has no package lists, or old ones: fetch them, then once more.
		if err := aptGet(ctx, "update", "-q"); err != nil {
			return fmt.Errorf("%w; %s", err, byHand)
		}
		if err := aptGet(ctx, install...); err != nil {
			return fmt.Errorf("%w; %s", err, byHand)
		}
	}
	if left := s.Missing(); len(left) > 0 {
		return fmt.Errorf("install %s: apt-get was content, but what %s should bring is still not there", strings.Join(pkgs, ", "), strings.Join(left, ", "))
	}
	return nil
}

// who needs the set, for an error.
func (s Set) who() string {
	if s == Guest {
		return "guests"
	}
	return "tests and demo"
}

func aptGet(ctx context.Context, args ...string) error {
	var output bytes.Buffer
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, strings.TrimSpace(output.String()))
		}
		return fmt.Errorf("apt-get %s: %w", strings.Join(args, " "), err)
	}
	return nil
}
