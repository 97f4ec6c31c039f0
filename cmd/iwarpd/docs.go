//go:build docs

package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra/doc"
)

// Built with the tag docs the program writes its manual page, made from its own
// help, to the folder "iwarpd gen-man DIR" names. deploy/packages/build does that.
func init() {
	if len(os.Args) != 3 || os.Args[1] != "gen-man" {
		return
	}
	header := &doc.GenManHeader{Title: "IWARPD", Section: "8", Source: "iwarpd", Manual: "System Administration"}
	root := rootCommand()
	root.DisableAutoGenTag = true // no HISTORY, which says how the page was made
	if err := doc.GenManTree(root, header, os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "iwarpd:", err)
		os.Exit(1)
	}
	os.Exit(0)
}
