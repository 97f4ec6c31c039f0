// Package filecopy copies files between two hosts by RDMA for iwarpctl cp and iwarpctl serve. The
// client writes a file to the server's registered window by RDMA Write, or reads it from there by
// RDMA Read; short Sends coordinate the transfer. docs/cp.md specifies the protocol.
package filecopy

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"

	"github.com/zeebo/blake3"
	"github.com/zeebo/xxh3"

	"github.com/iwarpd/iwarpd/internal/printable"
)

// Version is the newest version of the protocol. Version 2, the oldest, does not have XXH128.
const (
	Version = 3
	oldest  = 2
)

const magic = "IWCP"

// Limits of the protocol.
const (
	maxMessage = 2048     // bytes of a message
	maxName    = 1024     // bytes of a file name
	maxSlots   = 32       // chunks in a window
	maxChunk   = 64 << 20 // bytes of a chunk
	recvDepth  = 40       // receives that each side keeps posted
	maxText    = 512      // bytes of an error text
	maxEntry   = 255      // bytes of the name of a directory entry
	maxEntries = 16       // entries in the answer to a list
)

// hello returns the private data that offers or confirms version v.
func hello(v uint8) []byte { return append([]byte(magic), v) }

// checkHello returns the version in the other side's private data. If the version is not
// supported, it returns it with an error.
func checkHello(b []byte) (uint8, error) {
	if len(b) < len(magic)+1 || string(b[:len(magic)]) != magic {
		return 0, errors.New("the other side does not support iwarpctl's copy protocol: is that the port of iwarpctl serve?")
	}
	v := b[len(magic)]
	if v < oldest || v > Version {
		return v, fmt.Errorf("the other side supports version %d of the copy protocol, this one %d to %d: upgrade the older one",
			v, oldest, Version)
	}
	return v, nil
}

type kind uint8

const (
	kindChunk kind = 4    // file sender: chunk Seq is in its slot
	kindFree  kind = 5    // file receiver: the slot of chunk Seq is free
	kindOK    kind = 7    // server: end of a list, or the folder exists
	kindError kind = 8    // either side: failure
	kindList  kind = 9    // client: list a folder, or one object
	kindEntry kind = 10   // server: an entry of the list
	kindMkdir kind = 11   // client: create a folder
	kindGet   kind = 0x41 // client: send me a file
	kindPut   kind = 0x42 // client: receive a file
	kindOpen  kind = 0x43 // server: go ahead, this is my window
	kindEnd   kind = 0x46 // file sender: end of file
	kindDone  kind = 0x47 // file receiver: the file is complete and on disk
)

// Flags of requests.
const (
	flagPreserve = 1 << iota // put, mkdir: keep mode and modification time
	flagResume               // put: resume an earlier copy, and keep an incomplete one
	flagStat                 // list: the object itself
)

// A Hash is a hash function that both sides compute over a file.
type Hash uint8

// The hashes of docs/cp.md.
const (
	SHA256 Hash = 1
	BLAKE3 Hash = 2
	XXH128 Hash = 3 // XXH3 of 128 bits: detects accidents but not forgery, at the speed of memory
)

// hashes describes each Hash.
var hashes = [...]struct {
	name string
	new  func() hash.Hash
}{
	SHA256: {"sha256", sha256.New},
	BLAKE3: {"blake3", func() hash.Hash { return blake3.New() }},
	XXH128: {"xxh128", func() hash.Hash { return xxh128{xxh3.New()} }},
}

// valid reports whether h is a known hash.
func (h Hash) valid() bool { return h != 0 && int(h) < len(hashes) }

func (h Hash) String() string {
	if !h.valid() {
		return fmt.Sprintf("hash %d", uint8(h))
	}
	return hashes[h].name
}

func (h Hash) new() hash.Hash { return hashes[h].new() }

// xxh128 computes the 128-bit sum of a Hasher, in the canonical order that xxh128sum prints.
type xxh128 struct{ *xxh3.Hasher }

func (x xxh128) Size() int { return 16 }

func (x xxh128) Sum(b []byte) []byte {
	sum := x.Sum128().Bytes()
	return append(b, sum[:]...)
}

// Text returns sum after the name of the hash, such as "xxh128:" and 32 hexadecimal digits.
func (h Hash) Text(sum [sumSize]byte) string {
	return h.String() + ":" + hex.EncodeToString(sum[:h.new().Size()])
}

// ParseHash returns the hash with the name s.
func ParseHash(s string) (Hash, error) {
	for h := range Hash(len(hashes)) {
		if h.valid() && s == h.String() {
			return h, nil
		}
	}
	return 0, fmt.Errorf("checksum %q: must be xxh128, blake3 or sha256", s)
}

const sumSize = 32 // bytes of the longest sum; shorter ones are padded with zeros

// Types of an entry.
const (
	typeFile uint8 = iota
	typeFolder
	typeOther
)

