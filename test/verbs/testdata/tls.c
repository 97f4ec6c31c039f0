/*
 * Thread-local variables, which are as large as some stacks, are registered while the kernel takes the CPU from the
 * thread again and again. It stores on which CPU the thread runs on the same page as the last of them, or on the
 * next one.
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/rseq.h>
#include <unistd.h>

#include "check.h"

static __thread char local[1 << 20];
static atomic_bool stop;

static void *spin(void *arg)
{
	while (!atomic_load(&stop))
		;
	return arg;
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	char *end = (char *)__builtin_thread_pointer() + __rseq_offset + sizeof(struct rseq);
	struct ibv_context *c;
	struct ibv_pd *pd;
	pthread_t t;
	cpu_set_t one;

	alarm(60);
	CPU_ZERO(&one);
	CPU_SET(sched_getcpu(), &one);
	CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
	CHECK(list && list[0]);
	c = ibv_open_device(list[0]);
	CHECK(c);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(c);
	CHECK(pd && pthread_create(&t, NULL, spin, NULL) == 0);
	for (int i = 0; i < 300; i++) {
		struct ibv_mr *mr;

		memset(local, i, sizeof(local));
		mr = ibv_reg_mr(pd, local, (size_t)(end - local), IBV_ACCESS_LOCAL_WRITE);
		CHECK(mr && ibv_dereg_mr(mr) == 0);
		for (size_t k = 0; k < sizeof(local); k++)
			CHECK(local[k] == (char)i);
	}
	atomic_store(&stop, true);
	CHECK(pthread_join(t, NULL) == 0);
	CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(c) == 0);
	return 0;
}
