/*
 * rsockets over a model of verbs: rsmodel SEED N makes N connections, whose ends exchange data by random calls. While a
 * call waits, the network makes random steps, and so do calls of other threads. It is linked with the files of rsockets,
 * which are compiled so that they call the poll, sched_yield and clock_gettime of this file.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "rs.h"

static unsigned long seed;
static uint64_t state;
static bool hostile; /* an end does not keep to the protocol: */
static bool passive; /* that which accepts, or the other one */

#define CHECK(x)                                                                                     \
	do {                                                                                         \
		if (!(x)) {                                                                          \
			fprintf(stderr, "seed %lu, line %d: %s (errno %d)\n", seed, __LINE__, #x, errno);     \
			abort();                                                                     \
		}                                                                                    \
	} while (0)

/* below returns a random number less than n. */
static uint32_t below(uint32_t n)
{
	state = state * 6364136223846793005U + 1442695040888963407U;
	return (uint32_t)((state >> 33) % n);
}

/* What an end has sent and the other one does not have yet. */
struct item {
	struct item *next;
	enum { WRITE, SEND, FIN, RST } kind;
	uint64_t to;
	uint32_t key, len, done;
	uint8_t data[];
};

/* A work request that has been posted. */
struct work {
	struct work *next;
	struct ibv_wc wc;
	bool signaled;
	uint32_t slots; /* that its completion frees */
	const void *from; /* what to send, or NULL if item has it */
	struct item *item;
};

struct region {
	struct ibv_mr mr;
	int access;
	struct region *next;
};

struct completion {
	struct ibv_wc wc;
	uint32_t slots;
};

struct comp_channel {
	struct ibv_comp_channel pub;
	struct ibv_cq *cq;
};

struct model_cq {
	struct ibv_cq ibv;
	struct comp_channel *channel;
	struct completion *ring;
	uint32_t head, tail;
	bool armed;
};

struct node;

struct model_qp {
	struct ibv_qp ibv;
	struct node *node;
	struct ibv_qp_cap cap;
	uint64_t *ids; /* of receives */
	struct ibv_sge *at;
	uint32_t head, tail; /* of receives */
	uint32_t used, unsignaled; /* slots of the send queue; those that the next signaled request frees */
	uint32_t data; /* used slots but for those of credits */
	bool error;
};

struct event {
	struct rdma_cm_event pub;
	struct event *next;
	uint8_t data[64];
};

struct event_channel {
	struct rdma_event_channel pub;
	struct event *events;
};

/* An identifier, with its queue pair and what is on the way from it to its peer. */
struct node {
	struct id id;
	struct node *next, *peer;
	struct model_qp *qp;
	struct work *works;
	struct item *wire;
	struct event *events; /* on the way to the channel */
	uint16_t port;
	bool listens, accepts, withdrawn, gone, closed;
};

static struct node *nodes;
static struct region *regions;
static uint32_t last_key;
static struct ibv_context context;
static struct ibv_pd pd = { .context = &context };
static int64_t now_us;
static unsigned int queues; /* that were made */

static struct node *node_of(struct rdma_cm_id *id)
{
	return container_of(id_of(id), struct node, id);
}

#define APPEND(list, x)                              \
	do {                                         \
		__typeof__(list) *at_ = &(list);     \
		while (*at_)                         \
			at_ = &(*at_)->next;         \
		*at_ = (x);                          \
	} while (0)

/* What rsockets use of the libraries. */

const struct settings *iwv_settings(void)
{
	static const struct settings s;

	return &s;
}

void *real_cm_symbol(const char *name)
{
	(void)name;
	return NULL;
}

void iwv_log(const char *format, ...)
{
	(void)format;
}

int iwv_eventfd(int flags)
{
	return eventfd(0, EFD_CLOEXEC | flags);
}

bool iwv_eventfd_after_fork(int fd, int type) /* the model does not fork */
{
	(void)fd, (void)type;
	return false;
}

bool iwv_interrupts(void)
{
	return true;
}

socklen_t addr_len(const struct sockaddr *a)
{
	return a->sa_family == AF_INET ? sizeof(struct sockaddr_in) : 0;
}

/* Verbs. */

static void notify(int fd)
{
	static const uint64_t one = 1;

	CHECK(write(fd, &one, sizeof(one)) == sizeof(one));
}

static void complete(struct ibv_cq *ibv, const struct ibv_wc *wc, uint32_t slots)
{
	struct model_cq *q = container_of(ibv, struct model_cq, ibv);

	CHECK(q->tail - q->head < (uint32_t)ibv->cqe);
	q->ring[q->tail++ % (uint32_t)ibv->cqe] = (struct completion){ *wc, slots };
	if (q->armed)
		notify(q->channel->pub.fd);
	q->armed = false;
}

/* memory returns len bytes at addr of a region that grants access, or NULL. */
static void *memory(uint32_t key, uint64_t addr, uint64_t len, int access)
{
	for (struct region *r = regions; r; r = r->next) {
		uint64_t off = addr - (uintptr_t)r->mr.addr;

		if (r->mr.rkey == key && (r->access & access) == access && off <= r->mr.length && len <= r->mr.length - off)
			return (uint8_t *)r->mr.addr + off;
	}
	return NULL;
}

#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *p, void *addr, size_t length, int access)
{
	struct region *r = calloc(1, sizeof(*r));

	last_key += 77;
	r->mr = (struct ibv_mr){ .pd = p, .addr = addr, .length = length, .lkey = last_key, .rkey = last_key };
	r->access = access;
	r->next = regions;
	regions = r;
	return &r->mr;
}

/* What the header calls instead if the program is not optimized. */
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *p, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	CHECK(iova == (uintptr_t)addr);
	return ibv_reg_mr(p, addr, length, (int)access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	struct region **r = &regions, *old;

	while (&(*r)->mr != mr)
		r = &(*r)->next;
	old = *r;
	*r = old->next;
	free(old);
	return 0;
}

int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a)
{
	(void)c;
	*a = (struct ibv_device_attr){ .max_qp_wr = 16384, .max_cqe = 65536 };
	return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c)
{
	struct comp_channel *ch = calloc(1, sizeof(*ch));

	ch->pub.context = c;
	ch->pub.fd = eventfd(0, EFD_SEMAPHORE);
	CHECK(ch->pub.fd >= 0);
	return &ch->pub;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *ch)
{
	close(ch->fd);
	free(ch);
	return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *c, int cqe, void *arg, struct ibv_comp_channel *ch, int vector)
{
	struct model_cq *q = calloc(1, sizeof(*q));

	(void)vector;
	queues++;
	q->ibv = (struct ibv_cq){ .context = c, .cqe = cqe, .cq_context = arg };
	q->channel = (struct comp_channel *)ch;
	q->channel->cq = &q->ibv;
	q->ring = calloc((size_t)cqe, sizeof(*q->ring));
	return &q->ibv;
}

