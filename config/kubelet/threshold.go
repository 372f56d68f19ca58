package kubelet

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// verdict is what a threshold comes to on a filesystem.
type verdict string

const (
	sensible verdict = ""
	// off: the kubelet drops it (THR-9).
	off verdict = "off"
	// never: it can't be met.
	never verdict = "never"
	// always: it is met even by an empty filesystem.
	always verdict = "always"
)

var errThreshold = errors.New("is neither a percentage from 0% to 100% nor a quantity above 0")

// plainQuantity is what is given to the library, which thinks for minutes about
// exponents with many digits.
var plainQuantity = regexp.MustCompile(`^\+?(\d{1,30}\.?\d{0,30}|\.\d{1,30})([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,3})?$`)

// judge says what a threshold comes to if at most attainable of capacity can be
// available: bytes or inodes. With a capacity of 0 there is nothing to count, as
// with btrfs's inodes (OBS-11).
func judge(threshold string, capacity, attainable uint64) (verdict, error) {
	if share, ok := strings.CutSuffix(threshold, "%"); ok {
		if share == "0" || share == "100" {
			return off, nil
		}
		// 32 bits, as the kubelet (THR-8).
		percent, err := strconv.ParseFloat(share, 32)
		if err != nil || percent < 0 || percent > 100 {
			return "", fmt.Errorf("%s %w (THR-6)", shown(threshold), errThreshold)
		}
		// NaN is accepted, and never met (THR-6).
		limit := math.Trunc(float64(capacity) * float64(float32(percent/100)))
		switch {
		case math.IsNaN(percent), limit <= 0:
			return never, nil
		case limit > float64(attainable):
			return always, nil
		}
		return sensible, nil
	}
	if !plainQuantity.MatchString(threshold) {
		return "", fmt.Errorf("%s %w (THR-7)", shown(threshold), errThreshold)
	}
	q, err := resource.ParseQuantity(threshold)
	if err != nil || q.Sign() <= 0 {
		return "", fmt.Errorf("%s %w (THR-7)", shown(threshold), errThreshold)
	}
	if attainable > math.MaxInt64 {
		return sensible, nil
	}
	if q.CmpInt64(int64(attainable)) > 0 {
		return always, nil
	}
	return sensible, nil
}
