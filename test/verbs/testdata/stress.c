/*
 * stress SEED SECONDS: threads register parts of memory that all of them store to, and parts of their own whose
 * mappings they change meanwhile, and fork. No store is lost, and at the end all memory is private again.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum {
	THREADS = 4,
	REGIONS = 100, /* of a thread */
	PAGE = 4096,
	COMMON = 64, /* pages that all threads use */
	OWN = 1024,  /* pages of a thread, and of the place to which it moves some of them */
	WORDS = 4,   /* of a page of a thread's own */
	RW = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
};

struct region {
	struct ibv_mr *mr;
	size_t page, pages; /* of the thread's own memory, or none */
};

struct thread {
	pthread_t id;
	size_t number;
	uint64_t seed, stored;
	int zero; /* /dev/zero */
	char *own, *elsewhere;
	uint64_t common[COMMON], words[OWN][WORDS]; /* what there should be */
	int used[OWN];                              /* regions of each page */
	struct region regions[REGIONS];
};

static struct ibv_pd *pd;
static char *common;
static time_t end;
static pthread_rwlock_t holes = PTHREAD_RWLOCK_INITIALIZER; /* held for writing while there is one: the library maps too */
static _Atomic(struct ibv_mr *) given; /* a region of the common memory that another thread deregisters */

static uint64_t pick(struct thread *t, uint64_t n)
{
	t->seed = t->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (t->seed >> 33) % n;
}

static volatile uint64_t *word(struct thread *t, size_t page, size_t i)
{
	return (volatile uint64_t *)(void *)(t->own + page * PAGE + i * (PAGE / WORDS));
}

static volatile uint64_t *common_word(const struct thread *t, size_t page)
{
	return (volatile uint64_t *)(void *)(common + page * PAGE + t->number * 8);
}

/* part picks a part of n pages. */
static size_t part(struct thread *t, size_t n, size_t *pages)
{
	size_t from = pick(t, n), most = n - from;

	*pages = 1 + pick(t, pick(t, 4) == 0 || most < 4 ? most : 4);
	return from;
}

static void store(struct thread *t)
{
	for (size_t page = 0; page < COMMON; page++) {
		CHECK(*common_word(t, page) == t->common[page]);
		*common_word(t, page) = t->common[page] = ++t->stored;
	}
	for (int i = 0; i < 64; i++) {
		size_t page = pick(t, OWN), k = pick(t, WORDS);

		CHECK(*word(t, page, k) == t->words[page][k]);
		*word(t, page, k) = t->words[page][k] = ++t->stored;
	}
}

/* by_kernel makes the kernel store. */
static void by_kernel(struct thread *t)
{
	size_t page = pick(t, COMMON), own = pick(t, OWN), k = pick(t, WORDS);

	CHECK(read(t->zero, (void *)common_word(t, page), 8) == 8 && read(t->zero, (void *)word(t, own, k), 8) == 8);
	t->common[page] = t->words[own][k] = 0;
}

static void verify(struct thread *t, size_t page, size_t pages)
{
	for (size_t i = 0; i < pages * WORDS; i++)
		CHECK(*word(t, page + i / WORDS, i % WORDS) == t->words[page + i / WORDS][i % WORDS]);
}

static void use(struct thread *t, const struct region *r, int n)
{
	for (size_t i = 0; i < r->pages; i++)
		t->used[r->page + i] += n;
}

static struct ibv_mr *reg(struct thread *t, char *p, size_t pages)
{
	size_t first = pick(t, PAGE);
	struct ibv_mr *mr;

	pthread_rwlock_rdlock(&holes);
	mr = ibv_reg_mr(pd, p + first, (pages - 1) * PAGE + 1 + pick(t, PAGE - first), RW);
	pthread_rwlock_unlock(&holes);
	CHECK(mr);
	return mr;
}

static void dereg(struct ibv_mr *mr)
{
	pthread_rwlock_rdlock(&holes);
	CHECK(ibv_dereg_mr(mr) == 0);
	pthread_rwlock_unlock(&holes);
}

static void drop(struct thread *t, struct region *r)
{
	if (!r->mr)
		return;
	dereg(r->mr);
	use(t, r, -1);
	*r = (struct region){ 0 };
}

static void register_own(struct thread *t)
{
	struct region *r = &t->regions[pick(t, REGIONS)];

	drop(t, r);
	r->page = part(t, OWN, &r->pages);
	r->mr = reg(t, t->own + r->page * PAGE, r->pages);
	use(t, r, 1);
	verify(t, r->page, r->pages);
}

static void register_common(struct thread *t)
{
	struct region *r = &t->regions[pick(t, REGIONS)];
	struct ibv_mr *other;
	size_t pages, page = part(t, COMMON, &pages);

	drop(t, r);
	r->mr = reg(t, common + page * PAGE, pages);
	if (pick(t, 2) == 0)
		return;
	other = atomic_exchange(&given, r->mr);
	r->mr = NULL;
	if (other)
		dereg(other);
}

static void deregister(struct thread *t)
{
	drop(t, &t->regions[pick(t, REGIONS)]);
}

static void zeroed(struct thread *t, size_t page, size_t pages)
{
	memset(t->words[page], 0, pages * sizeof(t->words[0]));
	verify(t, page, pages);
}

