/*
 * hostile is a malicious client of the daemon. It implements the protocol of docs/api.md
 * without libiwarpd or a protobuf library, and runs one attack:
 *
 *     hostile SOCKET PEER DIR ATTACK [socket]    "hostile list" prints the names of all attacks
 *
 * With "socket" it connects and listens over kernel sockets, of a daemon that has them besides frames.
 * hostile starts as root, to prepare pages and files that never arrive (userfaultfd, FUSE).
 * It runs the attack as an unprivileged user, or as root if the attack's name says so.
 * Attacks on a slot use the socket of slot 0, in the folder slots beside SOCKET. The exit
 * status is 0 if the attack was carried out, however the daemon reacted, and 2 if it could
 * not be. The test checks the daemon and a victim.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/fuse.h>
#include <linux/io_uring.h>
#include <linux/memfd.h>
#include <linux/netlink.h>
#include <linux/userfaultfd.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { UID = 61002, PAGE = 4096, HEADER = 4096, ENTRIES = 256, CONSUMER = 128, BELLS = 128, FDS = 250 };

static const char *sock_path, *peer, *dir;
static bool kernel_sockets;
static pid_t fuse_server, main_pid;
static int slot; /* its folder; 0: the main socket */

static void fail(const char *what)
{
	fprintf(stderr, "hostile: %s: %s\n", what, strerror(errno));
	if (fuse_server > 0)
		kill(fuse_server, SIGKILL);
	_exit(2);
}

#define TRY(x) ({ __typeof__(x) _r = (x); if ((intptr_t)_r == -1) fail(#x); _r; })

/*
 * give_up ends the attack, which fails if it takes too long; helpers of it just end. The FUSE
 * server is killed first, since otherwise our exit would wait for its FLUSH.
 */
static void give_up(int sig)
{
	static const char late[] = "hostile: the attack does not end\n";

	if (getpid() != main_pid)
		_exit(0);
	if (fuse_server > 0)
		kill(fuse_server, SIGKILL);
	if (sig == SIGALRM && write(STDERR_FILENO, late, sizeof(late) - 1) < 0)
		_exit(2);
	_exit(sig == SIGALRM ? 2 : sig);
}

static void nap(int ms) { usleep((useconds_t)ms * 1000); }

/* The part of protobuf that is needed. */

struct buf { uint8_t b[8192]; size_t n; };

static void varint(struct buf *o, uint64_t v)
{
	for (; v >= 128; v >>= 7)
		o->b[o->n++] = (uint8_t)(v | 128);
	o->b[o->n++] = (uint8_t)v;
}

static void num(struct buf *o, int field, uint64_t v) { varint(o, (uint64_t)field << 3); varint(o, v); }

static void bytes(struct buf *o, int field, const void *p, size_t n)
{
	varint(o, (uint64_t)field << 3 | 2);
	varint(o, n);
	memcpy(o->b + o->n, p, n);
	o->n += n;
}

struct span { const uint8_t *p; size_t n; };

static bool get_varint(struct span *s, uint64_t *v)
{
	*v = 0;
	for (int shift = 0; s->n && shift < 64; shift += 7) {
		uint8_t b = *s->p++;

		s->n--;
		*v |= (uint64_t)(b & 127) << shift;
		if (b < 128)
			return true;
	}
	return false;
}

/* field finds a field of a message. It returns its number, or stores its content in *sub. */
static uint64_t field(struct span s, int want, struct span *sub)
{
	uint64_t key, v;

	if (sub)
		*sub = (struct span){ 0 };
	while (s.n && get_varint(&s, &key)) {
		if (!get_varint(&s, &v))
			return 0;
		if ((key & 7) == 2) {
			if (v > s.n)
				return 0;
			if ((int)(key >> 3) == want && sub)
				*sub = (struct span){ s.p, v };
			s.p += v;
			s.n -= v;
		} else if ((int)(key >> 3) == want) {
			return v;
		}
	}
	return 0;
}

/* The client. */

struct reply { uint8_t b[65536]; size_t n; int fds[FDS]; int nfds; struct span body; uint64_t error; };

struct client { int s; uint64_t id; int workers, pages[64], wakes[64]; uint8_t *bells[64]; };

static int dial(void)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	int s = TRY(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));

	if (slot > 0) /* as for a container, the folder above is not accessible */
		snprintf(a.sun_path, sizeof(a.sun_path), "/proc/self/fd/%d/iwarpd.sock", slot);
	else
		strncpy(a.sun_path, sock_path, sizeof(a.sun_path) - 1);
	TRY(connect(s, (struct sockaddr *)&a, sizeof(a)));
	return s;
}

static ssize_t send_fds(int s, const void *p, size_t n, const int *fds, int nfds, int flags)
{
	union { struct cmsghdr h; uint8_t b[CMSG_SPACE(sizeof(int) * 253)]; } c;
	struct iovec v = { (void *)(uintptr_t)p, n };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1 };

	if (nfds) {
		m.msg_control = &c;
		m.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)nfds);
		c.h = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int) * (size_t)nfds) };
		memcpy(CMSG_DATA(&c.h), fds, sizeof(int) * (size_t)nfds);
	}
	return sendmsg(s, &m, flags | MSG_NOSIGNAL);
}

/* receive reads a packet. It returns 0 if the daemon has closed the connection. */
static int receive(int s, struct reply *r)
{
	union { struct cmsghdr h; uint8_t b[CMSG_SPACE(sizeof(int) * FDS)]; } c;
	struct iovec v = { r->b, sizeof(r->b) };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = &c, .msg_controllen = sizeof(c) };
	ssize_t n = recvmsg(s, &m, MSG_CMSG_CLOEXEC);

	r->nfds = 0;
	if (n <= 0)
		return 0;
	r->n = (size_t)n;
	for (struct cmsghdr *h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
		r->nfds = (int)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(r->fds, CMSG_DATA(h), sizeof(int) * (size_t)r->nfds);
	}
	return 1;
}

enum { ALLOC_PD = 3, REGISTER = 5, DEREGISTER, CREATE_CQ, DESTROY_CQ, CREATE_QP, DESTROY_QP, LISTEN, CONNECT = 13, DISCONNECT = 16,
       ALLOC_MW = 17, DEALLOC_MW, CREATE_SRQ, DESTROY_SRQ = 21, RESIZE_CQ, MODIFY_CQ, CREATE_CHANNEL = 28, ATTACH_MEMORY = 30, STATUS = 32, CAPTURE = 39, LIST_SRQS = 41 };

/* request builds a request in out. Listeners and connections use kernel sockets if main was told so. */
static void request(struct client *c, int kind, const struct buf *body, struct buf *out)
{
	struct buf all = *body, startup = { .n = 0 };

	if (kernel_sockets && (kind == LISTEN || kind == CONNECT)) {
		num(&startup, 10, 3); /* transport */
		bytes(&all, kind == LISTEN ? 4 : 5, startup.b, startup.n);
	}
	out->n = 0;
	num(out, 1, ++c->id);
	bytes(out, kind, all.b, all.n);
}

/*
 * ask sends a request and reads up to its reply. It returns false if the daemon has
 * closed the connection.
 */
static bool ask(struct client *c, int kind, const struct buf *body, const int *fds, int nfds, struct reply *r)
{
	struct buf q;
	struct span m, got;

	request(c, kind, body, &q);
	if (send_fds(c->s, q.b, q.n, fds, nfds, 0) < 0)
		return false;
	while (receive(c->s, r)) {
		field((struct span){ r->b, r->n }, 1, &m);
		if (!m.p || field(m, 1, NULL) != c->id)
			continue;
		r->body = m;
		field(m, 2, &got);
		r->error = got.p ? field(got, 1, NULL) : 0;
		return true;
	}
	return false;
}

static struct reply last;

/* call is ask with number fields: kind of the request, then pairs of field and value, then 0. */
static bool call_fd(struct client *c, int kind, int fd, ...)
{
	struct buf b = { .n = 0 };
	va_list l;

	va_start(l, fd);
	for (int f; (f = va_arg(l, int)) != 0;)
		num(&b, f, va_arg(l, uint64_t));
	va_end(l);
	return ask(c, kind, &b, &fd, fd >= 0, &last);
}

#define U(x) ((uint64_t)(x))
#define call(c, kind, ...) call_fd(c, kind, -1, ##__VA_ARGS__, 0)

/* body returns field f of the reply's content, which is in field kind. */
static uint64_t body(int kind, int f)
{
	struct span s;

	field(last.body, kind, &s);
	return s.p ? field(s, f, NULL) : 0;
}

static struct client greet(void)
{
	struct client c = { .s = dial() };

	if (!call(&c, 2, 1, U(1), 2, U(1)) || last.error)
		fail("hello");
	c.workers = (int)body(3, 3);
	for (int i = 0; i < c.workers && 2 * i + 1 < last.nfds; i++) {
		c.pages[i] = last.fds[2 * i];
		c.wakes[i] = last.fds[2 * i + 1];
	}
	return c;
}

/* won ends the attack with success: the daemon has accepted what it must refuse. */
static void won(const char *what)
{
	fprintf(stderr, "hostile: %s\n", what);
	give_up(3);
}

enum { LIST_QPS = 33, LIST_CLIENTS = 36, ADMIN_DISCONNECT = 38, LIST_QUOTAS = 47 };

struct objects { uint64_t pd, cq, qp, bell, worker; int ring, wake, sq, rq; };

static struct objects objects(struct client *c)
{
	struct objects o = { 0 };

