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

// ServeTCP serves the connections of l until ctx is done or l is closed (record
// marking: RFC 5531 section 11).
func (s *Server) ServeTCP(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, 256)
	for {
		c, err := l.Accept()
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
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { c.Close(); <-slots }()
			stop := context.AfterFunc(ctx, func() { c.Close() })
			defer stop()
			s.serveConn(ctx, c)
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

func (s *Server) serveConn(ctx context.Context, c net.Conn) {
	peer, _, _ := net.SplitHostPort(c.RemoteAddr().String())
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
		wg.Go(func() {
			defer func() { mem.free(); <-slots }()
			spare := mem.result
			m, ok := s.Serve(ctx, peer, Msg{Body: mem.call}, func(n int) ([]byte, error) {
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
			if WriteRecord(c, &m) != nil {
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
