// Package rping implements both roles of the protocol of rping, the ping of librdmacm-utils. The
// other side may be that program on any RDMA host.
//
// In each round the client advertises a buffer with ping data in a Send. The server reads it by
// RDMA Read and answers with a Send. Then the client advertises a second buffer, and the server
// writes the data back into it by RDMA Write and answers with a Send. Both answers have the
// length of an advert; their content is ignored. The client disconnects after its last round.
package rping

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// Limits of the program rping.
const (
	DefaultPort = 7174
	DefaultSize = 64
	MinSize     = 26
	MaxSize     = 64<<10 - 1
)

// advertLen is the length in bytes of each Send of the protocol.
const advertLen = 16

// Advert describes a buffer to the other side.
type Advert struct {
	Addr uint64
	RKey uint32
	Size uint32
}

// Append appends a to b in wire format: be64 address, be32 key, be32 size.
func (a Advert) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, a.Addr)
	b = binary.BigEndian.AppendUint32(b, a.RKey)
	return binary.BigEndian.AppendUint32(b, a.Size)
}

// DecodeAdvert parses an advert, which must be all of b.
func DecodeAdvert(b []byte) (Advert, error) {
	if len(b) != advertLen {
		return Advert{}, fmt.Errorf("rping: message of %d bytes; want %d: is the other side rping?", len(b), advertLen)
	}
	return Advert{
		Addr: binary.BigEndian.Uint64(b),
		RKey: binary.BigEndian.Uint32(b[8:]),
		Size: binary.BigEndian.Uint32(b[12:]),
	}, nil
}

// fill fills b with the ping data of round n, counted from 0: a number, printable characters that
// rotate by one each round, and a NUL.
func fill(b []byte, n int) {
	const first, last = 'A', 'z'
	const letters = last - first + 1
	k := copy(b, fmt.Sprintf("rdma-ping-%d: ", n))
	for i := k; i < len(b); i++ {
		b[i] = byte(first + (n+i-k)%letters)
	}
	if len(b) > 0 {
		b[len(b)-1] = 0
	}
}

// text returns the string in b up to its NUL, as rping prints it.
func text(b []byte) []byte {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		return b[:i]
	}
	return b
}

// conn is the part of *iwarp.Conn that the protocol uses.
type conn interface {
	Send(ctx context.Context, b []byte) error
	Recv(ctx context.Context, b []byte) (int, error)
	Read(ctx context.Context, r iwarp.Remote, b []byte) error
	Write(ctx context.Context, r iwarp.Remote, b []byte) error
}

// buffer is registered memory and its address for the peer.
type buffer struct {
	Bytes  []byte
	Remote iwarp.Remote
}

// A Report is the result of a client or server connection.
type Report struct {
	Rounds int   // completed rounds
	Bytes  int64 // bytes of ping data, counted once per round
}

// Options apply to both sides.
type Options struct {
	Count    int       // 0: until the context is done
	Validate bool      // client: compare the data received
	Print    io.Writer // where to print the ping data, a line per round; may be nil

	Round func(time.Duration) // client: called after each round with its duration; may be nil
}

// ErrMismatch means that the data received is not the data sent.
var ErrMismatch = errors.New("rping: data mismatch")

// runClient runs the client side over an established connection. The server reads the buffer start and
// writes the buffer sink, both of the ping size.
func runClient(ctx context.Context, c conn, start, sink buffer, o Options) (Report, error) {
	var rep Report
	msg := make([]byte, 0, advertLen)
	for n := 0; o.Count == 0 || n < o.Count; n++ {
		fill(start.Bytes, n)
		began := time.Now()
		for _, b := range []buffer{start, sink} {
			msg = Advert{b.Remote.Addr, b.Remote.RKey, uint32(len(b.Bytes))}.Append(msg[:0])
			if err := c.Send(ctx, msg); err != nil {
				return rep, fmt.Errorf("rping: round %d: send advert: %w", n, err)
			}
			if err := goAhead(ctx, c); err != nil {
				return rep, fmt.Errorf("rping: round %d: %w", n, err)
			}
		}
		took := time.Since(began)
		if o.Validate && !bytes.Equal(start.Bytes, sink.Bytes) {
			return rep, fmt.Errorf("%w in round %d", ErrMismatch, n)
		}
		rep.Rounds++
		rep.Bytes += int64(len(start.Bytes))
		if o.Round != nil {
			o.Round(took)
		}
		if o.Print != nil {
			fmt.Fprintf(o.Print, "ping data: %s\n", text(sink.Bytes))
		}
	}
	return rep, nil
}

