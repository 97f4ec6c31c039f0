/* Queue pairs and shared receive queues. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum {
	MIN_INLINE = 64,   /* bytes; some programs use inline data without asking for it */
	SHARED_RECVS = 32, /* receives of an SRQ that a QP holds at least, until their data is in far memory */
};

static uint32_t most(uint32_t a, uint32_t b)
{
	return a > b ? a : b;
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
	cap->max_inline_data = most(cap->max_inline_data, MIN_INLINE);
	cap->max_inline_data = (uint32_t)least(cap->max_inline_data, least(c->attr.max_inline, MAX_INLINE));
	/* A Write with Immediate Data takes two entries of the send queue. */
	attr->send_depth = 2 * cap->max_send_wr <= c->attr.max_qp_wr / 2 ? 2 * cap->max_send_wr : cap->max_send_wr;
	attr->recv_depth = cap->max_recv_wr;
	attr->max_sge = cap->max_send_sge;
	attr->max_inline = cap->max_inline_data;
	attr->receive_wait_ms = iwv_settings()->receive_wait;
	attr->flush_late = true;
	return 0;
}

static struct qp *new_qp(struct ibv_pd *pd, const struct ibv_qp_init_attr *init)
{
	struct qp *qp = calloc(1, sizeof(*qp));

	if (!qp)
		return NULL;
	qp->ctx = iwv_context_of(pd->context);
	qp->sig_all = init->sq_sig_all;
	qp->attr = (struct ibv_qp_attr){
		.path_mtu = IBV_MTU_1024,
		.cap = init->cap,
		.port_num = 1,
		.max_rd_atomic = (uint8_t)least(qp->ctx->attr.max_ord, UINT8_MAX),
		.max_dest_rd_atomic = (uint8_t)least(qp->ctx->attr.max_ird, UINT8_MAX),
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	};
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
	pthread_mutex_destroy(&qp->send_lock);
	pthread_mutex_destroy(&qp->recv_lock);
	pthread_mutex_destroy(&qp->ibv.mutex);
	pthread_cond_destroy(&qp->ibv.cond);
	free(qp);
}

/* set_numbered sets what qp_numbered returns. It fails only if there never was a QP with such a number. */
static int set_numbered(struct context *c, uint32_t num, struct qp *qp)
{
	struct numbers *n = atomic_load(&c->numbers[num % QP_NUMS / NUMBERS]);

	if (!n)
		n = calloc(1, sizeof(*n));
	if (!n)
		return -ENOMEM;
	atomic_store(&n->qp[num % NUMBERS], qp);
	atomic_store(&c->numbers[num % QP_NUMS / NUMBERS], n);
	return 0;
}

static uint64_t most_sends(const struct qp *qp)
{
	return 2 * (uint64_t)qp->attr.cap.max_send_wr;
}

/* forgotten makes the CQs of a QP of which nothing completes any more forget it. The lock is held. */
static void forgotten(const struct qp *qp)
{
	cq_forget(qp->ibv.send_cq, qp->ibv.qp_num, most_sends(qp));
	cq_forget(qp->ibv.recv_cq, qp->ibv.qp_num, qp->recvs);
}

