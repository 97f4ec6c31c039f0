/* Options of rsockets. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "rs.h"

enum {
	SMALLEST_BUFFER = 1 << 13,
	LARGEST_BUFFER = 1 << 28,
	SMALLEST_QUEUE = 16,
	LARGEST_QUEUE = 16384,
	PAGE = 1 << 12,
};

/* An option that is a number. */
struct option {
	int level, name;
	size_t at; /* in struct rs_options */
	int min, max;
	bool early;	  /* it cannot be set after the connection has been made */
	const char *file; /* of /etc/rdma/rsocket with its default, or NULL */
	int value;	  /* that without the file */
};

#define AT(member) offsetof(struct rs_options, member)

static struct option options[] = {
	{ SOL_SOCKET, SO_RCVBUF, AT(in_size), SMALLEST_BUFFER, LARGEST_BUFFER, true, "mem_default", 1 << 19 },
	{ SOL_SOCKET, SO_SNDBUF, AT(out_size), SMALLEST_BUFFER, LARGEST_BUFFER, true, "wmem_default", 1 << 19 },
	{ SOL_SOCKET, SO_KEEPALIVE, AT(keepalive), 0, 1, false, NULL, 0 },
	{ SOL_SOCKET, SO_OOBINLINE, AT(oobinline), 0, 1, false, NULL, 0 },
	{ SOL_SOCKET, SO_REUSEADDR, AT(reuseaddr), 0, 1, false, NULL, 0 },
	{ IPPROTO_TCP, TCP_NODELAY, AT(nodelay), 0, 1, false, NULL, 0 },
	{ IPPROTO_TCP, TCP_KEEPIDLE, AT(keepidle), 1, 32767, false, NULL, 7200 },
	{ IPPROTO_TCP, TCP_KEEPINTVL, AT(keepintvl), 1, 32767, false, NULL, 75 },
	{ IPPROTO_TCP, TCP_KEEPCNT, AT(keepcnt), 1, 127, false, NULL, 9 },
	{ IPPROTO_IPV6, IPV6_V6ONLY, AT(v6only), 0, 1, true, NULL, 0 },
	{ SOL_RDMA, RDMA_SQSIZE, AT(send_queue), SMALLEST_QUEUE, LARGEST_QUEUE, true, "sqsize_default", 384 },
	{ SOL_RDMA, RDMA_RQSIZE, AT(recv_queue), SMALLEST_QUEUE, LARGEST_QUEUE, true, "rqsize_default", 384 },
	{ SOL_RDMA, RDMA_INLINE, AT(inline_size), 0, 1 << 16, true, "inline_default", 64 },
	{ SOL_RDMA, RDMA_IOMAPSIZE, AT(iomaps), 0, RS_MAX_IOMAPS, true, "iomap_size", 0 },
};

#define OPTIONS (sizeof(options) / sizeof(*options))

static pthread_once_t once = PTHREAD_ONCE_INIT;

/* fit returns the value of o that is nearest to v. Buffers are whole pages. */
static int fit(const struct option *o, int v)
{
	if (o->max == 1)
		return v != 0;
	v = v < o->min ? o->min : v > o->max ? o->max : v;
	return o->max == LARGEST_BUFFER ? (v + PAGE - 1) & ~(PAGE - 1) : v;
}

static void read_files(void)
{
	for (size_t i = 0; i < OPTIONS; i++) {
		char path[64];
		FILE *f;
		int v;

		if (!options[i].file)
			continue;
		snprintf(path, sizeof(path), "/etc/rdma/rsocket/%s", options[i].file);
		f = fopen(path, "re");
		if (!f)
			continue;
		if (fscanf(f, "%d", &v) == 1)
			options[i].value = fit(&options[i], v);
		else
			iwv_log("%s: not a number; ignored", path);
		fclose(f);
	}
}

static int *value_of(struct rs_options *opt, const struct option *o)
{
	return (int *)(void *)((char *)opt + o->at);
}

void rs_defaults(struct rs_options *opt)
{
	pthread_once(&once, read_files);
	memset(opt, 0, sizeof(*opt));
	for (size_t i = 0; i < OPTIONS; i++)
		*value_of(opt, &options[i]) = options[i].value;
	opt->recv_wait = opt->send_wait = RS_FOREVER;
}

static const struct option *find(int level, int name)
{
	for (size_t i = 0; i < OPTIONS; i++)
		if (options[i].level == level && options[i].name == name)
			return &options[i];
	return NULL;
}

/* The time-out of SO_RCVTIMEO or SO_SNDTIMEO, or NULL for other options. */
static int *wait_of(struct rs *rs, int level, int name)
{
	if (level != SOL_SOCKET)
		return NULL;
	return name == SO_RCVTIMEO ? &rs->opt.recv_wait : name == SO_SNDTIMEO ? &rs->opt.send_wait : NULL;
}

