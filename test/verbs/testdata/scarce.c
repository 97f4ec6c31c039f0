/*
 * Uses libibverbs and librdmacm while the process lacks something: each call that needs it fails in turn, and each packet with
 * descriptors comes without them. A function must fail with an errno, and succeed when it is called again.
 *
 *	scarce ADDRESS
 *
 * When it has destroyed all objects, it prints "made all" and waits to be ended. The libraries are linked with --wrap for
 * the functions below, which they find in this program.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../testdata/descriptors.h"

static const char *step = "start", *lacking = "nothing";
static int number;

#define CHECK(cond)                                                                                               \
	do {                                                                                                      \
		if (!(cond)) {                                                                                    \
			fprintf(stderr, "scarce.c:%d: %s without %s, call %d: not so: %s (%s)\n", __LINE__, step, \
				lacking, number, #cond, strerror(errno));                                         \
			exit(1);                                                                                  \
		}                                                                                                 \
	} while (0)

enum { WAIT = 60000 };

/* What the process lacks. What a resize needs once the daemon has done it is left out: test/clib has a test of that. */
enum { NOTHING, MEMORY, MAPPINGS, FILES, RIGHTS, BUFFERS, THREADS, OTHER };

/* Of the thread that calls: the library's thread lacks nothing. */
static __thread int scarce; /* what it is of which call number fails */
static __thread int calls;  /* since it was set */
static __thread bool failed;

/* fails reports whether a call that takes some of what must fail now, with that error. */
static bool fails(int what, int error)
{
	if (scarce == NOTHING || scarce != what || calls++ != number)
		return false;
	failed = true;
	errno = error;
	return true;
}

#define WRAP(type, name, params, args, what, error, failure)   \
	type __wrap_##name params;                             \
	type __wrap_##name params                              \
	{                                                      \
		return fails(what, error) ? failure : name args; \
	}

WRAP(void *, malloc, (size_t n), (n), MEMORY, ENOMEM, NULL)
WRAP(void *, calloc, (size_t n, size_t size), (n, size), MEMORY, ENOMEM, NULL)
WRAP(void *, realloc, (void *p, size_t n), (p, n), MEMORY, ENOMEM, NULL)
WRAP(void *, mmap, (void *p, size_t n, int prot, int flags, int fd, off_t at), (p, n, prot, flags, fd, at), MAPPINGS, ENOMEM, MAP_FAILED)
WRAP(int, eventfd, (unsigned int n, int flags), (n, flags), FILES, EMFILE, -1)
WRAP(int, epoll_create1, (int flags), (flags), FILES, EMFILE, -1)
WRAP(int, epoll_ctl, (int e, int op, int fd, struct epoll_event *ev), (e, op, fd, ev), op == EPOLL_CTL_ADD ? MAPPINGS : OTHER, ENOMEM, -1)
WRAP(int, memfd_create, (const char *name, unsigned int flags), (name, flags), FILES, EMFILE, -1)
WRAP(int, socket, (int domain, int type, int protocol), (domain, type, protocol), FILES, EMFILE, -1)
WRAP(int, pthread_create, (pthread_t *t, const pthread_attr_t *attr, void *(*f)(void *), void *arg), (t, attr, f, arg), THREADS, EAGAIN, EAGAIN)

int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
	return fails(FILES, EMFILE) ? -1 : open(path, flags);
}

/* The kernel has buffers again when it has been asked for them three times. */
ssize_t __wrap_sendmsg(int fd, const struct msghdr *h, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *h, int flags)
{
	static __thread int left;

	if (fails(BUFFERS, ENOBUFS))
		left = 3;
	if (left == 0)
		return sendmsg(fd, h, flags);
	left--;
	errno = ENOBUFS;
	return -1;
}

ssize_t __wrap_recvmsg(int fd, struct msghdr *h, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *h, int flags)
{
	ssize_t n = recvmsg(fd, h, flags);

	if (n > 0 && CMSG_FIRSTHDR(h) && fails(RIGHTS, errno))
		lose_descriptors(h);
	return n;
}

