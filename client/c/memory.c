/* Protection domains, memory regions and windows. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

struct mr {
	struct object obj;
	struct iwarpd_mr pub;
	bool own; /* allocated by iwarpd_alloc_mr */
};

struct mw {
	struct object obj;
	struct iwarpd_mw pub;
};

static void pd_free(struct object *o)
{
	free(container_of(o, struct iwarpd_pd, obj));
}

int iwarpd_alloc_pd(struct iwarpd_device *dev, struct iwarpd_pd **out, struct iwarpd_error *e)
{
	Pb__AllocPD body = PB__ALLOC_PD__INIT;
	Pb__Request req = REQUEST(alloc_pd, ALLOC_PD, &body);
	struct iwarpd_pd *pd = calloc(1, sizeof(*pd));
	struct packet p;
	int err;

	if (!pd)
		return set_error(e, -ENOMEM, "out of memory");
	err = device_call(dev, &req, -1, PB__REPLY__BODY_PD, 0, &p, e);
	if (err) {
		free(pd);
		return err;
	}
	object_add(&pd->obj, dev, OBJECT_PD, p.msg->reply->pd->pd, pd_free);
	packet_free(&p);
	*out = pd;
	return 0;
}

int iwarpd_dealloc_pd(struct iwarpd_pd *pd, struct iwarpd_error *e)
{
	return object_destroy(&pd->obj, e);
}

static void mr_free(struct object *o)
{
	struct mr *m = container_of(o, struct mr, obj);

	if (m->own)
		munmap(m->pub.addr, m->pub.length);
	free(m);
}

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/*
 * populate allocates the pages of memory to be registered. They are charged to this
 * process, and the daemon refuses memory with holes. If allocation fails, the
 * daemon reports the error.
 */
static void populate(const struct iwarpd_mr_attr *attr)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	uintptr_t at = (uintptr_t)attr->addr & ~(page - 1);
	size_t n = (uintptr_t)attr->addr + attr->length - at;

	if (attr->addr && (madvise((void *)at, n, MADV_POPULATE_WRITE) == 0 || madvise((void *)at, n, MADV_POPULATE_READ) == 0))
		return;
	if (fallocate(attr->fd, 0, (off_t)attr->offset, (off_t)attr->length) < 0)
		errno = 0;
}

/* attach_fd gives the daemon a descriptor of memory that contains regions. */
static int attach_fd(struct iwarpd_device *dev, bool near, int fd, struct iwarpd_error *e)
{
	Pb__AttachMemory body = PB__ATTACH_MEMORY__INIT;
	Pb__Request req = REQUEST(attach_memory, ATTACH_MEMORY, &body);
	struct packet p;
	int err;

	body.near = near;
	err = device_call(dev, &req, fd, PB__REPLY__BODY__NOT_SET, 0, &p, e);
	if (!err)
		packet_free(&p);
	return err;
}

/*
 * attach gives the daemon the memfd of near memory, or /proc/self/mem for far memory. It
 * does so once for each.
 */
static int attach(struct iwarpd_device *dev, const struct iwarpd_mr_attr *attr, struct iwarpd_error *e)
{
	bool *attached = attr->near ? &dev->near : &dev->far;
	int err = 0, state;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); /* nobody would release the lock */
	pthread_mutex_lock(&dev->attaching);
	if (!*attached) {
		int fd = attr->near ? attr->fd : open("/proc/self/mem", O_RDWR | O_CLOEXEC);

		err = fd < 0 ? sys_error(e, "far memory: /proc/self/mem") : attach_fd(dev, attr->near, fd, e);
		if (!attr->near && fd >= 0)
			close(fd);
		*attached = !err;
	}
	pthread_mutex_unlock(&dev->attaching);
	pthread_setcancelstate(state, &state);
	return err;
}

int iwarpd_open_userfaultfd(struct iwarpd_device *dev, int *fd, struct iwarpd_error *e)
{
	Pb__OpenUserfaultfd body = PB__OPEN_USERFAULTFD__INIT;
	Pb__Request req = REQUEST(open_userfaultfd, OPEN_USERFAULTFD, &body);
	struct packet p;
	int err;

	err = device_call(dev, &req, -1, PB__REPLY__BODY__NOT_SET, 1, &p, e);
	if (err)
		return err;
	*fd = p.fds[0];
	p.num_fds = 0; /* it is the caller's */
	packet_free(&p);
	return 0;
}

/* prepare allocates the pages of a memfd that is to be registered, and keeps it from shrinking. */
static void prepare(const struct iwarpd_mr_attr *attr)
{
	populate(attr);
	fcntl(attr->fd, F_ADD_SEALS, F_SEAL_SHRINK); /* the daemon refuses what cannot be sealed */
}

