/*
 * peer is a small DDP peer for the tests in this folder and for test/interop/sctp. It uses
 * the SCTP sockets of usrsctp or, with -DLINUX, of the kernel. It has one association with
 * any number of DDP streams.
 *
 *	peer [options] server port
 *	peer [options] client port address
 *
 *	-d      the draft's code points          -a N    adaptation; 0: none
 *	-u N    in UDP, from and to that port    -e      enhanced Initiate (RFC 6581)
 *	-r      RDMAP: see rdmap.h               -6      IPv6
 *	-n N    segments of the echo             -k N    consecutive sessions
 *	-s N    stream of the client's session   -p TEXT its private data
 *	-b N    local port of the client         -l      serve associations one after another
 *	-f      allow fragmentation, and echo segments larger than a packet
 *	-z      closing resets (SO_LINGER)       -i      the first message opens the association
 *
 * Without -r a server returns each segment; a client counts the segments that return and
 * ends the session. The segments "ABORT" and "SHUTDOWN" make the server abort or shut down
 * the association. An Initiate whose private data begins with "reject" is rejected. The
 * peer prints what happens.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef LINUX
#include "stack-linux.h"
#else
#include "stack-usrsctp.h"
#endif

static int draft, frag, rdma, enhanced, v6, client, many, linger, segments = 20, sessions = 1;
static uint32_t adaptation = 1;
static uint16_t udp_port, first_stream = 3;
static const char *private = "hello";
static sock_t sock;
static struct sockaddr *to; /* destination of the first message */
static socklen_t tolen;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static uint32_t ppid_segment(void) { return draft ? 1 : 16; }
static uint32_t ppid_control(void) { return draft ? 2 : 17; }

static size_t fragment_point(void)
{
	struct sctp_status st;
	socklen_t n = sizeof st;

	memset(&st, 0, sizeof st);
	if (x_getsockopt(sock, IPPROTO_SCTP, SCTP_STATUS, &st, &n) < 0)
		die("status");
	return st.sstat_fragmentation_point;
}

static void set_limit(uint32_t n);
static void initiate(uint16_t sid);
static void terminate(uint16_t sid);
static void skip(uint16_t sid, uint16_t by);
static void abort_association(void);

#include "rdmap.h"

enum { AHEAD = 8192 };

/* A DDP stream: its next segment numbers, and the segments that arrived out of order. */
struct stream {
	uint16_t out, in;
	int open, initiated, terminated, echoed;
	struct held {
		unsigned char *b;
		size_t n;
		uint32_t ppid;
	} held[AHEAD];
	struct rdmap rdmap;
};

static struct stream *streams[65536];

static struct stream *stream(uint16_t sid)
{
	if (!streams[sid]) {
		streams[sid] = calloc(1, sizeof **streams);
		streams[sid]->out = streams[sid]->in = draft;
	}
	return streams[sid];
}

static void forget(uint16_t sid)
{
	struct stream *s = streams[sid];
	int i;

	if (!s)
		return;
	for (i = 0; i < AHEAD; i++)
		free(s->held[i].b);
	free(s->rdmap.part);
	free(s);
	streams[sid] = NULL;
}

static void send_message(uint16_t sid, uint32_t ppid, int ordered, unsigned char *m, size_t n)
{
	struct stream *s = stream(sid);
	struct sctp_sndinfo info;

	m[0] = s->out >> 8;
	m[1] = s->out & 0xff;
	s->out++;
	memset(&info, 0, sizeof info);
	info.snd_sid = sid;
	info.snd_ppid = htonl(ppid);
	info.snd_flags = ordered ? 0 : SCTP_UNORDERED;
	if (x_send(sock, m, n, &info, to, tolen) < 0)
		perror("send"); /* a receive will report the end */
	to = NULL, tolen = 0;
}

static void segment(uint16_t sid, const unsigned char *hdr, size_t nhdr, const unsigned char *b, size_t n, int ordered, uint32_t ppid)
{
	static unsigned char m[1 << 17];

	if (2 + nhdr + n > sizeof m)
		die("segment");
	memcpy(m + 2, hdr, nhdr);
	memcpy(m + 2 + nhdr, b, n);
	send_message(sid, ppid, ordered, m, 2 + nhdr + n);
}

