/* Uses of one device without a peer, mainly registering memory: memory MODE. */
#define _GNU_SOURCE
#include <alloca.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <malloc.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum {
	MEGABYTE = 1 << 20,
	PAGE = 4096,
	PAGES = 16,
	WRITERS = 4,
	MOVES = 100,
	RW = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
};

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

/* Checks which memory can be registered. */
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
	CHECK(!ibv_reg_mr(pd, stack, sizeof(stack), RW | IBV_ACCESS_REMOTE_ATOMIC)); /* far memory has no atomics */
	CHECK(ibv_dereg_mr(reg(stack, sizeof(stack))) == 0);
	a = ibv_reg_mr(pd, (void *)kinds, 100, IBV_ACCESS_REMOTE_READ);
	CHECK(a && ibv_dereg_mr(a) == 0);
	CHECK(ibv_dereg_mr(reg(map(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED), 100)) == 0);
	CHECK(!ibv_reg_mr(pd, (void *)(uintptr_t)PAGE, 100, RW));
	CHECK(!ibv_reg_mr(pd, map(PAGE, PROT_NONE, MAP_PRIVATE), 100, IBV_ACCESS_REMOTE_READ));
	CHECK(!ibv_reg_mr(pd, p, 0, RW));
}

/* shared reports whether the page of p is mapped from a file. */
static bool shared(const void *p)
{
	FILE *f = fopen("/proc/self/maps", "re");
	unsigned long start, end;
	bool is = false, found = false;
	char line[512], perms[5];

	CHECK(f);
	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "%lx-%lx %4s", &start, &end, perms) == 3 && start <= (uintptr_t)p && (uintptr_t)p < end) {
			found = true;
			is = perms[3] == 's';
		}
	}
	fclose(f);
	CHECK(found);
	return is;
}

