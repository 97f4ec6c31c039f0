/* Uses of librdmacm and libibverbs that programs seldom make: cm MODE ADDRESS. The peer is the same process. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "cm.h"

static const char *address;

static struct rdma_event_channel *channel(void)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();

	CHECK(ch);
	return ch;
}

static struct sockaddr_in socket_address(__be16 port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = port };

	CHECK(inet_pton(AF_INET, address, &a.sin_addr) == 1);
	return a;
}

static struct rdma_cm_id *listener(struct rdma_event_channel *ch, int backlog)
{
	struct sockaddr_in a = socket_address(0);
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&a) == 0 && rdma_listen(id, backlog) == 0);
	return id;
}

/* next takes and acknowledges the next event of a channel, and returns its id. */
static struct rdma_cm_id *next(struct rdma_event_channel *ch, enum rdma_cm_event_type want)
{
	struct rdma_cm_event *e;
	struct rdma_cm_id *id;

	CHECK(rdma_get_cm_event(ch, &e) == 0);
	if (e->event != want)
		printf("%s instead of %s\n", rdma_event_str(e->event), rdma_event_str(want));
	CHECK(e->event == want);
	id = e->id;
	CHECK(rdma_ack_cm_event(e) == 0);
	return id;
}

/* qp_state returns the state of a queue pair, which its structure has too. */
static enum ibv_qp_state qp_state(struct ibv_qp *qp)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == qp->state);
	return attr.qp_state;
}

static struct ibv_cq *shared; /* of all queue pairs of create_qp, or NULL */

static void create_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = { .send_cq = shared, .recv_cq = shared, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };

	CHECK(rdma_create_qp(id, NULL, &init) == 0);
}

/* route_to returns an id that may connect to an address. */
static struct rdma_cm_id *route_to(struct rdma_event_channel *ch, struct sockaddr_in *to)
{
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)to, 2000) == 0 && next(ch, RDMA_CM_EVENT_ADDR_RESOLVED) == id);
	CHECK(rdma_resolve_route(id, 2000) == 0 && next(ch, RDMA_CM_EVENT_ROUTE_RESOLVED) == id);
	return id;
}

/* call starts a connection to a listener. */
static struct rdma_cm_id *call(struct rdma_event_channel *ch, struct rdma_cm_id *to)
{
	struct sockaddr_in a = socket_address(rdma_get_src_port(to));
	struct rdma_cm_id *id = route_to(ch, &a);

	create_qp(id);
	CHECK(rdma_connect(id, NULL) == 0);
	return id;
}

/* establish connects two new ids of a listener. */
static void establish(struct rdma_event_channel *server, struct rdma_event_channel *client, struct rdma_cm_id *l,
		      struct rdma_cm_id **id, struct rdma_cm_id **child)
{
	*id = call(client, l);
	*child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	create_qp(*child);
	CHECK(rdma_accept(*child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == *child && next(client, RDMA_CM_EVENT_ESTABLISHED) == *id);
}

static void end(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0);
}

/* part ends both ids of a connection, and their listener. */
static void part(struct rdma_cm_id *one, struct rdma_cm_id *other, struct rdma_cm_id *l)
{
	end(one);
	end(other);
	end(l);
}

static bool readable(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, 0) == 1;
}

/* waiting returns the number of events that a channel has. */
static unsigned long waiting(struct rdma_event_channel *ch)
{
	char path[64], line[128];
	unsigned long n;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", ch->fd);
	f = fopen(path, "re");
	CHECK(f);
	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "eventfd-count: %lx", &n) == 1) {
			fclose(f);
			return n;
		}
	}
	CHECK(false);
}

static void await(struct rdma_event_channel *ch, unsigned long n)
{
	while (waiting(ch) != n)
		usleep(1000);
}

/* The requests of peers that do not wait are bounded by the backlog, like others. */
static void requests(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 2);

	for (int i = 0; i < 6; i++) {
		unsigned long before = waiting(server);
		struct rdma_cm_id *id = call(client, l);

		while (waiting(server) == before && !readable(client->fd))
			usleep(1000);
		end(id);
	}
	CHECK(waiting(server) == 2);
	for (int i = 0; i < 2; i++)
		end(next(server, RDMA_CM_EVENT_CONNECT_REQUEST));
	for (int reported = 0; !reported;) { /* until the daemon has noticed that they are gone */
		struct rdma_cm_id *id = call(client, l);

		while (waiting(server) == 0 && !readable(client->fd))
			usleep(1000);
		reported = waiting(server) == 1;
		end(id);
	}
	end(l); /* with a request that was not taken */
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* A request moves to another channel with its listener. */
static void migrate(void)
{
	struct rdma_event_channel *old = channel(), *now = channel(), *client = channel();
	struct rdma_cm_id *l = listener(old, 0), *id = call(client, l), *child;

	await(old, 1);
	CHECK(rdma_migrate_id(l, now) == 0);
	rdma_destroy_event_channel(old);
	child = next(now, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(child->channel == now);
	CHECK(rdma_reject(child, NULL, 0) == 0);
	end(child);
	CHECK(next(client, RDMA_CM_EVENT_REJECTED) == id);
	end(id);
	end(l);
	rdma_destroy_event_channel(now);
	rdma_destroy_event_channel(client);
}

/* still_running checks that a thread does not end within a second. */
static void still_running(pthread_t t)
{
	struct timespec soon;

	CHECK(clock_gettime(CLOCK_REALTIME, &soon) == 0);
	soon.tv_sec++;
	CHECK(pthread_timedjoin_np(t, NULL, &soon) == ETIMEDOUT);
}

/* A move of an identifier from one channel to another. */
struct move {
	struct rdma_cm_id *id;
	struct rdma_event_channel *to;
};

static void *move(void *arg)
{
	struct move *m = arg;

	CHECK(rdma_migrate_id(m->id, m->to) == 0);
	return NULL;
}

/* An identifier moves when its events are acknowledged. */
static void held(void)
{
	struct rdma_event_channel *old = channel(), *now = channel();
	struct sockaddr_in a = socket_address(htons(1));
	struct rdma_cm_event *e;
	struct move m = { .to = now };
	pthread_t t;

	CHECK(rdma_create_id(old, &m.id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(m.id, NULL, (struct sockaddr *)&a, 2000) == 0 && rdma_get_cm_event(old, &e) == 0);
	CHECK(pthread_create(&t, NULL, move, &m) == 0);
	still_running(t);
	CHECK(rdma_ack_cm_event(e) == 0 && pthread_join(t, NULL) == 0);
	rdma_destroy_event_channel(old);
	CHECK(rdma_resolve_route(m.id, 2000) == 0 && next(now, RDMA_CM_EVENT_ROUTE_RESOLVED) == m.id);
	end(m.id);

	/* An event that the program has not taken ends with its identifier. */
	CHECK(rdma_create_id(now, &m.id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(m.id, NULL, (struct sockaddr *)&a, 2000) == 0 && readable(now->fd));
	end(m.id);
	CHECK(!readable(now->fd));
	rdma_destroy_event_channel(now);
}

/* Listening or connecting a second time, and connecting a listener, fail and change nothing. */
static void twice(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct sockaddr_in a = socket_address(htons(1));

	CHECK(rdma_listen(l, 0) == -1 && errno == EINVAL);
	CHECK(rdma_resolve_addr(l, NULL, (struct sockaddr *)&a, 2000) == -1 && errno == EINVAL);
	CHECK(!readable(server->fd));
	establish(server, client, l, &id, &child);
	CHECK(rdma_connect(id, NULL) == -1 && errno == EINVAL);
	CHECK(rdma_disconnect(id) == 0);
	CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == child);
	CHECK(rdma_disconnect(child) == 0);
	CHECK(next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	part(child, id, l);
}

/* refused checks that each of some calls for an id fails with EINVAL. */
static void refused(struct rdma_cm_id *id, const char *calls)
{
	struct sockaddr_in a = socket_address(0), b = socket_address(htons(1));
	struct sockaddr_in6 other = { .sin6_family = AF_INET6, .sin6_port = htons(1), .sin6_addr = IN6ADDR_LOOPBACK_INIT };

	for (const char *c = calls; *c; c++) {
		int err = 0;

		errno = 0;
		switch (*c) {
		case 'b':
			err = rdma_bind_addr(id, (struct sockaddr *)&a);
			break;
		case 'l':
			err = rdma_listen(id, 0);
			break;
		case 'a':
			err = rdma_resolve_addr(id, NULL, (struct sockaddr *)&b, 2000);
			break;
		case 'o': /* of the other address family */
			err = rdma_resolve_addr(id, (struct sockaddr *)&a, (struct sockaddr *)&other, 2000);
			break;
		case 'r':
			err = rdma_resolve_route(id, 2000);
			break;
		case 'c':
			err = rdma_connect(id, NULL);
			break;
		case 'd':
			err = rdma_disconnect(id);
			break;
		case 'A':
			err = rdma_accept(id, NULL);
			break;
		case 'R':
			err = rdma_reject(id, NULL, 0);
			break;
		}
		if (err != -1 || errno != EINVAL)
			printf("call %c of %s: %d, %s\n", *c, calls, err, strerror(errno));
		CHECK(err == -1 && errno == EINVAL);
	}
}

/* Each call is refused in all states but its own, as the kernel's rdma_cm does, and reports no event. */
static void states(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct sockaddr_in a = socket_address(0), to = socket_address(rdma_get_src_port(l));

	refused(l, "blaordcAR");
	CHECK(rdma_create_id(client, &id, NULL, RDMA_PS_TCP) == 0);
	refused(id, "ordcAR");
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&a) == 0);
	refused(id, "bordcAR");
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000) == 0 && next(client, RDMA_CM_EVENT_ADDR_RESOLVED) == id);
	create_qp(id);
	CHECK(qp_state(id->qp) == IBV_QPS_INIT);
	refused(id, "blaodcAR");
	CHECK(rdma_resolve_route(id, 2000) == 0 && next(client, RDMA_CM_EVENT_ROUTE_RESOLVED) == id);
	refused(id, "blaordAR");
	CHECK(rdma_connect(id, NULL) == 0 && qp_state(id->qp) == IBV_QPS_INIT);
	refused(id, "blaorcAR");
	child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	create_qp(child);
	refused(child, "blaorc");
	CHECK(qp_state(child->qp) == IBV_QPS_INIT && rdma_accept(child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child && next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	CHECK(qp_state(id->qp) == IBV_QPS_RTS && qp_state(child->qp) == IBV_QPS_RTS);
	refused(id, "blaorcAR");
	refused(child, "blaorcAR");
	CHECK(!readable(server->fd) && !readable(client->fd));
	part(id, child, l);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/*
 * An endpoint without an address, as rdma_getaddrinfo makes of hints without one, is refused, and one with too much
 * private data.
 */
static void nowhere(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *res;
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *id;

	CHECK(rdma_getaddrinfo(NULL, NULL, &hints, &res) == 0);
	CHECK(rdma_create_ep(&id, res, NULL, NULL) == -1 && errno == EINVAL);
	rdma_freeaddrinfo(res);
	hints.ai_flags = 0;
	CHECK(rdma_getaddrinfo(address, "1", &hints, &res) == 0);
	res->ai_connect_len = IWARPD_MAX_PRIVATE_DATA + 1;
	res->ai_connect = calloc(1, res->ai_connect_len);
	CHECK(rdma_create_ep(&id, res, NULL, NULL) == -1 && errno == EINVAL);
	rdma_freeaddrinfo(res);
	CHECK(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, NULL) == -1 && errno == EINVAL);
	CHECK(rdma_resolve_addr(id, NULL, NULL, 1000) == -1 && errno == EINVAL);
	end(id);
	rdma_destroy_event_channel(ch);
}

/* An endpoint for datagrams, which iwarpd does not support, is refused when it is made, and not when a peer calls. */
static void datagrams(void)
{
	struct rdma_addrinfo hints[] = {
		{ .ai_flags = RAI_PASSIVE, .ai_qp_type = IBV_QPT_UD },
		{ .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_UDP },
	}, *res;
	struct ibv_qp_init_attr init = { .cap = { 1, 1, 1, 1, 0 } };
	struct rdma_cm_id *id;

	for (size_t i = 0; i < sizeof(hints) / sizeof(hints[0]); i++) {
		CHECK(rdma_getaddrinfo(address, "0", &hints[i], &res) == 0);
		CHECK(res->ai_qp_type == IBV_QPT_UD && res->ai_port_space == RDMA_PS_UDP);
		CHECK(rdma_create_ep(&id, res, NULL, &init) == -1 && errno == ENODEV);
		rdma_freeaddrinfo(res);
	}
}

/*
 * An identifier that is not bound has a port when the program asks for it, which is that of its connection. Others get one
 * when they connect.
 */
static void ported(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct sockaddr_in a = socket_address(rdma_get_src_port(l));

	for (int ask = 0; ask < 3; ask++) {
		__be16 port = 0;

		CHECK(rdma_create_id(client, &id, NULL, RDMA_PS_TCP) == 0 && rdma_get_src_port(id) == 0);
		CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000) == 0 && next(client, RDMA_CM_EVENT_ADDR_RESOLVED) == id);
		if (ask == 1)
			port = rdma_get_src_port(id);
		CHECK(rdma_resolve_route(id, 2000) == 0 && next(client, RDMA_CM_EVENT_ROUTE_RESOLVED) == id);
		if (ask == 2)
			port = rdma_get_src_port(id);
		CHECK((port != 0) == (ask > 0));
		if (ask > 0) { /* it is that of no other one until then */
			struct sockaddr_in same = socket_address(port);
			struct rdma_cm_id *other;

			CHECK(rdma_create_id(client, &other, NULL, RDMA_PS_TCP) == 0);
			CHECK(rdma_bind_addr(other, (struct sockaddr *)&same) == -1 && errno == EADDRINUSE);
			end(other);
		}
		CHECK(ask == 0 || (rdma_get_src_port(id) == port && ((struct sockaddr_in *)rdma_get_local_addr(id))->sin_port == port));
		create_qp(id);
		CHECK(rdma_connect(id, NULL) == 0);
		child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
		create_qp(child);
		CHECK(rdma_accept(child, NULL) == 0);
		CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child && next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
		CHECK(rdma_get_src_port(id) != 0 && rdma_get_src_port(id) == rdma_get_dst_port(child));
		CHECK(ask == 0 || rdma_get_src_port(id) == port);
		end(id);
		end(child);
	}
	end(l);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* A source address that the host does not have is refused at once, and can be replaced. */
static void source(void)
{
	struct sockaddr_in none = { .sin_family = AF_INET }, to = socket_address(htons(1));
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *id;

	CHECK(inet_pton(AF_INET, "192.0.2.77", &none.sin_addr) == 1);
	CHECK(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, (struct sockaddr *)&none, (struct sockaddr *)&to, 2000) == -1 && errno == EADDRNOTAVAIL);
	CHECK(!readable(ch->fd) && !id->verbs);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000) == 0 && next(ch, RDMA_CM_EVENT_ADDR_RESOLVED) == id && id->verbs);
	end(id);
	rdma_destroy_event_channel(ch);
}

/* A port that another identifier uses is refused when an identifier is bound to it, and with RDMA_OPTION_ID_REUSEADDR when it listens. */
static void taken(void)
{
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *bound, *id;
	struct sockaddr_in a = socket_address(0);
	int on = 1;

	CHECK(rdma_create_id(ch, &bound, NULL, RDMA_PS_TCP) == 0 && rdma_bind_addr(bound, (struct sockaddr *)&a) == 0);
	a.sin_port = rdma_get_src_port(bound);
	CHECK(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&a) == -1 && errno == EADDRINUSE && !id->verbs);
	CHECK(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof(on)) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&a) == 0);
	CHECK(rdma_listen(id, 0) == -1 && errno == EADDRINUSE);
	end(bound);
	CHECK(rdma_listen(id, 0) == 0);
	end(id);
	rdma_destroy_event_channel(ch);
}

/* A listener that is bound to a port of the program's choice holds as many requests as its backlog says. */
static void backlog(void)
{
	enum { CALLS = 200 };
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l, *id[CALLS];
	struct sockaddr_in a = socket_address(htons(7177));

	CHECK(rdma_create_id(server, &l, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(l, (struct sockaddr *)&a) == 0 && rdma_listen(l, CALLS) == 0);
	for (int i = 0; i < CALLS; i++)
		id[i] = call(client, l);
	for (int i = 0; i < CALLS; i++)
		end(next(server, RDMA_CM_EVENT_CONNECT_REQUEST));
	for (int i = 0; i < CALLS; i++)
		end(id[i]);
	end(l);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* A program may answer a request when its listener has ended, whose port is free then. */
static void single(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id[2], *child[2];
	struct sockaddr_in a = socket_address(rdma_get_src_port(l));

	for (int i = 0; i < 2; i++) {
		id[i] = call(client, l);
		child[i] = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	}
	end(l);
	CHECK(rdma_create_id(server, &l, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(l, (struct sockaddr *)&a) == 0 && rdma_listen(l, 0) == 0);
	create_qp(child[0]);
	CHECK(rdma_accept(child[0], NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child[0] && next(client, RDMA_CM_EVENT_ESTABLISHED) == id[0]);
	CHECK(rdma_reject(child[1], NULL, 0) == 0 && next(client, RDMA_CM_EVENT_REJECTED) == id[1]);
	for (int i = 0; i < 2; i++) {
		end(id[i]);
		end(child[i]);
	}
	end(l);
}

/* The peer of a request that cannot be accepted does not wait. The program cannot answer the request again. */
static void unacceptable(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id = call(client, l);
	struct rdma_cm_id *child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);

	refused(child, "A"); /* there is no queue pair */
	CHECK(next(client, RDMA_CM_EVENT_REJECTED) == id);
	create_qp(child);
	refused(child, "AR");
	part(id, child, l);
}

/* An identifier whose bind the daemon refuses, which has no room for more listeners, has no device. */
static void unbound(void)
{
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *ids[1000];
	int err = 0, n = 0;

	while (!err) {
		struct sockaddr_in a = socket_address(0);

		CHECK(n < 1000 && rdma_create_id(ch, &ids[n], NULL, RDMA_PS_TCP) == 0);
		err = rdma_bind_addr(ids[n], (struct sockaddr *)&a);
		CHECK((err == 0) == (ids[n]->verbs != NULL) && (err == 0) == (ids[n]->pd != NULL));
		n++;
	}
	while (n > 0)
		end(ids[--n]);
	rdma_destroy_event_channel(ch);
}

/* recv_empty posts a receive without room. */
static void recv_empty(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_recv_wr wr = { .wr_id = id }, *bad;

	CHECK(ibv_post_recv(qp, &wr, &bad) == 0);
}

/* write_badly posts a Write with Immediate Data from memory that is not registered. */
static void write_badly(struct ibv_qp *qp)
{
	static char byte;
	struct ibv_sge sge = { .addr = (uintptr_t)&byte, .length = 1, .lkey = UINT32_MAX };
	struct ibv_send_wr wr = { .wr_id = qp->qp_num, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM }, *bad;

	CHECK(ibv_post_send(qp, &wr, &bad) == 0);
}

/* Writes with Immediate Data fail at once, on queue pairs that share a completion queue. Each has a completion with the reason. */
static void halves(void)
{
	enum { PAIRS = 8 };
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *ids[PAIRS], *children[PAIRS];
	struct ibv_wc wc;

	shared = ibv_create_cq(l->verbs, 100, NULL, NULL, 0);
	CHECK(shared);
	for (int i = 0; i < PAIRS; i++)
		establish(server, client, l, &ids[i], &children[i]);
	for (int i = 0; i < PAIRS; i++)
		write_badly(ids[i]->qp);
	for (int i = 0; i < PAIRS; i++) {
		while (ibv_poll_cq(shared, 1, &wc) == 0)
			usleep(1000);
		if (wc.status != IBV_WC_LOC_PROT_ERR)
			printf("queue pair %u: %s\n", wc.qp_num, ibv_wc_status_str(wc.status));
		CHECK(wc.wr_id == wc.qp_num && wc.status == IBV_WC_LOC_PROT_ERR);
	}
	for (int i = 0; i < PAIRS; i++) {
		end(ids[i]);
		end(children[i]);
	}
	end(l);
	CHECK(ibv_destroy_cq(shared) == 0);
}

/* A completion queue that is as deep as the program needs has room for both halves of Writes with Immediate Data. */
static void exact(void)
{
	enum { WRITES = 4 };
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_wc wc;

	shared = ibv_create_cq(l->verbs, 2 * WRITES, NULL, NULL, 0); /* sends and receives */
	CHECK(shared);
	establish(server, client, l, &id, &child);
	shared = NULL;
	for (int i = 0; i < WRITES; i++)
		recv_empty(id->qp, 0);
	for (int i = 0; i < WRITES; i++)
		write_badly(id->qp);
	CHECK(next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	for (int sends = 0, recvs = 0; sends < WRITES || recvs < WRITES;) {
		while (ibv_poll_cq(id->qp->send_cq, 1, &wc) == 0)
			usleep(1000);
		sends += wc.wr_id == id->qp->qp_num;
		recvs += wc.wr_id == 0;
	}
	CHECK(ibv_poll_cq(id->qp->send_cq, 1, &wc) == 0);
	part(id, child, l);
}

/*
 * A Write with Immediate Data that takes two entries of a send queue is posted whole or not at all, and a Read into several
 * pieces is refused.
 */
static void whole(void)
{
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *l = listener(ch, 0);
	struct ibv_cq *cq = ibv_create_cq(l->verbs, 100, NULL, NULL, 0);
	struct ibv_pd *pd = ibv_alloc_pd(l->verbs);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 1, 2, 1, 0 } };
	struct ibv_send_wr one = { .opcode = IBV_WR_SEND }, two = { .opcode = IBV_WR_RDMA_WRITE_WITH_IMM }, *bad;
	struct ibv_send_wr pieces = { .opcode = IBV_WR_RDMA_READ, .sg_list = (struct ibv_sge[2]){ { 0 } }, .num_sge = 2 };
	struct ibv_device_attr attr;
	struct ibv_qp *qp;
	int err;

	CHECK(cq && pd);
	qp = ibv_create_qp(pd, &init);
	CHECK(ibv_query_device(l->verbs, &attr) == 0 && attr.max_sge_rd == 1);
	CHECK(qp && ibv_post_send(qp, &pieces, &bad) == EINVAL && bad == &pieces);
	CHECK(ibv_post_send(qp, &one, &bad) == 0);
	while ((err = ibv_post_send(qp, &two, &bad)) == 0)
		;
	CHECK(err == ENOMEM && bad == &two);
	CHECK(ibv_post_send(qp, &one, &bad) == 0); /* the number of entries is even, so one was free */
	CHECK(ibv_post_send(qp, &one, &bad) == ENOMEM);
	CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0);
	end(l);
	rdma_destroy_event_channel(ch);
}

/*
 * A listener ends with a request that was not taken, and then the daemon ends, which polls report too. What is destroyed then has no
 * descriptor any more.
 */
static void dropped(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id;
	int files = open_files();
	struct ibv_port_attr port;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	void *context;

	id = call(client, l);
	await(server, 1);
	end(l);
	rdma_destroy_event_channel(server);
	CHECK(next(client, RDMA_CM_EVENT_REJECTED) == id);
	CHECK(ibv_poll_cq(id->qp->recv_cq, 1, &wc) == 0);
	CHECK(ibv_query_port(id->verbs, 1, &port) == 0 && port.state == IBV_PORT_ACTIVE && port.phys_state == 5);
	printf("dropped\n");
	fflush(stdout);
	CHECK(next(client, RDMA_CM_EVENT_DEVICE_REMOVAL) == id);
	CHECK(!readable(client->fd));
	CHECK(ibv_query_port(id->verbs, 1, &port) == 0 && port.state == IBV_PORT_DOWN && port.phys_state == 3);
	CHECK(ibv_poll_cq(id->qp->recv_cq, 1, &wc) < 0);
	CHECK(ibv_destroy_cq(id->recv_cq) == EBUSY); /* its queue pair uses it */

	/* What is posted now is flushed, and wakes a program. */
	CHECK(ibv_req_notify_cq(id->recv_cq, 0) == 0);
	recv_empty(id->qp, 1);
	CHECK(ibv_get_cq_event(id->recv_cq_channel, &cq, &context) == 0 && cq == id->recv_cq);
	ibv_ack_cq_events(cq, 1);
	CHECK(ibv_poll_cq(cq, 1, &wc) == 1 && wc.wr_id == 1 && wc.status == IBV_WC_WR_FLUSH_ERR);
	end(id);
	CHECK(open_files() == files - 1); /* server */
}

static struct ibv_context *device(int i)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *c;

	CHECK(list && list[0] && (i == 0 || list[1]));
	c = ibv_open_device(list[i]);
	CHECK(c);
	ibv_free_device_list(list);
	return c;
}

