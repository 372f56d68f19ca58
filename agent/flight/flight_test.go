package flight

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/engine/record"
)

const small = 64 << 10

func open(t *testing.T, path string, size int64) *Recorder {
	t.Helper()
	r, err := Open(path, size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close(t.Context()) }) //nolint:errcheck // closed before, or the test failed
	return r
}

// recordNo is a record that can be told from others, of some length.
func recordNo(n, length int) record.Record {
	random := rand.New(rand.NewPCG(uint64(n), 1))
	b := make([]byte, length)
	for i := range b {
		b[i] = 'a' + byte(random.IntN(26))
	}
	return record.Record{Decider: fmt.Sprintf("%d %s", n, b)}
}

// put records numbers and waits until they are written.
func put(t *testing.T, r *Recorder, length int, numbers ...int) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for _, n := range numbers {
		c := r.Counters()
		want := c.Written + c.Failed + 1
		r.Append(recordNo(n, length), n%2 == 0)
		for c := r.Counters(); c.Written+c.Failed < want; c = r.Counters() {
			if time.Now().After(deadline) {
				t.Fatalf("record %d is not written: %+v", n, c)
			}
			time.Sleep(time.Millisecond) //nolint:forbidigo // polls with a deadline
		}
	}
}

func shut(t *testing.T, r *Recorder) {
	t.Helper()
	if err := r.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// read returns the numbers of all records in a file.
func read(t *testing.T, path string) (out []int) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	lines, err := Lines(f, info.Size())
	if err != nil {
		t.Fatal(err)
	}
	for reader := record.NewReader(lines); ; {
		rec, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		var n int
		if _, err := fmt.Sscanf(rec.Decider, "%d ", &n); err != nil {
			t.Fatal(err)
		}
		if rec.Decider != recordNo(n, len(rec.Decider)-len(fmt.Sprint(n))-1).Decider {
			t.Fatalf("record %d is not what was written", n)
		}
		out = append(out, n)
	}
}

func from(a, b int) (out []int) {
	for i := a; i < b; i++ {
		out = append(out, i)
	}
	return out
}

// The newest records stay, in order, over restarts and many rounds, in a file
// that never grows.
func TestNewestRecordsStay(t *testing.T) {
	t.Parallel()
	for _, length := range []int{10, 700, 5000} {
		path := filepath.Join(t.TempDir(), FileName)
		for round := range 6 {
			r := open(t, path, small)
			put(t, r, length, from(round*20, round*20+20)...)
			if c := r.Counters(); c.Written != 20 || c.Error != "" || r.Note() != "" {
				t.Errorf("%+v, %s", c, r.Note())
			}
			shut(t, r)
			got := read(t, path)
			if len(got) < 3 || got[len(got)-1] != round*20+19 {
				t.Fatalf("length %d, round %d: %v", length, round, got)
			}
			for i := 1; i < len(got); i++ {
				if got[i] != got[i-1]+1 {
					t.Errorf("length %d, round %d: %v", length, round, got)
				}
			}
			if info, err := os.Stat(path); err != nil || info.Size() != small {
				t.Errorf("the file has %d bytes, %v", info.Size(), err)
			}
		}
	}
}

// A crash at any byte of a write costs what was being written and what was there
// before, and nothing else.
func TestTornTail(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, FileName)
	r := open(t, path, small)
	put(t, r, 3000, from(0, 40)...)
	shut(t, r)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	were := read(t, path)
	r = open(t, path, small)
	put(t, r, 3000, 40)
	shut(t, r)
	after, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	first, last := len(before), 0
	for i := range before {
		if before[i] != after[i] {
			first, last = min(first, i), i
		}
	}
	for n := first; n <= last; n += 1 + (last-first)/15 {
		torn := append(bytes.Clone(after[:n]), before[n:]...)
		other := filepath.Join(dir, "torn")
		if err := os.WriteFile(other, torn, 0o600); err != nil {
			t.Fatal(err)
		}
		got := read(t, other)
		if len(got) < len(were)-3 || got[len(got)-1] != 39 {
			t.Fatalf("torn at %d: %v, before %v", n, got, were)
		}
		r := open(t, other, small)
		put(t, r, 3000, 40, 41)
		shut(t, r)
		if got := read(t, other); got[len(got)-1] != 41 || got[len(got)-2] != 40 {
			t.Errorf("torn at %d, and then: %v", n, got)
		}
	}
}

func TestFilesOfOthers(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), FileName)
	if err := os.WriteFile(path, []byte(strings.Repeat("rubbish ", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	r := open(t, path, small)
	if !strings.Contains(r.Note(), "begins anew") {
		t.Errorf("it says %q", r.Note())
	}
	if _, err := Open(path, small); !errors.Is(err, ErrLocked) {
		t.Errorf("a second process: %v", err)
	}
	put(t, r, 10, 1)
	r.Append(recordNo(2, small), true) // larger than a quarter
	put(t, r, 10, 3)
	shut(t, r)
	if c := r.Counters(); c.Failed != 1 || !strings.Contains(c.Error, "larger") {
		t.Errorf("%+v", c)
	}
	if got := read(t, path); len(got) != 2 || got[1] != 3 {
		t.Errorf("%v", got)
	}
	r.Append(recordNo(4, 1), true)
	if c := r.Counters(); c.Dropped != 1 {
		t.Errorf("after its end: %+v", c)
	}
	if _, err := Lines(bytes.NewReader([]byte("{}\n")), 3); err == nil {
		t.Error("a file of lines is taken for a recorder's")
	}
	if Is(bytes.NewReader([]byte("{}\n"))) || !Is(bytes.NewReader([]byte(fileMark))) {
		t.Error("files are not told apart")
	}
}

// A disk that takes nothing stops nobody: it is counted.
func TestWritesThatFail(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), FileName)
	r := open(t, path, small)
	if err := r.file.Close(); err != nil {
		t.Fatal(err)
	}
	for n := range 2 * queued {
		r.Append(recordNo(n, 10), true)
	}
	shut(t, r)
	if c := r.Counters(); c.Written != 0 || c.Failed+c.Dropped != 2*queued || c.Error == "" {
		t.Errorf("%+v", c)
	}
}

// TestDamageIsNotReadForEver: each block of a file pretends to be the head of half a file.
func TestDamageIsNotReadForEver(t *testing.T) {
	t.Parallel()
	const size = 16 << 20
	file := bytes.Repeat(append(append([]byte(recordMark), make([]byte, 8)...), make([]byte, align-len(recordMark)-8)...), size/align)
	for at := 0; at < len(file); at += align {
		binary.LittleEndian.PutUint64(file[at+8:], 7)
		binary.LittleEndian.PutUint32(file[at+16:], size/2)
	}
	r := &counting{r: bytes.NewReader(file)}
	frames, err := scan(r, size)
	if err != nil || len(frames) > 0 {
		t.Errorf("%d records, %v", len(frames), err)
	}
	if r.bytes > (damagedTimes+3)*size {
		t.Errorf("%d bytes were read of a file of %d", r.bytes, size)
	}
}

// counting counts what is read.
type counting struct {
	r     io.ReaderAt
	bytes int64
}

func (c *counting) ReadAt(b []byte, at int64) (int, error) {
	n, err := c.r.ReadAt(b, at)
	c.bytes += int64(n)
	return n, err //nolint:wrapcheck // io.ReaderAt
}
