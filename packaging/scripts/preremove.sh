#!/bin/sh
# Before a removal or an upgrade: deb says "remove" or "upgrade", rpm says how many versions will be left.
set -e

case "$1" in
remove | 0) ;;
*) exit 0 ;;
esac

# The kubelet or containerd would be left with a socket that nobody serves.
for file in /var/lib/cleave/install/installed.json /var/lib/cleave/install/journal.json; do
	if [ -e "$file" ]; then
		echo "cleave: this node runs through cleave: run 'cleave uninstall --yes' first, then remove the package" >&2
		exit 1
	fi
done
if [ -d /run/systemd/system ]; then
	for unit in cleave.service cleave-passthrough.service cleave-snapshotter.service; do
		if systemctl --quiet is-active "$unit"; then
			echo "cleave: $unit runs: see that nobody uses it, stop it, then remove the package" >&2
			exit 1
		fi
	done
	systemctl --quiet disable cleave.service cleave.socket cleave-snapshotter.service cleave-snapshotter.socket
	systemctl stop cleave.socket cleave-snapshotter.socket
fi
exit 0