/* open_qp creates the QP of the daemon, for whose completions the CQs have room then. The lock is held. */
static int open_qp(struct qp *qp, const struct iwarpd_qp_attr *attr, struct iwarpd_error *e)
{
	int err;

	cq_of(qp->ibv.send_cq)->need += most_sends(qp);
	cq_of(qp->ibv.recv_cq)->need += qp->recvs;
	err = cq_grow(qp->ibv.send_cq, e);
	if (!err)
		err = cq_grow(qp->ibv.recv_cq, e);
	if (!err)
		err = iwarpd_create_qp(container_of(qp->ibv.pd, struct pd, ibv)->pd, attr, &qp->q, e);
	if (!err) {
		qp->ibv.qp_num = qp->ibv.handle = iwarpd_qp_num(qp->q);
		err = set_numbered(qp->ctx, qp->ibv.qp_num, qp);
		if (err)
			iwarpd_destroy_qp(qp->q, NULL);
	}
	if (err) {
		forgotten(qp);
		return err;
	}
	qp->next = qp->ctx->qps;
	qp->ctx->qps = qp;
	return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct iwarpd_qp_attr attr = { 0 };
	struct iwarpd_error e = { 0 };
	struct qp *qp;
	int err;

	OTHERS(pd->context, ibv_create_qp, pd, init);
	if (init->qp_type != IBV_QPT_RC) {
		iwv_unsupported("ibv_create_qp: a type that is not IBV_QPT_RC");
		return NULL;
	}
	if (!init->send_cq || !init->recv_cq || init->send_cq->context != pd->context ||
	    init->recv_cq->context != pd->context || (init->srq && init->srq->context != pd->context)) {
		errno = EINVAL;
		return NULL;
	}
	qp = new_qp(pd, init);
	if (!qp)
		return NULL;
	if (init->srq) { /* the program need not set these; a QP holds no more receives than its SRQ has */
		qp->attr.cap.max_recv_wr = (uint32_t)least(qp->attr.cap.max_recv_wr, srq_of(init->srq)->attr.max_wr);
		qp->attr.cap.max_recv_sge = 0;
	}
	err = fill(qp->ctx, &attr, &qp->attr.cap);
	if (init->srq)
		attr.recv_depth = most(attr.recv_depth, SHARED_RECVS);
	qp->recvs = init->srq ? srq_of(init->srq)->attr.max_wr : qp->attr.cap.max_recv_wr;
	attr.send_cq = cq_of(init->send_cq)->q;
	attr.recv_cq = cq_of(init->recv_cq)->q;
	attr.srq = init->srq ? srq_of(init->srq)->q : NULL;
	attr.context = qp; /* sig_all is in the flags of each work request, since the library adds some of its own */
	if (!err) {
		iwv_thread_lock();
		err = open_qp(qp, &attr, &e);
		iwv_thread_unlock();
	}
	if (err) {
		free_qp(qp);
		iwv_fail(err, "ibv_create_qp", &e);
		return NULL;
	}
	init->cap = qp->attr.cap;
	return &qp->ibv;
}

struct ibv_qp *create_qp_ex(struct ibv_context *ctx, struct ibv_qp_init_attr_ex *init)
{
	if (!qp_plain(init)) {
		iwv_unsupported("ibv_create_qp_ex: comp_mask or create_flags");
		return NULL;
	}
	if (!(init->comp_mask & IBV_QP_INIT_ATTR_PD) || !init->pd || init->pd->context != ctx) {
		errno = EINVAL;
		return NULL;
	}
	return ibv_create_qp(init->pd, (struct ibv_qp_init_attr *)init); /* which it begins with */
}

struct qp *iwv_qp_of_event(const struct iwarpd_event *ev)
{
	return ev->qp ? iwarpd_qp_context(ev->qp) : NULL;
}

/* just_ended reports whether an error means that a connection has ended, of which the event is to come. */
static bool just_ended(int err)
{
	return err == -EBADFD || err == -ENOENT;
}

int iwv_qp_disconnect(struct qp *qp, bool abort, struct iwarpd_error *e)
{
	int err;

	switch (atomic_load(&qp->conn)) {
	case CONN_MAKING:
	case CONN_UP:
		break;
	case CONN_NONE:
	case CONN_CLOSING:
		if (abort)
			break;
		return 0;
	default:
		return 0;
	}
	err = iwarpd_disconnect(qp->q, abort, e);
	if (just_ended(err))
		err = 0;
	if (!err)
		atomic_store(&qp->conn, CONN_CLOSING);
	return err;
}

/* drained reports that a QP in the error state takes no more receives of its SRQ, if it has one. The lock is held. */
static void drained(struct qp *qp)
{
	if (qp->ibv.srq && qp->ibv.state == IBV_QPS_ERR && atomic_load(&qp->conn) == CONN_OVER)
		async_last_recv(qp);
}

void qp_event(const struct iwarpd_event *ev)
{
	struct qp *qp = iwv_qp_of_event(ev);

	if (!qp)
		return;
	switch (ev->type) {
	case IWARPD_EVENT_ESTABLISHED:
		if (atomic_load(&qp->conn) == CONN_MAKING) {
			atomic_store(&qp->conn, CONN_UP);
			qp->ibv.state = IBV_QPS_RTS;
			qp->attr.max_rd_atomic = (uint8_t)least(ev->negotiated.ord, UINT8_MAX);
			qp->attr.max_dest_rd_atomic = (uint8_t)least(ev->negotiated.ird, UINT8_MAX);
		}
		break;
	case IWARPD_EVENT_REJECTED:
	case IWARPD_EVENT_CONNECT_FAILED:
	case IWARPD_EVENT_DISCONNECTED:
		atomic_store(&qp->conn, CONN_OVER);
		if (!qp->exchange)
			qp->ibv.state = IBV_QPS_ERR;
		qp->deadline = 0;
		drained(qp);
		break;
	}
}

