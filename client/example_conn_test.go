package iwarp_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

// connectPair returns the two ends of a connection between the devices a and b.
func connectPair(ctx context.Context, a, b *iwarp.Device, cfg *iwarp.Config) (client, server *iwarp.Conn, err error) {
	l, err := b.Listen(ctx, ":7174", cfg)
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	accepted := make(chan error, 1)
	go func() {
		var err error
		server, err = l.Accept(ctx)
		accepted <- err
	}()
	if client, err = a.Dial(ctx, "10.99.0.2:7174", cfg); err != nil {
		return nil, nil, err
	}
	if err := <-accepted; err != nil {
		client.Close()
		return nil, nil, err
	}
	return client, server, nil
}

// A server accepts connections until its listener is closed; a client dials it.
// With a daemon on each host, iwarp.Listen and iwarp.Dial take the place of the
// methods of the devices.
func ExampleDial() {
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	l, err := b.Device().Listen(ctx, "10.99.0.2:7174", &iwarp.Config{PrivateData: []byte("welcome")})
	if err != nil {
		log.Fatal(err)
	}
	served := make(chan error, 1)
	go func() {
		for {
			conn, err := l.Accept(ctx)
			if errors.Is(err, iwarp.ErrClosed) {
				served <- nil
				return
			}
			if err != nil {
				served <- err
				return
			}
			fmt.Printf("accepted, request %q\n", conn.Info().PrivateData)
			conn.Close()
		}
	}()

	conn, err := a.Device().Dial(ctx, l.Addr().String(), &iwarp.Config{PrivateData: []byte("hello")})
	if err != nil {
		log.Fatal(err)
	}
	private, remote := conn.Info().PrivateData, conn.Info().Remote
	conn.Close()
	l.Close()
	if err := <-served; err != nil {
		log.Fatal(err)
	}
	fmt.Printf("connected to %v, reply %q\n", remote, private)
	// Output:
	// accepted, request "hello"
	// connected to 10.99.0.2:7174, reply "welcome"
}

// A Send is one message, and one Recv returns it.
func ExampleConn_Send() {
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx := context.Background()
	client, server, err := connectPair(ctx, a.Device(), b.Device(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	defer server.Close()

	for _, s := range []string{"one", "two"} {
		if err := client.Send(ctx, []byte(s)); err != nil {
			log.Fatal(err)
		}
	}
	buf := make([]byte, 1024)
	for range 2 {
		n, err := server.Recv(ctx, buf)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s\n", buf[:n])
	}
	// Output:
	// one
	// two
}

// The server registers memory; the client writes into it and reads it back. The server's program does nothing during
// that.
func ExampleConn_Write() {
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx := context.Background()
	client, server, err := connectPair(ctx, a.Device(), b.Device(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	defer server.Close()

	mem, err := server.Alloc(ctx, 4096, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite|iwarp.AccessRemoteRead)
	if err != nil {
		log.Fatal(err)
	}
	remote := mem.Remote() // a real server sends it to the client in a message

	// The second Write starts at byte 6 of the region.
	if err := client.Write(ctx, remote, []byte("hello ")); err != nil {
		log.Fatal(err)
	}
	if err := client.Write(ctx, remote.At(6, 5), []byte("world")); err != nil {
		log.Fatal(err)
	}
	// When Read returns, the Writes before it have been placed.
	buf := make([]byte, 11)
	if err := client.Read(ctx, remote, buf); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", buf)
	// Output: hello world
}

// FetchAdd and CompareSwap operate on 8 bytes of the peer's memory. Each is atomic with respect to other RDMA atomic
// operations on the same bytes.
func ExampleConn_FetchAdd() {
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx := context.Background()
	client, server, err := connectPair(ctx, a.Device(), b.Device(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	defer server.Close()

	mem, err := server.Alloc(ctx, 4096, iwarp.AccessLocalWrite|iwarp.AccessRemoteAtomic)
	if err != nil {
		log.Fatal(err)
	}
	binary.NativeEndian.PutUint64(mem.Bytes(), 40)
	counter := mem.RemoteAt(0, 8)

	old, err := client.FetchAdd(ctx, counter, 2)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("FetchAdd returned", old)
	// It stores 100 only if the counter is 42.
	if old, err = client.CompareSwap(ctx, counter, 42, 100); err != nil {
		log.Fatal(err)
	}
	fmt.Println("CompareSwap returned", old)
	if old, err = client.FetchAdd(ctx, counter, 0); err != nil {
		log.Fatal(err)
	}
	fmt.Println("the counter is", old)
	// Output:
	// FetchAdd returned 40
	// CompareSwap returned 42
	// the counter is 100
}

// A shared receive queue reports an asynchronous event when its receives fall
// below a limit.
func ExampleDevice_AsyncEvent() {
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}

	// The server has a queue pair with two receives in an SRQ whose limit is 2.
	d := b.Device()
	pd, err := d.AllocPD(ctx)
	check(err)
	cq, err := d.CreateCQ(ctx, 16)
	check(err)
	srq, err := d.CreateSRQ(ctx, iwarp.SRQConfig{PD: pd, Depth: 16, Limit: 2})
	check(err)
	qp, err := d.CreateQP(ctx, iwarp.QPConfig{PD: pd, SendCQ: cq, RecvCQ: cq, SRQ: srq})
	check(err)
	mr, err := pd.Alloc(ctx, 4096, iwarp.AccessLocalWrite)
	check(err)
	for i := range 2 {
		check(srq.PostRecv(&iwarp.RecvWR{ID: uint64(i), SGEs: []iwarp.SGE{mr.SGE(i*1024, 1024)}}))
	}
	l, err := d.Listen(ctx, ":7174", nil)
	check(err)
	defer l.Close()
	accepted := make(chan error, 1)
	go func() {
		req, err := l.Request(ctx)
		if err == nil {
			_, err = req.Accept(ctx, qp, nil)
		}
		accepted <- err
	}()

	client, err := a.Device().Dial(ctx, "10.99.0.2:7174", nil)
	check(err)
	defer client.Close()
	check(<-accepted)
	check(client.Send(ctx, []byte("this message takes one of two receives")))

	e, err := d.AsyncEvent(ctx)
	check(err)
	fmt.Println(e.Kind, e.SRQ == srq)
	// Output: shared receive queue limit true
}
