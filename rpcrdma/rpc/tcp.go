package rpc

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"
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
	peer string
	used uint64 // order of the last calls; guarded by the mu of its tcpConns
}

// tcpConns are the connections of a ServeTCP.
type tcpConns struct {
	mu   sync.Mutex
	m    map[*tcpConn]struct{}
	uses uint64
}

// use makes c the most recently used connection.
func (l *tcpConns) use(c *tcpConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.uses++
	c.used = l.uses
}

// add adds c. If there are maxConns connections, the least recently used one of the client with the
// most is closed, so that no client keeps others out. add returns false if that client does not have at
// least two more than the client of c.
func (l *tcpConns) add(c *tcpConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.m) >= maxConns {
		count := make(map[string]int)
		for o := range l.m {
			count[o.peer]++
		}
		var victim *tcpConn
		for o := range l.m {
			if victim == nil || count[o.peer] > count[victim.peer] || count[o.peer] == count[victim.peer] && o.used < victim.used {
				victim = o
			}
		}
		if count[victim.peer] < count[c.peer]+2 {
			return false
		}
		victim.Close()
		delete(l.m, victim)
	}
	l.m[c] = struct{}{}
	l.uses++
	c.used = l.uses
	return true
}

func (l *tcpConns) remove(c *tcpConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.m, c)
}

// ServeTCP serves the connections of l until ctx is done or l is closed (record
// marking: RFC 5531 section 11).
func (s *Server) ServeTCP(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, maxConns)
	conns := &tcpConns{m: make(map[*tcpConn]struct{})}
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
		peer, _, _ := net.SplitHostPort(nc.RemoteAddr().String())
		c := &tcpConn{Conn: nc, peer: peer}
		if !conns.add(c) {
			c.Close()
			continue
		}
		slots <- struct{}{} // of the connection that made room, when its calls have ended
		wg.Go(func() {
			defer func() { c.Close(); conns.remove(c); <-slots }()
			stop := context.AfterFunc(ctx, func() { c.Close() })
			defer stop()
			s.serveConn(ctx, c, func() { conns.use(c) })
		})
	}
}

// perConn is the number of calls served concurrently per TCP connection. At most perConnLarge of
// them may have more than small bytes of arguments or results. This bounds the memory for a peer
// that does not read its replies.
const (
	perConn      = 16
	perConnLarge = 4
	small        = 1 << 16
)

// memory holds a call and its result.
type memory struct {
	call, result []byte
	large        chan struct{} // of the connection: one entry for each large call
	taken        bool
}

// want waits until the connection may have another large call, if n makes this call one.
func (m *memory) want(n int) {
	if n > small && !m.taken {
		m.large <- struct{}{}
		m.taken = true
	}
}

func (m *memory) free() {
	if m.taken {
		<-m.large
	}
	m.large, m.taken = nil, false
	memories.Put(m)
}

var memories = sync.Pool{New: func() any { return new(memory) }}

// serveConn serves a connection. It calls use for each call.
func (s *Server) serveConn(ctx context.Context, c *tcpConn, use func()) {
	var wg sync.WaitGroup
	defer wg.Wait()
	var mu sync.Mutex // serializes writing
	limit := s.MaxRecord
	if limit == 0 {
		limit = maxRecord
	}
	slots := make(chan struct{}, perConn)
	large := make(chan struct{}, perConnLarge)
	r := bufio.NewReaderSize(c, 16<<10)
	for {
		_ = c.SetReadDeadline(time.Now().Add(idle))
		if _, err := r.Peek(1); err != nil {
			return
		}
		slots <- struct{}{}
		mem := memories.Get().(*memory)
		mem.large = large
		call, err := readRecord(r, mem.call, limit, mem.want)
		if err != nil {
			mem.free()
			return
		}
		mem.call = call
		use()
		wg.Go(func() {
			defer func() { mem.free(); <-slots }()
			spare := mem.result
			m, ok := s.Serve(ctx, c.peer, Msg{Body: mem.call}, func(n int) ([]byte, error) {
				mem.want(n)
				b := spare
				if spare = nil; cap(b) < n {
					b = make([]byte, n)
					mem.result = b
				}
				return b[:n], nil
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

// readRecord reads a message of up to limit bytes into the memory of b, overwriting it. It calls want with the
// expected length as soon as it is known.
func readRecord(r io.Reader, b []byte, limit int, want func(n int)) ([]byte, error) {
	b = b[:0]
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
		want(len(b) + n)
		for n > 0 {
			at := len(b)
			k := min(n, max(1<<16, cap(b)-at, at))
			b = slices.Grow(b, k)[:at+k]
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
