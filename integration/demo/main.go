// Command demo shows cleave at work in one go, on the node of a scenario of the lab
// (docs/lab/demo.yaml): two disks, a real containerd on them, cleave in front, pods
// that write known amounts, and what is said about those amounts with and without
// cleave. `cleave lab run` plays the same file and looks at what goes.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/cleave-cri/cleave/lab/janitor"
)

func main() {
	janitor.Main()
	var o options
	flag.StringVar(&o.cleave, "cleave", "", "the cleave `program` to show; without one it is built")
	flag.StringVar(&o.file, "scenario", "docs/lab/demo.yaml", "the scenario `file` that is played")
	flag.BoolVar(&o.keep, "keep", false, "leave the node running and say how to talk to it")
	flag.BoolVar(&o.down, "down", false, "take down what earlier runs have left running, all or the folders named")
	flag.Parse()
	o.folders = flag.Args()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends this program at once; the janitor cleans up then
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}
