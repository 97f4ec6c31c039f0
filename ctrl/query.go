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

// viewer answers requests of a client about the daemon and its objects: those of its user or, for an administrator, of
// all.
type viewer struct {
	*Server
	as *tenant
}

func (c *session) viewer() viewer { return viewer{c.srv, &c.tenant} }

// query serves the requests of tools that look at the daemon. Each may hold mu for milliseconds, so that a user
// has one at a time: otherwise those of many clients would all come before the request of another user.
func (v viewer) query(req *ctrlpb.Request, reply *ctrlpb.Reply) error {
	v.as.use.slow.Lock()
	defer v.as.use.slow.Unlock()
	switch b := req.Body.(type) {
	case *ctrlpb.Request_ListCqs:
		reply.Body = &ctrlpb.Reply_Cqs{Cqs: v.listCQs(b.ListCqs.After)}
	case *ctrlpb.Request_ListSrqs:
		reply.Body = &ctrlpb.Reply_Srqs{Srqs: v.listSRQs(b.ListSrqs.After)}
	case *ctrlpb.Request_QueryStatus:
		reply.Body = &ctrlpb.Reply_Status{Status: v.queryStatus()}
	case *ctrlpb.Request_ListQps:
		list, err := v.listQPs(b.ListQps)
		reply.Body = &ctrlpb.Reply_Qps{Qps: list}
		return err
	case *ctrlpb.Request_ListMrs:
		reply.Body = &ctrlpb.Reply_Mrs{Mrs: v.listMRs(b.ListMrs.After)}
	case *ctrlpb.Request_ListListens:
		reply.Body = &ctrlpb.Reply_Listens{Listens: v.listListens(b.ListListens.After)}
	case *ctrlpb.Request_ListClients:
		reply.Body = &ctrlpb.Reply_Clients{Clients: v.listClients(b.ListClients.After)}
	case *ctrlpb.Request_ListQuotas:
		reply.Body = &ctrlpb.Reply_Quotas{Quotas: v.listQuotas(b.ListQuotas.After)}
	case *ctrlpb.Request_QueryStats:
		reply.Body = &ctrlpb.Reply_Stats{Stats: &ctrlpb.StatsReply{Counters: v.Counters()}}
	case *ctrlpb.Request_AdminDisconnect:
		return v.disconnect(b.AdminDisconnect)
	default:
		return errorf(invalid, "ctrl: request %d is of a kind that this daemon does not know: update it", req.Id)
	}
	return nil
}

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

// sees reports whether the client may see what uid has.
func (v viewer) sees(uid uint32) bool { return uid == v.as.cred.Uid || v.as.policy().admin }

// visible returns the sessions whose objects the client may list, without those being torn down. Called with mu held.
func (v viewer) visible() []*session {
	return slices.DeleteFunc(v.holding(), func(o *session) bool { return o.dead })
}

// holding returns the sessions that the client may see, including those being torn down, which still hold
// memory and quota. Called with mu held.
func (v viewer) holding() []*session {
	return slices.DeleteFunc(values(v.sessions), func(o *session) bool { return !v.sees(o.cred.Uid) })
}

// qp returns a queue pair that the client may see. Called with mu held.
func (v viewer) qp(num uint32) (*qp, error) {
	q := v.qps[num]
	if q == nil || q.sess.dead || !v.sees(q.sess.cred.Uid) {
		return nil, noQP(num)
	}
	return q, nil
}

// noQP is the error of a query of a queue pair that does not exist, or that the client may not see.
func noQP(num uint32) *Error {
	return errorf(noObject, "ctrl: no queue pair %d: iwarpctl qp list shows those that exist", num)
}

