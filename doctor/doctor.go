// Package doctor holds the form of a check: what `cleave doctor` runs and
// prints. It imports nothing of ours, so that each check can live in the
// package that owns the fact it is about; agent collects and runs them.
package doctor

import (
	"context"
	"fmt"
	"io"
	"time"
)

// Level is how bad it is.
type Level string

// The levels, from good to bad.
const (
	Pass Level = "pass"
	Warn Level = "warn"
	Fail Level = "fail"
)

// Result is what a check found.
type Result struct {
	// Check is the check's name.
	Check string `json:"check"`
	Level Level  `json:"level"`
	// Reason says what was found, for people.
	Reason string `json:"reason"`
	// Remedy says what to do about it; empty for Pass.
	Remedy string `json:"remedy,omitempty"`
}

// Passed is a result with nothing to do.
func Passed(format string, args ...any) Result {
	return Result{Level: Pass, Reason: fmt.Sprintf(format, args...)}
}

// Warned is a result that somebody should look at.
func Warned(reason, remedy string) Result {
	return Result{Level: Warn, Reason: reason, Remedy: remedy}
}

// Failed is a result with which cleave can't do its work.
func Failed(reason, remedy string) Result {
	return Result{Level: Fail, Reason: reason, Remedy: remedy}
}

// Check looks at one thing. Run changes nothing on the node.
type Check struct {
	// Name is a short phrase, the same in every version.
	Name string
	Run  func(ctx context.Context) Result
}

// timeLimit bounds one check.
const timeLimit = 10 * time.Second

// Run runs the checks in their order and returns a result for each. One that
// does not end in time is reported as failed and left behind.
func Run(ctx context.Context, checks []Check) []Result {
	results := make([]Result, 0, len(checks))
	for _, c := range checks {
		r := runOne(ctx, c)
		r.Check = c.Name
		results = append(results, r)
	}
	return results
}

func runOne(ctx context.Context, c Check) Result {
	ctx, cancel := context.WithTimeout(ctx, timeLimit)
	defer cancel()
	// The process ends after the checks; a check that hangs in the kernel
	// ends with it.
	done := make(chan Result, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- Failed(fmt.Sprintf("the check itself broke: %v", p), "report this as a bug of cleave")
			}
		}()
		done <- c.Run(ctx)
	}()
	select {
	case r := <-done:
		return r
	case <-ctx.Done():
		return Failed(fmt.Sprintf("no result within %s", timeLimit), "look for a file system or a runtime that hangs")
	}
}

// Worst returns the worst level among results, Pass if there are none.
func Worst(results []Result) Level {
	worst := Pass
	for _, r := range results {
		switch r.Level {
		case Fail:
			return Fail
		case Warn:
			worst = Warn
		case Pass:
		}
	}
	return worst
}

// Write prints results for people, one block a check.
func Write(w io.Writer, results []Result) error {
	for _, r := range results {
		if _, err := fmt.Fprintf(w, "%-4s  %-22s %s\n", r.Level, r.Check, r.Reason); err != nil {
			return err
		}
		if r.Remedy == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%29s-> %s\n", "", r.Remedy); err != nil {
			return err
		}
	}
	return nil
}
