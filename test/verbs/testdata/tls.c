/* Thread-local variables, which are as large as some stacks, are registered. */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

static __thread char local[1 << 20];

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *c;
	struct ibv_pd *pd;

	alarm(60);
	CHECK(list && list[0]);
	c = ibv_open_device(list[0]);
	CHECK(c);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(c);
	CHECK(pd);
	for (int i = 0; i < 10; i++) {
		struct ibv_mr *mr;

		memset(local, i, sizeof(local));
		mr = ibv_reg_mr(pd, local, sizeof(local), IBV_ACCESS_LOCAL_WRITE);
		CHECK(mr && ibv_dereg_mr(mr) == 0);
		for (size_t k = 0; k < sizeof(local); k++)
			CHECK(local[k] == (char)i);
	}
	CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(c) == 0);
	return 0;
}
