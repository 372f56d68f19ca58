package guest

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/lab/cachedir"
	"github.com/cleave-cri/cleave/lab/flock"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/sweep"
)

const (
	// suite is the distribution that the recipe was tried with; the machine's own package sources must serve it.
	suite = "bookworm"
	// kernelPackage depends on the newest kernel for virtual machines: ext4 and NVMe are built in, so it needs no initrd.
	kernelPackage = "linux-image-cloud-amd64"
	// rootSize is the size of the root's filesystem as mke2fs takes it. The file is sparse, some 250 MB of it are written.
	rootSize = "4G"
	// debHooks is where mmdebstrap's package keeps its hooks.
	debHooks = "/usr/share/mmdebstrap/hooks/merged-usr"

	kernelFile = "vmlinuz"
	imageFile  = "root.img"
)

// guestPackages are in the guest beside the essential ones and what they depend on. usr-is-merged takes the place of
// usrmerge, which would bring perl; mkfs.xfs is run on the host, because xfsprogs brings python.
func guestPackages() []string {
	return []string{"usr-is-merged", "systemd-sysv", "udev", "dbus", "runc", "iproute2", "kmod", "e2fsprogs"}
}

// unwanted are paths of the packages that are left out, for size.
func unwanted() []string {
	return []string{"man", "doc", "locale", "info", "i18n", "zoneinfo"}
}

// The guest's own files. The kubelet and containerd need /etc/hosts: without it no sandbox starts.
const (
	hosts = "127.0.0.1 localhost guest\n::1 localhost\n"
	// systemd waits for pods that still run at the end; with its default that would take 90 seconds.
	systemdConf = "[Manager]\nDefaultTimeoutStopSec=10s\n"
	// unit runs the host's command once everything else is up. Results go to a serial line that nobody else writes to.
	unit = `[Unit]
Description=Run what the host passed in
After=multi-user.target

[Service]
Type=exec
ExecStart=/usr/local/lib/guest/run
ExecStopPost=/usr/bin/systemctl --no-block poweroff
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS1
Delegate=yes

[Install]
WantedBy=multi-user.target
`
	// script is that unit's program: a tar in on one disk, a tar out on another, and one line that says how both ended.
	script = `#!/bin/sh
mkdir -p /guest/out
cd /guest || exit 1
udevadm settle
rc=125
if tar xf /dev/disk/by-id/virtio-` + inSerial + `; then
	./run
	rc=$?
fi
journalctl --boot --no-pager >out/journal.log 2>&1
tar cf /dev/disk/by-id/virtio-` + outSerial + ` -C out .
tarred=$?
sync
echo
echo "` + exitLine + ` $rc $tarred"
`
)

// rootFiles are the files that the recipe adds to the root, by their path in it.
func rootFiles() map[string]rootFile {
	return map[string]rootFile{
		"etc/hosts":                              {hosts, 0o644},
		"etc/hostname":                           {"guest\n", 0o644},
		"etc/resolv.conf":                        {"", 0o644},
		"etc/systemd/system.conf.d/guest.conf":   {systemdConf, 0o644},
		"etc/systemd/system/guest.service":       {unit, 0o644},
		"usr/local/lib/guest/run":                {script, 0o755},
		"etc/systemd/journald.conf.d/guest.conf": {"[Journal]\nStorage=volatile\n", 0o644},
	}
}

type rootFile struct {
	content string
	mode    fs.FileMode
}

// rootLinks are its symlinks. The masked units would take the serial lines for a login.
func rootLinks() map[string]string {
	return map[string]string{
		"etc/systemd/system/serial-getty@ttyS0.service":            "/dev/null",
		"etc/systemd/system/serial-getty@ttyS1.service":            "/dev/null",
		"etc/systemd/system/getty.target":                          "/dev/null",
		"etc/systemd/system/multi-user.target.wants/guest.service": "../guest.service",
	}
}

func strapArgs(tree string) []string {
	args := []string{"--quiet", "--mode=root", "--variant=essential", "--hook-dir=" + debHooks, "--include=" + strings.Join(guestPackages(), ",")}
	for _, dir := range unwanted() {
		args = append(args, "--dpkgopt=path-exclude=/usr/share/"+dir+"/*")
	}
	return append(args, suite, tree)
}

func imageArgs(tree, image string) []string {
	return []string{"-q", "-F", "-t", "ext4", "-m", "0", "-d", tree, image, rootSize}
}

