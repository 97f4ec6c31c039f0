package rpc

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// maxRecord is the longest message that is taken over TCP, in octets.
const maxRecord = 1<<20 + 1<<16

// idle is how long a TCP connection may be without a whole call.
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
			select { // a connection that was gone already, or no descriptors
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

func (s *Server) serveConn(ctx context.Context, c net.Conn) {
	peer, _, _ := net.SplitHostPort(c.RemoteAddr().String())
	for {
		_ = c.SetDeadline(time.Now().Add(idle))
		b, err := ReadRecord(c)
		if err != nil {
			return
		}
		if m, ok := s.Serve(ctx, peer, Msg{Body: b}, nil); ok {
			if WriteRecord(c, &m) != nil {
				return
			}
		}
	}
}

// ErrRecord is a record that is too long.
var ErrRecord = errors.New("rpc: record is too long")

// ReadRecord reads a message. Memory grows with what has come.
func ReadRecord(r io.Reader) ([]byte, error) {
	var b []byte
	for {
		var mark [4]byte
		if _, err := io.ReadFull(r, mark[:]); err != nil {
			return nil, err
		}
		m := binary.BigEndian.Uint32(mark[:])
		n := int(m &^ (1 << 31))
		if n > maxRecord-len(b) || n == 0 && m>>31 == 0 {
			return nil, ErrRecord
		}
		for n > 0 {
			k := min(n, 1<<16)
			at := len(b)
			b = append(b, make([]byte, k)...)
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

// WriteRecord writes a message in one fragment.
func WriteRecord(w io.Writer, m *Msg) error {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, 4+m.Len()), 1<<31|uint32(m.Len()))
	_, err := w.Write(m.AppendFlat(b))
	return err
}
