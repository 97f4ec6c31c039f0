/* Queues of events, each with a descriptor to wait on. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "internal.h"

int iwv_queue_init(struct event_queue *q)
{
	q->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	if (q->fd < 0)
		return -1;
	pthread_mutex_init(&q->lock, NULL);
	q->first = NULL;
	q->last = &q->first;
	return q->fd;
}

void iwv_queue_close(struct event_queue *q)
{
	close(q->fd);
	pthread_mutex_destroy(&q->lock);
}

void iwv_queue_put(struct event_queue *q, struct queue_item *item)
{
	static const uint64_t one = 1;

	pthread_mutex_lock(&q->lock);
	item->next = NULL;
	*q->last = item;
	q->last = &item->next;
	pthread_mutex_unlock(&q->lock);
	if (write(q->fd, &one, sizeof(one)) < 0)
		return; /* fails only at a count of 2^64 - 2 */
}

int iwv_queue_wait(struct event_queue *q)
{
	uint64_t count;

	/*
	 * Like the read of the kernel's verbs, this one can be interrupted by signals and
	 * pthread_cancel.
	 */
	return read(q->fd, &count, sizeof(count)) < 0 ? -1 : 0;
}

struct queue_item *iwv_queue_pop(struct event_queue *q)
{
	struct queue_item *item;

	pthread_mutex_lock(&q->lock);
	item = q->first;
	if (item) {
		q->first = item->next;
		if (!q->first)
			q->last = &q->first;
		item->next = NULL;
	}
	pthread_mutex_unlock(&q->lock);
	return item;
}

struct queue_item *iwv_queue_take(struct event_queue *q, bool (*match)(struct queue_item *item, void *arg), void *arg)
{
	struct queue_item *list = NULL, **end = &list, **at;
	uint64_t count;
	struct iovec v = { .iov_base = &count, .iov_len = sizeof(count) };

	pthread_mutex_lock(&q->lock);
	for (at = &q->first; *at;) {
		struct queue_item *item = *at;

		if (!match(item, arg)) {
			at = &item->next;
			continue;
		}
		*at = item->next;
		item->next = NULL;
		*end = item;
		end = &item->next;
		if (preadv2(q->fd, &v, 1, -1, RWF_NOWAIT) < 0)
			continue; /* another thread is taking an item */
	}
	q->last = at;
	pthread_mutex_unlock(&q->lock);
	return list;
}
