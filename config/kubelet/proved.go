//go:build !unproved

package kubelet

// provedFrom and provedTo are the minor versions of kubelets that mode crio was
// run with, as docs/compatibility.md has it; of 1.34 to 1.36 only the source was
// read (KSS-16).
const provedFrom, provedTo = 37, 37
