package verbs

import (
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
)

// older returns the socket of a daemon that is h's, but does not know ModifyQP.
func older(t *testing.T, h *host) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "older.sock")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for c, err := l.AcceptUnix(); err == nil; c, err = l.AcceptUnix() {
			client := seqpacket.FromUnix(c)
			daemon, err := seqpacket.Dial(t.Context(), h.socket)
			if err != nil {
				t.Error(err)
				client.Close()
				return
			}
			go relay(daemon, client, forgetModifyQP)
			go relay(client, daemon, func(b []byte) []byte { return b })
		}
	}()
	return path
}

// relay passes on what a connection receives, as change returns it, until that ends.
func relay(to, from *seqpacket.Conn, change func(b []byte) []byte) {
	defer from.Close()
	defer to.Shutdown()
	for {
		b, fds, err := from.Read(seqpacket.MaxFDs)
		if err == nil {
			err = to.Write(change(b), fds)
		}
		seqpacket.CloseAll(fds)
		if err != nil {
			return
		}
	}
}

// forgetModifyQP removes the body of a ModifyQP, of which nothing is left where the message is not known.
func forgetModifyQP(b []byte) []byte {
	var r ctrlpb.Request
	if proto.Unmarshal(b, &r) != nil || r.GetModifyQp() == nil {
		return b
	}
	r.Body = nil
	b, _ = proto.Marshal(&r)
	return b
}
