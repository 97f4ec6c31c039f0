/*
 * daemon: a child uses the device that its parent has opened and not used, as the child of daemon(3) does; the parent
 * does so too. The descriptors for events do not block in the child either.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <rdma/rdma_cma.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { MANY = 50 }; /* more descriptors than are open */

/* epolls returns the number of epolls that this process has. */
static int epolls(void)
{
	static const char name[] = "anon_inode:[eventpoll]";
	char path[32], link[sizeof(name)];
	int n = 0;

	for (int fd = 0; fd < MANY; fd++) {
		snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
		n += readlink(path, link, sizeof(link)) == sizeof(name) - 1 && memcmp(link, name, sizeof(name) - 1) == 0;
	}
	return n;
}

static void use(struct ibv_context *c)
{
	struct ibv_pd *pd = ibv_alloc_pd(c);
	static char buf[4096];
	struct ibv_mr *mr;
	struct ibv_cq *cq;

	CHECK(pd);
	mr = ibv_reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_LOCAL_WRITE);
	cq = ibv_create_cq(c, 16, NULL, NULL, 0);
	CHECK(mr && cq);
	CHECK(ibv_destroy_cq(cq) == 0 && ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(pd) == 0);
}

int main(void)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_async_event async;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct ibv_context *c;
	int status;
	pid_t child, again;

	CHECK(list && *list && ch);
	c = ibv_open_device(*list);
	CHECK(c && rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(fcntl(c->async_fd, F_SETFL, O_NONBLOCK) == 0 && fcntl(ch->fd, F_SETFL, O_NONBLOCK) == 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		alarm(30);
		CHECK(ibv_get_async_event(c, &async) < 0 && errno == EAGAIN);
		CHECK(rdma_get_cm_event(ch, &event) < 0 && errno == EAGAIN);
		again = fork();
		CHECK(again >= 0);
		if (again == 0) { /* all descriptors that it does not know are those of other files */
			for (int fd = STDERR_FILENO + 1; fd < MANY; fd++)
				CHECK(dup2(STDERR_FILENO, fd) == fd);
			use(c);
			CHECK(ibv_close_device(c) == 0);
			rdma_destroy_event_channel(ch);
			for (int fd = STDERR_FILENO + 1; fd < MANY; fd++)
				CHECK(fcntl(fd, F_GETFD) == 0);
			_exit(0);
		}
		CHECK(waitpid(again, &status, 0) == again && WIFEXITED(status) && WEXITSTATUS(status) == 0);
		use(c);
		CHECK(ibv_close_device(c) == 0);
		exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	use(c);
	CHECK(ibv_close_device(c) == 0);
	child = fork(); /* while the library's thread has nothing to wait for */
	CHECK(child >= 0);
	if (child == 0)
		_exit(epolls());
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0 && epolls() == 1);
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(ch);
	ibv_free_device_list(list);
	return 0;
}
