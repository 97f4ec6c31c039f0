/*
 * Uses libiwarpd while the process lacks something: each call that needs it fails in turn, and each packet with descriptors
 * comes without them. A call must fail with an error that says so, leave nothing, and leave the device usable.
 *
 *	scarce SOCKET ADDRESS
 *
 * It is linked with --wrap for the functions below. When only the device is left it prints "made" and waits for a line.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iwarpd.h>

#include "../../testdata/descriptors.h"

#define CHECK(cond)                                                                                     \
	do {                                                                                            \
		if (!(cond)) {                                                                          \
			fprintf(stderr, "scarce.c:%d: %s without %s, call %d: not so: %s (%s)\n", __LINE__, \
				step, lacking, number, #cond, err.text);                                \
			exit(1);                                                                        \
		}                                                                                       \
	} while (0)

enum { WAIT = 60000 };

static struct iwarpd_error err;
static const char *step = "start", *lacking = "nothing";
static int number;

/* What the process lacks. */
enum { NOTHING, MEMORY, MAPPINGS, FILES, RIGHTS, BUFFERS, OTHER };

static int scarce; /* one of them, of which call number fails */
static int calls;  /* since it was set */
static bool failed;

/* fails reports whether a call that takes some of what must fail now, with that error. */
static bool fails(int what, int error)
{
	if (scarce != what || scarce == NOTHING || calls++ != number)
		return false;
	failed = true;
	errno = error;
	return true;
}

#define WRAP(type, name, params, args, what, error, failure)     \
	type __real_##name params;                               \
	type __wrap_##name params;                               \
	type __wrap_##name params                                \
	{                                                        \
		return fails(what, error) ? failure : __real_##name args; \
	}

static size_t freed; /* bytes, since memory ran out */

/* out reports whether there are no n bytes, as from the call that fails on, but for what is freed then. */
static bool out(size_t n)
{
	if (scarce != MEMORY || !failed)
		return fails(MEMORY, ENOMEM);
	if (n > freed) {
		errno = ENOMEM;
		return true;
	}
	freed -= n;
	return false;
}

void *__real_malloc(size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_malloc(size_t n)
{
	return out(n) ? NULL : __real_malloc(n);
}

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size)
{
	return out(n * size) ? NULL : __real_calloc(n, size);
}

void *__real_realloc(void *p, size_t n);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_realloc(void *p, size_t n)
{
	return out(n) ? NULL : __real_realloc(p, n);
}

void __real_free(void *p);
void __wrap_free(void *p);
void __wrap_free(void *p)
{
	if (failed)
		freed += malloc_usable_size(p);
	__real_free(p);
}

int __real_munmap(void *p, size_t n);
int __wrap_munmap(void *p, size_t n);
int __wrap_munmap(void *p, size_t n)
{
	if (failed)
		freed += n;
	return __real_munmap(p, n);
}

WRAP(void *, mmap, (void *p, size_t n, int prot, int flags, int fd, off_t at), (p, n, prot, flags, fd, at), MAPPINGS, ENOMEM, MAP_FAILED)
WRAP(int, eventfd, (unsigned int n, int flags), (n, flags), FILES, EMFILE, -1)
WRAP(int, epoll_create1, (int flags), (flags), FILES, EMFILE, -1)
WRAP(int, epoll_ctl, (int e, int op, int fd, struct epoll_event *ev), (e, op, fd, ev), op == EPOLL_CTL_ADD ? MEMORY : OTHER, ENOMEM, -1)
WRAP(int, memfd_create, (const char *name, unsigned int flags), (name, flags), FILES, EMFILE, -1)
WRAP(int, ftruncate, (int fd, off_t n), (fd, n), MEMORY, ENOMEM, -1)

static int replaced[3]; /* descriptors that are open whenever a socket is opened, but for 0 */

