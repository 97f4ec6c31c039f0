package ctrl

import (
	"encoding/hex"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/sctp"
	ddp "github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/tcp"
)

// setup returns a session control message with enhanced data of four bytes in hex; "":
// an unenhanced one.
func setup(t *testing.T, word, private string) *ddp.Setup {
	t.Helper()
	set := &ddp.Setup{Private: []byte(private)}
	if word != "" {
		b, err := hex.DecodeString(word)
		if err != nil {
			t.Fatal(err)
		}
		set.Enhanced = &mpa.EnhancedData{}
		if err := set.Enhanced.Decode(b); err != nil {
			t.Fatal(err)
		}
	}
	return set
}

func wordOf(set *ddp.Setup) string {
	if set == nil || set.Enhanced == nil {
		return ""
	}
	return hex.EncodeToString(set.Enhanced.Append(nil))
}

// depthsText formats the peer's depths as a client sees them.
func depthsText(ird, ord *uint32) string {
	if ird == nil || ord == nil {
		return "none"
	}
	return hex.EncodeToString([]byte{byte(*ird >> 8), byte(*ird), byte(*ord >> 8), byte(*ord)})
}

// TestSCTPResponder checks what the client may accept or reject, and the golden bytes of the answer to the Initiate
// (RFC 6581 sections 7, 9.1 and 9.2).
func TestSCTPResponder(t *testing.T) {
	h := newHarness(t, Config{})
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 7174), peerA)
	for _, tt := range []struct {
		name           string
		startup        *ctrlpb.Startup
		request        string
		accept, reject string
		params         mpa.Params
	}{
		{"unenhanced", nil, "", "", "", mpa.Params{CRC: true, Rev: 1, IRD: 16, ORD: 16}},
		{"as asked", nil, "00040005", "00050004", "00100010", mpa.Params{IRD: 5, ORD: 4}},
		{"more than the default", nil, "00200040", "00400020", "00100010", mpa.Params{IRD: 64, ORD: 32}},
		{"more than the limit", nil, "01000100", "00800080", "00100010", mpa.Params{IRD: 128, ORD: 128}},
		{"more than Listen named", &ctrlpb.Startup{Ird: proto.Uint32(3), Ord: proto.Uint32(2)}, "00200040", "00030002", "00030002", mpa.Params{IRD: 3, ORD: 2}},
		{"0x3fff", nil, "3fff3fff", "3fff3fff", "00100010", mpa.Params{IRD: 16, ORD: 16}},
		{"0x3fff for ORD", nil, "00043fff", "3fff0004", "00100010", mpa.Params{IRD: 16, ORD: 4}},
		{"Send", nil, "c0040005", "c0050004", "c0100010", mpa.Params{IRD: 5, ORD: 4, RTR: mpa.RTRSend}},
		{"Read and Send", nil, "c0044005", "80054004", "80104010", mpa.Params{IRD: 5, ORD: 4, RTR: mpa.RTRRead}},
		{"Write", nil, "80048005", "80058004", "80108010", mpa.Params{IRD: 5, ORD: 4, RTR: mpa.RTRWrite}},
		{"B, C, D without A", nil, "4004c005", "00050004", "00100010", mpa.Params{IRD: 5, ORD: 4}},
	} {
		for _, reject := range []bool{false, true} {
			c := h.hello(t)
			req := reqListenSCTP()
			if tt.startup != nil {
				tt.startup.Transport = ctrlpb.Transport_TRANSPORT_SCTP
				req.GetListen().Startup = tt.startup
			}
			l := c.ok(req).GetListen().Listen
			h.e.mu.Lock()
			var lid dataplane.ListenerID
			for lid = range h.e.listens {
			}
			id := h.e.add(netip.AddrPortFrom(addrA, 7174), peerA)
			h.e.mu.Unlock()
			h.OnEvent(dataplane.Event{Kind: dataplane.EventRequest, Conn: id, Listener: lid, Flow: flow, Setup: setup(t, tt.request, "may I")})
			ask := c.event().GetConnectRequest()
			if d := setup(t, tt.request, "").Enhanced; d != nil && (ask.GetIrd() != uint32(d.IRD) || ask.GetOrd() != uint32(d.ORD) || ask.GetP2P() != d.P2P) {
				t.Errorf("%s: the client sees %v", tt.name, ask)
			}
			want := tt.accept
			if reject {
				want = tt.reject
				c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Reject{Reject: &ctrlpb.Reject{Conn: ask.GetConn(), PrivateData: []byte("so")}}})
			} else {
				c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: &ctrlpb.Accept{Conn: ask.GetConn(), Qp: c.qp(), PrivateData: []byte("so")}}})
			}
			h.e.await(t, "answer")
			h.e.with(id, func(fc *fakeConn) {
				if wordOf(fc.answer) != want || string(fc.answer.Private) != "so" {
					t.Errorf("%s, reject %v: answered by %q %q, want %q", tt.name, reject, wordOf(fc.answer), fc.answer.Private, want)
				}
				p := tt.params
				if p.CRC = true; tt.request != "" {
					p.Rev, p.Enhanced = 2, true
				}
				if !reject && fc.attached.Params != p {
					t.Errorf("%s: runs with %+v, want %+v", tt.name, fc.attached.Params, p)
				}
			})
			if !reject {
				h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: id})
				if e := c.event().GetEstablished(); e == nil || depthsText(e.PeerIrd, e.PeerOrd) != noFlags(tt.request) {
					t.Errorf("%s: established: %v", tt.name, e)
				}
				h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: id})
			}
			c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l}}})
			h.leave(t, c)
		}
	}
}

