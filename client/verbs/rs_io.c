/* Sending and receiving of rsockets. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/uio.h>

#include "rs.h"

int rs_patience(const struct rs *rs, int ms, int flags)
{
	return rs->flags & O_NONBLOCK || flags & MSG_DONTWAIT ? 0 : ms;
}

/* check_iov returns the length of a vector, or -1 with errno. */
static ssize_t check_iov(const struct iovec *iov, size_t n)
{
	size_t len = 0;

	if (n > IOV_MAX)
		return set_errno(EMSGSIZE);
	for (size_t i = 0; i < n; i++) {
		if (iov[i].iov_len > SSIZE_MAX - len)
			return set_errno(EINVAL);
		len += iov[i].iov_len;
	}
	return (ssize_t)len;
}

/* finish returns what a call that moved done bytes before err returns. */
static ssize_t finish(size_t done, int err)
{
	return done > 0 ? (ssize_t)done : set_errno(err);
}

static bool is_unconnected(const struct rs *rs)
{
	return rs->state == RS_OPEN || rs->state == RS_LISTENING;
}

/* await_sending waits until ready returns true, with the flags of send. It returns 0 if there is a connection on which to send. */
static int await_sending(struct rs *rs, bool (*ready)(const struct rs *rs), int flags)
{
	int err = rs_wait(rs, ready, rs_patience(rs, rs->opt.send_wait, flags));

	if (err)
		return err;
	if (is_unconnected(rs))
		return ENOTCONN;
	if (rs->out_done)
		return EPIPE;
	return rs->state != RS_OVER ? 0 : rs->err ? rs->err : ECONNRESET;
}

int rs_await_room(struct rs *rs, int flags)
{
	do {
		int err = await_sending(rs, rs_can_send, flags);

		if (err)
			return err;
	} while (!rs_send_iomaps(rs) || !rs_can_send(rs)); /* the mappings may take the last credit */
	return 0;
}

static bool is_made(const struct rs *rs)
{
	return rs->state != RS_CONNECTING && rs->state != RS_ACCEPTING;
}

static ssize_t send_all(struct rs *rs, const struct iovec *iov, size_t len, int flags)
{
	int err = len > 0 ? 0 : await_sending(rs, is_made, flags); /* even if there is nothing to send, as with TCP */
	size_t done = 0;

	while (!err && done < len) {
		struct rs_sge *to = &rs->offers[0];
		struct rs_sge at;
		uint32_t n;

		err = rs_await_room(rs, flags);
		if (err)
			break;
		at = *to;
		rs->sent++;
		n = rs_write(rs, iov, done, len - done, &at, true);
		to->addr += n;
		to->length -= n;
		if (to->length == 0) {
			rs->offers[0] = rs->offers[1];
			rs->offers[1].length = 0;
		}
		done += n;
	}
	return finish(done, err);
}

static ssize_t rsendv(int socket, const struct iovec *iov, size_t n, int flags)
{
	ssize_t len = check_iov(iov, n);
	struct rs *rs;

	if (len < 0)
		return -1;
	if (flags & MSG_OOB)
		return set_errno(EOPNOTSUPP);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	len = send_all(rs, iov, (size_t)len, flags);
	rs_put(rs);
	return len;
}

/* scatter copies len bytes to a vector, behind its first skip bytes. */
static void scatter(const struct iovec *to, size_t skip, const uint8_t *from, size_t len)
{
	for (; len > 0; to++) {
		size_t n;

		if (to->iov_len <= skip) {
			skip -= to->iov_len;
			continue;
		}
		n = least(to->iov_len - skip, len);
		memcpy((uint8_t *)to->iov_base + skip, from, n);
		skip = 0;
		from += n;
		len -= n;
	}
}

/* copy_in copies the unread data, at most len bytes of them, to a vector behind its first skip bytes. */
static size_t copy_in(const struct rs *rs, const struct iovec *to, size_t skip, size_t len)
{
	size_t all = least(len, rs->in_len), n = least(all, rs->opt.in_size - rs->in_pos);

	scatter(to, skip, rs->in + rs->in_pos, n);
	if (all > n)
		scatter(to, skip + n, rs->in, all - n);
	return all;
}

