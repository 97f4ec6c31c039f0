/* What programs do on one device without a peer, above all register memory: memory MODE. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
	MEGABYTE = 1 << 20,
	PAGE = 4096,
	PAGES = 16,
	WRITERS = 4,
	MOVES = 100,
	RW = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
};

#define CHECK(x)                                                              \
	do {                                                                  \
		if (!(x)) {                                                   \
			printf("line %d: failed: %s\n", __LINE__, #x);        \
			exit(1);                                              \
		}                                                             \
	} while (0)

static struct ibv_pd *pd;
static char data[2 * PAGE] = { 1, 2, 3 };
static char bss[2 * PAGE];

static struct ibv_mr *reg(void *p, size_t len)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, p, len, RW);

	CHECK(mr);
	return mr;
}

static void *map(size_t len, int prot, int flags)
{
	void *p = mmap(NULL, len, prot, MAP_ANONYMOUS | flags, -1, 0);

	CHECK(p != MAP_FAILED);
	return p;
}

static bool filled(const char *p, char with, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (p[i] != with)
			return false;
	return true;
}

/* Where it may lie, and where not. */
static void kinds(void)
{
	char *p = malloc(100), stack[100], *read_only = map(PAGE, PROT_READ, MAP_PRIVATE);
	struct ibv_mr *a, *b;

	strcpy(p, "hello");
	a = reg(p, 100);
	b = reg(p + 10, 50); /* overlaps */
	CHECK(strcmp(p, "hello") == 0);
	CHECK(ibv_dereg_mr(a) == 0);
	strcpy(p, "world");
	CHECK(ibv_dereg_mr(b) == 0);
	CHECK(strcmp(p, "world") == 0);

	a = reg(data, sizeof(data));
	CHECK(data[2] == 3);
	data[3] = 4;
	CHECK(ibv_dereg_mr(a) == 0 && data[2] == 3 && data[3] == 4);
	a = reg(bss, sizeof(bss));
	bss[7] = 7;
	CHECK(ibv_dereg_mr(a) == 0 && bss[7] == 7);

	a = ibv_reg_mr(pd, read_only, 100, IBV_ACCESS_REMOTE_READ);
	CHECK(a && ibv_dereg_mr(a) == 0);
	CHECK(!ibv_reg_mr(pd, read_only, 100, RW));
	CHECK(!ibv_reg_mr(pd, (void *)kinds, 100, RW));
	CHECK(!ibv_reg_mr(pd, stack, sizeof(stack), RW | IBV_ACCESS_REMOTE_ATOMIC)); /* far memory has none */
	CHECK(ibv_dereg_mr(reg(stack, sizeof(stack))) == 0);
	a = ibv_reg_mr(pd, (void *)kinds, 100, IBV_ACCESS_REMOTE_READ);
	CHECK(a && ibv_dereg_mr(a) == 0);
	CHECK(ibv_dereg_mr(reg(map(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED), 100)) == 0);
	CHECK(!ibv_reg_mr(pd, (void *)(uintptr_t)PAGE, 100, RW));
	CHECK(!ibv_reg_mr(pd, p, 0, RW));
}

/* Freed, mapped again and enlarged while it is registered. */
static void changes(void)
{
	char *p = malloc(MEGABYTE), *big;
	struct ibv_mr *mr;

	mr = reg(p, MEGABYTE);
	free(p);
	p = malloc(MEGABYTE);
	memset(p, 3, MEGABYTE);
	CHECK(ibv_dereg_mr(mr) == 0);
	CHECK(filled(p, 3, MEGABYTE));

	mr = reg(p, MEGABYTE);
	big = realloc(p, 64 * MEGABYTE); /* by mremap */
	CHECK(filled(big, 3, MEGABYTE));
	p = map(MEGABYTE, PROT_READ | PROT_WRITE, MAP_PRIVATE); /* where big was, maybe */
	memset(p, 8, MEGABYTE);
	CHECK(ibv_dereg_mr(reg(p, MEGABYTE)) == 0);
	CHECK(filled(big, 3, MEGABYTE));
	CHECK(ibv_dereg_mr(mr) == 0);
	CHECK(filled(big, 3, MEGABYTE) && filled(p, 8, MEGABYTE));
	free(big);
}

/* open_pd opens the first device. */
static struct ibv_pd *open_pd(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *c;
	struct ibv_pd *made;

	CHECK(list && list[0]);
	c = ibv_open_device(list[0]);
	ibv_free_device_list(list);
	CHECK(c);
	made = ibv_alloc_pd(c);
	CHECK(made);
	return made;
}

/* A child has its own copy, of the time of the fork, and may open the device itself. */
static void forks(void)
{
	char *p = malloc(MEGABYTE), b;
	struct ibv_mr *mr;
	int go[2], status;
	pid_t child;

	memset(p, 5, MEGABYTE);
	mr = reg(p, MEGABYTE);
	CHECK(pipe(go) == 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK(filled(p, 5, MEGABYTE));
		p[0] = 9;
		CHECK(read(go[0], &b, 1) == 1);
		CHECK(p[0] == 9 && filled(p + 1, 5, MEGABYTE - 1));
		pd = open_pd();
		mr = reg(p, MEGABYTE);
		CHECK(filled(p + 1, 5, MEGABYTE - 1));
		CHECK(ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(pd) == 0);
		_exit(0);
	}
	p[1] = 6;
	CHECK(write(go[1], "x", 1) == 1);
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(p[0] == 5 && p[1] == 6);
	CHECK(ibv_dereg_mr(mr) == 0);
	CHECK(p[0] == 5 && p[1] == 6);
}

