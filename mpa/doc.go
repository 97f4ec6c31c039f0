// Package mpa is Marker PDU Aligned framing for TCP: RFC 5044, with the enhanced
// connection setup of RFC 6581.
//
// Frame is the codec of the Request and Reply Frames and Startup the Startup
// Phase that exchanges them. Its result, Params, sets up Full Operation, in which
// each half connection stands alone: a Framer composes the FPDUs of the one and a
// Receiver takes those of the other apart.
//
//	f.Init(p.CRC, p.SendMarkers, seq of the first octet behind our startup frame)
//	r.Init(p.CRC, p.RecvMarkers, seq of the first octet behind the peer's)
//
// A responder sends its first FPDU only after it has received one (RFC 5044
// section 7.1.2, 4); the user of this package sees to that.
//
// Nothing here does I/O, reads a clock or allocates per FPDU. Octets of the peer
// give a value or a typed error, never a panic.
package mpa
