package clib

import (
	"encoding/binary"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// memory describes a memfd as the daemon passes it, or a corrupted one.
type memory struct {
	kind, entries, stride, rings, ringSize, maxSGE, maxInline uint32

	magic   string
	version uint32
	size    int64 // 0: as in the header
	seals   int

	producer, consumer uint32 // indices of the first ring
}

const sealSize = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// good holds the memfds of docs/api.md for a client with one worker.
var good = map[string]memory{
	"bells": {kind: 4, entries: 64, rings: 1, ringSize: 4096},
	"cq":    {kind: 3, entries: 64, stride: 64, rings: 1, ringSize: 8192},
	"sq":    {kind: 1, entries: 64, stride: 128, rings: 1, ringSize: 12288, maxSGE: 4, maxInline: 16},
	"rq":    {kind: 2, entries: 16, stride: 128, rings: 1, ringSize: 4096, maxSGE: 4},
}

// make returns the memfd.
func (m memory) make(t *testing.T) int {
	t.Helper()
	fd, err := unix.MemfdCreate("hostile", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	size := m.size
	if size == 0 {
		size = 4096 + int64(m.rings)*int64(m.ringSize)
	}
	h := []byte("WARPRING")
	if m.magic != "" {
		h = []byte(m.magic)
	}
	version := uint32(1)
	if m.version != 0 {
		version = m.version
	}
	for _, v := range []uint32{version, m.kind, m.entries, m.stride, m.rings, m.ringSize, m.maxSGE, m.maxInline} {
		h = binary.LittleEndian.AppendUint32(h, v)
	}
	seals := m.seals
	if seals == 0 {
		seals = sealSize
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if size >= int64(len(h)) {
		if _, err := unix.Pwrite(fd, h, 0); err != nil {
			t.Fatal(err)
		}
	}
	for off, index := range map[int64]uint32{4096: m.producer, 4096 + 128: m.consumer} {
		if index != 0 {
			if _, err := unix.Pwrite(fd, binary.LittleEndian.AppendUint32(nil, index), off); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return fd
}

// evil is a daemon that sends what a test asks for.
type evil struct {
	t   *testing.T
	mem map[string]memory
	// reply may change a reply, or return the bytes to send instead of it.
	reply func(r *ctrlpb.Reply, fds []int) ([]byte, []int)
	// events follow the reply to Connect, which is otherwise an error.
	events []*ctrlpb.Event
	// early packets precede the reply to Listen, with descriptors that do not belong there.
	early [][]byte

	destroyed int // objects that the client has destroyed
}

// serve serves one client until it disconnects.
func (e *evil) serve(c *net.UnixConn) {
	defer c.Close()
	requests := seqpacket.FromUnix(c)
	for {
		b, fds, err := requests.Read(1)
		if err != nil {
			return
		}
		seqpacket.CloseAll(fds)
		var req ctrlpb.Request
		if proto.Unmarshal(b, &req) != nil {
			e.t.Error("the client sent what is no Request")
			return
		}
		if req.GetListen() != nil && e.early != nil {
			r, w := e.pipe()
			for _, raw := range e.early {
				if err := write(c, raw, []int{r, w}); err != nil {
					e.t.Error(err)
				}
			}
			seqpacket.CloseAll([]int{r, w})
			time.Sleep(50 * time.Millisecond) // the client reads them, most of the time
		}
		r, fds := e.answer(&req)
		r.Id = req.Id
		var raw []byte
		if e.reply != nil {
			raw, fds = e.reply(r, fds)
		}
		if raw == nil {
			raw, _ = proto.Marshal(&ctrlpb.Message{Body: &ctrlpb.Message_Reply{Reply: r}})
		}
		err = write(c, raw, fds)
		seqpacket.CloseAll(fds)
		if err != nil {
			return
		}
		if r.GetConnect() != nil {
			for _, ev := range e.events {
				if write(c, event(ev), nil) != nil {
					return
				}
				if ev.GetCutOff() != nil {
					return
				}
			}
		}
	}
}

// write sends a packet, of any length and with as many descriptors as the kernel takes.
func write(c *net.UnixConn, b []byte, fds []int) error {
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(b, rights, nil)
	return err
}

func event(ev *ctrlpb.Event) []byte {
	raw, _ := proto.Marshal(&ctrlpb.Message{Body: &ctrlpb.Message_Event{Event: ev}})
	return raw
}

func (e *evil) pipe() (r, w int) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		e.t.Error(err)
	}
	return p[0], p[1]
}

func (e *evil) answer(req *ctrlpb.Request) (*ctrlpb.Reply, []int) {
	switch req.Body.(type) {
	case *ctrlpb.Request_Hello:
		r, w := e.pipe()
		unix.Close(r)
		return &ctrlpb.Reply{Body: &ctrlpb.Reply_Hello{Hello: &ctrlpb.HelloReply{Version: 1, Workers: 1, Device: &ctrlpb.DeviceAttr{MaxQpWr: 1024}}}},
			[]int{e.mem["bells"].make(e.t), w}
	case *ctrlpb.Request_AllocPd:
		return &ctrlpb.Reply{Body: &ctrlpb.Reply_Pd{Pd: &ctrlpb.PDReply{Pd: 1}}}, nil
	case *ctrlpb.Request_RegisterMr:
		return &ctrlpb.Reply{Body: &ctrlpb.Reply_Mr{Mr: &ctrlpb.MRReply{Mr: 2}}}, nil
	case *ctrlpb.Request_CreateCq:
		r, w := e.pipe()
		unix.Close(w)
		return &ctrlpb.Reply{Body: &ctrlpb.Reply_Cq{Cq: &ctrlpb.CQReply{Cq: 3}}}, []int{e.mem["cq"].make(e.t), r}
	case *ctrlpb.Request_CreateQp:
		return &ctrlpb.Reply{Body: &ctrlpb.Reply_Qp{Qp: &ctrlpb.QPReply{Qp: 4, Doorbell: 63}}},
			[]int{e.mem["sq"].make(e.t), e.mem["rq"].make(e.t)}
	case *ctrlpb.Request_CreateSrq:
		return &ctrlpb.Reply{Body: &ctrlpb.Reply_Srq{Srq: &ctrlpb.SRQReply{Srq: 6}}}, []int{e.mem["rq"].make(e.t)}
	case *ctrlpb.Request_CreateChannel:
		r, w := e.pipe()
		unix.Close(w)
		return &ctrlpb.Reply{Body: &ctrlpb.Reply_Channel{Channel: &ctrlpb.ChannelReply{Channel: 7}}}, []int{r}
	case *ctrlpb.Request_Listen:
		l := &ctrlpb.ListenReply{Listen: 8, Address: strings.Repeat("l", 1000)}
		return &ctrlpb.Reply{Body: &ctrlpb.Reply_Listen{Listen: l}}, nil
	case *ctrlpb.Request_DestroyCq, *ctrlpb.Request_DestroyQp, *ctrlpb.Request_DestroySrq, *ctrlpb.Request_DestroyChannel:
		e.destroyed++
	case *ctrlpb.Request_Connect:
		if e.events != nil {
			return &ctrlpb.Reply{Body: &ctrlpb.Reply_Connect{Connect: &ctrlpb.ConnectReply{Conn: 5}}}, nil
		}
	}
	return &ctrlpb.Reply{Error: &ctrlpb.Error{Code: 999, Text: strings.Repeat("far", 2000)}}, nil
}

// ping runs the example against the daemon and returns its output.
func (e *evil) ping(v *variant) (output string, code int) {
	return e.run(func(path string) *exec.Cmd { return v.command(e.t, "ping", "-u", path, "-c", "-a", "192.0.2.1") })
}

// check runs a mode of check.c that uses the daemon alone.
func (e *evil) check(v *variant, mode string) (output string, code int) {
	return e.run(func(path string) *exec.Cmd { return v.command(e.t, "check", path, "", path, "", mode) })
}

// run runs a command that is a client of the daemon at a path, and returns its output.
func (e *evil) run(command func(path string) *exec.Cmd) (output string, code int) {
	path := filepath.Join(e.t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		e.t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for c, err := l.AcceptUnix(); err == nil; c, err = l.AcceptUnix() {
			e.serve(c)
		}
	}()
	p := testenv.Start(e.t, command(path))
	<-p.Done
	l.Close()
	<-done
	return p.String(), p.Cmd.ProcessState.ExitCode()
}

// TestStoppingDaemon checks that iwarpd_open_wait waits for the next daemon if the one that answers is being stopped.
func TestStoppingDaemon(t *testing.T) { stoppingDaemon(t, plain) }

func TestSanitizedStoppingDaemon(t *testing.T) { stoppingDaemon(t, sanitized) }

func stoppingDaemon(t *testing.T, v *variant) {
	hellos := 0
	e := &evil{t: t, mem: good, reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
		if r.GetHello() != nil {
			if hellos++; hellos == 1 {
				seqpacket.CloseAll(fds)
				r.Body, r.Error = nil, &ctrlpb.Error{Code: ctrlpb.Code_CODE_DRAINING, Text: "stopping"}
				return nil, nil
			}
		}
		return nil, fds
	}}
	out, code := e.check(v, "reopen")
	if code != 0 || hellos != 2 {
		t.Errorf("exit code %d after %d attempts:\n%s", code, hellos, out)
	}
}

// TestFlushes checks that no queue pair stays unflushed when so many connects fail at once that the requests to flush them do not fit
// the socket of a daemon that is busy.
func TestFlushes(t *testing.T) { flushes(t, plain) }

func TestSanitizedFlushes(t *testing.T) { flushes(t, sanitized) }

func flushes(t *testing.T, v *variant) {
	const qps = 1000
	e := &evil{t: t, mem: good}
	for i := range uint32(qps) {
		e.events = append(e.events, &ctrlpb.Event{Body: &ctrlpb.Event_ConnectFailed{ConnectFailed: &ctrlpb.ConnectFailed{Qp: 1 + i, Error: &ctrlpb.Error{Code: ctrlpb.Code_CODE_UNREACHABLE}}}})
	}
	made, flushed := uint32(0), 0
	e.reply = func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
		switch {
		case r.GetQp() != nil:
			made++
			r.GetQp().Qp = made
		case r.Error != nil: // of a Disconnect
			if flushed++; flushed == qps {
				raw, _ := proto.Marshal(&ctrlpb.Message{Body: &ctrlpb.Message_Event{Event: &ctrlpb.Event{Body: &ctrlpb.Event_Draining{Draining: &ctrlpb.Draining{}}}}})
				return raw, nil
			}
		}
		return nil, fds
	}
	out, code := e.check(v, "flushes")
	if code != 0 {
		t.Errorf("exit code %d, %d of %d flushed:\n%s", code, flushed, qps, out)
	}
}

// TestSilentDaemon checks that a daemon that does not answer, as while it starts, delays a program no longer than that
// allows, and that a program makes a second attempt at a socket that it may not use yet.
func TestSilentDaemon(t *testing.T) { silentDaemon(t, plain) }

func TestSanitizedSilentDaemon(t *testing.T) { silentDaemon(t, sanitized) }

func silentDaemon(t *testing.T, v *variant) {
	path := filepath.Join(t.TempDir(), "s")
	testenv.Start(t, v.command(t, "check", path, "", path, "", "silent")).Succeed()
}

// A hostile daemon causes an error and no crash.
func TestSanitizedHostileDaemon(t *testing.T) {
	const whole = "far" // the error of Connect: everything before it was accepted
	with := func(which string, change func(*memory)) map[string]memory {
		mem := map[string]memory{}
		for k, m := range good {
			if k == which {
				change(&m)
			}
			mem[k] = m
		}
		return mem
	}
	type test struct {
		name  string
		mem   map[string]memory
		reply func(r *ctrlpb.Reply, fds []int) ([]byte, []int)
		want  string

		events []*ctrlpb.Event
	}
	tests := []test{{name: "as it should be", mem: good, want: whole}}
	for which, m := range good {
		changes := map[string]func(*memory){
			"magic":          func(m *memory) { m.magic = "WARPRUNG" },
			"version":        func(m *memory) { m.version = 2 },
			"kind":           func(m *memory) { m.kind = m.kind%4 + 1 },
			"no entries":     func(m *memory) { m.entries = 0 },
			"odd entries":    func(m *memory) { m.entries-- },
			"many entries":   func(m *memory) { m.entries = 1 << 31 },
			"more entries":   func(m *memory) { m.entries *= 1 << 10 },
			"no rings":       func(m *memory) { m.rings = 0; m.size = 4096 + int64(m.ringSize) },
			"many rings":     func(m *memory) { m.rings = 1 << 20; m.size = 4096 + int64(m.ringSize) },
			"ring size":      func(m *memory) { m.ringSize += 4096 },
			"wild ring size": func(m *memory) { m.ringSize = 1<<32 - 4096; m.size = 4096 },
			"short":          func(m *memory) { m.size = 4096 + int64(m.ringSize) - 4096 },
			"tiny":           func(m *memory) { m.size = 16 },
			"long":           func(m *memory) { m.size = 4096 + int64(m.ringSize) + 4096 },
			"can shrink":     func(m *memory) { m.seals = unix.F_SEAL_GROW },
			"can grow":       func(m *memory) { m.seals = unix.F_SEAL_SHRINK },
		}
		if m.stride != 0 {
			changes["no stride"] = func(m *memory) { m.stride = 0 }
			changes["stride"] = func(m *memory) { m.stride += 64 }
			changes["wild stride"] = func(m *memory) { m.stride = 1<<32 - 64 }
		}
		if m.maxSGE != 0 {
			changes["many SGEs"] = func(m *memory) { m.maxSGE = 1 << 28 }
			changes["more SGEs"] = func(m *memory) { m.maxSGE = 8 }
			changes["much inline"] = func(m *memory) { m.maxInline = 1<<32 - 1 }
		}
		for what, change := range changes {
			if which == "rq" && what == "much inline" {
				continue // has no effect there
			}
			tests = append(tests, test{name: which + "/" + what, mem: with(which, change), want: "Protocol error"})
		}
	}
	tests = append(tests,
		test{name: "no descriptors", mem: good, want: "invalid reply from the daemon", reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
			if r.GetCq() != nil {
				seqpacket.CloseAll(fds)
				fds = nil
			}
			return nil, fds
		}},
		test{name: "too many descriptors", mem: good, want: "invalid reply from the daemon", reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
			if r.GetQp() != nil {
				for range 20 {
					fd, _ := seqpacket.Dup(fds[0])
					fds = append(fds, fd)
				}
			}
			return nil, fds
		}},
		test{
			name: "more descriptors than a packet may have", mem: good, want: "Protocol error",
			reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
				if r.GetQp() != nil {
					for len(fds) < 253 { // the kernel's SCM_MAX_FD
						fd, _ := seqpacket.Dup(fds[0])
						fds = append(fds, fd)
					}
				}
				return nil, fds
			},
		},
		test{
			name: "an odd number of descriptors", mem: good, want: "Protocol error",
			reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
				if r.GetHello() != nil {
					fd, _ := seqpacket.Dup(fds[0])
					fds = append(fds, fd)
				}
				return nil, fds
			},
		},
		test{
			name: "no workers", mem: good, want: "Protocol error",
			reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
				if h := r.GetHello(); h != nil {
					h.Workers = 0
					seqpacket.CloseAll(fds)
					fds = nil
				}
				return nil, fds
			},
		},
		test{
			name: "no device", mem: good, want: "Protocol error",
			reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
				if h := r.GetHello(); h != nil {
					h.Device = nil
				}
				return nil, fds
			},
		},
		test{
			name: "no message, with descriptors", mem: good, want: "Protocol error",
			reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
				if r.GetCq() != nil {
					return []byte{0xff, 0xff, 1, 2, 3}, fds
				}
				return nil, fds
			},
		},
		test{
			name: "a packet that is too long", mem: good, want: "Protocol error",
			reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
				if r.GetPd() != nil { // with a field that no client knows; without its last byte it is a message
					raw, _ := proto.Marshal(&ctrlpb.Message{Body: &ctrlpb.Message_Reply{Reply: r}})
					raw = protowire.AppendTag(raw, 1000, protowire.BytesType)
					return append(protowire.AppendBytes(raw, make([]byte, 65536-3-len(raw))), 0), fds
				}
				return nil, fds
			},
		},
		test{name: "another reply", mem: good, want: "invalid reply from the daemon", reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
			if r.GetPd() != nil {
				r.Body = &ctrlpb.Reply_Mr{Mr: &ctrlpb.MRReply{}}
			}
			return nil, fds
		}},
		test{name: "no such doorbell", mem: good, want: "Protocol error", reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
			if q := r.GetQp(); q != nil {
				q.Doorbell = 64
			}
			return nil, fds
		}},
		test{name: "more workers than descriptors", mem: good, want: "Protocol error", reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
			if h := r.GetHello(); h != nil {
				h.Workers = 1<<31 + 1
			}
			return nil, fds
		}},
		test{name: "another version", mem: good, want: "Protocol error", reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
			if h := r.GetHello(); h != nil {
				h.Version = 2
			}
			return nil, fds
		}},
		test{name: "no message", mem: good, want: "Protocol error", reply: func(r *ctrlpb.Reply, fds []int) ([]byte, []int) {
			if r.GetMr() != nil {
				return []byte{0xff, 0xff, 1, 2, 3}, fds
			}
			return nil, fds
		}},
	)
	established := func(worker uint32) *ctrlpb.Event {
		return &ctrlpb.Event{Body: &ctrlpb.Event_Established{Established: &ctrlpb.Established{
			Qp: 4, Worker: worker, Local: strings.Repeat("l", 1000), Remote: strings.Repeat("r", 1000), PrivateData: make([]byte, 5000),
		}}}
	}
	ready := []*ctrlpb.Event{established(0)}
	var flood []*ctrlpb.Event
	for range 9000 {
		flood = append(flood, &ctrlpb.Event{Body: &ctrlpb.Event_ConnectGone{ConnectGone: &ctrlpb.ConnectGone{Conn: 1}}})
	}
	var callers []*ctrlpb.Event // peers that connect and leave
	for i := range uint32(9000) {
		first := &ctrlpb.Event{Body: &ctrlpb.Event_ConnectRequest{ConnectRequest: &ctrlpb.ConnectRequest{Conn: 100 + i, Listen: 1}}}
		if i%2 == 1 {
			first.Body = &ctrlpb.Event_StreamReady{StreamReady: &ctrlpb.StreamReady{Conn: 100 + i, Listen: 1}}
		}
		callers = append(callers, first, &ctrlpb.Event{Body: &ctrlpb.Event_ConnectGone{ConnectGone: &ctrlpb.ConnectGone{Conn: 100 + i}}})
	}
	var negotiates []*ctrlpb.Event
	for range 9000 {
		negotiates = append(negotiates, &ctrlpb.Event{Body: &ctrlpb.Event_AsyncError{AsyncError: &ctrlpb.AsyncError{Kind: ctrlpb.AsyncKind_ASYNC_NEGOTIATE}}})
	}
	cut := &ctrlpb.Event{Body: &ctrlpb.Event_CutOff{CutOff: &ctrlpb.CutOff{Error: &ctrlpb.Error{Text: "because"}}}}
	tests = append(tests,
		test{name: "CQ producer far ahead", mem: with("cq", func(m *memory) { m.producer = 1 << 20 }), want: "Protocol error", events: ready},
		test{name: "CQ full of nonsense", mem: with("cq", func(m *memory) { m.producer = 64 }), want: "none of rping's", events: ready},
		test{name: "SQ consumer ahead", mem: with("sq", func(m *memory) { m.consumer = 5 }), want: "Protocol error", events: ready},
		test{name: "RQ consumer ahead", mem: with("rq", func(m *memory) { m.consumer = 5 }), want: "Protocol error"},
		test{name: "no such worker", mem: good, want: "Broken pipe", events: []*ctrlpb.Event{established(1 << 31)}},
		test{name: "a queue that is no queue pair", mem: good, want: "cut this client off: because", events: []*ctrlpb.Event{
			{Body: &ctrlpb.Event_Established{Established: &ctrlpb.Established{Qp: 3}}}, cut,
		}},
		test{name: "a flood of events", mem: good, want: "Value too large", events: flood},
		test{name: "peers that leave", mem: good, want: "cut this client off: because", events: append(callers, cut)},
		test{name: "a peer that negotiates forever", mem: good, want: "cut this client off: because", events: append(negotiates, cut)},
		test{name: "cut off", mem: good, want: "cut this client off: because", events: []*ctrlpb.Event{
			cut,
			{Body: &ctrlpb.Event_Disconnected{Disconnected: &ctrlpb.Disconnected{Qp: 77}}},
		}},
	)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := &evil{t: t, mem: tt.mem, reply: tt.reply, events: tt.events}
			out, code := e.ping(sanitized)
			if code != 1 || !strings.Contains(out, tt.want) || strings.Contains(out, "Sanitizer") {
				t.Errorf("exit code %d; want 1 with %q:\n%s", code, tt.want, out)
			}
			// What a program cannot use is given back, and nothing of it is left.
			e = &evil{t: t, mem: tt.mem, reply: tt.reply}
			out, code = e.check(sanitized, "hostile")
			refused := fmt.Sprintf("refused %d\n", e.destroyed)
			if code != 0 || strings.Contains(out, "refused") && !strings.Contains(out, refused) {
				t.Errorf("exit code %d; want 0 with %d refused objects:\n%s", code, e.destroyed, out)
			}
		})
	}
}

// TestEarlyRequest checks that a connect request that comes before the reply to Listen waits until the program knows
// the listener, and that a message of a later version is ignored.
func TestEarlyRequest(t *testing.T) { earlyRequest(t, plain) }

func TestSanitizedEarlyRequest(t *testing.T) { earlyRequest(t, sanitized) }

func earlyRequest(t *testing.T, v *variant) {
	later := protowire.AppendBytes(protowire.AppendTag(nil, 1000, protowire.BytesType), nil)
	caller := &ctrlpb.ConnectRequest{Conn: 100, Listen: 8}
	request := event(&ctrlpb.Event{Body: &ctrlpb.Event_ConnectRequest{ConnectRequest: caller}})
	e := &evil{t: t, mem: good, early: [][]byte{later, request}}
	if out, code := e.check(v, "coming"); code != 0 {
		t.Errorf("exit code %d:\n%s", code, out)
	}
}
