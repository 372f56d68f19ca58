package config

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/cleave-cri/cleave/config/strict"
)

// maxSocketPath is the longest path of a unix socket: sun_path has 108 bytes, of
// which one is the zero byte at its end (unix(7)).
const maxSocketPath = 107

// Endpoint is the absolute path of a unix socket. *Endpoint can be the value of
// a command line flag.
type Endpoint string

// ParseEndpoint takes "unix:///path" or "/path". The error is for people and
// quotes s.
func ParseEndpoint(s string) (Endpoint, error) {
	path := s
	if scheme, rest, ok := strings.Cut(s, "://"); ok && !strings.Contains(scheme, "/") {
		if scheme != "unix" {
			return "", fmt.Errorf("%s: only unix sockets are possible, not %q: write unix:///path or /path", strict.Shown(s), scheme)
		}
		if !strings.HasPrefix(rest, "/") {
			return "", fmt.Errorf("%s: the path must be absolute: unix:/// has three slashes", strict.Shown(s))
		}
		path = rest
	}
	e := Endpoint(path)
	if fault := e.fault(); fault != "" {
		return "", fmt.Errorf("%s: %s", strict.Shown(s), fault)
	}
	return e, nil
}

// fault says what is wrong with e, or nothing.
func (e Endpoint) fault() string {
	path := string(e)
	switch {
	case path == "":
		return "a socket is needed: write unix:///path or /path"
	case !strings.HasPrefix(path, "/"):
		return "the path must be absolute: write unix:///path or /path"
	case strings.HasSuffix(path, "/"), strings.HasSuffix(path, "/."), strings.HasSuffix(path, "/.."):
		return "this names a folder, not a socket"
	case len(path) > maxSocketPath:
		return fmt.Sprintf("the path has %d bytes, but the kernel takes only %d for a socket", len(path), maxSocketPath)
	}
	return textFault(path)
}

// Path is the absolute path of the socket.
func (e Endpoint) Path() string { return string(e) }

// String is the form that the kubelet and crictl want: "unix:///path".
func (e Endpoint) String() string {
	if e == "" {
		return ""
	}
	return "unix://" + string(e)
}

// Set is ParseEndpoint for flags.
func (e *Endpoint) Set(s string) error {
	parsed, err := ParseEndpoint(s)
	if err != nil {
		return err
	}
	*e = parsed
	return nil
}

// Type is the name of this kind of value in the help of a command.
func (*Endpoint) Type() string { return "endpoint" }

// textFault says what is wrong with a path or name as a piece of text.
func textFault(s string) string {
	if !utf8.ValidString(s) {
		return "this is not UTF-8"
	}
	if strings.ContainsFunc(s, unicode.IsControl) {
		return "control characters are not allowed"
	}
	return ""
}
