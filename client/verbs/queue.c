/* Queues of events, each with a descriptor to wait on. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "internal.h"

static void empty(struct event_queue *q)
{
	q->first = NULL;
	q->last = &q->first;
}

int iwv_queue_init(struct event_queue *q)
{
	q->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	empty(q);
	return q->fd;
}

void iwv_queue_put(struct event_queue *q, struct queue_item *item)
{
	static const uint64_t one = 1;

	item->next = NULL;
	*q->last = item;
	q->last = &item->next;
	if (write(q->fd, &one, sizeof(one)) < 0)
		return; /* fails only at a count of 2^64 - 2 */
}

struct queue_item *iwv_queue_next(struct event_queue *q, void (*taken)(struct queue_item *item))
{
	struct queue_item *item = NULL;
	uint64_t count;

	while (!item) { /* unless another thread has taken it */
		/* Like the read of the kernel's verbs, this one can be interrupted by signals and pthread_cancel. */
		if (read(q->fd, &count, sizeof(count)) < 0)
			return NULL;
		iwv_thread_lock();
		item = q->first;
		if (item) {
			q->first = item->next;
			if (!q->first)
				q->last = &q->first;
			item->next = NULL;
			taken(item);
		}
		iwv_thread_unlock();
	}
	return item;
}

void iwv_queue_after_fork(struct event_queue *q)
{
	int flags = fcntl(q->fd, F_GETFL); /* the program may have set O_NONBLOCK */
	int fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE | (flags > 0 && (flags & O_NONBLOCK) ? EFD_NONBLOCK : 0));

	if (dup3(fd, q->fd, O_CLOEXEC) < 0) { /* RLIMIT_NOFILE has become lower */
		close(q->fd);
		q->fd = -1;
	}
	if (fd >= 0)
		close(fd);
	empty(q);
}

struct queue_item *iwv_queue_take(struct event_queue *q, bool (*match)(struct queue_item *item, void *arg), void *arg)
{
	struct queue_item *list = NULL, **end = &list, **at;
	uint64_t count;
	struct iovec v = { .iov_base = &count, .iov_len = sizeof(count) };

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
	return list;
}
