#include "textflag.h"

// To fold x by d bits is to multiply it by x^d modulo the polynomial. The
// constants are x^(d+31) for the low quadword, which comes first, and x^(d-33)
// for the high one, modulo the polynomial and bit-reflected.

DATA fold2048<>+0(SB)/8, $0xdcb17aa4
DATA fold2048<>+8(SB)/8, $0xb9e02b86
GLOBL fold2048<>(SB), RODATA|NOPTR, $16

DATA fold512<>+0(SB)/8, $0x740eef02
DATA fold512<>+8(SB)/8, $0x9e4addf8
GLOBL fold512<>(SB), RODATA|NOPTR, $16

// By 384, 256 and 128 bits: what takes three lanes of a vector to the fourth.
DATA lanes<>+0(SB)/8, $0x1c291d04
DATA lanes<>+8(SB)/8, $0xddc0152b
DATA lanes<>+16(SB)/8, $0x3da6d0cb
DATA lanes<>+24(SB)/8, $0xba4fc28e
DATA lanes<>+32(SB)/8, $0xf20c0dfe
DATA lanes<>+40(SB)/8, $0x493c7d27
DATA lanes<>+48(SB)/8, $0
DATA lanes<>+56(SB)/8, $0
GLOBL lanes<>(SB), RODATA|NOPTR, $64

// What follows takes 256 bytes of a stream with markers at a time, without a branch:
// where the marker lies is another place each time. R10 is how many times four bytes
// come before it; MARKER makes R11 of it, a bit for each four bytes of the 256: one, or
// none; and R12, all ones if there is one. The marker itself is in Z24, and R9 its ptr.
// To be called with DX 1.
#define MARKER \
	SHLXQ R10, DX, R11     \
	CMPQ R10, $64          \
	SBBQ R12, R12          \
	ANDQ R12, R11          \
	MOVWLZX R9, R13        \
	BSWAPL R13             \
	VPBROADCASTD R13, Z24

// PASSED goes on behind the 256 bytes.
#define PASSED \
	MOVQ R12, R13          \
	ANDL $512, R13         \
	ADDL R13, R9           \
	ANDQ $128, R12         \
	LEAQ -64(R10)(R12*1), R10

// SPREAD makes V of the bytes at SI, and the marker if it lies in the lowest 16 bits of
// R11. Only where R8 has a bit is there anything; in front of that V is zero. It goes to DI.
#define SPREAD(V) \
	MOVQ R11, R12          \
	ANDNQ R8, R12, R12     \
	KMOVW R12, K1          \
	KMOVW R11, K2          \
	KMOVW R8, K3           \
	VMOVDQU64 (SI), V      \
	VPEXPANDD.Z V, K1, V   \
	VMOVDQA32 Z24, K2, V   \
	VPCOMPRESSD V, K3, Z25 \
	VMOVDQU64 Z25, (DI)    \
	MOVWLZX R12, R12       \
	POPCNTL R12, R12       \
	LEAQ (SI)(R12*4), SI   \
	MOVWLZX R8, R12        \
	POPCNTL R12, R12       \
	LEAQ (DI)(R12*4), DI   \
	SHRQ $16, R8           \
	SHRQ $16, R11

// WEAVE is SPREAD where there is something everywhere, for Z20 to Z23 at once. It does
// not read what is behind the bytes that it takes: Z23 is filled from memory.
#define WEAVE \
	LEAQ -1(R11), R13      \
	NOTQ R11               \
	KMOVW R11, K1          \
	VMOVDQU64 (SI), Z25    \
	VMOVDQA64 Z24, Z20     \
	VPEXPANDD Z25, K1, Z20 \
	VMOVDQU64 Z20, (DI)    \
	SHRQ $16, R11          \
	KMOVW R11, K1          \
	CMPQ R13, R8           \
	SBBQ AX, AX            \
	VMOVDQU64 64(SI)(AX*4), Z25 \
	VMOVDQA64 Z24, Z21     \
	VPEXPANDD Z25, K1, Z21 \
	VMOVDQU64 Z21, 64(DI)  \
	SHRQ $16, R11          \
	KMOVW R11, K1          \
	CMPQ R13, BX           \
	SBBQ AX, AX            \
	VMOVDQU64 128(SI)(AX*4), Z25 \
	VMOVDQA64 Z24, Z22     \
	VPEXPANDD Z25, K1, Z22 \
	VMOVDQU64 Z22, 128(DI) \
	SHRQ $16, R11          \
	KMOVW R11, K1          \
	CMPQ R13, R15          \
	SBBQ AX, AX            \
	VMOVDQA64 Z24, Z23     \
	VPEXPANDD 192(SI)(AX*4), K1, Z23 \
	VMOVDQU64 Z23, 192(DI) \
	LEAQ 256(SI)(R12*4), SI \
	ADDQ $256, DI

