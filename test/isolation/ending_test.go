package isolation

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestListWhileSessionsEnd lists every kind of object while clients with many of them disconnect. No list may touch
// their memory, which is being unmapped.
func TestListWhileSessionsEnd(t *testing.T) {
	w := newWorld(t, ctrl.Limits{})
	var stop atomic.Bool
	var wg sync.WaitGroup
	lists := []*ctrlpb.Request{
		{Body: &ctrlpb.Request_ListSrqs{ListSrqs: &ctrlpb.ListSRQs{}}},
		{Body: &ctrlpb.Request_ListCqs{ListCqs: &ctrlpb.ListCQs{}}},
		{Body: &ctrlpb.Request_ListQps{ListQps: &ctrlpb.ListQPs{}}},
		{Body: &ctrlpb.Request_ListMrs{ListMrs: &ctrlpb.ListMRs{}}},
		{Body: &ctrlpb.Request_ListClients{ListClients: &ctrlpb.ListClients{}}},
		{Body: &ctrlpb.Request_QueryStatus{QueryStatus: &ctrlpb.QueryStatus{}}},
	}
	for i := range 3 {
		r, err := greet(w.socket)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			defer r.close()
			for n := i; !stop.Load(); n++ {
				req := lists[0] // every other time the list that once crashed the daemon
				if n%2 == 0 {
					req = lists[n/2%len(lists)]
				}
				if _, _, err := r.must(proto.CloneOf(req)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	rounds := 10
	if full() {
		rounds = 200
	}
	for range rounds {
		if err := makeAndLeave(w.socket, 60); err != nil {
			t.Error(err)
			break
		}
	}
	stop.Store(true)
	wg.Wait()
	settle(t, "the clients are gone", func() bool { return w.b.Server().Status().Clients == 1 })
}

// makeAndLeave creates n shared receive queues and completion queues, posts a receive to each of the former, and
// disconnects without destroying them.
func makeAndLeave(socket string, n int) (err error) {
	r, err := greet(socket)
	if err != nil {
		return err
	}
	defer r.close()
	rep, _, err := r.must(&ctrlpb.Request{Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}})
	if err != nil {
		return err
	}
	for range n {
		_, fds, err := r.must(&ctrlpb.Request{Body: &ctrlpb.Request_CreateSrq{CreateSrq: &ctrlpb.CreateSRQ{Pd: rep.GetPd().Pd, Depth: 64, MaxSge: 1}}})
		if err != nil {
			return err
		}
		p, err := shm.MapRQ(fds[0])
		if err == nil {
			err = errors.Join(p.Post(&verbs.RecvWR{}), p.Close())
		}
		seqpacket.CloseAll(fds)
		if err != nil {
			return err
		}
		_, fds, err = r.must(&ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 64}}})
		seqpacket.CloseAll(fds)
		if err != nil {
			return err
		}
	}
	return nil
}
