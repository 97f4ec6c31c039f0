/*
 * ping implements the protocol of rping in both roles. Its peer may be iwarpctl ping or the
 * rping of librdmacm-utils.
 *
 *   ping -s -a 10.0.0.1                       serve one client
 *   ping -c -a 10.0.0.1 -C 100 -S 65000 -V    be the client
 *   ping -c -a 10.0.0.1 -C 100000 -V -r       continue when a daemon on either side restarts
 *
 * In each round the client sends the address of a buffer with data. The server reads the
 * buffer by RDMA Read and answers. Then the client sends the address of a second buffer. The
 * server writes the data back into it by RDMA Write and answers.
 */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <iwarpd.h>

enum {
	ADVERT_LEN = 16, /* of each message */
	NUM_RECVS = 4,
	MIN_SIZE = 26,
	MAX_SIZE = 65535,
	TIMEOUT = 30000, /* ms, for each wait */
};

/* A message; all fields are in network byte order. */
struct advert {
	uint64_t addr;
	uint32_t rkey;
	uint32_t size;
};
_Static_assert(sizeof(struct advert) == ADVERT_LEN, "wire format");

struct options {
	const char *socket, *address;
	unsigned int port, count, size;
	int server, client, validate, verbose, reconnect;
};

enum { WRONG_DATA = -2 }; /* an error that reconnecting does not fix */

struct ping {
	struct options opt;
	struct iwarpd_device *dev;
	struct iwarpd_pd *pd;
	struct iwarpd_cq *send_cq, *recv_cq;
	struct iwarpd_qp *qp;
	struct iwarpd_mr *recv;  /* NUM_RECVS adverts */
	struct iwarpd_mr *start; /* the data */
	struct iwarpd_mr *sink;  /* client: where it is written back */
	unsigned int rounds;     /* client: completed rounds */
	struct iwarpd_error error;
};

static int quiet; /* the failure was reported, and the connection is being retried */

/* fail prints an error and returns -1. */
static int fail(const char *what, const char *why)
{
	if (!quiet)
		fprintf(stderr, "ping: %s: %s\n", what, why);
	return -1;
}

static int fail_with(struct ping *p, const char *what)
{
	return fail(what, p->error.text);
}

static int post_recv(struct ping *p, uint64_t i)
{
	struct iwarpd_sge sge = { p->recv->base + i * ADVERT_LEN, ADVERT_LEN, p->recv->lkey };
	struct iwarpd_recv_wr wr = { .id = i, .sge = &sge, .num_sge = 1 };
	int err = iwarpd_post_recv(p->qp, &wr);

	return err ? fail("post receive", strerror(-err)) : 0;
}

/* setup creates everything that a connection needs. */
static int setup(struct ping *p)
{
	struct iwarpd_qp_attr attr = { .recv_depth = NUM_RECVS, .max_inline = ADVERT_LEN };
	unsigned int access = IWARPD_LOCAL_WRITE | IWARPD_REMOTE_READ;

	if (iwarpd_alloc_pd(p->dev, &p->pd, &p->error) || iwarpd_create_cq(p->dev, 64, &p->send_cq, &p->error) ||
	    iwarpd_create_cq(p->dev, NUM_RECVS, &p->recv_cq, &p->error) ||
	    iwarpd_alloc_mr(p->pd, NUM_RECVS * ADVERT_LEN, IWARPD_LOCAL_WRITE, &p->recv, &p->error) ||
	    iwarpd_alloc_mr(p->pd, p->opt.server ? MAX_SIZE : p->opt.size, access, &p->start, &p->error))
		return fail_with(p, "set up");
	if (p->opt.client &&
	    iwarpd_alloc_mr(p->pd, p->opt.size, IWARPD_LOCAL_WRITE | IWARPD_REMOTE_WRITE, &p->sink, &p->error))
		return fail_with(p, "set up");
	attr.send_cq = p->send_cq;
	attr.recv_cq = p->recv_cq;
	if (iwarpd_create_qp(p->pd, &attr, &p->qp, &p->error))
		return fail_with(p, "set up");
	for (uint64_t i = 0; i < NUM_RECVS; i++)
		if (post_recv(p, i))
			return -1;
	return 0;
}

/* established waits for the result of connect or accept. */
static int established(struct ping *p)
{
	struct iwarpd_event ev;

	if (iwarpd_get_qp_event(p->qp, &ev, TIMEOUT, &p->error))
		return fail_with(p, "connect");
	if (ev.type != IWARPD_EVENT_ESTABLISHED)
		return fail("connect", ev.error.err ? ev.error.text : iwarpd_event_text(ev.type));
	if (p->opt.verbose)
		fprintf(stderr, "connected from %s to %s\n", ev.local, ev.remote);
	return 0;
}

static const struct iwarpd_startup one_read = { .ird = 1, .ord = 1 };

