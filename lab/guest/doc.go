// Package guest boots a real Linux of its own in qemu, for tests of what this machine's kernel or init can't do: project
// quota, the controllers of cgroup v2, systemd as PID 1. The guest is the distribution's: its systemd, its kernel, its
// runc; tests pass their own programs in.
//
// [Root] makes the guest's root once and keeps it in the cache. [Run] boots it, passes files in, runs one command as a
// unit of systemd and brings out what that command left. The root in the cache never changes: each guest writes to a
// file of its own that goes away with it. The processor is emulated in software, because /dev/kvm may be there and not
// work, so a guest is several times slower than the machine and takes some 15 seconds to come and go: one boot per suite,
// not per test.
//
// It needs root, the packages that `go run ./integration/toolchain deps guest` installs, and a janitor's run, which ends
// qemu and removes the files whatever becomes of the test.
package guest
