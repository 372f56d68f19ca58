package criocompat

import (
	"errors"
	"regexp"
	"strings"
	"testing"
)

const someID = "4f1d6c3f9a6a7c1b2d3e4f5061728394a5b6c7d8e9f00112233445566778899a"

func TestAliasIsAlwaysTheSame(t *testing.T) {
	t.Parallel()
	// SHA-256 of the empty string is e3b0c44298fc1c149afbf4c8996fb924 27ae41e4649b934ca495991b7852b855.
	// Aliases are in cgroup names of containers that outlive cleave: they must never change.
	got := Alias("")
	if hex := fromAlias(got); hex != "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" {
		t.Errorf("the alias of nothing is %s, in base 16 %s", got, hex)
	}
	if a, b := Alias(someID), Alias(someID[:63]+"b"); a == b {
		t.Error("two containers have one alias")
	}
}

// fromAlias reads an alias as base 16.
func fromAlias(alias string) string {
	return strings.Map(func(r rune) rune { return rune("0123456789abcdef"[strings.IndexRune(aliasLetters, r)]) }, alias)
}

// Tools that scan for a container's ID must find the real one, and cAdvisor the
// alias: the first 64 of [a-z0-9] (KSS-17).
func TestAliasIsFoundByCAdvisorAndByNobodyElse(t *testing.T) {
	t.Parallel()
	name, _, err := CgroupsPath("/kubepods/pod1/"+someID, someID)
	if err != nil {
		t.Fatal(err)
	}
	if got := regexp.MustCompile(`([a-z0-9]{64})`).FindString(name); got != Alias(someID) {
		t.Errorf("cAdvisor finds %q in %q, want the alias %q", got, name, Alias(someID))
	}
	if got := regexp.MustCompile(`[0-9a-f]{64}`).FindString(name); got != someID {
		t.Errorf("a tool that looks for an ID finds %q in %q, want %q", got, name, someID)
	}
}

func TestIsAlias(t *testing.T) {
	t.Parallel()
	good := Alias(someID)
	for name, want := range map[string]bool{
		good: true, "": false, good[1:]: false, good + "g": false, someID: false,
		strings.ToUpper(good): false, good[:63] + "w": false, good[:62] + "/g": false, "g" + "\x00" + good[2:]: false,
	} {
		if got := IsAlias(name); got != want {
			t.Errorf("IsAlias(%q) is %v", name, got)
		}
	}
}

func TestCgroupsPath(t *testing.T) {
	t.Parallel()
	named := Alias(someID) + "-" + someID
	cases := []struct {
		name, present, want string
		driver              Driver
		bad                 bool
	}{
		{"cgroupfs", "/kubepods/burstable/pod1/" + someID, "/kubepods/burstable/pod1/crio-" + named, Cgroupfs, false},
		{"cgroupfs without parent", "/" + someID, "/crio-" + named, Cgroupfs, false},
		{"cgroupfs, relative", "k8s.io/" + someID, "k8s.io/crio-" + named, Cgroupfs, false},
		{"systemd", "kubepods-pod1.slice:cri-containerd:" + someID, "kubepods-pod1.slice:crio:" + named, Systemd, false},
		{"empty", "", "", "", true},
		{"another's name", "/kubepods/pod1/other", "", "", true},
		{"another's prefix", "kubepods.slice:theirs:" + someID, "", "", true},
		{"another container", "kubepods.slice:cri-containerd:other", "", "", true},
		{"no slice", ":cri-containerd:" + someID, "", "", true},
		{"a colon too many", "a.slice:cri-containerd:x:" + someID, "", "", true},
		{"no clean path", "/kubepods/../" + someID, "", "", true},
		{"ours already", "/kubepods/crio-" + named, "", "", true},
		{"ours already, systemd", "a.slice:crio:" + named, "", "", true},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, driver, err := CgroupsPath(tc.present, someID)
			if tc.bad != (err != nil) || tc.bad && !errors.Is(err, ErrForm) {
				t.Fatalf("error %v, bad %v", err, tc.bad)
			}
			if got != tc.want || driver != tc.driver {
				t.Errorf("got %q by %q, want %q by %q", got, driver, tc.want, tc.driver)
			}
			if Named(tc.present, someID) != strings.HasPrefix(tc.name, "ours") || err == nil && !Named(got, someID) {
				t.Errorf("Named is wrong about %q or %q", tc.present, got)
			}
		})
	}
	if _, _, err := CgroupsPath("/", ""); !errors.Is(err, ErrForm) {
		t.Errorf("no ID: %v", err)
	}
}

// A path that is taken gets exactly one new last part, and no other container's.
func FuzzCgroupsPath(f *testing.F) {
	f.Add("/kubepods/pod1/"+someID, someID)
	f.Add("a.slice:cri-containerd:x", "x")
	f.Add(":::", "")
	f.Fuzz(func(t *testing.T, present, id string) {
		got, driver, err := CgroupsPath(present, id)
		if err != nil {
			if !errors.Is(err, ErrForm) || got != "" {
				t.Errorf("CgroupsPath(%q, %q): %q, %v", present, id, got, err)
			}
			return
		}
		if !Named(got, id) {
			t.Errorf("%q is not known as that of %q", got, id)
		}
		sep := "/"
		if driver == Systemd {
			sep = ":cri-containerd:"
		}
		if parent, ok := strings.CutSuffix(present, id); !ok || !strings.HasPrefix(got, strings.TrimSuffix(parent, sep)) {
			t.Errorf("%q became %q, which has another parent", present, got)
		}
	})
}
