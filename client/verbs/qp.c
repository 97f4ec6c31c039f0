/* Queue pairs, shared receive queues, and work requests. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum {
	BATCH = 16,        /* work requests posted with one doorbell */
	MIN_INLINE = 64,   /* bytes; some programs use inline data without asking for it */
	MAX_INLINE = 1024, /* bytes, gathered by the library */
};

_Static_assert(sizeof(struct ibv_sge) == sizeof(struct iwarpd_sge) &&
	       offsetof(struct ibv_sge, length) == offsetof(struct iwarpd_sge, len) &&
	       offsetof(struct ibv_sge, lkey) == offsetof(struct iwarpd_sge, lkey), "an SGE is libibverbs'");
_Static_assert((int)IBV_SEND_FENCE == IWARPD_FENCE && (int)IBV_SEND_SIGNALED == IWARPD_SIGNALED &&
	       (int)IBV_SEND_SOLICITED == IWARPD_SOLICITED && (int)IBV_SEND_INLINE == IWARPD_INLINE,
	       "flags are libibverbs'");

static struct iwarpd_cq *iwarpd_cq(struct ibv_cq *ibv)
{
	return cq_of(ibv)->q;
}

static uint32_t least(uint32_t a, uint32_t b)
{
	return a < b ? a : b;
}

static uint32_t most(uint32_t a, uint32_t b)
{
	return a > b ? a : b;
}

/* receive_wait returns the time in ms that a Send of the peer may wait for its receive. */
static uint32_t receive_wait(void)
{
	const char *v = secure_getenv("IWARPD_VERBS_RECEIVE_WAIT");
	unsigned long ms = v ? strtoul(v, NULL, 10) : 0;

	return ms < 60000 ? (uint32_t)ms : 60000;
}

/* fill sets the depths and sizes of attr, and updates cap to them. */
static int fill(const struct context *c, struct iwarpd_qp_attr *attr, struct ibv_qp_cap *cap)
{
	if (cap->max_send_sge > c->attr.max_sge || cap->max_recv_sge > c->attr.max_sge ||
	    cap->max_send_wr > c->attr.max_qp_wr || cap->max_recv_wr > c->attr.max_qp_wr)
		return -EINVAL;
	cap->max_send_wr = most(cap->max_send_wr, 1);
	cap->max_recv_wr = most(cap->max_recv_wr, 1);
	cap->max_send_sge = cap->max_recv_sge = most(most(cap->max_send_sge, cap->max_recv_sge), 1);
	/*
	 * Some programs ask for more until they are refused, others take what they get:
	 * so give the maximum.
	 */
	cap->max_inline_data = least(most(cap->max_inline_data, MIN_INLINE), least(c->attr.max_inline, MAX_INLINE));
	/* A Write with Immediate Data takes two entries of the send queue. */
	attr->send_depth = 2 * cap->max_send_wr <= c->attr.max_qp_wr / 2 ? 2 * cap->max_send_wr : cap->max_send_wr;
	attr->recv_depth = cap->max_recv_wr;
	attr->max_sge = cap->max_send_sge;
	attr->max_inline = cap->max_inline_data;
	attr->receive_wait_ms = receive_wait();
	return 0;
}

static struct qp *new_qp(struct ibv_pd *pd, const struct ibv_qp_init_attr *init)
{
	struct qp *qp = calloc(1, sizeof(*qp));

	if (!qp)
		return NULL;
	qp->ctx = iwv_context_of(pd->context);
	qp->sig_all = init->sq_sig_all;
	pthread_mutex_init(&qp->send_lock, NULL);
	pthread_mutex_init(&qp->recv_lock, NULL);
	qp->ibv.context = pd->context;
	qp->ibv.qp_context = init->qp_context;
	qp->ibv.pd = pd;
	qp->ibv.send_cq = init->send_cq;
	qp->ibv.recv_cq = init->recv_cq;
	qp->ibv.srq = init->srq;
	qp->ibv.state = IBV_QPS_RESET;
	qp->ibv.qp_type = init->qp_type;
	pthread_mutex_init(&qp->ibv.mutex, NULL);
	pthread_cond_init(&qp->ibv.cond, NULL);
	return qp;
}

