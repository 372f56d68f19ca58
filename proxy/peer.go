package proxy

import (
	"os"
	"strconv"
)

// commandOf returns the short name of a process for the log, empty when it is
// gone or hidden.
func commandOf(pid int32) string {
	name, err := os.ReadFile("/proc/" + strconv.Itoa(int(pid)) + "/comm")
	if err != nil || len(name) == 0 {
		return ""
	}
	return string(name[:len(name)-1])
}
