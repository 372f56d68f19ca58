package crio

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"

	"github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/node"
)

// session is a stream to a pod that echoes lines.
type session struct {
	name  string
	write *io.PipeWriter
	lines *bufio.Reader
	ended chan error
}

// open starts exec or attach of a pod whose command echoes what it reads.
func open(t *testing.T, c *cluster, pod, subresource string) *session {
	t.Helper()
	in, write := io.Pipe()
	read, out := io.Pipe()
	s := &session{name: subresource, write: write, lines: bufio.NewReader(read), ended: make(chan error, 1)}
	go func() {
		var err error
		streams := remotecommand.StreamOptions{Stdin: in, Stdout: out}
		if subresource == "exec" {
			err = c.plane.Stream(t.Context(), pod, "exec", &corev1.PodExecOptions{Command: []string{"cat"}, Stdin: true, Stdout: true}, streams)
		} else {
			err = c.plane.Stream(t.Context(), pod, "attach", &corev1.PodAttachOptions{Stdin: true, Stdout: true}, streams)
		}
		_ = out.CloseWithError(io.EOF)
		s.ended <- err
	}()
	return s
}

// echoes sends a line and waits for it to come back.
func (s *session) echoes(t *testing.T, line string) {
	t.Helper()
	if _, err := fmt.Fprintln(s.write, line); err != nil {
		t.Fatalf("%s: %v", s.name, err)
	}
	got, err := s.lines.ReadString('\n')
	if err != nil || strings.TrimSpace(got) != line {
		t.Fatalf("%s gives %q back for %q: %v", s.name, got, line, err)
	}
}

// What a person has open on a pod lives on while cleave is started anew, and more can be opened afterwards.
func TestStreamsLiveThroughARestart(t *testing.T) {
	c := start(t, options{})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := c.plane.Run(ctx, kube.PodSpec{Name: "shell", Image: node.BusyboxImage, Stdin: true, Command: []string{"sh", "-c",
		`mkdir /www; echo hello >/www/index.html; httpd -p 8080 -h /www; (n=0; while :; do n=$((n+1)); echo tick $n; sleep 0.2; done) >/proc/1/fd/2 & exec cat`}})
	if err != nil {
		t.Fatal(err)
	}
	exec, attach := open(t, c, "shell", "exec"), open(t, c, "shell", "attach")
	logs, err := c.plane.Logs(ctx, "shell", &corev1.PodLogOptions{Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	defer logs.Close() //nolint:errcheck // only read
	log := bufio.NewReader(logs)
	address := forward(t, c, "shell", 8080)
	check := func(t *testing.T, when string) {
		t.Helper()
		exec.echoes(t, "exec "+when)
		attach.echoes(t, "attach "+when)
		before := tick(t, log)
		if after := tick(t, log); after == before {
			t.Fatalf("%s: the log says %q twice", when, after)
		}
		if page := fetch(t, "http://"+address); page != "hello\n" {
			t.Fatalf("%s: through the forwarded port comes %q", when, page)
		}
		content := strings.Repeat(when, 100_000)
		copyIn(ctx, t, c, "shell", "/copied", content)
		if back, err := c.plane.Exec(ctx, "shell", "cat", "/copied"); err != nil || back != content {
			t.Fatalf("%s: copied %d bytes, got %d back: %v", when, len(content), len(back), err)
		}
	}
	check(t, "before")
	if !t.Run("handed over", func(t *testing.T) {
		old, err := c.node.Cleave.HandOver(ctx)
		if err != nil {
			t.Fatal(err)
		}
		check(t, "after")
		if err := old(ctx); err != nil {
			t.Error(err)
		}
	}) {
		return
	}
	t.Run("killed and started", func(t *testing.T) {
		if err := c.node.Cleave.Signal(ctx, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if err := c.node.Cleave.WaitGone(ctx); err != nil {
			t.Fatal(err)
		}
		exec.echoes(t, "while it is away")
		attach.echoes(t, "while it is away")
		if err := c.node.Cleave.Start(ctx); err != nil {
			t.Fatal(err)
		}
		// The kubelet's client tries again only after a while.
		eventually(ctx, t, "a command can be run", func() error {
			_, err := c.plane.Exec(ctx, "shell", "true")
			return err
		})
		check(t, "afterwards")
	})
	for _, s := range []*session{exec, attach} {
		if err := s.write.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := <-exec.ended; err != nil {
		t.Errorf("exec ended with %v", err)
	}
}

// tick reads the next line of the log that is a tick.
func tick(t *testing.T, log *bufio.Reader) string {
	t.Helper()
	for {
		line, err := log.ReadString('\n')
		if err != nil {
			t.Fatalf("logs -f: %v", err)
		}
		if strings.HasPrefix(line, "tick") {
			return line
		}
	}
}

// copyIn writes a file in a pod as kubectl cp does: the program in the pod knows where the content ends. (One that reads until its
// input is closed may miss the end: containerd closes it without waiting for what is under way. busybox's shell loses what a head at
// the end of its script has not yet written.)
func copyIn(ctx context.Context, t *testing.T, c *cluster, pod, path, content string) {
	t.Helper()
	in, write := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		_, err := io.WriteString(write, content)
		wrote <- err
	}()
	_, err := c.plane.ExecWith(ctx, pod, in, "sh", "-c", fmt.Sprintf("head -c %d | cat >%s", len(content), path))
	if err := errors.Join(err, in.Close(), <-wrote); err != nil {
		t.Fatalf("copy in: %v", err)
	}
}

func fetch(t *testing.T, url string) string {
	t.Helper()
	answer, err := http.Get(url) //nolint:noctx // the test's own end bounds it
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close() //nolint:errcheck // only read
	page, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(page)
}

// forward forwards a port of a pod to the loopback until the test ends, and returns the address there.
func forward(t *testing.T, c *cluster, pod string, port int) string {
	t.Helper()
	transport, upgrader, err := spdy.RoundTripperFor(c.plane.REST())
	if err != nil {
		t.Fatal(err)
	}
	url := c.plane.Client().CoreV1().RESTClient().Post().Resource("pods").Namespace(kube.Namespace).Name(pod).SubResource("portforward").URL()
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, url)
	stop, ready := make(chan struct{}), make(chan struct{})
	var errOut bytes.Buffer
	f, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{fmt.Sprintf("0:%d", port)}, stop, ready, io.Discard, &errOut)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- f.ForwardPorts() }()
	t.Cleanup(func() {
		close(stop)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	select {
	case <-ready:
	case err := <-ended:
		t.Fatalf("forward a port: %v %s", err, errOut.String())
	}
	ports, err := f.GetPorts()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", ports[0].Local)
}
