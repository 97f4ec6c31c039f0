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

// Status returns the state of the daemon.
func (a *Admin) Status(ctx context.Context) (*ctrlpb.StatusReply, error) {
	r, err := a.ask(ctx, "query status", &ctrlpb.Request{Body: &ctrlpb.Request_QueryStatus{QueryStatus: &ctrlpb.QueryStatus{}}})
	return r.GetStatus(), err
}

// Stats returns the counters of the daemon.
func (a *Admin) Stats(ctx context.Context) ([]*ctrlpb.Counter, error) {
	r, err := a.ask(ctx, "query stats", &ctrlpb.Request{Body: &ctrlpb.Request_QueryStats{QueryStats: &ctrlpb.QueryStats{}}})
	return r.GetStats().GetCounters(), err
}

// QPs returns the queue pairs, with TCP and RDMAP counters of those that are
// connected.
func (a *Admin) QPs(ctx context.Context) ([]*ctrlpb.QPInfo, error) {
	var all []*ctrlpb.QPInfo
	for after := uint32(0); ; {
		r, err := a.ask(ctx, "list queue pairs", &ctrlpb.Request{Body: &ctrlpb.Request_ListQps{ListQps: &ctrlpb.ListQPs{After: after}}})
		if err != nil {
			return nil, err
		}
		page := r.GetQps().GetQps()
		all = append(all, page...)
		if !r.GetQps().GetMore() || len(page) == 0 {
			return all, nil
		}
		after = page[len(page)-1].Qp
	}
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
	var all []*ctrlpb.MRInfo
	for after := uint32(0); ; {
		r, err := a.ask(ctx, "list memory regions", &ctrlpb.Request{Body: &ctrlpb.Request_ListMrs{ListMrs: &ctrlpb.ListMRs{After: after}}})
		if err != nil {
			return nil, err
		}
		page := r.GetMrs().GetMrs()
		all = append(all, page...)
		if !r.GetMrs().GetMore() || len(page) == 0 {
			return all, nil
		}
		after = page[len(page)-1].Index
	}
}

// Listens returns the listeners.
func (a *Admin) Listens(ctx context.Context) ([]*ctrlpb.ListenInfo, error) {
	var all []*ctrlpb.ListenInfo
	for after := uint32(0); ; {
		r, err := a.ask(ctx, "list listeners", &ctrlpb.Request{Body: &ctrlpb.Request_ListListens{ListListens: &ctrlpb.ListListens{After: after}}})
		if err != nil {
			return nil, err
		}
		page := r.GetListens().GetListens()
		all = append(all, page...)
		if !r.GetListens().GetMore() || len(page) == 0 {
			return all, nil
		}
		after = page[len(page)-1].Index
	}
}

// Clients returns the clients.
func (a *Admin) Clients(ctx context.Context) ([]*ctrlpb.ClientInfo, error) {
	var all []*ctrlpb.ClientInfo
	for after := uint32(0); ; {
		r, err := a.ask(ctx, "list clients", &ctrlpb.Request{Body: &ctrlpb.Request_ListClients{ListClients: &ctrlpb.ListClients{After: after}}})
		if err != nil {
			return nil, err
		}
		page := r.GetClients().GetClients()
		all = append(all, page...)
		if !r.GetClients().GetMore() || len(page) == 0 {
			return all, nil
		}
		after = page[len(page)-1].Client
	}
}

// Quotas returns the usage and the limits of each user.
func (a *Admin) Quotas(ctx context.Context) ([]*ctrlpb.UserQuotas, error) {
	var all []*ctrlpb.UserQuotas
	for after := uint32(0); ; {
		r, err := a.ask(ctx, "list quotas", &ctrlpb.Request{Body: &ctrlpb.Request_ListQuotas{ListQuotas: &ctrlpb.ListQuotas{After: after}}})
		if err != nil {
			return nil, err
		}
		page := r.GetQuotas().GetUsers()
		all = append(all, page...)
		if !r.GetQuotas().GetMore() || len(page) == 0 {
			return all, nil
		}
		after = page[len(page)-1].Uid + 1
	}
}

// Disconnect closes the connection of a queue pair, which may belong to another client.
func (a *Admin) Disconnect(ctx context.Context, qp uint32, abort bool) error {
	_, err := a.ask(ctx, "disconnect", &ctrlpb.Request{Body: &ctrlpb.Request_AdminDisconnect{AdminDisconnect: &ctrlpb.AdminDisconnect{Qp: qp, Abort: abort}}})
	return err
}

// CQs returns the completion queues.
func (a *Admin) CQs(ctx context.Context) ([]*ctrlpb.CQInfo, error) {
	var all []*ctrlpb.CQInfo
	for after := uint32(0); ; {
		r, err := a.ask(ctx, "list completion queues", &ctrlpb.Request{Body: &ctrlpb.Request_ListCqs{ListCqs: &ctrlpb.ListCQs{After: after}}})
		if err != nil {
			return nil, err
		}
		page := r.GetCqs().GetCqs()
		all = append(all, page...)
		if !r.GetCqs().GetMore() || len(page) == 0 {
			return all, nil
		}
		after = page[len(page)-1].Index
	}
}

// SRQs returns the shared receive queues.
func (a *Admin) SRQs(ctx context.Context) ([]*ctrlpb.SRQInfo, error) {
	var all []*ctrlpb.SRQInfo
	for after := uint32(0); ; {
		r, err := a.ask(ctx, "list shared receive queues", &ctrlpb.Request{Body: &ctrlpb.Request_ListSrqs{ListSrqs: &ctrlpb.ListSRQs{After: after}}})
		if err != nil {
			return nil, err
		}
		page := r.GetSrqs().GetSrqs()
		all = append(all, page...)
		if !r.GetSrqs().GetMore() || len(page) == 0 {
			return all, nil
		}
		after = page[len(page)-1].Index
	}
}
