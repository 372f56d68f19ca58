package dump

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cleave-cri/cleave/agent"
	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/agent/flight"
	"github.com/cleave-cri/cleave/agent/lastlogs"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine/record"
)

// Secrets of a node: each has to be found by another way.
const (
	opaque   = "opaque0123456789ABCDEF"           // a token file's
	inKube   = "kubeconfig<&>token-0123456789"    // a kubeconfig's, written otherwise in JSON
	fromFile = "token.of-another-file.0123456789" // of a file that the kubeconfig names
	jwt      = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJjbGVhdmUifQ.c2lnbmF0dXJl"
	bearer   = "abcdef0123456789abcdef"
	inLogs   = "what an evicted pod logged"
)

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// node is one whose files have secrets, and whose cleave tells them all.
func node(t *testing.T) Options {
	t.Helper()
	dir := t.TempDir()
	c := config.Default()
	c.StateDir = dir
	if err := c.Control.Endpoint.Set("unix://" + filepath.Join(dir, "control.sock")); err != nil {
		t.Fatal(err)
	}
	c.CRIO.KubeletTokenFile = write(t, filepath.Join(dir, "token"), opaque+"\n")
	other := write(t, filepath.Join(dir, "other"), fromFile)
	c.Reclaim.Kubeconfig = write(t, filepath.Join(dir, "kubeconfig"), "users:\n- name: x\n  user: {token: \""+inKube+"\", tokenFile: "+other+"}\n")
	write(t, filepath.Join(dir, lastlogs.FileName), inLogs)

	recorder, err := flight.Open(filepath.Join(dir, flight.FileName), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	for _, decider := range []string{"one", "two", "three, Authorization: Bearer " + bearer} {
		recorder.Append(record.Record{Format: record.Format, Decider: decider}, true)
	}
	if err := recorder.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	return Options{
		Version: "1.2.3", Config: c, Records: 2, JournalSince: time.Hour,
		examine: func(context.Context, config.Config) (any, error) {
			return map[string]string{"reason": "it says " + fromFile}, nil
		},
		journal: func(context.Context, time.Duration) ([]byte, error) {
			return []byte("line 1 password=hunter2hunter2\nline 2 https://user:pass@registry.example/\n"), errors.New("cut off, token: " + opaque)
		},
	}
}

// answer has a cleave answer on the control socket.
func answer(t *testing.T, o Options) {
	t.Helper()
	l, err := net.Listen("unix", o.Config.Control.Endpoint.Path())
	if err != nil {
		t.Fatal(err)
	}
	give := func(value any) control.Func {
		return control.Without(func(context.Context) (any, error) { return value, nil })
	}
	server := control.Server(map[string]control.Func{
		"GET /v1/status": give(agent.Status{Version: "1.2.3", Problem: "the API server said no to " + inKube + " and " + opaque}),
		"GET /v1/usage":  give(agent.Usage{Owners: []agent.OwnerUsage{{Kind: "volume", ID: "/x", Parts: []agent.PartUsage{{Problem: jwt}}}}}),
		"GET /metrics":   give("cleave_up 1"),
	})
	ended := make(chan error, 1)
	go func() { ended <- control.Serve(server, l) }()
	t.Cleanup(func() {
		if err := errors.Join(server.Close(), <-ended); err != nil {
			t.Error(err)
		}
	})
}

// unpack reads a dump, by name.
func unpack(t *testing.T, r io.Reader) (names []string, files map[string]string) {
	t.Helper()
	compressed, err := gzip.NewReader(r)
	if err != nil {
		t.Fatal(err)
	}
	files = map[string]string{}
	for archive := tar.NewReader(compressed); ; {
		head, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return names, files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(head.Name, "cleave-dump/")
		names = append(names, name)
		files[name] = string(text)
	}
}

// TestDump: all parts are there, whole, and without one of the node's secrets.
func TestDump(t *testing.T) {
	t.Parallel()
	o := node(t)
	answer(t, o)
	path, err := Create(t.Context(), filepath.Join(t.TempDir(), "report.tar.gz"), o)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	names, files := unpack(t, bytes.NewReader(content))
	if diff := cmp.Diff([]string{"versions.json", "config.yaml", "status.json", "usage.json", "metrics.txt", "doctor.json", "flight.jsonl", "journal.txt", "index.txt"}, names); diff != "" {
		t.Error(diff)
	}
	escaped, err := json.Marshal(inKube)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		for _, secret := range []string{opaque, inKube, strings.Trim(string(escaped), `"`), fromFile, jwt, bearer, inLogs, "hunter2", "user:pass"} {
			if strings.Contains(text, secret) {
				t.Errorf("%s has %q:\n%s", name, secret, text)
			}
		}
		if filepath.Ext(name) == ".json" && !json.Valid([]byte(text)) {
			t.Errorf("%s is no JSON any more:\n%s", name, text)
		}
	}
	for name, want := range map[string]string{
		"versions.json": `"cleave": "1.2.3"`,
		"config.yaml":   "kubeconfig: " + o.Config.Reclaim.Kubeconfig,
		"status.json":   "the API server said no to REMOVED and REMOVED",
		"doctor.json":   "it says REMOVED",
		"metrics.txt":   "cleave_up 1",
		"journal.txt":   "line 2 https://REMOVED@registry.example/",
		"index.txt":     "not whole: cut off, token: REMOVED",
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s lacks %q:\n%s", name, want, files[name])
		}
	}
	if _, err := config.Parse("config.yaml", []byte(files["config.yaml"])); err != nil {
		t.Errorf("the configuration can't be used: %v", err)
	}
	var deciders []string
	for reader := record.NewReader(strings.NewReader(files["flight.jsonl"])); ; {
		r, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		deciders = append(deciders, r.Decider)
	}
	if diff := cmp.Diff([]string{"two", "three, Authorization: Bearer REMOVED"}, deciders); diff != "" {
		t.Error(diff)
	}

	if _, err := Create(t.Context(), path, o); !errors.Is(err, os.ErrExist) {
		t.Errorf("a file that is there: got %v", err)
	}
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, content) {
		t.Error("a file that is there was changed")
	}
}