// recipe hashes everything that decides what comes out but the kernel's version, which is in the name beside it.
func recipe() string {
	h := sha256.New()
	files, links := rootFiles(), rootLinks()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(h, "%s %v %q\n", name, files[name].mode, files[name].content)
	}
	for _, name := range slices.Sorted(maps.Keys(links)) {
		fmt.Fprintln(h, name, links[name])
	}
	fmt.Fprintln(h, strapArgs(""), imageArgs("", ""), kernelPackage)
	return hex.EncodeToString(h.Sum(nil))[:16]
}

// System is what a guest boots: a kernel and the image of its root, both in the cache.
type System struct {
	kernel, image string
	// Version is the kernel's, as its package names it: 6.1.0-57-cloud-amd64.
	Version string
}

// Root returns the root that guests boot, and makes it if the cache has none of this recipe and of the kernel that the
// machine's package lists offer: half a minute, with the distribution's package servers. A machine without package lists
// takes the newest kernel that the cache has. What it makes on the way lies in the run. Progress goes to progress.
func Root(ctx context.Context, run *janitor.Run, progress io.Writer) (_ System, err error) {
	if runtime.GOARCH != "amd64" {
		return System{}, fmt.Errorf("make the guest's root: only for amd64, this is %s", runtime.GOARCH)
	}
	cache, err := cachedir.For("guest")
	if err != nil {
		return System{}, err
	}
	kernel, lookErr := newestKernel(ctx)
	if lookErr != nil {
		if s, ok := newestCached(cache); ok {
			return s, nil
		}
		return System{}, fmt.Errorf("make the guest's root: %w", lookErr)
	}
	s := cached(cache, kernel)
	if s.complete() {
		return s, nil
	}
	dir := filepath.Dir(s.image)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return System{}, fmt.Errorf("make the guest's cache folder: %w", err)
	}
	lock, err := flock.Take(ctx, dir+".lock", func() { fmt.Fprintln(progress, "guest: waiting for another process that makes the root") })
	if err != nil {
		return System{}, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	if s.complete() {
		return s, nil
	}
	fmt.Fprintf(progress, "guest: making a root with %s and kernel %s; half a minute, then it is cached\n", strings.Join(guestPackages(), ", "), kernel.version)
	start := time.Now()
	if err := s.make(ctx, run, kernel); err != nil {
		return System{}, fmt.Errorf("make the guest's root: %w; if the package servers can't be reached from here, copy %s from a machine that has it", err, dir)
	}
	fmt.Fprintf(progress, "guest: root made, %s\n", time.Since(start).Round(time.Second))
	return s, nil
}

// cached names the root of a kernel, whether it is there or not.
func cached(cache string, k kernel) System {
	dir := filepath.Join(cache, strings.Join([]string{recipe(), k.version, k.release()}, "_"))
	return System{kernel: filepath.Join(dir, kernelFile), image: filepath.Join(dir, imageFile), Version: k.release()}
}

// complete: the image is renamed into place last.
func (s System) complete() bool {
	for _, file := range []string{s.image, s.kernel} {
		if info, err := os.Stat(file); err != nil || !info.Mode().IsRegular() {
			return false
		}
	}
	return true
}

// newestCached is the root made last of those with this recipe.
func newestCached(cache string) (System, bool) {
	images, err := filepath.Glob(filepath.Join(cache, recipe()+"_*", imageFile))
	if err != nil || len(images) == 0 {
		return System{}, false
	}
	age := func(path string) time.Time {
		info, err := os.Stat(path)
		if err != nil {
			return time.Time{}
		}
		return info.ModTime()
	}
	newest := slices.MaxFunc(images, func(a, b string) int { return cmp.Or(age(a).Compare(age(b)), cmp.Compare(a, b)) })
	_, kernelOf, _ := strings.Cut(filepath.Base(filepath.Dir(newest)), "_")
	version, release, _ := strings.Cut(kernelOf, "_")
	s := cached(cache, kernel{pkg: kernelPrefix + release, version: version})
	return s, s.complete()
}

// A kernel is a package with a kernel in it.
type kernel struct{ pkg, version string }

// release is what uname says in that kernel.
func (k kernel) release() string { return strings.TrimPrefix(k.pkg, kernelPrefix) }

const kernelPrefix = "linux-image-"

var kernelDepends = regexp.MustCompile(`(?m)^Depends: .*\b(linux-image-[0-9][^ ,]*) \(= ([^)]+)\)`)

// newestKernel asks the package lists which kernel the machine would install.
func newestKernel(ctx context.Context) (kernel, error) {
	out, err := output(ctx, "", nil, "apt-cache", "show", "--no-all-versions", kernelPackage)
	if err != nil {
		return kernel{}, fmt.Errorf("find a kernel: %w; run apt-get update, on Debian %s", err, suite)
	}
	m := kernelDepends.FindStringSubmatch(out)
	if m == nil {
		return kernel{}, fmt.Errorf("find a kernel: the package lists don't say on which one %s depends", kernelPackage)
	}
	return kernel{pkg: m[1], version: m[2]}, nil
}

