package criocompat

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/cleave-cri/cleave/doctor"
)

// The kubelet's cAdvisor asks below /var/run, cleave listens below /run.
func TestCheckReached(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	at := func(names ...string) string { return filepath.Join(append([]string{dir}, names...)...) }
	for _, folder := range []string{"run", "other"} {
		if err := os.Mkdir(at(folder), 0o700); err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("unix", at(folder, "s"))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close() //nolint:errcheck // end of test
	}
	if err := os.Symlink("run", at("link")); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		listen, asked string
		want          doctor.Level
	}{
		"a link":            {at("run", "s"), at("link", "s"), doctor.Pass},
		"no such folder":    {at("run", "s"), at("missing", "s"), doctor.Fail},
		"a real CRI-O":      {at("run", "s"), at("other", "s"), doctor.Fail},
		"cleave is not on":  {at("run", "none"), at("link", "s"), doctor.Warn},
		"a file in between": {at("run", "s"), at("run", "s", "x"), doctor.Fail},
	} {
		t.Run(name, func(t *testing.T) {
			got := doctor.Run(t.Context(), []doctor.Check{checkReached(tc.listen, tc.asked)})[0]
			if got.Level != tc.want || got.Level != doctor.Pass && got.Remedy == "" {
				t.Errorf("%+v, want %s", got, tc.want)
			}
		})
	}
}
