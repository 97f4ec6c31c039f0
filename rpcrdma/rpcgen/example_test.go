package rpcgen_test

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/rpcgen"
	"github.com/iwarpd/iwarpd/rpcrdma/rpcgen/store"
)

// values implements the program of store.x.
type values struct {
	mu sync.Mutex
	m  map[string][]byte
}

func (v *values) StoreV1StoreNull(context.Context) error { return nil }

func (v *values) StoreV1StorePut(_ context.Context, e *store.Entry) (uint32, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.m[string(e.Key)] = e.Data
	return uint32(len(e.Data)), nil
}

func (v *values) StoreV1StoreGet(ctx context.Context, name []byte) ([]byte, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	b := v.m[string(name)]
	rpcgen.Item(ctx, b) // goes by RDMA Write where the client has a chunk for it
	return b, nil
}

// A program of one's own: a server and a client, joined by a wire in memory.
func Example() {
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx := context.Background()

	cfg := rpcrdma.DefaultConfig(true)
	cfg.Server = &rpc.Server{}
	service := store.NewStoreProgramService(&values{m: make(map[string][]byte)})
	cfg.Server.Register(store.STORE_PROGRAM_PROGRAM_NUMBER, rpcgen.Program(service, 1, 1))
	server, err := rpcrdma.New(ctx, b.Device(), cfg)
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	l, err := server.Listen(ctx, b.Addr().String()+":4711")
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()

	client, err := rpcrdma.New(ctx, a.Device(), rpcrdma.DefaultConfig(false))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	c := client.Dial(l.Addr())
	defer c.Close()

	put := rpc.Call{Prog: store.STORE_PROGRAM_PROGRAM_NUMBER, Vers: 1, Proc: 1}
	r, resp, err := c.Do(ctx, put, func(w *rpc.Writer) {
		w.String("large")
		w.Item(make([]byte, 100_000)) // DDP-eligible: goes by RDMA Read
	}, rpcrdma.Call{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("stored", r.U32())
	resp.Release()

	get := rpc.Call{Prog: store.STORE_PROGRAM_PROGRAM_NUMBER, Vers: 1, Proc: 2}
	r, resp, err = c.Do(ctx, get, func(w *rpc.Writer) { w.String("large") }, rpcrdma.Call{Results: []int{1 << 20}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("got", len(r.Result(1<<20)), r.Err())
	resp.Release()

	conn, err := c.Conn(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("version", conn.Version())
	// Output:
	// stored 100000
	// got 100000 <nil>
	// version 2
}