/* Moves a page of a region, and may put another one in its place. It is private when the region ends. */
static void pulled(void)
{
	for (int i = 0; i < 6; i++) {
		char *p = map(3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE), *at = p + i % 3 * PAGE;
		char *q = map(PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
		struct ibv_mr *mr;

		memset(p, 1, 3 * PAGE);
		mr = reg(p, 3 * PAGE);
		CHECK(mremap(at, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, q) == q);
		if (i >= 3)
			CHECK(mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
		CHECK(ibv_dereg_mr(mr) == 0 && !shared(q) && filled(q, 1, PAGE));
	}
}

/* Moves the pages of three regions as one. When one of the regions ends, those of the others stay theirs. */
static void divided(void)
{
	for (int first = 0; first < 3; first++) {
		char *p = map(3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE), *q = map(3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
		struct ibv_mr *mr[3];
		bool near;

		memset(p, 1, 3 * PAGE);
		for (int i = 0; i < 3; i++)
			mr[i] = reg(p + i * PAGE, PAGE);
		near = shared(p);
		CHECK(mremap(p, 3 * PAGE, 3 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, q) == q);
		for (int n = 0; n < 3; n++) {
			CHECK(ibv_dereg_mr(mr[(first + n) % 3]) == 0);
			for (int k = 0; k < 3; k++)
				CHECK(shared(q + (first + k) % 3 * PAGE) == (near && k > n));
		}
		CHECK(filled(q, 1, 3 * PAGE));
	}
}

/* Registers other memory at the place of a page that was moved, while the region of that one is there and after it. */
static void replaced(void)
{
	char *p = map(PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE), *q = map(PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	struct ibv_mr *mr;

	memset(p, 1, PAGE);
	mr = reg(p, PAGE);
	CHECK(mremap(p, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, q) == q);
	CHECK(mmap(p, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
	memset(p, 2, PAGE);
	CHECK(ibv_dereg_mr(reg(p, PAGE)) == 0 && filled(p, 2, PAGE) && filled(q, 1, PAGE));
	CHECK(ibv_dereg_mr(mr) == 0 && filled(p, 2, PAGE) && filled(q, 1, PAGE));
}

/* Frees, maps again and enlarges memory while it is registered. */
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
	p = map(MEGABYTE, PROT_READ | PROT_WRITE, MAP_PRIVATE); /* possibly at the former place of big */
	memset(p, 8, MEGABYTE);
	CHECK(ibv_dereg_mr(reg(p, MEGABYTE)) == 0);
	CHECK(filled(big, 3, MEGABYTE));
	CHECK(ibv_dereg_mr(mr) == 0);
	CHECK(filled(big, 3, MEGABYTE) && filled(p, 8, MEGABYTE));
	free(big);
	pulled();
	divided();
	replaced();
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

/* A child has its own copy from the time of the fork, and may open the device itself. */
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
static atomic_int ready; /* writers */
static pid_t tids[WRITERS];

/* Each writer has a word in each page, and reads into another one with a system call. */
static void *writer(void *arg)
{
	size_t k = (size_t)arg;
	uint64_t seen[PAGES] = { 0 };
	int zero = open("/dev/zero", O_RDONLY);

	tids[k] = gettid();
	atomic_fetch_add(&ready, 1);
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

static pthread_t threads[WRITERS];

static void start_writers(void)
{
	if (!area)
		area = map(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	memset(area, 0, PAGES * PAGE);
	atomic_store(&stop, false);
	atomic_store(&ready, 0);
	atomic_store(&stores, 0);
	for (size_t i = 0; i < WRITERS; i++)
		CHECK(pthread_create(&threads[i], NULL, writer, (void *)i) == 0);
	while (atomic_load(&ready) < WRITERS)
		sched_yield();
}

/* join waits until the kernel no longer lists a thread, which it may do for a while after pthread_join. */
static void join(pthread_t t, const pid_t *tid)
{
	char path[64];

	CHECK(pthread_join(t, NULL) == 0);
	snprintf(path, sizeof(path), "/proc/self/task/%d", *tid);
	while (access(path, F_OK) == 0)
		sched_yield();
}

static void end_writers(void)
{
	while (atomic_load(&stores) < 100000)
		sched_yield();
	atomic_store(&stop, true);
	for (size_t i = 0; i < WRITERS; i++)
		join(threads[i], &tids[i]);
	printf("%lu stores, %lu lost, %lu system calls failed\n", atomic_load(&stores), atomic_load(&lost), atomic_load(&failed));
	CHECK(atomic_load(&lost) == 0 && atomic_load(&failed) == 0);
}

/* Other threads write to pages while they are moved. */
static void writers(void)
{
	start_writers();
	for (int i = 0; i < MOVES || atomic_load(&stores) < 10000000; i++)
		CHECK(ibv_dereg_mr(reg(area, PAGES * PAGE)) == 0);
	end_writers();
}

/* address_space returns the size of the process's address space, in bytes. */
static rlim_t address_space(void)
{
	FILE *f = fopen("/proc/self/statm", "re");
	unsigned long v;

	CHECK(f && fscanf(f, "%lu", &v) == 1);
	fclose(f);
	return v * PAGE;
}

static void limit(int which, rlim_t n)
{
	struct rlimit l;

	CHECK(getrlimit(which, &l) == 0);
	l.rlim_cur = n;
	CHECK(setrlimit(which, &l) == 0);
}

/*
 * Registers and deregisters under a limit while threads write. Failed calls set errno, no
 * store is lost, and without the limit all memory becomes private again.
 */
static void under(int which, rlim_t n)
{
	struct rlimit was;
	int refused = 0;

	start_writers();
	CHECK(ibv_dereg_mr(reg(area, PAGES * PAGE)) == 0); /* makes what the library keeps */
	CHECK(getrlimit(which, &was) == 0);
	limit(which, which == RLIMIT_AS ? address_space() : n);
	for (int i = 0; i < MOVES; i++) {
		struct ibv_mr *mr = ibv_reg_mr(pd, area, PAGES * PAGE, RW);

		refused += !mr;
		CHECK(mr ? ibv_dereg_mr(mr) == 0 : errno != 0);
	}
	limit(which, was.rlim_cur);
	end_writers();
	printf("%d of %d refused\n", refused, MOVES);
	CHECK(ibv_dereg_mr(reg(area, PAGES * PAGE)) == 0 && !shared(area));
}

/* grow_heap leaves room in the heap that all threads use. */
static void grow_heap(void)
{
	CHECK(mallopt(M_TRIM_THRESHOLD, 64 * MEGABYTE) && mallopt(M_MMAP_THRESHOLD, 16 * MEGABYTE));
	free(malloc(8 * MEGABYTE));
}

/* A page that was moved stays shared, for lack of address space, until other memory is registered at its former place. */
static void moved_away(void)
{
	char *p = map(PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE), *q = map(PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	struct ibv_mr *mr;
	struct rlimit was;

	memset(p, 1, PAGE);
	mr = reg(p, PAGE);
	CHECK(mremap(p, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, q) == q);
	CHECK(getrlimit(RLIMIT_AS, &was) == 0);
	limit(RLIMIT_AS, address_space());
	CHECK(ibv_dereg_mr(mr) == 0);
	limit(RLIMIT_AS, was.rlim_cur);
	CHECK(shared(q));
	CHECK(mmap(p, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
	memset(p, 2, PAGE);
	CHECK(ibv_dereg_mr(reg(p, PAGE)) == 0);
	CHECK(!shared(q) && filled(q, 1, PAGE) && filled(p, 2, PAGE));
}

static void limit_as(void)
{
	grow_heap();
	moved_away();
	under(RLIMIT_AS, 0); /* not one more page */
}

static void limit_data(void)
{
	grow_heap();
	under(RLIMIT_DATA, PAGE);
}

/* Near memory is in a file that is larger than any limit. */
static void limit_fsize(void)
{
	char *p = map(MEGABYTE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	struct ibv_mr *mr;

	limit(RLIMIT_FSIZE, PAGE);
	mr = reg(p, MEGABYTE);
	CHECK(!shared(p) && ibv_dereg_mr(mr) == 0);
	limit(RLIMIT_FSIZE, RLIM_INFINITY);
	under(RLIMIT_FSIZE, PAGE);
}

static void limit_memlock(void)
{
	under(RLIMIT_MEMLOCK, 0);
}

/* fill_descriptors leaves none. */
static void fill_descriptors(void)
{
	int fd = dup(0);

	CHECK(fd >= 0);
	limit(RLIMIT_NOFILE, (rlim_t)fd + 20);
	while (dup(0) >= 0)
		;
	CHECK(errno == EMFILE);
}

/* Without a free descriptor, near memory and fork still work. */
static void limit_nofile(void)
{
	char *p = malloc(MEGABYTE);
	struct rlimit was;
	struct ibv_mr *mr;
	pid_t child;
	int status;

	memset(p, 5, MEGABYTE);
	mr = reg(p, MEGABYTE);
	CHECK(getrlimit(RLIMIT_NOFILE, &was) == 0);
	fill_descriptors();
	CHECK(ibv_dereg_mr(mr) == 0 && filled(p, 5, MEGABYTE));
	mr = reg(p, MEGABYTE);
	for (int i = 0; i < 3; i++) {
		child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			usleep(10000); /* meanwhile the parent writes */
			_exit(!filled(p, 5, MEGABYTE));
		}
		memset(p, 6, MEGABYTE);
		CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
		memset(p, 5, MEGABYTE);
	}
	CHECK(!ibv_reg_mr(pd, &status, sizeof(status), RW)); /* far memory needs a descriptor */
	CHECK(ibv_dereg_mr(mr) == 0 && filled(p, 5, MEGABYTE));
	limit(RLIMIT_NOFILE, was.rlim_cur);
	under(RLIMIT_NOFILE, 3);
}

/* Runs other programs while its memory is registered, and then executes itself. */
static void execs(void)
{
	char *p = malloc(MEGABYTE), *args[] = { "true", NULL }, stack[100];
	extern char **environ;
	pid_t child;
	int status;

	memset(p, 5, MEGABYTE);
	reg(p, MEGABYTE);
	reg(stack, sizeof(stack));
	for (int i = 0; i < 5; i++) {
		CHECK(posix_spawnp(&child, "true", NULL, NULL, args, environ) == 0);
		CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
		CHECK(filled(p, 5, MEGABYTE));
	}
	execl("/proc/self/exe", "memory", "kinds", (char *)NULL);
	CHECK(false);
}

/* A program that is not dumpable can only use near memory. */
static void undumpable(void)
{
	char *p = malloc(MEGABYTE), stack[100];
	struct ibv_mr *mr;

	CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
	memset(p, 5, MEGABYTE);
	mr = reg(p, MEGABYTE);
	CHECK(shared(p) && ibv_dereg_mr(mr) == 0 && filled(p, 5, MEGABYTE));
	mr = ibv_reg_mr(pd, stack, sizeof(stack), RW);
	if (geteuid() == 0)
		CHECK(mr && ibv_dereg_mr(mr) == 0);
	else
		CHECK(!mr && errno == EACCES);
}

/*
 * forbid makes the system call nr fail with err. If arg is not 0, only calls with the
 * second argument arg fail.
 */
static void forbid(uint32_t nr, uint32_t arg, uint32_t err)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
		BPF_JUMP(BPF_JMP | (arg ? BPF_JEQ : BPF_JGE) | BPF_K, arg, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | err),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = { sizeof(code) / sizeof(code[0]), code };

	CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) == 0);
}

/* Without the system call, /dev/userfaultfd is used. */
static void no_userfaultfd(void)
{
	forbid(SYS_userfaultfd, 0, EPERM);
	writers();
	CHECK(shared(area) == false);
	changes();
}

/* no_protection forbids both, so that pages cannot be protected while they move. */
static void no_protection(uint32_t err)
{
	forbid(SYS_userfaultfd, 0, err);
	forbid(SYS_ioctl, (uint32_t)USERFAULTFD_IOC_NEW, err);
}

/* Memory that one thread registers and several deregister stays shared. */
static void more_threads(void)
{
	for (int i = 0; i < 10; i++) {
		struct ibv_mr *mr = reg(area, PAGES * PAGE);

		CHECK(shared(area));
		start_writers();
		CHECK(ibv_dereg_mr(mr) == 0 && shared(area));
		end_writers();
	}
	CHECK(ibv_dereg_mr(reg(area, PAGES * PAGE)) == 0 && !shared(area));
}

static int park[2];
static pid_t parked_tid;

static void *parked(void *arg)
{
	char b;

	parked_tid = gettid();
	CHECK(read(park[0], &b, 1) == 1);
	return arg;
}

/* Pages that stayed shared, and that mremap has moved, keep what they have when their former addresses are registered. */
static void moved(void)
{
	char *p = map(MEGABYTE, PROT_READ | PROT_WRITE, MAP_PRIVATE), *q = map(MEGABYTE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	struct ibv_mr *mr;
	pthread_t t;

	memset(p, 1, MEGABYTE);
	mr = reg(p, MEGABYTE);
	CHECK(pipe(park) == 0 && pthread_create(&t, NULL, parked, NULL) == 0);
	CHECK(ibv_dereg_mr(mr) == 0 && shared(p));
	CHECK(mremap(p, MEGABYTE, MEGABYTE, MREMAP_MAYMOVE | MREMAP_FIXED, q) == q);
	CHECK(write(park[1], "x", 1) == 1);
	join(t, &parked_tid);
	CHECK(mmap(p, MEGABYTE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
	memset(p, 2, MEGABYTE);
	CHECK(ibv_dereg_mr(reg(p, MEGABYTE)) == 0);
	CHECK(filled(q, 1, MEGABYTE) && filled(p, 2, MEGABYTE) && !shared(q) && !shared(p));
}

/* The child of a fork does not have the library's thread. Another one that it has is the program's, and may write to memory. */
static void bereft(void)
{
	const int access = RW | IBV_ACCESS_REMOTE_ATOMIC; /* only near memory has atomics */
	pid_t child = fork();
	pthread_t t;
	int status;

	CHECK(child >= 0);
	if (child == 0) {
		CHECK(pipe(park) == 0 && pthread_create(&t, NULL, parked, NULL) == 0);
		CHECK(!ibv_reg_mr(pd, area, PAGES * PAGE, access) && errno == EOPNOTSUPP);
		CHECK(write(park[1], "x", 1) == 1);
		join(t, &parked_tid);
		CHECK(!ibv_reg_mr(pd, area, PAGES * PAGE, access) && errno != EOPNOTSUPP); /* the daemon knows only the parent */
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Without protection, memory is far once there are several threads. */
static void without(uint32_t err)
{
	struct ibv_mr *mr;

	no_protection(err);
	start_writers();
	for (int i = 0; i < MOVES; i++) {
		mr = reg(area, PAGES * PAGE);
		CHECK(!shared(area) && ibv_dereg_mr(mr) == 0);
	}
	end_writers();
	mr = reg(area, PAGES * PAGE); /* alone again */
	CHECK(shared(area) && ibv_dereg_mr(mr) == 0 && !shared(area));
	more_threads();
	moved();
	bereft();
	kinds();
	changes();
	forks();
}

static void without_eperm(void)
{
	without(EPERM);
}

static void without_enosys(void)
{
	without(ENOSYS);
}

/* call_always connects again and again, and is refused each time. */
static void call_always(struct sockaddr_in to)
{
	for (;;) {
		struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
		struct rdma_cm_id *id;

		CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
		CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000) == 0 && rdma_resolve_route(id, 2000) == 0);
		CHECK(rdma_create_qp(id, NULL, &init) == 0 && rdma_connect(id, NULL) < 0);
		rdma_destroy_qp(id);
		CHECK(rdma_destroy_id(id) == 0);
	}
}

/* refuse_all rejects the requests that have come, and returns how many they were. */
static int refuse_all(struct rdma_event_channel *ch)
{
	struct rdma_cm_event *e;
	int n = 0;

	for (; rdma_get_cm_event(ch, &e) == 0; n++) {
		struct rdma_cm_id *id = e->id;

		CHECK(e->event == RDMA_CM_EVENT_CONNECT_REQUEST && rdma_ack_cm_event(e) == 0);
		rdma_reject(id, NULL, 0); /* fails if the peer has ended */
		CHECK(rdma_destroy_id(id) == 0);
	}
	CHECK(errno == EAGAIN);
	return n;
}

static uintptr_t heap_start(void)
{
	FILE *f = fopen("/proc/self/maps", "re");
	unsigned long start = 0;
	char line[512];

	CHECK(f);
	while (!start && fgets(line, sizeof(line), f))
		if (strstr(line, "[heap]"))
			CHECK(sscanf(line, "%lx", &start) == 1);
	fclose(f);
	CHECK(start);
	return start;
}

/* The library's thread uses the heap, which moves without protection. */
static void heap(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET };
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id;
	union ibv_gid gid;
	pid_t callers[4];
	char *start;

	no_protection(EPERM);
	CHECK(ibv_query_gid(pd->context, 1, 0, &gid) == 0);
	memcpy(&any.sin_addr, gid.raw + 12, 4);
	ch = rdma_create_event_channel();
	CHECK(ch && rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&any) == 0 && rdma_listen(id, 0) == 0);
	any.sin_port = rdma_get_src_port(id);
	for (int i = 0; i < 4; i++) {
		callers[i] = fork();
		CHECK(callers[i] >= 0);
		if (callers[i] == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			call_always(any);
		}
	}
	CHECK(fcntl(ch->fd, F_SETFL, O_NONBLOCK) == 0);
	grow_heap();
	start = (char *)heap_start();
	alarm(300); /* lost stores may stop it */
	for (int i = 0, n = 0; i < MOVES || n < 3 * MOVES; i++) {
		struct ibv_mr *mr = reg(start, (size_t)((char *)sbrk(0) - start));

		CHECK(shared(mr) && ibv_dereg_mr(mr) == 0);
		n += refuse_all(ch);
	}
	for (int i = 0; i < 4; i++)
		CHECK(kill(callers[i], SIGKILL) == 0 && waitpid(callers[i], NULL, 0) == callers[i]);
	refuse_all(ch);
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(ch);
}

/* The kernel lacks PROCMAP_QUERY (before Linux 6.11). */
static void no_query(void)
{
	forbid(SYS_ioctl, (uint32_t)_IOWR('f', 17, char[104]), ENOTTY);
	kinds();
	changes();
	forks();
}

/* Very many adjacent regions, of which every second one ends first. */
static void many(void)
{
	enum { N = 10000 };
	static struct ibv_mr *mr[N];
	char *p = map((size_t)N * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	bool near;

	for (int i = 0; i < N; i++) {
		p[i * PAGE] = (char)i;
		mr[i] = reg(p + i * PAGE, PAGE);
	}
	near = shared(p);
	for (int i = 0; i < N; i += 2)
		CHECK(ibv_dereg_mr(mr[i]) == 0);
	for (int i = 0; i < N; i++)
		CHECK(p[i * PAGE] == (char)i);
	for (int i = 0; i < N; i += N / 4) /* what other regions use stays as it is */
		CHECK(!shared(p + i * PAGE) && shared(p + (i + 1) * PAGE) == near);
	for (int i = 1; i < N; i += 2)
		CHECK(ibv_dereg_mr(mr[i]) == 0);
	for (int i = 0; i < N; i++)
		CHECK(p[i * PAGE] == (char)i);
}

/* A region larger than the machine's memory, which is not touched. */
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

/* in_file returns how many bytes the library's memfd has. */
static size_t in_file(void)
{
	char path[64], name[64];
	size_t bytes = 0;

	for (int fd = 0; fd < 256; fd++) {
		struct stat st;
		ssize_t n;

		snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
		n = readlink(path, name, sizeof(name) - 1);
		if (n < 0)
			continue;
		name[n] = 0;
		if (strstr(name, "iwarpd-near") && fstat(fd, &st) == 0)
			bytes += (size_t)st.st_blocks * 512;
	}
	return bytes;
}

/* Checks that pages kept after their region take what the memory has when it is registered again, and that no more than 16 MiB are kept. */
static void kept(void)
{
	enum { MANY = 8 * MEGABYTE };
	char *p = map(3 * MANY, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	struct ibv_mr *mr;

	memset(p, 1, 3 * MANY);
	CHECK(ibv_dereg_mr(reg(p, MANY)) == 0 && in_file() == MANY);
	memset(p, 2, MANY);
	/* A part: what is beside it is freed. */
	mr = reg(p + MEGABYTE, MEGABYTE);
	CHECK(in_file() == MEGABYTE && filled(p, 2, MANY));
	p[MEGABYTE] = 3;
	CHECK(ibv_dereg_mr(mr) == 0 && p[MEGABYTE] == 3 && filled(p + MEGABYTE + 1, 2, MANY - MEGABYTE - 1));
	/* More than a part, where the file has pages in the middle. */
	mr = reg(p, MANY);
	CHECK(in_file() == MANY && p[MEGABYTE] == 3 && filled(p, 2, MEGABYTE) && filled(p + MEGABYTE + 1, 2, MANY - MEGABYTE - 1));
	CHECK(ibv_dereg_mr(mr) == 0 && ibv_dereg_mr(reg(p + MANY, MANY)) == 0 && in_file() == 2 * MANY);
	CHECK(ibv_dereg_mr(reg(p + 2 * MANY, MANY)) == 0 && in_file() == 2 * MANY);
	CHECK(ibv_dereg_mr(reg(p, 3 * MANY)) == 0 && in_file() == 0);
	CHECK(p[MEGABYTE] == 3 && filled(p + MANY, 1, 2 * MANY));
	for (int i = 0; i < 20; i++)
		CHECK(ibv_dereg_mr(reg(p + 2 * PAGE * i, PAGE)) == 0);
	CHECK(in_file() == 16 * PAGE);
}

/* Memory that the program may not access becomes private again. */
static void guarded(void)
{
	char *p = map(MEGABYTE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	struct ibv_mr *mr;

	memset(p, 5, MEGABYTE);
	mr = reg(p, MEGABYTE);
	CHECK(mprotect(p, MEGABYTE, PROT_NONE) == 0 && ibv_dereg_mr(mr) == 0);
	CHECK(mprotect(p, MEGABYTE, PROT_READ | PROT_WRITE) == 0 && filled(p, 5, MEGABYTE) && !shared(p));
}

static char *collected_at;

static void collected_fault(int sig)
{
	(void)sig;
	(void)mprotect(collected_at, 4 * MEGABYTE, PROT_READ | PROT_WRITE);
}

/* collect takes the right to write away and stores, so that its handler gives it back, as garbage collectors do. */
static void *collect(void *arg)
{
	volatile uint64_t *first = (uint64_t *)(void *)collected_at;
	volatile uint64_t *last = (uint64_t *)(void *)(collected_at + 4 * MEGABYTE) - 1;

	for (uint64_t i = 1; !atomic_load(&stop); i++) {
		CHECK(mprotect(collected_at, 4 * MEGABYTE, PROT_READ) == 0);
		for (volatile int k = 0; k < 20000; k++)
			;
		*last = i;
		*first = i;
		for (volatile int k = 0; k < 2000000; k++)
			;
		CHECK(*last == i && *first == i);
	}
	return arg;
}

/* No store is lost that a thread makes after it got the right to write while another one moves the pages. */
static void collected(void)
{
	struct sigaction sa = { .sa_handler = collected_fault, .sa_flags = SA_NODEFER };
	struct timespec now, end;
	pthread_t t;

	collected_at = map(4 * MEGABYTE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	memset(collected_at, 1, 4 * MEGABYTE);
	CHECK(sigaction(SIGSEGV, &sa, NULL) == 0 && pthread_create(&t, NULL, collect, NULL) == 0);
	clock_gettime(CLOCK_MONOTONIC, &end);
	do {
		struct ibv_mr *mr = ibv_reg_mr(pd, collected_at, 4 * MEGABYTE, 0);

		CHECK(!mr || ibv_dereg_mr(mr) == 0);
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec < end.tv_sec + 4);
	atomic_store(&stop, true);
	CHECK(pthread_join(t, NULL) == 0);
}

static bool old_kernel;

/* ioctl is called by the libraries too. The userfaultfd of an old kernel (before Linux 6.4) lacks a feature. */
int ioctl(int fd, unsigned long request, ...)
{
	va_list ap;
	void *arg;

	va_start(ap, request);
	arg = va_arg(ap, void *);
	va_end(ap);
	if (old_kernel && request == UFFDIO_API && ((struct uffdio_api *)arg)->features & 1 << 13) {
		errno = EINVAL;
		return -1;
	}
	return (int)syscall(SYS_ioctl, fd, request, arg);
}

static void older(void)
{
	old_kernel = true;
	guarded();
	writers();
	changes();
}

enum { STEP = 16, DEPTH = 2 * PAGE };

static _Atomic(char *) of_stack; /* a page of the stack of owner */
static _Atomic(struct ibv_mr *) of_stack_mr;

/* deregister ends the region of the page when the stack is n bytes deeper. */
static __attribute__((noinline)) void deregister(size_t n)
{
	volatile char *deepest = alloca(n);

	*deepest = 1;
	CHECK(ibv_dereg_mr(of_stack_mr) == 0);
}

/* The library's frames are first above the page, then reach into it, are in it, and in the end below it. */
static void *owner(void *arg)
{
	atomic_store(&of_stack, (char *)((uintptr_t)__builtin_frame_address(0) / PAGE * PAGE) - DEPTH / 2);
	for (size_t n = STEP; n <= DEPTH; n += STEP) {
		while (!atomic_load(&of_stack_mr))
			sched_yield();
		deregister(n);
		atomic_store(&of_stack_mr, NULL);
	}
	while (!atomic_load(&stop))
		sched_yield();
	return arg;
}

/* A thread deregisters a page of its stack that another one has registered. */
static void stacks(void)
{
	pthread_t t;
	char *page;

	alarm(60);
	CHECK(pthread_create(&t, NULL, owner, NULL) == 0);
	while ((page = atomic_load(&of_stack)) == NULL)
		sched_yield();
	for (size_t n = STEP; n <= DEPTH; n += STEP) {
		struct ibv_mr *mr = reg(page, PAGE);

		CHECK(shared(page));
		atomic_store(&of_stack_mr, mr);
		while (atomic_load(&of_stack_mr))
			sched_yield();
	}
	CHECK(ibv_dereg_mr(reg(page, PAGE)) == 0 && !shared(page));
	atomic_store(&stop, true);
	CHECK(pthread_join(t, NULL) == 0);
}

/* Holds a region of each kind until the test ends the program. */
static void hold(void)
{
	char *p = malloc(MEGABYTE), stack[100];

	reg(p, MEGABYTE);
	reg(stack, sizeof(stack));
	printf("registered\n");
	fflush(stdout);
	pause();
}

/* The program ends, and its child does not. */
static void orphaned(void)
{
	pid_t child;

	reg(malloc(MEGABYTE), MEGABYTE);
	child = fork();
	CHECK(child >= 0);
	if (child > 0)
		_exit(0);
	close(STDOUT_FILENO);
	close(STDERR_FILENO);
	pause();
}

/* sleeps returns how often the library's thread has slept. */
static long sleeps(void)
{
	char path[64], line[256];
	long n = -1;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/self/task/%d/status", thread_named("iwarpd-verbs"));
	f = fopen(path, "re");
	CHECK(f);
	while (fgets(line, sizeof(line), f) && sscanf(line, "voluntary_ctxt_switches: %ld", &n) != 1)
		;
	fclose(f);
	CHECK(n >= 0);
	return n;
}

/* The program closes all descriptors that it does not know, as daemons do. Their numbers are those of other files then, which stay. */
static void closed(void)
{
	char *p = malloc(MEGABYTE);
	int pipes[2], last, status;
	long slept;
	pid_t child;

	alarm(60);
	memset(p, 5, MEGABYTE);
	reg(p, MEGABYTE);
	CHECK(pipe(pipes) == 0);
	last = dup(pipes[0]);
	for (int fd = STDERR_FILENO + 1; fd < last; fd++)
		CHECK(fd == pipes[0] || dup2(pipes[0], fd) == fd);
	slept = sleeps();
	while (sleeps() < slept + 3) /* unless it finds at once that it has nothing to wait for, again and again */
		usleep(1000);
	child = fork();
	CHECK(child >= 0);
	if (child > 0)
		CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	for (int fd = STDERR_FILENO + 1; fd <= last; fd++)
		CHECK(fcntl(fd, F_GETPIPE_SZ) > 0);
	CHECK(filled(p, 5, MEGABYTE));
	CHECK(!ibv_reg_mr(pd, malloc(MEGABYTE), MEGABYTE, RW));
	_exit(0);
}

/* The library looks for mappings in the file that it has opened for that, and not in one that has its number. */
static void renumbered(void)
{
	char *p = malloc(MEGABYTE), maps[64], link[64] = "";
	int other = memfd_create("other", MFD_CLOEXEC), fd = other;

	memset(p, 5, MEGABYTE);
	reg(malloc(MEGABYTE), MEGABYTE);
	snprintf(maps, sizeof(maps), "/proc/%d/maps", getpid());
	while (strcmp(link, maps) != 0) {
		char path[32];
		ssize_t n;

		CHECK(++fd < 100);
		snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
		n = readlink(path, link, sizeof(link) - 1);
		link[n > 0 ? n : 0] = 0;
	}
	CHECK(write(other, "other", 5) == 5 && lseek(other, 2, SEEK_SET) == 2 && dup2(other, fd) == fd);
	reg(p, MEGABYTE);
	CHECK(shared(p) && filled(p, 5, MEGABYTE) && lseek(other, 0, SEEK_CUR) == 2);
	_exit(0);
}

static void flush(void);

/* A sandbox forbids the mark by which the library knows its descriptors. */
static void unmarked(void)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(1), .sin_addr = { htonl(INADDR_LOOPBACK) } };
	struct ibv_pd *first = pd;
	struct rdma_event_channel *ch;
	struct ibv_context *ended;
	struct rdma_cm_event *e;
	struct rdma_cm_id *id;
	pid_t child;
	int status;

	forbid(SYS_fcntl, F_SETSIG, EPERM);
	pd = open_pd();
	flush();
	ch = rdma_create_event_channel();
	CHECK(ch && rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000) == 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK(fcntl(ch->fd, F_SETFL, O_NONBLOCK) == 0 && rdma_get_cm_event(ch, &e) == -1 && errno == EAGAIN);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(rdma_get_cm_event(ch, &e) == 0 && e->event == RDMA_CM_EVENT_ADDR_RESOLVED && rdma_ack_cm_event(e) == 0);
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(ch);
	ended = pd->context;
	CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(ended) == 0);
	pd = first;
}

/* Even then it leaves those alone that are of another kind. */
static void unmarked_closed(void)
{
	forbid(SYS_fcntl, F_SETSIG, EPERM);
	pd = open_pd();
	closed();
}

/* A QP without a connection completes posted receives when it enters the error state. */
static void flush(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(pd->context);
	struct ibv_cq *cq = ibv_create_cq(pd->context, 10, NULL, channel, 0), *woken;
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;
	struct ibv_send_wr bind = { .opcode = IBV_WR_BIND_MW, .bind_mw.bind_info = { .length = UINT64_C(1) << 32 } }, *bad_bind;
	struct ibv_wc wc;
	void *context;

	CHECK(qp && ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
	CHECK(ibv_post_send(qp, &bind, &bad_bind) == EINVAL && bad_bind == &bind); /* a window has less than 4 GiB */
	CHECK(ibv_post_recv(qp, &wr, &bad) == 0);
	CHECK(ibv_req_notify_cq(cq, 0) == 0 && ibv_poll_cq(cq, 1, &wc) == 0);
	attr.qp_state = IBV_QPS_ERR;
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
	CHECK(ibv_get_cq_event(channel, &woken, &context) == 0 && woken == cq);
	ibv_ack_cq_events(cq, 1);
	wr.wr_id = 2;
	CHECK(ibv_post_recv(qp, &wr, &bad) == 0);
	for (uint64_t i = 0; i < 2; i++) {
		while (ibv_poll_cq(cq, 1, &wc) == 0)
			usleep(1000);
		CHECK(wc.wr_id == i + 1 && wc.status == IBV_WC_WR_FLUSH_ERR && wc.qp_num == qp->qp_num);
	}
	CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(channel) == 0);
}

int main(int argc, char **argv)
{
	static const struct { const char *name; void (*run)(void); } modes[] = {
		{ "kinds", kinds }, { "changes", changes }, { "forks", forks }, { "writers", writers }, { "many", many }, { "sparse", sparse }, { "kept", kept },
		{ "flush", flush }, { "limit-as", limit_as }, { "limit-data", limit_data }, { "limit-fsize", limit_fsize },
		{ "limit-memlock", limit_memlock }, { "limit-nofile", limit_nofile }, { "execs", execs }, { "undumpable", undumpable }, { "no-userfaultfd", no_userfaultfd },
		{ "without-eperm", without_eperm }, { "without-enosys", without_enosys }, { "heap", heap }, { "no-query", no_query },
		{ "unmarked", unmarked }, { "unmarked-closed", unmarked_closed }, { "hold", hold }, { "closed", closed }, { "renumbered", renumbered }, { "orphaned", orphaned }, { "stacks", stacks }, { "guarded", guarded }, { "collected", collected }, { "older", older },
	};
	struct ibv_context *c;

	CHECK(argc == 2);
	mallopt(M_ARENA_MAX, 1); /* returns 0 with the sanitizer's malloc, which needs no limit */
	pd = open_pd();
	c = pd->context;
	for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++)
		if (strcmp(argv[1], modes[i].name) == 0)
			modes[i].run();
	CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(c) == 0);
	return 0;
}
