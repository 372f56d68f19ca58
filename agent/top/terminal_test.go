package top

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// patience is how long a test waits for what has to come.
const patience = time.Minute

// pty is a terminal and the side on which somebody sits.
type pty struct {
	user *os.File
	path string
	seen strings.Builder
}

// closed closes a file at the end.
func closed(t *testing.T, f *os.File) {
	t.Helper()
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
}

func newPTY(t *testing.T) *pty {
	t.Helper()
	user, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skip("this machine gives no terminals: ", err)
	}
	closed(t, user)
	var number int
	var failed error
	if err := onDescriptor(user, func(fd int) {
		number, failed = unix.IoctlGetInt(fd, unix.TIOCGPTN)
		failed = errors.Join(failed, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	return &pty{user: user, path: fmt.Sprintf("/dev/pts/%d", number)}
}

func (p *pty) resize(t *testing.T, width, height uint16) {
	t.Helper()
	var failed error
	if err := onDescriptor(p.user, func(fd int) {
		failed = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: width, Row: height})
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
}

// settings are how the terminal treats what is typed.
func (p *pty) settings(t *testing.T, f *os.File) (s unix.Termios) {
	t.Helper()
	var failed error
	if err := onDescriptor(f, func(fd int) {
		var got *unix.Termios
		if got, failed = unix.IoctlGetTermios(fd, unix.TCGETS); failed == nil {
			s = *got
		}
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	return s
}

// sees reads until a text is there, and forgets what was before its end.
func (p *pty) sees(t *testing.T, text string) {
	t.Helper()
	if err := p.user.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 4096)
	for {
		if _, after, ok := strings.Cut(p.seen.String(), text); ok {
			p.seen.Reset()
			p.seen.WriteString(after)
			return
		}
		n, err := p.user.Read(buffer)
		p.seen.Write(buffer[:n])
		if err != nil {
			t.Fatalf("wait for %q: %v; seen: %q", text, err, p.seen.String())
		}
	}
}

// TestTerminal: it draws, anew where the window grows and where cleave is gone for a while; however it ends, the terminal is then as
// it was, and nothing runs on.
func TestTerminal(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	for _, tc := range []struct{ name, key string }{{"Ctrl-C", "\x03"}, {"q", "q"}, {"a signal", ""}, {"a hangup", ""}, {"a panic", ""}} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPTY(t)
			screen, err := os.OpenFile(p.path, os.O_RDWR|syscall.O_NOCTTY, 0)
			if err != nil {
				t.Fatal(err)
			}
			closed(t, screen)
			if f, ok := Drawable(screen, "xterm"); !ok || f != screen {
				t.Error("a terminal is not taken for one")
			}
			if _, ok := Drawable(screen, "dumb"); ok {
				t.Error("a terminal without movements is drawn on")
			}
			p.resize(t, 80, 24)
			before := p.settings(t, screen)

			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			s, u, plan := node()
			asked, done, broken := 0, make(chan error, 1), make(chan struct{})
			go func() {
				done <- Terminal{Out: screen, Keys: p.path}.Show(ctx, func(context.Context) (View, error) {
					select {
					case <-broken:
						panic("a mistake of ours")
					default:
					}
					if asked++; asked > 1 {
						return View{}, errors.New("cleave is not running")
					}
					return New(s, u, plan, now), nil
				})
			}()
			view := New(s, u, plan, now)
			p.sees(t, enter)
			p.sees(t, view.Screen(80, 24, false)[5]) // the first bar
			p.sees(t, "! this is of 08:00:00 UTC: cleave is not running")
			p.resize(t, 200, 50)
			if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil {
				t.Fatal(err)
			}
			p.sees(t, strings.TrimSpace(view.Filesystems[0].lines(200)[1].text))

			switch {
			case tc.name == "a hangup":
				hangup := syscall.SIGHUP
				if signal.Ignored(hangup) { // by nohup(1), which stays; this one goes the same way
					hangup = syscall.SIGQUIT
				}
				if err := syscall.Kill(os.Getpid(), hangup); err != nil {
					t.Fatal(err)
				}
			case tc.name == "a panic":
				close(broken)
			case tc.key == "":
				cancel()
			}
			if tc.key != "" {
				if _, err := p.user.WriteString("x" + tc.key); err != nil {
					t.Fatal(err)
				}
			}
			p.sees(t, leave)
			select {
			case err := <-done:
				if panicked := err != nil && strings.Contains(err.Error(), "panic: a mistake of ours\n"); err != nil && !panicked || panicked != (tc.name == "a panic") {
					t.Error(err)
				}
			case <-time.After(patience):
				t.Fatal("it does not end")
			}
			if diff := cmp.Diff(before, p.settings(t, screen)); diff != "" {
				t.Errorf("the terminal is not as it was:\n%s", diff)
			}
		})
	}
}

