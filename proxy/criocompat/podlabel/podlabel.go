// Package podlabel marks pod sandboxes for the kubelet's cAdvisor and hides the
// mark from everybody who speaks the CRI: the sandbox's label
// io.kubernetes.container.name, which dockershim once set to POD and which no CRI
// runtime knows (KSS-11). It changes encoded requests and answers, field by field,
// so that all else in them stays as it was, byte for byte. Pure; only agent may
// import it.
package podlabel

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// Label is the label's name: that of containers for the name that a pod's
	// spec gives them (kubelet, pkg/types: KubernetesContainerNameLabel).
	Label = "io.kubernetes.container.name"
	// Value is what makes cAdvisor take a container for the one that holds a pod's
	// network, and the kubelet leave it out of the list of containers (kubelet,
	// pkg/kubelet/stats: infra container). No container can be called so: names in
	// a pod's spec are in small letters.
	Value = "POD"
)

// Rewrite has the form of an interceptor of the proxy: it takes an encoded
// message and returns the other one, or nil to leave it.
type Rewrite = func(ctx context.Context, message []byte) ([]byte, error)

// Requests returns the interceptors of requests, by full method name: each that
// creates a sandbox gets the label, whatever value its caller has set: a pod's
// labels are its sandbox's too, so that anybody who may make a pod could otherwise
// call the sandbox like one of its containers, and the kubelet takes two of one name
// for one container and loses sight of it when it idles (kubelet, pkg/kubelet/stats:
// filterTerminatedContainerInfoAndAssembleByPodCgroupKey), limits included.
func Requests() map[string]Rewrite {
	return map[string]Rewrite{
		runtimeapi.RuntimeService_RunPodSandbox_FullMethodName: adder(&runtimeapi.RunPodSandboxRequest{}),
		runtimeapi.RuntimeService_RestorePod_FullMethodName:    adder(&runtimeapi.RestorePodRequest{}),
	}
}

// Answers returns the interceptors of answers, by full method name: each answer in
// which a sandbox's labels can be loses ours.
//
// A sandbox that its creator gave the same label, with whatever value, is shown
// without it.
func Answers() map[string]Rewrite {
	out := map[string]Rewrite{}
	services := runtimeapi.File_staging_src_k8s_io_cri_api_pkg_apis_runtime_v1_api_proto.Services()
	for i := range services.Len() {
		service := services.Get(i)
		for j := range service.Methods().Len() {
			method := service.Methods().Get(j)
			if n := nodeOf(method.Output(), nil); n != nil {
				out[fmt.Sprintf("/%s/%s", service.FullName(), method.Name())] = stripper(n, method.Output().FullName())
			}
		}
	}
	return out
}

func stripper(n *node, name protoreflect.FullName) Rewrite {
	return func(_ context.Context, answer []byte) ([]byte, error) {
		if !bytes.Contains(answer, []byte(Label)) {
			return nil, nil
		}
		better, err := n.strip(answer)
		if err != nil {
			return nil, fmt.Errorf("decode %s: %w", name, err)
		}
		return better, nil
	}
}

func adder(request protoreflect.ProtoMessage) Rewrite {
	descriptor := request.ProtoReflect().Descriptor()
	var config protowire.Number
	for i := range descriptor.Fields().Len() {
		if field := descriptor.Fields().Get(i); field.Message() != nil && field.Message().FullName() == configName {
			config = field.Number()
		}
	}
	return func(_ context.Context, request []byte) ([]byte, error) {
		marked, err := add(request, config)
		if err != nil {
			return nil, fmt.Errorf("decode %s: %w", descriptor.FullName(), err)
		}
		return marked, nil
	}
}

// labelled are the messages that describe one sandbox and have its labels.
var labelled = map[protoreflect.FullName]bool{
	nameOf(&runtimeapi.PodSandbox{}):           true,
	nameOf(&runtimeapi.PodSandboxStatus{}):     true,
	nameOf(&runtimeapi.PodSandboxAttributes{}): true,
	configName: true,
}

