package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cilium/ebpf/ringbuf"
)

// Fragments are the frames with IP fragments that the program has put in its
// ring: all of the packets of ours, and of others those that came before the
// first fragment of their packet, which alone has ports. What it has not taken
// reaches the kernel. While nobody reads, fragments of packets of ours are lost
// when the ring is full.
type Fragments struct {
	r   *ringbuf.Reader
	rec ringbuf.Record
}

// Fragments opens the ring. It has one reader.
func (s *Steering) Fragments() (*Fragments, error) {
	r, err := ringbuf.NewReader(s.objs.Fragments)
	if err != nil {
		return nil, fmt.Errorf("bpf: fragments: %w", explain(err))
	}
	return &Fragments{r: r}, nil
}

// Read returns the next frame, valid until the next Read, once there is one. It
// returns os.ErrDeadlineExceeded after the deadline, unless that is zero, and
// os.ErrClosed after Close.
func (f *Fragments) Read(deadline time.Time) ([]byte, error) {
	f.r.SetDeadline(deadline)
	err := f.r.ReadInto(&f.rec)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, os.ErrClosed):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("bpf: fragments: %w", err)
	}
	// The record is a struct small or large of steer.c.
	b := f.rec.RawSample
	if len(b) < 4 {
		return nil, nil
	}
	n := uint64(binary.NativeEndian.Uint32(b))
	b = b[4:]
	return b[:min(n, uint64(len(b)))], nil
}

// Close ends a Read that waits, and all later ones.
func (f *Fragments) Close() error { return f.r.Close() }
