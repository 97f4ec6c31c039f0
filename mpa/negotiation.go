package mpa

import (
	"encoding/binary"

	"github.com/iwarpd/iwarpd/internal/term"
)

// NoNegotiation is the value of IRD or ORD that leaves the depth to the ULPs (RFC 6581 section 9.1). Every negotiated depth is smaller.
const NoNegotiation = 0x3FFF

// RTR is a kind of ready-to-receive indication, which the initiator of a peer-to-peer connection sends first (RFC 6581 section 9.2).
type RTR uint8

// Kinds of RTR. Each is a bit, so that they can be combined in an RTRs.
const (
	RTRNone  RTR = 0
	RTRSend  RTR = 1 << 0 // flag B: zero-length Send
	RTRWrite RTR = 1 << 1 // flag C: zero-length RDMA Write
	RTRRead  RTR = 1 << 2 // flag D: zero-length RDMA Read
)

// String returns the name of the kind.
func (r RTR) String() string {
	switch r {
	case RTRNone:
		return "none"
	case RTRSend:
		return "send"
	case RTRWrite:
		return "write"
	case RTRRead:
		return "read"
	}
	return "invalid"
}

// RTRs is a set of kinds of RTR.
type RTRs uint8

// AllRTRs is the set of all kinds.
const AllRTRs = RTRs(RTRSend | RTRWrite | RTRRead)

// Has reports whether r is in s.
func (s RTRs) Has(r RTR) bool { return r != RTRNone && s&RTRs(r) == RTRs(r) }

// prefer returns one kind of the set, or RTRNone if it is empty. A Write costs the peer nothing, a Read takes an entry of its IRRQ, and a
// Send is supported by the fewest peers.
func (s RTRs) prefer() RTR {
	for _, r := range [...]RTR{RTRWrite, RTRRead, RTRSend} {
		if s.Has(r) {
			return r
		}
	}
	return RTRNone
}

// EnhancedData is the enhanced RDMA connection establishment data of RFC 6581
// section 9. It begins the Private Data of an MPA startup frame with S set, and
// of an enhanced session control chunk over SCTP.
type EnhancedData struct {
	IRD, ORD uint16 // 14 bits each; NoNegotiation leaves the depth to the ULPs
	P2P      bool   // A
	RTR      RTRs   // B, C, D; empty if A is clear
}

// Control flags: A and B above IRD, C and D above ORD (RFC 6581 section 9).
const (
	ctrlA     = 1 << 31
	ctrlB     = 1 << 30
	ctrlC     = 1 << 15
	ctrlD     = 1 << 14
	ctrlDepth = 0x3FFF
)

// ctrlFlags has the control flag of each kind of RTR.
var ctrlFlags = [...]struct {
	kind RTR
	flag uint32
}{{RTRSend, ctrlB}, {RTRWrite, ctrlC}, {RTRRead, ctrlD}}

// Validate reports ErrDepth if IRD or ORD does not fit in 14 bits.
func (d *EnhancedData) Validate() error {
	if d.IRD > ctrlDepth || d.ORD > ctrlDepth {
		return ErrDepth
	}
	return nil
}

// Append appends d, which must be valid, to dst: EnhancedLen bytes.
func (d *EnhancedData) Append(dst []byte) []byte {
	w := uint32(d.IRD&ctrlDepth)<<16 | uint32(d.ORD&ctrlDepth)
	if d.P2P { // otherwise B, C and D are zero too (RFC 6581 section 9.2)
		w |= ctrlA
		for _, f := range ctrlFlags {
			if d.RTR.Has(f.kind) {
				w |= f.flag
			}
		}
	}
	return binary.BigEndian.AppendUint32(dst, w)
}

// Decode reads d from the front of b. It returns ErrEnhancedData if b has fewer than EnhancedLen bytes.
func (d *EnhancedData) Decode(b []byte) error {
	if len(b) < EnhancedLen {
		return ErrEnhancedData
	}
	w := binary.BigEndian.Uint32(b)
	*d = EnhancedData{IRD: uint16(w>>16) & ctrlDepth, ORD: uint16(w) & ctrlDepth, P2P: w&ctrlA != 0}
	if d.P2P { // otherwise B, C and D are ignored (RFC 6581 section 9.2)
		for _, f := range ctrlFlags {
			if w&f.flag != 0 {
				d.RTR |= RTRs(f.kind)
			}
		}
	}
	return nil
}

// Negotiation negotiates IRD, ORD and the kind of RTR on one side of a connection (RFC 6581 sections 4 to 9). It handles EnhancedData only:
// Startup carries them in MPA frames, package session in session control chunks over SCTP. A nil EnhancedData means unenhanced connection
// setup, which negotiates nothing: each side uses the depths of its Config.
//
// The initiator calls Request, then HandleAccept or HandleReject with the responder's answer. The responder calls HandleRequest, then
// Accept or Reject, and sends the result. Peer and Apply return the outcome.
type Negotiation struct {
	cfg      *Config
	enhanced bool         // the peer has sent enhanced data
	peer     EnhancedData // its data
	sent     EnhancedData // our data, if we are the initiator
	ird, ord int          // depths of this side
	rtr      RTR          // the kind of RTR in use
}

// NewNegotiation returns the negotiation of one connection. cfg must be valid and must not change until the negotiation is over.
func NewNegotiation(cfg *Config) Negotiation {
	return Negotiation{cfg: cfg, ird: cfg.IRD, ord: cfg.ORD}
}

