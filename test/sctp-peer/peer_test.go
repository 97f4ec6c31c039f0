// Package sctppeer runs the SCTP of iwarpd against usrsctp, a real implementation,
// over raw sockets and over UDP, with DDP sessions on top.
package sctppeer

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
)

var build sync.Once
var tmp, peerPath, buildErr = "", "", error(nil)

func TestMain(m *testing.M) {
	code := m.Run()
	if tmp != "" {
		_ = os.RemoveAll(tmp)
	}
	os.Exit(code)
}

// peerBinary compiles peer.c.
func peerBinary(t *testing.T) string {
	testenv.RequireRoot(t)
	testenv.RequireTool(t, "gcc")
	if _, err := os.Stat("/usr/include/usrsctp.h"); err != nil {
		testenv.Skip(t, "needs libusrsctp-dev: %v", err)
	}
	build.Do(func() {
		if tmp, buildErr = os.MkdirTemp("", "sctp-peer"); buildErr != nil {
			return
		}
		peerPath = filepath.Join(tmp, "peer")
		if out, err := exec.Command("gcc", "-O1", "-Wall", "-Werror", "-o", peerPath, filepath.Join("peer", "peer.c"), "-lusrsctp").CombinedOutput(); err != nil {
			buildErr = fmt.Errorf("%v\n%s", err, out)
		}
	})
	if buildErr != nil {
		t.Fatal(buildErr)
	}
	return peerPath
}

// peer is the running peer program with its output.
type peer struct {
	cmd   *exec.Cmd
	mu    sync.Mutex
	lines []string
	done  chan struct{}
}

func start(t *testing.T, v *testenv.Veth, args ...string) *peer {
	t.Helper()
	p := &peer{cmd: v.B.NS.Command(peerBinary(t), args...), done: make(chan struct{})}
	p.cmd.Stderr = os.Stderr
	r, err := p.cmd.StdoutPipe()
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		for s := bufio.NewScanner(r); s.Scan(); {
			p.mu.Lock()
			p.lines = append(p.lines, s.Text())
			p.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		<-p.done
		p.cmd.Wait()
		if t.Failed() {
			t.Logf("the peer said: %q", p.said())
		}
	})
	return p
}

func (p *peer) said() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.lines)
}

func (p *peer) has(line string) bool {
	return slices.ContainsFunc(p.said(), func(s string) bool { return strings.HasPrefix(s, line) })
}

// echo is a Sink that records segments, or sends them back.
type echo struct {
	got  []string
	back bool
	todo []string
}

func (e *echo) HandleULPDU(b []byte) *term.Error {
	e.got = append(e.got, string(b))
	if e.back {
		e.todo = append(e.todo, string(b))
	}
	return nil
}
func (e *echo) Waits([]byte) bool                   { return false }
func (e *echo) HandleEarly(serial.Num, []byte) bool { return false }
func (e *echo) DeliverEarly(serial.Num) *term.Error { panic("nothing was placed early") }

// fields returns fields of the packets that match a filter.
func fields(t *testing.T, file, filter string, names ...string) []string {
	t.Helper()
	args := []string{"-Y", filter, "-T", "fields"}
	for _, n := range names {
		args = append(args, "-e", n)
	}
	return strings.Split(strings.TrimSpace(testenv.Tshark(t, file, args...)), "\n")
}

// checkWire checks the packets with tshark.
func checkWire(t *testing.T, file string, ours string, profile session.Profile) {
	t.Helper()
	if bad := fields(t, file, "sctp && !icmp && sctp.checksum.status != 1", "frame.number"); bad[0] != "" {
		t.Errorf("bad checksums in frames %v", bad)
	}
	if bad := fields(t, file, "_ws.malformed && !icmp", "frame.number"); bad[0] != "" {
		t.Errorf("malformed frames %v", bad)
	}
	var c sctp.Config
	profile.Configure(&c)
	ind := fields(t, file, "sctp.adaptation_layer_indication", "sctp.adaptation_layer_indication")
	if len(ind) < 2 {
		t.Errorf("%d indications", len(ind))
	}
	for _, s := range ind {
		if s != fmt.Sprintf("0x%08x", c.Adaptation) {
			t.Errorf("indication %s", s)
		}
	}
	data := fields(t, file, "sctp.chunk_type == 0 && ip.src == "+ours, "sctp.data_u_bit", "sctp.data_b_bit", "sctp.data_e_bit", "sctp.data_payload_proto_id")
	segments := 0
	for _, s := range data {
		f := strings.Fields(s)
		if len(f) != 4 {
			t.Fatalf("DATA fields %q", s)
		}
		for _, bits := range f[:3] {
			if strings.Trim(bits, "1,True") != "" {
				t.Errorf("DATA with U, B, E %q", f[:3])
			}
		}
		for v := range strings.SplitSeq(f[3], ",") {
			switch v {
			case fmt.Sprint(profile.Segment()):
				segments++
			case fmt.Sprint(profile.Control()):
			default:
				t.Errorf("PPID %s", v)
			}
		}
	}
	if segments == 0 {
		t.Error("no DDP segment of ours on the wire")
	}
}

