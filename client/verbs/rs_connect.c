/* Connections of rsockets: the events of the connection manager, accepting and connecting. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "rs.h"

enum { RESOLVE_MS = 2000 };

void rs_end(struct rs *rs, int err)
{
	if (rs->state == RS_OVER)
		return;
	rs->err = err;
	rs->state = RS_OVER;
}

/* keep_request keeps a connect request for raccept. It returns false if the request is to be rejected. */
static bool keep_request(struct rs *rs, const struct rdma_cm_event *e)
{
	if (!rs_check_hello(e->param.conn.private_data, e->param.conn.private_data_len)) {
		iwv_log("rsocket: rejected a connect request: the peer does not speak the protocol of rsockets");
		return false;
	}
	rs->request = e->id;
	memcpy(&rs->request_hello, e->param.conn.private_data, sizeof(rs->request_hello));
	return true;
}

/* begin_connect makes the connection, whose peer has been found. It returns 0 or an errno value. */
static int begin_connect(struct rs *rs)
{
	struct rs_hello h;
	struct rdma_conn_param p = { .private_data = &h, .private_data_len = sizeof(h) };

	if (rs_open(rs) < 0)
		return errno;
	rs_put_hello(rs, &h);
	return rdma_connect(rs->id, &p) < 0 ? errno : 0;
}

static int established(struct rs *rs, const struct rdma_cm_event *e)
{
	struct rs_hello h;

	if (rs->state == RS_CONNECTING) {
		if (!rs_check_hello(e->param.conn.private_data, e->param.conn.private_data_len))
			return EPROTO;
		memcpy(&h, e->param.conn.private_data, sizeof(h));
		rs_take_hello(rs, &h);
	}
	if (rs->state == RS_CONNECTING || rs->state == RS_ACCEPTING) /* it may have ended already */
		rs->state = RS_CONNECTED;
	return 0;
}

/* cm_event returns 0, or the errno value of what ends the connection. */
static int cm_event(struct rs *rs, const struct rdma_cm_event *e)
{
	switch (e->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		return rdma_resolve_route(rs->id, RESOLVE_MS) < 0 ? errno : 0;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		return begin_connect(rs);
	case RDMA_CM_EVENT_ESTABLISHED:
		return established(rs, e);
	case RDMA_CM_EVENT_REJECTED:
		return ECONNREFUSED;
	case RDMA_CM_EVENT_ADDR_ERROR:
	case RDMA_CM_EVENT_UNREACHABLE:
	case RDMA_CM_EVENT_CONNECT_ERROR:
		return -e->status;
	case RDMA_CM_EVENT_DEVICE_REMOVAL:
		return ENETDOWN;
	case RDMA_CM_EVENT_DISCONNECTED:
		rs_progress(rs); /* what had come before */
		rs_end(rs, -id_of(rs->id)->end);
		return 0;
	default:
		return 0;
	}
}

void rs_cm_events(struct rs *rs)
{
	struct rdma_cm_event *e;

	/* Further requests wait in the channel, where the backlog limits them. */
	while (!rs->request && rdma_get_cm_event(rs->channel, &e) == 0) {
		struct rdma_cm_id *refused = NULL;

		rs->turn++; /* who is about to sleep looks again */
		if (e->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
			if (!keep_request(rs, e))
				refused = e->id;
		} else {
			int err = cm_event(rs, e);

			if (err)
				rs_end(rs, err);
		}
		rdma_ack_cm_event(e);
		if (refused)
			rdma_destroy_id(refused);
	}
}

static bool has_request(const struct rs *rs)
{
	return rs->request || rs->state != RS_LISTENING;
}

/*
 * answer makes the connection of a request, to which a socket belongs. That of a request that the peer has withdrawn is
 * reset, like one of Linux's TCP: raccept neither fails nor waits because of it.
 */
static int answer(struct rs *rs, const struct rs_hello *theirs)
{
	struct rs_hello h;
	struct rdma_conn_param p = { .private_data = &h, .private_data_len = sizeof(h) };

	rs_take_hello(rs, theirs);
	if (!cm_withdrawn(id_of(rs->id))) { /* there may be many, and a connection takes milliseconds */
		if (rs_open(rs) == 0) {
			rs_put_hello(rs, &h);
			rs->state = RS_ACCEPTING;
			if (rdma_accept(rs->id, &p) == 0)
				return 0;
		}
		if (errno != ECONNRESET)
			return -1;
		rs_close(rs);
	}
	rs_end(rs, ECONNRESET);
	return 0;
}

