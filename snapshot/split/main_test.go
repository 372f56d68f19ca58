package split

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/cleave-cri/cleave/lab/janitor"
)

func TestMain(m *testing.M) {
	janitor.Main()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			os.Stderr.WriteString(err.Error() + "\n") //nolint:errcheck // the exit code says it too
			code = 1
		}
	}
	os.Exit(code)
}
