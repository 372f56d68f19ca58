//go:build pages

package main

import (
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// moreCommands has the command by which packages get what people read: it is not
// in the program that is shipped.
func moreCommands() []*cobra.Command {
	return []*cobra.Command{{
		Use:   "pages FOLDER",
		Short: "Write manual pages and shell completions into a folder",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			root, dir := cmd.Root(), args[0]
			root.RemoveCommand(cmd) // it is none that people have
			man := filepath.Join(dir, "man")
			if err := os.MkdirAll(man, 0o755); err != nil {
				return err
			}
			if err := doc.GenManTree(root, &doc.GenManHeader{Section: "8", Source: "cleave", Manual: "cleave"}, man); err != nil {
				return err
			}
			for name, write := range map[string]func(string) error{
				"cleave.bash": func(path string) error { return root.GenBashCompletionFileV2(path, true) },
				"_cleave":     root.GenZshCompletionFile,
				"cleave.fish": func(path string) error { return root.GenFishCompletionFile(path, true) },
			} {
				if err := write(filepath.Join(dir, name)); err != nil {
					return err
				}
			}
			return nil
		},
	}}
}
