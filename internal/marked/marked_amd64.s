#include "textflag.h"

// COPY copies 508 bytes.
#define COPY(src, dst) \
	VMOVDQU64 (src), Z16    \
	VMOVDQU64 64(src), Z17  \
	VMOVDQU64 128(src), Z18 \
	VMOVDQU64 192(src), Z19 \
	VMOVDQU64 256(src), Z20 \
	VMOVDQU64 320(src), Z21 \
	VMOVDQU64 384(src), Z22 \
	VMOVDQU64 444(src), Z23 \
	VMOVDQU64 Z16, (dst)    \
	VMOVDQU64 Z17, 64(dst)  \
	VMOVDQU64 Z18, 128(dst) \
	VMOVDQU64 Z19, 192(dst) \
	VMOVDQU64 Z20, 256(dst) \
	VMOVDQU64 Z21, 320(dst) \
	VMOVDQU64 Z22, 384(dst) \
	VMOVDQU64 Z23, 444(dst)

// func join(dst, src *byte, n, size, first, runs int)
//
// However many bytes stand in front of the first marker, and behind the last run, 508 are
// copied, without a branch. Those too many belong to the first run and to the last one,
// which are copied after them.
TEXT ·join(SB), NOSPLIT, $0-48
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	MOVQ size+24(FP), DX
	MOVQ first+32(FP), BX
	MOVQ runs+40(FP), AX
	LEAQ -508(SI)(DX*1), R8
	LEAQ -508(DI)(CX*1), R9
	COPY(SI, DI)
	LEAQ 4(SI)(BX*1), SI
	ADDQ BX, DI
	DECQ AX
	JZ   last

	PCALIGN $64
next:
	COPY(SI, DI)
	ADDQ $512, SI
	ADDQ $508, DI
	DECQ AX
	JNZ  next

last:
	COPY(R8, R9)
	COPY(SI, DI)
	VZEROUPPER
	RET