type wireKind struct {
	name    string
	profile session.Profile
	udp     bool
}

var wires = []wireKind{
	{"RFC5043", session.RFC5043, false},
	{"draft", session.Draft, false},
	{"RFC5043 over UDP", session.RFC5043, true},
}

func (w wireKind) args() (a []string) {
	a = []string{"-a", "1"}
	if w.profile == session.Draft {
		a = []string{"-d", "-a", "2"}
	}
	if w.udp {
		a = append(a, "-u", fmt.Sprint(sctp.UDPPort))
	}
	return a
}

func (h *host) state(stream uint16) session.State { return h.mux().State(stream) }

// TestDial sets up an association and a session from our side, sends segments that the peer sends back, and ends both
// in order.
func TestDial(t *testing.T) {
	for _, w := range wires {
		t.Run(w.name, func(t *testing.T) {
			v := testenv.NewVeth(t, 1500)
			peerBinary(t)
			stop := testenv.Capture(t, v.B.NS, v.B.Name, "ip or ip6", "wire")
			p := start(t, v, append(w.args(), "server", fmt.Sprint(peerPort))...)
			h := newHost(t, v, w.profile, w.udp)
			h.run("the peer", func() bool { return p.has("listening") })
			h.dial()
			h.run("the association", func() bool { return h.a.State() == sctp.Established })
			sink := &echo{}
			for _, stream := range []uint16{3, 5, 3} { // two streams, one of them twice
				if err := h.mux().Initiate(stream, session.Setup{Private: []byte("hello")}); err != nil {
					t.Fatal(err)
				}
				h.run("the session", func() bool { return h.state(stream) == session.Open })
				if e := h.ddp[len(h.ddp)-1]; e.Kind != session.EventOpen || string(e.Setup.Private) != "welcome" {
					t.Errorf("event %+v", e)
				}
				h.m.Attach(stream, sink)
				sink.got = nil
				var want []string
				for i := range 50 {
					n := 1 + i*29
					if i%7 == 0 {
						n = h.a.MaxMessage() - 2
					}
					b := fmt.Appendf(nil, "%03d%s", i, strings.Repeat("x", n))[:max(4, n)]
					want = append(want, string(b))
					h.segment(stream, b)
				}
				h.run("the echo", func() bool { return len(sink.got) == len(want) })
				if !slices.Equal(sink.got, want) {
					t.Fatal("another echo than what was sent, or in another order")
				}
				h.m.Terminate(stream)
				h.run("the end of the session", func() bool { return h.state(stream) == session.Idle })
			}
			h.a.Close(clock.Now())
			h.run("the end", func() bool { return h.a.State() == sctp.Closed })
			if h.a.Err() != nil {
				t.Error(h.a.Err())
			}
			h.run("the peer's end", func() bool { return p.has("done") })
			if len(h.bufs) != 0 {
				t.Errorf("%d buffers were not given back", len(h.bufs))
			}
			if !p.has(fmt.Sprintf("adaptation %d", h.cfg.Adaptation)) {
				t.Error("the peer got no adaptation indication")
			}
			if p.has("ordered") || p.has("unknown") {
				t.Error("the peer complains")
			}
			t.Logf("%+v", h.a.Stats())
			checkWire(t, stop(), v.A.Addr4.String(), w.profile)
		})
	}
}

