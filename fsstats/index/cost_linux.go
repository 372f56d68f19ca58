package index

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// CostOf says how long do has kept a processor busy: the time of its thread, the
// kernel's work for it included. 0 if that can't be had. It is for MeasureFuncs,
// and do must not hand its work to other goroutines.
func CostOf(do func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, after unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &before) != nil {
		do()
		return 0
	}
	do()
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &after) != nil {
		return 0
	}
	return time.Duration(after.Nano() - before.Nano())
}
