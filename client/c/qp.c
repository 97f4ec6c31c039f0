#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum {
	DEFAULT_DEPTH = 64,
	DEFAULT_SGE = 4,
	NO_WORKER = -1,
};

/* The fixed part of an entry of a send queue, and of a receive queue. */
struct send_wqe {
	uint64_t id;
	uint8_t opcode, flags;
	uint16_t num_sge;
	uint32_t inline_len;
	uint64_t remote_addr;
	uint32_t rkey, inv_key;
	uint64_t imm_or_add;
	uint64_t swap_or_access;
	uint64_t compare_mask, swap_mask;
};
_Static_assert(sizeof(struct send_wqe) == 64 && offsetof(struct send_wqe, remote_addr) == 16 &&
	       offsetof(struct send_wqe, imm_or_add) == 32, "send WQE of docs/api.md");

struct recv_wqe {
	uint64_t id;
	uint16_t num_sge;
	uint16_t zero[3];
};
_Static_assert(sizeof(struct recv_wqe) == 16, "receive WQE of docs/api.md");
_Static_assert(sizeof(struct iwarpd_sge) == 16, "SGE of docs/api.md");

/* A receive queue, of a QP or shared. */
struct recv_queue {
	struct map map; /* no memory: the QP uses an SRQ */
	struct ring ring;
};

struct iwarpd_srq {
	struct object obj;
	struct recv_queue rq;
	void *context;
};

struct iwarpd_qp {
	struct object obj; /* its handle is the QP's number */
	struct map sq_map;
	struct ring sq;
	struct recv_queue rq;
	uint32_t bell;
	void *context;
	atomic_int worker;  /* worker whose bell to ring; NO_WORKER: not established */
	bool flush_late;    /* of struct iwarpd_qp_attr */
	atomic_bool ended;  /* the connection has ended: what is posted is flushed, or nothing can be posted */
};

struct iwarpd_qp *qp_of(struct object *o)
{
	return container_of(o, struct iwarpd_qp, obj);
}

struct object *qp_object(struct iwarpd_qp *qp)
{
	return &qp->obj;
}

uint32_t iwarpd_qp_num(const struct iwarpd_qp *qp)
{
	return qp->obj.handle;
}

void *iwarpd_qp_context(const struct iwarpd_qp *qp)
{
	return qp->context;
}

static void qp_free(struct object *o)
{
	struct iwarpd_qp *qp = qp_of(o);

	map_close(&qp->sq_map);
	map_close(&qp->rq.map);
	free(qp);
}

static int map_recv(struct recv_queue *q, int fd)
{
	int err = map_open(&q->map, fd, MAP_RQ);

	if (!err)
		ring_producer(&q->ring, &q->map);
	return err;
}

static int map_rings(struct iwarpd_qp *qp, const struct packet *p)
{
	int err = map_open(&qp->sq_map, p->fds[0], MAP_SQ);

	if (err)
		return err;
	ring_producer(&qp->sq, &qp->sq_map);
	if (p->num_fds > 1)
		err = map_recv(&qp->rq, p->fds[1]);
	if (err)
		map_close(&qp->sq_map);
	return err;
}

/* bell_valid reports whether every doorbell page has that bell. */
static bool bell_valid(const struct iwarpd_device *dev, uint32_t bell)
{
	for (uint32_t i = 0; i < dev->workers; i++)
		if (bell >= dev->pages[i].map.entries)
			return false;
	return true;
}

/*
 * The posting thread publishes its index and then reads worker and ended. The
 * thread that reads events stores these and then reads the index. So at least one
 * of them sees the other's store: no work request stays without a bell, or
 * unflushed after the end.
 */

void qp_established(struct object *o, uint32_t worker)
{
	struct iwarpd_qp *qp = qp_of(o);

	atomic_store(&qp->worker, (int)worker);
	ring_bell(o->dev, worker, qp->bell); /* sends posted earlier rang no bell */
}

/*
 * flush requests error completions for what was posted while the connection ended. Many connections
 * may end at once, so the socket may be full. The lock is held.
 */
