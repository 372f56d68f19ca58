package agent

import "github.com/cleave-cri/cleave/web"

// values are what the metrics show now. It does not block.
func (a *agent) values() web.Values {
	v := web.Values{Version: a.opt.Version}
	if a.crio != nil {
		v.Kubelet = a.crio.status(a.observer.disks(), a.observer.newest.Load()).values()
	}
	return v
}