void qps_failed(struct context *c, const struct ibv_wc *wc, int n)
{
	for (int i = 0; i < n; i++) {
		struct qp *qp;

		if (wc[i].status == IBV_WC_SUCCESS)
			continue;
		iwv_thread_lock();
		qp = qp_numbered(c, wc[i].qp_num);
		if (qp && !qp->exchange)
			qp->ibv.state = IBV_QPS_ERR;
		iwv_thread_unlock();
	}
}

void qp_expire(struct context *c)
{
	struct qp **at = &c->closing, *qp;
	int64_t now = time_us() / 1000;

	while ((qp = *at) != NULL) {
		if (qp->deadline > now && !atomic_load(&c->gone)) {
			at = &qp->next;
			continue;
		}
		*at = qp->next;
		iwarpd_destroy_qp(qp->q, NULL);
		free_qp(qp);
	}
}

void qp_free_closing(struct context *c)
{
	while (c->closing) {
		struct qp *qp = c->closing;

		c->closing = qp->next;
		free_qp(qp);
	}
}

/*
 * leave ends the connection of a QP that is being destroyed, and reports whether its end is to come. The QP uses no
 * receive, CQ, SRQ or PD any more then.
 */
static bool leave(struct qp *qp)
{
	int conn = atomic_load(&qp->conn), err;

	if (conn != CONN_UP && conn != CONN_CLOSING)
		return false;
	err = iwarpd_leave(qp->q, NULL);
	if (err && !just_ended(err)) /* the daemon has ended */
		return false;
	atomic_store(&qp->conn, CONN_CLOSING);
	return true;
}

/*
 * A QP with a connection is closed in order and freed later: the peer then receives all
 * that has completed, and librdmacm's id gets its event.
 */
int ibv_destroy_qp(struct ibv_qp *ibv)
{
	struct qp *qp = qp_of(ibv);
	struct context *c;
	bool closing;

	OTHERS(ibv->context, ibv_destroy_qp, ibv);
	c = qp->ctx;
	iwv_thread_lock();
	thread_gone(c); /* its events that have come are not lost */
	set_numbered(c, ibv->qp_num, NULL);
	exchange_end(qp);
	async_drop(c, ibv, &qp->unacknowledged); /* others find the QP while it waits */
	closing = leave(qp);
	if (!closing)
		iwarpd_destroy_qp(qp->q, NULL);
	UNLINK(c->qps, qp);
	forgotten(qp);
	if (closing) {
		qp->deadline = time_us() / 1000 + CLOSE_WAIT_MS;
		qp->next = c->closing;
		c->closing = qp;
	} else {
		free_qp(qp);
	}
	iwv_thread_unlock();
	return 0;
}

void qps_after_fork(const struct context *c)
{
	for (struct qp *qp = c->qps; qp; qp = qp->next) {
		pthread_mutex_init(&qp->send_lock, NULL);
		pthread_mutex_init(&qp->recv_lock, NULL);
		qp->unacknowledged = 0;
	}
	for (struct srq *srq = c->srqs; srq; srq = srq->next) {
		pthread_mutex_init(&srq->lock, NULL);
		srq->unacknowledged = 0;
	}
}

int ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	struct qp *qp = qp_of(ibv);

	OTHERS(ibv->context, ibv_query_qp, ibv, attr, mask, init);
	iwv_thread_lock();
	*attr = qp->attr;
	attr->qp_state = attr->cur_qp_state = ibv->state;
	*init = (struct ibv_qp_init_attr){
		.qp_context = ibv->qp_context,
		.send_cq = ibv->send_cq,
		.recv_cq = ibv->recv_cq,
		.srq = ibv->srq,
		.cap = qp->attr.cap,
		.qp_type = ibv->qp_type,
		.sq_sig_all = qp->sig_all,
	};
	iwv_thread_unlock();
	return 0;
}

/* may_become reports whether a QP in one state can change to another. RTR to RTR is no change of InfiniBand's, but harmless. */
static bool may_become(enum ibv_qp_state from, enum ibv_qp_state to)
{
	switch (to) {
	case IBV_QPS_RESET:
	case IBV_QPS_ERR:
		return true;
	case IBV_QPS_INIT:
		return from == IBV_QPS_RESET || from == IBV_QPS_INIT;
	case IBV_QPS_RTR:
		return from == IBV_QPS_INIT || from == IBV_QPS_RTR;
	case IBV_QPS_RTS:
		return from == IBV_QPS_RTR || from == IBV_QPS_RTS;
	default: /* SQD and SQE */
		return false;
	}
}

/*
 * passed reports whether librdmacm has taken a QP past a state already. Programs that modify the queue pairs of their ids
 * themselves, such as rping -q, set INIT, RTR and RTS when the connection is there. Linux's siw ignores that too.
 */
