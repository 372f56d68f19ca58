// Package proxy is the transparent CRI proxy: it listens on a unix socket,
// hands every call to the runtime's own socket and every answer back, and
// changes nothing on the way but the answers and requests that somebody
// registered an [AnswerFunc] or [RequestFunc] for.
//
// It knows the CRI's services only by their gRPC descriptors, never by hand:
// methods and services that it has never heard of pass as well. It decides
// nothing about filesystems; what an interceptor answers lives in
// proxy/diskstats, and who wires the two is agent. Only agent and cmd may
// import this package.
package proxy