static char *area;
static atomic_bool stop;
static atomic_ulong stores, lost, failed;

/* A writer has a word of each page, and reads into another with a system call. */
static void *writer(void *arg)
{
	size_t k = (size_t)arg;
	uint64_t seen[PAGES] = { 0 };
	int zero = open("/dev/zero", O_RDONLY);

	for (uint64_t i = 1; !atomic_load(&stop); i++) {
		for (size_t page = 0; page < PAGES; page++) {
			volatile uint64_t *w = (volatile uint64_t *)(void *)(area + page * PAGE + k * 8);

			if (*w != seen[page])
				atomic_fetch_add(&lost, 1);
			*w = seen[page] = i;
		}
		atomic_fetch_add(&stores, PAGES);
		if (i % 64 == 0 && read(zero, area + PAGE / 2 + k * 64 + i / 64 % PAGES * PAGE, 8) != 8)
			atomic_fetch_add(&failed, 1);
	}
	close(zero);
	return NULL;
}

/* Other threads write to pages while these move. */
static void writers(void)
{
	pthread_t t[WRITERS];

	area = map(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	for (size_t i = 0; i < WRITERS; i++)
		CHECK(pthread_create(&t[i], NULL, writer, (void *)i) == 0);
	for (int i = 0; i < MOVES || atomic_load(&stores) < 10000000; i++)
		CHECK(ibv_dereg_mr(reg(area, PAGES * PAGE)) == 0);
	atomic_store(&stop, true);
	for (size_t i = 0; i < WRITERS; i++)
		pthread_join(t[i], NULL);
	printf("%lu stores, %lu lost, %lu system calls failed\n", atomic_load(&stores), atomic_load(&lost), atomic_load(&failed));
	CHECK(atomic_load(&lost) == 0 && atomic_load(&failed) == 0);
}

/* Very many regions, next to each other. */
static void many(void)
{
	enum { N = 10000 };
	static struct ibv_mr *mr[N];
	char *p = map((size_t)N * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);

	for (int i = 0; i < N; i++) {
		p[i * PAGE] = (char)i;
		mr[i] = reg(p + i * PAGE, PAGE);
	}
	for (int i = 0; i < N; i += 2)
		CHECK(ibv_dereg_mr(mr[i]) == 0);
	for (int i = 0; i < N; i++)
		CHECK(p[i * PAGE] == (char)i);
	for (int i = 1; i < N; i += 2)
		CHECK(ibv_dereg_mr(mr[i]) == 0);
	for (int i = 0; i < N; i++)
		CHECK(p[i * PAGE] == (char)i);
}

/* Much more than there is, of which nothing is touched. */
static void sparse(void)
{
	const size_t len = (size_t)64 << 30;
	char *p = map(len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE);
	struct ibv_mr *mr = reg(p, len);
	unsigned char there;

	p[len / 2] = 1;
	CHECK(mr->length == len && ibv_dereg_mr(mr) == 0);
	CHECK(p[len / 2] == 1 && mincore(p, PAGE, &there) == 0 && !(there & 1));
}

/* A QP that has no connection completes what was posted when it goes to the error state. */
static void flush(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(pd->context);
	struct ibv_cq *cq = ibv_create_cq(pd->context, 10, NULL, channel, 0), *woken;
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;
	struct ibv_wc wc[4];
	void *context;

	CHECK(qp && ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
	CHECK(ibv_post_recv(qp, &wr, &bad) == 0);
	CHECK(ibv_req_notify_cq(cq, 0) == 0 && ibv_poll_cq(cq, 4, wc) == 0);
	attr.qp_state = IBV_QPS_ERR;
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
	CHECK(ibv_get_cq_event(channel, &woken, &context) == 0 && woken == cq);
	ibv_ack_cq_events(cq, 1);
	wr.wr_id = 2;
	CHECK(ibv_post_recv(qp, &wr, &bad) == 0);
	CHECK(ibv_poll_cq(cq, 4, wc) == 2);
	for (uint64_t i = 0; i < 2; i++)
		CHECK(wc[i].wr_id == i + 1 && wc[i].status == IBV_WC_WR_FLUSH_ERR && wc[i].qp_num == qp->qp_num);
	CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(channel) == 0);
}

int main(int argc, char **argv)
{
	static const struct { const char *name; void (*run)(void); } modes[] = {
		{ "kinds", kinds }, { "changes", changes }, { "forks", forks }, { "writers", writers }, { "many", many }, { "sparse", sparse },
		{ "flush", flush },
	};
	struct ibv_context *c;

	CHECK(argc == 2);
	pd = open_pd();
	c = pd->context;
	for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++)
		if (strcmp(argv[1], modes[i].name) == 0)
			modes[i].run();
	CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(c) == 0);
	return 0;
}
