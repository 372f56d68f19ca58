// Command toolchain builds the real peers that tests and the demo run against, and installs what they need from the
// distribution.
//
//	go run ./integration/toolchain get containerd ctr shim   build what the cache lacks, print the paths
//	go run ./integration/toolchain get all                   all but the older versions that only the compatibility matrix runs
//	go run ./integration/toolchain list                      what can be asked for
//	go run ./integration/toolchain deps                      install missing distribution packages
//	go run ./integration/toolchain deps guest                install those that booting a guest needs
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/integration/toolchain/distro"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "toolchain:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out, progress io.Writer) error {
	const usage = "usage: toolchain get NAME... | get all | list | deps [guest]"
	if len(args) == 0 {
		return fmt.Errorf("%s", usage)
	}
	switch {
	case args[0] == "get" && len(args) > 1:
		names := args[1:]
		if len(names) == 1 && names[0] == "all" {
			names = bin.Usual()
		}
		paths, err := bin.Get(ctx, progress, names...)
		if err != nil {
			return err
		}
		fmt.Fprintln(out, strings.Join(paths, "\n"))
		return nil
	case args[0] == "list" && len(args) == 1:
		fmt.Fprintln(out, strings.Join(bin.Names(), "\n"))
		return nil
	case args[0] == "deps" && len(args) == 1:
		return distro.Tests.Ensure(ctx, progress)
	case args[0] == "deps" && len(args) == 2 && args[1] == string(distro.Guest):
		return distro.Guest.Ensure(ctx, progress)
	}
	return fmt.Errorf("%s; names are %s", usage, strings.Join(bin.Names(), ", "))
}