static int register_mr(struct iwarpd_pd *pd, const struct iwarpd_mr_attr *attr, bool own, struct iwarpd_mr **out,
		       struct iwarpd_error *e)
{
	Pb__RegisterMR body = PB__REGISTER_MR__INIT;
	Pb__Request req = REQUEST(register_mr, REGISTER_MR, &body);
	struct mr *m = calloc(1, sizeof(*m));
	struct packet p;
	int err;

	if (!m)
		return set_error(e, -ENOMEM, "out of memory");
	if (!attr->far && !attr->near)
		prepare(attr);
	body.pd = pd->obj.handle;
	body.offset = attr->far ? (uintptr_t)attr->addr : attr->offset;
	body.length = attr->length;
	body.base_addr = attr->base;
	body.access = attr->access;
	body.fast = attr->fast;
	body.far = attr->far;
	body.near = attr->near;
	err = device_call(pd->obj.dev, &req, attr->far || attr->near ? -1 : attr->fd, PB__REPLY__BODY_MR, 0, &p, e);
	if (err) {
		free(m);
		return err;
	}
	m->own = own;
	m->pub = (struct iwarpd_mr){ attr->addr, attr->length, attr->base, p.msg->reply->mr->lkey, p.msg->reply->mr->rkey };
	object_add(&m->obj, pd->obj.dev, OBJECT_MR, p.msg->reply->mr->mr, mr_free);
	packet_free(&p);
	*out = &m->pub;
	return 0;
}

int iwarpd_reg_mr(struct iwarpd_pd *pd, const struct iwarpd_mr_attr *attr, struct iwarpd_mr **mr, struct iwarpd_error *e)
{
	int err = 0;

	if (attr->fd < 0 && !attr->far)
		return set_error(e, -EBADF, "memory region: no descriptor");
	if (attr->far || attr->near)
		err = attach(pd->obj.dev, attr, e);
	return err ? err : register_mr(pd, attr, false, mr, e);
}

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

/* make_memfd creates a memfd of a fixed size. */
static int make_memfd(size_t length)
{
	const unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
	int fd = memfd_create("iwarpd-mr", flags | MFD_NOEXEC_SEAL);

	if (fd < 0 && errno == EINVAL) /* before Linux 6.3 */
		fd = memfd_create("iwarpd-mr", flags);
	if (fd < 0)
		return -1;
	if (ftruncate(fd, (off_t)length) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0) {
		close(fd);
		return -1;
	}
	return fd;
}

int iwarpd_alloc_mr(struct iwarpd_pd *pd, size_t length, unsigned int access, struct iwarpd_mr **mr,
		    struct iwarpd_error *e)
{
	struct iwarpd_mr_attr attr = { .length = length, .access = access };
	int err;

	if (length == 0 || length > UINT32_MAX)
		return set_error(e, -EINVAL, "a memory region has 1 to 2^32-1 bytes, not %zu", length);
	attr.fd = make_memfd(length);
	if (attr.fd < 0)
		return sys_error(e, "memory region: memfd");
	attr.addr = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, attr.fd, 0);
	if (attr.addr == MAP_FAILED) {
		err = sys_error(e, "memory region: mmap");
		close(attr.fd);
		return err;
	}
	if (!(access & IWARPD_ZERO_BASED))
		attr.base = (uint64_t)(uintptr_t)attr.addr;
	err = register_mr(pd, &attr, true, mr, e);
	close(attr.fd);
	if (err)
		munmap(attr.addr, length);
	return err;
}

int iwarpd_dereg_mr(struct iwarpd_mr *mr, struct iwarpd_error *e)
{
	struct mr *m = container_of(mr, struct mr, pub);

	return object_destroy(&m->obj, e);
}

static void mw_free(struct object *o)
{
	free(container_of(o, struct mw, obj));
}

int iwarpd_alloc_mw(struct iwarpd_pd *pd, struct iwarpd_mw **out, struct iwarpd_error *e)
{
	Pb__AllocMW body = PB__ALLOC_MW__INIT;
	Pb__Request req = REQUEST(alloc_mw, ALLOC_MW, &body);
	struct mw *w = calloc(1, sizeof(*w));
	struct packet p;
	int err;

	if (!w)
		return set_error(e, -ENOMEM, "out of memory");
	body.pd = pd->obj.handle;
	err = device_call(pd->obj.dev, &req, -1, PB__REPLY__BODY_MW, 0, &p, e);
	if (err) {
		free(w);
		return err;
	}
	w->pub.rkey = p.msg->reply->mw->rkey;
	object_add(&w->obj, pd->obj.dev, OBJECT_MW, p.msg->reply->mw->mw, mw_free);
	packet_free(&p);
	*out = &w->pub;
	return 0;
}

int iwarpd_dealloc_mw(struct iwarpd_mw *mw, struct iwarpd_error *e)
{
	struct mw *w = container_of(mw, struct mw, pub);

	return object_destroy(&w->obj, e);
}
