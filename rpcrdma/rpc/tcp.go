package rpc

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/iwarpd/iwarpd/internal/subnet"
)

// maxRecord is the default for the longest message over TCP, in bytes.
const maxRecord = 1<<20 + 1<<16

// idle is how long a TCP connection may go without a complete call.
const idle = 2 * time.Minute

// maxConns is the number of TCP connections that are served at a time.
const maxConns = 256

// tcpConn is a TCP connection that is served.
type tcpConn struct {
	net.Conn
	end  context.CancelFunc // closes the connection
	peer *subnet.Peer[room]
	used uint64 // order of the last calls; guarded by the mu of its tcpConns
}

// tcpConns are the connections of a ServeTCP.
type tcpConns struct {
	mu    sync.Mutex
	m     map[*tcpConn]struct{}
	peers subnet.Peers[room] // of the connections in m
	uses  uint64
}

// use makes c the most recently used connection.
func (l *tcpConns) use(c *tcpConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.uses++
	c.used = l.uses
}

// add adds a connection c of the client with the address addr. If there are maxConns connections, one of a client that
// crowds that of c ends, so that no client keeps others out: of the network with the most connections, and in it of the
// client with the most, the least recently used one. add returns false if no client crowds that of c.
func (l *tcpConns) add(c *tcpConn, addr netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	c.peer = l.peers.Find(addr, peerRoom)
	if len(l.m) >= maxConns {
		var victim *tcpConn
		for o := range l.m {
			if o.peer.Crowds(c.peer) && (victim == nil || cmp.Or(cmp.Compare(o.peer.Net.Conns, victim.peer.Net.Conns),
				cmp.Compare(o.peer.Conns, victim.peer.Conns), cmp.Compare(victim.used, o.used)) > 0) {
				victim = o
			}
		}
		if victim == nil {
			return false
		}
		victim.end()
		l.drop(victim)
	}
	l.peers.Add(c.peer)
	l.m[c] = struct{}{}
	l.uses++
	c.used = l.uses
	return true
}

// drop removes a connection that is in m. Called with mu held.
func (l *tcpConns) drop(c *tcpConn) {
	delete(l.m, c)
	l.peers.Remove(c.peer)
}

// remove removes c unless it has ended for another connection.
func (l *tcpConns) remove(c *tcpConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.m[c]; ok {
		l.drop(c)
	}
}

// ServeTCP serves the connections of l until ctx is done or l is closed (record
// marking: RFC 5531 section 11).
func (s *Server) ServeTCP(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, maxConns)
	conns := &tcpConns{m: make(map[*tcpConn]struct{}), peers: make(subnet.Peers[room])}
	for {
		nc, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			select { // a connection that was aborted, or no descriptors
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		from, _ := netip.ParseAddrPort(nc.RemoteAddr().String())
		open, end := context.WithCancel(ctx)
		c := &tcpConn{Conn: nc, end: end}
		if !conns.add(c, from.Addr()) {
			end()
			c.Close()
			continue
		}
		wg.Go(func() {
			defer func() { end(); c.Close(); conns.remove(c) }()
			stop := context.AfterFunc(open, func() { c.Close() })
			defer stop()
			select {
			case slots <- struct{}{}: // of the connection that made room, when its calls have ended
				defer func() { <-slots }()
			case <-open.Done():
				return
			}
			s.serveConn(ctx, c, from.Addr().String(), func() { conns.use(c) })
		})
	}
}

// perConn, perPeer and perNet are the numbers of calls served concurrently per TCP connection, per address and per
// network of IPv6. At most perConnLarge, perPeerLarge and perNetLarge of them may have more than small bytes of
// arguments or results. This bounds the memory for a client that does not read its replies.
const (
	perConn      = 16
	perConnLarge = 4
	perPeer      = 256
	perPeerLarge = 16
	perNet       = 1024
	perNetLarge  = 64
	small        = 1 << 16
)

// room has an entry for each call in progress of a connection or of a client, and one for each large call.
type room struct{ calls, large chan struct{} }

func newRoom(calls, large int) room {
	return room{make(chan struct{}, calls), make(chan struct{}, large)}
}

func peerRoom(network bool) room {
	if network {
		return newRoom(perNet, perNetLarge)
	}
	return newRoom(perPeer, perPeerLarge)
}

// buffers hold a call and a result.
type buffers struct{ call, result []byte }

// smallBuffers are for calls and results of up to small bytes, largeBuffers for others: those of a small call would
// otherwise take as much memory as those of a large one.
var smallBuffers, largeBuffers = pool(), pool()

func pool() *sync.Pool { return &sync.Pool{New: func() any { return new(buffers) }} }

// memory is that of a call.
type memory struct {
	rooms  []room // of the connection, its client and the network of that
	waited func() // called after a wait for places
	small  *buffers
	large  *buffers // nil unless the call is large
}