var (
	configName   = nameOf(&runtimeapi.PodSandboxConfig{})
	configLabels = (&runtimeapi.PodSandboxConfig{}).ProtoReflect().Descriptor().Fields().ByName("labels").Number()
)

func nameOf(m protoreflect.ProtoMessage) protoreflect.FullName {
	return m.ProtoReflect().Descriptor().FullName()
}

// node says where in a message a sandbox's labels are.
type node struct {
	// labels is the number of the field with a sandbox's labels, 0 for none.
	labels protowire.Number
	// info is that of a map with texts in JSON about a sandbox, 0 for none.
	info protowire.Number
	// fields are messages in which there are some further down.
	fields map[protowire.Number]*node
}

// nodeOf returns nil for a message without labels of a sandbox. above are the
// messages that it is in.
func nodeOf(m protoreflect.MessageDescriptor, above []protoreflect.FullName) *node {
	for _, name := range above {
		if name == m.FullName() {
			return nil
		}
	}
	n := &node{fields: map[protowire.Number]*node{}}
	aboutOne := false
	for i := range m.Fields().Len() {
		field := m.Fields().Get(i)
		switch {
		case field.IsMap() && field.Name() == "labels" && labelled[m.FullName()]:
			n.labels = field.Number()
		case field.Message() != nil && !field.IsMap():
			if inner := nodeOf(field.Message(), append(above, m.FullName())); inner != nil {
				n.fields[field.Number()] = inner
				aboutOne = aboutOne || labelled[field.Message().FullName()] && !field.IsList()
			}
		}
	}
	if info := m.Fields().ByName("info"); info != nil && info.IsMap() && aboutOne {
		n.info = info.Number()
	}
	if n.labels == 0 && len(n.fields) == 0 {
		return nil
	}
	return n
}

// strip returns a message without the label, nil if it is not in there.
func (n *node) strip(message []byte) ([]byte, error) {
	var out []byte
	copied := 0 // how much of message is in out
	err := eachField(message, func(start, end int, num protowire.Number, value []byte) error {
		var inner []byte
		var err error
		switch below := n.fields[num]; {
		case num == n.labels:
			if key, label := entry(value); string(key) != Label || string(label) != Value {
				return nil
			}
			out = append(out, message[copied:start]...)
			copied = end
			return nil
		case num == n.info:
			inner = stripInfo(value)
		case below != nil:
			inner, err = below.strip(value)
		}
		if inner == nil || err != nil {
			return err
		}
		out = append(out, message[copied:start]...)
		out = protowire.AppendTag(out, num, protowire.BytesType)
		out = protowire.AppendBytes(out, inner)
		copied = end
		return nil
	})
	if err != nil || copied == 0 {
		return nil, err
	}
	if out = append(out, message[copied:]...); out == nil {
		out = []byte{}
	}
	return out, nil
}

// stripInfo returns a map's entry whose value is JSON without the label, nil if it
// is not in there or the value is something else.
func stripInfo(pair []byte) []byte {
	key, value := entry(pair)
	better := stripJSON(value)
	if better == nil {
		return nil
	}
	var out []byte
	out = protowire.AppendTag(out, 1, protowire.BytesType)
	out = protowire.AppendBytes(out, key)
	out = protowire.AppendTag(out, 2, protowire.BytesType)
	return protowire.AppendBytes(out, better)
}

