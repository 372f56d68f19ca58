package crio

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/disk"
	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/lab/node"
	"github.com/cleave-cri/cleave/lab/pod"
)

// plain is a node with containerd alone, without kubelet.
func plain(ctx context.Context, t *testing.T) *node.Node {
	t.Helper()
	need.Root(t)
	need.Loop(t)
	need.Tools(t, "runc")
	run := need.Lab(t)
	paths, err := bin.Get(ctx, os.Stderr, "containerd", "shim")
	if err != nil {
		t.Fatal(err)
	}
	n, err := node.Start(ctx, run, node.Options{
		Containerd: paths[0], Shim: paths[1],
		Disks: []disk.Spec{{Name: "a", FS: disk.Ext4, SizeBytes: 64 << 20}, {Name: "b", FS: disk.Ext4, SizeBytes: 64 << 20}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		if err := n.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return n
}

// What would leave a kubelet without figures is refused at the start, with what to do.
func TestModeCRIOIsRefused(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	n := plain(ctx, t)
	start := func(t *testing.T, name string, change func(*config.Config)) error {
		t.Helper()
		c, err := n.Another(os.Getenv(cleaveEnv), name, func(cfg *config.Config) {
			cfg.Mode = config.ModeCRIO
			if change != nil {
				change(cfg)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.Stop(context.WithoutCancel(ctx)); err != nil {
				t.Error(err)
			}
		})
		return c.Start(ctx)
	}
	refused := func(t *testing.T, err error, words ...string) {
		t.Helper()
		if err == nil {
			t.Fatal("it serves")
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("it says\n%v\nwant %q", err, w)
			}
		}
	}
	t.Run("a CRI-O that lives", func(t *testing.T) {
		if err := os.MkdirAll("/run/crio", 0o755); err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("unix", "/run/crio/crio.sock")
		if err != nil {
			t.Fatal(err)
		}
		refused(t, start(t, "alive", nil), "/run/crio/crio.sock")
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("LAY-13: three disks", func(t *testing.T) {
		refused(t, start(t, "three", func(cfg *config.Config) {
			cfg.Filesystems.ImageFS, cfg.Filesystems.ContainerFS = n.Disks["a"].Path(), n.Disks["b"].Path()
		}), "three disks", "mode cri")
	})
	t.Run("KSS-4: no way from /var/run", func(t *testing.T) {
		if err := unix.Mount("tmpfs", "/var", "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		err := start(t, "var", nil)
		if err := unix.Unmount("/var", unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
		refused(t, err, "/var/run/crio/crio.sock", "make /var/run a link to /run")
	})
}

// Who says nothing, or nonsense, on the socket keeps nobody else from being answered.
func TestNonsenseOnTheSocketHoldsUpNobody(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	n := plain(ctx, t)
	c, err := n.Another(os.Getenv(cleaveEnv), "crio", func(cfg *config.Config) { cfg.Mode = config.ModeCRIO })
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	})
	var silent []net.Conn
	say := func(text string) net.Conn {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.Socket())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, text); err != nil && !strings.Contains(err.Error(), "broken pipe") {
			t.Fatal(err)
		}
		return conn
	}
	for range 1000 {
		silent = append(silent, say(""))
	}
	for _, text := range []string{"GET /inf", "\x00\xff\x16\x03\x01", "PRI * HTTP/2.0\r\n", "POST /info HTTP/1.1\r\n\r\n"} {
		silent = append(silent, say(text))
	}
	client, err := pod.Dial(c.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close() //nolint:errcheck // only asked
	if _, err := client.Pull(ctx, node.BusyboxImage); err != nil {
		t.Errorf("a call between: %v", err)
	}
	p, err := client.Run(ctx, n.PodSpec("between"))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Remove(ctx); err != nil {
		t.Error(err)
	}
	asked := say("GET /containers/" + strings.Repeat("g", 64) + " HTTP/1.1\r\nHost: crio\r\n\r\n")
	answer := make([]byte, 12)
	if _, err := io.ReadFull(asked, answer); err != nil || string(answer) != "HTTP/1.1 404" {
		t.Errorf("an unknown alias gets %q, %v", answer, err)
	}
	status, err := c.Status(ctx)
	if err != nil || status.CRIO == nil || !status.CRIO.Plugin.Registered {
		t.Errorf("the status is %s, %v", fmt.Sprint(status.CRIO), err)
	}
	for _, conn := range append(silent, asked) {
		_ = conn.Close() //nolint:errcheck // it may be closed already
	}
}
