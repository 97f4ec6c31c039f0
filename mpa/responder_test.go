package mpa

import (
	"errors"
	"testing"

	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

func TestResponderReply(t *testing.T) {
	const send, write, read = RTRs(RTRSend), RTRs(RTRWrite), RTRs(RTRRead)
	for _, tt := range []struct {
		name   string
		cfg    func(*Config)
		req    Frame
		answer func(*Startup) error
		want   Frame
	}{
		{"accept, revision 1", same, Frame{Rev: 1}, accept,
			Frame{Reply: true, CRC: true, Rev: 1, PrivateData: []byte("yes")}},
		{"reject, revision 1", same, Frame{Rev: 1}, reject,
			Frame{Reply: true, Reject: true, CRC: true, Rev: 1, PrivateData: []byte("no")}},
		{"R in the request is not echoed", same, Frame{Rev: 1, Reject: true}, accept,
			Frame{Reply: true, CRC: true, Rev: 1, PrivateData: []byte("yes")}},
		{"C of the request is echoed", func(c *Config) { c.CRC = false }, Frame{Rev: 1, CRC: true}, accept,
			Frame{Reply: true, CRC: true, Rev: 1, PrivateData: []byte("yes")}},
		{"M is our own wish", same, Frame{Rev: 1, Markers: true}, accept,
			Frame{Reply: true, CRC: true, Rev: 1, PrivateData: []byte("yes")}},
		{"accept, enhanced", same, Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 4, ORD: 5}}, accept,
			Frame{Reply: true, CRC: true, Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 5, ORD: 4}, PrivateData: []byte("yes")}},
		{"accept, enhanced, all zero", func(c *Config) { c.IRD, c.ORD = 0, 0 }, Frame{Rev: 2, Enhanced: true}, accept,
			Frame{Reply: true, CRC: true, Rev: 2, Enhanced: true, PrivateData: []byte("yes")}},
		{"reject, enhanced: the depths needed", func(c *Config) { c.ORD = 40 }, Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 4, ORD: 5}}, reject,
			Frame{Reply: true, Reject: true, CRC: true, Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 16, ORD: 40}, PrivateData: []byte("no")}},
		{"initiator's ORD is left to the ULPs", same, Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 4, ORD: NoNegotiation}}, accept,
			Frame{Reply: true, CRC: true, Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: NoNegotiation, ORD: 4}, PrivateData: []byte("yes")}},
		{"initiator's IRD is left to the ULPs", same, Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: NoNegotiation, ORD: 4}}, accept,
			Frame{Reply: true, CRC: true, Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 4, ORD: NoNegotiation}, PrivateData: []byte("yes")}},
		{"peer to peer is echoed, one kind", same, Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 16, ORD: 16, P2P: true, RTR: read | write}}, accept,
			Frame{Reply: true, CRC: true, Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 16, ORD: 16, P2P: true, RTR: write}, PrivateData: []byte("yes")}},
		{"peer to peer, rejected", same, Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 16, ORD: 16, P2P: true, RTR: read}}, reject,
			Frame{Reply: true, Reject: true, CRC: true, Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 16, ORD: 16, P2P: true, RTR: read}, PrivateData: []byte("no")}},
		{"no kind in common: one of ours", func(c *Config) { c.RTR = read }, Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 16, ORD: 16, P2P: true, RTR: send}}, accept,
			Frame{Reply: true, CRC: true, Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 16, ORD: 16, P2P: true, RTR: read}, PrivateData: []byte("yes")}},
		{"no kind offered: one of ours", same, Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 16, ORD: 16, P2P: true}}, accept,
			Frame{Reply: true, CRC: true, Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 16, ORD: 16, P2P: true, RTR: write}, PrivateData: []byte("yes")}},
		{"IRD raised for a Read", func(c *Config) { c.IRD = 0 }, Frame{Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 16, P2P: true, RTR: read}}, accept,
			Frame{Reply: true, CRC: true, Rev: 2, Enhanced: true, EnhancedData: EnhancedData{IRD: 1, ORD: 16, P2P: true, RTR: read}, PrivateData: []byte("yes")}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := replyTo(t, with(tt.cfg), tt.req, tt.answer); !sameFrame(got, tt.want) {
				t.Errorf("reply %+v\nwant  %+v", got, tt.want)
			}
		})
	}
}

func TestRequestRejectFlag(t *testing.T) {
	s := NewResponder(DefaultConfig(), t0)
	give(t, s, testenv.Unhex(t, hexReq+"60010000"))
	if ev := event(t, s, EventRequest); ev.Frame.Reject {
		t.Error("the ULP sees R in a request")
	}
}

