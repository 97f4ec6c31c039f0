package mpa_test

import (
	"fmt"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/mpa"
)

// Both sides of a connection, without a network between them.
func Example() {
	const now clock.Time = 1
	cfg := mpa.DefaultConfig()
	cfg.P2P = true
	cfg.PrivateData = []byte("hello")

	// The Startup Phase.
	a := mpa.NewInitiator(cfg, now)
	b := mpa.NewResponder(mpa.DefaultConfig(), now)
	request, _ := a.PollTransmit()
	b.HandleStream(now, request)
	ev, _ := b.PollEvent() // EventRequest: the ULP decides
	fmt.Printf("%s, IRD %d, ORD %d\n", ev.Frame.PrivateData, ev.Frame.IRD, ev.Frame.ORD)
	b.Accept([]byte("come in"), 8, 8)
	reply, _ := b.PollTransmit()
	a.HandleStream(now, reply)
	ev, _ = a.PollEvent() // EventAccepted
	p := a.Result()
	fmt.Printf("%s, CRC %v, IRD %d, ORD %d, RTR %v\n", ev.Frame.PrivateData, p.CRC, p.IRD, p.ORD, p.RTR)

	// Full Operation, from the initiator to the responder.
	const first = 4711 // sequence number after the Request
	var tx mpa.Framer
	tx.Init(p.CRC, p.SendMarkers, first)
	segment := make([]byte, tx.Size(first, 11))
	tx.Begin(segment, first, 11)
	tx.Write([]byte("a ULPDU"))
	tx.Write([]byte(" ..."))
	n := tx.End()

	var rx mpa.Receiver
	rx.Init(b.Result().CRC, b.Result().RecvMarkers, first)
	rx.HandleStream(segment[:n])
	var f mpa.FPDU
	for {
		ok, err := rx.PollFPDU(&f)
		if !ok {
			fmt.Println("error:", err)
			break
		}
		fmt.Printf("%q at %d\n", f.ULPDU.B, f.Seq)
	}
	// Output:
	// hello, IRD 16, ORD 16
	// come in, CRC true, IRD 16, ORD 8, RTR write
	// "a ULPDU ..." at 4711
	// error: <nil>
}