static void send_control(uint16_t sid, int code, const char *word, size_t nword, const char *text)
{
	unsigned char m[600] = {0};
	size_t n = strlen(text) < 500 ? strlen(text) : 500;

	m[3] = code;
	memcpy(m + 4, word, nword);
	memcpy(m + 4 + nword, text, n);
	send_message(sid, ppid_control(), 0, m, 4 + nword + n);
}

static const char reads[4] = {0, 16, 0, 16}; /* IRD and ORD */

static void initiate(uint16_t sid)
{
	forget(sid);
	stream(sid)->initiated = 1;
	if (enhanced)
		send_control(sid, 5, reads, 4, private);
	else
		send_control(sid, draft ? 2 : 1, "", 0, private);
}

static void terminate(uint16_t sid)
{
	stream(sid)->terminated = 1;
	send_control(sid, 4, "", 0, "");
}

static void skip(uint16_t sid, uint16_t by) { stream(sid)->out += by; }

static void set(int what, const void *v, socklen_t n, const char *name)
{
	if (x_setsockopt(sock, IPPROTO_SCTP, what, v, n) < 0)
		die(name);
}

static void set_limit(uint32_t n)
{
	int no = n == 0;

	limit = n;
	set(SCTP_DISABLE_FRAGMENTS, &no, sizeof no, "fragments");
}

static void reset_on_close(void)
{
	struct linger l = {1, 0};

	if (x_setsockopt(sock, SOL_SOCKET, SO_LINGER, &l, sizeof l) < 0)
		die("linger");
}

static void abort_association(void)
{
	reset_on_close();
	x_close(sock);
	printf("aborted\n");
	fflush(stdout);
	sleep(1);
	exit(0);
}

static void setup(void)
{
	static const uint16_t events[] = {SCTP_ASSOC_CHANGE, SCTP_ADAPTATION_INDICATION, SCTP_SHUTDOWN_EVENT};
	struct sctp_setadaptation ind = {.ssb_adaptation_ind = adaptation};
	struct sctp_initmsg init;
	int on = 1, no = !frag, big = 1 << 20;
	size_t i;

	if (x_socket(&sock, v6 ? AF_INET6 : AF_INET) < 0)
		die("socket");
	if (adaptation)
		set(SCTP_ADAPTATION_LAYER, &ind, sizeof ind, "adaptation");
	memset(&init, 0, sizeof init);
	init.sinit_num_ostreams = init.sinit_max_instreams = 16;
	set(SCTP_INITMSG, &init, sizeof init, "initmsg");
	set(SCTP_NODELAY, &on, sizeof on, "nodelay");
	set(SCTP_DISABLE_FRAGMENTS, &no, sizeof no, "fragments");
	set(SCTP_RECVRCVINFO, &on, sizeof on, "rcvinfo");
	x_setsockopt(sock, SOL_SOCKET, SO_SNDBUF, &big, sizeof big);
	x_setsockopt(sock, SOL_SOCKET, SO_RCVBUF, &big, sizeof big);
	if (udp_port) {
		struct sctp_udpencaps e;

		memset(&e, 0, sizeof e);
		e.sue_address.ss_family = v6 ? AF_INET6 : AF_INET;
		e.sue_port = htons(udp_port);
		set(SCTP_REMOTE_UDP_ENCAPS_PORT, &e, sizeof e, "encapsulation");
	}
	for (i = 0; i < sizeof events / sizeof *events; i++) {
		struct sctp_event e;

		memset(&e, 0, sizeof e);
		e.se_assoc_id = SCTP_ALL_ASSOC;
		e.se_type = events[i];
		e.se_on = 1;
#ifdef LINUX
		e.se_assoc_id = SCTP_FUTURE_ASSOC; /* a one-to-one socket has no other associations */
#endif
		set(SCTP_EVENT, &e, sizeof e, "event");
	}
	if (linger)
		reset_on_close();
}

/* fill makes segment n of the echo client: n and a pattern that depends on it. */
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

static int closed; /* the association has ended in order */