int __real_socket(int domain, int type, int protocol);
int __wrap_socket(int domain, int type, int protocol);
int __wrap_socket(int domain, int type, int protocol)
{
	for (int i = 0; i < 3; i++)
		CHECK(replaced[i] == 0 || fcntl(replaced[i], F_GETFD) >= 0);
	return fails(FILES, EMFILE) ? -1 : __real_socket(domain, type, protocol);
}

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
	return fails(FILES, EMFILE) ? -1 : __real_open(path, flags);
}

int __real_fcntl(int fd, int op, ...);
int __wrap_fcntl(int fd, int op, ...);
int __wrap_fcntl(int fd, int op, ...)
{
	va_list args;
	int arg;

	va_start(args, op);
	arg = va_arg(args, int);
	va_end(args);
	return op == F_DUPFD_CLOEXEC && fails(FILES, EMFILE) ? -1 : __real_fcntl(fd, op, arg);
}

/*
 * The socket of a process that lacks room for descriptors is full when it gives something back. The kernel has buffers again
 * when it has been asked for them three times.
 */
static bool full;
static int left;

ssize_t __real_sendmsg(int fd, const struct msghdr *h, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *h, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *h, int flags)
{
	if (full && (flags & MSG_DONTWAIT)) {
		full = false;
		errno = EAGAIN;
		return -1;
	}
	if (fails(BUFFERS, ENOBUFS))
		left = 3;
	if (left == 0)
		return __real_sendmsg(fd, h, flags);
	left--;
	errno = ENOBUFS;
	return -1;
}

ssize_t __real_recvmsg(int fd, struct msghdr *h, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *h, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *h, int flags)
{
	ssize_t n = __real_recvmsg(fd, h, flags);

	if (n > 0 && CMSG_FIRSTHDR(h) && fails(RIGHTS, errno)) {
		lose_descriptors(h);
		full = true;
	}
	return n;
}

static const char *path, *address;
static struct iwarpd_device *dev;
static struct iwarpd_pd *pd;
static struct iwarpd_mr *mr, *far;
static struct iwarpd_mw *mw;
static struct iwarpd_channel *channel;
static struct iwarpd_cq *cq, *told;
static struct iwarpd_srq *srq;
static struct iwarpd_qp *qp, *peer;
static struct iwarpd_listener *listener;
static struct iwarpd_event ev;
static char text[100];

static int make_dev(void)
{
	return iwarpd_open(path, "scarce", &dev, &err);
}

static int end_dev(void)
{
	iwarpd_close(dev);
	return 0;
}

static int make_pd(void)
{
	return iwarpd_alloc_pd(dev, &pd, &err);
}

static int end_pd(void)
{
	return iwarpd_dealloc_pd(pd, &err);
}

static int make_mr(void)
{
	return iwarpd_alloc_mr(pd, 4096, IWARPD_LOCAL_WRITE, &mr, &err);
}

static int end_mr(void)
{
	return iwarpd_dereg_mr(mr, &err);
}

static int make_far(void)
{
	struct iwarpd_mr_attr attr = { .fd = -1, .far = true, .addr = text, .length = sizeof(text), .access = IWARPD_LOCAL_WRITE };

	return iwarpd_reg_mr(pd, &attr, &far, &err);
}

static int end_far(void)
{
	return iwarpd_dereg_mr(far, &err);
}

static int make_mw(void)
{
	return iwarpd_alloc_mw(pd, &mw, &err);
}

static int end_mw(void)
{
	return iwarpd_dealloc_mw(mw, &err);
}

static int make_channel(void)
{
	return iwarpd_create_channel(dev, &channel, &err);
}

static int end_channel(void)
{
	return iwarpd_destroy_channel(channel, &err);
}

static int make_cq(void)
{
	return iwarpd_create_cq(dev, 8, &cq, &err);
}

static int end_cq(void)
{
	return iwarpd_destroy_cq(cq, &err);
}

static int make_told(void)
{
	return iwarpd_create_cq_on(channel, 8, NULL, &told, &err);
}

static int end_told(void)
{
	return iwarpd_destroy_cq(told, &err);
}

static int resize_cq(void)
{
	return iwarpd_resize_cq(cq, 100, &err);
}

