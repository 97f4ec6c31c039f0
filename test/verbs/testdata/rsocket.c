/* Uses of rsockets: rsocket MODE ADDRESS. The peer is the same process, or a child of it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static const char *address;

/* Options of the sockets of pair; 0 is the default. */
static struct {
	int rcvbuf, sndbuf, rq, sq, iomaps;
} options;

static void set(int fd, int level, int name, int v)
{
	if (v)
		CHECK(rsetsockopt(fd, level, name, &v, sizeof(v)) == 0);
}

static int get(int fd, int level, int name)
{
	int v = -1;
	socklen_t len = sizeof(v);

	CHECK(rgetsockopt(fd, level, name, &v, &len) == 0 && len == sizeof(v));
	return v;
}

static int error_of(int fd)
{
	return get(fd, SOL_SOCKET, SO_ERROR);
}

/* resolve stores the socket address of the test, and returns its length. */
static socklen_t resolve(struct sockaddr_storage *a, int port)
{
	struct sockaddr_in *in = (struct sockaddr_in *)a;
	struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)a;

	memset(a, 0, sizeof(*a));
	if (inet_pton(AF_INET, address, &in->sin_addr) == 1) {
		in->sin_family = AF_INET;
		in->sin_port = htons((uint16_t)port);
		return sizeof(*in);
	}
	CHECK(inet_pton(AF_INET6, address, &in6->sin6_addr) == 1);
	in6->sin6_family = AF_INET6;
	in6->sin6_port = htons((uint16_t)port);
	return sizeof(*in6);
}

static int new_socket(void)
{
	struct sockaddr_storage a;
	int fd;

	resolve(&a, 0);
	fd = rsocket(a.ss_family, SOCK_STREAM, 0);
	CHECK(fd >= 0);
	set(fd, SOL_SOCKET, SO_RCVBUF, options.rcvbuf);
	set(fd, SOL_SOCKET, SO_SNDBUF, options.sndbuf);
	set(fd, SOL_RDMA, RDMA_RQSIZE, options.rq);
	set(fd, SOL_RDMA, RDMA_SQSIZE, options.sq);
	set(fd, SOL_RDMA, RDMA_IOMAPSIZE, options.iomaps);
	return fd;
}

static void nonblocking(int fd, bool on)
{
	CHECK(rfcntl(fd, F_SETFL, on ? O_NONBLOCK : 0) == 0);
}

static int listener(int backlog)
{
	struct sockaddr_storage a;
	socklen_t len = resolve(&a, 0);
	int fd = new_socket();

	CHECK(rbind(fd, (struct sockaddr *)&a, len) == 0 && rlisten(fd, backlog) == 0);
	return fd;
}

static int port_of(int fd)
{
	struct sockaddr_storage a;
	socklen_t len = sizeof(a);

	CHECK(rgetsockname(fd, (struct sockaddr *)&a, &len) == 0);
	return ntohs(((struct sockaddr_in *)&a)->sin_port);
}

static int connect_to(int fd, int port)
{
	struct sockaddr_storage a;
	socklen_t len = resolve(&a, port);

	return rconnect(fd, (struct sockaddr *)&a, len);
}

/* poll_one returns the events of one socket. */
static short poll_one(int fd, short events, int ms)
{
	struct pollfd p = { .fd = fd, .events = events };
	int n = rpoll(&p, 1, ms);

	CHECK(n >= 0 && n == (p.revents != 0));
	return p.revents;
}

static void *connector(void *arg)
{
	int *to = arg, fd = new_socket();

	CHECK(connect_to(fd, *to) == 0);
	*to = fd;
	return NULL;
}

/* A listener and the two ends of a connection: a made it, b was accepted. */
struct pair {
	int l, a, b;
};

static void join(struct pair *p)
{
	int fd = port_of(p->l);
	pthread_t t;

	CHECK(pthread_create(&t, NULL, connector, &fd) == 0);
	p->b = raccept(p->l, NULL, NULL);
	CHECK(p->b >= 0);
	CHECK(pthread_join(t, NULL) == 0);
	p->a = fd;
}

static struct pair pair(void)
{
	struct pair p = { .l = listener(8) };

	join(&p);
	return p;
}

static void end(struct pair *p)
{
	CHECK(rclose(p->a) == 0 && rclose(p->b) == 0 && rclose(p->l) == 0);
}

/* The byte of a stream at a position. */
static uint8_t byte_at(uint64_t pos, uint64_t seed)
{
	uint64_t x = (pos / 8 + seed) * 0x9e3779b97f4a7c15;

	return (uint8_t)((x ^ x >> 29) >> pos % 8 * 8);
}

static void fill(uint8_t *buf, size_t n, uint64_t pos, uint64_t seed)
{
	for (size_t i = 0; i < n; i++)
		buf[i] = byte_at(pos + i, seed);
}

static void verify(const uint8_t *buf, size_t n, uint64_t pos, uint64_t seed)
{
	for (size_t i = 0; i < n; i++)
		if (buf[i] != byte_at(pos + i, seed)) {
			printf("byte %llu is wrong\n", (unsigned long long)(pos + i));
			CHECK(false);
		}
}

/* A direction of a stream: n bytes, in calls of at most piece. */
struct stream {
	int fd;
	size_t n, piece;
	uint64_t seed;
	bool last; /* the receiver reads until the end, and the sender sends that */
};

static void *send_stream(void *arg)
{
	struct stream *s = arg;
	uint8_t *buf = malloc(s->piece);
	size_t done = 0;

	CHECK(buf);
	while (done < s->n) {
		size_t len = s->n - done < s->piece ? s->n - done : s->piece;

		fill(buf, len, done, s->seed);
		CHECK(rsend(s->fd, buf, len, 0) == (ssize_t)len);
		done += len;
	}
	if (s->last)
		CHECK(rshutdown(s->fd, SHUT_WR) == 0);
	free(buf);
	return NULL;
}

static void *recv_stream(void *arg)
{
	struct stream *s = arg;
	uint8_t *buf = malloc(s->piece);
	size_t done = 0;

	CHECK(buf);
	while (done < s->n || s->last) {
		ssize_t len = rrecv(s->fd, buf, s->piece, 0);

		CHECK(len >= 0);
		if (len == 0)
			break;
		verify(buf, (size_t)len, done, s->seed);
		done += (size_t)len;
	}
	CHECK(done == s->n);
	free(buf);
	return NULL;
}

static pthread_t start(void *(*f)(void *), void *arg)
{
	pthread_t t;

	CHECK(pthread_create(&t, NULL, f, arg) == 0);
	return t;
}

static void finish(pthread_t t)
{
	void *result;

	CHECK(pthread_join(t, &result) == 0 && result == NULL);
}

/* exchange sends n bytes in both directions at once, and ends both. */
static void exchange(const struct pair *p, size_t n, size_t out, size_t in)
{
	struct stream s[4] = {
		{ p->a, n, out, 1, true }, { p->b, n, out, 2, true },
		{ p->a, n, in, 2, true }, { p->b, n, in, 1, true },
	};
	pthread_t t[4];

	for (int i = 0; i < 4; i++)
		t[i] = start(i < 2 ? send_stream : recv_stream, &s[i]);
	for (int i = 0; i < 4; i++)
		finish(t[i]);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* free_port returns a port at which nobody listens. */
static int free_port(void)
{
	int l = listener(1), port = port_of(l);

	CHECK(rclose(l) == 0);
	return port;
}

/* A connect that is refused is reported once. The socket can be used again. */
static void refused(void)
{
	int l, fd = new_socket(), port = free_port();
	struct pair p;

	CHECK(connect_to(fd, port) == -1 && errno == ECONNREFUSED);
	CHECK(error_of(fd) == 0);
	CHECK(connect_to(fd, port) == -1 && errno == ECONNREFUSED);
	nonblocking(fd, true);
	CHECK(connect_to(fd, port) == -1);
	if (errno == EINPROGRESS) {
		CHECK(poll_one(fd, POLLOUT, -1) & POLLERR);
		CHECK(error_of(fd) == ECONNREFUSED && error_of(fd) == 0);
	}
	while (connect_to(fd, port) == -1 && errno == ECONNREFUSED) /* at once */
		;
	CHECK(errno == EINPROGRESS && poll_one(fd, POLLOUT, -1) & POLLERR);
	CHECK(connect_to(fd, port) == -1 && errno == ECONNREFUSED && error_of(fd) == 0);
	while (connect_to(fd, port) == -1 && (errno == EINPROGRESS || errno == EALREADY)) /* as older programs do */
		;
	CHECK(errno == ECONNREFUSED);
	l = listener(8);
	p = (struct pair){ .l = l, .a = fd };
	CHECK(connect_to(fd, port_of(l)) == -1 && errno == EINPROGRESS);
	CHECK(connect_to(fd, port_of(l)) == -1 && errno == EALREADY);
	CHECK(rsend(fd, "x", 1, 0) == -1 && errno == EAGAIN && rsend(fd, "x", 0, 0) == -1 && errno == EAGAIN);
	CHECK(rrecv(fd, &port, 1, 0) == -1 && errno == EAGAIN);
	while (poll_one(l, POLLIN, 0) == 0)
		poll_one(fd, POLLOUT, 1);
	nonblocking(l, true);
	p.b = raccept(l, NULL, NULL);
	CHECK(p.b >= 0 && raccept(l, NULL, NULL) == -1 && errno == EAGAIN);
	CHECK(poll_one(fd, POLLOUT, -1) == POLLOUT && error_of(fd) == 0);
	CHECK(connect_to(fd, port_of(l)) == -1 && errno == EISCONN);
	nonblocking(fd, false);
	exchange(&p, 100000, 3000, 5000);
	end(&p);
}

/* A connect by connect alone. */
static void looped(void)
{
	int fd = new_socket(), l = listener(8), err;
	struct pair p = { .l = l, .a = fd };

	nonblocking(fd, true);
	nonblocking(l, true);
	CHECK(connect_to(fd, port_of(l)) == -1 && errno == EINPROGRESS);
	p.b = -1;
	do {
		err = connect_to(fd, port_of(l)) == 0 ? 0 : errno;
		if (p.b < 0)
			p.b = raccept(l, NULL, NULL);
	} while (err == EALREADY);
	CHECK(p.b >= 0 && (err == EISCONN || err == 0));
	end(&p);
}

static void on_signal(int sig)
{
	(void)sig;
}

static void handle(int flags)
{
	struct sigaction a = { .sa_handler = on_signal, .sa_flags = flags };

	CHECK(sigaction(SIGUSR1, &a, NULL) == 0);
}

/* A thread that another one is to interrupt. */
struct victim {
	pthread_t thread;
	atomic_bool done;
	useconds_t pause;
};

static void *interrupter(void *arg)
{
	struct victim *v = arg;

	while (!v->done) {
		usleep(v->pause);
		pthread_kill(v->thread, SIGUSR1);
	}
	return NULL;
}

static void *accepter(void *arg)
{
	int *fd = arg;

	*fd = raccept(*fd, NULL, NULL);
	return NULL;
}

static void *late_accepter(void *arg)
{
	usleep(100000);
	return accepter(arg);
}

/* Calls that wait are interrupted by signals, unless the handler has SA_RESTART. No data are lost. */
static void interrupted(void)
{
	struct victim v = { .thread = pthread_self(), .pause = 2000 };
	struct timeval tv = { .tv_usec = 100000 };
	struct pair p = pair();
	uint8_t *big = calloc(1, 1 << 24);
	int fd, accepted, interrupts = 0;
	pthread_t t, t2;
	ssize_t sent;

	CHECK(big);
	handle(0);
	t = start(interrupter, &v);
	CHECK(rrecv(p.a, big, 1, 0) == -1 && errno == EINTR);
	CHECK(raccept(p.l, NULL, NULL) == -1 && errno == EINTR);
	CHECK(rpoll(&(struct pollfd){ .fd = p.a, .events = POLLIN }, 1, -1) == -1 && errno == EINTR);
	sent = rsend(p.a, big, 1 << 24, 0);
	CHECK(sent > 0 && sent < 1 << 24);
	CHECK(rsend(p.a, big, 1, 0) == -1 && errno == EINTR);
	fd = new_socket();
	accepted = p.l;
	t2 = start(late_accepter, &accepted);
	while (connect_to(fd, port_of(p.l)) == -1 && errno == EINTR)
		interrupts++;
	CHECK(interrupts > 0 && connect_to(fd, port_of(p.l)) == -1 && errno == EISCONN);
	finish(t2);
	CHECK(accepted >= 0 && rclose(accepted) == 0);
	v.done = true;
	finish(t);
	handle(SA_RESTART);
	v.done = false;
	t = start(interrupter, &v);
	CHECK(rsetsockopt(p.a, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)) == 0);
	for (int i = 0; i < 3; i++)
		CHECK(rrecv(p.a, big, 1, 0) == -1 && errno == EAGAIN);
	v.done = true;
	finish(t);
	CHECK(rclose(fd) == 0);
	end(&p);
	free(big);
}

