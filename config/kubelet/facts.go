package kubelet

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Facts are what the checks need to know beside the kubelet's settings. A nil
// fact is not known, and nothing is concluded from it.
type Facts struct {
	// Mode is the mode that cleave is configured for: cri, crio or observe.
	Mode string
	// Socket is the CRI socket that cleave makes in that mode.
	Socket string

	// NodeFS, ImageFS and Logs are the filesystems of the kubelet's root folder,
	// of images, and of its pod logs.
	NodeFS, ImageFS, Logs *Disk

	// SameMounts says whether the kubelet sees the same mounts as this process.
	SameMounts *bool
	// VarRunIsRun says whether /var/run leads to /run, as the kubelet sees it.
	VarRunIsRun *bool
	// RunsCRIO lists the processes that are a CRI-O.
	RunsCRIO []int
	// Sockets are those of kubeadm's list that answer.
	Sockets []Socket
	// Kubeadm says whether kubeadm is used on this node.
	Kubeadm bool
	SELinux SELinux
}

// Disk is a filesystem, as far as thresholds are about it.
type Disk struct {
	// Device identifies the filesystem.
	Device string
	// CapacityBytes is all of it.
	CapacityBytes uint64
	// AttainableBytes is what is available when it is empty: the capacity without
	// the part that is kept for root, which the kubelet counts as not available
	// (OBS-4).
	AttainableBytes uint64
	// Inodes is how many it can have; nil if there is no limit, as on btrfs.
	Inodes *uint64
}

// Socket is a unix socket on which somebody answers.
type Socket struct {
	Path string
	// Owner is the base name of the program that listens; empty if unknown.
	Owner string
}

// SELinux is what can be seen of it.
type SELinux struct {
	Enabled, Enforcing bool
	// Labels are those of cleave's files beside those of the runtime's.
	Labels []Label
}

// Label is the SELinux label of a path beside that of its model, a path that is
// used in the same way and has the right label.
type Label struct {
	Path, Label       string
	Model, ModelLabel string
	// Err is why they could not be read, or nil.
	Err error
}

// KubeadmSockets are the sockets that kubeadm v1.37 looks for when it is not told
// one (cmd/kubeadm/app/constants/constants_unix.go). If two answer it refuses.
func KubeadmSockets() []string {
	return []string{"/var/run/containerd/containerd.sock", crioSocket, "/var/run/cri-dockerd.sock"}
}

// crioSocket is where cAdvisor asks about CRI-O's storage; no flag changes it
// (KSS-4).
const crioSocket = "/var/run/crio/crio.sock"

// UsesKubeadm says whether kubeadm is or was used below root, usually "/".
func UsesKubeadm(root string) bool {
	for _, trace := range []string{"usr/bin/kubeadm", "usr/local/bin/kubeadm", "opt/bin/kubeadm", "var/lib/kubelet/kubeadm-flags.env"} {
		if _, err := os.Stat(filepath.Join(root, trace)); err == nil {
			return true
		}
	}
	return false
}

// Surroundings looks at what is around a kubelet: its mounts, /var/run as it
// sees it, and whether a CRI-O runs. What can't be seen stays nil.
func (r Reader) Surroundings(ctx context.Context, pid int, f *Facts) {
	theirs, err := os.Readlink(r.path(strconv.Itoa(pid), "ns", "mnt"))
	ours, ownErr := os.Readlink(r.path("self", "ns", "mnt"))
	if err == nil && ownErr == nil {
		same := theirs == ours
		f.SameMounts = &same
	}
	run, err := r.statInRoot(pid, "/run")
	varRun, varErr := r.statInRoot(pid, "/var/run")
	if err == nil && (varErr == nil || errors.Is(varErr, fs.ErrNotExist)) {
		same := varErr == nil && os.SameFile(run, varRun)
		f.VarRunIsRun = &same
	}
	if pids, err := r.Named(ctx, "crio"); err == nil {
		f.RunsCRIO = pids
	}
}

// NameOf is the base name of a process's program as it was called, or empty.
func (r Reader) NameOf(pid int) string {
	args, err := r.args(pid)
	if err != nil || len(args) == 0 {
		return ""
	}
	return filepath.Base(args[0])
}

// LookSELinux reads whether SELinux is on, and the labels of paths (key) and of
// their models (value). mount is where its file system is, /sys/fs/selinux.
func LookSELinux(mount string, models [][2]string) SELinux {
	enforce, err := os.ReadFile(filepath.Join(mount, "enforce"))
	if err != nil {
		return SELinux{}
	}
	out := SELinux{Enabled: true, Enforcing: strings.TrimSpace(string(enforce)) == "1"}
	for _, pair := range models {
		l := Label{Path: pair[0], Model: pair[1]}
		if l.Label, l.Err = labelOf(l.Path); l.Err == nil {
			l.ModelLabel, l.Err = labelOf(l.Model)
		}
		if errors.Is(l.Err, fs.ErrNotExist) {
			continue // not made yet
		}
		out.Labels = append(out.Labels, l)
	}
	return out
}
