package verbs

import (
	"bytes"
	"errors"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/rdmap"
)

// TestBadWR posts a good Read, a bad work request and a good Send. It checks that the Read completes, that the bad one
// reports the reason, that the rest is flushed, and that the peer gets a Terminate.
func TestBadWR(t *testing.T) {
	many := make([]SGE, 17)
	tests := []struct {
		name string
		wr   func(a, b *side) SendWR
		want WCStatus
		op   WCOp
	}{
		{"undecodable", func(a, b *side) SendWR { return SendWR{Op: OpInvalid} }, WCLocQPOpErr, WCSend},
		{"terminate", func(a, b *side) SendWR { return SendWR{Op: rdmap.OpTerminate} }, WCLocQPOpErr, WCSend},
		{"opcode 0", func(a, b *side) SendWR { return SendWR{} }, WCLocQPOpErr, WCSend},
		{"17 SGEs", func(a, b *side) SendWR { return SendWR{Op: rdmap.OpSend, SGEs: many} }, WCLocQPOpErr, WCSend},
		{"inline too long", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpSend, Flags: Inline, Inline: make([]byte, 257)}
		}, WCLocQPOpErr, WCSend},
		{"inline and SGEs", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpSend, Flags: Inline, SGEs: []SGE{a.sge(0, 1)}}
		}, WCLocQPOpErr, WCSend},
		{"inline Read", func(a, b *side) SendWR { return SendWR{Op: rdmap.OpRead, Flags: Inline} }, WCLocQPOpErr, WCRead},
		{"Read of two sinks", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 1), a.sge(8, 1)}, RKey: b.mr.STag(), Remote: sideBase}
		}, WCLocQPOpErr, WCRead},
		{"atomic without SGE", func(a, b *side) SendWR { return SendWR{Op: rdmap.OpFetchAdd} }, WCLocQPOpErr, WCFetchAdd},
		{"atomic of 4", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpCmpSwap, SGEs: []SGE{a.sge(0, 4)}}
		}, WCLocLenErr, WCCmpSwap},
		{"atomic of 16", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpFetchAdd, SGEs: []SGE{a.sge(0, 16)}}
		}, WCLocLenErr, WCFetchAdd},
		{"Imm with SGE", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpImm, SGEs: []SGE{a.sge(0, 4)}}
		}, WCLocQPOpErr, WCImm},
		{"lkey 0", func(a, b *side) SendWR { return SendWR{Op: rdmap.OpSend, SGEs: []SGE{{sideBase, 1, 0}}} }, WCLocProtErr, WCSend},
		{"lkey of the peer", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpSend, SGEs: []SGE{{sideBase, 1, b.mr.STag()}}}
		}, WCLocProtErr, WCSend},
		{"second SGE out of bounds", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8), a.sge(len(a.mem)-1, 2)}, RKey: b.mr.STag(), Remote: sideBase}
		}, WCLocProtErr, WCWrite},
		{"Read sink not writable", func(a, b *side) SendWR {
			r, _ := a.table.Register(pdA, a.mem, 0, 0)
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{{0, 8, r.STag()}}, RKey: b.mr.STag(), Remote: sideBase}
		}, WCLocProtErr, WCRead},
		{"over 2^31-1 bytes", func(a, b *side) SendWR {
			huge, _ := a.table.Register(pdA, make([]byte, 1<<28), 0, 0) // never touched
			wr := SendWR{Op: rdmap.OpWrite, RKey: b.mr.STag(), Remote: sideBase}
			for range 8 {
				wr.SGEs = append(wr.SGEs, SGE{0, 1 << 28, huge.STag()})
			}
			return wr
		}, WCLocLenErr, WCWrite},
		{"local invalidate of a plain region", func(a, b *side) SendWR {
			return SendWR{Op: OpLocalInv, Inv: a.mr.STag()}
		}, WCLocAccessErr, WCLocalInv},
		{"local invalidate with SGE", func(a, b *side) SendWR {
			return SendWR{Op: OpLocalInv, SGEs: []SGE{a.sge(0, 8)}}
		}, WCLocQPOpErr, WCLocalInv},
		{"bind of a region", func(a, b *side) SendWR {
			return SendWR{Op: OpBindMW, RKey: a.mr.STag(), SGEs: []SGE{a.sge(0, 8)}, Access: RemoteRead}
		}, WCMWBindErr, WCBindMW},
		{"registration of a plain region", func(a, b *side) SendWR {
			return SendWR{Op: OpReg, RKey: a.mr.STag(), SGEs: []SGE{{0, 8, 0}}, Access: RemoteRead}
		}, WCMWBindErr, WCReg},
		{"registration without SGE", func(a, b *side) SendWR { return SendWR{Op: OpReg} }, WCLocQPOpErr, WCReg},
		{"remote address wraps", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: math.MaxUint64 - 3}
		}, WCLocQPOpErr, WCWrite},
		{"inline Write wraps", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpWrite, Flags: Inline, Inline: []byte("12345678"), RKey: b.mr.STag(), Remote: math.MaxUint64 - 3}
		}, WCLocQPOpErr, WCWrite},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newPair(t, 4096, QPConfig{})
			a.postRecv(RecvWR{ID: 70}, RecvWR{ID: 71})
			bad := tt.wr(a, b)
			bad.ID = 2
			a.post(
				SendWR{ID: 1, Op: rdmap.OpRead, Flags: Signaled, SGEs: []SGE{a.sge(0, 64)}, RKey: b.mr.STag(), Remote: sideBase},
				bad,
				SendWR{ID: 3, Op: rdmap.OpSend},
			)
			run(a, b, 1000)
			if a.State() != StateTerminate || !errors.Is(a.Err(), term.ErrRDMAPLocal) {
				t.Errorf("state %v, error %v", a.State(), a.Err())
			}
			if b.State() != StateTerminate || remoteErr(b.QP) != term.ErrRDMAPLocal {
				t.Errorf("peer: state %v, error %v", b.State(), b.Err())
			}
			a.Error()
			run(a, b, 1000)
			got := a.take()
			want := []outcome{{1, WCSuccess}, {2, tt.want}, {3, WCFlushErr}, {70, WCFlushErr}, {71, WCFlushErr}}
			if diff := cmp.Diff(want, outcomes(got), cmp.AllowUnexported(outcome{})); diff != "" {
				t.Errorf("completions (-want +got):\n%s", diff)
			}
			if len(got) > 1 && got[1].Op != tt.op {
				t.Errorf("opcode of the completion: %v; want %v", got[1].Op, tt.op)
			}
			if len(got) > 1 {
				if e, remote := got[1].Terminate(); e != term.ErrRDMAPLocal || remote {
					t.Errorf("vendor error %#x", got[1].Vendor)
				}
			}
		})
	}
}

