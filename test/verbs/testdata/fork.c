/*
 * fork SOCKET: a child looks for devices, though its parent was forked while another thread was doing
 * so. The program itself is the daemon at SOCKET, which does not answer.
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
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

int main(int argc, char **argv)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), first, second, status;
	struct pollfd p = { .fd = listener, .events = POLLIN };
	pthread_t thread;
	pid_t child;

	CHECK(argc == 2 && strlen(argv[1]) < sizeof(addr.sun_path));
	strcpy(addr.sun_path, argv[1]);
	CHECK(bind(listener, (struct sockaddr *)&addr, sizeof(addr)) == 0 && listen(listener, 8) == 0);
	CHECK(setenv("IWARPD_SOCKET", argv[1], 1) == 0);
	CHECK(pthread_create(&thread, NULL, scan, NULL) == 0);
	first = accept(listener, NULL, NULL);
	CHECK(first >= 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
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
	CHECK(close(first) == 0 && pthread_join(thread, NULL) == 0);
	return 0;
}
