// Package kube is what cleave knows from Kubernetes and asks of it: the specifications of this node's pods, and the few calls
// that evict, report and taint.
//
// Pods come from up to three sources, each a loop that fills a ready value: the API server ([Watch]), the kubelet's /pods
// ([KubeletPods]) and the folder of static pods ([Manifests]). [Merge] makes one [View] of them, in which each pod has its age.
// What a source does not say is not known; it is never 0.
//
// Deciding is not done here. Packages below have the parts: evict carries an eviction out, report says what happened in events,
// conditions and a taint, rights checks what cleave may do, allocatable explains Node Allocatable. Of this module kube imports
// nothing; agent may import it, and turns its pods into the engine's.
//
// Facts about the API were read in Kubernetes v1.37.2. Names such as SYN-4 mark single rules of the kubelet.
package kube
