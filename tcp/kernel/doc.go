// Package kernel holds tests only: package tcp against the kernel's TCP over a tun
// device in a network namespace.
package kernel
