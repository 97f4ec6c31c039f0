/* Identifiers: creating, binding, resolving and destroying them. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cm.h"

struct id *ids;

struct id *id_new(struct rdma_event_channel *channel, void *context, enum rdma_port_space ps, enum ibv_qp_type type)
{
	struct id *id = calloc(1, sizeof(*id));

	if (!id)
		return NULL;
	id->pub.channel = channel;
	id->channel = channel_of(channel);
	id->pub.context = context;
	id->pub.ps = ps;
	id->pub.qp_type = type;
	id->next = ids;
	ids = id;
	return id;
}

static void id_free(struct id *id)
{
	free(id->ep_attr);
	free(id->connect);
	free(id);
}

int id_bind_device(struct id *id, struct context *c)
{
	if (!c->pd)
		c->pd = ibv_alloc_pd(&c->v.context);
	if (!c->pd)
		return errno;
	c->shown = true;
	id->pub.verbs = &c->v.context;
	id->pub.port_num = 1;
	if (!id->pub.pd)
		id->pub.pd = c->pd;
	return 0;
}

/* unbind_device undoes id_bind_device for an id that has no object of the device yet. */
static void unbind_device(struct id *id)
{
	id->pub.verbs = NULL;
	id->pub.port_num = 0;
	id->pub.pd = NULL;
}

struct qp *id_qp(const struct id *id)
{
	struct qp *qp = id->pub.verbs ? iwv_context_of(id->pub.verbs)->qps : NULL;

	/* Do not use id->pub.qp: the program may have destroyed it with ibv_destroy_qp. */
	while (qp && atomic_load(&qp->cm) != id)
		qp = qp->next;
	return qp;
}

int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **out, void *context, enum rdma_port_space ps)
{
	bool sync = channel == NULL;
	struct id *id;

	FORWARD(rdma_create_id, channel, out, context, ps);
	if (ps != RDMA_PS_TCP && ps != RDMA_PS_IB) {
		iwv_log("rdma_create_id: iwarpd supports only the port space RDMA_PS_TCP");
		return set_errno(ENODEV);
	}
	if (sync)
		channel = rdma_create_event_channel();
	if (!channel)
		return -1;
	iwv_thread_lock();
	id = id_new(channel, context, ps, IBV_QPT_RC);
	iwv_thread_unlock();
	if (!id) {
		if (sync)
			rdma_destroy_event_channel(channel);
		return set_errno(ENOMEM);
	}
	id->sync = sync;
	*out = &id->pub;
	return 0;
}

/* shared reports whether an id has an endpoint with the listener l. */
static bool shared(const struct iwarpd_listener *l)
{
	for (struct id *id = ids; id; id = id->next)
		for (struct endpoint *e = id->endpoints; e; e = e->next)
			if (e->listener == l)
				return true;
	return false;
}

/* close_endpoint removes the endpoint at *at of an id. The lock is held. */
static void close_endpoint(struct endpoint **at)
{
	struct endpoint *e = *at;

	*at = e->next;
	if (!shared(e->listener))
		iwarpd_unlisten(e->listener, NULL);
	free(e);
}

void close_endpoints(struct id *id)
{
	while (id->endpoints)
		close_endpoint(&id->endpoints);
}

/* The listeners are the parent's. The child may destroy the ids, which get no events of the parent's daemon. */
static void after_fork_child(void)
{
	for (struct id *id = ids; id; id = id->next) {
		id->events = 0; /* those that the parent has taken are its own */
		close_endpoints(id);
		if (id->state == ID_LISTEN)
			id->state = ID_CONNECT; /* so that it follows no devices */
	}
}

__attribute__((constructor)) static void init(void)
{
	pthread_atfork(NULL, NULL, after_fork_child);
}

/* both_families reports whether id listens on every address of both families. */
static bool both_families(const struct id *id)
{
	return id->pub.route.addr.src_addr.sa_family == AF_INET6 && !id->afonly;
}

/*
 * other_family returns the listener of an id that is bound to the same port on every
 * address of the other family. iwarpd's listeners on every address accept both families.
 */