// make builds the root in the run's folder and puts it into the cache.
func (s System) make(ctx context.Context, run *janitor.Run, k kernel) (err error) {
	if err := onlySuite(); err != nil {
		return err
	}
	work := filepath.Join(run.Dir(), "guest-root")
	if err := os.Mkdir(work, 0o755); err != nil {
		return err
	}
	scope := sweep.Scope{Dir: work}
	defer func() { err = errors.Join(err, sweep.Files(scope)) }()
	tree, unpacked := filepath.Join(work, "tree"), filepath.Join(work, "kernel")
	env := append(run.Env(), "TMPDIR="+work)
	sources, err := packageSources()
	if err != nil {
		return err
	}
	if _, err := output(ctx, work, env, "mmdebstrap", append(strapArgs(tree), sources...)...); err != nil {
		return err
	}
	if _, err := output(ctx, work, env, "apt-get", "download", "-q", k.pkg+"="+k.version); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(work, k.pkg+"_*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("download %s: apt-get was content, but left %d packages: %w", k.pkg, len(debs), err)
	}
	if _, err := output(ctx, work, env, "dpkg-deb", "-x", debs[0], unpacked); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(unpacked, "lib", "modules"), filepath.Join(tree, "usr", "lib", "modules")); err != nil {
		return fmt.Errorf("put the modules into the root: %w", err)
	}
	if _, err := output(ctx, work, env, "chroot", tree, "depmod", s.Version); err != nil {
		return err
	}
	if err := writeRootFiles(tree); err != nil {
		return err
	}
	return s.keep(ctx, env, tree, filepath.Join(unpacked, "boot", "vmlinuz-"+s.Version))
}

// keep puts kernel and root into the cache, the root's image last and by a rename: what is there is whole.
func (s System) keep(ctx context.Context, env []string, tree, vmlinuz string) error {
	content, err := os.ReadFile(vmlinuz)
	if err != nil {
		return fmt.Errorf("find the kernel in its package: %w", err)
	}
	if err := os.WriteFile(s.kernel, content, 0o644); err != nil { //nolint:gosec // nothing secret
		return err
	}
	part := s.image + ".part" // one name, and the lock is held: what an earlier run left is overwritten
	if err := os.Remove(part); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if _, err := output(ctx, filepath.Dir(s.image), env, "mke2fs", imageArgs(tree, part)...); err != nil {
		return err
	}
	return os.Rename(part, s.image)
}

func writeRootFiles(tree string) (err error) {
	root, err := os.OpenRoot(tree)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	for name, file := range rootFiles() {
		if err := errors.Join(root.MkdirAll(filepath.Dir(name), 0o755), forget(root, name), root.WriteFile(name, []byte(file.content), file.mode)); err != nil {
			return fmt.Errorf("write the guest's files: %w", err)
		}
	}
	for name, target := range rootLinks() {
		if err := errors.Join(root.MkdirAll(filepath.Dir(name), 0o755), forget(root, name), root.Symlink(target, name)); err != nil {
			return fmt.Errorf("write the guest's links: %w", err)
		}
	}
	return nil
}

// forget removes what a package put in our place.
func forget(root *os.Root, name string) error {
	if err := root.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// onlySuite refuses machines whose package sources are not those of the suite.
func onlySuite() error {
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return err
	}
	if !slices.Contains(strings.Fields(string(release)), "VERSION_CODENAME="+suite) {
		return fmt.Errorf("the guest is made from the machine's own package sources, which must be those of Debian %s", suite)
	}
	return nil
}

// packageSources are the machine's own files of package sources.
func packageSources() ([]string, error) {
	var files []string
	for _, pattern := range []string{"/etc/apt/sources.list", "/etc/apt/sources.list.d/*.list", "/etc/apt/sources.list.d/*.sources"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, f := range found {
			if info, err := os.Stat(f); err == nil && info.Size() > 0 {
				files = append(files, f)
			}
		}
	}
	if len(files) == 0 {
		return nil, errors.New("find the machine's package sources: there are none in /etc/apt")
	}
	return files, nil
}

// output runs a program and returns what it prints. The error has the end of what it said.
func output(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	var out, said bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, env
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return "", fmt.Errorf("%w; `go run ./integration/toolchain deps guest` installs it", err)
		}
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, lastLines(said.String()+out.String(), 20))
	}
	return out.String(), nil
}
