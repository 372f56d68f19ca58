package lastlogs

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func open(t *testing.T, path string) *Keeper {
	t.Helper()
	k, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = k.Close() }) //nolint:errcheck // some tests close it themselves
	return k
}

func read(t *testing.T, path string) []Log {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read
	list, err := Read(f)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func keep(t *testing.T, k *Keeper, pod string, text []byte) {
	t.Helper()
	if err := k.Keep(Log{Namespace: "default", Pod: pod, UID: "u", Container: "c", File: "f", At: time.Unix(1000, 0).UTC(), SizeBytes: 7, Text: text}); err != nil {
		t.Fatal(err)
	}
}

// What is kept is there after a restart, the end of it if it is long; the file stays root's and of one size.
func TestKeep(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), FileName)
	long := bytes.Repeat([]byte("0123456789abcdef"), MaxBytes/16)
	k := open(t, path)
	keep(t, k, "short", []byte("a\xff\n"))
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
	keep(t, open(t, path), "long", append([]byte("the beginning"), long...))
	want := []Log{
		{Namespace: "default", Pod: "short", UID: "u", Container: "c", File: "f", At: time.Unix(1000, 0).UTC(), SizeBytes: 7, Text: []byte("a\xff\n")},
		{Namespace: "default", Pod: "long", UID: "u", Container: "c", File: "f", At: time.Unix(1000, 0).UTC(), SizeBytes: 7, Text: long},
	}
	if diff := cmp.Diff(want, read(t, path)); diff != "" {
		t.Error(diff)
	}
	info, err := os.Stat(path)
	if err != nil || info.Size() != SizeBytes || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// The oldest go when there are too many, and the order holds over the end of the file.
func TestTheOldestGo(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), FileName)
	k := open(t, path)
	for i := range slots + 7 {
		keep(t, k, fmt.Sprint(i), []byte("x"))
	}
	list := read(t, path)
	if len(list) != slots || list[0].Pod != "7" || list[slots-1].Pod != fmt.Sprint(slots+6) {
		t.Errorf("%d logs, from %s to %s", len(list), list[0].Pod, list[len(list)-1].Pod)
	}
}

// A crash while one is written costs that one and the one that it is written over.
func TestCrash(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), FileName)
	k := open(t, path)
	keep(t, k, "first", []byte("first text"))
	keep(t, k, "second", []byte("second text"))
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // written in whole
	if _, err := f.WriteAt([]byte("torn"), slotBytes+headBytes+3); err != nil {
		t.Fatal(err)
	}
	if list := read(t, path); len(list) != 1 || list[0].Pod != "first" {
		t.Errorf("%+v", list)
	}
	keep(t, open(t, path), "third", nil)
	if list := read(t, path); len(list) != 2 || list[1].Pod != "third" {
		t.Errorf("%+v", list)
	}
}

// A file that is something else begins anew, one that others could read is root's again, and no link is followed.
func TestOddFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	other := filepath.Join(dir, "other")
	if err := os.WriteFile(other, []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	keep(t, open(t, other), "pod", []byte("x"))
	if info, err := os.Stat(other); err != nil || info.Mode().Perm() != 0o600 || len(read(t, other)) != 1 {
		t.Errorf("%v, %v", info, err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(other, link); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(link); err == nil {
		t.Error("a link is followed")
	}
	long := Log{Pod: string(bytes.Repeat([]byte("x"), headBytes))}
	if err := open(t, other).Keep(long); err == nil {
		t.Error("names that don't fit are kept")
	}
}

func FuzzRead(f *testing.F) {
	slot, err := encode(Log{Pod: "pod", Text: []byte("text")}, 1)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(slot)
	f.Add([]byte(mark))
	f.Fuzz(func(t *testing.T, content []byte) {
		list, err := Read(bytes.NewReader(append(content, make([]byte, max(0, slotBytes-len(content)))...)))
		if err != nil {
			t.Error(err)
		}
		for _, l := range list {
			if len(l.Text) > MaxBytes {
				t.Errorf("%d bytes", len(l.Text))
			}
		}
	})
}

// Logs are shown as they were, and change no terminal.
func TestShown(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), FileName)
	k := open(t, path)
	keep(t, k, "web", []byte("first\n\x1b[2Jsecond\xff\n"))
	keep(t, k, "db", []byte("other"))
	logs, err := ReadFile(path, time.Time{}, "default/web")
	if err != nil || len(logs) != 1 || logs[0].Lines != "first\n\x1b[2Jsecond\ufffd\n" {
		t.Fatalf("%+v, %v", logs, err)
	}
	var text strings.Builder
	if err := logs.WriteText(&text, time.Now()); err != nil || !strings.Contains(text.String(), "  first\n  \\x1b[2Jsecond\\xff\n") {
		t.Errorf("%v:\n%q", err, text.String())
	}
	if late, err := ReadFile(path, time.Unix(2000, 0), ""); err != nil || len(late) > 0 {
		t.Errorf("older ones: %+v, %v", late, err)
	}
	if _, err := ReadFile(filepath.Join(t.TempDir(), "none"), time.Time{}, ""); err == nil || !strings.Contains(err.Error(), "reclaim.keepLogs") {
		t.Errorf("got %v", err)
	}
}
