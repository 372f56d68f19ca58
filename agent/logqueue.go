package agent

import (
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"go.uber.org/zap/zapcore"
)

const (
	// logQueueLines is how many lines of the log may wait for somebody to
	// read them: a pipe that nobody empties, or a journal that hangs, must not
	// hold up calls. More are dropped and counted.
	logQueueLines = 4096
	// logSyncTimeout bounds the wait for the last lines at the end.
	logSyncTimeout = time.Second
)

// logQueue writes a log in the background.
type logQueue struct {
	lines   chan []byte
	synced  chan chan struct{}
	dropped atomic.Int64
	// told makes the line that says how many were dropped.
	told func(dropped int64) []byte
}

var _ zapcore.WriteSyncer = (*logQueue)(nil)

// newLogQueue starts the writer, which lives as long as the process: a write
// that hangs can't be ended by anything else. told makes the line that says how
// many were dropped, in the form of the others.
func newLogQueue(w io.Writer, told func(dropped int64) []byte) *logQueue {
	q := &logQueue{lines: make(chan []byte, logQueueLines), synced: make(chan chan struct{}), told: told}
	go q.run(w)
	return q
}

func (q *logQueue) run(w io.Writer) {
	for {
		select {
		case line := <-q.lines:
			q.write(w, line)
		case done := <-q.synced:
			for len(q.lines) > 0 {
				q.write(w, <-q.lines)
			}
			close(done)
		}
	}
}

// write loses the line if it can't be written: there is nobody to tell.
func (q *logQueue) write(w io.Writer, line []byte) {
	if n := q.dropped.Swap(0); n > 0 {
		_, _ = w.Write(q.told(n)) //nolint:errcheck // see above
	}
	_, _ = w.Write(line) //nolint:errcheck // see above
}

// Write implements [io.Writer]. It never blocks and never fails.
func (q *logQueue) Write(line []byte) (int, error) {
	select {
	case q.lines <- append([]byte(nil), line...):
	default:
		q.dropped.Add(1)
	}
	return len(line), nil
}

// Sync waits until the lines so far are written, for a second at most.
func (q *logQueue) Sync() error {
	done := make(chan struct{})
	limit := time.NewTimer(logSyncTimeout)
	defer limit.Stop()
	select {
	case q.synced <- done:
	case <-limit.C:
		return fmt.Errorf("write the log: nobody reads it")
	}
	select {
	case <-done:
		return nil
	case <-limit.C:
		return fmt.Errorf("write the log: nobody reads it")
	}
}
