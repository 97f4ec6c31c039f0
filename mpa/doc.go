// Package mpa is Marker PDU Aligned framing for TCP: RFC 5044, with the enhanced connection setup of RFC 6581.
//
// Frame is the codec of the Request and Reply Frames, and Startup the Startup Phase that exchanges them. Its result, Params, configures
// Full Operation, in which the two half connections are independent: a Framer builds the FPDUs of one and a Receiver parses those of the
// other.
//
//	f.Init(p.CRC, p.SendMarkers, seq of the first byte after our startup frame)
//	r.Init(p.CRC, p.RecvMarkers, seq of the first byte after the peer's)
//
// A responder must not send its first FPDU before it has received one (RFC 5044 section 7.1.2, 4); the caller ensures that.
//
// The package does no I/O, reads no clock and does not allocate per FPDU. Input from the peer results in a value or a typed error, never a
// panic.
package mpa
