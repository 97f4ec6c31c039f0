//go:build !amd64

package prefetch

func octets(*byte, int) {}
