package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/internal/spin"
)

const (
	iwarpPort  = 7192
	regionSize = spreadDepth * mib // size of the region that is read and written; most workloads use only its start
	writeDepth = 256               // outstanding small Writes
	signalEach = 64
	// spreadDepth is the number of outstanding operations of the workloads that spread. Each
	// has its own part of the region, as calls of NFS do.
	spreadDepth = nfsDepth
)

func init() {
	roles["iwarp-server"] = iwarpServer
	roles["iwarp-client"] = iwarpClient
}

// runDaemon measures two daemons with an application each. All four processes run on the two
// pinned CPUs.
func runDaemon(m *matrix, mtu int, tests []test) ([]result, error) { return m.daemons(tests, false) }

// runDaemonSCTP is runDaemon over SCTP.
func runDaemonSCTP(m *matrix, mtu int, tests []test) ([]result, error) { return m.daemons(tests, true) }

// runDaemonSocket is runDaemon over the kernel's TCP sockets.
func runDaemonSocket(m *matrix, mtu int, tests []test) ([]result, error) {
	return m.daemons(tests, false, "--transport", "socket")
}

func (m *matrix) daemons(tests []test, sctp bool, flags ...string) ([]result, error) {
	return m.withDaemons(func(socketA, socketB string) ([]result, error) { return m.iwarp(tests, socketA, socketB, false, sctp) }, flags...)
}

// withDaemons starts a daemon on each side and calls run with their sockets. Without flags each
// daemon serves the interface of its side.
func (m *matrix) withDaemons(run func(socketA, socketB string) ([]result, error), flags ...string) (rs []result, err error) {
	if err := m.lab.setOffloads(true); err != nil {
		return nil, err
	}
	sockets := map[*side]string{}
	for _, s := range []*side{&m.lab.a, &m.lab.b} {
		d, socket, err := m.daemon(s, flags...)
		if err != nil {
			return nil, err
		}
		defer func() {
			if e := stop(d); e != nil && err == nil {
				err = fmt.Errorf("iwarpd: %w", e)
			}
		}()
		sockets[s] = socket
	}
	return run(sockets[&m.lab.a], sockets[&m.lab.b])
}

// runInProcess measures the engine inside the two applications. The client's polling drives its
// engine, and so does the server's if it answers messages. Otherwise the server sleeps, and its
// engine runs on its own thread.
func runInProcess(m *matrix, mtu int, tests []test) ([]result, error) {
	if err := m.lab.setOffloads(true); err != nil {
		return nil, err
	}
	rs := make([]result, len(tests))
	for _, inline := range []bool{false, true} {
		var some []test
		var at []int
		for i, t := range tests {
			if (t.Workload == "send-lat") == inline {
				some, at = append(some, t), append(at, i)
			}
		}
		if len(some) == 0 {
			continue
		}
		got, err := m.iwarp(some, "", "", inline, false)
		for i, k := range at {
			if err != nil {
				rs[k].Err = err.Error()
			} else {
				rs[k] = got[i]
			}
		}
	}
	return rs, nil
}

func (m *matrix) iwarp(tests []test, socketA, socketB string, inline, sctp bool) ([]result, error) {
	a, b := &m.lab.a, &m.lab.b
	return m.lab.pairOf(
		job{Role: "iwarp-server", If: b.ifn, Socket: socketB, Local: b.addr.Addr().String(), Inline: inline, SCTP: sctp},
		job{Role: "iwarp-client", If: a.ifn, Socket: socketA, Remote: b.addr.Addr().String(), Inline: true, SCTP: sctp, Tests: tests, Warm: m.opt.warm, Window: m.opt.window},
		m.limit(len(tests)), "GOMAXPROCS=3")
}

