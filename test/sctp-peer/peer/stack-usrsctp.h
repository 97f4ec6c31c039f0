/* The socket interface of usrsctp, with the names that peer.c uses. */
#include <usrsctp.h>

#define CAN_FORK 0
typedef struct socket *sock_t;

static void x_init(int udp_port)
{
	usrsctp_init(udp_port, NULL, NULL);
	usrsctp_sysctl_set_sctp_blackhole(2);
	usrsctp_sysctl_set_sctp_no_csum_on_loopback(0);
}

static void x_finish(void)
{
	int i;

	for (i = 0; i < 100 && usrsctp_finish() != 0; i++)
		usleep(20000);
}

static int x_socket(sock_t *s, int family)
{
	*s = usrsctp_socket(family, SOCK_STREAM, IPPROTO_SCTP, NULL, NULL, 0, NULL);
	return *s == NULL ? -1 : 0;
}

#define x_setsockopt usrsctp_setsockopt
#define x_getsockopt usrsctp_getsockopt
#define x_connect usrsctp_connect
#define x_bind usrsctp_bind
#define x_listen usrsctp_listen
#define x_shutdown usrsctp_shutdown
#define x_close usrsctp_close

static int x_accept(sock_t l, sock_t *s)
{
	*s = usrsctp_accept(l, NULL, NULL);
	return *s == NULL ? -1 : 0;
}

static int x_send(sock_t s, void *m, size_t n, struct sctp_sndinfo *info, struct sockaddr *to, socklen_t tolen)
{
	(void)tolen;
	return usrsctp_sendv(s, m, n, to, to != NULL, info, sizeof *info, SCTP_SENDV_SNDINFO, 0);
}

static ssize_t x_receive(sock_t s, void *m, size_t n, struct sctp_rcvinfo *info, int *flags)
{
	socklen_t len = sizeof *info, from = 0;
	unsigned type = 0;

	*flags = 0;
	return usrsctp_recvv(s, m, n, NULL, &from, info, &len, &type, flags);
}
