package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/agent/du"
	"github.com/cleave-cri/cleave/agent/ephemeral"
	"github.com/cleave-cri/cleave/agent/owners"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/orphan"
	"github.com/cleave-cri/cleave/snapshot"
)

// pathLargest answers with what takes most of what a pod has: a [du.Request], answered with a [du.Report].
const pathLargest = "/v1/du"

// largest finds what takes most of what a pod has.
type largest struct {
	survey   func() *survey
	searcher du.Searcher
	// processes lists those of a running container, where says on which filesystem a path is.
	processes func(container string) []int
	where     func(path string) (fsstats.Filesystem, error)
}

func newLargest(o *observer) *largest {
	if o == nil {
		return nil
	}
	return &largest{survey: o.surveyed.Load, processes: o.writers.processesOf, where: o.filesystems.FilesystemOf}
}

func (l *largest) find(ctx context.Context, r du.Request) (any, error) {
	if l == nil {
		return nil, errors.New("this cleave looks at nothing")
	}
	r, err := r.Settled()
	if err != nil {
		return nil, fmt.Errorf("look for what takes most: %w", err)
	}
	s := l.survey()
	if s.readAt.IsZero() || !s.asked {
		return nil, errors.New("look for what takes most: it is not known yet which pods there are: ask again in some seconds")
	}
	who, err := podNamed(s, r)
	if err != nil {
		return nil, err
	}
	report := du.Report{Namespace: who.namespace, Pod: who.name, UID: who.uid, Container: r.Container}
	return l.searcher.Search(ctx, r, report, placesOf(s, who, r.Container), l.open(who, r))
}

// open looks for deleted files that the running containers have open.
func (l *largest) open(who podParts, r du.Request) du.OpenFunc {
	return func(ctx context.Context) (files []du.OpenFile, _ error) {
		var holders []orphan.Holder
		for _, c := range who.containers {
			if c.Running && (r.Container == "" || c.Name == r.Container) {
				holders = append(holders, orphan.Holder{ID: c.Name, PIDs: l.processes(c.ID)})
			}
		}
		report, err := orphan.Find(ctx, holders, orphan.Options{
			EntriesPerSecond: r.EntriesPerSecond,
			DeviceOf: func(path string) (fsstats.Device, error) {
				f, err := l.where(path)
				return f.Device, err
			},
		})
		for _, f := range report.Files[:min(len(report.Files), r.Most)] {
			files = append(files, du.OpenFile{Container: f.Holder, Name: f.Name, PID: f.PID, Bytes: f.Bytes, Device: f.Device.String()})
		}
		return files, errors.Join(append(report.Errors, err)...)
	}
}

// podParts is a pod as the survey has it.
type podParts struct {
	namespace, name, uid string
	sandboxes            []ephemeral.Sandbox
	containers           []ephemeral.Container
}

