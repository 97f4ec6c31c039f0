/*
 * Connections of programs without librdmacm.
 *
 * Such programs exchange the GID and number of their QPs themselves, and then call
 * ibv_modify_qp with those of the peer. A GID is an address of a daemon, and a QP number
 * is unique on a daemon. Each QP therefore listens on a port that follows from its
 * number. It listens from the state INIT on, in which its peer cannot know it yet. In the
 * state RTR the QP with the lower GID and number connects, and the other accepts. Private
 * data identifies both QPs.
 *
 * Anyone can connect to that port. Some requests that come before the state RTR are kept,
 * and then the one is accepted that comes from the address and QP of the peer.
 *
 * These programs are written for InfiniBand, and some use Send with Immediate Data. iWARP has only
 * a message of its own for it (RFC 7306), which takes a receive more. So on these connections Send
 * with Invalidate carries it, which programs without librdmacm do not use.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum {
	FIRST_PORT = 61000, /* above the ephemeral ports of Linux */
	NUM_PORTS = 65536 - FIRST_PORT,
	MAGIC = 0x69577651, /* "iWvQ" */
	MAX_CALLERS = 8,
};

/* Private data of the initiator, in network byte order. */
struct hello {
	uint32_t magic;
	uint32_t from, to; /* QP numbers */
};

/* A pending connect request. */
struct caller {
	uint32_t conn;
	uint32_t qp; /* where it comes from */
	union ibv_gid gid;
};

struct exchange {
	bool holds; /* completions are held: from the state RTR to the error state */
	struct late *held, **last_held;
	struct iwarpd_listener *listener; /* or NULL: it connects */
	uint32_t peer;          /* QP number; set in the state RTR */
	union ibv_gid peer_gid;
	bool any_gid;           /* the peer connects from another address than that GID's */
	bool accepts;           /* the peer connects */
	struct caller callers[MAX_CALLERS + 1];
	unsigned int num_callers;
};

/* holding returns the lock of what is held. It and iwv_thread_lock are taken where the exchange of a QP is set. */
static pthread_mutex_t *holding(const struct qp *qp)
{
	return &cq_of(qp->ibv.recv_cq)->lock;
}

bool exchange_hold(struct qp *qp, const struct ibv_wc *wc)
{
	struct exchange *x = qp->exchange;
	struct late *l = x && x->holds ? calloc(1, sizeof(*l)) : NULL;

	if (!l)
		return false;
	l->wc = *wc;
	*x->last_held = l;
	x->last_held = &l->next;
	return true;
}

void exchange_show(struct qp *qp)
{
	struct exchange *x = qp->exchange;
	struct late *list;

	if (!x)
		return;
	pthread_mutex_lock(holding(qp));
	list = x->held;
	x->held = NULL;
	x->holds = false;
	pthread_mutex_unlock(holding(qp));
	cq_late(qp->ibv.recv_cq, list);
}

static void set_exchange(struct qp *qp, struct exchange *x)
{
	pthread_mutex_lock(holding(qp));
	qp->exchange = x;
	pthread_mutex_unlock(holding(qp));
}

static void hold(struct qp *qp)
{
	pthread_mutex_lock(holding(qp));
	qp->exchange->holds = true;
	pthread_mutex_unlock(holding(qp));
}

static uint16_t port_of(uint32_t qp)
{
	return (uint16_t)(FIRST_PORT + qp % NUM_PORTS);
}

int exchange_listen(struct qp *qp)
{
	struct iwarpd_listen_attr attr = { .port = port_of(qp->ibv.qp_num), .backlog = 2 * MAX_CALLERS };
	struct iwarpd_error e;
	struct exchange *x;
	int err;

	if (qp->exchange)
		return 0;
	x = calloc(1, sizeof(*x));
	if (!x)
		return -ENOMEM;
	err = iwarpd_listen(qp->ctx->dev, &attr, &x->listener, &e);
	if (err) {
		/* A QP of librdmacm needs no listener, so the failure matters only in the state RTR. */
		iwv_log("QP %u cannot be connected by ibv_modify_qp: %s", qp->ibv.qp_num, e.text);
		free(x);
		return 0;
	}
	x->last_held = &x->held;
	set_exchange(qp, x);
	return 0;
}

static void unlisten(struct exchange *x)
{
	if (x->listener)
		iwarpd_unlisten(x->listener, NULL); /* which resets the requests */
	x->listener = NULL;
	x->num_callers = 0;
}

