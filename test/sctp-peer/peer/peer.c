/*
 * A small DDP peer over usrsctp's socket interface: the other end of the tests in
 * this folder. One association, one DDP stream.
 *
 *	peer [-d] [-a adaptation] [-u udpport] [-f] server port
 *	peer [-d] [-a adaptation] [-u udpport] [-f] [-n segments] client port address
 *
 * -d: the draft's code points. -f: fragmentation is allowed, and segments are larger
 * than a packet. The server accepts a session on any stream and sends each segment
 * back; the client begins one on stream 3, counts what comes back and ends it. A
 * segment "ABORT" or "SHUTDOWN" tells the server to do so. Lines on standard output
 * say what was seen.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <usrsctp.h>

static int draft, frag, segments = 20;
static uint32_t adaptation = 1;
static uint16_t udp_port;
static uint16_t ssn[65536];
static struct socket *sock;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static uint32_t ppid_segment(void) { return draft ? 1 : 16; }
static uint32_t ppid_control(void) { return draft ? 2 : 17; }

static void send_message(uint16_t sid, uint32_t ppid, unsigned char *m, size_t n)
{
	struct sctp_sndinfo info;

	m[0] = ssn[sid] >> 8;
	m[1] = ssn[sid] & 0xff;
	ssn[sid]++;
	memset(&info, 0, sizeof info);
	info.snd_sid = sid;
	info.snd_ppid = htonl(ppid);
	info.snd_flags = SCTP_UNORDERED;
	if (usrsctp_sendv(sock, m, n, NULL, 0, &info, sizeof info, SCTP_SENDV_SNDINFO, 0) < 0)
		die("send");
}

static void send_control(uint16_t sid, int code, const char *private)
{
	unsigned char m[600] = {0};

	m[3] = code;
	memcpy(m + 4, private, strlen(private));
	send_message(sid, ppid_control(), m, 4 + strlen(private));
}

static void setup(void)
{
	static const uint16_t events[] = {SCTP_ASSOC_CHANGE, SCTP_ADAPTATION_INDICATION, SCTP_SHUTDOWN_EVENT};
	struct sctp_setadaptation ind = {.ssb_adaptation_ind = adaptation};
	struct sctp_initmsg init;
	int on = 1, no = !frag, big = 1 << 20;
	size_t i;

	if ((sock = usrsctp_socket(AF_INET, SOCK_STREAM, IPPROTO_SCTP, NULL, NULL, 0, NULL)) == NULL)
		die("socket");
	if (adaptation && usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_ADAPTATION_LAYER, &ind, sizeof ind) < 0)
		die("adaptation");
	memset(&init, 0, sizeof init);
	init.sinit_num_ostreams = init.sinit_max_instreams = 16;
	if (usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_INITMSG, &init, sizeof init) < 0)
		die("initmsg");
	if (usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_NODELAY, &on, sizeof on) < 0 ||
	    usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_DISABLE_FRAGMENTS, &no, sizeof no) < 0 ||
	    usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_RECVRCVINFO, &on, sizeof on) < 0)
		die("options");
	usrsctp_setsockopt(sock, SOL_SOCKET, SO_SNDBUF, &big, sizeof big);
	if (udp_port) {
		struct sctp_udpencaps e;

		memset(&e, 0, sizeof e);
		e.sue_address.ss_family = AF_INET;
		e.sue_port = htons(udp_port);
		if (usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_REMOTE_UDP_ENCAPS_PORT, &e, sizeof e) < 0)
			die("encapsulation");
	}
	for (i = 0; i < sizeof events / sizeof *events; i++) {
		struct sctp_event e;

		memset(&e, 0, sizeof e);
		e.se_assoc_id = SCTP_ALL_ASSOC;
		e.se_type = events[i];
		e.se_on = 1;
		if (usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_EVENT, &e, sizeof e) < 0)
			die("event");
	}
}

/* The client's segments: a number and a pattern that follows from it. */
static size_t fill(unsigned char *m, uint32_t n)
{
	size_t len = n % 3 == 0 ? (udp_port ? 1440 : 1450) : 8 + n * 37 % 1000, i;

	if (frag && n % 4 == 1)
		len = 3000 + n;
	m[2] = n >> 24, m[3] = n >> 16, m[4] = n >> 8, m[5] = n;
	for (i = 6; i < len; i++)
		m[i] = n * 7 + i * 13;
	return len;
}

static void notification(const union sctp_notification *n)
{
	switch (n->sn_header.sn_type) {
	case SCTP_ADAPTATION_INDICATION:
		printf("adaptation %u\n", n->sn_adaptation_event.sai_adaptation_ind);
		break;
	case SCTP_SHUTDOWN_EVENT:
		printf("shutdown\n");
		break;
	case SCTP_ASSOC_CHANGE:
		printf("association %s\n", n->sn_assoc_change.sac_state == SCTP_COMM_UP ? "up" :
			n->sn_assoc_change.sac_state == SCTP_COMM_LOST ? "lost" :
			n->sn_assoc_change.sac_state == SCTP_RESTART ? "restarted" :
			n->sn_assoc_change.sac_state == SCTP_SHUTDOWN_COMP ? "closed" : "failed");
		break;
	}
}