static void notification(const union sctp_notification *n)
{
	int i;

	switch (n->sn_header.sn_type) {
	case SCTP_ADAPTATION_INDICATION:
		printf("adaptation %u\n", n->sn_adaptation_event.sai_adaptation_ind);
		break;
	case SCTP_SHUTDOWN_EVENT:
		printf("shutdown\n");
		break;
	case SCTP_ASSOC_CHANGE:
		if (n->sn_assoc_change.sac_state == SCTP_RESTART)
			for (i = 0; i < 65536; i++)
				forget(i);
		closed = n->sn_assoc_change.sac_state == SCTP_SHUTDOWN_COMP;
		printf("association %s\n", n->sn_assoc_change.sac_state == SCTP_COMM_UP ? "up" :
			n->sn_assoc_change.sac_state == SCTP_COMM_LOST ? "lost" :
			n->sn_assoc_change.sac_state == SCTP_RESTART ? "restarted" :
			n->sn_assoc_change.sac_state == SCTP_SHUTDOWN_COMP ? "closed" : "failed");
		break;
	}
}

static int over; /* the client has had all its sessions */

static void ended(uint16_t sid)
{
	int mine = streams[sid] && streams[sid]->initiated && sid == first_stream;

	forget(sid);
	if (client && mine) {
		if (--sessions > 0)
			initiate(sid);
		else
			over = 1;
	}
}

static void control(uint16_t sid, unsigned char *m, size_t n)
{
	struct stream *s = stream(sid);
	int code = m[2] << 8 | m[3], i, word = !draft && code >= 5 && code <= 7 ? 4 : 0;
	static unsigned char copy[1 << 16];

	printf("control %d ssn %d stream %d private %.*s\n", code, m[0] << 8 | m[1], sid, (int)n - 4 - word, m + 4 + word);
	if (code == 4) {
		if (!s->terminated)
			terminate(sid);
		ended(sid);
	} else if (code == (draft ? 2 : 1) || (!draft && code == 5)) {
		if (n - 4 - word >= 6 && !memcmp(m + 4 + word, "reject", 6)) {
			if (draft)
				terminate(sid);
			else
				send_control(sid, code + 2, reads, word, "not you");
			forget(sid);
			return;
		}
		s->open = 1;
		send_control(sid, draft ? 3 : code + 1, reads, word, "welcome");
	} else if (s->initiated && (code == (draft ? 3 : 2) || (!draft && code == 6))) {
		s->open = 1;
		for (i = 0; client && !rdma && i < segments; i++)
			send_message(sid, ppid_segment(), 0, copy, fill(copy, i));
	} else if (s->initiated && !draft && (code == 3 || code == 7))
		ended(sid);
}

static void echoed(uint16_t sid, unsigned char *m, size_t n)
{
	static unsigned char copy[1 << 17];

	if (client) {
		size_t len = fill(copy, get32(m + 2));

		if (len != n || memcmp(copy + 2, m + 2, n - 2))
			printf("wrong segment of %zd bytes\n", n);
		if (++stream(sid)->echoed == segments) {
			printf("echoed %d\n", segments);
			terminate(sid);
		}
		return;
	}
	if (n == 2 + 5 && !memcmp(m + 2, "ABORT", 5))
		abort_association();
	if (n == 2 + 8 && !memcmp(m + 2, "SHUTDOWN", 8)) {
		x_shutdown(sock, SHUT_WR);
		return;
	}
	memcpy(copy, m, n);
	send_message(sid, ppid_segment(), 0, copy, n);
}

/* received handles messages in the order of their DDP-SSNs. */
static void received(uint16_t sid, uint32_t ppid, int flags, const unsigned char *b, size_t n)
{
	struct stream *s = stream(sid);
	struct held *h;
	uint16_t d;

	if (!(flags & SCTP_UNORDERED))
		printf("ordered message\n");
	if (ppid != ppid_control() && ppid != ppid_segment()) {
		printf("unknown ppid %u\n", ppid);
		return;
	}
	if (n < 2 || (d = (b[0] << 8 | b[1]) - s->in) >= AHEAD) {
		printf("wrong: DDP-SSN\n");
		return;
	}
	h = &s->held[(uint16_t)(s->in + d) % AHEAD];
	if (h->b) {
		printf("wrong: DDP-SSN twice\n");
		return;
	}
	*h = (struct held){malloc(n), n, ppid};
	memcpy(h->b, b, n);
	while ((s = streams[sid]) && (h = &s->held[s->in % AHEAD])->b) {
		struct held now = *h;

		h->b = NULL;
		s->in++;
		if (now.ppid == ppid_control())
			control(sid, now.b, now.n);
		else if (!s->open)
			printf("segment outside a session\n");
		else if (s->terminated)
			; /* the other side has not seen the Terminate yet */
		else if (!rdma)
			echoed(sid, now.b, now.n);
		else if (rdmap_segment(&s->rdmap, sid, now.b + 2, now.n - 2) < 0)
			terminate(sid);
		free(now.b);
	}
}

