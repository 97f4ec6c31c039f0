/*
 * check tests libiwarpd with two daemons that reach each other. It may be a client of
 * both.
 *
 *   check SOCKET_A ADDRESS_A SOCKET_B ADDRESS_B verbs|cm|files|memory|streams|sctp|shared|channels|threads|quiet|
 *	gone|reopen|silent|flushes|hostile|coming
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iwarpd.h>

#include "../../testdata/descriptors.h"

#define CHECK(cond)                                                                  \
	do {                                                                         \
		if (!(cond)) {                                                       \
			fprintf(stderr, "check.c:%d: not so: %s (%s)\n", __LINE__, #cond, err.text); \
			exit(1);                                                     \
		}                                                                    \
	} while (0)

enum { SIZE = 65536, RECVS = 16, WAIT = 60000 };

static struct iwarpd_error err;

struct side {
	struct iwarpd_device *dev;
	const char *address;
	struct iwarpd_pd *pd;
	struct iwarpd_channel *channel; /* channel of the queues; NULL if each has its own */
	struct iwarpd_cq *scq, *rcq;
	struct iwarpd_qp *qp;
	struct iwarpd_mr *mr;
	struct iwarpd_event ev; /* the last one */
	bool flush_late; /* of struct iwarpd_qp_attr */
};

/* check_closed_on_exec checks that all descriptors but the standard ones are closed on exec. */
static void check_closed_on_exec(void)
{
	for (int fd = STDERR_FILENO + 1; fd < 100; fd++)
		CHECK(fcntl(fd, F_GETFD) != 0);
}

/* shared_maps returns the number of mappings of memfds. */
static int shared_maps(void)
{
	FILE *f = fopen("/proc/self/maps", "re");
	char line[4096];
	int n = 0;

	CHECK(f);
	while (fgets(line, sizeof(line), f))
		n += strstr(line, "/memfd:") != NULL;
	fclose(f);
	return n;
}

static void open_side(struct side *s, const char *socket, const char *address)
{
	memset(s, 0, sizeof(*s));
	s->address = address;
	CHECK(iwarpd_open(socket, "check", &s->dev, &err) == 0);
}

static void make_cq(struct side *s, struct iwarpd_cq **cq)
{
	if (s->channel)
		CHECK(iwarpd_create_cq_on(s->channel, 64, cq, cq, &err) == 0);
	else
		CHECK(iwarpd_create_cq(s->dev, 64, cq, &err) == 0);
	CHECK(iwarpd_cq_context(*cq) == (s->channel ? cq : NULL));
}

static void make_qp(struct side *s)
{
	struct iwarpd_qp_attr attr = { .send_depth = 8, .recv_depth = RECVS, .max_sge = 2, .max_inline = 32, .flush_late = s->flush_late, .context = s };

	CHECK(iwarpd_alloc_pd(s->dev, &s->pd, &err) == 0);
	make_cq(s, &s->scq);
	make_cq(s, &s->rcq);
	CHECK(iwarpd_alloc_mr(s->pd, SIZE, IWARPD_LOCAL_WRITE | IWARPD_REMOTE_WRITE | IWARPD_REMOTE_READ |
			      IWARPD_REMOTE_ATOMIC | IWARPD_MW_BIND, &s->mr, &err) == 0);
	attr.send_cq = s->scq;
	attr.recv_cq = s->rcq;
	CHECK(iwarpd_create_qp(s->pd, &attr, &s->qp, &err) == 0);
	CHECK(iwarpd_qp_context(s->qp) == s);
	for (uint64_t i = 0; i < RECVS; i++) {
		struct iwarpd_sge sge = { s->mr->base + SIZE / 2 + i * 64, 64, s->mr->lkey };
		struct iwarpd_recv_wr wr = { .id = i, .sge = &sge, .num_sge = 1 };

		CHECK(iwarpd_post_recv(s->qp, &wr) == 0);
	}
}

/* drop destroys everything in order; nothing may be in use any more. */
static void drop(struct side *s)
{
	CHECK(iwarpd_dealloc_pd(s->pd, &err) == -EBUSY && err.code == IWARPD_CODE_BUSY && err.text[0]);
	CHECK(iwarpd_destroy_cq(s->scq, &err) == -EBUSY);
	CHECK(iwarpd_destroy_qp(s->qp, &err) == 0);
	CHECK(iwarpd_destroy_cq(s->scq, &err) == 0);
	CHECK(iwarpd_destroy_cq(s->rcq, &err) == 0);
	CHECK(iwarpd_dereg_mr(s->mr, &err) == 0);
	CHECK(iwarpd_dealloc_pd(s->pd, &err) == 0);
}

static void expect_event(struct side *s, uint32_t type)
{
	do { /* asynchronous errors may occur between other events */
		CHECK(iwarpd_get_qp_event(s->qp, &s->ev, WAIT, &err) == 0);
	} while (s->ev.type == IWARPD_EVENT_ASYNC_ERROR && s->ev.type != type);
	if (s->ev.type != type)
		fprintf(stderr, "event: %s: %s\n", iwarpd_event_text(s->ev.type), s->ev.error.text);
	CHECK(s->ev.type == type && s->ev.qp == s->qp);
}

/* request connects from a to b, and waits for the connect request at b. */
static void request(struct side *a, struct side *b, struct iwarpd_listener *l)
{
	struct iwarpd_connect_attr attr = {
		.remote = iwarpd_listener_address(l), .local = a->address, .private_data = "hello", .private_len = 5,
	};

	CHECK(iwarpd_connect(a->qp, &attr, &err) == 0);
	CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0);
	CHECK(b->ev.type == IWARPD_EVENT_CONNECT_REQUEST && b->ev.listener == l);
	CHECK(b->ev.data_len == 5 && memcmp(b->ev.data, "hello", 5) == 0);
	CHECK(strncmp(b->ev.remote, a->address, strlen(a->address)) == 0);
}

static struct iwarpd_listener *listen_on(struct side *s)
{
	struct iwarpd_listen_attr attr = { .address = s->address };
	struct iwarpd_listener *l;

	CHECK(iwarpd_listen(s->dev, &attr, &l, &err) == 0);
	CHECK(strncmp(iwarpd_listener_address(l), s->address, strlen(s->address)) == 0);
	return l;
}

static void join(struct side *a, struct side *b)
{
	struct iwarpd_accept_attr attr = { .private_data = "welcome", .private_len = 7, .ird = 4, .ord = -1 };
	struct iwarpd_listener *l = listen_on(b);

	make_qp(a);
	make_qp(b);
	request(a, b, l);
	CHECK(iwarpd_accept(b->dev, b->ev.conn, b->qp, &attr, &err) == 0);
	expect_event(a, IWARPD_EVENT_ESTABLISHED);
	CHECK(a->ev.data_len == 7 && memcmp(a->ev.data, "welcome", 7) == 0);
	CHECK(a->ev.negotiated.revision == 2 && a->ev.negotiated.crc && a->ev.negotiated.ord == 4);
	CHECK(a->ev.peer_ird == 4 && a->ev.peer_ord == 0);
	expect_event(b, IWARPD_EVENT_ESTABLISHED);
	CHECK(b->ev.negotiated.ird == 4 && b->ev.negotiated.ord == 0);
	CHECK(b->ev.peer_ird == 16 && b->ev.peer_ord == 16);
	CHECK(iwarpd_unlisten(l, &err) == 0);
}

static struct iwarpd_wc wait_one(struct iwarpd_cq *cq)
{
	struct iwarpd_wc wc;

	CHECK(iwarpd_wait_cq(cq, &wc, 1, WAIT) == 1);
	return wc;
}

/* run posts a work request with one SGE and checks the status of its completion. */
static void run(struct side *s, struct iwarpd_send_wr wr, uint64_t offset, uint32_t len, uint32_t status)
{
	struct iwarpd_sge sge = { s->mr->base + offset, len, s->mr->lkey };
	struct iwarpd_wc wc;

	wr.id = 4711;
	wr.flags |= IWARPD_SIGNALED;
	if (len > 0) {
		wr.sge = &sge;
		wr.num_sge = 1;
	}
	CHECK(iwarpd_post_send(s->qp, &wr) == 0);
	wc = wait_one(s->scq);
	if (wc.status != status)
		fprintf(stderr, "status %u: %s\n", wc.status, iwarpd_wc_status_text(wc.status));
	CHECK(wc.id == 4711 && wc.status == status && wc.qp == iwarpd_qp_num(s->qp));
}

static char *at(struct side *s, uint64_t offset)
{
	return (char *)s->mr->addr + offset;
}

static void check_tagged(struct side *a, struct side *b)
{
	struct iwarpd_send_wr wr = { .opcode = IWARPD_WR_RDMA_WRITE, .remote_addr = b->mr->base + 100, .rkey = b->mr->rkey };
	uint32_t received = iwarpd_received(b->dev);

	for (int i = 0; i < 20000; i++)
		at(a, 0)[i] = (char)(i * 7);
	run(a, wr, 0, 20000, IWARPD_WC_SUCCESS);
	wr.opcode = IWARPD_WR_RDMA_READ;
	wr.remote_addr = b->mr->base + 100;
	run(a, wr, 20001, 9999, IWARPD_WC_SUCCESS); /* follows the Write */
	CHECK(memcmp(at(b, 100), at(a, 0), 20000) == 0);
	CHECK(memcmp(at(a, 20001), at(a, 0), 9999) == 0);
	CHECK(iwarpd_received(b->dev) != received);
	iwarpd_yield(b->dev);
}

static void check_atomics(struct side *a, struct side *b)
{
	struct iwarpd_send_wr wr = {
		.opcode = IWARPD_WR_FETCH_ADD, .remote_addr = b->mr->base, .rkey = b->mr->rkey, .compare_add = 5,
	};
	uint64_t v = 37;

	memcpy(at(b, 0), &v, 8);
	run(a, wr, 8, 8, IWARPD_WC_SUCCESS);
	memcpy(&v, at(a, 8), 8);
	CHECK(v == 37);
	wr.opcode = IWARPD_WR_CMP_SWAP;
	wr.compare_add = 42;
	wr.swap = 1;
	wr.compare_mask = wr.swap_mask = UINT64_MAX;
	run(a, wr, 16, 8, IWARPD_WC_SUCCESS);
	memcpy(&v, at(a, 16), 8);
	CHECK(v == 42);
	memcpy(&v, at(b, 0), 8);
	CHECK(v == 1);
}

