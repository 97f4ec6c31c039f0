package verbs

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/big"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/iwarpd/iwarpd/internal/term"
)

const (
	pdA PDID = 1
	pdB PDID = 2
)

const accessRW = LocalWrite | RemoteWrite | RemoteRead | RemoteAtomic | MWBind

func mustRegister(t testing.TB, tb *Table, pd PDID, mem []byte, base uint64, a Access) *Region {
	t.Helper()
	r, err := tb.Register(pd, mem, base, a)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func registerFast(t testing.TB, tb *Table, pd PDID, mem []byte, a Access) *Region {
	t.Helper()
	r, err := tb.RegisterFast(pd, mem, a)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func allocWindow(t testing.TB, tb *Table, pd PDID) *Region {
	t.Helper()
	w, err := tb.AllocWindow(pd)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func deregister(t testing.TB, tb *Table, r *Region) {
	t.Helper()
	if err := tb.Deregister(r); err != nil {
		t.Fatal(err)
	}
}

// TestCheckBounds compares Check with arithmetic without overflow at every edge of regions at the bottom, in the middle
// and at the top of the address space.
func TestCheckBounds(t *testing.T) {
	tb := NewTable(rand.Reader)
	lens := []uint64{1, 2, 7, 8, 4096}
	for _, size := range lens {
		bases := []uint64{0, 1, 1 << 32, 1<<63 - 4, math.MaxUint64 - size + 1, math.MaxUint64 - size}
		for _, base := range bases {
			mem := make([]byte, size)
			r := mustRegister(t, tb, pdA, mem, base, accessRW)
			var tos []uint64
			for d := range uint64(4) {
				for _, edge := range []uint64{0, base, base + size/2, base + size, math.MaxUint64} {
					tos = append(tos, edge+d, edge-d)
				}
			}
			ns := []uint32{0, 1, 2, 8, uint32(size) - 1, uint32(size), uint32(size) + 1, 1 << 31, math.MaxUint32}
			for _, to := range tos {
				for _, n := range ns {
					checkOne(t, tb, r, mem, to, n)
				}
			}
			deregister(t, tb, r)
		}
	}
	if tb.Len() != 0 {
		t.Errorf("Len = %d after all were deregistered", tb.Len())
	}
}

func checkOne(t *testing.T, tb *Table, r *Region, mem []byte, to uint64, n uint32) {
	t.Helper()
	num := func(v uint64) *big.Int { return new(big.Int).SetUint64(v) }
	end := new(big.Int).Add(num(to), num(uint64(n)))
	top := new(big.Int).Add(num(r.Base()), num(r.Len()))
	want := (*term.Error)(nil)
	switch {
	case n > 0 && end.Cmp(new(big.Int).Lsh(big.NewInt(1), 64)) > 0:
		want = term.ErrTOWrap
	case num(to).Cmp(num(r.Base())) < 0 || end.Cmp(top) > 0:
		want = term.ErrBounds
	}
	b, err := tb.Check(pdA, 1, r.STag(), to, n, useWriteSink)
	if err != want {
		t.Fatalf("base %#x len %d: Check(%#x, %d) = %v; want %v", r.Base(), r.Len(), to, n, err, want)
	}
	if err != nil {
		return
	}
	if len(b) != int(n) || cap(b) != int(n) {
		t.Fatalf("base %#x len %d: Check(%#x, %d) gave len %d cap %d", r.Base(), r.Len(), to, n, len(b), cap(b))
	}
	if n > 0 && &b[0] != &mem[to-r.Base()] {
		t.Fatalf("base %#x len %d: Check(%#x, %d) gave other memory", r.Base(), r.Len(), to, n)
	}
}

// TestCheckRights checks every set of rights against every use.
func TestCheckRights(t *testing.T) {
	need := map[purpose]Access{
		useWriteSink: RemoteWrite, useReadSink: LocalWrite, useReadSource: RemoteRead,
		useAtomic: RemoteAtomic, useLocalRead: 0, useLocalWrite: LocalWrite,
	}
	refused := map[purpose]*term.Error{
		useWriteSink: term.ErrInvalidSTag, useReadSink: term.ErrInvalidSTag, useReadSource: term.ErrReadAccess,
		useAtomic: term.ErrReadAccess, useLocalWrite: term.ErrInvalidSTag,
	}
	tb := NewTable(rand.Reader)
	for a := Access(0); a <= accessAll+1; a++ {
		r, err := tb.Register(pdA, make([]byte, 16), 1<<20, a)
		legal := a <= accessAll && (a&(RemoteWrite|RemoteAtomic) == 0 || a&LocalWrite != 0)
		if legal != (err == nil) {
			t.Fatalf("Register with access %#x: %v; legal %v", a, err, legal)
		}
		if err != nil {
			if !errors.Is(err, ErrAccess) {
				t.Errorf("Register with access %#x: %v; want ErrAccess", a, err)
			}
			continue
		}
		to := uint64(1 << 20)
		if a&ZeroBased != 0 {
			to = 0
		}
		for use := range numUses {
			_, got := tb.Check(pdA, 1, r.STag(), to, 16, use)
			want := refused[use]
			if a&need[use] == need[use] {
				want = nil
			}
			if got != want {
				t.Errorf("access %#x, use %d: %v; want %v", a, use, got, want)
			}
		}
	}
}

func TestCheckSTag(t *testing.T) {
	tb := NewTable(rand.Reader)
	r := mustRegister(t, tb, pdA, make([]byte, 64), 0, accessRW)
	gone := mustRegister(t, tb, pdA, make([]byte, 64), 0, accessRW)
	goneTag := gone.STag()
	deregister(t, tb, gone)
	if err := tb.Deregister(gone); err != nil {
		t.Errorf("second Deregister: %v", err)
	}
	tests := []struct {
		name                  string
		pd                    PDID
		stag                  uint32
		write, source, atomic *term.Error
	}{
		{"right", pdA, r.STag(), nil, nil, nil},
		{"zero", pdA, 0, term.ErrInvalidSTag, term.ErrReadSTag, term.ErrReadSTag},
		{"deregistered", pdA, goneTag, term.ErrInvalidSTag, term.ErrReadSTag, term.ErrReadSTag},
		{"other key", pdA, r.STag() ^ 1, term.ErrInvalidSTag, term.ErrReadSTag, term.ErrReadSTag},
		{"other index", pdA, r.STag() ^ 1<<20, term.ErrInvalidSTag, term.ErrReadSTag, term.ErrReadSTag},
		{"other PD", pdB, r.STag(), term.ErrSTagStream, term.ErrReadSTagStream, term.ErrReadSTagStream},
	}
	for _, tt := range tests {
		for use, want := range map[purpose]*term.Error{useWriteSink: tt.write, useReadSource: tt.source, useAtomic: tt.atomic} {
			if _, err := tb.Check(tt.pd, 1, tt.stag, 0, 8, use); err != want {
				t.Errorf("%s, use %d: %v; want %v", tt.name, use, err, want)
			}
		}
	}
	for d := range uint32(256) {
		if got := tb.Lookup(r.STag() ^ d); (got == r) != (d == 0) {
			t.Errorf("Lookup with key changed by %#x: %v", d, got)
		}
	}
}

func TestRegisterRefuses(t *testing.T) {
	tb := NewTable(rand.Reader)
	if _, err := tb.Register(pdA, nil, 0, 0); !errors.Is(err, ErrLength) {
		t.Errorf("empty region: %v", err)
	}
	if _, err := tb.RegisterFast(pdA, nil, LocalWrite); !errors.Is(err, ErrLength) {
		t.Errorf("empty fast region: %v", err)
	}
	if _, err := tb.RegisterFast(pdA, make([]byte, 8), RemoteWrite); !errors.Is(err, ErrAccess) {
		t.Errorf("fast region for remote writes only: %v", err)
	}
	if _, err := tb.Register(pdA, make([]byte, 2), math.MaxUint64, 0); !errors.Is(err, ErrLength) {
		t.Errorf("region past the top: %v", err)
	}
	if _, err := tb.Register(pdA, make([]byte, 1), math.MaxUint64, 0); err != nil {
		t.Errorf("region that ends at the top: %v", err)
	}
	r, err := tb.Register(pdA, make([]byte, 2), math.MaxUint64, ZeroBased)
	if err != nil || r.Base() != 0 {
		t.Errorf("zero-based region: %v", err)
	}
	if _, err := NewTable(bytes.NewReader(nil)).Register(pdA, make([]byte, 1), 0, 0); !errors.Is(err, io.EOF) {
		t.Errorf("no randomness: %v", err)
	}
}

// TestSTagDraw supplies the random draws: index 0 and indices in use are drawn again.
func TestSTagDraw(t *testing.T) {
	var draws bytes.Buffer
	for _, v := range []uint32{0x00000000, 0x00000001, 0x000000ff, 0x00000102, 0x00000199, 0xffffff00} {
		binary.Write(&draws, binary.LittleEndian, v)
	}
	tb := NewTable(&draws)
	for _, want := range []uint32{0x102, 0xffffff00} {
		if got := mustRegister(t, tb, pdA, make([]byte, 1), 0, 0).STag(); got != want {
			t.Errorf("STag %#x; want %#x", got, want)
		}
	}
}

// TestWindows binds, uses and unbinds a window.
func TestWindows(t *testing.T) {
	tb := NewTable(rand.Reader)
	mem := make([]byte, 256)
	r := mustRegister(t, tb, pdA, mem, 0x1000, accessRW)
	noBind := mustRegister(t, tb, pdA, mem, 0x1000, LocalWrite|RemoteRead)
	readOnly := mustRegister(t, tb, pdA, mem, 0x1000, MWBind)
	foreign := mustRegister(t, tb, pdB, mem, 0x1000, accessRW)
	w := allocWindow(t, tb, pdA)
	const qp = 7
	tag := w.STag()&^0xff | 0x5a
	tests := []struct {
		name string
		pd   PDID
		lkey uint32
		addr uint64
		n    uint32
		a    Access
		ok   bool
	}{
		{"no region", pdA, 0, 0x1000, 16, RemoteRead, false},
		{"no MWBind", pdA, noBind.STag(), 0x1000, 16, RemoteRead, false},
		{"other PD", pdB, r.STag(), 0x1000, 16, RemoteRead, false},
		{"region of another PD", pdA, foreign.STag(), 0x1000, 16, RemoteRead, false},
		{"window of a window", pdA, w.STag(), 0x1000, 16, RemoteRead, false},
		{"empty", pdA, r.STag(), 0x1000, 0, RemoteRead, false},
		{"below", pdA, r.STag(), 0xfff, 16, RemoteRead, false},
		{"above", pdA, r.STag(), 0x1000, 257, RemoteRead, false},
		{"straddles the end", pdA, r.STag(), 0x10f8, 16, RemoteRead, false},
		{"behind", pdA, r.STag(), 0x1100, 1, RemoteRead, false},
		{"beyond the end", pdA, r.STag(), 0x1101, 1, RemoteRead, false},
		{"atomics on read-only memory", pdA, readOnly.STag(), 0x1000, 16, RemoteAtomic, false},
		{"write to read-only memory", pdA, readOnly.STag(), 0x1000, 16, RemoteWrite, false},
		{"local write", pdA, r.STag(), 0x1000, 16, LocalWrite, false},
		{"right", pdA, r.STag(), 0x1010, 16, RemoteRead | RemoteWrite, true},
		{"bound already", pdA, r.STag(), 0x1010, 16, RemoteRead, false},
	}
	for _, tt := range tests {
		if got := tb.bind(tt.pd, qp, tag, tt.lkey, tt.addr, tt.n, tt.a); got != tt.ok {
			t.Errorf("bind, %s: %v", tt.name, got)
		}
	}
	if strange, err := tb.AllocWindow(pdB); err != nil || tb.bind(pdA, qp, strange.STag(), r.STag(), 0x1000, 16, RemoteRead) {
		t.Errorf("a window of another PD was bound (%v)", err)
	}
	if w.STag() != tag || !w.Valid() || w.kind != kindWindow {
		t.Fatalf("window is %#x, valid %v", w.STag(), w.Valid())
	}
	if b, err := tb.Check(pdA, qp, tag, 0x1010, 16, useWriteSink); err != nil || &b[0] != &mem[16] {
		t.Errorf("Write through the window: %v", err)
	}
	for _, tt := range []struct {
		name string
		qp   uint32
		to   uint64
		use  purpose
		want *term.Error
	}{
		{"other QP", qp + 1, 0x1010, useWriteSink, term.ErrSTagStream},
		{"before it", qp, 0x100f, useWriteSink, term.ErrBounds},
		{"behind it", qp, 0x1011, useWriteSink, term.ErrBounds},
		{"no right", qp, 0x1010, useAtomic, term.ErrReadAccess},
		{"as lkey", qp, 0x1010, useLocalRead, term.ErrInvalidSTag},
		{"as sink of a Read", qp, 0x1010, useReadSink, term.ErrInvalidSTag},
	} {
		if _, err := tb.Check(pdA, tt.qp, tag, tt.to, 16, tt.use); err != tt.want {
			t.Errorf("%s: %v; want %v", tt.name, err, tt.want)
		}
	}
	if err := tb.Deregister(r); !errors.Is(err, ErrBusy) {
		t.Errorf("Deregister with a window bound: %v", err)
	}
	if tb.remoteInv(pdA, qp+1, tag) || tb.remoteInv(pdB, qp, tag) || tb.remoteInv(pdA, qp, tag^1) {
		t.Error("a window was invalidated by a stranger")
	}
	if tb.remoteInv(pdA, qp, r.STag()) {
		t.Error("the peer invalidated a plain region")
	}
	if !tb.remoteInv(pdA, qp, tag) || tb.remoteInv(pdA, qp, tag) {
		t.Error("remote invalidation works once")
	}
	if _, err := tb.Check(pdA, qp, tag, 0x1010, 16, useWriteSink); err != term.ErrInvalidSTag {
		t.Errorf("invalidated window: %v", err)
	}
	// A zero-based window, freed while bound.
	if !tb.bind(pdA, qp, tag, r.STag(), 0x1020, 8, RemoteRead|ZeroBased) {
		t.Fatal("second bind")
	}
	if b, err := tb.Check(pdA, qp, tag, 0, 8, useReadSource); err != nil || &b[0] != &mem[32] {
		t.Errorf("zero-based window: %v", err)
	}
	deregister(t, tb, w)
	if tb.bind(pdA, qp, tag, r.STag(), 0x1020, 8, RemoteRead) {
		t.Error("a freed window was bound")
	}
	if err := tb.Deregister(r); err != nil {
		t.Errorf("Deregister after its window: %v", err)
	}
}

func TestFastRegistration(t *testing.T) {
	tb := NewTable(rand.Reader)
	mem := make([]byte, 4096)
	r := registerFast(t, tb, pdA, mem, LocalWrite|RemoteRead)
	if _, err := tb.Check(pdA, 1, r.STag(), 0, 1, useLocalRead); err != term.ErrInvalidSTag {
		t.Errorf("before registration: %v", err)
	}
	tag := r.STag()&^0xff | 0x33
	for _, tt := range []struct {
		name      string
		pd        PDID
		base, off uint64
		n         uint32
		a         Access
		ok        bool
	}{
		{"other PD", pdB, 0, 0, 4096, RemoteRead, false},
		{"more rights than granted", pdA, 0, 0, 4096, LocalWrite | RemoteWrite, false},
		{"unknown right", pdA, 0, 0, 4096, 1 << 20, false},
		{"empty", pdA, 0, 0, 0, RemoteRead, false},
		{"too long", pdA, 0, 1, 4096, RemoteRead, false},
		{"offset outside", pdA, 0, 4097, 1, RemoteRead, false},
		{"offset wraps", pdA, 0, math.MaxUint64, 2, RemoteRead, false},
		{"base wraps", pdA, math.MaxUint64, 0, 2, RemoteRead, false},
		{"right", pdA, 0xabc0, 64, 128, LocalWrite | RemoteRead, true},
		{"valid already", pdA, 0xabc0, 64, 128, RemoteRead, false},
	} {
		if got := tb.fastReg(tt.pd, tag, tt.base, tt.off, tt.n, tt.a); got != tt.ok {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
	if b, err := tb.Check(pdA, 1, tag, 0xabc0, 128, useReadSource); err != nil || &b[0] != &mem[64] {
		t.Errorf("after registration: %v", err)
	}
	if tb.localInv(pdB, tag) || tb.localInv(pdA, tag^1) || !tb.localInv(pdA, tag) || tb.localInv(pdA, tag) {
		t.Error("local invalidation by its PD and key, once")
	}
	if !tb.fastReg(pdA, tag+1, 77, 0, 8, RemoteRead|ZeroBased) {
		t.Fatal("second registration")
	}
	if _, err := tb.Check(pdA, 1, tag+1, 0, 8, useReadSource); err != nil {
		t.Errorf("zero-based: %v", err)
	}
}

// TestWindowOfFastRegion binds a window to part of the registered part of a region. The region then cannot be
// invalidated before the window.
func TestWindowOfFastRegion(t *testing.T) {
	tb := NewTable(rand.Reader)
	mem := make([]byte, 4096)
	fast := registerFast(t, tb, pdA, mem, accessRW)
	w := allocWindow(t, tb, pdA)
	if tb.fastReg(pdA, fast.STag(), 0x5000, 64, 128, RemoteWrite) {
		t.Error("registered for remote writing without local writing")
	}
	const qp = 7
	if !tb.fastReg(pdA, fast.STag(), 0x5000, 64, 128, accessRW) {
		t.Fatal("registration")
	}
	for _, at := range []uint64{0x4fff, 0x5078, 0x5080} {
		if tb.bind(pdA, qp, w.STag(), fast.STag(), at, 16, RemoteRead) {
			t.Errorf("bound to 16 bytes at %#x", at)
		}
	}
	if !tb.bind(pdA, qp, w.STag(), fast.STag(), 0x5010, 16, RemoteRead) {
		t.Fatal("bind")
	}
	if b, err := tb.Check(pdA, qp, w.STag(), 0x5010, 16, useReadSource); err != nil || &b[0] != &mem[64+16] {
		t.Errorf("through the window: %v, or other memory", err)
	}
	if tb.localInv(pdA, fast.STag()) || tb.remoteInv(pdA, qp, fast.STag()) || !fast.Valid() {
		t.Error("invalidated under its window")
	}
	if !tb.localInv(pdA, w.STag()) || !tb.remoteInv(pdA, qp, fast.STag()) {
		t.Error("not invalidated once the window was")
	}
}

// TestDeregisterInRegistration checks that a region that is freed while a work request registers it does not stay
// valid.
func TestDeregisterInRegistration(t *testing.T) {
	tb := NewTable(rand.Reader)
	r := registerFast(t, tb, pdA, make([]byte, 64), accessRW)
	r.change(r.STag(), nil, func() {
		r.set(0, 0, 64, accessRW)
		if err := tb.Deregister(r); err != nil {
			t.Error(err)
		}
	})
	if r.Valid() {
		t.Error("valid, though it is gone")
	}
}

// TestUnchanged checks that values loaded from a region count only if no change was in progress before and none began
// meanwhile, even one that has ended.
func TestUnchanged(t *testing.T) {
	r, err := NewTable(rand.Reader).RegisterFast(pdA, make([]byte, 64), accessRW)
	if err != nil {
		t.Fatal(err)
	}
	none := func() {}
	set := func(n uint64) func() { return func() { r.set(0, 0, n, accessRW) } }
	for _, tt := range []struct {
		name string
		load func()
		want bool
	}{
		{"at rest", none, true},
		{"a change begins and ends", func() { r.change(r.STag(), nil, set(32)) }, false},
		{"after it", none, true},
		{"an invalidation, which the state tells", r.end, true},
		{"a change begins", func() { r.lock() }, false},
		{"during it", none, false},
		{"it ends", r.unlock, false},
		{"after all", none, true},
	} {
		loaded := false
		if got := r.unchanged(func() { loaded = true; tt.load() }); got != tt.want || !loaded {
			t.Errorf("%s: unchanged %v; want %v", tt.name, got, tt.want)
		}
	}
	if !r.lock() {
		t.Fatal("it can be changed no more")
	}
	var v view
	if r.state.Or(stateValid); r.read(r.STag(), &v) {
		t.Error("read in the middle of a change")
	}
	r.unlock()
	if !r.read(r.STag(), &v) || v.size != 32 {
		t.Errorf("read behind it: %+v", v)
	}
}

func TestTableFull(t *testing.T) {
	tb := NewTable(rand.Reader)
	tb.n = MaxRegions - 1
	if _, err := tb.Register(pdA, make([]byte, 8), 0, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := tb.AllocWindow(pdA); !errors.Is(err, ErrTableFull) {
		t.Errorf("one more than MaxRegions: %v; want %v", err, ErrTableFull)
	}
}

// TestTableConcurrent lets workers check while the control plane registers regions and work requests register, bind
// and invalidate. What a check grants must always lie in the region's own memory.
func TestTableConcurrent(t *testing.T) {
	const rounds = 3000
	tb := NewTable(rand.Reader)
	mem := make([]byte, 4096)
	stable := mustRegister(t, tb, pdA, mem, 0, accessRW)
	fast := registerFast(t, tb, pdA, mem, accessRW)
	win := allocWindow(t, tb, pdA)
	var wg sync.WaitGroup
	run := func(f func(i int)) {
		wg.Go(func() {
			for i := range rounds {
				f(i)
			}
		})
	}
	run(func(i int) {
		r, err := tb.Register(pdA, mem, uint64(i), accessRW)
		if err != nil {
			panic(err)
		}
		if _, f := tb.Check(pdA, 1, r.STag(), uint64(i), 4096, useWriteSink); f != nil {
			panic(f)
		}
		if err := tb.Deregister(r); err != nil {
			panic(err)
		}
	})
	for k := range uint32(2) {
		run(func(i int) {
			// Views of the first or the last half: a mixture of the two would reach beyond mem.
			tag := fast.STag()&^0xff | k
			half := uint64(i%2) * 2048
			tb.fastReg(pdA, tag, half, half, 2048, RemoteRead)
			tb.localInv(pdA, tag)
		})
		run(func(i int) {
			tag := win.STag()&^0xff | k
			half := uint64(i%2) * 2048
			tb.bind(pdA, 1, tag, stable.STag(), half, 2048, RemoteRead)
			tb.remoteInv(pdA, 1, tag)
		})
		run(func(i int) {
			for _, r := range []*Region{fast, win, stable} {
				for _, to := range []uint64{0, 1024, 2048} {
					if b, err := tb.Check(pdA, 1, r.STag(), to, 2048, useReadSource); err == nil && &b[0] != &mem[to] {
						panic(fmt.Sprintf("offset %d of a view", to))
					}
				}
			}
		})
	}
	wg.Wait()
	tb.localInv(pdA, fast.STag())
	tb.remoteInv(pdA, 1, win.STag())
	for _, r := range []*Region{win, fast, stable} {
		if err := tb.Deregister(r); err != nil {
			t.Errorf("Deregister: %v (windows %d)", err, r.windows.Load())
		}
	}
}

// TestBindWhileInvalidated checks that no window outlives a fast-register region that another QP invalidates while the window
// is bound.
func TestBindWhileInvalidated(t *testing.T) {
	tb := NewTable(rand.Reader)
	fast := registerFast(t, tb, pdA, make([]byte, 64), accessRW|MWBind)
	win := allocWindow(t, tb, pdA)
	const rounds = 500_000
	var done atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !done.Load() {
			if tb.bind(pdA, 1, win.STag(), fast.STag(), 0, 64, RemoteRead) {
				tb.remoteInv(pdA, 1, win.STag())
			}
		}
	})
	for i := range rounds {
		tb.fastReg(pdA, fast.STag(), 0, 0, 64, accessRW|MWBind)
		if tb.localInv(pdA, fast.STag()) && win.Valid() {
			t.Errorf("round %d: the window is bound, and the region was invalidated", i)
			break
		}
	}
	done.Store(true)
	wg.Wait()
	if n := fast.windows.Load(); n != 0 {
		t.Errorf("%d windows are left", n)
	}
}

// TestRemoteInvWhileRebound checks that the peer of one QP does not invalidate a window that is bound again, with the
// same key, on another QP meanwhile.
func TestRemoteInvWhileRebound(t *testing.T) {
	tb := NewTable(rand.Reader)
	r := mustRegister(t, tb, pdA, make([]byte, 64), 0, accessRW)
	win := allocWindow(t, tb, pdA)
	const rounds = 100_000
	var done atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !done.Load() {
			tb.remoteInv(pdA, 1, win.STag())
		}
	})
	bind := func(qp uint32) {
		for !tb.bind(pdA, qp, win.STag(), r.STag(), 0, 64, RemoteRead) {
			// an invalidation has not unbound it yet
		}
	}
	for i := range rounds {
		bind(1)
		tb.localInv(pdA, win.STag())
		bind(2)
		if !tb.localInv(pdA, win.STag()) {
			t.Errorf("round %d: the peer of QP 1 has invalidated the window of QP 2", i)
			break
		}
	}
	done.Store(true)
	wg.Wait()
}

// TestTableMemory checks that a table that has grown shrinks again.
func TestTableMemory(t *testing.T) {
	tb := NewTable(rand.Reader)
	mem := make([]byte, 1)
	for range 10 {
		var rs []*Region
		for range 500 {
			rs = append(rs, mustRegister(t, tb, pdA, mem, 0, 0))
		}
		for _, r := range rs {
			deregister(t, tb, r)
		}
	}
	for i := range tb.dir {
		if tb.dir[i].Load() != nil {
			t.Fatalf("node %d is left of an empty table", i)
		}
	}
}

func BenchmarkCheck(b *testing.B) {
	tb := NewTable(rand.Reader)
	r := mustRegister(b, tb, pdA, make([]byte, 1<<20), 0x7f0000000000, accessRW)
	stag := r.STag()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := tb.Check(pdA, 1, stag, 0x7f0000000100, 1444, useWriteSink); err != nil {
			b.Fatal(err)
		}
	}
}

// Check returns the memory that check grants, nil if it is far, or the violation that a peer's use is.
func (t *Table) Check(pd PDID, qp, stag uint32, to uint64, n uint32, use purpose) ([]byte, *term.Error) {
	m, f := t.check(pd, qp, stag, to, n, use)
	switch {
	case m.granted():
		return m.b, nil
	case use == useReadSource, use == useAtomic:
		return nil, remoteFaults[f]
	}
	return nil, taggedFaults[f]
}

func (r *Region) Valid() bool { return r.state.Load()&stateValid != 0 }
