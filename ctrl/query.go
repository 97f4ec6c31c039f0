package ctrl

import (
	"cmp"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/printable"
	"github.com/iwarpd/iwarpd/verbs"
)

// pageSize is the maximum number of list items in a reply, which keeps it below
// seqpacket.MaxPacket. longPage is that of the long items: queue pairs with their counters, and users
// with their quotas.
const pageSize, longPage = 64, 16

// maxAddresses is the maximum number of addresses in a reply, which has those of the first device
// twice. A host can have thousands of them, as with IPVS, which would exceed seqpacket.MaxPacket.
const maxAddresses = 1024

// attrs returns the attributes of the devices, with the limits of a client. Called with Server.mu held.
func (ds devices) attrs(cfg *Config, p *policy) (all []*ctrlpb.DeviceAttr) {
	most := maxAddresses / (len(ds) + 1)
	for _, d := range ds {
		a := d.attr(cfg, p)
		a.Addresses = a.Addresses[:min(len(a.Addresses), most)]
		all = append(all, a)
	}
	return all
}

func (d *device) attr(cfg *Config, p *policy) *ctrlpb.DeviceAttr {
	l := &p.limits
	a := &ctrlpb.DeviceAttr{
		Interface: d.Name, Mtu: uint32(d.mtu()),
		MaxQp: uint32(l.QPs), MaxCq: uint32(l.CQs), MaxPd: uint32(l.PDs), MaxMr: uint32(l.MRs), MaxMw: uint32(l.MWs),
		MaxListen: uint32(l.Listens), MaxMrSize: min(maxMRSize, l.Registered), MaxRegistered: l.Registered,
		MaxQpWr: uint32(l.QueueDepth), MaxCqe: uint32(l.CQDepth), MaxSge: uint32(min(l.MaxSGE, verbs.MaxSGE)),
		MaxInline: uint32(min(l.MaxInline, verbs.MaxInline)), MaxIrd: uint32(cfg.Startup.MaxIRD), MaxOrd: uint32(cfg.Startup.MaxIRD),
		MaxPrivateData: maxPrivate,
	}
	if d.Transport != nil {
		a.Transport = d.Transport()
	}
	if d.Link != nil {
		a.Link, a.Speed = d.Link()
	}
	for _, ad := range d.addrs() {
		a.Addresses = append(a.Addresses, ad.String())
	}
	if d.down != nil {
		a.Down = printable.Error(d.down)
	}
	return a
}

// visible returns the sessions whose objects c may list, without those being torn down. Called with mu held.
func (c *session) visible() []*session {
	return slices.DeleteFunc(c.holding(), func(o *session) bool { return o.dead })
}

// holding returns the sessions that c may see, including those being torn down, which still hold
// memory and quota. Called with mu held.
func (c *session) holding() []*session {
	var all []*session
	for _, o := range c.srv.sessions {
		if c.policy().admin || o.cred.Uid == c.cred.Uid {
			all = append(all, o)
		}
	}
	return all
}

func (c *session) queryStatus(reply *ctrlpb.Reply) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	reply.Body = &ctrlpb.Reply_Status{Status: s.status(c.holding(), c.policy())}
	return nil
}

// Status returns the state of the whole server.
func (s *Server) Status() *ctrlpb.StatusReply {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status(values(s.sessions), &policy{admin: true, limits: s.cfg.Limits})
}

func (s *Server) status(sessions []*session, p *policy) *ctrlpb.StatusReply {
	r := &ctrlpb.StatusReply{
		Version: s.cfg.Version, UptimeMs: uint64(time.Since(s.started).Milliseconds()), Devices: s.devices.attrs(&s.cfg, p),
		Workers: uint32(s.engine.Workers()), Clients: uint32(len(sessions)), Pid: uint32(os.Getpid()),
	}
	r.Device = r.Devices[0]
	for _, d := range s.devices {
		if d.detached {
			r.Detached = printable.Error(d.down)
		}
	}
	seen := make(map[*session]bool, len(sessions))
	for _, o := range sessions {
		seen[o] = true
		r.Pds += uint32(o.own[resPDs])
		r.Mrs += uint32(o.own[resMRs])
		r.Mws += uint32(o.own[resMWs])
		r.Cqs += uint32(o.own[resCQs])
		r.Qps += uint32(o.own[resQPs])
		r.Listens += uint32(o.own[resListens])
		r.Registered += o.own[resRegistered]
	}
	for _, cn := range s.conns {
		if seen[cn.sess] {
			r.Conns++
		}
	}
	return r
}

