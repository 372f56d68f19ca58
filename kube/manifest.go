package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// SourceManifests is the name of [Manifests] as a source.
const SourceManifests = "static pods"

const (
	// maxManifest bounds one file: the kubelet's own limit (pkg/kubelet/config/file_linux.go reads 10 MiB).
	maxManifest = 10 << 20
	// maxManifests bounds how many are read.
	maxManifests = 500
)

// Manifests knows the names of static pods from their files. It protects them when nobody else tells about them; what they
// request is not read, because they are never evicted.
type Manifests struct {
	path, node string
	every      time.Duration

	mu   sync.Mutex
	last Snapshot // guarded by mu
}

var _ Source = (*Manifests)(nil)

// NewManifests prepares it for the kubelet's staticPodPath, a folder or one file; Run fills it.
func NewManifests(path, node string, every time.Duration) *Manifests {
	return &Manifests{path: path, node: node, every: every, last: Snapshot{Source: SourceManifests}}
}

// Run reads the folder until ctx ends.
func (m *Manifests) Run(ctx context.Context) error {
	tick := time.NewTicker(m.every)
	defer tick.Stop()
	for {
		m.read()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Pods implements [Source].
func (m *Manifests) Pods() Snapshot {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

func (m *Manifests) read() {
	now := time.Now()
	names, odd, err := staticNames(m.path, m.node)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last.Problem = ""
	switch {
	case err != nil:
		m.last.Problem = fmt.Sprintf("read static pods: %v", err)
		return
	case len(odd) > 0:
		// The kubelet may have read what is broken now when it was not: names stay known.
		m.last.Problem = "could not be read: " + problems(odd)
		for _, name := range m.last.Static {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	m.last.Static, m.last.AsOf = names, now
}

// staticNames lists namespace/name of the pods that the kubelet makes from the files of a folder. It leaves out what the kubelet
// leaves out: folders, and files with a leading dot.
func staticNames(path, node string) (names, odd []string, _ error) {
	info, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil, nil // as many a worker node has it
	}
	if err != nil {
		return nil, nil, err
	}
	files := []string{path}
	if info.IsDir() {
		entries, err := os.ReadDir(path)
		if err != nil {
			return nil, nil, err
		}
		files = files[:0]
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), ".") {
				files = append(files, filepath.Join(path, e.Name()))
			}
		}
	}
	if len(files) > maxManifests {
		return nil, nil, fmt.Errorf("%s has %d files, more than %d", path, len(files), maxManifests)
	}
	for _, file := range files {
		name, err := staticName(file, node)
		switch {
		case err != nil:
			odd = append(odd, fmt.Sprintf("%s: %v", file, err))
		case name != "":
			names = append(names, name)
		}
	}
	return names, odd, nil
}

// staticName is the name of the pod in a file, empty if it is no regular file.
func staticName(file, node string) (_ string, err error) {
	// A pipe would keep the open waiting.
	info, err := os.Stat(file)
	if err != nil || !info.Mode().IsRegular() {
		return "", err
	}
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	data, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return "", err
	}
	if len(data) > maxManifest {
		return "", fmt.Errorf("it is larger than %d MiB", maxManifest>>20)
	}
	text, err := yaml.ToJSON(data)
	if err != nil {
		return "", err
	}
	var pod struct {
		Kind     string `json:"kind"`
		Metadata struct {
			Name      string `json:"name"`
			Namespace string `json:"namespace"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(text, &pod); err != nil {
		return "", err
	}
	if pod.Kind != "Pod" || pod.Metadata.Name == "" {
		return "", fmt.Errorf("it is no pod with a name (kind %q)", pod.Kind)
	}
	namespace := pod.Metadata.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	// The kubelet puts the node's name behind the pod's (pkg/kubelet/config/common.go).
	return namespace + "/" + pod.Metadata.Name + "-" + strings.ToLower(node), nil
}
