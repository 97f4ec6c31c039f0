/* Posting of work requests. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "internal.h"

enum { BATCH = 16 }; /* work requests posted with one doorbell */

_Static_assert(sizeof(struct ibv_sge) == sizeof(struct iwarpd_sge) &&
	       offsetof(struct ibv_sge, length) == offsetof(struct iwarpd_sge, len) &&
	       offsetof(struct ibv_sge, lkey) == offsetof(struct iwarpd_sge, lkey), "an SGE is libibverbs'");
_Static_assert((int)IBV_SEND_FENCE == IWARPD_FENCE && (int)IBV_SEND_SIGNALED == IWARPD_SIGNALED &&
	       (int)IBV_SEND_SOLICITED == IWARPD_SOLICITED && (int)IBV_SEND_INLINE == IWARPD_INLINE,
	       "flags are libibverbs'");

/* posted returns the errno value of the kernel's verbs for an error of libiwarpd. */
static int posted(int err)
{
	switch (err) {
	case 0:
		return 0;
	case -EAGAIN:
		return ENOMEM; /* the queue is full */
	case -EMSGSIZE:
		return EINVAL;
	default:
		return -err;
	}
}

/*
 * gather copies the SGEs of an inline work request. It returns the length, or -1 if they
 * do not fit.
 */
static int gather(char *to, size_t size, const struct ibv_send_wr *wr)
{
	size_t n = 0;

	for (int i = 0; i < wr->num_sge; i++) {
		const struct ibv_sge *s = &wr->sg_list[i];

		if (s->length > size - n)
			return -1;
		memcpy(to + n, (const void *)(uintptr_t)s->addr, s->length);
		n += s->length;
	}
	return (int)n;
}

/* put_inline passes the data inline, gathered in room if it has several pieces. */
static int put_inline(struct iwarpd_send_wr *to, const struct ibv_send_wr *wr, char *room)
{
	int n;

	to->num_sge = 0;
	to->sge = NULL;
	if (wr->num_sge == 1) {
		to->inline_data = (const void *)(uintptr_t)wr->sg_list[0].addr;
		to->inline_len = wr->sg_list[0].length;
		return 0;
	}
	n = gather(room, MAX_INLINE, wr);
	if (n < 0)
		return -EMSGSIZE;
	to->inline_data = room;
	to->inline_len = (uint32_t)n;
	return 0;
}

static uint64_t length_of(const struct ibv_send_wr *wr)
{
	uint64_t n = 0;

	for (int i = 0; i < wr->num_sge; i++)
		n += wr->sg_list[i].length;
	return n;
}

/*
 * put_imm makes the second half of a Write with Immediate Data: a message with Immediate
 * Data (RFC 7306). Its 64 bits are the program's 32 bits and the length of the Write.
 */
static void put_imm(struct iwarpd_send_wr *to, const struct ibv_send_wr *wr)
{
	*to = (struct iwarpd_send_wr){
		.id = wr->wr_id,
		.opcode = IWARPD_WR_IMM,
		.flags = wr->send_flags & (IBV_SEND_SIGNALED | IBV_SEND_SOLICITED),
		.imm = (uint64_t)be32toh(wr->imm_data) << 32 | length_of(wr),
	};
}

/* put_bind makes the binding of a window. The program may name all access rights of the region; a window has only remote ones. */
static int put_bind(struct iwarpd_send_wr *to, const struct ibv_send_wr *wr, struct iwarpd_sge *window)
{
	const struct ibv_mw_bind_info *b = &wr->bind_mw.bind_info;

	if (b->length > UINT32_MAX)
		return -EMSGSIZE;
	*window = (struct iwarpd_sge){ b->addr, (uint32_t)b->length, b->mr ? b->mr->lkey : 0 };
	to->opcode = IWARPD_WR_BIND_MW;
	to->rkey = wr->bind_mw.rkey;
	to->access = b->mw_access_flags & (unsigned int)~IBV_ACCESS_LOCAL_WRITE;
	to->sge = window;
	to->num_sge = 1;
	return 0;
}

