//go:build docs

package main

import (
	"os"

	"github.com/spf13/cobra/doc"

	"github.com/iwarpd/iwarpd/internal/clidoc"
)

// Built with the tag docs the program writes its own documentation.
func init() {
	clidoc.Main(os.Args, rootCommand(), &doc.GenManHeader{Title: "IWARPD", Section: "8", Source: "iwarpd", Manual: "System Administration"})
}