int ibv_destroy_cq(struct ibv_cq *ibv)
{
	struct model_cq *q = container_of(ibv, struct model_cq, ibv);

	free(q->ring);
	free(q);
	return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **arg)
{
	uint64_t n;

	if (read(ch->fd, &n, sizeof(n)) < 0)
		return -1;
	*cq = ((struct comp_channel *)ch)->cq;
	*arg = NULL;
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n)
{
	(void)cq;
	(void)n;
}

static int req_notify(struct ibv_cq *ibv, int solicited)
{
	CHECK(!solicited);
	container_of(ibv, struct model_cq, ibv)->armed = true;
	return 0;
}

/* is_data reports whether a work request has a place of those that its socket keeps for data: see CONTROL in rs_stream.c. */
static bool is_data(uint64_t wr_id)
{
	return !(wr_id >> 62);
}

static int poll_queue(struct ibv_cq *ibv, int n, struct ibv_wc *wc)
{
	struct model_cq *q = container_of(ibv, struct model_cq, ibv);
	int i = 0;

	for (; i < n && q->head != q->tail; i++) {
		struct completion *c = &q->ring[q->head++ % (uint32_t)ibv->cqe];

		*wc = c->wc;
		if (c->slots) {
			struct node *d = nodes;

			while (!d->qp || d->qp->ibv.qp_num != wc->qp_num)
				d = d->next;
			d->qp->used -= c->slots;
			d->qp->data -= is_data(wc->wr_id) ? c->slots : 0;
		}
		wc++;
	}
	return i;
}

enum { OTHER_SENDS = 10 }; /* what rs_stream.c adds to the length of the queue */

static struct model_qp *to_qp(struct ibv_qp *ibv)
{
	return container_of(ibv, struct model_qp, ibv);
}

