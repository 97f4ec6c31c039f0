//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * These programs select the frames of claimed local endpoints, with the same maps. All
 * other frames go to the kernel.
 *
 *   iwarpd_steer    XDP: redirects them to the AF_XDP socket of their queue;
 *   iwarpd_tap      filter of a packet socket: accepts them, but only the start of long super-frames;
 *   iwarpd_tap_super  filter of another packet socket: accepts long super-frames;
 *   iwarpd_ingress  tc ingress, which runs after the packet sockets: drops them,
 *                   so that the kernel does not see what iwarpd_tap has received.
 *
 * Packets in IP fragments are handled by the programs in fragments.h if these are
 * installed, and by the kernel otherwise.
 */
#include "uapi.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

/* Bytes of a super-frame that suffice to recognize it; see is_super. */
#define SUPER_START 256

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

/*
 * A claimed endpoint. Family is 4 or 6; address and port are in network byte order; an IPv4
 * address is in the first four bytes. The all-zero address stands for all addresses of the
 * host.
 */
struct endpoint {
	__u8 family;
	__u8 proto;
	__be16 port;
	__u8 addr[16];
};

/*
 * The remote end of a flow, or of the only flow of an endpoint that is claimed for one: other
 * frames to its port may belong to connections that the host translates (masquerading). Port
 * 0 stands for all.
 */
struct peer {
	__u8 addr[16] __attribute__((aligned(4)));
	__be16 port;
	__u16 zero;
};

struct flow {
	struct endpoint local;
	struct peer remote;
};

struct address {
	__u8 family;
	__u8 zero[3];
	__u8 addr[16];
};

/* In the order of Counters in steering.go. */
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
	FRAGMENT = VERDICTS, /* result of ip_header: not decided yet */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct endpoint);
	__type(value, struct peer);
} endpoints SEC(".maps");

/* The addresses that a claim of the all-zero address covers, if check_addresses is set. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, struct address);
	__type(value, __u32);
} addresses SEC(".maps");

/*
 * The programs for IP fragments, if installed. All programs of an array must have the same
 * type.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} programs SEC(".maps"), skb_programs SEC(".maps");

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

/*
 * The VLANs of the host, if check_vlans is set: the identifiers of a frame's tags, 12 bits
 * each, the innermost lowest.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u32);
} vlans SEC(".maps");

/* Nonzero: claims of the all-zero address cover only the map addresses. */
volatile __u32 check_addresses;

/* Nonzero: frames of VLANs that are not in the map vlans are passed to the kernel. */
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

/*
 * What an ICMP error quotes at least: two ports and four more bytes. TCP, SCTP and UDP all
 * begin with the ports.
 */
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

/* Where a program is attached; a compile-time constant. */
enum hook { XDP, INGRESS, TAP };

/* load copies n bytes of the frame. */
static __always_inline int load(void *ctx, const enum hook hook, __u32 off, void *to, const __u32 n)
{
	if (hook == XDP) {
		struct xdp_md *xdp = ctx;
		void *p = (void *)(long)xdp->data + off;

		if (p + n > (void *)(long)xdp->data_end)
			return -1;
		__builtin_memcpy(to, p, n);
		return 0;
	}
	return bpf_skb_load_bytes(ctx, off, to, n);
}

/*
 * ether loads the Ethernet header and returns the position of what follows it, which is 0 if
 * the frame has lost it at tc ingress: where generic XDP copies a frame for a program that takes
 * fragments, the kernel forgets how long the header is (skb->mac_len, Linux 6.9 to 6.18 at least).
 */
static __always_inline int ether(void *ctx, const enum hook hook, struct ether *eth)
{
	struct __sk_buff *skb = ctx;
	struct ether mac;
	__u8 differ = 0;

	if (load(ctx, hook, 0, eth, sizeof(*eth)) < 0)
		return -1;
	/* An IP header begins with 4 or 6, and may have the type at the same place, in its source address. */
	if (hook != INGRESS || (eth->type == (__be16)skb->protocol && (eth->dst[0] & 0xd0) != 0x40))
		return sizeof(*eth);
	if (bpf_skb_load_bytes_relative(ctx, 0, &mac, sizeof(mac), BPF_HDR_START_MAC) < 0)
		return -1;
	for (int i = 0; i < (int)sizeof(mac); i++)
		differ |= ((__u8 *)eth)[i] ^ ((__u8 *)&mac)[i];
	*eth = mac;
	return differ ? 0 : sizeof(*eth);
}

