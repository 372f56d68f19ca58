package split

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/cleave-cri/cleave/lab/janitor"
)

func TestMain(m *testing.M) {
	janitor.Main()
	crashMain()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}
