package rpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iwarpd/iwarpd/internal/subnet"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

func TestItems(t *testing.T) {
	for n := range 9 {
		data := bytes.Repeat([]byte{7}, n)
		var w Writer
		w.U32(1)
		w.Item(data)
		w.U64(2)
		w.Item([]byte("second"))
		w.U32(3)
		flat := w.AppendFlat(nil)
		if len(flat) != w.Len() {
			t.Fatalf("Len %d, %d bytes", w.Len(), len(flat))
		}
		for name, m := range map[string]Msg{"items": w.Msg, "flat": {Body: flat}} {
			r := NewReader(m)
			if r.Left() != len(flat) || r.U32() != 1 || !bytes.Equal(r.Opaque(100), data) || r.U64() != 2 || r.String(100) != "second" || r.U32() != 3 || r.Err() != nil || r.Left() != 0 {
				t.Errorf("%s of %d: %v, %d left", name, n, r.Err(), r.Left())
			}
			if r.U32() != 0 || r.Err() == nil {
				t.Error("it reads on behind the end")
			}
			all, err := io.ReadAll(NewReader(m))
			if err != nil || !bytes.Equal(all, flat) {
				t.Errorf("%s of %d: Read gives %x, %v", name, n, all, err)
			}
		}
		// As it comes from the wire: positions are those of the whole message.
		body, items, pos := bytes.Clone(w.Body), []Item{}, []uint32{}
		moved := 0
		for _, it := range w.Items {
			items = append(items, Item{Data: it.Data})
			pos = append(pos, uint32(it.Pos+moved))
			moved += Pad(len(it.Data))
		}
		m, ok := Place(body, items, pos)
		if !ok || !bytes.Equal(m.AppendFlat(nil), flat) {
			t.Errorf("%d: placed %v", n, ok)
		}
	}
}

func TestPlaceRefuses(t *testing.T) {
	body := make([]byte, 40)
	for _, c := range []struct {
		pos []uint32
		len []int
	}{{[]uint32{44}, []int{4}}, {[]uint32{1 << 31}, []int{4}}, {[]uint32{8, 8}, []int{100, 4}}, {[]uint32{8, 40}, []int{100, 4}}, {[]uint32{20, 16}, []int{4, 4}}} {
		items := make([]Item, len(c.pos))
		for i := range items {
			items[i].Data = make([]byte, c.len[i])
		}
		if m, ok := Place(body, items, c.pos); ok {
			t.Errorf("%v: %+v", c.pos, m.Items)
		}
	}
}

// TestPadding checks that a data item from a chunk has the length in the message, with or
// without its padding.
func TestPadding(t *testing.T) {
	for _, c := range []struct {
		n, chunk int
		ok       bool
	}{{5, 5, true}, {5, 8, true}, {5, 4, false}, {5, 6, false}, {5, 9, false}, {5, 12, false}, {8, 8, true}, {8, 7, false}, {8, 9, false}, {8, 12, false}, {1, 4, true}} {
		var w Writer
		w.U32(uint32(c.n), 99)
		data := bytes.Repeat([]byte{7}, c.chunk)
		m, ok := Place(w.Body, []Item{{Data: data}}, []uint32{4})
		if !ok {
			t.Fatal("no place")
		}
		r := NewReader(m)
		got := r.Opaque(100)
		if (r.Err() == nil) != c.ok || c.ok && (!bytes.Equal(got, data[:c.n]) || r.U32() != 99 || r.Left() != 0) {
			t.Errorf("an item of %d in a chunk of %d: %d, %v", c.n, c.chunk, len(got), r.Err())
		}
	}
}

func TestResult(t *testing.T) {
	head := func(n uint32) []byte { var w Writer; w.U32(n); return w.Body }
	for _, c := range []struct {
		name string
		m    Msg
		want string
		bad  bool
	}{
		{"in its chunk", Msg{head(5), []Item{{-1, []byte("hello")}}}, "hello", false},
		{"inline, the chunk unused", Msg{append(head(5), "hello\x00\x00\x00"...), []Item{{-1, nil}}}, "hello", false},
		{"inline, no chunk", Msg{append(head(5), "hello\x00\x00\x00"...), nil}, "hello", false},
		{"another length", Msg{head(4), []Item{{-1, []byte("hello")}}}, "", true},
		{"too long", Msg{head(30), []Item{{-1, make([]byte, 30)}}}, "", true},
	} {
		r := NewReader(c.m)
		if got := r.Result(20); string(got) != c.want || (r.Err() != nil) != c.bad {
			t.Errorf("%s: %q, %v", c.name, got, r.Err())
		}
	}
}

