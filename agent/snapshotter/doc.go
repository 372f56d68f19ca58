// Package snapshotter is the process of the split snapshotter: it serves
// snapshot/split to containerd on a unix socket, keeps the acquaintance with
// that containerd, and answers `cleave snapshotter status`. The snapshotter
// itself is in snapshot/split and knows neither sockets nor containerd.
//
// cmd may import it.
package snapshotter
