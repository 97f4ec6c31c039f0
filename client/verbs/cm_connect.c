/* Connections of identifiers. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "cm.h"

enum { MOST_DATA = IWARPD_MAX_PRIVATE_DATA + UINT8_MAX };

/*
 * put_private stores the private data of a call, after that of the rdma_addrinfo of an endpoint, if there is any.
 * It returns the length.
 */
static size_t put_private(uint8_t to[MOST_DATA], const struct id *id, const struct rdma_conn_param *p)
{
	size_t n = id->connect_len;

	if (n > 0)
		memcpy(to, id->connect, n);
	if (p && p->private_data) {
		memcpy(to + n, p->private_data, p->private_data_len);
		n += p->private_data_len;
	}
	return n;
}

/* stored returns the QP that is stored in id, if it still exists. Programs such as uDAPL's move one from another id so. */
static struct qp *stored(const struct id *id)
{
	struct qp *qp = id->pub.verbs ? iwv_context_of(id->pub.verbs)->qps : NULL;

	while (qp && &qp->ibv != id->pub.qp)
		qp = qp->next;
	return qp;
}

/*
 * connection_qp returns the QP for a connection and assigns it to id. It returns NULL if there is
 * none, or if it has had a connection. The lock is held.
 */
static struct qp *connection_qp(struct id *id, const struct rdma_conn_param *p)
{
	struct qp *qp = stored(id), *was = id_qp(id);

	if (!qp && p && id->pub.verbs)
		qp = qp_numbered(iwv_context_of(id->pub.verbs), p->qp_num);
	if (!qp || atomic_load(&qp->conn) != CONN_NONE)
		return NULL;
	if (was)
		atomic_store(&was->cm, NULL); /* an id has one queue pair */
	atomic_store(&qp->cm, id);
	qp->attr.timeout = id->ack_timeout;
	iwv_exchange_leave(qp); /* the program may have moved it to the state INIT or RTR before */
	return qp;
}

static int connect_qp(struct id *id, const struct rdma_conn_param *p)
{
	struct qp *qp = id->state == ID_ROUTE_RESOLVED ? connection_qp(id, p) : NULL;
	struct iwarpd_startup startup = { .dscp = id->dscp };
	uint8_t data[MOST_DATA];
	char remote[128], local[128];
	struct iwarpd_connect_attr attr = {
		.remote = remote, .local = local, .startup = &startup, .private_data = data,
	};
	struct iwarpd_error e;
	int err;

	if (!qp)
		return EINVAL;
	addr_text(&id->pub.route.addr.dst_addr, true, remote);
	addr_text(&id->pub.route.addr.src_addr, true, local);
	if (p) { /* 0 makes iwarpd choose */
		startup.ird = (int)least(p->responder_resources, qp->ctx->attr.max_ird);
		startup.ord = (int)least(p->initiator_depth, qp->ctx->attr.max_ord);
	}
	attr.private_len = put_private(data, id, p);
	atomic_store(&qp->conn, CONN_MAKING);
	close_endpoints(id); /* which have kept its port for it */
	err = iwarpd_connect(qp->q, &attr, &e);
	if (!err) {
		id->state = ID_CONNECT;
		return 0;
	}
	atomic_store(&qp->conn, CONN_NONE);
	return iwv_fail(err, "rdma_connect", &e);
}

int rdma_connect(struct rdma_cm_id *pub, struct rdma_conn_param *p)
{
	struct id *id = id_of(pub);

	FORWARD(rdma_connect, pub, p);
	iwv_thread_lock();
	return call_end(id, connect_qp(id, p));
}

static int accept_qp(struct id *id, const struct rdma_conn_param *p)
{
	struct qp *qp = id->conn ? connection_qp(id, p) : NULL;
	struct iwarpd_accept_attr attr = { 0 };
	struct iwarpd_error e;
	int err;

	if (id->request_gone)
		return ECONNRESET;
	if (!qp)
		return EINVAL;
	if (p) {
		attr.ird = p->responder_resources; /* the daemon's limits apply too */
		attr.ord = p->initiator_depth;
		attr.private_data = p->private_data;
		attr.private_len = p->private_data ? p->private_data_len : 0;
	}
	atomic_store(&qp->conn, CONN_MAKING);
	err = iwarpd_accept(qp->ctx->dev, id->conn, qp->q, &attr, &e);
	if (!err) {
		id->conn = 0;
		return 0;
	}
	atomic_store(&qp->conn, CONN_NONE);
	err = iwv_fail(err, "rdma_accept", &e);
	return err == ENOENT ? ECONNRESET : err; /* the peer has withdrawn it */
}

