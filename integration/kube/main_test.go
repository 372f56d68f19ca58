// Package kube tests what cleave asks of Kubernetes against a real API server and etcd: what its role allows and what is lost
// without each part of it, evictions and budgets, and what is known when the server goes away. It needs root.
//
// No kubelet runs here: a test takes its place where a pod has to end. Evictions with a real one are in integration/crio.
package kube

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/enclave"
	"github.com/cleave-cri/cleave/lab/janitor"
)

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		return m.Run() // every test says what it needs
	}
	inside, status, err := enclave.Apart(func() error {
		_, err := bin.Get(context.Background(), os.Stderr, "apiserver", "etcd")
		return err
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if !inside {
		return status
	}
	return m.Run()
}

// longEnv has the server away for a minute.
const longEnv = "CLEAVE_KUBE"

// patience bounds what a test waits for: far longer than it should take on a busy machine.
const patience = 4 * time.Minute

// eventually waits until try succeeds.
func eventually(t *testing.T, what string, try func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try(ctx)
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("wait until %s: %v", what, err)
		}
	}
}
