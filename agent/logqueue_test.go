package agent

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// TestALogThatNobodyReadsHoldsUpNobody fills a pipe that nobody empties.
func TestALogThatNobodyReadsHoldsUpNobody(t *testing.T) {
	t.Parallel()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	q := newLogQueue(write)
	line := []byte(strings.Repeat("x", 99) + "\n")
	const more = 10_000
	for range logQueueLines + more {
		if n, err := q.Write(line); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
	}
	if err := q.Sync(); err == nil {
		t.Error("Sync says that all is written")
	}
	// The writer hangs now, perhaps with a count in its hands that it wants to
	// tell. What comes beyond the queue is dropped and counted.
	for range logQueueLines + more {
		if _, err := q.Write(line); err != nil {
			t.Fatal(err)
		}
	}
	if q.dropped.Load() < more {
		t.Errorf("%d lines dropped, want at least %d", q.dropped.Load(), more)
	}
	// Closing the reading end lets the writer go on.
	if err := read.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestALogThatIsReadIsWhole(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	q := newLogQueue(&out)
	for range 100 {
		if _, err := q.Write([]byte("line\n")); err != nil {
			t.Fatal(err)
		}
	}
	if err := q.Sync(); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(out.String(), "line\n"); got != 100 {
		t.Errorf("%d lines, want 100", got)
	}
}
