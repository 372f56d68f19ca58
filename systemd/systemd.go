// Package systemd holds cleave's unit files, as they are in packages and as
// `cleave install` writes them. Below it, notify and activation are what a
// serving process says to systemd and takes from it, and install puts cleave on
// a node and takes it away again.
//
// It imports nothing of ours; agent, packaging and install may import it.
package systemd

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// The units.
const (
	Service            = "cleave.service"
	Socket             = "cleave.socket"
	Passthrough        = "cleave-passthrough.service"
	SnapshotterService = "cleave-snapshotter.service"
	SnapshotterSocket  = "cleave-snapshotter.socket"
)

// Folders that systemd reads units from, the first before the second
// (systemd.unit(5), "Unit File Load Path").
const (
	AdminDir  = "/etc/systemd/system"
	VendorDir = "/usr/lib/systemd/system"
)

// Executable is where the units expect the program.
const Executable = "/usr/bin/cleave"

//go:embed units
var units embed.FS

// File is a file of the units': a unit, or a drop-in with the folder it is in.
type File struct {
	// Name is the path below a folder that systemd reads units from.
	Name    string
	Content []byte
}

// Units returns all units, in the order of their names, for a program at a
// path: [Executable], or an absolute path of letters, digits and . _ - /, which
// systemd takes as it is.
func Units(executable string) ([]File, error) {
	if !plain(executable) || !filepath.IsAbs(executable) {
		return nil, fmt.Errorf("write units for %q: systemd would read that path otherwise: move the program to %s", executable, Executable)
	}
	entries, err := units.ReadDir("units")
	if err != nil {
		return nil, err
	}
	var out []File
	for _, e := range entries {
		text, err := fs.ReadFile(units, path.Join("units", e.Name()))
		if err != nil {
			return nil, err
		}
		text = []byte(strings.ReplaceAll(string(text), "="+Executable+" ", "="+executable+" "))
		out = append(out, File{Name: e.Name(), Content: text})
	}
	return out, nil
}

// plain reports whether a path means itself in a unit file: systemd has
// specifiers, escapes, quotes and blanks (systemd.syntax(7)).
func plain(path string) bool {
	return path != "" && strings.IndexFunc(path, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-/", r))
	}) < 0
}

// Setting is what makes one node's units differ from another's.
type Setting struct {
	// Listen is the absolute path of the socket for the kubelet.
	Listen string
	// FolderMode is that of its folder, if systemd has to make it, such as "0711";
	// empty leaves it as the units have it.
	FolderMode string
	// HostMounts is for mode crio: cleave makes mounts that the kubelet has to
	// see, and so must be where the kubelet is.
	HostMounts bool
	// Roots are those of the split snapshotter; none without it.
	Roots []string
	// SnapshotterSockets are those of the split snapshotter.
	SnapshotterSockets []string
}

const (
	// defaultListen is the socket that the units name.
	defaultListen = "/run/cleave/cleave.sock"
	// dropInName comes after what a distribution adds and before what an
	// administrator would call 90-something.
	dropInName = "50-cleave-install.conf"
	head       = "# Written by `cleave install`.\n"
)

// hostMounts takes away all that gives a service a mount namespace of its own,
// and adds what making a bind mount needs.
const hostMounts = `
[Service]
ProtectSystem=no
ProtectHome=no
PrivateTmp=no
PrivateDevices=no
ProtectKernelTunables=no
ProtectKernelModules=no
ProtectKernelLogs=no
ProtectControlGroups=no
ProtectClock=no
ProtectHostname=no
ReadWritePaths=
CapabilityBoundingSet=CAP_SYS_ADMIN
SystemCallFilter=@mount
`

// DropIns returns what has to be added to the units for a setting, in the order
// of their names; nothing for the usual one.
func DropIns(s Setting) ([]File, error) {
	for _, p := range slices.Concat([]string{s.Listen}, s.Roots, s.SnapshotterSockets) {
		if !filepath.IsAbs(p) || !plain(p) {
			return nil, fmt.Errorf("write units for the path %q: it must be absolute, of letters, digits and . _ - only: choose another", p)
		}
	}
	var out []File
	add := func(unit, text string) {
		out = append(out, File{Name: unit + ".d/" + dropInName, Content: []byte(head + text)})
	}
	var roots string
	if len(s.Roots) > 0 {
		roots = "\n[Unit]\nRequiresMountsFor=" + strings.Join(s.Roots, " ") + "\n"
		add(SnapshotterService, roots)
		if !slices.Equal(s.SnapshotterSockets, defaultSnapshotterSockets()) {
			add(SnapshotterSocket, listenLines(s.SnapshotterSockets))
		}
	}
	switch folder := filepath.Dir(s.Listen); {
	case s.HostMounts:
		add(Service, roots+hostMounts)
	case folder != filepath.Dir(defaultListen):
		// It gives its socket the owner and mode of the runtime's.
		add(Service, "\n[Service]\nReadWritePaths=-"+folder+"\n")
	}
	if s.Listen != defaultListen {
		text := listenLines([]string{s.Listen})
		if s.FolderMode != "" {
			text += "DirectoryMode=" + s.FolderMode + "\n"
		}
		add(Socket, text)
	}
	return out, nil
}

// PassthroughFile is where the pass-through finds its flags.
const PassthroughFile = "/etc/cleave/passthrough.env"

// PassthroughFlags is the content of [PassthroughFile], nil if the usual sockets
// are meant.
func PassthroughFlags(listen, runtime string) ([]byte, error) {
	if !plain(listen) || !plain(runtime) {
		return nil, fmt.Errorf("write the pass-through's flags: the sockets %q and %q must be of letters, digits and . _ - only", listen, runtime)
	}
	if listen == defaultListen && runtime == "/run/containerd/containerd.sock" {
		return nil, nil
	}
	return []byte(head + "CLEAVE_PASSTHROUGH=--listen=" + listen + " --runtime-endpoint=" + runtime + "\n"), nil
}

// defaultSnapshotterSockets are those that the units name.
func defaultSnapshotterSockets() []string {
	return []string{"/run/cleave/snapshotter.sock", "/run/cleave/snapshotter-status.sock"}
}

// listenLines makes a socket unit listen at just these paths.
func listenLines(paths []string) string {
	text := "\n[Socket]\nListenStream=\n"
	for _, p := range paths {
		text += "ListenStream=" + p + "\n"
	}
	return text
}