static void *slow_reader(void *arg)
{
	usleep(300000);
	return recv_stream(arg);
}

/* What rsend has taken arrives, though the socket is closed at once, while signals come. */
static void closed(void)
{
	struct victim v = { .thread = pthread_self(), .pause = 20 };
	pthread_t t, killer;

	handle(0);
	for (int i = 0; i < 10; i++) {
		struct pair p = pair();
		struct stream in = { p.b, i % 2 ? 300 : 60000, 10000, 7, true };
		struct stream out = { p.a, in.n, i % 2 ? 1 : 40000, 7, false };

		send_stream(&out);
		t = start(slow_reader, &in);
		v.done = false;
		killer = start(interrupter, &v);
		CHECK(rclose(p.a) == 0);
		v.done = true;
		finish(killer);
		finish(t);
		CHECK(rclose(p.b) == 0 && rclose(p.l) == 0);
	}
}

/* One side ends its direction; the other one's goes on. Data that nobody has read do no harm. */
static void half(void)
{
	uint8_t buf[4000];

	for (int i = 0; i < 2; i++) {
		struct pair p = pair();
		int from = i ? p.b : p.a, to = i ? p.a : p.b;
		struct stream out = { to, 3000000, 70000, 3, true }, in = { from, 3000000, 4000, 3, true };
		pthread_t t;

		fill(buf, sizeof(buf), 0, 9);
		CHECK(rsend(from, buf, sizeof(buf), 0) == sizeof(buf) && rshutdown(from, SHUT_WR) == 0);
		CHECK(rsend(from, buf, 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);
		CHECK(rsend(from, buf, 0, MSG_NOSIGNAL) == -1 && errno == EPIPE && rsend(to, buf, 0, 0) == 0);
		t = start(send_stream, &out);
		recv_stream(&in);
		finish(t);
		CHECK(rrecv(to, buf, sizeof(buf), MSG_WAITALL) == sizeof(buf));
		verify(buf, sizeof(buf), 0, 9);
		CHECK(rrecv(to, buf, 1, 0) == 0 && rrecv(from, buf, 1, 0) == 0 && rrecv(to, buf, 1, 0) == 0);
		CHECK(error_of(from) == 0 && error_of(to) == 0);
		end(&p);
	}
	for (int i = 0; i < 2; i++) { /* closed with unread data */
		struct sockaddr_storage peer;
		socklen_t len = sizeof(peer);
		struct pair p = pair();

		CHECK(rsend(p.a, buf, sizeof(buf), 0) == sizeof(buf));
		CHECK(poll_one(p.b, POLLIN, -1) == POLLIN);
		CHECK(rclose(i ? p.b : p.a) == 0);
		if (i) {
			CHECK(poll_one(p.a, POLLIN, -1) & POLLHUP);
			CHECK(rsend(p.a, buf, 1, MSG_NOSIGNAL) == -1 && (errno == ECONNRESET || errno == EPIPE));
			CHECK(rrecv(p.a, buf, 1, 0) == 0);
		} else {
			CHECK(rrecv(p.b, buf, sizeof(buf), MSG_WAITALL) == sizeof(buf));
			CHECK(rrecv(p.b, buf, sizeof(buf), MSG_WAITALL) == 0);
			CHECK(rgetpeername(p.b, (struct sockaddr *)&peer, &len) == 0);
		}
		CHECK(rclose(i ? p.a : p.b) == 0 && rclose(p.l) == 0);
	}
}

/* Errors are those of TCP, or of rsocket(7). */
static void errors(void)
{
	struct pair p = pair();
	int fd = new_socket(), file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC), none = 999;
	struct sockaddr_storage a;
	socklen_t len;
	char c;

	CHECK(file >= 0);
	for (int i = 0; i < 3; i++) {
		int bad = i == 0 ? -1 : i == 1 ? file : none;

		CHECK(rrecv(bad, &c, 1, 0) == -1 && errno == EBADF && rsend(bad, &c, 1, 0) == -1 && errno == EBADF);
		CHECK(rclose(bad) == -1 && errno == EBADF && rshutdown(bad, SHUT_WR) == -1 && errno == EBADF);
		CHECK(raccept(bad, NULL, NULL) == -1 && errno == EBADF && rlisten(bad, 1) == -1 && errno == EBADF);
		CHECK(connect_to(bad, 1) == -1 && errno == EBADF && rfcntl(bad, F_GETFL) == -1 && errno == EBADF);
	}
	CHECK(rsocket(AF_UNIX, SOCK_STREAM, 0) == -1 && errno == EAFNOSUPPORT);
	CHECK(rsocket(AF_INET, SOCK_DGRAM, 0) == -1 && errno == EPROTONOSUPPORT);
	CHECK(rrecv(fd, &c, 1, 0) == -1 && errno == ENOTCONN && rrecv(fd, &c, 0, 0) == -1 && rread(fd, &c, 0) == 0);
	CHECK(rread(file, &c, 0) == -1 && errno == EBADF);
	CHECK(raccept(fd, NULL, NULL) == -1 && errno == EINVAL && raccept(p.a, NULL, NULL) == -1 && errno == EINVAL);
	len = sizeof(a);
	CHECK(rgetpeername(fd, (struct sockaddr *)&a, &len) == -1 && errno == ENOTCONN);
	CHECK(rshutdown(fd, SHUT_WR) == -1 && errno == ENOTCONN && rshutdown(p.a, 77) == -1 && errno == EINVAL);
	CHECK(connect_to(p.a, 1) == -1 && errno == EISCONN && connect_to(p.b, 1) == -1 && errno == EISCONN);
	CHECK(connect_to(p.l, 1) == -1 && errno == EISCONN && rlisten(p.a, 1) == -1 && errno == EINVAL);
	len = resolve(&a, 0);
	CHECK(rbind(p.a, (struct sockaddr *)&a, len) == -1 && errno == EINVAL);
	CHECK(rbind(fd, (struct sockaddr *)&a, 4) == -1 && errno == EINVAL);
	CHECK(rconnect(fd, (struct sockaddr *)&a, 4) == -1 && errno == EINVAL);
	a.ss_family = AF_UNIX;
	CHECK(rconnect(fd, (struct sockaddr *)&a, len) == -1 && errno == EAFNOSUPPORT);
	CHECK(poll_one(fd, POLLIN | POLLOUT, 0) == (POLLOUT | POLLHUP));
	/* The connection is as it was. */
	exchange(&p, 10000, 10000, 10000);
	len = resolve(&a, port_of(p.l));
	CHECK(rbind(fd, (struct sockaddr *)&a, len) == -1 && errno == EADDRINUSE);
	CHECK(rclose(fd) == 0 && rclose(fd) == -1 && errno == EBADF);
	close(file);
	end(&p);
}

/* What a thread waits for on a socket that another thread closes. */
struct waiter {
	int fd, call;
	atomic_bool begun;
};

