package reclaim_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/reclaim"
	"github.com/cleave-cri/cleave/reclaim/reclaimtest"
)

func pickDead(t *testing.T, w *reclaimtest.World, policy garbage.ContainerPolicy, bytes map[string]int64, pressure bool) record.Step {
	t.Helper()
	choice, err := w.Containers.Choice(t.Context(), policy, bytes, pressure)
	if err != nil {
		t.Fatal(err)
	}
	return record.Step{Kind: engine.DeadContainers, Containers: &choice, Items: choice.Items()}
}

var kubelets = garbage.ContainerPolicy{PerContainer: 1, Total: -1}

// T29: of a restart loop the dead container with 10 GB goes, with its logs, and
// the living pod with 5 GB keeps all.
func TestT29_TheDeadGoFirst(t *testing.T) {
	t.Parallel()
	w, r := fake(t)
	w.Fates.Set(uidA, garbage.Alive)
	w.Fates.Set(uidB, garbage.Alive)
	dir := logDir(t, podA+"/app/0.log", podA+"/app/0.log.20260101-000000", podA+"/app/1.log", podA+"/app/notes.txt", podA+"/app/0.logs")
	w.Containers.LogDir = dir
	loop := w.Run(t, uidA, "app", "image")
	living := w.Run(t, uidB, "app", "image")
	now := time.Now()
	r.SetState(loop, runtimeapi.ContainerState_CONTAINER_EXITED)
	r.SetCreated(loop, now.Add(-time.Hour))
	r.SetBytes(loop, 10e9)
	r.SetBytes(living, 5e9)
	r.SetLog(loop, filepath.Join(dir, podA, "app", "0.log"))
	again := w.Run(t, uidA, "app", "image") // the next instance, which runs
	policy := kubelets
	policy.NoneUnderPressure = true // GAP-33; by CGC-6 it would stay
	if step := pickDead(t, w, kubelets, nil, true); len(step.Items) > 0 {
		t.Errorf("by the kubelet's rules: %+v", step.Items)
	}
	done, err := w.Containers.Run(t.Context(), pickDead(t, w, policy, map[string]int64{loop: 10e9}, true))
	if err != nil {
		t.Fatal(err)
	}
	if i := done.Items; len(i) != 1 || i[0].ID != loop || i[0].Rule != "GAP-33" || *i[0].ActualBytes != 10e9 || *i[0].ExpectedBytes != 10e9 {
		t.Errorf("%+v", i)
	}
	if diff := cmp.Diff([]string{"0.logs", "1.log", "notes.txt"}, names(t, dir, podA+"/app")); diff != "" {
		t.Errorf("its logs (-want +got):\n%s", diff)
	}
	for _, id := range []string{living, again} {
		if slices.Contains(r.Calls(), "RemoveContainer "+id) {
			t.Errorf("%s went", id)
		}
	}
}

// A runtime removes a layer after it has answered that the container is gone, and others write meanwhile: what comes within a second is
// waited for, else a pod goes for bytes that are on their way. What does not come is waited for no longer than that.
func TestT29_TheDeadLayerComesLateWhileOthersWrite(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		bytes            int64
		late, took, most time.Duration
		came             bool
	}{
		{gib, 700 * time.Millisecond, 0, 1500 * time.Millisecond, true},
		{gib, 4 * time.Second, time.Second, 1500 * time.Millisecond, false},
		{8 << 10, 4 * time.Second, 0, 500 * time.Millisecond, false}, // what is that small is not waited for
	} {
		synctest.Test(t, func(t *testing.T) {
			w, r := fake(t)
			w.Fates.Set(uidA, garbage.Ended)
			dead := w.Run(t, uidA, "app", "image")
			r.SetState(dead, runtimeapi.ContainerState_CONTAINER_EXITED)
			r.SetCreated(dead, time.Now().Add(-time.Hour))
			r.SetBytes(dead, tc.bytes)
			r.Late(tc.late)
			w.Containers.Space = eaten{r, gib / 16, time.Now()}
			began := time.Now()
			done, err := w.Containers.Run(t.Context(), pickDead(t, w, kubelets, map[string]int64{dead: tc.bytes}, true))
			if err != nil || len(done.Items) == 0 {
				t.Fatalf("%+v, %v", done.Items, err)
			}
			item := done.Items[0]
			if came := *item.ActualBytes > tc.bytes/2; item.ID != dead || came != tc.came || !item.OthersWrote {
				t.Errorf("after %s: %+v, %d came free", tc.late, item, *item.ActualBytes)
			}
			if took := time.Since(began); took < tc.took || took > tc.most {
				t.Errorf("after %s: it took %s", tc.late, took)
			}
		})
	}
}

