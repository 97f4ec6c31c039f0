package main

import (
	"net"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// TestSetMTU checks that the log says once that an interface has a larger MTU than iwarpd uses, unless the key mtu says which.
func TestSetMTU(t *testing.T) {
	for _, tt := range []struct{ key, has, want, lines int }{
		{0, 1500, 1500, 0}, {0, 9216, 9216, 0}, {0, 9217, 9216, 1}, {0, 65535, 9216, 1}, {9000, 65535, 9000, 0},
	} {
		core, logs := observer.New(zap.InfoLevel)
		n := &nic{s: &settings{MTU: tt.key}, log: zap.New(core)}
		for range 3 { // as in attempts to serve an interface that is back
			n.setMTU(&net.Interface{MTU: tt.has})
		}
		if got := int(n.mtu.Load()); got != tt.want || logs.Len() != tt.lines {
			t.Errorf("%+v: %d, %d lines", tt, got, logs.Len())
		}
	}
}
