//go:build !hasty

package imagelock

import "time"

// Window is for how long an image stays after a call that named it.
const Window = 2 * time.Minute