static struct iwarpd_listener *other_family(const struct id *id, const struct context *c)
{
	const struct sockaddr *src = &id->pub.route.addr.src_addr;
	struct iwarpd_listener *found = NULL;

	for (struct id *other = ids; other && !both_families(id); other = other->next) {
		const struct sockaddr *theirs = &other->pub.route.addr.src_addr;

		if (!other->endpoints || !addr_any(theirs) || addr_port(theirs) != addr_port(src))
			continue;
		if (both_families(other) || theirs->sa_family == src->sa_family)
			return NULL; /* iwarpd will report that the port is in use */
		for (struct endpoint *e = other->endpoints; e; e = e->next)
			if (e->ctx == c)
				found = e->listener;
	}
	return found;
}

/* reject_request rejects the connect request of an id, if it has one. */
static void reject_request(const struct id *id)
{
	if (id->conn)
		iwarpd_reject(iwv_context_of(id->pub.verbs)->dev, id->conn, NULL, 0, NULL);
}

void id_drop(struct id *id)
{
	reject_request(id);
	UNLINK(ids, id);
	id_free(id);
}

int rdma_destroy_id(struct rdma_cm_id *pub)
{
	struct id *id = id_of(pub);
	struct qp *qp;

	FORWARD(rdma_destroy_id, pub);
	if (id->sync)
		sync_done(id);
	iwv_thread_lock();
	UNLINK(ids, id); /* it gets no events any more */
	close_endpoints(id);
	reject_request(id);
	qp = id_qp(id);
	if (qp) {
		iwv_qp_disconnect(qp, false, NULL);
		atomic_store(&qp->cm, NULL);
	}
	/* The QP of a closing connection is in another list. */
	for (struct qp *q = pub->verbs ? iwv_context_of(pub->verbs)->closing : NULL; q; q = q->next)
		if (atomic_load(&q->cm) == id)
			atomic_store(&q->cm, NULL);
	events_drop(id);
	while (id->events > 0)
		iwv_thread_wait();
	iwv_thread_unlock();
	if (id->sync)
		rdma_destroy_event_channel(pub->channel);
	id_free(id);
	return 0;
}

static void set_addr(struct sockaddr_storage *to, const struct sockaddr *from)
{
	memset(to, 0, sizeof(*to));
	memcpy(to, from, addr_len(from));
}

/*
 * listen_by listens with a context. A listener on every address takes only the connections that
 * arrive at the context's device. The lock is held.
 */
static int listen_by(struct context *c, const struct iwarpd_listen_attr *attr, struct iwarpd_listener **l, struct iwarpd_error *e)
{
	int err = attr->address ? 0 : iwarpd_use(c->dev, c->device->interface, e);

	if (!err)
		err = iwarpd_listen(c->dev, attr, l, e);
	iwarpd_use(c->dev, NULL, NULL);
	return err;
}

/* open_endpoint listens on one device, maybe before the program has given a backlog: see max_requests. The lock is held. */
static int open_endpoint(struct id *id, struct context *c)
{
	struct sockaddr *src = &id->pub.route.addr.src_addr;
	struct iwarpd_startup startup = { .dscp = id->dscp };
	struct iwarpd_listen_attr attr = {
		.port = addr_port(src), .backlog = MAX_REQUESTS, .startup = &startup, .keep_requests = true,
	};
	struct sockaddr_storage got;
	struct iwarpd_error e;
	struct endpoint *ep;
	char text[128];
	int err;

	addr_text(src, false, text);
	attr.address = text;
	if (addr_any(src))
		attr.address = NULL;
	ep = calloc(1, sizeof(*ep));
	if (!ep)
		return -ENOMEM;
	ep->listener = addr_any(src) ? other_family(id, c) : NULL;
	err = ep->listener ? 0 : listen_by(c, &attr, &ep->listener, &e);
	if (err) {
		if (err != id->refused) /* a listener that follows the devices would log it each second */
			iwv_fail(err, "rdma_listen", &e);
		id->refused = err;
		free(ep);
		return err;
	}
	id->refused = 0;
	if (addr_parse(iwarpd_listener_address(ep->listener), c->device, &got))
		addr_set_port(src, addr_port((struct sockaddr *)&got));
	ep->ctx = c;
	ep->next = id->endpoints;
	id->endpoints = ep;
	return 0;
}

