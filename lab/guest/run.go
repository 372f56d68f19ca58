package guest

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/janitor"
)

const (
	// inSerial and outSerial are the serial numbers by which the guest knows the disks with the tars.
	inSerial  = "in"
	outSerial = "out"
	// exitLine begins the line with the exit codes of the command and of the packing of its results.
	exitLine = "GUEST-EXIT"

	// outBytes is how much the results may take: the size of the disk for them.
	outBytes = 64 << 20
	// maxSerialBytes is how long a virtio disk's serial number may be (virtio 1.1, 5.2.6).
	maxSerialBytes = 20

	defaultMemoryMiB = 1024
	defaultLimit     = 5 * time.Minute
	tailLines        = 40
)

// ErrFailed says that the guest came up and its command ended with an error; everything else is the guest's own failure.
var ErrFailed = errors.New("the command in the guest failed")

// Options of one guest. System and Command are required.
type Options struct {
	// System is what to boot, from Root.
	System System
	// Command is a shell script, run by /bin/sh as root in /guest, where Files are. What it leaves in /guest/out
	// comes back, 64 MiB at most.
	Command string
	// Files are passed in, by their path below /guest.
	Files map[string]File
	// Disks are made and formatted on the host, and appear in the guest as /dev/disk/by-id/virtio-NAME, not mounted.
	Disks []disk.Spec
	// MemoryMiB is the guest's memory in MiB; 0 means 1024.
	MemoryMiB int
	// Limit is how long the guest may live, boot included; 0 means 5 minutes.
	Limit time.Duration
}

// File is one file to pass in: Path is copied, or if that is empty Content is its content.
type File struct {
	Path    string
	Content []byte
	// Mode are the permissions; 0 means 0755 for a Path, 0644 for a Content.
	Mode fs.FileMode
}

// Result is what came of a guest. After an error it holds what there is.
type Result struct {
	// Output is the folder with what the command left in /guest/out, and with journal.log.
	Output string
	// Said is what the command printed, to both of its outputs.
	Said string
	// Console is what the kernel and systemd printed.
	Console string
	// Exit is the command's exit code, -1 if it is not known.
	Exit int
	// Took is how long the guest lived.
	Took time.Duration
}

// Run boots a guest and returns when it has powered off. It has passed only if qemu ended without error within the
// limit, and the guest said that the command and the packing of its results ended with 0. An error has the end of what
// the guest said in it; errors.Is(err, ErrFailed) tells a failed command from a guest that failed itself.
func Run(ctx context.Context, run *janitor.Run, o Options) (_ Result, err error) {
	r := Result{Exit: -1}
	if err := o.check(); err != nil {
		return r, fmt.Errorf("start a guest: %w", err)
	}
	dir, err := os.MkdirTemp(run.Dir(), "guest-")
	if err != nil {
		return r, fmt.Errorf("start a guest: %w", err)
	}
	m := machine{Options: o, dir: dir}
	if err := m.prepare(ctx); err != nil {
		return r, fmt.Errorf("start a guest: %w", err)
	}
	start := time.Now()
	bootErr := m.boot(ctx, run.Env())
	r.Took = time.Since(start)
	r.Console, r.Said = readLog(m.at("console.log")), readLog(m.at("said.log"))
	v, found := parseVerdict(r.Said)
	r.Said = v.said
	if found {
		r.Exit = v.command
	}
	switch {
	case bootErr != nil:
		return r, fmt.Errorf("run a guest of kernel %s: %w after %s\n%s", o.System.Version, bootErr, r.Took.Round(time.Second), r.tail())
	case !found:
		return r, fmt.Errorf("run a guest of kernel %s: it ended after %s without saying how its command ended\n%s", o.System.Version, r.Took.Round(time.Second), r.tail())
	case v.tar != 0:
		return r, fmt.Errorf("run a guest: packing the results ended with %d; they may take %d MiB\n%s", v.tar, outBytes>>20, r.tail())
	}
	r.Output = m.at("output")
	if err := unpack(m.at("out.tar"), r.Output); err != nil {
		return r, fmt.Errorf("unpack the guest's results: %w", err)
	}
	if v.command != 0 {
		return r, fmt.Errorf("%w with exit code %d\n%s", ErrFailed, v.command, lastLines(r.Said, tailLines))
	}
	return r, nil
}

func (o Options) check() error {
	if o.Command == "" {
		return errors.New("it has no command")
	}
	if !o.System.complete() {
		return fmt.Errorf("there is no root %q; get one from guest.Root", o.System.image)
	}
	for name, f := range o.Files {
		if !filepath.IsLocal(name) || filepath.Clean(name) != name || name == "run" || name == "out" {
			return fmt.Errorf("file %q: the name must be a clean path below /guest, and not run or out", name)
		}
		if f.Path != "" && f.Content != nil {
			return fmt.Errorf("file %q: give a path or a content, not both", name)
		}
	}
	seen := map[string]bool{inSerial: true, outSerial: true}
	for _, d := range o.Disks {
		if seen[d.Name] || len(d.Name) > maxSerialBytes || !serialOK.MatchString(d.Name) {
			return fmt.Errorf("disk %q: the name must be letters, digits and - , at most %d, not in or out, and each once", d.Name, maxSerialBytes)
		}
		seen[d.Name] = true
	}
	return nil
}

