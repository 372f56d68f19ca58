// Package busybox finds the one program that the lab's images consist of: the distribution's statically linked busybox.
package busybox

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
)

// ErrMissing says that no statically linked busybox is installed.
var ErrMissing = errors.New("no statically linked busybox in /bin or /usr/bin; `make deps` installs it (package busybox-static)")

// Find returns the path of a busybox that needs no shared library, or ErrMissing.
func Find() (string, error) {
	for _, path := range []string{"/bin/busybox", "/usr/bin/busybox"} {
		static, err := isStatic(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("find busybox: %w", err)
		}
		if static {
			return path, nil
		}
	}
	return "", ErrMissing
}

func isStatic(path string) (_ bool, err error) {
	file, err := elf.Open(path)
	if err != nil {
		return false, fmt.Errorf("read %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	for _, p := range file.Progs {
		if p.Type == elf.PT_INTERP {
			return false, nil
		}
	}
	return true, nil
}