// daemon starts iwarpd on a side and waits until it serves.
func (m *matrix) daemon(s *side, flags ...string) (*exec.Cmd, string, error) {
	if len(flags) == 0 {
		flags = []string{"--interface", s.ifn}
	}
	socket := filepath.Join(m.dir, s.ifn+".sock")
	log, err := os.Create(filepath.Join(m.dir, s.ifn+".log"))
	if err != nil {
		return nil, "", err
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(m.opt.bin, "iwarpd"), append(flags, "--socket", socket, "--log-level", "warn")...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := s.start(cmd); err != nil {
		return nil, "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for {
		if dev, err := iwarp.Open(ctx, socket); err == nil {
			return cmd, socket, dev.Close()
		}
		if ctx.Err() != nil || cmd.Process.Signal(unix.Signal(0)) != nil {
			err := stop(cmd)
			b, _ := os.ReadFile(log.Name())
			return nil, "", fmt.Errorf("iwarpd does not start: %v: %s", err, lastLine(string(b)))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// open returns the device of the job: a daemon's, or one in this process.
func open(ctx context.Context, j job) (*iwarp.Device, func(), error) {
	if j.Socket != "" {
		d, err := iwarp.Open(ctx, j.Socket)
		return d, func() { d.Close() }, err
	}
	// A worker whose application sleeps spins on a CPU of its own, as the peers' programs do.
	// IWARPD_LINK is read here, since only the daemon reads it by itself.
	kind, err := ifqueue.ParseKind(cmp.Or(os.Getenv("IWARPD_LINK"), "auto"))
	if err != nil {
		return nil, nil, fmt.Errorf("IWARPD_LINK: %w", err)
	}
	n, err := embed.Open(embed.Config{Interface: j.If, LinkKind: kind, InlineProgress: j.Inline, Poll: dataplane.Busy})
	if err != nil {
		return nil, nil, err
	}
	return n.Device(), func() { n.Close() }, nil
}

// offer is the private data of the server's reply: the region that the client may access.
type offer struct {
	Addr uint64
	RKey uint32
}

func (o offer) encode() []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, o.Addr), o.RKey)
}

func decodeOffer(b []byte) (offer, error) {
	if len(b) < 12 {
		return offer{}, fmt.Errorf("the server's private data has %d bytes", len(b))
	}
	return offer{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}, nil
}

// An end is the queue pair of one side with its memory.
type end struct {
	pd *iwarp.PD
	cq *iwarp.CQ
	qp *iwarp.QP
	mr *iwarp.MR

	shared bool // the engine is in another process on this CPU, so yield it
	spins  int
	wcs    [128]iwarp.WC
	sge    [1]iwarp.SGE
	wr     iwarp.SendWR
	rr     iwarp.RecvWR
	spread bool // each outstanding operation uses its own part of the regions
	posts  int
}

func newEnd(ctx context.Context, d *iwarp.Device, shared bool) (e *end, err error) {
	e = &end{shared: shared}
	if e.pd, err = d.AllocPD(ctx); err != nil {
		return nil, err
	}
	if e.cq, err = d.CreateCQ(ctx, 2*writeDepth); err != nil {
		return nil, err
	}
	if e.mr, err = e.pd.Alloc(ctx, regionSize, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite); err != nil {
		return nil, err
	}
	e.qp, err = d.CreateQP(ctx, iwarp.QPConfig{PD: e.pd, SendCQ: e.cq, RecvCQ: e.cq, SendDepth: writeDepth, RecvDepth: 64, MaxSGE: 1, MaxInline: 64})
	return e, err
}

func (e *end) close() error {
	return errors.Join(e.qp.Close(), e.cq.Close(), e.mr.Close(), e.pd.Close())
}

// poll spins until there are completions, and returns them. It fails if one of them has failed.
func (e *end) poll() ([]iwarp.WC, error) {
	for {
		if n := e.cq.Poll(e.wcs[:]); n > 0 {
			return e.good(n)
		}
		if e.shared {
			spin.Yield()
		}
		if e.spins++; e.spins%4096 == 0 {
			select {
			case <-e.qp.Done():
				return nil, e.over()
			default:
			}
		}
	}
}

// wait is poll that yields the CPU to an engine that shares it.
func (e *end) wait() ([]iwarp.WC, error) {
	if !e.shared {
		return e.poll()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	n, err := e.cq.Wait(ctx, e.wcs[:])
	if err != nil {
		return nil, err
	}
	return e.good(n)
}

func (e *end) good(n int) ([]iwarp.WC, error) {
	for i := range e.wcs[:n] {
		if wc := &e.wcs[i]; wc.Status != iwarp.WCSuccess {
			return nil, e.failed(wc)
		}
	}
	return e.wcs[:n], nil
}

// failed returns the error of a failed completion. A flushed one gets the reason why the
// connection ended.
func (e *end) failed(wc *iwarp.WC) error {
	if wc.Status == iwarp.WCFlushErr {
		select {
		case <-e.qp.Done():
			return e.over()
		case <-time.After(5 * time.Second):
		}
	}
	return fmt.Errorf("%v: %v", wc.Op, wc.Status)
}

func (e *end) over() error {
	if err := e.qp.Err(); err != nil {
		return err
	}
	return iwarp.ErrPeerClosed
}

// post posts op on n bytes of both regions: the first n, or the next n if the operations
// spread.
func (e *end) post(op iwarp.Op, n int, to offer, flags iwarp.SendFlags) error {
	at := 0
	if e.spread {
		at = e.posts % spreadDepth * n
	}
	e.wr = iwarp.SendWR{Op: op, Flags: flags, RKey: to.RKey, Remote: to.Addr + uint64(at)}
	if flags&iwarp.Inline != 0 {
		e.wr.Inline = e.mr.Bytes()[:n]
	} else {
		e.sge[0] = e.mr.SGE(at, n)
		e.wr.SGEs = e.sge[:]
	}
	err := e.qp.PostSend(&e.wr)
	if err == nil {
		e.posts++
	}
	return err
}

// recvOffset is the offset of received messages, so that they do not overlap those that are
// sent.
const recvOffset = 4096

func (e *end) postRecv(n int) error {
	e.sge[0] = e.mr.SGE(recvOffset, n)
	e.rr = iwarp.RecvWR{SGEs: e.sge[:]}
	return e.qp.PostRecv(&e.rr)
}

// iwarpServer accepts connections one after another. The first byte of the request's private
// data selects whether the server answers messages ('s'), answers Writes ('w') or sleeps.
func iwarpServer(j job, ready func()) ([]result, error) {
	ctx, cancel := whileStdinOpen()
	defer cancel()
	d, closer, err := open(ctx, j)
	if err != nil {
		return nil, err
	}
	defer closer()
	ln, err := d.Listen(ctx, net.JoinHostPort(j.Local, strconv.Itoa(iwarpPort)), &iwarp.Config{Startup: j.startup()})
	if err != nil {
		return nil, err
	}
	ready()
	var rs []result
	for {
		req, err := ln.Request(ctx)
		if ctx.Err() != nil {
			return rs, nil
		}
		if err != nil {
			return nil, err
		}
		before := counters(ctx, d)
		if err := serveOne(ctx, d, req, j.Socket != ""); err != nil && ctx.Err() == nil {
			return nil, err
		}
		rs = append(rs, result{Server: changes(before, counters(ctx, d))})
	}
}

func serveOne(ctx context.Context, d *iwarp.Device, req *iwarp.ConnRequest, shared bool) error {
	e, err := newEnd(ctx, d, shared)
	if err != nil {
		return errors.Join(err, req.Reject(ctx, nil))
	}
	echo := len(req.PrivateData()) >= 5 && req.PrivateData()[0] == 's'
	size := 0
	if echo {
		size = int(binary.BigEndian.Uint32(req.PrivateData()[1:]))
		for range 16 {
			if err := e.postRecv(size); err != nil {
				return err
			}
		}
	}
	if _, err := req.Accept(ctx, e.qp, &iwarp.Config{PrivateData: offer{e.mr.Base(), e.mr.RKey()}.encode()}); err != nil {
		return err
	}
	if echo {
		err = e.echo(size)
	} else if p := req.PrivateData(); len(p) > 5 && p[0] == 'w' {
		err = e.writeBack(int(binary.BigEndian.Uint32(p[1:])), p[5:])
	}
	if err != nil {
		return err
	}
	select {
	case <-e.qp.Done():
	case <-ctx.Done():
	}
	return e.close()
}

// echo answers each message with a message until the connection ends. The client reports why it
// ended.
func (e *end) echo(size int) error {
	for n := 0; ; {
		wcs, err := e.poll()
		if err != nil {
			return nil
		}
		for i := range wcs {
			if !wcs[i].IsRecv() {
				continue
			}
			if err := e.send(size, &n); err != nil {
				return err
			}
			if err := e.postRecv(size); err != nil {
				return err
			}
		}
	}
}

// writeBack answers each Write with a Write until the connection ends.
func (e *end) writeBack(size int, private []byte) error {
	to, err := decodeOffer(private)
	if err != nil {
		return err
	}
	for n := uint32(1); ; n++ {
		if e.written(n, size) != nil {
			return nil
		}
		if err := e.write(n, size, to); err != nil {
			return err
		}
	}
}

// written spins until the peer's Write of size bytes with the last four equal to n has arrived.
// Like perftest, it reads the memory. Unlike perftest, it yields the CPU to an engine that shares it.
func (e *end) written(n uint32, size int) error {
	word := (*uint32)(unsafe.Pointer(&e.mr.Bytes()[recvOffset+size-4]))
	for spins := 1; atomic.LoadUint32(word) != n; spins++ {
		if e.shared {
			spin.Yield()
		}
		if spins%4096 == 0 {
			select {
			case <-e.qp.Done():
				return e.over()
			default:
			}
		}
	}
	return nil
}

// write writes size bytes to the peer's memory. The last four are n.
func (e *end) write(n uint32, size int, to offer) error {
	binary.NativeEndian.PutUint32(e.mr.Bytes()[size-4:], n)
	for k := e.cq.Poll(e.wcs[:]); k > 0; k = e.cq.Poll(e.wcs[:]) {
		if _, err := e.good(k); err != nil {
			return err
		}
	}
	to.Addr += recvOffset
	flags := iwarp.Inline
	if n%signalEach == 0 {
		flags |= iwarp.Signaled
	}
	return e.post(iwarp.OpWrite, size, to, flags)
}

// send sends a message. Some of them are signaled, so that the queue never fills.
func (e *end) send(size int, n *int) error {
	flags := iwarp.SendFlags(0)
	if size <= 64 {
		flags = iwarp.Inline
	}
	if *n++; *n%signalEach == 0 {
		flags |= iwarp.Signaled
	}
	return e.post(iwarp.OpSend, size, offer{}, flags)
}

func iwarpClient(j job, _ func()) ([]result, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	d, closer, err := open(ctx, j)
	if err != nil {
		return nil, err
	}
	defer closer()
	rs := make([]result, len(j.Tests))
	for i, t := range j.Tests {
		if rs[i], err = iwarpTest(ctx, d, j, t); err != nil {
			rs[i] = result{Err: err.Error()}
		}
	}
	return rs, nil
}

func iwarpTest(ctx context.Context, d *iwarp.Device, j job, t test) (r result, err error) {
	e, err := newEnd(ctx, d, j.Socket != "" && !j.Alone)
	if err != nil {
		return r, err
	}
	private := binary.BigEndian.AppendUint32([]byte{'o'}, uint32(t.Size))
	switch t.Workload {
	case "write-ping-pong":
		private[0] = 'w'
		private = append(private, offer{e.mr.Base(), e.mr.RKey()}.encode()...)
	case "send-lat", "send-ping-pong":
		private[0] = 's'
		for range 16 {
			if err := e.postRecv(t.Size); err != nil {
				return r, err
			}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, j.Warm+j.Window+10*time.Second)
	defer cancel()
	info, err := e.qp.Connect(ctx, net.JoinHostPort(j.Remote, strconv.Itoa(iwarpPort)), &iwarp.Config{PrivateData: private, Startup: j.startup()})
	if err != nil {
		return r, err
	}
	to, err := decodeOffer(info.PrivateData)
	if err == nil {
		before := counters(ctx, d)
		r, err = e.measure(j, t, to)
		r.Client = changes(before, counters(ctx, d))
	}
	err = errors.Join(err, e.qp.Disconnect(ctx))
	select { // Close would drop what Disconnect still has to send
	case <-e.qp.Done():
	case <-ctx.Done():
	}
	return r, errors.Join(err, e.close())
}

// counters returns the counters of the engine, or nil if they cannot be read. The session may be over.
func counters(ctx context.Context, d *iwarp.Device) map[string]uint64 {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	all, err := d.Admin().Stats(ctx)
	if err != nil {
		return nil
	}
	c := make(map[string]uint64, len(all))
	for _, k := range all {
		c[k.GetName()] = k.GetValue()
	}
	return c
}

// changes returns how much each counter has grown. Gauges that shrank are left out.
func changes(before, after map[string]uint64) map[string]uint64 {
	c := make(map[string]uint64)
	for k, v := range after {
		if v > before[k] {
			c[k] = v - before[k]
		}
	}
	return c
}

// health returns a warning if either end lost more than one frame in a thousand, or sent as many
// segments again, and "" otherwise.
func health(r *result) string {
	var notes []string
	if r.Note != "" {
		notes = append(notes, r.Note)
	}
	for _, end := range []struct {
		name    string
		counted map[string]uint64
	}{{"client", r.Client}, {"server", r.Server}} {
		c := end.counted
		of := c["engine.rx_frames"]
		if n := c["link.rx_fill_empty"] + c["link.rx_ring_full"] + c["link.rx_dropped"]; n*1000 > of {
			notes = append(notes, fmt.Sprintf("the %s lost %d of %d frames at its receiving ring", end.name, n, of+n))
		}
		of = c["engine.tx_frames"] - c["engine.tx_super"] + c["engine.tx_super_segments"]
		if n := c["engine.tx_retransmits"]; n*1000 > of {
			notes = append(notes, fmt.Sprintf("%d of the %s's %d segments were retransmissions", n, end.name, of))
		}
	}
	return strings.Join(notes, "; ")
}

func (e *end) measure(j job, t test, to offer) (result, error) {
	switch t.Workload {
	case "write-bw":
		return e.stream(j, t, iwarp.OpWrite, to, max(4, min(64, 4*mib/t.Size)), 1)
	case "read-bw":
		return e.stream(j, t, iwarp.OpRead, to, max(4, min(16, 4*mib/t.Size)), 1)
	case "write-spread":
		e.spread = true
		return e.stream(j, t, iwarp.OpWrite, to, spreadDepth, 1)
	case "read-spread":
		e.spread = true
		return e.stream(j, t, iwarp.OpRead, to, spreadDepth, 1)
	case "write-rate":
		return e.stream(j, t, iwarp.OpWrite, to, writeDepth, signalEach)
	case "read-lat":
		return e.oneByOne(j, t, iwarp.OpRead, to, iwarp.Signaled)
	case "write-lat":
		return e.oneByOne(j, t, iwarp.OpWrite, to, iwarp.Signaled|iwarp.Inline)
	case "write-ping-pong":
		n := uint32(0)
		r, err := pingPong(j, func() error {
			n++
			if err := e.write(n, t.Size, to); err != nil {
				return err
			}
			return e.written(n, t.Size)
		})
		return half(r), err
	case "local":
		return e.local(j)
	case "send-lat":
		return e.exchange(j, t)
	case "send-ping-pong":
		r, err := e.exchange(j, t)
		return half(r), err
	}
	return result{}, fmt.Errorf("no workload %q", t.Workload)
}

// exchange sends messages to a server that answers each with a message.
func (e *end) exchange(j job, t test) (result, error) {
	n := 0
	return pingPong(j, func() error {
		if err := e.send(t.Size, &n); err != nil {
			return err
		}
		for {
			wcs, err := e.poll()
			if err != nil {
				return err
			}
			for i := range wcs {
				if wcs[i].IsRecv() {
					return e.postRecv(t.Size)
				}
			}
		}
	})
}

// half returns half of the round trip r.
func half(r result) result {
	return result{Value: r.Value / 2, Mean: r.Mean / 2, P99: r.P99 / 2, P999: r.P999 / 2}
}

// oneByOne posts each operation after the previous one has completed.
func (e *end) oneByOne(j job, t test, op iwarp.Op, to offer, flags iwarp.SendFlags) (result, error) {
	return pingPong(j, func() error {
		if err := e.post(op, t.Size, to, flags); err != nil {
			return err
		}
		_, err := e.poll()
		return err
	})
}

// stream keeps depth operations outstanding and counts those that complete in the window. One
// in each is signaled.
func (e *end) stream(j job, t test, op iwarp.Op, to offer, depth, each int) (r result, err error) {
	inline := iwarp.SendFlags(0)
	if op == iwarp.OpWrite && t.Size <= 64 {
		inline = iwarp.Inline
	}
	next := e.poll
	if t.Size >= 64*kib { // these complete rarely, so the application sleeps
		next = e.wait
	}
	posted, done := 0, 0
	start := time.Now()
	var from time.Time
	first, busy := 0, 0.0
	for {
		for posted-done < depth {
			flags := inline
			if (posted+1)%each == 0 {
				flags |= iwarp.Signaled
			}
			if err := e.post(op, t.Size, to, flags); errors.Is(err, iwarp.ErrQueueFull) {
				break
			} else if err != nil {
				return r, err
			}
			posted++
		}
		wcs, err := next()
		if err != nil {
			return r, err
		}
		done += len(wcs) * each
		now := time.Now()
		if from.IsZero() {
			if now.Sub(start) >= j.Warm {
				from, first, busy = now, done, cpuBusy()
			}
		} else if took := now.Sub(from); took >= j.Window {
			if each > 1 {
				r.Value = float64(done-first) / float64(took) * 1e3 // M/s
			} else {
				r.Value = float64(done-first) * float64(t.Size) * 8 / float64(took) // Gb/s
				r.CPU = (cpuBusy() - busy) / (float64(done-first) * float64(t.Size) / (1 << 30))
			}
			break
		}
	}
	// Wait for all signaled operations before the connection ends.
	for posted-done >= each {
		wcs, err := next()
		if err != nil {
			return r, err
		}
		done += len(wcs) * each
	}
	return r, nil
}