/* set_wait sets a time-out. As for TCP, one of zero is none, and one that is negative has passed already. */
static int set_wait(int *ms, const struct timeval *t)
{
	if (t->tv_usec < 0 || t->tv_usec >= 1000000)
		return EDOM;
	*ms = t->tv_sec < 0 ? 0 : rs_ms(t);
	if (t->tv_sec == 0 && t->tv_usec == 0)
		*ms = RS_FOREVER;
	return 0;
}

/* tell_id passes an option on that the identifier must know. */
static int tell_id(struct rs *rs, int level, int name, int v)
{
	if (level == SOL_SOCKET && name == SO_REUSEADDR)
		rdma_set_option(rs->id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &v, sizeof(v)); /* fails if it is too late to matter */
	else if (level == IPPROTO_IPV6 && rdma_set_option(rs->id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &v, sizeof(v)) < 0)
		return errno;
	return 0;
}

static int set_option(struct rs *rs, int level, int name, const void *val, socklen_t len)
{
	const struct option *o = find(level, name);
	int *wait = wait_of(rs, level, name), v, err;

	if (level == SOL_SOCKET && name == SO_LINGER) {
		if (len < sizeof(rs->opt.linger))
			return EINVAL;
		memcpy(&rs->opt.linger, val, sizeof(rs->opt.linger));
		return 0;
	}
	if (wait)
		return len < sizeof(struct timeval) ? EINVAL : set_wait(wait, val);
	if (!o)
		return ENOPROTOOPT;
	if (len < sizeof(v) || (o->early && rs->table && level != SOL_SOCKET))
		return EINVAL;
	if (o->early && rs->table)
		return 0; /* a size that programs may ask for at any time */
	memcpy(&v, val, sizeof(v));
	v = fit(o, v);
	err = tell_id(rs, level, name, v);
	if (!err)
		*value_of(&rs->opt, o) = v;
	return err;
}

int rsetsockopt(int socket, int level, int optname, const void *optval, socklen_t optlen)
{
	struct rs *rs;
	int err;

	FORWARD(rsetsockopt, socket, level, optname, optval, optlen);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	err = set_option(rs, level, optname, optval, optlen);
	rs_put(rs);
	return set_errno(err);
}

/* computed stores the value of an option that nobody sets, and reports whether it is one. */
static bool computed(struct rs *rs, int level, int name, int *v)
{
	if (level == IPPROTO_TCP && name == TCP_MAXSEG) {
		*v = 1 << 11; /* as librdmacm says */
		return true;
	}
	if (level != SOL_SOCKET)
		return false;
	switch (name) {
	case SO_ERROR:
		*v = rs_report(rs);
		return true;
	case SO_TYPE:
		*v = SOCK_STREAM;
		return true;
	case SO_DOMAIN:
		*v = rs->family;
		return true;
	case SO_PROTOCOL:
		*v = IPPROTO_TCP;
		return true;
	case SO_ACCEPTCONN:
		*v = rs->state == RS_LISTENING;
		return true;
	}
	return false;
}

static int put(void *to, socklen_t *len, const void *from, socklen_t n)
{
	*len = (socklen_t)least(*len, n);
	memcpy(to, from, *len);
	return 0;
}

static int get_option(struct rs *rs, int level, int name, void *val, socklen_t *len)
{
	const struct option *o = find(level, name);
	const int *wait = wait_of(rs, level, name);
	int v;

	if (level == SOL_SOCKET && name == SO_LINGER)
		return put(val, len, &rs->opt.linger, sizeof(rs->opt.linger));
	if (wait) {
		int ms = *wait == RS_FOREVER ? 0 : *wait;
		struct timeval t = { .tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000 };

		return put(val, len, &t, sizeof(t));
	}
	if (o)
		return put(val, len, value_of(&rs->opt, o), sizeof(v));
	return computed(rs, level, name, &v) ? put(val, len, &v, sizeof(v)) : ENOPROTOOPT;
}

int rgetsockopt(int socket, int level, int optname, void *optval, socklen_t *optlen)
{
	struct rs *rs;
	int err;

	FORWARD(rgetsockopt, socket, level, optname, optval, optlen);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	err = get_option(rs, level, optname, optval, optlen);
	rs_put(rs);
	return set_errno(err);
}

int rfcntl(int socket, int cmd, ...)
{
	struct rs *rs;
	int ret = 0;
	va_list args;
	long arg;

	va_start(args, cmd);
	arg = va_arg(args, long);
	va_end(args);
	FORWARD(rfcntl, socket, cmd, arg);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	switch (cmd) {
	case F_GETFL:
		ret = O_RDWR | rs->flags;
		break;
	case F_SETFL:
		rs->flags = (int)arg & O_NONBLOCK;
		break;
	case F_GETFD:
		ret = fcntl(rs->fd, F_GETFD);
		break;
	case F_SETFD:
		ret = fcntl(rs->fd, F_SETFD, arg);
		break;
	default:
		ret = set_errno(EINVAL);
	}
	rs_put(rs);
	return ret;
}