	if (!call(c, ALLOC_PD))
		fail("pd");
	o.pd = body(4, 1);
	if (!call(c, CREATE_CQ, 1, U(64)) || last.nfds != 2)
		fail("cq");
	o.cq = body(6, 1), o.ring = last.fds[0], o.wake = last.fds[1];
	if (!call(c, CREATE_QP, 1, o.pd, 2, o.cq, 3, o.cq, 4, U(16), 5, U(16), 6, U(4), 7, U(64)) || last.nfds != 2)
		fail("qp");
	o.qp = body(7, 1), o.bell = body(7, 2), o.sq = last.fds[0], o.rq = last.fds[1];
	return o;
}

static int make_memfd(size_t size)
{
	int fd = TRY(memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING));

	TRY(fallocate(fd, 0, 0, (off_t)size));
	return fd;
}

static uint8_t *map(int fd)
{
	struct stat st;
	uint8_t *p;

	TRY(fstat(fd, &st));
	p = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		fail("mmap");
	return p;
}

static _Atomic uint32_t *word(uint8_t *m, size_t at) { return (_Atomic uint32_t *)(void *)(m + at); }

static void ring(struct client *c, struct objects *o)
{
	uint8_t **m = &c->bells[o->worker];
	uint64_t one = 1;

	if (!*m)
		*m = map(c->pages[o->worker]);
	atomic_fetch_or((_Atomic uint64_t *)(void *)(*m + HEADER + BELLS + o->bell / 64 * 8), UINT64_C(1) << (o->bell % 64));
	if (write(c->wakes[o->worker], &one, sizeof(one)) < 0)
		return;
}

/* join connects o to the peer's sink. A receive for its greeting is posted in memory of *mr. */
static bool join(struct client *c, struct objects *o, uint64_t *lkey, int *mem)
{
	struct buf b = { .n = 0 };
	uint8_t *rq;
	uint32_t key;

	*mem = make_memfd(1 << 20);
	if (!call_fd(c, REGISTER, *mem, 1, o->pd, 3, U(1 << 20), 5, U(1), 0) || last.error)
		return false;
	key = (uint32_t)(*lkey = body(5, 2));
	rq = map(o->rq);
	rq[HEADER + ENTRIES + 8] = 1;
	memcpy(rq + HEADER + ENTRIES + 16 + 8, &(uint32_t){ PAGE }, 4);
	memcpy(rq + HEADER + ENTRIES + 16 + 12, &key, 4);
	atomic_store(word(rq, HEADER), 1);
	num(&b, 1, o->qp);
	bytes(&b, 3, peer, strlen(peer));
	if (!ask(c, CONNECT, &b, NULL, 0, &last) || last.error)
		return false;
	while (receive(c->s, &last)) {
		struct span e, up;

		field((struct span){ last.b, last.n }, 2, &e);
		field(e, 4, &up);
		if (up.p)
			return false;
		field(e, 2, &up);
		if (up.p) {
			o->worker = field(up, 3, NULL);
			return true;
		}
	}
	return false;
}

/* put posts SENDs of n bytes at addr of lkey, all at once. */
static void put(struct objects *o, uint64_t lkey, uint64_t addr, uint32_t n, uint32_t sends)
{
	uint8_t *m = map(o->sq), *e;
	uint32_t at = atomic_load(word(m, HEADER));
	uint32_t key = (uint32_t)lkey, stride;

	memcpy(&stride, m + 20, 4);
	for (uint32_t end = at + sends; at != end; at++) {
		e = m + HEADER + ENTRIES + (at & 15) * stride;
		memset(e, 0, stride);
		e[8] = 2;
		e[9] = 2;
		e[10] = 1;
		memcpy(e + 64, &addr, 8);
		memcpy(e + 72, &n, 4);
		memcpy(e + 76, &key, 4);
	}
	atomic_store(word(m, HEADER), at);
}

/* post is put, and rings the doorbell. */
static void post(struct client *c, struct objects *o, uint64_t lkey, uint64_t addr, uint32_t n)
{
	put(o, lkey, addr, n, 1);
	ring(c, o);
}

/* What never arrives. */

static void *stuck_page(void)
{
	static int fd = -1; /* main opens it as root */
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register reg = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	void *p = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (fd < 0) {
		fd = TRY((int)syscall(SYS_userfaultfd, O_CLOEXEC));
		TRY(ioctl(fd, UFFDIO_API, &api));
	}
	reg.range.start = (uintptr_t)p;
	reg.range.len = PAGE;
	TRY(ioctl(fd, UFFDIO_REGISTER, &reg));
	return p;
}

static void *stuck; /* a page of userfaultfd */
static void *fuse_page; /* one of a file of FUSE */
static int fuse_fd;

static const char *fuse_name(void)
{
	static char name[256];

	snprintf(name, sizeof(name), "%s/f", dir);
	return name;
}

static void fuse_answer(int dev, const struct fuse_in_header *in, int err, const void *p, size_t n)
{
	struct { struct fuse_out_header h; uint8_t b[512]; } o = { { (uint32_t)(sizeof(o.h) + n), err, in->unique }, { 0 } };

	memcpy(o.b, p, n);
	if (write(dev, &o, sizeof(o.h) + n) < 0)
		return;
}

/* serve answers only the requests for opening the file: no READ, STATFS, GETATTR or FLUSH. */
static void serve(int dev)
{
	static uint8_t b[1 << 18];
	const struct fuse_in_header *in = (const void *)b;

	TRY(setresuid(UID, UID, UID)); /* after that the attacker may kill it */
	alarm(15);
	while (read(dev, b, sizeof(b)) > 0) {
		struct fuse_attr root = { .ino = 1, .mode = S_IFDIR | 0777, .nlink = 1 };
		struct fuse_attr file = { .ino = 2, .mode = S_IFREG | 0666, .nlink = 1, .size = 1 << 20 };

		switch (in->opcode) {
		case FUSE_INIT: {
			struct fuse_init_out o = { .major = 7, .minor = 31, .max_write = 4096 };

			fuse_answer(dev, in, 0, &o, sizeof(o));
			break;
		}
		case FUSE_LOOKUP: {
			struct fuse_entry_out o = { .nodeid = 2, .entry_valid = 1000, .attr_valid = 0, .attr = file };

			fuse_answer(dev, in, 0, &o, sizeof(o));
			break;
		}
		case FUSE_GETATTR: {
			struct fuse_attr_out o = { .attr_valid = 1000, .attr = root };

			if (in->nodeid == 1)
				fuse_answer(dev, in, 0, &o, sizeof(o));
			break;
		}
		case FUSE_OPEN: {
			struct fuse_open_out o = { .fh = 1 };

			fuse_answer(dev, in, 0, &o, sizeof(o));
			break;
		}
		case FUSE_RELEASE:
			fuse_answer(dev, in, 0, NULL, 0);
		}
	}
	_exit(0);
}

static int mount_fuse(void)
{
	int dev = TRY(open("/dev/fuse", O_RDWR | O_CLOEXEC));
	char opts[128];

	TRY(unshare(CLONE_NEWNS));
	TRY(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL));
	snprintf(opts, sizeof(opts), "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", dev);
	TRY(mount("hostile", dir, "fuse", MS_NOSUID | MS_NODEV, opts));
	fuse_server = TRY(fork());
	if (fuse_server == 0)
		serve(dev);
	close(dev);
	return TRY(open(fuse_name(), O_RDWR | O_CLOEXEC));
}

struct stick { int fd; bool write; void *page; };

static void *stick_main(void *p)
{
	struct stick *s = p;

	if ((s->write ? write(s->fd, s->page, 8) : read(s->fd, s->page, 8)) < 0)
		return p;
	return NULL;
}

/* stick makes a thread block in the kernel in a read from, or write to, fd. */
static void stick(int fd, bool write, void *page)
{
	struct stick *s = malloc(sizeof(*s));
	pthread_t t;

	*s = (struct stick){ fd, write, page };
	pthread_create(&t, NULL, stick_main, s);
	nap(50);
}

/* Attacks. Each exits without freeing anything. */

static void traffic(struct client *c)
{
	for (int i = 0; i < 12; i++) {
		if (!call(c, STATUS))
			return;
		nap(5);
	}
}

static void wake_stuck(void)
{
	struct client c = greet();

	for (int i = 0; i < c.workers; i++)
		stick(c.wakes[i], true, stuck);
	traffic(&c);
}

static void wake_stuck_fuse(void)
{
	struct client c = greet();

	stick(c.wakes[0], true, fuse_page);
	traffic(&c);
}

static void cq_stuck_on(void *page)
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t lkey;
	int mem;
	uint8_t *cq = map(o.ring);

	atomic_store(word(cq, 2048), 1);
	if (!join(&c, &o, &lkey, &mem))
		fail("join");
	nap(20);
	stick(o.wake, false, page);
	for (int i = 0; i < 20; i++) { /* wake-ups for the blocked one */
		atomic_store(word(cq, 2048), 1);
		post(&c, &o, lkey, 0, 64);
		nap(5);
	}
	call(&c, DESTROY_QP, 1, o.qp);
	call(&c, DESTROY_CQ, 1, o.cq);
}

static void cq_stuck(void) { cq_stuck_on(stuck); }
static void cq_stuck_fuse(void) { cq_stuck_on(fuse_page); }

