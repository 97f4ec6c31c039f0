package sctp

import "testing"

// echo gives l the packet with which a peer of flow r.flow echoes the cookie of an INIT ACK.
func (r *rig) echo(l *Listener, i Init) *Assoc {
	h := Header{r.flow.RemotePort, r.flow.LocalPort, i.Tag}
	a, _ := l.HandlePacket(r.now, r.flow, r.from, append(h.Append(nil), chunk(ChunkCookieEcho, 0, i.Cookie)...))
	return a
}

// TestCookieKey checks that a listener takes only cookies that were made with its key.
func TestCookieKey(t *testing.T) {
	r := newRig(t, Config{})
	r.l = NewListener(&r.cfg, &r.key, 1500)
	i := r.init()
	for key, want := range map[Secret]bool{r.key: true, {}: false, {8}: false} {
		l := NewListener(&r.cfg, &key, 1500)
		if got := r.echo(l, i) != nil; got != want || l.Stats().CookiesBad != map[bool]uint64{false: 1}[want] {
			t.Errorf("key %v: an association %v, %+v", key[0], got, l.Stats())
		}
	}
}

// TestCookieOfAnother checks that a cookie which was made before there was an association does not restart it: it lacks the Tie-Tags
// (RFC 9260 5.2.4), and whoever saw it could reset the association.
func TestCookieOfAnother(t *testing.T) {
	r := newRig(t, Config{})
	r.l = NewListener(&r.cfg, &r.key, 1500)
	first := r.init()
	r.take()
	r.peerTag++
	other := r.init()
	r.peerTag--
	r.take()
	r.cookieEcho(first)
	if r.a == nil || r.a.State() != Established {
		t.Fatal("not established")
	}
	tag := r.a.Tag()
	r.take()
	r.cookieEcho(other)
	if n := r.a.Stats().Restarts; n != 0 || r.a.Tag() != tag || len(r.take()) != 0 {
		t.Errorf("%d restarts, tag %#x, was %#x", n, r.a.Tag(), tag)
	}
}

// TestCookieOfCollision checks that a listener does not take the cookie that an association made while it was being dialed: it has
// the tag of that association, which may be over.
func TestCookieOfCollision(t *testing.T) {
	for _, state := range []State{CookieWait, CookieEchoed} {
		r := dialing(t, Config{}, state)
		r.take()
		i := r.init()
		l := NewListener(&r.cfg, &r.key, 1500)
		if a := r.echo(l, i); a != nil || l.Stats().CookiesBad != 1 {
			t.Errorf("in %v: an association %v, %+v", state, a != nil, l.Stats())
		}
	}
}

// TestCookiePreservative checks that a peer may ask for a cookie that lives longer, up to twice as long (RFC 9260
// 5.2.6).
func TestCookiePreservative(t *testing.T) {
	r := newRig(t, Config{})
	usual := uint32(cookieLife.Milliseconds())
	for more, want := range map[uint32]uint32{0: usual, 5: usual + 5, usual: 2 * usual, 1<<32 - 1: 2 * usual} {
		if k := offer(r.now, &r.cfg, &r.flow, &Init{Preserve: more}, 1, 1); k.life != want {
			t.Errorf("%d ms more: a life of %d ms, want %d", more, k.life, want)
		}
	}
}
