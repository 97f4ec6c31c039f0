// Provoke is a partner for rping, the program, that breaks the rules of one of
// the two sides, or is broken with: it prints how its connection ended.
//
//	provoke -socket /run/iwarpd/iwarpd.sock -listen 10.97.1.1:7174 read-stag
//	provoke -socket /run/iwarpd/iwarpd.sock -connect 10.97.1.2:7175 advertise-stag
//
// One line tells the outcome: "terminate remote 0/1/0x00", "terminate local
// ...", "refused", "rejected" and such. The exit status is 1 if nothing of the
// kind happened.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/iwarpd/iwarpd/app/rping"
	iwarp "github.com/iwarpd/iwarpd/client"
)

func main() {
	socket := flag.String("socket", "", "the daemon's")
	listen := flag.String("listen", "", "address to serve one rping client at")
	connect := flag.String("connect", "", "address of an rping server")
	timeout := flag.Duration("timeout", 20*time.Second, "of it all")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), *timeout)
	defer cancel()
	out, err := run(ctx, *socket, *listen, *connect, flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, "provoke:", err)
		os.Exit(1)
	}
	fmt.Println(out)
}

func run(ctx context.Context, socket, listen, connect, what string) (string, error) {
	d, err := iwarp.Open(ctx, socket)
	if err != nil {
		return "", err
	}
	defer d.Close()
	if listen != "" {
		return serve(ctx, d, listen, what)
	}
	return dial(ctx, d, connect, what)
}

// tell returns how the connection ended.
func tell(ctx context.Context, q *iwarp.QP) (string, error) {
	select {
	case <-q.Done():
	case <-ctx.Done():
		return "", fmt.Errorf("the connection goes on")
	}
	te, ok := errors.AsType[*iwarp.TerminateError](q.Err())
	if !ok {
		return "", fmt.Errorf("no Terminate: %w", q.Err())
	}
	side := "local"
	if te.Remote {
		side = "remote"
	}
	return fmt.Sprintf("terminate %s %d/%d/%#02x", side, uint8(te.Layer), te.EType, te.ECode), nil
}

// serve acts as the server of rping up to the client's first advertisement.
func serve(ctx context.Context, d *iwarp.Device, addr, what string) (string, error) {
	l, err := d.Listen(ctx, addr, nil)
	if err != nil {
		return "", err
	}
	defer l.Close()
	fmt.Println("listening")
	req, err := l.Request(ctx)
	if err != nil {
		return "", err
	}
	if what == "reject" {
		return "rejecting", req.Reject(ctx, []byte("no, thank you"))
	}
	c, err := req.AcceptConn(ctx, nil)
	if err != nil {
		return "", err
	}
	defer c.Abort()
	var b [64]byte
	n, err := c.Recv(ctx, b[:])
	if err != nil {
		return "", err
	}
	ad, err := rping.DecodeAdvert(b[:n])
	if err != nil {
		return "", err
	}
	r := iwarp.Remote{Addr: ad.Addr, RKey: ad.RKey, Len: ad.Size}
	if what == "many-reads" {
		if err := manyReads(ctx, c, r); err != nil {
			return "", err
		}
		return tell(ctx, c.QP())
	}
	data := make([]byte, ad.Size)
	switch what {
	case "read-stag", "write-stag":
		r.RKey ^= 1
	case "read-bounds", "write-bounds":
		r.Addr += uint64(ad.Size)
	default:
		return "", fmt.Errorf("%q is nothing to serve", what)
	}
	if what[0] == 'r' {
		err = c.Read(ctx, r, data)
	} else {
		err = c.Write(ctx, r, data) // it does not wait for the peer
	}
	if err == nil && what[0] == 'r' {
		return "", errors.New("the peer answers the Read")
	}
	return tell(ctx, c.QP())
}

// manyReads posts the maximum number of outstanding Reads.
func manyReads(ctx context.Context, c *iwarp.Conn, r iwarp.Remote) error {
	mr, err := c.Alloc(ctx, 4096, iwarp.AccessLocalWrite)
	if err != nil {
		return err
	}
	wrs := make([]iwarp.SendWR, 16)
	for i := range wrs {
		wrs[i] = iwarp.SendWR{ID: uint64(i), Op: iwarp.OpRead, SGEs: []iwarp.SGE{mr.SGE(i*16, 16)}, RKey: r.RKey, Remote: r.Addr}
	}
	_, err = c.QP().PostSends(wrs)
	return err
}

// dial acts as the client of rping up to its first advertisement.
func dial(ctx context.Context, d *iwarp.Device, addr, what string) (string, error) {
	cfg := rping.Config()
	if what == "markers" {
		cfg.Startup.Markers, cfg.Startup.NoFallback = true, true
	}
	c, err := d.Dial(ctx, addr, cfg)
	switch {
	case errors.Is(err, iwarp.ErrRefused):
		return "refused", nil
	case errors.Is(err, iwarp.ErrRejected):
		return "rejected", nil
	case err != nil:
		return "", err
	}
	defer c.Abort()
	access := iwarp.AccessLocalWrite | iwarp.AccessRemoteRead
	if what == "advertise-rights" {
		access = iwarp.AccessLocalWrite | iwarp.AccessRemoteWrite
	}
	mr, err := c.Alloc(ctx, 4096, access)
	if err != nil {
		return "", err
	}
	ad := rping.Advert{Addr: mr.Base(), RKey: mr.RKey(), Size: 64}
	switch what {
	case "advertise-stag":
		ad.RKey ^= 1
	case "advertise-bounds":
		ad.Addr += 4096 - 32
	case "advertise-rights":
	default:
		return "", fmt.Errorf("%q is nothing to connect for", what)
	}
	if err := c.Send(ctx, ad.Append(nil)); err != nil {
		return "", err
	}
	// siw does not notice an FPDU that arrives while it sends its reply until another one arrives.
	probe := time.NewTicker(time.Second)
	defer probe.Stop()
	for {
		select {
		case <-c.QP().Done():
			return tell(ctx, c.QP())
		case <-ctx.Done():
			return "", errors.New("the connection goes on")
		case <-probe.C:
			_ = c.QP().PostSend(&iwarp.SendWR{Op: iwarp.OpWrite}) // an error: the connection is over
		}
	}
}