static void channel_stuck(void)
{
	struct client c = greet();
	int fd;

	if (!call(&c, CREATE_CHANNEL))
		return;
	fd = last.fds[0];
	stick(fd, false, stuck);
	stick(fd, true, stuck);
	call(&c, CREATE_CQ, 1, U(16), 2, body(12, 1));
	traffic(&c);
}

static void sq_lock(void)
{
	struct client c = greet();
	struct objects o = objects(&c);

	stick(o.sq, true, stuck);
	call(&c, DESTROY_QP, 1, o.qp);
}

static void rq_lock_leave(void)
{
	struct client c = greet();
	struct objects o = objects(&c);

	stick(o.rq, true, stuck);
	close(c.s);
	nap(1200);
}

static void cq_lock(void)
{
	struct client c = greet();
	struct objects o = objects(&c);

	stick(o.ring, true, stuck);
	for (int i = 0; i < 4; i++)
		if (!call(&c, RESIZE_CQ, 1, o.cq, 2, U(64)))
			return;
}

static void srq_lock(void)
{
	struct client c = greet();

	call(&c, ALLOC_PD);
	call(&c, CREATE_SRQ, 1, body(4, 1), 2, U(64), 3, U(1));
	stick(last.fds[0], true, stuck);
	call(&c, DESTROY_SRQ, 1, body(11, 1));
}

static void bells_lock(void)
{
	struct client c = greet();

	stick(c.pages[0], true, stuck);
	close(c.s);
	nap(1200);
}

static void mr_lock(void)
{
	struct client c = greet();
	int fd = make_memfd(2 * PAGE);

	call(&c, ALLOC_PD);
	stick(fd, true, stuck);
	call_fd(&c, REGISTER, fd, 1, body(4, 1), 3, U(PAGE), 5, U(3), 0);
	call(&c, DEREGISTER, 1, body(5, 1));
	traffic(&c);
}

static void region_of(int fd)
{
	struct client c = greet();
	struct timeval t = { .tv_sec = 5 };

	setsockopt(c.s, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof(t));
	if (!call(&c, ALLOC_PD))
		return;
	if (call_fd(&c, REGISTER, fd, 1, body(4, 1), 3, U(PAGE), 5, U(3), 0) && !last.error)
		give_up(3);
	traffic(&c);
}

static void fuse_region(void) { region_of(fuse_fd); }

/* Far memory. */

static bool attach(struct client *c, int fd) { return call_fd(c, ATTACH_MEMORY, fd, 0) && !last.error; }

static int own_memory(void) { return TRY(open("/proc/self/mem", O_RDWR | O_CLOEXEC)); }

static bool far_region(struct client *c, uint64_t pd, void *p, uint64_t len)
{
	return call(c, REGISTER, 1, pd, 2, U((uintptr_t)p), 3, len, 4, U((uintptr_t)p), 5, U(5), 7, U(1)) && !last.error;
}

/* far_refused offers a descriptor that is not of the client's memory. */
static void far_refused(int fd)
{
	struct client c = greet();

	if (attach(&c, fd))
		give_up(3);
	traffic(&c);
}

static void far_file(void) { far_refused(TRY(open("/etc/passwd", O_RDONLY))); }
static void far_fuse_file(void) { far_refused(fuse_fd); }
static void far_comm(void) { far_refused(TRY(open("/proc/self/comm", O_RDWR))); }
static void far_read_only(void) { far_refused(TRY(open("/proc/self/mem", O_RDONLY))); }

/* far_of gives the memory of a child, which executes a program, exits, or waits. */
static void far_of(bool exec, bool end)
{
	char name[64], b;
	int go[2], fd, null = TRY(open("/dev/null", O_RDWR));
	pid_t child;

	TRY(pipe2(go, O_CLOEXEC));
	child = TRY(fork());
	if (child == 0) {
		TRY(prctl(PR_SET_DUMPABLE, 1));
		close(go[1]);
		(void)!read(go[0], &b, 1);
		if (exec) {
			dup2(null, 0);
			execlp("sleep", "sleep", "8", (char *)NULL);
		}
		_exit(0);
	}
	close(go[0]);
	snprintf(name, sizeof(name), "/proc/%d/mem", child);
	fd = TRY(open(name, O_RDWR | O_CLOEXEC));
	if (exec || end) {
		close(go[1]);
		nap(200);
	}
	far_refused(fd);
	kill(child, SIGKILL);
}

static void far_other(void) { far_of(false, false); }
static void far_exited(void) { far_of(false, true); }
static void far_execed(void) { far_of(true, false); }

static void far_twice(void)
{
	struct client c = greet();

	if (!attach(&c, own_memory()) || attach(&c, own_memory()))
		give_up(3);
	traffic(&c);
}

static void far_without(void)
{
	struct client c = greet();

	call(&c, ALLOC_PD);
	if (far_region(&c, body(4, 1), stuck, PAGE))
		give_up(3);
	traffic(&c);
}

static void far_wraps(void)
{
	struct client c = greet();
	uint64_t pd;

	if (!attach(&c, own_memory()) || !call(&c, ALLOC_PD))
		give_up(3);
	pd = body(4, 1);
	if (far_region(&c, pd, (void *)-(uintptr_t)PAGE, 2 * PAGE) || far_region(&c, pd, stuck, 0) || far_region(&c, pd, stuck, UINT64_MAX))
		give_up(3);
	traffic(&c);
}

/*
 * far_send makes the daemon read pages that never arrive. If cut_off is set, it waits
 * until the daemon ends the connection.
 */
static void far_send(void *page, bool destroy, bool cut_off)
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t lkey, key;
	int mem;

	if (!attach(&c, own_memory()) || !join(&c, &o, &lkey, &mem))
		fail("join");
	if (!far_region(&c, o.pd, page, PAGE))
		give_up(3);
	key = body(5, 2);
	ring(&c, &o); /* maps the doorbells: once there are SENDs, mmap(2) waits for the page, too */
	put(&o, key, (uintptr_t)page, PAGE, 8);
	ring(&c, &o);
	nap(300);
	if (destroy)
		call(&c, DESTROY_QP, 1, o.qp); /* the daemon waits for the pages */
	if (!cut_off)
		traffic(&c);
	while (cut_off && receive(c.s, &last))
		;
}

static void far_uffd(void) { far_send(stuck, true, false); }
static void far_fuse(void) { far_send(fuse_page, false, true); }
static void far_fuse_destroy(void) { far_send(fuse_page, true, true); }

static void far_unmapped(void)
{
	struct client c = greet();
	struct objects o = objects(&c);
	char *p = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t lkey;
	int mem;

	if (!attach(&c, own_memory()) || !join(&c, &o, &lkey, &mem) || !far_region(&c, o.pd, p, PAGE))
		give_up(3);
	munmap(p, PAGE);
	post(&c, &o, body(5, 2), (uintptr_t)p, PAGE);
	traffic(&c);
}

static void fuse_extra(void)
{
	struct client c = greet();

	call_fd(&c, ALLOC_PD, fuse_fd, 0);
	traffic(&c);
}

static void fuse_many(int n, bool unread)
{
	struct client c = greet();
	int fds[200];
	struct buf q, none = { .n = 0 };

	for (int i = 0; i < n; i++)
		fds[i] = fuse_fd;
	request(&c, ALLOC_PD, &none, &q);
	for (int i = 0; i < (unread ? 20 : 1); i++)
		send_fds(c.s, q.b, q.n, fds, n, MSG_DONTWAIT);
	if (!unread)
		receive(c.s, &last);
}

static void fuse_two(void) { fuse_many(2, false); }
static void fuse_hundred(void) { fuse_many(100, false); }
static void fuse_unread(void) { fuse_many(100, true); }

static void fuse_garbage(void)
{
	struct client c = greet();

	send_fds(c.s, "\xff\xff\xff", 3, &fuse_fd, 1, 0);
	receive(c.s, &last);
}

static void fuse_refused(void)
{
	for (int i = 0; i < 20; i++) {
		struct client c = { .s = dial() };

		send_fds(c.s, "\x08\x01\x1a\x00", 4, &fuse_fd, 1, 0); /* AllocPD, before Hello */
	}
	nap(100);
}

static void fuse_clients(void)
{
	for (int i = 0; i < 20; i++) { /* many at a time */
		struct client c = greet();
		struct buf q, none = { .n = 0 };

		request(&c, ALLOC_PD, &none, &q);
		send_fds(c.s, q.b, q.n, &fuse_fd, 1, 0);
	}
	nap(1200);
}

/* lingerer returns a socket whose close waits, because its peer reads nothing. */
static int lingerer(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t n = sizeof(a);
	struct linger l = { 1, 60 };
	int s = TRY(socket(AF_INET, SOCK_STREAM, 0)), lis = TRY(socket(AF_INET, SOCK_STREAM, 0));
	static char junk[1 << 16];

	TRY(bind(lis, (struct sockaddr *)&a, sizeof(a)));
	TRY(listen(lis, 1));
	TRY(getsockname(lis, (struct sockaddr *)&a, &n));
	TRY(connect(s, (struct sockaddr *)&a, sizeof(a)));
	TRY(accept(lis, NULL, NULL));
	while (send(s, junk, sizeof(junk), MSG_DONTWAIT) > 0)
		;
	TRY(setsockopt(s, SOL_SOCKET, SO_LINGER, &l, sizeof(l)));
	return s;
}

