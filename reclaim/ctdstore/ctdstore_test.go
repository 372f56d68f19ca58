package ctdstore

import "testing"

// Labels name a registry without its port.
func TestRepositoryOf(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"docker.io/library/app:1":              "docker.io/library/app",
		"docker.io/library/app@sha256:1":       "docker.io/library/app",
		"registry.example:5000/app:1@sha256:1": "registry.example/app",
		"localhost:5000/a/b":                   "localhost/a/b",
		"[::1]:5000/app:1":                     "::1/app",
		"sha256:1":                             "",
	} {
		if got := repositoryOf(name); got != want {
			t.Errorf("%s is of %q, want %q", name, got, want)
		}
	}
}
