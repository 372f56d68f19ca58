package main

import (
	"os"
	"testing"

	"github.com/cleave-cri/cleave/lab/janitor"
)

// asDemo makes this test program the demo, so that tests can start and kill it.
const asDemo = "CLEAVE_TEST_AS_DEMO"

func TestMain(m *testing.M) {
	janitor.Main()
	if os.Getenv(asDemo) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}
