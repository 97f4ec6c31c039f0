package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/xsk"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

// The budget measures what the link leaves for a transport. Per frame it does only what iwarpd
// cannot avoid. Data frames carry a CRC32c and a TCP checksum. The sender copies and sums each
// payload into a TX slot; the receiver checks both sums, copies the payload out, and answers
// two frames with one. There is no connection, no retransmission, and the window is fixed. A
// ping is a small data frame that is answered at once by another.

const (
	budgetPort    = 7191
	budgetHeader  = 14 + 20 + 32           // Ethernet, IPv4, TCP with timestamps
	budgetInIP    = budgetHeader - 14      // the part that counts against the MTU
	budgetSeq     = 14 + 20 + 4            // number of a data frame; in an answer, the number of frames received
	budgetFlags   = 14 + 20 + 13           // TCP's flags; PSH marks a ping
	budgetSum     = 14 + 20 + 16           // the checksum
	budgetWindow  = 512                    // frames in flight
	budgetStep    = 512                    // bytes copied and summed at a time, as iwarpd does when it transmits
	budgetMessage = 1 << 20                // the buffer that is sent repeatedly
	budgetTimeout = 100 * time.Millisecond // patience during a measurement
)

const (
	flagACK  = 0x10
	flagPing = 0x18
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func init() {
	for _, kind := range []string{"budget", "budget-super"} {
		roles[kind+"-server"] = budgetServer
		roles[kind+"-client"] = budgetClient
	}
}

// runBudget runs the budget of that kind: "budget", or "budget-super" with super-frames.
func runBudget(m *matrix, kind string, mtu int, tests []test) ([]result, error) {
	if err := m.lab.setOffloads(true); err != nil {
		return nil, err
	}
	a, b := &m.lab.a, &m.lab.b
	server := job{Role: kind + "-server", If: b.ifn, MTU: mtu, Local: b.addr.Addr().String(), Remote: a.addr.Addr().String(), RemoteMAC: a.mac.String()}
	client := job{Role: kind + "-client", If: a.ifn, MTU: mtu, Local: a.addr.Addr().String(), Remote: b.addr.Addr().String(), RemoteMAC: b.mac.String(),
		Tests: tests, Warm: m.opt.warm, Window: m.opt.window}
	return m.lab.pairOf(server, client, m.limit(len(tests)), "GOMAXPROCS=2")
}

// openXSK opens queue 0 of the job's interface and steers the budget's port to it.
func openXSK(j job) (link.Link, func(), error) {
	ifc, err := net.InterfaceByName(j.If)
	if err != nil {
		return nil, nil, err
	}
	s, err := bpf.Load(bpf.Options{})
	if err != nil {
		return nil, nil, err
	}
	got, err := s.Attach(ifc.Index, bpf.Auto)
	if err != nil {
		return nil, nil, errors.Join(err, s.Close())
	}
	x, err := xsk.Open(xsk.Config{Interface: j.If, Generic: got == bpf.Generic})
	if err != nil {
		return nil, nil, errors.Join(err, s.Close())
	}
	closer := func() { _ = errors.Join(x.Close(), s.Close()) }
	if err := errors.Join(s.SetSocket(0, x.FD()), s.Claim(bpf.Endpoint{Proto: pkt.ProtoTCP, Port: budgetPort})); err != nil {
		closer()
		return nil, nil, err
	}
	return x, closer, nil
}

// A budget is one end of the wire.
type budget struct {
	link   link.Link
	super  *superBudget // nil: frame by frame
	header [budgetHeader]byte
	pseudo uint32 // sum of the pseudo-header without its length
	data   []byte // bytes sent or received
	off    int    // where the next payload starts in data
	ping   int    // bytes of a ping

	sent, acked, lost uint32 // counts of frames
	frames            [64]link.Frame
	slots             [64]link.Slot
	bad               uint64        // frames with a wrong CRC or checksum
	patience          time.Duration // time without an answer after which the frames in flight are lost
}

var errNoFrame = errors.New("no frame came back")

func openBudget(j job) (b *budget, closer func(), err error) {
	super := strings.HasPrefix(j.Role, "budget-super")
	open := openXSK
	if super {
		open = openSuperLink
	}
	l, closer, err := open(j)
	if err != nil {
		return nil, nil, err
	}
	if b, err = newBudget(l, j); err != nil {
		closer()
		return nil, nil, err
	}
	if super {
		b.useSuper()
	}
	return b, closer, nil
}

func newBudget(l link.Link, j job) (*budget, error) {
	local, err := netip.ParseAddr(j.Local)
	if err != nil {
		return nil, err
	}
	remote, err := netip.ParseAddr(j.Remote)
	if err != nil {
		return nil, err
	}
	mac, err := net.ParseMAC(j.RemoteMAC)
	if err != nil {
		return nil, err
	}
	b := &budget{link: l, data: make([]byte, budgetMessage), patience: budgetTimeout}
	for i := range b.data {
		b.data[i] = byte(i * 7)
	}
	h := b.header[:]
	copy(h, mac)
	copy(h[6:], []byte{2, 0, 0, 0, 0, 1, 8, 0})
	ip := h[14:34]
	copy(ip, []byte{0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, pkt.ProtoTCP})
	src, dst := local.As4(), remote.As4()
	copy(ip[12:], src[:])
	copy(ip[16:], dst[:])
	t := h[34:]
	binary.BigEndian.PutUint16(t, budgetPort)
	binary.BigEndian.PutUint16(t[2:], budgetPort)
	t[12], t[13] = 8<<4, flagACK // header length
	copy(t[20:], []byte{1, 1, 8, 10})
	b.pseudo = pkt.Sum(ip[12:20], pkt.ProtoTCP)
	return b, nil
}

// put completes a frame: it writes the header of f for n payload bytes whose partial sum is
// sum.
func (b *budget) put(f []byte, n int, seq, sum uint32) {
	copy(f, b.header[:])
	binary.BigEndian.PutUint16(f[16:], uint16(budgetInIP+n))
	binary.BigEndian.PutUint16(f[24:], pkt.Checksum(pkt.Sum(f[14:34], 0)))
	binary.BigEndian.PutUint32(f[budgetSeq:], seq)
	sum = pkt.Sum(f[34:budgetHeader], sum) + b.pseudo + uint32(32+n)
	binary.BigEndian.PutUint16(f[budgetSum:], pkt.Checksum(sum))
}

// postData sends the next piece of data as frame number seq. It returns false if the link has
// no room.
func (b *budget) postData(seq uint32) bool {
	s, ok := b.link.Alloc()
	if !ok {
		return false
	}
	f := b.link.Bytes(s)
	n := b.link.MTU() - budgetInIP // with the CRC
	src := b.data[b.off:min(b.off+n-4, len(b.data))]
	if b.header[budgetFlags] == flagPing {
		src = b.data[:b.ping]
	}
	p := f[budgetHeader : budgetHeader+len(src)+4]
	var crc, sum uint32
	for i := 0; i < len(src); i += budgetStep {
		k := copy(p[i:], src[i:min(i+budgetStep, len(src))])
		crc = crc32.Update(crc, castagnoli, p[i:i+k])
	}
	n = len(src) + 4
	binary.LittleEndian.PutUint32(p[len(src):], crc)
	sum = pkt.Sum(p[:n], 0)
	b.put(f, n, seq, sum)
	if !b.link.Post(s, 0, budgetHeader+n) {
		b.link.Free(s)
		return false
	}
	if b.header[budgetFlags] == flagPing {
		return true
	}
	if b.off += len(src); b.off == len(b.data) {
		b.off = 0
	}
	return true
}

// postPing sends a ping of n bytes, or answers one.
func (b *budget) postPing(n int) bool {
	b.header[budgetFlags], b.ping = flagPing, n
	ok := b.postData(0)
	b.header[budgetFlags] = flagACK
	return ok
}

// postAnswer reports the number of frames received. It returns false if the link has no room.
func (b *budget) postAnswer(count uint32) bool {
	s, ok := b.link.Alloc()
	if !ok {
		return false
	}
	b.put(b.link.Bytes(s), 0, count, 0)
	if !b.link.Post(s, 0, budgetHeader) {
		b.link.Free(s)
		return false
	}
	return true
}

func (b *budget) reap() {
	for {
		n := b.link.Reap(b.slots[:])
		for _, s := range b.slots[:n] {
			b.link.Free(s)
		}
		if n < len(b.slots) {
			return
		}
	}
}

// check verifies a received frame and returns its number.
func (b *budget) check(f *link.Frame) (seq uint32, ok bool) {
	head := f.Pieces[0]
	total := f.Len()
	if len(head) < budgetHeader || total < budgetHeader {
		return 0, false
	}
	n := int(binary.BigEndian.Uint16(head[16:])) - budgetInIP
	if n < 0 || budgetHeader+n > total {
		return 0, false
	}
	sum := pkt.Sum(head[26:34], pkt.ProtoTCP+uint32(32+n))
	var crc, want uint32
	at := 34 // offset in the frame of the next bytes to sum
	skip := 34
	left := 32 + n
	payload := n - 4
	for i := 0; i < f.N && left > 0; i++ {
		p := f.Pieces[i][skip:]
		skip = 0
		p = p[:min(len(p), left)]
		if at%2 == 0 {
			sum = pkt.Sum(p, sum)
		} else {
			sum = pkt.SumSwap(p, sum)
		}
		if i == 0 {
			p = p[budgetHeader-34:]
			left -= budgetHeader - 34
			at += budgetHeader - 34
		}
		left -= len(p)
		at += len(p)
		if n > 0 {
			c := min(len(p), payload)
			crc = crc32.Update(crc, castagnoli, p[:c])
			payload -= c
			for _, o := range p[c:] { // the CRC itself may span pieces
				want = want>>8 | uint32(o)<<24
			}
		}
	}
	if pkt.Fold(sum) != 0xffff || (n > 0 && crc != want) {
		b.bad++
		return 0, false
	}
	return binary.BigEndian.Uint32(head[budgetSeq:]), true
}

// place copies the payload of a checked data frame to data.
func (b *budget) place(f *link.Frame) {
	n := int(binary.BigEndian.Uint16(f.Pieces[0][16:])) - budgetInIP - 4
	skip := budgetHeader
	for i := 0; i < f.N && n > 0; i++ {
		p := f.Pieces[i][skip:]
		skip = 0
		p = p[:min(len(p), n)]
		n -= len(p)
		for len(p) > 0 {
			k := copy(b.data[b.off:], p)
			p = p[k:]
			if b.off += k; b.off == len(b.data) {
				b.off = 0
			}
		}
	}
}

// placePing is place for a ping. It does not advance the stream.
func (b *budget) placePing(f *link.Frame) {
	off := b.off
	b.place(f)
	b.off = off
}

// receive runs the receiving end until stop.
func (b *budget) receive(stop *atomic.Bool) {
	var count, answered uint32
	idle := 0
	for !stop.Load() {
		n := b.link.Receive(b.frames[:])
		for i := range b.frames[:n] {
			f := &b.frames[i]
			if b.super != nil {
				if b.placeSuper(f) && b.postAnswer(count+1) {
					count++
					answered = count
				}
			} else if _, ok := b.check(f); ok && f.Pieces[0][budgetFlags] == flagPing {
				b.placePing(f)
				b.postPing(f.Len() - budgetHeader - 4)
			} else if ok {
				b.place(f)
				count++
			}
			b.link.Release(f)
			if count-answered >= 2 && b.postAnswer(count) {
				answered = count
			}
		}
		if n > 0 {
			idle = 0
		} else if idle++; idle == 1000 && count != answered && b.postAnswer(count) {
			answered = count
		}
		b.link.Flush()
		b.reap()
	}
}

// send runs the sending end. It returns the goodput in Gb/s over the window and the frames
// lost.
func (b *budget) send(warm, window time.Duration) (r result, err error) {
	payload, most, post := b.link.MTU()-budgetInIP-4, uint32(budgetWindow), b.postData
	if b.super != nil {
		payload, most, post = b.super.most*(b.super.size-4), superWindow, b.postSuper
	}
	var first, lostFirst uint32
	start := time.Now()
	progress := start
	var from time.Time
	for {
		now := time.Now()
		n := b.link.Receive(b.frames[:])
		for i := range b.frames[:n] {
			f := &b.frames[i]
			if c, ok := b.check(f); ok {
				b.lost = min(b.lost, b.sent-c) // counted as lost, but arrived late
				if int32(c+b.lost-b.acked) > 0 {
					b.acked, progress = c+b.lost, now
				}
			}
			b.link.Release(f)
		}
		if from.IsZero() {
			if now.Sub(start) >= warm {
				from, first, lostFirst = now, b.acked, b.lost
			}
		} else if d := now.Sub(from); d >= window {
			good := b.acked - first - (b.lost - lostFirst)
			r.Value = float64(good) * float64(payload) * 8 / float64(d)
			if l := int32(b.lost - lostFirst); l > 0 {
				r.Note = fmt.Sprintf("%.2f %% of the frames were lost", 100*float64(l)/float64(max(b.acked-first, 1)))
			}
			if good == 0 {
				return r, errNoFrame
			}
			return r, nil
		}
		if b.sent != b.acked && now.Sub(progress) > b.patience {
			b.lost += b.sent - b.acked
			b.acked, progress = b.sent, now
		}
		for k := 0; k < 64 && b.sent-b.acked < most && post(b.sent); k++ {
			b.sent++
		}
		b.link.Flush()
		b.reap()
	}
}

// pingPong measures the round trip of a frame with size bytes.
func (b *budget) pingPong(j job, size int) (result, error) {
	return pingPong(j, func() error {
		if !b.postPing(size) {
			return errors.New("no room for a ping")
		}
		b.link.Flush()
		end := time.Time{}
		for spins := 1; ; spins++ {
			if n := b.link.Receive(b.frames[:1]); n > 0 {
				_, ok := b.check(&b.frames[0])
				ok = ok && b.frames[0].Pieces[0][budgetFlags] == flagPing
				if ok {
					b.placePing(&b.frames[0])
				}
				b.link.Release(&b.frames[0])
				b.reap()
				if ok {
					return nil
				}
			}
			if spins%1024 != 0 {
				continue
			}
			if now := time.Now(); end.IsZero() {
				end = now.Add(time.Minute)
			} else if now.After(end) {
				return errors.New("a ping got no answer")
			}
		}
	})
}

func budgetServer(j job, ready func()) ([]result, error) {
	quiet()
	b, closer, err := openBudget(j)
	if err != nil {
		return nil, err
	}
	defer closer()
	var stop atomic.Bool
	go func() {
		untilStdinEnds()
		stop.Store(true)
	}()
	ready()
	b.receive(&stop)
	if b.bad > 0 {
		return nil, fmt.Errorf("%d frames with a wrong CRC or checksum", b.bad)
	}
	return nil, nil
}

func budgetClient(j job, _ func()) ([]result, error) {
	quiet()
	b, closer, err := openBudget(j)
	if err != nil {
		return nil, err
	}
	defer closer()
	rs := make([]result, len(j.Tests))
	for i, t := range j.Tests {
		if t.Workload == "ping-pong" {
			rs[i], err = b.pingPong(j, t.Size)
		} else {
			rs[i], err = b.send(j.Warm, j.Window)
		}
		if err != nil {
			return nil, err
		}
	}
	return rs, nil
}
