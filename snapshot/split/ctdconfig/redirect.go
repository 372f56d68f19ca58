package ctdconfig

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// DefaultRedirect is the usual drop-in that moves containerd's socket.
const DefaultRedirect = "/etc/containerd/conf.d/99-cleave-redirect.toml"

// RedirectBeside is the same for another main file.
func RedirectBeside(mainFile string) string {
	return filepath.Join(filepath.Dir(mainFile), "conf.d", filepath.Base(DefaultRedirect))
}

// redirectName is the socket that containerd moves to, beside its old one.
const redirectName = "behind-cleave.sock"

// Plugins of containerd's servers, since version 4.
const (
	pluginGRPC  = "io.containerd.server.v1.grpc"
	pluginTTRPC = "io.containerd.server.v1.ttrpc"
	// serverVersion is the first whose servers are plugins (containerd 2.4,
	// cmd/containerd/server/config, serviceMigrate).
	serverVersion = 4
	// standardSocket is where a containerd listens that is told nothing.
	standardSocket = "/run/containerd/containerd.sock"
	// ttrpcSuffix is what its other socket has besides, if nothing is said.
	ttrpcSuffix = ".ttrpc"
)

// Redirect is where containerd listens now and where it shall. Its ttrpc socket
// stays where it is, for each running shim tells containerd there what happens
// to its containers, and learns of no other for the rest of its life.
type Redirect struct {
	// From is the absolute path of containerd's socket now, To what it shall be.
	From, To string
	// TTRPC is the absolute path of its ttrpc socket, now and then.
	TTRPC string
}

// server is one of containerd's sockets with its owner.
type server struct {
	address  string
	uid, gid int
}

// ExamineRedirect plans the drop-in at a path that moves containerd's socket. It
// changes nothing.
func ExamineRedirect(ctx context.Context, t Target, dropIn string) (Redirect, Plan, error) {
	f, err := t.facts(ctx, dropIn)
	if err != nil {
		return Redirect{}, Plan{}, err
	}
	return MakeRedirect(f, dropIn)
}

// MakeRedirect plans it from what containerd's configuration is. The error is as
// with [Make].
func MakeRedirect(f Facts, dropIn string) (Redirect, Plan, error) {
	effective, err := parse("containerd config dump", f.Dump)
	if err != nil {
		return Redirect{}, Plan{}, err
	}
	main, err := parse(f.MainPath, f.Main)
	if err != nil {
		return Redirect{}, Plan{}, err
	}
	version, err := versionFor(f.MainPath, main, effective)
	if err != nil {
		return Redirect{}, Plan{}, err
	}
	p := Plan{Path: dropIn}
	grpc, ttrpc := servers(effective)
	r := Redirect{From: grpc.address, To: filepath.Join(filepath.Dir(grpc.address), redirectName), TTRPC: ttrpc.address}
	if f.DropIn != nil {
		p.Conflicts = append(p.Conflicts, Conflict{dropIn, "the file is there already", "look at it and move it away"})
	}
	for _, path := range []string{r.From, r.TTRPC} {
		if !filepath.IsAbs(path) || strings.ContainsFunc(path, isControl) {
			p.Conflicts = append(p.Conflicts, Conflict{"address", fmt.Sprintf("containerd listens on %q, which is no absolute path", path), "give it one"})
		}
	}
	if r.From == r.To {
		p.Conflicts = append(p.Conflicts, Conflict{"address", "is " + r.To + " already", "look which file says so, and take that out"})
	}
	for _, id := range effective.texts("disabled_plugins") {
		if slices.Contains([]string{pluginGRPC, pluginTTRPC}, id) {
			p.Conflicts = append(p.Conflicts, Conflict{"disabled_plugins", id + " is disabled and is needed", "take it out of the list"})
		}
	}
	p.Content = redirectContent(version, r.To, grpc, ttrpc)
	p.ImportLine, p.ImportHint = importLine(f.MainPath, main, dropIn)
	return r, p, nil
}

// servers reads containerd's sockets from what it prints: of version 4 and of
// those before.
func servers(effective tree) (grpc, ttrpc server) {
	read := func(path ...string) server {
		var s server
		s.address, _ = effective.text(append(path, "address")...)
		s.uid, _ = effective.integer(append(path, "uid")...)
		s.gid, _ = effective.integer(append(path, "gid")...)
		return s
	}
	if dumped, _ := effective.integer("version"); dumped >= serverVersion {
		grpc, ttrpc = read("plugins", pluginGRPC), read("plugins", pluginTTRPC)
		if grpc.address == "" {
			grpc.address = standardSocket
		}
		if ttrpc.address == "" {
			ttrpc.address = standardSocket + ttrpcSuffix
		}
		return grpc, ttrpc
	}
	grpc, ttrpc = read("grpc"), read("ttrpc")
	if grpc.address == "" {
		grpc.address = standardSocket
	}
	if ttrpc.address == "" {
		// containerd 2.0, cmd/containerd/command/main.go: with the owner of the other.
		ttrpc = grpc
		ttrpc.address += ttrpcSuffix
	}
	return grpc, ttrpc
}

// redirectContent writes the drop-in. Owners are repeated, because beside an
// address containerd takes none for root.
func redirectContent(version int, to string, grpc, ttrpc server) []byte {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	grpc.address = to
	line("# Written by `cleave install --redirect`: containerd behind cleave. `cleave uninstall` takes it away again.")
	line("version = %d", version)
	for _, s := range []struct {
		name, plugin, remark string
		server
	}{
		{"grpc", pluginGRPC, "cleave listens where containerd did.", grpc},
		{"ttrpc", pluginTTRPC, "This one stays: shims that run know it.", ttrpc},
	} {
		line("")
		line("# %s", s.remark)
		if version >= serverVersion {
			line("[plugins.%s]", quote(s.plugin))
		} else {
			line("[%s]", s.name)
		}
		line("address = %s", quote(s.address))
		line("uid = %d", s.uid)
		line("gid = %d", s.gid)
	}
	return []byte(b.String())
}

// VerifyRedirect compares two outputs of `containerd config dump`, from before and
// after the drop-in, and says what is not as it should be.
func VerifyRedirect(before, after []byte, r Redirect) ([]string, error) {
	old, err := parse("containerd config dump, before", before)
	if err != nil {
		return nil, err
	}
	now, err := parse("containerd config dump, after", after)
	if err != nil {
		return nil, err
	}
	var out []string
	wasGRPC, wasTTRPC := servers(old)
	grpc, ttrpc := servers(now)
	wasGRPC.address = r.To
	for _, s := range []struct {
		name      string
		want, got server
	}{{"grpc", wasGRPC, grpc}, {"ttrpc", wasTTRPC, ttrpc}} {
		if s.want != s.got {
			out = append(out, fmt.Sprintf("its %s socket is %s of %d:%d, and should be %s of %d:%d: another file sets it later",
				s.name, s.got.address, s.got.uid, s.got.gid, s.want.address, s.want.uid, s.want.gid))
		}
	}
	for _, t := range []tree{old, now} {
		delete(t, "imports")
		for _, at := range []tree{t.table("grpc"), t.table("ttrpc"), t.table("plugins", pluginGRPC), t.table("plugins", pluginTTRPC)} {
			for _, key := range []string{"address", "uid", "gid"} {
				delete(at, key)
			}
		}
	}
	return append(out, compare("", old, now)...), nil
}
