package dataplane

import (
	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/tcp"
)

// This file has everything that names all transports: the choice of one for a listener, for a
// connect and for a packet.

// llp is DDP's lower layer protocol (RFC 5041 section 2): a tcpConn or an assoc. The worker is
// an argument, since the lane may move to another worker while it is dialed.
type llp interface {
	// begin processes events of the transport and frees acknowledged slots, before new ones
	// are allocated. A lane with something to send joins the round.
	begin(w *worker) int
	// pump composes as much as the window and g allow, or nothing if g is nil, and sends what
	// is due. It returns the amount of work done.
	pump(w *worker, g *sched.Grant) int
	// timeout is called when next is due.
	timeout(w *worker)
	next() clock.Time
	// reset resets the transport at once, with the errors that the streams have.
	reset(w *worker)
	// setHop sets the next hop to remote, an address of the peer.
	setHop(w *worker, remote [16]byte, hop *Hop)
	// setDSCP changes the DSCP of the packets sent from now on.
	setDSCP(dscp uint8) error
	// streams returns the DDP streams. The argument s of the methods below is one of them.
	streams() []*stream
	info(ci *ConnInfo)

	// attach starts full operation of s; answer does so in response to a request of the
	// peer.
	attach(w *worker, s *stream, a Attachment)
	answer(w *worker, s *stream, set session.Setup, a Attachment)
	// pumpStream composes as much of s as the window and g allow, and nothing of other streams.
	pumpStream(w *worker, s *stream, g *sched.Grant)
	// disconnect closes s gracefully, after everything posted.
	disconnect(w *worker, s *stream)
	// closeStream closes s gracefully at once; abortStream resets it. The queue pair is in
	// ERROR.
	closeStream(w *worker, s *stream)
	abortStream(w *worker, s *stream)
	// fault is called when an access to client memory failed for one of the streams.
	fault(w *worker)
}

// transportListener is the part of a listener that belongs to its transport. Either tcp or sctp
// is set, or none if the kernel listens.
type transportListener struct {
	tcp  *tcp.Listener
	sctp *sctp.Listener
	opts SCTP
}

// proto returns the IP protocol of the transport. SCTP in UDP counts as SCTP.
func (r *ListenRequest) proto() uint8 {
	if r.SCTP != nil {
		return pkt.ProtoSCTP
	}
	return pkt.ProtoTCP
}

// open makes the transport's part of l.
func (l *listener) open(w *worker, r *ListenRequest) error {
	switch {
	case w.socks != nil && r.SCTP != nil:
		return errSocketSCTP
	case w.socks != nil:
		return w.socks.listen(w, l, r.Local, r.Backlog)
	case r.SCTP != nil:
		w.sctp0()
		l.opts = *r.SCTP
		l.sctp = sctp.NewListener(w.sctpConfig(l.opts), w.e.sctpSecret(), w.mtu)
	default:
		l.tcp = tcp.NewListener(&w.tcp, r.Backlog, w.e.secret, w.announced)
	}
	return nil
}

// close ends the transport's part of l.
func (l *listener) close(w *worker) {
	if l.tcp != nil && l.tcp.Half() > 0 { // what their peers send does not arrive any more
		for _, ln := range w.lanes {
			if c, ok := ln.llp.(*tcpConn); ok && c.lst == l {
				c.abort(w, errAborted)
			}
		}
	}
	if l.sctp != nil {
		w.unlistenSCTP(l)
	}
	if w.socks != nil {
		w.socks.unlisten(l)
	}
}

// relink adapts l to a new link of w.
func (l *listener) relink(w *worker) {
	switch {
	case l.tcp != nil:
		l.tcp.SetMTU(w.announced)
	case l.sctp != nil:
		l.sctp.SetMTU(w.mtu)
	}
}

// connect opens connection id on w and sends the result to done, at once or, with Join, later.
func (r *ConnectRequest) connect(w *worker, id ConnID, hop *Hop, done chan<- error) {
	switch {
	case r.SCTP != nil && w.socks != nil:
		done <- errSocketSCTP
	case r.SCTP != nil && hop.Local:
		done <- errHostSCTP
	case hop.Local && reaches(w, r.Remote):
		done <- connectHost(w, id, r)
	case unplugged(w.link):
		done <- errUnplugged
	case w.socks != nil:
		done <- w.socks.connect(w, id, r)
	case r.Join:
		w.joinSCTP(id, r, done)
	case r.SCTP != nil:
		done <- w.connectSCTP(id, r, hop)
	default:
		done <- w.connectTCP(id, r, hop)
	}
}

// packet passes the packet in f, or the ICMP error about one, to its transport.
func (w *worker) packet(f *rxFrame) {
	proto, quoted := f.pkt.Proto, false
	if proto == pkt.ProtoICMP || proto == pkt.ProtoICMPv6 {
		if f.icmp.Parse(&f.pkt, f.Pieces[0]) != nil {
			return
		}
		proto, quoted = f.icmp.Proto, true
	}
	switch proto {
	case pkt.ProtoTCP:
		if quoted {
			w.tcpICMP(f)
		} else {
			w.segment(f)
		}
	case pkt.ProtoSCTP, pkt.ProtoUDP:
		if quoted {
			w.sctpICMP(f)
		} else {
			w.sctpFrame(f)
		}
	default:
		if !quoted {
			w.stats.RxUnsupported++
		}
	}
}
