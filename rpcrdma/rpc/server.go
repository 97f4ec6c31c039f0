package rpc

import (
	"cmp"
	"context"
	"hash/maphash"
	"net/netip"
	"sync"
	"time"

	"github.com/iwarpd/iwarpd/internal/subnet"
)

// Request is a call to be executed by a Program.
type Request struct {
	*Call
	Peer string // address of the client, without port
	// Buffer allocates memory for a result of up to n bytes that the transport can send without
	// a copy. The transport frees it when the reply has been sent.
	Buffer func(n int) ([]byte, error)
	// Reply receives the results.
	Reply *Writer
}

// Program implements versions Low to High of a program number. Serve is called concurrently. What
// it writes to Reply is used only if it returns Success.
type Program struct {
	Low, High uint32
	Serve     func(ctx context.Context, r *Request) Status
	// Items reports whether the arguments of a procedure have DDP-eligible data items; nil
	// means that all may have. Calls of other procedures with separate items are rejected.
	Items func(vers, proc uint32) bool
	// Once reports that a procedure must not be executed twice. Replies to it are cached for
	// duplicate requests.
	Once func(vers, proc uint32) bool
	// Bulk reports which of those procedures are so frequent that their replies are cached
	// separately, so that they do not displace others; nil means none.
	Bulk func(vers, proc uint32) bool
}

// Server dispatches calls to programs. The zero value is a server without programs.
type Server struct {
	// MaxRecord is the longest call accepted over TCP, in bytes; 0 allows 1 MiB of data.
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

// Serve executes a call and returns the reply. ok is false if m is not a call, or has no reply.
// buffer implements Request.Buffer; nil means the heap.
func (s *Server) Serve(ctx context.Context, peer string, m Msg, buffer func(int) ([]byte, error)) (reply Msg, ok bool) {
	c, err := parseCall(m)
	if err != nil {
		return Msg{}, false
	}
	if buffer == nil {
		buffer = func(n int) ([]byte, error) { return make([]byte, n), nil }
	}
	w := Writer{Msg{Body: make([]byte, 0, 256)}} // most replies fit
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
	return cache.do(key{peer: peer, xid: c.XID, prog: c.Prog, vers: c.Vers, proc: c.Proc, sum: sum(c)}, do), true
}

// GarbageReply returns the reply to a call that could not be assembled.
func GarbageReply(xid uint32) Msg {
	var w Writer
	startReply(&w, xid, GarbageArgs, 0, 0)
	return w.Msg
}

var seed = maphash.MakeSeed()

// sum distinguishes calls with the same XID by the length and the first bytes of their arguments, and by the machine and
// the user that make them. It is the same for a repetition in another format, such as over a new connection with other
// limits, or with another stamp or verifier.
func sum(c *Call) uint64 {
	var b [2048]byte
	args := *c.Args
	n, _ := args.Read(b[:])
	h := maphash.Bytes(seed, b[:n])*31 + uint64(c.Args.Left())
	who := c.Cred.Body
	if c.Cred.Flavor == AuthSys && len(who) >= 4 {
		who = who[4:] // without the stamp
	}
	return h*31 + maphash.Bytes(seed, who)
}

// key identifies a request. It does not include the client's port, which changes when the client
// reconnects. Clients that share an address differ in sum.
type key struct {
	peer                  string
	xid, prog, vers, proc uint32
	sum                   uint64
}

// cacheCost is the limit of the cached replies together, which the latest one alone may exceed: each costs its length,
// and at least leastCost. cacheAge is how long one is used. After a reconnect a client repeats its outstanding requests,
// a few hundred at most. A client that starts again may make the same request with the same XID as before: some derive
// their first XID from the time since they have started.
const (
	cacheCost = 16 << 20
	leastCost = 4 << 10
	cacheAge  = time.Hour
)

// cache holds replies for duplicate requests. The client with the most makes room for further ones, so that no client
// displaces all replies of another, which would be executed again.
type cache struct {
	mu      sync.Mutex
	entries map[key]*entry // requests in progress, and completed ones
	clients subnet.Peers[replies]
	cost    int
}

// client has its completed requests as its connections.
type client = subnet.Peer[replies]

type replies struct {
	order []*entry // of a client, the oldest first
	cost  int
}

type entry struct {
	key   key
	done  chan struct{}
	at    time.Time // when it was completed
	reply Msg
}

func (e *entry) cost() int { return max(leastCost, len(e.reply.Body)) }

// do returns the cached reply for k, or calls f for it. If a request with the same key is in
// progress, do waits for it.
func (c *cache) do(k key, f func() Msg) Msg {
	c.mu.Lock()
	for l := c.client(k.peer); len(l.Value.order) > 0 && time.Since(l.Value.order[0].at) >= cacheAge; {
		c.drop(l)
	}
	if e := c.entries[k]; e != nil {
		c.mu.Unlock()
		<-e.done
		return e.reply
	}
	if c.entries == nil {
		c.entries, c.clients = make(map[key]*entry), make(subnet.Peers[replies])
	}
	e := &entry{key: k, done: make(chan struct{})}
	c.entries[k] = e
	c.mu.Unlock()
	defer close(e.done)
	m := f()
	e.reply = Msg{Body: m.AppendFlat(nil)}
	c.mu.Lock()
	defer c.mu.Unlock()
	e.at = time.Now()
	for c.cost > 0 && c.cost+e.cost() > cacheCost {
		c.drop(c.largest())
	}
	l := c.client(k.peer)
	l.Value.order = append(l.Value.order, e)
	c.clients.Add(l)
	c.count(l, e.cost())
	return e.reply
}

// client returns the client with the given address. Called with mu held.
func (c *cache) client(addr string) *client {
	a, _ := netip.ParseAddr(addr)
	return c.clients.Find(a, nil)
}

// maxLooks is the number of clients and networks that largest looks at: thousands of them may have a reply each.
const maxLooks = 64

// largest returns the client with the most replies of the network with the most, of some clients that the order of a
// map makes random. Called with mu held, and only if there is a reply.
func (c *cache) largest() (most *client) {
	looks := 0
	for _, l := range c.clients {
		if looks++; looks > maxLooks && most != nil {
			break
		}
		if len(l.Value.order) == 0 { // a network
			continue
		}
		if most == nil || cmp.Or(cmp.Compare(l.Net.Value.cost, most.Net.Value.cost), cmp.Compare(l.Value.cost, most.Value.cost),
			most.Value.order[0].at.Compare(l.Value.order[0].at)) > 0 {
			most = l
		}
	}
	return most
}

// drop forgets the oldest request of l. Called with mu held.
func (c *cache) drop(l *client) {
	e := l.Value.order[0]
	l.Value.order[0] = nil // the array may stay for long
	l.Value.order = l.Value.order[1:]
	delete(c.entries, e.key)
	c.clients.Remove(l)
	c.count(l, -e.cost())
}

// count adds to the cost of the replies to l. Called with mu held.
func (c *cache) count(l *client, cost int) {
	c.cost += cost
	l.Value.cost += cost
	if l.Net != l {
		l.Net.Value.cost += cost
	}
}
