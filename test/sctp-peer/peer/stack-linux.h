/* The socket interface of Linux's SCTP (RFC 6458), with the names that peer.c uses. */
#include <errno.h>
#include <linux/sctp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define CAN_FORK 1
typedef int sock_t;

static void x_init(int udp_port) { (void)udp_port; }
static void x_finish(void) {}
static int x_socket(sock_t *s, int family) { return *s = socket(family, SOCK_STREAM, IPPROTO_SCTP); }

#define x_setsockopt setsockopt
#define x_getsockopt getsockopt
#define x_connect connect
#define x_bind bind
#define x_listen listen
#define x_shutdown shutdown
#define x_close close

static int x_accept(sock_t l, sock_t *s) { return *s = accept(l, NULL, NULL); }

static int x_send(sock_t s, void *m, size_t n, struct sctp_sndinfo *info, struct sockaddr *to, socklen_t tolen)
{
	char control[CMSG_SPACE(sizeof *info)] = {0};
	struct iovec iov = {m, n};
	struct msghdr h = {.msg_name = to, .msg_namelen = tolen, .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	struct cmsghdr *c = CMSG_FIRSTHDR(&h);

	c->cmsg_level = IPPROTO_SCTP;
	c->cmsg_type = SCTP_SNDINFO;
	c->cmsg_len = CMSG_LEN(sizeof *info);
	memcpy(CMSG_DATA(c), info, sizeof *info);
	return sendmsg(s, &h, MSG_NOSIGNAL);
}

static ssize_t x_receive(sock_t s, void *m, size_t n, struct sctp_rcvinfo *info, int *flags)
{
	char control[256];
	struct iovec iov = {m, n};
	struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	struct cmsghdr *c;
	ssize_t got = recvmsg(s, &h, 0);

	*flags = h.msg_flags;
	if (got > 0)
		for (c = CMSG_FIRSTHDR(&h); c; c = CMSG_NXTHDR(&h, c))
			if (c->cmsg_level == IPPROTO_SCTP && c->cmsg_type == SCTP_RCVINFO)
				memcpy(info, CMSG_DATA(c), sizeof *info);
	return got;
}