// SUMS adds the bytes in Z20 to Z23 to the sums.
#define SUMS \
	VPDPBUSD Z18, Z20, Z10 \
	VPDPBUSD Z18, Z21, Z11 \
	VPDPBUSD Z18, Z22, Z12 \
	VPDPBUSD Z18, Z23, Z13 \
	VPDPBUSD Z19, Z20, Z14 \
	VPDPBUSD Z19, Z21, Z15 \
	VPDPBUSD Z19, Z22, Z16 \
	VPDPBUSD Z19, Z23, Z17

// FOLD takes Z20 to Z23 into CRC and sums.
#define FOLD \
	VPCLMULQDQ $0x00, Z8, Z0, Z4 \
	VPCLMULQDQ $0x11, Z8, Z0, Z0 \
	VPCLMULQDQ $0x00, Z8, Z1, Z5 \
	VPCLMULQDQ $0x11, Z8, Z1, Z1 \
	VPCLMULQDQ $0x00, Z8, Z2, Z6 \
	VPCLMULQDQ $0x11, Z8, Z2, Z2 \
	VPCLMULQDQ $0x00, Z8, Z3, Z7 \
	VPCLMULQDQ $0x11, Z8, Z3, Z3 \
	SUMS                         \
	VPTERNLOGQ $0x96, Z20, Z4, Z0 \
	VPTERNLOGQ $0x96, Z21, Z5, Z1 \
	VPTERNLOGQ $0x96, Z22, Z6, Z2 \
	VPTERNLOGQ $0x96, Z23, Z7, Z3

// func pass(dst, src *byte, n int, crc, ptr uint32, next int) (reg, even, odd uint32)
//
// SI, DI, CX: src, dst or zero, bytes left. Z0 to Z3: what the CRC has come to;
// only Z0 outside of the loops. Z10 to Z13 and Z14 to Z17: sums, in each 32 bits,
// of the bytes at even and at odd places of a vector.
TEXT ·pass(SB), NOSPLIT, $0-52
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	MOVL crc+24(FP), AX
	MOVL ptr+28(FP), R9
	VBROADCASTI32X4 fold512<>(SB), Z9
	MOVL $0x00010001, DX
	VPBROADCASTD DX, Z18 // a one at every even place
	VPSLLD $8, Z18, Z19  // at every odd one
	VPXOR X0, X0, X0
	VPXOR X10, X10, X10
	VPXOR X11, X11, X11
	VPXOR X12, X12, X12
	VPXOR X13, X13, X13
	VPXOR X14, X14, X14
	VPXOR X15, X15, X15
	VPXORQ Z16, Z16, Z16
	VPXORQ Z17, Z17, Z17
	TESTL R9, R9
	JNZ  marked

	// The first CX%64 bytes stand at the end of a vector of zeros, which do not
	// count where the register is not in front of them: it goes in behind them.
	MOVQ CX, BX
	ANDQ $63, BX
	JZ   first
	MOVL $64, R8
	SUBQ BX, R8
	MOVQ $-1, DX
	SHLXQ R8, DX, DX
	KMOVQ DX, K1
	VMOVDQU64 (SI), Z20
	TESTQ DI, DI
	JZ   head
	VMOVDQU64 Z20, (DI) // those behind the first CX%64 come again
	ADDQ BX, DI

head:
	VPEXPANDB.Z Z20, K1, Z0
	VPDPBUSD Z18, Z0, Z10
	VPDPBUSD Z19, Z0, Z14
	VMOVD AX, X4
	VPEXPANDB.Z Z4, K1, Z4
	VPXORQ Z4, Z0, Z0
	ADDQ BX, SI
	SUBQ BX, CX
	// What is left of the register when there were fewer than four.
	SHLL $3, BX
	SHRXQ BX, AX, AX
	CMPL BX, $32
	JB   first
	XORL AX, AX

first: // whole vector
	VMOVDQU64 (SI), Z20
	TESTQ DI, DI
	JZ   second
	VMOVDQU64 Z20, (DI)
	ADDQ $64, DI

