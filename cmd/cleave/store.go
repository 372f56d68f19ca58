package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/cleave-cri/cleave/agent/store"
	"github.com/cleave-cri/cleave/config"
)

func imagesCommand() *cobra.Command {
	cmd := showCommand("images", "List images: what each takes, and what really comes free without it",
		func(ctx context.Context, cfg config.Config) (page, error) { return store.ListImages(ctx, cfg) },
		"runtime-endpoint")
	cmd.Long = `List the images of the container runtime with what they take on disk and what
would really come free if each alone were removed: layers and blobs that another
image, a container, a lease or another namespace needs stay. Nothing is changed,
and no running cleave is needed.`
	return cmd
}

func orphansCommand() *cobra.Command {
	cmd := showCommand("orphans", "List what takes space and has no owner, with the proof",
		func(ctx context.Context, cfg config.Config) (page, error) { return store.ListOrphans(ctx, cfg) },
		"runtime-endpoint")
	cmd.Long = `List what has no owner: snapshots, blobs, downloads, leases, images that CRI does
not list, log folders and mounts, each with the facts that show it. Nothing is
removed, and no running cleave is needed. If a part of the store can't be read,
nothing is called an orphan.`
	return cmd
}
