/* Events of the daemon: their effects on the library, and their queue. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* event_qp returns the number of the QP that an event is about, or 0. */
static uint32_t event_qp(const Pb__Event *ev)
{
	switch (ev->body_case) {
	case PB__EVENT__BODY_ESTABLISHED:
		return ev->established->qp;
	case PB__EVENT__BODY_REJECTED:
		return ev->rejected->qp;
	case PB__EVENT__BODY_CONNECT_FAILED:
		return ev->connect_failed->qp;
	case PB__EVENT__BODY_DISCONNECTED:
		return ev->disconnected->qp;
	case PB__EVENT__BODY_TERMINATED:
		return ev->terminated->qp;
	case PB__EVENT__BODY_ASYNC_ERROR:
		return ev->async_error->qp;
	case PB__EVENT__BODY_STREAM_READY:
		return ev->stream_ready->qp;
	case PB__EVENT__BODY_CONNECT_REQUEST:
		return ev->connect_request->qp;
	default:
		return 0;
	}
}

/*
 * note_event updates the state that posting depends on, before the event is read.
 */
static void note_event(struct iwarpd_device *dev, const Pb__Event *ev)
{
	struct object *qp = find_object(dev, OBJECT_QP, event_qp(ev));

	if (!qp)
		return;
	switch (ev->body_case) {
	case PB__EVENT__BODY_ESTABLISHED:
		if (ev->established->worker < dev->workers)
			qp_established(qp, ev->established->worker);
		break;
	case PB__EVENT__BODY_STREAM_READY:
		qp->conn = ev->stream_ready->conn;
		break;
	case PB__EVENT__BODY_REJECTED:
	case PB__EVENT__BODY_CONNECT_FAILED:
	case PB__EVENT__BODY_DISCONNECTED:
		qp->ended(qp);
		break;
	default:
		break;
	}
}

/* pop_event removes the event at *at from the queue. */
static Pb__Message *pop_event(struct iwarpd_device *dev, struct event **at)
{
	struct event *ev = *at;
	Pb__Message *msg = ev->msg;

	*at = ev->next;
	if (dev->last_event == &ev->next)
		dev->last_event = at;
	if (--dev->num_events == 0)
		set_readable(dev->wait.more, false);
	free(ev);
	return msg;
}

void event_done(struct iwarpd_device *dev, struct event **at)
{
	pb__message__free_unpacked(pop_event(dev, at), NULL);
}

/*
 * conn_of returns the connection of an event that precedes its establishment, or 0.
 */
static uint32_t conn_of(const Pb__Event *ev)
{
	switch (ev->body_case) {
	case PB__EVENT__BODY_CONNECT_REQUEST:
		return ev->connect_request->conn;
	case PB__EVENT__BODY_CONNECT_GONE:
		return ev->connect_gone->conn;
	case PB__EVENT__BODY_CONNECT_FAILED:
		return ev->connect_failed->conn;
	case PB__EVENT__BODY_STREAM_READY:
		return ev->stream_ready->conn;
	case PB__EVENT__BODY_STREAM_DATA:
		return ev->stream_data->conn;
	default:
		return 0;
	}
}

/* starts returns the listener whose connection an event starts, or 0. */
static uint32_t starts(const Pb__Event *ev)
{
	if (ev->body_case == PB__EVENT__BODY_CONNECT_REQUEST)
		return ev->connect_request->listen;
	if (ev->body_case == PB__EVENT__BODY_STREAM_READY)
		return ev->stream_ready->listen;
	return 0;
}

/*
 * never_seen drops all events of a connection that is gone if the program has read none of
 * them, and reports whether that is so. Peers that connect and leave could otherwise fill
 * the queue of a program that is busy.
 */
static bool never_seen(struct iwarpd_device *dev, const Pb__Event *gone)
{
	struct event **at = &dev->events;

	if (gone->body_case != PB__EVENT__BODY_CONNECT_GONE)
		return false;
	while (*at && conn_of((*at)->msg->event) != gone->connect_gone->conn)
		at = &(*at)->next;
	if (!*at || !starts((*at)->msg->event))
		return false;
	while (*at) {
		if (conn_of((*at)->msg->event) == gone->connect_gone->conn)
			event_done(dev, at);
		else
			at = &(*at)->next;
	}
	return true;
}

/*
 * is_negotiate reports whether an event is a Negotiate of the draft of SCTP. A peer may send
 * many, so that those are lost for which a busy program has no room, as at the daemon.
 */
static bool is_negotiate(const Pb__Event *ev)
{
	return ev->body_case == PB__EVENT__BODY_ASYNC_ERROR && (uint32_t)ev->async_error->kind == IWARPD_ASYNC_NEGOTIATE;
}

