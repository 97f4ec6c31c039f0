/* What test programs share. CHECK ends one unless x is true. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

#include "../../testdata/descriptors.h"

#define CHECK(x)                                                                            \
	do {                                                                                \
		if (!(x)) {                                                                 \
			printf("line %d: failed: %s: %s\n", __LINE__, #x, strerror(errno)); \
			exit(1);                                                            \
		}                                                                           \
	} while (0)

/* thread_named returns the thread of this process that has a name. */
static inline pid_t thread_named(const char *name)
{
	DIR *d = opendir("/proc/self/task");
	pid_t found = -1;
	struct dirent *e;

	CHECK(d);
	while (found < 0 && (e = readdir(d)) != NULL) {
		char path[300], comm[32] = "";
		FILE *f;

		snprintf(path, sizeof(path), "/proc/self/task/%s/comm", e->d_name);
		f = fopen(path, "re");
		if (f && fgets(comm, sizeof(comm), f) && strncmp(comm, name, strlen(name)) == 0)
			found = (pid_t)atoi(e->d_name);
		if (f)
			fclose(f);
	}
	closedir(d);
	CHECK(found > 0);
	return found;
}

/* await_call waits until a thread of this process waits in a system call. */
static inline void await_call(pid_t tid, long want)
{
	char path[64];
	long call = -1;

	snprintf(path, sizeof(path), "/proc/self/task/%d/syscall", (int)tid);
	while (call != want) {
		FILE *f = fopen(path, "re");

		CHECK(f);
		if (fscanf(f, "%ld", &call) != 1)
			call = -1; /* it runs */
		fclose(f);
		usleep(1000);
	}
}

/*
 * fork_idle forks while the library's thread waits for events: one that starts may hold a lock of the sanitizer, which is
 * never released in the child.
 */
static inline pid_t fork_idle(void)
{
	await_call(thread_named("iwarpd-verbs"), SYS_epoll_wait);
	return fork();
}
