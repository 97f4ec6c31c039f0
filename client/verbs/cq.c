/* Completion queues and completion channels. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#include "internal.h"

enum { FIRST_DEPTH = 1024 }; /* depth of a CQ without queue pairs, unless the program asks for less */

struct channel {
	struct ibv_comp_channel ibv;
	struct iwarpd_channel *ch; /* NULL: destroyed; changes with the lock and iwv_thread_lock held */
	struct channel *next;
	atomic_uint users;         /* threads in ibv_get_cq_event, and the program until it destroys the channel */
	pthread_mutex_t lock;      /* keeps CQs while their events are counted */
};

static struct channel *channel_of(struct ibv_comp_channel *ibv)
{
	return container_of(ibv, struct channel, ibv);
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *ibv)
{
	struct iwarpd_error e;
	struct channel *ch;
	int err;

	OTHERS(ibv, ibv_create_comp_channel, ibv);
	if (!context_own(iwv_context_of(ibv)))
		return NULL;
	ch = calloc(1, sizeof(*ch));
	if (!ch)
		return NULL;
	err = iwarpd_create_channel(iwv_context_of(ibv)->dev, &ch->ch, &e);
	if (err) {
		free(ch);
		iwv_fail(err, "ibv_create_comp_channel", &e);
		return NULL;
	}
	ch->ibv.context = ibv;
	ch->ibv.fd = iwarpd_channel_fd(ch->ch);
	atomic_init(&ch->users, 1);
	pthread_mutex_init(&ch->lock, NULL);
	iwv_thread_lock();
	ch->next = iwv_context_of(ibv)->channels;
	iwv_context_of(ibv)->channels = ch;
	iwv_thread_unlock();
	return &ch->ibv;
}

/* release ends a use of a channel, and frees it after the last one. */
static void release(void *channel)
{
	struct channel *ch = channel;

	if (atomic_fetch_sub(&ch->users, 1) > 1)
		return;
	pthread_mutex_destroy(&ch->lock);
	free(ch);
}

/* end_channel destroys the daemon's channel. A thread that waits in ibv_get_cq_event notices that, within a second or so. */
static int end_channel(struct channel *ch, struct iwarpd_error *e)
{
	struct context *c = iwv_context_of(ch->ibv.context);
	int err;

	pthread_mutex_lock(&ch->lock);
	err = iwarpd_destroy_channel(ch->ch, e);
	if (err && thread_gone(c))
		err = 0;
	if (!err)
		ch->ch = NULL;
	pthread_mutex_unlock(&ch->lock);
	if (err)
		return err;
	UNLINK(c->channels, ch);
	return 0;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
	struct iwarpd_error e;
	int err;

	OTHERS(ibv->context, ibv_destroy_comp_channel, ibv);
	if (ibv->refcnt > 0)
		return EBUSY;
	iwv_thread_lock();
	err = end_channel(channel_of(ibv), &e);
	iwv_thread_unlock();
	if (err)
		return iwv_fail(err, "ibv_destroy_comp_channel", &e);
	release(channel_of(ibv));
	return 0;
}

/* refer adds n to the number of CQs of a channel. */
static void refer(struct ibv_comp_channel *ch, int n)
{
	if (ch)
		__atomic_add_fetch(&ch->refcnt, n, __ATOMIC_RELAXED);
}

/*
 * room_for returns the depth of the daemon's queue. Programs ask for far more completions
 * (cqe) than their queue pairs can have outstanding (need). Each of a program's may have a
 * second one, which is hidden.
 */
static uint32_t room_for(struct ibv_context *ibv, int cqe, uint64_t need)
{
	uint64_t depth = need > FIRST_DEPTH ? need : FIRST_DEPTH;

	return (uint32_t)least(least(depth, 2 * (uint64_t)cqe), iwv_context_of(ibv)->attr.max_cqe);
}

/*
 * resize changes the depth of the daemon's queue. The new rings are not armed, and may hold
 * completions already, so an armed queue that has no event has one now.
 */