static void linger_many(bool bad)
{
	struct client c = greet();
	struct buf q, none = { .n = 0 };
	int fds[250];

	for (int i = 0; i < 4; i++)
		fds[i] = lingerer();
	for (int i = 4; i < 250; i++)
		fds[i] = fds[i % 4];
	request(&c, ALLOC_PD, &none, &q);
	for (int i = 0; i < 8; i++)
		send_fds(c.s, q.b, q.n, fds, bad ? 250 : 4, MSG_DONTWAIT);
	for (int i = 0; i < 4; i++)
		close(fds[i]); /* now the daemon holds the last reference */
	close(c.s);
	nap(1200);
}

static void linger_region(void) { region_of(lingerer()); }
static void linger_unread(void) { linger_many(false); }
static void linger_250(void) { linger_many(true); }

static void wake_hammer(void)
{
	struct client c = greet();
	uint64_t one = 1;

	for (int p = 0; p < 2; p++)
		if (fork() == 0) {
			alarm(1);
			for (;;)
				if (write(c.wakes[0], &one, 8) < 0)
					_exit(0);
		}
	nap(700);
}

static void wake_full(void)
{
	struct client c = greet();
	uint64_t v = UINT64_MAX - 1;

	for (int i = 0; i < c.workers; i++) {
		if (write(c.wakes[i], &v, 8) < 0 || write(c.wakes[i], &v, 8) < 0)
			continue;
	}
	traffic(&c);
}

static void wake_blocks(void)
{
	struct client c = greet();
	uint64_t v;

	fcntl(c.wakes[0], F_SETFL, 0);
	if (read(c.wakes[0], &v, 8) < 0)
		return;
	traffic(&c);
}

static void wake_drained(void)
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t v;

	for (int i = 0; i < 2000; i++) {
		ring(&c, &o);
		if (read(c.wakes[0], &v, 8) < 0)
			continue;
	}
}

/* watched registers very many watches on what the daemon signals. */
static void watched(void)
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t one = 1;

	for (int i = 0; i < 100; i++) {
		int ep = epoll_create1(EPOLL_CLOEXEC);

		for (int j = 0; j < 100; j++) {
			struct epoll_event e = { .events = EPOLLIN };
			int fd = dup(j & 1 ? c.wakes[0] : o.wake);

			if (fd < 0 || ep < 0)
				goto full;
			epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
		}
	}
full:
	for (int i = 0; i < 100; i++)
		if (write(c.wakes[0], &one, 8) < 0)
			break;
	close(c.s);
	nap(50);
}

static void epoll_ring(void)
{
	struct client c = greet();
	int a = TRY(epoll_create1(0)), b = TRY(epoll_create1(0));
	struct epoll_event e = { .events = EPOLLIN | EPOLLET };

	epoll_ctl(a, EPOLL_CTL_ADD, c.wakes[0], &e);
	epoll_ctl(b, EPOLL_CTL_ADD, a, &e);
	epoll_ctl(a, EPOLL_CTL_ADD, b, &e);
	traffic(&c);
}

static void cq_socket(void)
{
	struct client c = greet();
	struct objects o = objects(&c);
	struct sock_filter f[] = { BPF_STMT(BPF_RET | BPF_K, 0) };
	struct sock_fprog prog = { 1, f };
	int on = 1, fds[3] = { fuse_fd, o.wake, c.s };

	setsockopt(o.wake, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on));
	setsockopt(o.wake, SOL_SOCKET, SO_ATTACH_FILTER, &prog, sizeof(prog));
	setsockopt(o.wake, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof(on));
	fcntl(o.wake, F_SETFL, O_ASYNC);
	if (send_fds(o.wake, "x", 1, fds, 3, MSG_DONTWAIT) >= 0)
		give_up(3);
	shutdown(o.wake, SHUT_RDWR);
	traffic(&c);
}

static void ring_word(int which, size_t at, uint32_t v)
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t lkey;
	int mem;

	if (!join(&c, &o, &lkey, &mem))
		fail("join");
	atomic_store(word(map(which == 0 ? o.sq : which == 1 ? o.rq : o.ring), at), v);
	for (int i = 0; i < 4; i++)
		post(&c, &o, lkey, 0, 64);
	nap(30);
}

static void sq_far(void) { ring_word(0, HEADER, 1 << 20); }
static void sq_back(void) { ring_word(0, HEADER, UINT32_MAX); }
static void rq_far(void) { ring_word(1, HEADER, 1 << 20); }
static void cq_far(void) { ring_word(2, HEADER + CONSUMER, 1 << 30); }
static void header_entries(void) { ring_word(0, 16, 1 << 30); }
static void header_size(void) { ring_word(2, 28, UINT32_MAX); }
static void header_stride(void) { ring_word(0, 20, 1); }

static void noise(void)
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t lkey;
	int mem;

	if (!join(&c, &o, &lkey, &mem))
		fail("join");
	for (int i = 0; i < 100; i++) {
		int fds[3] = { o.sq, o.rq, o.ring };
		uint8_t *m = map(fds[i % 3]);
		struct stat st;

		fstat(fds[i % 3], &st);
		for (int j = 0; j < 500; j++)
			m[(size_t)rand() % (size_t)st.st_size] = (uint8_t)rand();
		munmap(m, (size_t)st.st_size);
		ring(&c, &o);
	}
}

static void flip(int which)
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t lkey;
	int mem;
	uint8_t *m;

	if (!join(&c, &o, &lkey, &mem))
		fail("join");
	m = which ? map(c.pages[o.worker]) : map(o.ring);
	for (int i = 0; i < 2000; i++) {
		atomic_store(word(m, which ? HEADER : 2048), (uint32_t)i % 3);
		if (i % 20 == 0)
			post(&c, &o, lkey, 0, 64);
	}
}

static void flip_arm(void) { flip(0); }
static void flip_sleeping(void) { flip(1); }

static void all_bells(void)
{
	struct client c = greet();
	uint8_t *m = map(c.pages[0]);
	uint64_t one = 1;

	for (int i = 0; i < 300; i++) {
		memset(m + HEADER + BELLS, 0xff, PAGE - BELLS);
		if (write(c.wakes[0], &one, 8) < 0)
			break;
		nap(1);
	}
}

static void punch(int fd)
{
	struct stat st;

	fstat(fd, &st);
	fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, st.st_size);
}

static void punched_rings(void)
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t lkey;
	int mem;

	if (!join(&c, &o, &lkey, &mem))
		fail("join");
	for (int i = 0; i < 300; i++) {
		punch(o.sq), punch(o.rq), punch(o.ring), punch(c.pages[0]);
		ring(&c, &o);
	}
}

/* gone makes registered memory go away by f, then sends it. */
static void gone(void (*f)(int mem))
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t lkey;
	int mem;

	if (!join(&c, &o, &lkey, &mem))
		fail("join");
	f(mem);
	for (int i = 0; i < 8; i++)
		post(&c, &o, lkey, 8192, 60000);
	while (receive(c.s, &last))
		; /* until the client is cut off */
}

static void cut(int fd) { TRY(ftruncate(fd, 0)); }
static void cut_regrow(int fd) { TRY(ftruncate(fd, 0)); TRY(ftruncate(fd, 1 << 20)); }
static void mr_truncated(void) { gone(cut); }
static void mr_regrown(void) { gone(cut_regrow); }
static void mr_punched(void) { gone(punch); }

static void mr_punch_race(void)
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t lkey;
	int mem;

	if (!join(&c, &o, &lkey, &mem))
		fail("join");
	if (fork() == 0) {
		alarm(1);
		for (;;) {
			punch(mem);
			fallocate(mem, 0, 0, 1 << 20);
		}
	}
	for (int i = 0; i < 200; i++) {
		post(&c, &o, lkey, 0, 60000);
		nap(1);
	}
}

/* left leaves a queue pair, also while it connects, destroys what it has used, and goes on posting. */
static void left(void)
{
	for (int i = 0; i < 24; i++) {
		struct client c = greet();
		struct objects o = objects(&c);
		uint64_t srq, lkey = 0;
		int mem;

		call(&c, DESTROY_QP, 1, o.qp);
		if (!call(&c, CREATE_SRQ, 1, o.pd, 2, U(64), 3, U(1)) || last.nfds != 1)
			fail("srq");
		srq = body(11, 1), o.rq = last.fds[0];
		if (!call(&c, CREATE_QP, 1, o.pd, 2, o.cq, 3, o.cq, 4, U(16), 5, U(16), 6, U(4), 9, srq) || last.nfds != 1)
			fail("qp");
		o.qp = body(7, 1), o.bell = body(7, 2), o.sq = last.fds[0];
		if (i % 2 == 0) {
			if (!join(&c, &o, &lkey, &mem))
				fail("join");
			for (int n = 0; n < 8; n++)
				post(&c, &o, lkey, 0, 60000);
		} else {
			struct buf b = { .n = 0 };

			num(&b, 1, o.qp);
			bytes(&b, 3, peer, strlen(peer));
			if (!ask(&c, CONNECT, &b, NULL, 0, &last))
				fail("connect");
			nap(i % 3);
		}
		call(&c, DISCONNECT, 1, o.qp, 3, U(1));
		call(&c, DESTROY_SRQ, 1, srq);
		if (last.error || !call(&c, DESTROY_CQ, 1, o.cq) || last.error)
			fail("it is still used");
		for (int n = 0; n < 8; n++)
			post(&c, &o, lkey, 0, 60000);
		nap(i % 5);
		close(c.s);
	}
}

