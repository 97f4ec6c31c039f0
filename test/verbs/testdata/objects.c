/*
 * objects SEED SECONDS ADDRESS: threads make, move and end listeners, connections, queue pairs, completion queues and
 * completion channels in any order that is allowed, and take and acknowledge each other's events. Nothing is left at the
 * end.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { CLIENTS = 4, SERVERS = 2, CHANNELS = 3, CONNS = 24, LISTENERS = 3, HELD = 8 };

/* A connection. Its mutex is held while its id is used, but for events, which any thread takes. */
struct conn {
	pthread_mutex_t lock;
	struct rdma_cm_id *id;
	struct ibv_cq *cq;
	struct ibv_comp_channel *ch;
	char buf[64];
	struct ibv_mr *mr;
};

struct thread {
	pthread_t id;
	uint64_t seed;
	struct rdma_cm_event *held[HELD]; /* not acknowledged yet */
};

static const char *address;
static time_t end;
static atomic_bool ended; /* the clients have */
static struct rdma_event_channel *channels[CHANNELS]; /* of the clients' connections */
static struct conn conns[CONNS], children[CONNS];
static _Atomic(__be16) ports[SERVERS * LISTENERS];
static atomic_uint established, requests, failures;

static uint64_t pick(struct thread *t, uint64_t n)
{
	t->seed = t->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (t->seed >> 33) % n;
}

static struct sockaddr_in socket_address(__be16 port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = port };

	CHECK(inet_pton(AF_INET, address, &a.sin_addr) == 1);
	return a;
}

static struct rdma_event_channel *channel(void)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();

	CHECK(ch && fcntl(ch->fd, F_SETFL, O_NONBLOCK) == 0);
	return ch;
}

/* ack acknowledges an event now, or keeps it and acknowledges another one. */
static void ack(struct thread *t, struct rdma_cm_event *e)
{
	struct rdma_cm_event **at = &t->held[pick(t, HELD)], *other = e;

	if (pick(t, 4) == 0) {
		other = *at;
		*at = e;
	}
	if (other)
		CHECK(rdma_ack_cm_event(other) == 0);
}

static void ack_all(struct thread *t)
{
	for (int i = 0; i < HELD; i++) {
		if (t->held[i])
			CHECK(rdma_ack_cm_event(t->held[i]) == 0);
		t->held[i] = NULL;
	}
}

static void create_qp(struct thread *t, struct conn *c)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 }, .sq_sig_all = 1 };

	if (pick(t, 2) == 0) {
		if (pick(t, 2) == 0) {
			c->ch = ibv_create_comp_channel(c->id->verbs);
			CHECK(c->ch && fcntl(c->ch->fd, F_SETFL, O_NONBLOCK) == 0);
		}
		c->cq = ibv_create_cq(c->id->verbs, 16, c, c->ch, 0);
		CHECK(c->cq);
		init.send_cq = init.recv_cq = c->cq;
		if (c->ch)
			CHECK(ibv_req_notify_cq(c->cq, 0) == 0);
	}
	CHECK(rdma_create_qp(c->id, NULL, &init) == 0);
	c->mr = ibv_reg_mr(c->id->pd, c->buf, sizeof(c->buf), IBV_ACCESS_LOCAL_WRITE);
	CHECK(c->mr);
	CHECK(rdma_post_recv(c->id, NULL, c->buf, 32, c->mr) == 0);
}

/* take_completions takes the completions and events of a connection's queues. */
static void take_completions(struct conn *c)
{
	struct ibv_wc wc[4];
	struct ibv_cq *cq;
	void *context;

	if (c->ch && ibv_get_cq_event(c->ch, &cq, &context) == 0) {
		CHECK(cq == c->cq && context == c);
		ibv_ack_cq_events(cq, 1);
		CHECK(ibv_req_notify_cq(cq, 0) == 0);
	}
	if (c->cq)
		CHECK(ibv_poll_cq(c->cq, 4, wc) >= 0);
	else if (c->id && c->id->qp)
		CHECK(ibv_poll_cq(c->id->send_cq, 4, wc) >= 0 && ibv_poll_cq(c->id->recv_cq, 4, wc) >= 0);
}