static int dial(struct ping *p)
{
	char remote[128];
	struct iwarpd_connect_attr attr = { .remote = remote, .startup = &one_read };
	int v6 = strchr(p->opt.address, ':') != NULL;

	snprintf(remote, sizeof(remote), v6 ? "[%s]:%u" : "%s:%u", p->opt.address, p->opt.port);
	if (iwarpd_connect(p->qp, &attr, &p->error))
		return fail_with(p, "connect");
	return established(p);
}

static int serve(struct ping *p)
{
	struct iwarpd_listen_attr attr = { .address = p->opt.address, .port = (uint16_t)p->opt.port, .startup = &one_read };
	struct iwarpd_listener *l;
	struct iwarpd_event ev;

	if (iwarpd_listen(p->dev, &attr, &l, &p->error))
		return fail_with(p, "listen");
	fprintf(stderr, "listening on %s\n", iwarpd_listener_address(l));
	do {
		if (iwarpd_get_event(p->dev, &ev, -1, &p->error))
			return fail_with(p, "listen");
	} while (ev.type != IWARPD_EVENT_CONNECT_REQUEST);
	if (iwarpd_accept(p->dev, ev.conn, p->qp, NULL, &p->error))
		return fail_with(p, "accept");
	return established(p);
}

/*
 * completion waits for a completion. It returns 1 if it was flushed because the
 * connection ended.
 */
static int completion(struct iwarpd_cq *cq, struct iwarpd_wc *wc)
{
	int n = iwarpd_wait_cq(cq, wc, 1, TIMEOUT);

	if (n < 0)
		return fail("wait for a completion", strerror(-n));
	if (wc->status == IWARPD_WC_WR_FLUSH_ERR)
		return 1;
	if (wc->status != IWARPD_WC_SUCCESS)
		return fail("completion", iwarpd_wc_status_text(wc->status));
	return 0;
}

/* run posts a work request and waits for its completion. */
static int run(struct ping *p, struct iwarpd_send_wr *wr)
{
	struct iwarpd_wc wc;
	int err;

	wr->flags |= IWARPD_SIGNALED;
	err = iwarpd_post_send(p->qp, wr);
	if (err)
		return fail("post", strerror(-err));
	err = completion(p->send_cq, &wc);
	return err > 0 ? fail("post", iwarpd_wc_status_text(wc.status)) : err;
}

static int send_advert(struct ping *p, const struct iwarpd_mr *mr)
{
	struct advert a = { 0 };
	struct iwarpd_send_wr wr = {
		.opcode = IWARPD_WR_SEND, .flags = IWARPD_INLINE, .inline_data = &a, .inline_len = sizeof(a),
	};

	if (mr) /* NULL: a go-ahead, whose content is ignored */
		a = (struct advert){ htobe64(mr->base), htobe32(mr->rkey), htobe32((uint32_t)mr->length) };
	return run(p, &wr);
}

/*
 * recv_advert receives an advert. It returns 1 when the peer has closed the
 * connection.
 */
static int recv_advert(struct ping *p, struct advert *a)
{
	struct iwarpd_wc wc;
	int err = completion(p->recv_cq, &wc);

	if (err)
		return err;
	if (wc.len != ADVERT_LEN || wc.id >= NUM_RECVS)
		return fail("receive", "a message that is none of rping's");
	memcpy(a, (char *)p->recv->addr + wc.id * ADVERT_LEN, sizeof(*a));
	*a = (struct advert){ be64toh(a->addr), be32toh(a->rkey), be32toh(a->size) };
	return post_recv(p, wc.id);
}

/* move reads or writes len bytes of the data from or to the client's buffer. */
static int move(struct ping *p, uint32_t opcode, const struct advert *a, uint32_t len)
{
	struct iwarpd_sge sge = { p->start->base, len, p->start->lkey };
	struct iwarpd_send_wr wr = {
		.opcode = opcode, .sge = &sge, .num_sge = 1, .remote_addr = a->addr, .rkey = a->rkey,
	};

	return run(p, &wr);
}

/* text_len returns the length of the data as rping writes it back: with its NUL. */
static uint32_t text_len(const struct ping *p, uint32_t size)
{
	size_t n = strnlen(p->start->addr, size);

	return n < size ? (uint32_t)n + 1 : size;
}

static int server_round(struct ping *p)
{
	struct advert a, sink;
	int err = recv_advert(p, &a);
	uint32_t len;

	if (err)
		return err;
	if (a.size == 0 || a.size > MAX_SIZE)
		return fail("advert", "a size that rping does not have");
	if (move(p, IWARPD_WR_RDMA_READ, &a, a.size) || send_advert(p, NULL) || recv_advert(p, &sink))
		return -1;
	len = text_len(p, a.size);
	if (p->opt.verbose)
		printf("server ping data: %.*s\n", (int)len, (char *)p->start->addr);
	if (move(p, IWARPD_WR_RDMA_WRITE, &sink, len < sink.size ? len : sink.size))
		return -1;
	return send_advert(p, NULL);
}

