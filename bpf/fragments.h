/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The optional programs for IP fragments. iwarpd_steer and iwarpd_ingress tail-call theirs
 * for each frame with a fragment, if it is in the map of programs.
 *
 * Only the first fragment of a packet has the ports. A first fragment for a claimed
 * endpoint is copied to a ring, whatever its queue, and dropped, so that the kernel never
 * gets the whole packet and never responds to it. Later fragments are recognized by their
 * identification for a while, and treated in the same way. A fragment that arrives before
 * the first one is both copied to the ring and passed to the kernel: whichever of them
 * lacks the first fragment times out. The kernel therefore receives its own packets
 * completely.
 */

/*
 * How long a first fragment identifies later ones, in nanoseconds. They usually follow at
 * once, and an identification may be reused soon (RFC 4963).
 */
#define FRAGMENT_LIFE 2000000000ULL

/*
 * Frames are stored in two sizes, for usual and for jumbo MTUs, since the verifier accepts
 * only constants. Longer frames are dropped.
 */
#define SMALL 1584
#define LARGE 10224

/* The shortest fragment after the Ethernet header. */
#define LEAST sizeof(struct ipv4)

/* Addresses with a claim on any port (the port is 0 here). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct endpoint);
	__type(value, __u32);
} hosts SEC(".maps");

/* has_claim reports whether there is a claim on a port of the address. It changes the address. */
static __always_inline int has_claim(struct endpoint *host)
{
	if (bpf_map_lookup_elem(&hosts, host))
		return 1;
	return any_address(host) && bpf_map_lookup_elem(&hosts, host);
}

/* A fragmented packet. In IPv6 the protocol is 0. */
struct packet {
	__u8 family;
	__u8 proto;
	__u8 zero[2];
	__u32 id;
	__u8 src[16], dst[16];
};

struct owner {
	__u64 since;
	__u32 ours;
	__u32 zero;
};

/* The packets whose first fragment has arrived. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct packet);
	__type(value, struct owner);
} packets SEC(".maps");

/* Copies of frames with fragments; fragments.go reads them. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} fragments SEC(".maps");

struct small {
	__u32 len;
	__u8 frame[SMALL];
};

struct large {
	__u32 len;
	__u8 frame[LARGE];
};

/*
 * copy_frame copies the frame to to, and reinserts a VLAN tag that the kernel has removed. rest is
 * the number of bytes after the Ethernet header, at most most, and pos their position.
 */
static __always_inline long copy_frame(void *ctx, const enum hook hook, __u32 pos, __u8 *to, __u64 rest,
				       const __u64 most, int tagged)
{
	struct __sk_buff *skb = ctx;

	if (hook != XDP && bpf_skb_load_bytes_relative(ctx, 0, to, 12, BPF_HDR_START_MAC) < 0)
		return -1;
	OPAQUE(rest); /* its bounds, which older verifiers forget in the calls before */
	if (rest < LEAST)
		rest = LEAST;
	if (rest > most)
		rest = most;
	if (hook == XDP)
		return bpf_xdp_load_bytes(ctx, 0, to, 14 + rest);
	if (!tagged) {
		*(__be16 *)(to + 12) = skb->protocol;
		return bpf_skb_load_bytes(ctx, pos, to + 14, rest);
	}
	*(__be16 *)(to + 12) = skb->vlan_proto;
	*(__be16 *)(to + 14) = bpf_htons(skb->vlan_tci);
	*(__be16 *)(to + 16) = skb->protocol;
	return bpf_skb_load_bytes(ctx, pos, to + 18, rest);
}

/* copy writes the frame to the ring, after its length. pos is that of what follows the Ethernet header. */
static __always_inline int copy(void *ctx, const enum hook hook, __u32 pos)
{
	int tagged = hook != XDP && ((struct __sk_buff *)ctx)->vlan_present;
	__u32 header = tagged ? 18 : 14;
	__u64 rest = frame_len(ctx, hook) - pos;
	struct small *small;
	struct large *large;
	void *e;
	long err;

	if (rest < LEAST || rest > LARGE - 18)
		return 0;
	if (rest <= SMALL - 18) {
		small = bpf_ringbuf_reserve(&fragments, sizeof(*small), 0);
		if (!small)
			return 0;
		small->len = header + rest;
		err = copy_frame(ctx, hook, pos, small->frame, rest, SMALL - 18, tagged);
		e = small;
	} else {
		large = bpf_ringbuf_reserve(&fragments, sizeof(*large), 0);
		if (!large)
			return 0;
		large->len = header + rest;
		err = copy_frame(ctx, hook, pos, large->frame, rest, LARGE - 18, tagged);
		e = large;
	}
	if (err < 0) {
		bpf_ringbuf_discard(e, 0);
		return 0;
	}
	bpf_ringbuf_submit(e, 0);
	return 1;
}

/* A fragment: its packet, and its part of it. */
struct part {
	struct packet packet;
	struct endpoint key;
	__u32 off;
	__u32 len;
	__u32 more;
	__u32 l4; /* offset of its payload in the frame */
};

static __always_inline int part4(void *ctx, const enum hook hook, __u32 pos, struct part *p)
{
	struct ipv4 ip;

	if (load(ctx, hook, pos, &ip, sizeof(ip)) < 0)
		return -1;
	p->off = (bpf_ntohs(ip.frag) & 0x1fff) * 8;
	p->more = ip.frag & bpf_htons(0x2000);
	p->l4 = (ip.version_ihl & 15) * 4;
	p->len = bpf_ntohs(ip.len) - p->l4;
	p->l4 += pos;
	p->packet.family = 4;
	p->packet.proto = ip.proto;
	p->packet.id = ip.id;
	__builtin_memcpy(p->packet.src, ip.src, 4);
	__builtin_memcpy(p->packet.dst, ip.dst, 4);
	p->key.family = 4;
	p->key.proto = ip.proto;
	__builtin_memcpy(p->key.addr, ip.dst, 4);
	return 0;
}

