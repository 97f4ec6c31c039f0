/* Connections of rsockets: their buffers, and the messages by which the peers exchange data. */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "rs.h"

enum {
	VERSION = 1,
	BIG_ENDIAN_HOST = 1, /* flags of struct rs_hello */
	HAS_IOMAPS = 2,
	OP_SHIFT = 29,
	MAX_WRITE = 1 << 16, /* bytes of a Write, so that one is copied while others are sent */
	MAX_CONTROLS = 8,    /* work requests for credits outstanding; two more say goodbye */
	SPARE = 64,	     /* receives beyond the credits, for messages that need none */
	RESERVE = 8,	     /* most credits that are left for those: a peer may have no other receives for them */
	INLINE = 64,
	BATCH = 16,
};

/* A wr_id says what completed: a receive and its message, or a number of work requests and of bytes of the buffer. */
#define RECEIVED ((uint64_t)1 << 63)
#define CONTROL ((uint64_t)1 << 62)
#define SENT(requests, bytes) ((uint64_t)(requests) << 32 | (bytes))

static size_t page_up(size_t n)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);

	return (n + page - 1) & ~(page - 1);
}

static uint32_t receives(const struct rs *rs)
{
	return rs->opt.recv_queue + SPARE;
}

static size_t messages_size(const struct rs *rs)
{
	return page_up(receives(rs) * sizeof(*rs->messages));
}

static size_t memory_size(const struct rs *rs)
{
	return page_up(sizeof(*rs->table)) + page_up(rs->opt.in_size) + messages_size(rs) + page_up(rs->opt.out_size);
}

/* map makes and registers the memory of a connection. The peer may write to the table and to the buffer in. */
static int map(struct rs *rs)
{
	enum { REMOTE = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };
	struct ibv_pd *pd = rs->id->qp->pd;
	uint8_t *m = mmap(NULL, memory_size(rs), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (m == MAP_FAILED)
		return -1;
	rs->table = (struct rs_table *)(void *)m;
	rs->in = m + page_up(sizeof(*rs->table));
	rs->messages = (uint32_t *)(void *)(rs->in + page_up(rs->opt.in_size));
	rs->out = (uint8_t *)rs->messages + messages_size(rs);
	rs->table_mr = ibv_reg_mr(pd, rs->table, sizeof(*rs->table), REMOTE);
	rs->in_mr = ibv_reg_mr(pd, rs->in, rs->opt.in_size, REMOTE);
	rs->out_mr = ibv_reg_mr(pd, rs->messages, messages_size(rs) + rs->opt.out_size, IBV_ACCESS_LOCAL_WRITE);
	return rs->table_mr && rs->in_mr && rs->out_mr ? 0 : -1;
}

static int post_receive(struct rs *rs, uint32_t index)
{
	struct ibv_sge at = {
		.addr = (uintptr_t)&rs->messages[index], .length = sizeof(*rs->messages), .lkey = rs->out_mr->lkey,
	};
	struct ibv_recv_wr wr = { .wr_id = RECEIVED | index, .sg_list = &at, .num_sge = 1 }, *bad;

	return set_errno(ibv_post_recv(rs->id->qp, &wr, &bad));
}

/* make_queues makes the queue pair, whose completions all go to one queue. */
static int make_queues(struct rs *rs)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = INLINE }, .qp_type = IBV_QPT_RC,
	};
	struct ibv_device_attr device;
	uint32_t most;

	if (set_errno(ibv_query_device(rs->id->verbs, &device)) < 0)
		return -1;
	most = (uint32_t)least((uint64_t)device.max_qp_wr, (uint64_t)device.max_cqe / 2) - SPARE;
	rs->opt.send_queue = (uint32_t)least(rs->opt.send_queue, most / 2);
	rs->opt.recv_queue = (uint32_t)least(rs->opt.recv_queue, most);
	attr.cap.max_send_wr = 2 * rs->opt.send_queue + MAX_CONTROLS + 2;
	attr.cap.max_recv_wr = receives(rs);
	rs->completions = ibv_create_comp_channel(rs->id->verbs);
	if (!rs->completions || fcntl(rs->completions->fd, F_SETFL, O_NONBLOCK) < 0)
		return -1;
	rs->cq = ibv_create_cq(rs->id->verbs, (int)(attr.cap.max_send_wr + attr.cap.max_recv_wr), NULL,
			       rs->completions, 0);
	attr.send_cq = attr.recv_cq = rs->cq;
	return rs->cq ? rdma_create_qp(rs->id, NULL, &attr) : -1;
}

