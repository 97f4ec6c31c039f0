/*
 * RDMAP and DDP (RFC 5040, RFC 5041) of a session. The first byte of each message is a
 * command; numbers are in network byte order.
 *
 *	e ...                           sends the message back
 *	m count4 size4 seed4            sends count messages with a pattern
 *	w off4 len4 rkey4 addr8         writes from its memory to the peer's, then sends "w"
 *	r off4 len4 rkey4 addr8         reads from the peer's memory, then sends "r"
 *	h off4 len4                     sends "h" and the FNV-1a hash of its memory, 8 bytes
 *	f limit4                        DDP segments have up to limit bytes, which SCTP
 *	                                then fragments; 0: none is fragmented
 *	i stream2                       begins another session
 *	o                               sends a segment with ordered delivery
 *	p                               sends a segment with an unknown PPID
 *	b                               writes outside of the peer's region
 *	n                               sends a segment with a DDP-SSN far ahead
 *	T, A, S                         sends Terminate, ABORT or SHUTDOWN
 *
 * The peer's memory is mem. It has one STag, and begins at MEM_BASE.
 */
enum { MEM_SIZE = 4 << 20, MEM_STAG = 0x00a1b2c3, MEM_BASE = 0x100000, MAX_SEND = 1 << 20 };

static unsigned char mem[MEM_SIZE];
static size_t limit;

struct rdmap {
	uint32_t msn_out[3];
	uint32_t msn_in[3];
	unsigned char *part;
	size_t npart;
	int reading;
};

static void segment(uint16_t sid, const unsigned char *hdr, size_t nhdr, const unsigned char *b, size_t n, int ordered, uint32_t ppid);

static uint32_t get32(const unsigned char *b) { return (uint32_t)b[0] << 24 | b[1] << 16 | b[2] << 8 | b[3]; }
static uint64_t get64(const unsigned char *b) { return (uint64_t)get32(b) << 32 | get32(b + 4); }
static void put32(unsigned char *b, uint32_t v) { b[0] = v >> 24, b[1] = v >> 16, b[2] = v >> 8, b[3] = v; }
static void put64(unsigned char *b, uint64_t v) { put32(b, v >> 32), put32(b + 4, v); }

/* Size of a DDP segment in bytes, including its header. */
static size_t mulpdu(void) { return (limit ? limit : fragment_point()) - 2; }

static void tagged(uint16_t sid, int op, uint32_t stag, uint64_t to, const unsigned char *b, size_t n)
{
	size_t max = mulpdu() - 14;

	do {
		size_t k = n < max ? n : max;
		unsigned char h[14] = {k == n ? 0xc1 : 0x81, 0x40 | op};

		put32(h + 2, stag);
		put64(h + 6, to);
		segment(sid, h, sizeof h, b, k, 0, ppid_segment());
		b += k, n -= k, to += k;
	} while (n > 0);
}

static void untagged(struct rdmap *r, uint16_t sid, int op, int qn, const unsigned char *b, size_t n)
{
	size_t max = mulpdu() - 18;
	uint32_t mo = 0;

	r->msn_out[qn]++;
	do {
		size_t k = n < max ? n : max;
		unsigned char h[18] = {k == n ? 0x41 : 0x01, 0x40 | op};

		put32(h + 6, qn);
		put32(h + 10, r->msn_out[qn]);
		put32(h + 14, mo);
		segment(sid, h, sizeof h, b, k, 0, ppid_segment());
		b += k, n -= k, mo += k;
	} while (n > 0);
}

static void rdmap_send(struct rdmap *r, uint16_t sid, const unsigned char *b, size_t n) { untagged(r, sid, 3, 0, b, n); }

static unsigned char *range(uint64_t off, size_t n) { return off > MEM_SIZE || n > MEM_SIZE - off ? NULL : mem + off; }

static int bad(const char *what)
{
	printf("wrong: %s\n", what);
	return -1;
}

