package handoff

import (
	"bytes"
	"sync"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

// TestRing passes frames between two goroutines, some of which are kept for a
// while: each arrives once and in order, and full means lost, not mixed up.
func TestRing(t *testing.T) {
	r := NewRing(1522)
	if n := len(r.mem); n > ringMemory || 2*n < ringMemory {
		t.Errorf("%d bytes", n)
	}
	const frames = 50_000
	var wg sync.WaitGroup
	var sent []uint32
	wg.Go(func() {
		var b [1500]byte
		for i := range uint32(frames) {
			n := 5 + int(i%1400)
			b[0], b[1], b[2], b[3] = byte(i), byte(i>>8), byte(i>>16), byte(i>>24)
			b[n-1] = byte(n)
			f := link.Frame{N: 2}
			f.Pieces[0], f.Pieces[1] = b[:3], b[3:n]
			if r.Send(&f) {
				sent = append(sent, i)
			}
		}
	})
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	var got []uint32
	var kept []link.Frame
	read := func(f *link.Frame) uint32 {
		b := f.Pieces[0]
		i := uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
		if n := 5 + int(i%1400); len(b) != n || b[n-1] != byte(n) {
			t.Errorf("frame %d: %d bytes", i, len(b))
		}
		return i
	}
	var f link.Frame
	for over := false; ; {
		if !r.Receive(&f) {
			if over {
				break
			}
			select {
			case <-done:
				over = true
			default:
			}
			continue
		}
		i := read(&f)
		got = append(got, i)
		if i%3 == 0 && r.MayKeep() {
			kept = append(kept, f)
			r.Keep()
		} else {
			r.Release()
		}
		if len(kept) > 100 {
			read(&kept[0])
			r.Unkeep(&kept[0])
			kept = kept[1:]
		}
	}
	if len(got) == 0 || len(got) != len(sent) {
		t.Fatalf("%d arrived of %d", len(got), len(sent))
	}
	for i := range got {
		if got[i] != sent[i] {
			t.Fatalf("frame %d is %d, want %d", i, got[i], sent[i])
		}
	}
	for i := range kept {
		r.Unkeep(&kept[i])
	}
	_, n := r.take.Peek(uint32(len(r.back)))
	if r.kept != 0 || len(r.free)+int(n) != len(r.full) {
		t.Errorf("%d kept, %d free", r.kept, len(r.free)+int(n))
	}
}

// TestDirectory changes one bucket from several goroutines.
func TestDirectory(t *testing.T) {
	d := NewDirectory[*int]()
	key := func(i int) Key {
		return Key{Flow: pkt.Flow{LocalPort: uint16(i), RemotePort: uint16(i >> 16)}}
	}
	ws := []*int{new(int), new(int), new(int), new(int)}
	const n = 5_000
	var wg sync.WaitGroup
	for g, w := range ws {
		wg.Go(func() {
			for i := g * n; i < (g+1)*n; i++ {
				d.Put(key(i), w)
				d.Remove(key(i), ws[(g+1)%4]) // not its own
				if i%2 == 0 {
					d.Remove(key(i), w)
				}
			}
		})
	}
	wg.Wait()
	for i := range 8 * n {
		k := key(i)
		var want *int
		if i < 4*n && i%2 != 0 {
			want = ws[i/n]
		}
		if got := d.Find(&k); got != want {
			t.Fatalf("flow %d: %v, want %v", i, got, want)
		}
	}
	d.Put(key(1), ws[3])
	k := key(1)
	if d.Find(&k) != ws[0] {
		t.Error("put took a flow from its owner")
	}
	d.Move(k, ws[2], ws[3])
	if d.Find(&k) != ws[0] {
		t.Error("move took a flow from another than its owner")
	}
	wg.Go(func() {
		for i := range n {
			d.Move(k, ws[i%2], ws[1-i%2])
		}
	})
	for range n {
		if d.Find(&k) == nil {
			t.Fatal("a flow that moves is unowned")
		}
	}
	wg.Wait()
	d.Move(k, ws[0], ws[1])
	if d.Find(&k) != ws[1] {
		t.Error("a flow has not moved")
	}
	d.Move(key(0), ws[0], ws[1]) // unowned
	d.Remove(key(0), ws[0])
	if d.Len() != 4*n/2 {
		t.Errorf("%d flows", d.Len())
	}
	if a := testing.AllocsPerRun(100, func() { d.Find(&k) }); a != 0 {
		t.Errorf("%v allocations to find a flow", a)
	}
}

// TestDialing checks that only the worker that dials can end the entry.
func TestDialing(t *testing.T) {
	var d Dialing[*int]
	a, b, k := new(int), new(int), Key{Flow: pkt.Flow{LocalPort: 1}}
	d.Remove(k, a)
	d.Add(k, a)
	d.Remove(k, b)
	d.Add(Key{Flow: k.Flow, Host: true}, b)
	if d.Find(k) != a || d.Len() != 2 {
		t.Error("another worker has ended it")
	}
	d.Remove(Key{Flow: k.Flow, Host: true}, b)
	if d.Find(Key{Flow: k.Flow, Proto: pkt.ProtoSCTP}) != nil {
		t.Error("found over another transport")
	}
	d.Remove(k, a)
	if d.Find(k) != nil || d.Len() != 0 {
		t.Error("it has not ended")
	}
}

// TestBuffersReturn fills and empties a ring several times: all of its buffers are free again.
func TestBuffersReturn(t *testing.T) {
	r := NewRing(64)
	_, _, all := r.Len()
	f := link.Frame{N: 1}
	var got link.Frame
	for round := range 3 {
		sent := 0
		for ; sent <= all; sent++ {
			f.Pieces[0] = []byte{byte(round), byte(sent), byte(sent >> 8)}
			if !r.Send(&f) {
				break
			}
		}
		if sent != all {
			t.Fatalf("round %d: %d frames in %d buffers", round, sent, all)
		}
		for i := range sent {
			if !r.Receive(&got) || !bytes.Equal(got.Pieces[0], []byte{byte(round), byte(i), byte(i >> 8)}) {
				t.Fatalf("round %d: frame %d is %x", round, i, got.Pieces[0])
			}
			if i%100 == 0 {
				r.Keep()
				r.Unkeep(&got)
			}
			r.Release()
			r.Release() // there is no current frame
		}
		if r.Receive(&got) {
			t.Error("a frame from an empty ring")
		}
		if kept, free, _ := r.Len(); kept != 0 || free != all {
			t.Fatalf("round %d: %d kept and %d free of %d buffers", round, kept, free, all)
		}
	}
	for n, fits := range map[int]bool{64: true, 65: false} {
		if f.Pieces[0] = make([]byte, n); r.Send(&f) != fits {
			t.Errorf("a frame of %d bytes in buffers of 64: %v", n, !fits)
		}
	}
}

// TestMayKeep checks that half of the buffers remain for passing frames, however many the
// connections hold.
func TestMayKeep(t *testing.T) {
	r := NewRing(64)
	_, _, all := r.Len()
	f := link.Frame{N: 1}
	f.Pieces[0] = make([]byte, 60)
	var kept []link.Frame
	for r.MayKeep() {
		var got link.Frame
		if !r.Send(&f) || !r.Receive(&got) {
			t.Fatal("no frame")
		}
		r.Keep()
		kept = append(kept, got)
	}
	if len(kept) != all/2 {
		t.Errorf("%d of %d buffers kept", len(kept), all)
	}
	r.Unkeep(&kept[0])
	if !r.MayKeep() {
		t.Error("one is back, and none may be kept")
	}
}
