package tcp

import "testing"

// TestDefaultMSS: without an MSS option of the peer segments hold 536 octets over
// IPv4, and 1220 over IPv6 (RFC 9293 MUST-15).
func TestDefaultMSS(t *testing.T) {
	for v6, want := range map[bool]int{false: 536, true: 1220} {
		for _, mtu := range []int{1500, 9000} {
			cfg := DefaultConfig()
			cfg.NoTimestamps = true
			c := Dial(simStart, &cfg, simFlow(0, v6), 1, mtu)
			var o Out
			for c.PollTransmit(simStart, &o) {
			}
			c.HandleSegment(simStart, &Segment{Header: Header{Seq: 9, Ack: 2, Flags: SYN | ACK, Window: 60000}, Buf: NoBuf})
			if c.State() != Established || c.MSS() != want {
				t.Errorf("IPv6 %v, MTU %d: %v, MSS %d; want %d", v6, mtu, c.State(), c.MSS(), want)
			}
		}
	}
}
