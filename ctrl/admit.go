package ctrl

import (
	"fmt"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
)

// turnedAway counts clients that were refused or cut off.
type turnedAway struct {
	refused, cuts tally
	refusing      map[uint32]int // refused clients still connected, by uid; guarded by Server.mu
}

// mostAdmitting is the maximum number of connections that are neither those of clients nor of refused clients that are to be answered. Each has
// memory that no quota counts, and to turn it away takes a thread. Others wait in the socket.
const mostAdmitting = 64

// serve starts a session for a client of the socket of slot, in new goroutines. It waits while mostAdmitting others are being admitted.
func (s *Server) serve(c *seqpacket.Conn, slot int) {
	s.admitting <- struct{}{}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		c.Abandon()
		<-s.admitting
		return
	}
	s.wg.Add(1)
	s.mu.Unlock()
	go func() {
		defer s.wg.Done()
		defer s.readers.Add(-1)
		if s.readers.Add(1) <= s.readers.most {
			_ = c.Block() // else it is served nevertheless
		}
		sess, uid, err := s.admit(c, slot)
		answer := err != nil && s.answers(uid)
		if err != nil {
			s.logRefused(err)
			if !answer {
				c.Abandon()
			}
		}
		<-s.admitting
		switch {
		case answer:
			s.refuse(c, uid, err)
		case err == nil:
			go sess.out.writeLoop()
			sess.run()
		}
	}()
}

// readers counts the goroutines that serve connections.
type readers struct {
	atomic.Int32
	most int32 // that may have a thread of their own
}

// logRefused logs that a client was refused. A refused client may retry at once, so only some
// refusals are logged, with their number.
func (s *Server) logRefused(err error) {
	if n, due := s.refused.add(s.now()); due {
		s.log.Warn("client refused", zap.Error(err), zap.Uint64("times", n))
	}
}

const (
	// refuseWait is the time to wait for the first request of a refused client.
	refuseWait = time.Second
	// maxRefusing bounds the refused clients of a user that have not read the answer, and maxRefusingUsers the users that have
	// some: one person may have thousands of uids, and no quota counts these connections.
	maxRefusing, maxRefusingUsers = 16, 64
)

// answers reports whether a refused client of uid is to be answered, and counts it until refuse returns.
func (s *Server) answers(uid uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.refusing[uid]; n == maxRefusing || n == 0 && len(s.refusing) == maxRefusingUsers {
		return false
	}
	s.refusing[uid]++
	return true
}

// refuse answers the first request of a client of uid with err and closes the connection.
func (s *Server) refuse(c *seqpacket.Conn, uid uint32, err error) {
	answerRefused(c, err, refuseWait)
	c.Shutdown()
	<-s.drain(c)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refusing[uid]--; s.refusing[uid] == 0 {
		delete(s.refusing, uid)
	}
}

// answerRefused answers the first request of c, for which it waits. A request that has arrived is answered even if the
// process stood still when the time was over.
func answerRefused(c *seqpacket.Conn, err error, wait time.Duration) {
	defer time.AfterFunc(wait, c.CloseRead).Stop()
	b, rerr := c.Peek() // it may carry descriptors whose close waits
	var req ctrlpb.Request
	if rerr != nil || proto.Unmarshal(b, &req) != nil {
		return
	}
	m := &ctrlpb.Message{Body: &ctrlpb.Message_Reply{Reply: &ctrlpb.Reply{Id: req.Id, Error: toPB(err)}}}
	if b, err := proto.Marshal(m); err == nil {
		c.TryWrite(b, nil) // there is room: it is the first packet
	}
}

// admit creates a session for the client at the other end of c, if it is allowed. uid is the client's, even if
// it is refused.
func (s *Server) admit(c *seqpacket.Conn, slot int) (sess *session, uid uint32, err error) {
	cred, err := c.Cred()
	if err != nil {
		return nil, 0, fmt.Errorf("ctrl: peer credentials: %w", err)
	}
	// Ask the kernel for the groups: the name service may fail, and does not know groups from
	// newgrp or a unit's SupplementaryGroups.
	gids, err := c.Groups()
	if err != nil {
		return nil, cred.Uid, fmt.Errorf("ctrl: peer groups: %w", err)
	}
	contained := c.Contained()
	switch {
	case slot != noSlot:
		cred.Uid, cred.Gid, gids = slotUID+uint32(slot), slotUID+uint32(slot), nil
	case cred.Uid >= slotUID:
		return nil, cred.Uid, errorf(permission, "ctrl: uid %d is not allowed: uids from %d on stand for slots", cred.Uid, uint32(slotUID))
	case cred.Uid == 0 && contained:
		cred.Uid = otherRoot
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.drained != nil {
		return nil, cred.Uid, errDraining
	}
	sess, err = s.newSession(c, cred, gids, contained)
	if err == nil {
		s.wg.Add(1) // for its writer
	}
	return sess, cred.Uid, err
}