// TestNoORD checks that a stream with an ORD of 0 refuses a Read, and sends nothing after it.
func TestNoORD(t *testing.T) {
	a, b := newSide(t, 1, 64, QPConfig{}), newSide(t, 2, 64, QPConfig{})
	a.Start(rdmap.Config{})
	b.Start(rdmap.Config{})
	a.mem[0] = 7
	a.post(SendWR{ID: 1, Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase},
		SendWR{ID: 2, Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase})
	run(a, b, 1000)
	a.wantOutcomes(t, []outcome{{1, WCLocQPOpErr}})
	if b.mem[0] != 0 {
		t.Error("the Write after it was sent")
	}
}

// TestRemoteErrors provokes each error that the peer's checks can return.
func TestRemoteErrors(t *testing.T) {
	tests := []struct {
		name string
		wr   func(a, b *side) SendWR
		want *term.Error
		st   WCStatus
	}{
		{"Write, STag", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag() ^ 1, Remote: sideBase}
		}, term.ErrInvalidSTag, WCSuccess},
		{"Write, bounds", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase - 1}
		}, term.ErrBounds, WCSuccess},
		{"Write, no right", func(a, b *side) SendWR {
			r, _ := b.table.Register(pdA, b.mem, sideBase, LocalWrite|RemoteRead)
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: r.STag(), Remote: sideBase}
		}, term.ErrInvalidSTag, WCSuccess},
		{"Write, no right of the queue pair", func(a, b *side) SendWR {
			b.Permit(RemoteRead | RemoteAtomic)
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase}
		}, term.ErrInvalidSTag, WCSuccess},
		{"Write, PD", func(a, b *side) SendWR {
			r, _ := b.table.Register(pdB, b.mem, sideBase, accessRW)
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: r.STag(), Remote: sideBase}
		}, term.ErrSTagStream, WCSuccess},
		{"Read, STag", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: 12345, Remote: sideBase}
		}, term.ErrReadSTag, WCRemAccessErr},
		{"Read, bounds", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase + uint64(len(b.mem)) - 7}
		}, term.ErrReadBounds, WCRemAccessErr},
		{"Read, before the region", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase - 8}
		}, term.ErrReadBounds, WCRemAccessErr},
		{"Read, PD", func(a, b *side) SendWR {
			r, _ := b.table.Register(pdB, b.mem, sideBase, accessRW)
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: r.STag(), Remote: sideBase}
		}, term.ErrReadSTagStream, WCRemAccessErr},
		{"Read, no right", func(a, b *side) SendWR {
			r, _ := b.table.Register(pdA, b.mem, sideBase, LocalWrite|RemoteWrite)
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: r.STag(), Remote: sideBase}
		}, term.ErrReadAccess, WCRemAccessErr},
		{"Read, no right of the queue pair", func(a, b *side) SendWR {
			b.Permit(RemoteWrite | RemoteAtomic)
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase}
		}, term.ErrReadAccess, WCRemAccessErr},
		{"atomic, no right of the queue pair", func(a, b *side) SendWR {
			b.Permit(RemoteWrite | RemoteRead)
			return SendWR{Op: rdmap.OpFetchAdd, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase}
		}, term.ErrReadAccess, WCRemAccessErr},
		{"atomic, no right", func(a, b *side) SendWR {
			r, _ := b.table.Register(pdA, b.mem, sideBase, LocalWrite|RemoteWrite)
			return SendWR{Op: rdmap.OpFetchAdd, SGEs: []SGE{a.sge(0, 8)}, RKey: r.STag(), Remote: sideBase}
		}, term.ErrReadAccess, WCRemAccessErr},
		{"atomic, not aligned", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpFetchAdd, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase + 4}
		}, term.ErrStream, WCRemOpErr},
		{"Send, no receive", func(a, b *side) SendWR {
			b.r.q = nil
			return SendWR{Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 8)}}
		}, term.ErrNoBuffer, WCSuccess},
		{"Send, too long", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 101)}}
		}, term.ErrTooLong, WCSuccess},
		{"Send with Invalidate, PD", func(a, b *side) SendWR {
			r, _ := b.table.RegisterFast(pdB, b.mem, accessRW)
			if !b.table.fastReg(pdB, r.STag(), sideBase, 0, 8, accessRW) {
				panic("no fast registration")
			}
			return SendWR{Op: rdmap.OpSendInv, Inv: r.STag()}
		}, term.ErrOpInvalidate, WCSuccess},
		{"Send with Invalidate of a plain region", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpSendInv, Inv: b.mr.STag()}
		}, term.ErrOpInvalidate, WCSuccess},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newPair(t, 4096, QPConfig{SigAll: true})
			b.postRecv(RecvWR{ID: 60, SGEs: []SGE{b.sge(0, 100)}})
			before := bytes.Clone(b.mem)
			wr := tt.wr(a, b)
			wr.ID = 1
			a.post(wr)
			run(a, b, 1000)
			if got := remoteErr(a.QP); got != tt.want {
				t.Errorf("Terminate: %v; want %v", got, tt.want)
			}
			a.Error()
			b.Error()
			run(a, b, 1000)
			a.wantOutcomes(t, []outcome{{1, tt.st}})
			if !bytes.Equal(b.mem, before) {
				t.Error("the peer's memory has changed")
			}
			if a.State() != StateError || b.State() != StateError {
				t.Errorf("states %v, %v", a.State(), b.State())
			}
		})
	}
}

