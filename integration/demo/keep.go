package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/janitor"
)

// demoMark is a file that tells a demo's run from others that were kept.
const demoMark = "demo"

// keepRunning leaves everything as it is and says how to go on.
func (d *demo) keepRunning(ctx context.Context) error {
	crictl, err := bin.Path(ctx, "crictl")
	if err != nil {
		return errors.Join(err, d.close(ctx))
	}
	if err := os.WriteFile(filepath.Join(d.lab.Dir(), demoMark), nil, 0o600); err != nil {
		return errors.Join(fmt.Errorf("mark the run: %w", err), d.close(ctx))
	}
	if err := d.lab.Keep(ctx); err != nil {
		return err
	}
	fmt.Fprint(d.progress.out, d.howTo(crictl))
	return nil
}

func (d *demo) howTo(crictl string) string {
	program := d.cleave
	if program == "" {
		program = d.node.Cleave.Binary()
	}
	var b strings.Builder
	b.WriteString(heading("Left running; how to talk to it"))
	for _, line := range [][2]string{
		{"through cleave", crictl + " -r " + d.node.Cleave.Endpoint() + " stats"},
		{"directly", crictl + " -r " + d.node.Runtime.Endpoint() + " stats"},
		{"both lists of filesystems (-r as above)", crictl + " -r " + d.node.Cleave.Endpoint() + " imagefsinfo"},
		{"what cleave sees", program + " status --control " + d.node.Cleave.Config().Control.Endpoint.Path()},
		{"what the snapshotter holds", program + " snapshotter status --config " + d.node.Cleave.ConfigFile()},
		{"their logs", "tail " + d.node.Cleave.LogFile() + " " + d.node.Split.LogFile() + " " + d.node.Runtime.LogFile()},
		{"take it down", "make demo DOWN=1"},
	} {
		fmt.Fprintf(&b, "# %s\n%s\n", line[0], line[1])
	}
	b.WriteString("\n" + paragraph("", "The registry that the images came from has ended, so nothing more can be pulled. The pod churn goes on "+
		"creating and deleting files."))
	return b.String()
}

// takeDown removes what earlier runs of the demo have left running: all, or
// those in the folders named.
func takeDown(ctx context.Context, folders []string, out io.Writer) error {
	kept, err := janitor.Kept(janitor.Options{})
	if err != nil {
		return err
	}
	found := false
	for _, dir := range kept {
		if _, err := os.Stat(filepath.Join(dir, demoMark)); err != nil {
			continue // not the demo's
		}
		if len(folders) > 0 && !slices.Contains(folders, dir) {
			continue
		}
		found = true
		if err := janitor.Clean(ctx, dir); err != nil {
			return fmt.Errorf("take down %s: %w", dir, err)
		}
		fmt.Fprintf(out, "took down %s: nothing of it is left\n", dir)
	}
	if !found {
		fmt.Fprintln(out, "no such demo is running")
	}
	return nil
}
