package iwarp

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/shm"
)

// PD is a protection domain. A QP can access memory of its own domain only.
type PD struct {
	d *Device
	h uint32

	mu  sync.RWMutex
	mrs []*MR
}

// find returns the region that b lies in, and where; nil: none.
func (p *PD) find(b []byte) (*MR, int) {
	if len(b) == 0 {
		return nil, 0
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	for _, m := range p.mrs {
		if off, ok := m.contains(b); ok {
			return m, off
		}
	}
	return nil, 0
}

func (p *PD) regions() []*MR {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return slices.Clone(p.mrs)
}

// AllocPD creates a protection domain.
func (d *Device) AllocPD(ctx context.Context) (*PD, error) {
	a, err := d.call(ctx, "allocate PD", &ctrlpb.Request{Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}}, -1)
	if err != nil {
		return nil, err
	}
	seqpacket.CloseAll(a.fds)
	return &PD{d: d, h: a.reply.GetPd().GetPd()}, nil
}

// Close destroys the domain. It fails with ErrBusy while regions or queue pairs use it.
func (p *PD) Close() error {
	return p.d.do(context.Background(), "close PD", &ctrlpb.Request{Body: &ctrlpb.Request_DeallocPd{DeallocPd: &ctrlpb.DeallocPD{Pd: p.h}}})
}

// MR is a memory region: bytes that the daemon reads and writes for the QPs of
// its PD, and for the peers of these within its access rights.
type MR struct {
	pd         *PD
	h          uint32
	lkey, rkey uint32
	base       uint64
	mem        []byte
	own        *shm.Region // nil: the memory is the caller's
	once       sync.Once
}

// Alloc makes a region of size bytes of new memory, zeroed, in a memfd that is
// shared with the daemon. Its base is the address of the memory here.
func (p *PD) Alloc(ctx context.Context, size int, a Access) (*MR, error) {
	return p.alloc(ctx, size, 0, true, a)
}

// AllocBase is Alloc with a base address of the caller's choice: the first
// byte is at base for work requests and peers.
func (p *PD) AllocBase(ctx context.Context, size int, base uint64, a Access) (*MR, error) {
	return p.alloc(ctx, size, base, false, a)
}

func (p *PD) alloc(ctx context.Context, size int, base uint64, natural bool, a Access) (*MR, error) {
	m, err := shm.CreateRegion("iwarp-mr", size)
	if err != nil {
		return nil, fmt.Errorf("iwarp: allocate memory: %w", err)
	}
	if natural {
		base = addrOf(m.Bytes())
	}
	mr, err := p.register(ctx, m.FD(), m.Bytes(), 0, base, a)
	if err != nil {
		m.Close()
		return nil, err
	}
	closeFD(m.TakeFD()) // the memory is mapped at both ends
	mr.own = m
	return mr, nil
}

// Register makes a region of memory that the caller has: mem is where the
// bytes from offset on of the memfd fd are mapped. The memfd is sealed against
// shrinking, and its pages are allocated; fd and mem stay the caller's.
func (p *PD) Register(ctx context.Context, fd int, mem []byte, offset int64, a Access) (*MR, error) {
	return p.register(ctx, fd, mem, offset, addrOf(mem), a)
}

// RegisterBase is Register with a base address of the caller's choice.
func (p *PD) RegisterBase(ctx context.Context, fd int, mem []byte, offset int64, base uint64, a Access) (*MR, error) {
	return p.register(ctx, fd, mem, offset, base, a)
}

// AllocFast is Alloc of a region that is not valid until a work request of MR.Reg
// registers it, or part of it, within the rights a. LocalInv, or the peer's Send
// with Invalidate, makes it invalid again.
func (p *PD) AllocFast(ctx context.Context, size int, a Access) (*MR, error) {
	m, err := shm.CreateRegion("iwarp-mr", size)
	if err != nil {
		return nil, fmt.Errorf("iwarp: allocate memory: %w", err)
	}
	mr, err := p.request(ctx, m.FD(), m.Bytes(), 0, 0, a, true)
	if err != nil {
		m.Close()
		return nil, err
	}
	closeFD(m.TakeFD())
	mr.own = m
	return mr, nil
}

// RegisterFast is AllocFast for memory that the caller has, as in Register.
func (p *PD) RegisterFast(ctx context.Context, fd int, mem []byte, offset int64, a Access) (*MR, error) {
	return p.request(ctx, fd, mem, offset, 0, a, true)
}

// Reg is the work request that registers n bytes of a region of AllocFast, from
// off on, for the rights a, with base the address of the first. key is the low
// byte of the key that is valid then: the RKey of the work request. It panics if
// the bytes are not within the region.
func (m *MR) Reg(id uint64, key uint8, base uint64, off, n int, a Access) SendWR {
	_ = m.mem[off : off+n]
	return SendWR{
		ID: id, Op: OpReg, RKey: m.rkey&^0xff | uint32(key), Remote: base, Access: a,
		SGEs: []SGE{{Addr: uint64(off), Len: uint32(n)}},
	}
}

func (p *PD) register(ctx context.Context, fd int, mem []byte, offset int64, base uint64, a Access) (*MR, error) {
	return p.request(ctx, fd, mem, offset, base, a, false)
}

