// Package filecopy copies files between two hosts by RDMA: iwarpctl cp and
// iwarpctl serve. The client writes a file into the server's registered window
// by RDMA Write, or reads it from there by RDMA Read; short messages by Send
// say what lies where. docs/cp.md is the protocol's specification.
package filecopy

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unicode"
)

// Version of the protocol, offered in the private data of the connection.
const Version = 1

const magic = "IWCP"

// Limits that both sides keep.
const (
	MaxMessage = 2048     // octets of a message
	MaxName    = 1024     // octets of a file name
	MaxSlots   = 32       // chunks that a window can hold
	MaxChunk   = 64 << 20 // octets of a chunk
	RecvDepth  = 40       // messages that a side can always take
	maxText    = 512      // octets of the text of an error
)

// Hello returns the private data of either side.
func Hello() []byte { return append([]byte(magic), Version) }

// CheckHello reads the other side's private data.
func CheckHello(b []byte) error {
	if len(b) < len(magic)+1 || string(b[:len(magic)]) != magic {
		return errors.New("the other side does not speak iwarpctl's copy protocol")
	}
	if v := b[len(magic)]; v != Version {
		return fmt.Errorf("the other side speaks version %d of the copy protocol, this one %d", v, Version)
	}
	return nil
}

type kind uint8

const (
	kindGet   kind = iota + 1 // client: send me a file
	kindPut                   // client: take a file
	kindOpen                  // server: go on, this is my window
	kindChunk                 // file sender: chunk Seq is in its slot
	kindFree                  // file receiver: chunk Seq is out of its slot
	kindEnd                   // file sender: that was all
	kindDone                  // file receiver: all is there and on disk
	kindError                 // either side: it ends here
)

// message is any message; each kind uses some of the fields.
type message struct {
	Kind  kind
	Name  string            // get, put
	Size  uint64            // put, open, end: octets of the file
	Addr  uint64            // open: address of the window
	RKey  uint32            // open
	Chunk uint32            // open: octets of a slot
	Slots uint16            // open
	Seq   uint64            // chunk, free: number of the chunk, from 0
	Len   uint32            // chunk: octets of it
	Sum   [sha256.Size]byte // end
	Code  Code              // error
	Text  string            // error
}

func (m *message) append(b []byte) []byte {
	be := binary.BigEndian
	b = append(b, byte(m.Kind))
	switch m.Kind {
	case kindGet:
		b = append(be.AppendUint16(b, uint16(len(m.Name))), m.Name...)
	case kindPut:
		b = be.AppendUint64(b, m.Size)
		b = append(be.AppendUint16(b, uint16(len(m.Name))), m.Name...)
	case kindOpen:
		b = be.AppendUint64(b, m.Size)
		b = be.AppendUint64(b, m.Addr)
		b = be.AppendUint32(b, m.RKey)
		b = be.AppendUint32(b, m.Chunk)
		b = be.AppendUint16(b, m.Slots)
	case kindChunk:
		b = be.AppendUint64(b, m.Seq)
		b = be.AppendUint32(b, m.Len)
	case kindFree:
		b = be.AppendUint64(b, m.Seq)
	case kindEnd:
		b = be.AppendUint64(b, m.Size)
		b = append(b, m.Sum[:]...)
	case kindDone:
	case kindError:
		text := m.Text[:min(len(m.Text), maxText)]
		b = be.AppendUint16(b, uint16(m.Code))
		b = append(be.AppendUint16(b, uint16(len(text))), text...)
	}
	return b
}

var errMessage = errors.New("malformed message of the copy protocol")

// decode reads the message that fills b.
func (m *message) decode(b []byte) error {
	r := reader{b: b}
	*m = message{Kind: kind(r.uint(1))}
	switch m.Kind {
	case kindGet:
		m.Name = r.text(MaxName)
	case kindPut:
		m.Size = r.uint(8)
		m.Name = r.text(MaxName)
	case kindOpen:
		m.Size, m.Addr = r.uint(8), r.uint(8)
		m.RKey, m.Chunk, m.Slots = uint32(r.uint(4)), uint32(r.uint(4)), uint16(r.uint(2))
	case kindChunk:
		m.Seq, m.Len = r.uint(8), uint32(r.uint(4))
	case kindFree:
		m.Seq = r.uint(8)
	case kindEnd:
		m.Size = r.uint(8)
		copy(m.Sum[:], r.take(sha256.Size))
	case kindDone:
	case kindError:
		m.Code = Code(r.uint(2))
		m.Text = r.text(maxText)
	default:
		return errMessage
	}
	if r.bad || len(r.b) != 0 {
		return errMessage
	}
	return nil
}

// reader takes fields from the front of b; bad is set when b is too short.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) take(n int) []byte {
	if r.bad || n > len(r.b) {
		r.bad = true
		return nil
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) uint(n int) uint64 {
	var v uint64
	for _, c := range r.take(n) {
		v = v<<8 | uint64(c)
	}
	return v
}

func (r *reader) text(most int) string {
	n := int(r.uint(2))
	if n > most {
		r.bad = true
	}
	return string(r.take(n))
}

// Code classifies an error for the other side.
type Code uint16

// The codes of docs/cp.md.
const (
	CodeInternal   Code = iota
	CodeRequest         // malformed or out of turn
	CodeName            // a name that is not allowed
	CodeNotFound        // no such file or folder
	CodePermission      // the file system says no
	CodeNoSpace         // disk full, quota or size limit
	CodeIO              // reading or writing the file failed
	CodeChecksum        // SHA-256 or size differs
	CodeBusy            // too many clients, or shutting down
)

// A RemoteError is what the other side said of its failure.
type RemoteError struct {
	Code Code
	Text string
}

// Error shows the text with everything that a terminal could take as a command
// removed: it comes from another host.
func (e *RemoteError) Error() string { return "the other side says: " + printable(e.Text) }

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}
