package nftset

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netns"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
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
	before := *f.content.Load()
	f.handle(elementEvent(t, true, "peers4", "10.0.0.8"))
	f.handle(endOf(t, 9))
	if has("10.0.0.8") || f.gen != 9 {
		t.Errorf("generation 9: %+v", *f.content.Load())
	}
	if !before[0].contains(netip.MustParseAddr("10.0.0.8")) {
		t.Error("content that a reader may have was changed")
	}
	for i, gone := range []bool{false, false, true, true} { // also what is there already, or is gone already
		f.handle(elementEvent(t, gone, "peers4", "10.0.0.8"))
		f.handle(endOf(t, 10+uint32(i)))
		if has("10.0.0.8") == gone {
			t.Errorf("generation %d: %+v", f.gen, *f.content.Load())
		}
	}
	f.gen = 1<<32 - 1
	f.handle(elementEvent(t, false, "peers4", "10.0.0.1"))
	f.handle(endOf(t, 0))
	if !has("10.0.0.1") || f.gen != 0 {
		t.Errorf("after the greatest generation: %+v", f.changes)
	}
}

// inNamespace moves the test to a network namespace without sets, whose changes it returns.
func inNamespace(t *testing.T) changes {
	t.Helper()
	testenv.RequireRoot(t)
	runtime.LockOSThread() // for good: the thread ends with the goroutine
	own, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	own.Close()
	c, err := newChanges()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.close() })
	return c
}

// TestReread checks which transactions make the follower read the sets, because it cannot know their content otherwise.
func TestReread(t *testing.T) {
	c := inNamespace(t)
	names, err := Parse("inet filter peers4")
	if err != nil {
		t.Fatal(err)
	}
	reader, err := nftables.New(nftables.AsLasting())
	if err != nil {
		t.Fatal(err)
	}
	defer reader.CloseLasting()
	of := func(kind netlink.HeaderType, table string) netlink.Message {
		return event(t, kind, func(e *netlink.AttributeEncoder) { e.String(unix.NFTA_SET_TABLE, table) })
	}
	inIPv6 := of(unix.NFT_MSG_NEWTABLE, "filter")
	inIPv6.Data[0] = byte(nftables.TableFamilyIPv6)
	empty := func(kind netlink.HeaderType) netlink.Message {
		return event(t, kind, func(*netlink.AttributeEncoder) {})
	}
	none := empty(unix.NFT_MSG_DELTABLE)
	short := func(m netlink.Message, n int) netlink.Message {
		m.Data = m.Data[:n]
		return m
	}
	element, next := elementEvent(t, false, "peers4", "10.0.0.8"), endOf(t, 8)
	stranger := elementEvent(t, false, "others", "10.0.0.8")
	other := netlink.Message{Header: netlink.Header{Type: unix.NFNL_SUBSYS_IPSET<<8 | unix.NFT_MSG_DELTABLE}}
	for _, tt := range []struct {
		name     string
		known    bool
		content  followed
		messages []netlink.Message
		read     bool
	}{
		{"the next one", true, followed{}, []netlink.Message{element, next}, false},
		{"of another subsystem", true, followed{}, []netlink.Message{other, next}, false},
		{"without known generation", false, followed{}, []netlink.Message{element, next}, true},
		{"one is missing", true, followed{}, []netlink.Message{element, endOf(t, 9)}, true},
		{"without generation", true, followed{}, []netlink.Message{element, empty(unix.NFT_MSG_NEWGEN)}, true},
		{"short generation", true, followed{}, []netlink.Message{element, short(endOf(t, 8), 10)}, true},
		{"short generation header", true, followed{}, []netlink.Message{element, short(endOf(t, 8), 3)}, true},
		{"short element", true, followed{}, []netlink.Message{short(element, len(element.Data)-1), next}, true},
		{"short element header", true, followed{}, []netlink.Message{short(element, 3), next}, true},
		{"of an aging set", true, followed{set: set{aging: true}}, []netlink.Message{element, next}, true},
		{"of a set that could not be read", true, followed{err: errNotRead}, []netlink.Message{element, next}, true},
		{"of another set", true, followed{err: errNotRead}, []netlink.Message{stranger, next}, false},
		{"new table", true, followed{}, []netlink.Message{of(unix.NFT_MSG_NEWTABLE, "filter"), next}, true},
		{"new set, and another table", true, followed{},
			[]netlink.Message{of(unix.NFT_MSG_NEWSET, "filter"), of(unix.NFT_MSG_NEWSET, "nat"), next}, true},
		{"another table", true, followed{}, []netlink.Message{of(unix.NFT_MSG_DELTABLE, "nat"), next}, false},
		{"another family", true, followed{}, []netlink.Message{inIPv6, next}, false},
		{"table without name", true, followed{}, []netlink.Message{none, next}, true},
		{"table without header", true, followed{}, []netlink.Message{short(none, 3), next}, true},
	} {
		f := &Follower{names: names, log: zap.NewNop(), reader: reader, changes: c}
		f.gen, f.known = 7, tt.known
		f.content.Store(&[]followed{tt.content})
		f.changed.Store(new(func()))
		for _, m := range tt.messages {
			f.handle(m)
		}
		if read := f.reads.Load() > 0; read != tt.read || f.whole || len(f.pending) > 0 || !f.known || !read && f.gen != 8 {
			t.Errorf("%s: read %v, want %v; %+v", tt.name, read, tt.read, f.changes)
		}
	}
}

// TestReadFails checks that the last elements of a set apply while it cannot be read, and that it can be read again.
func TestReadFails(t *testing.T) {
	c := inNamespace(t)
	names, err := Parse("inet filter peers4")
	if err != nil {
		t.Fatal(err)
	}
	fail := func([]netlink.Message) ([]netlink.Message, error) { return nil, unix.ENOBUFS }
	broken, err := nftables.New(nftables.WithTestDial(fail))
	if err != nil {
		t.Fatal(err)
	}
	core, logs := observer.New(zapcore.InfoLevel)
	f := &Follower{names: names, log: zap.New(core), reader: broken, changes: c}
	a := netip.MustParseAddr("10.0.0.1")
	f.content.Store(&[]followed{{set: newSet([]nftables.SetElement{{Key: a.AsSlice()}}, false, false)}})
	f.changed.Store(new(func()))
	for _, want := range []struct {
		in  bool
		log string
	}{
		{true, "the nftables set cannot be read, so its last elements apply"},
		{false, "the nftables set does not exist, so it allows no peer"},
	} {
		f.read()
		if logs.FilterMessage(want.log).Len() != 1 || f.Contains(a) != want.in {
			t.Errorf("want %q; %+v", want.log, *f.content.Load())
		}
	}
	if err := f.reader.CloseLasting(); err != nil {
		t.Error(err)
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