static void free_qp(struct qp *qp)
{
	free(qp->early);
	pthread_mutex_destroy(&qp->send_lock);
	pthread_mutex_destroy(&qp->recv_lock);
	pthread_mutex_destroy(&qp->ibv.mutex);
	pthread_cond_destroy(&qp->ibv.cond);
	free(qp);
}

/*
 * most_recvs returns the receive completions that a QP can have outstanding. All receives
 * of an SRQ count for each of its QPs.
 */
static uint32_t most_recvs(const struct qp *qp)
{
	return qp->ibv.srq ? container_of(qp->ibv.srq, struct srq, ibv)->attr.max_wr : qp->cap.max_recv_wr;
}

/*
 * need enlarges the CQs for the completions of a QP. They stay so when the QP is
 * destroyed, since its completions may not have been polled.
 */
static int need(struct qp *qp, struct iwarpd_error *e)
{
	int err;

	iwv_thread_lock();
	err = cq_need(qp->ibv.send_cq, 2 * (uint64_t)qp->cap.max_send_wr, e);
	if (!err)
		err = cq_need(qp->ibv.recv_cq, most_recvs(qp), e);
	iwv_thread_unlock();
	return err;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct iwarpd_qp_attr attr = { 0 };
	struct iwarpd_error e = { 0 };
	struct qp *qp;
	int err;

	if (!iwv_is_ours(pd->context))
		return REAL(ibv_create_qp)(pd, init);
	if (init->qp_type != IBV_QPT_RC) {
		iwv_unsupported("ibv_create_qp: a type that is not IBV_QPT_RC");
		return NULL;
	}
	if (!init->send_cq || !init->recv_cq) {
		errno = EINVAL;
		return NULL;
	}
	qp = new_qp(pd, init);
	if (!qp)
		return NULL;
	qp->cap = init->cap;
	err = fill(qp->ctx, &attr, &qp->cap);
	if (!err)
		err = need(qp, &e);
	attr.send_cq = iwarpd_cq(init->send_cq);
	attr.recv_cq = iwarpd_cq(init->recv_cq);
	attr.srq = init->srq ? container_of(init->srq, struct srq, ibv)->q : NULL;
	attr.context = qp; /* sig_all is in the flags of each work request, since the library adds some of its own */
	if (!err)
		err = iwarpd_create_qp(container_of(pd, struct pd, ibv)->pd, &attr, &qp->q, &e);
	if (err) {
		free_qp(qp);
		iwv_fail(err, "ibv_create_qp", &e);
		return NULL;
	}
	init->cap = qp->cap;
	qp->ibv.qp_num = qp->ibv.handle = iwarpd_qp_num(qp->q);
	iwv_thread_lock();
	qp->next = qp->ctx->qps;
	qp->ctx->qps = qp;
	iwv_thread_unlock();
	return &qp->ibv;
}

/* unlink_qp removes a QP from a list. The lock is held. */
static void unlink_qp(struct qp **list, struct qp *qp)
{
	for (; *list; list = &(*list)->next) {
		if (*list == qp) {
			*list = qp->next;
			return;
		}
	}
}

struct qp *iwv_qp_of_event(const struct iwarpd_event *ev)
{
	return ev->qp ? iwarpd_qp_context(ev->qp) : NULL;
}

struct qp *iwv_qp_find(struct context *c, uint32_t num)
{
	struct qp *qp = c->qps;

	while (qp && qp->ibv.qp_num != num)
		qp = qp->next;
	return qp;
}

int iwv_qp_disconnect(struct qp *qp, bool abort, struct iwarpd_error *e)
{
	int err;

	switch (atomic_load(&qp->conn)) {
	case CONN_MAKING:
	case CONN_UP:
		break;
	case CONN_CLOSING:
		if (abort)
			break;
		return 0;
	default:
		return 0;
	}
	err = iwarpd_disconnect(qp->q, abort, e);
	if (err == -EBADFD || err == -ENOENT)
		err = 0; /* the connection has just ended */
	if (!err)
		atomic_store(&qp->conn, CONN_CLOSING);
	return err;
}

