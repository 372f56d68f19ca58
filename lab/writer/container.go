package writer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cleave-cri/cleave/lab/scenario"
)

// writerEnv tells a program that it is a container's writer; the value is a
// container as JSON.
const writerEnv = "CLEAVE_LAB_WRITER"

// Where things are in a container.
const (
	// Program is where the program itself is.
	Program = "/cleave"
	// Notes is a folder outside of the disks of the lab, in which a container notes
	// for how long it had no space: on a full disk it could not.
	Notes = "/lab-notes"
	// Layer is where it writes into its writable layer, Volumes where its volumes
	// are mounted.
	Layer, Volumes = "/lab-data", "/lab-volumes"
)

// Container is what a container of the lab does.
type Container struct {
	// Name is for the file with its notes.
	Name   string
	Writes []scenario.Write
	// ExitsAfter ends it, 0 for never.
	ExitsAfter time.Duration
}

// Env is the variable by which the program becomes the container's writer.
func (c Container) Env() (key, value string, _ error) {
	text, err := json.Marshal(c)
	if err != nil {
		return "", "", fmt.Errorf("tell container %s what to write: %w", c.Name, err)
	}
	return writerEnv, string(text), nil
}

// Main turns this process into a container's writer if it was started as one, and
// does not return then. It must be called by main or TestMain, right after
// janitor.Main.
func Main() {
	text := os.Getenv(writerEnv)
	if text == "" {
		return
	}
	if err := container(text); err != nil {
		fmt.Fprintln(os.Stderr, "writer:", err)
		os.Exit(1) //nolint:forbidigo // this is the writer's main
	}
	os.Exit(0) //nolint:forbidigo // this is the writer's main
}

func container(text string) error {
	var c Container
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return fmt.Errorf("read what to write: %w", err)
	}
	// As PID 1 of a container it is not ended by a signal that it does not handle.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT) //nolint:forbidigo // called by the writer's main
	defer stop()
	if c.ExitsAfter > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.ExitsAfter)
		defer cancel()
	}
	group, ctx := errgroup.WithContext(ctx)
	for i, w := range c.Writes {
		dir := Layer
		if volume, ok := strings.CutPrefix(w.To, scenario.ToVolume); ok {
			dir = filepath.Join(Volumes, volume)
		}
		name := fmt.Sprintf("%s-%d", c.Name, i)
		group.Go(func() error {
			return Run(ctx, w, dir, name, func(noSpace time.Duration) { note(filepath.Join(Notes, name), noSpace) })
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// note writes a duration down. That it could not is for nobody to be told: the
// lab then knows less than there was.
func note(file string, noSpace time.Duration) {
	_ = os.WriteFile(file, []byte(strconv.FormatInt(noSpace.Milliseconds(), 10)), 0o644) //nolint:errcheck // see above
}

// Noted adds up for how long each container had no space that noted so in a
// folder: the longest of its streams, by the container's name.
func Noted(dir string) (map[string]time.Duration, error) {
	files, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read for how long containers had no space: %w", err)
	}
	out := map[string]time.Duration{}
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			return nil, fmt.Errorf("read for how long containers had no space: %w", err)
		}
		ms, err := strconv.ParseInt(string(text), 10, 64)
		i := strings.LastIndexByte(f.Name(), '-')
		if err != nil || i < 0 {
			continue // being written in this moment
		}
		name := f.Name()[:i]
		out[name] = max(out[name], time.Duration(ms)*time.Millisecond)
	}
	return out, nil
}
