/* Queues of events, each with a descriptor to wait on. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "internal.h"

static void empty(struct event_queue *q)
{
	q->first = NULL;
	q->last = &q->first;
}

/* All eventfds have one inode, and so have all epolls. Ours are marked by the signal that they would send if they sent any. */
enum { MARK = 64 };

static atomic_bool forbidden; /* a sandbox forbids marks, so that any eventfd or epoll may be ours */

void fd_mark(int fd)
{
	if (fcntl(fd, F_SETSIG, MARK) < 0 && errno != EBADF)
		atomic_store(&forbidden, true);
}

bool fd_marked(int fd)
{
	struct stat st;

	if (fcntl(fd, F_GETSIG) == MARK)
		return true;
	return atomic_load(&forbidden) && fstat(fd, &st) == 0 && (st.st_mode & S_IFMT) == 0; /* neither has a type */
}

int iwv_eventfd(int flags)
{
	int fd = eventfd(0, EFD_CLOEXEC | flags);

	if (fd >= 0)
		fd_mark(fd);
	return fd;
}

int iwv_queue_init(struct event_queue *q)
{
	q->fd = iwv_eventfd(EFD_SEMAPHORE);
	empty(q);
	return q->fd;
}

/* is_open reports whether the program has not closed the descriptor of a queue. Its number may be that of another file then. */
static bool is_open(const struct event_queue *q)
{
	return fd_marked(q->fd);
}

void iwv_queue_close(struct event_queue *q)
{
	if (is_open(q))
		close(q->fd);
}

void iwv_queue_put(struct event_queue *q, struct queue_item *item)
{
	static const uint64_t one = 1;

	item->next = NULL;
	*q->last = item;
	q->last = &item->next;
	if (is_open(q) && write(q->fd, &one, sizeof(one)) < 0)
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

bool iwv_eventfd_after_fork(int fd, int type)
{
	int close_on_exec, status, own;
	bool done;

	if (!fd_marked(fd))
		return false;
	close_on_exec = fcntl(fd, F_GETFD) & FD_CLOEXEC ? O_CLOEXEC : 0;
	status = fcntl(fd, F_GETFL); /* the program may have changed O_NONBLOCK */
	own = iwv_eventfd(type | (status & O_NONBLOCK ? EFD_NONBLOCK : 0));
	done = dup3(own, fd, close_on_exec) >= 0;
	if (!done) /* RLIMIT_NOFILE has become lower */
		close(fd);
	if (own >= 0)
		close(own);
	return done;
}

void iwv_queue_after_fork(struct event_queue *q)
{
	if (!iwv_eventfd_after_fork(q->fd, EFD_SEMAPHORE))
		q->fd = -1;
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
		if (is_open(q) && preadv2(q->fd, &v, 1, -1, RWF_NOWAIT) < 0)
			continue; /* another thread is taking an item */
	}
	q->last = at;
	return list;
}