/* accept_request makes the socket of a listener's request, which the listener keeps if there are no descriptors for it. */
static struct rs *accept_request(struct rs *listener)
{
	struct rdma_cm_id *id = listener->request;
	struct rs *rs = rs_new(listener);

	if (!rs)
		return NULL;
	listener->request = NULL;
	if (listener->sleepers > 0) /* they may not wait for further requests: see fall_asleep */
		rs_wake(listener);
	rs->id = id;
	if (rdma_migrate_id(id, rs->channel) == 0 && answer(rs, &listener->request_hello) == 0) {
		if (rs_insert(rs) == 0)
			return rs;
	} else if (errno == EMFILE || errno == ENFILE) {
		int err = errno;

		rs_close(rs);
		rs->id = NULL;
		rdma_migrate_id(id, listener->channel);
		listener->request = id;
		errno = err;
	}
	rs_free(rs);
	return NULL;
}

static struct rs *do_accept(struct rs *listener)
{
	int err = rs_wait(listener, has_request, rs_patience(listener, listener->opt.recv_wait, 0));

	if (!err && listener->state != RS_LISTENING)
		err = listener->err ? listener->err : EINVAL;
	if (!err)
		return accept_request(listener);
	errno = err;
	return NULL;
}

int raccept(int socket, struct sockaddr *addr, socklen_t *addrlen)
{
	struct rs *rs, *made;
	int fd = -1;

	FORWARD(raccept, socket, addr, addrlen);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	made = do_accept(rs);
	if (made) {
		fd = made->fd;
		if (addr && addrlen)
			rs_copy_address(made, addr, addrlen, rdma_get_peer_addr(made->id));
	}
	rs_put(rs);
	return fd;
}

static bool is_connected(const struct rs *rs)
{
	return rs->state != RS_CONNECTING;
}

/* never_connected reports whether a socket is over without having been connected. */
static bool never_connected(const struct rs *rs)
{
	return rs->state == RS_OVER && rs->peer_table.length == 0;
}

int rs_reopen(struct rs *rs)
{
	struct rdma_cm_id *old = rs->id;

	if (!never_connected(rs) || rs->err)
		return 0;
	rs_close(rs);
	if (rs->request)
		rdma_destroy_id(rs->request);
	rs->request = NULL;
	if (rs_make_id(rs) < 0)
		return -1;
	rdma_destroy_id(old);
	if (rs->bound.ss_family && rdma_bind_addr(rs->id, (struct sockaddr *)&rs->bound) < 0)
		return -1;
	rs->in_done = rs->out_done = false;
	rs->bye = rs->said = RS_STAYS;
	rs->state = RS_OPEN;
	return 0;
}

int rs_report(struct rs *rs)
{
	int err = rs->err;

	rs->err = 0;
	rs_reopen(rs); /* if it fails, the next call tries again */
	return err;
}

/* do_connect begins a connection, or waits for that which an earlier call began and did not report the end of. */
static int do_connect(struct rs *rs, struct sockaddr *to)
{
	int busy = EALREADY, err;

	if (rs_reopen(rs) < 0)
		return -1;
	if (rs->state == RS_OPEN) {
		if (rdma_resolve_addr(rs->id, NULL, to, RESOLVE_MS) < 0)
			return -1;
		rs->state = RS_CONNECTING;
		busy = EINPROGRESS;
	} else if (rs->state != RS_CONNECTING && !never_connected(rs)) {
		return set_errno(EISCONN);
	}
	err = rs_wait(rs, is_connected, rs_patience(rs, rs->opt.send_wait, 0));
	if (err)
		return set_errno(err == EAGAIN ? busy : err);
	rs_progress(rs);
	err = rs->state == RS_OVER ? rs_report(rs) : 0;
	if (!err && rs->peer_table.length == 0) /* another thread has reported why there is no connection */
		err = ECONNABORTED;
	return set_errno(err);
}

int rconnect(int socket, const struct sockaddr *addr, socklen_t addrlen)
{
	struct sockaddr_storage to;
	struct rs *rs;
	int ret;

	FORWARD(rconnect, socket, addr, addrlen);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	ret = set_errno(rs_plain_address(rs, &to, addr, addrlen));
	if (ret == 0)
		ret = do_connect(rs, (struct sockaddr *)&to);
	rs_put(rs);
	return ret;
}
