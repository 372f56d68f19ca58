package agent

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cleave-cri/cleave/agent/ephemeral"
)

// TestShimsThatHang: a look at who is there waits for one question at most, and those
// that answer are known after as many looks as there are shims that hang, also one that
// had no process yet.
func TestShimsThatHang(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const hanging = 3
		var w workloads
		for i := range hanging {
			w.containers = append(w.containers, ephemeral.Container{ID: fmt.Sprintf("hangs %d", i), Running: true})
		}
		for i := range 50 {
			w.containers = append(w.containers, ephemeral.Container{ID: fmt.Sprintf("good %d", i), Running: true})
		}
		w.containers = append(w.containers, ephemeral.Container{ID: "late", Running: true})
		asked, begun := 0, false
		b := &pidBook{ask: func(ctx context.Context, id string) (int, bool) {
			asked++
			if id == "late" && !begun {
				return 0, false
			}
			if strings.HasPrefix(id, "hangs") {
				<-ctx.Done()
				return 0, false
			}
			return 7, true
		}}
		var got map[string]int
		for i := range 2 * (hanging + 1) {
			begun = i > hanging
			began := time.Now()
			got = b.of(t.Context(), w)
			if took := time.Since(began); took > askTimeout {
				t.Errorf("a look took %v, want %v at most", took, askTimeout)
			}
		}
		if len(got) != 51 {
			t.Errorf("%d processes are known, want all 51 that answer: %v", len(got), got)
		}
		asked = 0
		w.containers = append(w.containers, ephemeral.Container{ID: "good and new", Running: true})
		if got = b.of(t.Context(), w); got["good and new"] != 7 || asked != 2 {
			t.Errorf("a new one has process %d after %d questions, want 7 before one that hangs", got["good and new"], asked)
		}
	})
}
