//go:build !amd64

package prefetch

func octets(*byte, int) {}

func forWriting(*byte, int) {}