// TestReceiveTooShort checks that the completion of a receive that is too short for its message says so, in whichever segment that shows, and
// that the receives after it are flushed.
func TestReceiveTooShort(t *testing.T) {
	for _, length := range []int{101, 8192} {
		a, b := newPair(t, 8192, QPConfig{})
		b.postRecv(RecvWR{ID: 60, SGEs: []SGE{b.sge(0, 8192)}}, RecvWR{ID: 61, SGEs: []SGE{b.sge(0, length-1)}}, RecvWR{ID: 62})
		a.post(SendWR{ID: 1, Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 10)}}, SendWR{ID: 2, Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, length)}})
		run(a, b, 1000)
		b.Error()
		run(a, b, 1000)
		want := []outcome{{60, WCSuccess}, {61, WCLocLenErr}, {62, WCFlushErr}}
		if diff := cmp.Diff(want, outcomes(b.take()), cmp.AllowUnexported(outcome{})); diff != "" {
			t.Errorf("a message of %d bytes (-want +got):\n%s", length, diff)
		}
		if got := remoteErr(a.QP); got != term.ErrTooLong {
			t.Errorf("Terminate: %v", got)
		}
	}
}

// TestGatherFails deregisters memory after the work request was taken, and after the Read Request was accepted.
func TestGatherFails(t *testing.T) {
	t.Run("send", func(t *testing.T) {
		a, b := newPair(t, 8192, QPConfig{})
		b.postRecv(RecvWR{ID: 60, SGEs: []SGE{b.sge(0, 8192)}})
		a.post(SendWR{ID: 1, Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 8192)}}, SendWR{ID: 2, Op: rdmap.OpSend})
		a.HandleSends(2)
		deregister(t, a.table, a.mr)
		run(a, b, 1000)
		a.Error()
		b.Error()
		run(a, b, 1000)
		a.wantOutcomes(t, []outcome{{1, WCLocProtErr}, {2, WCFlushErr}})
		b.wantOutcomes(t, []outcome{{60, WCFlushErr}})
		if a.fails != 1 || remoteErr(b.QP) != term.ErrRDMAPLocal {
			t.Errorf("%d Gathers failed, Terminate %v", a.fails, remoteErr(b.QP))
		}
	})
	t.Run("last segment", func(t *testing.T) {
		for _, polled := range []bool{false, true} {
			a, b := newPair(t, 8192, QPConfig{})
			b.postRecv(RecvWR{ID: 60, SGEs: []SGE{b.sge(0, 8192)}})
			a.post(SendWR{ID: 1, Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 100)}}, SendWR{ID: 2, Op: rdmap.OpSend})
			a.HandleSends(2)
			deregister(t, a.table, a.mr)
			var seg rdmap.Segment
			if !a.Stream().PollFilling(1000, 1000, &seg) {
				t.Fatal("nothing to send")
			}
			if polled && a.poll() { // the completions of the stream are known
				t.Errorf("completions %v", outcomes(a.take()))
			}
			if _, ok := a.Gather(&seg.Src, seg.Len, nil); ok {
				t.Error("memory that is gone was gathered")
			}
			a.Error()
			a.poll()
			a.wantOutcomes(t, []outcome{{1, WCLocProtErr}, {2, WCFlushErr}})
		}
	})
	t.Run("read response", func(t *testing.T) {
		for _, n := range []int{8192, 100} { // at a segment in the middle, and at the last one
			a, b := newPair(t, 8192, QPConfig{})
			a.post(SendWR{ID: 1, Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, n)}, RKey: b.mr.STag(), Remote: sideBase})
			a.turn(b, 1000)
			deregister(t, b.table, b.mr)
			run(a, b, 1000)
			a.Error()
			run(a, b, 1000)
			a.wantOutcomes(t, []outcome{{1, WCRemAccessErr}})
			if b.fails != 1 || remoteErr(a.QP) != term.ErrReadSTag {
				t.Errorf("%d Gathers failed, Terminate %v", b.fails, remoteErr(a.QP))
			}
		}
	})
}

