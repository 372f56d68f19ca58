package handover_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cleave-cri/cleave/agent/handover"
)

// TestMain lets this program be its own successor.
func TestMain(m *testing.M) {
	switch os.Getenv("HANDOVER_TEST") {
	case "ready":
		in, err := handover.Inherit()
		if err != nil {
			os.Exit(3)
		}
		if f, note := in.Take("file"); f == nil || note != "1:2=3" || in.Done() != nil {
			os.Exit(3)
		}
		os.Exit(0)
	case "never":
		time.Sleep(time.Hour) //nolint:forbidigo // killed by its predecessor
	case "fails":
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func start(ctx context.Context, t *testing.T, behaviour string) error {
	t.Helper()
	t.Setenv("HANDOVER_TEST", behaviour)
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close() //nolint:errcheck // end of test
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	_, err = handover.Start(ctx, self, nil, []handover.File{{Name: "file", Note: "1:2=3", File: file}})
	return err
}

func TestSuccessorThatBecomesReady(t *testing.T) {
	if err := start(t.Context(), t, "ready"); err != nil {
		t.Error(err)
	}
}

func TestSuccessorThatEnds(t *testing.T) {
	if err := start(t.Context(), t, "fails"); err == nil || !strings.Contains(err.Error(), "ended before it was ready") {
		t.Errorf("got %v", err)
	}
}

// TestStopGoesBeforeHandover: a process that is told to stop has no successor,
// neither one that is ready at once nor one that never is.
func TestStopGoesBeforeHandover(t *testing.T) {
	stopped, cancel := context.WithCancel(t.Context())
	cancel()
	for _, behaviour := range []string{"ready", "never"} {
		for range 20 {
			if err := start(stopped, t, behaviour); !errors.Is(err, context.Canceled) {
				t.Fatalf("%s: got %v, want %v", behaviour, err, context.Canceled)
			}
		}
	}
	for range 5 {
		soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		began := time.Now()
		if err := start(soon, t, "never"); err == nil {
			t.Error("a successor that is never ready has taken over")
		}
		cancel()
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("told to stop after 20 ms, it waited %s for the successor", took)
		}
	}
}