int rs_open(struct rs *rs)
{
	if (make_queues(rs) < 0 || map(rs) < 0)
		return -1;
	for (uint32_t i = 0; i < receives(rs); i++)
		if (post_receive(rs, i) < 0)
			return -1;
	rs->in_offered = rs->in_free = rs->in_offer = rs->opt.in_size / 2;
	return 0;
}

static void deregister(struct ibv_mr **mr)
{
	if (*mr)
		ibv_dereg_mr(*mr);
	*mr = NULL;
}

void rs_close(struct rs *rs)
{
	if (rs->id && rs->id->qp)
		rdma_destroy_qp(rs->id);
	rs_iomaps_free(rs);
	if (rs->cq)
		ibv_destroy_cq(rs->cq);
	if (rs->completions)
		ibv_destroy_comp_channel(rs->completions);
	rs->cq = NULL;
	rs->completions = NULL;
	deregister(&rs->table_mr);
	deregister(&rs->in_mr);
	deregister(&rs->out_mr);
	if (rs->table)
		munmap(rs->table, memory_size(rs));
	rs->table = NULL;
}

static uint8_t byte_order(void)
{
	return htobe16(1) == 1 ? BIG_ENDIAN_HOST : 0;
}

static struct rs_sge sge_to_be(uint64_t addr, uint32_t key, uint32_t length)
{
	return (struct rs_sge){ .addr = htobe64(addr), .key = htobe32(key), .length = htobe32(length) };
}

static struct rs_sge sge_from_be(const struct rs_sge *s)
{
	return (struct rs_sge){ .addr = be64toh(s->addr), .key = be32toh(s->key), .length = be32toh(s->length) };
}

void rs_put_hello(const struct rs *rs, struct rs_hello *h)
{
	*h = (struct rs_hello){
		.version = VERSION,
		.flags = HAS_IOMAPS | byte_order(),
		.credits = htobe16((uint16_t)rs->opt.recv_queue),
		.iomaps = (uint8_t)rs->opt.iomaps,
		.offers = sge_to_be((uintptr_t)rs->table, rs->table_mr->rkey, RS_OFFERS),
		.buffer = sge_to_be((uintptr_t)rs->in, rs->in_mr->rkey, rs->opt.in_size / 2),
	};
}

bool rs_check_hello(const void *data, size_t len)
{
	struct rs_hello h;

	if (len < sizeof(h))
		return false;
	memcpy(&h, data, sizeof(h));
	return h.version == VERSION && (h.flags & BIG_ENDIAN_HOST) == byte_order() && be16toh(h.credits) > RESERVE &&
	       h.offers.length != 0;
}

/* iomaps_length returns the length of a table, of which a value with the high bit has the high bits only. */
static uint32_t iomaps_length(uint8_t n)
{
	return n <= 0x80 ? n : (n & 0x7fU) << 8;
}

void rs_take_hello(struct rs *rs, const struct rs_hello *h)
{
	uint16_t credits = be16toh(h->credits);

	rs->peer_table = sge_from_be(&h->offers);
	rs->peer_next = 1 % rs->peer_table.length;
	rs->peer_iomaps = rs->peer_table;
	rs->peer_iomaps.addr += (uint64_t)rs->peer_table.length * sizeof(struct rs_sge);
	rs->peer_iomaps.length = h->flags & HAS_IOMAPS ? iomaps_length(h->iomaps) : 0;
	rs->offers[0] = sge_from_be(&h->buffer);
	rs->next_offer = 1;
	rs->limit = credits;
	rs->reserve = (uint16_t)least(RESERVE, credits / 4);
}

