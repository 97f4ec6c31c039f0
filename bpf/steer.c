//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * steer sends the frames of claimed local endpoints to the AF_XDP socket of
 * their queue, and passes everything else to the kernel.
 *
 * Packets in IP fragments are for the program in fragments.h, if it is installed:
 * without it they are the kernel's.
 */
#include "uapi.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#define MAX_VLAN 2
#define MAX_EXT 8

#define ETH_IPV4 0x0800
#define ETH_IPV6 0x86dd
#define ETH_8021Q 0x8100
#define ETH_8021AD 0x88a8

#define PROTO_ICMP 1
#define PROTO_TCP 6
#define PROTO_UDP 17
#define PROTO_ICMPV6 58
#define PROTO_SCTP 132

/* An endpoint of ours. Family is 4 or 6; the address and the port are in
 * network order; an IPv4 address fills the first four bytes. The all-zero
 * address is every address of the host. */
struct endpoint {
	__u8 family;
	__u8 proto;
	__be16 port;
	__u8 addr[16];
};

struct address {
	__u8 family;
	__u8 zero[3];
	__u8 addr[16];
};

/* The order is that of Counters in steering.go. */
enum verdict {
	STEERED_TCP,
	STEERED_SCTP,
	STEERED_UDP,
	STEERED_ICMP,
	PASSED,
	PASSED_FRAGMENT,
	MALFORMED,
	NO_SOCKET,
	STEERED_FRAGMENT,
	COPIED_FRAGMENT,
	DROPPED_FRAGMENT,
	VERDICTS,
	FRAGMENT = VERDICTS, /* of ip_header: not decided yet */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct endpoint);
	__type(value, __u32);
} endpoints SEC(".maps");

/* The addresses that a claim of every address means, when check_addresses. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, struct address);
	__type(value, __u32);
} addresses SEC(".maps");

/* The program for IP fragments, if it is installed. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} programs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, __u32);
} sockets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, VERDICTS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

/* The VLANs that the host is in, when check_vlans: the identifiers of a frame's
 * tags, 12 bits each, the innermost lowest. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u32);
} vlans SEC(".maps");

/* Not 0: an unspecified address claims only what is in addresses. */
volatile __u32 check_addresses;

/* Not 0: frames of other VLANs are not for this host. */
volatile __u32 check_vlans;

struct ether {
	__u8 dst[6], src[6];
	__be16 type;
} __attribute__((packed));

struct vlan {
	__be16 tci;
	__be16 type;
} __attribute__((packed));

struct ipv4 {
	__u8 version_ihl;
	__u8 tos;
	__be16 len;
	__be16 id;
	__be16 frag;
	__u8 ttl;
	__u8 proto;
	__be16 sum;
	__u8 src[4], dst[4];
} __attribute__((packed));

struct ipv6 {
	__u8 version_tc;
	__u8 flow[3];
	__be16 len;
	__u8 next;
	__u8 hops;
	__u8 src[16], dst[16];
} __attribute__((packed));

struct fragment {
	__u8 next;
	__u8 reserved;
	__be16 off;
	__be32 id;
};

struct ext {
	__u8 next;
	__u8 len;
	__u8 type;
	__u8 left;
};

/* The bytes that are certain in an ICMP error: two ports and four more. TCP,
 * SCTP and UDP all begin with the ports. */
struct ports {
	__be16 src;
	__be16 dst;
	__be32 rest;
};

struct icmp {
	__u8 type;
	__u8 code;
	__be16 sum;
	__be32 rest;
};

static __always_inline int count(__u32 verdict)
{
	__u64 *n = bpf_map_lookup_elem(&counters, &verdict);

	if (n)
		(*n)++;
	return XDP_PASS;
}

/* claimed looks for the endpoint, first with its address, then without. */
static __always_inline int claimed(void *map, struct endpoint *key)
{
	if (bpf_map_lookup_elem(map, key))
		return 1;
	if (check_addresses) {
		struct address a = { .family = key->family };

		__builtin_memcpy(a.addr, key->addr, 16);
		if (!bpf_map_lookup_elem(&addresses, &a))
			return 0;
	}
	__builtin_memset(key->addr, 0, 16);
	return bpf_map_lookup_elem(map, key) != 0;
}

/* steer hands the frame to the socket of its queue. */
static __always_inline int steer(struct xdp_md *ctx, __u32 verdict)
{
	int act = bpf_redirect_map(&sockets, ctx->rx_queue_index, XDP_PASS);

	count(act == XDP_REDIRECT ? verdict : NO_SOCKET);
	return act;
}

static __always_inline int is_transport(__u8 proto)
{
	return proto == PROTO_TCP || proto == PROTO_SCTP || proto == PROTO_UDP;
}

static __always_inline __u32 steered(__u8 proto)
{
	return proto == PROTO_TCP ? STEERED_TCP : proto == PROTO_SCTP ? STEERED_SCTP : STEERED_UDP;
}

/* ip_header reads the IP header at pos. With src it fills key with the packet's
 * source address, else with its destination. It returns the transport header,
 * or 0 with *verdict set. */