// TestDumpOfADeadNode: with nothing there, there is a dump that says so; the journal is asked only where somebody wants it.
func TestDumpOfADeadNode(t *testing.T) {
	t.Parallel()
	o := node(t)
	o.JournalSince, o.ConfigProblem = 0, errors.New("line 3: no such key")
	o.Config.StateDir = filepath.Join(o.Config.StateDir, "none")
	o.journal = func(context.Context, time.Duration) ([]byte, error) {
		t.Error("the journal was asked")
		return nil, nil
	}
	var b bytes.Buffer
	if err := Write(t.Context(), &b, o); err != nil {
		t.Fatal(err)
	}
	names, files := unpack(t, &b)
	if diff := cmp.Diff([]string{"versions.json", "config.yaml", "doctor.json", "index.txt"}, names); diff != "" {
		t.Error(diff)
	}
	for _, want := range []string{"status.json: 0 bytes, not whole: ", "cleave is not running", "flight.jsonl: 0 bytes", "no such key"} {
		if !strings.Contains(files["index.txt"], want) {
			t.Errorf("%q is missing in:\n%s", want, files["index.txt"])
		}
	}
}

// TestAPartThatHangs: what is on a disk that hangs does not keep the rest from being written, nor does a pipe in the place of records.
func TestAPartThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		answers := make(chan struct{})
		began := time.Now()
		content, err := limited(t.Context(), part{"hangs", func(context.Context) ([]byte, error) {
			<-answers
			return []byte("late"), nil
		}})
		if took := time.Since(began); len(content) > 0 || err == nil || !strings.Contains(err.Error(), "within 30s") || took != partTimeout+time.Second {
			t.Errorf("after %s: %q, %v", took, content, err)
		}
		close(answers)
	})
	pipe := filepath.Join(t.TempDir(), "flight.rec")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := lastRecords(pipe, 1); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a pipe gives %v", err)
	}
}

// TestNothingIsLeft: of a dump that ends early there is no file, and a full disk is told.
func TestNothingIsLeft(t *testing.T) {
	t.Parallel()
	o := node(t)
	ctx, cancel := context.WithCancel(t.Context())
	o.examine = func(context.Context, config.Config) (any, error) {
		cancel()
		return "", nil
	}
	dir := t.TempDir()
	if _, err := Create(ctx, filepath.Join(dir, "report"), o); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("there is no /dev/full: ", err)
	}
	if err := errors.Join(Write(t.Context(), full, node(t)), full.Close()); err == nil {
		t.Error("no error from a disk that is full")
	}
}

// TestForms: what is a secret by its looks goes, what only looks a bit like one stays.
func TestForms(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, in, want string }{
		{"YAML", "token: abc", "token: REMOVED"},
		{"JSON", `{"password":"a b", "n":"x"}`, `{"password":"REMOVED", "n":"x"}`},
		{"JSON in JSON", `{"m":"{\"access_token\":\"abc\"}"}`, `{"m":"{\"access_token\":\"REMOVED\"}"}`},
		{"number in JSON", `{"token": 5}`, `{"token": 5}`},
		{"flag", "--api-key=abc --x", "--api-key=REMOVED --x"},
		{"private key", "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "REMOVED\nx"},
		{"removed already", "token: REMOVED", "token: REMOVED"},
		{"path of a token", "kubeletTokenFile: /etc/token", "kubeletTokenFile: /etc/token"},
		{"image by digest", "docker.io/library/busybox@sha256:abc", "docker.io/library/busybox@sha256:abc"},
		{"socket", "unix:///run/cleave/control.sock", "unix:///run/cleave/control.sock"},
		{"words before it", "AWS_SECRET_ACCESS_KEY=abc/def+g x", "AWS_SECRET_ACCESS_KEY=REMOVED x"},
		{"access key in JSON", `{"accessKey":"abc"}`, `{"accessKey":"REMOVED"}`},
		{"registry's credentials", `{"auths":{"registry.example":{"auth":"dXNlcjpwYXNz"}}}`, `{"auths":{"registry.example":{"auth":"REMOVED"}}}`},
		{"a short one of Basic", "Authorization: Basic dTpw", "Authorization: Basic REMOVED"},
		{"a quote in JSON", `{"password":"a\"b c","n":1}`, `{"password":"REMOVED","n":1}`},
		{"an address that is signed", `"get https://blobs.example/x?X-Amz-Signature=abc&sig=d%2Fe\u0026x=1: 403"`, `"get https://blobs.example/x?X-Amz-Signature=REMOVED&sig=REMOVED\u0026x=1: 403"`},
		{"a password with @", "https://user:p@ss@registry.example/x@sha256:1", "https://REMOVED@registry.example/x@sha256:1"},
		{"words", "a bearer of news, basic rules", "a bearer of news, basic rules"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, removed := secrets(nil).remove([]byte(tc.in))
			if string(got) != tc.want || (removed > 0) != (tc.in != tc.want) {
				t.Errorf("got %q and %d, want %q", got, removed, tc.want)
			}
		})
	}
}

// TestShortSecrets: a text of a token file that is no token does not blacken the page.
func TestShortSecrets(t *testing.T) {
	t.Parallel()
	if s := secrets(nil).and("pod\n"); len(s) != 0 {
		t.Errorf("got %q", slices.Collect(slices.Values(s)))
	}
}
