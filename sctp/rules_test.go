package sctp

import (
	"testing"
	"time"
)

// TestTimeoutWindow checks that a time-out sets the window to one packet and ssthresh to half of the old window (RFC
// 9260 7.2.3).
func TestTimeoutWindow(t *testing.T) {
	r := listening(t, Config{})
	p := &r.a.paths[0]
	p.cwnd = 40000
	for range 8 {
		r.push(1000)
	}
	r.take()
	r.wait(time.Second)
	if p.cwnd != p.pmdcs() || p.ssthresh != 20000 {
		t.Errorf("window %d, threshold %d; want %d and 20000", p.cwnd, p.ssthresh, p.pmdcs())
	}
}

// TestGivesUp checks that an association ends with the time-out that exceeds Association.Max.Retrans (RFC 9260 8.1).
func TestGivesUp(t *testing.T) {
	for _, most := range []int{1, 3, 10} {
		r := listening(t, Config{MaxAssoc: most})
		r.push(1000)
		for range 2000 {
			r.take()
			if r.a.State() == Closed {
				break
			}
			r.wait(time.Second)
		}
		if got := r.a.Stats().Timeouts; r.a.State() != Closed || r.a.Err() != ErrTimeout || got != uint64(most)+1 {
			t.Errorf("at most %d: %v after %d time-outs, %v", most, r.a.State(), got, r.a.Err())
		}
	}
}

// TestForgedHeartbeatAck checks that only the random number of its HEARTBEAT confirms a path (RFC 9260 5.4).
func TestForgedHeartbeatAck(t *testing.T) {
	r := manyHomed(t, Config{}, 3)
	for range 100 {
		if r.a.paths[1].beat != beatIdle {
			break
		}
		r.take()
		r.wait(100 * time.Millisecond)
	}
	p := &r.a.paths[1]
	if p.beat == beatIdle || p.confirmed {
		t.Fatalf("no HEARTBEAT is out: %+v", r.a.Path(1))
	}
	ack := func(nonce uint64) {
		body := be.AppendUint64(be.AppendUint64(be.AppendUint32(nil, 1), 0), nonce)
		r.a.heartbeatAck(r.now, appendParam(nil, paramHeartbeatInfo, body))
	}
	for _, d := range []uint64{1, 1 << 63, 1 << 32} {
		if ack(p.hbNonce ^ d); p.confirmed {
			t.Fatal("confirmed by another number")
		}
	}
	if ack(p.hbNonce); !p.confirmed {
		t.Error("not confirmed")
	}
}

// TestInitAlone checks that an INIT is alone in its packet, with tag zero (RFC 9260 8.5.1).
func TestInitAlone(t *testing.T) {
	r := listening(t, Config{})
	for _, tc := range []struct {
		tag  uint32
		more bool
		want bool
	}{{0, false, true}, {0, true, false}, {r.a.tag, false, false}} {
		if got := r.a.tagOK(&Header{Tag: tc.tag}, &Chunk{Type: ChunkInit}, tc.more); got != tc.want {
			t.Errorf("tag %#x, others behind it %v: %v", tc.tag, tc.more, got)
		}
	}
}
