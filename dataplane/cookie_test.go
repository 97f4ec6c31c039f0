package dataplane

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/tcp"
)

// The segment that answers a SYN cookie may carry data and a FIN, if the ACK before it was lost. The data come before
// the FIN.
func TestCookieWithData(t *testing.T) {
	var answer tcp.Header // of the last frame from b
	s := newSim(t, link.PipeConfig{Filter: func(toB bool, f []byte) bool {
		var p pkt.Packet
		if err := p.Parse(f, len(f)); err != nil {
			t.Fatal(err)
		}
		if _, err := answer.Decode(f[p.L4Off:]); err != nil {
			t.Fatal(err)
		}
		return false
	}})
	h, local := s.hosts[1], netip.AddrPortFrom(addrB, 7174)
	h.w.turn()
	if err := h.w.listen(1, &ListenRequest{Local: local, Backlog: 1}); err != nil {
		t.Fatal(err)
	}
	segment := func(port uint16, hdr tcp.Header, data string) {
		hdr.SrcPort, hdr.DstPort, hdr.Window = port, local.Port(), 1000
		tu := pkt.Tuple{Flow: pkt.NewFlow(netip.AddrPortFrom(addrA, port), local), Proto: pkt.ProtoTCP, SrcMAC: macA, DstMAC: macB}
		l4 := make([]byte, hdr.Len(), hdr.Len()+len(data))
		hdr.Put(l4)
		l4 = append(l4, data...)
		binary.BigEndian.PutUint16(l4[16:], pkt.Checksum(pkt.Sum(l4, tu.PseudoSum(len(l4)))))
		h.w.takes(&tu, l4)
	}
	segment(39999, tcp.Header{Flags: tcp.SYN}, "") // it takes the only place among the half-open
	segment(40000, tcp.Header{Flags: tcp.SYN}, "")
	if h.w.stats.TxStateless != 1 {
		t.Fatal("the answer has no SYN cookie")
	}
	segment(40000, tcp.Header{Flags: tcp.ACK | tcp.FIN, Seq: 1, Ack: answer.Seq + 1}, "some data")
	h.drain()
	ev, ok := h.take(EventData)
	if !ok || string(ev.Data) != "some data" {
		t.Errorf("data %q", ev.Data)
	}
	if _, ok := h.take(EventPeerClosed); !ok || answer.Ack != 11 {
		t.Errorf("peer closed %v, acknowledged %d", ok, answer.Ack)
	}
}
