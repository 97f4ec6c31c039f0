package nftset

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// event returns a message of nftables.
func event(t *testing.T, kind netlink.HeaderType, encode func(*netlink.AttributeEncoder)) netlink.Message {
	t.Helper()
	e := netlink.NewAttributeEncoder()
	e.ByteOrder = binary.BigEndian
	encode(e)
	b, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return netlink.Message{Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | kind}, Data: append([]byte{byte(nftables.TableFamilyINet), 0, 0, 0}, b...)}
}

func elementEvent(t *testing.T, gone bool, set, addr string) netlink.Message {
	t.Helper()
	kind := netlink.HeaderType(unix.NFT_MSG_NEWSETELEM)
	if gone {
		kind = unix.NFT_MSG_DELSETELEM
	}
	return event(t, kind, func(e *netlink.AttributeEncoder) {
		e.String(unix.NFTA_SET_ELEM_LIST_TABLE, "filter")
		e.String(unix.NFTA_SET_ELEM_LIST_SET, set)
		e.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(e *netlink.AttributeEncoder) error {
			e.Nested(unix.NFTA_LIST_ELEM, func(e *netlink.AttributeEncoder) error {
				e.Nested(unix.NFTA_SET_ELEM_KEY, func(e *netlink.AttributeEncoder) error {
					e.Bytes(unix.NFTA_DATA_VALUE, netip.MustParseAddr(addr).AsSlice())
					return nil
				})
				return nil
			})
			return nil
		})
	})
}

func endOf(t *testing.T, gen uint32) netlink.Message {
	t.Helper()
	return event(t, unix.NFT_MSG_NEWGEN, func(e *netlink.AttributeEncoder) { e.Uint32(unix.NFTA_GEN_ID, gen) })
}

// TestGenerations checks which transactions are applied, and which have been read already.
func TestGenerations(t *testing.T) {
	names, err := Parse("inet filter peers4")
	if err != nil {
		t.Fatal(err)
	}
	f := &Follower{names: names, log: zap.NewNop(), changes: changes{gen: 7, known: true}}
	f.content.Store(&[]followed{{}})
	f.changed.Store(new(func()))
	has := func(a string) bool { return f.Contains(netip.MustParseAddr(a)) }

	for _, gen := range []uint32{5, 7} {
		f.handle(elementEvent(t, false, "peers4", "10.0.0.5"))
		f.handle(endOf(t, gen))
		if has("10.0.0.5") || f.gen != 7 || len(f.pending) != 0 {
			t.Errorf("a transaction of generation %d was applied to generation 7: %+v", gen, f.changes)
		}
	}
	f.handle(elementEvent(t, false, "peers4", "10.0.0.8"))
	f.handle(elementEvent(t, false, "others", "10.0.0.9"))
	if has("10.0.0.8") {
		t.Error("an element was applied before the end of its transaction")
	}
	f.handle(endOf(t, 8))
	if !has("10.0.0.8") || has("10.0.0.9") || has("10.0.0.7") || f.gen != 8 {
		t.Errorf("generation 8: %+v, %+v", *f.content.Load(), f.changes)
	}
	f.handle(elementEvent(t, true, "peers4", "10.0.0.8"))
	f.handle(endOf(t, 9))
	if has("10.0.0.8") || f.gen != 9 {
		t.Errorf("generation 9: %+v", *f.content.Load())
	}
	f.gen = 1<<32 - 1
	f.handle(elementEvent(t, false, "peers4", "10.0.0.1"))
	f.handle(endOf(t, 0))
	if !has("10.0.0.1") || f.gen != 0 {
		t.Errorf("after the greatest generation: %+v", f.changes)
	}
}

// TestFailed checks that an error names the capability and the kernel only if they may be the cause.
func TestFailed(t *testing.T) {
	for err, want := range map[syscall.Errno]bool{
		unix.EPERM: true, unix.EPROTONOSUPPORT: true, unix.ENOMEM: false, unix.EMFILE: false,
	} {
		got := failed(&netlink.OpError{Op: "dial", Err: os.NewSyscallError("socket", err)})
		if strings.Contains(got.Error(), "CAP_NET_ADMIN") != want || !errors.Is(got, err) {
			t.Errorf("%v: %v", err, got)
		}
	}
}
