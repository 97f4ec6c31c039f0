/* The life of rsockets: making, binding, listening, accepting, connecting, closing. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "rs.h"

enum { RESOLVE_MS = 2000, CLOSE_MS = 10000 };

/* The sockets by their descriptors. */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static struct rs **table;
static int table_size;

static int insert(struct rs *rs)
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

/* rs_free leaves errno as it is: a call may have failed before it. */
static void rs_free(struct rs *rs)
{
	int err = errno;

	rs_close(rs);
	if (rs->request)
		rdma_destroy_id(rs->request);
	if (rs->id)
		rdma_destroy_id(rs->id);
	if (rs->channel)
		rdma_destroy_event_channel(rs->channel);
	if (rs->fd >= 0)
		close(rs->fd);
	pthread_mutex_destroy(&rs->lock);
	free(rs);
	errno = err;
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

/* own_eventfd makes the descriptor of a socket one that the parent does not share. */
static void own_eventfd(const struct rs *rs)
{
	int flags = fcntl(rs->fd, F_GETFD), own = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

	if (own < 0)
		return;
	dup3(own, rs->fd, flags & FD_CLOEXEC ? O_CLOEXEC : 0);
	close(own);
}

/* The connections are the parent's. The child may close its descriptors, and connect new sockets. */
static void after_fork_child(void)
{
	pthread_mutex_init(&table_lock, NULL);
	for (int i = 0; i < table_size; i++) {
		struct rs *rs = table[i];

		if (!rs)
			continue;
		own_eventfd(rs);
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

/* rs_new makes a socket with the options of from, or with the defaults. It is not in the table. */
static struct rs *rs_new(const struct rs *from)
{
	struct rs *rs = calloc(1, sizeof(*rs));

	if (!rs)
		return NULL;
	pthread_mutex_init(&rs->lock, NULL);
	rs->refs = 1;
	if (from) {
		rs->family = from->family;
		rs->opt = from->opt;
	} else {
		rs_defaults(&rs->opt);
	}
	rs->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	rs->channel = rs->fd < 0 ? NULL : rdma_create_event_channel();
	if (rs->channel && fcntl(rs->channel->fd, F_SETFL, O_NONBLOCK) == 0)
		return rs;
	rs_free(rs);
	return NULL;
}

/* make_id makes the identifier of a socket that has none, with those options that it must know. */
static int make_id(struct rs *rs)
{
	int *reuse = &rs->opt.reuseaddr, *only = &rs->opt.v6only;
	int err = rdma_create_id(rs->channel, &rs->id, NULL, RDMA_PS_TCP);

	if (err == 0 && *reuse)
		err = rdma_set_option(rs->id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, reuse, sizeof(*reuse));
	if (err == 0 && *only)
		err = rdma_set_option(rs->id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, only, sizeof(*only));
	return err;
}

/* has_device reports whether there is a device. Without one librspreload takes the kernel's sockets. */
static bool has_device(void)
{
	struct ibv_context **list = rdma_get_devices(NULL);

	rdma_free_devices(list);
	return list != NULL;
}

int rsocket(int domain, int type, int protocol)
{
	struct rs *rs;
	int fd = -1;

	FORWARD(rsocket, domain, type, protocol);
	if (domain != AF_INET && domain != AF_INET6)
		return set_errno(EAFNOSUPPORT);
	if ((type & ~(SOCK_NONBLOCK | SOCK_CLOEXEC)) != SOCK_STREAM || (protocol != 0 && protocol != IPPROTO_TCP)) {
		iwv_log("rsocket: iWARP has no datagrams, so iwarpd supports only SOCK_STREAM");
		return set_errno(EPROTONOSUPPORT);
	}
	if (!has_device())
		return -1;
	rs_enter();
	rs = rs_new(NULL);
	if (rs) {
		rs->family = domain;
		rs->flags = type & SOCK_NONBLOCK ? O_NONBLOCK : 0;
		if (make_id(rs) == 0 && insert(rs) == 0)
			fd = rs->fd;
		else
			rs_free(rs);
	}
	rs_leave();
	return fd;
}

void rs_end(struct rs *rs, int err)
{
	if (rs->state == RS_OVER)
		return;
	rs->err = err;
	rs->state = RS_OVER;
}

/* keep_request keeps a connect request for raccept. It returns false if the request is to be rejected. */
static bool keep_request(struct rs *rs, const struct rdma_cm_event *e)
{
	if (!rs_check_hello(e->param.conn.private_data, e->param.conn.private_data_len)) {
		iwv_log("rsocket: rejected a connect request: the peer does not speak the protocol of rsockets");
		return false;
	}
	rs->request = e->id;
	memcpy(&rs->request_hello, e->param.conn.private_data, sizeof(rs->request_hello));
	return true;
}

/* begin_connect makes the connection, whose peer has been found. It returns 0 or an errno value. */
static int begin_connect(struct rs *rs)
{
	struct rs_hello h;
	struct rdma_conn_param p = { .private_data = &h, .private_data_len = sizeof(h) };

	if (rs_open(rs) < 0)
		return errno;
	rs_put_hello(rs, &h);
	return rdma_connect(rs->id, &p) < 0 ? errno : 0;
}

static int established(struct rs *rs, const struct rdma_cm_event *e)
{
	struct rs_hello h;

	if (rs->state == RS_CONNECTING) {
		if (!rs_check_hello(e->param.conn.private_data, e->param.conn.private_data_len))
			return EPROTO;
		memcpy(&h, e->param.conn.private_data, sizeof(h));
		rs_take_hello(rs, &h);
	}
	if (rs->state == RS_CONNECTING || rs->state == RS_ACCEPTING) /* it may have ended already */
		rs->state = RS_CONNECTED;
	return 0;
}

/* status_of returns the errno value of an event. */
static int status_of(const struct rdma_cm_event *e, int otherwise)
{
	return e->status < 0 ? -e->status : otherwise;
}

/* cm_event returns 0, or the errno value of what ends the connection. */
static int cm_event(struct rs *rs, const struct rdma_cm_event *e)
{
	switch (e->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		return rdma_resolve_route(rs->id, RESOLVE_MS) < 0 ? errno : 0;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		return begin_connect(rs);
	case RDMA_CM_EVENT_ESTABLISHED:
		return established(rs, e);
	case RDMA_CM_EVENT_REJECTED:
		return ECONNREFUSED;
	case RDMA_CM_EVENT_ADDR_ERROR:
	case RDMA_CM_EVENT_ROUTE_ERROR:
		return status_of(e, EHOSTUNREACH);
	case RDMA_CM_EVENT_UNREACHABLE:
		return status_of(e, ETIMEDOUT);
	case RDMA_CM_EVENT_CONNECT_ERROR:
		return status_of(e, ECONNABORTED);
	case RDMA_CM_EVENT_DEVICE_REMOVAL:
		return ENETDOWN;
	case RDMA_CM_EVENT_DISCONNECTED:
		rs_progress(rs); /* what had come before */
		rs_end(rs, -id_of(rs->id)->end);
		return 0;
	default:
		return 0;
	}
}

void rs_cm_events(struct rs *rs)
{
	struct rdma_cm_event *e;

	/* Further requests wait in the channel, where the backlog limits them. */
	while (!rs->request && rdma_get_cm_event(rs->channel, &e) == 0) {
		struct rdma_cm_id *refused = NULL;

		rs->turn++; /* who is about to sleep looks again */
		if (e->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
			if (!keep_request(rs, e))
				refused = e->id;
		} else {
			int err = cm_event(rs, e);

			if (err)
				rs_end(rs, err);
		}
		rdma_ack_cm_event(e);
		if (refused)
			rdma_destroy_id(refused);
	}
}

/*
 * copy_address stores as much of an address as there is room for, as accept(2) does. A socket of IPv6 has IPv4
 * addresses as ::ffff:192.0.2.1.
 */
static void copy_address(const struct rs *rs, struct sockaddr *to, socklen_t *len, const struct sockaddr *from)
{
	const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)from;
	struct sockaddr_in6 v6 = { .sin6_family = AF_INET6 };
	struct sockaddr_storage any = { .ss_family = (sa_family_t)rs->family };
	socklen_t n;

	if (!addr_len(from))
		from = (const struct sockaddr *)&any;
	if (from->sa_family == AF_INET && rs->family == AF_INET6) {
		v6.sin6_port = v4->sin_port;
		v6.sin6_addr.s6_addr[10] = v6.sin6_addr.s6_addr[11] = 0xff;
		memcpy(&v6.sin6_addr.s6_addr[12], &v4->sin_addr, sizeof(v4->sin_addr));
		from = (const struct sockaddr *)&v6;
	}
	n = addr_len(from);
	memcpy(to, from, least(n, *len));
	*len = n;
}

/* plain stores addr, which is of a family that iwarpd supports. ::ffff:192.0.2.1 becomes 192.0.2.1. */
static void plain(struct sockaddr_storage *to, const struct sockaddr *addr)
{
	const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)addr;
	struct sockaddr_in *v4 = (struct sockaddr_in *)to;

	memset(to, 0, sizeof(*to));
	memcpy(to, addr, addr_len(addr));
	if (addr->sa_family != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr))
		return;
	memset(to, 0, sizeof(*to));
	v4->sin_family = AF_INET;
	v4->sin_port = v6->sin6_port;
	memcpy(&v4->sin_addr, &v6->sin6_addr.s6_addr[12], sizeof(v4->sin_addr));
}

