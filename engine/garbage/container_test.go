package garbage

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// dead is an exited container created at a time of day.
func dead(id, pod, name, created string) Container {
	return Container{ID: id, PodUID: pod, Name: name, State: Exited, CreatedAt: at(created)}
}

func removals(list []Removal) string {
	var out []string
	for _, r := range list {
		out = append(out, r.Container.ID+"/"+r.Rule)
	}
	return strings.Join(out, " ")
}

var alive = Pods{Fate: map[string]PodFate{"p": Alive, "q": Alive, "r": Alive}, SourcesReady: true, Synced: true}

func TestCGC3_CGC8_AgeSinceCreation(t *testing.T) {
	t.Parallel()
	policy := ContainerPolicy{MinAge: time.Minute, Total: -1}
	list := []Container{dead("just-ended", "p", "a", "11:50:00"), dead("edge", "p", "b", "11:59:00"), dead("young", "p", "c", "11:59:01")}
	for id, state := range map[string]ContainerState{"created": Created, "unknown": Unknown, "running": Running} {
		c := dead(id, "p", id, "11:00:00")
		c.State = state
		list = append(list, c)
	}
	got := policy.Dead(list, alive, at("12:00:00"), false)
	if s := removals(got); s != "just-ended/CGC-6 edge/CGC-6 created/CGC-6 unknown/CGC-6" {
		t.Errorf("removed %s", s)
	}
	for _, r := range got {
		if r.StopFirst != (r.Container.ID == "unknown") { // CGC-8
			t.Errorf("%s: stop first is %t", r.Container.ID, r.StopFirst)
		}
	}
}

