/* Connections: listen, connect, accept, reject, disconnect. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct iwarpd_listener {
	struct object obj;
	char address[64];
};

struct iwarpd_listener *listener_of(struct object *o)
{
	return container_of(o, struct iwarpd_listener, obj);
}

/* PUT sets an optional field f of message m, which is of type M. */
#define PUT(m, M, f, F, value) ((m)->opt_##f##_case = PB__##M##__OPT_##F##_##F, (m)->f = (value))

static uint32_t depth(int n)
{
	return n < 0 ? 0 : (uint32_t)n;
}

/* put_startup fills in the message; fields that are not set stay absent. */
static void put_startup(Pb__Startup *m, const struct iwarpd_startup *s)
{
	if (s->crc)
		PUT(m, STARTUP, crc, CRC, s->crc > 0);
	if (s->markers)
		PUT(m, STARTUP, markers, MARKERS, s->markers > 0);
	if (s->fallback)
		PUT(m, STARTUP, fallback, FALLBACK, s->fallback > 0);
	if (s->p2p)
		PUT(m, STARTUP, p2p, P2P, s->p2p > 0);
	if (s->revision)
		PUT(m, STARTUP, revision, REVISION, s->revision);
	if (s->rtr)
		PUT(m, STARTUP, rtr, RTR, s->rtr);
	if (s->ird)
		PUT(m, STARTUP, ird, IRD, depth(s->ird));
	if (s->ord)
		PUT(m, STARTUP, ord, ORD, depth(s->ord));
	if (s->timeout_ms)
		PUT(m, STARTUP, timeout_ms, TIMEOUT_MS, s->timeout_ms);
	if (s->dscp)
		PUT(m, STARTUP, dscp, DSCP, depth(s->dscp));
	if (s->priority)
		PUT(m, STARTUP, priority, PRIORITY, depth(s->priority));
	if (s->ttl)
		PUT(m, STARTUP, ttl, TTL, s->ttl);
	m->transport = (Pb__Transport)s->transport;
	m->udp_encapsulation = s->udp_encapsulation != 0;
	m->shared_association = s->shared_association != 0;
}

ProtobufCBinaryData bytes(const void *data, size_t len)
{
	return (ProtobufCBinaryData){ .len = len, .data = (uint8_t *)data };
}

/* put_device names the interface of iwarpd_use, if there is one. */
static void put_device(char **device, const struct iwarpd_device *dev)
{
	const struct iwarpd_device_attr *used = atomic_load(&dev->used);

	if (used)
		*device = (char *)used->interface;
}

int iwarpd_connect(struct iwarpd_qp *qp, const struct iwarpd_connect_attr *attr, struct iwarpd_error *e)
{
	Pb__Connect body = PB__CONNECT__INIT;
	Pb__Startup startup = PB__STARTUP__INIT;
	Pb__Request req = REQUEST(connect, CONNECT, &body);

	if (!attr->remote)
		return set_error(e, -EINVAL, "connect: no remote address");
	body.qp = iwarpd_qp_num(qp);
	body.remote = (char *)attr->remote;
	if (attr->local)
		body.local = (char *)attr->local;
	body.private_data = bytes(attr->private_data, attr->private_len);
	body.timeout_ms = attr->timeout_ms;
	body.streaming = attr->streaming;
	put_device(&body.device, qp_object(qp)->dev);
	if (attr->startup) {
		put_startup(&startup, attr->startup);
		body.startup = &startup;
	}
	return device_do(qp_object(qp)->dev, &req, e);
}

static void listener_free(struct object *o)
{
	free(listener_of(o));
}

/* A request whose reply makes a listener. */
struct listen {
	Pb__Request req;
	struct iwarpd_device *dev;
	struct iwarpd_listener *listener;
};

/*
 * Events of a listener may come before the reply that names it, and are held back until then. The thread that reads the
 * reply makes the listener known: it may be the one that waits for these events, and would sleep on.
 */
