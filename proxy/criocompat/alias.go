package criocompat

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"path"
	"strings"
)

const (
	// aliasLetters are the letters of an alias, one for each of 16 values. cAdvisor
	// looks for 64 of [a-z0-9]; that none of these is a digit in base 16 keeps
	// tools that look for a container ID of 64 of [0-9a-f] from finding one in an
	// alias (KSS-17).
	aliasLetters = "ghijklmnopqrstuv"

	// aliasLength is the length of an alias: two letters for each byte of SHA-256.
	aliasLength = 2 * sha256.Size

	// prefix is how cAdvisor's handler for CRI-O wants the names of its cgroups to
	// begin (cAdvisor, container/crio/factory.go: CrioNamespace).
	prefix = "crio"
)

// Alias returns the name under which cAdvisor asks for a container: 64 letters
// from g to v that follow from the container's ID. It is none that containerd
// knows, so that cAdvisor's handler for containerd lets the container be,
// whichever handler is asked first (KSS-8).
func Alias(containerID string) string {
	sum := sha256.Sum256([]byte(containerID))
	alias := make([]byte, 0, aliasLength)
	for _, b := range sum {
		alias = append(alias, aliasLetters[b>>4], aliasLetters[b&0xf])
	}
	return string(alias)
}

// IsAlias reports whether a name has the form of an alias.
func IsAlias(name string) bool {
	return len(name) == aliasLength && strings.Trim(name, aliasLetters) == ""
}

// Driver is how cgroups are made, in the words of the kubelet's cgroupDriver.
type Driver string

// The drivers.
const (
	Cgroupfs Driver = "cgroupfs"
	Systemd  Driver = "systemd"
)

// DriverOf says by the form of a cgroup path how the cgroup is made (OCI runtime
// spec, "Cgroups Path": with systemd it is slice:prefix:name).
func DriverOf(cgroupsPath string) Driver {
	if strings.Contains(cgroupsPath, ":") {
		return Systemd
	}
	return Cgroupfs
}

// ErrForm says that a cgroup path does not have the form that containerd gives
// to a container's.
var ErrForm = errors.New("the cgroup path does not have containerd's form")

// CgroupsPath returns the path that a container's cgroup shall have in place of
// the one that containerd chose, in the form of the same driver, and that driver:
//
//	/kubepods/pod1/ID                       /kubepods/pod1/crio-ALIAS-ID
//	kubepods-pod1.slice:cri-containerd:ID   kubepods-pod1.slice:crio:ALIAS-ID
//
// runc names the systemd unit of the latter crio-ALIAS-ID.scope (OCI runtime spec,
// "Cgroups Path"; runc, docs/systemd.md). A path that has another form was chosen
// by somebody else and is theirs: [ErrForm].
func CgroupsPath(present, containerID string) (string, Driver, error) {
	name := Alias(containerID) + "-" + containerID
	if slice, rest, ok := strings.Cut(present, ":"); ok {
		unit, id, _ := strings.Cut(rest, ":")
		if slice == "" || unit != "cri-containerd" || id != containerID || id == "" {
			return "", "", fmt.Errorf("cgroup %q of container %s: %w", present, containerID, ErrForm)
		}
		return slice + ":" + prefix + ":" + name, Systemd, nil
	}
	if containerID == "" || path.Base(present) != containerID || path.Clean(present) != present {
		return "", "", fmt.Errorf("cgroup %q of container %s: %w", present, containerID, ErrForm)
	}
	return path.Join(path.Dir(present), prefix+"-"+name), Cgroupfs, nil
}

// Named reports whether a container's cgroup path is one of ours, so that the
// kubelet's cAdvisor measures the container.
func Named(cgroupsPath, containerID string) bool {
	name := Alias(containerID) + "-" + containerID
	return strings.HasSuffix(cgroupsPath, ":"+prefix+":"+name) ||
		path.Base(cgroupsPath) == prefix+"-"+name
}
