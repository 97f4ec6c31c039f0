package dataplane

import (
	"net/netip"
	"testing"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
)

// conns runs a script for connections over TCP: pairs of an operation and its argument.
func (f *fuzzLives) conns(in []byte, flags byte) {
	port := uint16(40000)
	for n := 0; len(in) >= 2 && n < 300; n++ {
		op, arg := in[0], in[1]
		in = in[2:]
		host := int(op >> 4 & 1)
		h := f.hosts[host]
		s, q := f.some(host, arg)
		switch op & 15 {
		case 0, 1:
			port++
			flow := pkt.NewFlow(netip.AddrPortFrom(addrA, port), netip.AddrPortFrom(addrB, 7174))
			_ = f.connectTo(f.hosts[0].w.newID(), flow)
		case 8, 9:
			if len(f.asked[host]) == 0 {
				break
			}
			id := f.asked[host][0]
			f.asked[host] = f.asked[host][1:]
			p := mpa.Params{Initiator: host == 0, CRC: flags&fuzzDraft != 0, IRD: 2, ORD: 2}
			p.SendMarkers, p.RecvMarkers = flags&fuzzUDP != 0, flags&fuzzUDP != 0
			if arg&3 == 3 {
				p.RTR = mpa.RTRSend
			}
			h.w.attach(id, h.w.streams[id], Attachment{QP: &f.qp(host, id).QPBinding, Params: p})
		case 11:
			f.store()
		case 12:
			if s != nil && !s.lane.gone {
				hop := Hop{SrcMAC: macA, DstMAC: macB, MTU: 600 + 8*int(arg), Found: arg&1 != 0}
				s.lane.llp.setHop(h.w, s.lane.key.Flow.Remote, &hop)
			}
		case 13:
			if s != nil && q != nil && s.qp == &q.QPBinding {
				q.left = q.left || q.far != nil
				s.detach(h.w)
			} else if c := streamOf(s); c != nil {
				c.streamSend(h.w, make([]byte, 1+int(arg)))
			}
		case 14:
			if c := streamOf(s); c != nil {
				c.streamConsumed(h.w, int(arg))
			}
		default:
			f.common(op, arg, h, s, q)
		}
		f.turn()
	}
}

// some returns a connection of a host, and its queue pair if it has one.
func (f *fuzzLives) some(host int, arg byte) (*stream, *fuzzQP) {
	for i := range f.qps {
		if q := f.qps[(i+int(arg))%len(f.qps)]; q.h == f.hosts[host] {
			return q.h.w.streams[q.id], q
		}
	}
	for _, id := range f.asked[host] {
		return f.hosts[host].w.streams[id], nil
	}
	return nil, nil
}

// FuzzConns runs a script of two hosts with TCP connections, or of one with both ends. Everything must be returned at
// the end, and every work request complete once. fuzzDraft and fuzzUDP stand for CRC and markers.
func FuzzConns(f *testing.F) {
	f.Add([]byte{1, 0, 0, 15, 9, 8, 0, 0x18, 0, 15, 9, 2, 0x48, 0x12, 0xf9, 15, 20, 6, 0})
	f.Add([]byte{0x11, 0, 0, 15, 9, 8, 3, 0x18, 3, 15, 9, 2, 0xf8, 7, 0, 15, 20})
	f.Add([]byte{0x0d, 0, 0, 15, 9, 8, 0, 0x18, 0, 15, 9, 2, 0xf9, 15, 9, 0x1d, 0, 15, 9, 11, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) == 0 || len(in) > 2000 {
			return
		}
		runConns(t, in)
	})
}

func runConns(t *testing.T, in []byte) {
	withinHost.on = in[0]&fuzzHost != 0
	defer func() { withinHost.on = false }()
	f := newFuzzLives(t, in[0])
	b := f.hosts[1].w
	b.turn()
	listen(t, b, 1, &ListenRequest{Local: netip.AddrPortFrom(addrB, 7174), Backlog: 8})
	f.conns(in[1:], in[0])
	f.finish()
}

// TestConnsRandom runs FuzzConns on random bytes.
func TestConnsRandom(t *testing.T) {
	oneGoroutine(t)
	testenv.Scripts(t, 100, 600, runConns)
}
