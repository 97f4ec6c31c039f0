/*
 * bulk moves data over usrsctp as DDP over SCTP does: in unordered messages of one packet
 * each, in one association over raw sockets.
 *
 *	bulk server port
 *	bulk client port address stream|ping size warm_ms window_ms
 *
 * The server discards messages with PPID 16 and returns those with PPID 17. The client
 * prints Gb/s, or the median and the mean of a round trip in microseconds. It polls without
 * sleeping when it pings.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <usrsctp.h>

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void set(struct socket *s, int name, const void *v, socklen_t n)
{
	if (usrsctp_setsockopt(s, IPPROTO_SCTP, name, v, n) < 0)
		die("option");
}

static void send_message(struct socket *s, uint32_t ppid, const void *m, size_t n)
{
	struct sctp_sndinfo info;

	memset(&info, 0, sizeof info);
	info.snd_ppid = htonl(ppid);
	info.snd_flags = SCTP_UNORDERED;
	if (usrsctp_sendv(s, m, n, NULL, 0, &info, sizeof info, SCTP_SENDV_SNDINFO, 0) < 0)
		die("send");
}

/* Returns the length of the next message, or 0 at the end. */
static ssize_t receive(struct socket *s, void *m, size_t n, uint32_t *ppid)
{
	struct sctp_rcvinfo info;
	socklen_t len = sizeof info, from = 0;
	unsigned type = 0;
	int flags = 0;
	ssize_t got = usrsctp_recvv(s, m, n, NULL, &from, &info, &len, &type, &flags);

	*ppid = type == SCTP_RECVV_RCVINFO ? ntohl(info.rcv_ppid) : 0;
	return got;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

/* usrsctp assumes an MTU of 1500 for each interface. */
static void set_mtu(struct socket *s, uint32_t mtu)
{
	struct sctp_paddrparams p;

	memset(&p, 0, sizeof p);
	p.spp_address.ss_family = AF_INET;
	p.spp_pathmtu = mtu;
	p.spp_flags = SPP_PMTUD_DISABLE;
	set(s, SCTP_PEER_ADDR_PARAMS, &p, sizeof p);
}

static void stream(struct socket *s, size_t size, double warm, double window)
{
	static unsigned char m[1 << 16];
	double start = now(), from = 0, bytes = 0;

	for (;;) {
		double t = now();

		if (!from && t - start >= warm)
			from = t, bytes = 0;
		if (from && t - from >= window) {
			printf("%f\n", bytes * 8 / (t - from) / 1e3);
			return;
		}
		send_message(s, 16, m, size);
		bytes += size;
	}
}

static void ping(struct socket *s, size_t size, double warm, double window)
{
	static unsigned char m[1 << 16];
	static double rtt[1 << 20];
	double start = now(), sum = 0;
	size_t n = 0;
	uint32_t ppid;

	usrsctp_set_non_blocking(s, 1);
	while (n < sizeof rtt / sizeof *rtt) {
		double t = now();
		ssize_t got;

		send_message(s, 17, m, size);
		while ((got = receive(s, m, sizeof m, &ppid)) < 0)
			if (errno != EWOULDBLOCK)
				die("receive");
		if (got == 0)
			exit(1);
		if (now() - start >= warm) {
			rtt[n] = now() - t;
			sum += rtt[n++];
		}
		if (now() - start >= warm + window)
			break;
	}
	qsort(rtt, n, sizeof *rtt, by_value);
	printf("%f %f\n", rtt[n / 2], sum / n);
}

int main(int argc, char **argv)
{
	static unsigned char m[1 << 17];
	struct sockaddr_in addr;
	struct socket *s;
	int on = 1, big = 1 << 20;
	uint32_t ppid;
	ssize_t n;

	if (argc != 3 && argc != 8)
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	usrsctp_init(0, NULL, NULL);
	usrsctp_sysctl_set_sctp_blackhole(2);
	usrsctp_sysctl_set_sctp_sendspace(big);
	usrsctp_sysctl_set_sctp_recvspace(big);
	if ((s = usrsctp_socket(AF_INET, SOCK_STREAM, IPPROTO_SCTP, NULL, NULL, 0, NULL)) == NULL)
		die("socket");
	set(s, SCTP_NODELAY, &on, sizeof on);
	set(s, SCTP_DISABLE_FRAGMENTS, &on, sizeof on);
	set(s, SCTP_RECVRCVINFO, &on, sizeof on);
	memset(&addr, 0, sizeof addr);
	addr.sin_family = AF_INET;
	addr.sin_port = htons(atoi(argv[2]));
	if (argc == 3) {
		struct socket *l = s;

		if (usrsctp_bind(l, (struct sockaddr *)&addr, sizeof addr) < 0 || usrsctp_listen(l, 4) < 0)
			die("listen");
		printf("ready\n");
		if ((s = usrsctp_accept(l, NULL, NULL)) == NULL)
			die("accept");
		while ((n = receive(s, m, sizeof m, &ppid)) > 0)
			if (ppid == 17)
				send_message(s, 17, m, n);
		return 0;
	}
	if (inet_pton(AF_INET, argv[3], &addr.sin_addr) != 1)
		return 2;
	if (atoi(argv[5]) > 1452)
		set_mtu(s, atoi(argv[5]) + 48);
	if (usrsctp_connect(s, (struct sockaddr *)&addr, sizeof addr) < 0)
		die("connect");
	(strcmp(argv[4], "ping") ? stream : ping)(s, atoi(argv[5]), atof(argv[6]) * 1e3, atof(argv[7]) * 1e3);
	return 0;
}