static struct sockaddr_in address = { .sin_family = AF_INET };
static char buf[100000];
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_mw *mw;
static struct ibv_comp_channel *completions;
static struct ibv_cq *cq, *other_cq;
static struct ibv_srq *srq;
static struct ibv_qp *qp;
static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener, *client, *server;

/* made returns what a function returns that has made p, or could not. */
static int made(const void *p)
{
	return p ? 0 : -1;
}

static int make_context(void)
{
	struct ibv_device **all = ibv_get_device_list(NULL);
	int err;

	if (!all)
		return -1;
	errno = ENODEV;
	context = all[0] ? ibv_open_device(all[0]) : NULL;
	err = errno;
	ibv_free_device_list(all);
	errno = err;
	return made(context);
}

static int end_context(void)
{
	return ibv_close_device(context);
}

static int make_pd(void)
{
	return made(pd = ibv_alloc_pd(context));
}

static int end_pd(void)
{
	return ibv_dealloc_pd(pd);
}

static int make_mr(void)
{
	return made(mr = ibv_reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_LOCAL_WRITE));
}

static int end_mr(void)
{
	return ibv_dereg_mr(mr);
}

static int make_mw(void)
{
	return made(mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2));
}

static int end_mw(void)
{
	return ibv_dealloc_mw(mw);
}

static int make_completions(void)
{
	return made(completions = ibv_create_comp_channel(context));
}

static int end_completions(void)
{
	return ibv_destroy_comp_channel(completions);
}

static int make_cq(void)
{
	return made(cq = ibv_create_cq(context, 8, NULL, completions, 0));
}

static int end_cq(void)
{
	return ibv_destroy_cq(cq);
}

static int make_other_cq(void)
{
	return made(other_cq = ibv_create_cq(context, 8, NULL, NULL, 0));
}

static int end_other_cq(void)
{
	return ibv_destroy_cq(other_cq);
}

static int make_srq(void)
{
	return made(srq = ibv_create_srq(pd, &(struct ibv_srq_init_attr){ .attr = { .max_wr = 10, .max_sge = 1 } }));
}

static int end_srq(void)
{
	return ibv_destroy_srq(srq);
}

static int make_qp(void)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = other_cq, .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_RC };

	return made(qp = ibv_create_qp(pd, &attr));
}

static int end_qp(void)
{
	return ibv_destroy_qp(qp);
}

static int make_channel(void)
{
	return made(channel = rdma_create_event_channel());
}

static int end_channel(void)
{
	rdma_destroy_event_channel(channel);
	return 0;
}

static int make_listener(void)
{
	int err;

	if (rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) < 0)
		return -1;
	address.sin_port = 0;
	if (rdma_bind_addr(listener, (struct sockaddr *)&address) == 0 && rdma_listen(listener, 10) == 0) {
		address.sin_port = rdma_get_src_port(listener);
		CHECK(listener->pd);
		return 0;
	}
	err = errno;
	CHECK(rdma_destroy_id(listener) == 0);
	errno = err;
	return -1;
}

static int end_listener(void)
{
	return rdma_destroy_id(listener);
}

static int make_client(void)
{
	return rdma_create_id(channel, &client, NULL, RDMA_PS_TCP);
}

static int end_client(void)
{
	return rdma_destroy_id(client);
}

static int end_server(void)
{
	return rdma_destroy_id(server);
}

/* await takes the next event, which must have a type. */
static int await(enum rdma_cm_event_type type)
{
	struct pollfd p = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *e;

	CHECK(poll(&p, 1, WAIT) == 1);
	if (rdma_get_cm_event(channel, &e) < 0)
		return -1;
	CHECK(e->event == type);
	if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
		server = e->id;
	return rdma_ack_cm_event(e);
}

static int resolve_addr(void)
{
	return rdma_resolve_addr(client, NULL, (struct sockaddr *)&address, WAIT);
}

static int addr_resolved(void)
{
	return await(RDMA_CM_EVENT_ADDR_RESOLVED);
}