/* A queue pair and what it needs. */
struct queues {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

static struct queues make(struct ibv_context *c, struct ibv_comp_channel *ch)
{
	struct queues q = { .pd = ibv_alloc_pd(c), .cq = ibv_create_cq(c, 10, NULL, ch, 0) };
	struct ibv_qp_init_attr init = { .send_cq = q.cq, .recv_cq = q.cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };

	CHECK(q.pd && q.cq);
	q.qp = ibv_create_qp(q.pd, &init);
	CHECK(q.qp);
	return q;
}

static void unmake(struct queues *q)
{
	CHECK(ibv_destroy_qp(q->qp) == 0 && ibv_destroy_cq(q->cq) == 0 && ibv_dealloc_pd(q->pd) == 0);
}

/* flush posts a receive and moves a queue pair to the error state. */
static void flush(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_recv_wr wr = { .wr_id = 7 }, *bad;

	CHECK(ibv_post_recv(qp, &wr, &bad) == 0 && ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
}

static void flushes(struct queues *q)
{
	struct ibv_wc wc;

	flush(q->qp);
	while (ibv_poll_cq(q->cq, 1, &wc) == 0)
		usleep(1000);
	CHECK(wc.wr_id == 7 && wc.status == IBV_WC_WR_FLUSH_ERR);
}

/* to_init makes a queue pair listen for its peer. */
static void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT };

	CHECK(ibv_modify_qp(qp, &init, IBV_QP_STATE) == 0);
}

/*
 * from_to connects a queue pair at one GID of a device to a peer at another one, or makes it wait for the peer, whose GID or number is
 * lower.
 */
static void from_to(struct ibv_qp *qp, int from, int to, uint32_t peer)
{
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .dest_qp_num = peer, .ah_attr = { .is_global = 1, .port_num = 1 } };

	rtr.ah_attr.grh.sgid_index = (uint8_t)from;
	CHECK(ibv_query_gid(qp->context, 1, to, &rtr.ah_attr.grh.dgid) == 0);
	CHECK(ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN) == 0);
}

static void to_rtr(struct ibv_qp *qp, uint32_t peer)
{
	from_to(qp, 0, 0, peer);
}

/* The state RTR set twice. */
static void rtr(void)
{
	struct ibv_context *c = device(0);
	struct queues a = make(c, NULL), b;

	to_init(a.qp);
	to_rtr(a.qp, 0); /* which never connects */
	to_rtr(a.qp, 0);
	flushes(&a);
	unmake(&a);
	b = make(c, NULL);
	flushes(&b);
	unmake(&b);
	CHECK(ibv_close_device(c) == 0);
}

/* Queue pairs of two daemons may have the same number. */
static void devices(void)
{
	struct ibv_context *one = device(0), *two = device(1);
	struct queues a = make(one, NULL), b = make(two, NULL);

	CHECK(a.qp->qp_num == b.qp->qp_num);
	to_init(a.qp);
	to_rtr(a.qp, 0);
	flushes(&b);
	flushes(&a);
	unmake(&a);
	unmake(&b);
	CHECK(ibv_close_device(one) == 0 && ibv_close_device(two) == 0);
}

/* Objects of one device are not used with those of another. */
static void foreign(void)
{
	struct ibv_context *one = device(0), *two = device(1);
	struct ibv_comp_channel *ch = ibv_create_comp_channel(two);
	struct queues a = make(one, NULL), b = make(two, ch);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(b.pd, &init);
	struct ibv_mr *mr = ibv_reg_mr(a.pd, &init, sizeof(init), IBV_ACCESS_LOCAL_WRITE);
	const struct ibv_qp_init_attr with[] = {
		{ .send_cq = b.cq, .recv_cq = a.cq }, { .send_cq = a.cq, .recv_cq = b.cq }, { .send_cq = a.cq, .recv_cq = a.cq, .srq = srq },
	};

	CHECK(srq && mr);
	for (size_t i = 0; i < sizeof(with) / sizeof(with[0]); i++) {
		struct ibv_qp_init_attr attr = with[i];

		attr.qp_type = IBV_QPT_RC;
		errno = 0;
		CHECK(!ibv_create_qp(a.pd, &attr) && errno == EINVAL);
	}
	errno = 0;
	CHECK(!ibv_create_cq(one, 10, NULL, ch, 0) && errno == EINVAL);
	errno = 0;
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, b.pd, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL);
	CHECK(ibv_dereg_mr(mr) == 0 && ibv_destroy_srq(srq) == 0);
	unmake(&a);
	unmake(&b);
	CHECK(ibv_destroy_comp_channel(ch) == 0 && ibv_close_device(one) == 0 && ibv_close_device(two) == 0);
}

static atomic_bool stop;

static void *taker(void *arg)
{
	while (!atomic_load(&stop)) {
		struct ibv_cq *cq;
		void *context;

		CHECK(ibv_get_cq_event(arg, &cq, &context) == 0);
		ibv_ack_cq_events(cq, 1);
	}
	return NULL;
}

/* Each of many queues of a channel that wake at a time has one event. */
static void once(struct ibv_context *c)
{
	enum { QUEUES = 200 }; /* whose wake-ups the library takes for so many that some may be lost */
	struct ibv_comp_channel *ch = ibv_create_comp_channel(c);
	struct queues q[QUEUES];

	CHECK(ch);
	for (int i = 0; i < QUEUES; i++) {
		q[i] = make(c, ch);
		q[i].cq->cq_context = &q[i];
		CHECK(ibv_req_notify_cq(q[i].cq, 0) == 0);
		flush(q[i].qp);
	}
	for (int i = 0; i < QUEUES; i++) /* all have woken the channel then */
		CHECK(ibv_destroy_qp(q[i].qp) == 0);
	for (int i = 0; i < QUEUES; i++) {
		struct ibv_cq *cq;
		void *context;

		CHECK(ibv_get_cq_event(ch, &cq, &context) == 0);
		CHECK(((struct queues *)context)->qp);
		((struct queues *)context)->qp = NULL;
		ibv_ack_cq_events(cq, 1);
	}
	CHECK(!readable(ch->fd));
	for (int i = 0; i < QUEUES; i++)
		CHECK(ibv_destroy_cq(q[i].cq) == 0 && ibv_dealloc_pd(q[i].pd) == 0);
	CHECK(ibv_destroy_comp_channel(ch) == 0);
}

/* Completion queues end while another thread takes their events. */
static void cqs(void)
{
	struct ibv_context *c = device(0);
	struct ibv_comp_channel *ch = ibv_create_comp_channel(c);
	struct queues q;
	pthread_t t;

	CHECK(ch && pthread_create(&t, NULL, taker, ch) == 0);
	for (int i = 0; i < 1000; i++) {
		q = make(c, ch);
		CHECK(ibv_req_notify_cq(q.cq, 0) == 0);
		flush(q.qp);
		unmake(&q);
	}
	q = make(c, ch);
	atomic_store(&stop, true); /* after the next event at the latest */
	CHECK(ibv_req_notify_cq(q.cq, 0) == 0);
	flush(q.qp);
	CHECK(pthread_join(t, NULL) == 0);
	unmake(&q);
	CHECK(ibv_destroy_comp_channel(ch) == 0);
	once(c);
	CHECK(ibv_close_device(c) == 0);
}

/* A completion may come while a queue is resized, so one that is armed has an event then, if it had none. */
static void resized(void)
{
	struct ibv_context *c = device(0);
	struct ibv_comp_channel *ch = ibv_create_comp_channel(c);
	struct ibv_cq *cq = ibv_create_cq(c, 10, NULL, ch, 0), *got;
	struct queues q;
	void *context;

	CHECK(cq && ibv_resize_cq(cq, 20) == 0 && !readable(ch->fd));
	CHECK(ibv_req_notify_cq(cq, 0) == 0 && ibv_resize_cq(cq, 30) == 0 && readable(ch->fd));
	CHECK(ibv_get_cq_event(ch, &got, &context) == 0 && got == cq);
	ibv_ack_cq_events(cq, 1);
	CHECK(ibv_resize_cq(cq, 40) == 0 && !readable(ch->fd));
	CHECK(ibv_destroy_cq(cq) == 0);

	q = make(c, ch);
	CHECK(ibv_req_notify_cq(q.cq, 0) == 0);
	flush(q.qp);
	while (!readable(ch->fd))
		usleep(1000);
	CHECK(ibv_resize_cq(q.cq, 20) == 0 && ibv_get_cq_event(ch, &got, &context) == 0 && !readable(ch->fd));
	ibv_ack_cq_events(got, 1);
	unmake(&q);
	CHECK(ibv_destroy_comp_channel(ch) == 0 && ibv_close_device(c) == 0);
}

struct late_write {
	struct ibv_qp *qp;
	struct ibv_send_wr *wr;
};

/* write_late posts a Write when the library has looked for one for seconds. */
static void *write_late(void *arg)
{
	struct late_write *w = arg;
	struct ibv_send_wr *bad;

	sleep(3);
	CHECK(ibv_post_send(w->qp, w->wr, &bad) == 0);
	return NULL;
}

/* A thread that sleeps for an event sees a Write of its peer, which makes no completion, however late it comes. */
static void written(void)
{
	static uint64_t credit, more = 42;
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_mr *to, *from;
	struct ibv_sge sge;
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct late_write late;
	struct ibv_cq *got;
	struct ibv_wc wc;
	pthread_t t;
	void *context;

	establish(server, client, l, &id, &child);
	to = ibv_reg_mr(id->pd, &credit, sizeof(credit), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	from = ibv_reg_mr(child->pd, &more, sizeof(more), IBV_ACCESS_LOCAL_WRITE);
	CHECK(to && from && ibv_req_notify_cq(id->send_cq, 0) == 0);
	sge = (struct ibv_sge){ .addr = (uintptr_t)&more, .length = sizeof(more), .lkey = from->lkey };
	wr.wr.rdma.remote_addr = (uintptr_t)&credit;
	wr.wr.rdma.rkey = to->rkey;
	CHECK(ibv_post_send(child->qp, &wr, &bad) == 0);
	CHECK(ibv_get_cq_event(id->send_cq_channel, &got, &context) == 0 && got == id->send_cq && credit == 42);
	ibv_ack_cq_events(got, 1);
	CHECK(ibv_poll_cq(got, 1, &wc) == 0);
	credit = 0;
	late = (struct late_write){ child->qp, &wr };
	CHECK(ibv_req_notify_cq(got, 0) == 0 && pthread_create(&t, NULL, write_late, &late) == 0);
	CHECK(ibv_get_cq_event(id->send_cq_channel, &got, &context) == 0 && got == id->send_cq && credit == 42);
	ibv_ack_cq_events(got, 1);
	CHECK(pthread_join(t, NULL) == 0);
	CHECK(ibv_dereg_mr(to) == 0 && ibv_dereg_mr(from) == 0);
	part(id, child, l);
}

/* forsaken is as written, though a queue pair of the same completion queue was destroyed with a receive. */
static void forsaken(void)
{
	static uint64_t credit, more = 42;
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child, *other, *its_child;
	struct ibv_comp_channel *ch = ibv_create_comp_channel(l->verbs);
	struct ibv_mr *to, *from;
	struct ibv_sge sge;
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_cq *got;
	void *context;

	shared = ibv_create_cq(l->verbs, 16, NULL, ch, 0);
	CHECK(shared);
	establish(server, client, l, &id, &child);
	establish(server, client, l, &other, &its_child);
	recv_empty(other->qp, 1);
	end(other);
	end(its_child);
	to = ibv_reg_mr(id->pd, &credit, sizeof(credit), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	from = ibv_reg_mr(child->pd, &more, sizeof(more), IBV_ACCESS_LOCAL_WRITE);
	CHECK(to && from && ibv_req_notify_cq(shared, 0) == 0);
	sge = (struct ibv_sge){ .addr = (uintptr_t)&more, .length = sizeof(more), .lkey = from->lkey };
	wr.wr.rdma.remote_addr = (uintptr_t)&credit;
	wr.wr.rdma.rkey = to->rkey;
	CHECK(ibv_post_send(child->qp, &wr, &bad) == 0);
	CHECK(ibv_get_cq_event(ch, &got, &context) == 0 && got == shared && credit == 42);
	ibv_ack_cq_events(got, 1);
	CHECK(ibv_dereg_mr(to) == 0 && ibv_dereg_mr(from) == 0);
	part(id, child, l);
	CHECK(ibv_destroy_cq(shared) == 0 && ibv_destroy_comp_channel(ch) == 0);
}

static void to_error(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
}

/* expect_flush waits for the completion of a work request, which must be flushed. */
static void expect_flush(struct ibv_cq *cq, uint64_t id)
{
	struct ibv_wc wc;

	while (ibv_poll_cq(cq, 1, &wc) == 0)
		usleep(1000);
	CHECK(wc.wr_id == id && wc.status == IBV_WC_WR_FLUSH_ERR);
}

/* Receives are flushed when their connection is rejected or canceled, and so are those that are posted then. */
static void failed(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0);

	for (int cancel = 0; cancel < 2; cancel++) {
		struct rdma_cm_id *id = call(client, l), *child;

		recv_empty(id->qp, 1);
		child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
		if (cancel)
			to_error(id->qp);
		else
			CHECK(rdma_reject(child, NULL, 0) == 0);
		CHECK(next(client, cancel ? RDMA_CM_EVENT_CONNECT_ERROR : RDMA_CM_EVENT_REJECTED) == id);
		expect_flush(id->recv_cq, 1);
		recv_empty(id->qp, 2);
		expect_flush(id->recv_cq, 2);
		end(id);
		end(child);
	}
	end(l);
}

/* modified returns the result of a change of state. */
static int modified(struct ibv_qp *qp, enum ibv_qp_state to)
{
	struct ibv_qp_attr attr = { .qp_state = to };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

/* A queue pair is in the error state when the program sees that it has failed, though its connection may end later. */
static void stated(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;

	for (int i = 0; i < 20; i++) {
		establish(server, client, l, &id, &child);
		recv_empty(id->qp, 1);
		CHECK(rdma_disconnect(child) == 0);
		expect_flush(id->recv_cq, 1);
		CHECK(qp_state(id->qp) == IBV_QPS_ERR);
		CHECK(next(client, RDMA_CM_EVENT_DISCONNECTED) == id && next(server, RDMA_CM_EVENT_DISCONNECTED) == child);
		end(id);
		end(child);
	}
	end(l);
}

/* A queue pair changes its state as libibverbs' manual says, and only so. One that librdmacm has connected stays in RTS. */
static void transitions(void)
{
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7 };
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct queues q = make(l->verbs, NULL);

	CHECK(modified(q.qp, IBV_QPS_RTR) == EINVAL && modified(q.qp, IBV_QPS_RTS) == EINVAL);
	CHECK(modified(q.qp, IBV_QPS_INIT) == 0 && modified(q.qp, IBV_QPS_INIT) == 0 && modified(q.qp, IBV_QPS_RTS) == EINVAL);
	CHECK(modified(q.qp, IBV_QPS_RTR) == 0 && modified(q.qp, IBV_QPS_INIT) == EINVAL && modified(q.qp, IBV_QPS_RTS) == 0);
	unmake(&q);
	establish(server, client, l, &id, &child);
	for (enum ibv_qp_state to = IBV_QPS_INIT; to <= IBV_QPS_SQE; to++) {
		CHECK(modified(id->qp, to) == (to <= IBV_QPS_RTS ? 0 : EINVAL));
		CHECK(qp_state(id->qp) == IBV_QPS_RTS);
	}
	CHECK(ibv_modify_qp(id->qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN) == 0);
	part(id, child, l);
}

/* A queue pair that was reset takes no connection of the peer that it had. One that has a receive is not reset. */
static void reset(void)
{
	struct ibv_context *c = device(0);
	struct queues a = make(c, NULL), b = make(c, NULL);
	int conn;

	to_init(b.qp);
	to_rtr(b.qp, a.qp->qp_num);
	CHECK(modified(b.qp, IBV_QPS_RESET) == 0);
	to_init(a.qp);
	to_rtr(a.qp, b.qp->qp_num);
	while ((conn = atomic_load(&qp_of(a.qp)->conn)) == CONN_MAKING)
		usleep(1000);
	CHECK(conn == CONN_OVER);
	CHECK(qp_state(b.qp) == IBV_QPS_RESET);
	CHECK(modified(b.qp, IBV_QPS_INIT) == 0);
	recv_empty(b.qp, 1);
	CHECK(modified(b.qp, IBV_QPS_RESET) == EOPNOTSUPP && modified(b.qp, IBV_QPS_ERR) == 0);
	expect_flush(b.cq, 1);
	unmake(&a);
	unmake(&b);
	CHECK(ibv_close_device(c) == 0);
}

/* A queue pair in the error state that never had a connection flushes what is posted, and stays so. Its id gets no event. */
static void unconnected(void)
{
	struct sockaddr_in a = socket_address(htons(1));
	struct rdma_event_channel *ch = channel();
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	struct ibv_send_wr wr = { .wr_id = 3, .opcode = IBV_WR_SEND }, *bad;
	struct ibv_context *c = device(0);
	struct queues q = make(c, NULL);
	struct rdma_cm_id *id;

	CHECK(ibv_modify_qp(q.qp, &reset, IBV_QP_STATE) == 0);
	recv_empty(q.qp, 1);
	CHECK(ibv_post_send(q.qp, &wr, &bad) == 0);
	to_error(q.qp);
	expect_flush(q.cq, 3);
	expect_flush(q.cq, 1);
	for (enum ibv_qp_state to = IBV_QPS_INIT; to <= IBV_QPS_SQE; to++) {
		struct ibv_qp_attr attr = { .qp_state = to };

		CHECK(ibv_modify_qp(q.qp, &attr, IBV_QP_STATE) == EINVAL);
		CHECK(qp_state(q.qp) == IBV_QPS_ERR);
	}
	recv_empty(q.qp, 2);
	expect_flush(q.cq, 2);
	CHECK(ibv_post_send(q.qp, NULL, &bad) == 0);
	CHECK(ibv_post_send(q.qp, &wr, &bad) == 0);
	expect_flush(q.cq, 3);
	CHECK(ibv_modify_qp(q.qp, &reset, IBV_QP_STATE) == EOPNOTSUPP);
	unmake(&q);
	CHECK(ibv_close_device(c) == 0);
	CHECK(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000) == 0 && next(ch, RDMA_CM_EVENT_ADDR_RESOLVED) == id);
	create_qp(id);
	to_error(id->qp);
	rdma_destroy_qp(id); /* it handles the events that have come */
	CHECK(!readable(ch->fd));
	end(id);
	rdma_destroy_event_channel(ch);
}

/* Everything that a queue pair without a connection has taken is flushed, also what exceeds the depth that was asked for. */
static void all(void)
{
	struct ibv_context *c = device(0);
	struct queues q = make(c, NULL);
	struct ibv_recv_wr recv = { 0 }, *bad_recv;
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND }, *bad;

	while (ibv_post_send(q.qp, &send, &bad) == 0)
		send.wr_id++;
	while (ibv_post_recv(q.qp, &recv, &bad_recv) == 0)
		recv.wr_id++;
	CHECK(send.wr_id > 4 && recv.wr_id > 4);
	to_error(q.qp);
	for (uint64_t i = 0; i < send.wr_id; i++)
		expect_flush(q.cq, i);
	for (uint64_t i = 0; i < recv.wr_id; i++)
		expect_flush(q.cq, i);
	unmake(&q);
	CHECK(ibv_close_device(c) == 0);
}

