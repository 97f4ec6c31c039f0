/*
 * Measures registering memory with libibverbs.
 *
 *	register first|fresh|again|last|any|touch size ms
 *
 * It prints the median, the mean and the least time in microseconds of
 *
 *	first  ibv_reg_mr of new memory that was written to, at addresses that were registered before
 *	fresh  the same at addresses that were never registered
 *	again  ibv_reg_mr of memory that another region covers
 *	last   ibv_dereg_mr of the last region of the memory
 *	any    ibv_reg_mr of memory that was never written to; far memory may exceed the machine's
 *	touch  no registration: the first write to each page of new memory
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { MOST = 100000, LEAST = 5 }; /* samples */

static struct ibv_pd *pd;
static size_t size;
static double samples[MOST];

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void open_pd(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *c;

	errno = ENODEV;
	if (!list || !list[0])
		die("device");
	c = ibv_open_device(list[0]);
	if (!c)
		die("ibv_open_device");
	pd = ibv_alloc_pd(c);
	if (!pd)
		die("ibv_alloc_pd");
	ibv_free_device_list(list);
}

static char *map(void)
{
	char *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | MAP_PRIVATE | MAP_NORESERVE, -1, 0);

	if (p == MAP_FAILED)
		die("mmap");
	return p;
}

static void touch(char *p)
{
	for (size_t i = 0; i < size; i += 4096)
		*(volatile char *)(p + i) = 1;
}

static struct ibv_mr *reg(char *p)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, p, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);

	if (!mr)
		die("ibv_reg_mr");
	return mr;
}

static void dereg(struct ibv_mr *mr)
{
	if (ibv_dereg_mr(mr))
		die("ibv_dereg_mr");
}

/* timed registers memory that was written to, and returns how long that took. */
static double timed(char *p)
{
	struct ibv_mr *mr;
	double t;

	touch(p);
	t = now();
	mr = reg(p);
	t = now() - t;
	dereg(mr);
	return t;
}

static double first(void)
{
	char *p = map();
	double t = timed(p);

	munmap(p, size);
	return t;
}

static double fresh(void)
{
	char *p = map();
	double t = timed(p);

	/* The addresses stay taken. */
	if (mmap(p, size, PROT_NONE, MAP_ANONYMOUS | MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
		die("mmap");
	return t;
}

static double again(void)
{
	static char *p;
	struct ibv_mr *mr;
	double t;

	if (!p) {
		p = map();
		reg(p);
	}
	t = now();
	mr = reg(p);
	t = now() - t;
	dereg(mr);
	return t;
}

static double last(void)
{
	char *p = map();
	struct ibv_mr *mr;
	double t;

	touch(p);
	mr = reg(p);
	t = now();
	dereg(mr);
	t = now() - t;
	munmap(p, size);
	return t;
}

static double any(void)
{
	char *p = map();
	struct ibv_mr *mr;
	double t = now();

	mr = reg(p);
	t = now() - t;
	dereg(mr);
	munmap(p, size);
	return t;
}

static double touched(void)
{
	char *p = map();
	double t = now();

	touch(p);
	t = now() - t;
	munmap(p, size);
	return t;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

int main(int argc, char **argv)
{
	static const struct { const char *name; double (*once)(void); } kinds[] = {
		{ "first", first }, { "fresh", fresh }, { "again", again }, { "last", last }, { "any", any }, { "touch", touched },
	};
	double (*once)(void) = NULL, end, sum = 0;
	size_t n = 0;

	for (size_t i = 0; argc == 4 && i < sizeof kinds / sizeof kinds[0]; i++)
		if (strcmp(argv[1], kinds[i].name) == 0)
			once = kinds[i].once;
	if (!once) {
		fprintf(stderr, "usage: register first|fresh|again|last|any|touch size ms\n");
		return 2;
	}
	size = strtoul(argv[2], NULL, 10);
	if (once != touched)
		open_pd();
	once(); /* the first call makes what the process keeps */
	end = now() + 1000 * atof(argv[3]);
	while (n < MOST && (n < LEAST || now() < end)) {
		samples[n] = once();
		sum += samples[n++];
	}
	qsort(samples, n, sizeof samples[0], compare);
	printf("%.3f %.3f %.3f\n", samples[n / 2], sum / (double)n, samples[0]);
	return 0;
}
