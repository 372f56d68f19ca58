package installer

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/cleave-cri/cleave/snapshot/split/ctdconfig"
	"github.com/cleave-cri/cleave/systemd/install/endpoint"
)

const (
	// shimName is how the program of a shim begins (containerd, docs/shim
	// "runtime binaries": io.containerd.runc.v2 is containerd-shim-runc-v2).
	shimName = "containerd-shim-"
	// shimAddress is the flag with the socket of the containerd that started a
	// shim, shimTTRPC the variable with the one on which it tells containerd what
	// happens to its containers (containerd 2.4, core/runtime/v2/command.go).
	shimAddress = "-address"
	shimTTRPC   = "TTRPC_ADDRESS="
)

// strandedShims lists the shims of the containerd that listens on r.From which
// tell what happens on another socket than r.TTRPC: of what they tell, nothing
// would arrive. proc is the folder of processes, "/proc". What can't be read of a
// shim is an error: then nobody knows.
func strandedShims(proc string, r ctdconfig.Redirect) ([]string, error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, fmt.Errorf("look for shims: %w", err)
	}
	var out []string
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		args, err := words(filepath.Join(proc, e.Name(), "cmdline"))
		if err != nil {
			return nil, fmt.Errorf("look for shims: %w", err)
		}
		if len(args) == 0 || !strings.HasPrefix(filepath.Base(args[0]), shimName) {
			continue
		}
		if endpoint.Socket(after(args, shimAddress)) != endpoint.Socket(r.From) {
			continue // another containerd's
		}
		variables, err := words(filepath.Join(proc, e.Name(), "environ"))
		if err != nil {
			return nil, fmt.Errorf("look at the shim with process number %s: %w", e.Name(), err)
		}
		if len(variables) == 0 {
			continue // it has ended meanwhile
		}
		var told string
		for _, v := range variables {
			if value, ok := strings.CutPrefix(v, shimTTRPC); ok {
				told = value
			}
		}
		if endpoint.Socket(told) != endpoint.Socket(r.TTRPC) {
			out = append(out, fmt.Sprintf("process %s, %s, container %s: %q instead of %s", e.Name(), filepath.Base(args[0]), after(args, "-id"), told, r.TTRPC))
		}
	}
	return out, nil
}

// words reads a file of words with a zero byte behind each. A process that is gone
// has none.
func words(path string) ([]string, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []string
	for word := range bytes.SplitSeq(bytes.TrimRight(text, "\x00"), []byte{0}) {
		if len(word) > 0 {
			out = append(out, string(word))
		}
	}
	return out, nil
}

// after is the argument that comes after another, empty if there is none.
func after(args []string, flag string) string {
	i := slices.Index(args, flag)
	if i < 0 || i+1 >= len(args) {
		return ""
	}
	return args[i+1]
}
