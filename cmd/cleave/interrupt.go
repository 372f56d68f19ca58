package main

import "context"

// orInterrupted runs what only reads and shows, and does not look at ctx: a file may be a pipe that nobody writes to, or long. When ctx ends
// it is left behind.
func orInterrupted(ctx context.Context, run func() error) error {
	ended := make(chan error, 1)
	go func() { ended <- run() }() // ends with the process at the latest
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
