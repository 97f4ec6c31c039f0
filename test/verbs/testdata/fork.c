/*
 * fork SOCKET: a fork waits for another thread that looks for devices, since the child would keep the connection to the daemon.
 * The child can look for devices then. The program itself is the daemon at SOCKET, which does not answer.
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static void *scan(void *arg)
{
	(void)arg;
	ibv_free_device_list(ibv_get_device_list(NULL));
	return NULL;
}

static atomic_bool forks; /* the main thread will wait for nothing but the end of the scan */

/* hang_up ends a scan, which has the daemon's end of its connection, when the main thread waits for it. */
static void *hang_up(void *daemon)
{
	while (!atomic_load(&forks))
		usleep(1000);
	await_call(getpid(), SYS_futex);
	CHECK(close(*(int *)daemon) == 0);
	return NULL;
}

int main(int argc, char **argv)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), first, second, files, status;
	struct pollfd p = { .fd = listener, .events = POLLIN };
	pthread_t thread, other;
	pid_t child;

	CHECK(argc == 2 && strlen(argv[1]) < sizeof(addr.sun_path));
	strcpy(addr.sun_path, argv[1]);
	CHECK(bind(listener, (struct sockaddr *)&addr, sizeof(addr)) == 0 && listen(listener, 8) == 0);
	CHECK(setenv("IWARPD_SOCKET", argv[1], 1) == 0);
	files = open_files();
	CHECK(pthread_create(&thread, NULL, scan, NULL) == 0);
	first = accept(listener, NULL, NULL);
	CHECK(first >= 0 && pthread_create(&other, NULL, hang_up, &first) == 0);
	atomic_store(&forks, true);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK(open_files() == files);
		scan(NULL);
		_exit(0);
	}
	if (poll(&p, 1, 20000) != 1) {
		printf("the child does not look for devices\n");
		kill(child, SIGKILL);
		return 1;
	}
	second = accept(listener, NULL, NULL);
	CHECK(second >= 0 && close(second) == 0);
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(pthread_join(other, NULL) == 0 && pthread_join(thread, NULL) == 0);
	return 0;
}
