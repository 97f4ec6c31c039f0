/* Devices as the connection manager uses them, and the choice of the device for an address. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cm.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t finding = PTHREAD_MUTEX_INITIALIZER; /* one thread looks for an address at a time */
static void *library;

static void open_library(void)
{
	library = dlopen("/usr/$LIB/librdmacm.so.1", RTLD_LAZY | RTLD_LOCAL);
	if (!library)
		iwv_log("the distribution's librdmacm: %s", dlerror());
}

void *real_cm_symbol(const char *name)
{
	pthread_once(&once, open_library);
	return library ? dlsym(library, name) : NULL;
}

/* is_open reports whether a device is open. */
static bool is_open(const struct device *d)
{
	bool open;

	iwv_thread_lock();
	open = context_live(d->cm);
	iwv_thread_unlock();
	return open;
}

/*
 * set_context makes opened the context of a device. That of a daemon that has ended stays if it was shown to
 * the program.
 */
static void set_context(struct device *d, struct context *opened)
{
	struct context *other = opened; /* unless another thread was faster */

	iwv_thread_lock();
	if (!context_live(d->cm)) {
		other = d->cm;
		d->cm = opened;
	}
	if (other && !other->shown)
		iwv_context_close(other);
	iwv_thread_unlock();
}

/*
 * has reports whether the device has the address, or its interface has it as a link-local
 * address.
 */
static bool has(const struct device *d, const struct sockaddr *a)
{
	const struct sockaddr_in6 *a6 = (const struct sockaddr_in6 *)(const void *)a;
	struct sockaddr_storage own;
	char name[IF_NAMESIZE];

	for (unsigned int i = 0; iwv_device_address(d, i, &own); i++)
		if (addr_same((struct sockaddr *)&own, a))
			return true;
	return a->sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&a6->sin6_addr) &&
	       if_indextoname(a6->sin6_scope_id, name) && strcmp(name, d->interface) == 0;
}

/*
 * open_devices opens the devices that are present and, unless a is NULL, have that address. It reports whether there is
 * one.
 */
static bool open_devices(struct device *d, enum scan how, const struct sockaddr *a)
{
	bool any = false;

	for (; d; d = d->next) {
		struct context *c;

		if (!atomic_load(&d->present) || (a && !has(d, a)))
			continue;
		any = true;
		c = is_open(d) ? NULL : iwv_context_open(d, how);
		if (c)
			set_context(d, c);
	}
	return any;
}

void cm_scan(enum scan how)
{
	/*
	 * Asking a daemon that is known again takes milliseconds, and the client of perftest does not wait until its
	 * server listens again.
	 */
	open_devices(iwv_devices_scan(how), how, NULL);
}

static bool open_with(const struct sockaddr *a)
{
	bool found;

	iwv_thread_lock();
	found = context_with(a);
	iwv_thread_unlock();
	return found;
}

void cm_find(const struct sockaddr *a)
{
	struct device *list;
	int state;

	if (addr_any(a)) {
		cm_scan(SCAN_NEW);
		return;
	}
	if (open_with(a))
		return;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	pthread_mutex_lock(&finding);
	/* Since the last scan an interface may have got an address, or a daemon may have started. */
	if (!open_with(a)) { /* nor has another thread opened it meanwhile */
		list = iwv_devices_scan(SCAN_ALL);
		if (!open_devices(list, SCAN_ALL, a))
			open_devices(list, SCAN_ALL, NULL); /* for context_for */
	}
	pthread_mutex_unlock(&finding);
	pthread_setcancelstate(state, NULL);
}

static void after_fork_child(void)
{
	pthread_mutex_init(&finding, NULL);
}

__attribute__((constructor)) static void init(void)
{
	pthread_atfork(NULL, NULL, after_fork_child);
}

struct context *context_with(const struct sockaddr *a)
{
	for (struct device *d = iwv_devices_scan(SCAN_NONE); d; d = d->next)
		if (context_live(d->cm) && has(d, a))
			return d->cm;
	return NULL;
}

/* local reports whether this network namespace has the address. (One without addresses accepts any in bind(2).) */
static bool local(const struct sockaddr_storage *a)
{
	struct ifaddrs *all;
	bool is = false;

	if (getifaddrs(&all) < 0)
		return true;
	for (struct ifaddrs *i = all; i; i = i->ifa_next)
		if (i->ifa_addr && addr_same(i->ifa_addr, (const struct sockaddr *)a))
			is = true;
	freeifaddrs(all);
	return is;
}

/*
 * context_of returns the first context whose device has an address of a family, which it stores in *a. With elsewhere
 * it must be the address of another network namespace.
 */
static struct context *context_of(sa_family_t family, struct sockaddr_storage *a, bool elsewhere)
{
	for (struct device *d = iwv_devices_scan(SCAN_NONE); d; d = d->next)
		for (unsigned int i = 0; context_live(d->cm) && iwv_device_address(d, i, a); i++)
			if (a->ss_family == family && !(elsewhere && local(a)))
				return d->cm;
	return NULL;
}

int cm_route(const struct sockaddr *dst, struct sockaddr_storage *src)
{
	socklen_t len = sizeof(*src);
	int s, state, err;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); /* the socket would stay open */
	memset(src, 0, sizeof(*src));
	src->ss_family = dst->sa_family;
	s = socket(dst->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	err = s < 0 && errno != EAFNOSUPPORT ? errno : 0; /* a host without IPv6 has no route */
	if (s >= 0 && connect(s, dst, addr_len(dst)) == 0 && getsockname(s, (struct sockaddr *)src, &len) == 0)
		addr_set_port((struct sockaddr *)src, 0);
	if (s >= 0)
		close(s);
	pthread_setcancelstate(state, &state);
	return set_errno(err);
}

struct context *context_for(const struct sockaddr *dst, struct sockaddr_storage *src)
{
	struct context *c = context_with((struct sockaddr *)src);

	return c ? c : context_of(dst->sa_family, src, !addr_any(dst));
}

struct ibv_context **rdma_get_devices(int *num)
{
	struct ibv_context **list;
	struct device *devices;
	size_t most = 0;
	int n = 0;

	FORWARD(rdma_get_devices, num);
	cm_scan(SCAN_NEW);
	iwv_thread_lock();
	devices = iwv_devices_scan(SCAN_NONE);
	for (struct device *d = devices; d; d = d->next)
		most++;
	list = calloc(most + 1, sizeof(*list));
	for (struct device *d = devices; list && d; d = d->next) {
		if (!context_live(d->cm))
			continue;
		d->cm->shown = true;
		list[n++] = &d->cm->v.context;
	}
	iwv_thread_unlock();
	if (n == 0) {
		free(list);
		list = NULL;
		errno = ENODEV;
	}
	if (num)
		*num = n;
	return list;
}

void rdma_free_devices(struct ibv_context **list)
{
	FORWARD(rdma_free_devices, list);
	free(list);
}