static void check_messages(struct side *a, struct side *b)
{
	struct iwarpd_sge pieces[2] = { { a->mr->base, 3, a->mr->lkey }, { a->mr->base + 10, 4, a->mr->lkey } };
	struct iwarpd_send_wr wrs[3] = {
		{ .opcode = IWARPD_WR_SEND, .flags = IWARPD_INLINE, .inline_data = "in line", .inline_len = 7 },
		{ .opcode = IWARPD_WR_SEND, .sge = pieces, .num_sge = 2 },
		{ .opcode = IWARPD_WR_IMM, .flags = IWARPD_SIGNALED | IWARPD_SOLICITED, .imm = 0x0102030405060708 },
	};
	struct iwarpd_wc wc;

	memcpy(at(a, 0), "abcdefghijklmn", 14);
	CHECK(iwarpd_post_sends(a->qp, wrs, 3) == 3);
	wc = wait_one(b->rcq);
	CHECK(wc.status == 0 && wc.opcode == IWARPD_WC_RECV && wc.len == 7 && wc.id == 0);
	CHECK(memcmp(at(b, SIZE / 2), "in line", 7) == 0);
	wc = wait_one(b->rcq);
	CHECK(wc.len == 7 && wc.id == 1 && memcmp(at(b, SIZE / 2 + 64), "abcklmn", 7) == 0);
	wc = wait_one(b->rcq);
	CHECK(wc.flags & IWARPD_WC_WITH_IMM && wc.flags & IWARPD_WC_SOLICITED && wc.imm == 0x0102030405060708);
	CHECK(wait_one(a->scq).opcode == IWARPD_WC_IMM);
}

/* check_window binds a window at b, writes through it from a, and invalidates it. */
static void check_window(struct side *a, struct side *b)
{
	struct iwarpd_send_wr write = { .opcode = IWARPD_WR_RDMA_WRITE }, inv = { .opcode = IWARPD_WR_SEND_WITH_INV };
	struct iwarpd_sge range = { b->mr->base + 4096, 256, b->mr->lkey };
	struct iwarpd_send_wr bind = {
		.opcode = IWARPD_WR_BIND_MW, .flags = IWARPD_SIGNALED, .sge = &range, .num_sge = 1, .access = IWARPD_REMOTE_WRITE,
	};
	struct iwarpd_mw *mw;
	struct iwarpd_wc wc;

	CHECK(iwarpd_alloc_mw(b->pd, &mw, &err) == 0);
	bind.rkey = (mw->rkey & ~UINT32_C(0xff)) | 0x5a;
	CHECK(iwarpd_post_send(b->qp, &bind) == 0);
	wc = wait_one(b->scq);
	CHECK(wc.status == 0 && wc.opcode == IWARPD_WC_BIND_MW);
	write.rkey = inv.inv_key = bind.rkey;
	write.remote_addr = b->mr->base + 4100;
	memcpy(at(a, 0), "window", 6);
	run(a, write, 0, 6, IWARPD_WC_SUCCESS);
	run(a, inv, 0, 0, IWARPD_WC_SUCCESS);
	wc = wait_one(b->rcq);
	CHECK(wc.flags & IWARPD_WC_WITH_INV && wc.inv_key == bind.rkey);
	CHECK(memcmp(at(b, 4100), "window", 6) == 0);
	CHECK(iwarpd_dealloc_mw(mw, &err) == 0);
}

/* check_reg makes a region valid by a work request, uses it, and invalidates it. */
static void check_reg(struct side *a, struct side *b)
{
	struct iwarpd_mr_attr attr = {
		.length = 8192, .access = IWARPD_LOCAL_WRITE | IWARPD_REMOTE_WRITE, .fast = true,
		.fd = memfd_create("check", MFD_CLOEXEC | MFD_ALLOW_SEALING),
	};
	struct iwarpd_sge all = { .len = 8192 };
	struct iwarpd_send_wr reg = { .opcode = IWARPD_WR_REG, .remote_addr = 0x1000, .access = attr.access };
	struct iwarpd_send_wr write = { .opcode = IWARPD_WR_RDMA_WRITE, .remote_addr = 0x1003 };
	struct iwarpd_send_wr inv = { .opcode = IWARPD_WR_LOCAL_INV };
	struct iwarpd_mr *mr;
	char got[4] = "";

	CHECK(attr.fd >= 0 && ftruncate(attr.fd, 8192) == 0);
	CHECK(iwarpd_reg_mr(b->pd, &attr, &mr, &err) == 0);
	write.rkey = inv.inv_key = reg.rkey = (mr->rkey & ~UINT32_C(0xff)) | 7;
	reg.sge = &all;
	reg.num_sge = 1;
	reg.flags = IWARPD_SIGNALED;
	CHECK(iwarpd_post_send(b->qp, &reg) == 0);
	CHECK(wait_one(b->scq).status == 0);
	memcpy(at(a, 0), "fast", 4);
	run(a, write, 0, 4, IWARPD_WC_SUCCESS);
	run(a, (struct iwarpd_send_wr){ .opcode = IWARPD_WR_SEND }, 0, 1, IWARPD_WC_SUCCESS);
	CHECK(wait_one(b->rcq).status == 0);
	CHECK(pread(attr.fd, got, 4, 3) == 4 && memcmp(got, "fast", 4) == 0);
	run(b, inv, 0, 0, IWARPD_WC_SUCCESS);
	CHECK(ftruncate(attr.fd, 1) < 0); /* sealed */
	CHECK(iwarpd_dereg_mr(mr, &err) == 0);
	close(attr.fd);
}

/*
 * check_resize makes a queue deeper while it holds completions, removes those of another queue pair, of which there are
 * none, and checks that none is lost.
 */
static void check_resize(struct side *a)
{
	struct iwarpd_send_wr wr = { .opcode = IWARPD_WR_RDMA_WRITE, .flags = IWARPD_SIGNALED };
	struct iwarpd_wc wc;

	for (int round = 0; round < 3; round++) {
		uint32_t depth = (uint32_t)64 << round;

		for (uint64_t i = 0; i < 6; i++) {
			if (i == 3)
				CHECK(iwarpd_resize_cq(a->scq, depth, &err) == 0);
			wr.id = i;
			CHECK(iwarpd_post_send(a->qp, &wr) == 0);
		}
		for (uint64_t i = 0; i < 6; i++) {
			iwarpd_clean_cq(a->scq, iwarpd_qp_num(a->qp) + 1);
			CHECK(iwarpd_poll_cq(a->scq, &wc, 0) == 0);
			wc = wait_one(a->scq);
			CHECK(wc.status == 0 && wc.id == i);
		}
	}
	for (uint64_t i = 0; i < 200; i++) { /* none is polled meanwhile */
		struct pollfd p = { .fd = iwarpd_cq_fd(a->scq), .events = POLLIN };

		iwarpd_arm_cq(a->scq, false);
		wr.id = i;
		while (iwarpd_post_send(a->qp, &wr) == -EAGAIN)
			;
		if (i % 50 != 0)
			continue;
		CHECK(poll(&p, 1, 60000) == 1 && iwarpd_resize_cq(a->scq, 512, &err) == 0);
	}
	for (uint64_t i = 0; i < 200; i++) {
		iwarpd_clean_cq(a->scq, iwarpd_qp_num(a->qp) + 1);
		CHECK(iwarpd_poll_cq(a->scq, &wc, 0) == 0);
		wc = wait_one(a->scq);
		CHECK(wc.status == 0 && wc.id == i);
	}
	CHECK(iwarpd_resize_cq(a->scq, 0, &err) == -EINVAL);
}

/* check_clean removes a completion that has come since the queue was polled. */
static void check_clean(struct side *s)
{
	struct iwarpd_send_wr wr = { .opcode = IWARPD_WR_RDMA_WRITE, .flags = IWARPD_SIGNALED, .id = 1 };
	struct iwarpd_wc wc;
	int left;

	CHECK(iwarpd_post_send(s->qp, &wr) == 0);
	usleep(20000); /* it has completed then, most of the time */
	iwarpd_clean_cq(s->scq, iwarpd_qp_num(s->qp));
	left = iwarpd_poll_cq(s->scq, &wc, 1);
	wr.id = 2;
	CHECK(iwarpd_post_send(s->qp, &wr) == 0);
	for (wc = wait_one(s->scq); wc.id != 2; wc = wait_one(s->scq))
		CHECK(++left <= 1 && wc.id == 1);
}

static void check_posting(struct side *s)
{
	struct iwarpd_sge sge[3] = { { 0, 0, 0 } };
	struct iwarpd_send_wr wr = { .opcode = IWARPD_WR_SEND, .sge = sge, .num_sge = 3 };
	struct iwarpd_recv_wr recv = { .sge = sge, .num_sge = 3 };

	CHECK(iwarpd_post_send(s->qp, &wr) == -EMSGSIZE);
	CHECK(iwarpd_post_recv(s->qp, &recv) == -EMSGSIZE);
	wr.num_sge = 1;
	wr.flags = IWARPD_INLINE;
	CHECK(iwarpd_post_send(s->qp, &wr) == -EINVAL);
	wr.num_sge = 0;
	wr.inline_len = 65;
	CHECK(iwarpd_post_send(s->qp, &wr) == -EMSGSIZE);
	wr.flags = 0;
	CHECK(iwarpd_post_send(s->qp, &wr) == -EINVAL);
}

/*
 * check_violation reads outside of a region. Both ends get a Terminate, the connection
 * ends, and nothing more can be posted, or it is flushed.
 */