static int resize(struct cq *cq, uint32_t depth, struct iwarpd_error *e)
{
	bool wake;
	int err;

	pthread_mutex_lock(&cq->lock);
	wake = iwarpd_disarm_cq(cq->q);
	err = iwarpd_resize_cq(cq->q, depth, e);
	if (!err)
		cq->depth = depth;
	pthread_mutex_unlock(&cq->lock);
	if (wake)
		iwarpd_wake_cq(cq->q);
	return err;
}

int cq_grow(struct ibv_cq *ibv, struct iwarpd_error *e)
{
	struct cq *cq = cq_of(ibv);
	uint32_t depth = room_for(ibv->context, ibv->cqe, cq->need);

	return depth > cq->depth ? resize(cq, depth, e) : 0;
}

/* new_cq makes a CQ without the daemon's queue. Its channel returns it as soon as it has that. */
static struct cq *new_cq(struct ibv_context *ibv, int cqe, void *cq_context, struct ibv_comp_channel *channel)
{
	struct cq *cq = calloc(1, sizeof(*cq));

	if (!cq)
		return NULL;
	cq->depth = room_for(ibv, cqe, 0);
	pthread_mutex_init(&cq->lock, NULL);
	cq->last_late = &cq->late;
	cq->ibv.context = ibv;
	cq->ibv.channel = channel;
	cq->ibv.cq_context = cq_context;
	cq->ibv.cqe = cqe;
	pthread_mutex_init(&cq->ibv.mutex, NULL);
	pthread_cond_init(&cq->ibv.cond, NULL);
	return cq;
}

static void free_cq(struct cq *cq)
{
	free_late(cq->late);
	pthread_mutex_destroy(&cq->lock);
	pthread_mutex_destroy(&cq->ibv.mutex);
	pthread_cond_destroy(&cq->ibv.cond);
	free(cq);
}

struct ibv_cq *ibv_create_cq(struct ibv_context *ibv, int cqe, void *cq_context, struct ibv_comp_channel *channel,
				 int vector)
{
	struct iwarpd_error e;
	struct context *c;
	struct cq *cq;
	int err;

	OTHERS(ibv, ibv_create_cq, ibv, cqe, cq_context, channel, vector);
	c = iwv_context_of(ibv);
	if (!context_own(c))
		return NULL;
	if (cqe < 1 || (uint32_t)cqe > c->attr.max_cqe || vector < 0 || vector >= ibv->num_comp_vectors ||
	    (channel && channel->context != ibv)) {
		errno = EINVAL;
		return NULL;
	}
	cq = new_cq(ibv, cqe, cq_context, channel);
	if (!cq)
		return NULL;
	err = channel ? iwarpd_create_cq_on(channel_of(channel)->ch, cq->depth, cq, &cq->q, &e) :
			iwarpd_create_cq(c->dev, cq->depth, &cq->q, &e);
	if (err) {
		free_cq(cq);
		iwv_fail(err, "ibv_create_cq", &e);
		return NULL;
	}
	refer(channel, 1);
	iwv_thread_lock();
	cq->next = c->cqs;
	c->cqs = cq;
	iwv_thread_unlock();
	return &cq->ibv;
}

/* events_taken returns the counter of the CQ's events that ibv_get_cq_event has returned. */
static uint32_t *events_taken(struct cq *cq)
{
	return &cq->ibv.handle; /* programs have no use for the handle */
}

static void count_taken(struct cq *cq)
{
	pthread_mutex_lock(&cq->ibv.mutex);
	(*events_taken(cq))++;
	pthread_mutex_unlock(&cq->ibv.mutex);
}

/* wait_acknowledged is not canceled, since the CQ is destroyed half then, and the lock would stay locked. */
static void wait_acknowledged(struct cq *cq)
{
	int state;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	pthread_mutex_lock(&cq->ibv.mutex);
	/* In the child of a fork also those of the parent may have been acknowledged. */
	while ((int32_t)(*events_taken(cq) - cq->ibv.comp_events_completed) > 0)
		pthread_cond_wait(&cq->ibv.cond, &cq->ibv.mutex);
	pthread_mutex_unlock(&cq->ibv.mutex);
	pthread_setcancelstate(state, &state);
}