static __always_inline __u32 frame_len(void *ctx, const enum hook hook)
{
	return hook == XDP ? bpf_xdp_get_buff_len(ctx) : ((struct __sk_buff *)ctx)->len;
}

static __always_inline void count(__u32 verdict)
{
	__u64 *n = bpf_map_lookup_elem(&counters, &verdict);

	if (n)
		(*n)++;
}

/*
 * any_address makes key that of a claim of all addresses, if such a claim covers the address
 * that it has.
 */
static __always_inline int any_address(struct endpoint *key)
{
	if (check_addresses) {
		struct address a = { .family = key->family };

		__builtin_memcpy(a.addr, key->addr, 16);
		if (!bpf_map_lookup_elem(&addresses, &a))
			return 0;
	}
	__builtin_memset(key->addr, 0, 16);
	return 1;
}

/* same_peer compares words, since the compiler has no memcmp. */
static __always_inline int same_peer(const struct peer *a, const struct peer *b)
{
	const __u32 *x = (const __u32 *)a->addr, *y = (const __u32 *)b->addr;

	return a->port == b->port && x[0] == y[0] && x[1] == y[1] && x[2] == y[2] && x[3] == y[3];
}

/* claimed reports whether the flow is ours. It changes the address of f->local. */
static __always_inline int claimed(struct flow *f)
{
	struct peer *only = bpf_map_lookup_elem(&endpoints, &f->local);

	if (only)
		return !only->port || same_peer(only, &f->remote);
	return any_address(&f->local) && bpf_map_lookup_elem(&endpoints, &f->local);
}

static __always_inline int is_transport(__u8 proto)
{
	return proto == PROTO_TCP || proto == PROTO_SCTP || proto == PROTO_UDP;
}

static __always_inline __u32 steered(__u8 proto)
{
	return proto == PROTO_TCP ? STEERED_TCP : proto == PROTO_SCTP ? STEERED_SCTP : STEERED_UDP;
}

static __always_inline int is_steered(__u32 verdict)
{
	return verdict <= STEERED_ICMP;
}

/* Hides a value's known range from the compiler. */
#define OPAQUE(v) asm volatile("" : "+r"(v))

/* Always 0, but the verifier does not know that: to it, a position to which this is added is unknown. */
static volatile __u32 zero;

/*
 * bound limits a position in the headers, so that the verifier sees the same state after
 * each header on all paths, and need not follow each of them.
 */
static __always_inline __u32 bound(__u32 pos)
{
	OPAQUE(pos);
	return pos & 0x7fff;
}

/*
 * ip_header parses the IP header at pos. It stores the source address in f->local if src is
 * set, and the destination address otherwise, and the other one in f->remote. It returns the
 * position of the transport header, or a negative verdict.
 */
