package ctrl

import (
	"fmt"
	"net/netip"

	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/mpa"
)

// connState is the state of a connection.
type connState uint8

const (
	connResolving connState = iota // route and neighbour are being resolved
	connDialing                    // TCP active open
	connStreaming                  // a byte stream, until the client starts MPA
	connStartup                    // MPA frames
	connWaiting                    // a connect request that the client has not answered
	connSwitching                  // attached, but full operation is not reached
	connUp
	connClosing // we are closing the connection
	connGone    // removed from all tables
)

var connStates = [...]string{"RESOLVING", "DIALING", "STREAMING", "STARTUP", "WAITING", "SWITCHING", "UP", "CLOSING", "GONE"}

// String returns the name of the state.
func (s connState) String() string {
	if int(s) < len(connStates) {
		return connStates[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// conn is a connection, from the request to open it to its end. Server.mu guards it.
type conn struct {
	id     dataplane.ConnID // 0 until it is opened
	handle uint32
	sess   *session
	qp     *qp // nil until connect or accept
	worker int
	state  connState

	// The two ends. claim holds the local port.
	listener *listener // nil for an active open
	local    netip.AddrPort
	by       *device        // device that the client requested; nil means that of the route
	wantAddr netip.AddrPort // local address that the client requested
	remote   netip.AddrPort
	ip       dataplane.IPOptions // active
	claim    *claim
	within   bool // the peer is a program of this host

	// The startup of MPA and its result.
	cfg       mpa.Config
	initiator bool         // this side sends the MPA request; otherwise it waits for the peer's
	st        *mpa.Startup // over TCP
	limit     clock.Time   // deadline of the whole setup, or of the current wait; see deadline
	params    mpa.Params
	private   []byte            // the peer's private data
	peer      *mpa.EnhancedData // the peer's depths, or nil if it sent none
	waiting   bool              // in listener.waiting and resWaiting

	// How and why it ends.
	failure  error // connSwitching: the startup failed, and a Terminate is being sent to the peer
	reason   error // connClosing: why we reset it, or nil if the client requested it or the engine knows why
	leaving  bool  // the engine still closes it in order
	timeWait bool  // the engine has closed it, and TCP is in TIME-WAIT

	overSCTP
	byteStream
}

// overSCTP is the state that only a connection over SCTP has.
type overSCTP struct {
	sctp    *dataplane.SCTP // nil: TCP
	neg     mpa.Negotiation // over TCP, conn.st has it
	shares  bool            // may share an association with other connections of its client
	shared  *shared         // that association, or nil
	alone   bool            // start a new association, because the others had no stream
	redials int             // number of attempts with another stream
}

// byteStream is the state of a connection that begins as a byte stream (connStreaming).
type byteStream struct {
	streaming bool
	in        []byte // received and not consumed
	shown     int    // bytes of in that were reported to the client
	late      bool   // in session.late
	ended     bool   // the peer sends no more data
	endShown  bool
	memory    uint64 // quota charged while it is a byte stream
	unsent    int    // bytes of StreamSend that the peer has not acknowledged, as far as known
}

// maxPrivate is the maximum length of a client's private data (RFC 5044 section 7.1.1).
const maxPrivate = mpa.MaxPrivateData

// take assigns q to c.
func (c *conn) take(q *qp) {
	c.qp, q.conn, q.used = q, c, true
}

// wait counts c, which waits for the client, in the backlog and in the quota of the user.
func (l *listener) wait(c *conn) error {
	// A client that does not keep up takes no more: a peer that connects and leaves repeatedly must not cause it to
	// be cut off.
	if l.waiting >= l.backlog || l.sess.out.behind() {
		return errBacklog
	}
	take := l.sess.take
	if l.waiting < leastPending && !l.streaming { // byte streams may outlive their listener
		take = l.sess.takeBeyond
	}
	if err := take(resWaiting, 1); err != nil {
		return err
	}
	l.waiting++
	c.waiting = true
	return nil
}

// answered records that the client has answered the connect request, or started MPA.
func (c *conn) answered() {
	if c.waiting {
		c.waiting = false
		c.listener.waiting--
		c.sess.give(resWaiting, 1)
		if c.listener.ending && c.listener.waiting == 0 {
			c.sess.give(resListens, 1)
		}
	}
}

// accepted records that the client has accepted the connect request with q.
func (c *conn) accepted(q *qp) {
	c.answered()
	if c.listener != nil {
		c.listener.accepted++
	}
	c.take(q)
}

// rejected records that the client has rejected the connect request.
func (c *conn) rejected() {
	c.answered()
	if c.listener != nil {
		c.listener.rejected++
	}
}
