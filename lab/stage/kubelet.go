package stage

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/lab/enclave"
	"github.com/cleave-cri/cleave/lab/plane"
	"github.com/cleave-cri/cleave/lab/podapi"
)

// ErrTold says that what was to be done was done by another process of this program,
// which has said what there is to say: it went wrong.
var ErrTold = errors.New("not done, as said above")

// Enter goes to where a node of these options can be: for one with a real kubelet,
// whose paths are fixed, into namespaces of its own. This program is started again
// there, and Enter returns false when that has ended; with [ErrTold] if that failed.
// Where Enter returns true the caller goes on.
func Enter(o Options) (bool, error) {
	if !o.Kubelet {
		return true, nil
	}
	if err := Machine(nil); err != nil {
		return false, err
	}
	inside, status, err := enclave.Apart(func() error { return nil })
	if err == nil && !inside && status != 0 {
		err = ErrTold
	}
	return inside, err
}

func (s *Stage) at(name string) string { return filepath.Join(s.run.Dir(), name) }

// KubeletPID is the process of the kubelet, or of its deputy.
func (s *Stage) KubeletPID() int {
	if s.Kubelet != nil {
		return s.Kubelet.PID()
	}
	return s.Deputy.PID()
}

// account is the file with which cleave asks the API server of a real kubelet. It could do so as the kubelet, but on a machine with
// several that would begin with another's.
func (s *Stage) account() string { return s.at("account.kubeconfig") }

// startPlane starts the API server of a real kubelet.
func (s *Stage) startPlane(ctx context.Context) error {
	s.o.Step("start etcd and the API server")
	p := s.o.Programs
	var err error
	// Who leaves a lab up knows that it is there.
	s.alone, err = enclave.Alone(ctx, func() { s.o.Step("wait for another kubelet of a lab to end") })
	if err != nil {
		return err
	}
	s.Plane, err = plane.Start(ctx, plane.Options{Dir: s.at("plane"), Etcd: p.etcd, APIServer: p.apiserver, Env: s.run.Env(), FreePriorities: true})
	if err != nil {
		return err
	}
	if err := s.Plane.WriteKubeconfig(s.account()); err != nil {
		return err
	}
	s.API = podapi.NewClient(s.Plane.Access())
	for _, pod := range s.Scenario.Pods {
		if err := s.API.EnsureNamespace(ctx, pod.Namespace); err != nil {
			return err
		}
	}
	return nil
}

// startKubelet starts a real kubelet and waits until the API server knows its node.
// That is not ready without a pod network, which the lab's pods don't need.
func (s *Stage) startKubelet(ctx context.Context) error {
	n := s.Node
	endpoint := n.Cleave.Endpoint()
	if s.o.Mode == config.ModeCRIO {
		// By this very text a kubelet takes a runtime for CRI-O (KSS-4).
		endpoint = "unix:///var" + strings.TrimPrefix(endpoint, "unix://")
	}
	own := settings(s.Scenario.Kubelet)
	// Its usual file may be a link into /run, of which the lab has one of its own.
	maps.Copy(own, map[string]any{"resolvConf": ""})
	var err error
	s.Kubelet, err = plane.NewKubelet(s.Plane.WriteKubeconfig, plane.KubeletOptions{
		Binary: s.o.Programs.kubelet, Dir: s.at("kubelet"), Env: s.run.Env(), Endpoint: endpoint, Containerd: n.Runtime.Socket(), Cgroup: s.run.Cgroup(),
		RootDir: n.Cleave.Config().Filesystems.NodeFS, PodLogsDir: n.Cleave.Config().Filesystems.Logs, Settings: own,
	})
	if err != nil {
		return err
	}
	return s.Kubelet.StartUntil(ctx, func(ctx context.Context) error {
		_, err := s.API.Node(ctx, plane.NodeName)
		if err != nil {
			return fmt.Errorf("wait for the kubelet's node: %w", err)
		}
		return nil
	})
}
