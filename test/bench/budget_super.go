package main

import (
	"encoding/binary"
	"errors"
	"net"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/crc32c"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

// The budget of super-frames is the budget with frames of as many segments as fit in 64 KiB, over the
// link that iwarpd would take. Each segment has a CRC32c of its own, and each super-frame is answered.

// superWindow is the number of super-frames in flight.
const superWindow = 8

// superBudget is what a budget needs for super-frames.
type superBudget struct {
	link  link.Segmenter
	size  int // bytes of a segment after the headers, with the CRC
	most  int // segments
	frame []byte
	parts [link.MaxSuper][]byte
}

// openSuperLink opens queue 0 of the job's interface as iwarpd does, and steers the budget's port to it.
func openSuperLink(j job) (link.Link, func(), error) {
	if _, err := net.InterfaceByName(j.If); err != nil {
		return nil, nil, err
	}
	s, err := bpf.Load(bpf.Options{})
	if err != nil {
		return nil, nil, err
	}
	set, err := ifqueue.Open(s, ifqueue.Config{Interface: j.If, Queues: []int{0}, Super: true})
	if err != nil {
		return nil, nil, errors.Join(err, s.Close())
	}
	closer := func() { _ = errors.Join(set.Close(), s.Close()) }
	if !set.Super {
		closer()
		return nil, nil, errors.New("no super-frames on " + j.If)
	}
	if err := s.Claim(bpf.Endpoint{Proto: pkt.ProtoTCP, Port: budgetPort}); err != nil {
		closer()
		return nil, nil, err
	}
	return set.Links[0], closer, nil
}

// useSuper makes b send super-frames.
func (b *budget) useSuper() {
	seg := b.link.(link.Segmenter)
	size := b.link.MTU() - budgetInIP
	// With budgetInIP a frame at MTU 3498 would have 65540 bytes, and the kernel cuts those of 64 KiB and more.
	most := min(link.MaxSuper, (seg.SuperBytes()-budgetHeader)/size)
	b.super = &superBudget{link: seg, size: size, most: most, frame: make([]byte, budgetHeader+most*size)}
}

// postSuper sends the next data as super-frame number seq. It returns false if the link refuses it.
func (b *budget) postSuper(seq uint32) bool {
	s := b.super
	off := b.off
	for i := range s.most {
		if off+s.size-4 > len(b.data) {
			off = 0
		}
		p := s.frame[budgetHeader+i*s.size:][:s.size]
		c, _ := crc32c.Copy(p[:s.size-4], 0, b.data[off:off+s.size-4])
		binary.LittleEndian.PutUint32(p[s.size-4:], c)
		s.parts[i] = p
		off += s.size - 4
	}
	n := len(s.frame) - budgetHeader
	b.put(s.frame, n, seq, 0)
	binary.BigEndian.PutUint16(s.frame[budgetSum:], pkt.Fold(b.pseudo+uint32(32+n))) // the rest is the link's
	s.parts[0] = s.frame[:budgetHeader+s.size]
	if !s.link.SendSuper(&link.Super{Parts: s.parts[:s.most], TCPOff: 34, HdrLen: budgetHeader, Size: s.size}) {
		return false
	}
	b.off = off
	return true
}

// placeSuper checks the CRCs of a super-frame and copies its payload to data. It reports whether f is one, and whole.
func (b *budget) placeSuper(f *link.Frame) bool {
	s := b.super
	if f.Len() != len(s.frame) || f.N == 0 || len(f.Pieces[0]) < budgetHeader {
		return false
	}
	p := f.Pieces[0]
	if f.N > 1 {
		p = s.frame[:0]
		for _, q := range f.Pieces[:f.N] {
			p = append(p, q...)
		}
	}
	for p = p[budgetHeader:]; len(p) > 0; p = p[s.size:] {
		if b.off+s.size-4 > len(b.data) {
			b.off = 0
		}
		if c, _ := crc32c.Copy(b.data[b.off:b.off+s.size-4], 0, p[:s.size-4]); c != binary.LittleEndian.Uint32(p[s.size-4:]) {
			b.bad++
			return false
		}
		b.off += s.size - 4
	}
	return true
}