// A container that has completed in a pod that lives would be run again if nothing of it were left, so its newest instance stays
// under pressure; older ones, and those of pods that have ended, go.
func TestGAP33_WhatHasCompletedIsNotRunAgain(t *testing.T) {
	t.Parallel()
	for fate, want := range map[garbage.PodFate]int{garbage.Alive: 1, garbage.Ended: 2, garbage.Gone: 2} {
		w, r := fake(t)
		w.Fates.Set(uidA, fate)
		older, newer := w.Run(t, uidA, "job", "image"), w.Run(t, uidA, "job", "image")
		for i, id := range []string{older, newer} {
			r.SetState(id, runtimeapi.ContainerState_CONTAINER_EXITED)
			r.SetCreated(id, time.Now().Add(time.Duration(i-2)*time.Hour))
		}
		policy := kubelets
		policy.NoneUnderPressure = true
		done, err := w.Containers.Run(t.Context(), pickDead(t, w, policy, nil, true))
		if err != nil {
			t.Fatal(err)
		}
		var gone []string
		for _, i := range done.Items {
			if i.ID == older || i.ID == newer {
				gone = append(gone, i.ID)
			}
		}
		if len(gone) != want || gone[0] != older {
			t.Errorf("of a pod that is %s went %q; %s is older, %s newer", fate, gone, older, newer)
		}
	}
}

// Logs that are not where the kubelet puts them stay, wherever a path leads.
func TestLogsElsewhereStay(t *testing.T) {
	t.Parallel()
	for name, path := range map[string]string{
		"outside":         "/outside/0.log",
		"beside":          "/pods-old/" + podA + "/app/0.log",
		"climbs out":      "/pods/" + podA + "/../../outside/0.log",
		"not a pod":       "/pods/backup/app/0.log",
		"not a log":       "/pods/" + podA + "/app/data",
		"through symlink": "/pods/" + podA + "/link/0.log",
		"a symlink":       "/pods/" + podA + "/app/1.log",
		"empty":           "",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			base := t.TempDir()
			for _, f := range []string{"outside/0.log", "pods-old/" + podA + "/app/0.log", "pods/backup/app/0.log", "pods/" + podA + "/app/data", "pods/" + podA + "/app/9.log"} {
				write(t, filepath.Join(base, f))
			}
			for link, to := range map[string]string{"link": "outside", "app/1.log": "outside/0.log"} {
				if err := os.Symlink(filepath.Join(base, to), filepath.Join(base, "pods", podA, link)); err != nil {
					t.Fatal(err)
				}
			}
			before := tree(t, base)
			w, r := fake(t)
			w.Containers.LogDir = filepath.Join(base, "pods")
			w.Fates.Set(uidA, garbage.Gone)
			id := w.Run(t, uidA, "app", "image")
			w.End(t, id)
			if path != "" {
				path = base + path
			}
			r.SetLog(id, path)
			done, err := w.Containers.Run(t.Context(), pickDead(t, w, kubelets, nil, false))
			if through := name == "through symlink"; through != (err != nil) {
				t.Errorf("%+v: %v", done.Items, err) // a symlink is a reason to stop
			}
			if diff := cmp.Diff(before, tree(t, base)); diff != "" {
				t.Errorf("files (-before +after):\n%s", diff)
			}
		})
	}
}

