package transaction

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	journalName  = "journal.json"
	progressName = "progress"
	lockName     = "lock"
	// beside is what the name of a file gets that lies beside another. No program
	// that reads a folder of settings takes a hidden file with such an ending.
	beside = ".cleave-swap"
	// maxFileBytes is the largest file that is read; real ones have some kB.
	maxFileBytes = 8 << 20
)

// store does the work on the disk.
type store struct {
	place    Place
	lock     *os.File
	progress *os.File
}

func openStore(p Place) (*store, error) {
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the journal's folder: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(p.Dir, lockName), os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the journal's lock: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = ErrBusy
		}
		return nil, errors.Join(err, lock.Close())
	}
	return &store{place: p, lock: lock}, nil
}

func (s *store) close() error {
	var err error
	if s.progress != nil {
		err = s.progress.Close()
	}
	// Closing it would not do: a child that is just being started has it open too.
	return errors.Join(err, syscall.Flock(int(s.lock.Fd()), syscall.LOCK_UN), s.lock.Close())
}

// at is a path of an edit on this machine. A symlink there is followed, and the
// file that it leads to is the one that is changed.
func (s *store) at(path string) (string, error) {
	full := filepath.Join(s.place.Root, path)
	real, err := filepath.EvalSymlinks(full)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(full); err == nil {
			return "", fmt.Errorf("%s is a symlink that leads nowhere", path)
		}
		return full, nil
	}
	return real, err
}

func swapName(full string) string {
	return filepath.Join(filepath.Dir(full), "."+filepath.Base(full)+beside)
}

// read returns a regular file; nil if there is none.
func (s *store) read(path string) (*[]byte, error) {
	full, err := s.at(path)
	if err != nil {
		return nil, err
	}
	return readFile(full)
}

// Read returns a file as an edit sees it; nil if there is none. Only the root of
// the place counts.
func Read(p Place, path string) (*[]byte, error) {
	s := store{place: p}
	return s.read(path)
}

func readFile(full string) (*[]byte, error) {
	f, err := os.OpenFile(full, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", full)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxFileBytes {
		return nil, fmt.Errorf("%s has more than %d bytes", full, maxFileBytes)
	}
	return &data, nil
}

// missing lists the folders that are not there on the way to one, outer first,
// save those that are known.
func (s *store) missing(dir string, known []string) []string {
	var out []string
	for ; dir != "/" && dir != "."; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(s.place.Root, dir)); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		if !slices.Contains(known, dir) {
			out = append(out, dir)
		}
	}
	slices.Reverse(out)
	return out
}

func (s *store) mkdir(dir string) error {
	full := filepath.Join(s.place.Root, dir)
	err := os.Mkdir(full, 0o755)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err == nil {
		err = os.Chmod(full, 0o755) // whatever the umask
	}
	return err
}

// rmdirs takes away folders that are empty, inner ones first. One that is used
// meanwhile stays.
func (s *store) rmdirs(dirs []string) {
	for _, dir := range slices.Backward(dirs) {
		// Not os.Remove: by now it may be somebody's link or file.
		_ = syscall.Rmdir(filepath.Join(s.place.Root, dir)) //nolint:errcheck // it is not empty, or gone
	}
}

// stage writes the new file beside the old one, on disk for sure, with the old
// one's owner, mode and attributes.
func (s *store) stage(e Edit) (err error) {
	full, err := s.at(e.Path)
	if err != nil {
		return err
	}
	name := swapName(full)
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("write what %s shall be: %w", e.Path, err)
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			err = fmt.Errorf("write what %s shall be: %w", e.Path, errors.Join(err, os.Remove(name)))
		}
	}()
	if _, err := f.Write(*e.After); err != nil {
		return err
	}
	if e.Before == nil {
		err = f.Chmod(fs.FileMode(e.Mode))
	} else {
		err = likeOld(f, full)
	}
	if err != nil {
		return err
	}
	return f.Sync()
}