/* mr_punch_large frees half a GiB of memory at once while a worker reads from it. */
static void mr_punch_large(void)
{
	const uint64_t size = 512 << 20;
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t lkey;
	int mem, big = TRY(memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING));

	if (!join(&c, &o, &lkey, &mem))
		fail("join");
	TRY(fallocate(big, 0, 0, (off_t)size));
	if (!call_fd(&c, REGISTER, big, 1, o.pd, 3, size, 5, U(1), 0) || last.error)
		fail("register");
	lkey = body(5, 2);
	for (uint64_t i = 0; i < 8; i++) /* the ring has room for 16 */
		post(&c, &o, lkey, i * (size / 8), 60000);
	TRY(fallocate(big, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)size));
	for (uint64_t i = 0; i < 8; i++) /* the ring has room for 16 */
		post(&c, &o, lkey, i * (size / 8), 60000);
	nap(100);
}

static void half_message(void)
{
	struct client c = greet();

	send_fds(c.s, "\x08\x05\x2a\x7f\x08", 5, NULL, 0, 0);
	receive(c.s, &last);
}

static void empty_packets(void)
{
	struct client c = greet();

	for (int i = 0; i < 100; i++)
		send_fds(c.s, "", 0, NULL, 0, MSG_DONTWAIT);
	receive(c.s, &last);
}

/* empty_packets_fds sends descriptors without a message. */
static void empty_packets_fds(void)
{
	int fds[253];

	for (int i = 0; i < 253; i++)
		fds[i] = 0;
	for (int i = 0; i < 20; i++) {
		struct client c = greet();

		send_fds(c.s, "", 0, fds, 253, 0);
		receive(c.s, &last);
		close(c.s);
	}
}

static void unread(int kind, int field1, uint64_t v)
{
	struct client c = greet();
	struct buf q, b = { .n = 0 };
	int size = 1;

	setsockopt(c.s, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size));
	if (field1)
		num(&b, field1, v);
	request(&c, kind, &b, &q);
	for (int i = 0; i < 600; i++)
		if (send_fds(c.s, q.b, q.n, NULL, 0, MSG_DONTWAIT) < 0) {
			if (errno != EAGAIN)
				return;
			nap(1);
		}
}

static void unread_status(void) { unread(STATUS, 0, 0); }
static void unread_cqs(void) { unread(CREATE_CQ, 1, 16); }
static void unread_deep_cqs(void) { unread(CREATE_CQ, 1, 16384); }
static void unread_channels(void) { unread(CREATE_CHANNEL, 0, 0); }

static void own_socket(void)
{
	struct client c = greet();

	for (int i = 0; i < 20; i++)
		call_fd(&c, ALLOC_PD, c.s, 0);
	for (int i = 0; i < 50; i++)
		send_fds(c.s, "\x08\x01\x1a\x00", 4, &c.s, 1, MSG_DONTWAIT);
}

static void cycles(void)
{
	struct client c = greet();

	for (int i = 0; i < 40; i++) {
		int p[2], both[3];

		if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, p) < 0)
			break;
		both[0] = p[0], both[1] = p[1], both[2] = c.s;
		send_fds(p[0], "x", 1, both, 3, MSG_DONTWAIT);
		send_fds(p[1], "x", 1, both, 3, MSG_DONTWAIT);
		if (i % 10 == 0)
			call_fd(&c, ALLOC_PD, p[0], 0);
		close(p[0]);
		close(p[1]);
	}
	call(&c, STATUS);
}

static void fd_flood(void)
{
	for (int i = 0; i < 20; i++) {
		struct client c = greet();
		int fds[250];

		for (int j = 0; j < 250; j++)
			fds[j] = j & 1 ? 0 : c.s;
		for (int j = 0; j < 10; j++)
			send_fds(c.s, "\x08\x01\x1a\x00", 4, fds, 250, MSG_DONTWAIT);
		close(c.s);
	}
}

static void forked(void)
{
	struct client c = greet();

	for (int p = 0; p < 3; p++)
		if (fork() == 0) {
			alarm(3);
			for (int i = 0; i < 200; i++)
				if (!call(&c, p == 0 ? CREATE_CQ : STATUS, 1, U(16)))
					break;
			_exit(0);
		}
	nap(300);
	shutdown(c.s, SHUT_RDWR);
}

static void half_closed(void)
{
	struct client c = greet();
	struct buf q, none = { .n = 0 };

	shutdown(c.s, SHUT_RD);
	for (int i = 0; i < 100; i++) {
		request(&c, CREATE_CHANNEL, &none, &q);
		if (send_fds(c.s, q.b, q.n, NULL, 0, 0) < 0)
			return;
	}
}

static void killed(void)
{
	for (int p = 0; p < 10; p++) {
		pid_t pid = fork();

		if (pid == 0) {
			struct client c = greet();

			for (;;) {
				struct objects o = objects(&c);

				close(o.ring), close(o.wake), close(o.sq), close(o.rq);
			}
		}
		nap(10 + p);
		if (pid > 0)
			kill(pid, SIGKILL);
	}
}

static void connects(void)
{
	for (int i = 0; i < 500; i++)
		close(dial());
}

static void silent(void)
{
	for (int i = 0; i < 40; i++)
		dial();
	nap(200);
}

static void resize_race(void)
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t lkey;
	int mem;

	if (!join(&c, &o, &lkey, &mem))
		fail("join");
	for (int i = 0; i < 100; i++) {
		post(&c, &o, lkey, 0, 64);
		if (!call(&c, RESIZE_CQ, 1, o.cq, 2, U(1 << i % 12)))
			return;
		for (int j = 0; j < last.nfds; j++)
			close(last.fds[j]);
	}
}

static void teardown_race(void)
{
	for (int i = 0; i < 30; i++) {
		struct client c = greet();
		struct objects o = objects(&c);
		uint64_t lkey;
		int mem;

		if (join(&c, &o, &lkey, &mem))
			for (int j = 0; j < 8; j++)
				post(&c, &o, lkey, 0, 60000);
		close(c.s);
	}
}

static void srqs_listed(void)
{
	for (int p = 0; p < 3; p++)
		if (fork() == 0) {
			struct client c = greet();

			alarm(2);
			while (call(&c, LIST_SRQS))
				;
			_exit(0);
		}
	for (int i = 0; i < 5; i++) {
		struct client c = greet();
		uint64_t pd;

		call(&c, ALLOC_PD);
		pd = body(4, 1);
		for (int j = 0; j < 60; j++) {
			if (!call(&c, CREATE_SRQ, 1, pd, 2, U(64), 3, U(1)))
				break;
			close(last.fds[0]);
		}
		close(c.s);
	}
}

static void captures(void)
{
	struct client c = greet();

	for (int i = 0; i < 50; i++)
		call(&c, CAPTURE, 4, U(UINT32_MAX));
}

static void same_region(void)
{
	struct client c = greet();
	int fd = make_memfd(1 << 20);
	uint64_t pd;

	call(&c, ALLOC_PD);
	pd = body(4, 1);
	for (int i = 0; i < 500; i++)
		if (!call_fd(&c, REGISTER, fd, 1, pd, 3, U(1 << 20), 5, U(3), 0) || last.error)
			break;
}

static void listens(void)
{
	struct client c = greet();

	for (int i = 0; i < 300; i++)
		if (!call(&c, LISTEN, 3, U(UINT32_MAX)) || last.error)
			break;
}

static void moderate(void)
{
	struct client c = greet();
	struct objects o = objects(&c);
	uint64_t lkey;
	int mem;

	if (!join(&c, &o, &lkey, &mem))
		fail("join");
	call(&c, MODIFY_CQ, 1, o.cq, 2, U(UINT32_MAX), 3, U(1000000));
	atomic_store(word(map(o.ring), 2048), 1);
	post(&c, &o, lkey, 0, 64);
}

/* Descriptors of other things than memory. */

static int fd_memfd(unsigned int flags, size_t size, int seals)
{
	int fd = TRY(memfd_create("hostile", flags));

	if (size)
		TRY(ftruncate(fd, (off_t)size));
	if (seals)
		TRY(fcntl(fd, F_ADD_SEALS, seals));
	return fd;
}

static int odd(int kind)
{
	int p[2], fd;
	struct epoll_event e = { .events = EPOLLIN };
	struct io_uring_params u = { 0 };
	sigset_t none;
	char name[64];

	sigemptyset(&none);
	switch (kind) {
	case 0: TRY(pipe(p)); return p[0];
	case 1: TRY(pipe(p)); return p[1];
	case 2: TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, p)); return p[0];
	case 3: return epoll_create1(0);
	case 4: fd = epoll_create1(0); p[0] = epoll_create1(0); epoll_ctl(fd, EPOLL_CTL_ADD, p[0], &e); return fd;
	case 5: return (int)syscall(SYS_io_uring_setup, 8, &u);
	case 6: return (int)syscall(SYS_userfaultfd, UFFD_USER_MODE_ONLY);
	case 7: return eventfd(0, 0);
	case 8: return timerfd_create(CLOCK_MONOTONIC, 0);
	case 9: return signalfd(-1, &none, 0);
	case 10: return inotify_init();
	case 11: return (int)syscall(SYS_pidfd_open, getpid(), 0);
	case 12: return socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
	case 13: return open("/", O_RDONLY);
	case 14: return open("/dev/null", O_PATH);
	case 15: return open("/proc/self/mem", O_RDWR);
	case 16: return open("/dev/zero", O_RDWR);
	case 17: return open("/dev/ptmx", O_RDWR | O_NOCTTY);
	case 18: return open("/proc/self/ns/net", O_RDONLY);
	case 19: return fd_memfd(0, PAGE, 0); /* cannot be sealed */
	case 20: return fd_memfd(MFD_ALLOW_SEALING, PAGE, F_SEAL_WRITE);
	case 21: return fd_memfd(MFD_ALLOW_SEALING, PAGE, F_SEAL_FUTURE_WRITE);
	case 22: return fd_memfd(MFD_ALLOW_SEALING, PAGE, F_SEAL_SEAL);
	case 23: return fd_memfd(MFD_ALLOW_SEALING, 0, 0);
	case 24: return fd_memfd(MFD_ALLOW_SEALING, (size_t)1 << 40, 0); /* a hole */
	case 25: return fd_memfd(MFD_ALLOW_SEALING, PAGE, 0); /* the same */
	case 26: return memfd_create("hostile", MFD_HUGETLB | MFD_ALLOW_SEALING);
	case 27:
		fd = make_memfd(PAGE);
		snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
		return open(name, O_RDONLY);
	case 28: return open("/proc/self/exe", O_RDONLY);
	case 29: return socket(AF_INET6, SOCK_DGRAM, 0);
	case 30: return open("/proc/self/fd", O_DIRECTORY);
	case 31: return open("/proc/self/pagemap", O_RDONLY);
	}
	return -1;
}

