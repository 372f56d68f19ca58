package config

import "github.com/cleave-cri/cleave/config/strict"

// Fault is one thing that is wrong with a configuration. Its File is empty for
// a Config that was not read from a file, or was changed since.
type Fault = strict.Fault

// Faults are all things that are wrong with a configuration, in the order of the
// file. As an error it is never empty.
type Faults = strict.Faults