/* One whole Send. */
static int command(struct rdmap *r, uint16_t sid, unsigned char *b, size_t n)
{
	unsigned char h[32] = {0};
	uint32_t i, j, len;

	switch (n ? b[0] : 'e') {
	case 'e':
		rdmap_send(r, sid, b, n);
		return 0;
	case 'm':
		if (n != 13 || (len = get32(b + 5)) < 4 || len > MAX_SEND)
			return bad("m");
		for (i = 0; i < get32(b + 1); i++) {
			static unsigned char m[MAX_SEND];

			put32(m, i);
			for (j = 4; j < len; j++)
				m[j] = i * 7 + j * 13 + get32(b + 9);
			rdmap_send(r, sid, m, len);
		}
		return 0;
	case 'w':
	case 'r':
		if (n != 21 || !range(get32(b + 1), get32(b + 5)))
			return bad("w or r");
		if (b[0] == 'w') {
			tagged(sid, 0, get32(b + 9), get64(b + 13), mem + get32(b + 1), get32(b + 5));
			rdmap_send(r, sid, b, 1);
			return 0;
		}
		put32(h, MEM_STAG);
		put64(h + 4, MEM_BASE + get32(b + 1));
		put32(h + 12, get32(b + 5));
		put32(h + 16, get32(b + 9));
		put64(h + 20, get64(b + 13));
		r->reading++;
		untagged(r, sid, 1, 1, h, 28);
		return 0;
	case 'h': {
		uint64_t sum = 0xcbf29ce484222325;
		unsigned char *p = n == 9 ? range(get32(b + 1), get32(b + 5)) : NULL;

		if (!p)
			return bad("h");
		for (i = 0; i < get32(b + 5); i++)
			sum = (sum ^ p[i]) * 0x100000001b3;
		h[0] = 'h';
		put64(h + 1, sum);
		rdmap_send(r, sid, h, 9);
		return 0;
	}
	case 'f':
		set_limit(get32(b + 1));
		rdmap_send(r, sid, b, 1);
		return 0;
	case 'i':
		initiate(b[1] << 8 | b[2]);
		return 0;
	case 'o':
	case 'p':
		h[0] = 0x41, h[1] = 0x43;
		put32(h + 10, r->msn_out[0] + 1);
		segment(sid, h, 18, b, 1, b[0] == 'o', b[0] == 'p' ? 4711 : ppid_segment());
		return 0;
	case 'b':
		tagged(sid, 0, 0x01020304, 0, mem, 100);
		return 0;
	case 'n':
		skip(sid, 20000);
		rdmap_send(r, sid, b, 1);
		return 0;
	case 'T':
		terminate(sid);
		return 0;
	case 'A':
		abort_association();
		return 0;
	case 'S':
		x_shutdown(sock, SHUT_WR);
		return 0;
	}
	return bad("command");
}

/* Handles the next DDP segment in the order of DDP-SSNs. */
static int rdmap_segment(struct rdmap *r, uint16_t sid, unsigned char *b, size_t n)
{
	uint32_t qn;
	int op;

	if (n < 14 || (b[0] & 0x3f) != 1 || b[1] >> 6 != 1)
		return bad("DDP or RDMAP header");
	op = b[1] & 15;
	if (b[0] & 0x80) {
		uint64_t off = get64(b + 6) - MEM_BASE;
		unsigned char *p = range(off, n - 14);

		if ((op != 0 && op != 2) || get32(b + 2) != MEM_STAG || !p)
			return bad("tagged segment");
		memcpy(p, b + 14, n - 14);
		if (op == 2 && (b[0] & 0x40)) {
			if (r->reading-- == 0)
				return bad("Read Response");
			rdmap_send(r, sid, (const unsigned char *)"r", 1);
		}
		return 0;
	}
	if (n < 18 || (qn = get32(b + 6)) > 2 || (qn == 0) != (op >= 3 && op <= 6) || (qn == 1) != (op == 1) || (qn == 2) != (op == 7))
		return bad("untagged segment");
	if (get32(b + 10) != r->msn_in[qn] + 1)
		return bad("MSN");
	if (get32(b + 14) != r->npart || r->npart + n - 18 > MAX_SEND)
		return bad("MO");
	if (!r->part)
		r->part = malloc(MAX_SEND);
	memcpy(r->part + r->npart, b + 18, n - 18);
	r->npart += n - 18;
	if (!(b[0] & 0x40))
		return 0;
	n = r->npart;
	r->npart = 0;
	r->msn_in[qn]++;
	b = r->part;
	switch (qn) {
	case 0:
		return command(r, sid, b, n);
	case 1: {
		unsigned char *p;

		if (n != 28 || get32(b + 16) != MEM_STAG || !(p = range(get64(b + 20) - MEM_BASE, get32(b + 12))))
			return bad("Read Request");
		tagged(sid, 2, get32(b), get64(b + 4), p, get32(b + 12));
		return 0;
	}
	}
	printf("terminate %d/%d/0x%02x\n", b[0] >> 4, b[0] & 15, b[1]);
	return 0;
}
