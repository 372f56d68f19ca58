package need_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/lab/need"
)

// recorder is a test that only notes how it ended.
type recorder struct {
	testing.TB
	ended string
}

func (*recorder) Helper() {}

func (r *recorder) Skipf(format string, args ...any) { r.end("skipped: "+format, args...) }

func (r *recorder) Fatalf(format string, args ...any) { r.end("failed: "+format, args...) }

// end keeps the first end: a real test would not go on.
func (r *recorder) end(format string, args ...any) {
	if r.ended == "" {
		r.ended = fmt.Sprintf(format, args...)
	}
}

// A kind of tests that is always skipped, because a package is missing in CI, must not pass unseen.
func TestSkipFailsWhereItIsRequired(t *testing.T) {
	for value, want := range map[string]string{
		"":  "skipped: needs no-such-program",
		"0": "skipped: needs no-such-program",
		"1": "failed: needs no-such-program",
	} {
		t.Setenv(need.RequireEnv, value)
		r := &recorder{TB: t}
		need.Tools(r, "sh", "no-such-program")
		if !strings.HasPrefix(r.ended, want) {
			t.Errorf("with %s=%q: %q, want %q", need.RequireEnv, value, r.ended, want)
		}
	}
}

func TestToolsThatAreThere(t *testing.T) {
	t.Parallel()
	r := &recorder{TB: t}
	if need.Tools(r, "sh"); r.ended != "" {
		t.Errorf("sh is there, and yet: %s", r.ended)
	}
}
