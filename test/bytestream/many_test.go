package main

import (
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestManyConnections opens thousands of connections between two engines in one process, sends a byte in each direction
// on each, and closes them, three times over: the later ones use again what the first had. It checks that nothing is left of
// them: no connection, timer, frame, slot or goroutine.
func TestManyConnections(t *testing.T) {
	testenv.NoGoroutineLeaks(t)
	conns := testenv.Count(t, "MANY_CONNECTIONS", 500)
	pa, pb, err := link.NewPipe(link.PipeConfig{Slots: 8192, RxFrames: 16384})
	if err != nil {
		t.Fatal(err)
	}
	defer pa.Close()
	defer pb.Close()
	addrs := [2]netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")}
	macs := [2][6]byte{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}}
	o := &options{do: "echo", cc: "cubic", conns: conns, cycles: 3, backlog: 1024, queue: 4096, rcvWindow: 1 << 16, timeWait: 50 * time.Millisecond,
		drain: 2 * time.Minute, timeout: 2 * time.Minute}
	var nodes [2]*node
	for i, l := range []link.Link{pa, pb} {
		res := &hostnet.Static{SrcMAC: macs[i], DstMAC: macs[1-i], MTU: 1500, Addrs: addrs[i : i+1]}
		if nodes[i], err = nodeOver(o, []link.Link{l}, res, nil); err != nil {
			t.Fatal(err)
		}
	}
	at := netip.AddrPortFrom(addrs[1], 7000)
	if err := nodes[1].Listen(at, o.backlog); err != nil {
		t.Fatal(err)
	}
	server, client := &report{}, &report{}
	served := make(chan struct{})
	go func() {
		defer close(served)
		var wg sync.WaitGroup
		defer wg.Wait()
		for i := range conns * o.cycles {
			s, err := nodes[1].Accept()
			if err != nil {
				server.fail(err)
				return
			}
			wg.Go(func() {
				if err := work(o, server, s, 1000+i); err != nil {
					server.fail(err)
				}
			})
		}
	}()
	before := runtime.NumGoroutine()
	if err := hold(o, nodes[0], client, at); err != nil {
		t.Fatal(err)
	}
	<-served
	for i, r := range []*report{client, server} {
		if err := nodes[i].Close(r); err != nil {
			t.Error(err)
		}
		if len(r.Errors) > 0 {
			t.Errorf("node %d: %s", i, strings.Join(r.Errors, "; "))
		}
		if want := conns * o.cycles; r.Done != want || r.Sent != int64(want) || r.Received != int64(want) {
			t.Errorf("node %d: %d connections, %d bytes sent, %d received; want %d of each", i, r.Done, r.Sent, r.Received, want)
		}
		e := r.Engine[0]
		if r.Left != 0 || e.FreeSlots != e.Slots || e.HeldFrames != 0 || e.Timers != 0 {
			t.Errorf("node %d: %d connections, %d slots, %d held frames, %d timers left", i, r.Left, e.Slots-e.FreeSlots, e.HeldFrames, e.Timers)
		}
		t.Logf("node %d: %d opened, %d accepted, %d retransmitted, %d without a slot, %d stateless", i, e.ActiveOpens, e.PassiveOpens, e.TxRetransmits, e.TxNoSlot, e.TxStateless)
	}
	t.Logf("%d connections at once, open after %.2f s (%d goroutines before)", conns, client.OpenSeconds, before)
}