void listen_replied(Pb__Request *req, const Pb__ListenReply *r)
{
	const struct listen *call = container_of(req, struct listen, req);
	struct iwarpd_listener *l = call->listener;

	strncpy(l->address, r->address, sizeof(l->address) - 1);
	object_link(&l->obj, call->dev, OBJECT_LISTENER, r->listen, listener_free);
}

int iwarpd_listen(struct iwarpd_device *dev, const struct iwarpd_listen_attr *attr, struct iwarpd_listener **out,
		  struct iwarpd_error *e)
{
	Pb__Listen body = PB__LISTEN__INIT;
	Pb__Startup startup = PB__STARTUP__INIT;
	struct listen call = { .req = REQUEST(listen, LISTEN, &body), .dev = dev };
	struct packet p;
	int err;

	call.listener = calloc(1, sizeof(*call.listener));
	if (!call.listener)
		return set_error(e, -ENOMEM, "out of memory");
	if (attr->address)
		body.address = (char *)attr->address;
	body.port = attr->port;
	body.backlog = attr->backlog;
	body.streaming = attr->streaming;
	body.keep_requests = attr->keep_requests;
	put_device(&body.device, dev);
	if (attr->startup) {
		put_startup(&startup, attr->startup);
		body.startup = &startup;
	}
	err = device_call(dev, &call.req, -1, PB__REPLY__BODY_LISTEN, 0, &p, e);
	if (err) {
		free(call.listener);
		return err;
	}
	packet_free(&p);
	*out = call.listener;
	return 0;
}

const char *iwarpd_listener_address(const struct iwarpd_listener *listener)
{
	return listener->address;
}

int iwarpd_unlisten(struct iwarpd_listener *listener, struct iwarpd_error *e)
{
	return object_destroy(&listener->obj, e);
}

int iwarpd_accept(struct iwarpd_device *dev, uint32_t conn, struct iwarpd_qp *qp, const struct iwarpd_accept_attr *attr,
		  struct iwarpd_error *e)
{
	Pb__Accept body = PB__ACCEPT__INIT;
	Pb__Request req = REQUEST(accept, ACCEPT, &body);

	body.conn = conn;
	body.qp = qp ? iwarpd_qp_num(qp) : 0;
	if (attr)
		body.private_data = bytes(attr->private_data, attr->private_len);
	if (attr && attr->ird)
		PUT(&body, ACCEPT, ird, IRD, depth(attr->ird));
	if (attr && attr->ord)
		PUT(&body, ACCEPT, ord, ORD, depth(attr->ord));
	return device_do(dev, &req, e);
}

int iwarpd_reject(struct iwarpd_device *dev, uint32_t conn, const void *private_data, size_t private_len,
		  struct iwarpd_error *e)
{
	Pb__Reject body = PB__REJECT__INIT;
	Pb__Request req = REQUEST(reject, REJECT, &body);

	body.conn = conn;
	body.private_data = bytes(private_data, private_len);
	return device_do(dev, &req, e);
}

int iwarpd_set_dscp(struct iwarpd_qp *qp, unsigned dscp, struct iwarpd_error *e)
{
	Pb__SetDSCP body = PB__SET_DSCP__INIT;
	Pb__Request req = REQUEST(set_dscp, SET_DSCP, &body);

	body.qp = iwarpd_qp_num(qp);
	body.dscp = dscp;
	return device_do(qp_object(qp)->dev, &req, e);
}

static int disconnect(struct iwarpd_qp *qp, bool abort, bool leave, struct iwarpd_error *e)
{
	Pb__Disconnect body = PB__DISCONNECT__INIT;
	Pb__Request req = REQUEST(disconnect, DISCONNECT, &body);

	body.qp = iwarpd_qp_num(qp);
	body.abort = abort;
	body.leave = leave;
	return device_do(qp_object(qp)->dev, &req, e);
}

int iwarpd_disconnect(struct iwarpd_qp *qp, bool abort, struct iwarpd_error *e)
{
	return disconnect(qp, abort, false, e);
}

int iwarpd_leave(struct iwarpd_qp *qp, struct iwarpd_error *e)
{
	return disconnect(qp, false, true, e);
}
