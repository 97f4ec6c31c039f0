/* The rsockets of a process: by their descriptors, in a fork and at exit. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "rs.h"

/* The sockets by their descriptors. */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static struct rs **table;
static int table_size;

int rs_insert(struct rs *rs)
{
	int err = 0;

	pthread_mutex_lock(&table_lock);
	if (rs->fd >= table_size) {
		int size = rs->fd + 64;
		struct rs **bigger = reallocarray(table, (size_t)size, sizeof(*table));

		if (bigger) {
			memset(bigger + table_size, 0, (size_t)(size - table_size) * sizeof(*table));
			table = bigger;
			table_size = size;
		} else {
			err = ENOMEM;
		}
	}
	if (!err)
		table[rs->fd] = rs;
	pthread_mutex_unlock(&table_lock);
	return set_errno(err);
}

/* use returns the socket fd, with one more reference, or NULL. The table is locked. */
static struct rs *use(int fd)
{
	struct rs *rs = fd >= 0 && fd < table_size ? table[fd] : NULL;

	if (rs)
		rs->refs++;
	return rs;
}

struct rs *rs_find(int fd)
{
	struct rs *rs;

	pthread_mutex_lock(&table_lock);
	rs = use(fd);
	pthread_mutex_unlock(&table_lock);
	return rs;
}

void rs_remove(struct rs *rs)
{
	pthread_mutex_lock(&table_lock);
	if (table[rs->fd] == rs) { /* no other thread closes it too */
		table[rs->fd] = NULL;
		rs->refs--;
	}
	pthread_mutex_unlock(&table_lock);
}

void rs_drop(struct rs *rs)
{
	bool last;

	pthread_mutex_lock(&table_lock);
	last = --rs->refs == 0;
	pthread_mutex_unlock(&table_lock);
	if (last)
		rs_free(rs);
}

/* The cancelability of a thread that is in a call. */
static __thread int cancelability;

void rs_enter(void)
{
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelability);
}

void rs_leave(void)
{
	pthread_setcancelstate(cancelability, NULL);
}

int rs_sleep(struct pollfd *p, nfds_t n, int ms, void (*canceled)(void *arg), void *arg)
{
	int ready;

	pthread_cleanup_push(canceled, arg);
	rs_leave();
	ready = poll(p, n, ms);
	rs_enter();
	pthread_cleanup_pop(0);
	return ready;
}

struct rs *rs_get(int fd)
{
	struct rs *rs;

	rs_enter();
	rs = rs_find(fd);
	if (rs) {
		pthread_mutex_lock(&rs->lock);
		return rs;
	}
	rs_leave();
	errno = EBADF;
	return NULL;
}

void rs_put(struct rs *rs)
{
	pthread_mutex_unlock(&rs->lock);
	rs_drop(rs);
	rs_leave();
}

static void before_fork(void)
{
	pthread_mutex_lock(&table_lock);
}

static void after_fork_parent(void)
{
	pthread_mutex_unlock(&table_lock);
}

/* The connections are the parent's. The child may close its descriptors, and connect new sockets. */
static void after_fork_child(void)
{
	pthread_mutex_init(&table_lock, NULL);
	for (int i = 0; i < table_size; i++) {
		struct rs *rs = table[i];

		if (!rs)
			continue;
		if (!iwv_eventfd_after_fork(rs->fd, 0)) {
			table[i] = NULL;
			continue;
		}
		pthread_mutex_init(&rs->lock, NULL);
		rs->refs = 1;
		rs->sleepers = 0;
		rs->woken = false;
		rs->err = rs->state == RS_OPEN ? 0 : ENOTCONN;
		rs->state = RS_OVER;
	}
}

__attribute__((constructor)) static void init(void)
{
	pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

/* lock_soon locks m, unless that takes 0.1 s: a thread in whose signal handler the program ends may hold it. */
static bool lock_soon(pthread_mutex_t *m)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	t.tv_nsec += 100000000;
	t.tv_sec += t.tv_nsec / 1000000000;
	t.tv_nsec %= 1000000000;
	return pthread_mutex_timedlock(m, &t) == 0;
}

/* A program that ends without rclose loses no data either, unless it does so in a signal handler within a call. */
__attribute__((destructor)) static void close_all(void)
{
	int64_t end = time_us() + RS_CLOSE_MS * 1000LL;

	for (int fd = 0; fd < table_size; fd++) {
		struct rs *rs;

		if (!lock_soon(&table_lock))
			return;
		rs = use(fd);
		pthread_mutex_unlock(&table_lock);
		if (!rs)
			continue;
		if (lock_soon(&rs->lock)) {
			rs_say_goodbye(rs, (int)((end - time_us()) / 1000));
			rs_progress(rs); /* also if others have taken all the time */
			pthread_mutex_unlock(&rs->lock);
		}
		rs_drop(rs);
	}
}
