/*
 * Usage: appear SOCKET LINK
 *
 * A daemon appears while the list of devices is being made: LINK, the second socket of IWARPD_SOCKET, becomes one to SOCKET.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "check.h"

enum { PLACES = 3 }; /* in a list of one device: it, NULL, and the list of the distribution's library */

static char **files;
static const size_t behind = 0x5a5a5a5a;
static size_t *list_end;
static atomic_bool making;

static int count(void)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);

	CHECK(list && !list[n]);
	ibv_free_device_list(list);
	return n;
}

static void *look(void *unused)
{
	CHECK(count() == 2);
	return unused;
}

void *__libc_calloc(size_t n, size_t size);
void *calloc(size_t n, size_t size)
{
	Dl_info caller;
	pthread_t t;

	if (n != PLACES || !atomic_load(&making) || !dladdr(__builtin_return_address(0), &caller) || !caller.dli_sname ||
	    strcmp(caller.dli_sname, "ibv_get_device_list") != 0)
		return __libc_calloc(n, size);
	atomic_store(&making, false);
	CHECK(symlink(files[1], files[2]) == 0 && pthread_create(&t, NULL, look, NULL) == 0 && pthread_join(t, NULL) == 0);
	list_end = (size_t *)__libc_calloc(n + 1, size) + n;
	*list_end = behind;
	return list_end - n;
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	files = argv;
	CHECK(count() == 1);
	atomic_store(&making, true);
	CHECK(count() == 1 && list_end && *list_end == behind);
	CHECK(count() == 2);
	return 0;
}