/* post writes from to the peer's memory, and then sends the message at msg. One of both may be NULL. */
static int post(struct rs *rs, struct ibv_sge *from, const struct rs_sge *to, const uint32_t *msg, uint64_t id)
{
	struct ibv_sge told = { .addr = (uintptr_t)msg, .length = sizeof(*msg) };
	struct ibv_send_wr tell = {
		.wr_id = id, .sg_list = &told, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
	};
	struct ibv_send_wr write = {
		.wr_id = id, .next = msg ? &tell : NULL, .sg_list = from, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = msg ? 0 : IBV_SEND_SIGNALED,
	}, *bad;
	uint32_t requests = (from != NULL) + (msg != NULL);
	int err;

	if (from) {
		write.wr.rdma.remote_addr = to->addr;
		write.wr.rdma.rkey = to->key;
		if (!from->lkey)
			write.send_flags |= IBV_SEND_INLINE;
	}
	tell.wr_id = write.wr_id = id | SENT(requests, 0);
	err = ibv_post_send(rs->id->qp, from ? &write : &tell, &bad);
	if (err) {
		rs_end(rs, err);
		return set_errno(err);
	}
	rs->sends += requests;
	if (id & CONTROL)
		rs->controls += requests;
	return 0;
}

static uint32_t message(enum rs_op op, uint32_t data)
{
	return (uint32_t)op << OP_SHIFT | data;
}

/* grant gives the peer credits, and offers it a half of the buffer that is free. */
static void grant(struct rs *rs)
{
	uint32_t half = rs->opt.in_size / 2;

	while (rs->state == RS_CONNECTED && rs->said != RS_LEAVES && rs->controls + 2 <= MAX_CONTROLS) {
		uint32_t msg = message(RS_CREDIT, (uint16_t)(rs->received + rs->opt.recv_queue));
		struct rs_sge offer = {
			.addr = (uintptr_t)rs->in + rs->in_offer, .key = rs->in_mr->rkey, .length = half,
		};
		struct ibv_sge from = { .addr = (uintptr_t)&offer, .length = sizeof(offer) };
		struct rs_sge to = rs->peer_table;

		to.addr += rs->peer_next * sizeof(offer);
		if (rs->in_free >= half) {
			rs->in_free -= half;
			rs->in_offered += half;
			rs->in_offer = rs->in_offer ? 0 : half;
			rs->peer_next = (rs->peer_next + 1) % rs->peer_table.length;
			post(rs, &from, &to, &msg, CONTROL);
		} else if ((uint16_t)(rs->received - rs->granted) >= rs->opt.recv_queue / 2) {
			post(rs, NULL, NULL, &msg, CONTROL);
		} else {
			return;
		}
		rs->granted = rs->received;
	}
}

/* take_offers takes what the peer has written into the table. */
static void take_offers(struct rs *rs)
{
	struct rs_sge *at = &rs->table->offers[rs->next_offer];

	if (rs->offers[0].length == 0) {
		rs->offers[0] = rs->offers[1];
		rs->offers[1].length = 0;
	}
	for (int i = 0; i < RS_OFFERS; i++) {
		if (rs->offers[i].length > 0 || at->length == 0)
			continue;
		rs->offers[i] = *at;
		at->length = 0;
		rs->next_offer = (rs->next_offer + 1) % RS_OFFERS;
		at = &rs->table->offers[rs->next_offer];
	}
}

/* take handles a message of the peer. */
static void take(struct rs *rs, uint32_t msg)
{
	uint32_t data = msg & ((1U << OP_SHIFT) - 1);

	switch (msg >> OP_SHIFT) {
	case RS_DATA:
		if (data > rs->in_offered) { /* it may not write so many */
			iwv_log("rsocket: the peer says that it has written %u bytes, and may write %u", data,
				rs->in_offered);
			rs_end(rs, EPROTO);
			return;
		}
		rs->in_offered -= data;
		rs->in_len += data;
		rs->received++;
		return;
	case RS_CREDIT:
		rs->limit = (uint16_t)data;
		take_offers(rs);
		return;
	case RS_IOMAP: /* the table has it */
		rs->received++;
		return;
	case RS_CONTROL:
		if (data == RS_SHUTDOWN || data == RS_DISCONNECT)
			rs->in_done = true;
		if (data == RS_DISCONNECT)
			rs_end(rs, 0);
	}
}

static void completed(struct rs *rs, const struct ibv_wc *wc)
{
	uint32_t n = (uint32_t)wc->wr_id;

	if (wc->status != IBV_WC_SUCCESS) {
		if (rs->state == RS_CONNECTED || rs->state == RS_ACCEPTING)
			rs->state = RS_ENDING;
	} else if (wc->wr_id & RECEIVED) {
		uint32_t msg = rs->messages[n];

		if (wc->byte_len != sizeof(msg) || post_receive(rs, n) < 0)
			rs_end(rs, EPROTO);
		else
			take(rs, msg);
	} else {
		uint32_t requests = (uint32_t)(wc->wr_id >> 32) & 3;

		rs->sends -= requests;
		if (wc->wr_id & CONTROL)
			rs->controls -= requests;
		rs->out_len -= n;
		rs->out_pos = rs->out_len > 0 ? (rs->out_pos + n) % rs->opt.out_size : 0;
	}
}