int rbind(int socket, const struct sockaddr *addr, socklen_t addrlen)
{
	struct rs *rs;
	struct sockaddr_storage at;
	int ret;

	FORWARD(rbind, socket, addr, addrlen);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	if (rs->state != RS_OPEN || addrlen < sizeof(addr->sa_family) || addrlen < addr_len(addr)) {
		ret = set_errno(EINVAL);
	} else if (addr->sa_family != rs->family) {
		ret = set_errno(EAFNOSUPPORT);
	} else {
		plain(&at, addr);
		ret = rdma_bind_addr(rs->id, (struct sockaddr *)&at);
	}
	rs_put(rs);
	return ret;
}

/* bind_any binds a socket to a free port, unless it is bound. */
static int bind_any(struct rs *rs)
{
	struct sockaddr_storage any = { .ss_family = (sa_family_t)rs->family };

	return id_of(rs->id)->state == ID_IDLE ? rdma_bind_addr(rs->id, (struct sockaddr *)&any) : 0;
}

int rlisten(int socket, int backlog)
{
	struct rs *rs;
	int ret;

	FORWARD(rlisten, socket, backlog);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	if (rs->state == RS_LISTENING)
		ret = 0;
	else if (rs->state != RS_OPEN)
		ret = set_errno(EINVAL);
	else
		ret = bind_any(rs) < 0 ? -1 : rdma_listen(rs->id, backlog);
	if (ret == 0)
		rs->state = RS_LISTENING;
	rs_put(rs);
	return ret;
}

