package walk

import (
	"os"
	"testing"

	"github.com/cleave-cri/cleave/lab/janitor"
)

func TestMain(m *testing.M) {
	janitor.Main()
	os.Exit(m.Run())
}
