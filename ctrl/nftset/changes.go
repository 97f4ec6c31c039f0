package nftset

import (
	"encoding/binary"
	"errors"
	"slices"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// sizeofNfgenmsg is the size of struct nfgenmsg, which begins with the family.
const sizeofNfgenmsg = 4

// eventBuffer is the room for events in bytes. A larger change is read whole.
const eventBuffer = 1 << 20

// changes applies the kernel's events. A transaction is a message for each element, and then one
// with the generation that the ruleset has with it. Transactions that a read has seen already are
// skipped, and if one is missing all sets are read again.
type changes struct {
	messages, asker *netlink.Conn
	events          chan []netlink.Message

	gen     uint32 // generation of the content
	known   bool   // whether gen is known
	pending []change
	whole   bool // the transaction is not about elements alone
}

// A change is one of an element.
type change struct {
	set     int // index in Follower.names
	element nftables.SetElement
	gone    bool
}

func newChanges() (c changes, err error) {
	c.events = make(chan []netlink.Message)
	if c.messages, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
		return c, err
	}
	if c.asker, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
		c.messages.Close()
		return c, err
	}
	_ = c.messages.SetReadBuffer(eventBuffer) // what does not fit is read again
	if err = c.messages.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		c.close()
	}
	return c, err
}

func (c *changes) close() error { return errors.Join(c.messages.Close(), c.asker.Close()) }

// generation returns the generation of the kernel's ruleset.
func (c *changes) generation() (uint32, error) {
	all, err := c.asker.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: netlink.Request},
		Data:   make([]byte, sizeofNfgenmsg),
	})
	if err != nil {
		return 0, err
	}
	for _, m := range all {
		if gen, ok := generationIn(m); ok {
			return gen, nil
		}
	}
	return 0, errors.New("the kernel does not report the generation of its ruleset")
}

// generationIn returns the generation in m.
func generationIn(m netlink.Message) (gen uint32, ok bool) {
	if len(m.Data) < sizeofNfgenmsg {
		return 0, false
	}
	attributes, err := netlink.NewAttributeDecoder(m.Data[sizeofNfgenmsg:])
	if err != nil {
		return 0, false
	}
	attributes.ByteOrder = binary.BigEndian
	for attributes.Next() {
		if attributes.Type() == unix.NFTA_GEN_ID {
			gen, ok = attributes.Uint32(), true
		}
	}
	return gen, ok && attributes.Err() == nil
}

// lost handles the loss of events.
func (f *Follower) lost() {
	f.pending, f.whole = nil, false
	f.read()
}

// handle handles an event.
func (f *Follower) handle(m netlink.Message) {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES {
		return
	}
	switch kind := m.Header.Type & 0xff; kind {
	case unix.NFT_MSG_NEWGEN:
		gen, ok := generationIn(m)
		f.commit(gen, ok)
	case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
		if more, ok := f.elementsIn(m, kind == unix.NFT_MSG_DELSETELEM); ok {
			f.pending = append(f.pending, more...)
		} else {
			f.whole = true
		}
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE, unix.NFT_MSG_NEWSET, unix.NFT_MSG_DELSET:
		f.whole = f.whole || f.concerns(m)
	}
}

// concerns reports whether m may be about a table of the sets.
func (f *Follower) concerns(m netlink.Message) bool {
	if len(m.Data) < sizeofNfgenmsg {
		return true
	}
	attributes, err := netlink.NewAttributeDecoder(m.Data[sizeofNfgenmsg:])
	if err != nil {
		return true
	}
	for attributes.Next() {
		if attributes.Type() == unix.NFTA_SET_TABLE { // as NFTA_TABLE_NAME
			family, table := nftables.TableFamily(m.Data[0]), attributes.String()
			return slices.ContainsFunc(f.names, func(n Name) bool { return n.Family == family && n.Table == table })
		}
	}
	return true
}

// commit handles the end of a transaction, after which the ruleset has the generation gen.
func (f *Follower) commit(gen uint32, ok bool) {
	pending, whole := f.pending, f.whole
	f.pending, f.whole = nil, false
	switch {
	case !ok || !f.known:
		f.read()
	case int32(gen-f.gen) <= 0: // read already
	case whole || gen != f.gen+1 || !f.apply(pending):
		f.read()
	default:
		f.gen = gen
	}
}

// apply applies the changes of a transaction. It reports whether it could.
func (f *Follower) apply(all []change) bool {
	now := slices.Clone(*f.content.Load())
	for i := range now {
		of := slices.DeleteFunc(slices.Clone(all), func(c change) bool { return c.set != i })
		if len(of) == 0 {
			continue
		}
		s, ok := now[i].with(of)
		if !ok || now[i].err != nil {
			return false
		}
		now[i].set = s
	}
	f.publish(now)
	return true
}

// elementsIn returns the elements of followed sets in an event, and false if it cannot be understood.
func (f *Follower) elementsIn(m netlink.Message, gone bool) (all []change, ok bool) {
	if len(m.Data) < sizeofNfgenmsg {
		return nil, false
	}
	attributes, err := netlink.NewAttributeDecoder(m.Data[sizeofNfgenmsg:])
	if err != nil {
		return nil, false
	}
	n := Name{Family: nftables.TableFamily(m.Data[0])}
	for attributes.Next() {
		switch attributes.Type() {
		case unix.NFTA_SET_ELEM_LIST_TABLE:
			n.Table = attributes.String()
		case unix.NFTA_SET_ELEM_LIST_SET:
			n.Set = attributes.String()
		case unix.NFTA_SET_ELEM_LIST_ELEMENTS:
			attributes.Nested(func(list *netlink.AttributeDecoder) error {
				for list.Next() {
					c := change{gone: gone}
					list.Nested(func(e *netlink.AttributeDecoder) error { return decodeElement(e, &c.element) })
					all = append(all, c)
				}
				return nil
			})
		}
	}
	set := slices.Index(f.names, n)
	if set < 0 {
		return nil, attributes.Err() == nil
	}
	for i := range all {
		all[i].set = set
	}
	return all, attributes.Err() == nil
}

// decodeElement decodes the parts of an element that matter for a set of addresses.
func decodeElement(d *netlink.AttributeDecoder, e *nftables.SetElement) error {
	d.ByteOrder = binary.BigEndian
	for d.Next() {
		switch d.Type() {
		case unix.NFTA_SET_ELEM_FLAGS:
			e.IntervalEnd = d.Uint32()&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_KEY:
			d.Nested(func(key *netlink.AttributeDecoder) error {
				for key.Next() {
					if key.Type() == unix.NFTA_DATA_VALUE {
						e.Key = key.Bytes()
					}
				}
				return nil
			})
		}
	}
	return nil
}