static bool has_request(const struct rs *rs)
{
	return rs->request || rs->state != RS_LISTENING;
}

/* accept_request makes the connection of a listener's request, which the listener keeps if there can be no socket. */
static struct rs *accept_request(struct rs *listener)
{
	struct rdma_cm_id *id = listener->request;
	struct rs *rs = rs_new(listener);
	struct rs_hello h;
	struct rdma_conn_param p = { .private_data = &h, .private_data_len = sizeof(h) };

	if (!rs)
		return NULL;
	listener->request = NULL;
	if (listener->sleepers > 0) /* they may not wait for further requests: see fall_asleep */
		rs_wake(listener);
	rs->id = id;
	if (rdma_migrate_id(id, rs->channel) == 0 && rs_open(rs) == 0) {
		rs_put_hello(rs, &h);
		rs_take_hello(rs, &listener->request_hello);
		rs->state = RS_ACCEPTING;
		if (rdma_accept(id, &p) == 0 && insert(rs) == 0)
			return rs;
	} else if (errno == EMFILE || errno == ENFILE) {
		int err = errno;

		rs_close(rs);
		rs->id = NULL;
		rdma_migrate_id(id, listener->channel);
		listener->request = id;
		errno = err;
	}
	rs_free(rs);
	return NULL;
}

