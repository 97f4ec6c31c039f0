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

// PD is a protection domain. A QP can only access memory of its own domain.
type PD struct {
	d *Device
	h uint32

	mu  sync.RWMutex
	mrs []*MR
}

// find returns the region that contains b and the offset of b in it, or nil.
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

// MR is a memory region. The daemon reads and writes it for the QPs of its PD, and for their
// peers within its access rights.
type MR struct {
	pd         *PD
	h          uint32
	lkey, rkey uint32
	base       uint64
	mem        []byte
	own        *shm.Region // nil if the caller owns the memory
	once       sync.Once
}

// Alloc allocates size bytes of zeroed memory in a memfd that it shares with the daemon, and
// registers them. The base of the region is the address of the memory in this process.
func (p *PD) Alloc(ctx context.Context, size int, a Access) (*MR, error) {
	m, err := newMemory(size)
	if err != nil {
		return nil, err
	}
	return p.own(ctx, m, &ctrlpb.RegisterMR{Base: addrOf(m.Bytes()), Access: uint32(a)})
}

// AllocBase is Alloc with a base address that the caller chooses: work requests and peers use
// base for the first byte.
func (p *PD) AllocBase(ctx context.Context, size int, base uint64, a Access) (*MR, error) {
	m, err := newMemory(size)
	if err != nil {
		return nil, err
	}
	return p.own(ctx, m, &ctrlpb.RegisterMR{Base: base, Access: uint32(a)})
}

// AllocFast is Alloc for a region that is invalid until a work request made by MR.Reg registers
// it, or part of it, with the rights a. OpLocalInv, or the peer's Send with Invalidate, makes it
// invalid again.
func (p *PD) AllocFast(ctx context.Context, size int, a Access) (*MR, error) {
	m, err := newMemory(size)
	if err != nil {
		return nil, err
	}
	return p.own(ctx, m, &ctrlpb.RegisterMR{Access: uint32(a), Fast: true})
}

// Register registers memory of the caller: mem is the mapping of the bytes from offset on of
// the memfd fd. Register seals the memfd against shrinking and allocates its pages. The caller
// keeps ownership of fd and mem.
func (p *PD) Register(ctx context.Context, fd int, mem []byte, offset int64, a Access) (*MR, error) {
	if len(mem) == 0 || offset < 0 || fd < 0 {
		return nil, &Error{"register memory", ctrlpb.Code_CODE_INVALID, "no memory"}
	}
	// The pages are charged to this process, so allocate them here. If that fails, the daemon
	// refuses the region with a better error.
	_ = shm.Populate(mem)
	_, _ = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
	return p.register(ctx, fd, mem, &ctrlpb.RegisterMR{Base: addrOf(mem), Offset: uint64(offset), Access: uint32(a)})
}

// Reg returns the work request that registers n bytes of a region of AllocFast, from off on,
// with the rights a. base becomes the address of the first byte, and key the low byte of the
// region's key, which is the RKey of the work request. Reg panics if the bytes are not within
// the region.
func (m *MR) Reg(id uint64, key uint8, base uint64, off, n int, a Access) SendWR {
	_ = m.mem[off : off+n]
	return SendWR{
		ID: id, Op: OpReg, RKey: m.rkey&^0xff | uint32(key), Remote: base, Access: a,
		SGEs: []SGE{{Addr: uint64(off), Len: uint32(n)}},
	}
}

func newMemory(size int) (*shm.Region, error) {
	m, err := shm.CreateRegion(size)
	if err != nil {
		return nil, fmt.Errorf("iwarp: allocate memory: %w", err)
	}
	return m, nil
}

// own registers m, which the MR then owns.
func (p *PD) own(ctx context.Context, m *shm.Region, r *ctrlpb.RegisterMR) (*MR, error) {
	mr, err := p.register(ctx, m.FD(), m.Bytes(), r)
	if err != nil {
		m.Close()
		return nil, err
	}
	closeFD(m.TakeFD()) // both sides have mapped the memory
	mr.own = m
	return mr, nil
}

// register sends r, whose PD and length it sets.
func (p *PD) register(ctx context.Context, fd int, mem []byte, r *ctrlpb.RegisterMR) (*MR, error) {
	r.Pd, r.Length = p.h, uint64(len(mem))
	if Access(r.Access)&AccessZeroBased != 0 {
		r.Base = 0
	}
	ans, err := p.d.call(ctx, "register memory", &ctrlpb.Request{Body: &ctrlpb.Request_RegisterMr{RegisterMr: r}}, fd)
	if err != nil {
		return nil, err
	}
	seqpacket.CloseAll(ans.fds)
	reply := ans.reply.GetMr()
	m := &MR{pd: p, h: reply.GetMr(), lkey: reply.GetLkey(), rkey: reply.GetRkey(), base: r.Base, mem: mem}
	if !r.Fast { // find returns only valid regions
		p.mu.Lock()
		p.mrs = append(p.mrs, m)
		p.mu.Unlock()
	}
	return m, nil
}

func addrOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// Bytes returns the memory. If Alloc allocated it, it must not be used after Close.
func (m *MR) Bytes() []byte { return m.mem }

// Base returns the address of the first byte, as used by work requests and peers.
func (m *MR) Base() uint64 { return m.base }

// LKey returns the key of the region for SGEs.
func (m *MR) LKey() uint32 { return m.lkey }

// RKey returns the key (STag) of the region for the peer.
func (m *MR) RKey() uint32 { return m.rkey }

// SGE returns an SGE for n bytes from off on. It panics if they are not within the region.
func (m *MR) SGE(off, n int) SGE {
	_ = m.mem[off : off+n]
	return SGE{Addr: m.base + uint64(off), Len: uint32(n), LKey: m.lkey}
}

// Remote returns the whole region in the form that the peer needs.
func (m *MR) Remote() Remote { return Remote{m.base, m.rkey, uint32(len(m.mem))} }

// RemoteAt returns n bytes from off on in the form that the peer needs. It panics if they are
// not within the region.
func (m *MR) RemoteAt(off, n int) Remote {
	_ = m.mem[off : off+n]
	return Remote{m.base + uint64(off), m.rkey, uint32(n)}
}

// Close deregisters the region. If Alloc allocated the memory, Close unmaps it. The daemon does
// not access the memory after Close has returned.
func (m *MR) Close() error {
	err := m.pd.d.do(context.Background(), "deregister memory", &ctrlpb.Request{Body: &ctrlpb.Request_DeregisterMr{DeregisterMr: &ctrlpb.DeregisterMR{Mr: m.h}}})
	if err != nil && m.pd.d.Err() == nil {
		return err
	}
	m.pd.mu.Lock()
	m.pd.mrs = slices.DeleteFunc(m.pd.mrs, func(o *MR) bool { return o == m })
	m.pd.mu.Unlock()
	m.once.Do(func() {
		if m.own != nil {
			m.own.Close()
		}
	})
	return err
}

// contains reports whether b lies within the region, and at which offset.
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

// MW is a memory window of type 2. A work request with OpBindMW binds it to part of a region.
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

// RKey returns the window's key. Its upper 24 bits identify the window; the caller may choose
// the low byte with each binding.
func (w *MW) RKey() uint32 { return w.rkey }

// Close destroys the window.
func (w *MW) Close() error {
	return w.pd.d.do(context.Background(), "close memory window", &ctrlpb.Request{Body: &ctrlpb.Request_DeallocMw{DeallocMw: &ctrlpb.DeallocMW{Mw: w.h}}})
}

// closeFD closes fd and ignores errors.
func closeFD(fd int) { _ = unix.Close(fd) }
