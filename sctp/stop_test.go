package sctp

import (
	"testing"
	"time"
)

// TestStopped checks that a host that was stopped just before it would have given up its peer, as a paused container
// is, tries once more and gives it up only if that is not answered either, after a whole time-out.
func TestStopped(t *testing.T) {
	for what, begin := range map[string]func(t *testing.T) *rig{
		"INIT":        func(t *testing.T) *rig { return dialing(t, Config{}, CookieWait) },
		"COOKIE ECHO": func(t *testing.T) *rig { return dialing(t, Config{}, CookieEchoed) },
		"HEARTBEAT":   func(t *testing.T) *rig { return listening(t, Config{}) },
		"data": func(t *testing.T) *rig {
			r := listening(t, Config{Heartbeat: -1})
			r.push(100)
			return r
		},
		"SHUTDOWN": func(t *testing.T) *rig {
			r := listening(t, Config{Heartbeat: -1, MaxAssoc: 4})
			r.a.Close(r.now)
			return r
		},
		"guard": func(t *testing.T) *rig {
			r := listening(t, Config{Heartbeat: -1})
			r.push(100)
			r.a.Close(r.now)
			r.send(r.a.tag, sackBytes(r.a.cumAck, 0)) // the window is closed
			return r
		},
	} {
		t.Run(what, func(t *testing.T) {
			run := func(stopAfter time.Duration) (after time.Duration) {
				r := begin(t)
				start, stopped := r.now, false
				for r.a.State() != Closed {
					r.now = r.a.Deadline()
					if stopAfter != 0 && !stopped && r.now.Sub(start) == stopAfter {
						r.now = r.now.Add(time.Hour)
						start, stopped = r.now, true
					}
					r.a.HandleTimeout(r.now)
					r.drain(nil)
					if what == "guard" && r.a.State() != Closed {
						r.send(r.a.tag, sackBytes(r.a.cumAck, 0))
					}
				}
				return r.now.Sub(start)
			}
			d := run(0)
			if after := run(d); d < 30*time.Second || after < 30*time.Second {
				t.Errorf("gives up after %v, and %v after a stop", d, after)
			}
		})
	}
}

// TestStoppedRTT checks that what was in flight while this host was stopped is not timed, and what is sent later is.
func TestStoppedRTT(t *testing.T) {
	for _, timer := range []bool{false, true} {
		r := listening(t, Config{})
		r.a.Push(&Message{Buf: 1, Len: 1400})
		r.a.Push(&Message{Buf: 2, Len: 1400})
		r.drain(nil)
		if r.now = r.now.Add(time.Hour); timer {
			r.a.HandleTimeout(r.now)
			r.drain(nil)
		}
		before := r.a.cumAck
		r.send(r.a.tag, sackBytes(before+1, 100000))
		r.send(r.a.tag, sackBytes(before+2, 100000))
		if p := &r.a.paths[0]; p.srtt != 0 || p.rto > 2*time.Second {
			t.Errorf("timer %v: SRTT %v, RTO %v after a stop", timer, p.srtt, p.rto)
		}
		r.a.HandleTimeout(r.now)
		r.push(100)
		r.now = r.now.Add(20 * time.Millisecond)
		r.send(r.a.tag, sackBytes(before+3, 100000))
		if p := &r.a.paths[0]; p.srtt == 0 || p.srtt > 20*time.Millisecond {
			t.Errorf("timer %v: the next message is not timed: SRTT %v", timer, p.srtt)
		}
	}
}
