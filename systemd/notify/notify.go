// Package notify is what a serving process tells the service manager about
// itself (sd_notify(3)): that it is ready, reloads, stops, is alive, and how it
// is, in a line for people. Without a service manager it does nothing. agent and
// agent/snapshotter may import it; it imports nothing of ours.
package notify

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/coreos/go-systemd/v22/daemon"
)

// maxStatusBytes is the longest status that is sent; a message has 4096 bytes in
// all (sd_notify(3)).
const maxStatusBytes = 1000

// Notifier speaks to the service manager. Its methods may be called from several
// goroutines.
type Notifier struct {
	fail func(error)

	mu     sync.Mutex
	status string // guarded by mu; the last one sent
}

// New returns a notifier that gives the errors of its messages to fail: none of
// them is a reason not to serve.
func New(fail func(error)) *Notifier { return &Notifier{fail: fail} }

// Managed reports whether there is a service manager.
func Managed() bool { return os.Getenv("NOTIFY_SOCKET") != "" }

// Ready says that calls are answered, and by which process: after a handover that
// is another one than before. It also ends what Reloading began.
func (n *Notifier) Ready(status string) {
	n.setStatus(status)
	n.send(daemon.SdNotifyReady, fmt.Sprintf("MAINPID=%d", os.Getpid()), line(status))
}

// Main takes the role of the main process back, from a successor that has died.
func (n *Notifier) Main(status string) {
	n.setStatus(status)
	n.send(fmt.Sprintf("MAINPID=%d", os.Getpid()), line(status))
}

// Reloading says that a new process is being started with the configuration as
// it is now. The time lets systemd tell this reload from an earlier one
// (sd_notify(3), MONOTONIC_USEC; systemd 253).
func (n *Notifier) Reloading(status string) {
	n.setStatus(status)
	n.send(daemon.SdNotifyReloading, strings.TrimSpace(daemon.SdNotifyMonotonicUsec()), line(status))
}

// Stopping says that no new calls are taken.
func (n *Notifier) Stopping(status string) {
	n.setStatus(status)
	n.send(daemon.SdNotifyStopping, line(status))
}

// Alive resets the watchdog.
func (n *Notifier) Alive() { n.send(daemon.SdNotifyWatchdog) }

// Status says how it is going, if that is another than the last time.
func (n *Notifier) Status(status string) {
	if n.setStatus(status) {
		n.send(line(status))
	}
}

// setStatus reports whether a status is news.
func (n *Notifier) setStatus(status string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	news := n.status != status
	n.status = status
	return news
}

func (n *Notifier) send(lines ...string) {
	if _, err := daemon.SdNotify(false, strings.Join(lines, "\n")); err != nil {
		n.fail(fmt.Errorf("tell the service manager: %w", err))
	}
}

// line is a status as one line of a message, whatever it quotes.
func line(status string) string {
	status = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, status)
	if len(status) > maxStatusBytes {
		status = strings.ToValidUTF8(status[:maxStatusBytes], "") + "…"
	}
	return "STATUS=" + status
}

// WatchdogPeriod is how long the service manager waits for a sign of life, 0 for
// ever. A successor has its predecessor's environment, where WATCHDOG_PID names
// the predecessor; the manager watches the service, whoever its main process is.
func WatchdogPeriod(successor bool) (time.Duration, error) {
	if successor {
		if err := os.Unsetenv("WATCHDOG_PID"); err != nil {
			return 0, fmt.Errorf("read the service manager's watchdog: %w", err)
		}
	}
	period, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return 0, fmt.Errorf("read the service manager's watchdog: %w", err)
	}
	return period, nil
}
