package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
)

// Fragments are the frames with IP fragments that the optional program has put in its
// ring: all of the packets of ours, and of others those that came before the
// first fragment of their packet, which alone has ports. What it has not taken
// reaches the kernel.
type Fragments struct {
	s   *Steering
	r   *ringbuf.Reader
	rec ringbuf.Record
}

// Fragments opens the ring, which has one reader, and installs the program that fills
// it, until Close.
func (s *Steering) Fragments() (*Fragments, error) {
	r, err := ringbuf.NewReader(s.objs.Fragments)
	if err != nil {
		return nil, fmt.Errorf("bpf: fragments: %w", explain(err))
	}
	if err := s.objs.Programs.Update(uint32(0), s.objs.IwarpdFragments, ebpf.UpdateAny); err != nil {
		_ = r.Close()
		return nil, fmt.Errorf("bpf: install the program for fragments: %w", explain(err))
	}
	return &Fragments{s: s, r: r}, nil
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

// Close takes the program out, so that all fragments are the kernel's, and ends a Read
// that waits, and all later ones.
func (f *Fragments) Close() error {
	err := f.s.objs.Programs.Delete(uint32(0))
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		err = nil // closed before
	}
	return errors.Join(err, f.r.Close())
}
