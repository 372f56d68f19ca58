package stage

import (
	"github.com/cleave-cri/cleave/lab/deputy"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/writer"
)

// Main turns this process into a part of a lab if it was started as one, and does
// not return then: the janitor, the kubelet's deputy, or what a container runs. It
// must be the first call of main or TestMain.
func Main() {
	janitor.Main()
	deputy.Main()
	writer.Main()
}
