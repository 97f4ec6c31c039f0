package mpa

import (
	"encoding/hex"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// dataOf decodes four bytes of enhanced data in hex, nil for none.
func dataOf(t *testing.T, s string) *EnhancedData {
	t.Helper()
	if s == "" {
		return nil
	}
	d := &EnhancedData{}
	if err := d.Decode(testenv.Unhex(t, s)); err != nil {
		t.Fatal(err)
	}
	return d
}

// hexOfData is the inverse of dataOf.
func hexOfData(d *EnhancedData) string {
	if d == nil {
		return ""
	}
	return hex.EncodeToString(d.Append(nil))
}

func TestEnhancedData(t *testing.T) {
	for _, tt := range []struct {
		wire, again string
		want        EnhancedData
	}{
		{"00000000", "00000000", EnhancedData{}},
		{"00100008", "00100008", EnhancedData{IRD: 16, ORD: 8}},
		{"3fff3fff", "3fff3fff", EnhancedData{IRD: NoNegotiation, ORD: NoNegotiation}},
		{"80100008", "80100008", EnhancedData{IRD: 16, ORD: 8, P2P: true}},
		{"c0100008", "c0100008", EnhancedData{IRD: 16, ORD: 8, P2P: true, RTR: RTRs(RTRSend)}},
		{"80108008", "80108008", EnhancedData{IRD: 16, ORD: 8, P2P: true, RTR: RTRs(RTRWrite)}},
		{"80104008", "80104008", EnhancedData{IRD: 16, ORD: 8, P2P: true, RTR: RTRs(RTRRead)}},
		{"ffffffff", "ffffffff", EnhancedData{IRD: NoNegotiation, ORD: NoNegotiation, P2P: true, RTR: AllRTRs}},
		{"4010c008", "00100008", EnhancedData{IRD: 16, ORD: 8}}, // without A, B to D are ignored
	} {
		if d := dataOf(t, tt.wire); *d != tt.want || hexOfData(d) != tt.again {
			t.Errorf("%s is %+v, and again %s; want %+v and %s", tt.wire, *d, hexOfData(d), tt.want, tt.again)
		}
	}
	if got := hexOfData(&EnhancedData{IRD: 1, ORD: 2, RTR: AllRTRs}); got != "00010002" {
		t.Errorf("kinds without A are sent: %s", got)
	}
	for n := range EnhancedLen {
		if err := (&EnhancedData{}).Decode(make([]byte, n)); err != ErrEnhancedData {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	for _, d := range []EnhancedData{{IRD: 0x4000}, {ORD: 0x4000}} {
		if d.Validate() != ErrDepth {
			t.Errorf("%+v is valid", d)
		}
	}
}

// TestNegotiationResponder checks the golden bytes of a responder's answers (RFC 6581 sections 9.1 and 9.2).
func TestNegotiationResponder(t *testing.T) {
	depths := func(ird, ord, maxIRD, maxORD int) func(*Config) {
		return func(c *Config) { c.IRD, c.ORD, c.MaxIRD, c.MaxORD = ird, ord, maxIRD, maxORD }
	}
	takes := func(kinds RTRs) func(*Config) { return func(c *Config) { c.RTR = kinds } }
	for _, tt := range []struct {
		name           string
		cfg            func(*Config)
		request        string
		ird, ord       int // for Accept
		accept, reject string
		gotIRD, gotORD int
		rtr            RTR
	}{
		{"unenhanced", same, "", -1, -1, "", "", 16, 16, RTRNone},
		{"unenhanced, depths of the ULP", same, "", 3, 4, "", "", 3, 4, RTRNone},
		{"fewer than the default", same, "00040005", -1, -1, "00050004", "00100010", 5, 4, RTRNone},
		{"more than the default", same, "00400032", -1, -1, "00320040", "00100010", 50, 64, RTRNone},
		{"more than there is", same, "01000101", -1, -1, "00800080", "00100010", 128, 128, RTRNone},
		{"none may be added", depths(16, 16, 0, 0), "00400032", -1, -1, "00100010", "00100010", 16, 16, RTRNone},
		{"nothing asked", same, "00000000", -1, -1, "00000000", "00100010", 0, 0, RTRNone},
		{"depths of the ULP", same, "00400032", 3, 4, "00030004", "00100010", 3, 4, RTRNone},
		{"ORD of the ULP above the initiator's IRD", same, "00020032", 3, 4, "00030002", "00100010", 3, 2, RTRNone},
		{"none for the ULP", same, "00400032", 0, 0, "00000000", "00100010", 0, 0, RTRNone},
		{"initiator's ORD of 0x3fff", same, "00043fff", -1, -1, "3fff0004", "00100010", 16, 4, RTRNone},
		{"initiator's ORD of 0x3fff, IRD of the ULP", same, "00043fff", 9, -1, "3fff0004", "00100010", 9, 4, RTRNone},
		{"initiator's IRD of 0x3fff", same, "3fff0004", -1, -1, "00043fff", "00100010", 4, 16, RTRNone},
		{"initiator's IRD of 0x3fff, ORD of the ULP", same, "3fff0004", -1, 99, "00043fff", "00100010", 4, 99, RTRNone},
		{"both 0x3fff", same, "3fff3fff", -1, -1, "3fff3fff", "00100010", 16, 16, RTRNone},
		{"B, C, D without A", same, "4004c005", -1, -1, "00050004", "00100010", 5, 4, RTRNone},
		{"all kinds", same, "c004c005", -1, -1, "80058004", "80108010", 5, 4, RTRWrite},
		{"Send", same, "c0040005", -1, -1, "c0050004", "c0100010", 5, 4, RTRSend},
		{"Write", same, "80048005", -1, -1, "80058004", "80108010", 5, 4, RTRWrite},
		{"Read", same, "80044005", -1, -1, "80054004", "80104010", 5, 4, RTRRead},
		{"Send and Read", same, "c0044005", -1, -1, "80054004", "80104010", 5, 4, RTRRead},
		{"Read needs a place", same, "80044000", -1, -1, "80014004", "80104010", 1, 4, RTRRead},
		{"Read needs a place that the ULP denies", same, "80044005", 0, 0, "80014000", "80104010", 1, 0, RTRRead},
		{"no kind", same, "80040005", -1, -1, "80058004", "80108010", 5, 4, RTRWrite},
		{"a kind that we do not take", takes(RTRs(RTRSend | RTRRead)), "80048005", -1, -1, "80054004", "80104010", 5, 4, RTRRead},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := with(tt.cfg)
			n := NewNegotiation(&c)
			n.HandleRequest(dataOf(t, tt.request))
			if got := hexOfData(n.Peer()); tt.request != "" && got != hexOfData(dataOf(t, tt.request)) {
				t.Errorf("the ULP sees %q", got)
			}
			if got := hexOfData(n.Reject()); got != tt.reject {
				t.Errorf("Reject %q, want %q", got, tt.reject)
			}
			for _, bad := range [][2]int{{NoNegotiation, 0}, {0, NoNegotiation}} {
				if _, err := n.Accept(bad[0], bad[1]); err != ErrDepth {
					t.Errorf("Accept(%d, %d): %v", bad[0], bad[1], err)
				}
			}
			d, err := n.Accept(tt.ird, tt.ord)
			if got := hexOfData(d); err != nil || got != tt.accept {
				t.Errorf("Accept %q, %v; want %q", got, err, tt.accept)
			}
			var p Params
			n.Apply(&p)
			if want := (Params{Enhanced: tt.request != "", IRD: tt.gotIRD, ORD: tt.gotORD, RTR: tt.rtr}); p != want {
				t.Errorf("runs with %+v, want %+v", p, want)
			}
		})
	}
}

// TestNegotiationInitiator checks the golden bytes of an initiator's requests and its reaction to the answers.
func TestNegotiationInitiator(t *testing.T) {
	p2p := func(kinds RTRs) func(*Config) { return func(c *Config) { c.P2P, c.RTR = true, kinds } }
	for _, tt := range []struct {
		name            string
		cfg             func(*Config)
		request, accept string
		ird, ord        int
		rtr             RTR
		err             error
	}{
		{"unenhanced", func(c *Config) { c.Rev, c.Enhanced = 1, false }, "", "", 16, 16, RTRNone, nil},
		{"answered without enhanced data", p2p(0), "c010c010", "", 16, 16, RTRNone, nil},
		{"granted", same, "00100010", "00100010", 16, 16, RTRNone, nil},
		{"responder's IRD below our ORD", same, "00100010", "00050010", 16, 5, RTRNone, nil},
		{"responder's IRD above our ORD", same, "00100010", "00500010", 16, 16, RTRNone, nil},
		{"responder's ORD below our IRD", same, "00100010", "00100002", 16, 16, RTRNone, nil},
		{"responder's ORD above our IRD", same, "00100010", "00100080", 128, 16, RTRNone, nil},
		{"responder's ORD above all that there is", same, "00100010", "00100081", 16, 16, RTRNone, ErrIRD},
		{"responder's ORD above all, our ORD lowered", same, "00100010", "00023ffe", 16, 2, RTRNone, ErrIRD},
		{"responder's IRD of 0x3fff", same, "00100010", "3fff0010", 16, 16, RTRNone, nil},
		{"responder's ORD of 0x3fff", same, "00100010", "00103fff", 16, 16, RTRNone, nil},
		{"A unasked", same, "00100010", "c010c010", 16, 16, RTRNone, nil},
		{"all kinds", p2p(0), "c010c010", "c010c010", 16, 16, RTRWrite, nil},
		{"Send", p2p(0), "c010c010", "c0100010", 16, 16, RTRSend, nil},
		{"Write", p2p(0), "c010c010", "80108010", 16, 16, RTRWrite, nil},
		{"Read", p2p(0), "c010c010", "80104010", 16, 16, RTRRead, nil},
		{"Read or Send to an IRD of 0", p2p(0), "c010c010", "c0004010", 16, 0, RTRSend, nil},
		{"Read to an IRD of 0", p2p(0), "c010c010", "80004010", 16, 0, RTRNone, ErrRTR},
		{"Write, Send and Read offered", p2p(RTRs(RTRSend | RTRRead)), "c0104010", "80108010", 16, 16, RTRNone, ErrRTR},
		{"A not answered", p2p(0), "c010c010", "4010c010", 16, 16, RTRNone, ErrRTR},
		{"no kind answered", p2p(0), "c010c010", "80100010", 16, 16, RTRNone, ErrRTR},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := with(tt.cfg)
			n := NewNegotiation(&c)
			if got := hexOfData(n.Request()); got != tt.request {
				t.Errorf("asks %q, want %q", got, tt.request)
			}
			e := n.HandleAccept(dataOf(t, tt.accept))
			if tt.err == nil && e != nil || tt.err != nil && (e == nil || e.Cause != tt.err || !e.Terminate) {
				t.Errorf("HandleAccept: %v, want %v", e, tt.err)
			}
			var p Params
			n.Apply(&p)
			if want := (Params{Enhanced: tt.accept != "", IRD: tt.ird, ORD: tt.ord, RTR: tt.rtr}); p != want {
				t.Errorf("runs with %+v, want %+v", p, want)
			}
		})
	}
	c := DefaultConfig()
	n := NewNegotiation(&c)
	n.Request()
	if n.Peer() != nil {
		t.Error("an answer before there is one")
	}
	if n.HandleReject(dataOf(t, "80070009")); hexOfData(n.Peer()) != "80070009" {
		t.Errorf("the ULP sees %+v of a rejection", n.Peer())
	}
}