static __always_inline void *ip_header(void *pos, void *end, int v6, int src,
				       struct endpoint *key, __u32 *verdict)
{
	if (!v6) {
		struct ipv4 *ip = pos;
		__u32 ihl;

		*verdict = MALFORMED;
		if ((void *)(ip + 1) > end || ip->version_ihl >> 4 != 4)
			return 0;
		ihl = (ip->version_ihl & 15) * 4;
		if (ihl < sizeof(*ip) || bpf_ntohs(ip->len) < ihl)
			return 0;
		/* Of a packet of ours, whatever was cut from it, the first
		 * fragment comes back. */
		if (ip->frag & bpf_htons(src ? 0x1fff : 0x3fff)) {
			*verdict = FRAGMENT;
			return 0;
		}
		key->family = 4;
		key->proto = ip->proto;
		if (src)
			__builtin_memcpy(key->addr, ip->src, 4);
		else
			__builtin_memcpy(key->addr, ip->dst, 4);
		return pos + ihl;
	}

	struct ipv6 *ip = pos;
	__u8 next;

	*verdict = MALFORMED;
	if ((void *)(ip + 1) > end || ip->version_tc >> 4 != 6)
		return 0;
	key->family = 6;
	if (src)
		__builtin_memcpy(key->addr, ip->src, 16);
	else
		__builtin_memcpy(key->addr, ip->dst, 16);
	next = ip->next;
	pos = ip + 1;
	for (int i = 0; i < MAX_EXT; i++) {
		struct ext *e = pos;
		__u32 len;

		if (next == 44) {
			/* Ours have it in front. */
			struct fragment *f = pos;

			if (!src || i || (void *)(f + 1) > end || f->off & bpf_htons(0xfff8)) {
				*verdict = FRAGMENT;
				return 0;
			}
			next = f->next;
			pos = f + 1;
			continue;
		}
		/* Hop-by-Hop, Routing, Destination Options, Mobility, HIP,
		 * Shim6, and AH, which counts in other units. */
		if (next != 0 && next != 43 && next != 60 && next != 135 &&
		    next != 139 && next != 140 && next != 51) {
			key->proto = next;
			return pos;
		}
		if ((void *)(e + 1) > end)
			return 0;
		/* With segments left this is not the last destination. */
		if (next == 43 && e->left != 0) {
			*verdict = PASSED;
			return 0;
		}
		len = next == 51 ? (e->len + 2) * 4 : (e->len + 1) * 8;
		next = e->next;
		pos += len;
		if (pos > end)
			return 0;
	}
	return 0;
}

#include "fragments.h"

/* is_error reports whether an ICMP message bears a packet of the receiver. */
static __always_inline int is_error(__u8 type, int v6)
{
	if (v6)
		return type >= 1 && type <= 4;
	return type == 3 || type == 11 || type == 12;
}

SEC("xdp.frags")
int iwarpd_steer(struct xdp_md *ctx)
{
	void *pos = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct ether *eth = pos;
	struct endpoint key = {};
	struct ports *l4;
	__be16 type;
	__u32 verdict, tags = 0;
	int v6;

	if ((void *)(eth + 1) > end)
		return count(MALFORMED);
	/* What was sent to many is no part of a connection. */
	if (eth->dst[0] & 1)
		return count(PASSED);
	type = eth->type;
	pos = eth + 1;
#pragma unroll
	for (int i = 0; i < MAX_VLAN; i++) {
		struct vlan *tag = pos;

		if (type != bpf_htons(ETH_8021Q) && type != bpf_htons(ETH_8021AD))
			break;
		if ((void *)(tag + 1) > end)
			return count(MALFORMED);
		type = tag->type;
		tags = tags << 12 | (bpf_ntohs(tag->tci) & 0xfff);
		pos = tag + 1;
	}
	/* A tag with no VLAN has a priority alone. */
	if (tags && check_vlans && !bpf_map_lookup_elem(&vlans, &tags))
		return count(PASSED);
	if (type == bpf_htons(ETH_IPV4))
		v6 = 0;
	else if (type == bpf_htons(ETH_IPV6))
		v6 = 1;
	else
		return count(PASSED);

	pos = v6 ? ip_header(pos, end, 1, 0, &key, &verdict)
		 : ip_header(pos, end, 0, 0, &key, &verdict);
	if (!pos && verdict == FRAGMENT) {
		bpf_tail_call(ctx, &programs, 0);
		return count(PASSED_FRAGMENT); /* it is not installed */
	}
	if (!pos)
		return count(verdict);

	if (is_transport(key.proto)) {
		l4 = pos;
		if ((void *)(l4 + 1) > end)
			return count(MALFORMED);
		key.port = l4->dst;
		if (!claimed(&endpoints, &key))
			return count(PASSED);
		return steer(ctx, steered(key.proto));
	}

	if (key.proto == (v6 ? PROTO_ICMPV6 : PROTO_ICMP)) {
		struct icmp *icmp = pos;

		if ((void *)(icmp + 1) > end)
			return count(MALFORMED);
		if (!is_error(icmp->type, v6))
			return count(PASSED);
		pos = icmp + 1;
		__builtin_memset(&key, 0, sizeof(key));
		pos = v6 ? ip_header(pos, end, 1, 1, &key, &verdict)
			 : ip_header(pos, end, 0, 1, &key, &verdict);
		if (!pos)
			return count(verdict == FRAGMENT ? PASSED_FRAGMENT : verdict);
		l4 = pos;
		if (!is_transport(key.proto) || (void *)(l4 + 1) > end)
			return count(PASSED);
		key.port = l4->src;
		if (!claimed(&endpoints, &key))
			return count(PASSED);
		return steer(ctx, STEERED_ICMP);
	}
	return count(PASSED);
}

char _license[] SEC("license") = "Dual BSD/GPL";
