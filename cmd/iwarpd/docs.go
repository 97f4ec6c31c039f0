//go:build docs

package main

import (
	"os"

	"github.com/iwarpd/iwarpd/internal/clidoc"
)

// Built with the tag docs the program writes its own documentation.
func init() {
	clidoc.Main(os.Args, rootCommand(), "8", "System Administration", []string{"iwarpd.yaml(5)", "iwarpctl(1)"},
		[2]string{"/etc/iwarpd/iwarpd.yaml", "The configuration; see iwarpd.yaml(5)."},
		[2]string{"/run/iwarpd/iwarpd.sock", "The socket for programs; its group may use it."},
		[2]string{"/usr/share/doc/iwarpd", "Documentation, a dashboard for Grafana and alert rules for Prometheus."})
}