// page returns up to n of the items, which it may change, that follow after, in the order of key. more reports whether
// others follow them.
func page[T any](items []T, key func(T) uint32, after uint32, n int) (out []T, more bool) {
	items = slices.DeleteFunc(items, func(t T) bool { return key(t) <= after })
	slices.SortFunc(items, func(a, b T) int { return cmp.Compare(key(a), key(b)) })
	return items[:min(len(items), n)], len(items) > n
}

// pageOf returns a page of the objects in a map of each session that c may see. key is that of page.
func pageOf[T any](c *session, of func(*session) map[uint32]T, key func(T) uint32, after uint32) ([]T, bool) {
	var all []T
	for _, o := range c.visible() {
		all = append(all, values(of(o))...)
	}
	return page(all, key, after, pageSize)
}

func (c *session) listQPs(r *ctrlpb.ListQPs, reply *ctrlpb.Reply) error {
	s := c.srv
	qps, more, err := c.pageOfQPs(r)
	if err != nil {
		return err
	}
	// A worker must not spend a turn on connections that are not listed.
	s.mu.Lock()
	ids := []dataplane.ConnID{}
	for _, q := range qps {
		if q.conn != nil && q.conn.id != 0 {
			ids = append(ids, q.conn.id)
		}
	}
	s.mu.Unlock()
	infos := make(map[*dataplane.QPBinding]dataplane.ConnInfo)
	conns, silent := s.engine.QueryConns(ids)
	for _, ci := range conns {
		if ci.QP != nil {
			infos[ci.QP] = ci
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	list := &ctrlpb.QPList{More: more}
	for _, q := range qps {
		list.Qps = append(list.Qps, q.info(infos, silent))
	}
	reply.Body = &ctrlpb.Reply_Qps{Qps: list}
	return nil
}

// pageOfQPs returns the queue pairs that r asks for, as many as fit in a reply.
func (c *session) pageOfQPs(r *ctrlpb.ListQPs) (qps []*qp, more bool, err error) {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	for _, o := range c.visible() {
		for _, q := range o.qps {
			if r.Qp == 0 || r.Qp == q.num {
				qps = append(qps, q)
			}
		}
	}
	if r.Qp != 0 && len(qps) == 0 {
		return nil, false, noQP(r.Qp)
	}
	qps, more = page(qps, func(q *qp) uint32 { return q.num }, r.After, longPage)
	return qps, more, nil
}

func (q *qp) srqHandle() uint32 {
	if q.srq == nil {
		return 0
	}
	return q.srq.handle
}

func (q *qp) info(conns map[*dataplane.QPBinding]dataplane.ConnInfo, silent []int) *ctrlpb.QPInfo {
	i := &ctrlpb.QPInfo{
		Qp: q.num, Client: q.sess.id, Uid: q.sess.cred.Uid, Pid: uint32(q.sess.cred.Pid), State: "IDLE",
		Pd: q.pd.handle, SendCq: q.sendCQ.handle, RecvCq: q.recvCQ.handle, SqDepth: uint32(q.sqDepth), RqDepth: uint32(q.rqDepth),
		MaxSge: uint32(q.maxSGE), Srq: q.srqHandle(), MaxInline: uint32(q.maxInline), SigAll: q.sigAll,
	}
	c := q.conn
	switch {
	case c == nil && q.used:
		i.State = "ERROR"
	case c == nil:
	default:
		i.Local, i.Remote, i.Worker = c.local.String(), c.remote.String(), uint32(c.worker)
		i.Device = q.sess.srv.devices.of(c, q.sess.srv.engine).name()
		switch c.state {
		case connUp:
			i.State = "RTS"
			i.Negotiated = negotiated(&c.params)
		case connClosing:
			i.State = "CLOSING"
			i.Negotiated = negotiated(&c.params)
		default:
			i.State = "CONNECTING"
		}
		if ci, ok := conns[q.binding]; ok {
			if a := ci.SCTP; a != nil {
				i.SctpState = a.State.String()
				i.Sctp = appendCounters(appendCounters(appendCounters(nil, "", a.Stats), "path_", a.Path), "ddp_", a.Sessions)
			} else {
				i.TcpState = ci.State.String()
				i.Tcp = appendCounters(nil, "", ci.TCP)
			}
			i.Rdmap = appendCounters(nil, "", ci.RDMAP)
			i.Verbs = appendCounters(nil, "", ci.Verbs)
		} else {
			i.Silent = slices.Contains(silent, c.worker)
		}
	}
	return i
}

func (c *session) listMRs(r *ctrlpb.ListMRs, reply *ctrlpb.Reply) error {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	all, more := pageOf(c, func(o *session) map[uint32]*mr { return o.mrs },
		func(m *mr) uint32 { return m.index }, r.After)
	list := &ctrlpb.MRList{More: more}
	for _, m := range all {
		list.Mrs = append(list.Mrs, &ctrlpb.MRInfo{
			Client: m.sess.id, Uid: m.sess.cred.Uid, Mr: m.handle, Pd: m.pd.handle, Base: m.region.Base(),
			Length: m.length, Access: uint32(m.region.Access()), Index: m.index, Far: m.mem == nil,
		})
	}
	reply.Body = &ctrlpb.Reply_Mrs{Mrs: list}
	return nil
}

func (c *session) listListens(r *ctrlpb.ListListens, reply *ctrlpb.Reply) error {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	all, more := pageOf(c, func(o *session) map[uint32]*listener { return o.listens },
		func(l *listener) uint32 { return l.index }, r.After)
	list := &ctrlpb.ListenList{More: more}
	for _, l := range all {
		list.Listens = append(list.Listens, &ctrlpb.ListenInfo{
			Client: l.sess.id, Uid: l.sess.cred.Uid, Pid: uint32(l.sess.cred.Pid), Listen: l.handle, Address: l.claim.addr.String(),
			Backlog: uint32(l.backlog), Waiting: uint32(l.waiting), Accepted: l.accepted, Rejected: l.rejected, Dropped: l.dropped, Index: l.index,
			Device: l.on.name(),
		})
	}
	reply.Body = &ctrlpb.Reply_Listens{Listens: list}
	return nil
}

func (c *session) listClients(r *ctrlpb.ListClients, reply *ctrlpb.Reply) error {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	all, more := page(c.visible(), func(o *session) uint32 { return o.id }, r.After, pageSize)
	list := &ctrlpb.ClientList{More: more}
	for _, o := range all {
		u := &o.own
		list.Clients = append(list.Clients, &ctrlpb.ClientInfo{
			Client: o.id, Uid: o.cred.Uid, Gid: o.cred.Gid, Pid: uint32(o.cred.Pid), Name: o.name,
			Pds: uint32(u[resPDs]), Mrs: uint32(u[resMRs]), Mws: uint32(u[resMWs]), Cqs: uint32(u[resCQs]), Qps: uint32(u[resQPs]),
			Listens: uint32(u[resListens]), Registered: u[resRegistered],
			ConnectedMs: uint64(time.Since(o.started).Milliseconds()), Requests: o.requests.Load(), Errors: o.errors.Load(),
		})
	}
	reply.Body = &ctrlpb.Reply_Clients{Clients: list}
	return nil
}

func (c *session) queryStats(reply *ctrlpb.Reply) error {
	reply.Body = &ctrlpb.Reply_Stats{Stats: &ctrlpb.StatsReply{Counters: c.srv.Counters()}}
	return nil
}

// Counters returns the counters of the control plane ("ctrl."), of the workers ("engine."), of
// their links ("link."), of reassembly ("fragments."), of SCTP ("sctp.") and of the XDP program
// ("xdp."), each summed over all workers. docs/metrics.md describes them.
func (s *Server) Counters() []*ctrlpb.Counter {
	k := &s.counters
	s.mu.Lock()
	clients, conns, ports, timeWait := len(s.sessions), len(s.conns), len(s.claims.byAddr), s.portsInTimeWait()
	var detached uint64
	for _, d := range s.devices {
		if d.detached {
			detached++
		}
	}
	s.mu.Unlock()
	out := []*ctrlpb.Counter{
		{Name: "ctrl.clients", Value: uint64(clients)},
		{Name: "ctrl.conns", Value: uint64(conns)},
		{Name: "ctrl.ports", Value: uint64(ports)}, // includes TIME-WAIT
		{Name: "ctrl.ports_time_wait", Value: uint64(timeWait)},
		{Name: "ctrl.requests", Value: k.requests.Load()},
		{Name: "ctrl.request_errors", Value: k.errors.Load()},
		{Name: "ctrl.clients_cut_off", Value: k.cutOff.Load()},
		{Name: "ctrl.client_faults", Value: k.faults.Load()},
		{Name: "ctrl.connect_requests", Value: k.connRequests.Load()},
		{Name: "ctrl.established", Value: k.established.Load()},
		{Name: "ctrl.rejected", Value: k.rejected.Load()},
		{Name: "ctrl.startup_failed", Value: k.startupFailed.Load()},
		{Name: "ctrl.startup_timeouts", Value: k.startupTimeout.Load()},
		{Name: "ctrl.startups_evicted", Value: k.startupsEvicted.Load()},
		{Name: "ctrl.peers_denied", Value: k.peersDenied.Load()},
		{Name: "ctrl.connects_denied", Value: k.connectsDenied.Load()},
		{Name: "ctrl.program_detached", Value: detached},
		{Name: "ctrl.program_detachments", Value: k.detached.Load()},
		{Name: "ctrl.fallbacks", Value: k.fallbacks.Load()},
	}
	sums := make(map[string]*ctrlpb.Counter)
	add := func(all []*ctrlpb.Counter) {
		for _, k := range all {
			if sum := sums[k.Name]; sum != nil {
				sum.Value += k.Value
				continue
			}
			sums[k.Name] = k
			out = append(out, k)
		}
	}
	for _, d := range s.devices {
		if d.Steering == nil {
			continue
		}
		if k, err := d.Steering.Counters(); err == nil {
			add(appendCounters(nil, "xdp.", k))
		}
	}
	workers, _ := s.engine.Stats()
	for _, st := range workers {
		all := appendCounters(appendCounters(nil, "engine.", st), "link.", st.Link)
		all = appendCounters(appendCounters(all, "sctp.", st.SCTP), "sctp.", st.SCTP.Assoc)
		all = appendCounters(all, "fragments.", st.Fragments)
		add(appendCounters(appendCounters(all, "sctp.ddp_", st.SCTP.Sessions), "sctp.listen_", st.SCTP.Listeners))
	}
	return out
}

// appendCounters appends the integer fields of the struct v, with their names in snake case.
// Durations are in nanoseconds and get the suffix _ns, true is 1, and embedded structs are
// flattened.
func appendCounters(out []*ctrlpb.Counter, prefix string, v any) []*ctrlpb.Counter {
	rv := reflect.ValueOf(v)
	if rv.Kind() == reflect.Pointer {
		rv = rv.Elem()
	}
	if rv.Kind() != reflect.Struct {
		return out
	}
	for i := range rv.NumField() {
		f, name := rv.Field(i), rv.Type().Field(i).Name
		if !unicode.IsUpper(rune(name[0])) {
			continue
		}
		switch {
		case rv.Type().Field(i).Anonymous:
			out = appendCounters(out, prefix, f.Interface())
		case f.Type() == reflect.TypeFor[time.Duration]():
			out = append(out, &ctrlpb.Counter{Name: prefix + snake(name) + "_ns", Value: uint64(max(f.Int(), 0))})
		case f.Kind() == reflect.Bool:
			n := uint64(0)
			if f.Bool() {
				n = 1
			}
			out = append(out, &ctrlpb.Counter{Name: prefix + snake(name), Value: n})
		case f.CanUint():
			out = append(out, &ctrlpb.Counter{Name: prefix + snake(name), Value: f.Uint()})
		case f.CanInt():
			out = append(out, &ctrlpb.Counter{Name: prefix + snake(name), Value: uint64(max(f.Int(), 0))})
		}
	}
	return out
}

// snake turns RxFPDUsEarly into rx_fpdus_early.
func snake(s string) string {
	var b strings.Builder
	for i, r := range s {
		if unicode.IsUpper(r) && i > 0 {
			prevLower := unicode.IsLower(rune(s[i-1])) || unicode.IsDigit(rune(s[i-1]))
			nextLower := i+1 < len(s) && unicode.IsLower(rune(s[i+1])) && !(s[i+1] == 's' && (i+2 == len(s) || unicode.IsUpper(rune(s[i+2]))))
			if prevLower || unicode.IsUpper(rune(s[i-1])) && nextLower {
				b.WriteByte('_')
			}
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

func (c *session) adminDisconnect(r *ctrlpb.AdminDisconnect) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	q, err := c.visibleQP(r.Qp)
	if err != nil {
		return err
	}
	return s.disconnectQP(q, r.Abort, "by iwarpctl disconnect")
}