// goAhead waits for the server's Send.
func goAhead(ctx context.Context, c conn) error {
	var b [advertLen]byte
	n, err := c.Recv(ctx, b[:])
	if err != nil {
		return fmt.Errorf("wait for the server: %w", err)
	}
	_, err = DecodeAdvert(b[:n])
	return err
}

// runServer runs the server side over an established connection until the client disconnects, and then
// returns nil. buf holds the data between the Read and the Write; larger pings are refused.
func runServer(ctx context.Context, c conn, buf []byte, o Options) (Report, error) {
	var rep Report
	for ; ; rep.Rounds++ {
		a, err := recvAdvert(ctx, c, len(buf))
		if errors.Is(err, io.EOF) || errors.Is(err, iwarp.ErrPeerClosed) {
			return rep, nil
		} else if err != nil {
			return rep, err
		}
		data := buf[:a.Size]
		if err := c.Read(ctx, a.remote(), data); err != nil {
			return rep, fmt.Errorf("rping: read %d bytes: %w", a.Size, err)
		}
		if o.Print != nil {
			fmt.Fprintf(o.Print, "server ping data: %s\n", text(data))
		}
		if err := c.Send(ctx, make([]byte, advertLen)); err != nil {
			return rep, fmt.Errorf("rping: send go-ahead: %w", err)
		}

		sink, err := recvAdvert(ctx, c, len(buf))
		if err != nil {
			return rep, err
		}
		// Like rping, send the data up to the terminating NUL.
		data = data[:min(len(text(data))+1, len(data), int(sink.Size))]
		if err := c.Write(ctx, sink.remote(), data); err != nil {
			return rep, fmt.Errorf("rping: write %d bytes: %w", len(data), err)
		}
		if err := c.Send(ctx, make([]byte, advertLen)); err != nil {
			return rep, fmt.Errorf("rping: send go-ahead: %w", err)
		}
		rep.Bytes += int64(a.Size)
	}
}

func (a Advert) remote() iwarp.Remote {
	return iwarp.Remote{Addr: a.Addr, RKey: a.RKey, Len: a.Size}
}

func recvAdvert(ctx context.Context, c conn, most int) (Advert, error) {
	var b [advertLen]byte
	n, err := c.Recv(ctx, b[:])
	if err != nil {
		return Advert{}, fmt.Errorf("rping: wait for an advert: %w", err)
	}
	a, err := DecodeAdvert(b[:n])
	if err == nil && (a.Size == 0 || int64(a.Size) > int64(most)) {
		err = fmt.Errorf("rping: the client advertises %d bytes; the buffer here has %d", a.Size, most)
	}
	return a, err
}

// Config returns rping's connection settings: one RDMA Read at a time.
func Config() *iwarp.Config {
	return &iwarp.Config{Startup: iwarp.Startup{IRD: 1, ORD: 1}, RecvSize: advertLen}
}

// Ping connects to the server at addr, an "address:port", and runs the client side with pings of
// size bytes. cfg should be derived from Config().
func Ping(ctx context.Context, dev *iwarp.Device, addr string, cfg *iwarp.Config, size int, o Options) (Report, error) {
	conn, err := dev.Dial(ctx, addr, cfg)
	if err != nil {
		return Report{}, err
	}
	defer conn.Close()
	start, err := register(ctx, conn, size, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead)
	if err != nil {
		return Report{}, err
	}
	sink, err := register(ctx, conn, size, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
	if err != nil {
		return Report{}, err
	}
	return runClient(ctx, conn, start, sink, o)
}

// ServeConn runs the server side over an accepted connection, with a buffer for rping's largest
// ping, and closes the connection.
func ServeConn(ctx context.Context, conn *iwarp.Conn, o Options) (Report, error) {
	defer conn.Close()
	buf, err := register(ctx, conn, MaxSize, iwarp.AccessLocalWrite)
	if err != nil {
		return Report{}, err
	}
	return runServer(ctx, conn, buf.Bytes, o)
}

func register(ctx context.Context, conn *iwarp.Conn, size int, access iwarp.Access) (buffer, error) {
	mr, err := conn.Alloc(ctx, size, access)
	if err != nil {
		return buffer{}, fmt.Errorf("rping: register %d bytes: %w", size, err)
	}
	return buffer{Bytes: mr.Bytes()[:size], Remote: mr.RemoteAt(0, size)}, nil
}