static ssize_t recv_some(struct rs *rs, const struct iovec *iov, size_t len, int flags)
{
	int ms = rs_patience(rs, rs->opt.recv_wait, flags), err = 0;
	size_t done = 0;

	if (is_unconnected(rs))
		return set_errno(ENOTCONN);
	do {
		size_t n;

		err = rs_wait(rs, rs_can_recv, ms); /* even if there is nothing to receive, as with TCP */
		if (err)
			break;
		if (rs->in_len == 0) {
			err = rs->in_done ? 0 : rs->err ? rs->err : rs->peer_table.length == 0 ? ENOTCONN : 0;
			break;
		}
		n = copy_in(rs, iov, done, len - done);
		done += n;
		if (flags & MSG_PEEK)
			break;
		rs->in_pos = (uint32_t)((rs->in_pos + n) % rs->opt.in_size);
		rs->in_len -= (uint32_t)n;
		rs->in_free += (uint32_t)n;
		rs_progress(rs);
	} while (flags & MSG_WAITALL && done < len);
	return finish(done, err);
}

static ssize_t rrecvv(int socket, const struct iovec *iov, size_t n, int flags)
{
	ssize_t len = check_iov(iov, n);
	struct rs *rs;

	if (len < 0)
		return -1;
	if (flags & (MSG_OOB | MSG_ERRQUEUE))
		return set_errno(EOPNOTSUPP);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	len = recv_some(rs, iov, (size_t)len, flags);
	rs_put(rs);
	return len;
}

ssize_t rrecv(int socket, void *buf, size_t len, int flags)
{
	struct iovec v = { .iov_base = buf, .iov_len = len };

	FORWARD(rrecv, socket, buf, len, flags);
	return rrecvv(socket, &v, 1, flags);
}

ssize_t rrecvfrom(int socket, void *buf, size_t len, int flags, struct sockaddr *src_addr, socklen_t *addrlen)
{
	ssize_t n;

	FORWARD(rrecvfrom, socket, buf, len, flags, src_addr, addrlen);
	n = rrecv(socket, buf, len, flags);
	if (n >= 0 && src_addr && addrlen)
		*addrlen = 0; /* as with TCP */
	return n;
}

ssize_t rrecvmsg(int socket, struct msghdr *msg, int flags)
{
	ssize_t n;

	FORWARD(rrecvmsg, socket, msg, flags);
	n = rrecvv(socket, msg->msg_iov, msg->msg_iovlen, flags);
	if (n >= 0) {
		msg->msg_namelen = 0;
		msg->msg_controllen = 0;
		msg->msg_flags = 0;
	}
	return n;
}

/* rreadvv differs from rrecvv where read(2) differs from recv(2): it reads nothing at once. */
static ssize_t rreadvv(int socket, const struct iovec *iov, size_t n)
{
	struct rs *rs;

	if (check_iov(iov, n) != 0)
		return rrecvv(socket, iov, n, 0);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	rs_put(rs);
	return 0;
}

ssize_t rread(int socket, void *buf, size_t count)
{
	struct iovec v = { .iov_base = buf, .iov_len = count };

	FORWARD(rread, socket, buf, count);
	return rreadvv(socket, &v, 1);
}

ssize_t rreadv(int socket, const struct iovec *iov, int iovcnt)
{
	FORWARD(rreadv, socket, iov, iovcnt);
	return iovcnt < 0 || iovcnt > IOV_MAX ? set_errno(EINVAL) : rreadvv(socket, iov, (size_t)iovcnt);
}

ssize_t rsend(int socket, const void *buf, size_t len, int flags)
{
	struct iovec v = { .iov_base = (void *)(uintptr_t)buf, .iov_len = len };

	FORWARD(rsend, socket, buf, len, flags);
	return rsendv(socket, &v, 1, flags);
}

/* rsendto is rsend: like Linux's TCP, a connection takes no notice of the address. */
ssize_t rsendto(int socket, const void *buf, size_t len, int flags, const struct sockaddr *dest_addr, socklen_t addrlen)
{
	FORWARD(rsendto, socket, buf, len, flags, dest_addr, addrlen);
	return rsend(socket, buf, len, flags);
}

ssize_t rsendmsg(int socket, const struct msghdr *msg, int flags)
{
	FORWARD(rsendmsg, socket, msg, flags);
	if (msg->msg_control && msg->msg_controllen > 0)
		return set_errno(EOPNOTSUPP);
	return rsendv(socket, msg->msg_iov, msg->msg_iovlen, flags);
}

ssize_t rwrite(int socket, const void *buf, size_t count)
{
	FORWARD(rwrite, socket, buf, count);
	return rsend(socket, buf, count, 0);
}

ssize_t rwritev(int socket, const struct iovec *iov, int iovcnt)
{
	FORWARD(rwritev, socket, iov, iovcnt);
	return iovcnt < 0 || iovcnt > IOV_MAX ? set_errno(EINVAL) : rsendv(socket, iov, (size_t)iovcnt, 0);
}
