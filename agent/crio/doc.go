// Package crio is what cleave keeps in mind about a kubelet that takes it for CRI-O (mode crio): which disks that kubelet may be told
// about, what it was told, and whether it asked at all. proxy/criocompat has the wire, this package the answers.
//
// Only agent may import it; agent supplies the kubelet's settings and the node's layout.
package crio