// shownBy is what a terminal shows that does what drawings ask of it, where lines don't wrap: the cursor stays in the last column.
func shownBy(t *testing.T, width, height int, text string) []string {
	t.Helper()
	cells := make([][]rune, height)
	for y := range cells {
		cells[y] = []rune(strings.Repeat(" ", width))
	}
	x, y := 0, 0
	for text != "" {
		var rest string
		switch {
		case strings.HasPrefix(text, begin):
			x, y, rest = 0, 0, text[len(begin):]
		case strings.HasPrefix(text, restOfLine), strings.HasPrefix(text, restOfScreen):
			copy(cells[y][x:], []rune(strings.Repeat(" ", width)))
			if strings.HasPrefix(text, restOfScreen) {
				for below := y + 1; below < height; below++ {
					copy(cells[below], []rune(strings.Repeat(" ", width)))
				}
			}
			rest = text[len(restOfLine):]
		case strings.HasPrefix(text, "\r\n"):
			if x, y, rest = 0, y+1, text[2:]; y == height {
				t.Fatal("the screen scrolls")
			}
		default:
			r := []rune(text)[0]
			if r < ' ' {
				t.Fatalf("unknown to this terminal: %q", text)
			}
			cells[y][x] = r
			x, rest = min(x+1, width-1), text[len(string(r)):]
		}
		text = rest
	}
	out := make([]string, height)
	for y := range cells {
		out[y] = strings.TrimRight(string(cells[y]), " ")
	}
	return out
}

// TestDrawing: each line is on the screen to its last letter, and nothing of the drawing before it.
func TestDrawing(t *testing.T) {
	t.Parallel()
	const width, height = 5, 3
	for _, tc := range []struct {
		name  string
		lines []string
	}{
		{"full", []string{"abcde", "fghij", "klmno"}},
		{"last one short", []string{"abcde", "fghij", "k"}},
		{"fewer", []string{"abcde", "fghij"}},
		{"one", []string{"abcde"}},
		{"empty between", []string{"", "x", ""}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			before := drawing([]string{"#####", "#####", "#####"}, height)
			want := append(append([]string{}, tc.lines...), make([]string, height-len(tc.lines))...)
			if diff := cmp.Diff(want, shownBy(t, width, height, before+drawing(tc.lines, height))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestNothingToShow: without a first view the terminal is left alone.
func TestNothingToShow(t *testing.T) {
	t.Parallel()
	file, err := os.Create(t.TempDir() + "/screen")
	if err != nil {
		t.Fatal(err)
	}
	closed(t, file)
	if _, ok := Drawable(file, "xterm"); ok {
		t.Error("a file is taken for a terminal")
	}
	if _, ok := Drawable(new(strings.Builder), "xterm"); ok {
		t.Error("a text is taken for a terminal")
	}
	none := errors.New("cleave is not running")
	if err := (Terminal{Out: file, Keys: "/dev/null"}).Show(t.Context(), func(context.Context) (View, error) { return View{}, none }); !errors.Is(err, none) {
		t.Errorf("got %v", err)
	}
	if info, err := file.Stat(); err != nil || info.Size() != 0 {
		t.Errorf("%v, %v", info, err)
	}
}
