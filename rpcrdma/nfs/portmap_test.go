package nfs_test

import (
	"testing"

	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// TestPortmap asks for the port of MOUNT as Linux does, over IPv4 and over IPv6, for which version 2 has no addresses.
func TestPortmap(t *testing.T) {
	srv := &rpc.Server{}
	srv.Register(nfs.ProgramPortmap, nfs.Portmap([]nfs.Mapping{
		{Prog: nfs.ProgramPortmap, Vers: 4, Port: 111, UDP: true}, {Prog: nfs.ProgramMount, Vers: 3, Port: 20048},
	}, false))
	const nlm = 100021
	call := func(peer string, vers, proc uint32, args func(*rpc.Writer)) *rpc.Reader {
		t.Helper()
		var w rpc.Writer
		sys := rpc.Sys{}
		(&rpc.Call{XID: 1, Prog: nfs.ProgramPortmap, Vers: vers, Proc: proc, Cred: sys.Auth()}).Start(&w)
		args(&w)
		m, _ := srv.Serve(t.Context(), peer, w.Msg, nil)
		r, err := rpc.ParseReply(m)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if got := call("192.0.2.1", 2, 3, func(w *rpc.Writer) { w.U32(nfs.ProgramMount, 3, 6, 0) }).U32(); got != 20048 {
		t.Errorf("GETPORT: %d", got)
	}
	for _, vers := range []uint32{3, 4} {
		for _, c := range []struct {
			peer              string
			prog              uint32
			netid, addr, want string
		}{
			{"192.0.2.1", nfs.ProgramMount, "tcp", "192.0.2.9.0.111", "192.0.2.9.78.80"},
			{"192.0.2.1", nfs.ProgramMount, "tcp", "", "0.0.0.0.78.80"},
			{"192.0.2.1", nfs.ProgramMount, "tcp", "192.0.2.9", "0.0.0.0.78.80"},
			{"192.0.2.1", nfs.ProgramMount, "udp", "192.0.2.9.0.111", ""},
			{"192.0.2.1", nfs.ProgramPortmap, "udp", "192.0.2.9.0.111", "192.0.2.9.0.111"},
			{"192.0.2.1", nfs.ProgramMount, "tcp6", "2001:db8::9.0.111", ""},
			{"2001:db8::1", nfs.ProgramMount, "tcp6", "2001:db8::9.0.111", "2001:db8::9.78.80"},
			{"2001:db8::1", nfs.ProgramMount, "tcp6", "no address.0.111", "::.78.80"},
			{"2001:db8::1", nfs.ProgramPortmap, "udp6", "", "::.0.111"},
			{"2001:db8::1", nlm, "tcp6", "2001:db8::9.0.111", ""},
		} {
			r := call(c.peer, vers, 3, func(w *rpc.Writer) {
				w.U32(c.prog, 3)
				w.String(c.netid)
				w.String(c.addr)
				w.String("")
			})
			if got := r.String(64); got != c.want || r.Err() != nil || r.Left() != 0 {
				t.Errorf("GETADDR %d by %s of program %d, %s, %q: %q, not %q, %v", vers, c.peer, c.prog, c.netid, c.addr, got, c.want, r.Err())
			}
		}
		r := call("2001:db8::1", vers, 4, func(*rpc.Writer) {})
		var got []string
		for r.U32() == 1 {
			r.U32()
			r.U32()
			got = append(got, r.String(64), r.String(64))
			r.String(64)
		}
		if len(got) != 4 || got[0] != "udp6" || got[1] != "::.0.111" || got[2] != "tcp6" || got[3] != "::.78.80" || r.Err() != nil || r.Left() != 0 {
			t.Errorf("DUMP %d: %q, %v", vers, got, r.Err())
		}
	}
}
