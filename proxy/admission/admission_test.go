package admission

import (
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestTheJudgeIsAskedAboutThePodOfTheContainer(t *testing.T) {
	t.Parallel()
	request := func(annotations map[string]string) []byte {
		data, err := proto.Marshal(&runtimeapi.CreateContainerRequest{
			PodSandboxId: "s", Config: &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "c"}},
			SandboxConfig: &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u"}, Annotations: annotations},
		})
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	web := Pod{UID: "u", Namespace: "shop", Name: "web"}
	static := web
	static.Static = true
	for _, tc := range []struct {
		name    string
		request []byte
		says    string
		asked   Pod
		code    codes.Code
	}{
		{"a pod of the API server, and all is well", request(map[string]string{source: "api"}), "", web, codes.OK},
		{"a pod of the API server, and a disk is full", request(map[string]string{source: "api"}), "imagefs is full", web, codes.ResourceExhausted},
		{"a pod that does not say where it is from", request(nil), "imagefs is full", web, codes.ResourceExhausted},
		{"a static pod", request(map[string]string{source: "file"}), "", static, codes.OK},
		{"no request at all", []byte{0xff}, "imagefs is full", Pod{}, codes.OK},
		{"an empty request", nil, "", Pod{}, codes.OK},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var asked Pod
			hold := Holds(func(p Pod) string { asked = p; return tc.says })[runtimeapi.RuntimeService_CreateContainer_FullMethodName]
			ended, err := hold(t.Context(), tc.request)
			if status.Code(err) != tc.code || ended != nil || asked != tc.asked {
				t.Errorf("asked about %+v, answered %v", asked, err)
			}
			if tc.code != codes.OK && status.Convert(err).Message() != "cleave: imagefs is full" {
				t.Errorf("answered %v", err)
			}
		})
	}
}

func FuzzRequest(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("\x0a\x01s\x1a\x05\x0a\x03\x12\x01u"))
	hold := Holds(func(p Pod) string { return p.UID })[runtimeapi.RuntimeService_CreateContainer_FullMethodName]
	f.Fuzz(func(t *testing.T, request []byte) {
		if _, err := hold(t.Context(), request); err != nil && status.Code(err) != codes.ResourceExhausted {
			t.Error(err)
		}
	})
}
