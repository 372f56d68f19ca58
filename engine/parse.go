package engine

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Settings are the kubelet's eviction settings as its configuration file
// writes them, each a map from signal to text (THR-1).
type Settings struct {
	// Hard is evictionHard: what has to be available, at once.
	Hard map[string]string
	// Soft is evictionSoft: what has to be available, after a grace period.
	Soft map[string]string
	// SoftGrace is evictionSoftGracePeriod, Go durations.
	SoftGrace map[string]string
	// MinReclaim is evictionMinimumReclaim.
	MinReclaim map[string]string
	// EnforcePods says whether enforceNodeAllocatable contains "pods"; each
	// hard memory threshold then holds for allocatable memory as well (THR-19).
	EnforcePods bool
}

// The classes of error that a threshold can have; ask with errors.Is. Any of
// them keeps the kubelet from starting (THR-3).
var (
	ErrUnknownSignal  = errors.New("no such signal")
	ErrBadPercentage  = errors.New("not a percentage")
	ErrNegativeShare  = errors.New("a percentage below 0")
	ErrShareAbove100  = errors.New("a percentage above 100")
	ErrBadQuantity    = errors.New("not a quantity")
	ErrNotPositive    = errors.New("not more than 0; to have no threshold write 0% or leave the signal out")
	ErrNegative       = errors.New("less than 0")
	ErrBadDuration    = errors.New("not a duration with a unit")
	ErrNoGracePeriod  = errors.New("a soft threshold without a grace period for its signal")
	errNoSeparator    = errors.New("no separator between name and value")
	errShareOfReclaim = fmt.Errorf("a minimum reclaim of 0%% or less is %w", ErrNotPositive)
)

// SettingError says which entry of which setting is wrong.
type SettingError struct {
	// Setting is the name in the kubelet's configuration file.
	Setting string
	Signal  string
	// Text is the value as it was written.
	Text string
	// Err is one of the classes above, perhaps with details.
	Err error
}

func (e *SettingError) Error() string {
	return fmt.Sprintf("%s[%q]: %q is %v", e.Setting, e.Signal, e.Text, e.Err)
}

func (e *SettingError) Unwrap() error { return e.Err }

