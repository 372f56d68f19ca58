// Package kubeletoracle is only tests: it drives the kubelet's own eviction
// manager, image garbage collector and threshold parser, unmodified, and
// engine's kubelet profile through the same random scenarios and compares what
// they do, step by step. It also runs the kubelet's command on random settings
// and compares them with what config/kubelet reads, and takes pods through a real
// API server to both. It is a module of its own, because the kubelet's code may
// never get into what cleave ships.
//
// The kubelet's loop runs in a testing/synctest bubble, so that hours pass in
// milliseconds. A clock handed in would not do: the loop also waits on
// time.After.
package kubeletoracle
