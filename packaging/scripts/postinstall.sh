#!/bin/sh
# After an install or an upgrade. Nothing is enabled and nothing started that did not run: `cleave install` does that.
set -e

[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload

# The new process takes over the sockets and no call is lost. If it can't, the old one goes on, and the package is installed
# all the same: a node that works is worth more than a new version.
if systemctl --quiet is-active cleave.service; then
	systemctl reload cleave.service ||
		echo "cleave: the new version did not start, the old one goes on: look at 'systemctl status cleave'" >&2
fi
# containerd's calls wait at its socket meanwhile, and pods run on.
if systemctl --quiet is-active cleave-snapshotter.service; then
	systemctl try-restart cleave-snapshotter.service ||
		echo "cleave: the snapshotter did not start: look at 'systemctl status cleave-snapshotter'" >&2
fi
if systemctl --quiet is-active cleave-passthrough.service; then
	echo "cleave: calls pass through only, by cleave-passthrough.service: 'cleave bypass --off' goes back to cleave" >&2
fi
exit 0
