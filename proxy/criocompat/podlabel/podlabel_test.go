package podlabel

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

type labels = map[string]string

// marked and plain are a sandbox's labels with ours and without.
func marked() labels {
	return labels{"io.kubernetes.pod.name": "p", Label: Value, "app": "POD", "x": Label}
}

func plain() labels {
	l := marked()
	delete(l, Label)
	return l
}

// container has the same label, with a name that a container can have.
func container() *runtimeapi.ContainerStatus {
	return &runtimeapi.ContainerStatus{Id: "c", Labels: labels{Label: "app"}}
}

// unknown is a field that no version of the CRI has.
var unknown = protowire.AppendString(protowire.AppendTag(nil, 4000, protowire.BytesType), "kept "+Label+Value)

func encode(t testing.TB, m proto.Message) []byte {
	t.Helper()
	m = proto.Clone(m)
	m.ProtoReflect().SetUnknown(unknown)
	encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return encoded
}

const (
	infoMarked = `{"pid":5,"config":{"metadata":{"name":"p"},"labels":{"a":"b","` + Label + `":"POD","z":"y"}},"sandboxMetadata":{"Config":{"labels":{"` +
		Label + `":"POD"}}},"runtimeSpec":{"annotations":{"` + Label + `":"POD"}}}`
	infoPlain = `{"pid":5,"config":{"metadata":{"name":"p"},"labels":{"a":"b","z":"y"}},"sandboxMetadata":{"Config":{"labels":{}}},"runtimeSpec":{"annotations":{"` +
		Label + `":"POD"}}}`
)

// answers are all answers that carry a sandbox's labels, with the label given.
func answers(l labels, info string) map[string]proto.Message {
	stats := &runtimeapi.PodSandboxStats{
		Attributes: &runtimeapi.PodSandboxAttributes{Id: "s", Labels: l},
		Linux: &runtimeapi.LinuxPodSandboxStats{Containers: []*runtimeapi.ContainerStats{{
			Attributes: &runtimeapi.ContainerAttributes{Id: "c", Labels: labels{Label: "app"}},
		}}},
	}
	other := &runtimeapi.PodSandboxStats{Attributes: &runtimeapi.PodSandboxAttributes{Id: "o", Labels: labels{"a": "b"}}}
	boxes := []*runtimeapi.PodSandbox{{Id: "o", Labels: labels{"a": "b"}}, {Id: "s", Labels: l}, {Id: "t", Labels: l}}
	status := &runtimeapi.PodSandboxStatus{Id: "s", Labels: l, Annotations: labels{Label: Value}}
	return map[string]proto.Message{
		runtimeapi.RuntimeService_ListPodSandbox_FullMethodName:     &runtimeapi.ListPodSandboxResponse{Items: boxes},
		runtimeapi.RuntimeService_StreamPodSandboxes_FullMethodName: &runtimeapi.StreamPodSandboxesResponse{PodSandboxes: boxes},
		runtimeapi.RuntimeService_PodSandboxStatus_FullMethodName: &runtimeapi.PodSandboxStatusResponse{
			Status: status, Info: map[string]string{"info": info, "other": "no JSON " + Label}, Timestamp: 7,
			ContainersStatuses: []*runtimeapi.ContainerStatus{container()},
		},
		runtimeapi.RuntimeService_PodSandboxStats_FullMethodName:       &runtimeapi.PodSandboxStatsResponse{Stats: stats},
		runtimeapi.RuntimeService_ListPodSandboxStats_FullMethodName:   &runtimeapi.ListPodSandboxStatsResponse{Stats: []*runtimeapi.PodSandboxStats{other, stats}},
		runtimeapi.RuntimeService_StreamPodSandboxStats_FullMethodName: &runtimeapi.StreamPodSandboxStatsResponse{PodSandboxStats: []*runtimeapi.PodSandboxStats{stats, other}},
		runtimeapi.RuntimeService_GetContainerEvents_FullMethodName: &runtimeapi.ContainerEventResponse{
			ContainerId: "c", PodSandboxStatus: status, ContainersStatuses: []*runtimeapi.ContainerStatus{container()},
		},
	}
}

