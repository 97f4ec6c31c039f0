package embed_test

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/shm"
)

// rawClient is a hostile client: it speaks the protocol by hand over the daemon's socket and writes to memory that it
// should not change.
type rawClient struct {
	t      *testing.T
	c      *seqpacket.Conn
	msgs   chan rawMessage
	id     uint64
	events []*ctrlpb.Event
	bells  *shm.DoorbellRinger
	sq     *shm.SQProducer
	bell   int
	ring   []byte // the completion queue's memfd
}

type rawMessage struct {
	m   *ctrlpb.Message
	fds []int
	err error
}

func newRawClient(t *testing.T, socket string) *rawClient {
	t.Helper()
	c, err := seqpacket.Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	f := &rawClient{t: t, c: c, msgs: make(chan rawMessage, 64)}
	t.Cleanup(func() { c.Close() })
	go func() {
		for {
			b, fds, err := c.Read(seqpacket.MaxFDs)
			m := new(ctrlpb.Message)
			if err == nil {
				err = proto.Unmarshal(b, m)
			}
			f.msgs <- rawMessage{m, fds, err}
			if err != nil {
				return
			}
		}
	}()
	return f
}

func (f *rawClient) next() rawMessage {
	f.t.Helper()
	select {
	case m := <-f.msgs:
		return m
	case <-time.After(time.Minute):
		f.t.Fatal("no message within a minute")
		return rawMessage{}
	}
}

func (f *rawClient) do(req *ctrlpb.Request) (*ctrlpb.Reply, []int) {
	f.t.Helper()
	f.id++
	req.Id = f.id
	b, err := proto.Marshal(req)
	if err == nil {
		err = f.c.Write(b, nil)
	}
	if err != nil {
		f.t.Fatal(err)
	}
	for {
		m := f.next()
		if m.err != nil {
			f.t.Fatal(m.err)
		}
		if ev := m.m.GetEvent(); ev != nil {
			f.events = append(f.events, ev)
			continue
		}
		if e := m.m.GetReply().Error; e != nil {
			f.t.Fatalf("%T: %s", req.Body, e.Text)
		}
		fds := m.fds
		f.t.Cleanup(func() { seqpacket.CloseAll(fds) })
		return m.m.GetReply(), fds
	}
}

// rawDepth is the number of completions and of work requests that its queues hold.
const rawDepth = 8

// open creates a queue pair and connects it.
func (f *rawClient) open(remote string) {
	f.t.Helper()
	_, fds := f.do(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	var err error
	if f.bells, err = shm.MapDoorbells(fds[0], fds[1]); err != nil {
		f.t.Fatal(err)
	}
	pd, _ := f.do(&ctrlpb.Request{Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}})
	cq, fds := f.do(&ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: rawDepth}}})
	var st unix.Stat_t
	if err := unix.Fstat(fds[0], &st); err != nil {
		f.t.Fatal(err)
	}
	if f.ring, err = unix.Mmap(fds[0], 0, int(st.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		f.t.Fatal(err)
	}
	qp, fds := f.do(&ctrlpb.Request{Body: &ctrlpb.Request_CreateQp{CreateQp: &ctrlpb.CreateQP{
		Pd: pd.GetPd().Pd, SendCq: cq.GetCq().Cq, RecvCq: cq.GetCq().Cq, SqDepth: 4 * rawDepth, RqDepth: 1, MaxSge: 1,
	}}})
	if f.sq, err = shm.MapSQ(fds[0]); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { f.bells.Close(); f.sq.Close(); _ = unix.Munmap(f.ring) })
	f.bell = int(qp.GetQp().Doorbell)
	f.do(&ctrlpb.Request{Body: &ctrlpb.Request_Connect{Connect: &ctrlpb.Connect{Qp: qp.GetQp().Qp, Remote: remote}}})
	for {
		if len(f.events) == 0 {
			f.events = append(f.events, f.next().m.GetEvent())
		}
		if f.events[0].GetEstablished() != nil {
			return
		}
		f.t.Fatalf("event %v", f.events[0])
	}
}

// word returns a word of the completion queue's memory.
func (f *rawClient) word(off int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&f.ring[off]))
}

