// Package cell is the compatibility matrix: which cells it has, what a run of one found, and the page that tells it to people.
// The runs are a test of integration/crio; only that test and integration/matrix may import this package.
package cell

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
)

// Key says which cell: the programs as they say their versions, such as v1.37.2, and cleave's mode.
type Key struct {
	Kubelet    string      `json:"kubelet"`
	Containerd string      `json:"containerd"`
	Mode       config.Mode `json:"mode"`
}

// Outcome is what a run of one cell found. It is one line of JSON.
type Outcome struct {
	Key
	Passed bool `json:"passed"`
	// Reason says why it failed, on one line; empty if it passed.
	Reason string `json:"reason,omitempty"`
	// APIServer is the version of the API server.
	APIServer string `json:"apiserver"`
	// Machine is what it ran on: kernel, version of cgroups, runc.
	Machine string `json:"machine"`
}

// Containerd is a containerd of the toolchain.
type Containerd struct {
	// Name and Shim are the names of the programs in the toolchain.
	Name, Shim string
	// ConfigVersion is the version of the configuration that it gets; see lab/runtime.
	ConfigVersion int
}

// Kubelets are the names of the matrix's kubelets in the toolchain, oldest first.
func Kubelets() []string { return []string{"kubelet-1.34", "kubelet-1.35", "kubelet-1.36", "kubelet"} }

// Containerds are the matrix's, the newest first.
func Containerds() []Containerd {
	return []Containerd{
		{Name: "containerd", Shim: "containerd-shim-runc-v2", ConfigVersion: 4},
		{Name: "containerd-older", Shim: "shim-older", ConfigVersion: 3},
	}
}

// Modes are cleave's in the matrix.
func Modes() []config.Mode { return []config.Mode{config.ModeCRI, config.ModeCRIO} }

// All lists the matrix's cells, by the versions that the toolchain pins.
func All() ([]Key, error) {
	var all []Key
	for _, k := range Kubelets() {
		kubelet, err := bin.Version(k)
		if err != nil {
			return nil, err
		}
		for _, c := range Containerds() {
			containerd, err := bin.Version(c.Name)
			if err != nil {
				return nil, err
			}
			for _, mode := range Modes() {
				all = append(all, Key{kubelet, containerd, mode})
			}
		}
	}
	return all, nil
}

// Read reads outcomes, one a line. A missing file has none.
func Read(path string) ([]Outcome, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read outcomes of the matrix: %w", err)
	}
	var all []Outcome
	lines := json.NewDecoder(bytes.NewReader(text))
	lines.DisallowUnknownFields()
	for {
		var o Outcome
		if err := lines.Decode(&o); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("read outcome %d of %s: %w", len(all)+1, path, err)
		}
		if o.Passed != (o.Reason == "") {
			return nil, fmt.Errorf("read outcome %d of %s: it passed (%t) with reason %q", len(all)+1, path, o.Passed, o.Reason)
		}
		all = append(all, o)
	}
}

// Append adds an outcome to a file.
func Append(path string, o Outcome) (err error) {
	line, err := json.Marshal(o)
	if err != nil {
		return fmt.Errorf("write an outcome of the matrix: %w", err)
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("write an outcome of the matrix: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	_, err = file.Write(append(line, '\n'))
	return err
}

// Merge returns the outcomes of the cells in their order, newer ones in place of older. What is of no cell, since a pin was moved,
// is left out.
func Merge(cells []Key, older, newer []Outcome) []Outcome {
	latest := map[Key]Outcome{}
	for _, o := range slices.Concat(older, newer) {
		latest[o.Key] = o
	}
	var all []Outcome
	for _, key := range cells {
		if o, ok := latest[key]; ok {
			all = append(all, o)
		}
	}
	return all
}

// Encode writes outcomes as Read reads them.
func Encode(all []Outcome) ([]byte, error) {
	var b bytes.Buffer
	lines := json.NewEncoder(&b)
	lines.SetEscapeHTML(false)
	for _, o := range all {
		if err := lines.Encode(o); err != nil {
			return nil, fmt.Errorf("write outcomes of the matrix: %w", err)
		}
	}
	return b.Bytes(), nil
}

// Proved lists the minor versions of kubelets, as v1.37, that passed in mode crio and failed in it with no containerd.
func Proved(cells []Key, all []Outcome) []string {
	outcomes := map[Key]Outcome{}
	for _, o := range all {
		outcomes[o.Key] = o
	}
	var minors []string
	failed := map[string]bool{}
	for _, key := range cells {
		o, ran := outcomes[key]
		if !ran || key.Mode != config.ModeCRIO {
			continue
		}
		minor := minorOf(key.Kubelet)
		failed[minor] = failed[minor] || !o.Passed
		if !slices.Contains(minors, minor) {
			minors = append(minors, minor)
		}
	}
	return slices.DeleteFunc(minors, func(m string) bool { return failed[m] })
}

func minorOf(version string) string {
	parts := strings.SplitN(version, ".", 3)
	return strings.Join(parts[:min(2, len(parts))], ".")
}

// values lists what the outcomes say of something, each once.
func values(all []Outcome, of func(Outcome) string) []string {
	var names []string
	for _, o := range all {
		names = append(names, cmp.Or(of(o), "unknown"))
	}
	slices.Sort(names)
	return slices.Compact(names)
}
