package embed_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

// Two programs exchange a message and memory. Here both run in one process, over a wire within it; with a daemon on
// each host, iwarp.Listen and iwarp.Dial take the place of the devices.
func ExamplePair() {
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx := context.Background()

	l, err := b.Device().Listen(ctx, ":7174", nil)
	if err != nil {
		log.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- serve(ctx, l) }()

	conn, err := a.Device().Dial(ctx, "10.99.0.2:7174", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()

	// The server sends the location of its memory.
	buf := make([]byte, 64)
	if _, err := conn.Recv(ctx, buf); err != nil {
		log.Fatal(err)
	}
	remote := iwarp.Remote{Addr: binary.BigEndian.Uint64(buf), RKey: binary.BigEndian.Uint32(buf[8:]), Len: binary.BigEndian.Uint32(buf[12:])}

	// The server's program does not run while its memory is read and written.
	n, err := conn.FetchAdd(ctx, remote.At(0, 8), 1)
	if err != nil {
		log.Fatal(err)
	}
	if err := conn.Write(ctx, remote.At(8, 16), []byte("written by RDMA!")); err != nil {
		log.Fatal(err)
	}
	fmt.Println("the counter was", n)
	if err := conn.Send(ctx, []byte("done")); err != nil {
		log.Fatal(err)
	}
	if err := <-served; err != nil {
		log.Fatal(err)
	}
	// Output:
	// the counter was 41
	// the client is done and left "written by RDMA!", counter 42
}

func serve(ctx context.Context, l *iwarp.Listener) error {
	conn, err := l.Accept(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	mem, err := conn.Alloc(ctx, 4096, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite|iwarp.AccessRemoteAtomic)
	if err != nil {
		return err
	}
	binary.NativeEndian.PutUint64(mem.Bytes(), 41)

	r := mem.Remote()
	msg := binary.BigEndian.AppendUint64(nil, r.Addr)
	msg = binary.BigEndian.AppendUint32(msg, r.RKey)
	msg = binary.BigEndian.AppendUint32(msg, r.Len)
	if err := conn.Send(ctx, msg); err != nil {
		return err
	}
	buf := make([]byte, 16)
	n, err := conn.Recv(ctx, buf)
	if err != nil {
		return err
	}
	fmt.Printf("the client is %s and left %q, counter %d\n", buf[:n], mem.Bytes()[8:24], binary.NativeEndian.Uint64(mem.Bytes()))
	return nil
}