second:
	VPDPBUSD Z18, Z20, Z10
	VPDPBUSD Z19, Z20, Z14
	VMOVD AX, X4
	VPXORQ Z4, Z20, Z20
	VPCLMULQDQ $0x00, Z9, Z0, Z4
	VPCLMULQDQ $0x11, Z9, Z0, Z0
	VPTERNLOGQ $0x96, Z20, Z4, Z0
	ADDQ $64, SI
	SUBQ $64, CX
	CMPQ CX, $256
	JB   vectors

	VMOVDQA64 Z0, Z3
	VPXOR X0, X0, X0
	VPXOR X1, X1, X1
	VPXOR X2, X2, X2
	VBROADCASTI32X4 fold2048<>(SB), Z8

	PCALIGN $64
loop:
	// The processor's own prefetcher stops at the end of each page. A page ahead may be the next FPDU.
	PREFETCHT0 4096(SI)
	PREFETCHT0 4160(SI)
	PREFETCHT0 4224(SI)
	PREFETCHT0 4288(SI)
	VMOVDQU64 (SI), Z20
	VMOVDQU64 64(SI), Z21
	VMOVDQU64 128(SI), Z22
	VMOVDQU64 192(SI), Z23
	TESTQ DI, DI
	JZ   read
	VMOVDQU64 Z20, (DI)
	VMOVDQU64 Z21, 64(DI)
	VMOVDQU64 Z22, 128(DI)
	VMOVDQU64 Z23, 192(DI)
	ADDQ $256, DI

read:
	FOLD
	ADDQ $256, SI
	SUBQ $256, CX
	CMPQ CX, $256
	JAE  loop

four: // vectors to one
	VPCLMULQDQ $0x00, Z9, Z0, Z4
	VPCLMULQDQ $0x11, Z9, Z0, Z0
	VPTERNLOGQ $0x96, Z0, Z4, Z1
	VPCLMULQDQ $0x00, Z9, Z1, Z4
	VPCLMULQDQ $0x11, Z9, Z1, Z1
	VPTERNLOGQ $0x96, Z1, Z4, Z2
	VPCLMULQDQ $0x00, Z9, Z2, Z4
	VPCLMULQDQ $0x11, Z9, Z2, Z2
	VPTERNLOGQ $0x96, Z2, Z4, Z3
	VMOVDQA64 Z3, Z0
	VPADDD Z11, Z10, Z10
	VPADDD Z13, Z12, Z12
	VPADDD Z15, Z14, Z14
	VPADDD Z17, Z16, Z16
	VPADDD Z12, Z10, Z10
	VPADDD Z16, Z14, Z14

	PCALIGN $64
vectors:
	CMPQ CX, $64
	JB   reduce
	VMOVDQU64 (SI), Z20
	TESTQ DI, DI
	JZ   one
	VMOVDQU64 Z20, (DI)
	ADDQ $64, DI

one:
	VPCLMULQDQ $0x00, Z9, Z0, Z4
	VPCLMULQDQ $0x11, Z9, Z0, Z0
	VPDPBUSD Z18, Z20, Z10
	VPDPBUSD Z19, Z20, Z14
	VPTERNLOGQ $0x96, Z20, Z4, Z0
	ADDQ $64, SI
	SUBQ $64, CX
	JMP  vectors

reduce: // four lanes to one
	VMOVDQU64 lanes<>(SB), Z8
	VPCLMULQDQ $0x00, Z8, Z0, Z4
	VPCLMULQDQ $0x11, Z8, Z0, Z5
	VPXORQ Z5, Z4, Z4
	VEXTRACTI32X4 $3, Z0, X0
	VEXTRACTI32X4 $1, Z4, X1
	VEXTRACTI32X4 $2, Z4, X2
	VPXOR X4, X0, X0
	VPXOR X2, X1, X1
	VPXOR X1, X0, X0

	// Sums of even and odd places, side by side.
	VPUNPCKLDQ Z14, Z10, Z4
	VPUNPCKHDQ Z14, Z10, Z5
	VPADDD Z5, Z4, Z4
	VEXTRACTI64X4 $1, Z4, Y5
	VPADDD Y5, Y4, Y4
	VEXTRACTI128 $1, Y4, X5
	VPADDD X5, X4, X4
	VPSRLDQ $8, X4, X5
	VPADDD X5, X4, X4
	VMOVQ X4, R8

	VMOVQ X0, AX
	VPEXTRQ $1, X0, DX
	VZEROUPPER
	XORL BX, BX
	CRC32Q AX, BX
	CRC32Q DX, BX
	MOVL BX, reg+40(FP)
	MOVL R8, even+44(FP)
	SHRQ $32, R8
	MOVL R8, odd+48(FP)
	RET

