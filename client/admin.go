package iwarp

import (
	"context"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
)

// Admin queries the state of the daemon: the objects of this user, or those of all users for root
// and administrators.
type Admin struct{ d *Device }

// Admin returns an Admin for the Device's daemon.
func (d *Device) Admin() *Admin { return &Admin{d} }

func (a *Admin) ask(ctx context.Context, op string, req *ctrlpb.Request) (*ctrlpb.Reply, error) {
	ans, err := a.d.call(ctx, op, req, -1)
	if err != nil {
		return nil, err
	}
	seqpacket.CloseAll(ans.fds)
	return ans.reply, nil
}

// list queries all items of a list, page by page. request returns the request for the items after the
// one with the key after, and page the items of a reply and whether there are more.
func list[T any](ctx context.Context, a *Admin, op string, request func(after uint32) *ctrlpb.Request, page func(*ctrlpb.Reply) (items []T, more bool), key func(T) uint32) (all []T, err error) {
	for after := uint32(0); ; {
		r, err := a.ask(ctx, op, request(after))
		if err != nil {
			return nil, err
		}
		items, more := page(r)
		all = append(all, items...)
		if !more || len(items) == 0 {
			return all, nil
		}
		after = key(items[len(items)-1])
	}
}

// Status returns the state of the daemon.
func (a *Admin) Status(ctx context.Context) (*ctrlpb.StatusReply, error) {
	r, err := a.ask(ctx, "query status", &ctrlpb.Request{Body: &ctrlpb.Request_QueryStatus{QueryStatus: &ctrlpb.QueryStatus{}}})
	s := r.GetStatus()
	if s != nil {
		s.Devices = devices(s.Device, s.Devices)
	}
	return s, err
}

// Stats returns the counters of the daemon.
func (a *Admin) Stats(ctx context.Context) ([]*ctrlpb.Counter, error) {
	r, err := a.ask(ctx, "query stats", &ctrlpb.Request{Body: &ctrlpb.Request_QueryStats{QueryStats: &ctrlpb.QueryStats{}}})
	return r.GetStats().GetCounters(), err
}

// QPs returns the queue pairs, with TCP and RDMAP counters of those that are
// connected.
func (a *Admin) QPs(ctx context.Context) ([]*ctrlpb.QPInfo, error) {
	return list(ctx, a, "list queue pairs", func(after uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_ListQps{ListQps: &ctrlpb.ListQPs{After: after}}}
	}, func(r *ctrlpb.Reply) ([]*ctrlpb.QPInfo, bool) {
		return r.GetQps().GetQps(), r.GetQps().GetMore()
	}, func(i *ctrlpb.QPInfo) uint32 { return i.Qp })
}

// QP returns one queue pair.
func (a *Admin) QP(ctx context.Context, num uint32) (*ctrlpb.QPInfo, error) {
	r, err := a.ask(ctx, "query queue pair", &ctrlpb.Request{Body: &ctrlpb.Request_ListQps{ListQps: &ctrlpb.ListQPs{Qp: num}}})
	if err != nil {
		return nil, err
	}
	if qps := r.GetQps().GetQps(); len(qps) > 0 {
		return qps[0], nil
	}
	return nil, &Error{"query queue pair", ctrlpb.Code_CODE_NO_OBJECT, "no such queue pair"}
}

// MRs returns the memory regions.
func (a *Admin) MRs(ctx context.Context) ([]*ctrlpb.MRInfo, error) {
	return list(ctx, a, "list memory regions", func(after uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_ListMrs{ListMrs: &ctrlpb.ListMRs{After: after}}}
	}, func(r *ctrlpb.Reply) ([]*ctrlpb.MRInfo, bool) {
		return r.GetMrs().GetMrs(), r.GetMrs().GetMore()
	}, func(i *ctrlpb.MRInfo) uint32 { return i.Index })
}

// Listens returns the listeners.
func (a *Admin) Listens(ctx context.Context) ([]*ctrlpb.ListenInfo, error) {
	return list(ctx, a, "list listeners", func(after uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_ListListens{ListListens: &ctrlpb.ListListens{After: after}}}
	}, func(r *ctrlpb.Reply) ([]*ctrlpb.ListenInfo, bool) {
		return r.GetListens().GetListens(), r.GetListens().GetMore()
	}, func(i *ctrlpb.ListenInfo) uint32 { return i.Index })
}

// Clients returns the clients.
func (a *Admin) Clients(ctx context.Context) ([]*ctrlpb.ClientInfo, error) {
	return list(ctx, a, "list clients", func(after uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_ListClients{ListClients: &ctrlpb.ListClients{After: after}}}
	}, func(r *ctrlpb.Reply) ([]*ctrlpb.ClientInfo, bool) {
		return r.GetClients().GetClients(), r.GetClients().GetMore()
	}, func(i *ctrlpb.ClientInfo) uint32 { return i.Client })
}

// Quotas returns the usage and the limits of each user.
func (a *Admin) Quotas(ctx context.Context) ([]*ctrlpb.UserQuotas, error) {
	return list(ctx, a, "list quotas", func(after uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_ListQuotas{ListQuotas: &ctrlpb.ListQuotas{After: after}}}
	}, func(r *ctrlpb.Reply) ([]*ctrlpb.UserQuotas, bool) {
		return r.GetQuotas().GetUsers(), r.GetQuotas().GetMore()
	}, func(i *ctrlpb.UserQuotas) uint32 { return i.Uid + 1 })
}

// Disconnect closes the connection of a queue pair, which may belong to another client.
func (a *Admin) Disconnect(ctx context.Context, qp uint32, abort bool) error {
	_, err := a.ask(ctx, "disconnect", &ctrlpb.Request{Body: &ctrlpb.Request_AdminDisconnect{AdminDisconnect: &ctrlpb.AdminDisconnect{Qp: qp, Abort: abort}}})
	return err
}

// CQs returns the completion queues.
func (a *Admin) CQs(ctx context.Context) ([]*ctrlpb.CQInfo, error) {
	return list(ctx, a, "list completion queues", func(after uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_ListCqs{ListCqs: &ctrlpb.ListCQs{After: after}}}
	}, func(r *ctrlpb.Reply) ([]*ctrlpb.CQInfo, bool) {
		return r.GetCqs().GetCqs(), r.GetCqs().GetMore()
	}, func(i *ctrlpb.CQInfo) uint32 { return i.Index })
}

// SRQs returns the shared receive queues.
func (a *Admin) SRQs(ctx context.Context) ([]*ctrlpb.SRQInfo, error) {
	return list(ctx, a, "list shared receive queues", func(after uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_ListSrqs{ListSrqs: &ctrlpb.ListSRQs{After: after}}}
	}, func(r *ctrlpb.Reply) ([]*ctrlpb.SRQInfo, bool) {
		return r.GetSrqs().GetSrqs(), r.GetSrqs().GetMore()
	}, func(i *ctrlpb.SRQInfo) uint32 { return i.Index })
}
