package crio

import (
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
)

// What is told holds for the kubelet's life, so a disk that is mounted a little late is waited for; one that never comes is not.
func TestAFolderThatIsMissingIsWaitedFor(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		mounts time.Duration // 0 means never
		took   time.Duration
		want   string
	}{
		{"mounted late", 5 * time.Second, 5 * time.Second, diskA.Mountpoint},
		{"never mounted", 0, mountGrace, diskB.Mountpoint},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				before := one // images seem to be where containers are
				before.Missing = true
				now, mounted, running := before, all, []Kubelet{proved}
				k := keeperOf(t, filepath.Join(t.TempDir(), "told.json"), &now, &mounted, &running)
				began := time.Now()
				k.sources.Disks = func() Disks {
					if tc.mounts > 0 && time.Since(began) >= tc.mounts {
						return split
					}
					return before
				}
				if _, err := k.Info(t.Context(), proved.PID); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(began); took != tc.took {
					t.Errorf("answered after %s, want %s", took, tc.took)
				}
				if told := k.Status().Told; told == nil || told.Images.Mountpoint != tc.want {
					t.Errorf("told %+v, want images on %s", told, tc.want)
				}
			})
		})
	}
}