static const char *const odd_names[] = {
	"pipe, read end", "pipe, write end", "socket pair", "epoll", "epoll of epoll", "io_uring", "userfaultfd", "eventfd", "timerfd",
	"signalfd", "inotify", "pidfd", "netlink", "directory", "O_PATH", "memory of a process", "/dev/zero", "terminal", "namespace",
	"memfd that cannot be sealed", "write-sealed memfd", "future-write-sealed memfd", "memfd without seals to come", "empty memfd",
	"memfd of a terabyte", "memfd with a hole", "memfd of huge pages", "read-only memfd", "program file", "UDP socket", "proc directory", "pagemap",
};
enum { ODD = sizeof(odd_names) / sizeof(odd_names[0]) };

/* Attacks over the socket of a slot. Its clients never have administrator rights. */

static void slot_capture(void)
{
	struct client c = greet();

	if (!call(&c, CAPTURE) || !last.error)
		won("it captures every frame");
	for (uint64_t qp = 1; qp < 64; qp++)
		if (!call(&c, CAPTURE, 1, qp) || !last.error)
			won("it captures another's queue pair");
}

static void slot_disconnect(void)
{
	struct client c = greet();

	for (uint64_t qp = 1; qp < 256; qp++)
		if (!call(&c, ADMIN_DISCONNECT, 1, qp, 2, U(1)) || !last.error)
			won("it ends the connection of another");
}

static void slot_handles(void)
{
	static const int kinds[] = { DEREGISTER, DESTROY_CQ, DESTROY_QP, DISCONNECT, DESTROY_SRQ };
	struct client c = greet();

	for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++)
		for (uint64_t h = 1; h < 128; h++)
			if (!call(&c, kinds[k], 1, h) || !last.error)
				won("it has the object of another");
}

/* listed returns the length of a list. */
static int listed(struct client *c, int kind)
{
	struct span list;
	uint64_t key, n;
	int items = 0;

	if (!call(c, kind) || last.error)
		fail("list");
	field(last.body, kind, &list);
	while (list.n && get_varint(&list, &key) && get_varint(&list, &n))
		if ((key & 7) == 2) {
			items += key >> 3 == 1;
			list.p += n;
			list.n -= n;
		}
	return items;
}

static void slot_lists(void)
{
	struct client c = greet(), other = greet();

	if (listed(&c, LIST_CLIENTS) != 2 || listed(&c, LIST_QPS) != 0 || listed(&other, LIST_QUOTAS) != 1)
		won("it sees what is not its slot's");
}

static void slot_ports(void)
{
	struct client c = greet();

	for (uint64_t port = 1; port < 1024; port++)
		if (!call(&c, LISTEN, 2, port) || !last.error)
			won("it listens on a port below 1024");
}

static void slot_quota(void)
{
	int n = 0;

	for (struct client c = { .s = dial() }; n < 200; n++, c = (struct client){ .s = dial() })
		if (!call(&c, 2, 1, U(1), 2, U(1)) || last.error)
			break;
	if (n > 64)
		won("it has more clients than its quota");
}

static void slot_reconnects(void)
{
	for (int i = 0; i < 200; i++) {
		struct client c = greet();
		struct objects o = objects(&c);

		call(&c, LISTEN, 2, U(20000));
		close(o.ring), close(o.wake), close(o.sq), close(o.rq);
		for (int w = 0; w < c.workers; w++)
			close(c.pages[w]), close(c.wakes[w]);
		close(c.s);
	}
}

static void slot_flood(void)
{
	for (int i = 0; i < 300; i++) {
		int s = dial();

		for (int n = 0; n < 8; n++)
			send_fds(s, "flood", 5, NULL, 0, MSG_DONTWAIT);
	}
	nap(200);
}

static void slot_name(void)
{
	static const char name[] = "\x1b[2J\n\rroot\x9b\xff\xe2\x80\xae";
	struct client c = { .s = dial() };
	struct buf b = { .n = 0 };

	num(&b, 1, 1);
	num(&b, 2, 1);
	bytes(&b, 3, name, sizeof(name) - 1);
	if (!ask(&c, 2, &b, NULL, 0, &last) || last.error)
		return;
	if (!call(&c, LIST_CLIENTS) || memchr(last.body.p, 0x1b, last.body.n))
		won("its name reaches a terminal");
}

/* slot_namespace acts as root of a user namespace of its own. */
static void slot_namespace(void)
{
	char text[64];
	int fd;

	if (unshare(CLONE_NEWUSER) == 0 && (fd = open("/proc/self/uid_map", O_WRONLY)) >= 0) {
		snprintf(text, sizeof(text), "0 %d 1", UID);
		TRY(write(fd, text, strlen(text)));
	}
	slot_capture();
	slot_disconnect();
}

/* slot_file replaces the socket by other files. */
static void slot_file(void)
{
	struct client c = greet();

	TRY(renameat(slot, "iwarpd.sock", slot, "away"));
	TRY(symlinkat("/etc/passwd", slot, "iwarpd.sock"));
	if (!call(&c, LIST_CLIENTS))
		fail("list");
	TRY(unlinkat(slot, "iwarpd.sock", 0));
	TRY(mkdirat(slot, "iwarpd.sock", 0700));
	TRY(unlinkat(slot, "iwarpd.sock", AT_REMOVEDIR));
	TRY(renameat(slot, "away", slot, "iwarpd.sock"));
}

/* Near memory: slices of one memfd, and windows bound to them. */

#define NEAR UINT64_C(0x7f1200000000) /* where its pages are in the file */

static int near_file(int pages)
{
	int fd = TRY(memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING));

	TRY(ftruncate(fd, INT64_C(1) << 56));
	if (pages)
		TRY(fallocate(fd, 0, (off_t)NEAR, (off_t)pages * PAGE));
	return fd;
}

static bool attach_near(struct client *c, int fd) { return call_fd(c, ATTACH_MEMORY, fd, 1, U(1), 0) && !last.error; }

static bool near_region(struct client *c, uint64_t pd, uint64_t at, uint64_t len)
{
	return call(c, REGISTER, 1, pd, 2, at, 3, len, 4, at, 5, U(31), 8, U(1)) && !last.error;
}

/* near_refused offers a descriptor that is no memfd, or no fit one. */
static void near_refused(int fd)
{
	struct client c = greet();

	if (attach_near(&c, fd))
		won("it is near memory");
	traffic(&c);
}

static void near_fuse(void) { near_refused(fuse_fd); }
static void near_linger(void) { near_refused(lingerer()); }
static void near_process(void) { near_refused(own_memory()); }
static void near_sealed(void) { near_refused(fd_memfd(MFD_ALLOW_SEALING, PAGE, F_SEAL_WRITE)); }
static void near_unsealable(void) { near_refused(fd_memfd(0, PAGE, 0)); }
static void near_huge(void) { near_refused(TRY(memfd_create("hostile", MFD_HUGETLB | MFD_ALLOW_SEALING))); }

static void near_twice(void)
{
	struct client c = greet();

	if (!attach_near(&c, near_file(1)) || attach_near(&c, near_file(1)))
		won("its near memory is attached twice");
	traffic(&c);
}

static void near_without(void)
{
	struct client c = greet();

	call(&c, ALLOC_PD);
	if (near_region(&c, body(4, 1), NEAR, PAGE))
		won("it has near memory without a memfd");
	traffic(&c);
}

/* near_client returns a client with so many pages of near memory, in *fd. */
static struct client near_client(int pages, int *fd, uint64_t *pd)
{
	struct client c = greet();

	*fd = near_file(pages);
	if (!attach_near(&c, *fd) || !call(&c, ALLOC_PD))
		fail("near memory");
	*pd = body(4, 1);
	return c;
}

