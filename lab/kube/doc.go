// Package kube is the Kubernetes of lab/plane (etcd, a real API server and a real kubelet) for tests: with client-go's typed clients,
// pods of one container, exec and logs.
//
// The program that uses this package has to be apart (lab/enclave). It needs root.
package kube
