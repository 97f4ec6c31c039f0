package iwarp_test

import (
	"context"
	"fmt"
	"log"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

// The verbs level: a queue pair, its completion queue, and work requests.
func ExampleQP_PostSend() {
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx := context.Background()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}

	// One QP on each device, with a CQ for both of its queues.
	queues := func(d *iwarp.Device) (*iwarp.QP, *iwarp.CQ, *iwarp.MR) {
		pd, err := d.AllocPD(ctx)
		check(err)
		cq, err := d.CreateCQ(ctx, 64)
		check(err)
		qp, err := d.CreateQP(ctx, iwarp.QPConfig{PD: pd, SendCQ: cq, RecvCQ: cq, SendDepth: 16, RecvDepth: 16})
		check(err)
		mr, err := pd.Alloc(ctx, 4096, iwarp.AccessLocalWrite)
		check(err)
		return qp, cq, mr
	}
	qpA, cqA, mrA := queues(a.Device())
	qpB, cqB, mrB := queues(b.Device())
	check(qpB.PostRecv(&iwarp.RecvWR{ID: 7, SGEs: []iwarp.SGE{mrB.SGE(0, 4096)}}))

	l, err := b.Device().Listen(ctx, ":7174", nil)
	check(err)
	accepted := make(chan error, 1)
	go func() {
		req, err := l.Request(ctx)
		check(err)
		_, err = req.Accept(ctx, qpB, nil)
		accepted <- err
	}()
	_, err = qpA.Connect(ctx, "10.99.0.2:7174", nil)
	check(err)
	check(<-accepted)

	n := copy(mrA.Bytes(), "hello")
	check(qpA.PostSend(&iwarp.SendWR{ID: 1, Op: iwarp.OpSend, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{mrA.SGE(0, n)}}))
	wcs := make([]iwarp.WC, 4)
	_, err = cqA.Wait(ctx, wcs)
	check(err)
	fmt.Println(wcs[0].ID, wcs[0].Op, wcs[0].Status)
	_, err = cqB.Wait(ctx, wcs)
	check(err)
	fmt.Printf("%d %v %v %q\n", wcs[0].ID, wcs[0].Op, wcs[0].Status, mrB.Bytes()[:wcs[0].Len])
	// Output:
	// 1 SEND success
	// 7 RECV success "hello"
}

// Two programs exchange a greeting over the TCP connection and then start MPA on it.
func ExampleQP_ConnectStream() {
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx := context.Background()

	qp := func(n *embed.Node) *iwarp.QP {
		d := n.Device()
		pd, err := d.AllocPD(ctx)
		if err != nil {
			log.Fatal(err)
		}
		cq, err := d.CreateCQ(ctx, 16)
		if err != nil {
			log.Fatal(err)
		}
		q, err := d.CreateQP(ctx, iwarp.QPConfig{PD: pd, SendCQ: cq, RecvCQ: cq})
		if err != nil {
			log.Fatal(err)
		}
		return q
	}
	l, err := b.Device().Listen(ctx, ":7174", &iwarp.Config{Streaming: true})
	if err != nil {
		log.Fatal(err)
	}
	done := make(chan error)
	go func() {
		s, err := l.AcceptStream(ctx)
		if err != nil {
			done <- err
			return
		}
		word := make([]byte, 5)
		if err := s.ReadFull(ctx, word); err != nil { // exactly these bytes, none of MPA's
			done <- err
			return
		}
		fmt.Printf("the peer says %q\n", word)
		req, err := s.Request(ctx)
		if err == nil {
			_, err = req.Accept(ctx, qp(b), nil)
		}
		done <- err
	}()

	q := qp(a)
	s, err := q.ConnectStream(ctx, fmt.Sprintf("%v:7174", b.Addr()), nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := s.Write(ctx, []byte("hello")); err != nil {
		log.Fatal(err)
	}
	info, err := s.StartMPA(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := <-done; err != nil {
		log.Fatal(err)
	}
	fmt.Println("work requests flow to port", info.Remote.Port())
	// Output:
	// the peer says "hello"
	// work requests flow to port 7174
}

// A server posts the receives of all its connections to one shared queue and is notified when few are left.
func ExampleSRQ() {
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx := context.Background()
	d := b.Device()
	pd, err := d.AllocPD(ctx)
	if err != nil {
		log.Fatal(err)
	}
	cq, err := d.CreateCQ(ctx, 64)
	if err != nil {
		log.Fatal(err)
	}
	mem, err := pd.Alloc(ctx, 4096, iwarp.AccessLocalWrite)
	if err != nil {
		log.Fatal(err)
	}
	srq, err := d.CreateSRQ(ctx, iwarp.SRQConfig{PD: pd, Depth: 16, Limit: 4})
	if err != nil {
		log.Fatal(err)
	}
	for i := range 4 {
		if err := srq.PostRecv(&iwarp.RecvWR{ID: uint64(i), SGEs: []iwarp.SGE{mem.SGE(i*1024, 1024)}}); err != nil {
			log.Fatal(err)
		}
	}
	l, err := d.Listen(ctx, ":7174", nil)
	if err != nil {
		log.Fatal(err)
	}
	done := make(chan error)
	go func() {
		q, err := d.CreateQP(ctx, iwarp.QPConfig{PD: pd, SendCQ: cq, RecvCQ: cq, SRQ: srq})
		if err != nil {
			done <- err
			return
		}
		req, err := l.Request(ctx)
		if err == nil {
			_, err = req.Accept(ctx, q, nil)
		}
		done <- err
	}()
	c, err := a.Device().Dial(ctx, fmt.Sprintf("%v:7174", b.Addr()), nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := <-done; err != nil {
		log.Fatal(err)
	}
	if err := c.Send(ctx, []byte("for whoever takes it")); err != nil {
		log.Fatal(err)
	}
	wcs := make([]iwarp.WC, 1)
	if _, err := cq.Wait(ctx, wcs); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("receive %d: %s\n", wcs[0].ID, mem.Bytes()[:wcs[0].Len])
	ev, err := d.AsyncEvent(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(ev.Kind)
	// Output:
	// receive 0: for whoever takes it
	// shared receive queue limit
}