/* take_late takes up to n late completions. The lock is held. */
static int take_late(struct cq *cq, int n, struct ibv_wc *wc)
{
	int i;

	for (i = 0; i < n && cq->late; i++) {
		struct late *l = cq->late;

		wc[i] = l->wc;
		cq->late = l->next;
		if (!cq->late)
			cq->last_late = &cq->late;
		free(l);
	}
	return i;
}

void free_late(struct late *l)
{
	while (l) {
		struct late *next = l->next;

		free(l);
		l = next;
	}
}

/* drop removes the completions of a QP from a list, and returns the end of the list. */
static struct late **drop(struct late **at, uint32_t qp)
{
	struct late *l;

	while ((l = *at) != NULL) {
		if (l->wc.qp_num == qp) {
			*at = l->next;
			free(l);
		} else {
			at = &l->next;
		}
	}
	return at;
}

void cq_forget(struct ibv_cq *ibv, uint32_t qp, uint64_t n)
{
	struct cq *cq = cq_of(ibv);

	cq->need -= n;
	pthread_mutex_lock(&cq->lock);
	iwarpd_clean_cq(cq->q, qp);
	cq->last_late = drop(&cq->late, qp);
	pthread_mutex_unlock(&cq->lock);
}

void cq_late(struct ibv_cq *ibv, struct late *list)
{
	struct cq *cq = cq_of(ibv);
	bool wake;

	pthread_mutex_lock(&cq->lock);
	*cq->last_late = list;
	while (*cq->last_late)
		cq->last_late = &(*cq->last_late)->next;
	wake = list && iwarpd_disarm_cq(cq->q);
	pthread_mutex_unlock(&cq->lock);
	if (wake)
		iwarpd_wake_cq(cq->q);
}

int cq_flush(struct ibv_cq *ibv, struct ibv_qp *qp, uint64_t wr_id, enum ibv_wc_opcode opcode)
{
	struct late *l = calloc(1, sizeof(*l));
	bool held;

	if (!l)
		return -ENOMEM;
	l->wc.wr_id = wr_id;
	l->wc.status = IBV_WC_WR_FLUSH_ERR;
	l->wc.opcode = opcode;
	l->wc.qp_num = qp->qp_num;
	pthread_mutex_lock(&cq_of(ibv)->lock);
	held = opcode == IBV_WC_RECV && exchange_hold(qp_of(qp), &l->wc);
	pthread_mutex_unlock(&cq_of(ibv)->lock);
	if (held)
		free(l);
	else
		cq_late(ibv, l);
	return 0;
}

void cqs_after_fork(const struct context *c)
{
	for (struct cq *cq = c->cqs; cq; cq = cq->next) {
		pthread_mutex_init(&cq->lock, NULL);
		pthread_mutex_init(&cq->ibv.mutex, NULL);
		pthread_cond_init(&cq->ibv.cond, NULL);
		*events_taken(cq) = cq->ibv.comp_events_completed;
		cq->unacknowledged = 0;
	}
	for (struct channel *ch = c->channels; ch; ch = ch->next)
		pthread_mutex_init(&ch->lock, NULL);
}

static bool gone(struct ibv_context *ibv)
{
	return atomic_load(&iwv_context_of(ibv)->gone);
}

/* end_queue destroys the daemon's queue. ibv_get_cq_event does not find the CQ afterwards. */
static int end_queue(struct cq *cq, struct iwarpd_error *e)
{
	struct channel *ch = cq->ibv.channel ? channel_of(cq->ibv.channel) : NULL;
	int err;

	if (ch)
		pthread_mutex_lock(&ch->lock);
	err = iwarpd_destroy_cq(cq->q, e);
	if (err && thread_gone(iwv_context_of(cq->ibv.context)))
		err = 0;
	if (ch)
		pthread_mutex_unlock(&ch->lock);
	return err;
}

