package strict

import (
	"fmt"
	"strconv"
	"time"

	"go.yaml.in/yaml/v3"
)

// The tags that YAML gives to plain scalars.
const (
	TagText  = "!!str"
	TagInt   = "!!int"
	TagFloat = "!!float"
	TagBool  = "!!bool"
)

// Text reads a scalar; the error of this and of the others says what it should
// have been, for people.
func Text(n *yaml.Node) (string, error) {
	if n.ShortTag() != TagText {
		return "", fmt.Errorf("must be text, not %s: put it in quotes if it is meant so", Shown(n.Value))
	}
	return n.Value, nil
}

// Int reads a whole number.
func Int(n *yaml.Node) (int, error) {
	i, err := strconv.Atoi(n.Value)
	if err != nil || n.ShortTag() != TagInt {
		return 0, fmt.Errorf("must be a whole number, not %s", Shown(n.Value))
	}
	return i, nil
}

// Bool reads true or false.
func Bool(n *yaml.Node) (v bool, err error) {
	if n.ShortTag() != TagBool || n.Decode(&v) != nil {
		return false, fmt.Errorf("must be true or false, not %s", Shown(n.Value))
	}
	return v, nil
}

// Duration reads a duration with its unit.
func Duration(n *yaml.Node) (time.Duration, error) {
	d, err := time.ParseDuration(n.Value)
	switch tag := n.ShortTag(); {
	case tag == TagInt || tag == TagFloat:
		return 0, fmt.Errorf("must be a duration with a unit, such as %ss, not %s", n.Value, Shown(n.Value))
	case err != nil || tag != TagText:
		return 0, fmt.Errorf("must be a duration, such as 10s or 1m30s, not %s", Shown(n.Value))
	}
	return d, nil
}

// Bytes reads a number of bytes, see ParseBytes.
func Bytes(n *yaml.Node) (int64, error) {
	switch n.ShortTag() {
	case TagText, TagInt, TagFloat:
	default:
		return 0, fmt.Errorf("%s %w", Shown(n.Value), ErrQuantity)
	}
	return ParseBytes(n.Value)
}
