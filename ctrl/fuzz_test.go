package ctrl

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
)

// FuzzRequests sends the packets of a hostile client: each is taken from the input after a length byte. The server
// must not panic and must keep nothing when the client is gone.
func FuzzRequests(f *testing.F) {
	add := func(reqs ...*ctrlpb.Request) {
		var b []byte
		for i, r := range reqs {
			r.Id = uint64(i + 1)
			p, err := proto.Marshal(r)
			if err != nil || len(p) > 255 {
				f.Fatal(err, len(p))
			}
			b = append(append(b, byte(len(p))), p...)
		}
		f.Add(b)
	}
	pd := &ctrlpb.Request{Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}}
	cq := &ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 8}}}
	add(pd, reqMR(1, 4096), &ctrlpb.Request{Body: &ctrlpb.Request_DeregisterMr{DeregisterMr: &ctrlpb.DeregisterMR{Mr: 2}}})
	add(pd, cq, reqQP(1, 2), reqConnect(1, "10.0.0.2:7"), &ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: 1}}})
	add(pd, cq, reqQP(1, 2), reqListen("", 7174), &ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: &ctrlpb.Accept{Conn: 4, Qp: 1}}})
	add(&ctrlpb.Request{Body: &ctrlpb.Request_CreateChannel{CreateChannel: &ctrlpb.CreateChannel{}}},
		&ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 8, Channel: 1}}},
		&ctrlpb.Request{Body: &ctrlpb.Request_DestroyChannel{DestroyChannel: &ctrlpb.DestroyChannel{Channel: 1}}})
	add(reqListen("10.0.0.1", 0), &ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: 1}}})
	add(&ctrlpb.Request{Body: &ctrlpb.Request_QueryStatus{QueryStatus: &ctrlpb.QueryStatus{}}},
		&ctrlpb.Request{Body: &ctrlpb.Request_ListQps{ListQps: &ctrlpb.ListQPs{}}},
		&ctrlpb.Request{Body: &ctrlpb.Request_ListClients{ListClients: &ctrlpb.ListClients{After: 1 << 31}}},
		&ctrlpb.Request{Body: &ctrlpb.Request_AdminDisconnect{AdminDisconnect: &ctrlpb.AdminDisconnect{Qp: 1}}},
		&ctrlpb.Request{Body: &ctrlpb.Request_SetDscp{SetDscp: &ctrlpb.SetDSCP{Qp: 1, Dscp: 46}}})
	f.Add([]byte{3, 8, 1, 0x12, 0})

	h := newHarness(f, Config{Limits: Limits{QueueDepth: 64, QPs: 4, CQs: 4, MRs: 4, Registered: 1 << 20}})
	go func() { // drains the calls
		for range h.e.calls {
		}
	}()
	f.Fuzz(func(t *testing.T, data []byte) {
		fds := socketpair(t)
		h.mu.Lock()
		before := h.lastID
		h.mu.Unlock()
		if err := h.ServeConn(fds[0]); err != nil {
			t.Fatal(err)
		}
		for began := false; !began; runtime.Gosched() { // otherwise settled might look before it
			h.mu.Lock()
			began = h.lastID != before
			h.mu.Unlock()
		}
		defer func() {
			unix.Close(fds[1])
			h.settled(t)
			h.mu.Lock()
			defer h.mu.Unlock()
			if n := len(h.qps) + len(h.usage) + len(h.listeners) + len(h.conns) + len(h.pending); n != 0 || h.table.Len() != 0 {
				t.Errorf("%d entries and %d regions left behind", n, h.table.Len())
			}
		}()
		mem := memfd(t, 4096)
		hello := marshal(t, &ctrlpb.Request{Id: 1, Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
		if len(data) == 0 || data[0] != 0 { // else without a greeting
			if err := unix.Sendmsg(fds[1], hello, nil, nil, 0); err != nil {
				t.Fatal(err)
			}
		}
		for len(data) > 0 {
			n := min(int(data[0]), len(data)-1)
			p := data[1 : 1+n]
			data = data[1+n:]
			if n == 0 {
				// A connection arrives, in case the client listens.
				h.e.mu.Lock()
				id := h.e.add(peerA, peerA)
				lid := dataplane.ListenerID(h.e.next - 1)
				h.e.mu.Unlock()
				h.OnEvent(dataplane.Event{Kind: dataplane.EventAccepted, Conn: id, Listener: lid, Flow: flowOf(peerA, peerA)})
				h.OnEvent(dataplane.Event{Kind: dataplane.EventData, Conn: id, Data: append([]byte("MPA ID Req Frame\x00\x01\x00"), 0)})
				continue
			}
			if unix.Sendmsg(fds[1], p, unix.UnixRights(mem), nil, 0) != nil {
				return // cut off
			}
		}
	})
}
