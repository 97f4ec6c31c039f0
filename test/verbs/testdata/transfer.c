/*
 * Messages from and to memory of every kind: transfer ADDRESS on the client, transfer on
 * the server. Both use the kinds in the same order.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <rdma/rdma_verbs.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PART = 25000, SIZE = 4 * PART, HUGE_PAGE = 2 << 20 };

#define CHECK(x)                                                                                      \
	do {                                                                                          \
		if (!(x)) {                                                                           \
			printf("%s, line %d: failed: %s: %s\n", kind, __LINE__, #x, strerror(errno)); \
			exit(1);                                                                      \
		}                                                                                     \
	} while (0)

static const char *kind = "set-up";
static struct rdma_cm_id *id;
static char data[SIZE] = { 1 };

/* Message that says where the sender's memory is, or that the sender has finished. */
struct word {
	uint64_t addr;
	uint32_t rkey, done;
};
static struct word *in, *out;
static struct ibv_mr *in_mr, *out_mr;

static char pattern(size_t at)
{
	return (char)(at * 7 + (at >> 8) + (size_t)kind[0]);
}

static void fill(char *p)
{
	for (size_t i = 0; i < SIZE; i++)
		p[i] = pattern(i);
}

static bool filled(const char *p, size_t from, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (p[i] != pattern(from + i))
			return false;
	return true;
}

static void received(void)
{
	struct ibv_wc wc;

	CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
}

static void sent(void)
{
	struct ibv_wc wc;

	CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
}

static void say(struct word w)
{
	*out = w;
	CHECK(rdma_post_send(id, NULL, out, sizeof(*out), out_mr, IBV_SEND_SIGNALED) == 0);
	sent();
}

static void listen_for_word(void)
{
	CHECK(rdma_post_recv(id, NULL, in, sizeof(*in), in_mr) == 0);
}

static void serve(char *p)
{
	struct ibv_mr *mr = ibv_reg_mr(id->pd, p, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);

	CHECK(mr);
	memset(p, 0, SIZE);
	received(); /* the client has posted a receive */
	CHECK(rdma_post_recv(id, NULL, p, PART, mr) == 0);
	listen_for_word();
	say((struct word){ .addr = (uintptr_t)p, .rkey = mr->rkey });
	received();
	CHECK(filled(p, 0, PART));
	received();
	CHECK(in->done && filled(p + PART, PART, PART));
	listen_for_word();
	CHECK(ibv_dereg_mr(mr) == 0);
	say((struct word){ .done = 1 });
}

static void request(char *p, bool writable)
{
	struct ibv_mr *mr = ibv_reg_mr(id->pd, p, SIZE, writable ? IBV_ACCESS_LOCAL_WRITE : IBV_ACCESS_REMOTE_READ), *sink_mr = mr;
	char *sink = writable ? p : malloc(SIZE);

	CHECK(mr && sink);
	if (!writable)
		sink_mr = ibv_reg_mr(id->pd, sink, SIZE, IBV_ACCESS_LOCAL_WRITE);
	CHECK(sink_mr);
	listen_for_word();
	say((struct word){ 0 });
	received();
	listen_for_word();
	CHECK(rdma_post_send(id, NULL, p, PART, mr, 0) == 0);
	CHECK(rdma_post_write(id, NULL, p + PART, PART, mr, 0, in->addr + PART, in->rkey) == 0);
	CHECK(rdma_post_read(id, NULL, sink + 2 * PART, PART, sink_mr, IBV_SEND_SIGNALED, in->addr + PART, in->rkey) == 0);
	sent();
	CHECK(filled(sink + 2 * PART, PART, PART));
	say((struct word){ .done = 1 });
	received();
	CHECK(in->done && ibv_dereg_mr(mr) == 0);
	if (!writable)
		CHECK(ibv_dereg_mr(sink_mr) == 0);
}

static void connect_to(const char *addr)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = addr ? 0 : RAI_PASSIVE }, *ai;
	struct ibv_qp_init_attr attr = { .cap = { 16, 16, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
	struct rdma_cm_id *listener;

	CHECK(rdma_getaddrinfo(addr, "7600", &hints, &ai) == 0);
	if (addr) {
		CHECK(rdma_create_ep(&id, ai, NULL, &attr) == 0);
	} else {
		CHECK(rdma_create_ep(&listener, ai, NULL, &attr) == 0);
		CHECK(rdma_listen(listener, 1) == 0 && rdma_get_request(listener, &id) == 0);
	}
	in = malloc(sizeof(*in));
	out = malloc(sizeof(*out));
	in_mr = ibv_reg_mr(id->pd, in, sizeof(*in), IBV_ACCESS_LOCAL_WRITE);
	out_mr = ibv_reg_mr(id->pd, out, sizeof(*out), IBV_ACCESS_LOCAL_WRITE);
	CHECK(in_mr && out_mr);
	if (addr) {
		CHECK(rdma_connect(id, NULL) == 0);
	} else {
		listen_for_word();
		CHECK(rdma_accept(id, NULL) == 0);
	}
}

static void *map(int fd, int prot, int flags, size_t len)
{
	void *p = mmap(NULL, len, prot, flags, fd, 0);

	CHECK(p != MAP_FAILED);
	return p;
}

static void one(const char *name, const char *addr, char *p, bool writable)
{
	kind = name;
	if (addr) {
		if (writable)
			fill(p);
		request(p, writable);
	} else {
		serve(p);
	}
	printf("%s\n", name);
}

int main(int argc, char **argv)
{
	const char *addr = argc > 1 ? argv[1] : NULL;
	char stack[SIZE], name[] = "/tmp/transferXXXXXX", *heap = malloc(SIZE), *p;
	int fd = mkstemp(name);

	setvbuf(stdout, NULL, _IOLBF, 0);
	CHECK(fd >= 0 && unlink(name) == 0 && ftruncate(fd, SIZE) == 0);
	connect_to(addr);
	one("heap", addr, heap, true);
	one("stack", addr, stack, true);
	one("data", addr, data, true);
	one("part of a page", addr, heap + 13, true);
	one("shared", addr, map(-1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, SIZE), true);
	one("file", addr, map(fd, PROT_READ | PROT_WRITE, MAP_SHARED, SIZE), true);
	one("huge pages", addr, map(-1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, HUGE_PAGE), true);

	kind = "read-only";
	p = map(-1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, SIZE + 4096);
	if (addr) {
		fill(p);
		CHECK(write(fd, p, SIZE) == SIZE);
		p = map(fd, PROT_READ, MAP_PRIVATE, SIZE);
	}
	one("read-only", addr, p, !addr);
	rdma_disconnect(id);
	return 0;
}
