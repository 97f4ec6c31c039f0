package ctrl

import (
	"net/netip"
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
)

const cPermission = ctrlpb.Code_CODE_PERMISSION

func nets(list ...string) (out []netip.Prefix) {
	for _, n := range list {
		out = append(out, netip.MustParsePrefix(n))
	}
	return out
}

// TestPeerRules checks that a connect to a peer that the rule does not list fails with an error that names rule, key
// and file, over each transport; that a listener admits the peers that its client's rule lists; and that both follow
// a reload.
func TestPeerRules(t *testing.T) {
	rules := func(accept, connect []netip.Prefix) Config {
		return Config{File: "/etc/x.yaml", Allow: []Rule{{UIDs: []uint32{54321}}, {AcceptFrom: accept, ConnectTo: connect}}}
	}
	h, c := newClient(t, rules(nets("10.0.0.0/30", "fd00::/8"), nets("10.0.0.2/32")))
	sctp := reqConnect(c.qp(), "10.0.0.3:7174")
	sctp.GetConnect().Startup = &ctrlpb.Startup{Transport: ctrlpb.Transport_TRANSPORT_SCTP}
	for _, req := range []*ctrlpb.Request{reqConnect(c.qp(), "10.0.0.3:7174"), reqConnect(c.qp(), "[fd00::1]:7174"), sctp} {
		if text := c.fails(cPermission, req); !strings.HasSuffix(text, ": not in connect-to of rule 2 of allow in /etc/x.yaml: add it there, and reload iwarpd") {
			t.Errorf("%s", text)
		}
	}
	if n := h.value(t, "ctrl.connects_denied"); n != 3 {
		t.Errorf("ctrl.connects_denied is %d", n)
	}
	c.ok(reqConnect(c.qp(), "10.0.0.2:7174"))
	c.ok(reqConnect(c.qp(), "[::ffff:10.0.0.2]:7175"))

	c.ok(reqListen("", 7174))
	admits := func(addr string, want bool) {
		t.Helper()
		if h.e.admits(netip.MustParseAddr(addr)) != want {
			t.Errorf("%s admitted %v", addr, !want)
		}
	}
	admits("10.0.0.3", true)
	admits("10.0.0.4", false)
	admits("fd00::1", true)
	h.Reload(rules(nets("10.0.0.4/32"), nil))
	admits("10.0.0.3", false)
	admits("10.0.0.4", true)
	c.ok(reqConnect(c.qp(), "10.0.0.3:7174"))
	if n := h.value(t, "ctrl.peers_denied"); n != 2 {
		t.Errorf("ctrl.peers_denied is %d", n)
	}
	// A worker may have admitted it under the old rules.
	if p := h.arrive(t, "10.0.0.3:1", 7174, mpa.DefaultConfig()); !p.c.ended || !p.c.abort {
		t.Error("a denied connection was accepted")
	}
}

// TestSlotPeers checks that the rule of slots has peers too and that errors name it.
func TestSlotPeers(t *testing.T) {
	cfg := Config{File: "/etc/x.yaml", Slots: Slots{Rule: Rule{AcceptFrom: nets("10.0.0.0/8"), ConnectTo: nets("10.0.0.0/8")}}}.fill()
	pol, ok := cfg.policyOf(slotUID+3, nil, false)
	if !ok || len(pol.acceptFrom) != 1 || len(pol.connectTo) != 1 || pol.rule != "slots in /etc/x.yaml" {
		t.Errorf("%+v, %v", pol, ok)
	}
}

// peerList is a PeerSet that a test changes.
type peerList struct {
	mu      sync.Mutex
	list    []netip.Prefix
	changed func()
}

func (p *peerList) Contains(a netip.Addr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, n := range p.list {
		if n.Contains(a) {
			return true
		}
	}
	return false
}

func (p *peerList) Watch(changed func()) { p.changed = changed }
func (p *peerList) String() string       { return "nftables set inet filter peers" }

func (p *peerList) set(list ...string) {
	p.mu.Lock()
	p.list = nets(list...)
	p.mu.Unlock()
	p.changed()
}

// TestDeniedConnections checks that connections whose peers are denied by a reload, or by a change of the set, remain
// unless the configuration ends them.
func TestDeniedConnections(t *testing.T) {
	set := &peerList{list: nets("10.0.0.0/8")}
	for _, end := range []bool{false, true} {
		for _, by := range []string{"rules", "set"} {
			set.list = nets("10.0.0.0/8")
			h := newHarnessWith(t, Config{EndDenied: end}, set)
			c, up, logs := h.busy(t)
			switch by {
			case "rules": // the connection that is up, and the one being dialed
				h.Reload(Config{EndDenied: end, File: "/etc/x.yaml", Allow: []Rule{{ConnectTo: nets("10.0.0.9/32")}}})
			case "set": // all but the one from 10.0.0.3, which waits for its client
				set.set("10.0.0.3/32")
			}
			if ended, abort := up.ended(); ended != end || abort != end {
				t.Fatalf("by %s, end %v: ended %v, by a reset %v", by, end, ended, abort)
			}
			if !end {
				continue
			}
			want := map[string]string{
				"rules": "10.0.0.4 is not an allowed peer any more: not in connect-to of rule 1 of allow in /etc/x.yaml: add it there, and reload iwarpd",
				"set":   "10.0.0.4 is not an allowed peer any more: not in the nftables set inet filter peers, which allow-set names: add it there",
			}[by]
			if f := c.event().GetConnectFailed(); !strings.Contains(f.GetError().GetText(), want) || f.GetError().GetCode() != cPermission {
				t.Errorf("by %s: the client got %v", by, f)
			}
			if n := logs.FilterMessage("connections ended whose peers are denied now").Len(); n != 1 {
				t.Errorf("by %s: %v", by, logs.All())
			}
			h.mu.Lock()
			if left := len(h.conns); left != 2 { // the one that waits, and the one that is being closed
				t.Errorf("by %s: %d connections left", by, left)
			}
			h.mu.Unlock()
		}
	}
}

// TestDenialsLogged checks that denied peers are logged at a limited rate, with their number.
func TestDenialsLogged(t *testing.T) {
	h := newHarness(t, Config{Allow: []Rule{{AcceptFrom: nets("10.0.0.1/32")}}})
	core, logs := observer.New(zap.WarnLevel)
	h.log = zap.New(core)
	c := h.hello(t)
	c.ok(reqListen("", 7174))
	for i := range 100 {
		h.e.admits(netip.AddrFrom4([4]byte{10, 9, 9, byte(i)}))
	}
	testenv.Until(t, "the peer is logged", func() bool { return logs.Len() != 0 })
	h.Close()
	all := logs.FilterMessage("a peer may not connect").All()
	if len(all) != 1 || all[0].ContextMap()["peer"] != "10.9.9.0" || all[0].ContextMap()["reason"] != "not in accept-from of rule 1 of allow: add it there, and reload iwarpd" {
		t.Errorf("%v", all)
	}
}
