// Command cleave stands between the kubelet and containerd and tells the truth
// about filesystems. Each subcommand has a file; what they do is in the packages.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/cleave-cri/cleave/lab/stage"
)

// version is set by the build (-ldflags "-X main.version=...").
var version = "development"

func main() {
	stage.Main()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := root().ExecuteContext(ctx)
	stop()
	var ended stage.CommandError
	if errors.As(err, &ended) {
		os.Exit(ended.Code)
	}
	if err != nil {
		if !errors.Is(err, stage.ErrTold) {
			fmt.Fprintln(os.Stderr, "cleave:", err)
		}
		os.Exit(1)
	}
}