static void complete_send(struct model_qp *q, const struct work *w, enum ibv_wc_status st)
{
	struct ibv_wc wc = w->wc;

	wc.status = st;
	if (w->signaled || st != IBV_WC_SUCCESS)
		complete(q->ibv.send_cq, &wc, w->slots);
}

static int queue_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct model_qp *q = to_qp(ibv);

	(void)bad;
	CHECK(!wr->next && q->tail - q->head < q->cap.max_recv_wr && wr->num_sge == 1);
	q->ids[q->tail % q->cap.max_recv_wr] = wr->wr_id;
	q->at[q->tail++ % q->cap.max_recv_wr] = *wr->sg_list;
	if (q->error) {
		struct ibv_wc wc = { .wr_id = wr->wr_id, .status = IBV_WC_WR_FLUSH_ERR, .qp_num = ibv->qp_num };

		q->head++;
		complete(ibv->recv_cq, &wc, 0);
	}
	return 0;
}

static int queue_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct model_qp *q = to_qp(ibv);

	for (; wr; wr = wr->next) {
		uint32_t len = wr->sg_list->length;
		struct work *w = calloc(1, sizeof(*w));
		struct item *i = calloc(1, sizeof(*i) + len);

		*bad = wr;
		CHECK(wr->num_sge == 1 && q->used < q->cap.max_send_wr);
		q->used++;
		q->data += is_data(wr->wr_id);
		CHECK(wr->opcode == IBV_WR_SEND || q->data <= q->cap.max_send_wr - OTHER_SENDS);
		*w = (struct work){ .wc = { .wr_id = wr->wr_id, .qp_num = ibv->qp_num }, .slots = ++q->unsignaled, .item = i };
		w->signaled = wr->send_flags & IBV_SEND_SIGNALED;
		i->kind = wr->opcode == IBV_WR_SEND ? SEND : WRITE;
		i->len = len;
		i->to = wr->wr.rdma.remote_addr;
		i->key = wr->wr.rdma.rkey;
		if (wr->send_flags & IBV_SEND_INLINE) {
			CHECK(len <= q->cap.max_inline_data);
			memcpy(i->data, (void *)(uintptr_t)wr->sg_list->addr, len);
		} else {
			w->from = memory(wr->sg_list->lkey, wr->sg_list->addr, len, 0);
			CHECK(w->from);
		}
		if (w->signaled)
			q->unsignaled = 0;
		if (q->error) {
			complete_send(q, w, IBV_WC_WR_FLUSH_ERR);
			free(w);
			free(i);
		} else {
			APPEND(q->node->works, w);
		}
	}
	return 0;
}

/* Connections. */

bool cm_withdrawn(const struct id *id)
{
	return container_of(id, struct node, id)->withdrawn;
}

static struct event *event(struct node *d, struct rdma_cm_id *listener, enum rdma_cm_event_type type,
			   const void *data, size_t len)
{
	struct event *e = calloc(1, sizeof(*e));

	e->pub = (struct rdma_cm_event){ .id = &d->id.pub, .listen_id = listener, .event = type };
	CHECK(len <= sizeof(e->data));
	if (len > 0)
		memcpy(e->data, data, len);
	e->pub.param.conn.private_data = e->data;
	e->pub.param.conn.private_data_len = (uint8_t)len;
	APPEND(d->events, e);
	return e;
}

static void flush(struct node *d)
{
	struct model_qp *q = d->qp;
	struct work *w;

	if (q && !q->error) {
		q->error = true;
		for (w = d->works; w; w = w->next)
			complete_send(q, w, IBV_WC_WR_FLUSH_ERR);
		for (; q->head != q->tail; q->head++) {
			struct ibv_wc wc = {
				.wr_id = q->ids[q->head % q->cap.max_recv_wr], .status = IBV_WC_WR_FLUSH_ERR,
				.qp_num = q->ibv.qp_num,
			};

			complete(q->ibv.recv_cq, &wc, 0);
		}
	}
	while ((w = d->works) != NULL) {
		d->works = w->next;
		free(w->item);
		free(w);
	}
}

static void free_wire(struct node *d)
{
	struct item *i;

	while ((i = d->wire) != NULL) {
		d->wire = i->next;
		free(i);
	}
}