func (v viewer) queryStatus() *ctrlpb.StatusReply {
	silent := v.engine.Silent()
	v.mu.Lock()
	defer v.mu.Unlock()
	r := v.status(v.holding(), v.as.policy())
	for _, w := range silent {
		r.Silent = append(r.Silent, uint32(w))
	}
	return r
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
	if p.admin { // it may quote the configuration
		r.NotReloaded = s.stale
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

// listOf returns the info of a page of the objects in a map of each session that v may see. key is that of page.
func listOf[T, I any](v viewer, of func(*session) map[uint32]T, key func(T) uint32, info func(T) I, after uint32) (list []I, more bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []T
	for _, o := range v.visible() {
		all = append(all, values(of(o))...)
	}
	all, more = page(all, key, after, pageSize)
	for _, o := range all {
		list = append(list, info(o))
	}
	return list, more
}

func (v viewer) listQPs(r *ctrlpb.ListQPs) (*ctrlpb.QPList, error) {
	qps, more, err := v.pageOfQPs(r)
	if err != nil {
		return nil, err
	}
	// A worker must not spend a turn on connections that are not listed.
	v.mu.Lock()
	ids := []dataplane.ConnID{}
	for _, q := range qps {
		if q.conn != nil && q.conn.id != 0 {
			ids = append(ids, q.conn.id)
		}
	}
	v.mu.Unlock()
	infos := make(map[*dataplane.QPBinding]dataplane.ConnInfo)
	conns, silent := v.engine.QueryConns(ids)
	for _, ci := range conns {
		if ci.QP != nil {
			infos[ci.QP] = ci
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	list := &ctrlpb.QPList{More: more}
	for _, q := range qps {
		list.Qps = append(list.Qps, q.info(infos, silent))
	}
	return list, nil
}

// pageOfQPs returns the queue pairs that r asks for, as many as fit in a reply.
func (v viewer) pageOfQPs(r *ctrlpb.ListQPs) (qps []*qp, more bool, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, o := range v.visible() {
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

func (v viewer) listMRs(after uint32) *ctrlpb.MRList {
	mrs, more := listOf(v, func(o *session) map[uint32]*mr { return o.mrs }, func(m *mr) uint32 { return m.index }, (*mr).info, after)
	return &ctrlpb.MRList{Mrs: mrs, More: more}
}

func (m *mr) info() *ctrlpb.MRInfo {
	return &ctrlpb.MRInfo{
		Client: m.sess.id, Uid: m.sess.cred.Uid, Mr: m.handle, Pd: m.pd.handle, Base: m.region.Base(),
		Length: m.length, Access: uint32(m.region.Access()), Index: m.index, Far: m.mem == nil,
	}
}

func (v viewer) listListens(after uint32) *ctrlpb.ListenList {
	listens, more := listOf(v, func(o *session) map[uint32]*listener { return o.listens }, func(l *listener) uint32 { return l.index }, (*listener).info, after)
	return &ctrlpb.ListenList{Listens: listens, More: more}
}

func (l *listener) info() *ctrlpb.ListenInfo {
	return &ctrlpb.ListenInfo{
		Client: l.sess.id, Uid: l.sess.cred.Uid, Pid: uint32(l.sess.cred.Pid), Listen: l.handle, Address: l.claim.addr.String(),
		Backlog: uint32(l.backlog), Waiting: uint32(l.waiting), Accepted: l.accepted, Rejected: l.rejected, Dropped: l.dropped, Index: l.index,
		Device: l.on.name(), Transport: l.transport(),
	}
}

func (v viewer) listClients(after uint32) *ctrlpb.ClientList {
	v.mu.Lock()
	defer v.mu.Unlock()
	all, more := page(v.visible(), func(o *session) uint32 { return o.id }, after, pageSize)
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
	return list
}

// listQuotas returns the usage and the limits of the users that the client may see.
func (v viewer) listQuotas(after uint32) *ctrlpb.QuotaList {
	v.mu.Lock()
	defer v.mu.Unlock()
	type item struct {
		uid    uint32
		limits *Limits
	}
	byUID := make(map[uint32]item)
	for _, o := range v.holding() {
		byUID[o.cred.Uid] = item{o.cred.Uid, &o.policy().limits}
	}
	for uid := range v.usage {
		if _, has := byUID[uid]; !has && v.sees(uid) {
			pol, _ := v.cfg.policyOf(uid, nil, false) // the groups are unknown without a client
			byUID[uid] = item{uid, &pol.limits}
		}
	}
	// A uid can be 0, so keys start at 1.
	all, more := page(values(byUID), func(i item) uint32 { return i.uid + 1 }, after, longPage)
	list := &ctrlpb.QuotaList{More: more}
	for _, i := range all {
		u := &ctrlpb.UserQuotas{Uid: i.uid}
		for r := range numResources {
			d := &quotas[r]
			q := &ctrlpb.Quota{Name: d.name, Limit: d.limit(i.limits), Bytes: d.bytes, Key: d.key}
			if a := v.usage[i.uid]; a != nil {
				q.Used = a.account[r]
				if r == resMessages {
					q.Used = a.unread.Load()
				}
			}
			u.Quotas = append(u.Quotas, q)
		}
		list.Users = append(list.Users, u)
	}
	return list
}

// Counters returns the counters of the control plane ("ctrl."), of the workers ("engine."), of
// their links ("link."), of reassembly ("fragments."), of SCTP ("sctp.") and of the XDP program
// ("xdp."), each summed over all workers. docs/metrics.md describes them.
func (s *Server) Counters() []*ctrlpb.Counter {
	out := s.ownCounters()
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

// ownCounters returns the counters of the control plane.
func (s *Server) ownCounters() []*ctrlpb.Counter {
	k := &s.counters
	s.mu.Lock()
	clients, conns, ports, timeWait := len(s.sessions), len(s.conns), len(s.claims.byAddr), s.portsInTimeWait()
	var detached, notReloaded uint64
	if s.stale != "" {
		notReloaded = 1
	}
	for _, d := range s.devices {
		if d.detached {
			detached++
		}
	}
	s.mu.Unlock()
	return []*ctrlpb.Counter{
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
		{Name: "ctrl.not_reloaded", Value: notReloaded},
		{Name: "ctrl.program_detached", Value: detached},
		{Name: "ctrl.program_detachments", Value: k.detached.Load()},
		{Name: "ctrl.fallbacks", Value: k.fallbacks.Load()},
	}
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

func (v viewer) disconnect(r *ctrlpb.AdminDisconnect) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	q, err := v.qp(r.Qp)
	if err != nil {
		return err
	}
	return v.disconnectQP(q, r.Abort, "by iwarpctl disconnect")
}
