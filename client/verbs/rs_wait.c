/* Waiting for rsockets. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "rs.h"

enum { FDS = 3, SPIN_US = 50 };

/* The end of a wait of ms milliseconds, or INT64_MAX. */
static int64_t end_of(int ms)
{
	return ms < 0 ? INT64_MAX : time_us() + ms * 1000LL;
}

/* remaining returns the time-out for poll(2) until end. */
static int remaining(int64_t end)
{
	int64_t us = end == INT64_MAX ? 0 : end - time_us();

	if (end == INT64_MAX)
		return -1;
	return us > 0 ? (int)least((uint64_t)(us + 999) / 1000, INT32_MAX) : 0;
}

int rs_ms(const struct timeval *t)
{
	/* There may be any number of microseconds. */
	uint64_t s = (uint64_t)t->tv_sec + (uint64_t)t->tv_usec / 1000000, us = (uint64_t)t->tv_usec % 1000000;

	return (int)least(least(s, INT32_MAX) * 1000 + (us + 999) / 1000, INT32_MAX);
}

void rs_wake(const struct rs *rs)
{
	static const uint64_t one = 1;

	if (write(rs->fd, &one, sizeof(one)) < 0)
		return; /* its count is at most that of calls */
}

/* take_events takes all events of the descriptors of a socket. */
static void take_events(struct rs *rs)
{
	struct ibv_cq *cq;
	uint64_t count;
	void *context;

	rs->turn++;
	if (read(rs->fd, &count, sizeof(count)) < 0)
		count = 0; /* nobody has called rs_wake */
	rs_cm_events(rs);
	if (!rs->completions)
		return;
	while (ibv_get_cq_event(rs->completions, &cq, &context) == 0)
		ibv_ack_cq_events(cq, 1);
}

/* update brings a socket up to date. Unless nobody sleeps, the events are those of the sleepers. */
static void update(struct rs *rs)
{
	if (rs->sleepers == 0 && rs->state != RS_CONNECTED)
		rs_cm_events(rs);
	rs_progress(rs);
}

static void arm(struct rs *rs)
{
	if (rs->table)
		ibv_req_notify_cq(rs->cq, 0);
	update(rs);
}

/*
 * Several threads may wait for a socket. Whoever takes an event would leave the others asleep, so the last of those
 * that were woken takes it. fall_asleep returns 0 until then, and if events were taken since the thread has armed
 * the queue, in the turn that it names: it must look again before it sleeps. Otherwise it stores what to wait for, and
 * returns how many entries that has: poll(2) counts those without a descriptor too.
 */
static nfds_t fall_asleep(struct rs *rs, unsigned int turn, struct pollfd *p)
{
	nfds_t n = 0;

	if (rs->woken || rs->turn != turn)
		return 0;
	rs->sleepers++;
	p[n++] = (struct pollfd){ .fd = rs->fd, .events = POLLIN };
	if (!rs->request)
		p[n++] = (struct pollfd){ .fd = rs->channel->fd, .events = POLLIN };
	if (rs->completions)
		p[n++] = (struct pollfd){ .fd = rs->completions->fd, .events = POLLIN };
	return n;
}

static void get_up(struct rs *rs, const struct pollfd *p, nfds_t n)
{
	while (n-- > 0)
		rs->woken = rs->woken || p[n].revents;
	if (--rs->sleepers > 0 || !rs->woken)
		return;
	rs->woken = false;
	take_events(rs);
}

/* A sleeper is a thread that waits for a socket, and what it waits for. */
struct sleeper {
	struct rs *rs;
	struct pollfd p[FDS];
	nfds_t n;
};

static void canceled(void *arg)
{
	const struct sleeper *s = arg;

	pthread_mutex_lock(&s->rs->lock);
	get_up(s->rs, s->p, s->n);
	rs_put(s->rs);
}

/* yield gives up the CPU, which a worker of the daemon may share, and the socket. */
static void yield(struct rs *rs)
{
	pthread_mutex_unlock(&rs->lock);
	sched_yield();
	pthread_mutex_lock(&rs->lock);
}