/* put_wr translates a work request of a QP. */
static int put_wr(struct iwarpd_send_wr *to, const struct ibv_send_wr *wr, const struct qp *qp, struct iwarpd_sge *window,
		  char *room)
{
	bool immediate = atomic_load_explicit(&qp->immediate, memory_order_relaxed);

	*to = (struct iwarpd_send_wr){
		.id = wr->wr_id,
		.flags = wr->send_flags & (IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED),
		.sge = (const struct iwarpd_sge *)(const void *)wr->sg_list,
		.num_sge = (uint32_t)wr->num_sge,
	};
	switch (wr->opcode) {
	case IBV_WR_SEND:
		to->opcode = IWARPD_WR_SEND;
		break;
	case IBV_WR_SEND_WITH_IMM:
		if (!immediate)
			return -iwv_unsupported("ibv_post_send: Send with Immediate Data on this connection");
		to->opcode = IWARPD_WR_SEND_WITH_INV;
		to->inv_key = be32toh(wr->imm_data);
		break;
	case IBV_WR_SEND_WITH_INV:
		if (immediate)
			return -iwv_unsupported("ibv_post_send: Send with Invalidate without librdmacm");
		to->opcode = IWARPD_WR_SEND_WITH_INV;
		to->inv_key = wr->invalidate_rkey;
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		to->id = HIDDEN_WR;
		to->flags = (to->flags & IBV_SEND_FENCE) | IWARPD_WITH_NEXT; /* put_imm makes that */
		/* fallthrough */
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_READ:
		if (wr->opcode == IBV_WR_RDMA_READ && wr->num_sge > 1)
			return -EINVAL; /* max_sge_rd is 1 */
		to->opcode = wr->opcode == IBV_WR_RDMA_READ ? IWARPD_WR_RDMA_READ : IWARPD_WR_RDMA_WRITE;
		to->remote_addr = wr->wr.rdma.remote_addr;
		to->rkey = wr->wr.rdma.rkey;
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		to->swap = wr->wr.atomic.swap;
		to->compare_mask = to->swap_mask = UINT64_MAX;
		/* fallthrough */
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		to->opcode = wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? IWARPD_WR_CMP_SWAP : IWARPD_WR_FETCH_ADD;
		to->compare_add = wr->wr.atomic.compare_add;
		to->remote_addr = wr->wr.atomic.remote_addr;
		to->rkey = wr->wr.atomic.rkey;
		break;
	case IBV_WR_LOCAL_INV:
		to->opcode = IWARPD_WR_LOCAL_INV;
		to->inv_key = wr->invalidate_rkey;
		to->num_sge = 0;
		break;
	case IBV_WR_BIND_MW:
		return put_bind(to, wr, window);
	default: /* TSO */
		return -iwv_unsupported("ibv_post_send: this kind of work request");
	}
	if ((wr->send_flags & IBV_SEND_INLINE) && wr->num_sge > 0 &&
	    (to->opcode == IWARPD_WR_SEND || to->opcode == IWARPD_WR_SEND_WITH_INV || to->opcode == IWARPD_WR_RDMA_WRITE)) {
		to->flags |= IWARPD_INLINE;
		return put_inline(to, wr, room);
	}
	return 0;
}

/*
 * own_room reports whether a work request uses the room of a batch, so that it is the
 * last one of it.
 */
static bool own_room(const struct ibv_send_wr *wr)
{
	return wr->opcode == IBV_WR_BIND_MW || ((wr->send_flags & IBV_SEND_INLINE) && wr->num_sge > 1);
}

/* A batch is work requests of libiwarpd and the data that they point to. */
struct batch {
	int n;
	struct iwarpd_send_wr wr[BATCH + 1];
	bool last[BATCH + 1]; /* the last one made from a work request of the program */
	struct iwarpd_sge window;
	char room[MAX_INLINE];
};

static void add(struct batch *b, bool sig_all, bool last)
{
	if (sig_all && last)
		b->wr[b->n].flags |= IWARPD_SIGNALED;
	b->last[b->n++] = last;
}

/*
 * room_of returns how many more sends of a QP may report success. The program frees the place of one by polling its
 * completion, as with other devices: some programs post until the queue is full. The daemon frees it earlier, and the
 * completions would overflow the CQ, which has places for twice max_send_wr.
 */
static int64_t room_of(const struct qp *qp)
{
	int64_t most = 2 * (int64_t)qp->attr.cap.max_send_wr;

	/* Failed sends report that in any case, so there may be fewer than none. Those of a daemon that has ended do not. */
	return atomic_load(&qp->ctx->gone) ? INT64_MAX : most - outstanding(&qp->signaled, &qp->polled);
}

