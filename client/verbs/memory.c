/* Protection domains, memory regions and memory windows. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct mr {
	struct ibv_mr ibv;
	struct iwarpd_mr *mr;
	unsigned int access;
	bool near; /* its pages are in the memfd */
};

struct mw {
	struct ibv_mw ibv;
	struct iwarpd_mw *mw;
};

enum {
	ACCESS_MASK = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
		      IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED,
	/* IBV_ACCESS_HUGETLB is a hint that iwarpd does not need. */
	ACCESS_IGNORED = IBV_ACCESS_HUGETLB,
};
_Static_assert((int)IBV_ACCESS_LOCAL_WRITE == IWARPD_LOCAL_WRITE && (int)IBV_ACCESS_REMOTE_WRITE == IWARPD_REMOTE_WRITE &&
	       (int)IBV_ACCESS_REMOTE_READ == IWARPD_REMOTE_READ && (int)IBV_ACCESS_REMOTE_ATOMIC == IWARPD_REMOTE_ATOMIC &&
	       (int)IBV_ACCESS_MW_BIND == IWARPD_MW_BIND && (int)IBV_ACCESS_ZERO_BASED == IWARPD_ZERO_BASED,
	       "access bits are libibverbs'");

struct ibv_pd *ibv_alloc_pd(struct ibv_context *ibv)
{
	struct iwarpd_error e;
	struct pd *pd;
	int err;

	OTHERS(ibv, ibv_alloc_pd, ibv);
	if (!context_own(iwv_context_of(ibv)))
		return NULL;
	pd = calloc(1, sizeof(*pd));
	if (!pd)
		return NULL;
	err = iwarpd_alloc_pd(iwv_context_of(ibv)->dev, &pd->pd, &e);
	if (err) {
		free(pd);
		iwv_fail(err, "ibv_alloc_pd", &e);
		return NULL;
	}
	pd->ibv.context = ibv;
	return &pd->ibv;
}

int ibv_dealloc_pd(struct ibv_pd *ibv)
{
	struct pd *pd = container_of(ibv, struct pd, ibv);
	struct iwarpd_error e;
	int err;

	OTHERS(ibv->context, ibv_dealloc_pd, ibv);
	err = iwarpd_dealloc_pd(pd->pd, &e);
	if (err && !daemon_gone(ibv->context))
		return iwv_fail(err, "ibv_dealloc_pd", &e);
	free(pd);
	return 0;
}

/* check_access returns 0, EINVAL where the kernel's verbs do, or EOPNOTSUPP. */
static int check_access(unsigned int access)
{
	const unsigned int writes = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

	if (access & ~(unsigned int)(ACCESS_MASK | ACCESS_IGNORED | IBV_ACCESS_OPTIONAL_RANGE))
		return EOPNOTSUPP; /* on-demand paging, for example */
	return (access & writes) && !(access & IBV_ACCESS_LOCAL_WRITE) ? EINVAL : 0;
}

/*
 * reg_near registers memory whose pages can be moved. It fails with -EFAULT if the
 * program itself may not make these accesses.
 */
static int reg_near(struct context *c, struct iwarpd_pd *pd, struct iwarpd_mr_attr *attr, struct mr *mr, struct iwarpd_error *e)
{
	int err;

	attr->fd = near_get(c->dev, (uintptr_t)attr->addr, attr->length, attr->access & IBV_ACCESS_LOCAL_WRITE);
	if (attr->fd < 0)
		return attr->fd;
	attr->near = true;
	attr->offset = (uintptr_t)attr->addr;
	err = iwarpd_reg_mr(pd, attr, &mr->mr, e);
	if (err)
		near_put((uintptr_t)attr->addr, attr->length);
	mr->near = !err;
	return err;
}

/* reg_far registers any memory. Atomics do not work there. */
static int reg_far(struct iwarpd_pd *pd, struct iwarpd_mr_attr *attr, struct mr *mr, struct iwarpd_error *e)
{
	int err = far_check((uintptr_t)attr->addr, attr->length, attr->access & IBV_ACCESS_LOCAL_WRITE);

	*e = (struct iwarpd_error){ 0 }; /* why it is not near is logged */
	attr->near = false;
	attr->far = true;
	return err ? err : iwarpd_reg_mr(pd, attr, &mr->mr, e);
}

/* place registers memory as near memory, which is faster, or else as far memory, unless it is for atomics. */
static int place(struct context *c, struct iwarpd_pd *pd, struct iwarpd_mr_attr *attr, struct mr *mr, struct iwarpd_error *e)
{
	bool atomic = attr->access & IBV_ACCESS_REMOTE_ATOMIC;
	uint64_t most = c->attr.max_mr_size < c->attr.max_registered ? c->attr.max_mr_size : c->attr.max_registered;
	int err = -EOPNOTSUPP;

	if (attr->length > most)
		snprintf(e->text, sizeof(e->text), "near memory has at most %" PRIu64 " bytes: raise max-registered in the daemon's configuration", most);
	else if (iwv_settings()->memory != MEMORY_FAR || atomic)
		err = reg_near(c, pd, attr, mr, e);
	if (!err || err == -EFAULT)
		return err;
	if (!e->text[0])
		snprintf(e->text, sizeof(e->text), "%s", strerror(-err));
	if (iwv_settings()->memory != MEMORY_NEAR && !atomic) {
		iwv_log("%zu bytes at %p are far memory: %s", (size_t)attr->length, attr->addr, e->text);
		return reg_far(pd, attr, mr, e);
	}
	iwv_log("%zu bytes at %p must be near memory%s", (size_t)attr->length, attr->addr, atomic ? ", because they are for atomics" : "");
	return err;
}