// podNamed finds the pod that a request is about. One of which the runtime has nothing left has only its folders, and is
// found by its UID. Of several with one name, one after the other, it is the newest.
func podNamed(s *survey, r du.Request) (podParts, error) {
	var found []ephemeral.Sandbox
	for _, sandbox := range s.workloads.sandboxes {
		if (sandbox.Name == r.Pod || sandbox.UID == r.Pod) && (r.Namespace == "" || sandbox.Namespace == r.Namespace) {
			found = append(found, sandbox)
		}
	}
	if len(found) == 0 {
		who := podParts{uid: r.Pod}
		if !hasFolders(s, who.uid) {
			return who, fmt.Errorf("look for pod %q: there is none of that name or UID%s: `crictl pods` lists those of this node", r.Pod, in(r.Namespace))
		}
		if r.Container != "" {
			return who, fmt.Errorf("look for container %q: of pod %s only folders are left: ask for the pod alone", r.Container, r.Pod)
		}
		return who, nil
	}
	var namespaces []string
	for _, sandbox := range found {
		if !slices.Contains(namespaces, sandbox.Namespace) {
			namespaces = append(namespaces, sandbox.Namespace)
		}
	}
	if len(namespaces) > 1 {
		slices.Sort(namespaces)
		return podParts{}, fmt.Errorf("look for pod %q: there is one in each of the namespaces %s: choose one with --namespace", r.Pod, strings.Join(namespaces, ", "))
	}
	newest := slices.MaxFunc(found, func(a, b ephemeral.Sandbox) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	who := podParts{namespace: newest.Namespace, name: newest.Name, uid: newest.UID}
	var names []string
	for _, sandbox := range s.workloads.sandboxes {
		if sandbox.UID != who.uid {
			continue
		}
		who.sandboxes = append(who.sandboxes, sandbox)
		for _, c := range s.workloads.containers {
			if c.SandboxID == sandbox.ID {
				who.containers = append(who.containers, c)
				names = append(names, c.Name)
			}
		}
	}
	if r.Container != "" && !slices.Contains(names, r.Container) {
		slices.Sort(names)
		return who, fmt.Errorf("look for container %q: pod %s/%s has none of that name, but: %s", r.Container, who.namespace, who.name, strings.Join(slices.Compact(names), ", "))
	}
	return who, nil
}

func in(namespace string) string {
	if namespace == "" {
		return ""
	}
	return " in namespace " + namespace
}

func hasFolders(s *survey, uid string) bool {
	return slices.ContainsFunc(s.folders.Pods, func(p owners.PodFolder) bool { return p.UID == uid }) ||
		slices.ContainsFunc(s.folders.Logs, func(l owners.LogFolder) bool { return l.UID == uid })
}

// placesOf lists the folders that a pod, or one container of it, has. Volumes are the pod's.
func placesOf(s *survey, who podParts, container string) (places []du.Place) {
	names := map[string]string{} // by ID
	for _, c := range who.containers {
		if container == "" || c.Name == container {
			names[c.ID] = c.Name
		}
	}
	for _, l := range s.layers {
		name, ours := names[l.layer.ContainerID]
		switch {
		case l.folders.Upper == "":
		case l.layer.Class == snapshot.Container && ours:
			places = append(places, du.Place{What: "writable layer", Container: name, Path: l.folders.Upper})
		case l.layer.Class == snapshot.Sandbox && container == "" && slices.ContainsFunc(who.sandboxes, func(s ephemeral.Sandbox) bool { return s.ID == l.layer.ContainerID }):
			places = append(places, du.Place{What: "sandbox's writable layer", Path: l.folders.Upper})
		}
	}
	for _, l := range s.folders.Logs {
		if l.UID != who.uid {
			continue
		}
		rest := du.Place{What: "other logs", Path: l.Path}
		for _, name := range l.Containers {
			path := filepath.Join(l.Path, name)
			rest.Without = append(rest.Without, path)
			if container == "" || name == container {
				places = append(places, du.Place{What: "logs", Container: name, Path: path})
			}
		}
		if container == "" {
			places = append(places, rest)
		}
	}
	for _, p := range s.folders.Pods {
		if p.UID != who.uid || container != "" {
			continue
		}
		rest := du.Place{What: "pod's other files", Path: p.Path}
		for _, v := range p.Volumes {
			switch {
			case !v.Mounted:
				rest.Without = append(rest.Without, v.Path)
				places = append(places, du.Place{What: "volume " + v.Name, Path: v.Path})
			case v.Source != "": // a folder of this node; others, on disks of their own, are not this node's to fill
				places = append(places, du.Place{What: "local volume " + v.Name, Path: v.Source})
			}
		}
		places = append(places, rest)
	}
	return places
}

// FetchLargest asks the cleave that is running what takes most of what a pod has. It returns [ErrNotRunning] if none answers on
// the socket.
func FetchLargest(ctx context.Context, socket string, r du.Request) (report du.Report, err error) {
	err = control.Send(ctx, socket, http.MethodPost, pathLargest, r, &report)
	return report, asked("ask what takes most", socket, err)
}

// PodNames gives the pods of this node and the containers of each, for completion of what somebody types.
func PodNames(ctx context.Context, socket string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	s, err := FetchStatus(ctx, socket)
	var names []string
	for _, p := range s.Pods {
		names = append(names, p.Name)
	}
	return names, err
}