// noFlags returns the depths of enhanced data in the form of depthsText.
func noFlags(word string) string {
	b, _ := hex.DecodeString(word)
	if len(b) == 0 {
		return "none"
	}
	b[0] &= 0x3f
	b[2] &= 0x3f
	return hex.EncodeToString(b)
}

// TestSCTPInitiator checks the content of the Initiate and the effect of the answer. The peer's depths reach the
// client, also those of a rejection (RFC 6581 section 9.1).
func TestSCTPInitiator(t *testing.T) {
	h := newHarness(t, Config{Startup: StartupDefaults{IRD: 16, ORD: 16, MaxIRD: 32}})
	p2p := &ctrlpb.Startup{P2P: proto.Bool(true)}
	for _, tt := range []struct {
		name            string
		startup         *ctrlpb.Startup
		request, answer string
		reject          bool
		params          mpa.Params
		fail            *term.Error
	}{
		{"granted", &ctrlpb.Startup{}, "00100010", "00100010", false, mpa.Params{IRD: 16, ORD: 16}, nil},
		{"ORD lowered", &ctrlpb.Startup{}, "00100010", "00050010", false, mpa.Params{IRD: 16, ORD: 5}, nil},
		{"IRD raised", &ctrlpb.Startup{}, "00100010", "00050020", false, mpa.Params{IRD: 32, ORD: 5}, nil},
		{"responder's ORD above all", &ctrlpb.Startup{}, "00100010", "00050021", false, mpa.Params{IRD: 16, ORD: 5}, term.ErrMPAIRD},
		{"0x3fff", &ctrlpb.Startup{}, "00100010", "3fff3fff", false, mpa.Params{IRD: 16, ORD: 16}, nil},
		{"Send", p2p, "c010c010", "c0100010", false, mpa.Params{IRD: 16, ORD: 16, RTR: mpa.RTRSend}, nil},
		{"all kinds", p2p, "c010c010", "c010c010", false, mpa.Params{IRD: 16, ORD: 16, RTR: mpa.RTRWrite}, nil},
		{"no kind", p2p, "c010c010", "80100010", false, mpa.Params{IRD: 16, ORD: 16}, term.ErrMPARTR},
		{"A not answered", p2p, "c010c010", "00100010", false, mpa.Params{IRD: 16, ORD: 16}, term.ErrMPARTR},
		{"a peer of RFC 5043 alone", p2p, "c010c010", "", false, mpa.Params{Rev: 1, IRD: 16, ORD: 16}, nil},
		{"revision 1", &ctrlpb.Startup{Revision: proto.Uint32(1)}, "", "", false, mpa.Params{Rev: 1, IRD: 16, ORD: 16}, nil},
		{"the draft", &ctrlpb.Startup{Transport: ctrlpb.Transport_TRANSPORT_SCTP_DRAFT}, "", "", false, mpa.Params{Rev: 1, IRD: 16, ORD: 16}, nil},
		{"rejected", &ctrlpb.Startup{}, "00100010", "00070009", true, mpa.Params{}, nil},
		{"rejected, 0x3fff", p2p, "c010c010", "bfffffff", true, mpa.Params{}, nil},
		{"rejected, unenhanced", &ctrlpb.Startup{}, "00100010", "", true, mpa.Params{}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := h.hello(t)
			req := reqConnect(c.qp(), peerA.String())
			req.GetConnect().Startup = proto.Clone(tt.startup).(*ctrlpb.Startup)
			if req.GetConnect().Startup.Transport == ctrlpb.Transport_TRANSPORT_TCP {
				req.GetConnect().Startup.Transport = ctrlpb.Transport_TRANSPORT_SCTP
			}
			c.ok(req)
			h.awaitDialed(t)
			id, fc := h.e.only(t, peerA)
			if got := wordOf(&fc.asked); got != tt.request {
				t.Errorf("asks %q, want %q", got, tt.request)
			}
			ev := dataplane.Event{Kind: dataplane.EventAnswer, Conn: id, Setup: setup(t, tt.answer, "so")}
			if tt.reject {
				ev.Kind = dataplane.EventRejected
			}
			h.OnEvent(ev)
			if tt.reject {
				r := c.event().GetRejected()
				if r == nil || depthsText(r.PeerIrd, r.PeerOrd) != noFlags(tt.answer) || string(r.PrivateData) != "so" {
					t.Errorf("rejected: %v", r)
				}
				h.e.with(id, func(fc *fakeConn) { fc.ended = true })
				return
			}
			h.e.await(t, "attach")
			want := tt.params
			if want.CRC, want.Initiator = true, true; want.Rev == 0 {
				want.Rev, want.Enhanced = 2, true
			}
			h.e.with(id, func(fc *fakeConn) {
				if fc.attached.Params != want || fc.attached.Fail != tt.fail {
					t.Errorf("attached with %+v, %v\nwant          %+v, %v", fc.attached.Params, fc.attached.Fail, want, tt.fail)
				}
				fc.ended = true
			})
			if tt.fail != nil {
				h.OnEvent(dataplane.Event{Kind: dataplane.EventFailed, Conn: id, Err: tt.fail})
				h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: id})
				if e := c.event().GetConnectFailed(); e.GetError().GetCode() != ctrlpb.Code_CODE_PROTOCOL || !strings.Contains(e.GetError().GetText(), "responder") {
					t.Errorf("failed: %v", e)
				}
				return
			}
			h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: id})
			e := c.event().GetEstablished()
			if e == nil || depthsText(e.PeerIrd, e.PeerOrd) != noFlags(tt.answer) || e.Negotiated.GetIrd() != uint32(want.IRD) || e.Negotiated.GetOrd() != uint32(want.ORD) {
				t.Errorf("established: %v", e)
			}
		})
	}
}

