/* The control socket: one message per packet, with descriptors as SCM_RIGHTS. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

int socket_connect(const char *path, bool wait, struct iwarpd_error *e)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int sock;

	if (strlen(path) >= sizeof(addr.sun_path))
		return set_error(e, -ENAMETOOLONG, "socket %.100s...: path too long", path);
	strcpy(addr.sun_path, path);
	sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | (wait ? 0 : SOCK_NONBLOCK), 0);
	if (sock < 0)
		return sys_error(e, "socket");
	while (connect(sock, (struct sockaddr *)&addr, sizeof(addr)) < 0) {
		int err = errno;

		if (err == EINTR)
			continue;
		close(sock);
		return set_error(e, -err, "%s: %s%s", path, strerror(err),
				 err == ENOENT || err == ECONNREFUSED ? ": is iwarpd running?" :
				 err == EACCES ? ": join the group that owns it, or run as root" : "");
	}
	fcntl(sock, F_SETFL, 0); /* what follows may block */
	return sock;
}

void close_fds(const int *fds, int n)
{
	for (int i = 0; i < n; i++)
		close(fds[i]);
}

void close_fd(int fd)
{
	if (fd >= 0)
		close(fd);
}

void set_readable(int fd, bool yes)
{
	uint64_t count = 1;
	int state;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	/* Neither can fail with a counter of 0 or 1. */
	(void)!(yes ? write(fd, &count, sizeof(count)) : read(fd, &count, sizeof(count)));
	pthread_setcancelstate(state, &state);
}

static void put_fd(struct msghdr *h, void *control, size_t size, int fd)
{
	struct cmsghdr *c;

	memset(control, 0, size);
	h->msg_control = control;
	h->msg_controllen = size;
	c = CMSG_FIRSTHDR(h);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(fd));
	memcpy(CMSG_DATA(c), &fd, sizeof(fd));
}

enum { MOST_PAUSES = 5000 }; /* of a message for which the kernel has no memory */

/*
 * lacks_buffers reports whether a message could not be sent because the kernel has no memory for it, and waits a
 * millisecond then. Most callers that destroy something cannot report that it is still there, nor try again later. But the
 * memory may be what the caller would free next, so that it waits no more in the end.
 */
static bool lacks_buffers(int err, int *pauses)
{
	static const struct timespec pause = { .tv_nsec = 1000000 };

	if ((err != ENOBUFS && err != ENOMEM) || ++*pauses > MOST_PAUSES)
		return false;
	nanosleep(&pause, NULL);
	return true;
}

int socket_send(int sock, const Pb__Request *req, int fd, bool wait)
{
	_Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))];
	uint8_t small[1024], *data = small; /* room for any request that destroys something */
	size_t len = pb__request__get_packed_size(req);
	struct iovec iov = { .iov_len = len };
	struct msghdr h = { .msg_iov = &iov, .msg_iovlen = 1 };
	int err, pauses = 0;

	if (len > MAX_PACKET)
		return -EMSGSIZE;
	if (len > sizeof(small))
		data = malloc(len);
	if (!data)
		return -ENOMEM;
	pb__request__pack(req, data);
	iov.iov_base = data;
	if (fd >= 0)
		put_fd(&h, control, sizeof(control), fd);
	do {
		err = sendmsg(sock, &h, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT)) < 0 ? errno : 0;
	} while (err == EINTR || lacks_buffers(err, &pauses));
	if (data != small)
		free(data);
	return err == ENOMEM ? -ENOBUFS : -err; /* memory of the kernel, not of the process */
}

/* take_fds extracts the descriptors of a received packet. */
static void take_fds(struct msghdr *h, struct packet *p)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(h); c; c = CMSG_NXTHDR(h, c)) {
		int n = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || n > MAX_FDS - p->num_fds)
			continue;
		memcpy(p->fds + p->num_fds, CMSG_DATA(c), (size_t)n * sizeof(int));
		p->num_fds += n;
	}
}

/*
 * SPARE is more bytes than malloc asks the kernel for at once, and than any message but the first one takes. They are mapped, since
 * malloc may keep what one thread has freed where it does not look for another one.
 */
enum { SPARE = 256 << 10 };

static void *spare_memory(void)
{
	void *p = mmap(NULL, SPARE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

void inbox_close(struct inbox *in)
{
	void *spare = in->spare;

	in->spare = NULL; /* first: the child of a fork unmaps what is there */
	if (spare)
		munmap(spare, SPARE);
}

void *inbox_alloc(struct inbox *in, size_t size)
{
	void *p = malloc(size);

	if (p || !in->spare)
		return p;
	inbox_close(in);
	return malloc(size);
}

/* An unpacking is the allocation of a message. */
struct unpacking {
	struct inbox *in;
	bool failed;
};

static void *allocate(void *unpacking, size_t size)
{
	struct unpacking *u = unpacking;
	void *p = inbox_alloc(u->in, size);

	if (!p)
		u->failed = true;
	return p;
}

static void release(void *unpacking, void *p)
{
	(void)unpacking;
	free(p);
}

/* unpack returns 0 with the message in the first n bytes, to be freed by packet_free, or an error. */
static int unpack(struct inbox *in, size_t n, Pb__Message **msg)
{
	struct unpacking u = { .in = in };
	ProtobufCAllocator a = { allocate, release, &u };

	*msg = pb__message__unpack(&a, n, in->buf);
	if (*msg)
		return 0;
	return u.failed ? -ENOMEM : -EPROTO;
}

/* receive receives a packet. It returns what recvmsg does. */
static ssize_t receive(int sock, struct msghdr *h, size_t controllen, int flags)
{
	ssize_t n;

	do {
		h->msg_controllen = controllen;
		n = recvmsg(sock, h, MSG_CMSG_CLOEXEC | flags);
	} while (n < 0 && errno == EINTR);
	return n;
}

int socket_recv(int sock, struct inbox *in, struct packet *p, bool wait)
{
	_Alignas(struct cmsghdr) char control[CMSG_SPACE(MAX_FDS * sizeof(int))];
	struct iovec iov = { .iov_base = in->buf, .iov_len = sizeof(in->buf) };
	struct msghdr h = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control };
	ssize_t n;
	int err;

	p->msg = NULL;
	p->lost = false;
	p->num_fds = 0;
	if (!in->spare)
		in->spare = spare_memory();
	n = receive(sock, &h, sizeof(control), wait ? 0 : MSG_DONTWAIT);
	/* The daemon's last packet may be queued even so: the kernel looks for it before it looks
	 * for the end, and for an error before both. */
	if (n == 0 || (n < 0 && errno == ECONNRESET))
		n = receive(sock, &h, sizeof(control), MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
		return 0;
	if (n <= 0)
		return -EPIPE;
	take_fds(&h, p);
	if ((h.msg_flags & MSG_CTRUNC) && p->num_fds < MAX_FDS) {
		p->lost = true;
		close_fds(p->fds, p->num_fds);
		p->num_fds = 0;
	}
	err = -EPROTO;
	if (!(h.msg_flags & MSG_TRUNC) && (p->lost || !(h.msg_flags & MSG_CTRUNC)))
		err = unpack(in, (size_t)n, &p->msg);
	if (err) {
		packet_free(p);
		return err;
	}
	return 1;
}

void packet_free(struct packet *p)
{
	close_fds(p->fds, p->num_fds);
	p->num_fds = 0;
	if (p->msg)
		pb__message__free_unpacked(p->msg, NULL);
	p->msg = NULL;
}
