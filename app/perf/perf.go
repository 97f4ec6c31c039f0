// Package perf measures bandwidth, message rate and latency of RDMA Write,
// RDMA Read and Send between two hosts: iwarpctl perf.
//
// The client says what it will do in the private data of the connection, the
// server answers with its window there, and no other control message is
// needed. Bandwidth of Writes and Reads, and the latency of Reads, leave the
// server's program asleep. The latency of Sends is that of a ping-pong; that of
// Writes too, each Write being followed by an empty Send that reports it.
package perf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// DefaultPort is the default port of a server.
const DefaultPort = 7175

// Op is the operation to measure.
type Op uint8

// Operations to measure.
const (
	Write Op = iota + 1
	Read
	Send
)

var opNames = []string{"", "write", "read", "send"}

func (o Op) String() string { return opNames[o] }

// ParseOp parses "write", "read" or "send".
func ParseOp(s string) (Op, error) {
	if i := slices.Index(opNames, s); i > 0 {
		return Op(i), nil
	}
	return 0, fmt.Errorf("operation %q: must be %s", s, strings.Join(opNames[1:], ", "))
}

// Mode is the quantity to measure.
type Mode uint8

// Modes.
const (
	Bandwidth Mode = iota + 1 // many operations outstanding
	Latency                   // one operation outstanding
)

var modeNames = []string{"", "bw", "lat"}

func (m Mode) String() string { return modeNames[m] }

// ParseMode parses "bw" or "lat".
func ParseMode(s string) (Mode, error) {
	if i := slices.Index(modeNames, s); i > 0 {
		return Mode(i), nil
	}
	return 0, fmt.Errorf("mode %q: must be %s", s, strings.Join(modeNames[1:], " or "))
}

// Limits on what a client may request from a server.
const (
	MaxSize  = 64 << 20
	MaxDepth = 4096
)

// MaxQPs is the maximum number of queue pairs of a client.
const MaxQPs = 1024

// Params describe a measurement. At least one of Count and Duration must be set; the one reached
// first ends the measurement.
type Params struct {
	Op       Op
	Mode     Mode
	Size     int // bytes of each message, 1 to MaxSize
	Depth    int // outstanding operations; 1 for latency
	Count    int // operations per queue pair
	Duration time.Duration
	QPs      int // of the client, each with a connection, that all do this at a time; 0: one
	// Bidirectional adds as many queue pairs that Read while the others Write, or the other way
	// round: bytes go both ways. Bandwidth of Write and Read only.
	Bidirectional bool
	// Done, if not nil, counts the operations that are complete, while the client runs.
	Done *atomic.Int64
}

// opposite returns p with the operation that moves bytes the other way.
func (p Params) opposite() Params {
	p.Op = map[Op]Op{Write: Read, Read: Write}[p.Op]
	return p
}

// count adds n operations to Done.
func (p *Params) count(n int) {
	if p.Done != nil {
		p.Done.Add(int64(n))
	}
}

// Check returns an error if p is invalid.
func (p *Params) Check() error {
	switch {
	case p.Op < Write || p.Op > Send || p.Mode < Bandwidth || p.Mode > Latency:
		return errors.New("no such operation or mode")
	case p.Size < 1 || p.Size > MaxSize:
		return fmt.Errorf("size %d: must be from 1 to %d", p.Size, MaxSize)
	case p.Depth < 1 || p.Depth > MaxDepth:
		return fmt.Errorf("depth %d: must be from 1 to %d", p.Depth, MaxDepth)
	case p.QPs < 0 || p.QPs > MaxQPs:
		return fmt.Errorf("%d queue pairs: must be from 1 to %d", p.QPs, MaxQPs)
	case p.Bidirectional && (p.Mode != Bandwidth || p.Op == Send):
		return errors.New("only write and read bandwidth can be measured in both directions at once")
	case p.Count < 0 || p.Duration < 0 || p.Count == 0 && p.Duration == 0:
		return errors.New("give a positive number of iterations or a duration")
	}
	return nil
}

// Private data. Request: magic, version, op, mode, be32 size, be32 depth, be64
// address, be32 key of the client's window (Writes come back there). Reply:
// magic, version, be64 address, be32 key of the server's window. Refusal:
// magic, version, text.
const (
	magic   = "IWPF"
	version = 1

	requestLen = 4 + 1 + 1 + 1 + 4 + 4 + 8 + 4
	replyLen   = 4 + 1 + 8 + 4
	maxText    = 200
)

// window is the memory of the other side that Writes and Reads access.
type window struct {
	addr uint64
	rkey uint32
}

func head() []byte { return append([]byte(magic), version) }

// checkHead checks the magic and the version, and returns the bytes after them.
func checkHead(b []byte) ([]byte, error) {
	if len(b) < len(magic)+1 || string(b[:len(magic)]) != magic {
		return nil, errors.New("the other side does not support iwarpctl's perf protocol: is that the port of iwarpctl perf --server?")
	}
	if v := b[len(magic)]; v != version {
		return nil, fmt.Errorf("the other side supports version %d of the perf protocol, this one %d: use the same iwarpctl on both", v, version)
	}
	return b[len(magic)+1:], nil
}

func appendRequest(p *Params, w window) []byte {
	be := binary.BigEndian
	b := append(head(), byte(p.Op), byte(p.Mode))
	b = be.AppendUint32(b, uint32(p.Size))
	b = be.AppendUint32(b, uint32(p.Depth))
	b = be.AppendUint64(b, w.addr)
	return be.AppendUint32(b, w.rkey)
}

func decodeRequest(b []byte) (Params, window, error) {
	b, err := checkHead(b)
	if err != nil {
		return Params{}, window{}, err
	}
	if len(b) != requestLen-replyHead {
		return Params{}, window{}, errors.New("malformed request of the perf protocol")
	}
	be := binary.BigEndian
	size, depth := be.Uint32(b[2:]), be.Uint32(b[6:])
	if size > MaxSize || depth > MaxDepth { // before they become an int
		return Params{}, window{}, fmt.Errorf("size %d, depth %d: at most %d and %d are allowed", size, depth, MaxSize, MaxDepth)
	}
	p := Params{Op: Op(b[0]), Mode: Mode(b[1]), Size: int(size), Depth: int(depth), Count: 1}
	return p, window{be.Uint64(b[10:]), be.Uint32(b[18:])}, p.Check()
}

const replyHead = len(magic) + 1

func appendReply(w window) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(head(), w.addr), w.rkey)
}

func decodeReply(b []byte) (window, error) {
	b, err := checkHead(b)
	if err != nil {
		return window{}, err
	}
	if len(b) != replyLen-replyHead {
		return window{}, errors.New("malformed reply of the perf protocol")
	}
	return window{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}, nil
}

func appendRefusal(text string) []byte {
	return append(head(), text[:min(len(text), maxText)]...)
}
