package ring

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestAgainstModel drives both ends with random steps, from random start
// indices, and compares with a plain slice.
func TestAgainstModel(t *testing.T) {
	r := testenv.Rand(t)
	for range 200 {
		size := uint32(1) << r.IntN(6)
		start := r.Uint32()
		if r.IntN(2) == 0 {
			start = -(r.Uint32() % (2 * size)) // wraps soon
		}
		var prod, cons atomic.Uint32
		prod.Store(start)
		cons.Store(start)
		p, c := NewProducer(&prod, &cons, size), NewConsumer(&prod, &cons, size)
		entries := make([]int, size)
		var model []int // published, not released
		var reserved []int
		next := 0
		for range 300 {
			switch r.IntN(4) {
			case 0:
				want := r.Uint32() % (size + 2)
				first, n := p.Reserve(want)
				if room := size - uint32(len(model)+len(reserved)); n != min(want, room) {
					t.Fatalf("Reserve(%d) gave %d, there is room for %d", want, n, room)
				}
				for i := range n {
					entries[p.Mask(first+i)] = next
					reserved = append(reserved, next)
					next++
				}
				if got := p.Unsubmitted(); got != uint32(len(reserved)) {
					t.Fatalf("Unsubmitted %d, want %d", got, len(reserved))
				}
			case 1:
				p.Submit()
				model = append(model, reserved...)
				reserved = reserved[:0]
			case 2, 3:
				want := r.Uint32() % (size + 2)
				first, n := c.Peek(want)
				if n != min(want, uint32(len(model))) {
					t.Fatalf("Peek(%d) gave %d of %d", want, n, len(model))
				}
				for i := range n {
					if got := entries[c.Mask(first+i)]; got != model[i] {
						t.Fatalf("entry %d is %d, want %d", i, got, model[i])
					}
				}
				if n > 0 {
					n = r.Uint32() % (n + 1)
				}
				c.Release(n)
				model = model[n:]
				if got := p.Pending(); got != uint32(len(model)) {
					t.Fatalf("Pending %d, want %d", got, len(model))
				}
			}
		}
		if p.Bad() || c.Bad() {
			t.Fatal("Bad on a good ring")
		}
	}
}

// TestHostile lets the other side store anything: no count exceeds the size,
// and no entry is seen twice or before it was seen at all.
func TestHostile(t *testing.T) {
	r := testenv.Rand(t)
	const size = 16
	for range 2000 {
		var prod, cons atomic.Uint32
		start := r.Uint32()
		prod.Store(start)
		cons.Store(start)
		p := NewProducer(&prod, &cons, size)
		prod.Store(r.Uint32()) // bad before the consumer even starts
		c := NewConsumer(&prod, &cons, size)
		for range 20 {
			evil := start + r.Uint32()%64 - 32
			if r.IntN(2) == 0 {
				evil = r.Uint32()
			}
			if r.IntN(2) == 0 {
				cons.Store(evil)
				if n := p.Free(r.Uint32() % 32); n > size {
					t.Fatalf("Free gave %d", n)
				}
				if _, n := p.Reserve(r.Uint32()); n > size {
					t.Fatalf("Reserve gave %d", n)
				}
				p.Submit()
				if n := p.Pending(); n > size {
					t.Fatalf("Pending gave %d", n)
				}
				cons.Store(start)
			} else {
				prod.Store(evil)
				first, n := c.Peek(r.Uint32())
				if n > size || c.Mask(first+n) >= size {
					t.Fatalf("Peek gave %d at %d", n, first)
				}
				c.Release(n)
				prod.Store(start)
			}
		}
	}
}