/* rdma_disconnect of a synchronous id returns when the connection has ended. */
static void synchronous(void)
{
	struct rdma_event_channel *client = channel();
	struct rdma_cm_id *l = listener(NULL, 0), *id = call(client, l), *child;

	CHECK(rdma_get_request(l, &child) == 0);
	create_qp(child);
	CHECK(rdma_accept(child, NULL) == 0 && rdma_disconnect(child) == 0);
	CHECK(child->event->event == RDMA_CM_EVENT_DISCONNECTED);
	CHECK(qp_state(child->qp) == IBV_QPS_ERR);
	CHECK(rdma_disconnect(child) == 0); /* again */
	CHECK(next(client, RDMA_CM_EVENT_ESTABLISHED) == id && next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	part(child, id, l);
	rdma_destroy_event_channel(client);
}

/* send_queues returns the number of queue pairs that this process has not freed. */
static int send_queues(void)
{
	FILE *f = fopen("/proc/self/maps", "re");
	char line[512];
	int n = 0;

	CHECK(f);
	while (fgets(line, sizeof(line), f))
		n += strstr(line, "iwarp-sq") != NULL;
	fclose(f);
	return n;
}

static void *destroy_cq(void *cq)
{
	CHECK(ibv_destroy_cq(cq) == 0);
	return NULL;
}

static void *destroy_srq(void *srq)
{
	CHECK(ibv_destroy_srq(srq) == 0);
	return NULL;
}

/*
 * A shared receive queue lasts until the program has acknowledged its event, and has no limit after that. So does a
 * completion queue.
 */
static void acknowledged(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id = call(client, l), *child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq_attr attr = { .srq_limit = 2 };
	struct ibv_recv_wr recv = { 0 }, *bad_recv;
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND }, *bad;
	struct ibv_async_event e;
	struct ibv_comp_channel *ch = ibv_create_comp_channel(l->verbs);
	struct queues q = make(l->verbs, ch);
	struct ibv_cq *cq;
	void *context;
	pthread_t t;

	CHECK(rdma_create_srq(child, NULL, &init) == 0);
	create_qp(child);
	for (int i = 0; i < 2; i++)
		CHECK(ibv_post_srq_recv(child->srq, &recv, &bad_recv) == 0);
	CHECK(ibv_modify_srq(child->srq, &attr, IBV_SRQ_LIMIT) == 0);
	CHECK(ibv_query_srq(child->srq, &attr) == 0 && attr.srq_limit == 2);
	CHECK(rdma_accept(child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child && next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	CHECK(ibv_post_send(id->qp, &send, &bad) == 0);
	CHECK(ibv_get_async_event(child->verbs, &e) == 0 && e.event_type == IBV_EVENT_SRQ_LIMIT_REACHED);
	CHECK(ibv_query_srq(child->srq, &attr) == 0 && attr.srq_limit == 0);
	rdma_destroy_qp(child);
	CHECK(pthread_create(&t, NULL, destroy_srq, child->srq) == 0);
	still_running(t);
	CHECK(e.element.srq == child->srq);
	ibv_ack_async_event(&e);
	CHECK(pthread_join(t, NULL) == 0);

	CHECK(ibv_req_notify_cq(q.cq, 0) == 0);
	flush(q.qp);
	CHECK(ibv_get_cq_event(ch, &cq, &context) == 0 && cq == q.cq && ibv_destroy_qp(q.qp) == 0);
	CHECK(pthread_create(&t, NULL, destroy_cq, cq) == 0);
	still_running(t);
	CHECK(pthread_cancel(t) == 0); /* it completes the call */
	ibv_ack_cq_events(cq, 1);
	CHECK(pthread_join(t, &context) == 0 && context == NULL && ibv_dealloc_pd(q.pd) == 0 && ibv_destroy_comp_channel(ch) == 0);
	part(id, child, l);
}

/* The end of a queue pair that was destroyed before raises no event that names it. */
static void unnamed(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_async_event e;

	establish(server, client, l, &id, &child);
	write_badly(id->qp); /* it ends both */
	rdma_destroy_qp(id);
	CHECK(next(client, RDMA_CM_EVENT_DISCONNECTED) == id && next(server, RDMA_CM_EVENT_DISCONNECTED) == child);
	while (readable(id->verbs->async_fd)) {
		CHECK(ibv_get_async_event(id->verbs, &e) == 0 && e.element.qp == child->qp);
		ibv_ack_async_event(&e);
	}
	part(id, child, l);
}

/* Each of several events of a device can be taken. */
static void fatal(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_async_event e[2];

	establish(server, client, l, &id, &child);
	write_badly(id->qp); /* it ends both */
	CHECK(next(client, RDMA_CM_EVENT_DISCONNECTED) == id && next(server, RDMA_CM_EVENT_DISCONNECTED) == child);
	for (int i = 0; i < 2; i++) {
		CHECK(ibv_get_async_event(id->verbs, &e[i]) == 0 && e[i].event_type == IBV_EVENT_QP_FATAL);
		ibv_ack_async_event(&e[i]);
	}
	CHECK((e[0].element.qp == id->qp && e[1].element.qp == child->qp) || (e[0].element.qp == child->qp && e[1].element.qp == id->qp));
	part(id, child, l);
}

/* A peer that writes where it may not raises another event than one that ends the connection by another mistake. */
static void trespassed(void)
{
	static char byte;
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_sge sge = { .addr = (uintptr_t)&byte, .length = 1 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .wr.rdma.rkey = UINT32_MAX }, *bad;
	struct ibv_mr *mr;

	establish(server, client, l, &id, &child);
	mr = ibv_reg_mr(id->pd, &byte, 1, 0);
	CHECK(mr);
	sge.lkey = mr->lkey;
	CHECK(ibv_post_send(id->qp, &wr, &bad) == 0);
	CHECK(next(client, RDMA_CM_EVENT_DISCONNECTED) == id && next(server, RDMA_CM_EVENT_DISCONNECTED) == child);
	CHECK(id_of(id)->end == -ECONNRESET && id_of(child)->end == -ECONNRESET);
	for (int i = 0; i < 2; i++) {
		struct ibv_async_event e;

		CHECK(ibv_get_async_event(id->verbs, &e) == 0);
		CHECK(e.event_type == (e.element.qp == child->qp ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_FATAL));
		ibv_ack_async_event(&e);
	}
	CHECK(ibv_dereg_mr(mr) == 0);
	part(id, child, l);
}

/* daemon_pid returns the process of the daemon that a mode stops or ends. */
static pid_t daemon_pid(void)
{
	CHECK(getenv("DAEMON"));
	return (pid_t)atoi(getenv("DAEMON"));
}

/* state returns the state of a process, as in proc(5). */
static char state(pid_t pid)
{
	char path[64], line[256], *at = NULL;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	f = fopen(path, "re");
	if (f && fgets(line, sizeof(line), f))
		at = strrchr(line, ')');
	if (f)
		fclose(f);
	return at ? at[2] : 'X';
}

/* stop_daemon stops a daemon until it gets SIGCONT. */
static void stop_daemon(void)
{
	CHECK(kill(daemon_pid(), SIGSTOP) == 0);
	while (state(daemon_pid()) != 'T')
		usleep(1000);
}

static void *destroy_qp(void *qp)
{
	CHECK(ibv_destroy_qp(qp) == 0);
	return NULL;
}

/*
 * An identifier ends while its queue pair, which is being destroyed, waits for the acknowledgment of an event. The
 * connection, whose peer's daemon was stopped, ends later.
 */
static void outlived(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_async_event e;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	pthread_t t;

	establish(server, client, l, &id, &child);
	qp = id->qp;
	cq = id->send_cq;
	stop_daemon();
	write_badly(qp);
	CHECK(ibv_get_async_event(id->verbs, &e) == 0 && e.event_type == IBV_EVENT_QP_FATAL && e.element.qp == qp);
	CHECK(pthread_create(&t, NULL, destroy_qp, qp) == 0);
	still_running(t);
	CHECK(rdma_destroy_id(id) == 0);
	ibv_ack_async_event(&e);
	CHECK(pthread_join(t, NULL) == 0);
	CHECK(kill(daemon_pid(), SIGCONT) == 0);
	CHECK(ibv_destroy_cq(cq) == 0);
	while (send_queues() > 1) /* until the connection has ended */
		usleep(1000);
}

/* function returns a function that the libraries share. */
static void *function(const char *name)
{
	void *f = dlsym(RTLD_DEFAULT, name);

	CHECK(f);
	return f;
}

/* The thread of the libraries runs none of the program's signal handlers. */
static void blocked(void)
{
	struct ibv_context *c = device(0);
	unsigned long long signals = 0;
	char path[64], line[256];
	FILE *f;

	snprintf(path, sizeof(path), "/proc/self/task/%d/status", thread_named("iwarpd-verbs"));
	f = fopen(path, "re");
	CHECK(f);
	while (fgets(line, sizeof(line), f) && sscanf(line, "SigBlk: %llx", &signals) != 1)
		;
	fclose(f);
	for (int sig = 1; sig < SIGRTMIN; sig++)
		CHECK(sig == SIGKILL || sig == SIGSTOP || sig >= 32 || signals >> (sig - 1) & 1);
	CHECK(ibv_close_device(c) == 0);
}

/* await_futex waits until a thread of this process waits for a lock. */
static void await_futex(pid_t tid)
{
	await_call(tid, SYS_futex);
}

static atomic_int busy; /* the thread of destroy_named or open_named */

static void *destroy_named(void *qp)
{
	atomic_store(&busy, (int)syscall(SYS_gettid));
	return destroy_qp(qp);
}

/* tid_of returns what a thread that was started stores in tid. */
static pid_t tid_of(const atomic_int *tid)
{
	while (atomic_load(tid) == 0)
		usleep(1000);
	return (pid_t)atomic_load(tid);
}

static void *deregister(void *mr)
{
	CHECK(ibv_dereg_mr(mr) == 0);
	return NULL;
}

static void *open_named(void *d)
{
	atomic_store(&busy, (int)syscall(SYS_gettid));
	return ibv_open_device(d);
}

/* A device is used while another thread opens one whose daemon is stopped. Canceling that thread leaves nothing open. */
static void opened(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *own;
	struct queues q;
	void *other;
	pthread_t t;

	CHECK(list && list[0] && list[1]);
	own = ibv_open_device(list[0]);
	CHECK(own);
	stop_daemon();
	CHECK(pthread_create(&t, NULL, open_named, list[1]) == 0);
	await_call(tid_of(&busy), SYS_ppoll);
	q = make(own, NULL);
	unmake(&q);
	CHECK(pthread_tryjoin_np(t, &other) == EBUSY && pthread_cancel(t) == 0);
	CHECK(kill(daemon_pid(), SIGCONT) == 0 && pthread_join(t, &other) == 0);
	CHECK(other && other != PTHREAD_CANCELED && ibv_close_device(other) == 0 && ibv_close_device(own) == 0);
	ibv_free_device_list(list);
}

static void list_devices(void)
{
	ibv_free_device_list(ibv_get_device_list(NULL));
}

static void *bind_nowhere(void *id)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(0xc6336401) }; /* 198.51.100.1 */

	atomic_store(&busy, (int)syscall(SYS_gettid));
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&a) == -1 && errno == EADDRNOTAVAIL);
	return NULL;
}

/* Identifiers are used while another thread looks for the device of an address, and a daemon is stopped. */
static void sought(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *id, *child, *nowhere, *l;
	pthread_t t;

	list_devices(); /* both daemons are known now */
	l = listener(server, 0);
	CHECK(rdma_create_id(client, &nowhere, NULL, RDMA_PS_TCP) == 0);
	stop_daemon();
	CHECK(pthread_create(&t, NULL, bind_nowhere, nowhere) == 0);
	await_call(tid_of(&busy), SYS_ppoll);
	establish(server, client, l, &id, &child);
	part(id, child, l);
	still_running(t);
	CHECK(kill(daemon_pid(), SIGCONT) == 0 && pthread_join(t, NULL) == 0);
	end(nowhere);
}

static void *connect_lost(void *id)
{
	CHECK(rdma_connect(id, NULL) == -1 && errno == ENODEV);
	return NULL;
}

/* call_alone starts a connection with a synchronous id in a thread of its own. */
static struct rdma_cm_id *call_alone(struct rdma_cm_id *to, pthread_t *t)
{
	struct sockaddr_in a = socket_address(rdma_get_src_port(to));
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000) == 0 && rdma_resolve_route(id, 2000) == 0);
	create_qp(id);
	CHECK(pthread_create(t, NULL, connect_lost, id) == 0);
	return id;
}

/*
 * The daemon ends while objects are being destroyed and the library has not handled its last event, and while a synchronous id
 * is connecting.
 */
static void removed(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id = call(client, l), *child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	void (*lock)(void) = (void (*)(void))function("iwv_thread_lock"), (*unlock)(void) = (void (*)(void))function("iwv_thread_unlock");
	__typeof__(&iwarpd_reject) reject = (__typeof__(reject))function("iwarpd_reject");
	struct iwarpd_device *dev = container_of(child->verbs, struct context, v.context)->dev;
	static char byte;
	struct ibv_mr *mr = ibv_reg_mr(id->pd, &byte, 1, 0);
	struct rdma_cm_id *alone, *unanswered;
	pthread_t t, u, v;

	CHECK(mr);
	alone = call_alone(l, &v);
	unanswered = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	lock();
	CHECK(pthread_create(&t, NULL, destroy_named, id->qp) == 0);
	await_futex(tid_of(&busy));
	CHECK(reject(dev, id_of(child)->conn, NULL, 0, NULL) == 0);
	await_futex(thread_named("iwarpd-verbs")); /* the event of the rejected queue pair has come */
	CHECK(kill(daemon_pid(), SIGKILL) == 0);
	while (state(daemon_pid()) != 'Z' && state(daemon_pid()) != 'X')
		usleep(1000);
	CHECK(pthread_create(&u, NULL, deregister, mr) == 0);
	still_running(u); /* it waits for the lock */
	unlock();
	CHECK(pthread_join(t, NULL) == 0 && pthread_join(u, NULL) == 0 && pthread_join(v, NULL) == 0);
	CHECK(next(client, RDMA_CM_EVENT_REJECTED) == id && next(client, RDMA_CM_EVENT_DEVICE_REMOVAL) == id);
	for (int i = 0; i < 3; i++) {
		struct rdma_cm_id *removed_id = next(server, RDMA_CM_EVENT_DEVICE_REMOVAL);

		CHECK(removed_id == l || removed_id == child || removed_id == unanswered);
		end(removed_id); /* so that the three differ */
	}
	CHECK(!readable(server->fd));
	id->qp = NULL;
	end(id);
	end(alone);
}

/* everywhere makes a listener on every address. */
static struct rdma_cm_id *everywhere(struct rdma_event_channel *ch, uint16_t port)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(port) };
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&any) == 0 && rdma_listen(id, 0) == 0);
	return id;
}

/* reach connects to the listener l until its channel has the request, which it rejects. */
static void reach(struct rdma_event_channel *server, struct rdma_cm_id *l)
{
	struct rdma_event_channel *client = channel();
	struct rdma_cm_id *child;
	bool reached = false;

	while (!reached) {
		struct pollfd p[2] = { { .fd = server->fd, .events = POLLIN }, { .fd = client->fd, .events = POLLIN } };
		struct rdma_cm_id *id = call(client, l);

		CHECK(poll(p, 2, -1) > 0);
		reached = p[0].revents;
		if (reached) {
			child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
			CHECK(rdma_reject(child, NULL, 0) == 0);
			end(child);
		}
		end(id);
	}
	rdma_destroy_event_channel(client);
}

/* A listener on every address takes a daemon that starts later. */
static void followed(void)
{
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *every = everywhere(ch, 7180);

	CHECK(!id_of(every)->endpoints->next);
	printf("listening\n");
	fflush(stdout);
	reach(ch, every);
	end(every);
	rdma_destroy_event_channel(ch);
}

/* One of two daemons does not answer while it restarts, as SIGUSR1 says. The other one is used meanwhile. */
static void starting(void)
{
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *every;
	sigset_t asked;
	bool before;

	CHECK(sigemptyset(&asked) == 0 && sigaddset(&asked, SIGUSR1) == 0 && sigprocmask(SIG_BLOCK, &asked, NULL) == 0);
	every = everywhere(ch, 7181);
	printf("listening\n");
	fflush(stdout);
	do {
		CHECK(sigpending(&asked) == 0);
		before = !sigismember(&asked, SIGUSR1);
		reach(ch, every);
	} while (before);
	end(every);
	rdma_destroy_event_channel(ch);
}

/* The only daemon ends between rdma_bind_addr and rdma_listen. */
static void bound(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(7182) };
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *id;
	sigset_t asked;
	int sig;

	CHECK(sigemptyset(&asked) == 0 && sigaddset(&asked, SIGUSR1) == 0 && sigprocmask(SIG_BLOCK, &asked, NULL) == 0);
	CHECK(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0 && rdma_bind_addr(id, (struct sockaddr *)&a) == 0);
	printf("bound\n");
	fflush(stdout);
	CHECK(sigwait(&asked, &sig) == 0 && rdma_listen(id, 1) == 0);
	printf("listening\n");
	fflush(stdout);
	CHECK(sigwait(&asked, &sig) == 0);
	rdma_destroy_id(id);
	rdma_destroy_event_channel(ch);
}

/*
 * One of two daemons restarts. A listener on every address is on both then, whether it is made before or after it, and both
 * are devices again.
 */
static void restarted(void)
{
	struct rdma_event_channel *ch = channel(), *kept = channel();
	struct rdma_cm_id *own = listener(ch, 0), *every = everywhere(kept, 7179), *id;
	int num = 0;

	rdma_free_devices(rdma_get_devices(&num));
	CHECK(num == 2);
	printf("listening\n");
	fflush(stdout);
	CHECK(next(ch, RDMA_CM_EVENT_DEVICE_REMOVAL) == own);
	end(own);
	reach(kept, every);
	end(every);
	for (num = 0; num < 2; usleep(10000))
		ibv_free_device_list(ibv_get_device_list(&num));
	id = everywhere(ch, 7178);
	CHECK(id_of(id)->endpoints && id_of(id)->endpoints->next);
	end(id);
	rdma_free_devices(rdma_get_devices(&num));
	CHECK(num == 2);
	rdma_destroy_event_channel(ch);
	rdma_destroy_event_channel(kept);
}

/* One of two daemons restarts on another interface. Then listeners on every address are on that. */
static void elsewhere(void)
{
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *own = listener(ch, 0), *id;
	bool both = false;

	printf("listening\n");
	fflush(stdout);
	CHECK(next(ch, RDMA_CM_EVENT_DEVICE_REMOVAL) == own);
	end(own);
	for (int i = 0; i < 2; i++) /* both look for the daemon */
		end(everywhere(ch, 0));
	printf("gone\n");
	fflush(stdout);
	for (; !both; usleep(10000)) {
		id = everywhere(ch, 0);
		both = id_of(id)->endpoints->next != NULL;
		end(id);
	}
	rdma_destroy_event_channel(ch);
}

/* A listener on every address that is made after a second daemon has started is on both. */
static void later(void)
{
	struct rdma_event_channel *ch = channel();
	bool both = false;

	for (bool first = true; first || !both; first = false) {
		struct rdma_cm_id *id = everywhere(ch, 0);

		both = id_of(id)->endpoints->next != NULL;
		end(id);
		if (first) {
			CHECK(!both);
			printf("listened\n");
			fflush(stdout);
		}
	}
	rdma_destroy_event_channel(ch);
}

/* A connection is accepted with the queue pair of another identifier, which ends then, in place of its own. */
static void moved(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id = call(client, l), *child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST), *other;
	struct sockaddr_in a = socket_address(0);
	struct ibv_qp *own;

	CHECK(rdma_create_id(server, &other, NULL, RDMA_PS_TCP) == 0 && rdma_bind_addr(other, (struct sockaddr *)&a) == 0);
	create_qp(other);
	create_qp(child);
	own = child->qp;
	child->qp = other->qp;
	other->qp = NULL;
	CHECK(rdma_accept(child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child && next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	end(other);
	CHECK(rdma_disconnect(child) == 0);
	CHECK(next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == child);
	CHECK(ibv_destroy_qp(own) == 0);
	part(child, id, l);
}

static struct rdma_cm_id *user, *ended; /* of the calls that are canceled */

static void allocate(void)
{
	struct ibv_pd *pd = ibv_alloc_pd(user->verbs);

	CHECK(pd && ibv_dealloc_pd(pd) == 0);
}

static void resolve(void)
{
	struct sockaddr_in a = socket_address(htons(1));
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(user->channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000) == 0);
	end(id);
}

/* write_nothing makes a worker that sleeps write nothing. */
static void write_nothing(void)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;

	CHECK(ibv_post_send(user->qp, &wr, &bad) == 0);
	while (ibv_poll_cq(user->send_cq, 1, &wc) == 0)
		usleep(1000);
}

/* post_unsupported posts what is logged. */
static void post_unsupported(void)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND_WITH_IMM }, *bad;

	CHECK(ibv_post_send(user->qp, &wr, &bad) == EOPNOTSUPP);
}

/* post_late posts after the end of the connection, which makes the library send the daemon a request. */
static void post_late(void)
{
	struct ibv_wc wc;

	recv_empty(ended->qp, 0);
	while (ibv_poll_cq(ended->recv_cq, 1, &wc) == 0)
		;
	CHECK(wc.status == IBV_WC_WR_FLUSH_ERR);
}

/* register_far registers memory that is far, since it is a stack. */
static void register_far(void)
{
	char stack[100];
	struct ibv_mr *mr = ibv_reg_mr(user->pd, stack, sizeof(stack), IBV_ACCESS_LOCAL_WRITE);

	CHECK(mr && ibv_dereg_mr(mr) == 0);
}

static void fork_child(void)
{
	pid_t pid = fork();

	if (pid == 0)
		_exit(0);
	CHECK(pid > 0 && waitpid(pid, NULL, 0) == pid);
}

static void *cancel(void *call)
{
	CHECK(pthread_cancel(pthread_self()) == 0); /* it ends at the next cancellation point */
	(*(void (**)(void))call)();
	pthread_testcancel();
	return NULL;
}

/* Threads are canceled in their calls, and others make the same calls then. */
static void canceled(void)
{
	static void (*calls[])(void) = { allocate, resolve, write_nothing, post_unsupported, post_late, register_far, fork_child, list_devices };
	enum { CALLS = sizeof(calls) / sizeof(calls[0]) };
	static char near[100];
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *child, *gone;
	struct ibv_mr *mr;
	pthread_t t;
	void *how;

	establish(server, client, l, &user, &child);
	establish(server, client, l, &ended, &gone);
	CHECK(rdma_disconnect(gone) == 0);
	CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == gone && next(client, RDMA_CM_EVENT_DISCONNECTED) == ended);
	mr = ibv_reg_mr(user->pd, near, sizeof(near), IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);
	for (int i = 0; i < 20 * CALLS; i++) {
		CHECK(pthread_create(&t, NULL, cancel, &calls[i % CALLS]) == 0);
		CHECK(pthread_join(t, &how) == 0 && how == PTHREAD_CANCELED);
		calls[i % CALLS]();
	}
	CHECK(ibv_dereg_mr(mr) == 0);
	end(user);
	end(child);
	end(ended);
	end(gone);
	end(l);
}

