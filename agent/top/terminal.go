package top

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/term"
)

// Keys is the terminal of a process, for Terminal: standard input may be something else.
const Keys = "/dev/tty"

const (
	redrawEvery = time.Second

	// enter goes to the other screen, so that the one before comes back at the end, hides the cursor and has lines end where the
	// screen does; leave takes that back, on an empty screen, because some terminals keep what was there if the size has changed.
	enter = "\x1b[?1049h\x1b[?25l\x1b[?7l"
	leave = begin + restOfScreen + "\x1b[?7h\x1b[?25h\x1b[?1049l"
	// begin goes to the first line; restOfLine and restOfScreen take away what is there from the cursor on. Behind a line that ends
	// in the last column the cursor still stands in that, so they go before text.
	begin        = "\x1b[H"
	restOfLine   = "\x1b[K"
	restOfScreen = "\x1b[J"

	// interrupt is what Ctrl-C sends while the terminal makes no signal of it.
	interrupt = 3

	usualWidth, usualHeight = 80, 24
)

// Drawable gives the terminal that w is, if it is one that can be drawn on. kind is its name as TERM has it.
func Drawable(w io.Writer, kind string) (*os.File, bool) {
	f, ok := w.(*os.File)
	if !ok || kind == "dumb" {
		return nil, false
	}
	is := false
	if err := onDescriptor(f, func(fd int) { is = term.IsTerminal(fd) }); err != nil {
		return nil, false
	}
	return f, is
}

// Terminal shows views until somebody types q or Ctrl-C.
type Terminal struct {
	Out *os.File
	// Keys is the path of the terminal on which is typed. Where it can't be opened, only a signal ends it.
	Keys   string
	Colour bool
}

// Show draws what fetch gives, each second and when the window changes its size. Once there was a view, an error of fetch is shown
// with the last one: cleave may be restarting. It returns when ctx ends or the terminal hangs up, which is no error, and leaves the
// terminal as it was, also where this program has a mistake.
func (t Terminal) Show(ctx context.Context, fetch func(context.Context) (View, error)) (err error) {
	view, err := fetch(ctx)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, hangups()...)
	defer stop()
	keys, restore, err := openKeys(t.Keys)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	if _, err := io.WriteString(t.Out, enter); err != nil {
		return fmt.Errorf("draw on the terminal: %w", err)
	}
	defer func() {
		if _, failed := io.WriteString(t.Out, leave); failed != nil && err == nil {
			err = fmt.Errorf("leave the terminal as it was: %w", failed)
		}
	}()

	news := make(chan View)
	all, ctx := errgroup.WithContext(ctx)
	part := func(do func() error) {
		all.Go(func() (err error) {
			defer func() { err = errors.Join(err, mistake(recover())) }()
			return do()
		})
	}
	part(func() error {
		defer stop()
		return t.draw(ctx, view, news)
	})
	part(func() error {
		poll(ctx, view, fetch, news)
		return nil
	})
	if keys != nil {
		part(func() error {
			defer stop()
			return waitForEnd(ctx, keys)
		})
	}
	return all.Wait()
}

// hangups are signals that would end the program and leave the terminal as it is. nohup(1) has the first one ignored, which stays.
func hangups() []os.Signal {
	out := []os.Signal{syscall.SIGQUIT}
	if !signal.Ignored(syscall.SIGHUP) {
		out = append(out, syscall.SIGHUP)
	}
	return out
}

// mistake is an error of what was recovered from a panic, so that the terminal is given back before anybody reads it.
func mistake(recovered any) error {
	if recovered == nil {
		return nil
	}
	return fmt.Errorf("panic: %v\n%s", recovered, debug.Stack())
}

// draw draws until ctx ends.
func (t Terminal) draw(ctx context.Context, view View, news <-chan View) error {
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)
	for {
		width, height := t.size()
		if _, err := io.WriteString(t.Out, drawing(view.Screen(width, height, t.Colour), height)); err != nil {
			return fmt.Errorf("draw on the terminal: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-resized:
		case view = <-news:
		}
	}
}

// drawing puts lines over whatever a screen of so many lines shows.
func drawing(lines []string, height int) string {
	var b strings.Builder
	b.WriteString(begin)
	for i, text := range lines {
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(restOfLine + text)
	}
	if len(lines) < height {
		b.WriteString("\r\n" + restOfScreen)
	}
	return b.String()
}

func (t Terminal) size() (width, height int) {
	err := onDescriptor(t.Out, func(fd int) {
		if w, h, err := term.GetSize(fd); err == nil {
			width, height = w, h
		}
	})
	if err != nil || width <= 0 || height <= 0 {
		return usualWidth, usualHeight
	}
	return width, height
}

// poll fetches views until ctx ends.
func poll(ctx context.Context, last View, fetch func(context.Context) (View, error), news chan<- View) {
	tick := time.NewTicker(redrawEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		view, err := fetch(ctx)
		if err == nil {
			last = view
		} else {
			view = last
			view.Problems = append([]string{fmt.Sprintf("this is of %s: %s", last.At.UTC().Format("15:04:05 UTC"), err)}, last.Problems...)
		}
		select {
		case <-ctx.Done():
			return
		case news <- view:
		}
	}
}

// openKeys opens a terminal to read each key as it is typed, without showing it. restore takes that back.
func openKeys(path string) (keys *os.File, restore func() error, _ error) {
	f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil || f.SetReadDeadline(time.Time{}) != nil {
		// No terminal of its own, or a read that can't be ended.
		if f != nil {
			err = f.Close()
			return nil, func() error { return err }, nil
		}
		return nil, func() error { return nil }, nil
	}
	var before *term.State
	var failed error
	if err := onDescriptor(f, func(fd int) { before, failed = term.MakeRaw(fd) }); err != nil || failed != nil {
		return nil, nil, errors.Join(fmt.Errorf("read keys from the terminal: %w", errors.Join(err, failed)), f.Close())
	}
	return f, func() error {
		var failed error
		if err := onDescriptor(f, func(fd int) { failed = term.Restore(fd, before) }); err != nil || failed != nil {
			failed = fmt.Errorf("leave the terminal as it was (`reset` does it): %w", errors.Join(err, failed))
		}
		return errors.Join(failed, f.Close())
	}, nil
}

// waitForEnd waits for a key that ends it, or for ctx.
func waitForEnd(ctx context.Context, keys *os.File) error {
	defer context.AfterFunc(ctx, func() {
		_ = keys.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // it was tried when it was opened
	})()
	typed := make([]byte, 64)
	for {
		n, err := keys.Read(typed)
		if strings.ContainsAny(string(typed[:n]), "qQ"+string(rune(interrupt))) {
			return nil
		}
		if err != nil {
			return nil //nolint:nilerr // the terminal is gone, or it is over: both are the end
		}
	}
}

// onDescriptor calls do with a file's descriptor. [os.File.Fd] would make reads of it endless.
func onDescriptor(f *os.File, do func(fd int)) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Control(func(fd uintptr) { do(int(fd)) })
}
