package ctrl

import (
	"errors"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/mpa"
)

// TestStartupSettings checks how the settings of a client change the defaults.
func TestStartupSettings(t *testing.T) {
	no, u32 := proto.Bool(false), proto.Uint32
	old := StartupDefaults{
		Revision: 1, NoP2P: true, Markers: true, RTR: 2, IRD: 3, ORD: 4, MaxIRD: 5, Timeout: time.Second, Accept: time.Minute,
	}
	def := StartupDefaults{}
	for _, tt := range []struct {
		name     string
		defaults StartupDefaults
		w        *ctrlpb.Startup
		want     func(*mpa.Config) // a change of what the defaults give; nil: an error
	}{
		{"nothing", def, nil, func(*mpa.Config) {}},
		{"no CRC", def, &ctrlpb.Startup{Crc: no}, func(c *mpa.Config) { c.CRC = false }},
		{"markers", def, &ctrlpb.Startup{Markers: proto.Bool(true)}, func(c *mpa.Config) { c.Markers = true }},
		{"revision 1", def, &ctrlpb.Startup{Revision: u32(1)}, func(c *mpa.Config) {
			c.Rev, c.Enhanced, c.P2P = 1, false, false
		}},
		{"revision 2", old, &ctrlpb.Startup{Revision: u32(2)}, func(c *mpa.Config) { c.Rev, c.Enhanced = 2, true }},
		{"revision 0", def, &ctrlpb.Startup{Revision: u32(0)}, nil},
		{"revision 3", def, &ctrlpb.Startup{Revision: u32(3)}, nil},
		{"no fallback", def, &ctrlpb.Startup{Fallback: no}, func(c *mpa.Config) {
			c.RetryRev1, c.RetryNoMarkers = false, false
		}},
		{"not peer to peer", def, &ctrlpb.Startup{P2P: no}, func(c *mpa.Config) { c.P2P = false }},
		{"peer to peer with revision 1", old, &ctrlpb.Startup{P2P: proto.Bool(true)}, nil},
		{"RTR", def, &ctrlpb.Startup{Rtr: u32(4)}, func(c *mpa.Config) { c.RTR = mpa.RTRs(4) }},
		{"all RTRs", old, &ctrlpb.Startup{Rtr: u32(7)}, func(c *mpa.Config) { c.RTR = mpa.AllRTRs }},
		{"RTR of the defaults", old, &ctrlpb.Startup{Rtr: u32(0)}, func(*mpa.Config) {}},
		{"RTR too great", def, &ctrlpb.Startup{Rtr: u32(8)}, nil},
		{"depths", old, &ctrlpb.Startup{Ird: u32(5), Ord: u32(5)}, func(c *mpa.Config) { c.IRD, c.ORD = 5, 5 }},
		{"no depths", old, &ctrlpb.Startup{Ird: u32(0), Ord: u32(0)}, func(c *mpa.Config) { c.IRD, c.ORD = 0, 0 }},
		{"IRD too great", old, &ctrlpb.Startup{Ird: u32(6)}, nil},
		{"ORD too great", old, &ctrlpb.Startup{Ord: u32(6)}, nil},
		{"time", def, &ctrlpb.Startup{TimeoutMs: u32(1500)}, func(c *mpa.Config) { c.Timeout = 1500 * time.Millisecond }},
	} {
		d := tt.defaults.fill()
		cfg, err := d.mpa(tt.w)
		want := mpa.DefaultConfig()
		want.CRC, want.Markers, want.RTR = true, d.Markers, mpa.RTRs(d.RTR)
		want.Rev, want.Enhanced, want.P2P = uint8(d.Revision), d.Revision == 2, !d.NoP2P
		want.IRD, want.ORD, want.MaxIRD, want.MaxORD = d.IRD, d.ORD, d.MaxIRD, d.MaxIRD
		want.Timeout, want.Decision = d.Timeout, d.Accept
		want.RetryRev1, want.RetryNoMarkers = true, true
		switch {
		case tt.want == nil:
			if code := toPB(err).GetCode(); code != cInvalid {
				t.Errorf("%s: %v", tt.name, err)
			}
			continue
		case err != nil:
			t.Errorf("%s: %v", tt.name, err)
		}
		if tt.want(&want); !reflect.DeepEqual(cfg, want) {
			t.Errorf("%s: %+v, want %+v", tt.name, cfg, want)
		}
	}
	if d := (StartupDefaults{}).fill(); d.RTR != uint32(mpa.AllRTRs) || d.Revision != 2 {
		t.Errorf("defaults %+v", d)
	}
}