func TestBadIsNoticed(t *testing.T) {
	var prod, cons atomic.Uint32
	p := NewProducer(&prod, &cons, 8)
	cons.Store(1) // ahead of the producer
	if n := p.Free(1); n == 0 {
		t.Error("what was seen before is still good")
	}
	p.Reserve(8)
	p.Submit()
	cons.Store(20)
	if n := p.Free(1); n != 0 || !p.Bad() {
		t.Errorf("Free %d, Bad %v", n, p.Bad())
	}
	p = NewProducer(&prod, &cons, 8)
	if n := p.Pending(); n != 8 || !p.Bad() {
		t.Errorf("Pending %d, Bad %v", n, p.Bad())
	}
	var prod2, cons2 atomic.Uint32
	c := NewConsumer(&prod2, &cons2, 8)
	prod2.Store(9)
	if _, n := c.Peek(4); n != 0 || !c.Bad() {
		t.Errorf("Peek %d, Bad %v", n, c.Bad())
	}
	prod2.Store(3)
	if _, n := c.Peek(4); n != 3 {
		t.Errorf("Peek %d after the index was put right", n)
	}
}

// TestMovesBack checks that entries that were seen can be released although the producer's index has moved back before them.
func TestMovesBack(t *testing.T) {
	for at := range uint32(5) {
		var prod, cons atomic.Uint32
		c := NewConsumer(&prod, &cons, 8)
		prod.Store(4)
		c.Peek(8)
		prod.Store(at)
		if _, n := c.Peek(8); n != 4 || c.Bad() != (at < 4) {
			t.Errorf("back at %d: Peek %d, Bad %v", at, n, c.Bad())
		}
		c.Release(4)
	}
}

func TestMisusePanics(t *testing.T) {
	var prod, cons atomic.Uint32
	for name, f := range map[string]func(){
		"release of too much": func() { c := NewConsumer(&prod, &cons, 8); c.Release(1) },
		"producer of 0":       func() { NewProducer(&prod, &cons, 0) },
		"producer of 6":       func() { NewProducer(&prod, &cons, 6) },
		"consumer of 0":       func() { NewConsumer(&prod, &cons, 0) },
		"consumer of 6":       func() { NewConsumer(&prod, &cons, 6) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
}

// TestTwoGoroutines proves, with -race, that entries need no other
// synchronisation than the indices.
func TestTwoGoroutines(t *testing.T) {
	const size, total = 64, 50000
	var prod, cons atomic.Uint32
	prod.Store(^uint32(99))
	cons.Store(^uint32(99))
	entries := make([]uint32, size)
	var wg sync.WaitGroup
	wg.Add(2)
	go func() {
		defer wg.Done()
		p := NewProducer(&prod, &cons, size)
		for v := uint32(0); v < total; {
			first, n := p.Reserve(min(7, total-v))
			for i := range n {
				entries[p.Mask(first+i)] = v
				v++
			}
			if p.Submit(); n == 0 {
				runtime.Gosched()
			}
		}
	}()
	go func() {
		defer wg.Done()
		c := NewConsumer(&prod, &cons, size)
		for v := uint32(0); v < total; {
			first, n := c.Peek(16)
			for i := range n {
				if got := entries[c.Mask(first+i)]; got != v {
					t.Errorf("entry %d is %d", v, got)
					v = total
					return
				}
				v++
			}
			if c.Release(n); n == 0 {
				runtime.Gosched()
			}
		}
	}()
	wg.Wait()
}

func TestAllocatesNothing(t *testing.T) {
	var prod, cons atomic.Uint32
	p, c := NewProducer(&prod, &cons, 64), NewConsumer(&prod, &cons, 64)
	if n := testing.AllocsPerRun(100, func() {
		p.Reserve(10)
		p.Submit()
		_, n := c.Peek(10)
		c.Release(n)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkRing(b *testing.B) {
	var prod, cons atomic.Uint32
	p, c := NewProducer(&prod, &cons, 1024), NewConsumer(&prod, &cons, 1024)
	b.ReportAllocs()
	for range b.N {
		p.Reserve(1)
		p.Submit()
		_, n := c.Peek(1)
		c.Release(n)
	}
}