static void check_violation(struct side *a, struct side *b)
{
	struct iwarpd_send_wr wr = { .opcode = IWARPD_WR_RDMA_READ, .remote_addr = b->mr->base + SIZE, .rkey = b->mr->rkey };
	struct iwarpd_wc wc;
	int got = 0, n;

	run(a, wr, 0, 8, IWARPD_WC_REM_ACCESS_ERR);
	expect_event(a, IWARPD_EVENT_TERMINATED);
	CHECK(a->ev.terminate.remote && a->ev.error.text[0]);
	expect_event(a, IWARPD_EVENT_DISCONNECTED);
	expect_event(b, IWARPD_EVENT_TERMINATED);
	CHECK(!b->ev.terminate.remote);
	expect_event(b, IWARPD_EVENT_DISCONNECTED);
	CHECK(iwarpd_post_send(a->qp, &wr) == -ENOTCONN);
	CHECK(iwarpd_post_send(b->qp, &wr) == 0 && wait_one(b->scq).status == IWARPD_WC_WR_FLUSH_ERR);
	while (got < RECVS && (n = iwarpd_wait_cq(a->rcq, &wc, 1, WAIT)) == 1) {
		CHECK(wc.status == IWARPD_WC_WR_FLUSH_ERR);
		got++;
	}
	CHECK(got == RECVS);
	CHECK(iwarpd_poll_cq(a->rcq, &wc, 1) == 0 && iwarpd_wait_cq(a->rcq, &wc, 1, 1) == -ETIMEDOUT);
}

/* check_interfaces selects an interface by name; from then on a connects over it. */
static void check_interfaces(struct side *a)
{
	const struct iwarpd_device_attr *attr = iwarpd_query_interface(a->dev, 0);

	CHECK(attr == iwarpd_query_device(a->dev) && iwarpd_query_interface(a->dev, 1) == NULL);
	CHECK(iwarpd_use(a->dev, "no such", &err) == -ENODEV && strstr(err.text, "no such"));
	CHECK(iwarpd_use(a->dev, NULL, &err) == 0);
	CHECK(iwarpd_use(a->dev, attr->interface, &err) == 0 && iwarpd_query_device(a->dev) == attr);
}

static void verbs(struct side *a, struct side *b)
{
	const struct iwarpd_device_attr *attr = iwarpd_query_device(a->dev);

	CHECK(attr->workers >= 1 && attr->max_sge >= 2 && strncmp(attr->server, "iwarpd", 6) == 0 && attr->addresses[0]);
	check_interfaces(a);
	join(a, b);
	check_tagged(a, b);
	check_atomics(a, b);
	check_messages(a, b);
	check_window(a, b);
	check_reg(a, b);
	check_resize(a);
	check_clean(a);
	check_posting(a);
	check_violation(a, b);
	CHECK(iwarpd_cq_overruns(a->scq) == 0);
	drop(a);
	drop(b);
}

static void check_refusals(struct side *a, struct side *b)
{
	struct iwarpd_connect_attr attr = { .remote = "nonsense" };
	struct pollfd event = { .fd = iwarpd_event_fd(a->dev), .events = POLLIN };
	struct iwarpd_connect_attr large = { .remote = "nonsense", .private_data = calloc(1, 65536), .private_len = 65536 };
	struct iwarpd_listener *l = listen_on(b);
	char remote[80];

	make_qp(a);
	CHECK(iwarpd_connect(a->qp, &attr, &err) == -EINVAL && err.code == IWARPD_CODE_INVALID);
	CHECK(iwarpd_connect(a->qp, &large, &err) == -EMSGSIZE);
	free((void *)large.private_data);
	request(a, b, l);
	CHECK(iwarpd_reject(b->dev, b->ev.conn, "no", 2, &err) == 0);
	expect_event(a, IWARPD_EVENT_REJECTED);
	CHECK(a->ev.data_len == 2 && memcmp(a->ev.data, "no", 2) == 0);
	CHECK(a->ev.peer_ird == 16 && a->ev.peer_ord == 16);
	CHECK(iwarpd_accept(b->dev, b->ev.conn, a->qp, NULL, &err) == -ENOENT);
	CHECK(iwarpd_connect(a->qp, &(struct iwarpd_connect_attr){ .remote = iwarpd_listener_address(l) }, &err) == -EBADFD);
	CHECK(iwarpd_unlisten(l, &err) == 0);
	drop(a);

	make_qp(a);
	snprintf(remote, sizeof(remote), strchr(b->address, ':') ? "[%s]:9" : "%s:9", b->address);
	attr.remote = remote;
	CHECK(iwarpd_connect(a->qp, &attr, &err) == 0);
	expect_event(a, IWARPD_EVENT_CONNECT_FAILED);
	CHECK(a->ev.error.err == -ECONNREFUSED);
	drop(a);

	/* An event of a QP that is destroyed before it is read does not stay queued. */
	make_qp(a);
	CHECK(iwarpd_connect(a->qp, &attr, &err) == 0);
	poll(&event, 1, WAIT);
	CHECK(event.revents == POLLIN);
	drop(a);
	poll(&event, 1, 0);
	CHECK(event.revents == 0);
}

/*
 * check_files checks that a reply whose descriptors do not fit in the process gives an
 * error, and that nothing else is lost.
 */
static void check_files(struct side *a)
{
	struct rlimit was, few;
	int used[101], n = 0, last;

	make_qp(a);
	CHECK(getrlimit(RLIMIT_NOFILE, &was) == 0);
	do { /* until no lower descriptor is free */
		last = fcntl(0, F_DUPFD_CLOEXEC, 0);
		CHECK(last >= 0);
		used[n++] = last;
	} while (last < 100);
	few = was;
	few.rlim_cur = (rlim_t)(last + 1);
	CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
	CHECK(iwarpd_resize_cq(a->scq, 1000, &err) == -EMFILE && iwarpd_modify_cq(a->scq, 0, 0, &err) == 0);
	few.rlim_cur = (rlim_t)(last + 2); /* too few for a channel, although the descriptors from the daemon fit */
	CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
	for (int i = 0; i < 4200; i++) { /* more channels than the quota allows */
		struct iwarpd_channel *channel;

		CHECK(iwarpd_create_channel(a->dev, &channel, &err) == -EMFILE);
	}
	CHECK(setrlimit(RLIMIT_NOFILE, &was) == 0);
	for (int left = 0; left < 4; left++) {
		struct iwarpd_qp_attr attr = { .send_cq = a->scq, .recv_cq = a->rcq };
		int want = left < 2 ? -EMFILE : 0; /* each brings two */
		struct iwarpd_cq *cq;
		struct iwarpd_qp *qp;

		few = was;
		few.rlim_cur = (rlim_t)(last + 1 + left);
		CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
		CHECK(iwarpd_create_cq(a->dev, 8, &cq, &err) == want);
		CHECK(want == 0 || strstr(err.text, "too many open files"));
		CHECK(want != 0 || iwarpd_destroy_cq(cq, &err) == 0);
		CHECK(iwarpd_create_qp(a->pd, &attr, &qp, &err) == want);
		CHECK(want != 0 || iwarpd_destroy_qp(qp, &err) == 0);
		CHECK(setrlimit(RLIMIT_NOFILE, &was) == 0);
	}
	while (n > 0)
		close(used[--n]);
	drop(a); /* nothing is left in the domain, or on the queues */
}

/* memory_mapped returns the size of this process's address space, in bytes. */
static rlim_t memory_mapped(void)
{
	unsigned long pages;
	FILE *f = fopen("/proc/self/statm", "r");

	CHECK(f && fscanf(f, "%lu", &pages) == 1);
	fclose(f);
	return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

/* check_resize_refused checks that a queue stays as it is if there is no room for new rings. */
static void check_resize_refused(struct side *a)
{
	struct rlimit was, few;
	struct iwarpd_cq *cq;

	CHECK(iwarpd_create_cq(a->dev, 8, &cq, &err) == 0);
	CHECK(getrlimit(RLIMIT_AS, &was) == 0);
	few = was;
	few.rlim_cur = memory_mapped() + (1 << 19);
	CHECK(setrlimit(RLIMIT_AS, &few) == 0);
	CHECK(iwarpd_resize_cq(cq, 1 << 14, &err) == -ENOMEM); /* 1 MiB */
	CHECK(setrlimit(RLIMIT_AS, &was) == 0);
	CHECK(iwarpd_resize_cq(cq, 1 << 14, &err) == 0 && iwarpd_destroy_cq(cq, &err) == 0);
}

/* expect_byte receives a message of one byte, and posts its receive again. */
static void expect_byte(struct side *s)
{
	struct iwarpd_wc wc = wait_one(s->rcq);
	struct iwarpd_sge sge = { s->mr->base + SIZE / 2, 64, s->mr->lkey };
	struct iwarpd_recv_wr wr = { .sge = &sge, .num_sge = 1 };

	CHECK(wc.status == 0 && wc.opcode == IWARPD_WC_RECV && wc.len == 1);
	CHECK(iwarpd_post_recv(s->qp, &wr) == 0);
}

/* check_early posts a send before the connection is established. */
static void check_early(struct side *a, struct side *b)
{
	struct iwarpd_send_wr wr = { .opcode = IWARPD_WR_SEND, .flags = IWARPD_INLINE, .inline_data = "x", .inline_len = 1 };
	struct iwarpd_startup rev1 = { .revision = 1, .crc = -1 };
	struct iwarpd_listen_attr attr = { .address = b->address, .startup = &rev1 };
	struct pollfd fd = { .events = POLLIN };
	struct iwarpd_listener *l;
	int posted = 0, e;

	CHECK(iwarpd_listen(b->dev, &attr, &l, &err) == 0);
	make_qp(a);
	make_qp(b);
	while ((e = iwarpd_post_send(a->qp, &wr)) == 0)
		posted++;
	CHECK(e == -EAGAIN && posted >= 8);
	request(a, b, l);
	CHECK(iwarpd_accept(b->dev, b->ev.conn, b->qp, NULL, &err) == 0);
	fd.fd = iwarpd_event_fd(a->dev);
	CHECK(poll(&fd, 1, WAIT) == 1);
	expect_event(a, IWARPD_EVENT_ESTABLISHED);
	CHECK(poll(&fd, 1, 0) == 0);
	for (int i = 0; i < posted; i++)
		expect_byte(b);
	CHECK(iwarpd_set_dscp(b->qp, 63, &err) == 0);
	CHECK(iwarpd_set_dscp(b->qp, 64, &err) == -EINVAL && strstr(err.text, "a DSCP is 0 to 63"));
	CHECK(iwarpd_disconnect(b->qp, false, &err) == 0);
	expect_event(a, IWARPD_EVENT_DISCONNECTED);
	CHECK(a->ev.error.err == 0);
	CHECK(iwarpd_set_dscp(a->qp, 0, &err) == -EBADFD);
	CHECK(iwarpd_unlisten(l, &err) == 0);
	drop(a);
}

static void write_stream(struct side *s, uint32_t conn, const char *text, size_t n)
{
	while (n > 0) {
		int m = iwarpd_stream_write(s->dev, conn, text, n, &err);

		CHECK(m > 0 || m == -EBUSY);
		if (m > 0) {
			text += m;
			n -= (size_t)m;
		}
	}
}

static void read_stream(struct side *s, uint32_t conn, char *buf, size_t n)
{
	while (n > 0) {
		int m = iwarpd_stream_read(s->dev, conn, buf, n < 7000 ? n : 7000, WAIT, &err);

		CHECK(m > 0);
		buf += m;
		n -= (size_t)m;
	}
}

/* open_stream returns the stream's conn at a; at b it is b->ev.conn. */
static uint32_t open_stream(struct side *a, struct side *b, struct iwarpd_listener *l)
{
	struct iwarpd_connect_attr attr = { .remote = iwarpd_listener_address(l), .streaming = true };

	make_qp(a);
	make_qp(b);
	CHECK(iwarpd_connect(a->qp, &attr, &err) == 0);
	expect_event(a, IWARPD_EVENT_STREAM_READY);
	CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0);
	CHECK(b->ev.type == IWARPD_EVENT_STREAM_READY && b->ev.listener == l && !b->ev.qp);
	CHECK(strcmp(b->ev.remote, a->ev.local) == 0 && strcmp(b->ev.local, a->ev.remote) == 0);
	return a->ev.conn;
}