static __always_inline int ip_header(void *ctx, const enum hook hook, __u32 pos, const int v6,
				     const int src, struct flow *f)
{
	if (!v6) {
		struct ipv4 ip;
		__u32 ihl;

		if (load(ctx, hook, pos, &ip, sizeof(ip)) < 0 || ip.version_ihl >> 4 != 4)
			return -MALFORMED;
		ihl = (ip.version_ihl & 15) * 4;
		if (ihl < sizeof(ip) || bpf_ntohs(ip.len) < ihl)
			return -MALFORMED;
		/*
		 * An ICMP error quotes the first fragment of a packet of ours, whichever
		 * fragment caused it.
		 */
		if (ip.frag & bpf_htons(src ? 0x1fff : 0x3fff))
			return -FRAGMENT;
		f->local.family = 4;
		f->local.proto = ip.proto;
		__builtin_memcpy(f->local.addr, src ? ip.src : ip.dst, 4);
		__builtin_memcpy(f->remote.addr, src ? ip.dst : ip.src, 4);
		return bound(pos + ihl);
	}

	struct ipv6 ip;
	__u8 next;

	if (load(ctx, hook, pos, &ip, sizeof(ip)) < 0 || ip.version_tc >> 4 != 6)
		return -MALFORMED;
	f->local.family = 6;
	__builtin_memcpy(f->local.addr, src ? ip.src : ip.dst, 16);
	__builtin_memcpy(f->remote.addr, src ? ip.dst : ip.src, 16);
	next = ip.next;
	pos += sizeof(ip);
	for (int i = 0; i < MAX_EXT; i++) {
		struct fragment frag;
		struct ext e;

		if (next == 44) {
			if (load(ctx, hook, pos, &frag, sizeof(frag)) < 0)
				return -MALFORMED;
			/*
			 * A single fragment may have the whole packet (RFC 6946). A quoted
			 * packet of ours has the Fragment header first.
			 */
			if (frag.off & bpf_htons(src ? 0xfff8 : 0xfff9) || (src && i))
				return -FRAGMENT;
			next = frag.next;
			pos = bound(pos + sizeof(frag));
			continue;
		}
		/*
		 * Hop-by-Hop, Routing, Destination Options, Mobility, HIP, Shim6, and AH,
		 * whose length has other units.
		 */
		if (next != 0 && next != 43 && next != 60 && next != 135 &&
		    next != 139 && next != 140 && next != 51) {
			f->local.proto = next;
			return pos;
		}
		if (load(ctx, hook, pos, &e, sizeof(e)) < 0)
			return -MALFORMED;
		/* With segments left, this is not the final destination. */
		if (next == 43 && e.left != 0)
			return -PASSED;
		pos = bound(pos + (next == 51 ? (e.len + 2) * 4 : (e.len + 1) * 8));
		next = e.next;
	}
	return -MALFORMED;
}

/*
 * skb_header is ip_header for the filters of packet sockets, as a function that the verifier
 * checks only once. The other programs make tail calls, and the kernel has tail calls beside
 * functions only where it compiles programs to machine code: not with net.core.bpf_jit_enable=0.
 * how has these flags.
 */
#define V6 1
#define SRC 2

__noinline int skb_header(struct __sk_buff *skb, __u32 pos, __u32 how, struct flow *f)
{
	if (!f)
		return -MALFORMED;
	pos = bound(pos);
	if (how & V6)
		return how & SRC ? ip_header(skb, TAP, pos, 1, 1, f) : ip_header(skb, TAP, pos, 1, 0, f);
	return how & SRC ? ip_header(skb, TAP, pos, 0, 1, f) : ip_header(skb, TAP, pos, 0, 0, f);
}

static __always_inline int header(void *ctx, const enum hook hook, __u32 pos, int v6, const int src,
				  struct flow *f)
{
	if (hook == TAP)
		return skb_header(ctx, pos, (v6 ? V6 : 0) | (src ? SRC : 0), f);
	return v6 ? ip_header(ctx, hook, pos, 1, src, f) : ip_header(ctx, hook, pos, 0, src, f);
}

/* is_error reports whether an ICMP message quotes a packet of its receiver. */
static __always_inline int is_error(__u8 type, int v6)
{
	if (v6)
		return type >= 1 && type <= 4;
	return type == 3 || type == 11 || type == 12;
}