func TestContainersThatStay(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		change func(w *reclaimtest.World, r *reclaimtest.Runtime, id string)
	}{
		{"it runs", func(_ *reclaimtest.World, r *reclaimtest.Runtime, id string) {
			r.SetState(id, runtimeapi.ContainerState_CONTAINER_RUNNING)
		}},
		{"it was made just now", func(_ *reclaimtest.World, r *reclaimtest.Runtime, id string) {
			r.SetState(id, runtimeapi.ContainerState_CONTAINER_CREATED)
		}},
		{"its pod is alive", func(w *reclaimtest.World, _ *reclaimtest.Runtime, _ string) { w.Fates.Set(uidA, garbage.Alive) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w, r := fake(t)
			w.Fates.Set(uidA, garbage.Gone)
			id := w.Run(t, uidA, "app", "image")
			w.End(t, id)
			planned := pickDead(t, w, kubelets, nil, true)
			if len(planned.Items) != 2 { // with its sandbox
				t.Fatalf("picked %+v", planned.Items)
			}
			tc.change(w, r, id)
			if now := pickDead(t, w, kubelets, nil, true); len(now.Items) > 0 {
				t.Errorf("picked: %+v", now.Items)
			}
			if _, err := w.Containers.Run(t.Context(), planned); !errors.Is(err, reclaim.ErrSurprise) {
				t.Errorf("a step that has it: %v", err)
			}
			if len(r.Calls()) > 0 {
				t.Errorf("calls: %v", r.Calls())
			}
		})
	}
}

// CGC-8: one whose state is unknown is stopped first, and stays if that fails.
func TestCGC8_OneThatCannotBeStoppedStays(t *testing.T) {
	t.Parallel()
	w, r := fake(t)
	w.Fates.Set(uidA, garbage.Gone)
	id := w.Run(t, uidA, "app", "image")
	r.SetState(id, runtimeapi.ContainerState_CONTAINER_UNKNOWN)
	step := pickDead(t, w, kubelets, nil, true)
	r.Before(func(call string) error {
		if strings.HasPrefix(call, "StopContainer") {
			return errors.New("does not answer")
		}
		return nil
	})
	if _, err := w.Containers.Run(t.Context(), step); err == nil || !slices.Equal(r.Calls(), []string{"StopContainer " + id}) {
		t.Errorf("%v, calls %v", err, r.Calls())
	}
	r.Before(nil)
	if _, err := w.Containers.Run(t.Context(), step); err != nil || !slices.Contains(r.Calls(), "RemoveContainer "+id) {
		t.Errorf("%v, calls %v", err, r.Calls())
	}
}

// CGC-9, and somebody else's containers, which have not the kubelet's labels.
func TestSandboxes(t *testing.T) {
	t.Parallel()
	w, r := fake(t)
	w.Fates.Set(uidA, garbage.Gone)
	w.Fates.Set(uidB, garbage.Alive)
	dead := w.Run(t, uidA, "app", "image")
	w.End(t, dead)
	foreign := w.Run(t, "", "", "image")
	r.SetState(foreign, runtimeapi.ContainerState_CONTAINER_EXITED)
	box := r.SandboxOf(dead)
	step := pickDead(t, w, kubelets, nil, true)
	if checked, err := w.Containers.Check(t.Context(), step); err != nil {
		t.Errorf("a dry run: %v: %+v", err, checked.Items)
	}
	if _, err := w.Containers.Run(t.Context(), step); err != nil {
		t.Fatal(err)
	}
	want := []string{"RemoveContainer " + dead, "StopPodSandbox " + box, "RemovePodSandbox " + box}
	if diff := cmp.Diff(want, r.Calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}