// Parse reads the settings. The thresholds come in the engine's order; the
// kubelet's has none, because it walks maps (THR-13). The error joins one
// SettingError for each wrong entry, where the kubelet stops at the first that
// it meets; there are no thresholds then.
func Parse(s Settings) ([]Threshold, error) {
	var faults []error
	hard := parseEntries(&faults, "evictionHard", s.Hard, parseThreshold)
	soft := parseEntries(&faults, "evictionSoft", s.Soft, parseThreshold)
	grace := parseEntries(&faults, "evictionSoftGracePeriod", s.SoftGrace, parseGrace)
	reclaim := parseEntries(&faults, "evictionMinimumReclaim", s.MinReclaim, parseMinReclaim)

	var out []Threshold
	add := func(signal Signal, v Value, grace time.Duration) {
		t := Threshold{Signal: signal, Value: v, Grace: grace}
		if r := reclaim[signal]; r != nil {
			t.MinReclaim = r
		}
		out = append(out, t)
	}
	for _, signal := range signals {
		if v := hard[signal]; v != nil {
			add(signal, *v, 0)
		}
		v := soft[signal]
		if v == nil {
			continue
		}
		g := grace[signal]
		if g == nil {
			if _, written := s.SoftGrace[string(signal)]; !written { // else it has its own fault
				faults = append(faults, &SettingError{Setting: "evictionSoft", Signal: string(signal), Text: s.Soft[string(signal)], Err: ErrNoGracePeriod})
			}
			continue
		}
		add(signal, *v, *g)
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	if s.EnforcePods {
		for _, t := range slices.Clone(out) {
			if t.Signal == MemoryAvailable && t.Hard() {
				t.Signal = AllocatableMemoryAvailable
				out = append(out, t)
			}
		}
	}
	// Of one signal those of evictionHard stay before those of evictionSoft:
	// where the kubelet takes the last of several that counts.
	slices.SortStableFunc(out, func(a, b Threshold) int { return cmp.Compare(a.Signal.rank(), b.Signal.rank()) })
	return out, nil
}

// parseEntries reads one setting, in the order of its keys. An entry for which
// parse returns nil says that there is nothing.
func parseEntries[T any](faults *[]error, setting string, entries map[string]string, parse func(string) (*T, error)) map[Signal]*T {
	out := map[Signal]*T{}
	for _, key := range slices.Sorted(maps.Keys(entries)) {
		var v *T
		err := error(ErrUnknownSignal)
		if Signal(key).Valid() {
			v, err = parse(entries[key])
		}
		if err != nil {
			*faults = append(*faults, &SettingError{Setting: setting, Signal: key, Text: entries[key], Err: err})
			continue
		}
		out[Signal(key)] = v
	}
	return out
}

// parseThreshold reads a value of evictionHard or evictionSoft; nil without an
// error means that the signal has no threshold (THR-5).
func parseThreshold(text string) (*Value, error) {
	if strings.HasSuffix(text, "%") {
		if text == "0%" || text == "100%" {
			return nil, nil
		}
		share, err := parseShare(text)
		switch {
		case err != nil:
			return nil, err
		case share < 0:
			return nil, ErrNegativeShare
		case share > 1:
			return nil, ErrShareAbove100
		}
		return &Value{Share: share}, nil // NaN gets here, as in the kubelet, and is never met (THR-6)
	}
	q, err := parseQuantity(text)
	if err != nil {
		return nil, err
	}
	if q.Sign() <= 0 {
		return nil, ErrNotPositive
	}
	return &Value{Quantity: q}, nil
}

// parseMinReclaim reads a value of evictionMinimumReclaim. It has no upper
// bound, and a quantity may be 0 where a percentage may not (THR-12).
func parseMinReclaim(text string) (*Value, error) {
	if strings.HasSuffix(text, "%") {
		share, err := parseShare(text)
		switch {
		case err != nil:
			return nil, err
		case share <= 0:
			return nil, errShareOfReclaim
		}
		return &Value{Share: share}, nil
	}
	q, err := parseQuantity(text)
	if err != nil {
		return nil, err
	}
	if q.Sign() < 0 {
		return nil, ErrNegative
	}
	return &Value{Quantity: q}, nil
}

// parseGrace reads a value of evictionSoftGracePeriod (THR-10).
func parseGrace(text string) (*time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil {
		return nil, fmt.Errorf("%w such as 90s", ErrBadDuration)
	}
	if d < 0 {
		return nil, ErrNegative
	}
	return &d, nil
}

// parseShare reads a percentage as the kubelet does (THR-4): all trailing
// percent signs go, the rest is any Go floating-point literal, and both the
// number and the division have 32 bits.
func parseShare(text string) (float32, error) {
	f, err := strconv.ParseFloat(strings.TrimRight(text, "%"), 32)
	if err != nil {
		return 0, ErrBadPercentage
	}
	return float32(f) / 100, nil
}

func parseQuantity(text string) (*resource.Quantity, error) {
	q, err := ParseQuantity(text)
	if err != nil {
		return nil, err
	}
	return &q, nil
}

// ParsePairs reads a setting as it stands on the kubelet's command line:
// pairs separated by commas, name and value separated by "<" (evictionHard and
// evictionSoft) or "=" (the others). Blanks around both are dropped, empty
// pairs are skipped, and of a repeated name the last value counts (THR-1).
func ParsePairs(text, separator string) (map[string]string, error) {
	out := map[string]string{}
	for pair := range strings.SplitSeq(text, ",") {
		if pair == "" {
			continue
		}
		name, value, ok := strings.Cut(pair, separator)
		if !ok {
			return nil, fmt.Errorf("read %q: %w: write name%svalue", pair, errNoSeparator, separator)
		}
		out[strings.TrimSpace(name)] = strings.TrimSpace(value)
	}
	return out, nil
}
