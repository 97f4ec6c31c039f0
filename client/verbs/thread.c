/* The library's thread, which takes events from the daemons. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "internal.h"

enum { STACK = 256 * 1024 }; /* of the thread, at least */
enum { TICK_MS = 1000 }; /* how often the thread looks for daemons, and for connections that do not close */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int cancel_state; /* of the thread that holds the lock, before it */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int opening; /* scans, and devices that are being opened, whose sockets a child would have */
static bool away; /* the thread looks for daemons, without the lock */
static struct context *contexts; /* all, also those of a parent that are not closed */
static int epoll = -1;
static cm_handler *_Atomic handler;
static cm_timer *_Atomic timer;

void iwv_thread_lock(void)
{
	int state;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	pthread_mutex_lock(&lock);
	cancel_state = state;
}

void iwv_thread_unlock(void)
{
	int state = cancel_state;

	pthread_mutex_unlock(&lock);
	pthread_setcancelstate(state, &state);
}

void iwv_thread_wait(void)
{
	int state = cancel_state;

	pthread_cond_wait(&changed, &lock);
	cancel_state = state;
}

void iwv_thread_wake(void)
{
	pthread_cond_broadcast(&changed);
}

void iwv_acknowledge(unsigned int *count)
{
	if (*count > 0)
		--*count;
	iwv_thread_wake();
}

void thread_opens(int n)
{
	iwv_thread_lock();
	opening += n;
	iwv_thread_wake();
	iwv_thread_unlock();
}

void thread_rest(void)
{
	while (away)
		iwv_thread_wait();
}

void iwv_thread_set_cm(cm_handler *h, cm_timer *t)
{
	atomic_store(&handler, h);
	atomic_store(&timer, t);
}

/* deliver passes an event to its handlers. ev is NULL if the daemon has ended. */
static void deliver(struct context *c, const struct iwarpd_event *ev)
{
	cm_handler *h = atomic_load(&handler);

	if (ev && ev->type == IWARPD_EVENT_ASYNC_ERROR) {
		async_error(c, ev);
		return;
	}
	if (ev && ev->type == IWARPD_EVENT_TERMINATED)
		async_terminated(c, ev);
	if (!(ev && exchange_event(c, ev)) && h)
		h(c, ev);
	if (ev)
		qp_event(ev);
	else
		async_fatal(c);
}

/* serve handles all waiting events of a context, the last of which is the end of the daemon. */
static void serve(struct context *c)
{
	struct iwarpd_event ev;
	struct iwarpd_error e;
	int err;

	if (atomic_load(&c->gone))
		return;
	while ((err = iwarpd_get_event(c->dev, &ev, 0, &e)) == 0)
		deliver(c, &ev);
	if (err == -ETIMEDOUT || err == -EINTR)
		return;
	iwv_log("%s: %s", c->device->ibv.name, e.text);
	atomic_store(&c->gone, true);
	devices_forget(c->device);
	deliver(c, NULL);
}

bool thread_gone(struct context *c)
{
	serve(c);
	return atomic_load(&c->gone);
}

bool daemon_gone(struct ibv_context *ibv)
{
	bool gone;

	iwv_thread_lock();
	gone = thread_gone(iwv_context_of(ibv));
	iwv_thread_unlock();
	return gone;
}

static bool served(const struct context *c)
{
	for (const struct context *at = contexts; at; at = at->next)
		if (at == c)
			return true;
	return false;
}

/* take handles the events of a context. Of a daemon that has ended there are no more. */
static void take(struct context *c)
{
	if (served(c) && thread_gone(c)) /* the context may have been closed meanwhile */
		epoll_ctl(epoll, EPOLL_CTL_DEL, iwarpd_event_fd(c->dev), NULL);
}

