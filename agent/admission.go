package agent

import (
	"fmt"
	"time"

	"github.com/cleave-cri/cleave/agent/pressure"
	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/proxy/admission"
)

// admissionMaxAge is for how long containers may be refused by what a pass saw: passes are at most 10 s apart.
const admissionMaxAge = time.Minute

// openAdmission has containers refused while a disk is full, where that is configured. In mode crio the kubelet sees the disks and
// refuses pods itself.
func (d *decisions) openAdmission(c *proxy.Config) {
	if !d.cfg.Kube.Admission || d.cfg.Mode != config.ModeCRI {
		return
	}
	for method, hold := range admission.Holds(d.refuses) {
		if before := c.Holds[method]; before != nil {
			hold = proxy.ChainHolds(before, hold)
		}
		c.Holds[method] = hold
	}
}

// passed takes a pass that is over.
func (d *decisions) passed(r record.Record) {
	p := d.book.Passed(r)
	d.pressure.Store(&p)
	if c := d.cluster.Load(); c != nil {
		c.teller.show(p)
	}
}

// refuses is the judge of admission.
func (d *decisions) refuses(pod admission.Pod) string {
	p := d.pressure.Load()
	if p == nil || len(p.Hard()) == 0 {
		return ""
	}
	c := d.cluster.Load()
	if c == nil {
		return "" // who may be refused is not known
	}
	return noContainer(*p, c.view(), pod, time.Now())
}

// noContainer says why no container of a pod may be made, empty if one may: also where it is not known for sure that this pod may be refused.
func noContainer(p pressure.Picture, view kube.View, pod admission.Pod, now time.Time) string {
	hard := p.Hard()
	if len(hard) == 0 || now.Sub(p.At) > admissionMaxAge || pod.Static {
		return ""
	}
	known, ok := view.Pod(pod.UID, pod.Namespace, pod.Name)
	if !ok || known.Age(now) > podsMaxAge || known.Pod.Protected() != "" || known.Pod.ToleratesDiskPressure || view.StaticName(pod.Namespace, pod.Name) {
		return ""
	}
	return fmt.Sprintf("%s is full, so no container is made for pod %s/%s, which does not tolerate %s: %s", hard[0].Role, pod.Namespace, pod.Name, kube.DiskPressure, hard[0].Text)
}