/* absent reports whether an error means that a device has no address, is down or is gone. */
static bool absent(int err)
{
	return err == -EADDRNOTAVAIL || err == -EHOSTUNREACH || err == -EPIPE || err == -ENODEV;
}

/* open_everywhere listens on each device. The lock is held. */
static int open_everywhere(struct id *id)
{
	int err = -ENODEV;

	for (struct device *d = iwv_devices_scan(SCAN_NONE); d; d = d->next) {
		int failed = context_live(d->cm) ? open_endpoint(id, d->cm) : -ENODEV;

		if (failed)
			err = failed;
		if (failed && !absent(failed))
			return err;
	}
	return id->endpoints ? 0 : err;
}

/* listens_on reports whether an id has an endpoint on the device of a context. */
static bool listens_on(const struct id *id, const struct context *c)
{
	const struct endpoint *e = id->endpoints;

	while (e && e->ctx != c)
		e = e->next;
	return e;
}

void listeners_forget(const struct context *c)
{
	for (struct id *id = ids; id; id = id->next) {
		for (struct endpoint **at = &id->endpoints; *at;) {
			if ((*at)->ctx == c)
				close_endpoint(at);
			else
				at = &(*at)->next;
		}
	}
}

/*
 * follow makes the ids that listen on every address listen on all open devices, and reports whether there is such an
 * id. A device on which one cannot is tried again the next time.
 */
static bool follow(void)
{
	bool any = false;

	iwv_thread_lock();
	for (struct id *id = ids; id; id = id->next) {
		if (id->state != ID_LISTEN || !addr_any(&id->pub.route.addr.src_addr))
			continue;
		any = true;
		for (struct device *d = iwv_devices_scan(SCAN_NONE); d; d = d->next)
			if (context_live(d->cm) && !listens_on(id, d->cm))
				open_endpoint(id, d->cm);
	}
	iwv_thread_unlock();
	return any;
}

void listeners_follow(void)
{
	if (!follow())
		return;
	cm_scan(SCAN_BY_THREAD);
	follow();
}

/* open_endpoints listens on the address of id. The lock is held. */
static int open_endpoints(struct id *id)
{
	struct sockaddr *src = &id->pub.route.addr.src_addr;
	uint16_t port = addr_port(src);
	int err = -EADDRINUSE;

	if (!addr_any(src)) {
		struct context *one = context_with(src);

		return one ? open_endpoint(id, one) : -EADDRNOTAVAIL;
	}
	/* The port that the first device gives may be in use on another one. */
	for (int tries = port ? 1 : 16; tries > 0 && err == -EADDRINUSE; tries--) {
		err = open_everywhere(id);
		if (err) {
			close_endpoints(id);
			addr_set_port(src, port);
		}
	}
	return err;
}

/* bind_addr is rdma_bind_addr with the lock held. */
static int bind_addr(struct id *id, const struct sockaddr *addr)
{
	struct context *c;

	if (id->state != ID_IDLE)
		return EINVAL;
	if (!addr_any(addr)) {
		int err;

		c = context_with(addr);
		err = c ? id_bind_device(id, c) : EADDRNOTAVAIL;
		if (err)
			return err;
	}
	set_addr(&id->pub.route.addr.src_storage, addr);
	id->state = ID_BOUND;
	/* The program may ask for its port at once, and must learn now whether another one uses it. */
	if (addr_port(addr) == 0 || !id->reuse) {
		int err = open_endpoints(id);

		if (err) {
			unbind_device(id);
			id->state = ID_IDLE;
			return -err;
		}
	}
	return 0;
}

int rdma_bind_addr(struct rdma_cm_id *pub, struct sockaddr *addr)
{
	int err;

	FORWARD(rdma_bind_addr, pub, addr);
	if (!addr_len(addr))
		return set_errno(EINVAL);
	cm_find(addr);
	iwv_thread_lock();
	err = bind_addr(id_of(pub), addr);
	iwv_thread_unlock();
	return set_errno(err);
}