int ibv_destroy_cq(struct ibv_cq *ibv)
{
	struct cq *cq = cq_of(ibv);
	struct iwarpd_error e = { 0 };
	struct context *c;
	int err;

	OTHERS(ibv->context, ibv_destroy_cq, ibv);
	c = iwv_context_of(ibv->context);
	iwv_thread_lock();
	/* There may be no daemon that says that a QP uses it. */
	err = cq->need > 0 ? -EBUSY : end_queue(cq, &e);
	if (!err) {
		UNLINK(c->cqs, cq);
		async_drop(c, ibv, &cq->unacknowledged);
	}
	iwv_thread_unlock();
	if (err)
		return iwv_fail(err, "ibv_destroy_cq", &e);
	wait_acknowledged(cq);
	refer(ibv->channel, -1);
	free_cq(cq);
	return 0;
}

int ibv_resize_cq(struct ibv_cq *ibv, int cqe)
{
	struct cq *cq = cq_of(ibv);
	struct iwarpd_error e;
	int err;

	OTHERS(ibv->context, ibv_resize_cq, ibv, cqe);
	if (cqe < 1 || (uint32_t)cqe > iwv_context_of(ibv->context)->attr.max_cqe)
		return EINVAL;
	iwv_thread_lock();
	err = resize(cq, room_for(ibv->context, cqe, cq->need), &e);
	if (!err)
		ibv->cqe = cqe;
	iwv_thread_unlock();
	return err ? iwv_fail(err, "ibv_resize_cq", &e) : 0;
}

static enum ibv_wc_opcode wc_opcode(uint32_t opcode)
{
	switch (opcode) {
	case IWARPD_WC_IMM: /* second half of a Write with Immediate Data */
		return IBV_WC_RDMA_WRITE;
	case IWARPD_WC_REG:
		return IBV_WC_LOCAL_INV;
	default: /* both libraries use the same numbers */
		return (enum ibv_wc_opcode)opcode;
	}
}

static void put_wc(struct ibv_wc *to, const struct iwarpd_wc *from, const struct qp *qp)
{
	*to = (struct ibv_wc){
		.wr_id = from->id,
		.status = (enum ibv_wc_status)from->status,
		.opcode = wc_opcode(from->opcode),
		.vendor_err = from->vendor,
		.byte_len = from->len,
		.qp_num = from->qp,
	};
	if (from->flags & IWARPD_WC_WITH_IMM) {
		to->wc_flags = IBV_WC_WITH_IMM;
		to->opcode = IBV_WC_RECV_RDMA_WITH_IMM;
		to->imm_data = htobe32((uint32_t)(from->imm >> 32));
		to->byte_len = (uint32_t)from->imm;
	}
	if (from->flags & IWARPD_WC_WITH_INV && atomic_load_explicit(&qp->immediate, memory_order_relaxed)) {
		to->wc_flags = IBV_WC_WITH_IMM;
		to->imm_data = htobe32(from->inv_key);
	} else if (from->flags & IWARPD_WC_WITH_INV) {
		to->wc_flags = IBV_WC_WITH_INV;
		to->invalidated_rkey = from->inv_key;
	}
}

const char hidden_wr;

/*
 * shown reports whether a program is to see a completion. Of the two halves of a Write with Immediate Data it sees the
 * second one, with the error of the first if that has failed. Only then the first one completes, just before.
 */
static bool shown(struct qp *qp, struct iwarpd_wc *wc)
{
	if (wc->id == HIDDEN_WR) {
		qp->half_status = wc->status;
		qp->half_vendor = wc->vendor;
		return false;
	}
	if (wc->opcode == IWARPD_WC_IMM && wc->status != IWARPD_WC_SUCCESS && qp->half_status != IWARPD_WC_SUCCESS) {
		wc->status = qp->half_status;
		wc->vendor = qp->half_vendor;
	}
	return true;
}

