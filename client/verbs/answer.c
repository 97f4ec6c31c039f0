/*
 * Waiting for the answer to a Write. Programs such as ib_write_lat write, poll until the Write
 * has completed, and then look at memory for the peer's answer without yielding the CPU. If a
 * worker of the daemon shares that CPU, it receives the answer only when the kernel takes the
 * CPU away from the program. So a completed Write is held back while its answer may come,
 * and the worker has the CPU.
 *
 * That would delay other programs: if there are several peers, the request of another one may
 * be in memory already. So a program waits only while it sends on one queue pair. A program with
 * a completion channel sleeps when it has nothing to do, and need not wait either.
 */
#include "internal.h"

/*
 * Most answers come within some 30 us. A program whose Writes have been answered in time waits
 * longer once, since the peer may have lost its CPU for a tick. Times are in microseconds.
 */
enum { SOON = 100, LATE = 10000, TRUSTED = 16 };

/*
 * After each wait in vain twice as many completions as before do not wait, up to MOST_REST, and
 * after one without a worker on this CPU ALONE. Completions whose answer was there before they
 * were polled do not count: they do not show whether waiting helps.
 */
enum { MOST_REST = 1024, ALONE = 64 };

/* A queue pair is the only one on which the program sends after so many sends without one on another. */
enum { SOLE = 64 };

/* After so many yields of no use there is no worker on this CPU. The kernel may let a thread that yields go on once or twice. */
enum { USELESS = 8 };

static void answered(struct answers *a, bool soon)
{
	if (!soon)
		a->quick = 0;
	else if (a->quick < TRUSTED)
		a->quick++;
}

void answer_posted(struct qp *qp)
{
	struct context *c = qp->ctx;
	struct cq *cq = cq_of(qp->ibv.send_cq);

	/* Several threads may come here at once. One of their sends may be lost, which is harmless. */
	if (atomic_load_explicit(&c->sender, memory_order_relaxed) != qp->ibv.qp_num) {
		atomic_store_explicit(&c->sender, qp->ibv.qp_num, memory_order_relaxed);
		atomic_store_explicit(&c->sends, 0, memory_order_relaxed);
	} else if (atomic_load_explicit(&c->sends, memory_order_relaxed) < SOLE) {
		atomic_fetch_add_explicit(&c->sends, 1, memory_order_relaxed);
	}
	if (!cq->ibv.channel) /* else nothing waits, and reading a word of each worker would be in vain */
		atomic_store_explicit(&cq->answers.received, iwarpd_received(c->dev), memory_order_relaxed);
}

int answer_wait(struct cq *cq)
{
	const struct context *c = iwv_context_of(cq->ibv.context);
	struct answers *a = &cq->answers;

	if (cq->ibv.channel || atomic_load_explicit(&c->sends, memory_order_relaxed) < SOLE)
		return 0;
	if (iwarpd_received(c->dev) != atomic_load_explicit(&a->received, memory_order_relaxed)) {
		answered(a, true);
		return 0;
	}
	if (a->rest > 0) {
		a->rest--;
		return 0;
	}
	return a->quick < TRUSTED ? SOON : LATE;
}

void await_answer(struct cq *cq, int us)
{
	const struct iwarpd_device *dev = iwv_context_of(cq->ibv.context)->dev;
	struct answers *a = &cq->answers;
	uint32_t before = iwarpd_received(dev), received = before;
	int64_t began = time_us(), took = 0;
	int alone = 0; /* yields in a row that were of no use */

	while (received == before && alone < USELESS && took < us) {
		alone = iwarpd_yield(dev) ? 0 : alone + 1;
		received = iwarpd_received(dev);
		took = time_us() - began;
	}
	pthread_mutex_lock(&cq->lock);
	if (received != before) {
		a->vain = a->rest = 0;
		answered(a, took <= SOON);
	} else if (alone < USELESS) {
		a->quick = 0;
		a->rest = 1U << a->vain;
		if (a->rest < MOST_REST)
			a->vain++;
	} else {
		a->vain = 0;
		a->rest = ALONE;
	}
	pthread_mutex_unlock(&cq->lock);
}