marked: // the first block is filled up in front
	MOVL $1, DX
	MOVQ CX, BX
	NEGQ BX
	ANDQ $255, BX
	ADDQ BX, CX
	SHRQ $2, BX
	MOVQ $-1, R8
	SHLXQ BX, R8, R8
	BLSIQ R8, R13
	KMOVQ R13, K4 // where the first bytes are: the register goes in front of them
	MOVQ next+32(FP), R10
	SHRQ $2, R10
	ADDQ BX, R10
	MARKER
	PASSED
	SPREAD(Z20)
	SPREAD(Z21)
	SPREAD(Z22)
	SPREAD(Z23)
	SUMS
	VPBROADCASTD AX, Z24
	VMOVDQA64 Z20, Z0
	VMOVDQA64 Z21, Z1
	VMOVDQA64 Z22, Z2
	VMOVDQA64 Z23, Z3
	VPXORD Z24, Z0, K4, Z0
	KSHIFTRQ $16, K4, K4
	VPXORD Z24, Z1, K4, Z1
	KSHIFTRQ $16, K4, K4
	VPXORD Z24, Z2, K4, Z2
	KSHIFTRQ $16, K4, K4
	VPXORD Z24, Z3, K4, Z3
	VBROADCASTI32X4 fold2048<>(SB), Z8
	MOVL $0xffff, R8 // bits of one vector, of two, of three
	MOVL $0xffffffff, BX
	MOVQ $0xffffffffffff, R15
	SUBQ $256, CX
	JZ   four

	PCALIGN $64
block:
	MARKER
	WEAVE
	PASSED
	FOLD
	SUBQ $256, CX
	JNZ  block
	JMP  four

// func short(p *byte, n int, crc uint32) (reg, sum uint32)
TEXT ·short(SB), NOSPLIT, $0-32
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
	MOVL crc+16(FP), AX
	XORL DX, DX // the sum, of 64 bits with end-around carry
	SUBQ $8, CX
	JB   four

eight:
	MOVQ (SI), BX
	CRC32Q BX, AX
	ADDQ BX, DX
	ADCQ $0, DX
	ADDQ $8, SI
	SUBQ $8, CX
	JAE  eight

four:
	TESTQ $4, CX
	JZ   two
	MOVL (SI), BX
	CRC32L BX, AX
	ADDQ BX, DX
	ADCQ $0, DX
	ADDQ $4, SI

two:
	TESTQ $2, CX
	JZ   one
	MOVWLZX (SI), BX
	CRC32W BX, AX
	ADDQ BX, DX
	ADCQ $0, DX
	ADDQ $2, SI

one:
	TESTQ $1, CX
	JZ   done
	MOVBLZX (SI), BX
	CRC32B BX, AX
	ADDQ BX, DX
	ADCQ $0, DX

done:
	MOVQ DX, BX
	SHRQ $32, BX
	ADDL BX, DX
	ADCL $0, DX
	MOVL AX, reg+24(FP)
	MOVL DX, sum+28(FP)
	RET

// THREE goes on by eight bytes of each lane: R12, R13 and DX.
#define THREE \
	MOVQ (SI), R12         \
	MOVQ (SI)(CX*1), R13   \
	MOVQ (SI)(CX*2), DX    \
	CRC32Q R12, R8         \
	CRC32Q R13, R9         \
	CRC32Q DX, R10         \
	ADCQ R12, AX           \
	ADCQ R13, AX           \
	ADCQ DX, AX            \
	LEAQ 8(SI), SI

// func lanes(dst, src *byte, k int, crc uint32, one, two uint64) (reg uint32, sum uint64)
TEXT ·lanes(SB), NOSPLIT, $0-64
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ k+16(FP), CX
	MOVL crc+24(FP), R8
	XORL R9, R9
	XORL R10, R10
	MOVQ CX, R11
	SHRQ $3, R11
	TESTQ DI, DI
	JZ   read
	XORL AX, AX // clears the carry, which the loop keeps

copy:
	THREE
	MOVQ R12, (DI)
	MOVQ R13, (DI)(CX*1)
	MOVQ DX, (DI)(CX*2)
	LEAQ 8(DI), DI
	DECQ R11
	JNZ  copy
	JMP  join

