package ctdconfig

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestRedirectGolden: the drop-in is written in the version of the main file, and
// has the owners that the sockets have.
func TestRedirectGolden(t *testing.T) {
	t.Parallel()
	const (
		older = "[grpc]\naddress = '/run/containerd/containerd.sock'\nuid = 0\ngid = 998\n[ttrpc]\naddress = ''\n"
		newer = "[plugins.'io.containerd.server.v1.grpc']\naddress = '/run/containerd/containerd.sock'\nuid = 0\ngid = 998\n" +
			"[plugins.'io.containerd.server.v1.ttrpc']\naddress = '/run/other.ttrpc'\nuid = 3\ngid = 4\n"
	)
	for _, tc := range []struct {
		name, main, dump string
		want             Redirect
	}{
		{"redirect_version2", "2", dumped("4", newer), Redirect{"/run/containerd/containerd.sock", "/run/containerd/behind-cleave.sock", "/run/other.ttrpc"}},
		{"redirect_version3", "3", dumped("3", older), Redirect{"/run/containerd/containerd.sock", "/run/containerd/behind-cleave.sock", "/run/containerd/containerd.sock.ttrpc"}},
		{"redirect_version4", "4", dumped("4", newer), Redirect{"/run/containerd/containerd.sock", "/run/containerd/behind-cleave.sock", "/run/other.ttrpc"}},
		{"redirect_standard", "4", dumped("4", ""), Redirect{"/run/containerd/containerd.sock", "/run/containerd/behind-cleave.sock", "/run/containerd/containerd.sock.ttrpc"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r, p, err := MakeRedirect(Facts{Dump: []byte(tc.dump), MainPath: mainFile, Main: []byte(strings.Replace(importer, "3", tc.main, 1))}, DefaultRedirect)
			if err == nil {
				err = p.Err()
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, r); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			checkGolden(t, tc.name, p.Content)
		})
	}
}

func TestRedirectRefused(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		main, more string
		dropIn     []byte
		want       string
	}{
		"something is there":    {importer, "", []byte("version = 3\n"), "the file is there already"},
		"a relative address":    {importer, "[plugins.'io.containerd.server.v1.grpc']\naddress = 'c.sock'\n", nil, "no absolute path"},
		"moved already":         {importer, "[plugins.'io.containerd.server.v1.grpc']\naddress = '/run/containerd/behind-cleave.sock'\n", nil, "already"},
		"drop-ins are not read": {"version = 3\n", "", nil, "imports no drop-ins"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, p, err := MakeRedirect(Facts{Dump: []byte(dumped("4", tc.more)), MainPath: mainFile, Main: []byte(tc.main), DropIn: tc.dropIn}, DefaultRedirect)
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Err(); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q in it", err, tc.want)
			}
		})
	}
	dump := strings.Replace(dumped("4", ""), "disabled_plugins = []", "disabled_plugins = ['"+pluginTTRPC+"']", 1)
	if _, p, err := MakeRedirect(Facts{Dump: []byte(dump), MainPath: mainFile, Main: []byte(importer)}, DefaultRedirect); err != nil || len(p.Conflicts) != 1 {
		t.Errorf("with ttrpc disabled: %v, %v", p.Conflicts, err)
	}
}

// TestRealContainerdTakesTheRedirect: it has moved then, its other socket has not,
// and nothing else is different.
func TestRealContainerdTakesTheRedirect(t *testing.T) {
	t.Parallel()
	for name, main := range mains {
		for owner, more := range map[string]string{"": "", " with owners": "[grpc]\ngid = 998\n[ttrpc]\nuid = 5\ngid = 6\n"} {
			if strings.HasPrefix(main, "version = 4") && more != "" {
				continue
			}
			t.Run(name+owner, func(t *testing.T) {
				t.Parallel()
				n := newNode(t, main+more)
				dropIn := RedirectBeside(n.target.MainFile)
				before, err := n.target.dump(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				r, p, err := ExamineRedirect(t.Context(), n.target, dropIn)
				if err == nil {
					err = p.Err()
				}
				if err != nil {
					t.Fatal(err)
				}
				if err := os.MkdirAll(filepath.Dir(dropIn), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(dropIn, p.Content, 0o644); err != nil {
					t.Fatal(err)
				}
				n.dump(t) // no key that it does not know
				after, err := n.target.dump(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if differences, err := VerifyRedirect(before, after, r); err != nil || len(differences) > 0 {
					t.Errorf("%v, %q", err, differences)
				}
				if same, err := VerifyRedirect(before, before, r); err != nil || len(same) == 0 {
					t.Errorf("without the drop-in nothing is found wrong: %v", err)
				}
			})
		}
	}
}
