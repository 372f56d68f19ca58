// Package kube runs the Kubernetes that a node talks to: etcd, a real API server and a real kubelet, each a process of one's
// own, without scheduler and controllers. Pods are created with their node's name set.
//
// They use fixed ports and the kubelet's fixed paths, so the program that uses this package has to be apart (lab/enclave). For
// integration tests and the lab. It needs root.
package kube