// TestPeerDepths checks that over TCP too the peer's depths reach the initiator's client.
func TestPeerDepths(t *testing.T) {
	h := newHarness(t, Config{})
	for _, reject := range []bool{false, true} {
		c := h.hello(t)
		cfg := mpa.DefaultConfig()
		cfg.IRD, cfg.ORD = 7, 9
		p, _ := h.dial(t, c, reqConnect(c.qp(), peerA.String()), cfg)
		if reject {
			p.event(mpa.EventRequest)
			if err := p.st.Reject([]byte("no")); err != nil {
				t.Fatal(err)
			}
			p.send()
			if r := c.event().GetRejected(); r == nil || depthsText(r.PeerIrd, r.PeerOrd) != "00070009" {
				t.Errorf("rejected: %v", r)
			}
			continue
		}
		p.accept("", 7, 9)
		p.attached()
		h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
		if e := c.event().GetEstablished(); e == nil || depthsText(e.PeerIrd, e.PeerOrd) != "00070009" {
			t.Errorf("established: %v", e)
		}
		h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id})
		c.event()
		h.e.with(p.id, func(fc *fakeConn) { fc.ended = true })
	}
}

// TestSCTPNegotiateReported checks that a Negotiate of the draft reaches the client of its listener or connect, and
// that a peer that sends many cannot get the client disconnected.
func TestSCTPNegotiateReported(t *testing.T) {
	h, c := newClient(t, Config{})
	draft := &ctrlpb.Startup{Transport: ctrlpb.Transport_TRANSPORT_SCTP_DRAFT}
	listen, connect := reqListenSCTP(), reqConnect(c.qp(), peerA.String())
	listen.GetListen().Startup, connect.GetConnect().Startup = draft, draft
	l := c.ok(listen).GetListen().Listen
	c.ok(connect)
	h.awaitDialed(t)
	id, _ := h.e.only(t, peerA)
	h.e.mu.Lock()
	var lid dataplane.ListenerID
	for lid = range h.e.listens {
	}
	h.e.mu.Unlock()
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 7174), peerA)
	ev := dataplane.Event{Kind: dataplane.EventNegotiate, Flow: flow, Setup: setup(t, "", "how about")}
	h.OnEvent(ev) // for a listener that is closed
	for _, to := range []struct {
		conn   dataplane.ConnID
		listen dataplane.ListenerID
	}{{conn: id}, {listen: lid}} {
		ev.Conn, ev.Listener = to.conn, to.listen
		h.OnEvent(ev)
		a := c.event().GetAsyncError()
		if a.GetKind() != ctrlpb.AsyncKind_ASYNC_NEGOTIATE || string(a.PrivateData) != "how about" || a.Remote != peerA.String() {
			t.Fatalf("event %v", a)
		}
		if (to.conn != 0) != (a.Qp == connect.GetConnect().Qp) || (to.listen != 0) != (a.Listen == l) {
			t.Errorf("it is for queue pair %d, listener %d", a.Qp, a.Listen)
		}
	}
	const many = 5000
	for range many {
		h.OnEvent(ev)
	}
	c.heardOfSome(many, func(ev *ctrlpb.Event) bool { return ev.GetAsyncError() != nil })
}

