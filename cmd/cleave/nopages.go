//go:build !pages

package main

import "github.com/spf13/cobra"

// moreCommands are none; see pages.go.
func moreCommands() []*cobra.Command { return nil }