int event_arrived(struct iwarpd_device *dev, Pb__Message *msg)
{
	struct event *ev;

	if (never_seen(dev, msg->event) || (is_negotiate(msg->event) && dev->num_events >= MAX_EVENTS / 2)) {
		pb__message__free_unpacked(msg, NULL);
		return 0;
	}
	ev = inbox_alloc(&dev->in, sizeof(*ev));
	note_event(dev, msg->event);
	if (!ev) {
		pb__message__free_unpacked(msg, NULL);
		return -ENOMEM;
	}
	*ev = (struct event){ .msg = msg };
	*dev->last_event = ev;
	dev->last_event = &ev->next;
	if (dev->num_events++ == 0)
		set_readable(dev->wait.more, true);
	return dev->num_events > MAX_EVENTS + EVENTS_QP * dev->most_qps ? -EOVERFLOW : 0;
}

static bool ends_stream(const Pb__Event *ev, uint32_t conn)
{
	return (ev->body_case == PB__EVENT__BODY_CONNECT_FAILED && ev->connect_failed->conn == conn) ||
	       (ev->body_case == PB__EVENT__BODY_CONNECT_GONE && ev->connect_gone->conn == conn);
}

static bool concerns_stream(const Pb__Event *ev, uint32_t conn)
{
	return (ev->body_case == PB__EVENT__BODY_STREAM_DATA && ev->stream_data->conn == conn) || ends_stream(ev, conn);
}

struct event **stream_event(struct iwarpd_device *dev, uint32_t conn)
{
	for (struct event **at = &dev->events; *at; at = &(*at)->next)
		if (concerns_stream((*at)->msg->event, conn))
			return at;
	return NULL;
}

void stream_forget(struct iwarpd_device *dev, uint32_t conn)
{
	struct event **at = &dev->events;

	pthread_mutex_lock(&dev->lock);
	while (*at) {
		const Pb__Event *ev = (*at)->msg->event;

		if (ev->body_case == PB__EVENT__BODY_STREAM_DATA && ev->stream_data->conn == conn)
			event_done(dev, at);
		else
			at = &(*at)->next;
	}
	pthread_mutex_unlock(&dev->lock);
}

/*
 * A program that waits for the events of its QPs alone would otherwise gather those that it has not
 * read before it destroys a QP.
 */
void events_drop(const struct object *qp)
{
	struct event **at = &qp->dev->events;

	while (*at) {
		const Pb__Event *ev = (*at)->msg->event;

		if (event_qp(ev) == qp->handle || (qp->conn != 0 && conn_of(ev) == qp->conn))
			event_done(qp->dev, at);
		else
			at = &(*at)->next;
	}
}

void events_free(struct iwarpd_device *dev)
{
	while (dev->events)
		event_done(dev, &dev->events);
}

static void put_text(char *to, size_t size, const char *from)
{
	size_t n = strnlen(from, size - 1);

	memcpy(to, from, n);
	to[n] = 0;
}

static void put_data(struct iwarpd_event *ev, const ProtobufCBinaryData *d)
{
	ev->data_len = (uint32_t)(d->len < sizeof(ev->data) ? d->len : sizeof(ev->data));
	if (ev->data_len)
		memcpy(ev->data, d->data, ev->data_len);
}

static void put_addresses(struct iwarpd_event *ev, const char *local, const char *remote)
{
	put_text(ev->local, sizeof(ev->local), local);
	put_text(ev->remote, sizeof(ev->remote), remote);
}

static void put_error(struct iwarpd_event *ev, const Pb__Error *err)
{
	if (err)
		pb_error(&ev->error, err);
}

static void put_request(struct iwarpd_event *ev, struct iwarpd_device *dev, const Pb__ConnectRequest *r)
{
	struct object *o = find_object(dev, OBJECT_LISTENER, r->listen);

	ev->type = IWARPD_EVENT_CONNECT_REQUEST;
	ev->listener = o ? listener_of(o) : NULL;
	ev->conn = r->conn;
	put_addresses(ev, r->local, r->remote);
	put_data(ev, &r->private_data);
	ev->negotiated = (struct iwarpd_negotiated){ .revision = r->revision, .ird = r->ird, .ord = r->ord, .p2p = r->p2p };
}

static void put_stream(struct iwarpd_event *ev, struct iwarpd_device *dev, const Pb__StreamReady *r)
{
	struct object *o = find_object(dev, OBJECT_LISTENER, r->listen);

	ev->type = IWARPD_EVENT_STREAM_READY;
	ev->listener = o ? listener_of(o) : NULL;
	ev->conn = r->conn;
	put_addresses(ev, r->local, r->remote);
}

