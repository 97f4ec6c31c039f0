//go:build docs

package main

import (
	"os"

	"github.com/iwarpd/iwarpd/internal/clidoc"
)

// Built with the tag docs the program writes its own documentation.
func init() {
	root := (&command{out: os.Stdout, err: os.Stderr}).root()
	clidoc.Main(os.Args, root, "1", "User Commands", []string{"iwarpd(8)"},
		[2]string{"/run/iwarpd/iwarpd.sock", "The socket of the daemon, unless --socket or IWARPD_SOCKET names another."})
}