// message is a message of any kind; each kind uses some of the fields.
type message struct {
	Kind  kind
	Name  string        // get, put, list, entry, mkdir
	Size  uint64        // put, open, end, entry: bytes of the file
	Addr  uint64        // open: address of the window
	RKey  uint32        // open
	Chunk uint32        // open: bytes of a slot
	Slots uint16        // open
	Seq   uint64        // chunk, free: number of the chunk, from 0
	Len   uint32        // chunk: bytes of it
	Sum   [sumSize]byte // end
	Code  Code          // error
	Text  string        // error

	Hash     Hash   // get, put, open
	Flags    uint8  // put, list, mkdir
	Mode     uint32 // put, open, entry, mkdir: permissions
	Mtime    int64  // the same: nanoseconds since 1970
	Offset   uint64 // get, open: offset of chunk 0 in the file
	DiskTime uint64 // end, done: nanoseconds in the sender's calls
	HashTime uint64 // end, done
	Type     uint8  // entry
	After    string // list: entries with greater names only
}

func appendText(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
}

func (m *message) encode() []byte {
	be := binary.BigEndian
	b := []byte{byte(m.Kind)}
	switch m.Kind {
	case kindGet:
		b = appendText(b, m.Name)
	case kindPut:
		b = appendText(be.AppendUint64(b, m.Size), m.Name)
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
	case kindError:
		b = appendText(be.AppendUint16(b, uint16(m.Code)), m.Text[:min(len(m.Text), maxText)])
	case kindList:
		b = appendText(appendText(append(b, m.Flags), m.Name), m.After)
	case kindEntry:
		b = be.AppendUint32(append(b, m.Type), m.Mode)
		b = be.AppendUint64(be.AppendUint64(b, uint64(m.Mtime)), m.Size)
		b = appendText(b, m.Name)
	case kindMkdir:
		b = be.AppendUint32(append(b, m.Flags), m.Mode)
		b = appendText(be.AppendUint64(b, uint64(m.Mtime)), m.Name)
	}
	switch m.Kind {
	case kindGet, kindPut, kindOpen:
		b = be.AppendUint32(append(b, byte(m.Hash), m.Flags), m.Mode)
		b = be.AppendUint64(be.AppendUint64(b, uint64(m.Mtime)), m.Offset)
	case kindEnd, kindDone:
		b = be.AppendUint64(be.AppendUint64(b, m.DiskTime), m.HashTime)
	}
	return b
}

var errMessage = errors.New("malformed message of the copy protocol")

// decode parses b, which must contain exactly one message.
func (m *message) decode(b []byte) error {
	r := reader{b: b}
	*m = message{Kind: kind(r.uint(1))}
	switch m.Kind {
	case kindGet:
		m.Name = r.text(maxName)
	case kindPut:
		m.Size = r.uint(8)
		m.Name = r.text(maxName)
	case kindOpen:
		m.Size, m.Addr = r.uint(8), r.uint(8)
		m.RKey, m.Chunk, m.Slots = uint32(r.uint(4)), uint32(r.uint(4)), uint16(r.uint(2))
	case kindChunk:
		m.Seq, m.Len = r.uint(8), uint32(r.uint(4))
	case kindFree:
		m.Seq = r.uint(8)
	case kindEnd:
		m.Size = r.uint(8)
		copy(m.Sum[:], r.take(sumSize))
	case kindDone, kindOK:
	case kindError:
		m.Code = Code(r.uint(2))
		m.Text = r.text(maxText)
	case kindList:
		m.Flags = uint8(r.uint(1))
		m.Name = r.text(maxName)
		m.After = r.text(maxEntry)
	case kindEntry:
		m.Type, m.Mode, m.Mtime = uint8(r.uint(1)), uint32(r.uint(4)), int64(r.uint(8))
		m.Size = r.uint(8)
		m.Name = r.text(maxEntry)
	case kindMkdir:
		m.Flags, m.Mode, m.Mtime = uint8(r.uint(1)), uint32(r.uint(4)), int64(r.uint(8))
		m.Name = r.text(maxName)
	default:
		return errMessage
	}
	switch m.Kind {
	case kindGet, kindPut, kindOpen:
		m.Hash, m.Flags, m.Mode = Hash(r.uint(1)), uint8(r.uint(1)), uint32(r.uint(4))
		m.Mtime, m.Offset = int64(r.uint(8)), r.uint(8)
		r.bad = r.bad || !m.Hash.valid()
	case kindEnd, kindDone:
		m.DiskTime, m.HashTime = r.uint(8), r.uint(8)
	}
	if r.bad || len(r.b) != 0 {
		return errMessage
	}
	return nil
}

// reader consumes fields from b; bad is set if b is too short.
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
	CodeRequest         // malformed or unexpected message
	CodeName            // invalid name
	CodeNotFound        // no such file or folder
	CodePermission      // denied by the file system
	CodeNoSpace         // disk full, quota or size limit
	CodeIO              // reading or writing the file failed
	CodeChecksum        // the sum or the size differs
	CodeBusy            // too many clients, or shutting down
)

// A RemoteError is an error reported by the other side.
type RemoteError struct {
	Code Code
	Text string
}

// Error escapes the text, which comes from another host, so that it cannot control the terminal.
func (e *RemoteError) Error() string { return "the other side says: " + printable.String(e.Text) }