var serialOK = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9-]*$`)

// A machine is one guest and the folder with its files.
type machine struct {
	Options
	dir string
}

func (m machine) at(name string) string { return filepath.Join(m.dir, name) }

// prepare makes the disks.
func (m machine) prepare(ctx context.Context) error {
	if err := m.pack(m.at("in.tar")); err != nil {
		return fmt.Errorf("pack its files: %w", err)
	}
	out, err := os.Create(m.at("out.tar"))
	if err != nil {
		return err
	}
	if err := errors.Join(out.Truncate(outBytes), out.Close()); err != nil {
		return err
	}
	for _, d := range m.Disks {
		if err := disk.Image(ctx, m.at(diskFile(d.Name)), d); err != nil {
			return err
		}
	}
	return nil
}

func diskFile(name string) string { return "disk-" + name }

// pack writes the tar that the guest unpacks into /guest.
func (m machine) pack(path string) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	w := tar.NewWriter(file)
	files := map[string]File{"run": {Content: []byte("#!/bin/sh\n" + m.Command + "\n"), Mode: 0o755}}
	for name, f := range m.Files {
		files[name] = f
	}
	for name, f := range files {
		if err := add(w, name, f); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	// A disk is made of whole sectors. A tar ends with zeros anyway.
	const sectorBytes = 4096
	size, err := file.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	return file.Truncate((size + sectorBytes - 1) / sectorBytes * sectorBytes)
}

func add(w *tar.Writer, name string, f File) (err error) {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Format: tar.FormatPAX}
	if f.Path == "" {
		h.Mode, h.Size = int64(cmp.Or(f.Mode, 0o644)), int64(len(f.Content))
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err = w.Write(f.Content)
		return err
	}
	file, err := os.Open(f.Path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file", f.Path)
	}
	h.Mode, h.Size = int64(cmp.Or(f.Mode, 0o755)), info.Size()
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(w, file)
	return err
}

// args are qemu's. There is no network, and the root's image is never written to.
func (m machine) args() []string {
	args := []string{
		"-accel", "tcg,thread=multi", "-smp", "2", "-m", strconv.Itoa(cmp.Or(m.MemoryMiB, defaultMemoryMiB)),
		"-display", "none", "-monitor", "none", "-nodefaults", "-no-reboot",
		"-kernel", m.System.kernel,
		// A panic ends qemu, which counts as an end without result.
		"-append", "console=ttyS0 root=/dev/nvme0n1 rw quiet panic=-1 systemd.show_status=0",
		"-drive", "file=" + escape(m.System.image) + ",format=raw,if=none,id=root,snapshot=on,cache=unsafe",
		"-device", "nvme,serial=root,drive=root",
		"-serial", "file:" + m.at("console.log"), "-serial", "file:" + m.at("said.log"),
	}
	add := func(file, serial, more string) {
		id := "disk-" + serial
		args = append(args, "-drive", "file="+escape(m.at(file))+",format=raw,if=none,id="+id+more, "-device", "virtio-blk-pci,drive="+id+",serial="+serial)
	}
	add("in.tar", inSerial, ",readonly=on")
	add("out.tar", outSerial, ",cache=unsafe")
	for _, d := range m.Disks {
		add(diskFile(d.Name), d.Name, ",cache=unsafe")
	}
	return args
}

// escape doubles commas, which part qemu's options.
func escape(path string) string { return strings.ReplaceAll(path, ",", ",,") }

// boot runs qemu until it ends or its time is over.
func (m machine) boot(ctx context.Context, env []string) error {
	limit := cmp.Or(m.Limit, defaultLimit)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it did not end within its limit of %s", limit))
	defer cancel()
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", m.args()...)
	// TMPDIR is where qemu keeps what the guest writes to its root.
	cmd.Env = append(env, "TMPDIR="+m.dir)
	cmd.Stdout, cmd.Stderr = &said, &said
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("%w; `go run ./integration/toolchain deps guest` installs it", err)
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return fmt.Errorf("qemu ended with %w: %s", err, lastLines(said.String(), tailLines))
}

// tail is what people need to see why a guest failed.
func (r Result) tail() string {
	return "its command said last:\n" + lastLines(r.Said, tailLines) + "\nits console said last:\n" + lastLines(r.Console, tailLines)
}

// A verdict is what the guest's last line says.
type verdict struct {
	said         string // everything before that line
	command, tar int    // exit codes
}

var verdictLine = regexp.MustCompile(`(?m)^` + exitLine + ` ([0-9]{1,3}) ([0-9]{1,3})\s*\z`)

// parseVerdict takes the exit codes off the end. Only the last line counts: the command may print what it likes.
func parseVerdict(said string) (verdict, bool) {
	at := verdictLine.FindStringSubmatchIndex(said)
	if at == nil {
		return verdict{said: said}, false
	}
	command, err1 := strconv.Atoi(said[at[2]:at[3]])
	packed, err2 := strconv.Atoi(said[at[4]:at[5]])
	if errors.Join(err1, err2) != nil {
		return verdict{said: said}, false
	}
	return verdict{said: strings.TrimSuffix(said[:at[0]], "\n"), command: command, tar: packed}, true
}

// readLog reads what came over a serial line, without the carriage returns that such a line adds.
func readLog(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.ReplaceAll(string(content), "\r", "")
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// unpack takes folders and regular files off a tar that the guest wrote, and nothing that could lead out of dir.
func unpack(path, dir string) (err error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	for r := tar.NewReader(file); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name := filepath.Clean(h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(name, 0o755)
		case tar.TypeReg:
			err = write(root, name, r)
		}
		if err != nil {
			return err
		}
	}
}

func write(root *os.Root, name string, content io.Reader) error {
	if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	file, err := root.Create(name)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	return errors.Join(err, file.Close())
}