// TestSCTPSetupErrors checks that each failed set-up is reported with its code.
func TestSCTPSetupErrors(t *testing.T) {
	h := newHarness(t, Config{})
	for _, tt := range []struct {
		err  error
		code ctrlpb.Code
	}{
		{ddp.ErrFunction, ctrlpb.Code_CODE_PROTOCOL},
		{dataplane.ErrTimeout, ctrlpb.Code_CODE_TIMEOUT},
		{tcp.ErrTimeout, ctrlpb.Code_CODE_TIMEOUT},
		{tcp.ErrUnreachable, ctrlpb.Code_CODE_UNREACHABLE},
		{tcp.ErrRefused, ctrlpb.Code_CODE_REFUSED},
		{sctp.ErrTimeout, ctrlpb.Code_CODE_TIMEOUT},
		{sctp.ErrUnreachable, ctrlpb.Code_CODE_UNREACHABLE},
		{sctp.ErrProtocol, ctrlpb.Code_CODE_PROTOCOL},
		{sctp.ErrNoSCTP, ctrlpb.Code_CODE_REFUSED},
		{errors.New("ABORT"), ctrlpb.Code_CODE_REFUSED},
		{nil, ctrlpb.Code_CODE_REFUSED},
	} {
		c := h.hello(t)
		req := reqConnect(c.qp(), peerA.String())
		req.GetConnect().Startup = &ctrlpb.Startup{Transport: ctrlpb.Transport_TRANSPORT_SCTP, TimeoutMs: proto.Uint32(2500)}
		c.ok(req)
		h.awaitDialed(t)
		id, fc := h.e.only(t, peerA)
		if fc.sctp.Answer != 2500*time.Millisecond {
			t.Errorf("the answer may take %v", fc.sctp.Answer)
		}
		h.e.with(id, func(fc *fakeConn) { fc.ended = true })
		h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: id, Err: tt.err})
		if e := c.event().GetConnectFailed(); e.GetError().GetCode() != tt.code {
			t.Errorf("connect, %v: %v", tt.err, e)
		}
		l, lid := h.listenSCTP(c)
		h.e.mu.Lock()
		id = h.e.add(netip.AddrPortFrom(addrA, 7174), peerA)
		h.e.mu.Unlock()
		h.OnEvent(dataplane.Event{Kind: dataplane.EventRequest, Conn: id, Listener: lid, Flow: pkt.NewFlow(netip.AddrPortFrom(addrA, 7174), peerA), Setup: &ddp.Setup{}})
		h.e.with(id, func(fc *fakeConn) { fc.ended = true })
		conn := c.event().GetConnectRequest().GetConn()
		h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: id, Err: tt.err})
		if e := c.event().GetConnectGone(); e.GetConn() != conn || e.GetError().GetCode() != tt.code {
			t.Errorf("request, %v: %v", tt.err, e)
		}
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l}}})
		h.leave(t, c)
	}
}