void qp_event(struct context *c, const struct iwarpd_event *ev)
{
	struct qp *qp = iwv_qp_of_event(ev);

	(void)c;
	if (!qp)
		return;
	switch (ev->type) {
	case IWARPD_EVENT_ESTABLISHED:
		if (atomic_load(&qp->conn) == CONN_MAKING) {
			atomic_store(&qp->conn, CONN_UP);
			qp->ibv.state = IBV_QPS_RTS;
		}
		break;
	case IWARPD_EVENT_REJECTED:
	case IWARPD_EVENT_CONNECT_FAILED:
	case IWARPD_EVENT_DISCONNECTED:
		atomic_store(&qp->conn, CONN_OVER);
		if (!qp->exchange)
			qp->ibv.state = IBV_QPS_ERR;
		qp->deadline = 0;
		break;
	}
}

/* finish frees a QP of the list closing. */
static void finish(struct context *c, struct qp *qp)
{
	unlink_qp(&c->closing, qp);
	iwarpd_destroy_qp(qp->q, NULL);
	free_qp(qp);
	iwv_thread_wake();
}

int qp_expire(struct context *c)
{
	int64_t now = now_ms(), wait = -1;
	struct qp *next;

	for (struct qp *qp = c->closing; qp; qp = next) {
		next = qp->next;
		if (qp->deadline <= now || atomic_load(&c->gone))
			finish(c, qp);
		else if (wait < 0 || qp->deadline - now < wait)
			wait = qp->deadline - now;
	}
	return (int)wait;
}

static bool uses(const struct qp *qp, const void *used)
{
	return qp->ibv.send_cq == used || qp->ibv.recv_cq == used || qp->ibv.srq == used || qp->ibv.pd == used;
}

void qp_wait_closing(struct context *c, const void *used)
{
	struct qp *qp;

	for (;;) {
		for (qp = c->closing; qp && !uses(qp, used); qp = qp->next)
			;
		if (!qp)
			return;
		if (qp->deadline <= now_ms())
			finish(c, qp);
		else
			iwv_thread_wait(100);
	}
}

/*
 * A QP with a connection is closed in order and freed later: the peer then receives all
 * that was sent, and librdmacm's id gets its event.
 */
int ibv_destroy_qp(struct ibv_qp *ibv)
{
	struct qp *qp = qp_of(ibv);
	struct context *c;

	if (!iwv_is_ours(ibv->context))
		return REAL(ibv_destroy_qp)(ibv);
	c = qp->ctx;
	iwv_thread_lock();
	unlink_qp(&c->qps, qp);
	exchange_end(qp);
	async_drop(c, ibv);
	if (!atomic_load(&c->gone) && atomic_load(&qp->conn) == CONN_UP)
		iwv_qp_disconnect(qp, false, NULL);
	qp->next = c->closing;
	c->closing = qp;
	qp->deadline = 0;
	if (atomic_load(&qp->conn) == CONN_CLOSING && !atomic_load(&c->gone))
		qp->deadline = now_ms() + CLOSE_WAIT_MS;
	else
		finish(c, qp);
	iwv_thread_unlock();
	return 0;
}

int ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	struct qp *qp = qp_of(ibv);

	if (!iwv_is_ours(ibv->context))
		return REAL(ibv_query_qp)(ibv, attr, mask, init);
	*attr = (struct ibv_qp_attr){
		.qp_state = ibv->state,
		.cur_qp_state = ibv->state,
		.path_mtu = IBV_MTU_1024,
		.cap = qp->cap,
		.port_num = 1,
		.max_rd_atomic = (uint8_t)least(qp->ctx->attr.max_ord, UINT8_MAX),
		.max_dest_rd_atomic = (uint8_t)least(qp->ctx->attr.max_ird, UINT8_MAX),
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	};
	*init = (struct ibv_qp_init_attr){
		.qp_context = ibv->qp_context,
		.send_cq = ibv->send_cq,
		.recv_cq = ibv->recv_cq,
		.srq = ibv->srq,
		.cap = qp->cap,
		.qp_type = ibv->qp_type,
		.sq_sig_all = qp->sig_all,
	};
	return 0;
}