// stripJSON returns a JSON text whose objects called labels don't have the label,
// nil if none has it or it is no JSON. All other bytes stay.
func stripJSON(text []byte) []byte {
	if !bytes.Contains(text, []byte(Label)) || !json.Valid(text) {
		return nil
	}
	type level struct {
		// labels says that it is an object called labels; object, that it is one.
		labels, object bool
		// key is the last key that was read, if a value has to follow.
		key  string
		keys bool // a key has to follow
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	stack := []level{{}}
	var out []byte
	copied := 0
	member, first := 0, false // where the member begins that is being read, and whether it is its object's first
	for {
		before := int(decoder.InputOffset())
		token, err := decoder.Token()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				return nil
			}
			break
		}
		top := &stack[len(stack)-1]
		if delim, ok := token.(json.Delim); ok {
			switch delim {
			case '{', '[':
				opened := level{object: delim == '{', keys: delim == '{'}
				opened.labels = opened.object && top.object && top.key == "labels"
				top.keys = top.object
				stack = append(stack, opened)
				first = true
			default:
				stack = stack[:len(stack)-1]
				first = false
			}
			continue
		}
		if top.object && top.keys {
			top.key, _ = token.(string) //nolint:errcheck // keys are strings
			top.keys = false
			member = max(before, copied)
			continue
		}
		if top.labels && top.key == Label && token == Value {
			end := int(decoder.InputOffset())
			if first {
				end += comma(text[end:])
			}
			out = append(out, text[copied:member]...)
			copied = end
			top.keys = true
			continue // the next one is the first, if this was
		}
		top.keys = top.object
		first = false
	}
	if copied == 0 {
		return nil
	}
	return append(out, text[copied:]...)
}

// comma returns how long white space and the comma behind it are, 0 without one.
func comma(text []byte) int {
	rest := bytes.TrimLeft(text, " \t\r\n")
	if len(rest) == 0 || rest[0] != ',' {
		return 0
	}
	return len(text) - len(rest) + 1
}

// add returns a request whose sandbox has the label, nil if it has it already or
// there is none. config is the number of the field with the sandbox. Another value
// of the label stays before ours, which counts (protobuf, "Maps": the last key seen).
func add(request []byte, config protowire.Number) ([]byte, error) {
	var start, end int
	var last []byte // the last one; several are one together (protobuf, "Last One Wins")
	has := false
	err := eachField(request, func(from, to int, num protowire.Number, value []byte) error {
		if num != config {
			return nil
		}
		start, end, last = from, to, value
		return eachField(value, func(_, _ int, num protowire.Number, value []byte) error {
			if key, label := entry(value); num == configLabels && string(key) == Label {
				has = string(label) == Value
			}
			return nil
		})
	})
	if err != nil || has || end == 0 {
		return nil, err
	}
	var label []byte
	label = protowire.AppendTag(label, 1, protowire.BytesType)
	label = protowire.AppendString(label, Label)
	label = protowire.AppendTag(label, 2, protowire.BytesType)
	label = protowire.AppendString(label, Value)

	marked := protowire.AppendTag(bytes.Clone(last), configLabels, protowire.BytesType)
	marked = protowire.AppendBytes(marked, label)
	out := make([]byte, 0, len(request)+len(label)+16)
	out = append(out, request[:start]...)
	out = protowire.AppendTag(out, config, protowire.BytesType)
	out = protowire.AppendBytes(out, marked)
	return append(out, request[end:]...), nil
}

// entry returns the key and value of a map's encoded entry, as far as they can be
// read.
func entry(pair []byte) (key, value []byte) {
	//nolint:errcheck // an entry that can't be read is none of ours
	_ = eachField(pair, func(_, _ int, num protowire.Number, field []byte) error {
		switch num {
		case 1:
			key = field
		case 2:
			value = field
		}
		return nil
	})
	return key, value
}

// eachField calls do for each length-delimited field of a message, with its place
// in there and its value. Fields of other kinds are passed over.
func eachField(message []byte, do func(start, end int, num protowire.Number, value []byte) error) error {
	for at := 0; at < len(message); {
		num, kind, tag := protowire.ConsumeTag(message[at:])
		if tag < 0 {
			return protowire.ParseError(tag)
		}
		size := protowire.ConsumeFieldValue(num, kind, message[at+tag:])
		if size < 0 {
			return protowire.ParseError(size)
		}
		end := at + tag + size
		if kind == protowire.BytesType {
			value, _ := protowire.ConsumeBytes(message[at+tag : end])
			if err := do(at, end, num, value); err != nil {
				return err
			}
		}
		at = end
	}
	return nil
}
