package rpc

import (
	"context"
	"hash/maphash"
	"sync"
)

// Request is a call that a Program serves.
type Request struct {
	*Call
	Peer string // address of the client, without port
	// Buffer gives memory for a result of up to n bytes from which the transport
	// can move it as it is. It is the transport's again once the reply was sent.
	Buffer func(n int) ([]byte, error)
	// Reply is where the results go.
	Reply *Writer
}

// Program serves one program number, of versions Low to High. Serve is called
// from many goroutines. What it writes to the Reply counts for Success alone.
type Program struct {
	Low, High uint32
	Serve     func(ctx context.Context, r *Request) Status
	// Items reports whether the arguments of a procedure have data items that the
	// program's binding makes DDP-eligible; nil: all may have. A call of another
	// procedure whose items stand apart is none.
	Items func(vers, proc uint32) bool
	// Once reports that a procedure must not be done twice: replies to it are kept
	// for requests that come again.
	Once func(vers, proc uint32) bool
	// Bulk reports which of those come in such numbers that replies to them are kept
	// apart, so that the others' are not lost among them; nil: none.
	Bulk func(vers, proc uint32) bool
}

// Server dispatches calls to programs. Its zero value has none.
type Server struct {
	// MaxRecord is the longest call that is taken over TCP, in bytes; 0: what has
	// 1 MiB of data.
	MaxRecord int

	mu       sync.RWMutex
	programs map[uint32]Program
	cache    cache
	bulk     cache
}

// Register adds a program.
func (s *Server) Register(prog uint32, p Program) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.programs == nil {
		s.programs = make(map[uint32]Program)
	}
	s.programs[prog] = p
}

// Serve does a call and returns the reply. ok false: it is none, and there is
// no reply. buffer is for Request.Buffer; nil: the heap.
func (s *Server) Serve(ctx context.Context, peer string, m Msg, buffer func(int) ([]byte, error)) (reply Msg, ok bool) {
	c, err := ParseCall(m)
	if err != nil {
		return Msg{}, false
	}
	if buffer == nil {
		buffer = func(n int) ([]byte, error) { return make([]byte, n), nil }
	}
	var w Writer
	if c.rpcvers != 2 {
		startReply(&w, c.XID, RPCMismatch, 0, 0)
		return w.Msg, true
	}
	s.mu.RLock()
	p, known := s.programs[c.Prog]
	s.mu.RUnlock()
	switch {
	case !known:
		startReply(&w, c.XID, ProgUnavail, 0, 0)
		return w.Msg, true
	case c.Vers < p.Low || c.Vers > p.High:
		startReply(&w, c.XID, ProgMismatch, p.Low, p.High)
		return w.Msg, true
	}
	if len(m.Items) > 0 && (c.Cred.Whole() || p.Items != nil && !p.Items(c.Vers, c.Proc)) {
		return Msg{}, false
	}
	do := func() Msg {
		startReply(&w, c.XID, Success, 0, 0)
		if st := p.Serve(ctx, &Request{Call: c, Peer: peer, Buffer: buffer, Reply: &w}); st != Success {
			w = Writer{}
			startReply(&w, c.XID, st, p.Low, p.High)
		}
		return w.Msg
	}
	if p.Once == nil || !p.Once(c.Vers, c.Proc) {
		return do(), true
	}
	cache := &s.cache
	if p.Bulk != nil && p.Bulk(c.Vers, c.Proc) {
		cache = &s.bulk
	}
	return cache.do(key{peer: peer, xid: c.XID, prog: c.Prog, vers: c.Vers, proc: c.Proc, sum: sum(m)}, do), true
}

// GarbageReply is the reply to a call whose message could not be put together.
func GarbageReply(xid uint32) Msg {
	var w Writer
	startReply(&w, xid, GarbageArgs, 0, 0)
	return w.Msg
}

var seed = maphash.MakeSeed()

// sum tells calls with the same XID apart, by their length and the start of what
// is in them.
func sum(m Msg) uint64 {
	h := maphash.Bytes(seed, m.Body[:min(len(m.Body), 2048)])*31 + uint64(m.Len())
	for _, it := range m.Items {
		h = h*31 + maphash.Bytes(seed, it.Data[:min(len(it.Data), 256)])
	}
	return h
}

// key names a request. The client's port is not in it: it changes when the
// client connects again.
type key struct {
	peer                  string
	xid, prog, vers, proc uint32
	sum                   uint64
}

// cacheSize is how many replies are kept. A client comes again with what was
// outstanding when its connection broke: a few hundred requests at most.
const cacheSize = 4096

// cache keeps replies for requests that come again.
type cache struct {
	mu      sync.Mutex
	entries map[key]*entry // those being done, and those of order
	order   []key          // a ring of what was done
	next    int
}

type entry struct {
	done  chan struct{}
	reply Msg
}

// do returns the reply of an earlier request with the same key, or that of f.
// A request that is being done is waited for.
func (c *cache) do(k key, f func() Msg) Msg {
	c.mu.Lock()
	if e := c.entries[k]; e != nil {
		c.mu.Unlock()
		<-e.done
		return e.reply
	}
	if c.entries == nil {
		c.entries = make(map[key]*entry)
	}
	e := &entry{done: make(chan struct{})}
	c.entries[k] = e
	c.mu.Unlock()
	defer close(e.done)
	m := f()
	e.reply = Msg{Body: m.AppendFlat(nil)}
	c.keep(k)
	return e.reply
}

// keep notes that k was done. The oldest of those goes when there are too many.
func (c *cache) keep(k key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.order) < cacheSize {
		c.order = append(c.order, k)
		return
	}
	delete(c.entries, c.order[c.next])
	c.order[c.next] = k
	c.next = (c.next + 1) % cacheSize
}
