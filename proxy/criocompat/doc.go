// Package criocompat is what a kubelet expects of a node with CRI-O, as far as
// it asks: the kubelet's cAdvisor, which measures containers there, asks over
// HTTP on the same socket that carries the CRI where images and containers lie
// and what a container's root is (KSS-4, KSS-9), and it takes only cgroups with
// certain names (KSS-6). The package tells the two protocols on the socket apart,
// answers the small one from what agent supplies, and holds the names.
//
// criocompat/nriplugin gives containers these names, criocompat/podlabel marks
// sandboxes, criocompat/containers looks containers up. Only agent and cmd may
// import this package, and the first and the last of these.
package criocompat