static void *waiter(void *arg)
{
	static char big[1 << 16];
	struct waiter *w = arg;
	struct pollfd p = { .fd = w->fd, .events = POLLIN };

	w->begun = true;
	switch (w->call) {
	case 0:
		CHECK(rrecv(w->fd, big, 1, 0) <= 0);
		break;
	case 1:
		while (rsend(w->fd, big, sizeof(big), MSG_NOSIGNAL) > 0)
			;
		break;
	case 2:
		CHECK(raccept(w->fd, NULL, NULL) == -1 && (errno == EBADF || errno == EINVAL || errno == ECONNABORTED));
		break;
	case 3:
		CHECK(rpoll(&p, 1, -1) == 1 && p.revents);
		break;
	}
	return NULL;
}

/* A close, or a shutdown, ends the waits of other threads. */
static void woken(void)
{
	for (int i = 0; i < 10; i++) {
		struct pair p = pair();
		struct waiter w = { .call = i % 5 == 4 ? 0 : i % 5 };
		pthread_t t;
		double begin;

		w.fd = w.call == 2 ? p.l : p.a;
		t = start(waiter, &w);
		while (!w.begun)
			;
		usleep(100000);
		begin = now();
		if (i >= 5 && w.call != 2)
			CHECK(rshutdown(w.fd, SHUT_RDWR) == 0);
		else
			CHECK(rclose(w.fd) == 0);
		finish(t);
		CHECK(now() - begin < 5);
		if (i >= 5 && w.call != 2)
			CHECK(rclose(w.fd) == 0);
		if (w.fd != p.l)
			CHECK(rclose(p.l) == 0);
		else
			CHECK(rclose(p.a) == 0);
		CHECK(rclose(p.b) == 0);
	}
}