/*
 * check_roles makes the side that accepted TCP the initiator of MPA, then both sides, and
 * then rejects a request.
 */
static void check_roles(struct side *a, struct side *b, struct iwarpd_listener *l)
{
	struct iwarpd_mpa_attr responder = { .role = IWARPD_MPA_RESPONDER };
	struct iwarpd_mpa_attr initiator = { .role = IWARPD_MPA_INITIATOR, .private_data = "hello", .private_len = 5 };
	uint32_t ca = open_stream(a, b, l), cb = b->ev.conn;
	struct iwarpd_listen_attr other = { .address = b->address };
	struct iwarpd_listener *l2;

	CHECK(iwarpd_start_mpa_as(b->dev, cb, &initiator, &err) == -ENOENT); /* no QP */
	initiator.qp = b->qp;
	CHECK(iwarpd_start_mpa_as(a->dev, ca, &responder, &err) == 0);
	CHECK(iwarpd_start_mpa_as(b->dev, cb, &initiator, &err) == 0);
	CHECK(iwarpd_listen(a->dev, &other, &l2, &err) < 0); /* a failed listen must not hold back requests */
	expect_event(a, IWARPD_EVENT_CONNECT_REQUEST);
	CHECK(a->ev.conn == ca && !a->ev.listener && a->ev.data_len == 5 && memcmp(a->ev.data, "hello", 5) == 0);
	CHECK(iwarpd_accept(a->dev, ca, NULL, NULL, &err) == 0);
	expect_event(a, IWARPD_EVENT_ESTABLISHED);
	expect_event(b, IWARPD_EVENT_ESTABLISHED);
	run(b, (struct iwarpd_send_wr){ .opcode = IWARPD_WR_SEND }, 0, 1, 0);
	expect_byte(a);
	run(a, (struct iwarpd_send_wr){ .opcode = IWARPD_WR_SEND }, 0, 1, 0);
	expect_byte(b);
	drop(a);
	drop(b);

	ca = open_stream(a, b, l);
	cb = b->ev.conn;
	initiator.qp = NULL; /* the QP of the connect */
	CHECK(iwarpd_start_mpa_as(a->dev, ca, &initiator, &err) == 0);
	initiator.qp = b->qp;
	CHECK(iwarpd_start_mpa_as(b->dev, cb, &initiator, &err) == 0);
	expect_event(a, IWARPD_EVENT_CONNECT_FAILED);
	CHECK(a->ev.error.err == -EPROTO && strstr(a->ev.error.text, "both sides started as initiator"));
	expect_event(b, IWARPD_EVENT_CONNECT_FAILED);
	CHECK(b->ev.error.err == -EPROTO && strstr(b->ev.error.text, "both sides started as initiator"));
	drop(a);
	drop(b);

	ca = open_stream(a, b, l);
	cb = b->ev.conn;
	initiator.qp = b->qp;
	CHECK(iwarpd_start_mpa_as(a->dev, ca, &responder, &err) == 0);
	CHECK(iwarpd_start_mpa_as(b->dev, cb, &initiator, &err) == 0);
	expect_event(a, IWARPD_EVENT_CONNECT_REQUEST);
	CHECK(iwarpd_reject(a->dev, ca, "no", 2, &err) == 0);
	expect_event(a, IWARPD_EVENT_CONNECT_FAILED);
	CHECK(a->ev.error.err == -ECANCELED);
	expect_event(b, IWARPD_EVENT_REJECTED);
	CHECK(b->ev.data_len == 2 && memcmp(b->ev.data, "no", 2) == 0);
	drop(a);
	drop(b);
}

/* A reader reads from a stream in a thread of its own. */
struct reader {
	struct side *s;
	uint32_t conn;
	atomic_int tid;
};

static void *read_to_end(void *arg)
{
	struct reader *r = arg;
	char byte;

	atomic_store(&r->tid, (int)syscall(SYS_gettid));
	CHECK(iwarpd_stream_read(r->s->dev, r->conn, &byte, 1, -1, NULL) == -ECONNRESET);
	return NULL;
}

/* await_call waits until a thread of this process is in a system call. */
static void await_call(int tid, long want)
{
	char path[64];
	long call = -1;

	snprintf(path, sizeof(path), "/proc/self/task/%d/syscall", tid);
	while (call != want) {
		FILE *f = fopen(path, "r");

		CHECK(f);
		if (fscanf(f, "%ld", &call) != 1)
			call = -1; /* it runs */
		fclose(f);
		usleep(1000);
	}
}

static void check_ended_read(struct side *s, uint32_t conn)
{
	struct reader r = { .s = s, .conn = conn };
	pthread_t t;

	CHECK(pthread_create(&t, NULL, read_to_end, &r) == 0);
	while (atomic_load(&r.tid) == 0)
		usleep(1000);
	await_call(atomic_load(&r.tid), SYS_ppoll);
	drop(s);
	CHECK(pthread_join(t, NULL) == 0);
}

/*
 * streams sends bytes both ways, starts MPA on the same connection, and sends a message.
 * Then it ends streams without MPA.
 */
static void streams(struct side *a, struct side *b)
{
	enum { MANY = 200000 };
	static char out[MANY], in[MANY];
	struct iwarpd_listen_attr attr = { .address = b->address, .streaming = true };
	struct iwarpd_listener *l;
	uint32_t ca, cb;

	for (int i = 0; i < MANY; i++)
		out[i] = (char)(i * 7 + i / 1000);
	CHECK(iwarpd_listen(b->dev, &attr, &l, &err) == 0);
	ca = open_stream(a, b, l);
	cb = b->ev.conn;
	CHECK(iwarpd_stream_read(a->dev, ca, in, sizeof(in), 0, &err) == -ETIMEDOUT);
	write_stream(a, ca, "HELLO", 5);
	CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0);
	CHECK(b->ev.type == IWARPD_EVENT_STREAM_DATA && b->ev.conn == cb);
	CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0); /* the event repeats until the data is read */
	CHECK(b->ev.type == IWARPD_EVENT_STREAM_DATA && b->ev.conn == cb);
	read_stream(b, cb, in, 2);
	read_stream(b, cb, in + 2, 3);
	CHECK(memcmp(in, "HELLO", 5) == 0);
	CHECK(iwarpd_get_event(b->dev, &b->ev, 0, &err) == -ETIMEDOUT);
	write_stream(b, cb, out, MANY);
	read_stream(a, ca, in, MANY);
	CHECK(memcmp(in, out, MANY) == 0);

	CHECK(iwarpd_start_mpa(b->dev, cb, NULL, 0, &err) == 0);
	CHECK(iwarpd_start_mpa(a->dev, ca, "hello", 5, &err) == 0);
	CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0);
	CHECK(b->ev.type == IWARPD_EVENT_CONNECT_REQUEST && b->ev.conn == cb);
	CHECK(b->ev.data_len == 5 && memcmp(b->ev.data, "hello", 5) == 0);
	CHECK(iwarpd_accept(b->dev, cb, b->qp, NULL, &err) == 0);
	expect_event(a, IWARPD_EVENT_ESTABLISHED);
	expect_event(b, IWARPD_EVENT_ESTABLISHED);
	run(a, (struct iwarpd_send_wr){ .opcode = IWARPD_WR_SEND }, 0, 1, 0);
	expect_byte(b);
	CHECK(iwarpd_disconnect(a->qp, false, &err) == 0);
	expect_event(a, IWARPD_EVENT_DISCONNECTED);
	expect_event(b, IWARPD_EVENT_DISCONNECTED);
	drop(a);
	drop(b);

	check_roles(a, b, l);
	ca = open_stream(a, b, l);
	cb = b->ev.conn;
	write_stream(a, ca, "bye", 3);
	CHECK(iwarpd_stream_close(a->dev, ca, false, &err) == 0);
	read_stream(b, cb, in, 3);
	CHECK(iwarpd_stream_read(b->dev, cb, in, 1, WAIT, &err) == 0);
	CHECK(iwarpd_stream_close(b->dev, cb, false, &err) == 0);
	CHECK(iwarpd_stream_write(b->dev, cb, "x", 1, &err) == -ENOENT);
	drop(a);
	drop(b);

	ca = open_stream(a, b, l);
	cb = b->ev.conn;
	CHECK(iwarpd_stream_close(b->dev, cb, true, &err) == 0);
	CHECK(iwarpd_stream_read(a->dev, ca, in, 1, WAIT, &err) == -ECONNRESET);
	expect_event(a, IWARPD_EVENT_CONNECT_FAILED);
	CHECK(iwarpd_stream_read(a->dev, ca, in, 1, WAIT, &err) == -ECONNRESET); /* already reported: no wait */
	drop(a);
	drop(b);

	/* Unread data does not hide other events, and a stream outlives its listener. */
	ca = open_stream(a, b, l);
	cb = b->ev.conn;
	write_stream(a, ca, "abc", 3);
	CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0);
	CHECK(b->ev.type == IWARPD_EVENT_STREAM_DATA);
	CHECK(iwarpd_stream_close(a->dev, ca, true, &err) == 0);
	do {
		CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0);
	} while (b->ev.type == IWARPD_EVENT_STREAM_DATA);
	CHECK(b->ev.type == IWARPD_EVENT_CONNECT_GONE && b->ev.conn == cb);
	read_stream(b, cb, in, 3);
	drop(a);
	drop(b);

	/* Destroying the QP ends a read of its stream. */
	ca = open_stream(a, b, l);
	check_ended_read(a, ca);
	CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0 && b->ev.type == IWARPD_EVENT_CONNECT_GONE);
	drop(b);

	/* Data of a stream whose QP is destroyed is not reported any more. */
	ca = open_stream(a, b, l);
	cb = b->ev.conn;
	write_stream(b, cb, "HELLO", 5);
	CHECK(iwarpd_get_event(a->dev, &a->ev, WAIT, &err) == 0);
	CHECK(a->ev.type == IWARPD_EVENT_STREAM_DATA && a->ev.conn == ca);
	drop(a);
	CHECK(iwarpd_get_event(a->dev, &a->ev, 0, &err) == -ETIMEDOUT);
	CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0);
	CHECK(b->ev.type == IWARPD_EVENT_CONNECT_GONE && b->ev.conn == cb);
	drop(b);

	ca = open_stream(a, b, l);
	cb = b->ev.conn;
	CHECK(iwarpd_unlisten(l, &err) == 0);
	CHECK(iwarpd_start_mpa(b->dev, cb, NULL, 0, &err) == 0);
	CHECK(iwarpd_start_mpa(a->dev, ca, NULL, 0, &err) == 0);
	CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0);
	CHECK(b->ev.type == IWARPD_EVENT_CONNECT_REQUEST && b->ev.conn == cb && !b->ev.listener);
	CHECK(iwarpd_accept(b->dev, cb, b->qp, NULL, &err) == 0);
	expect_event(a, IWARPD_EVENT_ESTABLISHED);
	expect_event(b, IWARPD_EVENT_ESTABLISHED);
	drop(a);
	drop(b);
}