// write posts n Writes of no bytes.
func (f *rawClient) write(n int, to *iwarp.MR) {
	f.t.Helper()
	for range n {
		if err := f.sq.Post(&iwarp.SendWR{Op: iwarp.OpWrite, Flags: iwarp.Signaled, Remote: to.Base(), RKey: to.RKey()}); err != nil {
			f.t.Fatal(err)
		}
		f.bells.Ring(f.bell)
	}
}

// completes waits until the daemon has put n completions into the ring in total.
func (f *rawClient) completes(n uint32) {
	f.t.Helper()
	testenv.Until(f.t, fmt.Sprintf("there are %d completions", n), func() bool { return f.word(shm.HeaderSize+shm.RingProducer).Load() == n })
}

// TestForgedCompletionRing checks that a client that corrupts its completion queue harms only itself: an impossible
// index disconnects it with the reason. Another client of the daemon, and the peer, continue.
func TestForgedCompletionRing(t *testing.T) {
	const consumer = shm.HeaderSize + shm.RingConsumer
	socket := filepath.Join(t.TempDir(), "s")
	na, nb, _ := pair(t, embed.PairConfig{CtrlA: ctrl.Config{Socket: socket}})
	ctx := t.Context()
	victim, friend := newEnd(t, ctx, na, 16), newEnd(t, ctx, nb, 16)
	join(t, ctx, nb, victim.qp, friend.qp)
	l := listen(t, ctx, nb, ":0", nil)
	for _, tt := range []struct {
		name  string
		forge func(f *rawClient) // runs with rawDepth completions in the ring, none of them consumed
		ends  bool
	}{
		{"one more taken than there is", func(f *rawClient) { f.word(consumer).Store(rawDepth + 1) }, true},
		{"far more taken", func(f *rawClient) { f.word(consumer).Store(1 << 30) }, true},
		{"one untaken", func(f *rawClient) { f.word(consumer).Store(^uint32(0)) }, true},
		{"half way round", func(f *rawClient) { f.word(consumer).Store(1 << 31) }, true},
		{"all taken unread", func(f *rawClient) { f.word(consumer).Store(rawDepth) }, false},
		{"the daemon's words", func(f *rawClient) {
			for off := 0; off < shm.HeaderSize; off += 4 { // among them arm and overruns
				f.word(off).Store(^uint32(0))
			}
			for off := shm.HeaderSize + shm.RingEntries; off < len(f.ring); off += 4 {
				f.word(off).Store(^uint32(0))
			}
			f.word(consumer).Store(rawDepth)
		}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newRawClient(t, socket)
			peer := newQP(t, ctx, nb, iwarp.QPConfig{PD: friend.pd, SendCQ: friend.cq, RecvCQ: friend.cq})
			accepted := accepting(ctx, l, peer)
			f.open(dialAddr(nb, l))
			if err := <-accepted; err != nil {
				t.Fatal(err)
			}
			f.write(rawDepth, friend.mem)
			f.completes(rawDepth)
			tt.forge(f)
			f.write(1, friend.mem)
			if tt.ends {
				var why string
				for why == "" {
					m := f.next()
					if m.err != nil {
						t.Fatalf("ended without a word: %v", m.err)
					}
					why = m.m.GetEvent().GetCutOff().GetError().GetText()
				}
				if !strings.Contains(why, "consumer index of completion queue") {
					t.Errorf("cut off: %s", why)
				}
				for {
					if m := f.next(); m.err != nil {
						if !errors.Is(m.err, io.EOF) && !errors.Is(m.err, unix.ECONNRESET) {
							t.Error(m.err)
						}
						break
					}
				}
			} else {
				f.completes(rawDepth + 1)
				f.c.Close()
			}
			select {
			case <-peer.Done():
			case <-time.After(time.Minute):
				t.Error("the connection of the client that is gone is still there")
			}
			if err := peer.Close(); err != nil {
				t.Error(err)
			}
			// All objects of the client are freed, and none of the other client's.
			testenv.Until(t, "only the other client is left", func() bool {
				st := na.Server().Status()
				return st.Clients == 1 && st.Qps == 1 && st.Cqs == 1 && st.Conns == 1
			})
			victim.post(t, &iwarp.SendWR{
				Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{victim.mem.SGE(0, 64)}, Remote: friend.mem.Base(), RKey: friend.mem.RKey(),
			})
			victim.wait(t, ctx, 1)
		})
	}
}
