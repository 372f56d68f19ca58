// Package endpoint finds the place where a node's kubelet is told its runtime's
// socket, and says how to change just that: the place that counts, and that an
// upgrade of the node does not write anew. It reads files and writes none.
//
// It imports only systemd, for the names of folders. install may import it.
package endpoint

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/cleave-cri/cleave/systemd"
)

// ErrUnknown says that the node is none that is understood, so that nothing is
// changed. Its message has what to do by hand.
var ErrUnknown = errors.New("where this node's kubelet is told its runtime is not understood")

// Shape is a way in which nodes are set up.
type Shape string

// The shapes.
const (
	// KubeadmFlags: --container-runtime-endpoint in kubeadm's file of flags, as
	// kubeadm before 1.35 writes it.
	KubeadmFlags Shape = "kubeadm's file of flags"
	// KubeadmInstance: kubeadm's instance configuration, from which it writes the
	// kubelet's file anew at each upgrade.
	KubeadmInstance Shape = "kubeadm's instance configuration"
	// File: the kubelet's configuration file.
	File Shape = "the kubelet's configuration file"
	// DropIn: the folder of drop-ins of --config-dir.
	DropIn Shape = "the kubelet's folder of drop-ins"
	// K3s: a kubelet in k3s or rke2 with a containerd of its own.
	K3s Shape = "k3s with an external containerd"
	// Unit: a flag in the kubelet's unit, or in a file of variables of it.
	Unit Shape = "the kubelet's unit"
)

// Usual places.
const (
	kubeadmFlagsFile = "/var/lib/kubelet/kubeadm-flags.env"
	instanceFile     = "instance-config.yaml"
	dropInName       = "99-cleave.conf"
	unitDropIn       = "99-cleave.conf"

	flagName = "container-runtime-endpoint"
	keyName  = "containerRuntimeEndpoint"
	imageKey = "imageServiceEndpoint"

	// standard is what a kubelet takes that is told nothing (v1.37,
	// pkg/kubelet/apis/config/v1beta1/defaults.go).
	standard = "unix:///run/containerd/containerd.sock"
)

// Change is a file as it shall be.
type Change struct {
	Path string
	// Before is nil if there is no such file.
	Before *string
	After  string
	// Old and New are the endpoints; Old is empty where none was written.
	Old, New string
}

// Finding is how a node's kubelet is told its runtime.
type Finding struct {
	Shape Shape
	// Service is the unit to restart.
	Service string
	// Endpoint is what the kubelet is told now, as written.
	Endpoint string
	// InUnit says that a change is one of unit files, which systemd has to read
	// anew.
	InUnit bool
	// Notes are for people.
	Notes []string

	set func(endpoint string) ([]Change, error)
}

// Set says how to tell the kubelet another endpoint. It makes no change where
// that is told already.
func (f Finding) Set(endpoint string) ([]Change, error) {
	if f.Endpoint == endpoint {
		return nil, nil
	}
	changes, err := f.set(endpoint)
	if err != nil {
		return nil, err
	}
	for i := range changes {
		changes[i].New = endpoint
	}
	return changes, nil
}

// Find looks at a node's files below root, usually "/". The error is ErrUnknown,
// or that of the system.
func Find(root string) (Finding, error) {
	t := tree{root}
	s, err := t.service("kubelet.service")
	if errors.Is(err, errMissing) {
		return t.findK3s()
	}
	if err != nil {
		return Finding{}, err
	}
	if len(s.argv) == 0 {
		return Finding{}, unknown("kubelet.service has no ExecStart")
	}
	if strings.HasSuffix(s.argv[0].text, "sh") {
		return Finding{}, unknown("kubelet.service starts it by way of a shell (%s)", s.argv[0].text)
	}
	if image, _, ok := s.flag("image-service-endpoint"); ok && image != "" {
		return Finding{}, unknown("--image-service-endpoint is given besides (%s), and cleave has to have both: take it out first", image)
	}
	if value, file, ok := s.flag(flagName); ok {
		return t.fromFlag(s, value, file)
	}
	return t.fromFiles(s)
}

func unknown(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnknown, fmt.Sprintf(format, args...))
}

// fromFlag is a kubelet with --container-runtime-endpoint, which is stronger than
// all files.
func (t tree) fromFlag(s service, value, file string) (Finding, error) {
	f := Finding{Shape: Unit, Service: "kubelet.service", Endpoint: value}
	f.InUnit = slices.ContainsFunc(s.files, func(u unitFile) bool { return u.path == file })
	if file == kubeadmFlagsFile {
		f.Shape = KubeadmFlags
		f.Notes = append(f.Notes, "kubeadm upgrade goes by the node's annotation kubeadm.alpha.kubernetes.io/cri-socket (kubeadm before 1.36): "+
			"annotate the node with cleave's socket too, and with the old one after an uninstall")
	}
	if f.InUnit && !strings.HasPrefix(file, systemd.AdminDir+"/") {
		// The distribution's file would be replaced by its next upgrade.
		f.set = func(endpoint string) ([]Change, error) { return t.overrideUnit(s, value, endpoint) }
		return f, nil
	}
	f.set = func(endpoint string) ([]Change, error) {
		change, err := t.changeFlag(file, value, endpoint)
		if err != nil {
			return nil, err
		}
		instance := filepath.Join(filepath.Dir(kubeadmFlagsFile), instanceFile)
		if f.Shape != KubeadmFlags || !t.exists(instance) {
			return []Change{change}, nil
		}
		more, err := t.changeKey(instance, value, endpoint)
		return append([]Change{change}, more), err
	}
	return f, nil
}