/* A depth that may be absent. */
#define PEER_DEPTH(m, M, f, F) ((m)->opt_##f##_case == PB__##M##__OPT_##F##_##F ? (int32_t)(m)->f : -1)

static void put_established(struct iwarpd_event *ev, const Pb__Established *s)
{
	const Pb__Negotiated *n = s->negotiated;

	ev->type = IWARPD_EVENT_ESTABLISHED;
	ev->conn = s->conn;
	put_addresses(ev, s->local, s->remote);
	put_data(ev, &s->private_data);
	ev->peer_ird = PEER_DEPTH(s, ESTABLISHED, peer_ird, PEER_IRD);
	ev->peer_ord = PEER_DEPTH(s, ESTABLISHED, peer_ord, PEER_ORD);
	if (n)
		ev->negotiated = (struct iwarpd_negotiated){
			.revision = n->revision, .rtr = n->rtr, .ird = n->ird, .ord = n->ord, .crc = n->crc,
			.send_markers = n->send_markers, .recv_markers = n->recv_markers, .p2p = n->p2p,
		};
}

static void put_rejected(struct iwarpd_event *ev, const Pb__Rejected *r)
{
	ev->type = IWARPD_EVENT_REJECTED;
	put_data(ev, &r->private_data);
	ev->peer_ird = PEER_DEPTH(r, REJECTED, peer_ird, PEER_IRD);
	ev->peer_ord = PEER_DEPTH(r, REJECTED, peer_ord, PEER_ORD);
}

static void put_terminated(struct iwarpd_event *ev, const Pb__Terminated *t)
{
	ev->type = IWARPD_EVENT_TERMINATED;
	ev->terminate = (struct iwarpd_terminate){ t->remote, (uint8_t)t->layer, (uint8_t)t->type, (uint8_t)t->code };
	set_error(&ev->error, -ECONNABORTED, "%s", t->text);
	put_data(ev, &t->headers);
}

static void put_async(struct iwarpd_event *ev, struct iwarpd_device *dev, const Pb__AsyncError *a)
{
	struct object *cq = find_object(dev, OBJECT_CQ, a->cq), *srq = find_object(dev, OBJECT_SRQ, a->srq);
	struct object *listener = find_object(dev, OBJECT_LISTENER, a->listen);

	ev->type = IWARPD_EVENT_ASYNC_ERROR;
	ev->async = (uint32_t)a->kind;
	ev->cq = cq ? cq_of(cq) : NULL;
	ev->srq = srq ? srq_of(srq) : NULL;
	ev->listener = listener ? listener_of(listener) : NULL;
	put_addresses(ev, a->local, a->remote);
	put_data(ev, &a->private_data);
	put_error(ev, a->error);
}

/*
 * put_event fills in *ev. It returns false if the object of the event no longer
 * exists.
 */
static bool put_event(struct iwarpd_event *ev, struct iwarpd_device *dev, const Pb__Event *pb)
{
	struct object *qp = find_object(dev, OBJECT_QP, event_qp(pb));

	memset(ev, 0, sizeof(*ev));
	if (event_qp(pb) != 0 && !qp)
		return false;
	if (qp)
		ev->qp = qp_of(qp);
	switch (pb->body_case) {
	case PB__EVENT__BODY_CONNECT_REQUEST:
		put_request(ev, dev, pb->connect_request);
		return true;
	case PB__EVENT__BODY_ESTABLISHED:
		put_established(ev, pb->established);
		return true;
	case PB__EVENT__BODY_REJECTED:
		put_rejected(ev, pb->rejected);
		return true;
	case PB__EVENT__BODY_CONNECT_FAILED:
		ev->type = IWARPD_EVENT_CONNECT_FAILED;
		put_error(ev, pb->connect_failed->error);
		return true;
	case PB__EVENT__BODY_DISCONNECTED:
		ev->type = IWARPD_EVENT_DISCONNECTED;
		put_error(ev, pb->disconnected->error);
		if (ev->error.err == -ECONNREFUSED)
			ev->error.err = -ECONNRESET;
		return true;
	case PB__EVENT__BODY_TERMINATED:
		put_terminated(ev, pb->terminated);
		return true;
	case PB__EVENT__BODY_ASYNC_ERROR:
		put_async(ev, dev, pb->async_error);
		return true;
	case PB__EVENT__BODY_CONNECT_GONE:
		ev->type = IWARPD_EVENT_CONNECT_GONE;
		ev->conn = pb->connect_gone->conn;
		put_error(ev, pb->connect_gone->error);
		return true;
	case PB__EVENT__BODY_STREAM_READY:
		put_stream(ev, dev, pb->stream_ready);
		return true;
	case PB__EVENT__BODY_STREAM_DATA:
		ev->type = IWARPD_EVENT_STREAM_DATA;
		ev->conn = pb->stream_data->conn;
		return true;
	case PB__EVENT__BODY_DRAINING:
		ev->type = IWARPD_EVENT_DRAINING;
		ev->drain_ms = pb->draining->timeout_ms;
		return true;
	default: /* of a later protocol version */
		return false;
	}
}