func (p *PD) request(ctx context.Context, fd int, mem []byte, offset int64, base uint64, a Access, fast bool) (*MR, error) {
	if len(mem) == 0 || offset < 0 || fd < 0 {
		return nil, &Error{"register memory", ctrlpb.Code_CODE_INVALID, "no memory"}
	}
	if a&AccessZeroBased != 0 {
		base = 0
	}
	// The pages are charged to us, so we allocate them, and see that they stay. What
	// cannot be, the daemon refuses, with a better error.
	_ = shm.Populate(mem)
	_, _ = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
	ans, err := p.d.call(ctx, "register memory", &ctrlpb.Request{Body: &ctrlpb.Request_RegisterMr{RegisterMr: &ctrlpb.RegisterMR{
		Pd: p.h, Offset: uint64(offset), Length: uint64(len(mem)), Base: base, Access: uint32(a), Fast: fast,
	}}}, fd)
	if err != nil {
		return nil, err
	}
	seqpacket.CloseAll(ans.fds)
	r := ans.reply.GetMr()
	m := &MR{pd: p, h: r.GetMr(), lkey: r.GetLkey(), rkey: r.GetRkey(), base: base, mem: mem}
	if !fast { // find gives regions that are valid
		p.mu.Lock()
		p.mrs = append(p.mrs, m)
		p.mu.Unlock()
	}
	return m, nil
}

func addrOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// Bytes returns the memory. After Close it must not be used any more where
// Alloc made it.
func (m *MR) Bytes() []byte { return m.mem }

// Base returns the address of the first byte, as used by work requests and peers.
func (m *MR) Base() uint64 { return m.base }

// LKey returns the key of the region for SGEs.
func (m *MR) LKey() uint32 { return m.lkey }

// RKey returns the key (STag) of the region for the peer.
func (m *MR) RKey() uint32 { return m.rkey }

// SGE names n bytes from off on for a work request. It panics if they are not
// within the region.
func (m *MR) SGE(off, n int) SGE {
	_ = m.mem[off : off+n]
	return SGE{Addr: m.base + uint64(off), Len: uint32(n), LKey: m.lkey}
}

// Remote names the whole region for the peer.
func (m *MR) Remote() Remote { return Remote{m.base, m.rkey, uint32(len(m.mem))} }

// RemoteAt names n bytes from off on for the peer. It panics if they are not
// within the region.
func (m *MR) RemoteAt(off, n int) Remote {
	_ = m.mem[off : off+n]
	return Remote{m.base + uint64(off), m.rkey, uint32(n)}
}

// Close deregisters the region and, where Alloc made it, unmaps the memory.
// When it returns the daemon does not touch the memory any more.
func (m *MR) Close() error {
	err := m.pd.d.do(context.Background(), "deregister memory", &ctrlpb.Request{Body: &ctrlpb.Request_DeregisterMr{DeregisterMr: &ctrlpb.DeregisterMR{Mr: m.h}}})
	if err != nil && m.pd.d.Err() == nil {
		return err
	}
	m.pd.mu.Lock()
	m.pd.mrs = slices.DeleteFunc(m.pd.mrs, func(o *MR) bool { return o == m })
	m.pd.mu.Unlock()
	m.unmap()
	return err
}

func (m *MR) unmap() {
	m.once.Do(func() {
		if m.own != nil {
			m.own.Close()
		}
	})
}

// contains reports whether b lies within the region, and where.
func (m *MR) contains(b []byte) (off int, ok bool) {
	if len(b) == 0 || len(m.mem) == 0 {
		return 0, false
	}
	at, start := addrOf(b), addrOf(m.mem)
	if at < start || at-start > uint64(len(m.mem)) || uint64(len(b)) > uint64(len(m.mem))-(at-start) {
		return 0, false
	}
	return int(at - start), true
}

// MW is a memory window of type 2: a work request with OpBindMW binds it to
// part of a region.
type MW struct {
	pd   *PD
	h    uint32
	rkey uint32
}

// AllocMW creates a memory window.
func (p *PD) AllocMW(ctx context.Context) (*MW, error) {
	a, err := p.d.call(ctx, "allocate memory window", &ctrlpb.Request{Body: &ctrlpb.Request_AllocMw{AllocMw: &ctrlpb.AllocMW{Pd: p.h}}}, -1)
	if err != nil {
		return nil, err
	}
	seqpacket.CloseAll(a.fds)
	return &MW{p, a.reply.GetMw().GetMw(), a.reply.GetMw().GetRkey()}, nil
}

// RKey returns the window's key: its upper 24 bits are the window, the low
// byte is the caller's to choose with each binding.
func (w *MW) RKey() uint32 { return w.rkey }

// Close destroys the window.
func (w *MW) Close() error {
	return w.pd.d.do(context.Background(), "close memory window", &ctrlpb.Request{Body: &ctrlpb.Request_DeallocMw{DeallocMw: &ctrlpb.DeallocMW{Mw: w.h}}})
}

// closeFD is unix.Close without its error.
func closeFD(fd int) { _ = unix.Close(fd) }
