//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The parts of the kernel's API that steer.c uses, so that clang and libbpf's headers
 * suffice to compile it: on distributions with multiarch headers linux/types.h is not found
 * for the bpf target.
 */
#ifndef UAPI_H
#define UAPI_H

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef short __s16;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;

enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_PROG_ARRAY = 3,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_XSKMAP = 17,
	BPF_MAP_TYPE_RINGBUF = 27,
};

enum { BPF_F_NO_PREALLOC = 1 };

enum xdp_action { XDP_ABORTED, XDP_DROP, XDP_PASS, XDP_TX, XDP_REDIRECT };

enum tcx_action_base { TCX_NEXT = -1, TCX_PASS = 0, TCX_DROP = 2 };

enum { PACKET_OUTGOING = 4 };

enum bpf_hdr_start_off { BPF_HDR_START_MAC, BPF_HDR_START_NET };

struct xdp_md {
	__u32 data;
	__u32 data_end;
	__u32 data_meta;
	__u32 ingress_ifindex;
	__u32 rx_queue_index;
	__u32 egress_ifindex;
};

/* Only some members; others are where skipped is. */
struct __sk_buff {
	__u32 len;
	__u32 pkt_type;
	__u32 mark;
	__u32 queue_mapping;
	__u32 protocol;
	__u32 vlan_present;
	__u32 vlan_tci;
	__u32 vlan_proto;
	__u32 skipped[36];
	__u32 gso_size;
};

#endif