/* take removes up to n completions that a program is to see. The lock is held. */
static int take(struct cq *cq, int n, struct ibv_wc *wc)
{
	const struct context *c = iwv_context_of(cq->ibv.context);
	struct iwarpd_wc got[32];
	int total = 0, k = 1;

	while (total < n && k > 0) {
		int most = n - total < 32 ? n - total : 32;

		k = iwarpd_poll_cq(cq->q, got, most);
		for (int i = 0; i < k; i++) {
			struct qp *qp = qp_numbered(c, got[i].qp);

			/* The program may have freed what the wr_id of a QP refers to that it is destroying. */
			if (!qp || !shown(qp, &got[i]))
				continue;
			if (got[i].opcode < IWARPD_WC_RECV)
				count(&qp->polled);
			put_wc(&wc[total], &got[i], qp);
			if (wc[total].status == IBV_WC_WR_FLUSH_ERR && wc[total].opcode == IBV_WC_RECV &&
			    exchange_hold(qp, &wc[total]))
				continue;
			if (got[i].opcode >= IWARPD_WC_RECV)
				count(&qp->received);
			total++;
		}
		if (k < most)
			break;
	}
	if (total < n && cq->late)
		total += take_late(cq, n - total, wc + total);
	return total > 0 || k >= 0 ? total : k;
}

/*
 * EMPTY_POLLS is the number of empty polls after which a thread yields its CPU, since the
 * daemon may share it. If no other thread is ready, yielding takes less time than a
 * message.
 */
enum { EMPTY_POLLS = 32 };

int poll_cq(struct ibv_cq *ibv, int n, struct ibv_wc *wc)
{
	struct cq *cq = cq_of(ibv);
	int got, wait = 0;
	bool over = gone(ibv->context); /* before the poll, which then finds all that the daemon has completed */

	pthread_mutex_lock(&cq->lock);
	got = take(cq, n, wc);
	if (got == 0 && ++cq->empty % EMPTY_POLLS == 0) {
		pthread_mutex_unlock(&cq->lock);
		sched_yield();
		/* There may be completions now. A program would take events that are later for the earlier ones. */
		pthread_mutex_lock(&cq->lock);
		got = take(cq, n, wc);
	}
	if (got > 0)
		cq->empty = 0;
	if (got == 1 && wc->opcode == IBV_WC_RDMA_WRITE && wc->status == IBV_WC_SUCCESS)
		wait = answer_wait(cq);
	pthread_mutex_unlock(&cq->lock);
	if (got > 0)
		qps_failed(iwv_context_of(ibv->context), wc, got);
	if (wait > 0)
		await_answer(cq, wait);
	if (got == 0 && over)
		return -EIO; /* a program that only polls would wait forever */
	return got;
}

int req_notify_cq(struct ibv_cq *ibv, int solicited_only)
{
	struct cq *cq = cq_of(ibv);

	pthread_mutex_lock(&cq->lock);
	if (ibv->channel)
		cq->received = iwarpd_received(iwv_context_of(ibv->context)->dev);
	iwarpd_arm_cq(cq->q, solicited_only != 0);
	pthread_mutex_unlock(&cq->lock);
	return 0;
}

/* take_event takes and counts a waiting event. The lock is held. */
static int take_event(struct channel *ch, struct cq **cq)
{
	struct iwarpd_cq *q;
	bool over;
	int err;

	if (!ch->ch)
		return -EBADF;
	over = gone(ch->ibv.context);
	err = iwarpd_get_cq_event(ch->ch, &q, 0);
	if (err)
		return over ? -EPIPE : err;
	*cq = iwarpd_cq_context(q);
	count_taken(*cq);
	return 0;
}

/* look calls take_event. The thread cannot be canceled meanwhile. */
static int look(struct channel *ch, struct cq **cq)
{
	int state, err;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	pthread_mutex_lock(&ch->lock);
	err = take_event(ch, cq);
	pthread_mutex_unlock(&ch->lock);
	pthread_setcancelstate(state, &state);
	return err;
}

/*
 * A peer's Write makes no completion, but a program may sleep until there is one: ib_send_bw -e sleeps
 * while it waits for credits, which its peer writes, and would wait forever. So a wait in which no
 * posted work request can complete also ends with an event when data of a peer has been placed since
 * the queue was armed. Other programs see no such event, since some take the completion for granted.
 * The wait looks after FIRST_LOOK ms, then twice as late each time, at last every LAST_LOOK ms.
 */
enum { FIRST_LOOK = 1, LAST_LOOK = 1024 };

/*
 * expects reports whether a completion of a work request that is posted to a QP may be one of a channel. For a QP with
 * an SRQ that is always so.
 */