// likeOld gives a file the owner, mode and extended attributes of another.
func likeOld(f *os.File, old string) error {
	info, err := os.Stat(old)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("look at %s: no owner in the answer of stat", old)
	}
	if err := f.Chown(int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := f.Chmod(info.Mode().Perm()); err != nil {
		return err
	}
	list := make([]byte, 64<<10) // the most that the kernel gives (xattr(7))
	n, err := unix.Listxattr(old, list)
	if errors.Is(err, unix.ENOTSUP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the attributes of %s: %w", old, err)
	}
	value := make([]byte, 64<<10)
	for name := range strings.SplitSeq(strings.TrimRight(string(list[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		size, err := unix.Getxattr(old, name, value)
		if err != nil {
			return fmt.Errorf("read the attribute %s of %s: %w", name, old, err)
		}
		if err := unix.Fsetxattr(int(f.Fd()), name, value[:size], 0); err != nil {
			return fmt.Errorf("give %s its attribute %s: %w", old, name, err)
		}
	}
	return nil
}

// apply puts an edit into effect, by exchanging the file with what lies beside it; so
// the file that was there lies there then, and [Edit.Reversed] brings that very file
// back. It is nothing if that was done already, and ErrChanged if the file is neither
// the old nor the new one.
func (s *store) apply(e Edit) error {
	full, err := s.at(e.Path)
	if err != nil {
		return err
	}
	now, err := readFile(full)
	if err != nil {
		return err
	}
	switch {
	case same(now, e.After):
		return nil
	case !same(now, e.Before):
		return fmt.Errorf("%s: %w: it is left as it is", e.Path, ErrChanged)
	}
	swap := swapName(full)
	if e.After != nil {
		there, err := readFile(swap)
		switch {
		case err != nil:
			return err
		case there == nil:
			// It was broken off at its very end, when that had been taken away.
			if err := s.stage(e); err != nil {
				return err
			}
		case !same(there, e.After):
			return fmt.Errorf("%s: what it shall be is not in %s any more; the journal in %s has its bytes", e.Path, swap, s.place.Dir)
		}
	}
	switch {
	case e.After == nil:
		err = rename(full, swap, unix.RENAME_NOREPLACE)
	case e.Before == nil:
		err = rename(swap, full, unix.RENAME_NOREPLACE)
	default:
		err = rename(swap, full, unix.RENAME_EXCHANGE)
	}
	if err != nil {
		return fmt.Errorf("change %s: %w", e.Path, err)
	}
	return nil
}

// rename is on disk when it returns.
func rename(from, to string, flags uint) error {
	if err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, flags); err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return syncDir(filepath.Dir(to))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// unstage takes away what lies beside a file: only what this edit put there. That
// may be the beginning of the new file, if the power went while it was written.
func (s *store) unstage(e Edit) error {
	full, err := s.at(e.Path)
	if err != nil {
		return err
	}
	swap := swapName(full)
	there, err := readFile(swap)
	if err != nil || there == nil {
		return err
	}
	begun := e.After != nil && bytes.HasPrefix(*e.After, *there)
	if !same(there, e.Before) && !begun {
		return fmt.Errorf("%s was not put there by cleave, or was changed: look at it and take it away", swap)
	}
	if err := os.Remove(swap); err != nil {
		return err
	}
	return syncDir(filepath.Dir(swap))
}

// writeJournal writes down what is going to be done, and a file of progress that
// has its full size.
func (s *store) writeJournal(r Record, states []state) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	progress := make([]byte, len(states))
	for i, st := range states {
		progress[i] = byte(st)
	}
	// The journal comes last: without it there is no transaction.
	for _, f := range []struct {
		name string
		text []byte
	}{{progressName, progress}, {journalName, text}} {
		if err := s.write(f.name, f.text); err != nil {
			return fmt.Errorf("write the journal in %s: %w", s.place.Dir, err)
		}
	}
	return s.openProgress()
}

func (s *store) openProgress() (err error) {
	s.progress, err = os.OpenFile(filepath.Join(s.place.Dir, progressName), os.O_RDWR|syscall.O_CLOEXEC, 0)
	return err
}

// write replaces a file in the journal's folder.
func (s *store) write(name string, text []byte) (err error) {
	path := filepath.Join(s.place.Dir, name)
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(path+".new"))
	}
	return syncDir(s.place.Dir)
}