/* decide returns the verdict for a frame: it is ours if is_steered. */
static __always_inline __u32 decide(void *ctx, const enum hook hook)
{
	struct ether eth;
	struct flow f = {};
	struct ports l4;
	__u32 tags = 0, pos;
	int v6, l4_pos = ether(ctx, hook, &eth), i = 0;

	if (l4_pos < 0)
		return MALFORMED;
	pos = bound(l4_pos + zero);
	/* Multicast frames never belong to a connection. */
	if (eth.dst[0] & 1)
		return PASSED;
	/* The kernel has removed the outermost tag from the frame. */
	if (hook != XDP && ((struct __sk_buff *)ctx)->vlan_present) {
		tags = ((struct __sk_buff *)ctx)->vlan_tci & 0xfff;
		i = 1;
	}
	for (; i < MAX_VLAN; i++) {
		struct vlan tag;

		if (eth.type != bpf_htons(ETH_8021Q) && eth.type != bpf_htons(ETH_8021AD))
			break;
		if (load(ctx, hook, pos, &tag, sizeof(tag)) < 0)
			return MALFORMED;
		eth.type = tag.type;
		tags = tags << 12 | (bpf_ntohs(tag.tci) & 0xfff);
		pos = bound(pos + sizeof(tag));
	}
	/* A tag with VLAN 0 has only a priority. */
	if (tags && check_vlans && !bpf_map_lookup_elem(&vlans, &tags))
		return PASSED;
	if (eth.type == bpf_htons(ETH_IPV4))
		v6 = 0;
	else if (eth.type == bpf_htons(ETH_IPV6))
		v6 = 1;
	else
		return PASSED;

	l4_pos = header(ctx, hook, pos, v6, 0, &f);
	if (l4_pos < 0)
		return -l4_pos;
	pos = bound(l4_pos);

	if (is_transport(f.local.proto)) {
		if (load(ctx, hook, pos, &l4, sizeof(l4)) < 0)
			return MALFORMED;
		f.local.port = l4.dst;
		f.remote.port = l4.src;
		return claimed(&f) ? steered(f.local.proto) : PASSED;
	}

	if (f.local.proto == (v6 ? PROTO_ICMPV6 : PROTO_ICMP)) {
		struct icmp icmp;

		if (load(ctx, hook, pos, &icmp, sizeof(icmp)) < 0)
			return MALFORMED;
		if (!is_error(icmp.type, v6))
			return PASSED;
		pos += sizeof(icmp);
		__builtin_memset(&f, 0, sizeof(f));
		l4_pos = header(ctx, hook, pos, v6, 1, &f);
		if (l4_pos < 0)
			return l4_pos == -FRAGMENT ? PASSED_FRAGMENT : -l4_pos;
		pos = bound(l4_pos);
		if (!is_transport(f.local.proto) || load(ctx, hook, pos, &l4, sizeof(l4)) < 0)
			return PASSED;
		f.local.port = l4.src;
		f.remote.port = l4.dst;
		return claimed(&f) ? STEERED_ICMP : PASSED;
	}
	return PASSED;
}

/* steer redirects the frame to the socket of its queue. */
static __always_inline int steer(struct xdp_md *ctx, __u32 verdict)
{
	int act = bpf_redirect_map(&sockets, ctx->rx_queue_index, XDP_PASS);

	count(act == XDP_REDIRECT ? verdict : NO_SOCKET);
	return act;
}

#include "fragments.h"

SEC("xdp.frags")
int iwarpd_steer(struct xdp_md *ctx)
{
	__u32 verdict = decide(ctx, XDP);

	if (is_steered(verdict))
		return steer(ctx, verdict);
	if (verdict == FRAGMENT) {
		bpf_tail_call(ctx, &programs, 0);
		verdict = PASSED_FRAGMENT; /* no program for fragments is installed */
	}
	count(verdict);
	return XDP_PASS;
}

SEC("tc")
int iwarpd_ingress(struct __sk_buff *skb)
{
	__u32 verdict = decide(skb, INGRESS);

	if (verdict == FRAGMENT) {
		bpf_tail_call(skb, &skb_programs, 0);
		verdict = PASSED_FRAGMENT;
	}
	count(verdict);
	return is_steered(verdict) ? TCX_DROP : TCX_NEXT;
}

/*
 * is_super reports whether the frame is a long super-frame. One that ends with its start is
 * received like other frames: the second socket would keep it until a long one comes.
 */
static __always_inline int is_super(const struct __sk_buff *skb)
{
	return skb->gso_size && skb->len > SUPER_START;
}

SEC("socket")
int iwarpd_tap(struct __sk_buff *skb)
{
	if (skb->pkt_type == PACKET_OUTGOING)
		return 0;
	if (!is_steered(decide(skb, TAP)))
		return 0;
	return is_super(skb) ? SUPER_START : -1; /* -1: all of the frame */
}

SEC("socket")
int iwarpd_tap_super(struct __sk_buff *skb)
{
	if (!is_super(skb) || skb->pkt_type == PACKET_OUTGOING)
		return 0;
	return is_steered(decide(skb, TAP)) ? -1 : 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