static void flush(struct iwarpd_qp *qp)
{
	Pb__Disconnect body = PB__DISCONNECT__INIT;
	Pb__Request req = REQUEST(disconnect, DISCONNECT, &body);

	body.qp = qp->obj.handle;
	body.abort = true;
	qp->obj.due = device_post(qp->obj.dev, &req) != 0;
	qp->obj.dev->due |= qp->obj.due;
}

static void qp_ended(struct object *o)
{
	struct iwarpd_qp *qp = qp_of(o);
	bool again = o->due;

	o->due = false;
	if (atomic_exchange(&qp->ended, true) && !again)
		return;
	if (ring_pending(&qp->sq) || (qp->rq.map.mem && ring_pending(&qp->rq.ring)))
		flush(qp);
}

static int new_qp(struct iwarpd_device *dev, const struct packet *p, const struct iwarpd_qp_attr *attr, struct iwarpd_qp **out)
{
	const Pb__QPReply *r = p->msg->reply->qp;
	struct iwarpd_qp *qp;
	int err;

	if (!bell_valid(dev, r->doorbell))
		return -EPROTO;
	qp = calloc(1, sizeof(*qp));
	if (!qp)
		return -ENOMEM;
	err = map_rings(qp, p);
	if (err) {
		free(qp);
		return err;
	}
	qp->bell = r->doorbell;
	qp->context = attr->context;
	qp->flush_late = attr->flush_late;
	atomic_init(&qp->worker, NO_WORKER);
	atomic_init(&qp->ended, false);
	qp->obj.ended = qp_ended;
	object_add(&qp->obj, dev, OBJECT_QP, r->qp, qp_free);
	*out = qp;
	return 0;
}

/*
 * ring_depth returns the depth to request so that a work request can be posted for
 * each one that has completed: the daemon releases entries late, up to a quarter of
 * the ring or 64 at once. It refuses a depth that is too large.
 */
static uint32_t ring_depth(const struct iwarpd_device *dev, uint32_t depth)
{
	uint32_t ask, most = dev->attrs[0].max_qp_wr;

	if (depth == 0)
		depth = DEFAULT_DEPTH;
	if (depth > most)
		return depth;
	ask = depth + (depth < 128 ? depth / 2 : 64) + 1;
	return ask < most ? ask : most;
}

int iwarpd_create_qp(struct iwarpd_pd *pd, const struct iwarpd_qp_attr *attr, struct iwarpd_qp **out,
		     struct iwarpd_error *e)
{
	Pb__CreateQP body = PB__CREATE_QP__INIT;
	Pb__Request req = REQUEST(create_qp, CREATE_QP, &body);
	struct packet p;
	int err;

	if (!attr->send_cq || !attr->recv_cq)
		return set_error(e, -EINVAL, "a queue pair needs two completion queues");
	body.pd = pd->obj.handle;
	body.send_cq = cq_handle(attr->send_cq);
	body.recv_cq = cq_handle(attr->recv_cq);
	body.sq_depth = ring_depth(pd->obj.dev, attr->send_depth);
	body.rq_depth = ring_depth(pd->obj.dev, attr->recv_depth);
	body.max_sge = attr->max_sge ? attr->max_sge : DEFAULT_SGE;
	body.max_inline = attr->max_inline;
	body.sig_all = attr->sig_all;
	body.receive_wait_ms = attr->receive_wait_ms;
	if (attr->srq)
		body.srq = attr->srq->obj.handle;
	err = device_call(pd->obj.dev, &req, -1, PB__REPLY__BODY_QP, attr->srq ? 1 : 2, &p, e);
	if (err)
		return err;
	err = new_qp(pd->obj.dev, &p, attr, out);
	return create_done(pd->obj.dev, &p, err, "queue pair", e);
}

int iwarpd_modify_qp(struct iwarpd_qp *qp, uint32_t access, struct iwarpd_error *e)
{
	Pb__ModifyQP body = PB__MODIFY_QP__INIT;
	Pb__Request req = REQUEST(modify_qp, MODIFY_QP, &body);

	body.qp = qp->obj.handle;
	body.access = access;
	return device_do(qp->obj.dev, &req, e);
}

/*
 * end_reads ends the reads of the stream of a QP that is to be destroyed, before the daemon replies: no event will end them, and
 * the thread that reads may be the one that receives the reply.
 */