// Every answer that has the label loses it and nothing else, and one that has not
// is left alone.
func TestAnswersLoseTheLabel(t *testing.T) {
	t.Parallel()
	rewrites := Answers()
	with, without := answers(marked(), infoMarked), answers(plain(), infoPlain)
	if diff := cmp.Diff(slices.Sorted(maps.Keys(with)), slices.Sorted(maps.Keys(rewrites))); diff != "" {
		t.Errorf("methods whose answers are looked at (-want +got):\n%s", diff)
	}
	for method, answer := range with {
		t.Run(method[strings.LastIndex(method, "/")+1:], func(t *testing.T) {
			t.Parallel()
			want, got := without[method], without[method].ProtoReflect().New().Interface()
			better, err := rewrites[method](t.Context(), encode(t, answer))
			if err != nil || better == nil {
				t.Fatalf("%v, %v", better, err)
			}
			if err := proto.Unmarshal(better, got); err != nil {
				t.Fatal(err)
			}
			want.ProtoReflect().SetUnknown(unknown)
			if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}
			if size := len(encode(t, want)); len(better) != size {
				t.Errorf("%d bytes, want %d: something was encoded otherwise", len(better), size)
			}
			if again, err := rewrites[method](t.Context(), better); again != nil || err != nil {
				t.Errorf("a second time: %q, %v", again, err)
			}
			whole := encode(t, answer)
			for cut := range len(whole) {
				if got, err := rewrites[method](t.Context(), whole[:cut]); err != nil && got != nil {
					t.Errorf("cut at %d: an answer and an error", cut)
				}
			}
		})
	}
}

// A message that describes a sandbox and is not among those we know would let the
// label through: a new version of the CRI must not do that unseen.
func TestNoOtherMessageHasASandboxesLabels(t *testing.T) {
	t.Parallel()
	messages := runtimeapi.File_staging_src_k8s_io_cri_api_pkg_apis_runtime_v1_api_proto.Messages()
	var got []protoreflect.FullName
	for i := range messages.Len() {
		if field := messages.Get(i).Fields().ByName("labels"); field != nil {
			got = append(got, messages.Get(i).FullName())
		}
	}
	want := []protoreflect.FullName{
		"runtime.v1.PodSandboxConfig", "runtime.v1.PodSandboxStatus", "runtime.v1.PodSandbox", "runtime.v1.PodSandboxAttributes",
		"runtime.v1.ContainerConfig", "runtime.v1.Container", "runtime.v1.ContainerStatus", "runtime.v1.ContainerAttributes",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("messages with labels (-known +in this CRI): add new ones to labelled if they are a sandbox's\n%s", diff)
	}
	var creating []string
	services := runtimeapi.File_staging_src_k8s_io_cri_api_pkg_apis_runtime_v1_api_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			input := services.Get(i).Methods().Get(j).Input()
			for k := range input.Fields().Len() {
				if m := input.Fields().Get(k).Message(); m != nil && m.FullName() == configName {
					creating = append(creating, string(input.Name()))
				}
			}
		}
	}
	// The configuration in the second and fourth is that of a sandbox that exists.
	if diff := cmp.Diff([]string{"RunPodSandboxRequest", "CreateContainerRequest", "RestorePodRequest", "PullImageRequest"}, creating); diff != "" {
		t.Errorf("requests with a sandbox (-known +in this CRI):\n%s", diff)
	}
}

func TestRequestsGetTheLabel(t *testing.T) {
	t.Parallel()
	type config = runtimeapi.PodSandboxConfig
	for name, tc := range map[string]struct{ in, want *config }{
		"labels":     {&config{Hostname: "h", Labels: plain()}, &config{Hostname: "h", Labels: marked()}},
		"no labels":  {&config{Hostname: "h"}, &config{Hostname: "h", Labels: labels{Label: Value}}},
		"empty":      {&config{}, &config{Labels: labels{Label: Value}}},
		"the same":   {&config{Labels: labels{Label: Value}}, nil},
		"another":    {&config{Labels: labels{Label: "mine"}}, &config{Labels: labels{Label: Value}}},
		"no sandbox": {nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for method, build := range map[string]func(*config) proto.Message{
				runtimeapi.RuntimeService_RunPodSandbox_FullMethodName: func(c *config) proto.Message {
					return &runtimeapi.RunPodSandboxRequest{Config: c, RuntimeHandler: "h"}
				},
				runtimeapi.RuntimeService_RestorePod_FullMethodName: func(c *config) proto.Message {
					return &runtimeapi.RestorePodRequest{CheckpointPath: "/p", Config: c, RuntimeHandler: "h"}
				},
			} {
				got, err := Requests()[method](t.Context(), encode(t, build(tc.in)))
				if err != nil {
					t.Fatal(err)
				}
				if tc.want == nil {
					if got != nil {
						t.Errorf("%s: changed to %q", method, got)
					}
					continue
				}
				message := build(nil)
				if err := proto.Unmarshal(got, message); err != nil {
					t.Fatal(err)
				}
				want := build(tc.want)
				want.ProtoReflect().SetUnknown(unknown)
				if diff := cmp.Diff(want, message, protocmp.Transform()); diff != "" {
					t.Errorf("%s (-want +got):\n%s", method, diff)
				}
			}
		})
	}
}