// flagText finds the flag in a file of any kind: its value ends at a blank, a
// quote or a backslash.
var flagText = regexp.MustCompile(`--` + flagName + `(?:=|[ \t]+|["'][ \t]+["']?)["']?([^\s"'\\]+)`)

// changeFlag replaces the flag's value, which has to be there just once.
func (t tree) changeFlag(path, old, endpoint string) (Change, error) {
	text, err := t.read(path)
	if err != nil {
		return Change{}, err
	}
	var places [][2]int
	offset := 0
	for line := range strings.Lines(text) {
		trimmed := strings.TrimSpace(line)
		if !strings.HasPrefix(trimmed, "#") && !strings.HasPrefix(trimmed, ";") {
			for _, m := range flagText.FindAllStringSubmatchIndex(line, -1) {
				if line[m[2]:m[3]] == old {
					places = append(places, [2]int{offset + m[2], offset + m[3]})
				}
			}
		}
		offset += len(line)
	}
	if len(places) != 1 {
		return Change{}, unknown("%s names --%s %s %d times, and it has to be once", path, flagName, old, len(places))
	}
	after := text[:places[0][0]] + endpoint + text[places[0][1]:]
	return Change{Path: path, Before: &text, After: after, Old: old}, nil
}

// overrideUnit writes a drop-in with the command as it is, but for the endpoint.
func (t tree) overrideUnit(s service, old, endpoint string) ([]Change, error) {
	path := filepath.Join(systemd.AdminDir, "kubelet.service.d", unitDropIn)
	if t.exists(path) {
		return nil, unknown("%s is there already", path)
	}
	m := flagText.FindAllStringSubmatchIndex(s.exec, -1)
	if len(m) != 1 || s.exec[m[0][2]:m[0][3]] != old {
		return nil, unknown("the endpoint %s is not in ExecStart of %s itself, in a file that belongs to the distribution: "+
			"move the setting to a file in %s first", old, s.execFile, systemd.AdminDir)
	}
	for _, base := range t.list(filepath.Dir(path), ".conf") {
		if base > unitDropIn {
			return nil, unknown("%s would come after cleave's drop-in %s: rename it", filepath.Join(filepath.Dir(path), base), unitDropIn)
		}
	}
	exec := s.exec[:m[0][2]] + endpoint + s.exec[m[0][3]:]
	return []Change{{Path: path, After: "# Written by `cleave install`: the command of " + s.execFile + " with another endpoint.\n[Service]\nExecStart=\nExecStart=" + exec + "\n", Old: old}}, nil
}

// fromFiles is a kubelet that is told by its configuration.
func (t tree) fromFiles(s service) (Finding, error) {
	f := Finding{Service: "kubelet.service"}
	config, _, hasConfig := s.flag("config")
	dir, _, hasDir := s.flag("config-dir")
	if !hasConfig && !hasDir {
		return Finding{}, unknown("the kubelet has neither --%s nor --config nor --config-dir", flagName)
	}
	var value, image string
	if hasConfig {
		text, err := t.read(config)
		if err != nil {
			return Finding{}, unknown("the kubelet's configuration file %s: %v", config, err)
		}
		if value, image, err = keys(text); err != nil {
			return Finding{}, unknown("the kubelet's configuration file %s: %v", config, err)
		}
	}
	if hasDir {
		for _, base := range t.list(dir, ".conf") {
			path := filepath.Join(dir, base)
			text, err := t.read(path)
			if err != nil {
				return Finding{}, err
			}
			v, i, err := keys(text)
			if err != nil {
				return Finding{}, unknown("the drop-in %s: %v", path, err)
			}
			if v != "" {
				value = v
				if base > dropInName {
					return Finding{}, unknown("%s sets the endpoint and would come after cleave's drop-in %s: rename it to come before", path, dropInName)
				}
			}
			if i != "" {
				image = i
			}
		}
	}
	if image != "" {
		return Finding{}, unknown("%s is set besides (%s), and cleave has to have both: take it out first", imageKey, image)
	}
	f.Endpoint = value
	if value == "" {
		f.Endpoint = standard
	}
	instance := filepath.Join(filepath.Dir(config), instanceFile)
	switch {
	case hasDir && t.exists(dir):
		f.Shape = DropIn
		f.set = func(endpoint string) ([]Change, error) { return t.addDropIn(dir, value, endpoint) }
	case t.exists(instance):
		f.Shape = KubeadmInstance
		f.set = func(endpoint string) ([]Change, error) {
			var out []Change
			for _, path := range []string{instance, config} {
				c, err := t.changeKey(path, value, endpoint)
				if err != nil {
					return nil, err
				}
				out = append(out, c)
			}
			return out, nil
		}
	default:
		f.Shape = File
		if t.exists("/etc/kubernetes/kubelet.conf") {
			f.Notes = append(f.Notes, "kubeadm upgrade writes "+config+" anew: look at `cleave doctor` after one, and run `cleave install` again if the kubelet has gone back to the runtime")
		}
		f.set = func(endpoint string) ([]Change, error) {
			c, err := t.changeKey(config, value, endpoint)
			return []Change{c}, err
		}
	}
	return f, nil
}