static int resize_told(void)
{
	return iwarpd_resize_cq(told, 100, &err);
}

static int no_end(void)
{
	return 0;
}

static int make_srq(void)
{
	return iwarpd_create_srq(pd, &(struct iwarpd_srq_attr){ .depth = 8 }, &srq, &err);
}

static int end_srq(void)
{
	return iwarpd_destroy_srq(srq, &err);
}

static int make_qp(void)
{
	return iwarpd_create_qp(pd, &(struct iwarpd_qp_attr){ .send_cq = cq, .recv_cq = told }, &qp, &err);
}

static int end_qp(void)
{
	return iwarpd_destroy_qp(qp, &err);
}

static int make_peer(void)
{
	return iwarpd_create_qp(pd, &(struct iwarpd_qp_attr){ .send_cq = cq, .recv_cq = told, .srq = srq }, &peer, &err);
}

static int end_peer(void)
{
	return iwarpd_destroy_qp(peer, &err);
}

static int make_listener(void)
{
	return iwarpd_listen(dev, &(struct iwarpd_listen_attr){ .address = address }, &listener, &err);
}

static int end_listener(void)
{
	return iwarpd_unlisten(listener, &err);
}

/* await reads the next event, which must have a type. */
static int await(uint32_t type)
{
	int result = iwarpd_get_event(dev, &ev, WAIT, &err);

	CHECK(result != 0 || ev.type == type);
	return result;
}

static int ask(void)
{
	return iwarpd_connect(qp, &(struct iwarpd_connect_attr){ .remote = iwarpd_listener_address(listener) }, &err);
}

static int asked(void)
{
	return await(IWARPD_EVENT_CONNECT_REQUEST);
}

static int answer(void)
{
	return iwarpd_accept(dev, ev.conn, peer, NULL, &err);
}

static int joined(void)
{
	return await(IWARPD_EVENT_ESTABLISHED);
}

static int leave(void)
{
	return iwarpd_disconnect(qp, false, &err);
}

static int has_left(void)
{
	return await(IWARPD_EVENT_DISCONNECTED);
}

static int post(void)
{
	return iwarpd_post_recv(qp, &(struct iwarpd_recv_wr){ 0 });
}

static int ask_nobody(void)
{
	char nobody[100];

	snprintf(nobody, sizeof(nobody), "%s:9", address);
	return iwarpd_connect(qp, &(struct iwarpd_connect_attr){ .remote = nobody }, &err);
}

static int failed_to_connect(void)
{
	return await(IWARPD_EVENT_CONNECT_FAILED);
}

static bool usable(void)
{
	struct iwarpd_pd *other;

	return iwarpd_alloc_pd(dev, &other, &err) == 0 && iwarpd_dealloc_pd(other, &err) == 0;
}

/* flushed waits for a flushed receive. */
static int flushed(void)
{
	struct iwarpd_cq *woken;
	struct iwarpd_wc wc;

	for (;;) {
		iwarpd_arm_cq(told, false);
		if (iwarpd_poll_cq(told, &wc, 1) == 1)
			break;
		CHECK(iwarpd_get_cq_event(channel, &woken, WAIT) == 0);
	}
	CHECK(wc.status == IWARPD_WC_WR_FLUSH_ERR);
	return 0;
}

/* A connection between the two queue pairs, which can have no second one, and one that cannot be made. */
static int (*const stages[])(void) = {
	ask, asked, answer, joined, joined, leave, has_left, has_left, end_qp, make_qp, end_peer, make_peer,
	post, ask_nobody, failed_to_connect, flushed, end_qp, make_qp,
};

enum { STAGES = sizeof(stages) / sizeof(stages[0]) };

static int stage;

/* make_connection goes on where the last call failed. */
static int make_connection(void)
{
	for (; stage < STAGES; stage++) {
		int result = stages[stage]();

		if (result)
			return result;
	}
	stage = 0;
	return 0;
}

