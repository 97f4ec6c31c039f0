// Package iwarp makes iwarpd available to Go programs in the way of an RNIC.
//
// It has two levels. The plain level resembles package net: Dial, Listen and
// Accept return a Conn, which sends and receives messages, and reads and writes
// the memory that the peer allows it to access:
//
//	conn, err := iwarp.Dial(ctx, "10.0.0.2:7174", nil)
//	...
//	err = conn.Send(ctx, []byte("hello"))
//
// The verbs level has the objects and rules of libibverbs and librdmacm: a
// Device has protection domains (PD), memory regions (MR), completion queues
// (CQ) and queue pairs (QP). Work requests are posted to a QP, and their
// completions are polled from a CQ. Posting and polling are loads and stores in
// memory shared with the daemon: they make no system call while the daemon is
// awake, and never allocate. Package verbs documents the fields and values of work
// requests and completions.
//
// The examples run without a daemon: package client/embed makes two devices that are
// connected within the process.
//
// All methods may be called from several goroutines. A canceled context ends
// only the wait: a work request that was posted stays posted.
package iwarp
