//go:build docs

package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra/doc"
)

// Built with the tag docs the program writes its manual pages, made from its own
// help, to the folder that "iwarpctl gen-man DIR" names. deploy/packages/build
// does that.
func init() {
	if len(os.Args) != 3 || os.Args[1] != "gen-man" {
		return
	}
	header := &doc.GenManHeader{Title: "IWARPCTL", Section: "1", Source: "iwarpd", Manual: "User Commands"}
	root := (&command{out: os.Stdout, err: os.Stderr}).root()
	root.DisableAutoGenTag = true // no HISTORY, which says how the page was made
	if err := doc.GenManTree(root, header, os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "iwarpctl:", err)
		os.Exit(1)
	}
	os.Exit(0)
}