/* leave ends the connection of d. What is on the wire arrives before the end, unless it is a reset. */
static void leave(struct node *d, bool reset)
{
	struct item *i;

	flush(d);
	if (d->closed)
		return;
	d->closed = true;
	if (reset)
		free_wire(d);
	i = calloc(1, sizeof(*i));
	i->kind = reset ? RST : FIN;
	APPEND(d->wire, i);
}

/* ended is called when the end of d's peer arrives, or the connection fails. */
static void ended(struct node *d, int err)
{
	d->id.end = err;
	flush(d);
	d->closed = true;
	free_wire(d);
	event(d, NULL, RDMA_CM_EVENT_DISCONNECTED, NULL, 0);
}

struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct event_channel *ch = calloc(1, sizeof(*ch));

	ch->pub.fd = eventfd(0, EFD_SEMAPHORE);
	CHECK(ch->pub.fd >= 0);
	return &ch->pub;
}

void rdma_destroy_event_channel(struct rdma_event_channel *ch)
{
	CHECK(!((struct event_channel *)ch)->events);
	close(ch->fd);
	free(ch);
}

int rdma_get_cm_event(struct rdma_event_channel *ch, struct rdma_cm_event **e)
{
	struct event_channel *c = (struct event_channel *)ch;
	uint64_t n;

	if (read(ch->fd, &n, sizeof(n)) < 0)
		return -1;
	*e = &c->events->pub;
	c->events = c->events->next;
	return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *e)
{
	free(e);
	return 0;
}

int rdma_create_id(struct rdma_event_channel *ch, struct rdma_cm_id **id, void *arg, enum rdma_port_space ps)
{
	struct node *d = calloc(1, sizeof(*d));

	(void)arg;
	(void)ps;
	d->id.pub.channel = ch;
	d->next = nodes;
	nodes = d;
	*id = &d->id.pub;
	return 0;
}

int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *v, size_t len)
{
	(void)id;
	(void)level;
	(void)name;
	(void)v;
	(void)len;
	return 0;
}

int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *a)
{
	(void)a;
	node_of(id)->id.state = ID_BOUND;
	return 0;
}

int rdma_listen(struct rdma_cm_id *id, int backlog)
{
	(void)backlog;
	node_of(id)->listens = true;
	return 0;
}

int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *src, struct sockaddr *dst, int ms)
{
	(void)src;
	(void)dst;
	(void)ms;
	id->verbs = &context;
	event(node_of(id), NULL, RDMA_CM_EVENT_ADDR_RESOLVED, NULL, 0);
	return 0;
}

int rdma_resolve_route(struct rdma_cm_id *id, int ms)
{
	(void)ms;
	event(node_of(id), NULL, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL, 0);
	return 0;
}

int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *p, struct ibv_qp_init_attr *a)
{
	static uint32_t last;
	struct model_qp *q = calloc(1, sizeof(*q));

	(void)p;
	q->ibv = (struct ibv_qp){
		.context = &context, .pd = &pd, .send_cq = a->send_cq, .recv_cq = a->recv_cq, .qp_num = ++last,
	};
	q->cap = a->cap;
	q->ids = calloc(a->cap.max_recv_wr, sizeof(*q->ids));
	q->at = calloc(a->cap.max_recv_wr, sizeof(*q->at));
	q->node = node_of(id);
	q->node->qp = q;
	id->qp = &q->ibv;
	return 0;
}

void rdma_destroy_qp(struct rdma_cm_id *id)
{
	struct node *d = node_of(id);

	if (d->peer)
		leave(d, false);
	free(d->qp->ids);
	free(d->qp->at);
	free(d->qp);
	d->qp = NULL;
	id->qp = NULL;
}

#undef ibv_modify_qp
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
	CHECK(mask == IBV_QP_STATE && a->qp_state == IBV_QPS_ERR);
	if (to_qp(qp)->node->peer)
		leave(to_qp(qp)->node, true);
	return 0;
}

/* request makes a connect request of from, or one that is withdrawn if that is NULL. */
static void request(struct node *from, const void *data, size_t len)
{
	struct node *l = nodes, *made;
	struct rdma_cm_id *pub;

	while (l && !l->listens)
		l = l->next;
	CHECK(l);
	rdma_create_id(l->id.pub.channel, &pub, NULL, RDMA_PS_TCP);
	pub->verbs = &context;
	made = node_of(pub);
	made->accepts = true;
	made->withdrawn = !from;
	made->peer = from;
	if (from)
		from->peer = made;
	event(l, &l->id.pub, RDMA_CM_EVENT_CONNECT_REQUEST, data, len)->pub.id = pub;
}

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
	for (uint32_t n = below(4); n > 0; n--)
		request(NULL, p->private_data, p->private_data_len);
	request(node_of(id), p->private_data, p->private_data_len);
	return 0;
}