/* drop ends a connection. Events of it that this thread holds are acknowledged before, since rdma_destroy_id waits for that. */
static void drop(struct thread *t, struct conn *c)
{
	struct rdma_cm_id *id = c->id;

	if (!id)
		return;
	ack_all(t);
	if (pick(t, 3) == 0)
		rdma_disconnect(id);
	if (c->mr && pick(t, 2) == 0) {
		CHECK(ibv_dereg_mr(c->mr) == 0);
		c->mr = NULL;
	}
	take_completions(c);
	if (id->qp)
		rdma_destroy_qp(id);
	if (c->mr)
		CHECK(ibv_dereg_mr(c->mr) == 0);
	c->mr = NULL;
	if (pick(t, 2) == 0) {
		CHECK(rdma_destroy_id(id) == 0);
		id = NULL;
	}
	if (c->cq)
		CHECK(ibv_destroy_cq(c->cq) == 0);
	if (c->ch)
		CHECK(ibv_destroy_comp_channel(c->ch) == 0);
	c->cq = NULL;
	c->ch = NULL;
	if (id)
		CHECK(rdma_destroy_id(id) == 0);
	c->id = NULL;
}

static void send_some(struct conn *c)
{
	if (c->id->qp && c->mr)
		(void)rdma_post_send(c->id, NULL, c->buf + 32, 32, c->mr, 0); /* it may have failed, or be full */
}

/* advance takes the next step of a connection. */
static void advance(struct thread *t, struct conn *c, enum rdma_cm_event_type event)
{
	struct rdma_conn_param param = { .private_data = "hello", .private_data_len = 5 };

	switch (event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		if (pick(t, 20) != 0)
			CHECK(rdma_resolve_route(c->id, 1000) == 0);
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		create_qp(t, c);
		if (pick(t, 20) != 0)
			CHECK(rdma_connect(c->id, pick(t, 2) ? &param : NULL) == 0);
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		atomic_fetch_add(&established, 1);
		send_some(c);
		break;
	default:
		atomic_fetch_add(&failures, 1);
		if (pick(t, 2) == 0)
			drop(t, c);
	}
}

/* take takes an event of a channel of the clients. */
static void take(struct thread *t, struct rdma_event_channel *ch)
{
	enum rdma_cm_event_type type;
	struct rdma_cm_event *e;
	struct conn *c;

	if (rdma_get_cm_event(ch, &e) < 0) {
		CHECK(errno == EAGAIN);
		return;
	}
	type = e->event;
	c = e->id->context;
	/* Another thread may destroy the id, and waits for this event. */
	if (pthread_mutex_trylock(&c->lock) != 0) {
		CHECK(rdma_ack_cm_event(e) == 0);
		return;
	}
	CHECK(e->id == c->id); /* an id that was destroyed has no event */
	ack(t, e);
	advance(t, c, type);
	pthread_mutex_unlock(&c->lock);
}

static void start(struct thread *t, struct conn *c)
{
	struct sockaddr_in a = socket_address(atomic_load(&ports[pick(t, SERVERS * LISTENERS)])), src = socket_address(0);

	CHECK(rdma_create_id(channels[pick(t, CHANNELS)], &c->id, c, RDMA_PS_TCP) == 0);
	if (pick(t, 4) == 0)
		CHECK(rdma_bind_addr(c->id, (struct sockaddr *)&src) == 0);
	if (pick(t, 20) != 0)
		CHECK(rdma_resolve_addr(c->id, NULL, (struct sockaddr *)&a, 1000) == 0);
}

/* synchronous connects, exchanges messages, and ends, by calls that wait. */
static void synchronous(struct thread *t)
{
	struct sockaddr_in a = socket_address(atomic_load(&ports[pick(t, SERVERS * LISTENERS)]));
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct rdma_cm_id *id;

	ack_all(t);
	CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 1000) == 0 && rdma_resolve_route(id, 1000) == 0);
	CHECK(rdma_create_qp(id, NULL, &init) == 0);
	if (rdma_connect(id, NULL) == 0) {
		atomic_fetch_add(&established, 1);
		if (pick(t, 2) == 0)
			CHECK(rdma_disconnect(id) == 0);
	}
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0);
}

/* The queues of several threads share a completion queue. */
static struct ibv_context *device;
static struct ibv_comp_channel *common_channel;
static struct ibv_cq *common;
static struct ibv_pd *pd;

static void *await_events(void *arg)
{
	struct ibv_comp_channel *ch = arg;
	struct ibv_cq *cq;
	void *context;

	while (ibv_get_cq_event(ch, &cq, &context) == 0) {
		if (cq == common)
			CHECK(ibv_req_notify_cq(cq, 0) == 0);
		ibv_ack_cq_events(cq, 1);
	}
	return NULL;
}

/* take_async takes an asynchronous event of the device. */
static void take_async(void)
{
	struct ibv_async_event e;

	if (ibv_get_async_event(device, &e) < 0)
		return;
	usleep(100);
	ibv_ack_async_event(&e);
}