void rs_progress(struct rs *rs)
{
	struct ibv_wc wc[BATCH];
	int n;

	if (!rs->table || rs->peer_table.length == 0) /* no connection, or none whose hello has been taken */
		return;
	do {
		n = ibv_poll_cq(rs->cq, BATCH, wc);
		for (int i = 0; i < n; i++)
			completed(rs, &wc[i]);
	} while (n == BATCH);
	if (n < 0)
		rs_end(rs, ECONNRESET);
	if (rs->state != RS_CONNECTED)
		return;
	grant(rs);
	if (rs->bye > rs->said && rs->state == RS_CONNECTED) {
		uint32_t msg = message(RS_CONTROL, rs->bye == RS_HALF ? RS_SHUTDOWN : RS_DISCONNECT);

		rs->said = rs->bye;
		post(rs, NULL, NULL, &msg, 0);
	}
}

/* is_coming reports whether there is, or will be, a connection, or soon the reason why not. */
static bool is_coming(const struct rs *rs)
{
	return rs->state == RS_CONNECTING || rs->state == RS_ACCEPTING || rs->state == RS_CONNECTED ||
	       rs->state == RS_ENDING;
}

bool rs_can_recv(const struct rs *rs)
{
	return rs->in_len > 0 || rs->in_done || !is_coming(rs);
}

/* has_room reports whether one more Write and its message can be posted. */
static bool has_room(const struct rs *rs)
{
	return rs->sends - rs->controls + 2 <= 2 * rs->opt.send_queue && rs->out_len < rs->opt.out_size;
}

bool rs_has_credit(const struct rs *rs)
{
	return rs->state == RS_CONNECTED && has_room(rs) && (uint16_t)(rs->limit - rs->sent) > rs->reserve;
}

bool rs_can_send(const struct rs *rs)
{
	if (!is_coming(rs) || rs->out_done)
		return true;
	return rs_has_credit(rs) && rs->offers[0].length > 0;
}

bool rs_all_sent(const struct rs *rs)
{
	if (rs->state == RS_ACCEPTING)
		return false;
	return rs->state != RS_CONNECTED || (rs->sends == 0 && rs->said == rs->bye);
}

/* gather copies len bytes of the vector, without the first skip bytes. */
static void gather(uint8_t *to, const struct iovec *from, size_t skip, size_t len)
{
	for (; len > 0; from++) {
		size_t n;

		if (from->iov_len <= skip) {
			skip -= from->iov_len;
			continue;
		}
		n = least(from->iov_len - skip, len);
		memcpy(to, (const uint8_t *)from->iov_base + skip, n);
		skip = 0;
		to += n;
		len -= n;
	}
}

uint32_t rs_write(struct rs *rs, const struct iovec *from, size_t skip, size_t len, const struct rs_sge *to, bool tell)
{
	uint32_t at = (rs->out_pos + rs->out_len) % rs->opt.out_size;
	uint32_t free = at < rs->out_pos ? rs->out_pos - at : rs->opt.out_size - at;
	uint32_t n = (uint32_t)least(least(len, to->length), least(free, MAX_WRITE));
	uint32_t msg = message(RS_DATA, n);
	struct ibv_sge sge = { .addr = (uintptr_t)rs->out + at, .length = n, .lkey = rs->out_mr->lkey };

	gather(rs->out + at, from, skip, n);
	if (post(rs, &sge, to, tell ? &msg : NULL, n) < 0)
		return 0;
	rs->out_len += n;
	return n;
}

int rs_send_iomap(struct rs *rs, unsigned int index, const struct rs_iomap *m)
{
	uint32_t msg = message(RS_IOMAP, index);
	struct ibv_sge from = { .addr = (uintptr_t)m, .length = sizeof(*m) };
	struct rs_sge to = rs->peer_iomaps;

	to.addr += index * sizeof(*m);
	rs->sent++;
	return post(rs, &from, &to, &msg, 0);
}