/* transports repeats these checks over each of the other transports. */
static void transports(struct side *a, struct side *b)
{
	static const struct iwarpd_startup how[] = {
		{ .transport = IWARPD_TRANSPORT_SCTP },
		{ .transport = IWARPD_TRANSPORT_SCTP, .udp_encapsulation = 1 },
		{ .transport = IWARPD_TRANSPORT_SCTP_DRAFT },
		{ .transport = IWARPD_TRANSPORT_SCTP, .shared_association = 1 },
		{ .transport = IWARPD_TRANSPORT_SOCKET },
	};

	for (size_t i = 0; i < sizeof(how) / sizeof(how[0]); i++) {
		struct iwarpd_listen_attr la = { .address = b->address, .startup = &how[i] };
		struct iwarpd_connect_attr ca = { .startup = &how[i] };
		struct iwarpd_listener *l;

		CHECK(iwarpd_listen(b->dev, &la, &l, &err) == 0);
		ca.remote = iwarpd_listener_address(l);
		make_qp(a);
		make_qp(b);
		CHECK(iwarpd_connect(a->qp, &ca, &err) == 0);
		CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0);
		CHECK(b->ev.type == IWARPD_EVENT_CONNECT_REQUEST);
		CHECK(iwarpd_accept(b->dev, b->ev.conn, b->qp, NULL, &err) == 0);
		expect_event(a, IWARPD_EVENT_ESTABLISHED);
		expect_event(b, IWARPD_EVENT_ESTABLISHED);
		run(a, (struct iwarpd_send_wr){ .opcode = IWARPD_WR_SEND }, 0, 1, 0);
		expect_byte(b);
		CHECK(iwarpd_disconnect(a->qp, false, &err) == 0);
		expect_event(a, IWARPD_EVENT_DISCONNECTED);
		expect_event(b, IWARPD_EVENT_DISCONNECTED);
		drop(a);
		drop(b);
		CHECK(iwarpd_unlisten(l, &err) == 0);
	}
}

/*
 * shared checks that a QP takes its receives from an SRQ, that the SRQ's limit is
 * reported once, and that a CQ is moderated.
 */
static void shared(struct side *a, struct side *b)
{
	struct iwarpd_srq_attr srq_attr = { .depth = 8, .max_sge = 1, .limit = 7, .context = b };
	struct iwarpd_qp_attr attr = { 0 };
	struct iwarpd_listener *l = listen_on(b);
	struct iwarpd_sge sge;
	struct iwarpd_recv_wr wr = { .sge = &sge, .num_sge = 1 };
	struct iwarpd_srq *srq;
	struct iwarpd_qp *own;
	struct iwarpd_wc wc;

	make_qp(a);
	make_qp(b);
	own = b->qp;
	attr = (struct iwarpd_qp_attr){ .send_cq = b->scq, .recv_cq = b->rcq, .send_depth = UINT32_MAX };
	CHECK(iwarpd_create_qp(b->pd, &attr, &b->qp, &err) == -EINVAL);
	CHECK(iwarpd_create_srq(b->pd, &(struct iwarpd_srq_attr){ .depth = UINT32_MAX }, &srq, &err) == -EINVAL);
	CHECK(iwarpd_create_srq(b->pd, &srq_attr, &srq, &err) == 0 && iwarpd_srq_context(srq) == b);
	attr = (struct iwarpd_qp_attr){ .send_cq = b->scq, .recv_cq = b->rcq, .srq = srq };
	CHECK(iwarpd_create_qp(b->pd, &attr, &b->qp, &err) == 0);
	sge = (struct iwarpd_sge){ b->mr->base, 64, b->mr->lkey };
	CHECK(iwarpd_post_recv(b->qp, &wr) == -EINVAL);
	for (int i = 0; i < 8; i++)
		CHECK(iwarpd_post_srq_recv(srq, &wr) == 0);
	CHECK(iwarpd_modify_cq(b->rcq, 2, 1000, &err) == 0);
	CHECK(iwarpd_destroy_srq(srq, &err) == -EBUSY);
	request(a, b, l);
	CHECK(iwarpd_accept(b->dev, b->ev.conn, b->qp, NULL, &err) == 0);
	expect_event(a, IWARPD_EVENT_ESTABLISHED);
	expect_event(b, IWARPD_EVENT_ESTABLISHED);
	for (int i = 0; i < 3; i++)
		run(a, (struct iwarpd_send_wr){ .opcode = IWARPD_WR_SEND }, 0, 5, IWARPD_WC_SUCCESS);
	for (int i = 0; i < 3; i++) {
		wc = wait_one(b->rcq);
		CHECK(wc.status == 0 && wc.len == 5 && wc.qp == iwarpd_qp_num(b->qp));
		CHECK(iwarpd_post_srq_recv(srq, &wr) == 0);
	}
	CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0);
	CHECK(b->ev.type == IWARPD_EVENT_ASYNC_ERROR && b->ev.async == IWARPD_ASYNC_SRQ_LIMIT && b->ev.srq == srq);
	CHECK(iwarpd_modify_srq(srq, 0, &err) == 0);
	CHECK(iwarpd_destroy_qp(own, &err) == 0);
	CHECK(iwarpd_unlisten(l, &err) == 0);
	CHECK(iwarpd_destroy_qp(b->qp, &err) == 0);
	CHECK(iwarpd_destroy_srq(srq, &err) == 0);
}

/* told checks that the channel returns cq, and that cq has n completions. */
static void told(struct side *s, struct iwarpd_cq *cq, int n)
{
	struct iwarpd_cq *got;
	struct iwarpd_wc wc[4];

	CHECK(iwarpd_get_cq_event(s->channel, &got, WAIT) == 0);
	CHECK(got == cq && *(struct iwarpd_cq **)iwarpd_cq_context(got) == cq);
	CHECK(iwarpd_poll_cq(cq, wc, 4) == n);
}

static bool readable(struct iwarpd_channel *ch)
{
	struct pollfd fd = { .fd = iwarpd_channel_fd(ch), .events = POLLIN };

	return poll(&fd, 1, 0) == 1;
}

/* until_told waits until the channel's descriptor is readable, without reading it. */
static void until_told(struct iwarpd_channel *ch)
{
	struct pollfd fd = { .fd = iwarpd_channel_fd(ch), .events = POLLIN };

	CHECK(poll(&fd, 1, WAIT) == 1);
}

/* sleeper waits for a queue of a channel. */
static void *sleeper(void *arg)
{
	struct side *s = arg;
	struct iwarpd_cq *cq;

	CHECK(iwarpd_get_cq_event(s->channel, &cq, WAIT) == 0);
	return cq;
}