/* queues makes queues without connections, fails the posted work requests, and destroys them. */
static void queues(struct thread *t)
{
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .send_cq = common, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_recv_wr wr = { 0 }, *bad;
	struct ibv_srq *srq = NULL;
	struct ibv_cq *own = NULL;
	struct ibv_wc wc[8];
	struct ibv_qp *qp;

	if (pick(t, 2) == 0) {
		own = ibv_create_cq(device, 4, NULL, pick(t, 2) ? common_channel : NULL, 0);
		CHECK(own);
	}
	if (pick(t, 2) == 0) {
		srq = ibv_create_srq(pd, &srq_init);
		CHECK(srq && ibv_post_srq_recv(srq, &wr, &bad) == 0);
	}
	init.recv_cq = own ? own : common;
	init.srq = srq;
	qp = ibv_create_qp(pd, &init);
	CHECK(qp);
	if (!srq)
		CHECK(ibv_post_recv(qp, &wr, &bad) == 0 && ibv_post_recv(qp, &wr, &bad) == 0);
	if (pick(t, 2) == 0)
		CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
	if (pick(t, 4) == 0)
		CHECK(ibv_resize_cq(init.recv_cq, 4 + (int)pick(t, 60)) == 0);
	CHECK(ibv_poll_cq(init.recv_cq, (int)pick(t, 8), wc) >= 0 && ibv_poll_cq(common, 2, wc) >= 0);
	take_async();
	CHECK(ibv_destroy_qp(qp) == 0);
	if (srq)
		CHECK(ibv_destroy_srq(srq) == 0);
	if (own)
		CHECK(ibv_destroy_cq(own) == 0);
}

static void migrate(struct thread *t, struct conn *c)
{
	if (!c->id)
		return;
	ack_all(t); /* rdma_migrate_id waits for that */
	CHECK(rdma_migrate_id(c->id, channels[pick(t, CHANNELS)]) == 0);
}

static void *client(void *arg)
{
	struct thread *t = arg;

	for (int i = 0; i < SERVERS * LISTENERS; i++)
		while (atomic_load(&ports[i]) == 0)
			usleep(1000);
	while (time(NULL) < end) {
		struct conn *c = &conns[pick(t, CONNS)];

		for (int i = 0; i < CHANNELS; i++)
			take(t, channels[i]);
		if (pick(t, 50) == 0)
			synchronous(t);
		if (pick(t, 20) == 0)
			queues(t);
		if (pthread_mutex_trylock(&c->lock) != 0)
			continue;
		switch (pick(t, 8)) {
		case 0: case 1: case 2:
			if (!c->id)
				start(t, c);
			break;
		case 3:
			migrate(t, c);
			break;
		case 4:
			if (pick(t, 4) == 0)
				drop(t, c);
			break;
		case 5:
			if (c->id && pick(t, 4) == 0)
				rdma_disconnect(c->id);
			break;
		case 6:
			if (c->id)
				send_some(c);
			break;
		case 7:
			if (c->id)
				take_completions(c);
			break;
		}
		pthread_mutex_unlock(&c->lock);
		/* Others may wait for it. */
		if (pick(t, 3) == 0)
			ack_all(t);
		else
			usleep(100);
	}
	ack_all(t);
	return NULL;
}

struct server {
	struct rdma_event_channel *ch;
	struct rdma_cm_id *listeners[LISTENERS];
	struct conn *children;
	size_t number;
};

