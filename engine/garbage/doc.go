// Package garbage picks what can be deleted without ending a pod: unused
// images, dead containers and sandboxes, logs that nobody reads any more. It
// only picks; each result is a list for somebody else to check again and to
// carry out.
//
// Like package engine, which may use it, it is pure, and it is the kubelet's
// choice, bugs included, unless an option says otherwise. Equal items are
// ordered by their id, where the kubelet's order is random.
package garbage