func TestCalls(t *testing.T) {
	sys := Sys{7, "host", 1000, 100, []uint32{1, 2, 3}}
	c := Call{XID: 1, Prog: 2, Vers: 3, Proc: 4, Cred: sys.Auth()}
	var w Writer
	c.Start(&w)
	w.U32(99)
	got, err := parseCall(w.Msg)
	if err != nil || got.XID != 1 || got.Prog != 2 || got.Vers != 3 || got.Proc != 4 || got.Args.U32() != 99 {
		t.Fatalf("%+v, %v", got, err)
	}
	if s, ok := ParseSys(got.Cred); !ok || s.UID != 1000 || s.Machine != "host" || len(s.GIDs) != 3 {
		t.Errorf("%+v, %v", s, ok)
	}
	for i := range len(w.Body) - 4 {
		if i%4 == 0 {
			if _, err := parseCall(Msg{Body: w.Body[:i]}); i < 40 && !errors.Is(err, ErrXDR) {
				t.Errorf("%d bytes: %v", i, err)
			}
		}
	}
	for s := Success; s <= SystemErr; s++ {
		var w Writer
		startReply(&w, 5, s, 1, 2)
		_, err := ParseReply(w.Msg)
		if s == Success && err != nil || s != Success && !errors.Is(err, s) {
			t.Errorf("%v: %v", s, err)
		}
	}
	for _, s := range []Status{RPCMismatch, AuthError} {
		var w Writer
		startReply(&w, 5, s, 1, 2)
		if _, err := ParseReply(w.Msg); !errors.Is(err, s) {
			t.Errorf("%v: %v", s, err)
		}
	}
}

// counter counts how often a procedure that must be done once is done.
func counter(n *atomic.Int32, hold chan struct{}) *Server {
	s := &Server{}
	s.Register(9, Program{Low: 1, High: 1, Once: func(_, proc uint32) bool { return proc == 1 }, Serve: func(_ context.Context, r *Request) Status {
		if hold != nil {
			<-hold
		}
		r.Reply.U32(uint32(n.Add(1)))
		return Success
	}})
	return s
}

func makeCall(xid, proc uint32, arg uint32) Msg {
	var w Writer
	c := Call{XID: xid, Prog: 9, Vers: 1, Proc: proc}
	c.Start(&w)
	w.U32(arg)
	return w.Msg
}

func TestDuplicates(t *testing.T) {
	var n atomic.Int32
	hold := make(chan struct{})
	s := counter(&n, hold)
	do := func(peer string, m Msg) uint32 {
		reply, ok := s.Serve(t.Context(), peer, m, nil)
		r, err := ParseReply(reply)
		if !ok || err != nil {
			t.Fatal(ok, err)
		}
		return r.U32()
	}
	// One that comes while the first is being done waits for its reply.
	var wg sync.WaitGroup
	var got [5]uint32
	for i := range got {
		wg.Go(func() { got[i] = do("a", makeCall(1, 1, 1)) })
	}
	close(hold)
	wg.Wait()
	for _, v := range got {
		if v != 1 {
			t.Fatal(got)
		}
	}
	as := func(a Auth) Msg {
		var w Writer
		(&Call{XID: 1, Prog: 9, Vers: 1, Proc: 1, Cred: a}).Start(&w)
		w.U32(1)
		return w.Msg
	}
	by := func(s Sys) Msg { return as(s.Auth()) }
	apart := makeCall(1, 1, 1000)
	apart.Items = []Item{{len(apart.Body), bytes.Repeat([]byte{7}, 1000)}}
	for _, c := range []struct {
		name string
		peer string
		m    Msg
		want uint32
	}{
		{"again", "a", makeCall(1, 1, 1), 1}, {"another client", "b", makeCall(1, 1, 1), 2}, {"another XID", "a", makeCall(2, 1, 1), 3},
		{"the XID used anew", "a", makeCall(1, 1, 2), 4}, {"may be done twice", "a", makeCall(1, 2, 1), 5}, {"is done twice", "a", makeCall(1, 2, 1), 6},
		{"its data apart", "a", apart, 7}, {"again, all in one", "a", Msg{Body: apart.AppendFlat(nil)}, 7},
		{"another machine behind the address", "a", by(Sys{Machine: "neighbor"}), 8}, {"another user", "a", by(Sys{UID: 1}), 9},
		{"that machine later", "a", by(Sys{Machine: "neighbor", Stamp: 1}), 8},
		{"the first is still known", "a", makeCall(1, 1, 1), 1},
		{"a credential of another kind", "a", as(Auth{Flavor: 9, Body: []byte{1, 0, 0, 0}}), 10},
		{"another one of that kind", "a", as(Auth{Flavor: 9, Body: []byte{2, 0, 0, 0}}), 11},
	} {
		if v := do(c.peer, c.m); v != c.want {
			t.Errorf("%s: %d, not %d", c.name, v, c.want)
		}
	}
	for i := range uint32(cacheSize) {
		do("a", makeCall(100+i, 1, 1))
	}
	if len(s.cache.entries) != cacheSize || do("a", makeCall(1, 1, 1)) == 1 {
		t.Errorf("%d entries", len(s.cache.entries))
	}
}