func (s *store) mark(i int, st state) error {
	if _, err := s.progress.WriteAt([]byte{byte(st)}, int64(i)); err != nil {
		return fmt.Errorf("write the progress: %w", err)
	}
	if err := s.progress.Sync(); err != nil {
		return fmt.Errorf("write the progress: %w", err)
	}
	return nil
}

// Unfinished is the kind of a transaction that was broken off, or empty; ErrBusy if it
// is under way.
func Unfinished(p Place) (kind string, err error) {
	s := store{place: p}
	if kind, err = s.unfinished(); err != nil || kind == "" {
		return "", err
	}
	// Only now, because whoever begins one has to get the lock at once.
	lock, err := os.Open(filepath.Join(p.Dir, lockName))
	if errors.Is(err, fs.ErrNotExist) {
		return kind, nil
	}
	if err != nil {
		return "", fmt.Errorf("open the journal's lock: %w", err)
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	err = syscall.Flock(int(lock.Fd()), syscall.LOCK_SH|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return "", ErrBusy
	}
	if err != nil {
		return "", err
	}
	// It may have been finished meanwhile.
	kind, err = s.unfinished()
	return kind, errors.Join(err, syscall.Flock(int(lock.Fd()), syscall.LOCK_UN))
}

// unfinished is the kind of a transaction that was broken off, or empty.
func (s *store) unfinished() (string, error) {
	r, err := readRecord(filepath.Join(s.place.Dir, journalName))
	if err != nil || r == nil {
		return "", err
	}
	return r.Kind, nil
}

func (s *store) readJournal() (*Record, []state, error) {
	r, err := readRecord(filepath.Join(s.place.Dir, journalName))
	if err != nil || r == nil {
		return nil, nil, err
	}
	progress, err := readFile(filepath.Join(s.place.Dir, progressName))
	if err != nil {
		return nil, nil, err
	}
	if progress == nil || len(*progress) != len(r.Steps) {
		return nil, nil, fmt.Errorf("read the journal in %s: its progress does not belong to it", s.place.Dir)
	}
	var states []state
	for _, b := range *progress {
		if !strings.ContainsRune(".>+<-", rune(b)) {
			return nil, nil, fmt.Errorf("read the journal in %s: its progress has the state %q", s.place.Dir, b)
		}
		states = append(states, state(b))
	}
	return r, states, s.openProgress()
}

// ReadRecord reads the record of a finished transaction; nil if there is none.
func ReadRecord(p Place, name string) (*Record, error) {
	return readRecord(filepath.Join(p.Dir, name))
}

func readRecord(path string) (*Record, error) {
	text, err := readFile(path)
	if err != nil || text == nil {
		return nil, err
	}
	var r Record
	if err := json.Unmarshal(*text, &r); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if r.Version != version {
		return nil, fmt.Errorf("read %s: it has format %d, and this cleave knows %d: use the cleave that wrote it", path, r.Version, version)
	}
	return &r, nil
}

// keepJournal makes the journal the record of a finished transaction.
func (s *store) keepJournal(name string) error {
	if err := os.Rename(filepath.Join(s.place.Dir, journalName), filepath.Join(s.place.Dir, name)); err != nil {
		return fmt.Errorf("keep the journal: %w", err)
	}
	return syncDir(s.place.Dir)
}

// dropJournal takes the journal away. Its going makes the end.
func (s *store) dropJournal() error {
	var errs []error
	for _, name := range []string{journalName, progressName} {
		if err := os.Remove(filepath.Join(s.place.Dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, syncDir(s.place.Dir))...)
}

// forget takes the record of a finished transaction away.
func (s *store) forget(name string) error {
	if err := os.Remove(filepath.Join(s.place.Dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("take the record away: %w", err)
	}
	return syncDir(s.place.Dir)
}