func TestCGC4_CGC5_PodsThatAreGone(t *testing.T) {
	t.Parallel()
	list := []Container{dead("gone", "g", "a", "10:00:00"), dead("ended", "e", "a", "10:00:00"), dead("stranger", "s", "a", "10:00:00"), dead("alive", "p", "a", "10:00:00")}
	pods := Pods{Fate: map[string]PodFate{"g": Gone, "e": Ended, "p": Alive}, SourcesReady: true, Synced: true}
	keep := ContainerPolicy{PerContainer: 1, Total: -1}
	for _, tc := range []struct {
		name     string
		change   func(*Pods)
		pressure bool
		want     string
	}{
		{"periodic", func(*Pods) {}, false, "gone/CGC-4 stranger/CGC-4"},
		{"under pressure", func(*Pods) {}, true, "ended/CGC-4 gone/CGC-4 stranger/CGC-4"},
		{"not all sources heard", func(p *Pods) { p.SourcesReady = false }, true, ""},
		{"not all pods seen", func(p *Pods) { p.Synced = false }, false, "gone/CGC-4"},
	} {
		p := pods
		tc.change(&p)
		if got := removals(keep.Dead(list, p, at("12:00:00"), tc.pressure)); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestCGC6_TheNewestStay(t *testing.T) {
	t.Parallel()
	list := []Container{dead("1", "p", "app", "10:00:00"), dead("3", "p", "app", "10:02:00"), dead("2", "p", "app", "10:01:00"), dead("other", "p", "side", "10:00:00")}
	for _, pressure := range []bool{false, true} {
		if got := removals((ContainerPolicy{PerContainer: 1, Total: -1}).Dead(list, alive, at("12:00:00"), pressure)); got != "1/CGC-6 2/CGC-6" {
			t.Errorf("pressure %t: %s", pressure, got)
		}
	}
	if got := removals((ContainerPolicy{PerContainer: -1, Total: -1}).Dead(list, alive, at("12:00:00"), false)); got != "" {
		t.Errorf("no limit: %s", got)
	}
}

func TestOptionNoneUnderPressure_GAP33(t *testing.T) {
	t.Parallel()
	list := []Container{dead("1", "p", "app", "10:00:00"), dead("2", "p", "app", "10:01:00"), {ID: "runs", PodUID: "p", Name: "app", State: Running}}
	for _, tc := range []struct {
		option, pressure bool
		want             string
	}{{false, true, "1/CGC-6"}, {true, false, "1/CGC-6"}, {true, true, "1/GAP-33 2/GAP-33"}} {
		policy := ContainerPolicy{PerContainer: 1, Total: -1, NoneUnderPressure: tc.option}
		if got := removals(policy.Dead(list, alive, at("12:00:00"), tc.pressure)); got != tc.want {
			t.Errorf("%+v: %s", tc, got)
		}
	}
}

func TestCGC7_TotalOfTheNode(t *testing.T) {
	t.Parallel()
	two := []Container{
		dead("p1", "p", "a", "10:00:00"), dead("p2", "p", "a", "10:01:00"), dead("q1", "q", "a", "10:02:00"), dead("q2", "q", "a", "10:03:00"), dead("r1", "r", "a", "09:00:00"),
	}
	if got := removals((ContainerPolicy{PerContainer: -1, Total: 4}).Dead(two, alive, at("12:00:00"), false)); got != "p1/CGC-7 q1/CGC-7" {
		t.Errorf("2, 2, 1 and at most 4: %s", got)
	}
	if got := removals((ContainerPolicy{PerContainer: -1, Total: 5}).Dead(two, alive, at("12:00:00"), false)); got != "" {
		t.Errorf("5 of 5: %s", got)
	}
	var five []Container
	for i, created := range []string{"10:04:00", "10:01:00", "10:03:00", "10:00:00", "10:02:00"} {
		five = append(five, dead(string(rune('a'+i)), "p", string(rune('a'+i)), created))
	}
	if got := removals((ContainerPolicy{PerContainer: -1, Total: 3}).Dead(five, alive, at("12:00:00"), false)); got != "d/CGC-7 b/CGC-7" {
		t.Errorf("five of one and at most 3: %s", got)
	}
	if got := (ContainerPolicy{PerContainer: 1, Total: 0}).Dead(five, alive, at("12:00:00"), false); len(got) != 5 {
		t.Errorf("at most 0: %s", removals(got))
	}
}

func TestCGC9_Sandboxes(t *testing.T) {
	t.Parallel()
	box := func(id, pod, created string, ready bool) Sandbox {
		return Sandbox{ID: id, PodUID: pod, CreatedAt: at(created), Ready: ready}
	}
	pods := Pods{Fate: map[string]PodFate{"p": Alive, "q": Alive, "e": Ended, "g": Gone}, Synced: true} // sources not heard: no matter
	list := []Sandbox{
		box("S1", "p", "10:00:00", false), box("S2", "p", "10:01:00", false), box("S3", "p", "10:02:00", true),
		box("last", "q", "10:00:00", false),
		box("of-ended", "e", "10:00:00", false),
		box("of-gone", "g", "10:00:00", false), box("with-container", "g", "10:00:00", false), box("ready", "g", "10:00:00", true),
	}
	containers := []Container{{SandboxID: "with-container"}}
	for pressure, want := range map[bool]string{false: "of-gone S1 S2", true: "of-ended of-gone S1 S2"} {
		var got []string
		for _, s := range Sandboxes(list, containers, pods, pressure) {
			got = append(got, s.ID)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("pressure %t: %v, want %s", pressure, got, want)
		}
	}
}

func TestCGC10_LogDirectories_GAP37(t *testing.T) {
	t.Parallel()
	pods := Pods{Fate: map[string]PodFate{"uid-1": Alive, "uid-2": Gone, "uid-3": Ended}, SourcesReady: true, Synced: true}
	entries := []string{"ns_a_uid-1", "ns_b_uid-2", "ns_c_uid-3", "backup", "ns_d_uid-9"}
	if got := strings.Join(LogDirs(entries, pods), " "); got != "ns_b_uid-2 backup ns_d_uid-9" {
		t.Errorf("deleted %s", got)
	}
	// GAP-37: what is not named by the kubelet is somebody else's.
	if got := strings.Join(LogDirsOfPods(entries, pods), " "); got != "ns_b_uid-2 ns_d_uid-9" {
		t.Errorf("deleted %s", got)
	}
	if got := LogDirsOfPods([]string{"_a_uid-2", "ns__uid-2", "ns_a_", "uid-2", "a_uid-2", "ns_a_b_uid-2"}, pods); len(got) > 0 {
		t.Errorf("GAP-37: deleted %v", got)
	}
	pods.SourcesReady = false
	if got := LogDirs(entries, pods); len(got) > 0 {
		t.Errorf("before all sources were heard: %v", got)
	}
	pods.SourcesReady, pods.Synced = true, false
	if got := strings.Join(LogDirs(entries, pods), " "); got != "ns_b_uid-2" {
		t.Errorf("before all pods were seen: %s", got)
	}
}

func TestCGC12_BrokenLinks(t *testing.T) {
	t.Parallel()
	states := map[string]ContainerState{"0123456": Running, "abcdef0": Exited, "fedcba9": Unknown}
	ask := func(id string) (ContainerState, bool) { s, ok := states[id]; return s, ok }
	for name, want := range map[string]bool{
		"pod_ns_app-0123456.log": false, "pod_ns_app-fedcba9.log": false, "pod_ns_app-abcdef0.log": true, "pod_ns_app-unknown.log": true,
		"pod_ns_app-01234.log": true, "01234.log": true,
	} {
		if got := LogLink(name, ask); got != want {
			t.Errorf("%s: removed is %t", name, got)
		}
	}
}

func TestCGC13_AfterADeath(t *testing.T) {
	t.Parallel()
	list := []Container{dead("1", "p", "app", "10:00:00"), dead("2", "p", "app", "10:01:00"), dead("3", "p", "app", "10:02:00"), dead("x", "p", "side", "10:00:00")}
	list = append(list, Container{ID: "runs", Name: "app", State: Running})
	for _, tc := range []struct {
		name   string
		policy ContainerPolicy
		died   string
		gone   bool
		want   string
	}{
		{"one is kept", ContainerPolicy{PerContainer: 1}, "3", false, "1 2"},
		{"one is kept even at 0", ContainerPolicy{PerContainer: 0}, "3", false, "1 2"},
		{"two are kept", ContainerPolicy{PerContainer: 2}, "3", false, "1"},
		{"the pod is gone", ContainerPolicy{PerContainer: 1}, "3", true, "1 2 3 x"},
		{"not one of the pod's", ContainerPolicy{PerContainer: 1}, "nobody", false, ""},
	} {
		var got []string
		for _, c := range tc.policy.AfterDeath(tc.died, list, tc.gone) {
			got = append(got, c.ID)
		}
		slices.Sort(got)
		if strings.Join(got, " ") != tc.want {
			t.Errorf("%s: %v, want %s", tc.name, got, tc.want)
		}
	}
}

// TestKeepLast_GAP33 is about what tells the kubelet that a container has run:
// the newest instance of a pod that lives, dead or not, and nothing else.
func TestKeepLast_GAP33(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		pods  Pods
		newer ContainerState
		want  []string
	}{
		"completed, in a pod that lives":       {Pods{Fate: map[string]PodFate{"1": Alive}, SourcesReady: true, Synced: true}, Exited, []string{"older"}},
		"the next one runs":                    {Pods{Fate: map[string]PodFate{"1": Alive}, SourcesReady: true, Synced: true}, Running, []string{"older"}},
		"of a pod that has ended":              {Pods{Fate: map[string]PodFate{"1": Ended}, SourcesReady: true, Synced: true}, Exited, []string{"older", "newer"}},
		"of a pod that is not there":           {Pods{SourcesReady: true, Synced: true}, Exited, []string{"older", "newer"}},
		"of a pod, and not all pods are known": {Pods{SourcesReady: true}, Exited, []string{"older"}},
	} {
		now := time.Unix(1000, 0)
		list := []Container{
			{ID: "newer", PodUID: "1", Name: "app", State: tc.newer, CreatedAt: now.Add(-time.Minute)},
			{ID: "older", PodUID: "1", Name: "app", State: Exited, CreatedAt: now.Add(-time.Hour)},
		}
		KeepLast(list, tc.pods)
		var got []string
		for _, r := range (ContainerPolicy{PerContainer: 1, Total: -1, NoneUnderPressure: true}).Dead(list, tc.pods, now, true) {
			got = append(got, r.Container.ID)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %q go, want %q", name, got, tc.want)
		}
	}
}