func (t tree) addDropIn(dir, old, endpoint string) ([]Change, error) {
	path := filepath.Join(dir, dropInName)
	if t.exists(path) {
		return nil, unknown("%s is there already", path)
	}
	return []Change{{Path: path, Old: old, After: "# Written by `cleave install`.\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n" +
		keyName + ": " + endpoint + "\n"}}, nil
}

// keys reads the two endpoints of a KubeletConfiguration, YAML or JSON.
func keys(text string) (runtime, image string, _ error) {
	values, err := decode(text)
	if err != nil {
		return "", "", err
	}
	for key, into := range map[string]*string{keyName: &runtime, imageKey: &image} {
		switch v := values[key].(type) {
		case nil:
		case string:
			*into = v
		default:
			return "", "", fmt.Errorf("%s is no text", key)
		}
	}
	return runtime, image, nil
}

func decode(text string) (map[string]any, error) {
	d := yaml.NewDecoder(strings.NewReader(text))
	var out map[string]any
	if err := d.Decode(&out); errors.Is(err, io.EOF) {
		return map[string]any{}, nil
	} else if err != nil {
		return nil, err
	}
	var more any
	if d.Decode(&more) == nil {
		return nil, errors.New("it has several documents")
	}
	return out, nil
}

// keyText finds a key at the start of a line of YAML, or in JSON: its value ends
// at a blank, a quote, a comma or a bracket. Endpoints have none of these.
func keyText(key string) *regexp.Regexp {
	return regexp.MustCompile(`(?m)(?:^` + key + `[ \t]*:[ \t]*["']?|"` + key + `"[ \t\r\n]*:[ \t\r\n]*")([^\s"',}#]*)`)
}

// changeKey replaces the endpoint in a KubeletConfiguration, and adds it at the
// end where none is written. All else stays as it is, which is looked at.
func (t tree) changeKey(path, old, endpoint string) (Change, error) {
	text, err := t.read(path)
	if err != nil {
		return Change{}, unknown("%s: %v", path, err)
	}
	return changeText(path, text, keyName, old, endpoint)
}

func changeText(path, text, key, old, endpoint string) (Change, error) {
	before, err := decode(text)
	if err != nil {
		return Change{}, unknown("%s: %v", path, err)
	}
	was, there := before[key]
	if there && was != old {
		return Change{}, unknown("%s says %v where %s is in effect", path, was, old)
	}
	c := Change{Path: path, Before: &text, Old: old}
	places := keyText(key).FindAllStringSubmatchIndex(text, -1)
	switch {
	case there && len(places) == 1 && text[places[0][2]:places[0][3]] == old:
		c.After = text[:places[0][2]] + endpoint + text[places[0][3]:]
	case !there && len(places) == 0 && !strings.HasPrefix(strings.TrimSpace(text), "{"):
		newline := "\n"
		if strings.Contains(text, "\r\n") {
			newline = "\r\n"
		}
		c.After = text
		if text != "" && !strings.HasSuffix(text, "\n") {
			c.After += newline
		}
		c.After += key + ": " + endpoint + newline
	default:
		return Change{}, unknown("%s writes %s in a way that can't be changed without touching anything else", path, key)
	}
	after, err := decode(c.After)
	if err != nil || !onlyDiffers(before, after, key, endpoint) {
		return Change{}, unknown("%s writes %s in a way that can't be changed without touching anything else", path, key)
	}
	return c, nil
}

// onlyDiffers reports whether two configurations are the same but for one key,
// which has a value in the second.
func onlyDiffers(before, after map[string]any, key, value string) bool {
	if after[key] != value {
		return false
	}
	delete(before, key)
	delete(after, key)
	a, errA := yaml.Marshal(before)
	b, errB := yaml.Marshal(after)
	return errA == nil && errB == nil && string(a) == string(b)
}

// Socket is the path in an endpoint, in a form in which two can be compared:
// /var/run is taken for /run, which it leads to. Empty if it is no unix socket.
func Socket(endpoint string) string {
	path := strings.TrimPrefix(endpoint, "unix://")
	if !strings.HasPrefix(path, "/") {
		return ""
	}
	path = filepath.Clean(path)
	if rest, ok := strings.CutPrefix(path, "/var/run/"); ok {
		return "/run/" + rest
	}
	return path
}
