package systemd_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/lab/need"
	"github.com/cleave-cri/cleave/systemd"
)

var usual = systemd.Setting{Listen: "/run/cleave/cleave.sock"}

var settings = map[string]systemd.Setting{
	"usual":                 usual,
	"crio":                  {Listen: "/run/crio/crio.sock", HostMounts: true},
	"in containerd's place": {Listen: "/run/containerd/containerd.sock", FolderMode: "0711"},
	"split and crio": {
		Listen: "/run/crio/crio.sock", HostMounts: true, Roots: []string{"/mnt/images", "/mnt/containers"},
		SnapshotterSockets: []string{"/run/cleave/snapshotter.sock", "/run/cleave/snapshotter-status.sock"},
	},
	"other sockets": {
		Listen: "/run/other/cleave.sock", Roots: []string{"/mnt/images", "/mnt/containers"},
		SnapshotterSockets: []string{"/run/other/snapshotter.sock", "/run/other/status.sock"},
	},
}

// write puts units and drop-ins into a folder, for a program that is there.
func write(t *testing.T, s systemd.Setting) (dir string) {
	t.Helper()
	dir = t.TempDir()
	program := filepath.Join(dir, "cleave")
	if err := os.WriteFile(program, nil, 0o755); err != nil { //nolint:gosec // a program is executable
		t.Fatal(err)
	}
	units, err := systemd.Units(program)
	if err != nil {
		t.Fatal(err)
	}
	dropIns, err := systemd.DropIns(s)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range append(units, dropIns...) {
		path := filepath.Join(dir, f.Name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, f.Content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestVerify has systemd itself read each unit, with every kind of drop-ins.
func TestVerify(t *testing.T) {
	t.Parallel()
	need.Tools(t, "systemd-analyze")
	for name, s := range settings {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := write(t, s)
			for _, unit := range []string{systemd.Service, systemd.Socket, systemd.Passthrough, systemd.SnapshotterService, systemd.SnapshotterSocket} {
				cmd := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", "--recursive-errors=no", filepath.Join(dir, unit))
				cmd.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+dir+":")
				out, err := cmd.CombinedOutput()
				if err != nil || len(out) > 0 {
					t.Errorf("%s: %v\n%s", unit, err, out)
				}
			}
		})
	}
}

// TestVerifyIsNotBlind: what the other test relies on does notice a mistake.
func TestVerifyIsNotBlind(t *testing.T) {
	t.Parallel()
	need.Tools(t, "systemd-analyze")
	dir := write(t, usual)
	dropIn := filepath.Join(dir, systemd.Service+".d", "50-cleave-install.conf")
	if err := os.MkdirAll(filepath.Dir(dropIn), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dropIn, []byte("[Service]\nSystemCallFilter=@nonsense\nNoSuchKey=1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", filepath.Join(dir, systemd.Service))
	cmd.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+dir+":")
	if out, _ := cmd.CombinedOutput(); !strings.Contains(string(out), "NoSuchKey") { //nolint:errcheck // what it says counts
		t.Errorf("an unknown key was not noticed:\n%s", out)
	}
}

// TestExposure holds the service to what docs/systemd.md promises.
func TestExposure(t *testing.T) {
	t.Parallel()
	need.Tools(t, "systemd-analyze")
	dir := write(t, usual)
	for unit, most := range map[string]string{systemd.Service: "35", systemd.Passthrough: "20", systemd.SnapshotterService: "50"} {
		cmd := exec.CommandContext(t.Context(), "systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold="+most, filepath.Join(dir, unit))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s is exposed by more than %s tenths: %v\n%s", unit, most, err, out)
		}
	}
}

// TestHostMounts: in mode crio, and for the snapshotter at all times, nothing may
// give the service a mount namespace of its own, where the kubelet would not see
// its mounts.
func TestHostMounts(t *testing.T) {
	t.Parallel()
	need.Tools(t, "systemd-analyze")
	dir := write(t, settings["split and crio"])
	for _, unit := range []string{systemd.Service, systemd.SnapshotterService} {
		cmd := exec.CommandContext(t.Context(), "systemd-analyze", "security", "--offline=true", "--json=short", filepath.Join(dir, unit))
		cmd.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+dir+":")
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		var found []struct {
			Field string `json:"json_field"`
			Set   *bool  `json:"set"`
		}
		if err := json.Unmarshal(out, &found); err != nil {
			t.Fatal(err)
		}
		checked := 0
		for _, f := range found {
			switch f.Field {
			case "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "PrivateMounts", "ProtectKernelTunables", "ProtectKernelModules",
				"ProtectKernelLogs", "ProtectControlGroups", "ProtectProc", "ProcSubset", "RootDirectoryOrRootImage":
				checked++
				if f.Set == nil || *f.Set {
					t.Errorf("%s: %s gives it a mount namespace of its own", unit, f.Field)
				}
			}
		}
		if checked < 10 {
			t.Errorf("%s: only %d of the settings were found in systemd's answer:\n%s", unit, checked, out)
		}
	}
}

// TestOpenat2Works: systemd's filter for RestrictSUIDSGID can't look into openat2's arguments, and refuses it altogether.
func TestOpenat2Works(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"cleave.service", "cleave-snapshotter.service"} {
		text, err := os.ReadFile("units/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "\nRestrictSUIDSGID=yes") {
			t.Errorf("%s: openat2(2) fails with it", name)
		}
	}
}

// TestPathsThatSystemdReadsOtherwise are refused.
func TestPathsThatSystemdReadsOtherwise(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"", "cleave", "/opt/my programs/cleave", "/opt/%n", "/opt/$HOME", "/opt/a\nUser=x", `/opt/"a`} {
		if _, err := systemd.Units(path); err == nil {
			t.Errorf("units for the program %q were written", path)
		}
		if _, err := systemd.DropIns(systemd.Setting{Listen: path}); err == nil {
			t.Errorf("a drop-in for the socket %q was written", path)
		}
		if _, err := systemd.PassthroughFlags("/run/cleave/cleave.sock", path); err == nil && path != "cleave" {
			t.Errorf("flags for the runtime %q were written", path)
		}
	}
	for _, f := range must(systemd.Units("/usr/local/bin/cleave")) {
		if strings.Contains(string(f.Content), systemd.Executable+" ") {
			t.Errorf("%s still names %s", f.Name, systemd.Executable)
		}
	}
}

func must(files []systemd.File, err error) []systemd.File {
	if err != nil {
		panic(err)
	}
	return files
}