// A sandbox's configuration that comes in two parts is one.
func TestRequestInParts(t *testing.T) {
	t.Parallel()
	add := Requests()[runtimeapi.RuntimeService_RunPodSandbox_FullMethodName]
	part := func(c *runtimeapi.PodSandboxConfig) []byte {
		b, err := proto.Marshal(&runtimeapi.RunPodSandboxRequest{Config: c})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	has := part(&runtimeapi.PodSandboxConfig{Labels: labels{Label: Value}})
	other := part(&runtimeapi.PodSandboxConfig{Labels: labels{Label: "mine"}})
	rest := part(&runtimeapi.PodSandboxConfig{Hostname: "h"})
	if got, err := add(t.Context(), slices.Concat(has, rest)); got != nil || err != nil {
		t.Errorf("the label in the first part: %q, %v", got, err)
	}
	for name, request := range map[string][]byte{
		"none":                  slices.Concat(rest, rest),
		"another, first":        slices.Concat(other, rest),
		"another, last":         slices.Concat(rest, other),
		"ours, then another":    slices.Concat(rest, has, other),
		"another between parts": slices.Concat(rest, other, rest),
	} {
		got, err := add(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		message := &runtimeapi.RunPodSandboxRequest{}
		if err := proto.Unmarshal(got, message); err != nil || message.GetConfig().GetLabels()[Label] != Value || message.GetConfig().GetHostname() != "h" {
			t.Errorf("%s: %v, %v", name, message, err)
		}
	}
}

func TestInfoKeepsItsBytes(t *testing.T) {
	t.Parallel()
	const l = `"` + Label + `"`
	for name, tc := range map[string]struct{ in, want string }{
		"alone":            {`{"labels":{` + l + `:"POD"}}`, `{"labels":{}}`},
		"first":            {`{"labels":{` + l + `:"POD","a":"b"}}`, `{"labels":{"a":"b"}}`},
		"last":             {`{"labels":{"a":"b",` + l + `:"POD"}}`, `{"labels":{"a":"b"}}`},
		"middle":           {`{"labels":{"a":"b",` + l + `:"POD","c":"d"}}`, `{"labels":{"a":"b","c":"d"}}`},
		"white space":      {"{ \"labels\" : {\n " + l + " : \"POD\" ,\n \"a\" : 1.50e1 } }\n", "{ \"labels\" : {\n \"a\" : 1.50e1 } }\n"},
		"twice the first":  {`{"labels":{` + l + `:"POD",` + l + `:"POD","a":1}}`, `{"labels":{"a":1}}`},
		"twice the last":   {`{"labels":{"a":1,` + l + `:"POD",` + l + `:"POD"}}`, `{"labels":{"a":1}}`},
		"after an object":  {`{"labels":{"a":{"b":[1,{}]},` + l + `:"POD"}}`, `{"labels":{"a":{"b":[1,{}]}}}`},
		"in a list":        {`[{"labels":{` + l + `:"POD"}},1,"` + Label + `"]`, `[{"labels":{}},1,"` + Label + `"]`},
		"another value":    {`{"labels":{` + l + `:"app"}}`, ""},
		"no string":        {`{"labels":{` + l + `:{"POD":1}}}`, ""},
		"elsewhere":        {`{"annotations":{` + l + `:"POD"}}`, ""},
		"labels of labels": {`{"labels":{"x":{` + l + `:"POD"}}}`, ""},
		"in a text":        {`{"labels":"{\"` + Label + `\":\"POD\"}"}`, ""},
		"labels in a list": {`{"labels":[` + l + `,"POD"]}`, ""},
		"no JSON":          {`{"labels":{` + l + `:"POD"}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := string(stripJSON([]byte(tc.in))); got != tc.want {
				t.Errorf("%s\nbecomes %s\nwant    %s", tc.in, got, tc.want)
			}
		})
	}
}

// Whatever comes, either it is left alone or it says the same without the label.
func FuzzStripJSON(f *testing.F) {
	f.Add([]byte(infoMarked))
	f.Add([]byte(`{"labels":{"a":[{}],"` + Label + `":"POD"},"labels":{"` + Label + `":"POD"}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		got := stripJSON(text)
		if got == nil {
			return
		}
		var before, after any
		if err := json.Unmarshal(text, &before); err != nil {
			t.Fatalf("%q is no JSON and was changed", text)
		}
		if err := json.Unmarshal(got, &after); err != nil {
			t.Fatalf("%q became %q: %v", text, got, err)
		}
		if diff := cmp.Diff(withoutLabel(before, false), withoutLabel(after, false)); diff != "" {
			t.Errorf("%q became %q:\n%s", text, got, diff)
		}
	})
}

// withoutLabel is stripJSON on values.
func withoutLabel(v any, isLabels bool) any {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if isLabels && key == Label && value == Value {
				delete(v, key)
				continue
			}
			v[key] = withoutLabel(value, key == "labels")
		}
	case []any:
		for i := range v {
			v[i] = withoutLabel(v[i], false)
		}
	}
	return v
}

// What the runtime says arrives as it would without the label on its way there, and
// bytes that are no message are left alone.
func FuzzAnswers(f *testing.F) {
	rewrites := Answers()
	methods := slices.Sorted(maps.Keys(rewrites))
	examples := answers(marked(), infoMarked)
	for i, method := range methods {
		f.Add(encode(f, examples[method]), uint8(i))
	}
	f.Fuzz(func(t *testing.T, answer []byte, which uint8) {
		method := methods[int(which)%len(methods)]
		got, err := rewrites[method](t.Context(), answer)
		if got == nil {
			return
		}
		if err != nil {
			t.Fatalf("an answer and an error: %v", err)
		}
		before, after := examples[method].ProtoReflect().New().Interface(), examples[method].ProtoReflect().New().Interface()
		if proto.Unmarshal(answer, before) != nil {
			return // it is broken deeper than we look
		}
		if err := proto.Unmarshal(got, after); err != nil {
			t.Fatalf("it can't be read any more: %v", err)
		}
		clean(before.ProtoReflect())
		clean(after.ProtoReflect())
		if diff := cmp.Diff(before, after, protocmp.Transform()); diff != "" {
			t.Errorf("more than the label is gone:\n%s", diff)
		}
	})
}

// clean takes the label out of a decoded message, and texts in JSON.
func clean(m protoreflect.Message) {
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case field.IsMap() && field.Name() == "labels" && labelled[m.Descriptor().FullName()]:
			v.Map().Clear(protoreflect.ValueOfString(Label).MapKey()) // whatever its value, for there may be two
		case field.IsMap() && field.Name() == "info":
			m.Clear(field)
		case field.IsMap():
		case field.IsList() && field.Message() != nil:
			for i := range v.List().Len() {
				clean(v.List().Get(i).Message())
			}
		case field.Message() != nil:
			clean(v.Message())
		}
		return true
	})
}

