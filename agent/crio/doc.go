// Package crio is what cleave knows for a kubelet that takes it for CRI-O (mode crio): which disks that kubelet may be told about,
// whether it was told, and which container a cAdvisor's question is about. proxy/criocompat has the wire, this package the answers.
//
// Only agent may import it; agent supplies the runtime, the kubelet's settings and the node's layout.
package crio
