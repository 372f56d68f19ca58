package engine

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Value is how much has to be available: a fixed amount or a share of the
// capacity. The zero Value is 0 % of the capacity.
type Value struct {
	// Quantity is a fixed amount in the signal's unit; nil if Share holds.
	// It is exact: half a byte is half a byte (THR-7). Nobody may change it.
	Quantity *resource.Quantity
	// Share of the capacity, 0.1 for 10 %. It has only 32 bits, because the
	// kubelet's has, and the loss shows in the results (THR-8).
	Share float32
}

// Of returns the amount that v means for a capacity, in the signal's unit.
func (v Value) Of(capacity int64) resource.Quantity {
	if v.Quantity != nil {
		return v.Quantity.DeepCopy()
	}
	return *resource.NewQuantity(truncate(float64(capacity)*float64(v.Share)), resource.BinarySI)
}

// truncate is the conversion that amd64 does: toward zero, and the least
// number of all for what has no int64. Go leaves the latter to the processor;
// a plan must not depend on it.
func truncate(f float64) int64 {
	if !(f >= math.MinInt64 && f < math.MaxInt64) { // false for NaN too
		return math.MinInt64
	}
	return int64(f)
}

// Equal says whether v and o are the same threshold to the kubelet (SYN-9):
// 10Gi and 10737418240 are, 10 % and the amount that 10 % comes to are not.
func (v Value) Equal(o Value) bool {
	switch {
	case v.Quantity != nil && o.Quantity != nil:
		return compare(v.Quantity, o.Quantity) == 0
	case v.Quantity == nil && o.Quantity == nil:
		return v.Share == o.Share
	default:
		return false
	}
}

// String is the value as people write it: 10Gi or 10%.
func (v Value) String() string {
	if v.Quantity != nil {
		return v.Quantity.String()
	}
	return strconv.FormatFloat(float64(v.Share)*100, 'g', 6, 64) + "%"
}

const shareMark = "share "

// MarshalText is exact, for records: "10Gi", or "share 0.1" for 10 %.
func (v Value) MarshalText() ([]byte, error) {
	if v.Quantity != nil {
		return []byte(v.Quantity.String()), nil
	}
	return []byte(shareMark + strconv.FormatFloat(float64(v.Share), 'g', -1, 32)), nil
}

// UnmarshalText reads what MarshalText writes.
func (v *Value) UnmarshalText(text []byte) error {
	if share, ok := strings.CutPrefix(string(text), shareMark); ok {
		f, err := strconv.ParseFloat(share, 32)
		if err != nil {
			return fmt.Errorf("read value %q: %w", text, err)
		}
		*v = Value{Share: float32(f)}
		return nil
	}
	q, err := ParseQuantity(string(text))
	if err != nil {
		return fmt.Errorf("read value %q: %w", text, err)
	}
	*v = Value{Quantity: &q}
	return nil
}

// endless is an exponent of ten of more than four digits, or a number of more
// digits than anybody writes.
var endless = regexp.MustCompile(`^[+-]?[0-9.]*[eE][+-]?0*[1-9][0-9]{4,}$|^[+-]?[0-9.]{1000}`)

// Endless says whether the library of quantities (apimachinery 0.37) would think
// for minutes about an amount: it writes out 1e-100000000 and 1e999999999.
func Endless(text string) bool { return endless.MatchString(text) }

// ParseQuantity reads an amount as the kubelet does, but for those that are
// Endless: they are ErrBadQuantity. A kubelet would not come up with them.
func ParseQuantity(text string) (resource.Quantity, error) {
	if Endless(text) {
		return resource.Quantity{}, fmt.Errorf("%w such as 10Gi: its exponent is too large", ErrBadQuantity)
	}
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return q, fmt.Errorf("%w such as 10Gi", ErrBadQuantity)
	}
	return q, nil
}