int rdma_listen(struct rdma_cm_id *pub, int backlog)
{
	struct id *id = id_of(pub);
	struct sockaddr_in any = { .sin_family = AF_INET };
	const struct sockaddr *src = &pub->route.addr.src_addr;
	bool bound;
	int err = 0;

	FORWARD(rdma_listen, pub, backlog);
	cm_find(addr_len(src) ? src : (struct sockaddr *)&any);
	iwv_thread_lock();
	if (id->state > ID_BOUND) {
		iwv_thread_unlock();
		return set_errno(EINVAL);
	}
	id->backlog = backlog > 0 ? backlog : 0;
	bound = id->state == ID_BOUND && !id->reuse && addr_any(&id->pub.route.addr.src_addr);
	if (id->state == ID_IDLE)
		err = bind_addr(id, (struct sockaddr *)&any);
	if (!err && !id->endpoints)
		err = -open_endpoints(id);
	if (bound && absent(-err)) /* the daemons have ended since then: listeners_follow opens those that start again */
		err = 0;
	if (!err)
		id->state = ID_LISTEN;
	iwv_thread_unlock();
	return set_errno(err);
}

/* may_resolve reports whether dst can be resolved: once, and in the address family of the source address, if there is one. */
static bool may_resolve(const struct id *id, const struct sockaddr *src, const struct sockaddr *dst)
{
	if (id->state == ID_BOUND)
		src = &id->pub.route.addr.src_addr;
	return id->state <= ID_BOUND && (!src || !addr_len(src) || src->sa_family == dst->sa_family);
}

/* bind_source binds an id to the source address that rdma_resolve_addr names, if it names one. The lock is held. */
static int bind_source(struct id *id, const struct sockaddr *src)
{
	if (id->state == ID_BOUND || !src || !addr_len(src) || (addr_any(src) && !addr_port(src)))
		return 0;
	return bind_addr(id, src);
}

/* resolve finds the device and the source address for dst, which cm_route has stored in from. The lock is held. */
static int resolve(struct id *id, const struct sockaddr *dst, struct sockaddr_storage *from)
{
	struct context *c;
	int err;

	if (id->pub.verbs)
		return 0;
	c = context_for(dst, from);
	err = c ? id_bind_device(id, c) : ENODEV;
	if (err)
		return err;
	addr_set_port((struct sockaddr *)from, id->state == ID_BOUND ? addr_port(&id->pub.route.addr.src_addr) : 0);
	set_addr(&id->pub.route.addr.src_storage, (struct sockaddr *)from);
	return 0;
}

/*
 * to_self replaces a destination that is the host's loopback address by the address of the id's device, unless that is the
 * loopback interface.
 */
static void to_self(struct id *id)
{
	const struct sockaddr *src = &id->pub.route.addr.src_addr;
	struct sockaddr *dst = &id->pub.route.addr.dst_addr;
	uint16_t port = addr_port(dst);

	if (!addr_any(dst) || addr_any(src))
		return;
	set_addr(&id->pub.route.addr.dst_storage, src);
	addr_set_port(dst, port);
}