static bool expects(const struct qp *qp, const struct ibv_comp_channel *ch)
{
	return (qp->ibv.send_cq->channel == ch && outstanding(&qp->signaled, &qp->polled) > 0) ||
	       (qp->ibv.recv_cq->channel == ch && (qp->ibv.srq || outstanding(&qp->receives, &qp->received) > 0));
}

/* find_written disarms and takes an armed queue for which that is so, or returns NULL. iwv_thread_lock is held. */
static struct cq *find_written(const struct channel *ch)
{
	const struct context *c = iwv_context_of(ch->ibv.context);
	uint32_t received = iwarpd_received(c->dev);
	struct cq *found = NULL;
	bool hopeless = true;

	for (struct qp *qp = c->qps; qp && hopeless; qp = qp->next)
		hopeless = !expects(qp, &ch->ibv);
	for (struct cq *cq = c->cqs; cq && hopeless && !found; cq = cq->next) {
		if (cq->ibv.channel != &ch->ibv)
			continue;
		pthread_mutex_lock(&cq->lock);
		if (cq->received != received && iwarpd_disarm_cq(cq->q))
			found = cq;
		pthread_mutex_unlock(&cq->lock);
	}
	if (found)
		count_taken(found);
	return found;
}

static struct cq *written(const struct channel *ch)
{
	struct cq *found;

	iwv_thread_lock();
	found = ch->ch ? find_written(ch) : NULL;
	iwv_thread_unlock();
	return found;
}

/* is_fault reports whether a signal says that the thread itself has failed, so that it does not come while it waits. */
static bool is_fault(int sig)
{
	return sig == SIGSEGV || sig == SIGBUS || sig == SIGFPE || sig == SIGILL;
}

bool iwv_interrupts(void)
{
	struct sigaction a;

	for (int sig = 1; sig < NSIG; sig++)
		if (!is_fault(sig) && sigaction(sig, NULL, &a) == 0 && a.sa_handler != SIG_DFL && a.sa_handler != SIG_IGN &&
		    !(a.sa_flags & SA_RESTART))
			return true;
	return false;
}

/* poll_channel is poll for ms milliseconds. The thread may be canceled. */
__attribute__((noinline)) static int poll_channel(struct channel *ch, int ms)
{
	struct pollfd p = { .fd = ch->ibv.fd, .events = POLLIN };
	int n;

	pthread_cleanup_push(release, ch);
	n = poll(&p, 1, ms);
	pthread_cleanup_pop(0);
	return n;
}

/* wait_event waits for an event and takes it. It returns -1 with errno set if there will be none. */
static int wait_event(struct channel *ch, struct cq **cq)
{
	int err, n, wait = FIRST_LOOK;

	while ((err = look(ch, cq)) != 0) {
		if (err != -ETIMEDOUT && err != -EINTR) {
			iwv_fail(err == -EPIPE ? -EIO : err, "ibv_get_cq_event", NULL);
			return -1;
		}
		if (fcntl(ch->ibv.fd, F_GETFL) & O_NONBLOCK) {
			errno = EAGAIN;
			return -1;
		}
		n = poll_channel(ch, wait);
		if (n < 0 && errno == EINTR && iwv_interrupts()) {
			errno = EINTR;
			return -1;
		}
		if (n == 0) {
			*cq = written(ch);
			if (*cq)
				return 0;
			if (wait < LAST_LOOK)
				wait *= 2;
		}
	}
	return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *ibv, struct ibv_cq **out, void **cq_context)
{
	struct channel *ch = channel_of(ibv);
	struct cq *cq;
	int err;

	OTHERS(ibv->context, ibv_get_cq_event, ibv, out, cq_context);
	atomic_fetch_add(&ch->users, 1);
	err = wait_event(ch, &cq);
	release(ch);
	if (err)
		return -1;
	*out = &cq->ibv;
	*cq_context = cq->ibv.cq_context;
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *ibv, unsigned int n)
{
	OTHERS(ibv->context, ibv_ack_cq_events, ibv, n);
	pthread_mutex_lock(&ibv->mutex);
	ibv->comp_events_completed += n;
	pthread_cond_broadcast(&ibv->cond);
	pthread_mutex_unlock(&ibv->mutex);
}