// A request that was given the label and then loses it is the same request.
func FuzzRequests(f *testing.F) {
	add := Requests()[runtimeapi.RuntimeService_RunPodSandbox_FullMethodName]
	f.Add(encode(f, &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{Labels: plain()}}))
	f.Add(encode(f, &runtimeapi.RunPodSandboxRequest{}))
	f.Fuzz(func(t *testing.T, request []byte) {
		got, err := add(t.Context(), request)
		if err != nil || got == nil {
			return
		}
		before, after := &runtimeapi.RunPodSandboxRequest{}, &runtimeapi.RunPodSandboxRequest{}
		if proto.Unmarshal(request, before) != nil {
			return
		}
		if err := proto.Unmarshal(got, after); err != nil {
			t.Fatalf("it can't be read any more: %v", err)
		}
		if after.GetConfig().GetLabels()[Label] != Value {
			t.Errorf("no label in %v", after)
		}
		delete(before.GetConfig().GetLabels(), Label)
		delete(after.GetConfig().GetLabels(), Label)
		if len(after.GetConfig().GetLabels()) == 0 {
			after.Config.Labels = before.GetConfig().GetLabels()
		}
		if diff := cmp.Diff(before, after, protocmp.Transform()); diff != "" {
			t.Errorf("more than the label was added:\n%s", diff)
		}
	})
}

func BenchmarkListPodSandbox(b *testing.B) {
	list := &runtimeapi.ListPodSandboxResponse{}
	for range 100 {
		list.Items = append(list.Items, &runtimeapi.PodSandbox{
			Id: strings.Repeat("a", 64), Metadata: &runtimeapi.PodSandboxMetadata{Name: "name", Uid: strings.Repeat("u", 36), Namespace: "n"},
			Labels: marked(), Annotations: labels{"kubernetes.io/config.seen": "2026-01-01", "kubernetes.io/config.source": "api"},
		})
	}
	answer, rewrite := encode(b, list), Answers()[runtimeapi.RuntimeService_ListPodSandbox_FullMethodName]
	b.SetBytes(int64(len(answer)))
	b.ReportAllocs()
	for b.Loop() {
		if got, err := rewrite(b.Context(), answer); err != nil || got == nil {
			b.Fatal(err)
		}
	}
}