int rs_wait(struct rs *rs, bool (*ready)(const struct rs *rs), int ms)
{
	int64_t end = 0, spin = 0;
	struct sleeper s = { .rs = rs };
	bool armed = false;
	int n;

	for (;;) {
		update(rs);
		if (ready(rs))
			return 0;
		if (ms == 0) {
			yield(rs);
			update(rs);
			return ready(rs) ? 0 : EAGAIN;
		}
		if (end == 0) {
			end = end_of(ms);
			spin = time_us() + SPIN_US;
		}
		if (time_us() < spin) {
			yield(rs);
			continue;
		}
		if (!armed) {
			arm(rs);
			armed = true;
			continue;
		}
		s.n = fall_asleep(rs, rs->turn, s.p);
		if (s.n == 0) {
			if (remaining(end) == 0) /* a sleeper may never get up: it is in a signal handler that exits */
				return EAGAIN;
			yield(rs);
			armed = false;
			continue;
		}
		pthread_mutex_unlock(&rs->lock);
		n = rs_sleep(s.p, s.n, remaining(end), canceled, &s);
		if (n < 0 && (errno != EINTR || iwv_interrupts()))
			n = -errno;
		else if (n < 0)
			n = 1;
		pthread_mutex_lock(&rs->lock);
		get_up(rs, s.p, s.n);
		armed = false;
		if (n < 0)
			return -n;
		if (remaining(end) == 0) {
			update(rs);
			return ready(rs) ? 0 : EAGAIN;
		}
	}
}

/* events_of returns what poll reports for a socket, of events and of what it always reports. */
static short events_of(struct rs *rs, short events)
{
	short got = 0;

	switch (rs->state) {
	case RS_OPEN:
		return (short)((events & POLLOUT) | POLLHUP);
	case RS_LISTENING:
		return rs->request ? (short)(events & (POLLIN | POLLRDNORM)) : 0;
	case RS_CONNECTING:
		return 0;
	case RS_ACCEPTING:
	case RS_CONNECTED:
	case RS_ENDING:
		if (rs_can_recv(rs))
			got |= POLLIN | POLLRDNORM;
		if (rs_can_send(rs))
			got |= POLLOUT | POLLWRNORM;
		if (rs->in_done)
			got |= POLLRDHUP;
		return (short)((got & events) | (rs->in_done && rs->out_done ? POLLHUP : 0));
	case RS_OVER:
		break;
	}
	got = POLLIN | POLLRDNORM | POLLOUT | POLLWRNORM | POLLRDHUP;
	got &= events;
	if (rs->in_len == 0) /* some programs do not read what has come before */
		got |= POLLHUP;
	return (short)(got | (rs->err ? POLLERR : 0));
}

/* A member is a descriptor that rpoll was given. */
struct member {
	struct rs *rs;	   /* or NULL: it is no socket of ours */
	unsigned int turn; /* of rs, when its queue was armed */
	nfds_t waits;	   /* its entries of all */
};

struct set {
	struct pollfd *fds, *others, *all; /* all: what the call sleeps on */
	struct member *members;
	nfds_t n;
	bool mixed; /* there are others than sockets */
};

/* look returns how many descriptors are ready, and stores their events. */
static int look(struct set *s, void (*prepare)(struct rs *rs))
{
	int ready = 0;

	for (nfds_t i = 0; i < s->n; i++) {
		struct rs *rs = s->members[i].rs;

		s->others[i] = (struct pollfd){ .fd = rs ? -1 : s->fds[i].fd, .events = s->fds[i].events };
		if (!rs)
			continue;
		pthread_mutex_lock(&rs->lock);
		prepare(rs);
		s->members[i].turn = rs->turn;
		s->fds[i].revents = events_of(rs, s->fds[i].events);
		pthread_mutex_unlock(&rs->lock);
		ready += s->fds[i].revents != 0;
	}
	return ready;
}

/* look_at_others does so for the descriptors that are no sockets of ours. */
static int look_at_others(struct set *s)
{
	int n = s->mixed ? poll(s->others, s->n, 0) : 0;

	for (nfds_t i = 0; n >= 0 && i < s->n; i++)
		if (!s->members[i].rs)
			s->fds[i].revents = s->others[i].revents;
	return n;
}

/* all_get_up undoes all_fall_asleep for the first n descriptors. */
static void all_get_up(struct set *s, nfds_t n)
{
	const struct pollfd *p = s->all;

	for (nfds_t i = 0; i < n; i++) {
		const struct member *m = &s->members[i];

		if (m->rs) {
			pthread_mutex_lock(&m->rs->lock);
			get_up(m->rs, p, m->waits);
			pthread_mutex_unlock(&m->rs->lock);
		}
		p += m->waits;
	}
}

/* all_fall_asleep stores what to wait for, and returns its length, or 0 if one may not go to sleep. */
static nfds_t all_fall_asleep(struct set *s)
{
	struct pollfd *p = s->all;

	for (nfds_t i = 0; i < s->n; i++) {
		struct member *m = &s->members[i];

		if (m->rs) {
			pthread_mutex_lock(&m->rs->lock);
			m->waits = fall_asleep(m->rs, m->turn, p);
			pthread_mutex_unlock(&m->rs->lock);
			if (m->waits == 0) {
				all_get_up(s, i);
				return 0;
			}
		} else {
			*p = s->others[i];
			m->waits = p->fd >= 0;
		}
		p += m->waits;
	}
	return (nfds_t)(p - s->all);
}

