package agent

import (
	"bytes"
	"encoding/json"
	"io"
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
	q := newLogQueue(write, droppedLine(encoderOf("json")))
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
	q := newLogQueue(&out, droppedLine(encoderOf("json")))
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

// TestDroppedLinesAreToldInTheFormOfTheLog: who reads the log line by line as JSON
// must not trip over the one that says that lines are missing.
func TestDroppedLinesAreToldInTheFormOfTheLog(t *testing.T) {
	t.Parallel()
	read, write := io.Pipe() // holds nothing: the first line waits for its reader
	q := newLogQueue(write, droppedLine(encoderOf("json")))
	const more = 7
	for range logQueueLines + 1 + more { // one in the writer's hands or not yet
		if _, err := q.Write([]byte("{}\n")); err != nil {
			t.Fatal(err)
		}
	}
	decoder := json.NewDecoder(read)
	for told := int64(0); told < more; {
		var line struct {
			Level, Msg, TS string
			Lines          int64
		}
		if err := decoder.Decode(&line); err != nil {
			t.Fatalf("a line of the log is no JSON: %v", err)
		}
		if line.Msg == "" {
			continue
		}
		if line.Lines <= 0 || line.Level != "warn" || line.TS == "" || !strings.Contains(line.Msg, "dropped") {
			t.Fatalf("got %+v, want a warning with a number of lines", line)
		}
		told += line.Lines
	}
	if err := read.Close(); err != nil { // lets the writer go on
		t.Fatal(err)
	}
	if got := string(droppedLine(encoderOf("console"))(7)); !strings.Contains(got, "WARN") || !strings.HasSuffix(got, "{\"lines\": 7}\n") {
		t.Errorf("for people it says %q", got)
	}
}