read:
	XORL AX, AX

readOn:
	THREE
	DECQ R11
	JNZ  readOn

join:
	ADCQ $0, AX
	// The lanes become one: the first is 2k bytes in front of the end, the second k.
	MOVQ R8, X0
	MOVQ two+40(FP), X1
	PCLMULQDQ $0, X1, X0
	MOVQ R9, X2
	MOVQ one+32(FP), X3
	PCLMULQDQ $0, X3, X2
	PXOR X2, X0
	MOVQ X0, R12
	XORL R8, R8
	CRC32Q R12, R8
	XORL R10, R8
	MOVL R8, reg+48(FP)
	MOVQ AX, sum+56(FP)
	RET

// FOLD16 moves the accumulator acc on by the distance of the constants k: its first 64 bits by those in the
// low half of k, its last ones by those in the high half.
#define FOLD16(k, acc) \
	VPCLMULQDQ $0x11, k, acc, X7   \
	VPCLMULQDQ $0x00, k, acc, acc  \
	VPXOR      X7, acc, acc

// COPY16 adds the 16 bytes at the offset at to acc and copies them. It reads each once.
#define COPY16(at, acc) \
	VMOVDQU at(SI), X6     \
	VMOVDQU X6, at(DI)     \
	VPXOR   X6, acc, acc

// WORDS adds the 64 bytes at p to the sum, with the carry.
#define WORDS(p) \
	ADCQ 0(p), AX  \
	ADCQ 8(p), AX  \
	ADCQ 16(p), AX \
	ADCQ 24(p), AX \
	ADCQ 32(p), AX \
	ADCQ 40(p), AX \
	ADCQ 48(p), AX \
	ADCQ 56(p), AX

// func fold(dst, src *byte, n int, crc uint32, k *[4][2]uint64) (reg uint32, sum uint64)
TEXT ·fold(SB), NOSPLIT, $0-56
	MOVQ    dst+0(FP), DI
	MOVQ    src+8(FP), SI
	MOVQ    n+16(FP), CX
	MOVL    crc+24(FP), R8
	MOVQ    k+32(FP), BX
	VMOVDQU 0(BX), X8
	SHRQ    $6, CX
	VMOVQ   R8, X0
	VPXOR   X1, X1, X1
	VPXOR   X2, X2, X2
	VPXOR   X3, X3, X3
	TESTQ   DI, DI
	JZ      sums
	XORL    AX, AX // clears the carry, which the loop keeps
	JMP     copied

copies:
	FOLD16(X8, X0)
	FOLD16(X8, X1)
	FOLD16(X8, X2)
	FOLD16(X8, X3)

copied:
	COPY16(0, X0)
	COPY16(16, X1)
	COPY16(32, X2)
	COPY16(48, X3)
	WORDS(DI)
	LEAQ 64(SI), SI
	LEAQ 64(DI), DI
	DECQ CX
	JNZ  copies
	JMP  reduce

sums:
	XORL AX, AX
	JMP  summed

summing:
	FOLD16(X8, X0)
	FOLD16(X8, X1)
	FOLD16(X8, X2)
	FOLD16(X8, X3)

summed:
	VPXOR 0(SI), X0, X0
	VPXOR 16(SI), X1, X1
	VPXOR 32(SI), X2, X2
	VPXOR 48(SI), X3, X3
	WORDS(SI)
	LEAQ 64(SI), SI
	DECQ CX
	JNZ  summing

reduce:
	ADCQ    $0, AX
	// The accumulators become one, at the place of the last.
	VMOVDQU 16(BX), X8
	FOLD16(X8, X0)
	VMOVDQU 32(BX), X8
	FOLD16(X8, X1)
	VMOVDQU 48(BX), X8
	FOLD16(X8, X2)
	VPXOR   X0, X3, X3
	VPXOR   X1, X3, X3
	VPXOR   X2, X3, X3
	VMOVQ   X3, R8
	VPEXTRQ $1, X3, R9
	XORL    R10, R10
	CRC32Q  R8, R10
	CRC32Q  R9, R10
	MOVL    R10, reg+40(FP)
	MOVQ    AX, sum+48(FP)
	RET

// func ticks() uint64
TEXT ·ticks(SB), NOSPLIT, $0-8
	RDTSC
	SHLQ $32, DX
	ORQ  DX, AX
	MOVQ AX, ret+0(FP)
	RET