static const struct step {
	const char *name;
	int (*make)(void), (*end)(void);
} steps[] = {
	{ "device", make_dev, end_dev },
	{ "domain", make_pd, end_pd },
	{ "region", make_mr, end_mr },
	{ "far region", make_far, end_far },
	{ "window", make_mw, end_mw },
	{ "channel", make_channel, end_channel },
	{ "completion queue", make_cq, end_cq },
	{ "completion queue on a channel", make_told, end_told },
	{ "resized completion queue", resize_cq, no_end },
	{ "resized completion queue on a channel", resize_told, no_end },
	{ "shared receive queue", make_srq, end_srq },
	{ "queue pair", make_qp, end_qp },
	{ "queue pair with a shared receive queue", make_peer, end_peer },
	{ "listener", make_listener, end_listener },
	{ "connection", make_connection, no_end },
};

enum { STEPS = sizeof(steps) / sizeof(steps[0]) };

/* do_without calls f while the process lacks what, and reports whether a call failed. */
static bool do_without(int what, int (*f)(void), int *result)
{
	CHECK(f == make_dev || usable()); /* the device keeps memory for a message again */
	calls = 0;
	failed = false;
	freed = 0;
	scarce = what;
	*result = f();
	scarce = 0;
	CHECK(*result == 0 || (failed && *result < 0 && err.text[0] && what != BUFFERS));
	return failed;
}

/* ends reports whether a device ends: a resize that the daemon has done cannot be completed, since the process had enough for it only before. */
static bool ends(const struct step *s, int what)
{
	return (s->make == resize_cq || s->make == resize_told) && ((what == MAPPINGS && number > 0) || what == RIGHTS);
}

/* again makes the objects again that went with the device. */
static void again(const struct step *end)
{
	iwarpd_close(dev);
	stage = 0;
	for (const struct step *s = steps; s < end; s++)
		CHECK(s->make() == 0);
}

/* try makes and destroys the object of a step with each call failing in turn. */
static void try(const struct step *s, int what)
{
	bool more = true;
	int result;

	step = s->name;
	for (number = 0; more; number++) {
		int files = open_files();

		more = do_without(what, s->make, &result);
		CHECK(result == 0 || open_files() == files);
		if (result && s->make != make_dev) {
			bool over = !usable();

			CHECK(over == ends(s, what));
			if (over)
				again(s);
		}
		if (result)
			CHECK(s->make() == 0);
		if (do_without(what, s->end, &result)) {
			more = true;
			CHECK(result == 0 || (result != -EPIPE && s->end() == 0)); /* the device has not ended */
		}
	}
	CHECK(s->make() == 0);
}

/* forked separates the device in the child of a fork, another thread of which could open files meanwhile. */
static void forked(void)
{
	pid_t child = fork();
	int status;

	if (child == 0) {
		replaced[0] = iwarpd_event_fd(dev);
		replaced[1] = iwarpd_channel_fd(channel);
		replaced[2] = iwarpd_cq_fd(cq);
		iwarpd_after_fork(dev);
		CHECK(replaced[0] == iwarpd_event_fd(dev) && replaced[1] == iwarpd_channel_fd(channel) && replaced[2] == iwarpd_cq_fd(cq));
		iwarpd_close(dev);
		_exit(0);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

int main(int argc, char **argv)
{
	static const struct { const char *name; int what; } kinds[] = {
		{ "nothing", NOTHING }, { "memory", MEMORY }, { "mappings", MAPPINGS }, { "files", FILES },
		{ "room for descriptors", RIGHTS }, { "buffers", BUFFERS },
	};
	int files = open_files();

	if (argc != 3)
		return 2;
	path = argv[1];
	address = argv[2];
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		lacking = kinds[i].name;
		for (size_t n = 0; n < STEPS; n++)
			try(&steps[n], kinds[i].what);
		if (kinds[i].what == NOTHING)
			forked();
		for (size_t n = STEPS; n-- > 1;)
			CHECK(steps[n].end() == 0);
		printf("made without %s\n", lacking);
		fflush(stdout);
		CHECK(getchar() == '\n');
		iwarpd_close(dev);
		CHECK(open_files() == files);
	}
	return 0;
}