/* near_bounds asks for what is not in the file, or not allocated. */
static void near_bounds(void)
{
	static const struct { uint64_t at, len; } bad[] = {
		{ NEAR, 0 }, { NEAR, 5 * PAGE }, { NEAR - 1, PAGE }, { NEAR + 4 * PAGE, 1 }, { 0, PAGE }, { UINT64_C(1) << 56, 1 },
		{ (UINT64_C(1) << 56) - PAGE, 2 * PAGE }, { UINT64_MAX, 1 }, { UINT64_MAX - PAGE + 1, PAGE }, { NEAR, UINT64_MAX },
		{ NEAR, UINT64_C(1) << 32 }, { UINT64_MAX - NEAR, 2 * NEAR },
	};
	int fd;
	uint64_t pd;
	struct client c = near_client(4, &fd, &pd);

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		if (near_region(&c, pd, bad[i].at, bad[i].len))
			won("it has memory that is not there");
	if (!near_region(&c, pd, NEAR, 4 * PAGE))
		fail("memory that is there");
}

/* near_lock has the lock of the memfd while the daemon uses it. */
static void near_lock(void)
{
	int fd;
	uint64_t pd;
	struct client c = near_client(4, &fd, &pd);

	stick(fd, true, stuck);
	near_region(&c, pd, NEAR, PAGE);
	near_region(&c, pd, NEAR, 2 * PAGE);
	call(&c, DEREGISTER, 1, body(5, 1));
	traffic(&c);
}

/* near_spread has pages so far apart that each needs a mapping of its own. */
static void near_spread(void)
{
	int fd;
	uint64_t pd;
	struct client c = near_client(0, &fd, &pd);

	for (uint64_t i = 0; i < 600; i++) {
		uint64_t at = NEAR + i * (UINT64_C(65) << 20);

		TRY(fallocate(fd, 0, (off_t)at, PAGE));
		if (!near_region(&c, pd, at, PAGE))
			break;
	}
}

/* near_slices has many slices of the same pages, of which it gives back some. */
static void near_slices(void)
{
	int fd;
	uint64_t pd, mrs[512];
	struct client c = near_client(64, &fd, &pd);

	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < 512; i++) {
			uint64_t at = (uint64_t)rand() % (63 * PAGE), len = 1 + (uint64_t)rand() % (64 * PAGE - at - 1);

			if (!near_region(&c, pd, NEAR + at, len))
				return;
			mrs[i] = body(5, 1);
		}
		for (int i = 0; i < 512 - 100 * round; i++)
			if (!call(&c, DEREGISTER, 1, mrs[i]) || last.error)
				fail("deregister");
	}
}

/* near_sealed_late forbids writing once the daemon has the memfd, before and after it is mapped. */
static void near_sealed_late(void)
{
	for (int mapped = 0; mapped < 2; mapped++) {
		int fd;
		uint64_t pd;
		struct client c = near_client(4, &fd, &pd);

		if (mapped && !near_region(&c, pd, NEAR, PAGE))
			fail("register");
		TRY(fcntl(fd, F_ADD_SEALS, mapped ? F_SEAL_FUTURE_WRITE : F_SEAL_WRITE));
		near_region(&c, pd, NEAR, 2 * PAGE);
		near_region(&c, pd, NEAR + (UINT64_C(1) << 40), PAGE);
		traffic(&c);
	}
}

/* near_gone makes near memory go away by f, then sends it. */
static void near_gone(void (*f)(int fd))
{
	struct client c = greet();
	struct objects o = objects(&c);
	int mem, fd = near_file(256);
	uint64_t lkey;

	if (!attach_near(&c, fd) || !join(&c, &o, &lkey, &mem) || !near_region(&c, o.pd, NEAR, 256 * PAGE))
		fail("join");
	lkey = body(5, 2);
	f(fd);
	for (int i = 0; i < 8; i++)
		post(&c, &o, lkey, NEAR + 2 * PAGE, 60000);
	while (receive(c.s, &last))
		; /* until the client is cut off */
}

static void punch_near(int fd) { TRY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)NEAR, 256 * PAGE)); }
static void cut_near(int fd) { TRY(ftruncate(fd, 0)); TRY(ftruncate(fd, INT64_C(1) << 56)); }
static void near_punched(void) { near_gone(punch_near); }
static void near_truncated(void) { near_gone(cut_near); }

/* near_punch_race frees and allocates pages while slices of them are made, sent and given back. */
static void near_punch_race(void)
{
	struct client c = greet();
	struct objects o = objects(&c);
	int mem, fd = near_file(256);
	uint64_t lkey, mr;

	if (!attach_near(&c, fd) || !join(&c, &o, &lkey, &mem))
		fail("join");
	if (fork() == 0) {
		alarm(1);
		for (;;) {
			punch_near(fd);
			fallocate(fd, 0, (off_t)NEAR, 256 * PAGE);
		}
	}
	for (int i = 0; i < 200; i++) {
		if (!near_region(&c, o.pd, NEAR, 16 * PAGE))
			continue;
		mr = body(5, 1);
		post(&c, &o, body(5, 2), NEAR, 60000);
		if (i % 3 && !call(&c, DEREGISTER, 1, mr))
			return;
	}
}

/* A window of near memory, whose key is rkey. */
struct window { struct objects o; int fd; uint64_t mr, lkey, mw, rkey; };

/* bind_window posts the request that binds a window to len bytes at addr of a region. It is not rung. */
static void bind_window(struct window *w, uint64_t lkey, uint64_t addr, uint32_t len)
{
	uint8_t *m = map(w->o.sq), *e;
	uint32_t at = atomic_load(word(m, HEADER)), stride, key = (uint32_t)lkey, rkey = (uint32_t)(w->rkey = (w->rkey & ~UINT64_C(255)) | 7), rights = 6;

	memcpy(&stride, m + 20, 4);
	e = m + HEADER + ENTRIES + (at & 15) * stride;
	memset(e, 0, stride);
	e[8] = 8;
	e[9] = 2;
	e[10] = 1;
	memcpy(e + 24, &rkey, 4);
	memcpy(e + 40, &rights, 4);
	memcpy(e + 64, &addr, 8);
	memcpy(e + 72, &len, 4);
	memcpy(e + 76, &key, 4);
	atomic_store(word(m, HEADER), at + 1);
}

/* window makes a client with four pages of near memory, a region of the middle two, and a window that is not bound. */
static struct client window(struct window *w)
{
	struct client c = greet();

	w->o = objects(&c);
	w->fd = near_file(4);
	if (!attach_near(&c, w->fd) || !near_region(&c, w->o.pd, NEAR + PAGE, 2 * PAGE))
		fail("near memory");
	w->mr = body(5, 1), w->lkey = body(5, 2);
	if (!call(&c, ALLOC_MW, 1, w->o.pd) || last.error)
		fail("window");
	w->mw = body(10, 1), w->rkey = body(10, 2);
	return c;
}

/* struck connects to the peer's service that writes to addr of the window. What was posted is done first. */
static void struck(struct client *c, struct window *w, uint64_t addr)
{
	struct buf b = { .n = 0 };
	char text[128], to[64];
	size_t n = strlen(peer);

	memcpy(to, peer, n + 1);
	to[n - 1]++; /* its port is the next one */
	snprintf(text, sizeof(text), "{\"RKey\":%u,\"Addr\":%llu,\"Len\":64,\"Read\":false}", (unsigned int)w->rkey, (unsigned long long)addr);
	num(&b, 1, w->o.qp);
	bytes(&b, 3, to, n);
	bytes(&b, 4, text, strlen(text));
	if (!ask(c, CONNECT, &b, NULL, 0, &last) || last.error)
		fail("connect");
}

/* page_of reads the first byte of a page of near memory, which a hole has too. */
static uint8_t page_of(struct window *w, int page)
{
	uint8_t b;

	TRY(pread(w->fd, &b, 1, (off_t)NEAR + page * PAGE));
	return b;
}

/* hit waits until the peer has written to a page, and reports whether it has. */
static bool hit(struct window *w, int page)
{
	for (int i = 0; i < 600; i++) {
		if (page_of(w, page))
			return true;
		nap(5);
	}
	return false;
}

/* near_window binds a window that the peer may write to: the attacks below test nothing if it cannot. */
static void near_window(void)
{
	struct window w;
	struct client c = window(&w);

	bind_window(&w, w.lkey, NEAR + PAGE, PAGE);
	struck(&c, &w, NEAR + PAGE);
	if (!hit(&w, 1))
		fail("the peer did not reach the window");
	if (call(&c, DEREGISTER, 1, w.mr) && !last.error)
		won("the region of a bound window is gone");
	call(&c, DEALLOC_MW, 1, w.mw);
	if (!call(&c, DEREGISTER, 1, w.mr) || last.error)
		fail("deregister");
}

/* near_window_wrong has the peer write where no window may be. */
static void near_window_wrong(uint64_t lkey_xor, uint64_t addr, uint32_t len, uint64_t at)
{
	struct window w;
	struct client c = window(&w);

	bind_window(&w, w.lkey ^ lkey_xor, addr, len);
	struck(&c, &w, at);
	nap(300);
	for (int page = 0; page < 4; page++)
		if (page_of(&w, page))
			won("the peer has written beyond the region");
	traffic(&c);
}

static void near_window_before(void) { near_window_wrong(0, NEAR, 2 * PAGE, NEAR); }
static void near_window_after(void) { near_window_wrong(0, NEAR + 2 * PAGE, PAGE + 1, NEAR + 3 * PAGE); }
static void near_window_around(void) { near_window_wrong(0, NEAR + PAGE, UINT32_MAX, NEAR + 3 * PAGE); }
static void near_window_wraps(void) { near_window_wrong(0, UINT64_MAX - PAGE, 2 * PAGE, NEAR); }
static void near_window_empty(void) { near_window_wrong(0, NEAR + PAGE, 0, NEAR + PAGE); }
static void near_window_key(void) { near_window_wrong(1, NEAR + PAGE, PAGE, NEAR + PAGE); }
static void near_window_past(void) { near_window_wrong(0, NEAR + PAGE, 8, NEAR + PAGE + 8); }

