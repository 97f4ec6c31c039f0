/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The optional program for IP fragments. iwarpd_steer jumps to it for each frame
 * that holds one, once it is in the map programs.
 *
 * Of a packet in fragments only the first one tells the ports. A first fragment
 * to a claimed endpoint is taken: copied to a ring, whatever queue it came by,
 * and dropped, so that the kernel never has the packet whole and never answers
 * it. For a while the fragments behind it are known by their identification,
 * and taken too. One that comes before the first is copied to the ring and
 * passed to the kernel, since it may be for either of them: who lacks the
 * first fragment forgets it. So what the kernel receives in fragments it gets
 * all of.
 */

/* How long a first fragment tells whose the others are, in nanoseconds. They
 * come at once; an identification may come again soon (RFC 4963). */
#define FRAGMENT_LIFE 2000000000ULL

/* Frames in the ring are of two sizes, since the verifier knows only constants:
 * those of a usual MTU, and those of a large one. Longer ones are not taken. */
#define SMALL 1580
#define LARGE 10220

/* What has a claim, whatever the port (it is 0 here). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct endpoint);
	__type(value, __u32);
} hosts SEC(".maps");

/* A packet in fragments: in IPv6 the protocol is 0. */
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

/* The packets whose first fragment has come. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct packet);
	__type(value, struct owner);
} packets SEC(".maps");

/* Copies of frames with fragments; reader in fragments.go. */
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

/* Without this the compiler folds two comparisons into one of a difference, in
 * which older verifiers do not see the bounds. */
#define OPAQUE(v) asm volatile("" : "+r"(v))

/* copy puts the frame in the ring, behind its length. */
static __always_inline int copy(struct xdp_md *ctx)
{
	__u64 len = bpf_xdp_get_buff_len(ctx);
	struct small *small;
	struct large *large;
	void *e;
	long err;

	if (len < 14 || len > LARGE)
		return 0;
	OPAQUE(len);
	if (len <= SMALL) {
		small = bpf_ringbuf_reserve(&fragments, sizeof(*small), 0);
		if (!small)
			return 0;
		small->len = len;
		if (len < 14)
			len = 14;
		err = bpf_xdp_load_bytes(ctx, 0, small->frame, len);
		e = small;
	} else {
		large = bpf_ringbuf_reserve(&fragments, sizeof(*large), 0);
		if (!large)
			return 0;
		large->len = len;
		if (len > LARGE)
			len = LARGE;
		err = bpf_xdp_load_bytes(ctx, 0, large->frame, len);
		e = large;
	}
	if (err < 0) {
		bpf_ringbuf_discard(e, 0);
		return 0;
	}
	bpf_ringbuf_submit(e, 0);
	return 1;
}

/* take copies a fragment of ours, and the kernel does not see it. */
static __always_inline int take(struct xdp_md *ctx)
{
	count(copy(ctx) ? STEERED_FRAGMENT : DROPPED_FRAGMENT);
	return XDP_DROP;
}

/* A fragment: which packet it is of, and what of that. */
struct part {
	struct packet packet;
	struct endpoint key;
	__u32 off;
	__u32 len;
	__u32 more;
	__u32 l4; /* where its payload is in the frame */
};

static __always_inline int part4(struct xdp_md *ctx, __u32 pos, struct part *p)
{
	struct ipv4 ip;

	if (bpf_xdp_load_bytes(ctx, pos, &ip, sizeof(ip)) < 0)
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

/* part6 reads the headers up to the Fragment header, and in the first fragment
 * those up to the transport. */
static __always_inline int part6(struct xdp_md *ctx, __u32 pos, struct part *p)
{
	struct ipv6 ip;
	struct ext e;
	__u32 end;
	__u8 next;
	int found = 0;

	if (bpf_xdp_load_bytes(ctx, pos, &ip, sizeof(ip)) < 0)
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
		if (bpf_xdp_load_bytes(ctx, pos, &e, sizeof(e)) < 0)
			return -1;
		if (next == 44) {
			if (found || bpf_xdp_load_bytes(ctx, pos + 4, &p->packet.id, 4) < 0)
				return -1;
			found = 1;
			next = e.next;
			p->off = (e.type << 8 | e.left) & 0xfff8;
			p->more = e.left & 1;
			pos += 8;
			p->len = end > pos ? end - pos : 0;
			if (p->off)
				break;
			continue;
		}
		if (next == 43 && e.left)
			return -1; /* this is not the last destination */
		pos += next == 51 ? (e.len + 2) * 4 : (e.len + 1) * 8;
		next = e.next;
	}
	p->key.proto = next;
	p->l4 = pos;
	return found ? 0 : -1;
}