/* Flags, time-outs and vectors. */
static void flags(void)
{
	struct timeval tv = { .tv_usec = 200000 }, got;
	struct linger none = { .l_onoff = 1 };
	struct pair p = pair();
	char a[4], b[3], c[8];
	struct iovec out[] = { { "ab", 2 }, { NULL, 0 }, { "cde", 3 }, { "fghij", 5 }, { NULL, 0 } };
	struct iovec in[] = { { a, 4 }, { NULL, 0 }, { b, 3 }, { c, 8 } };
	struct msghdr m = { .msg_iov = in, .msg_iovlen = 4 };
	uint8_t *big = calloc(1, 1 << 20);
	socklen_t len = sizeof(got);
	double begin;

	CHECK(big);
	CHECK(rrecv(p.a, a, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
	CHECK(rrecv(p.a, a, 0, MSG_DONTWAIT) == -1 && errno == EAGAIN && rread(p.a, a, 0) == 0 && rreadv(p.a, in, 0) == 0);
	CHECK(rwritev(p.b, out, 5) == 10 && rrecv(p.a, a, 0, 0) == 0 && rrecv(p.a, a, 0, MSG_WAITALL) == 0);
	CHECK(rrecv(p.a, c, 8, MSG_PEEK) > 0 && c[0] == 'a' && rrecv(p.a, c, 8, MSG_PEEK) > 0 && c[0] == 'a');
	CHECK(rrecv(p.a, c, 8, MSG_WAITALL) == 8 && memcmp(c, "abcdefgh", 8) == 0);
	CHECK(rread(p.a, c, 8) == 2 && memcmp(c, "ij", 2) == 0);
	CHECK(rwritev(p.b, out, 5) == 10 && rrecvmsg(p.a, &m, 0) > 0);
	CHECK(poll_one(p.a, POLLIN, 500) == 0); /* it has taken all */
	CHECK(rwritev(p.b, out, 5) == 10 && rwritev(p.b, out, 4) == 10 && poll_one(p.a, POLLIN, -1) == POLLIN);
	while (rrecv(p.a, big, 100, MSG_PEEK) < 20)
		;
	memset(b, 0, sizeof(b));
	CHECK(rreadv(p.a, in, 4) == 15);
	CHECK(memcmp(a, "abcd", 4) == 0 && memcmp(b, "efg", 3) == 0 && memcmp(c, "hijabcde", 8) == 0);
	CHECK(rrecv(p.a, c, 8, 0) == 5 && memcmp(c, "fghij", 5) == 0);
	CHECK(rsend(p.b, NULL, 0, 0) == 0 && rwritev(p.b, NULL, 0) == 0);
	CHECK(rwritev(p.b, out, -1) == -1 && errno == EINVAL);
	m = (struct msghdr){ .msg_iov = out, .msg_iovlen = 5 };
	CHECK(rsendmsg(p.b, &m, 0) == 10 && rrecv(p.a, big, 10, MSG_WAITALL) == 10);
	CHECK(memcmp(big, "abcdefghij", 10) == 0);
	CHECK(rrecv(p.a, big, 1, MSG_OOB) == -1 && rsend(p.a, big, 1, MSG_OOB) == -1);
	CHECK(rsetsockopt(p.a, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)) == 0);
	CHECK(rsetsockopt(p.a, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv)) == 0);
	CHECK(rgetsockopt(p.a, SOL_SOCKET, SO_RCVTIMEO, &got, &len) == 0 && got.tv_usec == 200000 && got.tv_sec == 0);
	begin = now();
	CHECK(rrecv(p.a, a, 1, 0) == -1 && errno == EAGAIN && rrecv(p.a, a, 0, 0) == -1 && errno == EAGAIN && now() - begin >= 0.4);
	CHECK(rsend(p.b, "xy", 2, 0) == 2 && rrecv(p.a, a, 4, MSG_WAITALL) == 2);
	while (rsend(p.a, big, 1 << 20, 0) == 1 << 20)
		;
	begin = now();
	CHECK(rsend(p.a, big, 1, 0) == -1 && errno == EAGAIN && now() - begin >= 0.2);
	CHECK((poll_one(p.a, POLLOUT, 0) & POLLOUT) == 0 && rsend(p.a, big, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
	while (rrecv(p.b, big, 1 << 20, MSG_DONTWAIT) > 0)
		usleep(1000);
	CHECK(poll_one(p.a, POLLOUT, -1) == POLLOUT);
	/* Without lingering, the end is no orderly one. */
	CHECK(rsetsockopt(p.a, SOL_SOCKET, SO_LINGER, &none, sizeof(none)) == 0);
	begin = now();
	CHECK(rclose(p.a) == 0 && now() - begin < 1);
	CHECK(poll_one(p.b, POLLIN, -1) & POLLERR);
	CHECK(rrecv(p.b, a, 1, 0) == -1 && errno == ECONNRESET);
	CHECK(rclose(p.b) == 0 && rclose(p.l) == 0);
	free(big);
}

/* Sizes of transfers, and of buffers and queues, that are small at one side and large at the other. */
static void sizes(void)
{
	struct pair p = pair();
	struct stream out = { p.a, 3000, 1, 5, true }, in = { p.b, 3000, 7, 5, true };
	pthread_t t = start(send_stream, &out);

	recv_stream(&in);
	finish(t);
	end(&p);
	for (int i = 0; i < 4; i++) {
		memset(&options, 0, sizeof(options));
		if (i & 1)
			options.rcvbuf = options.sndbuf = 1;
		if (i & 2)
			options.rq = options.sq = 16;
		p.l = listener(8);
		memset(&options, 0, sizeof(options));
		if (!(i & 1))
			options.rcvbuf = options.sndbuf = 1;
		if (!(i & 2))
			options.rq = options.sq = 1;
		else
			options.rq = options.sq = 16384;
		join(&p);
		exchange(&p, 1000000, 1 << (4 + 3 * i), 777);
		end(&p);
		p.l = listener(8);
		join(&p);
		exchange(&p, 3000, 1, 5000);
		end(&p);
	}
}

static void bulk(void)
{
	struct pair p = pair();

	exchange(&p, 64 << 20, 1 << 20, 100000);
	end(&p);
}

/* Threads that play ping-pong with counted bytes, several at each end: a wake-up that is lost stops them. */
struct game {
	int fd;
	int rounds;
	bool polls;
	atomic_int left;
};

static void *echo(void *arg)
{
	struct game *g = arg;
	char c;

	for (;;) {
		if (g->polls && poll_one(g->fd, POLLIN, 20000) == 0)
			CHECK(!"a lost wake-up");
		if (rrecv(g->fd, &c, 1, g->polls ? MSG_DONTWAIT : 0) != 1) {
			if (errno == EAGAIN && g->polls)
				continue;
			return NULL;
		}
		if (c == 'q')
			return NULL;
		CHECK(rsend(g->fd, &c, 1, 0) == 1);
	}
}

static void *ping(void *arg)
{
	struct game *g = arg;
	char c = 'p';

	while (atomic_fetch_sub(&g->left, 1) > 0) {
		CHECK(rsend(g->fd, &c, 1, 0) == 1);
		if (g->polls)
			while (rrecv(g->fd, &c, 1, MSG_DONTWAIT) != 1)
				CHECK(errno == EAGAIN && poll_one(g->fd, POLLIN, 20000) != 0);
		else
			CHECK(rrecv(g->fd, &c, 1, 0) == 1);
	}
	return NULL;
}

static void *watcher(void *arg)
{
	struct game *g = arg;

	while (atomic_load(&g->left) > 0)
		poll_one(g->fd, POLLIN, 100);
	return NULL;
}

static void threads(void)
{
	enum { ROUNDS = 3000 };

	for (int i = 0; i < 4; i++) {
		struct pair p = pair();
		struct game a = { .fd = p.a, .left = ROUNDS, .polls = i & 1 };
		struct game b = { .fd = p.b, .left = ROUNDS, .polls = i & 2 };
		pthread_t t[8];

		for (int j = 0; j < 2; j++) {
			t[j] = start(echo, &b);
			t[2 + j] = start(ping, &a);
			t[4 + j] = start(watcher, &a);
			t[6 + j] = start(watcher, &a);
		}
		for (int j = 2; j < 8; j++)
			finish(t[j]);
		CHECK(rsend(p.a, "qq", 2, 0) == 2);
		finish(t[0]);
		finish(t[1]);
		end(&p);
	}
	for (int i = 0; i < 2; i++) { /* two writers and two readers */
		struct pair p = pair();
		struct game a = { .fd = p.a, .left = ROUNDS };
		struct stream s = { p.a, 3000000, 3000, 0, false };
		static uint8_t buf[5000];
		pthread_t t[4];
		size_t n = 0;

		t[0] = start(send_stream, &s);
		t[1] = start(send_stream, &s);
		t[2] = start(watcher, &a);
		t[3] = start(watcher, &a);
		while (n < 6000000) {
			ssize_t got = rrecv(p.b, buf, sizeof(buf), i ? MSG_DONTWAIT : 0);

			if (got < 0)
				CHECK(i && errno == EAGAIN && poll_one(p.b, POLLIN, 20000));
			else
				n += (size_t)got;
		}
		a.left = 0;
		for (int j = 0; j < 4; j++)
			finish(t[j]);
		end(&p);
	}
}

enum { CROWD = 12, CROWD_ROUNDS = 300 };

static struct pollfd crowd[CROWD];
static atomic_int crowd_left;

/* Two of these serve the same sockets, by rpoll. */
static void *crowd_server(void *arg)
{
	struct pollfd fds[CROWD];
	char c;

	(void)arg;
	memcpy(fds, crowd, sizeof(fds));
	while (crowd_left > 0) {
		int n = rpoll(fds, CROWD, 20000);

		CHECK(n > 0 || crowd_left == 0);
		for (int i = 0; i < CROWD && n > 0; i++)
			if (fds[i].revents & POLLIN && rrecv(fds[i].fd, &c, 1, MSG_DONTWAIT) == 1)
				CHECK(rsend(fds[i].fd, &c, 1, 0) == 1);
	}
	return NULL;
}

static atomic_int onlooker;

static void *look_on(void *fd)
{
	struct pollfd p = { .fd = *(int *)fd, .events = POLLOUT };

	atomic_store(&onlooker, gettid());
	rpoll(&p, 1, -1);
	return NULL;
}

/* A thread that waits for something else of a listener, since before a request was accepted, keeps others from no further one. */
static void attended(void)
{
	struct pair p = { .l = listener(8) };
	int fd = new_socket(), first;
	pthread_t t;

	nonblocking(fd, true);
	CHECK(connect_to(fd, port_of(p.l)) == -1 && errno == EINPROGRESS);
	while (poll_one(p.l, POLLIN, 1) == 0)
		poll_one(fd, POLLOUT, 0);
	t = start(look_on, &p.l);
	while (atomic_load(&onlooker) == 0)
		usleep(1000);
	await_call(atomic_load(&onlooker), SYS_poll);
	first = raccept(p.l, NULL, NULL);
	CHECK(first >= 0);
	join(&p);
	CHECK(pthread_cancel(t) == 0 && pthread_join(t, NULL) == 0);
	CHECK(rclose(fd) == 0 && rclose(first) == 0);
	end(&p);
}

static void *crowd_client(void *arg)
{
	const int *fd = arg;
	char c = 0;

	for (int i = 0; i < CROWD_ROUNDS; i++) {
		CHECK(rsend(*fd, &c, 1, 0) == 1 && rrecv(*fd, &c, 1, 0) == 1 && c == (char)i);
		c++;
	}
	CHECK(rsend(*fd, &c, 1, 0) == 1); /* wakes the servers at the end */
	crowd_left--;
	CHECK(rsend(*fd, &c, 1, 0) == 1);
	return NULL;
}

static void crowded(void)
{
	struct pair p = { .l = listener(8) };
	int fds[CROWD];
	pthread_t t[CROWD + 2];

	for (int i = 0; i < CROWD; i++) {
		join(&p);
		fds[i] = p.a;
		crowd[i] = (struct pollfd){ .fd = p.b, .events = POLLIN };
	}
	crowd_left = CROWD;
	for (int i = 0; i < CROWD + 2; i++)
		t[i] = i < CROWD ? start(crowd_client, &fds[i]) : start(crowd_server, NULL);
	for (int i = 0; i < CROWD + 2; i++)
		finish(t[i]);
	for (int i = 0; i < CROWD; i++)
		CHECK(rclose(fds[i]) == 0 && rclose(crowd[i].fd) == 0);
	CHECK(rclose(p.l) == 0);
}

/* rpoll and rselect take descriptors of all kinds. */
static void polled(void)
{
	struct pair p = pair();
	int pipes[2], socks[2], n;
	struct pollfd fds[7];
	fd_set r, w;
	struct timeval tv = { .tv_sec = 20 };
	char c;

	CHECK(pipe2(pipes, O_CLOEXEC) == 0 && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, socks) == 0);
	fds[0] = (struct pollfd){ .fd = -1, .events = POLLIN, .revents = 5 };
	fds[1] = (struct pollfd){ .fd = pipes[0], .events = POLLIN };
	fds[2] = (struct pollfd){ .fd = p.a, .events = POLLIN };
	fds[3] = (struct pollfd){ .fd = socks[0], .events = POLLIN };
	fds[4] = (struct pollfd){ .fd = p.b, .events = POLLIN };
	fds[5] = (struct pollfd){ .fd = p.l, .events = POLLIN };
	fds[6] = (struct pollfd){ .fd = p.a, .events = POLLIN };
	CHECK(rpoll(fds, 7, 10) == 0 && fds[0].revents == 0);
	CHECK(write(pipes[1], "x", 1) == 1 && rpoll(fds, 7, -1) == 1 && fds[1].revents == POLLIN);
	CHECK(read(pipes[0], &c, 1) == 1 && write(socks[1], "x", 1) == 1);
	CHECK(rpoll(fds, 7, -1) == 1 && fds[3].revents == POLLIN);
	CHECK(read(socks[0], &c, 1) == 1 && rsend(p.b, "x", 1, 0) == 1);
	CHECK(rpoll(&fds[2], 1, -1) == 1); /* The byte may arrive between the looks at two entries. */
	CHECK(rpoll(fds, 7, -1) == 2 && fds[2].revents == POLLIN && fds[6].revents == POLLIN && fds[4].revents == 0);
	CHECK(rpoll(fds, 2, 10) == 0);
	FD_ZERO(&r);
	FD_ZERO(&w);
	FD_SET(p.a, &r);
	FD_SET(pipes[0], &r);
	FD_SET(p.b, &r);
	FD_SET(p.b, &w);
	FD_SET(pipes[1], &w);
	n = rselect(FD_SETSIZE, &r, &w, NULL, &tv);
	CHECK(n == 3 && FD_ISSET(p.a, &r) && !FD_ISSET(p.b, &r) && !FD_ISSET(pipes[0], &r));
	CHECK(FD_ISSET(p.b, &w) && FD_ISSET(pipes[1], &w));
	CHECK(rrecv(p.a, &c, 1, 0) == 1);
	FD_ZERO(&r);
	FD_SET(p.a, &r);
	tv = (struct timeval){ .tv_usec = 1000 };
	CHECK(rselect(p.a + 1, &r, NULL, NULL, &tv) == 0 && !FD_ISSET(p.a, &r));
	FD_SET(999, &r);
	FD_SET(p.a, &r);
	CHECK(rselect(1000, &r, NULL, NULL, NULL) == -1 && errno == EBADF && FD_ISSET(p.a, &r) && FD_ISSET(999, &r));
	CHECK(rpoll(NULL, 0, 10) == 0);
	fds[0].fd = 999;
	CHECK(rpoll(fds, 7, -1) == 1 && fds[0].revents == POLLNVAL);
	close(pipes[1]);
	fds[0].fd = -1;
	CHECK(rpoll(fds, 7, -1) == 1 && fds[1].revents == POLLHUP);
	close(pipes[0]);
	close(socks[0]);
	close(socks[1]);
	end(&p);
}

/* As many sockets as the limit of descriptors permits are polled. */
static void many(void)
{
	enum { MOST = 400, ALL = 1024 - 200 }; /* a listener has two descriptors */
	struct rlimit limit = { .rlim_cur = 1024, .rlim_max = 1024 };
	static struct pollfd fds[ALL];
	int n = 0, l, pipes[2];

	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	l = listener(8);
	while (n < MOST && (fds[n].fd = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0)
		fds[n++].events = POLLIN;
	CHECK(n > 300 && (n == MOST || errno == EMFILE));
	for (int i = 0; i < n; i++)
		fds[i].events = POLLIN;
	CHECK(rpoll(fds, (nfds_t)n, 10) == n); /* POLLHUP */
	fds[0].fd = l;
	for (int i = 1; i < n; i++)
		CHECK(rclose(fds[i].fd) == 0);
	for (int i = 1; i < n; i++)
		fds[i].fd = -1;
	CHECK(rpoll(fds, (nfds_t)n, 10) == 0);
	for (int i = 1; i < 200; i++)
		fds[i].fd = listener(1);
	CHECK(pipe2(pipes, O_CLOEXEC) == 0);
	for (int i = 200; i < ALL; i++)
		fds[i] = (struct pollfd){ .fd = pipes[0], .events = POLLIN };
	CHECK(rpoll(fds, ALL, 10) == 0);
	CHECK(write(pipes[1], "x", 1) == 1 && rpoll(fds, ALL, -1) == ALL - 200 && fds[199].revents == 0 && fds[200].revents == POLLIN);
}

/* At the limit of descriptors raccept fails, and takes the connection later. */
static void limited(void)
{
	struct rlimit limit, was;
	struct pair p = { .l = listener(8) };
	int port = port_of(p.l), dead;
	char c;

	CHECK(getrlimit(RLIMIT_NOFILE, &was) == 0);
	p.a = new_socket();
	nonblocking(p.a, true);
	CHECK(connect_to(p.a, port) == -1 && errno == EINPROGRESS);
	while (poll_one(p.l, POLLIN, 1) == 0)
		poll_one(p.a, POLLOUT, 0);
	for (int room = 0; room < 6; room++) {
		dead = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
		CHECK(dead >= 0);
		limit = (struct rlimit){ .rlim_cur = (rlim_t)(dead + room), .rlim_max = was.rlim_max };
		close(dead);
		CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
		CHECK(raccept(p.l, NULL, NULL) == -1 && errno == EMFILE);
		CHECK(setrlimit(RLIMIT_NOFILE, &was) == 0);
		CHECK(poll_one(p.l, POLLIN, 0) == POLLIN);
	}
	nonblocking(p.a, false);
	p.b = raccept(p.l, NULL, NULL);
	CHECK(p.b >= 0);
	CHECK(rsend(p.b, "x", 1, 0) == 1 && poll_one(p.a, POLLOUT, -1) == POLLOUT && rrecv(p.a, &c, 1, 0) == 1);
	end(&p);
}

static long resident(void)
{
	long pages = 0, all;
	FILE *f = fopen("/proc/self/statm", "re");

	CHECK(f && fscanf(f, "%ld %ld", &all, &pages) == 2);
	fclose(f);
	return pages;
}

/* Hundreds of connections leave nothing behind. */
static void hundreds(void)
{
	struct pair p = { .l = listener(8) };
	enum { ROUNDS = 150 };
	int files = 0;
	long pages = 0;

	for (int i = 0; i < ROUNDS; i++) {
		join(&p);
		if (i % 3 == 0)
			CHECK(rsend(p.a, "hello", 5, 0) == 5);
		if (i % 5 == 0)
			CHECK(rshutdown(p.b, SHUT_WR) == 0);
		CHECK(rclose(i & 1 ? p.a : p.b) == 0);
		CHECK(rclose(i & 1 ? p.b : p.a) == 0);
		if (i == ROUNDS / 2) {
			files = open_files();
			pages = resident();
		}
	}
	printf("files %d then %d, resident pages %ld then %ld\n", files, open_files(), pages, resident());
	CHECK(open_files() <= files && resident() < pages + ROUNDS / 3);
	CHECK(rclose(p.l) == 0);
}

static void iomaps(void)
{
	static uint8_t area[2][100000];
	uint8_t buf[50000];
	struct pair p;
	off_t at;
	char c;

	options.iomaps = 4;
	p = pair();
	CHECK(riowrite(p.a, buf, 10, 77, 0) == 0); /* not mapped */
	CHECK(riomap(p.b, area[0], 100000, PROT_READ, 0, -1) == -1 && errno == EINVAL);
	CHECK(riomap(p.b, area[0], 0, PROT_WRITE, 0, -1) == -1 && errno == EINVAL);
	for (int round = 0; round < 20; round++) {
		at = riomap(p.b, area[0], 100000, PROT_WRITE, 0, -1);
		CHECK(at == (off_t)(uintptr_t)area[0]);
		CHECK(riomap(p.b, area[1], 100000, PROT_WRITE, 0, 5000) == 5000);
		CHECK(rsend(p.b, "x", 1, 0) == 1 && rrecv(p.a, &c, 1, 0) == 1);
		fill(buf, sizeof(buf), 0, (uint64_t)round);
		CHECK(riowrite(p.a, buf, sizeof(buf), at + 10, 0) == sizeof(buf));
		CHECK(riowrite(p.a, buf, sizeof(buf), 105000 - 100, 0) == 100);
		CHECK(riowrite(p.a, buf, 10, 105000, 0) == 0 && riowrite(p.a, buf, 10, 4999, 0) == 0);
		CHECK(rsend(p.a, "y", 1, 0) == 1 && rrecv(p.b, &c, 1, 0) == 1 && c == 'y');
		verify(area[0] + 10, sizeof(buf), 0, (uint64_t)round);
		verify(area[1] + 100000 - 100, 100, 0, (uint64_t)round);
		CHECK(riounmap(p.b, area[0], 100000) == 0 && riounmap(p.b, area[0], 100000) == -1 && errno == EINVAL);
		CHECK(rsend(p.b, "x", 1, 0) == 1 && rrecv(p.a, &c, 1, 0) == 1);
		CHECK(riowrite(p.a, buf, 10, at, 0) == 0 && riounmap(p.b, area[1], 100000) == 0);
	}
	for (int i = 0; i < 2000; i++) { /* more than there are credits */
		CHECK(riomap(p.b, area[0], 10, PROT_WRITE, 0, i) == i);
		CHECK(rsend(p.b, "x", 1, 0) == 1 && rrecv(p.a, &c, 1, 0) == 1 && riounmap(p.b, area[0], 10) == 0);
	}
	CHECK(riomap(p.b, area[0], 10, PROT_WRITE, 0, 1) == 1 && riomap(p.b, area[0] + 10, 10, PROT_WRITE, 0, 2) == 2);
	CHECK(riomap(p.b, area[0] + 20, 10, PROT_WRITE, 0, 3) == 3);
	CHECK(riomap(p.b, area[0] + 30, 10, PROT_WRITE, 0, 4) == 4);
	CHECK(riomap(p.b, area[0] + 40, 10, PROT_WRITE, 0, 5) == -1 && errno == ENOMEM);
	end(&p);
}

static void *canceled_call(void *arg)
{
	struct waiter *w = arg;
	struct pollfd p = { .fd = w->fd, .events = POLLIN };
	static char big[1 << 20];

	w->begun = true;
	if (w->call == 0)
		rrecv(w->fd, big, 1, 0);
	else if (w->call == 1)
		while (rsend(w->fd, big, sizeof(big), 0) > 0)
			;
	else if (w->call == 2)
		raccept(w->fd, NULL, NULL);
	else
		rpoll(&p, 1, -1);
	CHECK(!"not canceled");
	return NULL;
}

/* A thread that waits can be canceled. The socket stays usable. */
static void canceled(void)
{
	for (int i = 0; i < 8; i++) {
		struct pair p = pair();
		struct waiter w = { .call = i % 4, .fd = i % 4 == 2 ? p.l : p.a };
		pthread_t t = start(canceled_call, &w);
		struct timespec soon;
		void *result;
		char c;

		while (!w.begun)
			;
		if (i >= 4)
			usleep(50000);
		CHECK(pthread_cancel(t) == 0 && clock_gettime(CLOCK_REALTIME, &soon) == 0);
		soon.tv_sec += 5;
		CHECK((errno = pthread_timedjoin_np(t, &result, &soon)) == 0 && result == PTHREAD_CANCELED);
		if (w.call == 2) {
			CHECK(rclose(p.a) == 0 && rclose(p.b) == 0);
			join(&p);
		}
		CHECK(rsend(p.b, "x", 1, 0) == 1 && rrecv(p.a, &c, 1, 0) == 1);
		end(&p);
	}
}

/* A child of a fork may close the sockets; the parent's go on. It can also make its own. */
static void forked(void)
{
	struct pair p = pair();
	struct stream s = { p.a, 20000000, 100000, 4, true }, in = { p.b, 20000000, 30000, 4, true };
	pthread_t t[2] = { start(send_stream, &s), start(recv_stream, &in) };
	int fresh = new_socket();
	char c;

	for (int i = 0; i < 4; i++) {
		pid_t child = fork();
		int status;

		CHECK(child >= 0);
		if (child == 0) {
			alarm(20);
			if (i == 0)
				_exit(0);
			if (i == 1)
				execl("/bin/true", "true", NULL);
			CHECK(rrecv(p.a, &c, 1, 0) == -1);
			CHECK(rsend(p.b, &c, 1, 0) == -1);
			CHECK(connect_to(fresh, free_port()) == -1 && errno == ECONNREFUSED && rclose(fresh) == 0);
			CHECK(poll_one(p.a, POLLIN, 0) != 0);
			CHECK(rclose(p.a) == 0 && rclose(p.b) == 0 && rclose(p.l) == 0);
			if (i == 3) {
				struct pair own = pair();

				exchange(&own, 100000, 5000, 5000);
				end(&own);
			}
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	}
	finish(t[0]);
	finish(t[1]);
	end(&p);
	p = pair();
	CHECK(connect_to(fresh, free_port()) == -1 && errno == ECONNREFUSED && rclose(fresh) == 0);
	exchange(&p, 100000, 5000, 5000);
	end(&p);
}

/* child_connects makes a child that connects, sends n bytes and then waits. */
static pid_t child_connects(int port, size_t n)
{
	pid_t child = fork_idle();
	struct stream s = { .n = n, .piece = n, .seed = 6 };

	CHECK(child >= 0);
	if (child > 0)
		return child;
	alarm(60);
	s.fd = new_socket();
	CHECK(connect_to(s.fd, port) == 0);
	send_stream(&s);
	for (;;)
		pause();
}

/* The end of a peer that is killed is no end of file. */
static void killed(void)
{
	int l = listener(8);
	uint8_t buf[3000];

	for (int i = 0; i < 4; i++) {
		pid_t child = child_connects(port_of(l), sizeof(buf));
		int fd = raccept(l, NULL, NULL);

		CHECK(fd >= 0);
		if (i & 1)
			CHECK(rrecv(fd, buf, sizeof(buf), MSG_WAITALL) == sizeof(buf));
		else
			CHECK(poll_one(fd, POLLIN, -1) == POLLIN);
		if (i & 2)
			CHECK(rshutdown(fd, SHUT_WR) == 0);
		usleep(100000);
		CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
		if (!(i & 1))
			CHECK(rrecv(fd, buf, sizeof(buf), MSG_WAITALL) == sizeof(buf));
		verify(buf, sizeof(buf), 0, 6);
		CHECK(poll_one(fd, POLLIN, -1) & POLLERR);
		CHECK(rrecv(fd, buf, 1, 0) == -1 && errno == ECONNRESET);
		CHECK(rsend(fd, buf, 1, MSG_NOSIGNAL) == -1);
		CHECK(rclose(fd) == 0);
	}
	CHECK(rclose(l) == 0);
}

static void leave(int sig)
{
	(void)sig;
	exit(0);
}

/* A program may end by exit in a signal handler, in the middle of a call. */
static void exited(void)
{
	static uint8_t buf[100000];
	int l = listener(8);

	for (int i = 0; i < 20; i++) {
		pid_t child = fork_idle();
		int fd, status;

		CHECK(child >= 0);
		if (child == 0) {
			alarm(10);
			signal(SIGUSR1, leave);
			fd = new_socket();
			CHECK(connect_to(fd, port_of(l)) == 0);
			while (rsend(fd, buf, 100 << i % 8, 0) > 0)
				;
			_exit(1);
		}
		fd = raccept(l, NULL, NULL);
		CHECK(fd >= 0);
		for (double begin = now(); now() - begin < 0.05;)
			CHECK(rrecv(fd, buf, sizeof(buf), 0) > 0);
		CHECK(kill(child, SIGUSR1) == 0);
		while (rrecv(fd, buf, sizeof(buf), 0) > 0)
			;
		CHECK(rclose(fd) == 0);
		CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	}
	CHECK(rclose(l) == 0);
}

/* What a program has sent before it ends without rclose arrives. */
static void unclosed(void)
{
	int l = listener(8);

	for (int i = 0; i < 10; i++) {
		pid_t child = fork_idle();
		struct stream s = { .n = 1000000, .piece = 1000, .seed = 8, .last = true };
		int status;

		CHECK(child >= 0);
		if (child == 0) {
			alarm(20);
			s.fd = new_socket();
			s.last = i & 1;
			CHECK(connect_to(s.fd, port_of(l)) == 0);
			send_stream(&s);
			exit(0);
		}
		s.fd = raccept(l, NULL, NULL);
		CHECK(s.fd >= 0);
		recv_stream(&s);
		CHECK(rclose(s.fd) == 0);
		CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	}
	CHECK(rclose(l) == 0);
}

/* A request whose peer has gone does not stop the listener: its socket is reset. */
static void gone(void)
{
	struct pair p = { .l = listener(8) };
	int fd = new_socket();
	double begin;
	char c;

	nonblocking(fd, true);
	CHECK(connect_to(fd, port_of(p.l)) == -1 && errno == EINPROGRESS);
	while (poll_one(p.l, POLLIN, 1) == 0)
		poll_one(fd, POLLOUT, 0);
	begin = now();
	CHECK(rclose(fd) == 0);
	CHECK(now() - begin < 2);
	usleep(100000);
	CHECK(poll_one(p.l, POLLIN, 0) == POLLIN);
	fd = raccept(p.l, NULL, NULL);
	CHECK(fd >= 0 && poll_one(fd, POLLIN, -1) & POLLERR);
	CHECK(rrecv(fd, &c, 1, 0) == -1 && errno == ECONNRESET && rsend(fd, &c, 1, 0) == -1);
	CHECK(rclose(fd) == 0);
	join(&p);
	end(&p);
}

/* The connections of a daemon end with it. The test ends it when this program says so. */
static void restarted(void)
{
	struct pair p = pair();
	char c;
	int l = new_socket(), fd;
	struct sockaddr_storage a;
	socklen_t len = resolve(&a, 0);

	memset(&((struct sockaddr_in *)&a)->sin_addr, 0, sizeof(struct in_addr));
	CHECK(rbind(l, (struct sockaddr *)&a, len) == 0 && rlisten(l, 8) == 0);
	CHECK(rsend(p.a, "x", 1, 0) == 1 && rrecv(p.b, &c, 1, 0) == 1);
	printf("ready\n");
	fflush(stdout);
	CHECK(rrecv(p.a, &c, 1, 0) == -1);
	printf("rrecv: %m\n");
	CHECK(poll_one(p.b, POLLIN, -1) & POLLERR);
	CHECK(rrecv(p.b, &c, 1, 0) == -1 && rsend(p.b, &c, 1, 0) == -1);
	fd = raccept(p.l, NULL, NULL);
	CHECK(fd == -1 && errno == ENETDOWN);
	end(&p);
	p.l = l;
	for (;;) {
		p.a = rsocket(AF_INET, SOCK_STREAM, 0);
		if (p.a >= 0) {
			nonblocking(p.a, true);
			if (connect_to(p.a, port_of(l)) == -1 && errno == EINPROGRESS) {
				while (!(poll_one(l, POLLIN, 1) & POLLIN) && poll_one(p.a, POLLOUT, 1) == 0)
					;
				if (poll_one(l, POLLIN, 0) & POLLIN)
					break;
			}
			rclose(p.a);
		}
		usleep(10000);
	}
	p.b = raccept(l, NULL, NULL);
	CHECK(p.b >= 0);
	nonblocking(p.a, false);
	exchange(&p, 100000, 5000, 5000);
	end(&p);
}

/* The protocol of rsockets, for peers that do not keep to it. */
struct sge {
	uint64_t addr;
	uint32_t key, length;
};

struct hello {
	uint8_t version, flags;
	uint16_t credits;
	uint8_t reserved[3], iomaps;
	struct sge offers, buffer;
};

struct raw {
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	struct hello theirs;
	uint64_t *memory; /* the table and the buffer, of 1 << 16 bytes */
};

static void raw_queues(struct raw *r)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 2000, 2000, 1, 1, 64 } };
	struct ibv_recv_wr wr = { 0 }, *bad;

	CHECK(rdma_create_qp(r->id, NULL, &init) == 0);
	r->memory = calloc(1, 1 << 16);
	r->mr = ibv_reg_mr(r->id->pd, r->memory, 1 << 16, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(r->mr);
	for (int i = 0; i < 1000; i++) {
		struct ibv_sge at = { (uintptr_t)r->memory + (1 << 16) - 8, 4, r->mr->lkey };

		wr.sg_list = &at;
		wr.num_sge = 1;
		CHECK(ibv_post_recv(r->id->qp, &wr, &bad) == 0);
	}
}

static struct hello raw_hello(const struct raw *r)
{
	struct sge at = { htobe64((uintptr_t)r->memory), htobe32(r->mr->rkey), htobe32(2) }, buffer = at;

	buffer.addr = htobe64((uintptr_t)r->memory + 4096);
	buffer.length = htobe32(8192);
	return (struct hello){ .version = 1, .flags = 2, .credits = htobe16(384), .offers = at, .buffer = buffer };
}

static void raw_end(struct raw *r)
{
	rdma_disconnect(r->id);
	rdma_destroy_qp(r->id);
	ibv_dereg_mr(r->mr);
	rdma_destroy_id(r->id);
	free(r->memory);
}

/* raw_call connects to a listener, and returns what its raccept does, or -1 if the request is rejected. */
static int raw_call(struct raw *r, int l, void (*change)(struct hello *h), size_t len)
{
	struct sockaddr_storage a;
	struct hello h;
	struct rdma_conn_param p = { .private_data = &h, .private_data_len = (uint8_t)len };
	int fd = l;
	pthread_t t;

	resolve(&a, port_of(l));
	CHECK(rdma_create_id(NULL, &r->id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(r->id, NULL, (struct sockaddr *)&a, 2000) == 0 && rdma_resolve_route(r->id, 2000) == 0);
	raw_queues(r);
	h = raw_hello(r);
	if (change)
		change(&h);
	t = start(accepter, &fd);
	if (rdma_connect(r->id, &p) < 0) {
		CHECK(errno == ECONNREFUSED);
		CHECK(pthread_cancel(t) == 0 && pthread_join(t, NULL) == 0);
		return -1;
	}
	finish(t);
	CHECK(fd >= 0 && r->id->event->param.conn.private_data_len >= sizeof(r->theirs));
	memcpy(&r->theirs, r->id->event->param.conn.private_data, sizeof(r->theirs));
	CHECK(r->theirs.version == 1 && be32toh(r->theirs.offers.length) >= 2 && r->theirs.credits);
	return fd;
}

static int raw_post(const struct raw *r, enum ibv_wr_opcode op, const void *data, uint32_t len, uint64_t to,
		    uint32_t key)
{
	struct ibv_sge at = { (uintptr_t)data, len, 0 };
	struct ibv_send_wr wr = {
		.sg_list = &at, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
	}, *bad;
	struct ibv_wc wc;
	int n;

	wr.wr.rdma.remote_addr = to;
	wr.wr.rdma.rkey = key;
	if (len > 64) {
		memcpy(r->memory, data, len);
		at.addr = (uintptr_t)r->memory;
		at.lkey = r->mr->lkey;
		wr.send_flags = IBV_SEND_SIGNALED;
	}
	if (ibv_post_send(r->id->qp, &wr, &bad) != 0)
		return -1;
	while ((n = ibv_poll_cq(r->id->send_cq, 1, &wc)) == 0)
		;
	CHECK(n == 1);
	return wc.status == IBV_WC_SUCCESS ? 0 : -1;
}

static int raw_send(const struct raw *r, uint32_t msg)
{
	return raw_post(r, IBV_WR_SEND, &msg, sizeof(msg), 0, 0);
}

/* raw_offer writes an entry of the peer's table. */
static void raw_offer(const struct raw *r, unsigned int index, struct sge offer)
{
	raw_post(r, IBV_WR_RDMA_WRITE, &offer, sizeof(offer), be64toh(r->theirs.offers.addr) + index * sizeof(offer),
		 be32toh(r->theirs.offers.key));
}

enum { DATA, CREDIT = 4, IOMAP = 6, CONTROL };
#define MSG(op, data) ((uint32_t)(op) << 29 | (data))

static void bad_version(struct hello *h)
{
	h->version = 2;
}

static void bad_order(struct hello *h)
{
	h->flags ^= 1;
}

static void no_table(struct hello *h)
{
	h->offers.length = 0;
}

static void huge_table(struct hello *h)
{
	h->offers.length = UINT32_MAX;
}

static void many_credits(struct hello *h)
{
	h->credits = UINT16_MAX;
}

static void no_buffer(struct hello *h)
{
	h->buffer.length = 0;
}

static void bad_buffer(struct hello *h)
{
	h->buffer.key ^= 0x12345678;
}

static void all_iomaps(struct hello *h)
{
	h->iomaps = UINT8_MAX;
}

/* fails checks that a connection ends with an error, and no end of file. */
static void fails(int fd, int line)
{
	struct timeval tv = { .tv_sec = 20 };
	char c;
	ssize_t n;

	CHECK(rsetsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)) == 0);
	while ((n = rrecv(fd, &c, 1, 0)) == 1)
		;
	if (n != -1 || errno == EAGAIN)
		printf("line %d: %zd\n", line, n);
	CHECK(n == -1 && errno != EAGAIN);
	CHECK(rsend(fd, &c, 1, 0) == -1);
}

