package proxy

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
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
}

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

	mu        sync.Mutex
	fallbacks map[fallbackKey]int64 // guarded by mu
}

type fallbackKey struct{ method, reason string }

func newCounters() *counters {
	return &counters{fallbacks: map[fallbackKey]int64{}}
}

// begin counts a call; the function that it returns ends it.
func (c *counters) begin() func() {
	c.calls.Add(1)
	c.inFlight.Add(1)
	return c.end
}

func (c *counters) end() { c.inFlight.Add(-1) }

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