// TestCRCPolicy checks when CRC32c is requested.
func TestCRCPolicy(t *testing.T) {
	a, b := netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("10.0.0.0/8")
	others := netip.MustParsePrefix("10.0.1.0/24")
	for _, tt := range []struct {
		name         string
		s            StartupDefaults
		within, wish bool
		want         bool
	}{
		{"required", StartupDefaults{CRC: CRCRequired}, false, false, true},
		{"optional, not wished", StartupDefaults{CRC: CRCOptional}, false, false, false},
		{"optional, wished", StartupDefaults{CRC: CRCOptional}, false, true, true},
		{"off", StartupDefaults{CRC: CRCOff}, false, true, false},
		{"within the host", StartupDefaults{CRC: CRCRequired}, true, true, false},
		{"required within the host", StartupDefaults{CRC: CRCRequired, CRCLocal: true}, true, false, true},
		{"off for the peer", StartupDefaults{CRCPeers: []CRCRule{{a, CRCOff}, {b, CRCRequired}}}, false, true, false},
		{"the other way round", StartupDefaults{CRC: CRCOff, CRCPeers: []CRCRule{{b, CRCRequired}, {a, CRCOff}}},
			false, false, true},
		{"off for others", StartupDefaults{CRCPeers: []CRCRule{{others, CRCOff}}}, false, false, true},
	} {
		if got := tt.s.crc(peerA.Addr(), tt.within, tt.wish); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

// TestCRCApplied checks that the policy applies to a connection, whatever its client wishes.
func TestCRCApplied(t *testing.T) {
	for _, policy := range []CRCPolicy{CRCRequired, CRCOff} {
		h, c := newClient(t, Config{Startup: StartupDefaults{CRC: policy}})
		req := reqConnect(c.qp(), peerA.String())
		req.GetConnect().Startup = &ctrlpb.Startup{Crc: proto.Bool(policy == CRCOff)}
		p, _ := h.dial(t, c, req, mpa.DefaultConfig())
		if ev := p.event(mpa.EventRequest); ev.Frame.CRC != (policy == CRCRequired) {
			t.Errorf("policy %d: CRC %v", policy, ev.Frame.CRC)
		}
	}
}

// TestSourceAddress checks that a client cannot connect from an address that its rule does not list, if the route
// chooses that address.
func TestSourceAddress(t *testing.T) {
	h, c := newClient(t, Config{Allow: []Rule{{Addrs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}}}})
	c.ok(reqConnect(c.qp(), peerA.String()))
	if ev := c.event().GetConnectFailed(); ev.GetError().GetCode() != ctrlpb.Code_CODE_PERMISSION {
		t.Errorf("event %v", ev)
	}
	h.leave(t, c)
}

// TestShares checks on which associations a connection may be.
func TestShares(t *testing.T) {
	h, _ := newClient(t, Config{})
	h.mu.Lock()
	sess := h.sessions[h.lastID]
	h.mu.Unlock()
	from := netip.MustParseAddrPort
	opts := dataplane.SCTP{UDP: true}
	device := &device{Device: Device{Name: "eth9"}}
	open := func() *shared {
		return &shared{n: 1, remote: peerA, device: "eth9", claim: &claim{addr: from("10.0.0.1:5000")}}
	}
	for _, tt := range []struct {
		name string
		sh   func(*shared)
		c    func(*conn)
		want bool
	}{
		{"the same", func(*shared) {}, func(*conn) {}, true},
		{"ended", func(sh *shared) { sh.n = 0 }, func(*conn) {}, false},
		{"to another port", func(*shared) {}, func(c *conn) { c.remote = from("10.0.0.2:7175") }, false},
		{"over another transport", func(*shared) {}, func(c *conn) { c.sctp = &opts }, false},
		{"not yet open", func(sh *shared) { sh.claim = nil }, func(c *conn) { c.wantAddr = from("10.0.0.9:1") }, true},
		{"through the interface", func(*shared) {}, func(c *conn) { c.by = device }, true},
		{"through another interface", func(sh *shared) { sh.device = "eth8" }, func(c *conn) { c.by = device }, false},
		{"through any interface", func(sh *shared) { sh.device = "" }, func(c *conn) { c.by = device }, true},
		{"from its address", func(*shared) {}, func(c *conn) { c.wantAddr = netip.AddrPortFrom(addrA, 0) }, true},
		{"from another address", func(*shared) {}, func(c *conn) { c.wantAddr = from("10.0.0.9:0") }, false},
		{"from its port", func(*shared) {}, func(c *conn) { c.wantAddr = from("10.0.0.1:5000") }, true},
		{"from another port", func(*shared) {}, func(c *conn) { c.wantAddr = from("10.0.0.1:5001") }, false},
	} {
		sh, cn := open(), &conn{sess: sess, remote: peerA, overSCTP: overSCTP{sctp: &dataplane.SCTP{}}}
		tt.sh(sh)
		tt.c(cn)
		if got := sh.fits(cn); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
	sess.pol.Store(&policy{addrs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}})
	if open().fits(&conn{sess: sess, remote: peerA, overSCTP: overSCTP{sctp: &dataplane.SCTP{}}}) {
		t.Error("from an address that its rule does not list any more")
	}
}

// TestBindErrors checks the codes of errors of bind(2).
func TestBindErrors(t *testing.T) {
	any, local := netip.MustParseAddrPort("10.0.0.1:0"), netip.MustParseAddrPort("[fe80::1]:7174")
	for _, tt := range []struct {
		addr netip.AddrPort
		err  error
		code ctrlpb.Code
	}{
		{any, unix.EADDRINUSE, portInUse}, {peerA, unix.EADDRINUSE, portInUse}, {peerA, unix.EADDRNOTAVAIL, badAddress},
		{local, unix.ENODEV, badAddress}, {local, unix.EINVAL, badAddress}, {peerA, unix.EINVAL, internal},
		{local, unix.EACCES, permission}, {local, unix.ENOBUFS, internal},
	} {
		if code := toPB(bindError(tt.addr, tt.err)).GetCode(); code != tt.code {
			t.Errorf("%v, %v: %v, want %v", tt.addr, tt.err, code, tt.code)
		}
	}
	if a, b := bindError(any, unix.EADDRINUSE), bindError(peerA, unix.EADDRINUSE); a.Error() == b.Error() {
		t.Error("the advice for all ports is that for one")
	}
}

// TestClaimAll checks that an endpoint is claimed on all interfaces or on none.
func TestClaimAll(t *testing.T) {
	var all [3]fakeSteering
	var ds devices
	for i := range all {
		ds = append(ds, &device{Device: Device{Steering: &all[i]}})
	}
	ep := bpf.Endpoint{Addr: addrA, Port: 7174}
	all[2].fails = errors.New("no room")
	if err := ds.claim(ep); err == nil || all[0].len()+all[1].len() != 0 {
		t.Errorf("%v; %d and %d endpoints are left", err, all[0].len(), all[1].len())
	}
	all[2].fails = nil
	if err := ds.claim(ep); err != nil || all[0].len()+all[1].len()+all[2].len() != 3 {
		t.Errorf("%v; not on all", err)
	}
}

// TestAppendCounters checks which fields of a struct become counters.
func TestAppendCounters(t *testing.T) {
	type Inner struct{ Deep uint32 }
	v := struct {
		Inner
		Frames   uint64
		SRTT     time.Duration
		Negative int
		Size     int
		Yes, No  bool
		Name     string
		hidden   uint64
	}{Inner{1}, 2, 3, -4, 5, true, false, "six", 7}
	want := map[string]uint64{
		"x.deep": 1, "x.frames": 2, "x.srtt_ns": 3, "x.negative": 0, "x.size": 5, "x.yes": 1, "x.no": 0,
	}
	for _, v := range []any{v, &v} {
		got := map[string]uint64{}
		for _, k := range appendCounters(nil, "x.", v) {
			got[k.Name] = k.Value
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
	if got := appendCounters(nil, "x.", 7); len(got) != 0 {
		t.Errorf("of a number: %v", got)
	}
}
