/* The distribution's libibverbs, which serves all devices that are not iwarpd's. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "internal.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static void *library;

static void open_library(void)
{
	library = dlopen("/usr/$LIB/libibverbs.so.1", RTLD_LAZY | RTLD_LOCAL);
	if (!library)
		iwv_log("the distribution's libibverbs: %s", dlerror());
}

void *real_verbs_symbol(const char *name)
{
	void *f;

	pthread_once(&once, open_library);
	f = library ? dlsym(library, name) : NULL;
	if (!f)
		iwv_log("the distribution's libibverbs has no %s", name);
	return f;
}