// Request returns the data of the initiator's request, or nil if cfg is unenhanced.
func (n *Negotiation) Request() *EnhancedData {
	if !n.cfg.Enhanced {
		return nil
	}
	d := EnhancedData{IRD: uint16(n.cfg.IRD), ORD: uint16(n.cfg.ORD)}
	if n.cfg.P2P {
		d.P2P, d.RTR = true, n.cfg.rtrs()
	}
	n.sent = d
	return &d
}

// HandleRequest processes the data of the initiator's request.
func (n *Negotiation) HandleRequest(d *EnhancedData) { n.setPeer(d) }

// Accept returns the data of the responder's accepting answer, or nil if the request was unenhanced. ird and ord are the ULP's depths. A
// negative depth means what the initiator asks for, its ORD or IRD, up to the Config's MaxIRD or MaxORD, or the Config's depth if the
// initiator does not negotiate. The ULP's ORD is limited to the initiator's IRD. On error, ErrDepth, nothing changes.
func (n *Negotiation) Accept(ird, ord int) (*EnhancedData, error) {
	c := n.cfg
	if ird < 0 {
		ird = n.asked(n.peer.ORD, c.IRD, c.MaxIRD)
	}
	if ord < 0 {
		ord = n.asked(n.peer.IRD, c.ORD, c.MaxORD)
	}
	if !validDepth(ird) || !validDepth(ord) {
		return nil, ErrDepth
	}
	n.ird, n.ord = ird, ord
	if !n.enhanced {
		return nil, nil
	}
	d := n.answer()
	n.rtr = d.RTR.prefer()
	if n.rtr == RTRRead {
		n.ird = max(n.ird, 1) // the RTR needs an entry (RFC 6581 section 9.1)
	}
	n.ord = min(n.ord, int(n.peer.IRD)) // NoNegotiation exceeds every depth
	d.IRD, d.ORD = uint16(n.ird), uint16(n.ord)
	if n.peer.ORD == NoNegotiation {
		d.IRD = NoNegotiation
	}
	if n.peer.IRD == NoNegotiation {
		d.ORD = NoNegotiation
	}
	return d, nil
}

// Reject returns the data of the responder's rejecting answer, or nil if the request was unenhanced. Its depths are those of the Config,
// which the ULP would have needed.
func (n *Negotiation) Reject() *EnhancedData {
	if !n.enhanced {
		return nil
	}
	d := n.answer()
	d.IRD, d.ORD = uint16(n.cfg.IRD), uint16(n.cfg.ORD)
	return d
}

// HandleAccept processes the data of an accepting answer. It returns an *Error with a Terminate for the peer, ErrIRD or ErrRTR, if this
// side cannot meet the responder's needs (RFC 6581 sections 9.1 and 9.2).
func (n *Negotiation) HandleAccept(d *EnhancedData) *Error {
	n.setPeer(d)
	if !n.enhanced {
		return nil
	}
	n.ord = min(n.ord, int(d.IRD)) // NoNegotiation exceeds every depth
	if need := int(d.ORD); need > n.ird && need != NoNegotiation {
		if need > n.cfg.MaxIRD {
			return &Error{Cause: ErrIRD, Term: term.ErrMPAIRD, Terminate: true}
		}
		n.ird = need
	}
	if !n.sent.P2P {
		return nil // we asked for no RTR, so the answer's kinds have no meaning
	}
	// An answer without A has no kinds either: the connection models do not match, which is the same error.
	kinds := d.RTR & n.sent.RTR
	if d.IRD == 0 {
		kinds &^= RTRs(RTRRead) // it would exceed the peer's IRRQ
	}
	if n.rtr = kinds.prefer(); n.rtr == RTRNone {
		return &Error{Cause: ErrRTR, Term: term.ErrMPARTR, Terminate: true}
	}
	return nil
}

// HandleReject processes the data of a rejecting answer, which are for the ULP.
func (n *Negotiation) HandleReject(d *EnhancedData) { n.setPeer(d) }

// Peer returns the peer's data, or nil. Both ULPs must see them (RFC 6581 section 9.1).
func (n *Negotiation) Peer() *EnhancedData {
	if !n.enhanced {
		return nil
	}
	return &n.peer
}

// Apply stores the outcome in p: Enhanced, IRD, ORD and RTR.
func (n *Negotiation) Apply(p *Params) {
	p.Enhanced, p.IRD, p.ORD, p.RTR = n.enhanced, n.ird, n.ord, n.rtr
}

func (n *Negotiation) setPeer(d *EnhancedData) {
	if d != nil {
		n.enhanced, n.peer = true, *d
	}
}

// asked returns the depth that the initiator asks for, at most limit, or def if it does not negotiate.
func (n *Negotiation) asked(depth uint16, def, limit int) int {
	if !n.enhanced || depth == NoNegotiation {
		return def
	}
	return min(int(depth), max(def, limit))
}

// answer returns the data of an answer except the depths: A as in the request and, with A, one kind of RTR, so that both sides know which
// one is used. It prefers a kind that the initiator offers to another one that we support (RFC 6581 section 9.2).
func (n *Negotiation) answer() *EnhancedData {
	if !n.peer.P2P {
		return &EnhancedData{}
	}
	kind := (n.peer.RTR & n.cfg.rtrs()).prefer()
	if kind == RTRNone {
		kind = n.cfg.rtrs().prefer()
	}
	return &EnhancedData{P2P: true, RTR: RTRs(kind)}
}