/* The events that get_event waits for: any, or those of a QP. */
struct wanted {
	struct iwarpd_device *dev;
	uint32_t qp; /* number; 0: any */
	int cancel;  /* as of device_wait */
};

/*
 * listener_to_come reports whether the event starts a connection of a listener that
 * iwarpd_listen has not returned yet.
 */
static bool listener_to_come(struct iwarpd_device *dev, const Pb__Event *ev)
{
	return starts(ev) != 0 && !find_object(dev, OBJECT_LISTENER, starts(ev));
}

/*
 * too_early reports whether the first event of the same connection is being held
 * back.
 */
static bool too_early(struct iwarpd_device *dev, const Pb__Event *ev)
{
	if (!device_listening(dev) || conn_of(ev) == 0)
		return false;
	for (struct event *at = dev->events; at && at->msg->event != ev; at = at->next)
		if (conn_of(at->msg->event) == conn_of(ev) && listener_to_come(dev, at->msg->event))
			return true;
	return listener_to_come(dev, ev);
}

static bool is_wanted(const struct wanted *w, const Pb__Event *ev)
{
	return w->qp != 0 ? event_qp(ev) == w->qp : !too_early(w->dev, ev);
}

/*
 * find_event returns the first matching event in the queue that has, or has not,
 * been reported.
 */
static struct event **find_event(const struct wanted *w, bool reported)
{
	struct event **at = &w->dev->events;

	while (*at && ((*at)->reported != reported || !is_wanted(w, (*at)->msg->event)))
		at = &(*at)->next;
	return at;
}

/* end_readers notifies the readers of a stream that its end is being consumed. */
static void end_readers(struct iwarpd_device *dev, const Pb__Event *ev)
{
	for (struct stream *s = dev->readers; s; s = s->next)
		if (ends_stream(ev, s->conn))
			s->over = true;
}

static bool have_event(void *arg)
{
	return *find_event(arg, false) != NULL;
}

/*
 * wait_event waits for an event. It returns stream data that was reported before,
 * and not read, only if there is no other event, not even in the socket.
 */
static int wait_event(struct wanted *w, struct event ***at, int64_t deadline)
{
	bool reported = *find_event(w, true) != NULL;
	int err = device_wait(w->dev, have_event, w, reported ? deadline_in(0) : deadline, w->cancel);

	*at = find_event(w, err == -ETIMEDOUT && reported);
	return **at ? 0 : err;
}

/* next_event implements get_event. The lock is held. */
static int next_event(struct wanted *w, struct iwarpd_event *ev, int64_t deadline)
{
	for (;;) {
		struct event **at;
		int err = wait_event(w, &at, deadline);
		bool good;

		if (err)
			return err;
		good = put_event(ev, w->dev, (*at)->msg->event);
		if (good && ev->type == IWARPD_EVENT_STREAM_DATA) {
			(*at)->reported = true; /* it stays queued for iwarpd_stream_read */
		} else {
			end_readers(w->dev, (*at)->msg->event);
			event_done(w->dev, at);
		}
		if (good)
			return 0;
	}
}

static int get_event(struct iwarpd_device *dev, uint32_t qp, struct iwarpd_event *ev, int timeout_ms,
		     struct iwarpd_error *e)
{
	struct wanted w = { dev, qp, 0 };
	int err;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &w.cancel);
	pthread_mutex_lock(&dev->lock);
	err = next_event(&w, ev, deadline_in(timeout_ms));
	pthread_mutex_unlock(&dev->lock);
	pthread_setcancelstate(w.cancel, &w.cancel);
	switch (err) {
	case 0:
		return 0;
	case -ETIMEDOUT:
		return set_error(e, err, "no event within %d ms", timeout_ms);
	case -EPIPE:
		return device_gone(dev, e);
	}
	return set_error(e, err, "wait for an event: %s", strerror(-err));
}

int iwarpd_get_event(struct iwarpd_device *dev, struct iwarpd_event *ev, int timeout_ms, struct iwarpd_error *e)
{
	return get_event(dev, 0, ev, timeout_ms, e);
}

int iwarpd_get_qp_event(struct iwarpd_qp *qp, struct iwarpd_event *ev, int timeout_ms, struct iwarpd_error *e)
{
	struct object *o = qp_object(qp);

	return get_event(o->dev, o->handle, ev, timeout_ms, e);
}
