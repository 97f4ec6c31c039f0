package iwarp

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
)

// CaptureFilter says which frames a Capture gets. Users that are no
// administrators must name a queue pair of theirs.
type CaptureFilter struct {
	QP      uint32 // its connection; 0: whatever passes what follows
	Address string // of either side; "": any
	Port    uint16 // of either side; 0: any
	SnapLen int    // bytes kept of each frame; 0: all
}

// Capture is a copy of the frames that the daemon receives and sends.
type Capture struct {
	conn *seqpacket.Conn
	snap int
}

// CapturedFrame is one frame, from its Ethernet header on.
type CapturedFrame struct {
	Time    time.Time
	Out     bool // sent, not received
	Worker  int
	Size    int    // bytes on the wire; Data may be cut
	Data    []byte // valid until the next Next
	Dropped uint64 // frames, so far, that could not be kept
}

// Capture begins to copy frames. What is not read in time is dropped, and
// counted; traffic does not wait.
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
		return nil, fmt.Errorf("iwarp: capture: %w", err)
	}
	return &Capture{conn, int(ans.reply.GetCapture().GetSnaplen())}, nil
}

// SnapLen returns how many bytes of a frame are kept at most.
func (c *Capture) SnapLen() int { return c.snap }

// Next waits for a frame. io.EOF: the daemon has ended the capture. Close ends
// the wait.
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