/* near_window_gone makes the pages of a window go away before the peer writes to them. */
static void near_window_gone(bool cut)
{
	struct window w;
	struct client c = window(&w);

	bind_window(&w, w.lkey, NEAR + PAGE, PAGE);
	if (cut)
		cut_near(w.fd);
	else
		punch_near(w.fd);
	struck(&c, &w, NEAR + PAGE);
	while (receive(c.s, &last))
		; /* until the client is cut off */
}

static void near_window_punched(void) { near_window_gone(false); }
static void near_window_truncated(void) { near_window_gone(true); }

/* near_window_race frees the window, its region or the client while the peer writes. */
static void near_window_race(void)
{
	for (int i = 0; i < 24; i++) {
		struct window w;
		struct client c = window(&w);

		bind_window(&w, w.lkey, NEAR + PAGE, PAGE);
		struck(&c, &w, NEAR + PAGE);
		nap(i / 4);
		if (i % 4 == 0)
			punch_near(w.fd);
		if (i % 4 == 1)
			call(&c, DEALLOC_MW, 1, w.mw);
		if (i % 4 < 3)
			call(&c, DEREGISTER, 1, w.mr);
		close(c.s);
		close(w.fd);
	}
}

static const struct attack { const char *name; void (*run)(void); } attacks[] = {
	{ "write to the worker's wake-up, stuck", wake_stuck },
	{ "write to the worker's wake-up, stuck in FUSE", wake_stuck_fuse },
	{ "read of a queue's wake-up, stuck", cq_stuck },
	{ "read of a queue's wake-up, stuck in FUSE", cq_stuck_fuse },
	{ "read of a channel, stuck", channel_stuck },
	{ "lock of a send ring", sq_lock },
	{ "lock of a receive ring", rq_lock_leave },
	{ "lock of a completion ring, resized", cq_lock },
	{ "lock of a shared receive ring", srq_lock },
	{ "lock of a doorbell page", bells_lock },
	{ "lock of registered memory", mr_lock },
	{ "FUSE file as memory", fuse_region },
	{ "file as far memory", far_file },
	{ "FUSE file as far memory", far_fuse_file },
	{ "other file of procfs as far memory", far_comm },
	{ "read-only far memory", far_read_only },
	{ "far memory of another process", far_other },
	{ "far memory of an exited process", far_exited },
	{ "far memory of before an exec", far_execed },
	{ "far memory twice", far_twice },
	{ "far memory without a descriptor", far_without },
	{ "far memory that wraps", far_wraps },
	{ "far memory that is unmapped", far_unmapped },
	{ "far memory of userfaultfd", far_uffd },
	{ "far memory of FUSE", far_fuse },
	{ "far memory of FUSE, then destroyed", far_fuse_destroy },
	{ "FUSE file with another request", fuse_extra },
	{ "two FUSE files", fuse_two },
	{ "a hundred FUSE files", fuse_hundred },
	{ "FUSE files that wait in the socket", fuse_unread },
	{ "FUSE file with garbage", fuse_garbage },
	{ "FUSE files before Hello", fuse_refused },
	{ "FUSE files of twenty clients", fuse_clients },
	{ "lingering socket as memory", linger_region },
	{ "lingering sockets that wait in the socket", linger_unread },
	{ "lingering sockets, 250 in a packet", linger_250 },
	{ "wake-ups without end", wake_hammer },
	{ "wake-up that is full", wake_full },
	{ "wake-up that blocks", wake_blocks },
	{ "wake-up that is read", wake_drained },
	{ "ten thousand watchers", watched },
	{ "loop of epolls", epoll_ring },
	{ "descriptors into a queue's wake-up", cq_socket },
	{ "send index far ahead", sq_far },
	{ "send index behind", sq_back },
	{ "receive index far ahead", rq_far },
	{ "completion index far ahead", cq_far },
	{ "header: entries", header_entries },
	{ "header: ring size", header_size },
	{ "header: stride", header_stride },
	{ "noise in rings", noise },
	{ "arm word that changes", flip_arm },
	{ "sleeping word that changes", flip_sleeping },
	{ "every bell", all_bells },
	{ "holes in rings", punched_rings },
	{ "memory that is truncated", mr_truncated },
	{ "memory that is truncated and grows", mr_regrown },
	{ "memory with holes", mr_punched },
	{ "memory with holes, a race", mr_punch_race },
	{ "memory of half a GiB with holes", mr_punch_large },
	{ "FUSE file as near memory", near_fuse },
	{ "lingering socket as near memory", near_linger },
	{ "memory of a process as near memory", near_process },
	{ "write-sealed near memory", near_sealed },
	{ "near memory that cannot be sealed", near_unsealable },
	{ "near memory of huge pages", near_huge },
	{ "near memory twice", near_twice },
	{ "near memory without a memfd", near_without },
	{ "near memory that is not there", near_bounds },
	{ "near memory, locked", near_lock },
	{ "near memory, spread", near_spread },
	{ "near memory, many slices", near_slices },
	{ "near memory, write-sealed late", near_sealed_late },
	{ "near memory with holes", near_punched },
	{ "near memory that is truncated", near_truncated },
	{ "near memory with holes, a race", near_punch_race },
	{ "near window", near_window },
	{ "near window before its region", near_window_before },
	{ "near window after its region", near_window_after },
	{ "near window around memory", near_window_around },
	{ "near window that wraps", near_window_wraps },
	{ "near window of nothing", near_window_empty },
	{ "near window with a wrong key", near_window_key },
	{ "near window, written past its end", near_window_past },
	{ "near window with holes", near_window_punched },
	{ "near window that is truncated", near_window_truncated },
	{ "near window, a race", near_window_race },
	{ "half a message", half_message },
	{ "empty packets", empty_packets },
	{ "empty packets with descriptors", empty_packets_fds },
	{ "status unread", unread_status },
	{ "completion queues unread", unread_cqs },
	{ "deep completion queues unread", unread_deep_cqs },
	{ "channels unread", unread_channels },
	{ "own socket in flight", own_socket },
	{ "cycles in flight", cycles },
	{ "flood of descriptors", fd_flood },
	{ "socket shared by a fork", forked },
	{ "half-closed socket", half_closed },
	{ "killed at work", killed },
	{ "connections without end", connects },
	{ "silent clients", silent },
	{ "resize race", resize_race },
	{ "teardown race", teardown_race },
	{ "listed while it ends", srqs_listed },
	{ "queue pair left", left },
	{ "captures", captures },
	{ "one memory many times", same_region },
	{ "listeners", listens },
	{ "moderation, then gone", moderate },
	{ "slot: captures", slot_capture },
	{ "slot as root: captures", slot_capture },
	{ "slot: ends connections", slot_disconnect },
	{ "slot as root: ends connections", slot_disconnect },
	{ "slot: handles of others", slot_handles },
	{ "slot: lists", slot_lists },
	{ "slot as root: ports", slot_ports },
	{ "slot: clients over its quota", slot_quota },
	{ "slot: reconnects", slot_reconnects },
	{ "slot: flood", slot_flood },
	{ "slot: name", slot_name },
	{ "slot: namespace", slot_namespace },
	{ "slot as root: file replaced", slot_file },
	{ "slot: own socket in flight", own_socket },
	{ "slot: status unread", unread_status },
};
enum { ATTACKS = sizeof(attacks) / sizeof(attacks[0]) };

int main(int argc, char **argv)
{
	const char *name;

	if (argc == 2 && !strcmp(argv[1], "list")) {
		for (int i = 0; i < ATTACKS; i++)
			puts(attacks[i].name);
		for (int i = 0; i < ODD; i++)
			printf("as memory: %s\n", odd_names[i]);
		return 0;
	}
	if (argc < 5)
		return 2;
	kernel_sockets = argc > 5 && !strcmp(argv[5], "socket");
	sock_path = argv[1], peer = argv[2], dir = argv[3], name = argv[4];
	signal(SIGPIPE, SIG_IGN);
	signal(SIGCHLD, SIG_IGN);
	signal(SIGALRM, give_up);
	main_pid = getpid();
	stuck = stuck_page();
	fuse_fd = mount_fuse();
	fuse_page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fuse_fd, 0);
	if (!strncmp(name, "slot", 4)) {
		char folder[108];

		snprintf(folder, sizeof(folder), "%.*s/slots/0", (int)(strrchr(sock_path, '/') - sock_path), sock_path);
		slot = TRY(open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC));
	}
	if (strncmp(name, "slot as root", 12)) {
		TRY(setresgid(UID, UID, UID));
		TRY(setresuid(UID, UID, UID));
	}
	TRY(prctl(PR_SET_DUMPABLE, 1)); /* /proc/self is this user's */
	alarm(12);
	for (int i = 0; i < ATTACKS; i++)
		if (!strcmp(name, attacks[i].name)) {
			attacks[i].run();
			goto done;
		}
	for (int i = 0; i < ODD; i++)
		if (!strncmp(name, "as memory: ", 11) && !strcmp(name + 11, odd_names[i])) {
			int fd = odd(i);

			if (fd < 0) /* not on this kernel */
				fail(name);
			region_of(fd);
			goto done;
		}
	return 2;
done:
	give_up(0);
}