static void refuse(struct qp *qp, uint32_t conn)
{
	iwarpd_reject(qp->ctx->dev, conn, NULL, 0, NULL);
}

static void refuse_all(struct qp *qp, struct exchange *x)
{
	for (unsigned int i = 0; i < x->num_callers; i++)
		refuse(qp, x->callers[i].conn);
	x->num_callers = 0;
}

void exchange_end(struct qp *qp)
{
	struct exchange *x = qp->exchange;

	if (!x)
		return;
	set_exchange(qp, NULL);
	unlisten(x);
	free_late(x->held);
	free(x);
}

/* gid_text writes the address of a GID and reports whether it is an IPv4 address. */
static bool gid_text(const union ibv_gid *gid, char text[INET6_ADDRSTRLEN])
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
	bool v4 = memcmp(gid->raw, mapped, sizeof(mapped)) == 0;

	inet_ntop(v4 ? AF_INET : AF_INET6, v4 ? gid->raw + 12 : gid->raw, text, INET6_ADDRSTRLEN);
	return v4;
}

/* gid_of makes a GID from the address of an event, which has a port. */
static bool gid_of(const char *remote, union ibv_gid *gid)
{
	char text[64], *end;
	bool v6 = remote[0] == '[';

	snprintf(text, sizeof(text), "%s", remote + v6);
	end = v6 ? strpbrk(text, "%]") : strrchr(text, ':');
	if (!end)
		return false;
	*end = 0;
	*gid = (union ibv_gid){ .raw = { [10] = 0xff, 0xff } };
	return inet_pton(v6 ? AF_INET6 : AF_INET, text, v6 ? gid->raw : gid->raw + 12) == 1;
}

static bool is_peer(const struct exchange *x, const struct caller *c)
{
	return c->qp == x->peer && (x->any_gid || memcmp(&c->gid, &x->peer_gid, sizeof(c->gid)) == 0);
}

/* take removes a connect request of the peer from those that are kept, and returns its number, or 0. */
static uint32_t take(struct exchange *x)
{
	for (unsigned int i = 0; i < x->num_callers; i++) {
		uint32_t conn = x->callers[i].conn;

		if (!is_peer(x, &x->callers[i]))
			continue;
		x->callers[i] = x->callers[--x->num_callers];
		return conn;
	}
	return 0;
}

/* answer accepts the connect request of the peer, if it has come and is not withdrawn, and refuses the others. */
static int answer(struct qp *qp)
{
	struct exchange *x = qp->exchange;
	uint32_t conn;
	int err = -ENOENT;

	atomic_store(&qp->conn, CONN_MAKING);
	while (err == -ENOENT && (conn = take(x)) != 0)
		err = iwarpd_accept(qp->ctx->dev, conn, qp->q, NULL, NULL);
	refuse_all(qp, x);
	if (err)
		atomic_store(&qp->conn, CONN_NONE);
	return err == -ENOENT ? 0 : err;
}

static int call(struct qp *qp, const union ibv_gid *own, const union ibv_gid *peer)
{
	struct hello hello = { htonl(MAGIC), htonl(qp->ibv.qp_num), htonl(qp->exchange->peer) };
	char host[INET6_ADDRSTRLEN], local[INET6_ADDRSTRLEN], remote[80];
	struct iwarpd_connect_attr attr = { .remote = remote, .private_data = &hello, .private_len = sizeof(hello) };
	struct iwarpd_error e;
	bool v4 = gid_text(peer, host);
	int err;

	snprintf(remote, sizeof(remote), v4 ? "%s:%u" : "[%s]:%u", host, port_of(qp->exchange->peer));
	if (gid_text(own, local) == v4)
		attr.local = local;
	atomic_store(&qp->conn, CONN_MAKING);
	err = iwarpd_connect(qp->q, &attr, &e);
	if (err) { /* the program may try another peer */
		iwv_log("connect to %s: %s", remote, e.text);
		atomic_store(&qp->conn, CONN_NONE);
		return err;
	}
	unlisten(qp->exchange);
	return 0;
}

/* carry_immediate makes a Send with Invalidate of the peer one with Immediate Data, and lets the program send those. */
static int carry_immediate(struct qp *qp)
{
	struct iwarpd_error e;
	int err = qp_permit(qp, qp->attr.qp_access_flags, true, &e);

	if (err == -EINVAL) { /* an older daemon */
		iwv_log("QP %u: no Send with Immediate Data: %s", qp->ibv.qp_num, e.text);
		return 0;
	}
	atomic_store(&qp->immediate, !err);
	return err;
}