static int reject(struct id *id, const void *data, uint8_t len)
{
	struct iwarpd_error e;
	int err;

	if (id->request_gone) { /* it needs no answer */
		id->request_gone = false;
		return 0;
	}
	if (!id->conn)
		return EINVAL;
	err = iwarpd_reject(iwv_context_of(id->pub.verbs)->dev, id->conn, data, data ? len : 0, &e);
	id->conn = 0;
	if (err && err != -ENOENT) /* it has been withdrawn meanwhile */
		return iwv_fail(err, "rdma_reject", &e);
	return 0;
}

bool cm_withdrawn(const struct id *id)
{
	bool gone;

	iwv_thread_lock();
	gone = id->request_gone;
	iwv_thread_unlock();
	return gone;
}

/* rdma_accept, if it fails, rejects the request, so that the peer does not wait. Linux's rdma_cm does that too. */
int rdma_accept(struct rdma_cm_id *pub, struct rdma_conn_param *p)
{
	struct id *id = id_of(pub);
	int err;

	FORWARD(rdma_accept, pub, p);
	iwv_thread_lock();
	err = accept_qp(id, p);
	if (err)
		reject(id, NULL, 0);
	return call_end(id, err);
}

int rdma_reject(struct rdma_cm_id *pub, const void *data, uint8_t len)
{
	int err;

	FORWARD(rdma_reject, pub, data, len);
	iwv_thread_lock();
	err = reject(id_of(pub), data, len);
	iwv_thread_unlock();
	return set_errno(err);
}

int rdma_reject_ece(struct rdma_cm_id *pub, const void *data, uint8_t len)
{
	FORWARD(rdma_reject_ece, pub, data, len);
	return rdma_reject(pub, data, len);
}

int rdma_disconnect(struct rdma_cm_id *pub)
{
	struct id *id = id_of(pub);
	struct iwarpd_error e = { 0 };
	struct qp *qp;
	bool wait;
	int err;

	FORWARD(rdma_disconnect, pub);
	iwv_thread_lock();
	/* The last event of an established connection is still to come. */
	wait = id->sync && pub->event && pub->event->event == RDMA_CM_EVENT_ESTABLISHED;
	qp = id_qp(id);
	err = id->state == ID_CONNECT ? 0 : -EINVAL;
	if (!err && qp)
		err = iwv_qp_disconnect(qp, false, &e);
	iwv_thread_unlock();
	if (err)
		return set_errno(iwv_fail(err, "rdma_disconnect", &e));
	return wait ? sync_wait(id) : 0;
}

/*
 * id_of_qp returns the id of the connection of an event. iwarpd's events name a
 * connection by its QP.
 */
static struct id *id_of_qp(const struct iwarpd_event *ev)
{
	struct qp *qp = iwv_qp_of_event(ev);

	return qp ? atomic_load(&qp->cm) : NULL;
}

/* takes reports whether an id, whose listener two may share, accepts connections of an address family. */
static bool takes(const struct id *id, sa_family_t family)
{
	const struct sockaddr *src = &id->pub.route.addr.src_addr;

	return src->sa_family == family || (src->sa_family == AF_INET6 && !id->afonly);
}

static struct id *id_of_listener(const struct context *c, const struct iwarpd_event *ev)
{
	struct sockaddr_storage local;

	if (!addr_parse(ev->local, c->device, &local))
		return NULL;
	for (struct id *id = ids; id; id = id->next)
		for (struct endpoint *e = id->endpoints; e; e = e->next)
			if (e->listener == ev->listener && takes(id, local.ss_family))
				return id;
	return NULL;
}

/* with_data makes an event with the private data of ev. */
static struct cm_event *with_data(struct id *id, enum rdma_cm_event_type type, int status, const struct iwarpd_event *ev)
{
	struct cm_event *e = event_new(id, type, status);
	uint8_t len = (uint8_t)least(ev->data_len, UINT8_MAX);

	if (!e)
		return NULL;
	memcpy(e->data, ev->data, len);
	e->pub.param.conn.private_data = len > 0 ? e->data : NULL;
	e->pub.param.conn.private_data_len = len;
	e->pub.param.conn.responder_resources = (uint8_t)least(ev->negotiated.ird, UINT8_MAX);
	e->pub.param.conn.initiator_depth = (uint8_t)least(ev->negotiated.ord, UINT8_MAX);
	return e;
}

/*
 * max_requests returns how many connect requests of a listener the program may leave, as Linux
 * does. Those that were withdrawn count too: peers could otherwise fill the memory of a program
 * that is busy.
 */
static unsigned int max_requests(const struct id *listener)
{
	return listener->backlog > 0 && listener->backlog < MAX_REQUESTS ? (unsigned int)listener->backlog : MAX_REQUESTS;
}