static void hostile(void)
{
	static const char zeros[100000];
	static const int size = 131072;
	int l = listener(8), fd;
	struct pair p;
	struct raw r;
	char c;

	CHECK(rsetsockopt(l, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size)) == 0);
	/* Requests that are refused. */
	CHECK(raw_call(&r, l, bad_version, sizeof(struct hello)) == -1);
	raw_end(&r);
	CHECK(raw_call(&r, l, bad_order, sizeof(struct hello)) == -1);
	raw_end(&r);
	CHECK(raw_call(&r, l, no_table, sizeof(struct hello)) == -1);
	raw_end(&r);
	CHECK(raw_call(&r, l, NULL, sizeof(struct hello) - 1) == -1);
	raw_end(&r);
	CHECK(raw_call(&r, l, NULL, 0) == -1);
	raw_end(&r);
	/* Strange ones that are not, and peers that are silent, or cannot be written to. */
	fd = raw_call(&r, l, huge_table, sizeof(struct hello));
	CHECK(fd >= 0 && rsend(fd, "x", 1, 0) == 1 && riomap(fd, &c, 1, PROT_WRITE, 0, 0) == -1);
	raw_end(&r); /* in order, though without a message */
	CHECK(rrecv(fd, &c, 1, 0) == 0 && rclose(fd) == 0);
	fd = raw_call(&r, l, all_iomaps, sizeof(struct hello) + 20);
	CHECK(fd >= 0 && riomap(fd, &c, 1, PROT_WRITE, 0, 0) == 0);
	CHECK(rsend(fd, "x", 1, 0) == 1 && riowrite(fd, "x", 1, 0, 0) == 0);
	CHECK(rclose(fd) == 0);
	raw_end(&r);
	fd = raw_call(&r, l, bad_buffer, sizeof(struct hello));
	CHECK(fd >= 0 && rsend(fd, "x", 1, 0) == 1);
	fails(fd, __LINE__);
	CHECK(rclose(fd) == 0);
	raw_end(&r);
	fd = raw_call(&r, l, no_buffer, sizeof(struct hello));
	CHECK(fd >= 0 && rsend(fd, "x", 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
	for (int i = 0; i < 3; i++) { /* offers without room, or the same again */
		raw_offer(&r, 1, (struct sge){ 0, 0, 0 });
		CHECK(raw_send(&r, MSG(CREDIT, 384)) == 0);
	}
	raw_offer(&r, 1, (struct sge){ (uintptr_t)r.memory, r.mr->rkey, 1 << 20 });
	CHECK(raw_send(&r, MSG(CREDIT, 384)) == 0);
	CHECK(poll_one(fd, POLLOUT, -1) & POLLOUT);
	while (rsend(fd, zeros, sizeof(zeros), 0) > 0) /* until the end of the memory */
		;
	fails(fd, __LINE__);
	CHECK(rclose(fd) == 0);
	raw_end(&r);
	/* Credits. */
	fd = raw_call(&r, l, many_credits, sizeof(struct hello));
	CHECK(fd >= 0 && poll_one(fd, POLLOUT, 5000) == POLLOUT && rsend(fd, "x", 1, MSG_DONTWAIT) == 1);
	CHECK(raw_send(&r, MSG(CREDIT, 0)) == 0 && raw_send(&r, MSG(CREDIT, UINT16_MAX)) == 0);
	CHECK(rsend(fd, "x", 1, 0) == 1 && raw_send(&r, MSG(CREDIT, 0x1fffffff)) == 0 && rclose(fd) == 0);
	raw_end(&r);
	/* Data that were not offered. */
	for (int i = 0; i < 3; i++) {
		fd = raw_call(&r, l, NULL, sizeof(struct hello));
		CHECK(fd >= 0);
		raw_send(&r, MSG(DATA, i == 0 ? 0x1fffffff : i == 1 ? 131073 : 65537));
		if (i == 2)
			raw_send(&r, MSG(DATA, 65536));
		if (i > 1)
			for (ssize_t n = 0; n >= 0 && i == 1;)
				n = rrecv(fd, &c, 1, 0);
		fails(fd, __LINE__);
		CHECK(rclose(fd) == 0);
		raw_end(&r);
	}
	/* Messages of other lengths. */
	for (int i = 0; i < 4; i++) {
		fd = raw_call(&r, l, NULL, sizeof(struct hello));
		CHECK(fd >= 0);
		raw_post(&r, IBV_WR_SEND, zeros, i == 0 ? 0 : i == 1 ? 3 : i == 2 ? 5 : 100, 0, 0);
		fails(fd, __LINE__);
		CHECK(rclose(fd) == 0);
		raw_end(&r);
	}
	/* Unknown messages, and many. */
	fd = raw_call(&r, l, NULL, sizeof(struct hello));
	CHECK(fd >= 0);
	for (uint32_t i = 0; i < 2000; i++) {
		raw_send(&r, i & 1 ? MSG(CONTROL, 1 + 7 * i) : MSG(i % 6 == 4 ? 5 : i % 6, 0));
		if (i % 100 == 0) /* the peer has taken all before */
			CHECK(raw_send(&r, MSG(DATA, 1)) == 0 && rrecv(fd, &c, 1, 0) == 1);
	}
	CHECK(raw_send(&r, MSG(IOMAP, 0x1fffffff)) == 0);
	CHECK(raw_send(&r, MSG(CONTROL, 2)) == 0 && raw_send(&r, MSG(DATA, 5)) == 0);
	CHECK(poll_one(fd, POLLIN, -1) == POLLIN);
	CHECK(raw_send(&r, MSG(CONTROL, 0)) == 0 && raw_send(&r, MSG(CONTROL, 2)) == 0);
	CHECK(poll_one(fd, POLLIN, -1) & POLLIN);
	CHECK(rclose(fd) == 0);
	raw_end(&r);
	fd = raw_call(&r, l, NULL, sizeof(struct hello)); /* more than there is room for */
	CHECK(fd >= 0);
	for (uint32_t i = 0; i < 10000 && raw_send(&r, MSG(CONTROL, 1)) == 0; i++)
		;
	fails(fd, __LINE__);
	CHECK(rclose(fd) == 0);
	raw_end(&r);
	/* The listener goes on. */
	p = (struct pair){ .l = l };
	join(&p);
	exchange(&p, 100000, 5000, 5000);
	end(&p);
}

/* A server that does not speak the protocol. */
struct stranger {
	struct rdma_cm_id *listener;
	void (*change)(struct hello *h);
	uint8_t len;
};

static void *answer(void *arg)
{
	const struct stranger *s = arg;
	struct raw r;
	struct hello h;
	struct rdma_conn_param p = { .private_data = &h, .private_data_len = s->len };

	CHECK(rdma_get_request(s->listener, &r.id) == 0);
	raw_queues(&r);
	h = raw_hello(&r);
	if (s->change)
		s->change(&h);
	CHECK(rdma_accept(r.id, &p) == 0 || errno == ECONNRESET);
	usleep(100000);
	raw_end(&r);
	return NULL;
}

static void strange(void)
{
	static const struct {
		void (*change)(struct hello *h);
		uint8_t len;
	} answers[] = { { bad_version, 40 }, { bad_order, 40 }, { no_table, 40 }, { NULL, 39 }, { NULL, 0 } };
	struct sockaddr_storage a;
	struct stranger s;

	resolve(&a, 0);
	CHECK(rdma_create_id(NULL, &s.listener, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(s.listener, (struct sockaddr *)&a) == 0 && rdma_listen(s.listener, 8) == 0);
	for (size_t i = 0; i < sizeof(answers) / sizeof(answers[0]); i++) {
		int fd = new_socket(), l;
		struct pair p;
		pthread_t t;

		s.change = answers[i].change;
		s.len = answers[i].len;
		t = start(answer, &s);
		CHECK(connect_to(fd, ntohs(rdma_get_src_port(s.listener))) == -1 && errno == EPROTO);
		finish(t);
		l = listener(8);
		p = (struct pair){ .l = l };
		join(&p);
		CHECK(rclose(fd) == 0);
		end(&p);
	}
	CHECK(rdma_destroy_id(s.listener) == 0);
}

static void *send_later(void *fd)
{
	usleep(700000);
	CHECK(rsend(*(int *)fd, "x", 1, 0) == 1);
	return NULL;
}

static void *acceptor(void *l)
{
	int fd = raccept(*(int *)l, NULL, NULL);
	char c;

	CHECK(fd >= 0 && rrecv(fd, &c, 1, 0) == 1 && poll_one(fd, POLLRDHUP, 0) == 0 && rclose(fd) == 0);
	return NULL;
}

/* A connect that several threads wait for, and whose peer leaves. */
struct shared {
	int fd, port;
};

static void *shared_connect(void *arg)
{
	const struct shared *s = arg;

	CHECK(connect_to(s->fd, s->port) == -1 && (errno == ECONNREFUSED || errno == ECONNABORTED));
	return NULL;
}

/* What rsocket(7) leaves open is as with sockets of Linux's TCP. */
static void alike(void)
{
	static struct iovec many[IOV_MAX + 1];
	struct msghdr m = { .msg_iov = many, .msg_iovlen = IOV_MAX + 1 };
	struct pair p = pair();
	int l = listener(1), v6 = rsocket(AF_INET6, SOCK_STREAM, 0), v4 = rsocket(AF_INET, SOCK_STREAM, 0), other, on = 1, no = 0;
	struct sockaddr_in6 a6 = { .sin6_family = AF_INET6, .sin6_port = htons(1), .sin6_addr = IN6ADDR_LOOPBACK_INIT };
	struct sockaddr_in6 mapped = { .sin6_family = AF_INET6, .sin6_port = htons(1) };
	struct sockaddr_in a4 = { .sin_family = AF_INET, .sin_port = htons(1), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct timeval tv = { .tv_sec = 18446744073709552 }; /* in ms it is 2^64 + 384 */
	pthread_t t, waiters[4];
	struct shared s;
	socklen_t len;
	fd_set r;
	char c;

	/* Addresses are of the socket's family. */
	CHECK(v6 >= 0 && v4 >= 0);
	CHECK(rconnect(v4, (struct sockaddr *)&a6, sizeof(a6)) == -1 && errno == EAFNOSUPPORT);
	CHECK(rconnect(v6, (struct sockaddr *)&a4, sizeof(a4)) == -1 && errno == EAFNOSUPPORT);
	CHECK(rbind(v4, (struct sockaddr *)&a6, sizeof(a6)) == -1 && errno == EAFNOSUPPORT);
	CHECK(rconnect(v4, (struct sockaddr *)&a4, 1) == -1 && errno == EINVAL);
	CHECK(rconnect(v4, (struct sockaddr *)&a4, sizeof(a4)) == -1 && errno == ECONNREFUSED);
	CHECK(rsetsockopt(l, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0);

	/* A socket that was refused is as before: it may be bound, and listen. */
	CHECK(poll_one(v4, POLLIN | POLLOUT, 0) == (POLLOUT | POLLHUP) && rrecv(v4, &c, 1, 0) == -1 && errno == ENOTCONN);
	len = sizeof(a4);
	a4.sin_port = 0;
	CHECK(inet_pton(AF_INET, address, &a4.sin_addr) == 1 && rbind(v4, (struct sockaddr *)&a4, len) == 0 && rlisten(v4, 1) == 0);

	/* A listener that is shut down refuses peers, those too that wait, and may listen again. */
	nonblocking(other = new_socket(), true);
	CHECK(connect_to(other, port_of(v4)) == -1 && errno == EINPROGRESS);
	while (poll_one(v4, POLLIN, 1) == 0)
		poll_one(other, POLLOUT, 0);
	CHECK(rshutdown(other, SHUT_WR) == 0 && rshutdown(v4, SHUT_RD) == 0 && poll_one(v4, POLLIN | POLLOUT, 0) == (POLLOUT | POLLHUP));
	CHECK(poll_one(other, POLLOUT, -1) & POLLERR && error_of(other) == ECONNREFUSED);
	nonblocking(other, false);
	CHECK(connect_to(other, port_of(v4)) == -1 && errno == ECONNREFUSED && rlisten(v4, 1) == 0);
	t = start(acceptor, &v4);
	CHECK(connect_to(other, port_of(v4)) == 0 && rsend(other, "x", 1, 0) == 1);
	finish(t);
	CHECK(rclose(other) == 0);

	/* No thread that waits for a connection has one if there is none. */
	s = (struct shared){ new_socket(), port_of(v4) };
	for (int i = 0; i < 4; i++)
		waiters[i] = start(shared_connect, &s);
	CHECK(poll_one(v4, POLLIN, -1) == POLLIN && rshutdown(v4, SHUT_RD) == 0);
	for (int i = 0; i < 4; i++)
		finish(waiters[i]);
	CHECK(rclose(s.fd) == 0);

	/* A socket that was refused is bound to its address still, and connects from no other. */
	CHECK(rclose(v4) == 0 && (v4 = new_socket()) >= 0);
	CHECK(rbind(v4, (struct sockaddr *)&a4, len) == 0 && rgetsockname(v4, (struct sockaddr *)&a4, &len) == 0);
	CHECK(connect_to(v4, 1) == -1 && errno == ECONNREFUSED);
	other = new_socket();
	CHECK(rbind(other, (struct sockaddr *)&a4, len) == -1 && errno == EADDRINUSE);
	nonblocking(v4, true);
	while (connect_to(v4, 1) == -1 && errno == ECONNREFUSED) /* at once */
		;
	CHECK(errno == EINPROGRESS && poll_one(v4, POLLOUT, -1) & POLLERR);
	CHECK(rbind(other, (struct sockaddr *)&a4, len) == 0 && error_of(v4) == ECONNREFUSED);
	CHECK(rrecv(v4, &c, 1, 0) == -1 && errno == ENOTCONN); /* though it cannot have its port now */
	nonblocking(v4, false);
	CHECK(connect_to(v4, port_of(l)) == -1 && errno == EADDRINUSE && rlisten(v4, 1) == -1 && errno == EADDRINUSE && rclose(other) == 0);
	t = start(acceptor, &l);
	CHECK(connect_to(v4, port_of(l)) == 0 && port_of(v4) == ntohs(a4.sin_port) && rsend(v4, "x", 1, 0) == 1);
	finish(t);
	CHECK(rclose(v4) == 0);
	a4.sin_port = 0;
	CHECK(rbind(v4 = new_socket(), (struct sockaddr *)&a4, len) == 0 && rgetsockname(v4, (struct sockaddr *)&a4, &len) == 0 && rclose(v4) == 0);

	/* One for IPv6 alone takes no IPv4 addresses. Whether it is that can change until it is connected, or bound. */
	inet_pton(AF_INET6, "::ffff:127.0.0.1", &mapped.sin6_addr);
	CHECK(rsetsockopt(v6, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on)) == 0);
	CHECK(rconnect(v6, (struct sockaddr *)&mapped, sizeof(mapped)) == -1 && errno == ENETUNREACH);
	CHECK(rbind(v6, (struct sockaddr *)&mapped, sizeof(mapped)) == -1 && errno == EINVAL);
	CHECK(rconnect(v6, (struct sockaddr *)&a6, sizeof(a6)) == -1 && errno == ECONNREFUSED);
	CHECK(rsetsockopt(v6, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no)) == 0);
	CHECK(rconnect(v6, (struct sockaddr *)&mapped, sizeof(mapped)) == -1 && errno == ECONNREFUSED);

	/* Two sockets may be bound to one port if both say so before. */
	v4 = new_socket();
	other = new_socket();
	CHECK(rsetsockopt(v4, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 && rsetsockopt(other, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0);
	CHECK(rbind(v4, (struct sockaddr *)&a4, len) == 0 && rbind(other, (struct sockaddr *)&a4, len) == 0 && rclose(other) == 0);

	/* Vectors have a limit. */
	CHECK(rreadv(p.a, many, IOV_MAX + 1) == -1 && errno == EINVAL && rwritev(p.a, many, IOV_MAX + 1) == -1 && errno == EINVAL);
	CHECK(rsendmsg(p.a, &m, 0) == -1 && errno == EMSGSIZE && rrecvmsg(p.a, &m, 0) == -1 && errno == EMSGSIZE);
	CHECK(rreadv(p.a, many, IOV_MAX) == 0 && rwritev(p.a, many, IOV_MAX) == 0);

	/* A time may be long, zero or negative. */
	CHECK(rsetsockopt(p.a, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)) == 0);
	t = start(send_later, &p.b);
	CHECK(rrecv(p.a, &c, 1, 0) == 1);
	finish(t);
	FD_ZERO(&r);
	FD_SET(p.a, &r);
	t = start(send_later, &p.b);
	CHECK(rselect(p.a + 1, &r, NULL, NULL, &tv) == 1 && rrecv(p.a, &c, 1, 0) == 1);
	finish(t);
	len = sizeof(tv);
	tv = (struct timeval){ .tv_usec = -1 };
	CHECK(rselect(p.a + 1, &r, NULL, NULL, &tv) == -1 && errno == EINVAL);
	CHECK(rsetsockopt(p.a, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)) == -1 && errno == EDOM);
	tv = (struct timeval){ .tv_sec = -1 };
	CHECK(rselect(p.a + 1, &r, NULL, NULL, &tv) == -1 && errno == EINVAL);
	CHECK(rsetsockopt(p.a, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)) == 0 && rrecv(p.a, &c, 1, 0) == -1 && errno == EAGAIN);
	tv = (struct timeval){ .tv_usec = 2000000 };
	CHECK(rselect(p.a + 1, &r, NULL, NULL, &tv) == 0);
	tv = (struct timeval){ .tv_sec = 0 };
	CHECK(rsetsockopt(p.a, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)) == 0);
	t = start(send_later, &p.b);
	CHECK(rrecv(p.a, &c, 1, 0) == 1);
	finish(t);
	CHECK(rgetsockopt(p.a, SOL_SOCKET, SO_RCVTIMEO, &tv, &len) == 0 && tv.tv_sec == 0 && tv.tv_usec == 0);
	CHECK(rclose(l) == 0 && rclose(v4) == 0 && rclose(v6) == 0);
	end(&p);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} modes[] = {
		{ "refused", refused }, { "looped", looped }, { "interrupted", interrupted }, { "closed", closed },
		{ "half", half }, { "errors", errors }, { "woken", woken }, { "flags", flags }, { "sizes", sizes },
		{ "bulk", bulk }, { "threads", threads }, { "crowded", crowded }, { "polled", polled },
		{ "many", many }, { "limited", limited }, { "hundreds", hundreds }, { "iomaps", iomaps }, { "canceled", canceled },
		{ "killed", killed }, { "attended", attended }, { "forked", forked }, { "exited", exited }, { "unclosed", unclosed },
		{ "gone", gone }, { "restarted", restarted }, { "hostile", hostile },
		{ "strange", strange }, { "alike", alike },
	};

	CHECK(argc == 3);
	address = argv[2];
	alarm(120);
	for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++)
		if (strcmp(argv[1], modes[i].name) == 0) {
			modes[i].run();
			return 0;
		}
	printf("no mode %s\n", argv[1]);
	return 1;
}
