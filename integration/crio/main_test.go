// Package crio tests mode crio as it is used: a real kubelet with pods of a real API server, on a real containerd with runc,
// through cleave, on filesystems of its own. It needs root; what it runs is pinned in integration/toolchain.
//
// CRI-O's socket has a fixed path, so all of it runs in one mount namespace of its own (TH-6), one node at a time.
package crio

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/enclave"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/node"
)

// cleaveEnv tells the program inside where the program under test is.
const cleaveEnv = "CLEAVE_TEST_BINARY"

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		return m.Run() // every test says what it needs
	}
	var dir string
	inside, status, err := enclave.Apart(func() (err error) {
		ctx := context.Background()
		if _, err := bin.Get(ctx, os.Stderr, "containerd", "shim", "kubelet", "apiserver", "etcd"); err != nil {
			return err
		}
		if dir, err = os.MkdirTemp("", "cleave-crio"); err != nil {
			return err
		}
		var tags []string
		if os.Getenv(matrixEnv) != "" {
			tags = []string{"unproved"} // see config/kubelet
		}
		// With the race detector it takes a multiple of the time.
		binary, err := node.BuildCleave(ctx, dir, os.Getenv(benchEnv)+os.Getenv(evictBenchEnv) == "", tags...)
		if err != nil {
			return err
		}
		return os.Setenv(cleaveEnv, binary)
	})
	if dir != "" {
		defer os.RemoveAll(dir) //nolint:errcheck,forbidigo // holds one program of ours
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if !inside {
		return status
	}
	return m.Run()
}

// eventually waits until try succeeds.
func eventually(ctx context.Context, t *testing.T, what string, try func() error) {
	t.Helper()
	if err := until(ctx, what, try); err != nil {
		t.Fatal(err)
	}
}

// until does so and returns an error if ctx ends first.
func until(ctx context.Context, what string, try func() error) error {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, err)
		}
	}
}

// patience bounds what a test waits for: far longer than it should take on a busy machine.
const patience = 6 * time.Minute
