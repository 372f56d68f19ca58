package config

import (
	"errors"
	"fmt"
	"math/big"
	"strconv"
	"strings"
)

// maxQuantity is the longest quantity that is looked at; a number of bytes needs
// no more.
const maxQuantity = 40

var (
	errQuantity   = errors.New(`must be a number of bytes, such as 128Mi, 1Gi or 134217728`)
	errFractional = errors.New("is not a whole number of bytes")
	errTooLarge   = errors.New("is more than 2^63-1 bytes")
)

// ParseBytes reads a number of bytes as Kubernetes writes quantities: digits
// with or without a decimal point, then nothing, or a power of 1024 (Ki Mi Gi Ti
// Pi Ei) or of 1000 (n u m k M G T P E), or an exponent of ten (e3, E3). The
// result must be a whole number of bytes that fits int64; it may be negative.
// The error is for people and quotes s.
func ParseBytes(s string) (int64, error) {
	number, unit := s, ""
	if i := strings.IndexFunc(s, func(r rune) bool { return !strings.ContainsRune("+-.0123456789", r) }); i >= 0 {
		number, unit = s[:i], s[i:]
	}
	fail := func(err error) (int64, error) { return 0, fmt.Errorf("%s %w", shown(s), err) }
	if len(s) > maxQuantity || !isDecimal(number) {
		return fail(errQuantity)
	}
	value, ok := new(big.Rat).SetString(number)
	if !ok {
		return fail(errQuantity)
	}
	factor, ok := unitFactor(unit)
	if !ok {
		return fail(errQuantity)
	}
	if factor == nil { // an exponent beyond all reason
		switch {
		case value.Sign() == 0:
			return 0, nil
		case strings.HasPrefix(unit[1:], "-"):
			return fail(errFractional)
		}
		return fail(errTooLarge)
	}
	value.Mul(value, factor)
	if !value.IsInt() {
		if unit == "m" {
			return fail(errors.New("is in thousandths of a byte; Mi is for mebibytes"))
		}
		return fail(errFractional)
	}
	if !value.Num().IsInt64() {
		return fail(errTooLarge)
	}
	return value.Num().Int64(), nil
}

// isDecimal says whether s is digits with at most one sign and one point.
func isDecimal(s string) bool {
	s = strings.TrimPrefix(strings.TrimPrefix(s, "+"), "-")
	whole, rest, _ := strings.Cut(s, ".")
	digits := whole + rest
	return digits != "" && strings.Trim(digits, "0123456789") == ""
}

// unitFactor gives what a unit multiplies with; nil for an exponent that makes
// any number too large or too small.
func unitFactor(unit string) (factor *big.Rat, ok bool) {
	const decimal, binary = "n u m  k M G T P E", "Ki Mi Gi Ti Pi Ei"
	for i, u := range strings.Split(decimal, " ") {
		if u == unit {
			return power(10, 3*(i-3)), true
		}
	}
	for i, u := range strings.Split(binary, " ") {
		if u == unit {
			return power(2, 10*(i+1)), true
		}
	}
	if unit == "" || unit[0] != 'e' && unit[0] != 'E' {
		return nil, false
	}
	exponent, err := strconv.Atoi(unit[1:])
	switch {
	case errors.Is(err, strconv.ErrRange):
		return nil, true
	case err != nil:
		return nil, false
	case exponent < -2*maxQuantity || exponent > 2*maxQuantity:
		return nil, true
	}
	return power(10, exponent), true
}

func power(base int64, exponent int) *big.Rat {
	n := new(big.Int).Exp(big.NewInt(base), big.NewInt(int64(max(exponent, -exponent))), nil)
	if exponent < 0 {
		return new(big.Rat).SetFrac(big.NewInt(1), n)
	}
	return new(big.Rat).SetInt(n)
}

// formatBytes writes a number of bytes so that ParseBytes reads it: with the
// largest power of 1024 that leaves a whole number.
func formatBytes(n int64) string {
	units := []string{"", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"}
	i := 0
	for n != 0 && n%1024 == 0 && i < len(units)-1 {
		n /= 1024
		i++
	}
	return strconv.FormatInt(n, 10) + units[i]
}