/* fill_batch translates work requests of a list until the batch is full. */
static int fill_batch(struct batch *b, const struct ibv_send_wr *wr, const struct qp *qp)
{
	bool sig_all = qp->sig_all;
	int64_t room = room_of(qp);

	for (b->n = 0; wr && b->n < BATCH; wr = wr->next) {
		bool imm = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
		int err = put_wr(&b->wr[b->n], wr, qp, &b->window, b->room);

		if (!err && (sig_all || wr->send_flags & IBV_SEND_SIGNALED) && room-- <= 0)
			err = -EAGAIN;
		if (err)
			return err;
		add(b, sig_all, !imm);
		if (imm) {
			put_imm(&b->wr[b->n], wr);
			add(b, sig_all, true);
		}
		if (own_room(wr))
			return 0;
	}
	return 0;
}

/* completion_of returns the opcode of a work request's completion. */
static enum ibv_wc_opcode completion_of(const struct ibv_send_wr *wr)
{
	switch (wr->opcode) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return IBV_WC_RDMA_WRITE;
	case IBV_WR_RDMA_READ:
		return IBV_WC_RDMA_READ;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		return IBV_WC_COMP_SWAP;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		return IBV_WC_FETCH_ADD;
	case IBV_WR_LOCAL_INV:
		return IBV_WC_LOCAL_INV;
	case IBV_WR_BIND_MW:
		return IBV_WC_BIND_MW;
	default:
		return IBV_WC_SEND;
	}
}

/* post_batch posts the first work requests of a list and makes *wr the next one. */
static int post_batch(struct qp *qp, struct ibv_send_wr **wr)
{
	struct batch b;
	int err = fill_batch(&b, *wr, qp), done = 0;

	while (done < b.n) { /* a full queue takes a part; the next call returns why */
		int n = iwarpd_post_sends(qp->q, &b.wr[done], b.n - done);

		if (n < 0)
			return n;
		for (int end = done + n; done < end; done++) {
			if (!b.last[done])
				continue;
			atomic_store_explicit(&qp->posted, true, memory_order_relaxed);
			if (b.wr[done].flags & IWARPD_SIGNALED)
				count(&qp->signaled);
			*wr = (*wr)->next;
		}
	}
	return err;
}

int post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct qp *qp = qp_of(ibv);
	int err = 0;

	pthread_mutex_lock(&qp->send_lock);
	answer_posted(qp);
	while (wr && !err)
		err = post_batch(qp, &wr);
	for (; wr && (err == -ENOTCONN || err == 0); wr = wr->next)
		err = cq_flush(ibv->send_cq, ibv, wr->wr_id, completion_of(wr));
	pthread_mutex_unlock(&qp->send_lock);
	if (err)
		*bad = wr;
	return posted(err);
}

static struct iwarpd_recv_wr recv_of(const struct ibv_recv_wr *wr)
{
	return (struct iwarpd_recv_wr){ wr->wr_id, (const struct iwarpd_sge *)(const void *)wr->sg_list,
					(uint32_t)wr->num_sge };
}

int post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct qp *qp = qp_of(ibv);
	int err = 0;

	pthread_mutex_lock(&qp->recv_lock);
	for (; wr; wr = wr->next) {
		struct iwarpd_recv_wr r = recv_of(wr);

		err = iwarpd_post_recv(qp->q, &r);
		if (!err) {
			atomic_store_explicit(&qp->posted, true, memory_order_relaxed);
			count(&qp->receives);
		}
		if (err == -ENOTCONN)
			err = cq_flush(ibv->recv_cq, ibv, wr->wr_id, IBV_WC_RECV);
		if (err)
			break;
	}
	pthread_mutex_unlock(&qp->recv_lock);
	if (err)
		*bad = wr;
	return posted(err);
}

int post_srq_recv(struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct srq *srq = srq_of(ibv);
	int err = 0;

	pthread_mutex_lock(&srq->lock);
	for (; wr; wr = wr->next) {
		struct iwarpd_recv_wr r = recv_of(wr);

		err = iwarpd_post_srq_recv(srq->q, &r);
		if (err)
			break;
	}
	pthread_mutex_unlock(&srq->lock);
	if (err)
		*bad = wr;
	return posted(err);
}
