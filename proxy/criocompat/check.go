package criocompat

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/cleave-cri/cleave/doctor"
	"github.com/cleave-cri/cleave/proxy/unixsock"
)

// Socket is where cAdvisor asks, whatever the kubelet's configuration says
// (cAdvisor, container/crio/client.go: CrioSocket; KSS-4).
const Socket = "/var/run/crio/crio.sock"

// CheckReached is the check that cAdvisor's path leads to the socket that cleave
// listens on: /var/run has to be a link to /run, or the same folder.
func CheckReached(listen string) doctor.Check { return checkReached(listen, Socket) }

func checkReached(listen, asked string) doctor.Check {
	return doctor.Check{Name: "cAdvisor reaches cleave", Run: func(context.Context) doctor.Result {
		ours, err := unixsock.Reached(listen)
		if err != nil {
			return doctor.Warned("can't compare: "+err.Error(), "start cleave first")
		}
		switch theirs, err := unixsock.Reached(asked); {
		case errors.Is(err, fs.ErrNotExist):
			return doctor.Failed(fmt.Sprintf("%s, where the kubelet's cAdvisor asks, does not exist, while cleave listens on %s", asked, listen),
				"make /var/run a link to /run; mode crio needs it")
		case err != nil:
			return doctor.Failed(err.Error(), "make /var/run a link to /run; mode crio needs it")
		case theirs != ours:
			return doctor.Failed(fmt.Sprintf("%s, where the kubelet's cAdvisor asks, is not the socket %s of cleave", asked, listen),
				"stop the CRI-O that listens there, or make /var/run a link to /run; mode crio needs it")
		}
		return doctor.Passed("%s leads to cleave's socket", asked)
	}}
}