/* full_channel checks that wake-ups are not lost when the pipe is full. */
static void full_channel(struct side *a, struct side *b)
{
	enum { PIPE = 4096 };
	struct iwarpd_send_wr none = { .opcode = IWARPD_WR_RDMA_WRITE, .flags = IWARPD_SIGNALED };
	struct iwarpd_cq *got, *quiet;
	struct iwarpd_wc wc;

	CHECK(iwarpd_create_cq_on(b->channel, 8, NULL, &quiet, &err) == 0);
	iwarpd_arm_cq(quiet, false);
	CHECK(iwarpd_disarm_cq(quiet));
	for (int fd = 3; fd < 256; fd++) /* one of them is the channel's pipe */
		fcntl(fd, F_SETPIPE_SZ, PIPE);
	for (int i = 0; i < PIPE / 8 + 10; i++) {
		iwarpd_arm_cq(b->scq, false);
		CHECK(iwarpd_post_send(b->qp, &none) == 0);
		while (iwarpd_poll_cq(b->scq, &wc, 1) == 0)
			sched_yield();
	}
	iwarpd_arm_cq(b->rcq, false);
	run(a, (struct iwarpd_send_wr){ .opcode = IWARPD_WR_SEND }, 0, 1, 0);
	CHECK(iwarpd_post_send(b->qp, &none) == 0); /* the worker publishes it after it has decided to wake for rcq */
	while (iwarpd_poll_cq(b->scq, &wc, 1) == 0)
		sched_yield();
	CHECK(!iwarpd_disarm_cq(b->rcq)); /* so it wakes */
	CHECK(iwarpd_resize_cq(b->rcq, 64, &err) == 0);
	do {
		CHECK(iwarpd_get_cq_event(b->channel, &got, WAIT) == 0 && got != quiet);
	} while (got != b->rcq);
	expect_byte(b);
	while (iwarpd_get_cq_event(b->channel, &got, 0) == 0)
		CHECK(got != quiet);
	CHECK(iwarpd_destroy_cq(quiet, &err) == 0);
}

/* check_forgotten destroys a queue that has woken its channel. */
static void check_forgotten(struct side *s)
{
	struct iwarpd_channel *ch;
	struct iwarpd_cq *cq[2], *got;

	CHECK(iwarpd_create_channel(s->dev, &ch, &err) == 0);
	for (int i = 0; i < 2; i++)
		CHECK(iwarpd_create_cq_on(ch, 8, NULL, &cq[i], &err) == 0);
	iwarpd_wake_cq(cq[0]);
	CHECK(readable(ch) && iwarpd_destroy_cq(cq[0], &err) == 0 && !readable(ch));
	iwarpd_wake_cq(cq[1]);
	CHECK(iwarpd_get_cq_event(ch, &got, 0) == 0 && got == cq[1] && !readable(ch));
	CHECK(iwarpd_destroy_cq(cq[1], &err) == 0 && iwarpd_destroy_channel(ch, &err) == 0);
}

/* channels checks one channel of two queues of b. */
static void channels(struct side *a, struct side *b)
{
	struct iwarpd_send_wr send = { .opcode = IWARPD_WR_SEND }, none = { .opcode = IWARPD_WR_RDMA_WRITE, .flags = IWARPD_SIGNALED };
	struct iwarpd_cq *got, *one, *two;
	struct iwarpd_wc wc;
	pthread_t t;

	CHECK(iwarpd_create_channel(b->dev, &b->channel, &err) == 0);
	join(a, b);
	CHECK(iwarpd_destroy_channel(b->channel, &err) == -EBUSY);
	CHECK(iwarpd_cq_fd(b->scq) == iwarpd_channel_fd(b->channel));
	CHECK(iwarpd_wait_cq(b->scq, &wc, 1, WAIT) == -EINVAL);

	/* Queues that are not armed do not wake, nor do completions from before the arming. */
	run(a, send, 0, 1, 0);
	while (iwarpd_poll_cq(b->rcq, &wc, 1) == 0)
		sched_yield();
	/*
	 * The worker publishes a completion and then decides whether to wake. When it
	 * publishes another one, it has decided.
	 */
	CHECK(iwarpd_post_send(b->qp, &none) == 0);
	while (iwarpd_poll_cq(b->scq, &wc, 1) == 0)
		sched_yield();
	CHECK(iwarpd_get_cq_event(b->channel, &got, 0) == -ETIMEDOUT && !readable(b->channel));
	iwarpd_arm_cq(b->rcq, false);
	CHECK(iwarpd_get_cq_event(b->channel, &got, 20) == -ETIMEDOUT);
	run(a, send, 0, 1, 0);
	told(b, b->rcq, 1);
	CHECK(!readable(b->channel));

	/*
	 * Both queues wake it. It is readable until both are taken, in the order of their
	 * wake-ups.
	 */
	iwarpd_arm_cq(b->rcq, false);
	iwarpd_arm_cq(b->scq, false);
	run(a, send, 0, 1, 0);
	until_told(b->channel);
	CHECK(iwarpd_post_send(b->qp, &none) == 0);
	told(b, b->rcq, 1);
	until_told(b->channel);
	told(b, b->scq, 1);
	CHECK(!readable(b->channel));

	/* The solicited alone. */
	iwarpd_arm_cq(b->rcq, true);
	run(a, send, 0, 1, 0);
	while (iwarpd_poll_cq(b->rcq, &wc, 1) == 0)
		sched_yield();
	CHECK(!readable(b->channel));
	send.flags = IWARPD_SOLICITED;
	run(a, send, 0, 1, 0);
	told(b, b->rcq, 1);
	send.flags = 0;
	iwarpd_arm_cq(b->rcq, false);
	iwarpd_arm_cq(b->rcq, true); /* for the solicited too, which changes nothing */
	run(a, send, 0, 1, 0);
	told(b, b->rcq, 1);

	/* Two threads wait: each gets another queue. */
	iwarpd_arm_cq(b->rcq, false);
	iwarpd_arm_cq(b->scq, false);
	CHECK(pthread_create(&t, NULL, sleeper, b) == 0);
	CHECK(iwarpd_post_send(b->qp, &none) == 0);
	run(a, send, 0, 1, 0);
	one = sleeper(b);
	CHECK(pthread_join(t, (void **)&two) == 0);
	CHECK(one != two && (one == b->scq || two == b->scq) && (one == b->rcq || two == b->rcq));
	expect_byte(b);
	CHECK(iwarpd_poll_cq(b->scq, &wc, 1) == 1);

	/* After a resize the queue must be armed again, and then wakes. */
	iwarpd_arm_cq(b->rcq, false);
	CHECK(iwarpd_resize_cq(b->rcq, 128, &err) == 0);
	iwarpd_arm_cq(b->rcq, false);
	run(a, send, 0, 1, 0);
	told(b, b->rcq, 1);
	full_channel(a, b);
	check_forgotten(b);

	/* A destroyed queue is not returned, even if it has woken the channel. */
	iwarpd_arm_cq(b->rcq, false);
	iwarpd_arm_cq(b->scq, false);
	run(a, send, 0, 1, 0);
	CHECK(iwarpd_post_send(b->qp, &none) == 0);
	CHECK(iwarpd_get_cq_event(b->channel, &got, WAIT) == 0);
	until_told(b->channel);
	drop(b);
	CHECK(iwarpd_get_cq_event(b->channel, &got, 0) == -ETIMEDOUT && !readable(b->channel));
	CHECK(iwarpd_destroy_channel(b->channel, &err) == 0);
	b->channel = NULL;
	drop(a);
}

static void *accept_all(void *arg)
{
	struct side *b = arg;

	for (int i = 0; i < 2; i++) {
		CHECK(iwarpd_get_event(b->dev, &b->ev, WAIT, &err) == 0);
		if (b->ev.type == IWARPD_EVENT_CONNECT_REQUEST)
			CHECK(iwarpd_accept(b->dev, b->ev.conn, b->qp, NULL, &err) == 0);
	}
	CHECK(b->ev.type == IWARPD_EVENT_ESTABLISHED);
	return NULL;
}

static void *churn(void *arg)
{
	struct side *s = arg;
	struct iwarpd_pd *pd;

	for (int i = 0; i < 500; i++)
		CHECK(iwarpd_alloc_pd(s->dev, &pd, NULL) == 0 && iwarpd_dealloc_pd(pd, NULL) == 0);
	return NULL;
}

/* A waiter waits for events in a thread of its own. */
struct waiter {
	struct side *s;
	atomic_int tid;
	pthread_t t;
};

static void *await_event(void *arg)
{
	struct waiter *w = arg;

	atomic_store(&w->tid, (int)syscall(SYS_gettid));
	iwarpd_get_event(w->s->dev, &w->s->ev, -1, NULL);
	return NULL;
}

/* start_waiter starts a thread that comes to wait in a system call. */
static void start_waiter(struct waiter *w, long call)
{
	CHECK(pthread_create(&w->t, NULL, await_event, w) == 0);
	while (atomic_load(&w->tid) == 0)
		usleep(1000);
	await_call(atomic_load(&w->tid), call);
}

/* The sanitizers follow neither the stack nor the locks of a thread that is being canceled. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
static void check_canceled(struct side *s, const struct side *peer)
{
	(void)s, (void)peer;
}
#else
static void cancel_waiter(struct waiter *w)
{
	void *result;

	CHECK(pthread_cancel(w->t) == 0 && pthread_join(w->t, &result) == 0 && result == PTHREAD_CANCELED);
}

/* refused returns a queue pair with an event that was not read: its connection was refused. */
static struct iwarpd_qp *refused(struct side *s, const struct side *peer)
{
	struct iwarpd_qp_attr attr = { .send_cq = s->scq, .recv_cq = s->rcq };
	struct pollfd p = { .fd = iwarpd_event_fd(s->dev), .events = POLLIN };
	char remote[80];
	struct iwarpd_connect_attr nothing = { .remote = remote };
	struct iwarpd_qp *qp;

	snprintf(remote, sizeof(remote), "%s:1", peer->address);
	CHECK(iwarpd_create_qp(s->pd, &attr, &qp, &err) == 0 && iwarpd_connect(qp, &nothing, &err) == 0);
	CHECK(poll(&p, 1, WAIT) == 1);
	return qp;
}

static void destroy(void *qp)
{
	CHECK(iwarpd_destroy_qp(qp, &err) == 0);
}

static void look(void *channel)
{
	struct iwarpd_cq *cq;

	CHECK(iwarpd_get_cq_event(channel, &cq, 0) == -ETIMEDOUT);
}

static void register_far(void *pd)
{
	struct iwarpd_mr_attr attr = { .addr = pd, .length = 1, .far = true };
	struct iwarpd_mr *mr;

	CHECK(iwarpd_reg_mr(pd, &attr, &mr, &err) == 0 && iwarpd_dereg_mr(mr, &err) == 0);
}