/* transport_len is what the first fragment of an IPv6 packet has to hold of the
 * transport header: all of it (RFC 8200, Section 4.5). In IPv4 the ports are
 * certain, since a fragment has eight bytes. */
static __always_inline __u32 transport_len(const struct endpoint *key)
{
	if (key->family == 4)
		return sizeof(struct ports);
	return key->proto == PROTO_TCP ? 20 : key->proto == PROTO_SCTP ? 12 : 8;
}

/* iwarpd_fragments decides whose a fragment is. What no host would send is the
 * kernel's to answer. It begins from the frame, and so it reads the headers again. */
SEC("xdp.frags")
int iwarpd_fragments(struct xdp_md *ctx)
{
	struct part p = {};
	struct owner *known, owner = {};
	struct endpoint host;
	struct ports ports;
	__u64 now = bpf_ktime_get_ns();
	__u32 pos = 12;
	__be16 type;

	if (bpf_xdp_load_bytes(ctx, pos, &type, 2) < 0)
		return count(MALFORMED);
	pos += 2;
	for (int i = 0; i < MAX_VLAN; i++) {
		if (type != bpf_htons(ETH_8021Q) && type != bpf_htons(ETH_8021AD))
			break;
		if (bpf_xdp_load_bytes(ctx, pos + 2, &type, 2) < 0)
			return count(MALFORMED);
		pos += 4;
	}
	if ((type == bpf_htons(ETH_IPV4) ? part4(ctx, pos, &p) : part6(ctx, pos, &p)) < 0)
		return count(MALFORMED);
	if (!p.off && !p.more) { /* a packet in one fragment (RFC 6946) */
		if (!is_transport(p.key.proto))
			return count(PASSED_FRAGMENT);
		if (bpf_xdp_load_bytes(ctx, p.l4, &ports, sizeof(ports)) < 0)
			return count(MALFORMED);
		p.key.port = ports.dst;
		return claimed(&endpoints, &p.key) ? steer(ctx, steered(p.key.proto)) : count(PASSED);
	}
	if (!p.len || (p.more && p.len & 7) || p.off + p.len > 65535)
		return count(MALFORMED);

	known = bpf_map_lookup_elem(&packets, &p.packet);
	if (known && now - known->since > FRAGMENT_LIFE)
		known = 0;
	if (p.off && known) {
		if (!known->ours)
			return count(PASSED_FRAGMENT);
		return take(ctx);
	}
	host = p.key;
	if (!is_transport(p.key.proto) || !claimed(&hosts, &host)) {
		if (known) /* of a packet of ours that had this identification */
			known->ours = 0;
		return count(PASSED_FRAGMENT);
	}
	if (p.off)
		return count(copy(ctx) ? COPIED_FRAGMENT : PASSED_FRAGMENT);

	if (p.l4 + transport_len(&p.key) > bpf_xdp_get_buff_len(ctx) ||
	    bpf_xdp_load_bytes(ctx, p.l4, &ports, sizeof(ports)) < 0)
		return count(MALFORMED);
	p.key.port = ports.dst;
	owner.since = now;
	owner.ours = claimed(&endpoints, &p.key);
	bpf_map_update_elem(&packets, &p.packet, &owner, 0);
	if (owner.ours)
		return take(ctx);
	return count(PASSED_FRAGMENT);
}

