/* Completion channels: wait for several completion queues. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

enum {
	WAKE_LEN = 8,     /* bytes of a wake-up: the handle of the queue, and 4 zero bytes */
	MANY_WAKES = 1024, /* a channel holds at least this many bytes; if it had as many, wake-ups may be lost */
	ALL_WAKES = 4096,  /* more bytes than it holds: a wake-up left in it would be a second one of a queue that fired */
};

struct iwarpd_channel {
	struct object obj;
	struct waiter wait; /* more is readable while ready is not empty; iwarpd_channel_fd */

	pthread_mutex_t lock; /* guards the rest, and the list links of the queues */
	struct cq_link *cqs;
	struct cq_link *ready, **last_ready; /* queues with a pending wake-up, oldest first */
	bool more_set;
};

static struct iwarpd_channel *channel_of(struct object *o)
{
	return container_of(o, struct iwarpd_channel, obj);
}

struct object *channel_object(struct iwarpd_channel *ch)
{
	return &ch->obj;
}

static void channel_free(struct object *o)
{
	struct iwarpd_channel *ch = channel_of(o);

	waiter_close(&ch->wait);
	pthread_mutex_destroy(&ch->lock);
	free(ch);
}

/* new_channel creates a channel from the descriptor in p, which it takes over. */
static int new_channel(struct packet *p, struct iwarpd_channel **out)
{
	struct iwarpd_channel *ch = calloc(1, sizeof(*ch));
	int err;

	if (!ch)
		return -ENOMEM;
	ch->last_ready = &ch->ready;
	fcntl(p->fds[0], F_SETFL, O_NONBLOCK);
	err = waiter_open(&ch->wait, p->fds[0]);
	p->num_fds = 0;
	if (err) {
		free(ch);
		return err;
	}
	pthread_mutex_init(&ch->lock, NULL);
	*out = ch;
	return 0;
}

int iwarpd_create_channel(struct iwarpd_device *dev, struct iwarpd_channel **out, struct iwarpd_error *e)
{
	Pb__CreateChannel body = PB__CREATE_CHANNEL__INIT;
	Pb__Request req = REQUEST(create_channel, CREATE_CHANNEL, &body);
	struct packet p;
	int err;

	err = device_call(dev, &req, -1, PB__REPLY__BODY_CHANNEL, 1, &p, e);
	if (err)
		return err;
	err = new_channel(&p, out);
	if (!err)
		object_add(&(*out)->obj, dev, OBJECT_CHANNEL, p.msg->reply->channel->channel, channel_free);
	return create_done(dev, &p, err, "completion channel", e);
}

int iwarpd_destroy_channel(struct iwarpd_channel *ch, struct iwarpd_error *e)
{
	bool used;

	channel_lock(ch);
	used = ch->cqs != NULL;
	channel_unlock(ch);
	if (used) /* there may be no daemon that says so */
		return set_error(e, -EBUSY, "the completion channel has completion queues");
	return object_destroy(&ch->obj, e);
}

/*
 * show_more keeps the descriptor readable while queues are ready. The lock is held.
 */
static void show_more(struct iwarpd_channel *ch)
{
	bool set = ch->ready != NULL;

	if (set == ch->more_set)
		return;
	ch->more_set = set;
	set_readable(ch->wait.more, set);
}

void channel_lock(struct iwarpd_channel *ch)
{
	pthread_mutex_lock(&ch->lock);
}

void channel_unlock(struct iwarpd_channel *ch)
{
	pthread_mutex_unlock(&ch->lock);
}

void channel_add(struct iwarpd_channel *ch, struct cq_link *l)
{
	channel_lock(ch);
	l->next = ch->cqs;
	ch->cqs = l;
	channel_unlock(ch);
}

void channel_remove(struct iwarpd_channel *ch, struct cq_link *l)
{
	struct cq_link **at = &ch->cqs;

	channel_lock(ch);
	while (*at != l)
		at = &(*at)->next;
	*at = l->next;
	if (l->is_ready) {
		for (at = &ch->ready; *at != l; at = &(*at)->next_ready)
			;
		*at = l->next_ready;
		if (ch->last_ready == &l->next_ready)
			ch->last_ready = at;
	}
	show_more(ch);
	channel_unlock(ch);
}

/* push makes iwarpd_get_cq_event return l. The lock is held. */
static void push(struct iwarpd_channel *ch, struct cq_link *l)
{
	if (l->is_ready)
		return;
	l->is_ready = true;
	l->next_ready = NULL;
	*ch->last_ready = l;
	ch->last_ready = &l->next_ready;
}

void channel_push(struct iwarpd_channel *ch, struct cq_link *l)
{
	channel_lock(ch);
	push(ch, l);
	show_more(ch);
	channel_unlock(ch);
}

/*
 * take removes and returns the queue with the oldest wake-up, or NULL. The lock is
 * held.
 */
static struct cq_link *take(struct iwarpd_channel *ch)
{
	struct cq_link *l = ch->ready;

	if (!l)
		return NULL;
	ch->ready = l->next_ready;
	if (!ch->ready)
		ch->last_ready = &ch->ready;
	l->is_ready = false;
	show_more(ch);
	return l;
}

/* woken processes the wake-ups in b. The lock is held. */
static void woken(struct iwarpd_channel *ch, const uint8_t *b, size_t n)
{
	for (size_t i = 0; i + WAKE_LEN <= n; i += WAKE_LEN) {
		uint32_t handle;

		memcpy(&handle, b + i, sizeof(handle));
		for (struct cq_link *l = ch->cqs; l; l = l->next)
			if (l->handle == handle)
				push(ch, l);
	}
	if (n < MANY_WAKES)
		return;
	for (struct cq_link *l = ch->cqs; l; l = l->next) /* wake-ups sent while it was full are lost */
		if (l->fired(l->cq))
			push(ch, l);
}

/*
 * look returns a queue with a pending wake-up. It returns NULL if there is none, or
 * with -EPIPE in *err.
 */
static struct cq_link *look(struct iwarpd_channel *ch, int *err)
{
	uint8_t b[ALL_WAKES];
	struct cq_link *l;
	ssize_t n = 1;
	int state;

	*err = 0;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); /* nobody would release the lock */
	channel_lock(ch);
	if (!ch->ready) {
		n = read(ch->wait.sock.fd, b, sizeof(b)); /* it does not block, so that no signal interrupts it */
		if (n > 0)
			woken(ch, b, (size_t)n);
	}
	l = take(ch);
	channel_unlock(ch);
	pthread_setcancelstate(state, &state);
	if (!l && n == 0)
		*err = -EPIPE;
	return l;
}

int iwarpd_get_cq_event(struct iwarpd_channel *ch, struct iwarpd_cq **cq, int timeout_ms)
{
	int64_t deadline = deadline_in(timeout_ms);
	int err;

	for (;;) {
		struct cq_link *l = look(ch, &err);

		if (l) {
			*cq = l->cq;
			return 0;
		}
		if (!err)
			err = wait_fd(ch->wait.epoll, deadline);
		if (err)
			return err;
	}
}

void channel_after_fork(struct object *o)
{
	struct iwarpd_channel *ch = channel_of(o);

	pthread_mutex_init(&ch->lock, NULL);
	waiter_after_fork(&ch->wait);
}

int iwarpd_channel_fd(const struct iwarpd_channel *ch)
{
	return ch->wait.epoll;
}