// TestResponderErrors checks that an invalid Request ends the connection without a Reply.
func TestResponderErrors(t *testing.T) {
	for _, tt := range []struct {
		name  string
		cfg   func(*Config)
		wire  string
		cause error
	}{
		{"an HTTP client", same, hexOf("GET / HTTP/1.1\r\n\r\n"), ErrKey},
		{"one wrong byte is enough", same, hexOf("X"), ErrKey},
		{"responder against responder", same, hexRep + "40010000", ErrBothResponders},
		{"513 bytes of private data", same, hexReq + "40010201", ErrPDLength},
		{"S without enhanced data", same, hexReq + "50020000", ErrEnhancedData},
		{"revision 0", same, hexReq + "c0000000", ErrRevision},
		{"revision 3", same, hexReq + "4003000400010001", ErrRevision},
		{"revision 2 for a revision-1 responder", func(c *Config) { c.Rev, c.Enhanced = 1, false }, hexReq + "5002000400010001", ErrRevision},
		{"S for an unenhanced responder", func(c *Config) { c.Enhanced = false }, hexReq + "5002000400010001", ErrNotEnhanced},
		{"bytes behind the request", same, hexReq + "4001000000", ErrTrailing},
		{"an FPDU behind the request", same, hexReq + "5002000400010001" + "0000000000000000", ErrTrailing},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := NewResponder(with(tt.cfg), t0)
			wire := testenv.Unhex(t, tt.wire)
			n, err := s.HandleStream(t0, wire)
			if n > len(wire) || n > maxFrameLen {
				t.Errorf("consumed %d of %d", n, len(wire))
			}
			checkFailed(t, s, err, tt.cause, term.ErrMPAFrame, false, RetryNone)
			if b, ok := s.PollTransmit(); ok {
				t.Errorf("sends %x", b)
			}
		})
	}
}

func TestAnswerMisuse(t *testing.T) {
	s := NewResponder(DefaultConfig(), t0)
	if err := s.Accept(nil, -1, -1); err != ErrState {
		t.Errorf("Accept before the request: %v", err)
	}
	if err := s.Reject(nil); err != ErrState {
		t.Errorf("Reject before the request: %v", err)
	}
	give(t, s, testenv.Unhex(t, hexReq+"5002000400010001"))
	event(t, s, EventRequest)
	for _, tt := range []struct {
		name string
		err  error
		do   func() error
	}{
		{"Accept with 509 bytes", ErrPrivateData, func() error { return s.Accept(make([]byte, 509), -1, -1) }},
		{"Reject with 509 bytes", ErrPrivateData, func() error { return s.Reject(make([]byte, 509)) }},
		{"Accept with an IRD of 0x3fff", ErrDepth, func() error { return s.Accept(nil, NoNegotiation, 0) }},
		{"Accept with an ORD of 0x3fff", ErrDepth, func() error { return s.Accept(nil, 0, NoNegotiation) }},
		{"Accept", nil, func() error { return s.Accept(make([]byte, 508), 0, 0) }},
		{"Accept again", ErrState, func() error { return s.Accept(nil, 0, 0) }},
		{"Reject after Accept", ErrState, func() error { return s.Reject(nil) }},
	} {
		if err := tt.do(); !errors.Is(err, tt.err) {
			t.Errorf("%s: %v; want %v", tt.name, err, tt.err)
		}
	}
	// With enhanced data there is room for 508 bytes of private data, without it for 512.
	for wire, most := range map[string]int{hexReq + "5002000400010001": 508, hexReq + "40010000": 512} {
		s := NewResponder(DefaultConfig(), t0)
		give(t, s, testenv.Unhex(t, wire))
		event(t, s, EventRequest)
		if err := s.Reject(make([]byte, most+1)); !errors.Is(err, ErrPrivateData) {
			t.Errorf("Reject with %d bytes: %v; want %v", most+1, err, ErrPrivateData)
		}
		if err := s.Accept(make([]byte, most+1), -1, -1); !errors.Is(err, ErrPrivateData) {
			t.Errorf("Accept with %d bytes: %v; want %v", most+1, err, ErrPrivateData)
		}
		if err := s.Accept(make([]byte, most), -1, -1); err != nil {
			t.Errorf("Accept with %d bytes: %v", most, err)
		}
	}
	i := NewInitiator(DefaultConfig(), t0)
	if err := i.Accept(nil, -1, -1); err != ErrState {
		t.Errorf("Accept by the initiator: %v", err)
	}
}