int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
	struct node *d = node_of(id);

	event(d, NULL, RDMA_CM_EVENT_ESTABLISHED, NULL, 0);
	event(d->peer, NULL, RDMA_CM_EVENT_ESTABLISHED, p->private_data, p->private_data_len);
	return 0;
}

int rdma_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *ch)
{
	id->channel = ch;
	return 0;
}

/* node_free frees a node that its program and its peer do not need any more. */
static void node_free(struct node *d)
{
	struct node **at = &nodes;

	free_wire(d);
	while (*at != d)
		at = &(*at)->next;
	*at = d->next;
	free(d);
}

int rdma_destroy_id(struct rdma_cm_id *id)
{
	struct node *d = node_of(id);
	struct event_channel *ch = (struct event_channel *)id->channel;
	struct event *e;
	uint64_t n;

	if (id->qp)
		rdma_destroy_qp(id);
	for (int i = 0; i < 2; i++) {
		struct event **list = i ? &ch->events : &d->events;

		while ((e = *list) != NULL) {
			CHECK(e->pub.event != RDMA_CM_EVENT_CONNECT_REQUEST);
			*list = e->next;
			free(e);
			if (i)
				CHECK(read(ch->pub.fd, &n, sizeof(n)) == sizeof(n));
		}
	}
	d->gone = true;
	if (!d->peer)
		node_free(d);
	return 0;
}

struct ibv_context **rdma_get_devices(int *n)
{
	static struct ibv_context *list[2] = { &context };

	if (n)
		*n = 1;
	return list;
}

void rdma_free_devices(struct ibv_context **list)
{
	(void)list;
}

/* The network. */

/* fail ends a connection of which d has broken a rule, or its peer. */
static void fail(struct node *d)
{
	ended(d, -ECONNABORTED);
	if (!d->peer->closed)
		ended(d->peer, -ECONNRESET);
}

/* arrive brings some bytes of an item, or its end, to the peer of d. */
static void arrive(struct node *d, struct item *i)
{
	struct node *to = d->peer;
	struct model_qp *q = to->qp;
	uint32_t n = i->len - i->done;
	uint8_t *at;

	if (i->kind == FIN || i->kind == RST) {
		if (!to->closed)
			ended(to, i->kind == FIN ? 0 : -ECONNRESET);
	} else if (!to->closed && q && !q->error) {
		if (i->kind == SEND) {
			struct ibv_sge *sge = &q->at[q->head % q->cap.max_recv_wr];
			struct ibv_wc wc = {
				.wr_id = q->ids[q->head % q->cap.max_recv_wr], .opcode = IBV_WC_RECV,
				.byte_len = i->len, .qp_num = q->ibv.qp_num,
			};

			if (q->head == q->tail) {
				CHECK(hostile);
				fail(to);
				return;
			}
			at = memory(sge->lkey, sge->addr, i->len, IBV_ACCESS_LOCAL_WRITE);
			CHECK(at && i->len <= sge->length);
			memcpy(at, i->data, i->len);
			q->head++;
			complete(q->ibv.recv_cq, &wc, 0);
		} else {
			if (below(2)) /* a segment */
				n = 1 + below(n);
			at = memory(i->key, i->to + i->done, n, IBV_ACCESS_REMOTE_WRITE);
			if (!at) {
				CHECK(hostile);
				fail(to);
				return;
			}
			memcpy(at, i->data + i->done, n);
			i->done += n;
			if (i->done < i->len)
				return;
		}
	}
	d->wire = i->next;
	free(i);
}

/* corrupt changes a message, or what is written to a table. */
static void corrupt(struct item *i)
{
	uint32_t v = below(4) ? below(9) << 29 | below(70000) : below(UINT32_MAX);

	if (i->kind == SEND || (i->len >= sizeof(v) && i->len < 41))
		memcpy(i->data + below(i->len / 4) * 4, &v, sizeof(v));
	else
		i->to += below(3) * 4096;
}

