package nfs_test

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// FuzzServer calls every procedure of NFS, MOUNT and the portmapper with any arguments. A marker in them stands for the
// handle of the root.
func FuzzServer(f *testing.F) {
	testenv.RequireRoot(f)
	dir := f.TempDir()
	s := nfs.NewTestServer(f, nfs.Config{Dir: dir, Async: true})
	srv := &rpc.Server{}
	srv.Register(nfs.ProgramNFS, s.Program())
	srv.Register(nfs.ProgramMount, s.MountProgram())
	srv.Register(nfs.ProgramPortmap, nfs.Portmap([]nfs.Mapping{{Prog: nfs.ProgramMount, Vers: 3, Port: 20048}}, false))
	call := func(prog, vers, proc uint32, args func(*rpc.Writer)) rpc.Msg {
		var w rpc.Writer
		sys := rpc.Sys{UID: 65534, GID: 65534}
		c := rpc.Call{XID: 1, Prog: prog, Vers: vers, Proc: proc, Cred: sys.Auth()}
		c.Start(&w)
		args(&w)
		return w.Msg
	}
	reply, _ := srv.Serve(f.Context(), "x", call(nfs.ProgramMount, 3, 1, func(w *rpc.Writer) { w.String("/") }), nil)
	r, err := rpc.ParseReply(reply)
	if err != nil || r.U32() != 0 {
		f.Fatal("mount:", err)
	}
	root := append([]byte(nil), r.Opaque(64)...)
	for proc := range uint32(23) {
		f.Add(proc, true, []byte("\x00\x00\x00\x04name\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), []byte(nil), uint16(0))
		f.Add(proc, true, []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 8}, []byte("12345678"), uint16(116))
	}
	f.Fuzz(func(t *testing.T, proc uint32, withRoot bool, args, item []byte, pos uint16) {
		for _, c := range []struct{ prog, vers uint32 }{{nfs.ProgramNFS, 3}, {nfs.ProgramMount, 3}, {nfs.ProgramPortmap, 2}, {nfs.ProgramPortmap, 4}} {
			m := call(c.prog, c.vers, proc%24, func(w *rpc.Writer) {
				if withRoot && c.prog == nfs.ProgramNFS {
					w.Opaque(root)
				}
				w.Body = append(w.Body, args...)
			})
			if len(item) > 0 {
				var ok bool
				if m, ok = rpc.Place(m.Body, []rpc.Item{{Data: item}}, []uint32{uint32(pos)}); !ok {
					return
				}
			}
			reply, ok := srv.Serve(t.Context(), "x", m, nil)
			if !ok {
				continue
			}
			if n := reply.Len(); n > 1<<20+4096 {
				t.Fatalf("a reply of %d bytes", n)
			}
			_, _ = rpc.ParseReply(reply)
		}
	})
}