// cacheSize is the number of short replies that are cached.
const cacheSize = cacheCost / leastCost

// TestRepliesOfOthers checks that neither clients with many calls nor a network of many clients displace the replies of
// other clients, but those beyond a share, and that nothing is counted for replies that are gone.
func TestRepliesOfOthers(t *testing.T) {
	var n atomic.Int32
	s := counter(&n, nil)
	do := func(peer string, xid uint32) uint32 {
		reply, _ := s.Serve(t.Context(), peer, makeCall(xid, 1, 1), nil)
		r, err := ParseReply(reply)
		if err != nil {
			t.Fatal(err)
		}
		return r.U32()
	}
	const few, many = 500, cacheSize
	first := make(map[string]uint32)
	for _, c := range []struct {
		peer  string
		calls uint32
	}{{"10.0.0.1", few}, {"fe80::1", many}, {"10.0.0.2", many}, {"2001:db8::1", few}} {
		for i := range c.calls {
			if r := do(c.peer, i); c.calls == many && i >= many-few && first[c.peer] == 0 || i == 0 && c.calls == few {
				first[c.peer] = r
			}
		}
	}
	for i := range uint32(2 * cacheSize) {
		do(fmt.Sprintf("2001:db8::1:%x", i), 0)
	}
	for peer, want := range first {
		xid := uint32(0)
		if peer == "fe80::1" || peer == "10.0.0.2" {
			xid = many - few
		}
		if got := do(peer, xid); (got == want) == (peer == "2001:db8::1") { // that is in the network of the many
			t.Errorf("%s: %d, then %d", peer, want, got)
		}
	}
	c := &s.cache
	if len(c.entries) > cacheSize || c.cost > cacheCost {
		t.Errorf("%d entries of %d bytes", len(c.entries), c.cost)
	}
	for c.cost > 0 {
		c.drop(c.largest())
	}
	if len(c.entries)+len(c.clients) > 0 {
		t.Errorf("%d entries and %d clients are left", len(c.entries), len(c.clients))
	}
}

// TestOldReply checks that a client that makes the same call with the same XID long afterwards gets a reply of its own,
// which is kept as long as any.
func TestOldReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int32
		s := counter(&n, nil)
		do := func(xid uint32) uint32 {
			reply, _ := s.Serve(t.Context(), "a", makeCall(xid, 1, 1), nil)
			r, err := ParseReply(reply)
			if err != nil {
				t.Fatal(err)
			}
			return r.U32()
		}
		want := func(what string, v uint32) {
			if got := do(1); got != v {
				t.Errorf("%s: %d, not %d", what, got, v)
			}
		}
		want("first", 1)
		time.Sleep(59 * time.Minute)
		want("within an hour", 1)
		time.Sleep(2 * time.Minute)
		want("later", 2)
		for i := range uint32(cacheSize - 1) {
			do(100 + i)
		}
		want("after other calls", 2)
		do(99)
		want("after more of them than are kept", 2+cacheSize+1)
		time.Sleep(cacheAge)
		if do(1000); len(s.cache.entries) != 1 {
			t.Errorf("%d replies are kept after an hour", len(s.cache.entries))
		}
	})
}

// TestLongReplies checks that the memory for cached replies is bounded, and that the latest one is kept, however long.
func TestLongReplies(t *testing.T) {
	size, calls := 0, 0
	s := &Server{}
	once := func(uint32, uint32) bool { return true }
	s.Register(9, Program{Low: 1, High: 1, Once: once, Serve: func(_ context.Context, r *Request) Status {
		calls++
		r.Reply.Opaque(make([]byte, size))
		return Success
	}})
	do := func(xid uint32, long, want int) {
		t.Helper()
		size = long
		reply, ok := s.Serve(t.Context(), "a", makeCall(xid, 1, 1), nil)
		if !ok || reply.Len() < long || calls != want {
			t.Errorf("call %d: %d bytes, %d calls, not %d", xid, reply.Len(), calls, want)
		}
	}
	for i := range 40 {
		do(uint32(i), 1<<20, i+1)
	}
	kept := 0
	for _, e := range s.cache.entries {
		kept += len(e.reply.Body)
	}
	if kept > 16<<20 || kept < 15<<20 {
		t.Errorf("%d bytes are kept", kept)
	}
	do(39-14, 1<<20, 40)
	do(0, 1<<20, 41)
	do(100, 20<<20, 42)
	do(100, 20<<20, 42)
	do(0, 1<<20, 43)
	do(0, 1<<20, 43)
	do(100, 20<<20, 44)
}