/* move makes one step of what d has to do, and reports whether there was any. */
static bool move(struct node *d)
{
	uint32_t first = below(3);

	for (uint32_t k = 0; k < 3; k++) {
		uint32_t what = (first + k) % 3;

		if (what == 0 && d->events && !d->gone) {
			struct event *e = d->events;
			struct event_channel *ch = (struct event_channel *)d->id.pub.channel;

			d->events = e->next;
			e->next = NULL;
			APPEND(ch->events, e);
			notify(ch->pub.fd);
			return true;
		}
		if (what == 1 && d->works && d->peer && d->peer->qp) {
			struct work *w = d->works;

			d->works = w->next;
			if (w->from)
				memcpy(w->item->data, w->from, w->item->len);
			if (hostile && d->accepts == passive && below(8) == 0)
				corrupt(w->item);
			APPEND(d->wire, w->item);
			complete_send(d->qp, w, IBV_WC_SUCCESS);
			free(w);
			return true;
		}
		if (what == 2 && d->wire) {
			arrive(d, d->wire);
			return true;
		}
	}
	return false;
}

static uint32_t stalled; /* how often the network makes no step */

/* network makes a random step, and reports whether there was anything to do. */
static bool network(void)
{
	uint32_t n = 0, first;
	struct node *d;

	if (stalled > 0) {
		stalled--;
		return false;
	}
	for (d = nodes; d; d = d->next)
		n++;
	first = n ? below(n) : 0;
	for (uint32_t i = 0; i < n; i++) {
		d = nodes;
		for (uint32_t k = 0; k < (first + i) % n; k++)
			d = d->next;
		if (move(d))
			return true;
	}
	return false;
}

/* The ends. */

enum { MAPPED = 3000, WRITES = 256, OTHERS = 1 << 20 };

struct end {
	int fd, peer;
	uint64_t sent, got;	 /* bytes */
	bool sending, receiving; /* in a call */
	bool finished, eof;
	uint32_t marks;		 /* how often the buffer of the other end was written */
	size_t written;		 /* bytes of it since then */
	uint64_t at[WRITES];	 /* bytes that had been sent then */
	uint8_t buffer[MAPPED];
	bool mapped;
	uint8_t others[3]; /* mapped now and then, at OTHERS and the following offsets */
	bool others_mapped[3];
} ends[2];

static int depth;

static uint8_t byte_at(uint64_t pos, int of)
{
	return (uint8_t)(pos * 167 + pos / 251 + (uint64_t)of * 77);
}

static void act(void);

static void pause_call(void)
{
	if (depth < 3 && below(6) == 0)
		act();
	if (!network())
		now_us += 1000;
}

int model_clock(clockid_t id, struct timespec *t);
int model_clock(clockid_t id, struct timespec *t)
{
	(void)id;
	now_us += 7;
	*t = (struct timespec){ now_us / 1000000, now_us % 1000000 * 1000 };
	return 0;
}

int model_yield(void);
int model_yield(void)
{
	pause_call();
	return 0;
}

int model_poll(struct pollfd *p, nfds_t n, int ms);
int model_poll(struct pollfd *p, nfds_t n, int ms)
{
	int64_t until = now_us + ms * 1000LL;

	for (;;) {
		struct timespec zero = { 0 };
		int ready = (int)syscall(SYS_ppoll, p, n, &zero, NULL, 0);

		if (ready != 0 || ms == 0)
			return ready;
		if (ms > 0 && now_us >= until) {
			/* Everything has arrived: then nothing may wait for the sleeper without a wake-up. */
			for (struct node *d = nodes; d; d = d->next) {
				struct model_cq *q = d->qp ? container_of(d->qp->ibv.recv_cq, struct model_cq, ibv) : NULL;

				for (nfds_t i = 0; q && i < n; i++)
					if (p[i].fd == q->channel->pub.fd)
						CHECK(q->head == q->tail);
			}
			return 0;
		}
		pause_call();
	}
}

static void set(int fd, int level, int name, int v)
{
	CHECK(rsetsockopt(fd, level, name, &v, sizeof(v)) == 0);
}

static void patience(int fd, int name, uint32_t ms)
{
	struct timeval t = { .tv_usec = ms * 1000 };

	CHECK(rsetsockopt(fd, SOL_SOCKET, name, &t, sizeof(t)) == 0);
}