static void set_free(const struct set *s)
{
	for (nfds_t i = 0; s->members && i < s->n; i++)
		if (s->members[i].rs)
			rs_drop(s->members[i].rs);
	free(s->members);
	free(s->all);
}

static void poll_canceled(void *arg)
{
	struct set *s = arg;

	all_get_up(s, s->n);
	set_free(s);
}

/* sleep_in_poll waits for any descriptor. It returns what poll(2) does. */
static int sleep_in_poll(struct set *s, int64_t end)
{
	nfds_t n = all_fall_asleep(s);
	int ready, err;

	if (n == 0) {
		sched_yield();
		return 1;
	}
	ready = rs_sleep(s->all, n, remaining(end), poll_canceled, s);
	err = errno;
	all_get_up(s, s->n);
	errno = err;
	return ready;
}

static int poll_set(struct set *s, int ms)
{
	int64_t end = end_of(ms), spin = time_us() + SPIN_US;
	void (*prepare)(struct rs *rs) = update;
	bool yielded = false;
	int n, others;

	for (;;) {
		n = look(s, prepare);
		others = look_at_others(s);
		if (others < 0)
			return -1;
		n += others;
		if (n > 0 || (yielded && remaining(end) == 0))
			return n;
		if (prepare == update) {
			sched_yield();
			yielded = true;
			if (time_us() >= spin)
				prepare = arm;
			continue;
		}
		if (sleep_in_poll(s, end) < 0)
			return -1;
		prepare = update;
	}
}

int rpoll(struct pollfd *fds, nfds_t nfds, int timeout)
{
	struct set s = { .fds = fds, .n = nfds };
	bool any = false;
	int n = -1;

	FORWARD(rpoll, fds, nfds, timeout);
	rs_enter();
	s.members = calloc(nfds + 1, sizeof(*s.members));
	s.all = calloc(nfds + 1, (1 + FDS) * sizeof(*s.all));
	s.others = s.all ? s.all + nfds * FDS : NULL;
	for (nfds_t i = 0; s.members && i < nfds; i++) {
		s.members[i].rs = fds[i].fd < 0 ? NULL : rs_find(fds[i].fd);
		any = any || s.members[i].rs;
		s.mixed = s.mixed || !s.members[i].rs;
	}
	if (!s.members || !s.all)
		n = set_errno(ENOMEM);
	else if (any)
		n = poll_set(&s, timeout);
	set_free(&s);
	rs_leave();
	return any || !s.all ? n : poll(fds, nfds, timeout);
}

/* The events of each set of select, and what makes a descriptor a member of it, as select(2) says. */
static const struct {
	short events, makes;
} select_sets[] = {
	{ POLLIN | POLLRDNORM, POLLIN | POLLRDNORM | POLLHUP | POLLERR },
	{ POLLOUT | POLLWRNORM, POLLOUT | POLLWRNORM | POLLERR },
	{ POLLPRI, POLLPRI },
};

/* put_sets leaves those descriptors in the sets of select that are ready, and returns how many, or -1 if one is not open. */
static int put_sets(fd_set *const sets[3], const struct pollfd *fds, int n)
{
	int found = 0;

	for (int j = 0; j < n; j++)
		if (fds[j].revents & POLLNVAL)
			return set_errno(EBADF);
	for (int j = 0; j < n; j++) {
		for (int i = 0; i < 3; i++) {
			if (!(fds[j].events & select_sets[i].events))
				continue;
			if (fds[j].revents & select_sets[i].makes)
				found++;
			else
				FD_CLR(fds[j].fd, sets[i]);
		}
	}
	return found;
}

int rselect(int nfds, fd_set *readfds, fd_set *writefds, fd_set *exceptfds, struct timeval *timeout)
{
	fd_set *sets[] = { readfds, writefds, exceptfds };
	struct pollfd *fds;
	int n = 0, found;

	FORWARD(rselect, nfds, readfds, writefds, exceptfds, timeout);
	if (nfds < 0 || (timeout && (timeout->tv_sec < 0 || timeout->tv_usec < 0)))
		return set_errno(EINVAL);
	fds = calloc((size_t)nfds + 1, sizeof(*fds));
	if (!fds)
		return set_errno(ENOMEM);
	for (int fd = 0; fd < nfds; fd++) {
		for (int i = 0; i < 3; i++)
			if (sets[i] && FD_ISSET(fd, sets[i]))
				fds[n].events |= select_sets[i].events;
		fds[n].fd = fd;
		n += fds[n].events != 0;
	}
	found = rpoll(fds, (nfds_t)n, timeout ? rs_ms(timeout) : RS_FOREVER);
	if (found >= 0)
		found = put_sets(sets, fds, n);
	free(fds);
	return found;
}