int rdma_resolve_addr(struct rdma_cm_id *pub, struct sockaddr *src, struct sockaddr *dst, int timeout_ms)
{
	struct id *id = id_of(pub);
	struct sockaddr_storage from;
	struct cm_event *e;
	char text[128];
	int err;

	FORWARD(rdma_resolve_addr, pub, src, dst, timeout_ms);
	if (!addr_len(dst))
		return set_errno(EINVAL);
	if (cm_route(dst, &from) < 0)
		return -1;
	if (addr_len(src) && !addr_any(src))
		cm_find(src);
	else if (!pub->verbs && addr_any(dst))
		cm_scan(SCAN_ALL); /* any device will do, and one may have got its first address */
	else if (!pub->verbs)
		cm_find((struct sockaddr *)&from);
	iwv_thread_lock();
	err = may_resolve(id, src, dst) ? bind_source(id, src) : EINVAL;
	e = err ? NULL : event_new(id, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	if (!err && !e)
		err = ENOMEM;
	if (err) {
		iwv_thread_unlock();
		return set_errno(err);
	}
	set_addr(&id->pub.route.addr.dst_storage, dst);
	err = resolve(id, dst, &from);
	if (err) {
		addr_text(dst, true, text);
		iwv_log("rdma_resolve_addr: no device of iwarpd reaches %s: %s", text, strerror(err));
		e->pub.event = RDMA_CM_EVENT_ADDR_ERROR;
		e->pub.status = -err;
	} else {
		to_self(id);
		id->state = ID_ADDR_RESOLVED;
	}
	event_post(e);
	return call_end(id, 0);
}

int rdma_resolve_route(struct rdma_cm_id *pub, int timeout_ms)
{
	struct id *id = id_of(pub);
	struct cm_event *e = NULL;
	int err = EINVAL;

	FORWARD(rdma_resolve_route, pub, timeout_ms);
	iwv_thread_lock();
	if (id->state == ID_ADDR_RESOLVED) {
		e = event_new(id, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
		err = ENOMEM;
	}
	if (e) {
		id->state = ID_ROUTE_RESOLVED;
		event_post(e);
		err = 0;
	}
	return call_end(id, err);
}

/*
 * take_port gives a resolved id without a port one for its connection, as a bind does, by a listener until it connects. Without it
 * the daemon chooses one when it connects, which costs nothing. The lock is held.
 */
static void take_port(struct id *id)
{
	if ((id->state == ID_ADDR_RESOLVED || id->state == ID_ROUTE_RESOLVED) && addr_port(&id->pub.route.addr.src_addr) == 0)
		open_endpoints(id);
}

__be16 rdma_get_src_port(struct rdma_cm_id *pub)
{
	__be16 port;

	FORWARD(rdma_get_src_port, pub);
	iwv_thread_lock();
	take_port(id_of(pub));
	port = htons(addr_port(&pub->route.addr.src_addr));
	iwv_thread_unlock();
	return port;
}

__be16 rdma_get_dst_port(struct rdma_cm_id *pub)
{
	FORWARD(rdma_get_dst_port, pub);
	return htons(addr_port(&pub->route.addr.dst_addr));
}

/* set_tos sets the DSCP of the connections of id from an IP TOS. The lock is held. */
static int set_tos(struct id *id, uint8_t tos)
{
	if (id->state == ID_CONNECT)
		iwv_log("rdma_set_option: a connection keeps the TOS that it, or its listener, had when it began");
	id->dscp = tos >> 2 ? tos >> 2 : -1;
	if (!id->endpoints || id->state != ID_BOUND)
		return 0;
	close_endpoints(id); /* that were opened by a bind */
	return -open_endpoints(id);
}

/* set_option sets an option in the states in which the kernel's rdma_cm does. The lock is held. */
static int set_option(struct id *id, int name, const void *value, size_t len)
{
	bool is_byte = name == RDMA_OPTION_ID_TOS || name == RDMA_OPTION_ID_ACK_TIMEOUT;
	uint8_t byte;
	int on;

	if (!is_byte && name != RDMA_OPTION_ID_AFONLY && name != RDMA_OPTION_ID_REUSEADDR)
		return ENOSYS;
	if (len != (is_byte ? sizeof(byte) : sizeof(on)))
		return EINVAL;
	byte = *(const uint8_t *)value;
	if (name == RDMA_OPTION_ID_TOS)
		return set_tos(id, byte);
	if (name == RDMA_OPTION_ID_ACK_TIMEOUT) {
		id->ack_timeout = byte;
		return 0;
	}
	memcpy(&on, value, sizeof(on));
	if (name == RDMA_OPTION_ID_AFONLY) {
		if (id->state > ID_BOUND)
			return EINVAL;
		id->afonly = on;
	} else {
		if (id->state == ID_LISTEN || (!on && id->state != ID_IDLE))
			return EINVAL;
		id->reuse = on;
	}
	return 0;
}

int rdma_set_option(struct rdma_cm_id *pub, int level, int name, void *value, size_t len)
{
	int err;

	FORWARD(rdma_set_option, pub, level, name, value, len);
	if (level != RDMA_OPTION_ID)
		return set_errno(ENOSYS);
	iwv_thread_lock();
	err = set_option(id_of(pub), name, value, len);
	iwv_thread_unlock();
	return set_errno(err);
}
