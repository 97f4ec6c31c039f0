package main

import (
	"encoding/binary"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// ethernet is the bytes of an Ethernet header.
const ethernet = 14

// tooBig is what a router says of a packet that is longer than mtu: Packet Too Big
// of ICMPv6 (RFC 4443 3.2), or Fragmentation Needed (RFC 1191). It has the address of
// the packet's destination. It is nil for what is no IP packet.
func tooBig(frame []byte, mtu int) []byte {
	var p pkt.Packet
	if len(frame) < ethernet || p.Parse(frame, len(frame)) != nil || p.Proto == pkt.ProtoICMP || p.Proto == pkt.ProtoICMPv6 {
		return nil
	}
	t := p.Reply()
	t.Proto = pkt.ProtoICMP
	msg := make([]byte, 8, 8+576)
	msg[0], msg[1] = 3, 4
	if p.V6 {
		t.Proto = pkt.ProtoICMPv6
		msg[0], msg[1] = 2, 0
	}
	binary.BigEndian.PutUint32(msg[4:], uint32(mtu))
	msg = append(msg, frame[ethernet:min(len(frame), ethernet+500)]...)
	sum := uint32(0)
	if p.V6 {
		sum = t.PseudoSum(len(msg))
	}
	binary.BigEndian.PutUint16(msg[2:], pkt.Checksum(pkt.Sum(msg, sum)))
	b := make([]byte, t.HeaderLen(), t.HeaderLen()+len(msg))
	t.Put(b, len(msg), 0)
	return append(b, msg...)
}
