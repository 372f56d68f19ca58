package config

import "github.com/cleave-cri/cleave/config/strict"

// ParseBytes reads a number of bytes as Kubernetes writes quantities, see
// [strict.ParseBytes].
func ParseBytes(s string) (int64, error) { return strict.ParseBytes(s) }