static struct rs *do_accept(struct rs *listener)
{
	int ms = rs_patience(listener, listener->opt.recv_wait, 0), err;
	struct rs *made;

	do {
		err = rs_wait(listener, has_request, ms);
		if (!err && listener->state != RS_LISTENING)
			err = listener->err ? listener->err : EINVAL;
		if (err) {
			errno = err;
			return NULL;
		}
		made = accept_request(listener);
	} while (!made && errno == ECONNRESET); /* the peer has withdrawn the request */
	return made;
}

int raccept(int socket, struct sockaddr *addr, socklen_t *addrlen)
{
	struct rs *rs, *made;
	int fd = -1;

	FORWARD(raccept, socket, addr, addrlen);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	made = do_accept(rs);
	if (made) {
		fd = made->fd;
		if (addr && addrlen)
			copy_address(made, addr, addrlen, rdma_get_peer_addr(made->id));
	}
	rs_put(rs);
	return fd;
}

static bool is_connected(const struct rs *rs)
{
	return rs->state != RS_CONNECTING;
}

/* reopen makes a socket whose connection was not made one that may try again. */
static int reopen(struct rs *rs)
{
	struct rdma_cm_id *old = rs->id;

	rs_close(rs);
	if (make_id(rs) < 0)
		return -1;
	rdma_destroy_id(old);
	rs->state = RS_OPEN;
	return 0;
}

/* never_connected reports whether a socket tried to connect, and could not. */
static bool never_connected(const struct rs *rs)
{
	return rs->state == RS_OVER && rs->peer_table.length == 0;
}

/* do_connect begins a connection, or waits for that which an earlier call began and did not report the end of. */
static int do_connect(struct rs *rs, const struct sockaddr *addr)
{
	struct sockaddr_storage to;
	int busy = EALREADY, err;

	if (never_connected(rs) && !rs->err && reopen(rs) < 0)
		return -1;
	if (rs->state == RS_OPEN) {
		plain(&to, addr);
		if (rdma_resolve_addr(rs->id, NULL, (struct sockaddr *)&to, RESOLVE_MS) < 0)
			return -1;
		rs->state = RS_CONNECTING;
		busy = EINPROGRESS;
	} else if (rs->state != RS_CONNECTING && !never_connected(rs)) {
		return set_errno(EISCONN);
	}
	err = rs_wait(rs, is_connected, rs_patience(rs, rs->opt.send_wait, 0));
	if (err)
		return set_errno(err == EAGAIN ? busy : err);
	rs_progress(rs);
	if (rs->state != RS_OVER)
		return 0;
	err = rs->err;
	rs->err = 0; /* as it has been reported */
	return set_errno(err);
}

int rconnect(int socket, const struct sockaddr *addr, socklen_t addrlen)
{
	struct rs *rs;
	int ret;

	FORWARD(rconnect, socket, addr, addrlen);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	if (addrlen < sizeof(addr->sa_family) || !addr_len(addr))
		ret = set_errno(EAFNOSUPPORT);
	else if (addrlen < addr_len(addr))
		ret = set_errno(EINVAL);
	else
		ret = do_connect(rs, addr);
	rs_put(rs);
	return ret;
}

