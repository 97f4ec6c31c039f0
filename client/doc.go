// Package iwarp lets a Go program use iwarpd as it would use an RNIC.
//
// There are two levels. The plain one is like package net: Dial, Listen and
// Accept give a Conn, which sends and receives messages, and reads and writes
// the peer's memory where the peer has allowed it:
//
//	conn, err := iwarp.Dial(ctx, "10.0.0.2:7174", nil)
//	...
//	err = conn.Send(ctx, []byte("hello"))
//
// The verbs level has the objects and rules of libibverbs and librdmacm: a
// Device has protection domains (PD), memory regions (MR), completion queues
// (CQ) and queue pairs (QP); work requests are posted to a QP and their
// completions polled from a CQ. Posting and polling are loads and stores in
// memory shared with the daemon: while the daemon is awake they cost no system
// call, and they never allocate.
//
// All methods may be called from several goroutines. A context ends the wait,
// not what was waited for: a work request that was posted stays posted.
package iwarp