/* kill_unconnected flushes the receives of a QP that will have no connection. */
static void kill_unconnected(struct qp *qp)
{
	pthread_mutex_lock(&qp->recv_lock);
	qp->dead = true;
	for (uint32_t i = 0; i < qp->num_early; i++)
		cq_flush(qp->ibv.recv_cq, &qp->ibv, qp->early[i], IBV_WC_RECV);
	qp->num_early = 0;
	pthread_mutex_unlock(&qp->recv_lock);
}

void iwv_qp_connecting(struct qp *qp, bool yes)
{
	atomic_store(&qp->conn, yes ? CONN_MAKING : CONN_NONE);
	if (!yes)
		return;
	pthread_mutex_lock(&qp->recv_lock);
	free(qp->early);
	qp->early = NULL;
	qp->num_early = 0;
	pthread_mutex_unlock(&qp->recv_lock);
}

/* modify performs a change of state. librdmacm has done so already if the QP has an id. */
static int modify(struct qp *qp, const struct ibv_qp_attr *attr, int mask, struct iwarpd_error *e)
{
	switch (attr->qp_state) {
	case IBV_QPS_INIT:
		return atomic_load(&qp->cm) ? 0 : exchange_listen(qp);
	case IBV_QPS_RTR:
		/* Without an address, librdmacm will connect the QP for an id. */
		if (!(mask & IBV_QP_AV) || atomic_load(&qp->cm) || atomic_load(&qp->conn) != CONN_NONE)
			return 0;
		return exchange_connect(qp, attr);
	case IBV_QPS_ERR:
		exchange_show(qp);
		if (atomic_load(&qp->conn) == CONN_NONE)
			kill_unconnected(qp);
		return iwv_qp_disconnect(qp, true, e);
	default:
		return 0;
	}
}

int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask)
{
	struct qp *qp = qp_of(ibv);
	struct iwarpd_error e = { 0 };
	int err;

	if (!iwv_is_ours(ibv->context))
		return REAL(ibv_modify_qp)(ibv, attr, mask);
	if (!(mask & IBV_QP_STATE))
		return 0;
	iwv_thread_lock();
	err = modify(qp, attr, mask, &e);
	if (!err)
		ibv->state = attr->qp_state;
	iwv_thread_unlock();
	if (err)
		iwv_fail(err, "ibv_modify_qp", &e);
	return -err;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
	struct iwarpd_srq_attr attr;
	struct iwarpd_error e;
	struct srq *srq;
	int err;

	if (!iwv_is_ours(pd->context))
		return REAL(ibv_create_srq)(pd, init);
	srq = calloc(1, sizeof(*srq));
	if (!srq)
		return NULL;
	attr = (struct iwarpd_srq_attr){
		.depth = most(init->attr.max_wr, 1),
		.max_sge = most(init->attr.max_sge, 1),
		.limit = init->attr.srq_limit,
		.context = srq,
	};
	err = iwarpd_create_srq(container_of(pd, struct pd, ibv)->pd, &attr, &srq->q, &e);
	if (err) {
		free(srq);
		iwv_fail(err, "ibv_create_srq", &e);
		return NULL;
	}
	srq->attr = (struct ibv_srq_attr){ attr.depth, attr.max_sge, attr.limit };
	init->attr = srq->attr;
	srq->ibv.context = pd->context;
	srq->ibv.srq_context = init->srq_context;
	srq->ibv.pd = pd;
	pthread_mutex_init(&srq->lock, NULL);
	pthread_mutex_init(&srq->ibv.mutex, NULL);
	pthread_cond_init(&srq->ibv.cond, NULL);
	return &srq->ibv;
}

