//go:build faultpoints

package fault

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// plan is read from the environment once.
var plan = sync.OnceValues(func() (Point, *counter) {
	name, times, _ := strings.Cut(os.Getenv("CLEAVE_FAULT"), ":")
	n, err := strconv.Atoi(times)
	if err != nil {
		n = 1
	}
	return Point(name), &counter{left: n}
})

// counter says how often the point may still be reached.
type counter struct {
	mu   sync.Mutex
	left int // guarded by mu
}

// Reach says that the work has come to a point, and dies if that is the one.
func Reach(p Point) {
	name, c := plan()
	if p != name {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left--
	if c.left == 0 {
		if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
			panic(err)
		}
		select {}
	}
}
