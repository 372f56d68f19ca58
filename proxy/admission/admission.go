// Package admission refuses containers while a disk is so full that none should be added. It reads the request and asks a judge, who
// has ready values; it decides nothing. It imports nothing of ours; only agent may import it.
package admission

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// source is the annotation by which the kubelet tells where a pod is from; "api" is the API server
// (pkg/kubelet/types/pod_update.go).
const source = "kubernetes.io/config.source"

// Pod is the one that a container is to be made for, as the kubelet names it to the runtime.
type Pod struct {
	UID, Namespace, Name string
	// Static pods come from a file or a page that the kubelet reads.
	Static bool
}

// Judge says why no container may be made for a pod now, with the figures; "" lets it be made. It must not wait.
type Judge func(Pod) string

// Hold has the form of the proxy's HoldFunc.
type Hold = func(ctx context.Context, request []byte) (ended func(), err error)

// Holds returns what to do with calls, by full method name. What can't be understood is the runtime's to refuse.
func Holds(judge Judge) map[string]Hold {
	return map[string]Hold{
		runtimeapi.RuntimeService_CreateContainer_FullMethodName: func(_ context.Context, request []byte) (func(), error) {
			var r runtimeapi.CreateContainerRequest
			if proto.Unmarshal(request, &r) != nil {
				return nil, nil
			}
			m := r.GetSandboxConfig().GetMetadata()
			from, said := r.GetSandboxConfig().GetAnnotations()[source]
			why := judge(Pod{UID: m.GetUid(), Namespace: m.GetNamespace(), Name: m.GetName(), Static: said && from != "api"})
			if why == "" {
				return nil, nil
			}
			return nil, status.Error(codes.ResourceExhausted, "cleave: "+why)
		},
	}
}
