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

// Fragments are the frames with IP fragments that the optional programs have put in their
// ring: all fragments of steered packets, and fragments of any packet that arrived before
// the first one, since only the first has ports. All other fragments go to the kernel.
type Fragments struct {
	s   *Steering
	r   *ringbuf.Reader
	rec ringbuf.Record
}

// Fragments opens the ring, which allows one reader, and installs the programs that fill
// it. Close uninstalls them.
func (s *Steering) Fragments() (*Fragments, error) {
	r, err := ringbuf.NewReader(s.objs.Fragments)
	if err != nil {
		return nil, fmt.Errorf("bpf: fragments: %w", explain(err))
	}
	f := &Fragments{s: s, r: r}
	for array, prog := range map[*ebpf.Map]*ebpf.Program{s.objs.Programs: s.objs.IwarpdFragments, s.objs.SkbPrograms: s.objs.IwarpdSkbFragments} {
		if err := array.Update(uint32(0), prog, ebpf.UpdateAny); err != nil {
			_ = f.Close()
			return nil, fmt.Errorf("bpf: install the program for fragments: %w", explain(err))
		}
	}
	return f, nil
}

// Read waits for the next frame, which is valid until the next Read. It returns
// os.ErrDeadlineExceeded after the deadline, unless that is zero, and os.ErrClosed after
// Close.
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

// Close uninstalls the programs, so that all fragments go to the kernel, and makes pending
// and later calls of Read fail.
func (f *Fragments) Close() error {
	var errs []error
	for _, array := range []*ebpf.Map{f.s.objs.Programs, f.s.objs.SkbPrograms} {
		if err := array.Delete(uint32(0)); !errors.Is(err, ebpf.ErrKeyNotExist) { // already closed
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, f.r.Close())...)
}