/* fill writes the data of round n: a number and letters, ended by NUL. */
static void fill(char *b, unsigned int size, unsigned int n)
{
	unsigned int k = (unsigned int)snprintf(b, size, "rdma-ping-%u: ", n);

	for (unsigned int i = k; i < size; i++)
		b[i] = (char)('A' + (n + i - k) % ('z' - 'A' + 1));
	b[size - 1] = 0;
}

static int client_round(struct ping *p, unsigned int n)
{
	struct advert go;
	int err;

	fill(p->start->addr, p->opt.size, n);
	err = send_advert(p, p->start);
	if (!err)
		err = recv_advert(p, &go);
	if (!err)
		err = send_advert(p, p->sink);
	if (!err)
		err = recv_advert(p, &go);
	if (err)
		return err > 0 ? fail("connection", "it was closed, or lost") : err;
	if (p->opt.validate && memcmp(p->start->addr, p->sink->addr, p->opt.size) != 0) {
		fail("validate", "what came back is not what was sent");
		return WRONG_DATA;
	}
	if (p->opt.verbose)
		printf("ping data: %s\n", (char *)p->sink->addr);
	return 0;
}

static int be_server(struct ping *p)
{
	unsigned int n = 0;
	int err = serve(p);

	while (!err) {
		err = server_round(p);
		if (!err)
			n++;
	}
	if (err < 0)
		return err;
	printf("%u rounds\n", n);
	return 0;
}

/* draining reports whether the daemon has announced that it will stop. */
static int draining(struct ping *p)
{
	struct iwarpd_event ev;

	while (iwarpd_get_event(p->dev, &ev, 0, NULL) == 0)
		if (ev.type == IWARPD_EVENT_DRAINING)
			return 1;
	return 0;
}

static int hang_up(struct ping *p)
{
	struct iwarpd_event ev = { 0 };

	if (iwarpd_disconnect(p->qp, false, &p->error))
		return fail_with(p, "disconnect");
	while (ev.type != IWARPD_EVENT_DISCONNECTED)
		if (iwarpd_get_qp_event(p->qp, &ev, TIMEOUT, &p->error))
			return fail_with(p, "disconnect");
	return 0;
}

static int be_client(struct ping *p)
{
	int stop = 0, err = dial(p);

	for (unsigned int first = p->rounds; !err && !stop && p->rounds < p->opt.count; p->rounds++) {
		err = client_round(p, p->rounds);
		if (err || !p->opt.reconnect)
			continue;
		quiet = 0;
		if (p->rounds == first)
			fprintf(stderr, "ping: connected to %s, round %u\n", p->opt.address, p->rounds);
		stop = draining(p);
	}
	if (err)
		return err;
	if (stop) {
		fail("closing the connection", "the daemon is stopping");
		quiet = 1; /* the daemon may exit before the connection has ended */
	}
	if (hang_up(p) || stop)
		return -1;
	printf("%u rounds\n", p->opt.count);
	return 0;
}

/* session opens the device, runs one side, and closes the device. */
static int session(struct ping *p)
{
	int err, wait = p->opt.reconnect ? -1 : 0;

	if (iwarpd_open_wait(p->opt.socket, NULL, wait, &p->dev, &p->error))
		return fail_with(p, "open");
	err = setup(p);
	if (!err)
		err = p->opt.server ? be_server(p) : be_client(p);
	iwarpd_close(p->dev);
	return err;
}

static int usage(void)
{
	fputs("usage: ping -s|-c [-a ADDR] [-p PORT] [-C ROUNDS] [-S SIZE] [-V] [-v] [-r] [-u SOCKET]\n", stderr);
	return 2;
}

static int parse(struct options *o, int argc, char **argv)
{
	int c;

	*o = (struct options){ .port = 7174, .count = 10, .size = 64 };
	while ((c = getopt(argc, argv, "sca:p:C:S:Vvru:")) != -1) {
		switch (c) {
		case 's': o->server = 1; break;
		case 'c': o->client = 1; break;
		case 'a': o->address = optarg; break;
		case 'p': o->port = (unsigned int)atoi(optarg); break;
		case 'C': o->count = (unsigned int)atoi(optarg); break;
		case 'S': o->size = (unsigned int)atoi(optarg); break;
		case 'V': o->validate = 1; break;
		case 'v': o->verbose = 1; break;
		case 'r': o->reconnect = 1; break;
		case 'u': o->socket = optarg; break;
		default: return -1;
		}
	}
	if (o->server == o->client || (o->client && !o->address) || o->port > 65535 || optind != argc)
		return -1;
	return o->size < MIN_SIZE || o->size > MAX_SIZE ? -1 : 0;
}

int main(int argc, char **argv)
{
	struct ping p = { 0 };
	int err;

	if (parse(&p.opt, argc, argv))
		return usage();
	err = session(&p);
	while (err && err != WRONG_DATA && p.opt.reconnect) {
		quiet = 1;
		nanosleep(&(struct timespec){ .tv_nsec = 200000000 }, NULL);
		err = session(&p);
	}
	return err ? 1 : 0;
}
