// Package plane runs the Kubernetes that a node talks to: etcd, a real API server and a real kubelet, each a process of one's
// own, without scheduler and controllers. Pods are created with their node's name set.
//
// They use the kubelet's fixed paths, so the program that uses this package has to be apart (lab/enclave). For `cleave lab` and tests;
// lab/kube has client-go's typed clients for it, which the program that is shipped does without. It needs root.
package plane