/*
 * part6 parses the headers up to the Fragment header and, for the first fragment, up to the
 * transport.
 */
static __always_inline int part6(void *ctx, const enum hook hook, __u32 pos, struct part *p)
{
	struct ipv6 ip;
	struct ext e;
	__u32 end;
	__u8 next;
	int found = 0;

	if (load(ctx, hook, pos, &ip, sizeof(ip)) < 0)
		return -1;
	next = ip.next;
	pos += sizeof(ip);
	end = pos + bpf_ntohs(ip.len);
	p->packet.family = 6;
	__builtin_memcpy(p->packet.src, ip.src, 16);
	__builtin_memcpy(p->packet.dst, ip.dst, 16);
	p->key.family = 6;
	__builtin_memcpy(p->key.addr, ip.dst, 16);
	for (int i = 0; i < MAX_EXT; i++) {
		if (next != 0 && next != 43 && next != 60 && next != 51 && next != 44)
			break;
		if (load(ctx, hook, pos, &e, sizeof(e)) < 0)
			return -1;
		if (next == 44) {
			if (found || load(ctx, hook, pos + 4, &p->packet.id, 4) < 0)
				return -1;
			found = 1;
			next = e.next;
			p->off = (e.type << 8 | e.left) & 0xfff8;
			p->more = e.left & 1;
			pos = bound(pos + 8);
			p->len = end > pos ? end - pos : 0;
			if (p->off)
				break;
			continue;
		}
		if (next == 43 && e.left)
			return -1; /* this is not the final destination */
		pos = bound(pos + (next == 51 ? (e.len + 2) * 4 : (e.len + 1) * 8));
		next = e.next;
	}
	p->key.proto = next;
	p->l4 = pos;
	return found ? 0 : -1;
}

/*
 * transport_len returns how much of the transport header the first fragment of an IPv6
 * packet must contain: all of it (RFC 8200, Section 4.5). In IPv4 each fragment has at
 * least eight bytes, which include the ports.
 */
static __always_inline __u32 transport_len(const struct endpoint *key)
{
	if (key->family == 4)
		return sizeof(struct ports);
	return key->proto == PROTO_TCP ? 20 : key->proto == PROTO_SCTP ? 12 : 8;
}

/*
 * fragment decides where a fragment goes. Invalid ones are left to the kernel. It parses
 * the headers again, since a tail call passes only the frame.
 */
static __always_inline __u32 fragment(void *ctx, const enum hook hook)
{
	struct part p = {};
	struct owner *known, owner = {};
	struct endpoint host;
	struct flow f = {};
	struct ports ports;
	__u64 now = bpf_ktime_get_ns();
	struct ether eth;
	int start = ether(ctx, hook, &eth);
	__u32 pos = start;
	__be16 type;

	if (start < 0)
		return MALFORMED;
	type = eth.type;
	for (int i = 0; i < MAX_VLAN; i++) {
		if (type != bpf_htons(ETH_8021Q) && type != bpf_htons(ETH_8021AD))
			break;
		if (load(ctx, hook, pos + 2, &type, 2) < 0)
			return MALFORMED;
		pos += 4;
	}
	if ((type == bpf_htons(ETH_IPV4) ? part4(ctx, hook, pos, &p) : part6(ctx, hook, pos, &p)) < 0)
		return MALFORMED;
	if (!p.len || (p.more && p.len & 7) || p.off + p.len > 65535)
		return MALFORMED;

	known = bpf_map_lookup_elem(&packets, &p.packet);
	if (known && now - known->since > FRAGMENT_LIFE)
		known = 0;
	if (p.off && known) {
		if (!known->ours)
			return PASSED_FRAGMENT;
		return copy(ctx, hook, start) ? STEERED_FRAGMENT : DROPPED_FRAGMENT;
	}
	host = p.key;
	if (!is_transport(p.key.proto) || !has_claim(&host)) {
		if (known) /* of an earlier packet with this identification */
			known->ours = 0;
		return PASSED_FRAGMENT;
	}
	if (p.off)
		return copy(ctx, hook, start) ? COPIED_FRAGMENT : PASSED_FRAGMENT;

	if (p.l4 + transport_len(&p.key) > frame_len(ctx, hook) ||
	    load(ctx, hook, p.l4, &ports, sizeof(ports)) < 0)
		return MALFORMED;
	f.local = p.key;
	f.local.port = ports.dst;
	__builtin_memcpy(f.remote.addr, p.packet.src, 16);
	f.remote.port = ports.src;
	owner.since = now;
	owner.ours = claimed(&f);
	bpf_map_update_elem(&packets, &p.packet, &owner, 0);
	if (owner.ours)
		return copy(ctx, hook, start) ? STEERED_FRAGMENT : DROPPED_FRAGMENT;
	return PASSED_FRAGMENT;
}

/* is_taken reports whether a fragment must be hidden from the kernel. */
static __always_inline int is_taken(__u32 verdict)
{
	return verdict == STEERED_FRAGMENT || verdict == DROPPED_FRAGMENT;
}

SEC("xdp.frags")
int iwarpd_fragments(struct xdp_md *ctx)
{
	__u32 verdict = fragment(ctx, XDP);

	count(verdict);
	return is_taken(verdict) ? XDP_DROP : XDP_PASS;
}

SEC("tc")
int iwarpd_skb_fragments(struct __sk_buff *skb)
{
	__u32 verdict = fragment(skb, INGRESS);

	count(verdict);
	return is_taken(verdict) ? TCX_DROP : TCX_NEXT;
}