static void connect_request(struct context *c, const struct iwarpd_event *ev)
{
	struct id *listener = id_of_listener(c, ev), *id = NULL;
	struct cm_event *e = NULL;

	if (listener && listener->channel && listener->state == ID_LISTEN && listener->requests < max_requests(listener))
		id = id_new(listener->pub.channel, listener->pub.context, listener->pub.ps, listener->pub.qp_type);
	if (id && id_bind_device(id, c) != 0) {
		id_drop(id);
		id = NULL;
	}
	if (id) {
		id->conn = ev->conn;
		id->state = ID_CONNECT;
		id->unreported = true;
		addr_parse(ev->local, c->device, &id->pub.route.addr.src_storage);
		addr_parse(ev->remote, c->device, &id->pub.route.addr.dst_storage);
		e = with_data(id, RDMA_CM_EVENT_CONNECT_REQUEST, 0, ev);
	}
	if (id && !e)
		id_drop(id);
	else if (!e)
		iwarpd_reject(c->dev, ev->conn, NULL, 0, NULL);
	if (!e)
		return;
	/*
	 * The peer's ORD limits what this side responds to, and its IRD limits what this
	 * side may initiate.
	 */
	e->pub.param.conn.responder_resources = (uint8_t)least(ev->negotiated.ord, UINT8_MAX);
	e->pub.param.conn.initiator_depth = (uint8_t)least(ev->negotiated.ird, UINT8_MAX);
	e->pub.listen_id = &listener->pub;
	listener->requests++;
	event_post(e);
}

static void established(const struct context *c, const struct iwarpd_event *ev)
{
	struct id *id = id_of_qp(ev);
	struct sockaddr_storage local;
	struct cm_event *e;

	if (!id)
		return;
	if (addr_parse(ev->local, c->device, &local))
		id->pub.route.addr.src_storage = local;
	e = with_data(id, RDMA_CM_EVENT_ESTABLISHED, 0, ev);
	if (!e)
		return;
	/* No more than the peer has said that it initiates, if it has: the other values, -1 and 0x3fff, are larger. */
	e->pub.param.conn.responder_resources = (uint8_t)least(e->pub.param.conn.responder_resources, (uint32_t)ev->peer_ord);
	event_post(e);
}

/* connect_failed reports the events that Linux's iw_cm reports for the same causes. */
static void connect_failed(const struct iwarpd_event *ev)
{
	enum rdma_cm_event_type type = RDMA_CM_EVENT_CONNECT_ERROR;
	struct id *id = id_of_qp(ev);

	if (!id)
		return;
	iwv_log("connect: %s", ev->error.text);
	if (ev->error.code == IWARPD_CODE_REFUSED)
		type = RDMA_CM_EVENT_REJECTED;
	else if (ev->error.code == IWARPD_CODE_TIMEOUT || ev->error.code == IWARPD_CODE_UNREACHABLE)
		type = RDMA_CM_EVENT_UNREACHABLE;
	event_simple(id, type, ev->error.err);
}

static void request_gone(struct context *c, const struct iwarpd_event *ev)
{
	for (struct id *id = ids; id; id = id->next) {
		if (id->conn == ev->conn && id->pub.verbs == &c->v.context) {
			id->conn = 0;
			id->request_gone = true;
		}
	}
}

/* device_gone ends the listeners of a context whose daemon has ended, and notifies those ids that the program knows. */
static void device_gone(struct context *c)
{
	listeners_forget(c);
	for (struct id *id = ids; id; id = id->next)
		if (id->pub.verbs == &c->v.context && !id->unreported)
			event_simple(id, RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
}

static void handle(struct context *c, const struct iwarpd_event *ev)
{
	struct cm_event *e;
	struct id *id;

	if (!ev) {
		device_gone(c);
		return;
	}
	switch (ev->type) {
	case IWARPD_EVENT_CONNECT_REQUEST:
		connect_request(c, ev);
		break;
	case IWARPD_EVENT_CONNECT_GONE:
		request_gone(c, ev);
		break;
	case IWARPD_EVENT_ESTABLISHED:
		established(c, ev);
		break;
	case IWARPD_EVENT_REJECTED:
		id = id_of_qp(ev);
		e = id ? with_data(id, RDMA_CM_EVENT_REJECTED, -ECONNREFUSED, ev) : NULL;
		if (e)
			event_post(e);
		break;
	case IWARPD_EVENT_CONNECT_FAILED:
		connect_failed(ev);
		break;
	case IWARPD_EVENT_TERMINATED: /* DISCONNECTED follows, and may be graceful */
		id = id_of_qp(ev);
		if (id)
			id->end = -ECONNRESET;
		break;
	case IWARPD_EVENT_DISCONNECTED:
		id = id_of_qp(ev);
		if (!id)
			break;
		if (ev->error.err)
			id->end = ev->error.err;
		event_simple(id, RDMA_CM_EVENT_DISCONNECTED, 0);
		break;
	}
}

__attribute__((constructor)) static void init(void)
{
	iwv_thread_set_cm(handle, listeners_follow);
}