/* A region whose access rights change keeps its I/O virtual address. One that is to stay as it is keeps its key. */
static void rereg(void)
{
	enum { IOVA = 0x10000, RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ };
	static const struct { int flags, access; } invalid[] = {
		{ 0, 0 }, { IBV_REREG_MR_CHANGE_TRANSLATION, 0 }, { IBV_REREG_MR_CHANGE_PD, RIGHTS },
	};
	static uint64_t far, near;
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_mr *there, *here;
	struct ibv_sge sge;
	uint32_t key;
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_READ, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;

	establish(server, client, l, &id, &child);
	far = 42;
	there = ibv_reg_mr_iova(child->pd, &far, sizeof(far), IOVA, IBV_ACCESS_LOCAL_WRITE);
	here = ibv_reg_mr(id->pd, &near, sizeof(near), IBV_ACCESS_LOCAL_WRITE);
	CHECK(there && here);
	key = there->rkey;
	for (size_t i = 0; i < sizeof(invalid) / sizeof(invalid[0]); i++) {
		errno = 0;
		CHECK(ibv_rereg_mr(there, invalid[i].flags, there->pd, NULL, sizeof(far), invalid[i].access) ==
		      IBV_REREG_MR_ERR_INPUT);
		CHECK(errno == EINVAL && there->rkey == key);
	}
	CHECK(ibv_rereg_mr(there, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, RIGHTS) == 0);
	sge = (struct ibv_sge){ .addr = (uintptr_t)&near, .length = sizeof(near), .lkey = here->lkey };
	wr.wr.rdma.remote_addr = IOVA;
	wr.wr.rdma.rkey = there->rkey;
	CHECK(ibv_post_send(id->qp, &wr, &bad) == 0);
	while (ibv_poll_cq(id->send_cq, 1, &wc) == 0)
		usleep(1000);
	CHECK(wc.status == IBV_WC_SUCCESS && near == 42);
	CHECK(ibv_dereg_mr(there) == 0 && ibv_dereg_mr(here) == 0);
	part(id, child, l);
}

/* Extended attributes that ask for nothing else are those of ibv_create_qp. */
static void extended(void)
{
	struct ibv_context *c = device(0);
	struct ibv_pd *pd = ibv_alloc_pd(c);
	struct ibv_cq *cq = ibv_create_cq(c, 16, NULL, NULL, 0);
	static const struct { uint32_t mask, flags; int err; } cases[] = {
		{ IBV_QP_INIT_ATTR_PD, 0, 0 },
		{ IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS, 0, 0 },
		{ IBV_QP_INIT_ATTR_CREATE_FLAGS, 0, EINVAL },
		{ IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS, IBV_QP_CREATE_SCATTER_FCS, EOPNOTSUPP },
		{ IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_MAX_TSO_HEADER, 0, EOPNOTSUPP },
		{ IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, 0, EOPNOTSUPP },
	};

	CHECK(pd && cq);
	CHECK(!ibv_import_device(0)); /* standard input is no device */
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct ibv_qp_init_attr_ex init = {
			.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 },
			.comp_mask = cases[i].mask, .pd = pd, .create_flags = cases[i].flags,
		};
		struct ibv_qp *qp = ibv_create_qp_ex(c, &init);

		CHECK(qp ? !cases[i].err && init.cap.max_send_wr >= 4 && ibv_destroy_qp(qp) == 0 : errno == cases[i].err);
	}
	CHECK(ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(c) == 0);
}

/*
 * rdma_create_qp_ex tells the program which completion queues it has made. They are the id's, and the next queue pair's
 * if the program destroys the first one by itself.
 */
static void queues_made(void)
{
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *id = listener(ch, 0);
	struct ibv_cq *sends = NULL, *recvs = NULL;

	for (int i = 0; i < 2; i++) {
		uint32_t depth = i == 0 ? 4 : 100;
		struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_RC, .cap = { depth, depth, 1, 1, 0 } };

		CHECK(rdma_create_qp_ex(id, &init) == 0);
		CHECK(init.send_cq->cqe >= (int)depth && init.recv_cq->cqe >= (int)depth);
		CHECK(init.send_cq && init.send_cq == id->send_cq && init.recv_cq == id->recv_cq);
		CHECK(i == 0 || (init.send_cq == sends && init.recv_cq == recvs));
		sends = id->send_cq;
		recvs = id->recv_cq;
		if (i == 0) {
			CHECK(ibv_destroy_qp(id->qp) == 0);
			id->qp = NULL;
		}
	}
	end(id);
	rdma_destroy_event_channel(ch);
}

/* A message may be as long as the port says, and no longer. */
static void limits(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0);
	struct ibv_device_attr_ex attr;
	struct ibv_port_attr port;
	size_t most;
	char *mem;

	CHECK(ibv_query_port(l->verbs, 1, &port) == 0);
	CHECK(ibv_query_device_ex(l->verbs, NULL, &attr) == 0 && attr.device_cap_flags_ex == attr.orig_attr.device_cap_flags);
	most = port.max_msg_sz;
	mem = mmap(NULL, most + 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	CHECK(mem != MAP_FAILED);
	for (size_t more = 0; more < 2; more++) {
		struct rdma_cm_id *id, *child;
		struct ibv_sge sge = { .addr = (uintptr_t)mem, .length = (uint32_t)(most + more) };
		struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1 }, *bad;
		struct ibv_mr *mr;
		struct ibv_wc wc;

		CHECK(sge.length == most + more);
		establish(server, client, l, &id, &child);
		mr = ibv_reg_mr(id->pd, mem, sge.length, 0);
		CHECK(mr);
		sge.lkey = mr->lkey;
		CHECK(ibv_post_send(id->qp, &wr, &bad) == 0); /* the peer has no such memory */
		while (ibv_poll_cq(id->send_cq, 1, &wc) == 0)
			usleep(1000);
		printf("%zu bytes: %s\n", most + more, ibv_wc_status_str(wc.status));
		CHECK(wc.status != IBV_WC_SUCCESS && (wc.status == IBV_WC_LOC_LEN_ERR) == (more > 0));
		CHECK(ibv_dereg_mr(mr) == 0);
		end(id);
		end(child);
	}
	end(l);
}

/*
 * A work request is posted after the connection has ended and before the library has noticed, and another one after that. They
 * complete in this order.
 */
static void ordered(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	void (*lock)(void) = (void (*)(void))function("iwv_thread_lock"), (*unlock)(void) = (void (*)(void))function("iwv_thread_unlock");
	__typeof__(&iwv_qp_disconnect) disconnect = (__typeof__(disconnect))function("iwv_qp_disconnect");
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_send_wr wr = { .wr_id = 1, .opcode = IBV_WR_SEND }, *bad;

	establish(server, client, l, &id, &child);
	recv_empty(id->qp, 0);
	CHECK(ibv_req_notify_cq(id->recv_cq, 0) == 0);
	lock();
	CHECK(disconnect(qp_of(child->qp), true, NULL) == 0);
	while (!readable(id->recv_cq_channel->fd))
		usleep(1000);
	CHECK(ibv_post_send(id->qp, &wr, &bad) == 0);
	unlock();
	expect_flush(id->recv_cq, 0);
	CHECK(next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	wr.wr_id = 2;
	CHECK(ibv_post_send(id->qp, &wr, &bad) == 0);
	for (uint64_t i = 1; i <= 2; i++)
		expect_flush(id->send_cq, i);
	CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == child);
	part(id, child, l);
}

static _Thread_local void (*unlocked)(void); /* called when this thread has released the lock of the libraries */

/* iwv_thread_unlock is called by the libraries in place of their own. */
void iwv_thread_unlock(void)
{
	void (*then)(void) = unlocked, (*real)(void) = (void (*)(void))dlsym(RTLD_NEXT, "iwv_thread_unlock");

	CHECK(real);
	unlocked = NULL;
	real();
	if (then)
		then();
}

static struct rdma_event_channel *awaited; /* of end_next */

/* end_next ends the id of the next event, as soon as there is one. */
static void end_next(void)
{
	struct rdma_cm_event *e;
	struct rdma_cm_id *id;

	if (!readable(awaited->fd)) {
		unlocked = end_next;
		return;
	}
	CHECK(rdma_get_cm_event(awaited, &e) == 0);
	id = e->id;
	CHECK(rdma_ack_cm_event(e) == 0);
	end(id);
}

/* An id ends after the event of a call and before that returns, as when another thread takes the event. */
static void overtaken(void)
{
	struct sockaddr_in a = socket_address(htons(1));
	struct rdma_cm_id *id;

	awaited = channel();
	for (int route = 0; route < 2; route++) {
		CHECK(rdma_create_id(awaited, &id, NULL, RDMA_PS_TCP) == 0);
		if (!route)
			unlocked = end_next;
		CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000) == 0);
		if (!route)
			continue;
		CHECK(next(awaited, RDMA_CM_EVENT_ADDR_RESOLVED) == id);
		unlocked = end_next;
		CHECK(rdma_resolve_route(id, 2000) == 0);
	}
	CHECK(!readable(awaited->fd) && !unlocked);
	rdma_destroy_event_channel(awaited);
}

/* establish_on is establish with a completion queue of id, which it returns, that no other queue pair uses. */
static struct ibv_cq *establish_on(struct ibv_comp_channel *ch, struct rdma_event_channel *server, struct rdma_event_channel *client,
				   struct rdma_cm_id *l, struct rdma_cm_id **id, struct rdma_cm_id **child)
{
	struct ibv_cq *cq = shared = ibv_create_cq(l->verbs, 16, NULL, ch, 0);

	CHECK(ch && cq);
	*id = call(client, l);
	shared = NULL;
	*child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	create_qp(*child);
	CHECK(rdma_accept(*child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == *child && next(client, RDMA_CM_EVENT_ESTABLISHED) == *id);
	return cq;
}

/* send_empty posts a Send without data. */
static void send_empty(struct ibv_qp *qp)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;

	CHECK(ibv_post_send(qp, &wr, &bad) == 0);
}

/* When a queue pair is destroyed, those of its completions that were not polled are gone. Others of the same queue are not. */
static void destroyed(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child, *other, *others;
	struct ibv_comp_channel *ch = ibv_create_comp_channel(l->verbs);
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_cq *cq, *got;
	struct ibv_qp *qp;
	struct ibv_wc wc;
	void *context;

	establish(server, client, l, &other, &others);
	cq = establish_on(ch, server, client, l, &id, &child);
	recv_empty(id->qp, 1); /* completes */
	recv_empty(id->qp, 2); /* is flushed */
	CHECK(ibv_req_notify_cq(cq, 0) == 0);
	send_empty(child->qp);
	CHECK(ibv_get_cq_event(ch, &got, &context) == 0 && got == cq);
	ibv_ack_cq_events(cq, 1);

	init.send_cq = init.recv_cq = cq;
	for (int i = 0; i < 2; i++) {
		qp = ibv_create_qp(other->pd, &init);
		CHECK(qp);
		recv_empty(qp, 3 + i);
		to_error(qp);
		if (i == 0)
			CHECK(ibv_destroy_qp(qp) == 0);
	}
	rdma_destroy_qp(id);
	CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == child && next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	expect_flush(cq, 4);
	CHECK(ibv_poll_cq(cq, 1, &wc) == 0);

	CHECK(ibv_destroy_qp(qp) == 0);
	end(id);
	end(child);
	end(other);
	end(others);
	end(l);
	CHECK(ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(ch) == 0);
}

/* flushed makes a queue pair flush a work request, and waits for the event of its completion queue. */
static void flushed(struct ibv_qp *qp, uint64_t id)
{
	struct pollfd p = { .fd = qp->recv_cq->channel->fd, .events = POLLIN };
	struct ibv_cq *got;
	void *context;

	CHECK(ibv_req_notify_cq(qp->recv_cq, 0) == 0);
	recv_empty(qp, id);
	to_error(qp);
	CHECK(poll(&p, 1, 10000) == 1); /* there is none if the queue has overflowed */
	CHECK(ibv_get_cq_event(qp->recv_cq->channel, &got, &context) == 0 && got == qp->recv_cq);
	ibv_ack_cq_events(got, 1);
}

/*
 * The completions of destroyed queue pairs take no room in their completion queue, which would overflow. Those of
 * others stay, from before and after it was resized too.
 */
static void reused(void)
{
	struct ibv_context *c = device(0);
	struct ibv_comp_channel *ch = ibv_create_comp_channel(c);
	struct ibv_pd *pd = ibv_alloc_pd(c);
	struct ibv_cq *cq = ibv_create_cq(c, 4, NULL, ch, 0);
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 },
	};
	struct ibv_qp *qps[4];
	struct ibv_wc wc;

	CHECK(ch && pd && cq);
	for (int i = 0; i < 20; i++) {
		CHECK((qps[0] = ibv_create_qp(pd, &init)) != NULL);
		flushed(qps[0], 0);
		CHECK(ibv_destroy_qp(qps[0]) == 0);
	}
	for (int i = 0; i < 4; i++) {
		CHECK((qps[i] = ibv_create_qp(pd, &init)) != NULL);
		if (i == 2)
			CHECK(ibv_resize_cq(cq, 5) == 0);
		flushed(qps[i], (uint64_t)i);
	}
	for (int i = 0; i < 4; i += 2)
		CHECK(ibv_destroy_qp(qps[i]) == 0);
	for (uint64_t i = 1; i < 4; i += 2)
		expect_flush(cq, i);
	CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
	for (int i = 1; i < 4; i += 2)
		CHECK(ibv_destroy_qp(qps[i]) == 0);
	CHECK(ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(ch) == 0);
	CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(c) == 0);
}

static struct ibv_qp *sender; /* sends when this process yields its CPU, until the channel has an event of the receive */
static struct ibv_comp_channel *receiver;

/* sched_yield is called by the libraries in place of that of libc. */
int sched_yield(void)
{
	if (sender) {
		send_empty(sender);
		sender = NULL;
		while (!readable(receiver->fd))
			usleep(1000);
	}
	return (int)syscall(SYS_sched_yield);
}

/* A poll that yields the CPU returns what has completed meanwhile: the program may look for the end of the connection next. */
static void yielded(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	int n = 0;

	receiver = ibv_create_comp_channel(l->verbs);
	cq = establish_on(receiver, server, client, l, &id, &child);
	recv_empty(id->qp, 1);
	CHECK(ibv_req_notify_cq(cq, 0) == 0);
	sender = child->qp;
	for (int i = 0; i < 1000 && sender; i++)
		n += ibv_poll_cq(cq, 1, &wc);
	CHECK(!sender && n == 1 && wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS);
	part(id, child, l);
	CHECK(ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(receiver) == 0);
}

/*
 * What the peer of a destroyed queue pair sends takes none of its receives, though the connection has not ended, and the
 * peer gets nothing that the program stores in memory that it had posted. The queue pair is freed when the connection
 * ends.
 */
static void left(void)
{
	enum { SIZE = 64 << 20, WRITES = 4 };
	static char in, out = 42;
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	char *source = malloc(SIZE), *sink = malloc(SIZE);
	struct ibv_mr *from, *to, *in_mr, *out_mr;
	struct ibv_sge sge = { .length = 1 };
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	int queues = send_queues();
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1 }, *bad;

	establish(server, client, l, &id, &child);
	CHECK(source && sink);
	from = ibv_reg_mr(id->pd, source, SIZE, 0);
	to = ibv_reg_mr(child->pd, sink, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	in_mr = ibv_reg_mr(id->pd, &in, 1, IBV_ACCESS_LOCAL_WRITE);
	out_mr = ibv_reg_mr(child->pd, &out, 1, 0);
	CHECK(from && to && in_mr && out_mr);
	memset(source, 1, SIZE);
	sge.addr = (uintptr_t)&in;
	sge.lkey = in_mr->lkey;
	CHECK(ibv_post_recv(id->qp, &recv, &bad_recv) == 0);
	sge = (struct ibv_sge){ (uintptr_t)source, SIZE, from->lkey };
	wr.wr.rdma.remote_addr = (uintptr_t)sink;
	wr.wr.rdma.rkey = to->rkey;
	for (int i = 0; i < WRITES; i++)
		CHECK(ibv_post_send(id->qp, &wr, &bad) == 0);
	rdma_destroy_qp(id);
	memset(source, 2, SIZE);
	sge = (struct ibv_sge){ (uintptr_t)&out, 1, out_mr->lkey };
	wr.opcode = IBV_WR_SEND;
	CHECK(ibv_post_send(child->qp, &wr, &bad) == 0);
	CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == child && next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	CHECK(in == 0 && !memchr(sink, 2, SIZE));
	CHECK(ibv_dereg_mr(from) == 0 && ibv_dereg_mr(to) == 0 && ibv_dereg_mr(in_mr) == 0 && ibv_dereg_mr(out_mr) == 0);
	free(source);
	free(sink);
	part(id, child, l);
	for (int i = 0; send_queues() > queues; i++) { /* until the library's thread has freed the first one */
		CHECK(i < 50);
		usleep(100000);
	}
}

/* await_success waits for the completion of a work request, which must have succeeded. */
static struct ibv_wc await_success(struct ibv_cq *cq, uint64_t id)
{
	struct ibv_wc wc;

	while (ibv_poll_cq(cq, 1, &wc) == 0)
		usleep(1000);
	if (wc.status != IBV_WC_SUCCESS)
		printf("work request %d: %s\n", (int)wc.wr_id, ibv_wc_status_str(wc.status));
	CHECK(wc.wr_id == id && wc.status == IBV_WC_SUCCESS);
	return wc;
}

/* exchange connects two queue pairs of one device as programs without librdmacm do. */
static void exchange(struct queues *a, struct queues *b)
{
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS };

	to_init(a->qp);
	to_init(b->qp);
	to_rtr(a->qp, b->qp->qp_num);
	to_rtr(b->qp, a->qp->qp_num);
	CHECK(ibv_modify_qp(a->qp, &rts, IBV_QP_STATE) == 0 && ibv_modify_qp(b->qp, &rts, IBV_QP_STATE) == 0);
}

/*
 * Programs without librdmacm have Send with Immediate Data, which takes one receive and invalidates nothing: neither a
 * key that does not exist nor the one of a memory window. It and the access flags leave each other alone.
 */
static void immediate(void)
{
	static uint64_t data, out = 42, in[2];
	struct ibv_context *c = device(0);
	struct queues a = make(c, NULL), b = make(c, NULL);
	struct ibv_mr *mr = ibv_reg_mr(b.pd, &data, sizeof(data), IBV_ACCESS_MW_BIND), *to, *from;
	struct ibv_mw *mw = ibv_alloc_mw(b.pd, IBV_MW_TYPE_2);
	struct ibv_send_wr bind = { .wr_id = 1, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED, .bind_mw = { .mw = mw } };
	struct ibv_sge sge, sink;
	struct ibv_send_wr imm = { .wr_id = 2, .opcode = IBV_WR_SEND_WITH_IMM, .sg_list = &sge, .num_sge = 1 };
	struct ibv_send_wr send = { .wr_id = 3, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_send_wr inv = { .wr_id = 4, .opcode = IBV_WR_SEND_WITH_INV };
	struct ibv_send_wr read = { .wr_id = 7, .opcode = IBV_WR_RDMA_READ, .sg_list = &sge, .num_sge = 1 };
	struct ibv_qp_attr access = { .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct ibv_wc wc;

	CHECK(mr && mw);
	to = ibv_reg_mr(b.pd, in, sizeof(in), IBV_ACCESS_LOCAL_WRITE);
	from = ibv_reg_mr(a.pd, &out, sizeof(out), IBV_ACCESS_LOCAL_WRITE);
	CHECK(to && from && ibv_modify_qp(b.qp, &access, IBV_QP_ACCESS_FLAGS) == 0);
	exchange(&a, &b);
	CHECK(ibv_modify_qp(a.qp, &access, IBV_QP_ACCESS_FLAGS) == 0);
	bind.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
	bind.bind_mw.bind_info = (struct ibv_mw_bind_info){ mr, (uintptr_t)&data, sizeof(data), IBV_ACCESS_REMOTE_READ };
	CHECK(ibv_post_send(b.qp, &bind, &bad) == 0);
	await_success(b.cq, bind.wr_id);
	const uint32_t values[] = { 0, 1, bind.bind_mw.rkey, mr->rkey, 0x12345678, UINT32_MAX };
	for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
		struct ibv_recv_wr recv[2] = { { .wr_id = 5, .next = &recv[1], .sg_list = &sink, .num_sge = 1 }, { .wr_id = 6 } }, *bad_recv;

		sge = (struct ibv_sge){ (uintptr_t)&out, sizeof(out), from->lkey };
		sink = (struct ibv_sge){ (uintptr_t)in, sizeof(in), to->lkey };
		imm.num_sge = i != 1;
		imm.send_flags = i % 2 ? IBV_SEND_INLINE | IBV_SEND_SOLICITED : 0;
		imm.imm_data = htonl(values[i]);
		imm.next = &send;
		in[0] = 0;
		CHECK(ibv_post_recv(b.qp, recv, &bad_recv) == 0 && ibv_post_send(a.qp, &imm, &bad) == 0);
		await_success(a.cq, send.wr_id);
		wc = await_success(b.cq, 5);
		CHECK(wc.opcode == IBV_WC_RECV && wc.wc_flags == IBV_WC_WITH_IMM && wc.imm_data == htonl(values[i]));
		CHECK(wc.byte_len == imm.num_sge * sizeof(out) && in[0] == (imm.num_sge ? out : 0));
		wc = await_success(b.cq, 6);
		CHECK(wc.opcode == IBV_WC_RECV && wc.wc_flags == 0 && wc.byte_len == 0);
	}
	imm.next = NULL;
	imm.send_flags = IBV_SEND_SIGNALED;
	recv_empty(a.qp, 5);
	imm.num_sge = 0;
	CHECK(ibv_post_send(b.qp, &imm, &bad) == 0); /* the other way */
	CHECK(await_success(b.cq, imm.wr_id).opcode == IBV_WC_SEND && await_success(a.cq, 5).imm_data == imm.imm_data);
	CHECK(ibv_post_send(a.qp, &inv, &bad) == EOPNOTSUPP && bad == &inv);
	CHECK(ibv_dereg_mr(mr) == EBUSY);
	read.wr.rdma.rkey = bind.bind_mw.rkey;
	read.wr.rdma.remote_addr = (uintptr_t)&data;
	CHECK(ibv_post_send(a.qp, &read, &bad) == 0);
	while (ibv_poll_cq(a.cq, 1, &wc) == 0)
		usleep(1000);
	CHECK(wc.wr_id == read.wr_id && wc.status == IBV_WC_REM_ACCESS_ERR);
	CHECK(ibv_dealloc_mw(mw) == 0 && ibv_dereg_mr(mr) == 0);
	CHECK(ibv_dereg_mr(to) == 0 && ibv_dereg_mr(from) == 0);
	unmake(&a);
	unmake(&b);
	CHECK(ibv_close_device(c) == 0);
}

static void await_up(struct ibv_qp *qp)
{
	while (atomic_load(&qp_of(qp)->conn) != CONN_UP)
		usleep(1000);
}

/* Programs without librdmacm connect from and to each GID of a device, also of another address family. */
static void addressed(void)
{
	struct ibv_context *c = device(0);
	union ibv_gid gid;

	for (int i = 0; ibv_query_gid(c, 1, i, &gid) == 0; i++) {
		for (int j = 0; ibv_query_gid(c, 1, j, &gid) == 0; j++) {
			struct queues a = make(c, NULL), b = make(c, NULL);

			to_init(a.qp);
			to_init(b.qp);
			from_to(a.qp, i, j, b.qp->qp_num);
			from_to(b.qp, j, i, a.qp->qp_num);
			await_up(a.qp);
			await_up(b.qp);
			unmake(&a);
			unmake(&b);
		}
	}
	CHECK(ibv_close_device(c) == 0);
}

/* After an attempt to connect a queue pair to an address that no peer can have, it is connected to another one. */
static void retried(void)
{
	struct ibv_context *c = device(0);
	struct queues a = make(c, NULL), b = make(c, NULL);
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .ah_attr = { .is_global = 1, .port_num = 1 } };

	rtr.ah_attr.grh.dgid = (union ibv_gid){ .raw = { [10] = 0xff, 0xff, 224, 0, 0, 1 } };
	to_init(a.qp);
	CHECK(ibv_modify_qp(a.qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN) > 0);
	exchange(&a, &b);
	await_up(a.qp);
	await_up(b.qp);
	unmake(&a);
	unmake(&b);
	CHECK(ibv_close_device(c) == 0);
}

