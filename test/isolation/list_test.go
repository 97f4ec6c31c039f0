package isolation

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// attacks lists the attempts to access another client's objects or to bring the daemon down.
func attacks(j *job) []attack {
	v := &j.Victim
	le := binary.LittleEndian
	req := func(b any) *ctrlpb.Request {
		r := new(ctrlpb.Request)
		m := r.ProtoReflect()
		for i := range m.Descriptor().Fields().Len() {
			f := m.Descriptor().Fields().Get(i)
			if msg := b.(proto.Message).ProtoReflect(); f.Message() != nil && f.Message().FullName() == msg.Descriptor().FullName() {
				m.Set(f, m.NewField(f))
				proto.Merge(m.Mutable(f).Message().Interface(), b.(proto.Message))
			}
		}
		return r
	}
	hello := func(version, least uint32) func(*foe) error {
		return func(f *foe) error {
			r, err := dial(f.Socket)
			if err != nil {
				return err
			}
			defer r.close()
			rep, _, err := r.do(req(&ctrlpb.Hello{Version: version, MinVersion: least}))
			if err != nil || rep.Error.GetCode() != ctrlpb.Code_CODE_VERSION {
				return fmt.Errorf("%v, %v", rep, err)
			}
			return nil
		}
	}
	sge := func(e []byte, addr uint64, n, lkey uint32) {
		le.PutUint16(e[shm.SQENumSGE:], 1)
		le.PutUint64(e[shm.SQEFixed+shm.SGEAddr:], addr)
		le.PutUint32(e[shm.SQEFixed+shm.SGELen:], n)
		le.PutUint32(e[shm.SQEFixed+shm.SGELKey:], lkey)
	}
	quarter := &ctrlpb.RegisterMR{Length: 4096, Access: uint32(verbs.LocalWrite | verbs.RemoteWrite)}
	request, _ := proto.Marshal(&ctrlpb.Request{Id: 1, Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}})
	pipe := func() (int, error) {
		var p [2]int
		err := unix.Pipe2(p[:], unix.O_CLOEXEC)
		unix.Close(p[1])
		return p[0], err
	}
	return []attack{
		// Requests with the victim's handles.
		{"close its protection domain", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.DeallocPD{Pd: h}) }, noObject)},
		{"deregister its memory", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.DeregisterMR{Mr: h}) }, noObject)},
		{"destroy its completion queue", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.DestroyCQ{Cq: h}) }, noObject)},
		{"resize its completion queue", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.ResizeCQ{Cq: h, Depth: 1}) }, noObject)},
		{"moderate its completion queue", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.ModifyCQ{Cq: h, Count: 9, PeriodUs: 1e6}) }, noObject)},
		{"destroy its shared receive queue", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.DestroySRQ{Srq: h}) }, noObject)},
		{"arm its shared receive queue", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.ModifySRQ{Srq: h, Limit: 1}) }, noObject)},
		{"free its memory window", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.DeallocMW{Mw: h}) }, noObject)},
		{"make a window in its domain", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.AllocMW{Pd: h}) }, noObject)},
		{"make a shared receive queue in its domain", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.CreateSRQ{Pd: h, Depth: 4, MaxSge: 1}) }, noObject)},
		{"make a queue pair in its domain", everyHandle(func(h uint32) *ctrlpb.Request {
			return req(&ctrlpb.CreateQP{Pd: h, SendCq: h, RecvCq: h, SqDepth: 1, RqDepth: 1, MaxSge: 1})
		}, noObject)},
		{"complete on its queue", func(f *foe) error {
			o, err := f.objects(false)
			if err != nil {
				return err
			}
			return refused(req(&ctrlpb.CreateQP{Pd: o.pd, SendCq: o.cq, RecvCq: o.cq + 100, SqDepth: 1, RqDepth: 1, MaxSge: 1}), noObject)(f)
		}},
		{"take its receives", func(f *foe) error {
			o, err := f.objects(false)
			if err != nil {
				return err
			}
			return refused(req(&ctrlpb.CreateQP{Pd: o.pd, SendCq: o.cq, RecvCq: o.cq, SqDepth: 1, RqDepth: 1, MaxSge: 1, Srq: 7}), noObject)(f)
		}},
		{"destroy its queue pair", refused(req(&ctrlpb.DestroyQP{Qp: v.QP}), noObject)},
		{"change the access by its queue pair", refused(req(&ctrlpb.ModifyQP{Qp: v.QP}), noObject)},
		{"disconnect its queue pair", refused(req(&ctrlpb.Disconnect{Qp: v.QP, Abort: true}), noObject)},
		{"disconnect as an administrator", refused(req(&ctrlpb.AdminDisconnect{Qp: v.QP, Abort: true}), noObject)},
		{"change the DSCP of its connection", refused(req(&ctrlpb.SetDSCP{Qp: v.QP}), noObject)},
		{"connect its queue pair", refused(req(&ctrlpb.Connect{Qp: v.QP, Remote: j.Peer}), noObject)},
		{"close its listener", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.Unlisten{Listen: h}) }, noObject)},
		{"accept its peer", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.Accept{Conn: h, Qp: v.QP}) }, noObject)},
		{"reject its peer", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.Reject{Conn: h}) }, noObject)},
		{"talk to its peer", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.StreamSend{Conn: h, Data: []byte("x")}) }, noObject)},
		{"consume its bytes", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.StreamConsumed{Conn: h, Count: 1}) }, noObject)},
		{"start MPA for it", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.StartMPA{Conn: h}) }, noObject)},
		{"close its stream", everyHandle(func(h uint32) *ctrlpb.Request { return req(&ctrlpb.StreamClose{Conn: h}) }, noObject)},
		{"listen on its port", refused(req(&ctrlpb.Listen{Port: uint32(v.Port)}), ctrlpb.Code_CODE_PORT_IN_USE)},
		{"capture its frames", refused(req(&ctrlpb.Capture{Qp: v.QP}), captures(noObject))},
		{"capture all frames", refused(req(&ctrlpb.Capture{}), captures(noPerm))},
		{"capture its port", refused(req(&ctrlpb.Capture{Port: uint32(v.Port)}), captures(noPerm))},
		// Lists, which must show only the attacker's own objects.
		{"show its queue pair", refused(req(&ctrlpb.ListQPs{Qp: v.QP}), noObject)},
		{"list queue pairs", empty(req(&ctrlpb.ListQPs{}), func(r *ctrlpb.Reply) int { return len(r.GetQps().Qps) })},
		{"list memory", empty(req(&ctrlpb.ListMRs{}), func(r *ctrlpb.Reply) int { return len(r.GetMrs().Mrs) })},
		{"list completion queues", empty(req(&ctrlpb.ListCQs{}), func(r *ctrlpb.Reply) int { return len(r.GetCqs().Cqs) })},
		{"list shared receive queues", empty(req(&ctrlpb.ListSRQs{}), func(r *ctrlpb.Reply) int { return len(r.GetSrqs().Srqs) })},
		{"list listeners", empty(req(&ctrlpb.ListListens{}), func(r *ctrlpb.Reply) int { return len(r.GetListens().Listens) })},
		{"list clients", func(f *foe) error {
			rep, _, err := f.r.must(req(&ctrlpb.ListClients{}))
			for _, c := range rep.GetClients().GetClients() {
				if c.Client == v.Client {
					return errCarriedOut
				}
			}
			return err
		}},
		{"count its objects", empty(req(&ctrlpb.QueryStatus{}), func(r *ctrlpb.Reply) int { return int(r.GetStatus().Qps + r.GetStatus().Mrs + r.GetStatus().Conns) })},
		// Its memory.
		{"write its memory over the wire", struck(false, func(*foe, int) (uint32, uint64) { return v.RKey, v.Addr })},
		{"read its memory over the wire", struck(true, func(*foe, int) (uint32, uint64) { return v.RKey, v.Addr })},
		{"guess STags over the wire", struck(false, func(f *foe, i int) (uint32, uint64) { return v.RKey&^0xff | f.rng.Uint32N(256), v.Addr })},
		{"guess any STag over the wire", struck(true, func(f *foe, i int) (uint32, uint64) { return f.rng.Uint32(), f.rng.Uint64() })},
		{"send its memory to a peer", wqe(func(f *foe, e []byte) { e[shm.SQEOpcode] = shm.WRSend; sge(e, v.Addr, 64, v.RKey) })},
		{"read a peer into its memory", wqe(func(f *foe, e []byte) { e[shm.SQEOpcode] = shm.WRRead; sge(e, v.Addr, 64, v.RKey) })},
		{"invalidate its memory", wqe(func(f *foe, e []byte) { e[shm.SQEOpcode] = shm.WRLocalInv; le.PutUint32(e[shm.SQEInv:], v.RKey) })},
		{"register its memory anew", wqe(func(f *foe, e []byte) {
			e[shm.SQEOpcode] = shm.WRReg
			le.PutUint32(e[shm.SQERKey:], v.RKey)
			sge(e, 0, 64, 0)
		})},
		{"bind a window to its memory", wqe(func(f *foe, e []byte) {
			e[shm.SQEOpcode] = shm.WRBindMW
			le.PutUint32(e[shm.SQERKey:], v.RKey)
			sge(e, v.Addr, 64, v.RKey)
		})},
		// The protocol.
		{"no Hello", func(f *foe) error {
			r, err := dial(f.Socket)
			if err != nil {
				return err
			}
			defer r.close()
			rep, _, err := r.do(req(&ctrlpb.AllocPD{}))
			if err != nil || rep.Error.GetCode() != ctrlpb.Code_CODE_VERSION {
				return fmt.Errorf("%v, %v", rep, err)
			}
			return nil
		}},
		{"a version to come", hello(99, 99)},
		{"version 0", hello(0, 0)},
		{"two Hellos", refused(req(&ctrlpb.Hello{Version: 1, MinVersion: 1}), ctrlpb.Code_CODE_STATE)},
		{"a packet of garbage", cutOff([]byte("\xff\xff\xff\xff\xff no protobuf"))},
		{"half a request", cutOff(append(request[:len(request)-1:len(request)-1], 0x7f))},
		{"a request without an id", cutOff([]byte{0x22, 0})},
		{"a packet too long", cutOff(make([]byte, seqTooLong))},
		{"two descriptors", cutOff(request, 0, 1)},
		{"250 descriptors", cutOff(request, make([]int, 250)...)},
		{"a request of a kind to come", refused(&ctrlpb.Request{}, invalid)},
		{"requests without reading", func(f *foe) error {
			b, _ := proto.Marshal(&ctrlpb.Request{Id: 1, Body: req(&ctrlpb.QueryStatus{}).Body})
			_ = unix.SetNonblock(f.r.fd, true)
			return within("cut off", func() (bool, error) {
				for range 1000 {
					switch err := unix.Send(f.r.fd, b, unix.MSG_NOSIGNAL); {
					case errors.Is(err, unix.EAGAIN):
						return false, nil
					case err != nil:
						return true, nil
					}
				}
				return false, nil
			})
		}},
		{"a long name", func(f *foe) error {
			r, err := dial(f.Socket)
			if err != nil {
				return err
			}
			defer r.close()
			_, _, err = r.must(req(&ctrlpb.Hello{Version: 1, MinVersion: 1, Name: string(make([]byte, 60000))}))
			return err
		}},
		{"a port that is none", refused(req(&ctrlpb.Listen{Port: 70000}), invalid)},
		{"an address that is none", refused(req(&ctrlpb.Listen{Address: "the victim's"}), invalid)},
		{"an address of somebody else", refused(req(&ctrlpb.Listen{Address: "192.0.2.1", Port: 9009}), ctrlpb.Code_CODE_ADDRESS)},
		// Memory that cannot be registered.
		{"a memfd that cannot be sealed", region(func() (int, error) {
			fd, err := unix.MemfdCreate("attack", unix.MFD_CLOEXEC)
			return fd, errors.Join(err, unix.Ftruncate(fd, 4096))
		}, quarter, invalid)},
		{"a file", region(opened("/proc/self/exe", unix.O_RDONLY), quarter, invalid)},
		{"a device", region(opened("/dev/zero", unix.O_RDWR), quarter, invalid)},
		{"a folder", region(opened("/", unix.O_RDONLY), quarter, invalid)},
		{"a path", region(opened("/dev/null", unix.O_PATH), quarter, invalid)},
		{"a pipe", region(pipe, quarter, invalid)},
		{"a socket", region(func() (int, error) { return unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0) }, quarter, invalid)},
		{"an eventfd", region(func() (int, error) { return unix.Eventfd(0, 0) }, quarter, invalid)},
		{"more than the memfd has", region(memfd(4096, 0), &ctrlpb.RegisterMR{Length: 8192, Access: 1}, invalid)},
		{"an offset that wraps", region(memfd(4096, 0), &ctrlpb.RegisterMR{Offset: 1<<64 - 4096, Length: 8192, Access: 1}, invalid)},
		{"no bytes", region(memfd(4096, 0), &ctrlpb.RegisterMR{Access: 1}, invalid)},
		{"a base that wraps", region(memfd(4096, 0), &ctrlpb.RegisterMR{Length: 4096, Base: 1<<64 - 100, Access: 1}, invalid)},
		{"a write-sealed memfd to write to", region(memfd(4096, unix.F_SEAL_WRITE), quarter, invalid)},
		{"memory that is not allocated", region(func() (int, error) {
			fd, err := unix.MemfdCreate("attack", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
			return fd, errors.Join(err, unix.Ftruncate(fd, 4096))
		}, quarter, invalid)},
		{"access bits that are none", region(memfd(4096, 0), &ctrlpb.RegisterMR{Length: 4096, Access: 1 << 31}, invalid)},
		{"more memory than allowed", region(memfd(4096, 0), &ctrlpb.RegisterMR{Length: 3 << 30, Access: 1}, noQuota)},
		{"memory that is truncated", func(f *foe) error {
			o, m, err := f.mapping(sq)
			if err != nil {
				return err
			}
			defer unix.Munmap(m)
			fd, err := memfd(1<<20, 0)()
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			rep, _, err := f.r.must(req(&ctrlpb.RegisterMR{Pd: o.pd, Length: 1 << 20, Access: 1}), fd)
			if err != nil {
				return err
			}
			if err := unix.Ftruncate(fd, 0); err != nil {
				return err
			}
			e := m[shm.HeaderSize+shm.RingEntries:]
			e[shm.SQEOpcode] = shm.WRSend
			sge(e, 0, 4096, rep.GetMr().Lkey)
			word(m, shm.HeaderSize+shm.RingProducer).Store(1)
			if err := f.ring(&o); err != nil {
				return err
			}
			return f.ended()
		}},
		// The rings.
		{"a send index far ahead", scribble(sq, shm.HeaderSize+shm.RingProducer, 100_000)},
		{"a send index behind", scribble(sq, shm.HeaderSize+shm.RingProducer, ^uint32(0))},
		{"a completion index far ahead", func(f *foe) error {
			o, m, err := f.mapping(ring)
			if err != nil {
				return err
			}
			defer unix.Munmap(m)
			word(m, shm.HeaderSize+int(o.worker)*(len(m)-shm.HeaderSize)/int(f.r.hello.Workers)+shm.RingConsumer).Store(1 << 30)
			p, err := shm.MapSQ(o.sq)
			if err != nil {
				return err
			}
			defer p.Close()
			for range 40 { // the daemon checks the index when the ring seems full
				for range 8 {
					_ = p.Post(&verbs.SendWR{Op: 2 /* wrong */, Flags: verbs.Signaled})
				}
				_ = f.ring(&o)
				time.Sleep(time.Millisecond)
			}
			return nil // with errors the QP ends at once; the daemon must survive
		}},
		{"a receive index far ahead", func(f *foe) error {
			o, err := f.objects(false)
			if err != nil {
				return err
			}
			m, err := mapped(rq(&o))
			if err != nil {
				return err
			}
			word(m, shm.HeaderSize+shm.RingProducer).Store(1 << 20)
			// The peer's first message needs a receive.
			if _, _, err := f.r.must(req(&ctrlpb.Connect{Qp: o.qp, Remote: f.Peer})); err != nil {
				return err
			}
			return f.ended()
		}},
		{"a shared receive index that moves back", movesBack},
		{"an opcode that is none", wqe(func(f *foe, e []byte) { e[shm.SQEOpcode] = 0xee })},
		{"65535 pieces", wqe(func(f *foe, e []byte) { e[shm.SQEOpcode] = shm.WRSend; le.PutUint16(e[shm.SQENumSGE:], 65535) })},
		{"inline data of 4 GiB", wqe(func(f *foe, e []byte) {
			e[shm.SQEOpcode], e[shm.SQEFlags] = shm.WRSend, uint8(verbs.Inline)
			le.PutUint32(e[shm.SQEInlineLen:], ^uint32(0))
		})},
		{"a piece of 4 GiB", wqe(func(f *foe, e []byte) { e[shm.SQEOpcode] = shm.WRSend; sge(e, 0, ^uint32(0), 0x1234) })},
		{"flags that are none", wqe(func(f *foe, e []byte) { e[shm.SQEOpcode], e[shm.SQEFlags] = 0x77, 0xff })},
		{"a ring that is truncated", func(f *foe) error {
			o, err := f.objects(false)
			if err != nil {
				return err
			}
			for _, fd := range []int{o.sq, o.rq, o.ring, f.r.bells[0]} {
				if unix.Ftruncate(fd, 0) == nil || unix.Ftruncate(fd, 1<<30) == nil {
					return errors.New("a ring was resized")
				}
			}
			return nil
		}},
		{"rings full of noise", noise(sq, rq, ring)},
		{"a work request that changes while it is read", changing},
		{"every bell without end", func(f *foe) error {
			m, err := mapped(f.r.bells[0])
			if err != nil {
				return err
			}
			defer unix.Munmap(m)
			for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end); {
				for i := shm.HeaderSize; i < len(m); i += 4 {
					word(m, i).Store(^uint32(0))
				}
				shm.Wake(f.r.bells[1])
			}
			return nil
		}},
		{"a wake-up descriptor that is full", func(f *foe) error {
			b := make([]byte, 1<<16)
			for range 100 {
				_, _ = unix.Write(f.r.bells[1], b)
			}
			return nil
		}},
		{"a wake-up descriptor that blocks", func(f *foe) error {
			return unix.SetNonblock(f.r.bells[1], false)
		}},
		// Quantity.
		{"thousands of domains", untilQuota(func(*foe, *own) *ctrlpb.Request { return req(&ctrlpb.AllocPD{}) })},
		{"thousands of windows", untilQuota(func(f *foe, o *own) *ctrlpb.Request { return req(&ctrlpb.AllocMW{Pd: o.pd}) })},
		{"thousands of completion queues", untilQuota(func(*foe, *own) *ctrlpb.Request { return req(&ctrlpb.CreateCQ{Depth: 1}) })},
		{"deep completion queues", untilQuota(func(*foe, *own) *ctrlpb.Request { return req(&ctrlpb.CreateCQ{Depth: 16384}) })},
		{"thousands of queue pairs", untilQuota(func(f *foe, o *own) *ctrlpb.Request {
			return req(&ctrlpb.CreateQP{Pd: o.pd, SendCq: o.cq, RecvCq: o.cq, SqDepth: 1, RqDepth: 1, MaxSge: 1})
		})},
		{"thousands of listeners", untilQuota(func(*foe, *own) *ctrlpb.Request { return req(&ctrlpb.Listen{}) })},
		{"a queue of 4 billion", refused(req(&ctrlpb.CreateCQ{Depth: ^uint32(0)}), invalid)},
		{"4 billion pieces", func(f *foe) error {
			o, err := f.objects(false)
			if err != nil {
				return err
			}
			return refused(req(&ctrlpb.CreateQP{Pd: o.pd, SendCq: o.cq, RecvCq: o.cq, SqDepth: 1, RqDepth: 1, MaxSge: ^uint32(0)}), invalid)(f)
		}},
		{"hundreds of connections", func(f *foe) error {
			var all []*raw
			defer func() {
				for _, r := range all {
					r.close()
				}
			}()
			for range 300 {
				r, err := greet(f.Socket)
				if err != nil {
					return nil // the client quota
				}
				all = append(all, r)
			}
			return fmt.Errorf("%d clients", len(all))
		}},
	}
}

