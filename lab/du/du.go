// Package du measures folders with GNU du, which shares no code with containerd or cleave: the measure that tests and
// the demo hold others to. It imports nothing of ours.
package du

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// Measure returns the allocated bytes and the inodes of folders on their own filesystems. An inode that is in several
// of them counts once. Files that go while it walks are left out; a folder that is missing from the start is an error.
func Measure(ctx context.Context, paths ...string) (usedBytes, inodes uint64, err error) {
	for _, path := range paths {
		if _, err := os.Lstat(path); err != nil {
			return 0, 0, fmt.Errorf("du: %w", err)
		}
	}
	if usedBytes, err = total(ctx, "--block-size=1", paths); err != nil {
		return 0, 0, err
	}
	inodes, err = total(ctx, "--inodes", paths)
	return usedBytes, inodes, err
}

func total(ctx context.Context, unit string, paths []string) (uint64, error) {
	args := append([]string{"--summarize", "--one-file-system", "--total", unit, "--"}, paths...)
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "du", args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	// It ends with 1 when files have gone while it walked, and counts the rest.
	if exit := (*exec.ExitError)(nil); err != nil && (!errors.As(err, &exit) || !onlyGone(stderr.String())) {
		return 0, fmt.Errorf("du: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	fields := strings.Fields(string(out)) // … <total> "total"
	if len(fields) < 2 {
		return 0, fmt.Errorf("du: it said %q", out)
	}
	n, err := strconv.ParseUint(fields[len(fields)-2], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("du: it said %q: %w", out, err)
	}
	return n, nil
}

func onlyGone(complaints string) bool {
	for line := range strings.Lines(complaints) {
		if !strings.HasSuffix(strings.TrimSpace(line), ": No such file or directory") {
			return false
		}
	}
	return complaints != ""
}
