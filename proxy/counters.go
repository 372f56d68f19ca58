package proxy

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/proxy/h2relay"
)

// Counters is what a proxy has counted since its start.
type Counters struct {
	// Calls is the number of calls taken.
	Calls int64 `json:"calls"`
	// CallsInFlight is the number of calls not yet answered.
	CallsInFlight int64 `json:"callsInFlight"`
	// Connections is the number of connections now open.
	Connections int64 `json:"connections"`
	// Fallbacks are the answers and requests that went through unchanged because
	// their interceptor failed, by method and reason, in that order.
	Fallbacks []Fallback `json:"fallbacks,omitempty"`
	// Methods are the calls that have ended, by method; those of methods that
	// are not the CRI's are one, "other".
	Methods []MethodCalls `json:"methods,omitempty"`
}

// MethodCalls are the calls of one method that have ended.
type MethodCalls struct {
	// Method is the last part of its name, such as ListContainers.
	Method string `json:"method"`
	// ByCode counts them by gRPC status, as text ("OK", "NotFound"); "none" is
	// for those that were broken off without one.
	ByCode map[string]int64 `json:"byCode"`
	// Seconds is what they took together, from the header of the request to the
	// end of the answer; calls that do not end by themselves are left out, here
	// and in Within.
	Seconds float64 `json:"seconds,omitempty"`
	// Within counts those that took no longer than each of LatencyBounds, and at
	// its end all of them.
	Within []int64 `json:"within,omitempty"`
}

// latencyBounds are those of MethodCalls.Within, in seconds. A call of the CRI takes from 0.2 ms to the minutes of a pull.
var latencyBounds = [...]float64{0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 60}

// LatencyBounds are the bounds of [MethodCalls.Within], in seconds.
func LatencyBounds() []float64 { return slices.Clone(latencyBounds[:]) }

// Fallback counts the answers of one method that an interceptor could not
// improve for one reason: error, panic, slow, or busy. For requests and gates the
// word "request" or "gate" goes before that.
type Fallback struct {
	Method string `json:"method"`
	Reason string `json:"reason"`
	Count  int64  `json:"count"`
}

type counters struct {
	calls, inFlight, connections atomic.Int64

	// methods are those of the CRI, by full name; other counts the rest. Neither is changed.
	methods map[string]*methodCounters
	other   *methodCounters

	mu        sync.Mutex
	fallbacks map[fallbackKey]int64 // guarded by mu
}

// methodCounters count the calls of one method.
type methodCounters struct {
	name    string
	endless bool
	// codes are the statuses of gRPC, 0 to 16, then any other, then none.
	codes  [codesCounted]atomic.Int64
	nanos  atomic.Int64
	within [len(latencyBounds) + 1]atomic.Int64 // each call once
}

const (
	knownCodes   = int(codes.Unauthenticated) + 1
	unknownCode  = knownCodes
	noCode       = knownCodes + 1
	codesCounted = knownCodes + 2
)

func (m *methodCounters) end(code int, took time.Duration) {
	switch {
	case code == h2relay.NoStatus:
		code = noCode
	case code < 0 || code >= knownCodes:
		code = unknownCode
	}
	m.codes[code].Add(1)
	if m.endless {
		return
	}
	m.nanos.Add(int64(took))
	i, _ := slices.BinarySearch(latencyBounds[:], took.Seconds())
	m.within[i].Add(1)
}

// calls is what was counted; false if nothing was.
func (m *methodCounters) calls() (MethodCalls, bool) {
	out := MethodCalls{Method: m.name, ByCode: map[string]int64{}, Seconds: time.Duration(m.nanos.Load()).Seconds()}
	for code := range m.codes {
		n := m.codes[code].Load()
		if n == 0 {
			continue
		}
		text := "none"
		switch {
		case code < knownCodes:
			text = codes.Code(code).String() //nolint:gosec // 0 to 16
		case code == unknownCode:
			text = "Unknown"
			n += out.ByCode[text]
		}
		out.ByCode[text] = n
	}
	if len(out.ByCode) == 0 {
		return out, false
	}
	if !m.endless {
		sum := int64(0)
		for i := range m.within {
			sum += m.within[i].Load()
			out.Within = append(out.Within, sum)
		}
	}
	return out, true
}

type fallbackKey struct{ method, reason string }

func newCounters() *counters {
	c := &counters{fallbacks: map[fallbackKey]int64{}, methods: map[string]*methodCounters{}, other: &methodCounters{name: "other"}}
	for _, known := range []*grpc.ServiceDesc{&runtimeapi.RuntimeService_ServiceDesc, &runtimeapi.ImageService_ServiceDesc} {
		add := func(name string) {
			full := "/" + known.ServiceName + "/" + name
			c.methods[full] = &methodCounters{name: name, endless: endlessMethods[full]}
		}
		for _, m := range known.Methods {
			add(m.MethodName)
		}
		for _, s := range known.Streams {
			add(s.StreamName)
		}
	}
	return c
}

// begin counts a call; the function that it returns ends it, with its status.
func (c *counters) begin(method string) func(code int) {
	c.calls.Add(1)
	c.inFlight.Add(1)
	m, ok := c.methods[method]
	if !ok {
		m = c.other
	}
	began := time.Now()
	return func(code int) {
		c.inFlight.Add(-1)
		m.end(code, time.Since(began))
	}
}

// fallBack counts one and reports whether it is the first of its kind.
func (c *counters) fallBack(method, reason string) (first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := fallbackKey{method, reason}
	c.fallbacks[key]++
	return c.fallbacks[key] == 1
}

func (c *counters) snapshot() Counters {
	out := Counters{
		Calls:         c.calls.Load(),
		CallsInFlight: c.inFlight.Load(),
		Connections:   c.connections.Load(),
	}
	for _, m := range c.methods {
		if calls, any := m.calls(); any {
			out.Methods = append(out.Methods, calls)
		}
	}
	slices.SortFunc(out.Methods, func(a, b MethodCalls) int { return cmp.Compare(a.Method, b.Method) })
	if calls, any := c.other.calls(); any {
		out.Methods = append(out.Methods, calls)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, count := range c.fallbacks {
		out.Fallbacks = append(out.Fallbacks, Fallback{Method: key.method, Reason: key.reason, Count: count})
	}
	slices.SortFunc(out.Fallbacks, func(a, b Fallback) int {
		return cmp.Or(cmp.Compare(a.Method, b.Method), cmp.Compare(a.Reason, b.Reason))
	})
	return out
}