const seqTooLong = 65536 + 1

// noise writes random data over all of the attacker's rings while they are in use.
func noise(rings ...func(*own) int) func(*foe) error {
	return func(f *foe) error {
		o, err := f.objects(true)
		if err != nil {
			return err
		}
		for range 50 {
			for _, r := range rings {
				m, err := mapped(r(&o))
				if err != nil {
					return err
				}
				for range 200 {
					word(m, f.rng.IntN(len(m)/4)*4).Store(f.rng.Uint32())
				}
				for i := shm.HeaderSize + shm.RingEntries; i+4 <= len(m); i += 4 {
					word(m, i).Store(f.rng.Uint32())
				}
				word(m, shm.HeaderSize+shm.RingProducer).Store(f.rng.Uint32N(20))
				unix.Munmap(m)
			}
			_ = f.ring(&o)
		}
		return nil
	}
}

// changing posts work requests and modifies them while the daemon reads them.
func changing(f *foe) error {
	o, m, err := f.mapping(sq)
	if err != nil {
		return err
	}
	defer unix.Munmap(m)
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := uint32(1); !stop.Load(); n++ {
			for e := range 16 {
				at := shm.HeaderSize + shm.RingEntries + e*128
				word(m, at+shm.SQEOpcode&^3).Store(n%3*2 | n<<16) // opcode, flags and number of pieces
				word(m, at+shm.SQEInlineLen).Store(n * 0x01010101)
			}
		}
	}()
	for i := uint32(1); i < 2000; i++ {
		word(m, shm.HeaderSize+shm.RingProducer).Store(min(i, word(m, shm.HeaderSize+shm.RingConsumer).Load()+16))
		_ = f.ring(&o)
	}
	stop.Store(true)
	<-done
	return nil
}
