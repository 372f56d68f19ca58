// Package evict carries out an eviction that was decided elsewhere: through the API server, so that the cluster sees, counts and
// obeys it. It imports kube for what a pod is; agent may import it.
//
// It decides nothing: who goes, how often and when not is the engine's. It re-checks just before acting, names the pod by its
// UID in every call, and does nothing when a fact is missing.
//
// An eviction through the API deletes the pod. Unlike the kubelet's own, it leaves no pod of phase Failed and reason Evicted, and
// a pod without a controller is gone for good; patching a status does not evict (KSS-12). What remains is the event and the record.
package evict