// TestListen makes the peer set up an association and a session and send messages, of one
// packet and of several fragments. We send each segment back.
func TestListen(t *testing.T) {
	for _, w := range append(wires, wireKind{"fragments", session.RFC5043, false}) {
		t.Run(w.name, func(t *testing.T) {
			v := testenv.NewVeth(t, 1500)
			args := w.args()
			if w.name == "fragments" {
				args = append(args, "-f")
			}
			h := newHost(t, v, w.profile, w.udp)
			h.listen()
			p := start(t, v, append(args, "-n", "40", "client", fmt.Sprint(port), v.A.Addr4.String())...)
			h.run("an Initiate", func() bool { return h.m != nil && h.state(3) == session.Requested })
			if e := h.ddp[0]; e.Kind != session.EventRequest || string(e.Setup.Private) != "hello" {
				t.Errorf("event %+v", e)
			}
			if err := h.m.Accept(3, session.Setup{Private: []byte("yes")}); err != nil {
				t.Fatal(err)
			}
			sink := &echo{back: true}
			h.m.Attach(3, sink)
			if w.name == "fragments" {
				// A segment larger than a packet cannot be sent back: DDP would have divided it.
				h.run("all segments", func() bool { return len(sink.got) == 40 })
				if h.pieces == 0 {
					t.Error("no message came in pieces")
				}
				for i, s := range sink.got {
					if i%4 == 1 && len(s) != 3000+i-2 {
						t.Errorf("segment %d has %d bytes", i, len(s))
					}
				}
				h.a.Abort()
				h.turn()
				h.run("the ABORT", func() bool { return p.has("association lost") || p.has("association") && gone(p) })
				return
			}
			h.run("all segments", func() bool {
				for len(sink.todo) > 0 && h.m.CanSend(3) && h.a.Room() >= len(sink.todo[0])+2 {
					h.segment(3, []byte(sink.todo[0]))
					sink.todo = sink.todo[1:]
				}
				return h.state(3) == session.Ended || h.state(3) == session.Idle
			})
			if len(sink.got) != 40 {
				t.Errorf("%d segments", len(sink.got))
			}
			h.run("the end", func() bool { return h.a.State() == sctp.Closed && p.has("done") })
			if h.a.Err() != nil || !p.has("echoed 40") || p.has("wrong") || p.has("ordered") {
				t.Errorf("%v, peer %q", h.a.Err(), p.said())
			}
			if !p.has("control 4") {
				t.Error("the peer saw no Terminate of ours")
			}
		})
	}
}

func gone(p *peer) bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// TestEnds checks ABORT and SHUTDOWN by the peer, our ABORT, and a restart on our side.
func TestEnds(t *testing.T) {
	open := func(t *testing.T) (*host, *peer) {
		v := testenv.NewVeth(t, 1500)
		p := start(t, v, "server", fmt.Sprint(peerPort))
		h := newHost(t, v, session.RFC5043, false)
		h.run("the peer", func() bool { return p.has("listening") })
		h.dial()
		h.run("the association", func() bool { return h.a.State() == sctp.Established })
		h.mux().Initiate(1, session.Setup{})
		h.run("the session", func() bool { return h.state(1) == session.Open })
		h.m.Attach(1, &echo{})
		return h, p
	}
	t.Run("ABORT of the peer's", func(t *testing.T) {
		h, _ := open(t)
		h.segment(1, []byte("ABORT"))
		h.run("the end", func() bool { return h.a.State() == sctp.Closed })
		if _, ok := h.a.Err().(*sctp.AbortError); !ok {
			t.Error(h.a.Err())
		}
	})
	t.Run("SHUTDOWN of the peer's", func(t *testing.T) {
		h, p := open(t)
		h.segment(1, []byte("SHUTDOWN"))
		h.run("the end", func() bool { return h.a.State() == sctp.Closed && p.has("done") })
		if h.a.Err() != nil || !slices.Contains(h.events, sctp.EventShutdown) {
			t.Error(h.a.Err(), h.events)
		}
	})
	t.Run("ABORT of ours", func(t *testing.T) {
		h, p := open(t)
		h.a.Abort()
		h.run("the peer's end", func() bool { return p.has("association lost") || gone(p) })
	})
	t.Run("restart of ours", func(t *testing.T) {
		h, p := open(t)
		h.bufs, h.m, h.events = map[sctp.Buf]message{}, nil, nil // we lose all state
		h.key[0]++
		h.cfg.Accept = nil // usrsctp's INIT ACK for a restart has no indication
		h.dial()
		h.run("the association", func() bool { return h.a.State() == sctp.Established })
		h.run("the restart", func() bool { return p.has("association restarted") })
		h.mux().Initiate(2, session.Setup{})
		h.run("the session", func() bool { return h.state(2) == session.Open })
	})
	t.Run("other adaptation", func(t *testing.T) {
		v := testenv.NewVeth(t, 1500)
		p := start(t, v, "-a", "7", "server", fmt.Sprint(peerPort))
		h := newHost(t, v, session.RFC5043, false)
		h.run("the peer", func() bool { return p.has("listening") })
		h.dial()
		h.run("the refusal", func() bool { return h.a.State() == sctp.Closed })
		if h.a.Err() != sctp.ErrAdaptation {
			t.Error(h.a.Err())
		}
	})
}
