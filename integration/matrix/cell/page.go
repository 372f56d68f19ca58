package cell

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cleave-cri/cleave/config"
)

// Page is docs/compatibility.md: the cells with the outcome of each.
func Page(cells []Key, all []Outcome) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("# What cleave was run with")
	line("")
	line("Written by `make matrix` from its last run; not to be edited. Each cell is a node of its own on this page's machine: etcd, the")
	line("API server, the kubelet, cleave and its split snapshotter, containerd and runc, images on one disk and writable layers on another.")
	line("")
	line("A cell passes when the node becomes ready, a pod runs and writes, a command runs in it, the kubelet is started anew under it, and")
	line("then")
	line("")
	line("- in mode `cri`: the kubelet's summary has the figures of the image disk, no split (KSS-2), and the pod's writable layer within")
	line("  1 %% of `du`;")
	line("- in mode `crio`: the summary has both disks, each with the figures of its own, the pod's network, and its writable layer within")
	line("  1 %% of `du`;")
	line("- `cleave status` names no problem.")
	line("")
	outcomes := map[Key]Outcome{}
	var kubelets, containerds []string
	add := func(names []string, name string) []string {
		if slices.Contains(names, name) {
			return names
		}
		return append(names, name)
	}
	for _, o := range all {
		outcomes[o.Key] = o
	}
	for _, key := range cells {
		kubelets, containerds = add(kubelets, key.Kubelet), add(containerds, key.Containerd)
	}
	header, rule := "| kubelet |", "| --- |"
	for _, c := range containerds {
		for _, mode := range Modes() {
			header += fmt.Sprintf(" containerd %s, `%s` |", c, mode)
			rule += " --- |"
		}
	}
	line("%s", header)
	line("%s", rule)
	var failures []Outcome
	for _, k := range kubelets {
		row := "| " + k + " |"
		for _, c := range containerds {
			for _, mode := range Modes() {
				o, ran := outcomes[Key{k, c, mode}]
				switch {
				case !ran:
					row += " not run |"
				case o.Passed:
					row += " passed |"
				default:
					failures = append(failures, o)
					row += fmt.Sprintf(" **failed** (%d) |", len(failures))
				}
			}
		}
		line("%s", row)
	}
	for i, o := range failures {
		if i == 0 {
			line("")
		}
		line("%d. kubelet %s, containerd %s, mode `%s`: %s", i+1, o.Kubelet, o.Containerd, o.Mode, plain(o.Reason))
	}
	line("")
	line("Run with API server %s, on %s.", list(all, func(o Outcome) string { return o.APIServer }), list(all, func(o Outcome) string { return o.Machine }))
	line("")
	proved := "none"
	if p := Proved(cells, all); len(p) > 0 {
		proved = strings.Join(p, ", ")
	}
	line("Kubelets that passed in mode `%s` and failed with no containerd: %s. Only to these does cleave report a split in that mode;", config.ModeCRIO, proved)
	line("another one is told of one disk, and `cleave status` and `cleave doctor` say so.")
	return b.String()
}

func list(all []Outcome, of func(Outcome) string) string {
	if len(all) == 0 {
		return "nothing"
	}
	return strings.Join(values(all, of), "; ")
}

// plain takes from a text what would be markup, and keeps it on one line.
func plain(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	return "`" + strings.ReplaceAll(text, "`", "'") + "`"
}