void iwv_exchange_leave(struct qp *qp)
{
	exchange_end(qp);
	if (atomic_exchange(&qp->immediate, false))
		qp_permit(qp, qp->attr.qp_access_flags, false, NULL);
}

int exchange_connect(struct qp *qp, const struct ibv_qp_attr *attr)
{
	const union ibv_gid *peer = &attr->ah_attr.grh.dgid;
	char text[INET6_ADDRSTRLEN];
	union ibv_gid own;
	int order, err;

	if (!qp->exchange)
		return -EADDRINUSE;
	if (!attr->ah_attr.is_global || put_gid(qp->ctx, attr->ah_attr.grh.sgid_index, &own) < 0) {
		iwv_log("ibv_modify_qp: a GID is needed: many programs have an option for its index, which is 0");
		return -EINVAL;
	}
	err = carry_immediate(qp);
	if (err)
		return err;
	qp->exchange->peer = attr->dest_qp_num;
	qp->exchange->peer_gid = *peer;
	qp->exchange->any_gid = gid_text(&own, text) != gid_text(peer, text);
	hold(qp);
	order = memcmp(&own, peer, sizeof(own));
	qp->exchange->accepts = order > 0 || (order == 0 && qp->ibv.qp_num >= attr->dest_qp_num);
	err = qp->exchange->accepts ? answer(qp) : call(qp, &own, peer);
	if (err)
		qp->exchange->accepts = false;
	return err;
}

static struct qp *listening(struct context *c, const struct iwarpd_listener *l)
{
	struct qp *qp = c->qps;

	while (qp && !(qp->exchange && qp->exchange->listener == l))
		qp = qp->next;
	return qp;
}

static void forget(struct exchange *x, uint32_t conn)
{
	for (unsigned int i = 0; i < x->num_callers; i++) {
		if (x->callers[i].conn == conn) {
			memmove(x->callers + i, x->callers + i + 1, sizeof(*x->callers) * (--x->num_callers - i));
			return;
		}
	}
}

/*
 * crowd tells where the most requests come from: from which IPv6 network, and from which address there. All of IPv4 is like one
 * network. A stranger may have as many addresses of its own network as it likes.
 */
static unsigned int crowd(const struct exchange *x, const union ibv_gid *from)
{
	unsigned int net = 0, host = 0;

	for (unsigned int i = 0; i < x->num_callers; i++) {
		const union ibv_gid *gid = &x->callers[i].gid;

		net += gid->global.subnet_prefix == from->global.subnet_prefix;
		host += memcmp(gid, from, sizeof(*gid)) == 0;
	}
	return (MAX_CALLERS + 2) * net + host;
}

/*
 * keep adds a connect request to those of a QP. The oldest one from where the most come makes room, so that a stranger pushes out
 * its own ones, and not the peer's.
 */
static void keep(struct qp *qp, const struct caller *c)
{
	struct exchange *x = qp->exchange;
	unsigned int most = 0;

	x->callers[x->num_callers++] = *c;
	if (x->num_callers <= MAX_CALLERS)
		return;
	for (unsigned int i = 1; i < x->num_callers; i++)
		if (crowd(x, &x->callers[i].gid) > crowd(x, &x->callers[most].gid))
			most = i;
	refuse(qp, x->callers[most].conn);
	forget(x, x->callers[most].conn);
}

bool exchange_event(struct context *c, const struct iwarpd_event *ev)
{
	struct caller caller = { .conn = ev->conn };
	struct hello hello = { 0 };
	struct qp *qp;

	if (ev->type == IWARPD_EVENT_CONNECT_GONE)
		for (qp = c->qps; qp; qp = qp->next)
			if (qp->exchange)
				forget(qp->exchange, ev->conn);
	if (ev->type != IWARPD_EVENT_CONNECT_REQUEST)
		return false;
	qp = listening(c, ev->listener);
	if (!qp)
		return false;
	if (ev->data_len >= sizeof(hello))
		memcpy(&hello, ev->data, sizeof(hello));
	caller.qp = ntohl(hello.from);
	if (ntohl(hello.magic) != MAGIC || ntohl(hello.to) != qp->ibv.qp_num || !gid_of(ev->remote, &caller.gid) ||
	    atomic_load(&qp->conn) != CONN_NONE) {
		refuse(qp, ev->conn);
		return true;
	}
	keep(qp, &caller);
	if (qp->exchange->accepts)
		answer(qp);
	return true;
}
