//go:build unproved

package kubelet

// The compatibility matrix is there to prove versions, so the program that it
// runs splits for every one that may be told of a split at all.
const provedFrom, provedTo = firstSplit, 1 << 20
