// Package lab is the ground that integration tests, the demo and the split-filesystem lab stand on: filesystems
// on loop devices, a private containerd, images built on the spot, pods, and the certainty that all of it goes away
// again. The work is in its sub-packages:
//
//   - janitor: one folder per run, and a process that cleans it up whatever becomes of the run
//   - sweep: finding and ending processes, mounts, loop devices and cgroups that belong to such a folder
//   - disk: a filesystem of its own on a loop device
//   - runtime: a private containerd
//   - image: images, and the registry that serves them
//   - pod: host-network pods through any CRI endpoint
//   - du, flock: GNU du as a measure, locks between processes
//   - guest: a Linux of its own in qemu, for what this machine's kernel can't do
//   - guestnode: such a guest as a node: containerd and cleave as units of systemd
//   - cachedir: where costly things are kept outside of the checkout
//   - need: what a test needs of the machine, and what happens when it isn't there
//   - stage: a node as a scenario describes it, for `cleave lab`; with deputy, which stands in for its kubelet, and
//     writer, which its containers run
//   - plane: etcd, a real API server and a real kubelet; kube: the same with typed clients, for tests
//   - podapi: asks an API server for pods, the deputy or a real one
//   - play: plays a scenario on such a node, and compares
//
// Nothing that cleave does in production imports these packages; the one command that does is `cleave lab`.
package lab