int ibv_modify_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr, int mask)
{
	struct srq *srq = container_of(ibv, struct srq, ibv);
	struct iwarpd_error e;
	int err;

	if (!iwv_is_ours(ibv->context))
		return REAL(ibv_modify_srq)(ibv, attr, mask);
	if (mask & IBV_SRQ_MAX_WR)
		return iwv_unsupported("ibv_modify_srq: IBV_SRQ_MAX_WR");
	if (!(mask & IBV_SRQ_LIMIT))
		return 0;
	err = iwarpd_modify_srq(srq->q, attr->srq_limit, &e);
	if (err)
		iwv_fail(err, "ibv_modify_srq", &e);
	else
		srq->attr.srq_limit = attr->srq_limit;
	return -err;
}

int ibv_query_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr)
{
	if (!iwv_is_ours(ibv->context))
		return REAL(ibv_query_srq)(ibv, attr);
	*attr = container_of(ibv, struct srq, ibv)->attr;
	return 0;
}

int ibv_destroy_srq(struct ibv_srq *ibv)
{
	struct srq *srq = container_of(ibv, struct srq, ibv);
	struct iwarpd_error e;
	struct context *c;
	int err;

	if (!iwv_is_ours(ibv->context))
		return REAL(ibv_destroy_srq)(ibv);
	c = iwv_context_of(ibv->context);
	iwv_thread_lock();
	qp_wait_closing(c, ibv);
	err = iwarpd_destroy_srq(srq->q, &e);
	if (!err || atomic_load(&c->gone)) {
		async_drop(c, ibv);
		err = 0;
	}
	iwv_thread_unlock();
	if (err) {
		iwv_fail(err, "ibv_destroy_srq", &e);
		return -err;
	}
	pthread_mutex_destroy(&srq->lock);
	pthread_mutex_destroy(&srq->ibv.mutex);
	pthread_cond_destroy(&srq->ibv.cond);
	free(srq);
	return 0;
}

/* posted returns the errno value of the kernel's verbs for an error of libiwarpd. */
static int posted(int err)
{
	switch (err) {
	case 0:
		return 0;
	case -EAGAIN:
		return ENOMEM; /* the queue is full */
	case -EMSGSIZE:
		return EINVAL;
	default:
		return -err;
	}
}

/*
 * gather copies the SGEs of an inline work request. It returns the length, or -1 if they
 * do not fit.
 */
static int gather(char *to, size_t size, const struct ibv_send_wr *wr)
{
	size_t n = 0;

	for (int i = 0; i < wr->num_sge; i++) {
		const struct ibv_sge *s = &wr->sg_list[i];

		if (s->length > size - n)
			return -1;
		memcpy(to + n, (const void *)(uintptr_t)s->addr, s->length);
		n += s->length;
	}
	return (int)n;
}

/* put_inline passes the data inline, gathered in room if it has several pieces. */
static int put_inline(struct iwarpd_send_wr *to, const struct ibv_send_wr *wr, char *room)
{
	int n;

	to->num_sge = 0;
	to->sge = NULL;
	if (wr->num_sge == 1) {
		to->inline_data = (const void *)(uintptr_t)wr->sg_list[0].addr;
		to->inline_len = wr->sg_list[0].length;
		return 0;
	}
	n = gather(room, MAX_INLINE, wr);
	if (n < 0)
		return -EMSGSIZE;
	to->inline_data = room;
	to->inline_len = (uint32_t)n;
	return 0;
}

static uint64_t length_of(const struct ibv_send_wr *wr)
{
	uint64_t n = 0;

	for (int i = 0; i < wr->num_sge; i++)
		n += wr->sg_list[i].length;
	return n;
}

/*
 * put_imm makes the second half of a Write with Immediate Data: a message with Immediate
 * Data (RFC 7306). Its 64 bits are the program's 32 bits and the length of the Write.
 */
static void put_imm(struct iwarpd_send_wr *to, const struct ibv_send_wr *wr)
{
	*to = (struct iwarpd_send_wr){
		.id = wr->wr_id,
		.opcode = IWARPD_WR_IMM,
		.flags = wr->send_flags & (IBV_SEND_SIGNALED | IBV_SEND_SOLICITED),
		.imm = (uint64_t)be32toh(wr->imm_data) << 32 | length_of(wr),
	};
}