// TestReplyIsKept checks that the reply of a call that must not run twice stays in the
// cache while the call runs and shortly after, however many and however large other
// replies are.
func TestReplyIsKept(t *testing.T) {
	var n atomic.Uint32
	entered, hold := make(chan struct{}, 2), make(chan struct{})
	s := &Server{}
	yes := func(uint32, uint32) bool { return true }
	s.Register(9, Program{Low: 1, High: 1, Once: yes, Bulk: func(_, proc uint32) bool { return proc == 2 }, Serve: func(_ context.Context, r *Request) Status {
		if r.Proc == 3 {
			entered <- struct{}{}
			<-hold
		}
		r.Reply.U32(n.Add(1))
		return Success
	}})
	do := func(m Msg) uint32 {
		reply, ok := s.Serve(t.Context(), "a", m, nil)
		r, err := ParseReply(reply)
		if !ok || err != nil {
			t.Error(ok, err)
			return 0
		}
		return r.U32()
	}
	var wg sync.WaitGroup
	var got [2]uint32
	wg.Go(func() { got[0] = do(makeCall(1, 3, 0)) })
	<-entered
	for i := range uint32(cacheSize + 1) {
		do(makeCall(i, 1, 0))
	}
	wg.Go(func() { got[1] = do(makeCall(1, 3, 0)) }) // comes again while it is being done
	close(hold)
	wg.Wait()
	if again := do(makeCall(1, 3, 0)); got[0] != cacheSize+2 || got[1] != got[0] || again != got[0] {
		t.Errorf("what was being done: %v, then %d", got, again)
	}
	first := do(makeCall(1, 2, 0))
	for i := range uint32(cacheSize - 1) {
		do(makeCall(2+i, 2, 0))
	}
	if again := do(makeCall(1, 2, 0)); again != first {
		t.Errorf("bulk: %d, then %d", first, again)
	}
	do(makeCall(1+cacheSize, 2, 0))
	if again := do(makeCall(1, 2, 0)); again == first {
		t.Error("bulk is kept for good")
	}
	if again := do(makeCall(1, 3, 0)); again != got[0] {
		t.Errorf("after bulk: %d, then %d", got[0], again)
	}
}

func TestTCP(t *testing.T) {
	var n atomic.Int32
	l := serving(t, counter(&n, nil))
	c := dialFrom(t, l, 1)
	// In fragments of one word, then whole.
	m := makeCall(3, 2, 1)
	for i := 0; i < len(m.Body); i += 4 {
		mark := []byte{0, 0, 0, 4}
		if i+4 == len(m.Body) {
			mark[0] = 0x80
		}
		if _, err := c.Write(append(mark, m.Body[i:i+4]...)); err != nil {
			t.Fatal(err)
		}
	}
	for want := range uint32(2) {
		if want == 1 {
			write(t, c, &m)
		}
		b := read(t, c)
		r, err := ParseReply(Msg{Body: b})
		if err != nil || r.U32() != want+1 {
			t.Fatal(err)
		}
	}
	// Many at once, whose replies come in any order.
	for i := range uint32(100) {
		m := makeCall(100+i, 2, 1)
		write(t, c, &m)
	}
	seen := make(map[uint32]bool)
	for range 100 {
		b := read(t, c)
		seen[binary.BigEndian.Uint32(b)] = true
	}
	if len(seen) != 100 || !seen[100] || !seen[199] {
		t.Errorf("replies to %d calls", len(seen))
	}
	// With items.
	for n := range 9 {
		var w Writer
		w.U32(1)
		w.Item(bytes.Repeat([]byte{1}, n))
		w.Item(bytes.Repeat([]byte{2}, 9-n))
		w.U32(2)
		var b bytes.Buffer
		write(t, &b, &w.Msg)
		if got, err := record(&b); err != nil || !bytes.Equal(got, w.AppendFlat(nil)) || b.Len() != 0 {
			t.Errorf("%d bytes: %x, %v", n, got, err)
		}
	}
	// A record that is too long, or that never ends, ends the connection.
	if _, err := c.Write([]byte{0x7f, 0xff, 0xff, 0xff}); err != nil {
		t.Fatal(err)
	}
	if _, err := record(c); err == nil {
		t.Error("a record of 2 GiB is taken")
	}
}