static int client, echoed, terminated;

static void received(uint16_t sid, uint32_t ppid, int flags, unsigned char *m, ssize_t n)
{
	static unsigned char copy[1 << 16];

	if (!(flags & SCTP_UNORDERED))
		printf("ordered message\n");
	if (ppid == ppid_control()) {
		int code = m[2] << 8 | m[3];

		printf("control %d ssn %d stream %d private %.*s\n", code, m[0] << 8 | m[1], sid, (int)n - 4, m + 4);
		if (code == 4) {
			if (!terminated && !client)
				send_control(sid, 4, "");
			terminated = 1;
		} else if (!client && code == (draft ? 2 : 1)) {
			terminated = 0;
			ssn[sid] = draft;
			send_control(sid, draft ? 3 : 2, "welcome");
		} else if (client && code == (draft ? 3 : 2)) {
			int i;

			for (i = 0; i < segments; i++)
				send_message(sid, ppid_segment(), copy, fill(copy, i));
		}
		return;
	}
	if (ppid != ppid_segment()) {
		printf("unknown ppid %u\n", ppid);
		return;
	}
	if (client) {
		size_t len = fill(copy, (uint32_t)m[2] << 24 | m[3] << 16 | m[4] << 8 | m[5]);

		if (len != (size_t)n || memcmp(copy + 2, m + 2, n - 2))
			printf("wrong segment of %zd octets\n", n);
		if (++echoed == segments) {
			printf("echoed %d\n", echoed);
			send_control(sid, 4, "");
		}
		return;
	}
	if (n == 2 + 5 && !memcmp(m + 2, "ABORT", 5)) {
		struct linger l = {1, 0};

		usrsctp_setsockopt(sock, SOL_SOCKET, SO_LINGER, &l, sizeof l);
		usrsctp_close(sock);
		printf("aborted\n");
		fflush(stdout);
		sleep(1);
		exit(0);
	}
	if (n == 2 + 8 && !memcmp(m + 2, "SHUTDOWN", 8)) {
		usrsctp_shutdown(sock, SHUT_WR);
		return;
	}
	memcpy(copy, m, n);
	send_message(sid, ppid_segment(), copy, n);
}

int main(int argc, char **argv)
{
	static unsigned char m[1 << 17];
	struct sockaddr_in addr;
	int c;

	setvbuf(stdout, NULL, _IOLBF, 0);
	while ((c = getopt(argc, argv, "da:u:fn:")) != -1) {
		switch (c) {
		case 'd': draft = 1; break;
		case 'a': adaptation = atoi(optarg); break;
		case 'u': udp_port = atoi(optarg); break;
		case 'f': frag = 1; break;
		case 'n': segments = atoi(optarg); break;
		default: return 2;
		}
	}
	argc -= optind, argv += optind;
	if (argc < 2)
		return 2;
	client = !strcmp(argv[0], "client");
	usrsctp_init(udp_port, NULL, NULL);
	usrsctp_sysctl_set_sctp_blackhole(2);
	usrsctp_sysctl_set_sctp_no_csum_on_loopback(0);
	setup();
	memset(&addr, 0, sizeof addr);
	addr.sin_family = AF_INET;
	addr.sin_port = htons(atoi(argv[1]));
	if (client) {
		if (argc < 3 || inet_pton(AF_INET, argv[2], &addr.sin_addr) != 1)
			return 2;
		if (usrsctp_connect(sock, (struct sockaddr *)&addr, sizeof addr) < 0)
			die("connect");
		ssn[3] = draft;
		send_control(3, draft ? 2 : 1, "hello");
	} else {
		struct socket *l = sock;

		if (usrsctp_bind(l, (struct sockaddr *)&addr, sizeof addr) < 0 || usrsctp_listen(l, 4) < 0)
			die("listen");
		printf("listening\n");
		if ((sock = usrsctp_accept(l, NULL, NULL)) == NULL)
			die("accept");
	}
	for (;;) {
		struct sctp_rcvinfo info;
		socklen_t len = sizeof info, from = 0;
		unsigned type = 0;
		int flags = 0;
		ssize_t n = usrsctp_recvv(sock, m, sizeof m, NULL, &from, &info, &len, &type, &flags);

		if (n < 0) {
			perror("receive");
			return 1;
		}
		if (n == 0)
			break;
		if (flags & MSG_NOTIFICATION)
			notification((union sctp_notification *)m);
		else
			received(info.rcv_sid, ntohl(info.rcv_ppid), info.rcv_flags, m, n);
		if (client && terminated && echoed == segments)
			break;
	}
	usrsctp_close(sock);
	for (c = 0; c < 100 && usrsctp_finish() != 0; c++)
		usleep(20000);
	printf("done\n");
	return 0;
}