static int resolve_route(void)
{
	return rdma_resolve_route(client, WAIT);
}

static int route_resolved(void)
{
	return await(RDMA_CM_EVENT_ROUTE_RESOLVED);
}

static int make_cm_qp(struct rdma_cm_id *id)
{
	return rdma_create_qp(id, NULL, &(struct ibv_qp_init_attr){ .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_RC });
}

static int make_client_qp(void)
{
	return make_cm_qp(client);
}

static int make_server_qp(void)
{
	return make_cm_qp(server);
}

/* end_qp_of destroys the queue pair of an identifier, and its completion queues. */
static int end_qp_of(struct rdma_cm_id *id)
{
	rdma_destroy_qp(id);
	return id->qp || id->send_cq || id->recv_cq || id->send_cq_channel || id->recv_cq_channel ? -1 : 0;
}

static int end_qps(void)
{
	int err = end_qp_of(client), other = end_qp_of(server);

	return err ? err : other;
}

static int ask(void)
{
	return rdma_connect(client, &(struct rdma_conn_param){ 0 });
}

static int asked(void)
{
	return await(RDMA_CM_EVENT_CONNECT_REQUEST);
}

static int stage;

/* answer accepts. If that fails, the request has been rejected, and the next attempt starts from the beginning. */
static int answer(void)
{
	int err, what = scarce;

	if (rdma_accept(server, &(struct rdma_conn_param){ 0 }) == 0)
		return 0;
	err = errno;
	scarce = NOTHING;
	CHECK(await(RDMA_CM_EVENT_REJECTED) == 0 && end_qps() == 0 && end_client() == 0 && end_server() == 0);
	scarce = what;
	stage = 0;
	errno = err;
	return -1;
}

static int established(void)
{
	return await(RDMA_CM_EVENT_ESTABLISHED);
}

/* leave ends a connection, for want of buffers by destroying its queue pairs. */
static int leave(void)
{
	return strcmp(lacking, "buffers") == 0 ? end_qps() : rdma_disconnect(client);
}

static int left(void)
{
	return await(RDMA_CM_EVENT_DISCONNECTED);
}

static int (*const stages[])(void) = {
	make_client, resolve_addr, addr_resolved, resolve_route, route_resolved, make_client_qp, ask, asked, make_server_qp,
	answer, established, established, leave, left, left, end_qps, end_client, end_server,
};

enum { STAGES = sizeof(stages) / sizeof(stages[0]) };

/* make_connection goes on where the last call failed. */
static int make_connection(void)
{
	for (; stage < STAGES; stage++)
		if (stages[stage]() != 0)
			return -1;
	stage = 0;
	return 0;
}

static int sockets[3]; /* a listener, and both ends of a connection */

static int end_sockets(void)
{
	for (int i = 0; i < 3; i++)
		if (sockets[i] >= 0)
			CHECK(rclose(sockets[i]) == 0);
	return 0;
}

/* join makes both ends of a connection of sockets, none of which waits. */
static int join(void)
{
	socklen_t len = sizeof(address);
	bool connected = false;

	address.sin_port = 0;
	if (rbind(sockets[0], (struct sockaddr *)&address, len) < 0 || rlisten(sockets[0], 1) < 0 ||
	    rgetsockname(sockets[0], (struct sockaddr *)&address, &len) < 0)
		return -1;
	while (!connected || sockets[2] < 0) {
		if (!connected && rconnect(sockets[1], (struct sockaddr *)&address, len) == 0)
			connected = true;
		else if (!connected && errno != EINPROGRESS && errno != EALREADY)
			return -1;
		if (sockets[2] < 0)
			sockets[2] = raccept(sockets[0], NULL, NULL);
		if (sockets[2] < 0 && errno != EAGAIN)
			return -1;
	}
	return 0;
}

