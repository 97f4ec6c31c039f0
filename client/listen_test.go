package iwarp

import (
	"testing"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// TestCallersThatLeave checks that nothing is left of peers that connect and leave while the program does not wait for
// connections.
func TestCallersThatLeave(t *testing.T) {
	d := &Device{reqs: make(map[uint32]*ConnRequest), streams: make(map[uint32]*Stream), listens: make(map[uint32]*Listener)}
	l := &Listener{d: d, h: 1, more: make(chan struct{}, 1)}
	d.listens[l.h] = l
	const stays = 100
	for conn := range uint32(2 * stays) {
		if conn%2 == 0 {
			d.connectRequest(&ctrlpb.ConnectRequest{Listen: l.h, Conn: conn})
		} else {
			d.streamReady(&ctrlpb.StreamReady{Listen: l.h, Conn: conn})
		}
		if conn > stays+1 || conn < stays {
			d.connectGone(&ctrlpb.ConnectGone{Conn: conn})
		}
	}
	if len(l.queue) != 1 || len(l.streams) != 1 || len(d.reqs) != 1 || len(d.streams) != 1 {
		t.Fatalf("%d requests, %d streams are queued, %d and %d known", len(l.queue), len(l.streams), len(d.reqs), len(d.streams))
	}
	if r, err := l.Request(t.Context()); err != nil || r.h != stays {
		t.Errorf("request %+v, %v", r, err)
	}
	if s, err := l.AcceptStream(t.Context()); err != nil || s.h != stays+1 {
		t.Errorf("stream %+v, %v", s, err)
	}
}