static void end_reads(const struct object *qp)
{
	pthread_mutex_lock(&qp->dev->lock);
	for (struct stream *s = qp->dev->readers; s && qp->conn != 0; s = s->next)
		if (s->conn == qp->conn)
			s->over = true;
	pthread_mutex_unlock(&qp->dev->lock);
}

int iwarpd_destroy_qp(struct iwarpd_qp *qp, struct iwarpd_error *e)
{
	end_reads(&qp->obj);
	return object_destroy(&qp->obj, e);
}

/* closed reports whether nothing can be posted. */
static bool closed(struct iwarpd_qp *qp)
{
	return atomic_load(&qp->ended) && (!qp->flush_late || device_dead(qp->obj.dev));
}

/* posted_late handles work requests published after the end of the connection. */
static void posted_late(struct iwarpd_qp *qp)
{
	pthread_mutex_lock(&qp->obj.dev->lock);
	flush(qp);
	pthread_mutex_unlock(&qp->obj.dev->lock);
}

/* put_pieces writes the variable part of an entry. */
static void put_pieces(uint8_t *to, const struct iwarpd_send_wr *wr)
{
	if (wr->inline_len)
		memcpy(to, wr->inline_data, wr->inline_len);
	else if (wr->num_sge)
		memcpy(to, wr->sge, wr->num_sge * sizeof(*wr->sge));
}

static void put_send(uint8_t *entry, const struct iwarpd_send_wr *wr)
{
	struct send_wqe w = {
		.id = wr->id,
		.opcode = (uint8_t)wr->opcode,
		.flags = (uint8_t)wr->flags,
		.num_sge = (uint16_t)wr->num_sge,
		.inline_len = wr->inline_len,
		.remote_addr = wr->remote_addr,
		.rkey = wr->rkey,
		.inv_key = wr->inv_key,
	};

	switch (wr->opcode) {
	case IWARPD_WR_IMM:
		w.imm_or_add = wr->imm;
		break;
	case IWARPD_WR_CMP_SWAP:
	case IWARPD_WR_FETCH_ADD:
		w.imm_or_add = wr->compare_add;
		w.swap_or_access = wr->swap;
		w.compare_mask = wr->compare_mask;
		w.swap_mask = wr->swap_mask;
		break;
	case IWARPD_WR_BIND_MW:
	case IWARPD_WR_REG:
		w.swap_or_access = wr->access;
		break;
	}
	memcpy(entry, &w, sizeof(w));
	put_pieces(entry + sizeof(w), wr);
}

/* check_send returns an error if wr does not fit an entry. */
static int check_send(const struct iwarpd_qp *qp, const struct iwarpd_send_wr *wr)
{
	bool in_line = wr->flags & IWARPD_INLINE;

	if (wr->opcode > UINT8_MAX || (wr->flags & ~(uint32_t)IWARPD_WITH_NEXT) > UINT8_MAX || (in_line ? wr->num_sge : wr->inline_len) != 0)
		return -EINVAL;
	if (wr->num_sge > qp->sq_map.max_sge || wr->inline_len > qp->sq_map.max_inline)
		return -EMSGSIZE;
	return 0;
}

/* put_one writes an entry without publishing it. */
static int put_one(struct iwarpd_qp *qp, const struct iwarpd_send_wr *wr)
{
	int err = check_send(qp, wr);
	void *entry;

	if (err)
		return err;
	entry = ring_free_entry(&qp->sq, wr->flags & IWARPD_WITH_NEXT ? 2 : 1, &err);
	if (!entry)
		return err ? err : -EAGAIN;
	put_send(entry, wr);
	qp->sq.next++;
	return 0;
}

int iwarpd_post_sends(struct iwarpd_qp *qp, const struct iwarpd_send_wr *wr, int n)
{
	int worker, posted, err = 0;

	if (closed(qp))
		return -ENOTCONN;
	for (posted = 0; posted < n; posted++) {
		err = put_one(qp, &wr[posted]);
		if (err)
			break;
	}
	if (posted == 0)
		return err;
	ring_publish(&qp->sq);
	worker = atomic_load(&qp->worker);
	if (worker != NO_WORKER)
		ring_bell(qp->obj.dev, (uint32_t)worker, qp->bell);
	if (atomic_load(&qp->ended))
		posted_late(qp);
	return posted;
}

