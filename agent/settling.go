package agent

import (
	"github.com/cleave-cri/cleave/agent/settle"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/reclaim/ctdstore"
)

// openSettler lets calls that remove containers end when the space is back.
func (a *agent) openSettler(c *proxy.Config) {
	store := ctdstore.New(a.upstream, a.cfg.Runtime.Namespace, splitSnapshotter) // a collection is of all snapshotters
	a.settler = settle.New(store.Collect, a.observer.short, a.log.Named("settle"))
	if c.Holds == nil {
		c.Holds = map[string]proxy.HoldFunc{}
	}
	for method, hold := range a.settler.Holds() {
		c.Holds[method] = hold
	}
}

// shortPercent is how much of a filesystem has to be available before it may be that somebody evicts for it. Kubelets have
// thresholds of 10 to 15 %, and soft ones somewhat above.
const shortPercent = 30

// short says whether a filesystem that containers write to is short of space, in the newest picture.
func (o *observer) short() bool {
	p := o.newest.Load()
	for _, role := range []fsstats.Role{fsstats.ContainerFS, fsstats.NodeFS} {
		place, ok := p.layout.Get(role)
		if ok && place.Filesystem.AvailableBytes < place.Filesystem.CapacityBytes/100*shortPercent {
			return true
		}
	}
	return false
}
