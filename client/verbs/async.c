/* Asynchronous events of a context. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "internal.h"

struct async_item {
	struct queue_item item;
	struct ibv_async_event ev;
};

int async_init(struct context *c)
{
	return iwv_queue_init(&c->async);
}

static bool any(struct queue_item *item, void *arg)
{
	(void)item, (void)arg;
	return true;
}

static void free_items(struct queue_item *list)
{
	while (list) {
		struct queue_item *next = list->next;

		free(container_of(list, struct async_item, item));
		list = next;
	}
}

void async_close(struct context *c)
{
	free_items(iwv_queue_take(&c->async, any, NULL));
	iwv_queue_close(&c->async);
}

static bool about(struct queue_item *item, void *element)
{
	return container_of(item, struct async_item, item)->ev.element.qp == element; /* NULL if it is about the device */
}

void async_drop(struct context *c, const void *element, const unsigned int *unacknowledged)
{
	for (;;) {
		free_items(iwv_queue_take(&c->async, about, (void *)element));
		if (*unacknowledged == 0)
			return;
		iwv_thread_wait();
	}
}

static void put(struct context *c, enum ibv_event_type type, void *element)
{
	struct async_item *a = calloc(1, sizeof(*a));

	iwv_log("%s: asynchronous event %s", c->device->ibv.name, ibv_event_type_str(type));
	if (!a)
		return;
	a->ev.event_type = type;
	a->ev.element.qp = element;
	iwv_queue_put(&c->async, &a->item);
}

void async_error(struct context *c, const struct iwarpd_event *ev)
{
	struct cq *cq = c->cqs;
	struct srq *srq;

	while (cq && cq->q != ev->cq)
		cq = cq->next;
	switch (ev->async) {
	case IWARPD_ASYNC_CQ_OVERRUN:
		if (cq)
			put(c, IBV_EVENT_CQ_ERR, &cq->ibv);
		break;
	case IWARPD_ASYNC_SRQ_LIMIT:
		srq = ev->srq ? iwarpd_srq_context(ev->srq) : NULL;
		if (srq) {
			srq->attr.srq_limit = 0; /* until the program sets it again */
			put(c, IBV_EVENT_SRQ_LIMIT_REACHED, &srq->ibv);
		}
		break;
	}
}

/*
 * forbidden reports whether a Terminate of this side says that the peer may not access the memory: in DDP a tagged
 * buffer error (RFC 5041 section 7.2), in RDMAP a remote protection error (RFC 5040 section 4.8).
 */
static bool forbidden(const struct iwarpd_terminate *t)
{
	enum { LAYER_LLP = 2, ACCESS = 1 };

	return !t->remote && t->layer < LAYER_LLP && t->type == ACCESS;
}

void async_terminated(struct context *c, const struct iwarpd_event *ev)
{
	/* Not one that the program has destroyed. */
	struct qp *qp = ev->qp ? qp_numbered(c, iwarpd_qp_num(ev->qp)) : NULL;

	if (qp)
		put(c, forbidden(&ev->terminate) ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_FATAL, &qp->ibv);
}

void async_last_recv(struct qp *qp)
{
	if (qp_numbered(qp->ctx, qp->ibv.qp_num)) /* the program has not destroyed it */
		put(qp->ctx, IBV_EVENT_QP_LAST_WQE_REACHED, &qp->ibv);
}

void async_fatal(struct context *c)
{
	put(c, IBV_EVENT_DEVICE_FATAL, NULL);
}

/*
 * unacknowledged returns the counter of an object's events that the program has taken and not
 * acknowledged, or NULL if the event has no object. It is an event of iwarpd's.
 */
static unsigned int *unacknowledged(const struct ibv_async_event *event)
{
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		return &cq_of(event->element.cq)->unacknowledged;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		return &qp_of(event->element.qp)->unacknowledged;
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		return &srq_of(event->element.srq)->unacknowledged;
	default:
		return NULL;
	}
}

static void taken(struct queue_item *item)
{
	unsigned int *count = unacknowledged(&container_of(item, struct async_item, item)->ev);

	if (count)
		++*count;
}

int ibv_get_async_event(struct ibv_context *ibv, struct ibv_async_event *event)
{
	struct queue_item *item;

	OTHERS(ibv, ibv_get_async_event, ibv, event);
	item = iwv_queue_next(&iwv_context_of(ibv)->async, taken);
	if (!item)
		return -1;
	*event = container_of(item, struct async_item, item)->ev;
	free_items(item);
	return 0;
}

/* element_context returns the context of the object of an event, or NULL. */
static struct ibv_context *element_context(const struct ibv_async_event *event)
{
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		return event->element.cq->context;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		return event->element.qp->context;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		return event->element.srq->context;
	case IBV_EVENT_WQ_FATAL:
		return event->element.wq->context;
	default:
		return NULL;
	}
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
	struct ibv_context *ibv = element_context(event);
	unsigned int *count;

	if (ibv && !is_ours(ibv)) {
		REAL(ibv_ack_async_event)(event);
		return;
	}
	count = unacknowledged(event);
	if (!count)
		return;
	iwv_thread_lock();
	iwv_acknowledge(count);
	iwv_thread_unlock();
}
