package split

import "fmt"

// classed makes an error of one of containerd's classes (errdefs), by which the
// caller's containerd tells it apart. The class is not in its text, which people
// read.
func classed(class error, format string, args ...any) error {
	return &classedError{class: class, error: fmt.Errorf(format, args...)}
}

type classedError struct {
	error
	class error
}

func (e *classedError) Unwrap() []error { return []error{e.class, e.error} }