static bool passed(struct qp *qp, enum ibv_qp_state to)
{
	return (to == IBV_QPS_INIT || to == IBV_QPS_RTR) && qp->ibv.state == IBV_QPS_RTS && atomic_load(&qp->cm);
}

/* modify performs a change of state. librdmacm has done so already if the QP has an id. */
static int modify(struct qp *qp, const struct ibv_qp_attr *attr, int mask, struct iwarpd_error *e)
{
	if (!may_become(qp->ibv.state, attr->qp_state))
		return -EINVAL;
	switch (attr->qp_state) {
	case IBV_QPS_RESET:
		if (atomic_load(&qp->conn) != CONN_NONE || atomic_load(&qp->posted)) {
			iwv_log("QP %u: iwarpd cannot reset a queue pair that has had work requests, a connection or an error: create another one", qp->ibv.qp_num);
			return -EOPNOTSUPP;
		}
		exchange_end(qp); /* it takes no connection now */
		return 0;
	case IBV_QPS_INIT:
		return atomic_load(&qp->cm) ? 0 : exchange_listen(qp);
	case IBV_QPS_RTR:
		/* Without an address, librdmacm will connect the QP for an id. */
		if (!(mask & IBV_QP_AV) || atomic_load(&qp->cm) || atomic_load(&qp->conn) != CONN_NONE)
			return 0;
		return mask & IBV_QP_DEST_QPN ? exchange_connect(qp, attr) : -EINVAL;
	case IBV_QPS_ERR:
		exchange_show(qp);
		if (atomic_load(&qp->conn) == CONN_NONE)
			atomic_store(&qp->cm, NULL); /* its id has not connected it, and gets no event */
		return iwv_qp_disconnect(qp, true, e);
	default:
		return 0;
	}
}

#define FIELD(mask, member) { mask, offsetof(struct ibv_qp_attr, member), sizeof(((struct ibv_qp_attr *)NULL)->member) }

/* remember stores attributes, so that ibv_query_qp returns them. */
static void remember(struct ibv_qp_attr *to, const struct ibv_qp_attr *from, int mask)
{
	static const struct { int mask; size_t at, size; } fields[] = {
		FIELD(IBV_QP_ACCESS_FLAGS, qp_access_flags),
		FIELD(IBV_QP_PKEY_INDEX, pkey_index),
		FIELD(IBV_QP_PORT, port_num),
		FIELD(IBV_QP_AV, ah_attr),
		FIELD(IBV_QP_PATH_MTU, path_mtu),
		FIELD(IBV_QP_TIMEOUT, timeout),
		FIELD(IBV_QP_RETRY_CNT, retry_cnt),
		FIELD(IBV_QP_RNR_RETRY, rnr_retry),
		FIELD(IBV_QP_RQ_PSN, rq_psn),
		FIELD(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic),
		FIELD(IBV_QP_MIN_RNR_TIMER, min_rnr_timer),
		FIELD(IBV_QP_SQ_PSN, sq_psn),
		FIELD(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic),
		FIELD(IBV_QP_DEST_QPN, dest_qp_num),
	};

	for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
		if (mask & fields[i].mask)
			memcpy((char *)to + fields[i].at, (const char *)from + fields[i].at, fields[i].size);
}

/* What the access flags of a QP restrict. */
enum { QP_ACCESS = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };

int qp_permit(struct qp *qp, unsigned int access, bool immediate, struct iwarpd_error *e)
{
	return iwarpd_modify_qp(qp->q, (access & QP_ACCESS) | (immediate ? IWARPD_IGNORE_INVALIDATE : 0), e);
}

/*
 * permit changes what the peer may do. A daemon that cannot restrict the peer answers that the request is invalid,
 * which is no reason to refuse its service. The lock is held.
 */
static int permit(struct qp *qp, unsigned int access, struct iwarpd_error *e)
{
	int err = 0;

	if ((access ^ qp->attr.qp_access_flags) & QP_ACCESS)
		err = qp_permit(qp, access, atomic_load(&qp->immediate), e);
	if (err != -EINVAL)
		return err;
	iwv_log("QP %u: the peer may do all that memory regions allow: %s", qp->ibv.qp_num, e->text);
	return 0;
}

/* The attributes of InfiniBand, which iWARP devices of Linux accept in any change, but for another size and path. */
enum { QP_ATTR = (2 * IBV_QP_DEST_QPN - 1) & ~(IBV_QP_CAP | IBV_QP_ALT_PATH) };