/*
 * When the peer leaves, programs without librdmacm see nothing of that, as on InfiniBand: what it flushes completes, in order, when
 * they end the queue pair.
 */
static void parted(void)
{
	struct ibv_context *c = device(0);
	struct queues a = make(c, NULL), b = make(c, NULL);
	struct ibv_send_wr send = { .wr_id = 9, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;

	to_init(a.qp); /* exchange does so again */
	exchange(&a, &b);
	for (uint64_t id = 0; id <= 2; id++)
		recv_empty(b.qp, id);
	CHECK(ibv_post_send(a.qp, &send, &bad) == 0);
	await_success(b.cq, 0);
	CHECK(modified(a.qp, IBV_QPS_ERR) == 0);
	while (atomic_load(&qp_of(b.qp)->conn) != CONN_OVER)
		usleep(1000);
	CHECK(ibv_poll_cq(b.cq, 1, &wc) == 0);
	CHECK(modified(b.qp, IBV_QPS_ERR) == 0);
	expect_flush(b.cq, 1);
	expect_flush(b.cq, 2);
	recv_empty(b.qp, 3);
	expect_flush(b.cq, 3);
	unmake(&a);
	unmake(&b);
	CHECK(ibv_close_device(c) == 0);
}

/* A queue pair whose port is in use cannot wait for its peer. */
static void occupied(void)
{
	struct ibv_context *c = device(0);
	struct queues q = make(c, NULL);
	struct rdma_event_channel *ch = channel();
	struct sockaddr_in a = socket_address(htons((uint16_t)(61000 + q.qp->qp_num % (65536 - 61000))));
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .ah_attr = { .is_global = 1, .port_num = 1 } };
	struct rdma_cm_id *l;

	CHECK(rdma_create_id(ch, &l, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(l, (struct sockaddr *)&a) == 0 && rdma_listen(l, 0) == 0);
	to_init(q.qp);
	CHECK(ibv_query_gid(c, 1, 0, &rtr.ah_attr.grh.dgid) == 0);
	CHECK(ibv_modify_qp(q.qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN) == EADDRINUSE);
	unmake(&q);
	end(l);
	rdma_destroy_event_channel(ch);
	CHECK(ibv_close_device(c) == 0);
}

/*
 * A queue pair that the program has made, and made wait for another peer, is connected by its number, and ends with its
 * connection. Its peer can invalidate the key of a memory window.
 */
static void numbered(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct sockaddr_in a = socket_address(rdma_get_src_port(l));
	struct rdma_conn_param param = { 0 };
	static uint64_t data;
	struct ibv_send_wr bind = { .wr_id = 1, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr inv = { .wr_id = 2, .opcode = IBV_WR_SEND_WITH_INV, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_mr *mr;
	struct queues q;
	struct ibv_wc wc;

	CHECK(rdma_create_id(client, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000) == 0 && next(client, RDMA_CM_EVENT_ADDR_RESOLVED) == id);
	CHECK(rdma_resolve_route(id, 2000) == 0 && next(client, RDMA_CM_EVENT_ROUTE_RESOLVED) == id);
	q = make(id->verbs, NULL);
	to_init(q.qp);
	to_rtr(q.qp, 0);
	param.qp_num = q.qp->qp_num;
	CHECK(rdma_connect(id, &param) == 0);
	child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	create_qp(child);
	CHECK(rdma_accept(child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child && next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	mr = ibv_reg_mr(q.pd, &data, sizeof(data), IBV_ACCESS_MW_BIND);
	bind.bind_mw.mw = ibv_alloc_mw(q.pd, IBV_MW_TYPE_2);
	CHECK(mr && bind.bind_mw.mw);
	inv.invalidate_rkey = bind.bind_mw.rkey = ibv_inc_rkey(bind.bind_mw.mw->rkey);
	bind.bind_mw.bind_info = (struct ibv_mw_bind_info){ mr, (uintptr_t)&data, sizeof(data), IBV_ACCESS_REMOTE_READ };
	recv_empty(q.qp, 3);
	CHECK(ibv_post_send(q.qp, &bind, &bad) == 0);
	await_success(q.cq, bind.wr_id);
	CHECK(ibv_dereg_mr(mr) == EBUSY && ibv_post_send(child->qp, &inv, &bad) == 0);
	await_success(child->send_cq, inv.wr_id);
	wc = await_success(q.cq, 3);
	CHECK(wc.wc_flags == IBV_WC_WITH_INV && wc.invalidated_rkey == inv.invalidate_rkey);
	CHECK(ibv_dereg_mr(mr) == 0 && ibv_dealloc_mw(bind.bind_mw.mw) == 0);
	CHECK(rdma_disconnect(child) == 0 && next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	CHECK(qp_state(q.qp) == IBV_QPS_ERR);
	unmake(&q);
	part(id, child, l);
}

/* last_receive takes the event that a queue pair takes no more receives of its shared queue. */
static void last_receive(struct ibv_qp *qp)
{
	struct ibv_async_event e;

	CHECK(ibv_get_async_event(qp->context, &e) == 0);
	CHECK(e.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && e.element.qp == qp);
	ibv_ack_async_event(&e);
	CHECK(!readable(qp->context->async_fd));
}

/* Each of several work requests with inline data of several pieces sends its own, if that is not too much. */
static void gathered(void)
{
	static char out[] = "abcdefgh", in[2][4], much[1000];
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_sge pieces[4], sge = { .length = 4 };
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr send[2], *bad;
	struct ibv_mr *mr;

	establish(server, client, l, &id, &child);
	mr = ibv_reg_mr(child->pd, in, sizeof(in), IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);
	sge.lkey = mr->lkey;
	for (int i = 0; i < 4; i++)
		pieces[i] = (struct ibv_sge){ .addr = (uintptr_t)(out + 2 * i), .length = 2 };
	for (int i = 0; i < 2; i++) {
		sge.addr = (uintptr_t)in[i];
		recv.wr_id = (uint64_t)i;
		CHECK(ibv_post_recv(child->qp, &recv, &bad_recv) == 0);
		send[i] = (struct ibv_send_wr){
			.next = i == 0 ? &send[1] : NULL, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE,
			.sg_list = &pieces[2 * i], .num_sge = 2,
		};
	}
	CHECK(ibv_post_send(id->qp, send, &bad) == 0);
	for (uint64_t i = 0; i < 2; i++)
		CHECK(await_success(child->recv_cq, i).byte_len == 4 && memcmp(in[i], out + 4 * i, 4) == 0);
	for (int i = 0; i < 2; i++)
		pieces[i] = (struct ibv_sge){ .addr = (uintptr_t)much, .length = sizeof(much) };
	send[0].next = NULL;
	CHECK(ibv_post_send(id->qp, send, &bad) == EINVAL && bad == send);
	CHECK(ibv_dereg_mr(mr) == 0);
	part(id, child, l);
}

/*
 * The child of a fork destroys all that it has of its parent's, as programs do when they end, and closes the device.
 * The parent has it still, and misses no event.
 */
static void forked(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child, *next_id, *next_child;
	static char data[100];
	struct ibv_context *c = device(0);
	struct queues q = make(c, NULL);
	struct ibv_srq_init_attr shared_attr = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(q.pd, &shared_attr);
	struct ibv_qp_init_attr init = {
		.send_cq = q.cq, .recv_cq = q.cq, .srq = srq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 },
	};
	struct ibv_qp *ended = srq ? ibv_create_qp(q.pd, &init) : NULL;
	struct ibv_recv_wr recv = { 0 }, *bad;
	struct ibv_mr *mr;
	struct ibv_cq *cq;
	void *context;
	int status;
	pid_t pid;

	CHECK(ended);
	to_error(ended);
	while (!readable(c->async_fd))
		usleep(1000);
	establish(server, client, l, &id, &child);
	mr = ibv_reg_mr(id->pd, data, sizeof(data), IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr && ibv_req_notify_cq(child->recv_cq, 0) == 0);
	next_id = call(client, l);
	while (!readable(server->fd)) /* the request waits in the channel */
		usleep(1000);
	recv_empty(child->qp, 1);
	send_empty(id->qp);
	while (!readable(child->recv_cq_channel->fd)) /* and so does the event of the completion */
		usleep(1000);
	flush(q.qp);
	/* What other threads that post would have. */
	pthread_mutex_lock(&qp_of(q.qp)->send_lock);
	pthread_mutex_lock(&qp_of(q.qp)->recv_lock);
	pthread_mutex_lock(&srq_of(srq)->lock);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		alarm(30);
		CHECK(!readable(c->async_fd));
		recv_empty(q.qp, 1);
		send_empty(q.qp);
		ibv_post_srq_recv(srq, &recv, &bad); /* to nobody, but it returns */
		CHECK(ibv_get_cq_event(child->recv_cq_channel, &cq, &context) == -1 && errno == EIO);
		CHECK(ibv_dereg_mr(mr) == 0);
		CHECK(ibv_destroy_qp(ended) == 0 && ibv_destroy_srq(srq) == 0);
		end(id);
		end(child);
		end(next_id);
		end(l);
		rdma_destroy_event_channel(server);
		rdma_destroy_event_channel(client);
		unmake(&q);
		CHECK(ibv_close_device(c) == 0);
		exit(0);
	}
	pthread_mutex_unlock(&qp_of(q.qp)->send_lock);
	pthread_mutex_unlock(&qp_of(q.qp)->recv_lock);
	pthread_mutex_unlock(&srq_of(srq)->lock);
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	CHECK(readable(server->fd) && readable(child->recv_cq_channel->fd));
	last_receive(ended);
	CHECK(ibv_destroy_qp(ended) == 0 && ibv_destroy_srq(srq) == 0);
	await_success(child->recv_cq, 1);
	next_child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	create_qp(next_child);
	CHECK(rdma_accept(next_child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == next_child);
	CHECK(next(client, RDMA_CM_EVENT_ESTABLISHED) == next_id);
	CHECK(ibv_dereg_mr(mr) == 0);
	recv_empty(child->qp, 2);
	send_empty(id->qp);
	await_success(child->recv_cq, 2);
	end(id);
	end(child);
	end(next_id);
	end(next_child);
	end(l);
	unmake(&q);
	CHECK(ibv_close_device(c) == 0);
}

/*
 * What a destroyed queue pair has used is destroyed at once, though its peer, whose daemon is stopped, has
 * acknowledged nothing. The peer then receives what was sent.
 */
static void silent(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *child;
	struct sockaddr_in a = socket_address(rdma_get_src_port(l));
	struct rdma_cm_id *id = route_to(client, &a);
	struct ibv_comp_channel *ch = ibv_create_comp_channel(id->verbs);
	struct ibv_pd *pd = ibv_alloc_pd(id->verbs);
	struct ibv_srq_init_attr recvs = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_cq *cq = ibv_create_cq(id->verbs, 16, NULL, ch, 0);
	struct ibv_srq *srq = ibv_create_srq(pd, &recvs);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_RC, .cap = { 4, 0, 1, 0, 0 } };

	CHECK(ch && pd && cq && srq && rdma_create_qp(id, pd, &init) == 0 && rdma_connect(id, NULL) == 0);
	child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	create_qp(child);
	recv_empty(child->qp, 1);
	CHECK(rdma_accept(child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child && next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	CHECK(ibv_destroy_cq(cq) == EBUSY && ibv_destroy_srq(srq) == EBUSY && ibv_dealloc_pd(pd) == EBUSY);

	stop_daemon();
	send_empty(id->qp);
	rdma_destroy_qp(id);
	CHECK(ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(ch) == 0);
	CHECK(ibv_destroy_srq(srq) == 0 && ibv_dealloc_pd(pd) == 0);
	CHECK(!readable(client->fd)); /* the connection has not ended */
	CHECK(kill(daemon_pid(), SIGCONT) == 0);
	await_success(child->recv_cq, 1);
	CHECK(next(client, RDMA_CM_EVENT_DISCONNECTED) == id && next(server, RDMA_CM_EVENT_DISCONNECTED) == child);
	part(id, child, l);
}

enum { EXITING = 1 << 10 }; /* bytes of a Write */

/* exiting is a process that destroys its queue pair and ends when it has posted something. */
static void exiting(int from)
{
	struct rdma_event_channel *client = channel();
	struct { uint64_t addr; uint32_t rkey; } to;
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .num_sge = 1 }, *bad;
	char *source = malloc(EXITING);
	struct sockaddr_in a;
	struct rdma_cm_id *id;
	struct ibv_sge sge;
	struct ibv_mr *mr;

	CHECK(source && read(from, &a, sizeof(a)) == sizeof(a));
	id = route_to(client, &a);
	create_qp(id);
	mr = ibv_reg_mr(id->pd, source, EXITING, 0);
	CHECK(mr && rdma_connect(id, NULL) == 0 && next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	CHECK(read(from, &to, sizeof(to)) == sizeof(to));
	sge = (struct ibv_sge){ (uintptr_t)source, EXITING, mr->lkey };
	wr.sg_list = &sge;
	wr.wr.rdma.remote_addr = to.addr;
	wr.wr.rdma.rkey = to.rkey;
	for (int i = 0; i < 3; i++)
		CHECK(ibv_post_send(id->qp, &wr, &bad) == 0);
	send_empty(id->qp);
	end(id);
	exit(0);
}

/* The little that a program has posted last arrives, though it has ended. */
static void exited(void)
{
	struct { uint64_t addr; uint32_t rkey; } to = { 0 };
	struct rdma_event_channel *server;
	struct rdma_cm_id *l, *child;
	struct sockaddr_in a;
	char *sink = malloc(EXITING);
	struct ibv_mr *mr;
	int p[2], status;
	pid_t pid;

	CHECK(sink && pipe(p) == 0);
	pid = fork();
	if (pid == 0)
		exiting(p[0]);
	server = channel();
	l = listener(server, 0);
	a = socket_address(rdma_get_src_port(l));
	CHECK(write(p[1], &a, sizeof(a)) == sizeof(a));
	child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	create_qp(child);
	mr = ibv_reg_mr(child->pd, sink, EXITING, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr);
	recv_empty(child->qp, 1);
	CHECK(rdma_accept(child, NULL) == 0 && next(server, RDMA_CM_EVENT_ESTABLISHED) == child);
	to.addr = (uintptr_t)sink;
	to.rkey = mr->rkey;
	CHECK(write(p[1], &to, sizeof(to)) == sizeof(to));
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	await_success(child->recv_cq, 1);
	CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == child && ibv_dereg_mr(mr) == 0);
	free(sink);
	end(child);
	end(l);
}

/*
 * A device with memory management extensions has Send with Invalidate and Local Invalidate: a peer reads from a memory
 * window and invalidates it, it is bound again, and the program invalidates it.
 */
static void invalidated(void)
{
	static uint64_t data = 42, got;
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_device_attr attr;
	struct ibv_mr *mr, *to;
	struct ibv_mw *mw;
	struct ibv_sge sge;
	struct ibv_send_wr read = { .wr_id = 1, .opcode = IBV_WR_RDMA_READ, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr send = { .wr_id = 2, .opcode = IBV_WR_SEND_WITH_INV, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr bind = { .wr_id = 3, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr local = { .wr_id = 4, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;

	CHECK(ibv_query_device(l->verbs, &attr) == 0 && attr.device_cap_flags & IBV_DEVICE_MEM_MGT_EXTENSIONS);
	establish(server, client, l, &id, &child);
	mr = ibv_reg_mr(child->pd, &data, sizeof(data), IBV_ACCESS_MW_BIND);
	to = ibv_reg_mr(id->pd, &got, sizeof(got), IBV_ACCESS_LOCAL_WRITE);
	mw = ibv_alloc_mw(child->pd, IBV_MW_TYPE_2);
	CHECK(mr && to && mw);
	sge = (struct ibv_sge){ (uintptr_t)&got, sizeof(got), to->lkey };
	bind.bind_mw.mw = mw;
	bind.bind_mw.bind_info = (struct ibv_mw_bind_info){ mr, (uintptr_t)&data, sizeof(data), IBV_ACCESS_REMOTE_READ };
	bind.bind_mw.rkey = mw->rkey;
	for (int i = 0; i < 2; i++) {
		bind.bind_mw.rkey = ibv_inc_rkey(bind.bind_mw.rkey);
		got = 0;
		recv_empty(child->qp, 5);
		CHECK(ibv_post_send(child->qp, &bind, &bad) == 0);
		await_success(child->send_cq, bind.wr_id);
		read.wr.rdma.remote_addr = (uintptr_t)&data;
		read.wr.rdma.rkey = bind.bind_mw.rkey;
		CHECK(ibv_post_send(id->qp, &read, &bad) == 0);
		await_success(id->send_cq, read.wr_id);
		CHECK(got == data && ibv_dereg_mr(mr) == EBUSY);
		errno = 0;
		CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
		CHECK(errno == EBUSY);
		if (i == 0) {
			send.invalidate_rkey = bind.bind_mw.rkey;
			CHECK(ibv_post_send(id->qp, &send, &bad) == 0);
			await_success(id->send_cq, send.wr_id);
			wc = await_success(child->recv_cq, 5);
			CHECK(wc.wc_flags & IBV_WC_WITH_INV && wc.invalidated_rkey == send.invalidate_rkey);
		} else {
			local.invalidate_rkey = bind.bind_mw.rkey;
			CHECK(ibv_post_send(child->qp, &local, &bad) == 0);
			await_success(child->send_cq, local.wr_id);
		}
	}
	CHECK(ibv_post_send(id->qp, &read, &bad) == 0);
	while (ibv_poll_cq(id->send_cq, 1, &wc) == 0)
		usleep(1000);
	CHECK(wc.wr_id == read.wr_id && wc.status == IBV_WC_REM_ACCESS_ERR);
	CHECK(ibv_dealloc_mw(mw) == 0 && ibv_dereg_mr(mr) == 0 && ibv_dereg_mr(to) == 0);
	part(id, child, l);
}

/* A queue pair refuses what its access flags do not name, in memory that allows it, and permits the rest. */
static void permitted(void)
{
	static uint64_t data, got;
	static const unsigned int flags[] = { IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_ATOMIC };
	static const enum ibv_wr_opcode uses[] = { IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD };
	const unsigned int all = IBV_ACCESS_LOCAL_WRITE | flags[0] | flags[1] | flags[2];
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;

	for (int denied = 0; denied < 3; denied++) {
		struct ibv_qp_attr attr = { .qp_access_flags = all & ~flags[denied] };
		struct ibv_mr *mr, *from;
		struct ibv_sge sge;

		establish(server, client, l, &id, &child);
		CHECK(ibv_modify_qp(child->qp, &attr, IBV_QP_ACCESS_FLAGS) == 0);
		mr = ibv_reg_mr(child->pd, &data, sizeof(data), (int)all);
		from = ibv_reg_mr(id->pd, &got, sizeof(got), IBV_ACCESS_LOCAL_WRITE);
		CHECK(mr && from);
		sge = (struct ibv_sge){ (uintptr_t)&got, sizeof(got), from->lkey };
		data = 42;
		for (int i = 1; i <= 3; i++) { /* what is denied comes last */
			struct ibv_send_wr wr = { .wr_id = (uint64_t)i, .opcode = uses[(denied + i) % 3], .sg_list = &sge, .num_sge = 1,
						  .send_flags = IBV_SEND_SIGNALED }, *bad;

			got = i < 3 ? 0 : 7;
			if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
				wr.wr.atomic.remote_addr = (uintptr_t)&data;
				wr.wr.atomic.rkey = mr->rkey;
				wr.wr.atomic.compare_add = 1;
			} else {
				wr.wr.rdma.remote_addr = (uintptr_t)&data;
				wr.wr.rdma.rkey = mr->rkey;
			}
			CHECK(ibv_post_send(id->qp, &wr, &bad) == 0);
			if (i < 3) {
				await_success(id->send_cq, wr.wr_id);
			} else { /* a Write has succeeded when it was sent */
				struct ibv_wc wc;

				while (ibv_poll_cq(id->send_cq, 1, &wc) == 0)
					usleep(1000);
				CHECK(wc.status == (denied == 0 ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR) && got == 7);
			}
		}
		CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == child && next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
		CHECK(data != 7);
		end(id);
		end(child);
		CHECK(ibv_dereg_mr(mr) == 0 && ibv_dereg_mr(from) == 0);
	}
	end(l);
}

/* A queue pair with a shared receive queue reports once that it takes no more receives: after its connection, or at once if it has none. */
static void last(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id = call(client, l), *child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp *qp;

	CHECK(rdma_create_srq(child, NULL, &init) == 0);
	create_qp(child);
	CHECK(rdma_accept(child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child && next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	CHECK(rdma_disconnect(id) == 0);
	CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == child && next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	last_receive(child->qp);
	to_error(child->qp);
	CHECK(!readable(child->verbs->async_fd));

	attr.send_cq = attr.recv_cq = child->send_cq;
	attr.srq = child->srq;
	attr.cap.max_recv_wr = attr.cap.max_recv_sge = UINT32_MAX; /* which do not matter with a shared queue */
	qp = ibv_create_qp(child->pd, &attr);
	CHECK(qp);
	to_error(qp);
	last_receive(qp);
	to_error(qp);
	CHECK(!readable(child->verbs->async_fd) && ibv_destroy_qp(qp) == 0);

	qp = ibv_create_qp(child->pd, &attr);
	CHECK(qp);
	to_error(qp);
	while (!readable(child->verbs->async_fd))
		usleep(1000);
	CHECK(ibv_destroy_qp(qp) == 0 && !readable(child->verbs->async_fd)); /* the event has ended with it */
	rdma_destroy_qp(child);
	rdma_destroy_srq(child);
	part(id, child, l);
}

/* A shared receive queue has no limit until the program sets one, whatever its first attributes say. */
static void armed(void)
{
	struct ibv_context *c = device(0);
	struct ibv_pd *pd = ibv_alloc_pd(c);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 2, .srq_limit = UINT32_MAX } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	struct ibv_srq_attr attr;

	CHECK(srq && init.attr.max_wr >= 4 && init.attr.max_sge >= 2);
	CHECK(ibv_query_srq(srq, &attr) == 0 && attr.max_wr == init.attr.max_wr && attr.srq_limit == 0);
	for (uint32_t limit = attr.max_wr; limit <= attr.max_wr + 1; limit++) {
		attr.srq_limit = limit;
		CHECK(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT) == (limit > attr.max_wr ? EINVAL : 0));
		CHECK(ibv_query_srq(srq, &attr) == 0 && attr.srq_limit == attr.max_wr);
	}
	CHECK(ibv_destroy_srq(srq) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(c) == 0);
}

/* Each GID names the network device that has its address. The table ends where the port says. */
static void gids(void)
{
	struct ibv_context *c = device(0);
	struct ibv_gid_entry e;
	struct ibv_port_attr port;
	char name[IF_NAMESIZE];

	CHECK(ibv_query_port(c, 1, &port) == 0 && port.gid_tbl_len > 0);
	for (int i = 0; i < port.gid_tbl_len; i++) {
		CHECK(ibv_query_gid_ex(c, 1, i, &e, 0) == 0 && e.gid_index == (uint32_t)i && e.port_num == 1);
		CHECK(if_indextoname(e.ndev_ifindex, name));
		CHECK(strcmp(name, container_of(c, struct context, v.context)->device->interface) == 0);
	}
	CHECK(ibv_query_gid_ex(c, 1, port.gid_tbl_len, &e, 0) == EINVAL);
	CHECK(ibv_close_device(c) == 0);
}

/* refuses checks that a call has failed, as what it returned says, since iwarpd has no such thing. */
static void refuses(bool failed)
{
	CHECK(failed && errno == EOPNOTSUPP);
	errno = 0;
}

/* What iwarpd does not have fails as each function's manual says, also functions that the headers of Debian 12 lack. */
static void unsupported(void)
{
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *id = listener(ch, 0);
	int (*resolve_info)(struct rdma_cm_id *, const char *, const char *, const struct rdma_addrinfo *) =
		(__typeof__(resolve_info))function("rdma_resolve_addrinfo");
	int (*query_info)(struct rdma_cm_id *, struct rdma_addrinfo **) =
		(__typeof__(query_info))function("rdma_query_addrinfo");
	int (*write_event)(struct rdma_cm_id *, enum rdma_cm_event_type, int, uint64_t) =
		(__typeof__(write_event))function("rdma_write_cm_event");
	struct ibv_ah_attr attr = { .port_num = 1 };
	struct ibv_device_attr dev;
	struct rdma_addrinfo *info;
	struct ibv_grh grh = { 0 };
	struct ibv_wc wc = { 0 };

	errno = 0;
	refuses(!ibv_create_ah(id->pd, &attr));
	refuses(!ibv_create_ah_from_wc(id->pd, &wc, &grh, 1));
	refuses(ibv_init_ah_from_wc(id->verbs, 1, &wc, &grh, &attr) == -1);
	refuses(!ibv_import_pd(id->verbs, 0));
	refuses(!ibv_import_mr(id->pd, 0));
	refuses(!ibv_import_dm(id->verbs, 0));
	refuses(!ibv_reg_dmabuf_mr(id->pd, 0, 4096, 0, 0, 0));
	refuses(!ibv_alloc_mw(id->pd, IBV_MW_TYPE_1));
	CHECK(ibv_query_device(id->verbs, &dev) == 0 && !(dev.device_cap_flags & IBV_DEVICE_MEM_WINDOW));
	refuses(rdma_join_multicast(id, &id->route.addr.src_addr, NULL) == -1);
	refuses(resolve_info(id, "localhost", "7", NULL) == -1);
	refuses(query_info(id, &info) == -1);
	refuses(write_event(id, RDMA_CM_EVENT_ADDR_CHANGE, 0, 0) == -1);
	CHECK(!readable(ch->fd));
	end(id);
	rdma_destroy_event_channel(ch);
}

/* A probe is a call of what programs look for when they start, and what it sets errno to or returns. */
struct probe {
	const char *call;
	int got, want;
};

/* error returns the errno value of a call that returns a pointer. */
static int error(const void *made)
{
	return made ? 0 : errno;
}

/* What programs for hardware look for when they start works, or fails as they expect, and nothing is left. */
static void probed(void)
{
#define PROBE(call, want) { #call, call, want }
	struct ibv_context *c = device(0);
	struct ibv_pd *pd = ibv_alloc_pd(c);
	struct ibv_cq *cq = ibv_create_cq(c, 16, NULL, NULL, 0);
	struct ibv_srq_init_attr_ex recvs = {
		.attr = { .max_wr = 4, .max_sge = 1 }, .pd = pd,
		.comp_mask = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE,
	};
	struct ibv_srq *srq = ibv_create_srq_ex(c, &recvs);
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	static char data[100];
	const int local = IBV_ACCESS_LOCAL_WRITE, hints = IBV_ACCESS_RELAXED_ORDERING | IBV_ACCESS_HUGETLB;
	const int demand = local | IBV_ACCESS_ON_DEMAND;
	struct ibv_mr *mr = ibv_reg_mr(pd, data, sizeof(data), local | hints);
	struct ibv_sge sge = { (uintptr_t)data, sizeof(data), mr ? mr->lkey : 0 };
	struct ibv_qp_init_attr_ex extended = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 }, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
	};
	struct ibv_srq_init_attr_ex shared_by_xrc = {
		.attr = { .max_wr = 4, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC, .pd = pd, .cq = cq,
		.comp_mask = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_CQ,
	};
	struct ibv_cq_init_attr_ex polled = { .cqe = 16, .wc_flags = IBV_WC_EX_WITH_BYTE_LEN };
	struct ibv_td_init_attr td = { 0 };
	struct ibv_parent_domain_init_attr parent = { .pd = pd };
	struct ibv_xrcd_init_attr xrcd = {
		.fd = -1, .oflags = O_CREAT, .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
	};
	struct ibv_qp_open_attr open = { .comp_mask = IBV_QP_OPEN_ATTR_NUM, .qp_num = 1 };
	struct ibv_alloc_dm_attr dm = { .length = 64 };
	struct ibv_counters_init_attr counters = { 0 };
	struct ibv_flow_attr flow = { .type = IBV_FLOW_ATTR_SNIFFER, .size = sizeof(flow), .port = 1 };
	struct ibv_flow_action_esp_attr esp = { 0 };
	struct ibv_wq_init_attr wq = { .wq_type = IBV_WQT_RQ, .max_wr = 4, .max_sge = 1, .pd = pd, .cq = cq };
	struct ibv_rwq_ind_table_init_attr table = { 0 };
	struct ibv_modify_cq_attr moderate = { .attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = { 8, 100 } };
	struct ibv_qp_rate_limit_attr rate = { .rate_limit = 1000 };
	struct ibv_values_ex clock = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	struct ibv_query_device_ex_input bad_input = { .comp_mask = 1 };
	struct ibv_mw_bind bind = { .bind_info = { .mr = mr } };
	struct ibv_ops_wr op = { .opcode = IBV_WR_TAG_SYNC }, *bad_op;
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_device_attr_ex dev;
	struct ibv_port_attr port;
	struct ibv_ece ece = { .vendor_id = 1 };
	union ibv_gid gid = { 0 };
	uint32_t number;
	__be16 pkey;
	const struct probe probes[] = {
		PROBE(ibv_query_device_ex(c, NULL, &dev), 0),
		PROBE(ibv_query_device_ex(c, &bad_input, &dev), EINVAL),
		PROBE(error(ibv_create_qp_ex(c, &extended)), EOPNOTSUPP),
		PROBE(ibv_qp_to_qp_ex(qp) == NULL, 1),
		PROBE(error(ibv_create_cq_ex(c, &polled)), EOPNOTSUPP),
		PROBE(ibv_modify_cq(cq, &moderate), EOPNOTSUPP),
		PROBE(error(ibv_alloc_td(c, &td)), EOPNOTSUPP),
		PROBE(error(ibv_alloc_parent_domain(c, &parent)), EOPNOTSUPP),
		PROBE(error(ibv_alloc_null_mr(pd)), EOPNOTSUPP),
		PROBE(error(ibv_reg_mr(pd, NULL, SIZE_MAX, demand)), EOPNOTSUPP),
		PROBE(error(ibv_reg_mr(pd, data, sizeof(data), demand)), EOPNOTSUPP),
		PROBE(error(ibv_reg_mr(pd, data, sizeof(data), IBV_ACCESS_REMOTE_WRITE)), EINVAL),
		PROBE(error(ibv_reg_mr_iova(pd, data, sizeof(data), UINT64_MAX, local)), EINVAL),
		PROBE(error(ibv_reg_dmabuf_mr(pd, 0, 4096, 0, 0, local)), EOPNOTSUPP),
		PROBE(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), EOPNOTSUPP),
		PROBE(error(ibv_alloc_dm(c, &dm)), EOPNOTSUPP),
		PROBE(ibv_query_rt_values_ex(c, &clock), EOPNOTSUPP),
		PROBE(error(ibv_open_xrcd(c, &xrcd)), EOPNOTSUPP),
		PROBE(error(ibv_create_srq_ex(c, &shared_by_xrc)), EOPNOTSUPP),
		PROBE(error(ibv_open_qp(c, &open)), EOPNOTSUPP),
		PROBE(ibv_get_srq_num(srq, &number), EOPNOTSUPP),
		PROBE(ibv_post_srq_ops(srq, &op, &bad_op), EOPNOTSUPP),
		PROBE(error(ibv_create_flow(qp, &flow)), EOPNOTSUPP),
		PROBE(error(ibv_create_flow_action_esp(c, &esp)), EOPNOTSUPP),
		PROBE(error(ibv_create_counters(c, &counters)), EOPNOTSUPP),
		PROBE(error(ibv_create_wq(c, &wq)), EOPNOTSUPP),
		PROBE(error(ibv_create_rwq_ind_table(c, &table)), EOPNOTSUPP),
		PROBE(ibv_modify_qp_rate_limit(qp, &rate), EOPNOTSUPP),
		PROBE(ibv_bind_mw(qp, mw, &bind), EINVAL), /* for type 1 */
		PROBE(ibv_attach_mcast(qp, &gid, 0), EOPNOTSUPP),
		PROBE(ibv_detach_mcast(qp, &gid, 0), EOPNOTSUPP),
		PROBE(ibv_set_ece(qp, &ece), EOPNOTSUPP),
		PROBE(ibv_query_ece(qp, &ece), 0),
		PROBE((int)ece.vendor_id, 0),
		PROBE(ibv_query_qp_data_in_order(qp, IBV_WR_RDMA_WRITE, 0), 0),
		PROBE(ibv_query_port(c, 2, &port), EINVAL),
		PROBE(ibv_query_port(c, 1, &port), 0),
		PROBE(ibv_query_pkey(c, 1, 0, &pkey), 0),
		PROBE(ibv_query_pkey(c, 1, 1, &pkey), -1),
		PROBE(ibv_get_pkey_index(c, 1, pkey), 0),
		PROBE(ibv_get_pkey_index(c, 1, htobe16(0x8001)), -1),
		PROBE(ibv_fork_init(), 0),
		PROBE(ibv_is_fork_initialized(), IBV_FORK_UNNEEDED),
		PROBE(ibv_get_device_index(c->device), -1),
		PROBE(strcmp(ibv_node_type_str(c->device->node_type), "iWARP NIC"), 0),
		PROBE(strcmp(ibv_port_state_str(port.state), "active"), 0),
		PROBE(strcmp(ibv_wc_status_str(IBV_WC_WR_FLUSH_ERR), "Work Request Flushed Error"), 0),
		PROBE(strcmp(ibv_event_type_str(IBV_EVENT_QP_FATAL), "local work queue catastrophic error"), 0),
	};

	CHECK(pd && cq && srq && qp && mr && mw);
	for (size_t i = 0; i < sizeof(probes) / sizeof(probes[0]); i++) {
		if (probes[i].got != probes[i].want)
			printf("%s: %d instead of %d\n", probes[i].call, probes[i].got, probes[i].want);
		CHECK(probes[i].got == probes[i].want);
	}
	/* No object is left that uses these. */
	CHECK(ibv_dealloc_mw(mw) == 0 && ibv_dereg_mr(mr) == 0 && ibv_destroy_qp(qp) == 0 && ibv_destroy_srq(srq) == 0);
	CHECK(ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(c) == 0);
#undef PROBE
}

/* endpoint makes a listening endpoint whose connections get queue pairs with these attributes. */
static struct rdma_cm_id *endpoint(struct ibv_qp_init_attr *attr)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *res;
	struct rdma_cm_id *id;

	CHECK(rdma_getaddrinfo(address, NULL, &hints, &res) == 0);
	CHECK(rdma_create_ep(&id, res, NULL, attr) == 0 && rdma_listen(id, 0) == 0);
	rdma_freeaddrinfo(res);
	return id;
}

/* The queue pair of a request of an endpoint gets the PD of the listening id. */
static void domains(void)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct rdma_event_channel *client = channel();
	struct rdma_cm_id *l = endpoint(&attr), *id = call(client, l), *child;
	struct ibv_pd *pd = ibv_alloc_pd(l->verbs);

	CHECK(pd);
	l->pd = pd;
	CHECK(rdma_get_request(l, &child) == 0 && child->pd == pd && child->qp->pd == pd);
	rdma_destroy_ep(child);
	CHECK(next(client, RDMA_CM_EVENT_REJECTED) == id && ibv_dealloc_pd(pd) == 0);
	end(id);
	rdma_destroy_ep(l);
	rdma_destroy_event_channel(client);
}

/* spoil changes errno, as any call may that succeeds. */
static void spoil(void)
{
	errno = EAGAIN;
	unlocked = spoil;
}

/*
 * A queue pair that asks for too much is refused, also after a completion queue was made for it, or a connect request
 * taken. errno says why, though the library makes other calls then.
 */
static void excessive(void)
{
	struct ibv_qp_init_attr deep = { .qp_type = IBV_QPT_RC, .cap = { INT_MAX, 1, 1, 1, 0 } };
	struct ibv_qp_init_attr wide = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, INT_MAX, 0 } };
	struct rdma_event_channel *client = channel();
	struct rdma_cm_id *l = endpoint(&wide), *id = call(client, l), *child;

	unlocked = spoil;
	CHECK(rdma_create_qp(l, NULL, &deep) == -1 && errno == EINVAL && !l->qp && !l->send_cq && !l->recv_cq);
	CHECK(rdma_get_request(l, &child) == -1 && errno == EINVAL);
	unlocked = NULL;
	CHECK(next(client, RDMA_CM_EVENT_REJECTED) == id);
	end(id);
	rdma_destroy_ep(l);
	rdma_destroy_event_channel(client);
}

/* A completion queue that rdma_create_qp makes has room for all receives of the shared queue. */
static void roomy(void)
{
	enum { MESSAGES = 64 };
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_srq_init_attr init = { .attr = { .max_wr = MESSAGES, .max_sge = 1 } };
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { MESSAGES, UINT32_MAX, 1, 1, 0 } };
	struct ibv_recv_wr recv = { 0 }, *bad;

	id = call(client, l);
	child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(rdma_create_srq(child, NULL, &init) == 0 && rdma_create_qp(child, NULL, &attr) == 0);
	CHECK(rdma_accept(child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child && next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	for (; recv.wr_id < MESSAGES; recv.wr_id++)
		CHECK(ibv_post_srq_recv(child->srq, &recv, &bad) == 0);
	for (int i = 0; i < MESSAGES; i++) {
		send_empty(id->qp);
		await_success(id->send_cq, 0);
	}
	CHECK(rdma_disconnect(id) == 0); /* after all of them */
	CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == child && next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	for (uint64_t i = 0; i < MESSAGES; i++)
		await_success(child->recv_cq, i);
	rdma_destroy_qp(child);
	rdma_destroy_srq(child);
	part(id, child, l);
}

/*
 * A program may store a completion queue of its own in an identifier, for sends and receives, and its channel. They end
 * with the queue pair, once.
 */
static void lent(void)
{
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *id = listener(ch, 0);
	int files = open_files();

	id->send_cq_channel = id->recv_cq_channel = ibv_create_comp_channel(id->verbs);
	CHECK(id->recv_cq_channel);
	id->send_cq = id->recv_cq = shared = ibv_create_cq(id->verbs, 10, NULL, id->recv_cq_channel, 0);
	CHECK(shared);
	create_qp(id);
	shared = NULL;
	rdma_destroy_qp(id);
	CHECK(!id->recv_cq && !id->recv_cq_channel && open_files() == files);
	end(id);
	rdma_destroy_event_channel(ch);
}

/* An identifier forgets a lent completion queue that another queue pair uses: the program may destroy it. */
static void relent(void)
{
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *ids[] = { listener(ch, 0), listener(ch, 0) };

	shared = ibv_create_cq(ids[0]->verbs, 10, NULL, ibv_create_comp_channel(ids[0]->verbs), 0);
	CHECK(shared);
	for (size_t i = 0; i < 2; i++) {
		ids[i]->send_cq_channel = ids[i]->recv_cq_channel = shared->channel;
		ids[i]->send_cq = ids[i]->recv_cq = shared;
		create_qp(ids[i]);
	}
	shared = NULL;
	for (size_t i = 0; i < 2; i++) {
		rdma_destroy_qp(ids[i]);
		CHECK(!ids[i]->send_cq && !ids[i]->recv_cq && !ids[i]->send_cq_channel && !ids[i]->recv_cq_channel);
	}
	create_qp(ids[0]);
	rdma_destroy_qp(ids[0]);
	end(ids[0]);
	end(ids[1]);
	rdma_destroy_event_channel(ch);
}

/* The private data of a connect follow those of the endpoint's addresses. Each may be missing. */
static void greeting(void)
{
	static const char *const said[][3] = {
		{ "", "", "" }, { "ab", "", "ab" }, { "", "cd", "cd" }, { "ab", "cd", "abcd" },
	};
	struct rdma_event_channel *server = channel();
	struct rdma_cm_id *l = listener(server, 0), *id;
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *res;
	struct rdma_cm_event *e;
	char port[8];

	snprintf(port, sizeof(port), "%u", ntohs(rdma_get_src_port(l)));
	for (size_t i = 0; i < sizeof(said) / sizeof(said[0]); i++) {
		struct rdma_conn_param param = {
			.private_data = said[i][1], .private_data_len = (uint8_t)strlen(said[i][1]),
		};
		struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
		size_t len = strlen(said[i][2]);

		CHECK(rdma_getaddrinfo(address, port, &hints, &res) == 0);
		res->ai_connect = strdup(said[i][0]);
		res->ai_connect_len = strlen(said[i][0]);
		CHECK(rdma_create_ep(&id, res, NULL, &attr) == 0);
		rdma_freeaddrinfo(res);
		CHECK(rdma_migrate_id(id, server) == 0 && rdma_connect(id, &param) == 0);
		CHECK(rdma_get_cm_event(server, &e) == 0 && e->event == RDMA_CM_EVENT_CONNECT_REQUEST);
		CHECK(e->param.conn.private_data_len == len && (len == 0) == (e->param.conn.private_data == NULL));
		CHECK(len == 0 || memcmp(e->param.conn.private_data, said[i][2], len) == 0);
		CHECK(rdma_reject(e->id, NULL, 0) == 0);
		CHECK(rdma_destroy_id(e->id) == 0 && rdma_ack_cm_event(e) == 0);
		CHECK(next(server, RDMA_CM_EVENT_REJECTED) == id);
		rdma_destroy_ep(id);
	}
	end(l);
	rdma_destroy_event_channel(server);
}

/* accept_next accepts the next connect request of a channel. */
static struct rdma_cm_id *accept_next(struct rdma_event_channel *ch)
{
	struct rdma_cm_id *child = next(ch, RDMA_CM_EVENT_CONNECT_REQUEST);

	create_qp(child);
	CHECK(rdma_accept(child, NULL) == 0 && next(ch, RDMA_CM_EVENT_ESTABLISHED) == child);
	return child;
}

/*
 * An id connects the queue pair that it stores, or else the one that the call names, which the program may have made and moved
 * itself, and none that has a connection.
 */
static void named(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0);
	struct sockaddr_in a = socket_address(rdma_get_src_port(l));
	struct rdma_cm_id *storing = route_to(client, &a), *naming = route_to(client, &a), *third = route_to(client, &a), *child[2];
	struct queues q = make(naming->verbs, NULL);
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct rdma_conn_param p = { .qp_num = q.qp->qp_num };
	struct ibv_qp *qp;

	create_qp(storing);
	qp = storing->qp;
	create_qp(third); /* the last one that was made */
	CHECK(ibv_modify_qp(q.qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	storing->qp = NULL;
	CHECK(rdma_connect(storing, NULL) == -1 && errno == EINVAL);
	storing->qp = qp;
	CHECK(rdma_connect(storing, &p) == 0);
	child[0] = accept_next(server);
	CHECK(next(client, RDMA_CM_EVENT_ESTABLISHED) == storing && qp_state(qp) == IBV_QPS_RTS);
	CHECK(rdma_connect(naming, &p) == 0);
	child[1] = accept_next(server);
	CHECK(next(client, RDMA_CM_EVENT_ESTABLISHED) == naming && qp_state(q.qp) == IBV_QPS_RTS);

	rdma_destroy_qp(third);
	third->qp = qp;
	CHECK(rdma_connect(third, NULL) == -1 && errno == EINVAL);
	third->qp = NULL;
	CHECK(rdma_disconnect(storing) == 0 && next(client, RDMA_CM_EVENT_DISCONNECTED) == storing);
	CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == child[0]);
	CHECK(rdma_disconnect(naming) == 0 && next(client, RDMA_CM_EVENT_DISCONNECTED) == naming);
	CHECK(next(server, RDMA_CM_EVENT_DISCONNECTED) == child[1]);
	CHECK(qp_state(qp) == IBV_QPS_ERR && qp_state(q.qp) == IBV_QPS_ERR);
	unmake(&q);
	end(storing);
	end(naming);
	end(third);
	end(child[0]);
	end(child[1]);
	end(l);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* A request at the port of a queue pair is refused at once unless it says that it is of a queue pair's, and for that one. */
static void misdirected(void)
{
	enum { PORTS = 65536 - 61000, MAGIC = 0x69577651 };
	struct ibv_context *c = device(0);
	struct queues q = make(c, NULL);
	struct rdma_event_channel *client = channel();
	struct sockaddr_in a = socket_address(htons((uint16_t)(61000 + q.qp->qp_num % PORTS)));
	uint32_t hellos[][3] = {
		{ htonl(MAGIC), 0, htonl(q.qp->qp_num + PORTS) }, { htonl(MAGIC + 1), 0, htonl(q.qp->qp_num) },
		{ htonl(MAGIC), 0, htonl(q.qp->qp_num) },
	};
	struct queues peer = make(c, NULL); /* whose number is higher, so that it is called */
	uint32_t other[] = { htonl(MAGIC), htonl(peer.qp->qp_num + 1), htonl(q.qp->qp_num) };
	struct rdma_conn_param p = { .private_data = other, .private_data_len = sizeof(other) };
	struct rdma_cm_id *kept = route_to(client, &a), *next_id;

	to_init(q.qp);
	create_qp(kept);
	CHECK(rdma_connect(kept, &p) == 0); /* which waits */
	for (int i = 0; i < 3; i++) {
		struct rdma_cm_id *id = route_to(client, &a);
		struct rdma_conn_param p = { .private_data = hellos[i], .private_data_len = i < 2 ? sizeof(hellos[i]) : 8 };

		create_qp(id);
		CHECK(rdma_connect(id, &p) == 0 && next(client, RDMA_CM_EVENT_REJECTED) == id);
		end(id);
	}
	/* The request that waits ends when the queue pair calls its own peer. */
	to_init(peer.qp);
	to_rtr(peer.qp, q.qp->qp_num);
	CHECK(!readable(client->fd));
	to_rtr(q.qp, peer.qp->qp_num);
	CHECK(next(client, RDMA_CM_EVENT_REJECTED) == kept);
	await_up(q.qp);
	end(kept);
	unmake(&peer);
	unmake(&q);
	CHECK(rdma_create_id(client, &next_id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(next_id, (struct sockaddr *)&a) == 0); /* the port is free */
	end(next_id);
	rdma_destroy_event_channel(client);
	CHECK(ibv_close_device(c) == 0);
}

/* A queue pair keeps the early request of its peer, however many strangers connect to its port from another address. */
static void besieged(void)
{
	enum { PORTS = 65536 - 61000, MAGIC = 0x69577651, KEPT = 8, ALL = 20 };
	struct ibv_context *c = device(0);
	struct queues peer = make(c, NULL), q = make(c, NULL); /* whose number is higher, so that it is called */
	struct rdma_event_channel *client = channel();
	struct sockaddr_in6 a = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)(61000 + q.qp->qp_num % PORTS)) };
	uint32_t hello[] = { htonl(MAGIC), htonl(peer.qp->qp_num), htonl(q.qp->qp_num) };
	struct rdma_conn_param p = { .private_data = hello, .private_data_len = sizeof(hello) };
	struct rdma_cm_id *strangers[ALL];
	union ibv_gid gid;
	int i = 0;

	do
		CHECK(ibv_query_gid(c, 1, i++, &gid) == 0);
	while (gid.global.subnet_prefix == 0 || (gid.raw[0] == 0xfe && gid.raw[1] == 0x80));
	memcpy(&a.sin6_addr, gid.raw, sizeof(a.sin6_addr));
	to_init(q.qp);
	to_init(peer.qp);
	to_rtr(peer.qp, q.qp->qp_num);
	for (i = 0; i < ALL; i++) {
		strangers[i] = route_to(client, (struct sockaddr_in *)(void *)&a);
		create_qp(strangers[i]);
		CHECK(rdma_connect(strangers[i], &p) == 0);
		if (i >= KEPT - 1)
			CHECK(next(client, RDMA_CM_EVENT_REJECTED) == strangers[i - KEPT + 1]);
	}
	to_rtr(q.qp, peer.qp->qp_num);
	await_up(q.qp);
	await_up(peer.qp);
	for (i = 0; i < KEPT - 1; i++)
		next(client, RDMA_CM_EVENT_REJECTED);
	for (i = 0; i < ALL; i++)
		end(strangers[i]);
	unmake(&peer);
	unmake(&q);
	rdma_destroy_event_channel(client);
	CHECK(ibv_close_device(c) == 0);
}

/* Calls that fail can be repeated, and none answers a request again. Parameters have limits, and data without an address are none. */
static void answered(void)
{
	static uint8_t data[508]; /* the most there may be */
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *res;
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct rdma_conn_param param = {
		.private_data = data, .private_data_len = 1, .responder_resources = UINT8_MAX, .initiator_depth = UINT8_MAX,
	};
	struct rdma_cm_event *e;
	char port[8];
	int own;

	snprintf(port, sizeof(port), "%u", ntohs(rdma_get_src_port(l)));
	CHECK(rdma_getaddrinfo(address, port, &hints, &res) == 0);
	res->ai_connect = memcpy(malloc(sizeof(data)), data, sizeof(data));
	res->ai_connect_len = sizeof(data);
	CHECK(rdma_create_ep(&id, res, NULL, &attr) == 0 && id->event && rdma_migrate_id(id, NULL) == 0 && !id->event);
	own = id->channel->fd;
	CHECK(rdma_migrate_id(id, client) == 0 && id->channel == client && fcntl(own, F_GETFD) == -1 && errno == EBADF);
	CHECK(rdma_get_cm_event(client, NULL) == -1 && errno == EINVAL && rdma_ack_cm_event(NULL) == -1 && errno == EINVAL);
	rdma_freeaddrinfo(res);
	CHECK(rdma_connect(id, &param) == -1 && errno == EINVAL);
	param.private_data = NULL;
	param.private_data_len = 9;
	CHECK(rdma_connect(id, &param) == 0);
	child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	create_qp(child);
	CHECK(rdma_accept(child, &param) == 0 && next(server, RDMA_CM_EVENT_ESTABLISHED) == child);
	refused(child, "AR");
	CHECK(rdma_get_cm_event(client, &e) == 0 && e->event == RDMA_CM_EVENT_ESTABLISHED && e->param.conn.private_data_len == 0);
	CHECK(rdma_ack_cm_event(e) == 0);
	refused(id, "bla");

	CHECK(rdma_disconnect(id) == 0 && rdma_disconnect(id) == 0);
	CHECK(next(client, RDMA_CM_EVENT_DISCONNECTED) == id && next(server, RDMA_CM_EVENT_DISCONNECTED) == child);
	CHECK(id_of(child)->end == 0); /* in order */
	CHECK(rdma_disconnect(id) == 0 && rdma_disconnect(child) == 0 && !readable(client->fd) && !readable(server->fd));
	rdma_destroy_ep(id);
	rdma_destroy_ep(child);

	id = call(client, l);
	child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(rdma_reject(child, NULL, 9) == 0);
	refused(child, "AR");
	CHECK(rdma_get_cm_event(client, &e) == 0 && e->event == RDMA_CM_EVENT_REJECTED && e->status == -ECONNREFUSED);
	CHECK(e->param.conn.private_data_len == 0 && rdma_ack_cm_event(e) == 0);
	part(id, child, l);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* withdrawn_request returns a connect request whose peer has withdrawn it. */
static struct rdma_cm_id *withdrawn_request(struct rdma_event_channel *server, struct rdma_event_channel *client, struct rdma_cm_id *l)
{
	struct rdma_cm_id *id = call(client, l), *child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);

	end(id);
	while (!*(volatile bool *)&id_of(child)->request_gone)
		usleep(1000);
	return child;
}

/* Nothing is sent to the peer of a withdrawn request. To accept it fails, and leaves the queue pair as it was. */
static void withdrawn(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *rejected, *accepted, *id, *child;

	rejected = withdrawn_request(server, client, l);
	CHECK(rdma_reject(rejected, NULL, 0) == 0);
	accepted = withdrawn_request(server, client, l);
	create_qp(accepted);
	CHECK(rdma_accept(accepted, NULL) == -1 && errno == ECONNRESET);
	refused(accepted, "AR");
	id = call(client, l);
	child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	child->qp = accepted->qp;
	accepted->qp = NULL;
	CHECK(rdma_accept(child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child && next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	end(rejected);
	rejected = withdrawn_request(server, client, l);
	CHECK(kill(daemon_pid(), SIGSTOP) == 0);
	end(rejected); /* of which the daemon knows */
	CHECK(kill(daemon_pid(), SIGCONT) == 0);
	end(id);
	end(child);
	end(accepted);
	end(l);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* fails takes the next event of a channel, and checks its kind and its status. */
static void fails(struct rdma_event_channel *ch, enum rdma_cm_event_type type, int status)
{
	struct rdma_cm_event *e;

	CHECK(rdma_get_cm_event(ch, &e) == 0);
	if (e->event != type || e->status != status)
		printf("%s, status %d\n", rdma_event_str(e->event), e->status);
	CHECK(e->event == type && e->status == status && rdma_ack_cm_event(e) == 0);
}

/* What a program sees of a connect request, and of attempts that lead to none. */
static void reported(void)
{
	static int context;
	struct rdma_event_channel *server = channel(), *client = channel();
	struct sockaddr_in a = socket_address(0), nowhere_at = socket_address(htons(1)), *local, *peer;
	struct rdma_cm_id *l, *id, *child;

	/* A port that is only bound takes no connection. */
	CHECK(rdma_create_id(server, &l, &context, RDMA_PS_TCP) == 0 && rdma_bind_addr(l, (struct sockaddr *)&a) == 0);
	a.sin_port = rdma_get_src_port(l);
	id = call(client, l);
	fails(client, RDMA_CM_EVENT_REJECTED, -ECONNREFUSED);
	CHECK(!readable(server->fd));
	end(id);

	CHECK(rdma_listen(l, 0) == 0);
	id = call(client, l);
	child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	local = (struct sockaddr_in *)rdma_get_local_addr(child);
	peer = (struct sockaddr_in *)rdma_get_peer_addr(child);
	CHECK(child->context == &context && child->channel == server && child->ps == RDMA_PS_TCP && child->port_num == 1);
	CHECK(local->sin_addr.s_addr == a.sin_addr.s_addr && local->sin_port == a.sin_port);
	CHECK(peer->sin_addr.s_addr == a.sin_addr.s_addr && peer->sin_port && peer->sin_port != a.sin_port);
	end(child);
	fails(client, RDMA_CM_EVENT_REJECTED, -ECONNREFUSED);
	end(id);

	/* The end of a connection is none of an attempt, whatever it is. */
	establish(server, client, l, &id, &child);
	to_error(child->qp);
	fails(client, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(id_of(id)->end == -ECONNRESET);
	part(child, id, l);

	/* Nobody listens at the port, or nothing has the address, or no route leads to it. */
	id = route_to(client, &a);
	create_qp(id);
	CHECK(rdma_connect(id, NULL) == 0);
	fails(client, RDMA_CM_EVENT_REJECTED, -ECONNREFUSED);
	end(id);
	nowhere_at.sin_addr.s_addr ^= htonl(0x55);
	id = route_to(client, &nowhere_at);
	create_qp(id);
	CHECK(rdma_connect(id, NULL) == 0);
	fails(client, RDMA_CM_EVENT_UNREACHABLE, -EHOSTUNREACH);
	end(id);
	CHECK(inet_pton(AF_INET, "203.0.113.1", &nowhere_at.sin_addr) == 1);
	CHECK(rdma_create_id(client, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&nowhere_at, 2000) == 0);
	fails(client, RDMA_CM_EVENT_ADDR_ERROR, -ENODEV);
	CHECK(rdma_resolve_route(id, 2000) == -1 && errno == EINVAL);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000) == 0 && next(client, RDMA_CM_EVENT_ADDR_RESOLVED) == id);
	end(id);
	CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&nowhere_at, 2000) == -1 && errno == ENODEV);
	end(id);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* A channel may be destroyed before its ids, which then get no events, as with the kernel's rdma_cm. */
static void orphaned(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id = call(client, l), *child = accept_next(server), *waits, *v4, *v6;
	struct sockaddr_in6 any6 = { .sin6_family = AF_INET6 };
	struct sockaddr_in any4 = { .sin_family = AF_INET };
	int status, on = 1;
	pid_t pid;

	CHECK(next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	CHECK(rdma_create_id(client, &v4, NULL, RDMA_PS_TCP) == 0 && rdma_create_id(client, &v6, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(v4, (struct sockaddr *)&any4) == 0);
	any6.sin6_port = rdma_get_src_port(v4);
	CHECK(rdma_set_option(v6, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &on, sizeof(on)) == 0);
	CHECK(rdma_bind_addr(v6, (struct sockaddr *)&any6) == 0); /* they share a listener of the daemon */
	any4.sin_port = any6.sin6_port;
	CHECK(rdma_create_id(client, &waits, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(waits, (struct sockaddr *)&any4) == -1 && errno == EADDRINUSE);
	CHECK(rdma_bind_addr(waits, (struct sockaddr *)&any6) == -1 && errno == EADDRINUSE);
	end(waits);
	waits = call(client, l);
	while (!readable(server->fd))
		usleep(1000);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		rdma_destroy_event_channel(server);
		rdma_destroy_event_channel(client);
		CHECK(rdma_listen(v4, 1) == -1 && errno == EADDRINUSE); /* the parent has it */
		end(child);
		end(l);
		end(waits);
		end(id);
		CHECK(rdma_destroy_id(v4) == 0 && rdma_destroy_id(v6) == 0);
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	rdma_destroy_event_channel(server);
	CHECK(next(client, RDMA_CM_EVENT_REJECTED) == waits);
	end(waits);
	waits = call(client, l);
	CHECK(next(client, RDMA_CM_EVENT_REJECTED) == waits);
	CHECK(rdma_disconnect(child) == 0 && next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	end(waits);
	end(id);
	server = channel();
	CHECK(rdma_migrate_id(l, server) == 0);
	id = call(client, l);
	end(next(server, RDMA_CM_EVENT_CONNECT_REQUEST));
	CHECK(next(client, RDMA_CM_EVENT_REJECTED) == id);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
	part(id, child, l);
	end(v4);
	end(v6);
}

static int set(struct rdma_cm_id *id, int name, void *value, size_t len)
{
	return rdma_set_option(id, RDMA_OPTION_ID, name, value, len) < 0 ? errno : 0;
}

/* Options have one length each. Those of an address cannot be set any more once they have had their effect. */
static void optional(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l, *id, *child;
	struct sockaddr_in a = socket_address(0);
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	int on = 1, off = 0;
	uint8_t byte = 17;

	CHECK(rdma_create_id(server, &l, NULL, RDMA_PS_TCP) == 0);
	CHECK(set(l, RDMA_OPTION_ID_TOS, &byte, sizeof(on)) == EINVAL && set(l, RDMA_OPTION_ID_ACK_TIMEOUT, &byte, 0) == EINVAL);
	CHECK(set(l, RDMA_OPTION_ID_AFONLY, &on, 1) == EINVAL && set(l, RDMA_OPTION_ID_REUSEADDR, &on, 1) == EINVAL);
	CHECK(set(l, 99, &on, sizeof(on)) == ENOSYS);
	CHECK(rdma_set_option(l, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &on, sizeof(on)) == -1 && errno == ENOSYS);
	CHECK(set(l, RDMA_OPTION_ID_REUSEADDR, &on, sizeof(on)) == 0 && set(l, RDMA_OPTION_ID_REUSEADDR, &off, sizeof(on)) == 0);
	CHECK(rdma_bind_addr(l, (struct sockaddr *)&a) == 0);
	CHECK(set(l, RDMA_OPTION_ID_AFONLY, &on, sizeof(on)) == 0 && set(l, RDMA_OPTION_ID_REUSEADDR, &on, sizeof(on)) == 0);
	CHECK(set(l, RDMA_OPTION_ID_REUSEADDR, &off, sizeof(on)) == EINVAL);
	CHECK(rdma_listen(l, 0) == 0);
	CHECK(set(l, RDMA_OPTION_ID_AFONLY, &off, sizeof(on)) == EINVAL && set(l, RDMA_OPTION_ID_REUSEADDR, &on, sizeof(on)) == EINVAL);

	a.sin_port = rdma_get_src_port(l);
	id = route_to(client, &a);
	create_qp(id);
	CHECK(set(id, RDMA_OPTION_ID_ACK_TIMEOUT, &byte, sizeof(byte)) == 0 && rdma_connect(id, NULL) == 0);
	child = accept_next(server);
	CHECK(next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	CHECK(ibv_query_qp(id->qp, &attr, IBV_QP_TIMEOUT, &init) == 0 && attr.timeout == byte);
	part(id, child, l);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* use resolves the address of a new id of a channel, whose first event is that. */
static struct rdma_cm_id *use(struct rdma_event_channel *ch)
{
	struct sockaddr_in a = socket_address(htons(1));
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000) == 0 && readable(ch->fd));
	return id;
}

/* Parent and child use a channel that the parent has made, with or without an id, and see none of each other's events. */
static void divided(void)
{
	struct rdma_event_channel *with = channel(), *without = channel(), *closed = channel(), *destroyed = channel(), *replaced = channel();
	struct rdma_cm_id *id = use(with), *own;
	uint64_t count;
	int status, was[] = { closed->fd, destroyed->fd }, pipes[2];
	pid_t pid;

	close(closed->fd); /* as a daemon does that closes all descriptors that it does not know */
	rdma_destroy_event_channel(destroyed);
	CHECK(pipe(pipes) == 0 && pipes[0] == was[0] && pipes[1] == was[1]);
	CHECK(close(replaced->fd) == 0 && eventfd(7, EFD_NONBLOCK) == replaced->fd);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		alarm(30);
		CHECK(!readable(with->fd) && fcntl(was[0], F_GETPIPE_SZ) > 0 && fcntl(was[1], F_GETPIPE_SZ) > 0);
		CHECK(read(replaced->fd, &count, sizeof(count)) == sizeof(count) && count == 7);
		own = use(without);
		CHECK(next(without, RDMA_CM_EVENT_ADDR_RESOLVED) == own && !readable(without->fd));
		use(without);
		own = use(with);
		CHECK(next(with, RDMA_CM_EVENT_ADDR_RESOLVED) == own && !readable(with->fd));
		end(id);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	CHECK(!readable(without->fd));
	own = use(without);
	CHECK(next(without, RDMA_CM_EVENT_ADDR_RESOLVED) == own && next(with, RDMA_CM_EVENT_ADDR_RESOLVED) == id);
	end(own);
	end(id);
	rdma_destroy_event_channel(with);
	rdma_destroy_event_channel(without);
}

/* The child of a fork destroys what its parent has taken an event of, whether it acknowledges that or not. So does the parent. */
static void unreturned(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child, *used = use(channel());
	struct rdma_cm_id *sync = listener(NULL, 0), *caller = call(client, sync), *request;
	struct ibv_context *c = device(0);
	struct queues q = make(c, NULL);
	struct ibv_srq_init_attr shared_attr = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(q.pd, &shared_attr);
	struct ibv_qp_init_attr init = {
		.send_cq = q.cq, .recv_cq = q.cq, .srq = srq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 },
	};
	struct ibv_qp *ended = srq ? ibv_create_qp(q.pd, &init) : NULL;
	struct ibv_async_event async;
	struct rdma_cm_event *e;
	struct ibv_cq *cq;
	void *context;
	int status;

	CHECK(ended);
	CHECK(rdma_get_request(sync, &request) == 0); /* which has the event of its listener */
	establish(server, client, l, &id, &child);
	CHECK(rdma_get_cm_event(used->channel, &e) == 0 && e->id == used);
	to_error(ended);
	CHECK(ibv_get_async_event(c, &async) == 0 && async.element.qp == ended);
	CHECK(ibv_req_notify_cq(child->recv_cq, 0) == 0);
	recv_empty(child->qp, 1);
	send_empty(id->qp);
	CHECK(ibv_get_cq_event(child->recv_cq_channel, &cq, &context) == 0 && cq == child->recv_cq);
	for (int i = 0; i < 3; i++) {
		pid_t pid = i < 2 ? fork() : 0;

		CHECK(pid >= 0);
		if (pid > 0) {
			CHECK(waitpid(pid, &status, 0) == pid && status == 0);
			continue;
		}
		alarm(30);
		if (i > 0) {
			CHECK(rdma_ack_cm_event(e) == 0);
			ibv_ack_async_event(&async);
			ibv_ack_cq_events(cq, 1);
		}
		CHECK(rdma_destroy_id(used) == 0 && ibv_destroy_qp(ended) == 0 && ibv_destroy_srq(srq) == 0);
		CHECK(rdma_destroy_id(i < 2 ? sync : request) == 0 && rdma_destroy_id(i < 2 ? request : sync) == 0);
		end(caller);
		end(child);
		end(id);
		end(l);
		unmake(&q);
		CHECK(ibv_close_device(c) == 0);
		if (i < 2)
			exit(0);
	}
}

/* A connect request of a synchronous listener is synchronous, also if the program takes its event itself. */
static void inherited(void)
{
	struct rdma_event_channel *client = channel();
	struct rdma_cm_id *l = listener(NULL, 0), *id = call(client, l), *child;
	struct rdma_cm_event *e;

	CHECK(rdma_get_cm_event(l->channel, &e) == 0 && e->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	child = e->id;
	CHECK(rdma_ack_cm_event(e) == 0);
	create_qp(child);
	CHECK(rdma_accept(child, NULL) == 0);
	CHECK(child->channel != l->channel && child->event && child->event->event == RDMA_CM_EVENT_ESTABLISHED);
	end(l);
	CHECK(next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	CHECK(rdma_disconnect(child) == 0 && next(client, RDMA_CM_EVENT_DISCONNECTED) == id);
	end(child);
	end(id);
	rdma_destroy_event_channel(client);
}

/*
 * ibv_query_qp returns the attributes that the program has set, and not those of a change that failed. Any change may have any of
 * InfiniBand's, as on iWARP devices of Linux.
 */
static void remembered(void)
{
	enum {
		RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
		RTS = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
		      IBV_QP_MAX_QP_RD_ATOMIC,
	};
	struct ibv_context *c = device(0);
	struct queues q = make(c, NULL);
	struct ibv_qp_attr set = { .qp_state = IBV_QPS_INIT, .qp_access_flags = IBV_ACCESS_REMOTE_READ, .port_num = 1 };
	struct ibv_qp_attr got;
	struct ibv_qp_init_attr init;

	CHECK(ibv_modify_qp(q.qp, &set, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	set = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_512, .rq_psn = 11, .max_dest_rd_atomic = 3, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .sl = 5 },
	};
	CHECK(ibv_query_gid(c, 1, 0, &set.ah_attr.grh.dgid) == 0);
	CHECK(ibv_modify_qp(q.qp, &set, RTR & ~IBV_QP_DEST_QPN) == EINVAL && qp_state(q.qp) == IBV_QPS_INIT);
	set.port_num = 1;
	CHECK(ibv_modify_qp(q.qp, &set, RTR | IBV_QP_PORT) == 0); /* as the kernel's rdma_init_qp_attr has it for iWARP */
	set.qp_state = IBV_QPS_RTS;
	set.timeout = 14;
	set.retry_cnt = 7;
	set.rnr_retry = 6;
	set.sq_psn = 22;
	set.max_rd_atomic = 2;
	CHECK(ibv_modify_qp(q.qp, &set, RTS) == 0);
	for (int i = 0; i < 2; i++) {
		CHECK(ibv_query_qp(q.qp, &got, RTR | RTS, &init) == 0);
		CHECK(got.qp_state == IBV_QPS_RTS && got.cur_qp_state == IBV_QPS_RTS);
		CHECK(got.qp_access_flags == IBV_ACCESS_REMOTE_READ && got.port_num == 1 && got.path_mtu == IBV_MTU_512);
		CHECK(got.rq_psn == 11 && got.max_dest_rd_atomic == 3 && got.min_rnr_timer == 12);
		CHECK(got.ah_attr.sl == 5 && memcmp(&got.ah_attr.grh, &set.ah_attr.grh, sizeof(got.ah_attr.grh)) == 0);
		CHECK(got.timeout == 14 && got.retry_cnt == 7 && got.rnr_retry == 6);
		CHECK(got.sq_psn == 22 && got.max_rd_atomic == 2);
		CHECK(got.cap.max_send_wr >= 4 && init.cap.max_send_wr == got.cap.max_send_wr);
		set.qp_state = IBV_QPS_INIT;
		set.sq_psn = 23;
		CHECK(ibv_modify_qp(q.qp, &set, RTS) == EINVAL);
		CHECK(ibv_modify_qp(q.qp, &set, IBV_QP_SQ_PSN | IBV_QP_CAP) == EOPNOTSUPP);
		CHECK(ibv_modify_qp(q.qp, &set, 1 << 21) == EOPNOTSUPP && ibv_modify_qp(q.qp, &set, 1 << 30) == EOPNOTSUPP);
	}
	CHECK(ibv_modify_qp(q.qp, &set, 0) == 0);
	for (set.port_num = 0; set.port_num <= 2; set.port_num += 2) /* the device has one port */
		CHECK(ibv_modify_qp(q.qp, &set, IBV_QP_PORT) == EINVAL);
	CHECK(ibv_query_qp(q.qp, &got, IBV_QP_PORT, &init) == 0 && got.port_num == 1);
	set.qp_state = IBV_QPS_ERR;
	CHECK(ibv_modify_qp(q.qp, &set, IBV_QP_STATE | IBV_QP_CUR_STATE) == 0);
	unmake(&q);
	CHECK(ibv_close_device(c) == 0);
}

/* ibv_query_qp returns how many Reads a connection may have, as the two programs have agreed. */
static void agreed(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct sockaddr_in a = socket_address(rdma_get_src_port(l));
	struct rdma_conn_param param = { .responder_resources = 3, .initiator_depth = 2 };
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	CHECK(rdma_create_id(client, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000) == 0);
	CHECK(next(client, RDMA_CM_EVENT_ADDR_RESOLVED) == id);
	CHECK(rdma_resolve_route(id, 2000) == 0 && next(client, RDMA_CM_EVENT_ROUTE_RESOLVED) == id);
	create_qp(id);
	CHECK(rdma_connect(id, &param) == 0);
	child = next(server, RDMA_CM_EVENT_CONNECT_REQUEST);
	create_qp(child);
	CHECK(rdma_accept(child, NULL) == 0);
	CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child && next(client, RDMA_CM_EVENT_ESTABLISHED) == id);
	CHECK(ibv_query_qp(id->qp, &attr, IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC, &init) == 0);
	CHECK(attr.max_rd_atomic == 2 && attr.max_dest_rd_atomic == 3);
	CHECK(ibv_query_qp(child->qp, &attr, IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC, &init) == 0);
	CHECK(attr.max_rd_atomic == 3 && attr.max_dest_rd_atomic == 2);
	part(id, child, l);
}

/* A program that posts until its send queue is full, and then polls, loses no completion, and keeps its connection. */
static void crowded(void)
{
	enum { MOST = 1000 };
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_send_wr two[2] = { { .next = &two[1], .opcode = IBV_WR_RDMA_WRITE }, wr };
	struct ibv_wc wc;

	establish(server, client, l, &id, &child);
	for (int round = 0; round < 20; round++) {
		int posted = 0, err = 0;

		while (posted < MOST && (err = ibv_post_send(id->qp, &wr, &bad)) == 0)
			posted++;
		CHECK(err == ENOMEM && bad == &wr && posted >= 4);
		/* The first of a list, which reports nothing, is posted. */
		CHECK(ibv_post_send(id->qp, two, &bad) == ENOMEM && (bad == &two[1] || bad == &two[0]));
		while (posted > 0) {
			int n = ibv_poll_cq(id->send_cq, 1, &wc);

			CHECK(n == 0 || wc.status == IBV_WC_SUCCESS);
			CHECK(!readable(id->verbs->async_fd)); /* the queue has not overflowed */
			posted -= n;
		}
	}
	part(id, child, l);
}

static void *get_event(void *ch)
{
	struct ibv_cq *cq;
	void *context;

	atomic_store(&busy, (int)syscall(SYS_gettid));
	return ibv_get_cq_event(ch, &cq, &context) < 0 ? NULL : cq;
}

/* A thread may wait for an event of a completion channel that another one destroys. */
static void abandoned(void)
{
	struct ibv_context *c = device(0);
	struct ibv_comp_channel *ch = ibv_create_comp_channel(c);
	pthread_t t;
	void *got;

	CHECK(ch && pthread_create(&t, NULL, get_event, ch) == 0);
	await_call(tid_of(&busy), SYS_poll);
	CHECK(ibv_destroy_comp_channel(ch) == 0 && ibv_close_device(c) == 0);
	CHECK(pthread_join(t, &got) == 0 && !got);
}

static void *look_for_events(void *ch)
{
	struct ibv_cq *cq;
	void *context;

	while (!atomic_load(&stop))
		CHECK(ibv_get_cq_event(ch, &cq, &context) < 0 && errno == EAGAIN);
	return NULL;
}

/* A child may destroy a completion channel at which a thread of its parent looks. */
static void bequeathed(void)
{
	struct ibv_context *c = device(0);
	struct ibv_comp_channel *ch = ibv_create_comp_channel(c);
	pthread_t t;

	CHECK(ch && fcntl(ch->fd, F_SETFL, O_NONBLOCK) == 0);
	CHECK(pthread_create(&t, NULL, look_for_events, ch) == 0);
	for (int i = 0; i < 100; i++) {
		int status;
		pid_t child = fork();

		CHECK(child >= 0);
		if (child == 0) {
			alarm(30);
			CHECK(ibv_destroy_comp_channel(ch) == 0);
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child && status == 0);
	}
	atomic_store(&stop, true);
	CHECK(pthread_join(t, NULL) == 0 && ibv_destroy_comp_channel(ch) == 0 && ibv_close_device(c) == 0);
}

/* told checks what the next event of a channel says, and returns its id. */
static struct rdma_cm_id *told(struct rdma_event_channel *ch, enum rdma_cm_event_type want, struct rdma_conn_param p)
{
	const struct rdma_conn_param *got;
	struct rdma_cm_event *e;
	struct rdma_cm_id *id;

	CHECK(rdma_get_cm_event(ch, &e) == 0 && e->event == want);
	got = &e->param.conn;
	CHECK(e->status == (want == RDMA_CM_EVENT_REJECTED ? -ECONNREFUSED : 0));
	CHECK((e->listen_id != NULL) == (want == RDMA_CM_EVENT_CONNECT_REQUEST));
	CHECK(got->private_data_len == p.private_data_len && memcmp(got->private_data, p.private_data, p.private_data_len) == 0);
	CHECK(want == RDMA_CM_EVENT_REJECTED || (got->responder_resources == p.responder_resources && got->initiator_depth == p.initiator_depth));
	id = e->id;
	CHECK(rdma_ack_cm_event(e) == 0);
	return id;
}

/* Each side learns what the other has said: its private data, the Reads that it may have, and those that it takes. */
static void said(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct sockaddr_in a = socket_address(rdma_get_src_port(l));
	struct rdma_conn_param hello = { .private_data = "hello", .private_data_len = 5, .responder_resources = 3, .initiator_depth = 2 };
	struct rdma_conn_param asked = { .private_data = "hello", .private_data_len = 5, .responder_resources = 2, .initiator_depth = 3 };
	struct rdma_conn_param yes = { .private_data = "yes", .private_data_len = 3, .responder_resources = 2, .initiator_depth = 1 };
	struct rdma_conn_param granted = { .private_data = "yes", .private_data_len = 3, .responder_resources = 1, .initiator_depth = 2 };
	struct rdma_conn_param no = { .private_data = "no", .private_data_len = 2 };

	for (int accept = 0; accept < 2; accept++) {
		id = route_to(client, &a);
		create_qp(id);
		CHECK(rdma_connect(id, &hello) == 0);
		child = told(server, RDMA_CM_EVENT_CONNECT_REQUEST, asked);
		if (accept) {
			create_qp(child);
			CHECK(rdma_accept(child, &yes) == 0);
			CHECK(next(server, RDMA_CM_EVENT_ESTABLISHED) == child && told(client, RDMA_CM_EVENT_ESTABLISHED, granted) == id);
		} else {
			CHECK(rdma_reject(child, no.private_data, no.private_data_len) == 0);
			CHECK(told(client, RDMA_CM_EVENT_REJECTED, no) == id);
		}
		end(child);
		end(id);
	}
	end(l);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

/* awake takes the event of a completion queue. */
static void awake(struct ibv_cq *cq)
{
	struct ibv_cq *got;
	void *context;

	CHECK(ibv_get_cq_event(cq->channel, &got, &context) == 0 && got == cq && context == cq->cq_context);
	ibv_ack_cq_events(cq, 1);
}

/* A queue that is armed for solicited completions has one event, for a message that asks for it or for an error. */
static void solicited(void)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_send_wr plain = { .opcode = IBV_WR_SEND }, asks = { .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SOLICITED }, *bad;
	struct ibv_cq *cq;

	establish(server, client, l, &id, &child);
	cq = child->recv_cq;
	for (uint64_t i = 0; i < 4; i++)
		recv_empty(child->qp, i);
	CHECK(ibv_req_notify_cq(cq, 1) == 0);
	CHECK(ibv_post_send(id->qp, &plain, &bad) == 0);
	await_success(cq, 0);
	CHECK(!readable(cq->channel->fd));
	CHECK(ibv_post_send(id->qp, &asks, &bad) == 0);
	awake(cq);
	await_success(cq, 1);
	CHECK(ibv_post_send(id->qp, &asks, &bad) == 0); /* nobody has asked for a second event */
	await_success(cq, 2);
	CHECK(!readable(cq->channel->fd));
	CHECK(ibv_req_notify_cq(cq, 1) == 0);
	to_error(child->qp);
	awake(cq);
	expect_flush(cq, 3);
	part(id, child, l);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

static unsigned int send_error; /* see sandboxed */

/* sandboxed destroys a queue pair in a thread that can send no more messages, because of send_error. */
static void *sandboxed(void *qp)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sendmsg, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | send_error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog filter = { sizeof(code) / sizeof(code[0]), code };

	CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
	CHECK(ibv_destroy_qp(qp) == 0);
	return NULL;
}

/* A queue pair is destroyed even if the daemon cannot be asked to: no event of its connection finds it. */
static void destroy_unasked(unsigned int err)
{
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	struct ibv_async_event event;
	struct ibv_qp *qp;
	pthread_t t;

	establish(server, client, l, &id, &child);
	qp = id->qp;
	id->qp = NULL;
	send_error = err;
	CHECK(pthread_create(&t, NULL, sandboxed, qp) == 0 && pthread_join(t, NULL) == 0);
	rdma_disconnect(child);
	CHECK(ibv_get_async_event(l->verbs, &event) == 0 && event.event_type == IBV_EVENT_DEVICE_FATAL);
	ibv_ack_async_event(&event);
	part(id, child, l);
}

static void forbidden(void)
{
	destroy_unasked(EPERM);
}

/* As in a memory cgroup at its limit that has no process to kill, unless the program frees some itself. */
static void starved(void)
{
	destroy_unasked(ENOBUFS);
}

/* Sentences of the manual pages on which no program of the table depends. */
static void manual(void)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct rdma_event_channel *ch = channel();
	struct rdma_cm_id *id = listener(ch, 0), *request;
	struct ibv_recv_wr recv = { 0 }, *bad;
	struct rdma_cm_event *cm_event;
	struct ibv_async_event event;
	struct ibv_context **list;
	struct ibv_port_attr port;
	struct ibv_gid_entry e[256];
	int n, own = 0;

	list = rdma_get_devices(&n);
	CHECK(list && n > 0 && !list[n]);
	for (int i = 0; i < n; i++)
		own += list[i] == id->verbs;
	CHECK(own == 1);
	rdma_free_devices(list);

	CHECK(ibv_query_port(id->verbs, 1, &port) == 0);
	CHECK(ibv_query_gid_table(id->verbs, e, 256, 0) == port.gid_tbl_len);
	CHECK(ibv_query_gid_table(id->verbs, e, (size_t)port.gid_tbl_len - 1, 0) == -EINVAL);

	CHECK(rdma_get_request(id, &request) == -1 && errno == EINVAL); /* it is not synchronous */

	CHECK(rdma_create_srq(id, NULL, &init) == 0);
	create_qp(id);
	CHECK(id->qp->srq == id->srq && ibv_post_recv(id->qp, &recv, &bad) == EINVAL && bad == &recv);
	CHECK(rdma_create_qp(id, NULL, &attr) == -1 && errno == EINVAL); /* it has one */
	CHECK(ibv_destroy_comp_channel(id->recv_cq_channel) == EBUSY);
	rdma_destroy_qp(id);
	rdma_destroy_srq(id);

	CHECK(fcntl(id->verbs->async_fd, F_SETFL, O_NONBLOCK) == 0 && fcntl(ch->fd, F_SETFL, O_NONBLOCK) == 0);
	CHECK(ibv_get_async_event(id->verbs, &event) == -1 && errno == EAGAIN);
	CHECK(rdma_get_cm_event(ch, &cm_event) == -1 && errno == EAGAIN);
	end(id);
	rdma_destroy_event_channel(ch);
}

/* The addresses of a region begin where the program says, of both sides: at 0, or at any other. */
static void based(void)
{
	static const uint64_t bases[] = { 0, 4096, UINT64_MAX - 4096 };
	static char from[8] = "abcdefg", to[8];
	struct rdma_event_channel *server = channel(), *client = channel();
	struct rdma_cm_id *l = listener(server, 0), *id, *child;
	const int local = IBV_ACCESS_LOCAL_WRITE, remote = IBV_ACCESS_REMOTE_READ;
	struct ibv_send_wr read = { .opcode = IBV_WR_RDMA_READ, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED }, *bad;

	establish(server, client, l, &id, &child);
	for (size_t i = 0; i < 4; i++) {
		bool zero = i == 3;
		uint64_t base = zero ? 0 : bases[i];
		struct ibv_mr *source = zero ? ibv_reg_mr(child->pd, from, sizeof(from), remote | IBV_ACCESS_ZERO_BASED) :
					       ibv_reg_mr_iova(child->pd, from, sizeof(from), base, remote);
		struct ibv_mr *sink = zero ? ibv_reg_mr(id->pd, to, sizeof(to), local | IBV_ACCESS_ZERO_BASED) :
					     ibv_reg_mr_iova(id->pd, to, sizeof(to), base, local);
		struct ibv_sge sge = { .addr = base + 1, .length = 3 };

		CHECK(source && sink && source->addr == from && sink->addr == to);
		memset(to, '-', sizeof(to));
		sge.lkey = sink->lkey;
		read.wr_id = i;
		read.sg_list = &sge;
		read.wr.rdma.remote_addr = base + 2;
		read.wr.rdma.rkey = source->rkey;
		CHECK(ibv_post_send(id->qp, &read, &bad) == 0);
		await_success(id->send_cq, i);
		CHECK(memcmp(to, "-cde----", sizeof(to)) == 0);
		CHECK(ibv_dereg_mr(source) == 0 && ibv_dereg_mr(sink) == 0);
	}
	part(id, child, l);
	rdma_destroy_event_channel(server);
	rdma_destroy_event_channel(client);
}

static void *destroy_id(void *id)
{
	CHECK(rdma_destroy_id(id) == 0);
	return NULL;
}

/* An identifier lasts until the program has acknowledged its events. */
static void owed(void)
{
	struct rdma_event_channel *ch = channel();
	struct sockaddr_in a = socket_address(htons(1));
	struct rdma_cm_event *e;
	struct rdma_cm_id *id;
	pthread_t t;

	CHECK(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000) == 0 && rdma_get_cm_event(ch, &e) == 0);
	CHECK(pthread_create(&t, NULL, destroy_id, id) == 0);
	still_running(t);
	CHECK(e->id == id && rdma_ack_cm_event(e) == 0 && pthread_join(t, NULL) == 0);
	rdma_destroy_event_channel(ch);
}

/*
 * The child of a child uses a device that none of its parents has used, and its events are its own. It destroys what it has of
 * theirs, as they do.
 */
static void descended(void)
{
	struct ibv_context *c = device(0), *other = device(0);
	struct queues theirs = make(other, NULL);
	pid_t first = getpid(), pid;
	int status;

	pid = fork_idle();
	if (pid == 0)
		pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		struct queues q = make(c, NULL);
		struct ibv_srq_init_attr attr = { .attr = { .max_wr = 4, .max_sge = 1 } };
		struct ibv_srq *srq = ibv_create_srq(q.pd, &attr);
		struct ibv_qp_init_attr init = {
			.send_cq = q.cq, .recv_cq = q.cq, .srq = srq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 },
		};
		struct ibv_qp *qp = srq ? ibv_create_qp(q.pd, &init) : NULL;

		CHECK(qp);
		to_error(qp);
		while (!readable(c->async_fd))
			usleep(1000);
	} else {
		CHECK(waitpid(pid, &status, 0) == pid && status == 0 && !readable(c->async_fd));
	}
	unmake(&theirs);
	CHECK(ibv_close_device(other) == 0);
	if (getpid() != first)
		_exit(0);
	CHECK(ibv_close_device(c) == 0);
}

int main(int argc, char **argv)
{
#define MODE(name) { #name, name }
	static const struct { const char *name; void (*run)(void); } modes[] = {
		MODE(requests), MODE(migrate), MODE(twice), MODE(states), MODE(dropped), MODE(nowhere), MODE(datagrams),
		MODE(halves), MODE(whole), MODE(exact), MODE(rtr), MODE(devices), MODE(cqs), MODE(extended),
		MODE(resized), MODE(written), MODE(forsaken), MODE(failed), MODE(unconnected), MODE(rereg),
		MODE(synchronous), MODE(acknowledged), MODE(unnamed), MODE(fatal), MODE(outlived), MODE(silent),
		MODE(opened), MODE(sought), MODE(exited), MODE(removed), MODE(restarted), MODE(starting), MODE(bound),
		MODE(followed), MODE(foreign), MODE(transitions), MODE(source), MODE(unbound), MODE(taken),
		MODE(backlog), MODE(single), MODE(unacceptable), MODE(elsewhere), MODE(moved), MODE(canceled),
		MODE(later), MODE(queues_made), MODE(forked), MODE(gathered), MODE(limits), MODE(ordered),
		MODE(numbered), MODE(last), MODE(overtaken), MODE(destroyed), MODE(reused), MODE(yielded), MODE(left),
		MODE(reset), MODE(held), MODE(invalidated), MODE(all), MODE(stated), MODE(armed), MODE(gids),
		MODE(unsupported), MODE(probed), MODE(domains), MODE(excessive), MODE(roomy), MODE(greeting),
		MODE(inherited), MODE(remembered), MODE(agreed), MODE(crowded), MODE(permitted), MODE(abandoned),
		MODE(trespassed), MODE(bequeathed), MODE(blocked), MODE(immediate), MODE(parted), MODE(occupied), MODE(forbidden),
		MODE(starved), MODE(lent), MODE(relent), MODE(ported), MODE(said), MODE(solicited), MODE(manual), MODE(owed), MODE(based),
		MODE(addressed), MODE(retried), MODE(divided), MODE(named), MODE(optional), MODE(misdirected),
		MODE(answered), MODE(besieged), MODE(unreturned), MODE(withdrawn), MODE(reported), MODE(orphaned),
		MODE(descended),
	};

	CHECK(argc == 3);
	address = argv[2];
	alarm(120);
	for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++)
		if (strcmp(argv[1], modes[i].name) == 0) {
			modes[i].run();
			return 0;
		}
	printf("no mode %s\n", argv[1]);
	return 1;
}
