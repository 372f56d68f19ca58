//go:build !unproved

package kubelet

// provedFrom and provedTo are the minor versions of kubelets that mode crio was
// run with, as docs/compatibility.md has it.
const provedFrom, provedTo = 34, 37
