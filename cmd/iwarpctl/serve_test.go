package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/app/filecopy"
)

// TestServed checks that serve names the hash function of the sum.
func TestServed(t *testing.T) {
	for hash, size := range map[filecopy.Hash]int{filecopy.XXH128: 16, filecopy.BLAKE3: 32, filecopy.SHA256: 32} {
		e := filecopy.Event{Put: true, Name: "f", Result: filecopy.Result{Size: 1, Hash: hash}}
		want := hash.String() + ":" + strings.Repeat("00", size)
		var out bytes.Buffer
		c := command{out: &out}
		c.served(netip.AddrPort{}, e)
		if !strings.HasSuffix(out.String(), ", "+want+"\n") {
			t.Errorf("served prints %q; want the sum %s", out.String(), want)
		}
		out.Reset()
		c.json = true
		c.served(netip.AddrPort{}, e)
		var got served
		if err := json.Unmarshal(out.Bytes(), &got); err != nil || got.Checksum != want || (got.SHA256 != "") != (hash == filecopy.SHA256) {
			t.Errorf("served prints %q, %v; want the checksum %s", out.String(), err, want)
		}
	}
}

// TestPeerText checks that what a peer chooses is escaped: the name of a file in an error, and the data of a ping.
func TestPeerText(t *testing.T) {
	store, err := filecopy.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	const name = "a\u202eb"
	var out bytes.Buffer
	c := command{out: &out, err: &out}
	_, _, err = store.Open(name)
	c.served(netip.AddrPort{}, filecopy.Event{Name: name, Err: err})
	fmt.Fprintf(c.pingData(&pingFlags{verbose: true}), "ping data: %s\n", "\x1b[2J")
	c.json = true
	fmt.Fprintf(c.pingData(&pingFlags{verbose: true}), "ping data: %s\n", "\x1b[2J")
	const ping = `ping data: \u001b[2J` + "\n"
	if got, want := out.String(), `invalid AddrPort: get "a\u202eb": a\u202eb: no such file or directory`+"\n"+ping+ping; got != want {
		t.Errorf("%q; want %q", got, want)
	}
}
