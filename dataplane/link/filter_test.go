package link

import "golang.org/x/sys/unix"

// Classic BPF, as in linux/filter.h.
const (
	ldAbs   = unix.BPF_LD | unix.BPF_H | unix.BPF_ABS
	ldAbsB  = unix.BPF_LD | unix.BPF_B | unix.BPF_ABS
	ldInd   = unix.BPF_LD | unix.BPF_H | unix.BPF_IND
	ldIndB  = unix.BPF_LD | unix.BPF_B | unix.BPF_IND
	ldxMSH  = unix.BPF_LDX | unix.BPF_B | unix.BPF_MSH
	ldxImm  = unix.BPF_LDX | unix.BPF_IMM
	jmpEq   = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	jmpGt   = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K
	jmpSet  = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
	jmpFar  = unix.BPF_JMP | unix.BPF_JA
	retOp   = unix.BPF_RET | unix.BPF_K
	takeAll = 1 << 18 // length of a frame that a filter accepts
)

// PortFilter returns a classic BPF program that accepts TCP, SCTP and UDP packets to the given ports, and ICMP and
// ICMPv6 errors. It accepts all IPv6 packets with extension headers, which classic BPF cannot walk, and no
// fragments of IPv4. The kernel has removed a VLAN tag before.
func PortFilter(ports []uint16) []unix.SockFilter {
	var f []unix.SockFilter
	op := func(code uint16, k uint32) { f = append(f, unix.SockFilter{Code: code, K: k}) }
	// skipUnless jumps over the next n instructions unless A equals k.
	skipUnless := func(k uint32, n uint8) {
		f = append(f, unix.SockFilter{Code: jmpEq, Jf: n, K: k})
	}
	take := func(k uint32) { skipUnless(k, 1); op(retOp, takeAll) }
	drop := func() { op(retOp, 0) }

	// transport is the code that runs once X is the offset of the transport header less 14, and A is its protocol.
	transport := func(icmp uint32, errors [][2]uint32) {
		skipUnless(icmp, uint8(2+3*len(errors)))
		op(ldIndB, 14)
		for _, e := range errors { // types e[0]..e[1]
			f = append(f,
				unix.SockFilter{Code: jmpGt, Jt: 2, K: e[1]},
				unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, Jf: 1, K: e[0]},
				unix.SockFilter{Code: retOp, K: takeAll})
		}
		drop()
		f = append(f,
			unix.SockFilter{Code: jmpEq, Jt: 3, K: unix.IPPROTO_TCP},
			unix.SockFilter{Code: jmpEq, Jt: 2, K: unix.IPPROTO_SCTP},
			unix.SockFilter{Code: jmpEq, Jt: 1, K: unix.IPPROTO_UDP})
		drop()
		op(ldInd, 14+2)
		for _, p := range ports {
			take(uint32(p))
		}
		drop()
	}

	op(ldAbs, 12)
	skipUnless(unix.ETH_P_IP, 1)
	op(jmpFar, 0) // to IPv4, set below
	toV4 := len(f) - 1
	skipUnless(unix.ETH_P_IPV6, 1)
	op(jmpFar, 1)
	drop()
	op(ldAbsB, 14+6)
	for _, ext := range []uint32{0, 43, 51, 60} {
		take(ext)
	}
	op(ldxImm, 40)
	transport(unix.IPPROTO_ICMPV6, [][2]uint32{{1, 4}})

	f[toV4].K = uint32(len(f) - toV4 - 1)
	op(ldAbs, 14+6)
	f = append(f, unix.SockFilter{Code: jmpSet, Jf: 1, K: 0x3fff})
	drop()
	op(ldxMSH, 14)
	op(ldAbsB, 14+9)
	transport(unix.IPPROTO_ICMP, [][2]uint32{{3, 3}, {11, 12}})
	return f
}
