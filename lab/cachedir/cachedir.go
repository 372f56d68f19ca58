// Package cachedir says where that which is costly to make is kept outside of the checkout: peers, a guest's root. It
// imports nothing of ours.
package cachedir

import (
	"fmt"
	"os"
	"path/filepath"
)

// For returns the absolute folder of one kind of things: ${CLEAVE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cleave}/kind.
// It is not made.
func For(kind string) (string, error) {
	base := os.Getenv("CLEAVE_CACHE")
	if base == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("find the cache folder: %w; set CLEAVE_CACHE to a folder of your choice", err)
		}
		base = filepath.Join(user, "cleave")
	}
	base, err := filepath.Abs(base)
	if err != nil {
		return "", fmt.Errorf("find the cache folder: %w", err)
	}
	return filepath.Join(base, kind), nil
}
