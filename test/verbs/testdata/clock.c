/*
 * Waits of the library while the time of day is wrong: by the clock that the library sees, it is
 * an hour later than by the kernel's.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* clock_gettime replaces the C library's. */
int clock_gettime(clockid_t clock, struct timespec *t)
{
	long err = syscall(SYS_clock_gettime, clock, t);

	if (!err && clock == CLOCK_REALTIME)
		t->tv_sec += 3600;
	return (int)err;
}

int main(void)
{
	void (*lock)(void), (*wait)(int);

	ibv_free_device_list(ibv_get_device_list(NULL)); /* the library is linked */
	*(void **)&lock = dlsym(RTLD_DEFAULT, "iwv_thread_lock");
	*(void **)&wait = dlsym(RTLD_DEFAULT, "iwv_thread_wait");
	if (!lock || !wait) {
		printf("%s\n", dlerror());
		return 1;
	}
	alarm(20);
	lock();
	wait(1500);
	return 0;
}
