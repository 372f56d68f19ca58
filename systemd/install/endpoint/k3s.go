package endpoint

import (
	"errors"
	"path/filepath"
)

// distribution is one that has the kubelet in its own process.
type distribution struct {
	services []string
	config   string
}

func distributions() []distribution {
	return []distribution{
		{[]string{"k3s.service", "k3s-agent.service"}, "/etc/rancher/k3s/config.yaml"},
		{[]string{"rke2-server.service", "rke2-agent.service"}, "/etc/rancher/rke2/config.yaml"},
	}
}

// findK3s is a node without a kubelet of its own. Flags are stronger than the
// file, and of the files below config.yaml.d the last counts (k3s, "Configuration
// File"). Told no endpoint it starts a containerd of its own, which ends with it
// and has no place for cleave.
func (t tree) findK3s() (Finding, error) {
	for _, d := range distributions() {
		for _, name := range d.services {
			s, err := t.service(name)
			if errors.Is(err, errMissing) {
				continue
			}
			if err != nil {
				return Finding{}, err
			}
			return t.fromK3s(name, s, d.config)
		}
	}
	return Finding{}, unknown("there is no kubelet.service, and no k3s or rke2 either")
}

func (t tree) fromK3s(name string, s service, config string) (Finding, error) {
	f := Finding{Shape: K3s, Service: name}
	if value, file, ok := s.flag(flagName); ok {
		f.Endpoint, f.InUnit = value, file == s.execFile
		f.set = func(endpoint string) ([]Change, error) {
			c, err := t.changeFlag(file, value, endpoint)
			return []Change{c}, err
		}
		return f, nil
	}
	paths := []string{config}
	for _, base := range t.list(config+".d", ".yaml") {
		paths = append(paths, filepath.Join(config+".d", base))
	}
	var place string
	for _, path := range paths {
		text, err := t.read(path)
		if errors.Is(err, errMissing) {
			continue
		}
		if err != nil {
			return Finding{}, err
		}
		values, err := decode(text)
		if err != nil {
			return Finding{}, unknown("%s: %v", path, err)
		}
		if _, ok := values["image-service-endpoint"]; ok {
			return Finding{}, unknown("%s gives image-service-endpoint besides, and cleave has to have both: take it out first", path)
		}
		if v, ok := values[flagName].(string); ok && v != "" {
			f.Endpoint, place = v, path
		}
	}
	if place == "" {
		return Finding{}, unknown("%s runs a containerd of its own: set up containerd as a service of the node and name it with %s in %s first", name, flagName, config)
	}
	f.set = func(endpoint string) ([]Change, error) {
		text, err := t.read(place)
		if err != nil {
			return nil, err
		}
		c, err := changeText(place, text, flagName, f.Endpoint, endpoint)
		return []Change{c}, err
	}
	return f, nil
}