int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask)
{
	struct qp *qp = qp_of(ibv);
	struct iwarpd_error e = { 0 };
	int err = 0;

	OTHERS(ibv->context, ibv_modify_qp, ibv, attr, mask);
	if (mask & ~QP_ATTR)
		return iwv_unsupported("ibv_modify_qp: one of the attributes");
	if (mask & IBV_QP_PORT && attr->port_num != 1)
		return iwv_fail(-EINVAL, "ibv_modify_qp: the device has port 1 only", NULL);
	iwv_thread_lock();
	if ((mask & IBV_QP_STATE) && !passed(qp, attr->qp_state)) {
		enum ibv_qp_state from = ibv->state;

		err = modify(qp, attr, mask, &e);
		if (!err)
			ibv->state = attr->qp_state;
		if (ibv->state != from)
			drained(qp);
	}
	if (!err && mask & IBV_QP_ACCESS_FLAGS)
		err = permit(qp, attr->qp_access_flags, &e);
	if (!err)
		remember(&qp->attr, attr, mask);
	iwv_thread_unlock();
	return err ? iwv_fail(err, "ibv_modify_qp", &e) : 0;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
	struct iwarpd_srq_attr attr;
	struct iwarpd_error e;
	struct srq *srq;
	int err;

	OTHERS(pd->context, ibv_create_srq, pd, init);
	srq = calloc(1, sizeof(*srq));
	if (!srq)
		return NULL;
	attr = (struct iwarpd_srq_attr){
		.depth = most(init->attr.max_wr, 1),
		.max_sge = most(init->attr.max_sge, 1),
		.context = srq,
	};
	err = iwarpd_create_srq(container_of(pd, struct pd, ibv)->pd, &attr, &srq->q, &e);
	if (err) {
		free(srq);
		iwv_fail(err, "ibv_create_srq", &e);
		return NULL;
	}
	init->attr.max_wr = attr.depth;
	init->attr.max_sge = attr.max_sge;
	srq->attr = init->attr;
	srq->attr.srq_limit = 0; /* ibv_modify_srq sets it */
	srq->ibv.context = pd->context;
	srq->ibv.srq_context = init->srq_context;
	srq->ibv.pd = pd;
	pthread_mutex_init(&srq->lock, NULL);
	pthread_mutex_init(&srq->ibv.mutex, NULL);
	pthread_cond_init(&srq->ibv.cond, NULL);
	iwv_thread_lock();
	srq->next = iwv_context_of(pd->context)->srqs;
	iwv_context_of(pd->context)->srqs = srq;
	iwv_thread_unlock();
	return &srq->ibv;
}

int ibv_modify_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr, int mask)
{
	struct srq *srq = srq_of(ibv);
	struct iwarpd_error e;
	int err;

	OTHERS(ibv->context, ibv_modify_srq, ibv, attr, mask);
	if (mask & IBV_SRQ_MAX_WR)
		return iwv_unsupported("ibv_modify_srq: IBV_SRQ_MAX_WR");
	if (!(mask & IBV_SRQ_LIMIT))
		return 0;
	if (attr->srq_limit > srq->attr.max_wr) /* the daemon's queue is deeper */
		return iwv_fail(-EINVAL, "ibv_modify_srq: srq_limit", NULL);
	iwv_thread_lock();
	err = iwarpd_modify_srq(srq->q, attr->srq_limit, &e);
	if (!err)
		srq->attr.srq_limit = attr->srq_limit;
	iwv_thread_unlock();
	return err ? iwv_fail(err, "ibv_modify_srq", &e) : 0;
}

int ibv_query_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr)
{
	OTHERS(ibv->context, ibv_query_srq, ibv, attr);
	iwv_thread_lock();
	*attr = srq_of(ibv)->attr;
	iwv_thread_unlock();
	return 0;
}

int ibv_destroy_srq(struct ibv_srq *ibv)
{
	struct srq *srq = srq_of(ibv);
	struct iwarpd_error e;
	struct context *c;
	int err;

	OTHERS(ibv->context, ibv_destroy_srq, ibv);
	c = iwv_context_of(ibv->context);
	iwv_thread_lock();
	err = iwarpd_destroy_srq(srq->q, &e);
	if (!err || thread_gone(c)) {
		UNLINK(c->srqs, srq);
		async_drop(c, ibv, &srq->unacknowledged);
		err = 0;
	}
	iwv_thread_unlock();
	if (err)
		return iwv_fail(err, "ibv_destroy_srq", &e);
	pthread_mutex_destroy(&srq->lock);
	pthread_mutex_destroy(&srq->ibv.mutex);
	pthread_cond_destroy(&srq->ibv.cond);
	free(srq);
	return 0;
}