int rshutdown(int socket, int how)
{
	struct rs *rs;
	int ret = 0;

	FORWARD(rshutdown, socket, how);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	if (how != SHUT_RD && how != SHUT_WR && how != SHUT_RDWR) {
		ret = set_errno(EINVAL);
	} else if (rs->state == RS_LISTENING && how != SHUT_WR) {
		rs_end(rs, 0); /* as with TCP, calls of raccept end */
		rs_wake(rs);
	} else if (!rs->table) {
		ret = set_errno(ENOTCONN);
	} else {
		rs->in_done = rs->in_done || how != SHUT_WR;
		rs->out_done = rs->out_done || how != SHUT_RD;
		if (rs->out_done && rs->bye != RS_LEAVES)
			rs->bye = rs->in_done ? RS_LEAVES : RS_HALF;
		rs_progress(rs);
		rs_wake(rs);
	}
	rs_put(rs);
	return ret;
}

/* say_goodbye tells the peer that the socket is closed, and waits until it has that and all data, for at most ms. */
static void say_goodbye(struct rs *rs, int ms)
{
	int64_t end = rs_now_us() + ms * 1000LL;

	rs->in_done = rs->out_done = true;
	rs->bye = RS_LEAVES;
	rs_wake(rs);
	while (ms > 0 && rs_wait(rs, rs_all_sent, ms) == EINTR) /* as close(2) does, it goes on */
		ms = (int)((end - rs_now_us()) / 1000);
}

/* reset ends a connection at once, so that the peer gets ECONNRESET. */
static void reset(struct rs *rs)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	if (rs->id->qp)
		ibv_modify_qp(rs->id->qp, &attr, IBV_QP_STATE);
}

int rclose(int socket)
{
	struct rs *rs;
	int ms = CLOSE_MS;

	FORWARD(rclose, socket);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	pthread_mutex_lock(&table_lock);
	if (table[socket] == rs) { /* no other thread closes it too */
		table[socket] = NULL;
		rs->refs--;
	}
	pthread_mutex_unlock(&table_lock);
	if (rs->opt.linger.l_onoff)
		ms = (int)least((uint64_t)rs->opt.linger.l_linger, INT32_MAX / 1000) * 1000;
	say_goodbye(rs, ms);
	if (ms == 0)
		reset(rs);
	rs_end(rs, EBADF);
	rs_wake(rs);
	rs_put(rs);
	return 0;
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
	int64_t end = rs_now_us() + CLOSE_MS * 1000LL;

	for (int fd = 0; fd < table_size; fd++) {
		struct rs *rs;

		if (!lock_soon(&table_lock))
			return;
		rs = use(fd);
		pthread_mutex_unlock(&table_lock);
		if (!rs)
			continue;
		if (lock_soon(&rs->lock)) {
			say_goodbye(rs, (int)((end - rs_now_us()) / 1000));
			rs_progress(rs); /* also if others have taken all the time */
			pthread_mutex_unlock(&rs->lock);
		}
		rs_drop(rs);
	}
}

int rgetpeername(int socket, struct sockaddr *addr, socklen_t *addrlen)
{
	struct rs *rs;
	int err = 0;

	FORWARD(rgetpeername, socket, addr, addrlen);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	if (rs->peer_table.length > 0 && !rs->err) /* also after the peer has closed it */
		copy_address(rs, addr, addrlen, rdma_get_peer_addr(rs->id));
	else
		err = ENOTCONN;
	rs_put(rs);
	return set_errno(err);
}

int rgetsockname(int socket, struct sockaddr *addr, socklen_t *addrlen)
{
	struct rs *rs;

	FORWARD(rgetsockname, socket, addr, addrlen);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	copy_address(rs, addr, addrlen, rdma_get_local_addr(rs->id));
	rs_put(rs);
	return 0;
}
