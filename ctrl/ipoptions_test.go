package ctrl

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/mpa"
)

// TestIPOptions checks that the options that a client sets are used, that the others come from the
// configuration, and that values that no header can hold are refused, for connects and listeners.
func TestIPOptions(t *testing.T) {
	h, c := newClient(t, Config{IP: dataplane.IPOptions{DSCP: 10, TTL: 64, Priority: 3}})
	for _, tt := range []struct {
		st   *ctrlpb.Startup
		want dataplane.IPOptions
		fail string
	}{
		{nil, dataplane.IPOptions{DSCP: 10, TTL: 64, Priority: 3}, ""},
		{&ctrlpb.Startup{Dscp: proto.Uint32(63), Ttl: proto.Uint32(1)}, dataplane.IPOptions{DSCP: 63, TTL: 1, Priority: 3}, ""},
		{&ctrlpb.Startup{Dscp: proto.Uint32(0), Ttl: proto.Uint32(255), Priority: proto.Uint32(0)}, dataplane.IPOptions{TTL: 255}, ""},
		{&ctrlpb.Startup{Dscp: proto.Uint32(46), Transport: ctrlpb.Transport_TRANSPORT_SCTP}, dataplane.IPOptions{DSCP: 46, TTL: 64, Priority: 3}, ""},
		{&ctrlpb.Startup{Dscp: proto.Uint32(64)}, dataplane.IPOptions{}, "a DSCP is 0 to 63, not 64"},
		{&ctrlpb.Startup{Ttl: proto.Uint32(0)}, dataplane.IPOptions{}, "a TTL is 1 to 255, not 0"},
		{&ctrlpb.Startup{Ttl: proto.Uint32(256)}, dataplane.IPOptions{}, "a TTL is 1 to 255, not 256"},
		{&ctrlpb.Startup{Priority: proto.Uint32(8)}, dataplane.IPOptions{}, "a VLAN priority is 0 to 7, not 8"},
	} {
		connect, listen := reqConnect(c.qp(), peerA.String()), reqListen("", 0)
		connect.GetConnect().Startup, listen.GetListen().Startup = tt.st, tt.st
		if tt.fail != "" {
			for _, req := range []*ctrlpb.Request{connect, listen} {
				if text := c.fails(ctrlpb.Code_CODE_INVALID, req); !strings.Contains(text, tt.fail) {
					t.Errorf("%v: %s", tt.st, text)
				}
			}
			continue
		}
		c.ok(listen)
		c.ok(connect)
		h.e.await(t, "connect")
		h.e.mu.Lock()
		if h.e.listenIP != tt.want {
			t.Errorf("%v: listens with %+v; want %+v", tt.st, h.e.listenIP, tt.want)
		}
		if h.e.connectIP != tt.want {
			t.Errorf("%v: connects with %+v; want %+v", tt.st, h.e.connectIP, tt.want)
		}
		h.e.mu.Unlock()
	}
}

// TestSetDSCP checks that only an established connection's DSCP changes, and only to what the header
// can hold.
func TestSetDSCP(t *testing.T) {
	h, c := newClient(t, Config{})
	q := c.qp()
	set := func(qp, dscp uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_SetDscp{SetDscp: &ctrlpb.SetDSCP{Qp: qp, Dscp: dscp}}}
	}
	c.fails(ctrlpb.Code_CODE_STATE, set(q, 10))
	p, _ := h.dial(t, c, reqConnect(q, peerA.String()), mpa.DefaultConfig())
	p.accept("", -1, -1)
	c.fails(ctrlpb.Code_CODE_STATE, set(q, 10))
	h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
	if c.event().GetEstablished() == nil {
		t.Fatal("not established")
	}
	for _, dscp := range []uint32{10, 0, 63} {
		c.ok(set(q, dscp))
		h.e.mu.Lock()
		if got, ok := h.e.dscp[p.id]; !ok || uint32(got) != dscp {
			t.Errorf("the engine has %v; want %d", h.e.dscp, dscp)
		}
		h.e.mu.Unlock()
	}
	c.fails(ctrlpb.Code_CODE_INVALID, set(q, 64))
	c.fails(ctrlpb.Code_CODE_NO_OBJECT, set(q+1, 10))
}