static void listen_at(struct thread *t, struct server *s, size_t i)
{
	struct sockaddr_in a = socket_address(0);

	if (s->listeners[i]) {
		ack_all(t);
		CHECK(rdma_destroy_id(s->listeners[i]) == 0);
	}
	CHECK(rdma_create_id(s->ch, &s->listeners[i], NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(s->listeners[i], (struct sockaddr *)&a) == 0);
	CHECK(rdma_listen(s->listeners[i], 1 + (int)pick(t, 8)) == 0);
	atomic_store(&ports[s->number * LISTENERS + i], rdma_get_src_port(s->listeners[i]));
}

static void answer(struct thread *t, struct server *s, struct rdma_cm_event *e)
{
	struct rdma_cm_id *id = e->id;
	struct conn *c = &s->children[pick(t, CONNS / SERVERS)];

	atomic_fetch_add(&requests, 1);
	ack(t, e);
	if (pick(t, 8) == 0) {
		if (pick(t, 2) == 0)
			rdma_reject(id, "no", 2);
		ack_all(t);
		CHECK(rdma_destroy_id(id) == 0);
		return;
	}
	drop(t, c);
	c->id = id;
	id->context = c;
	create_qp(t, c);
	if (rdma_accept(id, NULL) < 0)
		drop(t, c);
}

static void serve(struct thread *t, struct server *s)
{
	struct pollfd p = { .fd = s->ch->fd, .events = POLLIN };
	enum rdma_cm_event_type type;
	struct rdma_cm_event *e;
	struct conn *c;

	if (poll(&p, 1, 1) == 0)
		return;
	CHECK(rdma_get_cm_event(s->ch, &e) == 0);
	if (e->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
		answer(t, s, e);
		return;
	}
	type = e->event;
	c = e->id->context;
	ack(t, e);
	CHECK(c && c->id);
	advance(t, c, type);
}

static void *server(void *arg)
{
	struct thread *t = arg;
	static atomic_size_t number;
	struct server s = { .ch = channel(), .number = atomic_fetch_add(&number, 1) };

	s.children = &children[s.number * (CONNS / SERVERS)];
	for (size_t i = 0; i < LISTENERS; i++)
		listen_at(t, &s, i);
	while (!atomic_load(&ended)) {
		serve(t, &s);
		if (pick(t, 50) == 0)
			listen_at(t, &s, pick(t, LISTENERS));
		if (pick(t, 20) == 0)
			drop(t, &s.children[pick(t, CONNS / SERVERS)]);
	}
	ack_all(t);
	for (size_t i = 0; i < CONNS / SERVERS; i++)
		drop(t, &s.children[i]);
	for (size_t i = 0; i < LISTENERS; i++)
		CHECK(rdma_destroy_id(s.listeners[i]) == 0);
	rdma_destroy_event_channel(s.ch);
	return NULL;
}

int main(int argc, char **argv)
{
	static struct thread threads[CLIENTS + SERVERS];
	static char byte;
	struct rdma_cm_id *first;
	struct sockaddr_in a;
	struct ibv_device **list;
	struct ibv_mr *mr;
	pthread_t waiter;
	int files;

	CHECK(argc == 4);
	address = argv[3];
	alarm((unsigned int)atoi(argv[2]) + 100);
	end = time(NULL) + atoi(argv[2]);
	a = socket_address(0);
	channels[0] = channel();
	/* The library opens the devices and what it needs for memory. */
	CHECK(rdma_create_id(channels[0], &first, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(first, (struct sockaddr *)&a) == 0);
	mr = ibv_reg_mr(first->pd, &byte, 1, 0);
	CHECK(mr && ibv_dereg_mr(mr) == 0 && rdma_destroy_id(first) == 0);
	rdma_destroy_event_channel(channels[0]);
	files = open_files();
	list = ibv_get_device_list(NULL);
	CHECK(list && list[0]);
	device = ibv_open_device(list[0]);
	CHECK(device && fcntl(device->async_fd, F_SETFL, O_NONBLOCK) == 0);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(device);
	common_channel = ibv_create_comp_channel(device);
	CHECK(pd && common_channel);
	common = ibv_create_cq(device, 64, NULL, common_channel, 0);
	CHECK(common && ibv_req_notify_cq(common, 0) == 0);
	CHECK(pthread_create(&waiter, NULL, await_events, common_channel) == 0);
	for (int i = 0; i < CHANNELS; i++)
		channels[i] = channel();
	for (int i = 0; i < CONNS; i++)
		pthread_mutex_init(&conns[i].lock, NULL);
	for (int i = CLIENTS + SERVERS - 1; i >= 0; i--) {
		threads[i].seed = strtoull(argv[1], NULL, 0) * (CLIENTS + SERVERS) + (uint64_t)i;
		CHECK(pthread_create(&threads[i].id, NULL, i < CLIENTS ? client : server, &threads[i]) == 0);
	}
	for (int i = 0; i < CLIENTS; i++)
		CHECK(pthread_join(threads[i].id, NULL) == 0);
	for (int i = 0; i < CONNS; i++)
		drop(&threads[0], &conns[i]);
	atomic_store(&ended, true);
	for (int i = CLIENTS; i < CLIENTS + SERVERS; i++)
		CHECK(pthread_join(threads[i].id, NULL) == 0);
	for (int i = 0; i < CHANNELS; i++)
		rdma_destroy_event_channel(channels[i]);
	CHECK(ibv_destroy_cq(common) == 0 && ibv_destroy_comp_channel(common_channel) == 0);
	CHECK(pthread_join(waiter, NULL) == 0); /* the channel is gone */
	CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(device) == 0);
	printf("%u established, %u requests, %u failures\n", established, requests, failures);
	CHECK(established > 0);
	for (int i = 0; i < 500 && open_files() > files; i++) /* connections close */
		usleep(10000);
	if (open_files() != files)
		printf("%d descriptors instead of %d\n", open_files(), files);
	CHECK(open_files() == files);
	return 0;
}
