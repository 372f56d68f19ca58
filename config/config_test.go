package config

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestExampleIsTheDefault(t *testing.T) {
	t.Parallel()
	got, err := Parse("example.yaml", Example())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Default(), got); diff != "" {
		t.Errorf("(-default +example):\n%s", diff)
	}
}