static void send_some(struct end *e)
{
	uint32_t n = 1 + below(stalled ? 9 : below(4) ? 3000 : 30000); /* small ones fill the queue */
	uint8_t *b = malloc(n);
	ssize_t done;

	e->sending = true;
	for (uint32_t i = 0; i < n; i++)
		b[i] = byte_at(e->sent + i, (int)(e - ends));
	patience(e->fd, SO_SNDTIMEO, 1 + below(50));
	done = rsend(e->fd, b, n, below(2) ? MSG_DONTWAIT : 0);
	CHECK(done >= 0 || errno == EAGAIN || hostile);
	if (done > 0)
		e->sent += (uint64_t)done;
	e->sending = false;
	free(b);
}

static void recv_some(struct end *e)
{
	static const int flags[] = { 0, MSG_DONTWAIT, MSG_PEEK, MSG_WAITALL };
	uint32_t n = below(20) ? 1 + below(below(4) ? 3000 : 30000) : 0;
	int f = flags[below(4)], other = 1 - (int)(e - ends);
	uint8_t *b = malloc(n);
	ssize_t got;

	e->receiving = true;
	patience(e->fd, SO_RCVTIMEO, 1 + below(50));
	got = rrecv(e->fd, b, n, f);
	CHECK(got >= 0 || errno == EAGAIN || hostile);
	for (ssize_t i = 0; i < got && !hostile; i++)
		CHECK(b[i] == byte_at(e->got + (uint64_t)i, other));
	if (got > 0 && f != MSG_PEEK)
		e->got += (uint64_t)got;
	if (got == 0 && n == 0) {
		CHECK(e->got < ends[other].sent || ends[other].sending || ends[other].finished || hostile);
	} else if (got == 0) {
		CHECK((ends[other].finished && e->got == ends[other].sent) || hostile);
		e->eof = true;
	}
	/* What was written to the buffer before these bytes is there. */
	for (uint32_t i = 0; i < ends[other].marks && !hostile; i++)
		if (ends[other].at[i] < e->got)
			for (int k = 0; k < MAPPED; k += 299)
				CHECK(e->buffer[k] > i);
	e->receiving = false;
	free(b);
}

static void write_mapped(struct end *e)
{
	uint8_t b[MAPPED];
	size_t n;

	if (!ends[1 - (e - ends)].mapped || e->marks == 255)
		return;
	e->sending = true;
	memset(b, (int)e->marks + 1, sizeof(b));
	patience(e->fd, SO_SNDTIMEO, 1 + below(50));
	n = riowrite(e->fd, b, sizeof(b) - e->written, (off_t)(4096 + e->written), 0);
	CHECK(n <= sizeof(b) - e->written || (n == (size_t)-1 && (errno == EAGAIN || hostile)));
	if (n != (size_t)-1)
		e->written += n;
	if (e->written == sizeof(b)) {
		e->written = 0;
		e->at[e->marks++] = e->sent;
	}
	e->sending = false;
}

/* map_another maps a buffer, of which the peer must be told before the next data, or ends that. */
static void map_another(struct end *e)
{
	uint32_t i = below(3);
	uint8_t *at = &e->others[i];

	if (e->others_mapped[i])
		CHECK(riounmap(e->fd, at, 1) == 0);
	else if (riomap(e->fd, at, 1, PROT_WRITE, 0, OTHERS + (off_t)i) < 0)
		return; /* the peer does not know yet which entry of its table is unused */
	e->others_mapped[i] = !e->others_mapped[i];
}

static void poll_some(struct end *e)
{
	struct pollfd p[2] = { { .fd = e->fd, .events = POLLIN | POLLOUT }, { .fd = e->peer, .events = POLLIN } };
	int n = rpoll(p, 1 + below(2), (int)below(20));

	CHECK(n >= 0);
	if (p[0].revents & POLLIN && !e->receiving) {
		char c;
		ssize_t got = rrecv(e->fd, &c, 1, MSG_DONTWAIT | MSG_PEEK);

		CHECK(got >= 0 || hostile);
	}
}

/* act makes a random call of a thread that no other call of its kind is in the way of. */
static void act(void)
{
	struct end *e = &ends[below(2)];

	if (e->fd < 0)
		return;
	if (below(100) == 0)
		stalled = 20 + below(200);
	depth++;
	switch (below(9)) {
	case 0:
	case 1:
	case 2:
		if (!e->sending && !e->finished)
			send_some(e);
		break;
	case 3:
	case 4:
	case 5:
		if (!e->receiving && !e->eof)
			recv_some(e);
		break;
	case 6:
		poll_some(e);
		break;
	case 7:
		if (!e->sending && !e->finished)
			write_mapped(e);
		break;
	case 8:
		map_another(e);
	}
	depth--;
}

