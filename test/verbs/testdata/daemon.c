/*
 * daemon: a child uses the device that its parent has opened and not used, as the child of daemon(3) does; the parent
 * does so too. The descriptors for events do not block in the child either.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <rdma/rdma_cma.h>
#include <sys/socket.h>
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
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	struct ibv_cq *cq;

	CHECK(pd);
	mr = ibv_reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_LOCAL_WRITE);
	cq = ibv_create_cq(c, 16, NULL, NULL, 0);
	init.srq = ibv_create_srq(pd, &shared);
	CHECK(mr && cq && init.srq);
	init.send_cq = init.recv_cq = cq;
	qp = ibv_create_qp(pd, &init);
	CHECK(qp && ibv_modify_qp(qp, &error, IBV_QP_STATE) == 0); /* an asynchronous event: it has used its last receive */
	CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_srq(init.srq) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(pd) == 0);
}

int main(void)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_async_event async;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct ibv_context *c;
	char data[64];
	int status, ends[2];
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
		if (again == 0) { /* all descriptors that it does not know are those of another file */
			CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0 && write(ends[1], "12345678", 8) == 8);
			CHECK(dup2(ends[1], MANY) == MANY && dup2(ends[0], MANY + 1) == MANY + 1);
			for (int fd = STDERR_FILENO + 1; fd < MANY; fd++)
				CHECK(dup2(MANY + 1, fd) == fd);
			use(c);
			CHECK(ibv_close_device(c) == 0);
			rdma_destroy_event_channel(ch);
			for (int fd = STDERR_FILENO + 1; fd < MANY; fd++)
				CHECK(fcntl(fd, F_GETFD) == 0);
			CHECK(read(MANY + 1, data, sizeof(data)) == 8 && read(MANY, data, sizeof(data)) < 0 && errno == EAGAIN);
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
