// Command bench measures what cleave costs, as ratios between calls made
// directly and through it, interleaved in one run, and prints one line a figure:
//
//	BENCH <name> <value> <unit>
//
// Times vary from machine to machine and from run to run; ratios and medians
// of interleaved calls are what can be compared. It needs root.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/cleave-cri/cleave/lab/janitor"
)

func main() {
	janitor.Main()
	if slices.Contains(os.Args[1:], "react") { // a kubelet needs namespaces of its own
		if inside, status, err := apartForReact(); err != nil || !inside {
			if err != nil {
				fmt.Fprintln(os.Stderr, "bench:", err)
			}
			os.Exit(status)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	cleave := flags.String("cleave", "bin/cleave", "the program to measure")
	scale := flags.Float64("scale", 1, "how many calls, relative to the usual number")
	also := flags.String("also", "", "another build of it, measured beside the first in the same run")
	only := flags.String("only", "", "which parts to measure; without it all")
	if err := flags.Parse(args); err != nil {
		return err
	}
	switch flags.Arg(0) {
	case "proxy":
		return benchProxy(ctx, *cleave, *also, *scale, parts(*only, "version,list100,memory,list500k"))
	case "redirect":
		return benchRedirect(ctx, *cleave, *scale)
	case "snapshotter":
		return benchSnapshotter(ctx, *cleave, *scale, parts(*only, "unpack_sequential,unpack_parallel,create,usage,unmount"))
	case "walk":
		return benchWalk(ctx, *scale)
	case "idle":
		return benchIdle(ctx, *scale)
	case "fanotify":
		return benchFanotify(ctx, *scale)
	case "react":
		return benchReact(ctx, *cleave, *scale, parts(*only, "kubelet,cleave"))
	case helperFiles:
		return writeFiles(flags.Arg(1))
	case helperWriter:
		return write(ctx, flags.Arg(1))
	case helperRelay:
		return serveTypedRelay(ctx, flags.Arg(1), flags.Arg(2))
	case helperBytes:
		return serveByteRelay(ctx, flags.Arg(1), flags.Arg(2))
	case helperReplay:
		return serveReplay(ctx, flags.Arg(1))
	default:
		return errors.New("say what to measure: proxy, redirect, snapshotter, walk, idle, fanotify or react")
	}
}

// parts are the parts that were asked for, or all.
func parts(asked, all string) []string { return strings.Split(cmp.Or(asked, all), ",") }

// report prints one figure.
func report(name string, value float64, unit string) {
	fmt.Printf("BENCH %s %.4g %s\n", name, value, unit)
}