// newMemory waits until the rooms have a place for a call.
func newMemory(rooms []room, waited func()) *memory {
	for _, r := range rooms {
		r.calls <- struct{}{}
	}
	waited()
	return &memory{rooms: rooms, waited: waited, small: smallBuffers.Get().(*buffers)}
}

// buffers returns the buffers for n bytes. If n makes the call a large one, it waits until the rooms have a place for that.
func (m *memory) buffers(n int) *buffers {
	if n <= small {
		return m.small
	}
	if m.large == nil {
		for _, r := range m.rooms {
			r.large <- struct{}{}
		}
		m.waited()
		m.large = largeBuffers.Get().(*buffers)
	}
	return m.large
}

// read reads the call into the buffers. They keep its memory.
func (m *memory) read(r io.Reader, limit int) ([]byte, error) {
	call, err := readRecord(r, limit, func(n int) []byte { return m.buffers(n).call })
	if err == nil {
		m.buffers(len(call)).call = call
	}
	return call, err
}

// free frees the places of the call.
func (m *memory) free() {
	smallBuffers.Put(m.small)
	if m.large != nil {
		largeBuffers.Put(m.large)
	}
	for _, r := range m.rooms {
		if m.large != nil {
			<-r.large
		}
		<-r.calls
	}
}

// serveConn serves a connection of the client with the address from. It calls use for each call.
func (s *Server) serveConn(ctx context.Context, c *tcpConn, from string, use func()) {
	var wg sync.WaitGroup
	defer wg.Wait()
	var mu sync.Mutex // serializes writing
	limit := s.MaxRecord
	if limit == 0 {
		limit = maxRecord
	}
	rooms := []room{newRoom(perConn, perConnLarge), c.peer.Value}
	if c.peer.Net != c.peer {
		rooms = append(rooms, c.peer.Net.Value)
	}
	r := bufio.NewReaderSize(c, 16<<10)
	begin := func() { _ = c.SetReadDeadline(time.Now().Add(idle)) } // again after each wait for our own calls
	for {
		begin()
		if _, err := r.Peek(1); err != nil {
			return
		}
		mem := newMemory(rooms, begin)
		call, err := mem.read(r, limit)
		if err != nil {
			mem.free()
			return
		}
		use()
		wg.Go(func() {
			defer mem.free()
			first := true
			m, ok := s.Serve(ctx, from, Msg{Body: call}, func(n int) ([]byte, error) {
				b := mem.buffers(n)
				if !first {
					return make([]byte, n), nil
				}
				first = false
				if cap(b.result) < n {
					b.result = make([]byte, n)
				}
				return b.result[:n], nil
			})
			if !ok {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			_ = c.SetWriteDeadline(time.Now().Add(idle))
			if WriteRecord(c.Conn, &m) != nil { // net.Buffers are written at once to a TCPConn alone
				c.Close()
			}
		})
	}
}

// ErrRecord means that a record is too long.
var ErrRecord = errors.New("rpc: record is too long")

// readRecord reads a message of up to limit bytes. memory returns a buffer for a number of bytes; readRecord calls it as soon
// as it knows how many are to be expected, and allocates what the buffer lacks.
func readRecord(r io.Reader, limit int, memory func(n int) []byte) (b []byte, err error) {
	for {
		var mark [4]byte
		if _, err := io.ReadFull(r, mark[:]); err != nil {
			return nil, err
		}
		m := binary.BigEndian.Uint32(mark[:])
		n := int(m &^ (1 << 31))
		if n > limit-len(b) || n == 0 && m>>31 == 0 {
			return nil, ErrRecord
		}
		if to := memory(len(b) + n); cap(to) > cap(b) {
			b = append(to[:0], b...)
		}
		for n > 0 {
			at := len(b)
			k := min(n, max(1<<16, cap(b)-at, at))
			if at+k > cap(b) { // twice as much, so that short fragments are not copied often; but a small call keeps no room for a large one
				most := limit
				if at+k <= small {
					most = min(limit, small)
				}
				b = append(make([]byte, 0, max(at+k, min(2*at, most))), b...)
			}
			b = b[:at+k]
			if _, err := io.ReadFull(r, b[at:]); err != nil {
				return nil, err
			}
			n -= k
		}
		if m>>31 == 1 {
			return b, nil
		}
	}
}

// WriteRecord writes a message as one fragment. Its items are not copied.
func WriteRecord(w io.Writer, m *Msg) error {
	mark := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(m.Body)), 1<<31|uint32(m.Len()))
	if len(m.Items) == 0 {
		_, err := w.Write(append(mark, m.Body...))
		return err
	}
	var l net.Buffers
	at := 0
	for _, it := range m.Items {
		l = append(l, append(mark, m.Body[at:it.Pos]...), it.Data)
		mark, at = make([]byte, -len(it.Data)&3, -len(it.Data)&3+len(m.Body)), it.Pos
	}
	l = append(l, append(mark, m.Body[at:]...))
	_, err := l.WriteTo(w)
	return err
}