/* make_sockets makes some for want of buffers alone: for want of memory, the event that a connection has ended ends the device. */
static int make_sockets(void)
{
	int err;

	sockets[0] = sockets[1] = sockets[2] = -1;
	if (strcmp(lacking, "buffers") != 0)
		return 0;
	sockets[0] = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	sockets[1] = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	if (sockets[0] >= 0 && sockets[1] >= 0 && join() == 0)
		return 0;
	err = errno;
	end_sockets();
	errno = err;
	return -1;
}

static int no_end(void)
{
	return 0;
}

static const struct step {
	const char *name;
	int (*make)(void), (*end)(void);
} steps[] = {
	{ "context", make_context, end_context },
	{ "domain", make_pd, end_pd },
	{ "region", make_mr, end_mr },
	{ "window", make_mw, end_mw },
	{ "completion channel", make_completions, end_completions },
	{ "completion queue with a channel", make_cq, end_cq },
	{ "completion queue", make_other_cq, end_other_cq },
	{ "shared receive queue", make_srq, end_srq },
	{ "queue pair", make_qp, end_qp },
	{ "event channel", make_channel, end_channel },
	{ "listener", make_listener, end_listener },
	{ "connection", make_connection, no_end },
	{ "sockets", make_sockets, end_sockets },
};

enum { STEPS = sizeof(steps) / sizeof(steps[0]) };

/* do_without calls f while the process lacks what, and reports whether a call failed. */
static bool do_without(int what, int (*f)(void), int *result)
{
	calls = 0;
	failed = false;
	errno = 0;
	scarce = what;
	*result = f();
	scarce = NOTHING;
	CHECK(*result == 0 || (failed && errno != 0 && what != BUFFERS));
	return failed;
}

/* try makes and destroys the object of a step with each call failing in turn. */
static void try(const struct step *s, int what)
{
	bool more = true;
	int result;

	step = s->name;
	for (number = 0; more; number++) {
		more = do_without(what, s->make, &result);
		CHECK(result == 0 || s->make() == 0);
		more |= do_without(what, s->end, &result);
		CHECK(result == 0 || s->end() == 0);
	}
	CHECK(s->make() == 0);
}

/*
 * forked destroys in the child of a fork, which may have no descriptor with the number of its parent's, what its parent
 * uses. There is no near memory yet: a child that cannot copy it ends.
 */
static void forked(void)
{
	struct pollfd p = { .events = POLLIN };
	struct rlimit was, few;
	int status, socket = rsocket(AF_INET, SOCK_STREAM, 0);
	pid_t child;

	step = "fork";
	CHECK(make_channel() == 0 && make_client() == 0 && resolve_addr() == 0 && socket >= 0);
	CHECK(getrlimit(RLIMIT_NOFILE, &was) == 0);
	few = (struct rlimit){ 3, was.rlim_max };
	CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
	child = fork();
	if (child == 0) {
		CHECK(end_client() == 0 && end_channel() == 0);
		CHECK(fcntl(socket, F_GETFD) == -1);
		_exit(0);
	}
	CHECK(setrlimit(RLIMIT_NOFILE, &was) == 0);
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	p.fd = channel->fd;
	CHECK(poll(&p, 1, 0) == 1 && addr_resolved() == 0);
	CHECK(end_client() == 0 && end_channel() == 0 && rclose(socket) == 0);
}

int main(int argc, char **argv)
{
	static const struct { const char *name; int what; } kinds[] = {
		{ "memory", MEMORY }, { "mappings", MAPPINGS }, { "files", FILES }, { "room for descriptors", RIGHTS },
		{ "buffers", BUFFERS }, { "threads", THREADS },
	};

	if (argc != 2 || inet_pton(AF_INET, argv[1], &address.sin_addr) != 1)
		return 2;
	forked();
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		lacking = kinds[i].name;
		for (size_t n = 0; n < STEPS; n++)
			try(&steps[n], kinds[i].what);
		for (size_t n = STEPS; n-- > 0;) {
			step = steps[n].name;
			CHECK(steps[n].end() == 0);
		}
	}
	puts("made all");
	fflush(stdout);
	return pause();
}
