/* The life of rsockets: making, binding, listening, shutting down, closing. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "rs.h"

/* rs_free leaves errno as it is: a call may have failed before it. */
void rs_free(struct rs *rs)
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

struct rs *rs_new(const struct rs *from)
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
	rs->fd = iwv_eventfd(EFD_NONBLOCK);
	rs->channel = rs->fd < 0 ? NULL : rdma_create_event_channel();
	if (rs->channel && fcntl(rs->channel->fd, F_SETFL, O_NONBLOCK) == 0)
		return rs;
	rs_free(rs);
	return NULL;
}

int rs_make_id(struct rs *rs)
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
		if (rs_make_id(rs) == 0 && rs_insert(rs) == 0)
			fd = rs->fd;
		else
			rs_free(rs);
	}
	rs_leave();
	return fd;
}

void rs_copy_address(const struct rs *rs, struct sockaddr *to, socklen_t *len, const struct sockaddr *from)
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

int rs_plain_address(const struct rs *rs, struct sockaddr_storage *to, const struct sockaddr *addr, socklen_t len)
{
	const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)addr;
	struct sockaddr_in v4 = { .sin_family = AF_INET };

	if (len < sizeof(addr->sa_family) || len < addr_len(addr))
		return EINVAL;
	if (addr->sa_family != rs->family)
		return EAFNOSUPPORT;
	memset(to, 0, sizeof(*to));
	memcpy(to, addr, addr_len(addr));
	if (addr->sa_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) {
		if (rs->opt.v6only)
			return ENETUNREACH;
		v4.sin_port = v6->sin6_port;
		memcpy(&v4.sin_addr, &v6->sin6_addr.s6_addr[12], sizeof(v4.sin_addr));
		memset(to, 0, sizeof(*to));
		memcpy(to, &v4, sizeof(v4));
	}
	return 0;
}

int rbind(int socket, const struct sockaddr *addr, socklen_t addrlen)
{
	struct sockaddr_storage at;
	struct rs *rs;
	int err;

	FORWARD(rbind, socket, addr, addrlen);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	err = rs_reopen(rs) < 0 ? errno : rs->state == RS_OPEN ? rs_plain_address(rs, &at, addr, addrlen) : EINVAL;
	if (err == ENETUNREACH) /* which bind(2) does not give */
		err = EINVAL;
	if (!err && rdma_bind_addr(rs->id, (struct sockaddr *)&at) < 0)
		err = errno;
	if (!err)
		rs->bound = rs->id->route.addr.src_storage;
	rs_put(rs);
	return set_errno(err);
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
	ret = rs_reopen(rs);
	if (ret == 0 && rs->state != RS_LISTENING)
		ret = rs->state != RS_OPEN ? set_errno(EINVAL) : bind_any(rs) < 0 ? -1 : rdma_listen(rs->id, backlog);
	if (ret == 0)
		rs->state = RS_LISTENING;
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
		rs_end(rs, 0); /* as with TCP, calls of raccept end, and peers are refused */
		rs_reopen(rs);
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

void rs_say_goodbye(struct rs *rs, int ms)
{
	int64_t end = time_us() + ms * 1000LL;

	rs->in_done = rs->out_done = true;
	rs->bye = RS_LEAVES;
	rs_wake(rs);
	while (ms > 0 && rs_wait(rs, rs_all_sent, ms) == EINTR) /* as close(2) does, it goes on */
		ms = (int)((end - time_us()) / 1000);
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
	int ms = RS_CLOSE_MS;

	FORWARD(rclose, socket);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	rs_remove(rs);
	if (rs->opt.linger.l_onoff)
		ms = (int)least((uint64_t)rs->opt.linger.l_linger, INT32_MAX / 1000) * 1000;
	rs_say_goodbye(rs, ms);
	if (ms == 0)
		reset(rs);
	rs_end(rs, EBADF);
	rs_wake(rs);
	rs_put(rs);
	return 0;
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
		rs_copy_address(rs, addr, addrlen, rdma_get_peer_addr(rs->id));
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
	rs_copy_address(rs, addr, addrlen, rdma_get_local_addr(rs->id));
	rs_put(rs);
	return 0;
}