// TestBadReceive sends a message to a receive that cannot take it.
func TestBadReceive(t *testing.T) {
	tests := []struct {
		name string
		wr   func(b *side) RecvWR
		want WCStatus
	}{
		{"lkey", func(b *side) RecvWR { return RecvWR{SGEs: []SGE{{sideBase, 100, 0}}} }, WCLocProtErr},
		{"second piece out of bounds", func(b *side) RecvWR {
			return RecvWR{SGEs: []SGE{b.sge(0, 4), b.sge(len(b.mem), 100)}}
		}, WCLocProtErr},
		{"not writable", func(b *side) RecvWR {
			r, _ := b.table.Register(pdA, b.mem, 0, RemoteRead)
			return RecvWR{SGEs: []SGE{{0, 100, r.STag()}}}
		}, WCLocProtErr},
		{"17 SGEs", func(b *side) RecvWR { return RecvWR{SGEs: make([]SGE, 17)} }, WCLocQPOpErr},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newPair(t, 4096, QPConfig{})
			wr := tt.wr(b)
			wr.ID = 60
			b.postRecv(wr, RecvWR{ID: 61})
			a.post(SendWR{ID: 1, Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 50)}})
			run(a, b, 1000)
			b.Error()
			run(a, b, 1000)
			b.wantOutcomes(t, []outcome{{60, tt.want}, {61, WCFlushErr}})
			if remoteErr(a.QP) == nil {
				t.Error("the sender has no Terminate")
			}
		})
	}
}