/* put_wr translates a work request. */
static int put_wr(struct iwarpd_send_wr *to, const struct ibv_send_wr *wr, struct iwarpd_sge *window, char *room)
{
	*to = (struct iwarpd_send_wr){
		.id = wr->wr_id,
		.flags = wr->send_flags & (IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED),
		.sge = (const struct iwarpd_sge *)(const void *)wr->sg_list,
		.num_sge = (uint32_t)wr->num_sge,
	};
	switch (wr->opcode) {
	case IBV_WR_SEND:
		to->opcode = IWARPD_WR_SEND;
		break;
	case IBV_WR_SEND_WITH_INV:
		to->opcode = IWARPD_WR_SEND_WITH_INV;
		to->inv_key = wr->invalidate_rkey;
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		to->id = HIDDEN_WR;
		to->flags &= IBV_SEND_FENCE;
		/* fallthrough */
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_READ:
		to->opcode = wr->opcode == IBV_WR_RDMA_READ ? IWARPD_WR_RDMA_READ : IWARPD_WR_RDMA_WRITE;
		to->remote_addr = wr->wr.rdma.remote_addr;
		to->rkey = wr->wr.rdma.rkey;
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		to->opcode = IWARPD_WR_CMP_SWAP;
		to->swap = wr->wr.atomic.swap;
		to->compare_mask = to->swap_mask = UINT64_MAX;
		goto atomic;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		to->opcode = IWARPD_WR_FETCH_ADD;
	atomic:
		to->compare_add = wr->wr.atomic.compare_add;
		to->remote_addr = wr->wr.atomic.remote_addr;
		to->rkey = wr->wr.atomic.rkey;
		break;
	case IBV_WR_LOCAL_INV:
		to->opcode = IWARPD_WR_LOCAL_INV;
		to->inv_key = wr->invalidate_rkey;
		to->num_sge = 0;
		break;
	case IBV_WR_BIND_MW:
		to->opcode = IWARPD_WR_BIND_MW;
		to->rkey = wr->bind_mw.rkey;
		/*
		 * The program may name all access rights of the region; a window has only
		 * remote ones.
		 */
		to->access = wr->bind_mw.bind_info.mw_access_flags & (unsigned int)~IBV_ACCESS_LOCAL_WRITE;
		*window = (struct iwarpd_sge){ wr->bind_mw.bind_info.addr, (uint32_t)wr->bind_mw.bind_info.length,
					       wr->bind_mw.bind_info.mr ? wr->bind_mw.bind_info.mr->lkey : 0 };
		to->sge = window;
		to->num_sge = 1;
		break;
	default: /* TSO, and Send with Immediate Data, which other iWARP devices lack too */
		return -EOPNOTSUPP;
	}
	if ((wr->send_flags & IBV_SEND_INLINE) && wr->num_sge > 0 &&
	    (to->opcode == IWARPD_WR_SEND || to->opcode == IWARPD_WR_SEND_WITH_INV || to->opcode == IWARPD_WR_RDMA_WRITE)) {
		to->flags |= IWARPD_INLINE;
		return put_inline(to, wr, room);
	}
	return 0;
}

/*
 * own_room reports whether a work request uses the room of a batch, so that it is the
 * last one of it.
 */
static bool own_room(const struct ibv_send_wr *wr)
{
	return wr->opcode == IBV_WR_BIND_MW || ((wr->send_flags & IBV_SEND_INLINE) && wr->num_sge > 1);
}

/* A batch is work requests of libiwarpd and the data that they point to. */
struct batch {
	int n;
	struct iwarpd_send_wr wr[BATCH + 1];
	bool last[BATCH + 1]; /* the last one made from a work request of the program */
	struct iwarpd_sge window;
	char room[MAX_INLINE];
};

static void add(struct batch *b, bool sig_all, bool last)
{
	if (sig_all && last)
		b->wr[b->n].flags |= IWARPD_SIGNALED;
	b->last[b->n++] = last;
}

