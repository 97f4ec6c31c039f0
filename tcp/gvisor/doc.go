// Package gvisor holds tests only: package tcp against an independent TCP,
// gVisor's netstack, inside one process.
package gvisor
