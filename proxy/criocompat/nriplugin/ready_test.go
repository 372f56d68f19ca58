package nriplugin

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestRuntimeIsNotReadyWithoutThePlugin(t *testing.T) {
	t.Parallel()
	unknown := protowire.AppendVarint(protowire.AppendTag(nil, 4000, protowire.VarintType), 7)
	answer := func(ready bool, reason, message string) *runtimeapi.StatusResponse {
		m := &runtimeapi.StatusResponse{
			Status: &runtimeapi.RuntimeStatus{Conditions: []*runtimeapi.RuntimeCondition{
				{Type: runtimeapi.NetworkReady, Status: true},
				{Type: runtimeapi.RuntimeReady, Status: ready, Reason: reason, Message: message},
			}},
			Info: map[string]string{"config": "{}"},
		}
		m.ProtoReflect().SetUnknown(unknown)
		return m
	}
	const why = "cleave's NRI plugin is not registered with containerd: gone"
	for name, tc := range map[string]struct {
		registered bool
		in, want   *runtimeapi.StatusResponse
	}{
		"registered":         {true, answer(true, "", ""), nil},
		"not registered":     {false, answer(true, "", ""), answer(false, "NRIPluginNotRegistered", why)},
		"broken anyway":      {false, answer(false, "Broken", "its own words"), nil},
		"without conditions": {false, &runtimeapi.StatusResponse{}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := New(Config{})
			p.set(func(s *state) { s.registered, s.reason = tc.registered, errors.New("gone") })
			in, err := proto.Marshal(tc.in)
			if err != nil {
				t.Fatal(err)
			}
			out, err := p.RuntimeStatus(t.Context(), in)
			if err != nil {
				t.Fatal(err)
			}
			if tc.want == nil {
				if out != nil {
					t.Errorf("changed to %q", out)
				}
				return
			}
			got := &runtimeapi.StatusResponse{}
			if err := proto.Unmarshal(out, got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got, protocmp.Transform()); diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}
		})
	}
	p := New(Config{})
	if out, err := p.RuntimeStatus(t.Context(), []byte{0xff}); out != nil || err == nil {
		t.Errorf("garbage: %q, %v", out, err)
	}
}
