package iwarp

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/shm"
)

// CaptureFilter selects the frames of a Capture. Users without administrator rights must name one
// of their queue pairs.
type CaptureFilter struct {
	QP      uint32 // frames of its connection; 0: all
	Address string // of either side; "": any
	Port    uint16 // of either side; 0: any
	SnapLen int    // bytes kept of each frame; 0: all
}

// Capture receives copies of the frames that the daemon receives and sends.
type Capture struct {
	conn *seqpacket.Conn
	snap int
}

// CapturedFrame is a frame, starting with its Ethernet header.
type CapturedFrame struct {
	Time    time.Time
	Out     bool // sent, not received
	Worker  int
	Size    int    // length on the wire; Data may be truncated
	Data    []byte // valid until the next call of Next
	Dropped uint64 // total number of frames dropped so far
}

// Capture starts a capture. Frames that are not read in time are dropped and counted; the capture
// never delays traffic.
func (a *Admin) Capture(ctx context.Context, f CaptureFilter) (*Capture, error) {
	ans, err := a.d.call(ctx, "capture", &ctrlpb.Request{Body: &ctrlpb.Request_Capture{Capture: &ctrlpb.Capture{
		Qp: f.QP, Address: f.Address, Port: uint32(f.Port), Snaplen: size(max(f.SnapLen, 0)),
	}}}, -1)
	if err != nil {
		return nil, err
	}
	if len(ans.fds) != 1 {
		seqpacket.CloseAll(ans.fds)
		return nil, fmt.Errorf("%w: capture: %d descriptors", ErrInternal, len(ans.fds))
	}
	conn, err := seqpacket.FromFD(ans.fds[0])
	if err != nil {
		return nil, fmt.Errorf("iwarp: capture: %w", shm.Limit(err))
	}
	return &Capture{conn, int(ans.reply.GetCapture().GetSnaplen())}, nil
}

// SnapLen returns the maximum number of bytes kept of a frame.
func (c *Capture) SnapLen() int { return c.snap }

// Next waits for a frame. It returns io.EOF if the daemon ended the capture. Close unblocks it.
func (c *Capture) Next() (CapturedFrame, error) {
	const header = 24
	b, fds, err := c.conn.Read(0)
	if err != nil {
		return CapturedFrame{}, err
	}
	seqpacket.CloseAll(fds)
	if len(b) < header {
		return CapturedFrame{}, fmt.Errorf("%w: capture: record of %d bytes", ErrInternal, len(b))
	}
	le := binary.LittleEndian
	return CapturedFrame{
		Time: time.Unix(0, int64(le.Uint64(b))), Dropped: le.Uint64(b[8:]), Size: int(le.Uint32(b[16:])), Worker: int(le.Uint16(b[20:])),
		Out: b[22] == 1, Data: b[header:],
	}, nil
}

// Close ends the capture.
func (c *Capture) Close() error { return c.conn.Close() }
