package nriplugin

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// notRegistered is the reason of a runtime that is not ready because of us, in the
// form of CRI's RuntimeCondition.reason.
const notRegistered = "NRIPluginNotRegistered"

// RuntimeStatus is an interceptor of the CRI's Status: while the plugin is not registered
// the runtime is not ready, and so the kubelet does not create containers that it
// could not measure. A runtime that has more to complain of keeps its own words.
func (p *Plugin) RuntimeStatus(_ context.Context, answer []byte) ([]byte, error) {
	p.mu.Lock()
	now := p.state
	p.mu.Unlock()
	if now.registered {
		return nil, nil
	}
	m := &runtimeapi.StatusResponse{}
	if err := proto.Unmarshal(answer, m); err != nil {
		return nil, fmt.Errorf("decode %s: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	if !notReady(m, fmt.Sprintf("%v: %v", ErrNotRegistered, now.reason)) {
		return nil, nil
	}
	better, err := proto.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	return better, nil
}

// notReady takes the runtime's readiness away and reports whether it had it.
func notReady(m *runtimeapi.StatusResponse, message string) (changed bool) {
	for _, c := range m.GetStatus().GetConditions() {
		if c.GetType() == runtimeapi.RuntimeReady && c.GetStatus() {
			c.Status, c.Reason, c.Message = false, notRegistered, message
			changed = true
		}
	}
	return changed
}