// TestZeroLengthErrors checks that errors of operations without data end the QP as well.
func TestZeroLengthErrors(t *testing.T) {
	t.Run("receive", func(t *testing.T) {
		a, b := newPair(t, 64, QPConfig{})
		b.postRecv(RecvWR{ID: 60, SGEs: make([]SGE, 17)})
		a.post(SendWR{ID: 1, Op: rdmap.OpSend})
		run(a, b, 1000)
		b.wantOutcomes(t, []outcome{{60, WCLocQPOpErr}})
		if b.State() != StateTerminate || remoteErr(a.QP) != term.ErrRDMAPLocal {
			t.Errorf("state %v, Terminate %v", b.State(), remoteErr(a.QP))
		}
	})
	t.Run("atomic result", func(t *testing.T) {
		a, b := newPair(t, 64, QPConfig{})
		a.post(SendWR{ID: 1, Op: rdmap.OpFetchAdd, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase})
		a.HandleSends(1)
		deregister(t, a.table, a.mr)
		run(a, b, 1000)
		a.wantOutcomes(t, []outcome{{1, WCLocProtErr}})
		if a.State() != StateTerminate || remoteErr(b.QP) != term.ErrRDMAPLocal {
			t.Errorf("state %v, Terminate %v", a.State(), remoteErr(b.QP))
		}
	})
}

// TestErrorBeforeStart checks that a QP that never had a stream is flushed too.
func TestErrorBeforeStart(t *testing.T) {
	a := newSide(t, 1, 64, QPConfig{})
	a.post(SendWR{ID: 1, Op: rdmap.OpSend})
	a.postRecv(RecvWR{ID: 2})
	if a.State() != StateIdle || a.HandleSends(8) != 0 || a.poll() {
		t.Error("an idle QP does something")
	}
	a.Error()
	a.Start(rdmap.Config{})
	a.poll()
	if got := a.wcs; len(got) == 2 && (got[0].IsRecv() || !got[1].IsRecv()) {
		t.Errorf("completions %+v", got)
	}
	a.wantOutcomes(t, []outcome{{1, WCFlushErr}, {2, WCFlushErr}})
	if a.State() != StateError || a.Err() != nil {
		t.Errorf("state %v, error %v", a.State(), a.Err())
	}
}
