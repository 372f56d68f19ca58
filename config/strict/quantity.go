package strict

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// maxQuantity is the longest quantity that is looked at; a number of bytes needs
// no more.
const maxQuantity = 40

var (
	ErrQuantity   = errors.New(`must be a number of bytes, such as 128Mi, 1Gi or 134217728`)
	errMilli      = errors.New("is in thousandths of a byte; Mi is for mebibytes")
	errFractional = errors.New("is not a whole number of bytes")
	errNegative   = errors.New("is negative")
	errTooLarge   = errors.New("is more than 2^63-1 bytes")
)

// wellFormed is stricter than the library (apimachinery 0.37), which takes "."
// and "Mi" for 0 and 1e4294967296 for 1, thinks for a minute about 1e-100000000,
// and rounds what is finer than nine decimal places up to a whole number.
var wellFormed = regexp.MustCompile(`^[+-]?(\d+\.?|\d*\.\d{1,9})([kMGTPE]|[KMGTPE]i|[eE]\+?\d{1,2})?$`)

// fractional has a unit that is for parts of one thing (n, u, m, e-1).
var fractional = regexp.MustCompile(`^[+-]?[\d.]*\d[\d.]*([num]|[eE]-\d+)$`)

// ParseBytes reads a number of bytes as Kubernetes writes quantities: digits
// with or without a decimal point, then nothing, or a power of 1024 (Ki Mi Gi Ti
// Pi Ei) or of 1000 (k M G T P E), or an exponent of ten (e3, E3). The result
// must be a whole number of bytes that fits int64. Where Kubernetes would round
// up, this refuses: parts of a byte, and units that are for parts (n u m e-3).
// The error is for people and quotes s.
func ParseBytes(s string) (int64, error) {
	fail := func(err error) (int64, error) { return 0, fmt.Errorf("%s %w", Shown(s), err) }
	switch {
	case len(s) > maxQuantity:
		return fail(ErrQuantity)
	case fractional.MatchString(s) && strings.HasSuffix(s, "m"):
		return fail(errMilli)
	case fractional.MatchString(s):
		return fail(errFractional)
	case !wellFormed.MatchString(s):
		return fail(ErrQuantity)
	}
	q, err := resource.ParseQuantity(s)
	if err != nil {
		return fail(ErrQuantity)
	}
	switch n := q.Value(); {
	case q.Sign() < 0:
		return fail(errNegative)
	// A number with a binary unit that is too large becomes the largest, which none can be.
	case q.CmpInt64(math.MaxInt64) > 0, n == math.MaxInt64 && q.Format == resource.BinarySI:
		return fail(errTooLarge)
	case q.CmpInt64(n) != 0:
		return fail(errFractional)
	default:
		return n, nil
	}
}

// FormatBytes writes a number of bytes so that ParseBytes reads it, short:
// 128Mi.
func FormatBytes(n int64) string {
	return resource.NewQuantity(n, resource.BinarySI).String()
}