static void close_end(struct end *e)
{
	int fd = e->fd;

	e->fd = ends[1 - (e - ends)].peer = -1;
	CHECK(rclose(fd) == 0);
}

static void finish(struct end *e)
{
	CHECK(rshutdown(e->fd, SHUT_WR) == 0);
	e->finished = true;
}

/* options sets sizes at or near the smallest. */
static void options(int fd)
{
	static const int sizes[] = { 8192, 8192, 12288, 65536, 131072 };

	set(fd, SOL_SOCKET, SO_RCVBUF, sizes[below(5)]);
	set(fd, SOL_SOCKET, SO_SNDBUF, sizes[below(5)]);
	set(fd, SOL_RDMA, RDMA_SQSIZE, 16 + (int)below(3));
	set(fd, SOL_RDMA, RDMA_RQSIZE, below(2) ? 16 + (int)below(3) : 64); /* or more than the peer may have outstanding */
	set(fd, SOL_RDMA, RDMA_IOMAPSIZE, 1 + (int)below(4));
}

static void run(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int l = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	int fd = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), made = -1;
	uint32_t calls = 20 + below(200);

	queues = 0;
	memset(ends, 0, sizeof(ends));
	ends[0].fd = ends[1].fd = -1;
	CHECK(l >= 0 && fd >= 0);
	options(l);
	options(fd);
	CHECK(rlisten(l, 1) == 0);
	CHECK(rconnect(fd, (struct sockaddr *)&a, sizeof(a)) == -1 && errno == EINPROGRESS);
	while (made < 0) {
		char c;

		made = raccept(l, NULL, NULL);
		CHECK(made >= 0 || errno == EAGAIN);
		if (made >= 0 && rrecv(made, &c, 1, MSG_DONTWAIT) == -1 && errno == ECONNRESET) { /* withdrawn */
			CHECK(rclose(made) == 0);
			made = -1;
		}
		rconnect(fd, (struct sockaddr *)&a, sizeof(a));
	}
	while (rconnect(fd, (struct sockaddr *)&a, sizeof(a)) < 0 && errno == EALREADY)
		;
	CHECK(queues == 2); /* none for requests that were withdrawn */
	CHECK(rfcntl(fd, F_SETFL, 0) == 0);
	ends[0].fd = ends[1].peer = fd;
	ends[1].fd = ends[0].peer = made;
	for (int i = 0; i < 2; i++) {
		if (below(2))
			ends[i].mapped = riomap(ends[i].fd, ends[i].buffer, MAPPED, PROT_WRITE, 0, 4096) == 4096;
	}
	for (uint32_t i = 0; i < calls; i++)
		act();
	if (hostile) {
		close_end(&ends[0]);
		close_end(&ends[1]);
	} else if (below(2)) {
		for (int i = 0; i < 2; i++)
			finish(&ends[i]);
		while (!ends[0].eof || !ends[1].eof)
			act();
		close_end(&ends[0]);
		close_end(&ends[1]);
	} else { /* what was sent arrives though its socket is closed */
		struct end *e = &ends[below(2)], *other = &ends[1 - (e - ends)];

		e->finished = other->finished = true; /* the other one has nobody to send to */
		close_end(e);
		while (!other->eof)
			recv_some(other);
		close_end(other);
	}
	CHECK(rclose(l) == 0);
	while (nodes) {
		while (network())
			;
		for (struct node *d = nodes, *next; d; d = next) {
			next = d->next;
			CHECK(d->gone);
			node_free(d);
		}
	}
	CHECK(!regions);
}

int main(int argc, char **argv)
{
	unsigned long n;

	CHECK(argc == 3);
	context.ops.poll_cq = poll_queue;
	context.ops.req_notify_cq = req_notify;
	context.ops.post_send = queue_send;
	context.ops.post_recv = queue_recv;
	seed = strtoul(argv[1], NULL, 0);
	for (n = strtoul(argv[2], NULL, 0); n > 0; n--, seed++) {
		state = seed * 2 + 1;
		for (int i = 0; i < 8; i++)
			below(2);
		hostile = below(3) == 0;
		passive = below(2);
		run();
	}
	return 0;
}