static void *run(void *arg)
{
	int64_t due = 0;
	cm_timer *t;

	(void)arg;
	for (;;) {
		struct epoll_event ev[16];
		int n = epoll_wait(epoll, ev, 16, TICK_MS);

		if (n < 0 && errno != EINTR) /* the program has closed the descriptor */
			poll(NULL, 0, TICK_MS);
		if (n > 0)
			pthread_mutex_lock(&lock);
		else if (pthread_mutex_trylock(&lock) != 0)
			continue; /* the next tick will do */
		for (int i = 0; i < n; i++)
			take(ev[i].data.ptr);
		for (struct context *c = contexts; c; c = c->next)
			qp_expire(c);
		t = atomic_load(&timer);
		away = t && time_us() / 1000 >= due;
		pthread_mutex_unlock(&lock);
		if (!away)
			continue;
		t();
		due = time_us() / 1000 + TICK_MS / 2; /* there may be many events */
		pthread_mutex_lock(&lock);
		away = false;
		pthread_cond_broadcast(&changed);
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

/*
 * start starts the thread with all signals blocked. Its stack has the default size, since it also holds the program's
 * thread-local variables, of any size. The lock is held.
 */
static int start(void)
{
	pthread_attr_t attr;
	sigset_t all, old;
	size_t stack = 0;
	pthread_t t;
	int err;

	epoll = epoll_create1(EPOLL_CLOEXEC);
	if (epoll < 0)
		return -1;
	fd_mark(epoll);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_getstacksize(&attr, &stack); /* RLIMIT_STACK */
	if (stack < STACK)
		pthread_attr_setstacksize(&attr, STACK);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	err = pthread_create(&t, &attr, run, NULL);
	if (err == EAGAIN && pthread_attr_setstacksize(&attr, STACK) == 0) /* a large RLIMIT_STACK */
		err = pthread_create(&t, &attr, run, NULL);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&attr);
	if (!err) {
		pthread_setname_np(t, "iwarpd-verbs");
		return 0;
	}
	close(epoll);
	epoll = -1;
	errno = err;
	return -1;
}

bool thread_runs(void)
{
	return epoll >= 0;
}

int thread_serve(struct context *c)
{
	struct epoll_event ev = { .events = EPOLLIN, .data.ptr = c };
	int err = 0;

	if (epoll < 0)
		err = start();
	if (!err)
		err = epoll_ctl(epoll, EPOLL_CTL_ADD, iwarpd_event_fd(c->dev), &ev);
	if (!err && !atomic_load(&c->inherited)) { /* which is in the list already */
		c->next = contexts;
		contexts = c;
	}
	return err;
}

void thread_forget(struct context *c)
{
	UNLINK(contexts, c);
	if (c->dev)
		epoll_ctl(epoll, EPOLL_CTL_DEL, iwarpd_event_fd(c->dev), NULL);
}

static void before_fork(void)
{
	iwv_thread_lock();
	while (opening > 0)
		iwv_thread_wait();
	near_before_fork();
}

static void after_fork_parent(void)
{
	near_after_fork_parent();
	iwv_thread_unlock();
}

/*
 * separate cuts a context of the parent off in the child. With objects it is then like one whose daemon has ended: the
 * child may close it and destroy its objects. Without objects the child opens it again when it uses it: see context_own.
 */
static void separate(struct context *c)
{
	bool used = c->dev && iwarpd_after_fork(c->dev);

	if (used || atomic_load(&c->gone)) {
		atomic_store(&c->gone, true);
	} else if (c->dev) { /* the parent has not inherited it too */
		iwarpd_close(c->dev); /* now: the child may close all descriptors, and open files with their numbers */
		c->dev = NULL;
		atomic_store(&c->inherited, true);
	}
	iwv_queue_after_fork(&c->async);
	cqs_after_fork(c);
	qps_after_fork(c);
}

/* The child of a fork does not have the thread. Contexts that the child opens start a new one. */
static void after_fork_child(void)
{
	near_after_fork_child();
	devices_after_fork_child();
	if (fd_marked(epoll))
		close(epoll);
	epoll = -1;
	for (struct context *c = contexts; c; c = c->next)
		separate(c);
	away = false;
	pthread_cond_init(&changed, NULL);
	pthread_mutex_init(&lock, NULL);
	pthread_setcancelstate(cancel_state, NULL);
}

__attribute__((constructor)) static void init(void)
{
	pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}