int iwarpd_post_send(struct iwarpd_qp *qp, const struct iwarpd_send_wr *wr)
{
	int n = iwarpd_post_sends(qp, wr, 1);

	return n < 0 ? n : 0;
}

static int put_recv(struct recv_queue *q, const struct iwarpd_recv_wr *wr)
{
	struct recv_wqe w = { .id = wr->id, .num_sge = (uint16_t)wr->num_sge };
	uint8_t *entry;
	int err = 0;

	if (wr->num_sge > q->map.max_sge)
		return -EMSGSIZE;
	entry = ring_free_entry(&q->ring, 1, &err);
	if (!entry)
		return err ? err : -EAGAIN;
	memcpy(entry, &w, sizeof(w));
	if (wr->num_sge)
		memcpy(entry + sizeof(w), wr->sge, wr->num_sge * sizeof(*wr->sge));
	q->ring.next++;
	ring_publish(&q->ring);
	return 0;
}

int iwarpd_post_recv(struct iwarpd_qp *qp, const struct iwarpd_recv_wr *wr)
{
	int err;

	if (!qp->rq.map.mem)
		return -EINVAL;
	if (closed(qp))
		return -ENOTCONN;
	err = put_recv(&qp->rq, wr);
	if (!err && atomic_load(&qp->ended))
		posted_late(qp);
	return err;
}

struct iwarpd_srq *srq_of(struct object *o)
{
	return container_of(o, struct iwarpd_srq, obj);
}

void *iwarpd_srq_context(const struct iwarpd_srq *srq)
{
	return srq->context;
}

static void srq_free(struct object *o)
{
	struct iwarpd_srq *srq = srq_of(o);

	map_close(&srq->rq.map);
	free(srq);
}

void srq_after_fork(struct object *o)
{
	map_after_fork(&srq_of(o)->rq.map);
}

static int new_srq(struct iwarpd_device *dev, const struct packet *p, void *context, struct iwarpd_srq **out)
{
	struct iwarpd_srq *srq = calloc(1, sizeof(*srq));
	int err;

	if (!srq)
		return -ENOMEM;
	err = map_recv(&srq->rq, p->fds[0]);
	if (err) {
		free(srq);
		return err;
	}
	srq->context = context;
	object_add(&srq->obj, dev, OBJECT_SRQ, p->msg->reply->srq->srq, srq_free);
	*out = srq;
	return 0;
}

int iwarpd_create_srq(struct iwarpd_pd *pd, const struct iwarpd_srq_attr *attr, struct iwarpd_srq **out,
		      struct iwarpd_error *e)
{
	Pb__CreateSRQ body = PB__CREATE_SRQ__INIT;
	Pb__Request req = REQUEST(create_srq, CREATE_SRQ, &body);
	struct packet p;
	int err;

	body.pd = pd->obj.handle;
	body.depth = ring_depth(pd->obj.dev, attr->depth);
	body.max_sge = attr->max_sge ? attr->max_sge : DEFAULT_SGE;
	body.limit = attr->limit;
	err = device_call(pd->obj.dev, &req, -1, PB__REPLY__BODY_SRQ, 1, &p, e);
	if (err)
		return err;
	err = new_srq(pd->obj.dev, &p, attr->context, out);
	return create_done(pd->obj.dev, &p, err, "shared receive queue", e);
}

int iwarpd_modify_srq(struct iwarpd_srq *srq, uint32_t limit, struct iwarpd_error *e)
{
	Pb__ModifySRQ body = PB__MODIFY_SRQ__INIT;
	Pb__Request req = REQUEST(modify_srq, MODIFY_SRQ, &body);

	body.srq = srq->obj.handle;
	body.limit = limit;
	return device_do(srq->obj.dev, &req, e);
}

int iwarpd_destroy_srq(struct iwarpd_srq *srq, struct iwarpd_error *e)
{
	return object_destroy(&srq->obj, e);
}

int iwarpd_post_srq_recv(struct iwarpd_srq *srq, const struct iwarpd_recv_wr *wr)
{
	return put_recv(&srq->rq, wr);
}
