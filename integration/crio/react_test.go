package crio

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/kube"
)

// KSS-24 turned round: cleave's figures are seconds old where the kubelet's are a minute old, so with it the one that fills the disk
// goes, at any speed, through the API, and the innocent stays.
func TestKSS24_CleaveEvictsTheFiller(t *testing.T) {
	for _, tc := range []struct {
		mode config.Mode
		rate int
		long bool
	}{
		{config.ModeCRIO, 100, false},
		{config.ModeCRI, 100, true},
		{config.ModeCRIO, 10, true},
	} {
		t.Run(fmt.Sprintf("%s, %d MiB a second", tc.mode, tc.rate), func(t *testing.T) {
			if tc.long && !long() {
				t.Skipf("takes minutes: `make test-crio` runs it")
			}
			c := start(t, options{mode: tc.mode, settings: eviction(map[string]string{"nodefs.available": "30%"}), cleave: func(cfg *config.Config) {
				cfg.Reclaim.Enabled, cfg.Reclaim.Evict = true, true
			}})
			ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
			defer cancel()
			for _, s := range []kube.PodSpec{innocent(), fill(tc.rate)} {
				if _, err := c.plane.Run(ctx, s); err != nil {
					t.Fatal(err)
				}
			}
			eventually(ctx, t, "cleave decides", func() error {
				s, err := c.node.Cleave.Status(ctx)
				switch {
				case err != nil:
					return err
				case s.Reclaim == nil || s.Reclaim.LookedAt == nil || s.Reclaim.Problem != "":
					return fmt.Errorf("its status is %+v", s.Reclaim)
				}
				return nil
			})
			if _, err := c.plane.Exec(ctx, "writer", "touch", "/go"); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			eventually(ctx, t, "the writer is gone", func() error {
				if p, err := c.plane.Pod(ctx, "innocent"); err != nil || evicted(p) {
					t.Fatalf("innocent went first: %v", err)
				}
				p, err := c.plane.Pod(ctx, "writer")
				switch {
				case apierrors.IsNotFound(err):
					return nil
				case err != nil:
					return err
				case evicted(p):
					t.Fatalf("the kubelet was first: %s", p.Status.Message)
				}
				return errors.New("it is there")
			})
			s, err := c.node.Cleave.Status(ctx)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("gone after %s: %+v", time.Since(began).Round(100*time.Millisecond), s.Reclaim.Counts)
			if s.Reclaim.Counts.Evicted != 1 {
				t.Errorf("cleave evicted %d pods", s.Reclaim.Counts.Evicted)
			}
			eventually(ctx, t, "the disk has room", func() error {
				s, err := c.node.Cleave.Status(ctx)
				if err == nil && s.Reclaim.Outcome != "calm" {
					err = fmt.Errorf("cleave says %q", s.Reclaim.Outcome)
				}
				return err
			})
			c.stillRuns(ctx, t, "innocent")
		})
	}
}