/* A call of a thread that is canceled. */
struct canceled {
	void (*call)(void *);
	void *arg;
};

static void *cancel(void *arg)
{
	const struct canceled *c = arg;

	CHECK(pthread_cancel(pthread_self()) == 0); /* it ends at the next cancellation point */
	c->call(c->arg);
	pthread_testcancel();
	return NULL;
}

/* check_unlocked makes a call in a thread that is canceled, and then the same one, which needs the same lock. */
static void check_unlocked(void (*call)(void *), void *arg, void *again)
{
	struct canceled c = { call, arg };
	pthread_t t;

	CHECK(pthread_create(&t, NULL, cancel, &c) == 0 && pthread_join(t, NULL) == 0);
	call(again);
}

/*
 * check_canceled cancels threads that wait, one for the socket and the others for it, and threads in calls that take
 * locks.
 */
static void check_canceled(struct side *s, const struct side *peer)
{
	struct waiter w[3] = { { .s = s }, { .s = s }, { .s = s } };

	start_waiter(&w[0], SYS_ppoll);
	start_waiter(&w[1], SYS_futex);
	start_waiter(&w[2], SYS_futex);
	cancel_waiter(&w[1]);
	cancel_waiter(&w[0]);
	await_call(atomic_load(&w[2].tid), SYS_ppoll);
	cancel_waiter(&w[2]);
	churn(s);
	check_unlocked(destroy, refused(s, peer), s->qp);
	check_unlocked(register_far, s->pd, s->pd);
	CHECK(iwarpd_create_channel(s->dev, &s->channel, &err) == 0);
	check_unlocked(look, s->channel, s->channel);
	CHECK(iwarpd_destroy_channel(s->channel, &err) == 0);
}
#endif

static void interrupt(int sig)
{
	(void)sig;
}

/* check_interrupted makes requests in several threads that signals interrupt. Each has its reply. */
static void check_interrupted(struct side *s)
{
	struct sigaction a = { .sa_handler = interrupt };
	struct itimerval often = { { 0, 200 }, { 0, 200 } }, never = { 0 };
	pthread_t t[4];
	sigset_t set;

	CHECK(sigaction(SIGALRM, &a, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_create(&t[i], NULL, churn, s) == 0);
	sigemptyset(&set);
	sigaddset(&set, SIGALRM);
	CHECK(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0); /* the kernel would choose this thread */
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
}

/* threads makes requests in several threads while others wait for events, on the same devices. */
static void threads(struct side *a, struct side *b)
{
	struct iwarpd_listener *l = listen_on(b);
	struct iwarpd_connect_attr attr = { .remote = iwarpd_listener_address(l) };
	pthread_t t[5];

	make_qp(a);
	make_qp(b);
	CHECK(pthread_create(&t[0], NULL, accept_all, b) == 0);
	for (int i = 1; i < 5; i++)
		CHECK(pthread_create(&t[i], NULL, churn, i % 2 ? a : b) == 0);
	CHECK(iwarpd_connect(a->qp, &attr, &err) == 0);
	expect_event(a, IWARPD_EVENT_ESTABLISHED);
	for (int i = 0; i < 5; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	check_interrupted(a);
	check_tagged(a, b);
	check_canceled(a, b);
}

/* quiet checks that posting and polling make no system calls, with daemons that never sleep. */
static void quiet(struct side *a, struct side *b)
{
	enum { ALL = 1000 };
	struct iwarpd_send_wr wr = { .opcode = IWARPD_WR_RDMA_WRITE, .flags = IWARPD_SIGNALED };
	struct iwarpd_wc wc[8];
	int posted = 0, done = 0, e;
	bool good = true;

	join(a, b);
	wr.remote_addr = b->mr->base;
	wr.rkey = b->mr->rkey;
	CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0); /* kills at other system calls than read, write, exit */
	/*
	 * Post as many as fit: a round trip takes long when three processes that never
	 * sleep share a CPU.
	 */
	while (good && done < ALL) {
		if (posted < ALL && (e = iwarpd_post_send(a->qp, &wr)) != -EAGAIN) {
			good = e == 0;
			posted++;
			continue;
		}
		e = iwarpd_poll_cq(a->scq, wc, 8);
		good = e >= 0;
		for (int i = 0; i < e; i++, done++)
			good = good && wc[i].status == 0;
	}
	syscall(SYS_exit, good ? 0 : 1);
}

/*
 * forked polls, in the child of a fork, a queue that the parent has not polled until it
 * is empty. The zeros there are no completions, and the wake-up is the parent's.
 */
static void forked(struct side *a, struct side *b)
{
	struct pollfd woken = { .events = POLLIN };
	struct iwarpd_wc wc;
	pid_t child;
	int status;

	join(a, b);
	woken.fd = iwarpd_cq_fd(a->rcq);
	iwarpd_arm_cq(a->rcq, false);
	CHECK(iwarpd_disconnect(a->qp, true, &err) == 0);
	expect_event(a, IWARPD_EVENT_DISCONNECTED);
	CHECK(wait_one(a->rcq).status == IWARPD_WC_WR_FLUSH_ERR); /* of several */
	CHECK(poll(&woken, 1, WAIT) == 1);
	child = fork();
	if (child == 0) {
		iwarpd_after_fork(a->dev);
		CHECK(iwarpd_poll_cq(a->rcq, &wc, 1) == -EPIPE && iwarpd_wait_cq(a->rcq, &wc, 1, 0) == -EPIPE);
		CHECK(poll(&woken, 1, 0) == 0);
		_exit(0);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	CHECK(iwarpd_poll_cq(a->rcq, &wc, 1) == 1 && wc.status == IWARPD_WC_WR_FLUSH_ERR);
}

/*
 * forked_poor reads, in the child of a fork that may open nothing and not even replace a descriptor, what its parent has not
 * read yet.
 */
static void forked_poor(struct side *a)
{
	struct iwarpd_cq *cq, *woken;
	pid_t child;
	int status;

	CHECK(iwarpd_create_channel(a->dev, &a->channel, &err) == 0);
	make_cq(a, &cq);
	iwarpd_wake_cq(cq);
	child = fork();
	if (child == 0) {
		CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){ 3, 3 }) == 0);
		iwarpd_after_fork(a->dev);
		CHECK(iwarpd_get_cq_event(a->channel, &woken, 0) == 0 && iwarpd_get_cq_event(a->channel, &woken, 0) == -ETIMEDOUT);
		iwarpd_close(a->dev);
		_exit(0);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	CHECK(readable(a->channel) && iwarpd_get_cq_event(a->channel, &woken, 0) == 0 && woken == cq);
}

/* Whether the program has closed the descriptors when it separates a device from that of its parent. */
enum closed { CLOSED_BEFORE, WATCHED_BEFORE, CLOSED_AFTER };

/*
 * child_closed is the child of a fork in which a device is separated whose descriptors the program closes, as daemons do with all that
 * they do not know. Their numbers, from first to last, are those of other files by then, and maybe of an epoll that watches these.
 */
static void child_closed(struct side *own, enum closed how, int pipe, int first, int last)
{
	int epoll = iwarpd_event_fd(own->dev);

	if (how == CLOSED_AFTER)
		iwarpd_after_fork(own->dev);
	for (int fd = first; fd < last; fd++)
		CHECK(dup2(pipe, fd) == fd); /* which closes what it was */
	if (how == WATCHED_BEFORE) {
		int other = epoll_create1(0);

		CHECK(dup2(other, epoll) == epoll && close(other) == 0);
		for (int fd = first; fd < last; fd++)
			CHECK(fd == epoll || epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &(struct epoll_event){ 0 }) == 0);
	}
	if (how != CLOSED_AFTER)
		iwarpd_after_fork(own->dev);
	iwarpd_close(own->dev);
	for (int fd = first; fd < last; fd++)
		CHECK(how == WATCHED_BEFORE && fd == epoll ? fcntl(fd, F_GETFD) == 0 : fcntl(fd, F_GETPIPE_SZ) > 0);
}