static struct ibv_mr *reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	struct iwarpd_mr_attr attr = { .length = length, .addr = addr, .base = iova, .access = access & ACCESS_MASK };
	struct context *c = iwv_context_of(pd->context);
	struct iwarpd_error e = { 0 };
	struct mr *mr;
	int err = -check_access(access), state;

	if (!err && (length == 0 || (uintptr_t)addr + length < (uintptr_t)addr))
		err = -EINVAL;
	if (err) {
		iwv_fail(err, "ibv_reg_mr: access or length", NULL);
		return NULL;
	}
	if (access & IBV_ACCESS_ZERO_BASED)
		attr.base = 0;
	mr = calloc(1, sizeof(*mr));
	if (!mr)
		return NULL;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); /* it takes locks */
	err = place(c, container_of(pd, struct pd, ibv)->pd, &attr, mr, &e);
	pthread_setcancelstate(state, NULL);
	if (err) {
		free(mr);
		iwv_fail(err, "ibv_reg_mr", &e);
		return NULL;
	}
	mr->access = access;
	mr->ibv = (struct ibv_mr){
		.context = pd->context,
		.pd = pd,
		.addr = addr,
		.length = length,
		.lkey = mr->mr->lkey,
		.rkey = mr->mr->rkey,
	};
	return &mr->ibv;
}

#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	OTHERS(pd->context, ibv_reg_mr, pd, addr, length, access);
	return reg_mr(pd, addr, length, (uintptr_t)addr, (unsigned int)access);
}

#undef ibv_reg_mr_iova
struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	OTHERS(pd->context, ibv_reg_mr_iova, pd, addr, length, iova, access);
	return reg_mr(pd, addr, length, iova, (unsigned int)access);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	OTHERS(pd->context, ibv_reg_mr_iova2, pd, addr, length, iova, access);
	return reg_mr(pd, addr, length, iova, access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	OTHERS(pd->context, ibv_reg_dmabuf_mr, pd, offset, length, iova, fd, access);
	iwv_unsupported("ibv_reg_dmabuf_mr");
	return NULL;
}

/* dereg deregisters a region. The program has mr still. */
static int dereg(struct mr *mr)
{
	struct iwarpd_error e;
	int err = iwarpd_dereg_mr(mr->mr, &e);

	if (err && !daemon_gone(mr->ibv.context))
		return iwv_fail(err, "ibv_dereg_mr", &e);
	if (mr->near)
		near_put((uintptr_t)mr->ibv.addr, mr->ibv.length);
	return 0;
}

int ibv_dereg_mr(struct ibv_mr *ibv)
{
	struct mr *mr = container_of(ibv, struct mr, ibv);
	int err;

	OTHERS(ibv->context, ibv_dereg_mr, ibv);
	err = dereg(mr);
	if (!err)
		free(mr);
	return err;
}

/* The region gets new keys, as the verbs allow. */
int ibv_rereg_mr(struct ibv_mr *ibv, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct mr *mr = container_of(ibv, struct mr, ibv);
	uint64_t iova = (uintptr_t)addr;
	struct ibv_mr *made;
	int err;

	OTHERS(ibv->context, ibv_rereg_mr, ibv, flags, pd, addr, length, access);
	if (!flags || flags & ~IBV_REREG_MR_FLAGS_SUPPORTED || (access && !(flags & IBV_REREG_MR_CHANGE_ACCESS)) ||
	    (flags & IBV_REREG_MR_CHANGE_TRANSLATION && !addr) ||
	    (flags & IBV_REREG_MR_CHANGE_PD && pd->context != ibv->context)) {
		errno = EINVAL;
		return IBV_REREG_MR_ERR_INPUT;
	}
	if (!(flags & IBV_REREG_MR_CHANGE_TRANSLATION)) {
		addr = ibv->addr;
		length = ibv->length;
		iova = mr->mr->base;
	}
	made = reg_mr(flags & IBV_REREG_MR_CHANGE_PD ? pd : ibv->pd, addr, length, iova,
		      flags & IBV_REREG_MR_CHANGE_ACCESS ? (unsigned int)access : mr->access);
	if (!made)
		return IBV_REREG_MR_ERR_INPUT;
	err = dereg(mr);
	if (err) {
		ibv_dereg_mr(made);
		errno = err;
		return IBV_REREG_MR_ERR_INPUT;
	}
	*mr = *container_of(made, struct mr, ibv);
	free(container_of(made, struct mr, ibv));
	return 0;
}

struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	struct iwarpd_error e;
	struct mw *mw;
	int err;

	if (type != IBV_MW_TYPE_2) {
		iwv_unsupported("ibv_alloc_mw: type 1");
		return NULL;
	}
	mw = calloc(1, sizeof(*mw));
	if (!mw)
		return NULL;
	err = iwarpd_alloc_mw(container_of(pd, struct pd, ibv)->pd, &mw->mw, &e);
	if (err) {
		free(mw);
		iwv_fail(err, "ibv_alloc_mw", &e);
		return NULL;
	}
	mw->ibv = (struct ibv_mw){ .context = pd->context, .pd = pd, .rkey = mw->mw->rkey, .type = type };
	return &mw->ibv;
}

int dealloc_mw(struct ibv_mw *ibv)
{
	struct mw *mw = container_of(ibv, struct mw, ibv);
	struct iwarpd_error e;
	int err = iwarpd_dealloc_mw(mw->mw, &e);

	if (err && !daemon_gone(ibv->context))
		return iwv_fail(err, "ibv_dealloc_mw", &e);
	free(mw);
	return 0;
}