static void map_at(char *p, size_t len)
{
	CHECK(mmap(p, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
}

static void map_anew(struct thread *t)
{
	size_t pages, page = part(t, OWN, &pages);
	char *p = t->own + page * PAGE;

	pthread_rwlock_wrlock(&holes);
	if (pick(t, 2) == 0)
		CHECK(munmap(p, pages * PAGE) == 0);
	map_at(p, pages * PAGE);
	pthread_rwlock_unlock(&holes);
	zeroed(t, page, pages);
}

static void protect(struct thread *t)
{
	size_t pages, page = part(t, OWN, &pages);
	char *p = t->own + page * PAGE;
	int prot = pick(t, 2) ? PROT_READ : PROT_NONE;

	CHECK(mprotect(p, pages * PAGE, prot) == 0);
	deregister(t);
	if (prot == PROT_READ)
		verify(t, page, pages);
	CHECK(mprotect(p, pages * PAGE, PROT_READ | PROT_WRITE) == 0);
	verify(t, page, pages);
}

/* remap moves a mapping and leaves another one in its place, unless they are several, which Linux moves since 6.17. */
static bool remap(char *from, char *to, size_t len)
{
	bool moved;

	pthread_rwlock_wrlock(&holes);
	moved = mremap(from, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
	CHECK(moved || errno == EFAULT);
	map_at(moved ? from : to, len);
	pthread_rwlock_unlock(&holes);
	return moved;
}

/* move moves pages to another place, uses the first one meanwhile, and moves them back. */
static void move(struct thread *t)
{
	size_t pages, page = part(t, OWN, &pages), len = pages * PAGE;
	char *p = t->own + page * PAGE, *q = t->elsewhere + page * PAGE;
	struct ibv_mr *mr;

	if (!remap(p, q, len))
		return;
	if (pick(t, 2)) {
		memset(p, 0xff, len);
		mr = reg(t, p, pages);
		deregister(t);
		dereg(mr);
		for (size_t i = 0; i < len; i++)
			CHECK(p[i] == (char)0xff);
	}
	if (pick(t, 2)) {
		mr = reg(t, q, pages);
		deregister(t);
		dereg(mr);
	}
	CHECK(remap(q, p, len));
	verify(t, page, pages);
}

static void advise(struct thread *t)
{
	size_t pages, page = part(t, OWN, &pages);
	char *p = t->own + page * PAGE;

	madvise(p, pages * PAGE, pick(t, 2) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE); /* there may be no huge pages */
	for (size_t i = 0; i < pages; i++)
		if (t->used[page + i] > 0)
			return;
	CHECK(madvise(p, pages * PAGE, MADV_DONTNEED) == 0);
	zeroed(t, page, pages);
}

static void forked(struct thread *t)
{
	bool all = pick(t, 4) == 0;
	int status;
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (pid == 0) {
		pthread_rwlock_init(&holes, NULL);
		for (size_t page = 0; page < COMMON; page++)
			CHECK(*common_word(t, page) == t->common[page]);
		verify(t, 0, OWN);
		for (size_t i = 0; all && i < REGIONS; i++)
			drop(t, &t->regions[i]);
		verify(t, 0, OWN);
		_exit(0);
	}
	store(t);
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void *run(void *arg)
{
	static void (*const calls[])(struct thread *) = {
		register_own, register_own, register_common, register_common, deregister, deregister, deregister,
		by_kernel, map_anew, protect, move, advise,
	};
	struct thread *t = arg;

	while (time(NULL) < end) {
		store(t);
		calls[pick(t, sizeof(calls) / sizeof(calls[0]))](t);
		if (pick(t, 200) == 0)
			forked(t);
	}
	for (size_t i = 0; i < REGIONS; i++)
		drop(t, &t->regions[i]);
	store(t);
	verify(t, 0, OWN);
	return NULL;
}

/* shared returns the number of mappings that are shared with the daemon. */
static int shared(void)
{
	FILE *f = fopen("/proc/self/maps", "re");
	char line[512];
	int n = 0;

	CHECK(f);
	while (fgets(line, sizeof(line), f))
		n += strstr(line, "iwarpd-near") != NULL;
	fclose(f);
	return n;
}

static void *map(size_t pages)
{
	void *p = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(p != MAP_FAILED);
	return p;
}

int main(int argc, char **argv)
{
	static struct thread threads[THREADS];
	struct ibv_device **list = ibv_get_device_list(NULL);
	uint64_t stored = 0;
	struct ibv_context *c;
	struct ibv_mr *last;
	char *own;

	CHECK(argc == 3 && list && list[0]);
	alarm((unsigned int)atoi(argv[2]) + 100);
	c = ibv_open_device(list[0]);
	CHECK(c);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(c);
	CHECK(pd);
	end = time(NULL) + atoi(argv[2]);
	common = map(COMMON);
	own = map((size_t)2 * THREADS * OWN);
	for (size_t i = 0; i < THREADS; i++) {
		struct thread *t = &threads[i];

		t->number = i;
		t->seed = strtoull(argv[1], NULL, 0) * THREADS + i;
		t->zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
		t->own = own + 2 * i * OWN * PAGE;
		t->elsewhere = t->own + (size_t)OWN * PAGE;
		CHECK(t->zero >= 0 && pthread_create(&t->id, NULL, run, t) == 0);
	}
	for (size_t i = 0; i < THREADS; i++) {
		CHECK(pthread_join(threads[i].id, NULL) == 0);
		stored += threads[i].stored;
	}
	last = atomic_load(&given);
	if (last)
		dereg(last);
	CHECK(shared() == 0);
	printf("%llu stores\n", (unsigned long long)stored);
	CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(c) == 0);
	return 0;
}