/* descend separates a device in generations of children, each of which is left with as many files as it had before the device. */
static void descend(struct side *own, int generations, int files)
{
	pid_t child = fork();
	int status;

	if (child == 0) {
		iwarpd_after_fork(own->dev);
		CHECK(!readable(own->channel));
		if (generations > 1)
			descend(own, generations - 1, files);
		iwarpd_close(own->dev);
		CHECK(open_files() == files);
		_exit(0);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

/* forked_closed also checks that nothing is read from what has the numbers of the descriptors. */
static void forked_closed(const char *path)
{
	int status, ends[2], last, files;
	struct side own = { 0 };
	char data[64];

	CHECK(pipe(ends) == 0 && fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0 && write(ends[1], "12345678", 8) == 8);
	files = open_files();
	CHECK(iwarpd_open(path, "check", &own.dev, &err) == 0);
	make_cq(&own, &own.scq); /* which has a descriptor of its own */
	CHECK(iwarpd_create_channel(own.dev, &own.channel, &err) == 0);
	make_cq(&own, &own.rcq);
	iwarpd_wake_cq(own.rcq);
	descend(&own, 2, files);
	last = dup(ends[0]);
	for (int how = CLOSED_BEFORE; how <= CLOSED_AFTER; how++) {
		pid_t child = fork();

		if (child == 0) {
			child_closed(&own, (enum closed)how, ends[0], ends[1] + 1, last);
			CHECK(read(ends[0], data, sizeof(data)) == 8 && write(ends[1], data, 8) == 8);
			_exit(0);
		}
		CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	}
	CHECK(readable(own.channel));
	iwarpd_close(own.dev);
	CHECK(close(last) == 0 && open_files() == files && close(ends[0]) == 0 && close(ends[1]) == 0);
}

/* gone has the daemons killed and checks what calls return then. */
static void gone(struct side *a, struct side *b)
{
	struct iwarpd_send_wr wr = { .opcode = IWARPD_WR_SEND };
	struct iwarpd_cq *cq;
	struct iwarpd_wc wc;
	int files;
	char c;

	CHECK(iwarpd_create_channel(b->dev, &b->channel, &err) == 0);
	join(a, b);
	printf("kill\n");
	fflush(stdout);
	CHECK(read(0, &c, 1) == 1);
	for (int i = 0; i < 4; i++) /* the first wakes the worker, which is gone */
		CHECK(iwarpd_post_send(a->qp, &wr) == 0);
	CHECK(iwarpd_get_event(a->dev, &a->ev, WAIT, &err) == -EPIPE);
	CHECK(iwarpd_get_qp_event(b->qp, &b->ev, WAIT, &err) == -EPIPE);
	CHECK(iwarpd_post_send(a->qp, &wr) == -ENOTCONN && iwarpd_post_send(b->qp, &wr) == -ENOTCONN);
	CHECK(iwarpd_wait_cq(a->rcq, &wc, 1, WAIT) == -EPIPE);
	CHECK(iwarpd_get_cq_event(b->channel, &cq, WAIT) == -EPIPE);
	CHECK(iwarpd_destroy_qp(a->qp, &err) == -EPIPE && strstr(err.text, "gone"));

	/* What is destroyed then is freed. */
	check_closed_on_exec();
	files = open_files();
	CHECK(iwarpd_destroy_channel(b->channel, &err) == -EBUSY);
	CHECK(iwarpd_destroy_cq(b->scq, &err) == -EPIPE && iwarpd_destroy_cq(b->rcq, &err) == -EPIPE);
	CHECK(iwarpd_destroy_channel(b->channel, &err) == -EPIPE && open_files() == files - 3);
}

/* silent opens a socket at which nothing answers, with room for one connection that is not accepted yet. */
static void silent(const char *path)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	struct iwarpd_device *dev;

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
	CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0 && listen(fd, 0) == 0);
	CHECK(iwarpd_open_wait(path, "check", 100, &dev, &err) == -ETIMEDOUT && strstr(err.text, "does not answer"));
	CHECK(close(accept(fd, NULL, NULL)) == 0);
	CHECK(iwarpd_open_within(path, "check", 100, &dev, &err) == -ETIMEDOUT && strstr(err.text, "does not answer"));
	CHECK(iwarpd_open_within(path, "check", WAIT, &dev, &err) == -EAGAIN);
	CHECK(iwarpd_open_wait(path, "check", 100, &dev, &err) == -ETIMEDOUT && strstr(err.text, "no daemon within"));
	CHECK(close(fd) == 0);
}

/* permit permits the use of a socket after a moment, as a daemon does that starts. */
static void *permit(void *path)
{
	CHECK(usleep(20000) == 0 && chmod(path, 0600) == 0);
	return NULL;
}

/* denied opens a socket that it may not use, until it may. */
static void denied(char *path)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct had[2], none[2] = { { 0 } };
	struct iwarpd_device *dev;
	pthread_t thread;

	/* root may use any file */
	CHECK(syscall(SYS_capget, &header, had) == 0 && syscall(SYS_capset, &header, memset(none, 0, sizeof(none))) == 0);
	CHECK(chmod(path, 0) == 0 && iwarpd_open_wait(path, "check", WAIT, &dev, &err) == -EACCES);
	CHECK(pthread_create(&thread, NULL, permit, path) == 0);
	CHECK(iwarpd_open_wait(path, "check", 500, &dev, &err) == -ETIMEDOUT && strstr(err.text, "no daemon within"));
	CHECK(pthread_join(thread, NULL) == 0);
}

/* flushes has the connects of many queue pairs with receives fail at once. The daemon drains when all of them have been flushed. */
static void flushes(const char *path)
{
	enum { QPS = 1000 };
	struct iwarpd_connect_attr attr = { .remote = "192.0.2.1:1" };
	struct iwarpd_qp_attr qp_attr = { 0 };
	struct iwarpd_recv_wr wr = { 0 };
	struct iwarpd_device *dev;
	struct iwarpd_event ev;
	struct iwarpd_pd *pd;
	struct iwarpd_cq *cq;
	struct iwarpd_qp *qp;

	CHECK(iwarpd_open(path, "check", &dev, &err) == 0);
	CHECK(iwarpd_alloc_pd(dev, &pd, &err) == 0 && iwarpd_create_cq(dev, 64, &cq, &err) == 0);
	qp_attr.send_cq = qp_attr.recv_cq = cq;
	for (int i = 0; i < QPS; i++)
		CHECK(iwarpd_create_qp(pd, &qp_attr, &qp, &err) == 0 && iwarpd_post_recv(qp, &wr) == 0);
	CHECK(iwarpd_connect(qp, &attr, &err) == 0);
	for (int i = 0; i < QPS; i++)
		CHECK(iwarpd_get_event(dev, &ev, WAIT, &err) == 0 && ev.type == IWARPD_EVENT_CONNECT_FAILED);
	CHECK(iwarpd_get_event(dev, &ev, WAIT, &err) == 0 && ev.type == IWARPD_EVENT_DRAINING);
	iwarpd_close(dev);
}

/* refused counts the objects of the daemon that the library could not use. */
static int refused_objects;

/* made reports whether an object could be made. Of one whose reply was no valid one the library has no handle. */
static bool made(int result)
{
	refused_objects += result == -EPROTO && strstr(err.text, "reply") == NULL && strstr(err.text, "request") == NULL;
	return result == 0;
}

/* hostile makes objects of a daemon that may be hostile, as far as that goes, and prints how many could not be used. */
static void hostile(const char *path)
{
	struct iwarpd_srq_attr srq_attr = { 0 };
	struct iwarpd_qp_attr attr = { 0 };
	struct iwarpd_listen_attr any = { 0 };
	struct iwarpd_channel *channel;
	struct iwarpd_listener *l;
	struct iwarpd_device *dev;
	struct iwarpd_srq *srq;
	struct iwarpd_mr *mr;
	struct iwarpd_pd *pd;
	struct iwarpd_cq *cq;
	struct iwarpd_qp *qp;

	if (iwarpd_open(path, "check", &dev, &err) < 0)
		return;
	if (iwarpd_listen(dev, &any, &l, &err) == 0)
		CHECK(strlen(iwarpd_listener_address(l)) < 64);
	if (iwarpd_alloc_pd(dev, &pd, &err) < 0) {
		iwarpd_close(dev);
		return;
	}
	iwarpd_alloc_mr(pd, 1, 0, &mr, &err);
	made(iwarpd_create_channel(dev, &channel, &err));
	made(iwarpd_create_srq(pd, &srq_attr, &srq, &err));
	if (made(iwarpd_create_cq(dev, 64, &cq, &err))) {
		attr.send_cq = attr.recv_cq = cq;
		made(iwarpd_create_qp(pd, &attr, &qp, &err));
	}
	printf("refused %d\n", refused_objects);
	iwarpd_close(dev);
}

/*
 * coming listens while another thread waits for events. The first one, a connect request, comes before the reply to
 * iwarpd_listen.
 */
static void coming(const char *path)
{
	struct iwarpd_listen_attr any = { 0 };
	struct side s = { 0 };
	struct waiter w = { .s = &s };
	struct iwarpd_listener *l;

	alarm(WAIT / 1000);
	CHECK(iwarpd_open(path, "check", &s.dev, &err) == 0);
	start_waiter(&w, SYS_ppoll);
	CHECK(iwarpd_listen(s.dev, &any, &l, &err) == 0 && pthread_join(w.t, NULL) == 0);
	CHECK(s.ev.type == IWARPD_EVENT_CONNECT_REQUEST && s.ev.listener == l);
	iwarpd_close(s.dev);
}

/* check runs a mode that uses one daemon, or two. */
static int check(char **argv)
{
	struct side a, b;

	if (strcmp(argv[5], "reopen") == 0) {
		CHECK(iwarpd_open_wait(argv[1], "check", WAIT, &a.dev, &err) == 0);
		iwarpd_close(a.dev);
		return 0;
	}
	if (strcmp(argv[5], "silent") == 0) {
		silent(argv[1]);
		denied(argv[1]);
		return 0;
	}
	if (strcmp(argv[5], "flushes") == 0) {
		flushes(argv[1]);
		return 0;
	}
	if (strcmp(argv[5], "hostile") == 0) {
		hostile(argv[1]);
		return 0;
	}
	if (strcmp(argv[5], "coming") == 0) {
		coming(argv[1]);
		return 0;
	}
	open_side(&a, argv[1], argv[2]);
	open_side(&b, argv[3], argv[4]);
	b.flush_late = true;
	if (strcmp(argv[5], "verbs") == 0) {
		verbs(&a, &b);
	} else if (strcmp(argv[5], "cm") == 0) {
		check_refusals(&a, &b);
		check_early(&a, &b);
	} else if (strcmp(argv[5], "files") == 0) {
		check_files(&a);
	} else if (strcmp(argv[5], "memory") == 0) {
		check_resize_refused(&a);
	} else if (strcmp(argv[5], "streams") == 0) {
		streams(&a, &b);
	} else if (strcmp(argv[5], "transports") == 0) {
		transports(&a, &b);
	} else if (strcmp(argv[5], "shared") == 0) {
		shared(&a, &b);
	} else if (strcmp(argv[5], "channels") == 0) {
		channels(&a, &b);
	} else if (strcmp(argv[5], "threads") == 0) {
		threads(&a, &b);
	} else if (strcmp(argv[5], "quiet") == 0) {
		quiet(&a, &b);
	} else if (strcmp(argv[5], "forked") == 0) {
		forked(&a, &b);
		forked_poor(&a);
		forked_closed(argv[1]);
	} else if (strcmp(argv[5], "gone") == 0) {
		gone(&a, &b);
	} else {
		return 2;
	}
	iwarpd_close(a.dev);
	iwarpd_close(b.dev);
	return 0;
}

/* Nothing of a device stays after it is closed. */
int main(int argc, char **argv)
{
	int files, maps, result;

	close_range(STDERR_FILENO + 1, UINT_MAX, 0); /* what this process has inherited */
	files = open_files();
	maps = shared_maps();
	result = argc == 6 ? check(argv) : 2;
	CHECK(result != 0 || (open_files() == files && shared_maps() == maps));
	return result;
}
