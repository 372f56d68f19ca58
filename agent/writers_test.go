package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cleave-cri/cleave/agent/owners"
)

// fakeKernel has /proc and the cgroups in a folder.
type fakeKernel struct{ dir string }

func (k fakeKernel) write(t *testing.T, name, content string) {
	t.Helper()
	path := filepath.Join(k.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (k fakeKernel) writers() *writers {
	w := newWriters()
	w.root, w.procs = filepath.Join(k.dir, "cgroup"), filepath.Join(k.dir, "proc")
	return w
}

func TestProcessesOfContainers(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name string
		// files of the kernel
		files map[string]string
		want  []int
	}{
		{"version 2, with a cgroup below", map[string]string{
			"proc/10/cgroup": "0::/pods/c\n", "cgroup/pods/c/cgroup.controllers": "io memory\n",
			"cgroup/pods/c/cgroup.procs": "10\n11\n", "cgroup/pods/c/below/cgroup.procs": "12\n",
		}, []int{10, 11, 12}},
		{"version 1", map[string]string{
			"proc/10/cgroup": "9:name=systemd:/pods/c\n8:pids:/pods/c\n0::/\n", "cgroup/pids/pods/c/cgroup.procs": "10\n11\n",
		}, []int{10, 11}},
		{"in the root cgroup, where everybody is: its children", map[string]string{
			"proc/10/cgroup": "8:pids:/\n0::/\n", "cgroup/pids/cgroup.procs": "1\n10\n99\n", "cgroup/cgroup.procs": "1\n",
			"proc/10/task/10/children": "11 12 ", "proc/11/task/11/children": "", "proc/12/task/12/children": "13 ",
		}, []int{10, 11, 12, 13}},
		{"a path that leads out", map[string]string{
			"proc/10/cgroup": "8:pids:/../../c\n", "cgroup/pids/cgroup.procs": "1\n",
		}, []int{10}},
		{"it has ended", nil, nil},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			k := fakeKernel{t.TempDir()}
			for name, content := range tc.files {
				k.write(t, name, content)
			}
			w := k.writers()
			w.set(map[string]int{"c": 10}, nil)
			got := w.processesOf("c")
			slices.Sort(got)
			if !slices.Equal(got, tc.want) {
				t.Errorf("processes %v, want %v", got, tc.want)
			}
			if got := w.processesOf("another"); got != nil {
				t.Errorf("processes %v of a container that does not run", got)
			}
		})
	}
}

// TestFilesThatAContainerWritesTo: of its layer, open to write, and with a name.
func TestFilesThatAContainerWritesTo(t *testing.T) {
	t.Parallel()
	k := fakeKernel{t.TempDir()}
	k.write(t, "proc/10/cgroup", "0::/c\n")
	k.write(t, "cgroup/c/cgroup.controllers", "io\n")
	k.write(t, "cgroup/c/cgroup.procs", "10\n11\n") // 11 has ended meanwhile
	if err := os.MkdirAll(filepath.Join(k.dir, "proc/10/fd"), 0o700); err != nil {
		t.Fatal(err)
	}
	for fd, file := range []struct{ flags, target string }{
		{"0100000", "/read"}, {"0100001", "/log/written"}, {"0102002", "/both"}, {"01", "pipe:[7]"}, {"02", "/gone (deleted)"}, {"01", "/log/written"},
	} {
		name := fmt.Sprint(fd)
		k.write(t, "proc/10/fdinfo/"+name, "pos:\t0\nflags:\t"+file.flags+"\nmnt_id:\t1\n")
		if err := os.Symlink(file.target, filepath.Join(k.dir, "proc/10/fd", name)); err != nil {
			t.Fatal(err)
		}
	}
	w := k.writers()
	w.set(map[string]int{"c": 10}, nil)
	if got := w.writing(owners.Container, "c"); got != nil {
		t.Errorf("%q without a layer that is walked", got)
	}
	w.setLayers(map[string]string{"c": "/s/1/fs"})
	got := w.writing(owners.Container, "c")
	slices.Sort(got)
	if want := []string{"/s/1/fs/both", "/s/1/fs/log/written"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := w.writing(owners.Pod, "c"); got != nil {
		t.Errorf("%q of a pod", got)
	}
}

// TestAWriteMovesTheHint of the container and of its pod, and of nobody else.
func TestAWriteMovesTheHint(t *testing.T) {
	t.Parallel()
	k := fakeKernel{t.TempDir()}
	stat := func(id string, bytes int) {
		k.write(t, "cgroup/"+id+"/io.stat", fmt.Sprintf("8:0 rbytes=1 wbytes=%d rios=1 wios=1 dbytes=0 dios=0\n", bytes))
	}
	for pid, id := range map[int]string{10: "a", 20: "b"} {
		k.write(t, fmt.Sprintf("proc/%d/cgroup", pid), "0::/"+id+"\n")
		k.write(t, "cgroup/"+id+"/cgroup.controllers", "io\n")
		k.write(t, "cgroup/"+id+"/cgroup.procs", fmt.Sprintln(pid))
		stat(id, 1)
	}
	hints := func() (out [4]uint64) {
		w := k.writers() // a fresh one remembers none
		w.set(map[string]int{"a": 10, "b": 20}, map[string][]string{"pa": {"a"}, "pb": {"b"}})
		for i, who := range []struct {
			pod bool
			id  string
		}{{false, "a"}, {true, "pa"}, {false, "b"}, {true, "pb"}} {
			kind := owners.Container
			if who.pod {
				kind = owners.Pod
			}
			counter, ok := w.written(kind, who.id)
			if !ok {
				t.Fatalf("no hint of %+v", who)
			}
			out[i] = counter
		}
		if _, ok := w.written(owners.Image, "a"); ok {
			t.Error("an image is told to write")
		}
		return out
	}
	before := hints()
	stat("a", 4097)
	after := hints()
	if after[0] == before[0] || after[1] == before[1] {
		t.Errorf("hints %v, then %v: the container's and its pod's have not moved", before, after)
	}
	if after[2] != before[2] || after[3] != before[3] {
		t.Errorf("hints %v, then %v: those of who has not written have moved", before, after)
	}
}