/* fill_batch translates work requests of a list until the batch is full. */
static int fill_batch(struct batch *b, const struct ibv_send_wr *wr, bool sig_all)
{
	for (b->n = 0; wr && b->n < BATCH; wr = wr->next) {
		bool imm = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
		int err = put_wr(&b->wr[b->n], wr, &b->window, b->room);

		if (err)
			return err;
		add(b, sig_all, !imm);
		if (imm) {
			put_imm(&b->wr[b->n], wr);
			add(b, sig_all, true);
		}
		if (own_room(wr))
			return 0;
	}
	return 0;
}

/* post_batch posts the first work requests of a list and makes *wr the next one. */
static int post_batch(struct qp *qp, struct ibv_send_wr **wr)
{
	struct batch b;
	int err = fill_batch(&b, *wr, qp->sig_all), done = 0;

	while (done < b.n) { /* a full queue takes a part; the next call returns why */
		int n = iwarpd_post_sends(qp->q, &b.wr[done], b.n - done);

		if (n < 0)
			return n;
		for (int end = done + n; done < end; done++)
			if (b.last[done])
				*wr = (*wr)->next;
	}
	return err;
}

/* completion_of returns the opcode of a work request's completion. */
static enum ibv_wc_opcode completion_of(const struct ibv_send_wr *wr)
{
	switch (wr->opcode) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return IBV_WC_RDMA_WRITE;
	case IBV_WR_RDMA_READ:
		return IBV_WC_RDMA_READ;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		return IBV_WC_COMP_SWAP;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		return IBV_WC_FETCH_ADD;
	case IBV_WR_LOCAL_INV:
		return IBV_WC_LOCAL_INV;
	case IBV_WR_BIND_MW:
		return IBV_WC_BIND_MW;
	default:
		return IBV_WC_SEND;
	}
}

int post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct qp *qp = qp_of(ibv);
	int err = 0;

	pthread_mutex_lock(&qp->send_lock);
	while (wr && !err)
		err = post_batch(qp, &wr);
	/* Work requests posted after the end of the connection complete too, as flushed. */
	for (; wr && (err == -ENOTCONN || err == 0); wr = wr->next)
		err = cq_flush(ibv->send_cq, ibv, wr->wr_id, completion_of(wr));
	pthread_mutex_unlock(&qp->send_lock);
	if (err)
		*bad = wr;
	return posted(err);
}

static struct iwarpd_recv_wr recv_of(const struct ibv_recv_wr *wr)
{
	return (struct iwarpd_recv_wr){ wr->wr_id, (const struct iwarpd_sge *)(const void *)wr->sg_list,
					(uint32_t)wr->num_sge };
}

/*
 * note_early saves the wr_id of a receive, in case there will be no connection. recv_lock
 * is held.
 */
static void note_early(struct qp *qp, uint64_t wr_id)
{
	if (atomic_load(&qp->conn) != CONN_NONE || qp->num_early == qp->cap.max_recv_wr)
		return;
	if (!qp->early)
		qp->early = malloc(qp->cap.max_recv_wr * sizeof(*qp->early));
	if (qp->early)
		qp->early[qp->num_early++] = wr_id;
}

int post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct qp *qp = qp_of(ibv);
	int err = 0;

	pthread_mutex_lock(&qp->recv_lock);
	for (; wr; wr = wr->next) {
		struct iwarpd_recv_wr r = recv_of(wr);

		err = qp->dead ? -ENOTCONN : iwarpd_post_recv(qp->q, &r);
		if (!err)
			note_early(qp, wr->wr_id);
		if (err == -ENOTCONN)
			err = cq_flush(ibv->recv_cq, ibv, wr->wr_id, IBV_WC_RECV);
		if (err)
			break;
	}
	pthread_mutex_unlock(&qp->recv_lock);
	if (err)
		*bad = wr;
	return posted(err);
}

int post_srq_recv(struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct srq *srq = container_of(ibv, struct srq, ibv);
	int err = 0;

	pthread_mutex_lock(&srq->lock);
	for (; wr; wr = wr->next) {
		struct iwarpd_recv_wr r = recv_of(wr);

		err = iwarpd_post_srq_recv(srq->q, &r);
		if (err)
			break;
	}
	pthread_mutex_unlock(&srq->lock);
	if (err)
		*bad = wr;
	return posted(err);
}