/* talk serves an association until it ends. */
static int talk(void)
{
	static unsigned char m[1 << 17];
	size_t have = 0;

	while (!over) {
		struct sctp_rcvinfo info;
		int flags = 0;
		ssize_t n = x_receive(sock, m + have, sizeof m - have, &info, &flags);

		if (n == 0 || (n < 0 && closed))
			break;
		if (n < 0) {
			perror("receive");
			return 1;
		}
		have += n;
		if (!(flags & MSG_EOR) && CAN_FORK)
			continue; /* part of a message */
		if (flags & MSG_NOTIFICATION)
			notification((union sctp_notification *)m);
		else
			received(info.rcv_sid, ntohl(info.rcv_ppid), info.rcv_flags, m, have);
		have = 0;
	}
	x_close(sock);
	x_finish();
	printf("done\n");
	return 0;
}

int main(int argc, char **argv)
{
	struct sockaddr_storage addr, local;
	struct sockaddr_in *a4 = (struct sockaddr_in *)&addr;
	struct sockaddr_in6 *a6 = (struct sockaddr_in6 *)&addr;
	socklen_t len;
	int c, from = 0, implicit = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	while ((c = getopt(argc, argv, "da:u:fn:er6k:s:p:b:lzi")) != -1) {
		switch (c) {
		case 'd': draft = 1; break;
		case 'a': adaptation = atoi(optarg); break;
		case 'u': udp_port = atoi(optarg); break;
		case 'f': frag = 1; break;
		case 'n': segments = atoi(optarg); break;
		case 'e': enhanced = 1; break;
		case 'r': rdma = 1; break;
		case '6': v6 = 1; break;
		case 'k': sessions = atoi(optarg); break;
		case 's': first_stream = atoi(optarg); break;
		case 'p': private = optarg; break;
		case 'b': from = atoi(optarg); break;
		case 'l': many = 1; break;
		case 'z': linger = 1; break;
		case 'i': implicit = 1; break;
		default: return 2;
		}
	}
	argc -= optind, argv += optind;
	if (argc < 2)
		return 2;
	client = !strcmp(argv[0], "client");
	x_init(udp_port);
	setup();
	memset(&addr, 0, sizeof addr);
	addr.ss_family = v6 ? AF_INET6 : AF_INET;
	len = v6 ? sizeof *a6 : sizeof *a4;
	local = addr;
	a4->sin_port = htons(atoi(argv[1])); /* at the same offset in an IPv6 address */
	if (client) {
		if (argc < 3 || inet_pton(addr.ss_family, argv[2], v6 ? (void *)&a6->sin6_addr : (void *)&a4->sin_addr) != 1)
			return 2;
		((struct sockaddr_in *)&local)->sin_port = htons(from);
		if (from && x_bind(sock, (struct sockaddr *)&local, len) < 0)
			die("bind");
		if (implicit)
			to = (struct sockaddr *)&addr, tolen = len;
		else if (x_connect(sock, (struct sockaddr *)&addr, len) < 0)
			die("connect");
		initiate(first_stream);
		return talk();
	}
	if (x_bind(sock, (struct sockaddr *)&addr, len) < 0 || x_listen(sock, 16) < 0)
		die("listen");
	printf("listening\n");
	for (;;) {
		sock_t l = sock;

		if (x_accept(l, &sock) < 0)
			die("accept");
		if (!many)
			return talk();
#if CAN_FORK
		signal(SIGCHLD, SIG_IGN);
		if (fork() == 0) {
			x_close(l);
			return talk();
		}
		x_close(sock);
		sock = l;
#endif
	}
}