// TestUDP checks that a call in a datagram gets its reply in one, from the address that
// the call was sent to, on a socket that is bound to one address or to all, and that
// other datagrams get no reply.
func TestUDP(t *testing.T) {
	for _, bind := range []string{"127.0.0.2:0", ":0"} {
		l, err := ListenUDP(t.Context(), bind)
		if err != nil {
			t.Fatal(err)
		}
		var n atomic.Int32
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- counter(&n, nil).ServeUDP(ctx, l) }()
		// A socket that is connected takes nothing from another address.
		c, err := net.Dial("udp", fmt.Sprintf("127.0.0.2:%d", l.LocalAddr().(*net.UDPAddr).Port))
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		b := make([]byte, 2048)
		for want := range uint32(3) {
			m := makeCall(7+want, 2, 1)
			for _, d := range [][]byte{nil, {1, 2, 3}, bytes.Repeat([]byte{0xff}, 6000), m.Body} {
				if _, err := c.Write(d); err != nil {
					t.Fatal(err)
				}
			}
			k, err := c.Read(b)
			if err != nil {
				t.Fatalf("bound to %s: %v", bind, err)
			}
			r, err := ParseReply(Msg{Body: b[:k]})
			if err != nil || binary.BigEndian.Uint32(b) != 7+want || r.U32() != want+1 {
				t.Fatal(err, b[:k])
			}
		}
		c.Close()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// serving serves TCP until the test ends.
func serving(t *testing.T, s *Server) net.Listener {
	l := testenv.Listen(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.ServeTCP(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l
}

func serveTCP(t *testing.T, s *Server, p Program) (dial func() net.Conn) {
	s.Register(9, p)
	l := serving(t, s)
	return func() net.Conn { return dialFrom(t, l, 1) }
}

// TestLargeCalls checks that a connection has only a few large calls in progress, and a client with many connections
// not many more, large by their arguments or by their results, and that large results do not delay other calls.
func TestLargeCalls(t *testing.T) {
	const calls = 3 * perConnLarge // of a connection
	for _, test := range []struct{ args, conns, most int }{
		{0, 1, perConnLarge}, {1 << 20, 1, perConnLarge}, {0, 2 * perPeerLarge / perConnLarge, perPeerLarge},
	} {
		var under, most atomic.Int32
		entered, hold := make(chan struct{}, test.conns*calls), make(chan struct{})
		dial := serveTCP(t, &Server{}, Program{Low: 1, High: 1, Serve: func(_ context.Context, r *Request) Status {
			if r.Proc == 0 {
				return Success
			}
			if test.args == 0 {
				b, err := r.Buffer(1 << 20)
				if err != nil {
					return SystemErr
				}
				r.Reply.Item(b)
			}
			n := under.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			entered <- struct{}{}
			<-hold
			under.Add(-1)
			return Success
		}})
		var conns []net.Conn
		sent := make(chan error, test.conns)
		for range test.conns {
			c := dial()
			conns = append(conns, c)
			go func() {
				var err error
				for i := range uint32(calls + 1) {
					m := makeCall(i, 1, 0)
					if i == calls {
						m = makeCall(i, 0, 0)
					} else {
						m.Body = append(m.Body, make([]byte, test.args)...)
					}
					err = errors.Join(err, WriteRecord(c, &m))
				}
				sent <- err
			}()
		}
		for range test.most {
			<-entered
		}
		if test.args > 0 {
			close(hold)
		} else {
			for _, c := range conns {
				b := read(t, c)
				if xid := binary.BigEndian.Uint32(b); xid != calls {
					t.Errorf("call %d is answered first", xid)
				}
			}
			close(hold)
		}
		var wg sync.WaitGroup
		for _, c := range conns {
			wg.Go(func() {
				left := calls
				if test.args > 0 {
					left++
				}
				seen := make(map[uint32]bool)
				for range left {
					b, err := record(c)
					if err != nil {
						t.Error(err)
						return
					}
					seen[binary.BigEndian.Uint32(b)] = true
				}
				if err := <-sent; err != nil || len(seen) != left {
					t.Errorf("%d of %d calls are answered, %v", len(seen), left, err)
				}
			})
		}
		wg.Wait()
		if m := most.Load(); int(m) != test.most {
			t.Errorf("%d bytes of arguments, %d connections: %d large calls at once", test.args, test.conns, m)
		}
	}
}

// TestManyCalls checks that a client with many connections has a bounded number of calls in progress, and that this does not
// delay other clients.
func TestManyCalls(t *testing.T) {
	entered, hold := make(chan struct{}, perPeer), make(chan struct{})
	var more atomic.Int32
	s := &Server{}
	s.Register(9, Program{Low: 1, High: 1, Serve: func(_ context.Context, r *Request) Status {
		switch r.Proc {
		case 1:
			entered <- struct{}{}
			<-hold
		case 2:
			more.Add(1)
		}
		return Success
	}})
	l := serving(t, s)
	for range perPeer / perConn {
		c := dialFrom(t, l, 2)
		for i := range uint32(perConn) {
			m := makeCall(i, 1, 0)
			write(t, c, &m)
		}
	}
	for range perPeer {
		<-entered
	}
	last, m := dialFrom(t, l, 2), makeCall(0, 2, 0)
	write(t, last, &m)
	for i := range uint32(20) {
		if err := exchange(dialFrom(t, l, 3), makeCall(i, 0, 0)); err != nil {
			t.Error("another client:", err)
		}
	}
	if more.Load() > 0 {
		t.Errorf("more than %d calls of a client are in progress", perPeer)
	}
	close(hold)
	if _, err := record(last); err != nil {
		t.Error(err)
	}
}

// TestSlowCalls checks that a call that has to wait for others of its client may take as long to arrive as if it did not.
func TestSlowCalls(t *testing.T) {
	for _, test := range []struct{ calls, args int }{{perConn, 0}, {perConnLarge, 1 << 17}} {
		synctest.Test(t, func(t *testing.T) {
			ours, theirs := net.Pipe()
			entered, hold := make(chan struct{}, test.calls+1), make(chan struct{})
			s := &Server{}
			s.Register(9, Program{Low: 1, High: 1, Serve: func(context.Context, *Request) Status {
				entered <- struct{}{}
				<-hold
				return Success
			}})
			var wg sync.WaitGroup
			wg.Go(func() {
				s.serveConn(t.Context(), &tcpConn{Conn: ours, peer: subnet.Peers[room]{}.Find(netip.Addr{}, peerRoom)}, "", func() {})
				ours.Close()
			})
			wg.Go(func() {
				for i := range uint32(test.calls + 1) {
					m := makeCall(i, 1, 0)
					m.Body = append(m.Body, make([]byte, max(test.args, int(i)/test.calls<<15))...) // the last one is longer than what is read ahead
					if err := WriteRecord(theirs, &m); err != nil {
						t.Errorf("call %d: %v", i, err)
					}
				}
			})
			for range test.calls {
				<-entered
			}
			time.Sleep(2 * idle)
			close(hold)
			for i := range test.calls + 1 {
				if _, err := record(theirs); err != nil {
					t.Fatalf("reply %d: %v", i, err)
				}
			}
			theirs.Close()
			wg.Wait()
		})
	}
}

// TestIdleMemory checks that connections without calls keep no memory of earlier calls, and that small calls in progress do
// not keep that of large ones.
func TestIdleMemory(t *testing.T) {
	hold := make(chan struct{})
	defer close(hold)
	dial := serveTCP(t, &Server{}, Program{Low: 1, High: 1, Serve: func(_ context.Context, r *Request) Status {
		if r.Proc == 2 {
			<-hold
			return Success
		}
		b, err := r.Buffer(1 << 20)
		if err != nil {
			return SystemErr
		}
		r.Reply.Item(b)
		return Success
	}})
	heap := func() uint64 {
		for range 3 { // a sync.Pool keeps what it has over one
			runtime.GC()
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for _, small := range []bool{false, true} {
		before := heap()
		for range 2 {
			c := dial()
			for i := range uint32(perConn - 1) {
				m := makeCall(i, 1, 0)
				m.Body = append(m.Body, make([]byte, 1<<20)...)
				if err := exchange(c, m); err != nil {
					t.Fatal(err)
				}
				if small {
					m := makeCall(i, 2, 0)
					write(t, c, &m)
				}
			}
		}
		const enough = 8 << 20
		// The last calls may be on their way out.
		testenv.Until(t, fmt.Sprintf("small calls in progress %v: the heap is small", small), func() bool { return heap() <= before+enough })
	}
}

// TestBuffersApart checks that the small and the large buffers of a call, which become those of different calls, share no memory, in
// however many fragments the calls came.
func TestBuffersApart(t *testing.T) {
	m := newMemory([]room{newRoom(1, 1)}, func() {})
	defer m.free()
	m.small = new(buffers)
	for _, fragments := range [][]int{{40_000}, {33_000, 32_000}, {65_000, 16_000}} {
		var b bytes.Buffer
		for i, n := range fragments {
			mark := uint32(n)
			if i == len(fragments)-1 {
				mark |= 1 << 31
			}
			b.Write(binary.BigEndian.AppendUint32(nil, mark))
			b.Write(make([]byte, n))
		}
		if _, err := m.read(&b, maxRecord); err != nil {
			t.Fatal(err)
		}
	}
	if &m.small.call[0] == &m.large.call[0] {
		t.Error("they share memory")
	}
}

// TestMaxRecord checks that a server may accept shorter records over TCP.
func TestMaxRecord(t *testing.T) {
	dial := serveTCP(t, &Server{MaxRecord: 1 << 16}, Program{Low: 1, High: 1, Serve: func(context.Context, *Request) Status { return Success }})
	for _, n := range []int{1 << 16, 1<<16 + 4} {
		c := dial()
		m := makeCall(1, 0, 0)
		m.Body = append(m.Body, make([]byte, n-len(m.Body))...)
		_ = WriteRecord(c, &m) // cut off where the server is faster
		if _, err := record(c); (err == nil) != (n == 1<<16) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

// TestRecordInPieces checks that a record costs little more memory, and so little more copying, in fragments of a few bytes than in one, and
// that its buffer has no room for a large call if it is small.
func TestRecordInPieces(t *testing.T) {
	const piece = 24 // so that doubling from it misses the size of a small buffer
	for _, n := range []int{2500 * piece, 11000 * piece} {
		want := make([]byte, n)
		for i := range want {
			want[i] = byte(i * 7)
		}
		var wire []byte
		for left := want; len(left) > 0; left = left[piece:] {
			mark := uint32(piece)
			if len(left) == piece {
				mark |= 1 << 31
			}
			wire = append(binary.BigEndian.AppendUint32(wire, mark), left[:piece]...)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		b, err := record(bytes.NewReader(wire))
		runtime.ReadMemStats(&after)
		if err != nil || !bytes.Equal(b, want) {
			t.Fatalf("%d bytes: %d read, %v", n, len(b), err)
		}
		if got := after.TotalAlloc - before.TotalAlloc; got > uint64(8*n+len(wire)) {
			t.Errorf("%d bytes in fragments of %d: %d bytes allocated", n, piece, got)
		}
		if n <= small && cap(b) > small {
			t.Errorf("%d bytes in a buffer of %d", n, cap(b))
		}
	}
}

func FuzzServer(f *testing.F) {
	f.Add(makeCall(1, 1, 1).Body, []byte("item"), uint16(40))
	f.Add(makeCall(1, 2, 1).Body, []byte(nil), uint16(0))
	var n atomic.Int32
	s := counter(&n, nil)
	f.Fuzz(func(t *testing.T, body, item []byte, pos uint16) {
		m := Msg{Body: body}
		if len(item) > 0 {
			var ok bool
			if m, ok = Place(body, []Item{{Data: item}}, []uint32{uint32(pos)}); !ok {
				return
			}
		}
		flat := m.AppendFlat(nil)
		all, err := io.ReadAll(NewReader(m))
		if err != nil || !bytes.Equal(all, flat) {
			t.Fatalf("%x, %v", all, err)
		}
		reply, ok := s.Serve(t.Context(), "x", m, nil)
		if ok && len(reply.Body) < 24 {
			t.Fatalf("%x", reply.Body)
		}
		_, _ = ParseReply(m)
		if c, err := parseCall(m); err == nil {
			_, _ = ParseSys(c.Cred)
		}
	})
}

// record reads a message.
func record(r io.Reader) ([]byte, error) {
	return readRecord(r, maxRecord, func(int) []byte { return nil })
}

func read(t *testing.T, r io.Reader) []byte {
	t.Helper()
	b, err := record(r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func write(t *testing.T, w io.Writer, m *Msg) {
	t.Helper()
	if err := WriteRecord(w, m); err != nil {
		t.Fatal(err)
	}
}

// dialFrom connects to l from 127.0.0.from.
func dialFrom(t *testing.T, l net.Listener, from byte) net.Conn {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, from)}}
	c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return c
}

// exchange makes a call over TCP.
func exchange(c net.Conn, m Msg) error {
	if err := WriteRecord(c, &m); err != nil {
		return err
	}
	_, err := record(c)
	return err
}

// TestSlowVictim checks that a connection that ended for another one, but whose call is still in progress, delays that one alone.
func TestSlowVictim(t *testing.T) {
	s := &Server{}
	entered, hold := make(chan struct{}), make(chan struct{})
	s.Register(9, Program{Low: 1, High: 1, Serve: func(_ context.Context, r *Request) Status {
		if r.Proc == 1 {
			close(entered)
			<-hold
		}
		return Success
	}})
	l := serving(t, s)
	slow := dialFrom(t, l, 2)
	m := makeCall(1, 1, 0)
	write(t, slow, &m)
	<-entered
	for range maxConns - 1 {
		if err := exchange(dialFrom(t, l, 2), makeCall(2, 0, 0)); err != nil {
			t.Fatal(err)
		}
	}
	// Two take the places of the slow connection and of an idle one. There is room for one of them.
	calls := make(chan error)
	for from := range byte(2) {
		c := dialFrom(t, l, 3+from)
		go func() { calls <- exchange(c, makeCall(3, 0, 0)) }()
	}
	if err := <-calls; err != nil {
		t.Error("while the call is in progress:", err)
	}
	close(hold)
	if err := <-calls; err != nil {
		t.Error("then:", err)
	}
}

// TestFullServer checks that a client that holds all TCP connections does not keep others out, and cannot take theirs.
func TestFullServer(t *testing.T) {
	var n atomic.Int32
	l := serving(t, counter(&n, nil))
	dial := func(from byte) net.Conn { return dialFrom(t, l, from) }
	call := func(c net.Conn, xid uint32) error { return exchange(c, makeCall(xid, 2, 1)) }
	var all []net.Conn
	for i := range maxConns {
		c := dial(2)
		if err := call(c, uint32(i)); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	if err := call(all[0], 1000); err != nil { // no longer the least recently used
		t.Fatal(err)
	}
	other := dial(3)
	if err := call(other, 1001); err != nil {
		t.Errorf("another client: %v", err)
	}
	if _, err := all[1].Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the least recently used connection: %v, want the end", err)
	}
	for i := range uint32(3) {
		if err := call(dial(2), 2000+i); err == nil {
			t.Error("the client that holds all gets one more")
		}
	}
	for i, c := range []net.Conn{other, all[0], all[2]} {
		if err := call(c, 3000+uint32(i)); err != nil {
			t.Errorf("connection %d that stays: %v", i, err)
		}
	}
}

// TestNetworkRoom checks that the calls of all addresses of a network count together.
func TestNetworkRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		entered, hold := make(chan struct{}, 2), make(chan struct{})
		s := &Server{}
		s.Register(9, Program{Low: 1, High: 1, Serve: func(context.Context, *Request) Status {
			entered <- struct{}{}
			<-hold
			return Success
		}})
		peers := make(subnet.Peers[room])
		var wg sync.WaitGroup
		for _, addr := range []string{"2001:db8::1", "2001:db8::2"} {
			p := peers.Find(netip.MustParseAddr(addr), func(network bool) room {
				if network {
					return newRoom(1, 1)
				}
				return newRoom(2, 2)
			})
			peers.Add(p)
			ours, theirs := net.Pipe()
			wg.Go(func() { s.serveConn(t.Context(), &tcpConn{Conn: ours, peer: p}, addr, func() {}) })
			wg.Go(func() {
				if err := exchange(theirs, makeCall(1, 1, 0)); err != nil {
					t.Error(err)
				}
				theirs.Close()
			})
		}
		synctest.Wait()
		if n := len(entered); n != 1 {
			t.Errorf("%d calls at once", n)
		}
		close(hold)
		wg.Wait()
		if n := len(entered); n != 2 {
			t.Errorf("%d calls in all", n)
		}
	})
}

// TestFullNetwork checks that a host that holds all TCP connections, each from another of its IPv6 addresses, does not keep
// others out.
func TestFullNetwork(t *testing.T) {
	conns := &tcpConns{m: make(map[*tcpConn]struct{}), peers: make(subnet.Peers[room])}
	ended := make(map[string]int)
	add := func(addr string) bool {
		return conns.add(&tcpConn{end: func() { ended[addr]++ }}, netip.MustParseAddr(addr))
	}
	add("2001:db8:1::1")
	for i := range maxConns - 1 {
		add(fmt.Sprintf("2001:db8::%x", i+1))
	}
	if add("2001:db8::ffff") {
		t.Error("the host that holds nearly all gets one more")
	}
	for i, addr := range []string{"10.0.0.1", "2001:db8:1::1", "2001:db8:2::1"} {
		if !add(addr) {
			t.Errorf("%s is kept out", addr)
		}
		if first := fmt.Sprintf("2001:db8::%x", i+1); ended[first] != 1 || len(ended) != i+1 {
			t.Errorf("%s: ended are %v, want %s too", addr, ended, first)
		}
	}
	if len(conns.m) != maxConns {
		t.Errorf("%d connections", len(conns.m))
	}
}

// BenchmarkRepliesOfMany measures a call whose reply is kept while the cache is full of those of so many clients.
func BenchmarkRepliesOfMany(b *testing.B) {
	for _, clients := range []int{1, 100, 4000} {
		b.Run(fmt.Sprint(clients), func(b *testing.B) {
			peers := make([]string, clients)
			for i := range peers {
				peers[i] = netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String()
			}
			var c cache
			call := func(i int) {
				c.do(key{peer: peers[i%clients], xid: uint32(i)}, func() Msg { return Msg{} })
			}
			for i := range cacheSize {
				call(i)
			}
			b.ResetTimer()
			for i := range b.N {
				call(cacheSize + i)
			}
		})
	}
}
