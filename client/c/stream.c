/* Byte streams before MPA. */
#include <errno.h>
#include <string.h>

#include "internal.h"

enum { MAX_WRITE = 32768 }; /* bytes of a StreamSend */

static bool have_stream_event(void *arg)
{
	const struct stream *s = arg;

	return s->over || stream_event(s->dev, s->conn) != NULL;
}

/* take copies available bytes, or returns an error. The lock is held. */
static int take(struct stream *s, void *buf, size_t len, int64_t deadline)
{
	int err = device_wait(s->dev, have_stream_event, s, deadline, s->cancel);
	const Pb__StreamData *d;
	struct event **at, *ev;
	size_t n;

	if (err)
		return err;
	at = stream_event(s->dev, s->conn);
	if (!at)
		return -ECONNRESET;
	ev = *at;
	if (ev->msg->event->body_case != PB__EVENT__BODY_STREAM_DATA)
		return -ECONNRESET;
	d = ev->msg->event->stream_data;
	n = d->data.len - ev->taken;
	if (n > len)
		n = len;
	if (n)
		memcpy(buf, d->data.data + ev->taken, n);
	ev->taken += n;
	if (ev->taken == d->data.len && (n == 0 || !d->end)) /* the end is returned by a read of its own */
		event_done(s->dev, at);
	return (int)n;
}

/* consumed notifies the daemon that n bytes were read. */
static int consumed(struct stream *s, int n, struct iwarpd_error *e)
{
	Pb__StreamConsumed body = PB__STREAM_CONSUMED__INIT;
	Pb__Request req = REQUEST(stream_consumed, STREAM_CONSUMED, &body);

	body.conn = s->conn;
	body.count = (uint32_t)n;
	return device_do(s->dev, &req, e);
}

/* forget_reader undoes the registration of a read. The lock is not held. */
static void forget_reader(void *arg)
{
	struct stream *s = arg, **at = &s->dev->readers;

	pthread_mutex_lock(&s->dev->lock);
	while (*at != s)
		at = &(*at)->next;
	*at = s->next;
	pthread_mutex_unlock(&s->dev->lock);
}

/* read_one registers the read, so that it is notified of the end of the stream. */
static int read_one(struct stream *s, void *buf, size_t len, int64_t deadline)
{
	struct iwarpd_device *dev = s->dev;
	int n, err;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &s->cancel);
	pthread_cleanup_push(forget_reader, s);
	pthread_mutex_lock(&dev->lock);
	s->next = dev->readers;
	dev->readers = s;
	if (!stream_event(dev, s->conn)) { /* an earlier event may have reported the end: ask the daemon */
		pthread_mutex_unlock(&dev->lock);
		err = consumed(s, 0, NULL);
		pthread_mutex_lock(&dev->lock);
		if (err == -ENOENT)
			s->over = true;
	}
	n = take(s, buf, len, deadline);
	pthread_mutex_unlock(&dev->lock);
	pthread_cleanup_pop(1);
	pthread_setcancelstate(s->cancel, &s->cancel);
	return n;
}

int iwarpd_stream_read(struct iwarpd_device *dev, uint32_t conn, void *buf, size_t len, int timeout_ms,
		       struct iwarpd_error *e)
{
	struct stream s = { .dev = dev, .conn = conn };
	int n, err;

	if (len == 0 || len > INT32_MAX)
		return set_error(e, -EINVAL, "read from a stream: no room, or too much");
	n = read_one(&s, buf, len, deadline_in(timeout_ms));
	switch (n) {
	case -ETIMEDOUT:
		return set_error(e, n, "nothing to read within %d ms", timeout_ms);
	case -ECONNRESET:
		return set_error(e, n, "the connection is over");
	case -EPIPE:
		return device_gone(dev, e);
	case 0:
		return 0;
	}
	if (n < 0)
		return set_error(e, n, "read from a stream: %s", strerror(-n));
	err = consumed(&s, n, e);
	return err && err != -ENOENT ? err : n; /* the connection may have ended after these bytes */
}

int iwarpd_stream_write(struct iwarpd_device *dev, uint32_t conn, const void *data, size_t len, struct iwarpd_error *e)
{
	Pb__StreamSend body = PB__STREAM_SEND__INIT;
	Pb__Request req = REQUEST(stream_send, STREAM_SEND, &body);
	int err;

	if (len > MAX_WRITE)
		len = MAX_WRITE;
	body.conn = conn;
	body.data = bytes(data, len);
	err = device_do(dev, &req, e);
	return err ? err : (int)len;
}

int iwarpd_start_mpa_as(struct iwarpd_device *dev, uint32_t conn, const struct iwarpd_mpa_attr *attr,
			struct iwarpd_error *e)
{
	Pb__StartMPA body = PB__START_MPA__INIT;
	Pb__Request req = REQUEST(start_mpa, START_MPA, &body);
	int err;

	body.conn = conn;
	body.role = (Pb__MPARole)attr->role;
	body.qp = attr->qp ? iwarpd_qp_num(attr->qp) : 0;
	body.private_data = bytes(attr->private_data, attr->private_len);
	err = device_do(dev, &req, e);
	if (!err)
		stream_forget(dev, conn);
	return err;
}

int iwarpd_start_mpa(struct iwarpd_device *dev, uint32_t conn, const void *private_data, size_t private_len,
		     struct iwarpd_error *e)
{
	struct iwarpd_mpa_attr attr = { .private_data = private_data, .private_len = private_len };

	return iwarpd_start_mpa_as(dev, conn, &attr, e);
}

int iwarpd_stream_close(struct iwarpd_device *dev, uint32_t conn, bool abort, struct iwarpd_error *e)
{
	Pb__StreamClose body = PB__STREAM_CLOSE__INIT;
	Pb__Request req = REQUEST(stream_close, STREAM_CLOSE, &body);
	int err;

	body.conn = conn;
	body.abort = abort;
	err = device_do(dev, &req, e);
	stream_forget(dev, conn);
	return err == -ENOENT ? 0 : err; /* already ended */
}
