//go:build hasty

package imagelock

import "time"

// Window is that short only in the program of tests that kill it over and over again:
// after each start it waits for as long.
const Window = 2 * time.Second
