// Package engine decides what to do about a node's disks: which thresholds
// are crossed, which node condition follows, what is reclaimed first and which
// pod goes when that is not enough.
//
// It is pure. Values go in, values come out; there is no clock, no file, no
// log and no network, and it imports nothing else of cleave. Same input, same
// output: where the kubelet itself is random, because it walks a Go map or
// sorts unstably, the engine decides by a stated key and also says which other
// answers the kubelet could have given.
//
// The zero Options are the kubelet profile: the decisions of the kubelet
// 1.37, bugs included. integration/kubeletoracle holds that profile against
// the kubelet's own code. Each improvement on it is one named option.
//
// Names such as SYN-9 or RANK-16 in comments and results are rules; docs/engine.md
// says what each family is about, and a test named after the rule shows it.
package engine
