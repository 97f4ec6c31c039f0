/* Event channels and their events. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>

#include "cm.h"

static struct channel *channels; /* all; guarded by iwv_thread_lock */
static unsigned int generation;  /* of this process: one more than its parent's */

struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct channel *ch;

	FORWARD(rdma_create_event_channel);
	ch = calloc(1, sizeof(*ch));
	if (!ch)
		return NULL;
	ch->pub.fd = iwv_queue_init(&ch->queue);
	if (ch->pub.fd < 0) {
		free(ch);
		return NULL;
	}
	iwv_thread_lock();
	ch->next = channels;
	channels = ch;
	iwv_thread_unlock();
	return &ch->pub;
}

/* first_user returns an id whose events go to a channel, or NULL. */
static struct id *first_user(const struct channel *ch)
{
	struct id *id = ids;

	while (id && id->channel != ch)
		id = id->next;
	return id;
}

/* The ids of a channel should have been destroyed before. Others get no events any more, as with Linux's rdma_cm. */
void rdma_destroy_event_channel(struct rdma_event_channel *pub)
{
	struct channel *ch = channel_of(pub);
	struct id *id;

	FORWARD(rdma_destroy_event_channel, pub);
	iwv_thread_lock();
	while ((id = first_user(ch)) != NULL) {
		events_drop(id);
		id->channel = NULL;
	}
	UNLINK(channels, ch);
	iwv_thread_unlock();
	iwv_queue_close(&ch->queue);
	free(ch);
}

/* The channels of the child share nothing with those of the parent. */
static void after_fork_child(void)
{
	generation++;
	for (struct channel *ch = channels; ch; ch = ch->next)
		iwv_queue_after_fork(&ch->queue);
}

__attribute__((constructor)) static void init(void)
{
	pthread_atfork(NULL, NULL, after_fork_child);
}

struct cm_event *event_new(struct id *id, enum rdma_cm_event_type type, int status)
{
	struct cm_event *e = calloc(1, sizeof(*e));

	if (!e) {
		iwv_log("librdmacm: out of memory: an event is lost");
		return NULL;
	}
	e->pub.id = &id->pub;
	e->pub.event = type;
	e->pub.status = status;
	return e;
}

/*
 * owner returns the id whose channel gets an event, and that counts it: rdma_destroy_id waits
 * until its events are acknowledged.
 */
static struct id *owner(const struct cm_event *e)
{
	return id_of(e->pub.listen_id ? e->pub.listen_id : e->pub.id);
}

void event_post(struct cm_event *e)
{
	iwv_log("%s, status %d", rdma_event_str(e->pub.event), e->pub.status);
	if (owner(e)->channel)
		iwv_queue_put(&owner(e)->channel->queue, &e->item);
	else
		free(e);
}

void event_simple(struct id *id, enum rdma_cm_event_type type, int status)
{
	struct cm_event *e = event_new(id, type, status);

	if (e)
		event_post(e);
}

/* taken counts an event that the program takes. The lock is held. */
static void taken(struct queue_item *item)
{
	struct cm_event *e = container_of(item, struct cm_event, item);

	e->generation = generation;
	owner(e)->events++;
	if (e->pub.event == RDMA_CM_EVENT_CONNECT_REQUEST) {
		id_of(e->pub.listen_id)->requests--;
		id_of(e->pub.id)->unreported = false;
	}
}

/* A connect request to a synchronous id is synchronous too. */
static int follow_listener(const struct cm_event *e)
{
	return e->pub.listen_id && id_of(e->pub.listen_id)->sync ? rdma_migrate_id(e->pub.id, NULL) : 0;
}

int rdma_get_cm_event(struct rdma_event_channel *pub, struct rdma_cm_event **event)
{
	struct queue_item *item;
	struct cm_event *e;

	FORWARD(rdma_get_cm_event, pub, event);
	if (!event)
		return set_errno(EINVAL);
	item = iwv_queue_next(&channel_of(pub)->queue, taken);
	if (!item)
		return -1;
	e = container_of(item, struct cm_event, item);
	if (follow_listener(e) < 0) {
		int err = errno;

		rdma_destroy_id(e->pub.id);
		rdma_ack_cm_event(&e->pub);
		return set_errno(err);
	}
	*event = &e->pub;
	return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *event)
{
	struct cm_event *e;

	FORWARD(rdma_ack_cm_event, event);
	if (!event)
		return set_errno(EINVAL);
	e = container_of(event, struct cm_event, pub);
	iwv_thread_lock();
	if (e->generation == generation) /* an event of the parent is not counted, and its id may be gone */
		iwv_acknowledge(&owner(e)->events);
	iwv_thread_unlock();
	free(e);
	return 0;
}

void sync_done(struct id *id)
{
	if (id->pub.event)
		rdma_ack_cm_event(id->pub.event);
	id->pub.event = NULL;
}

int sync_wait(struct id *id)
{
	sync_done(id);
	if (rdma_get_cm_event(id->pub.channel, &id->pub.event) < 0)
		return -1;
	switch (id->pub.event->event) {
	case RDMA_CM_EVENT_REJECTED:
		return set_errno(ECONNREFUSED);
	case RDMA_CM_EVENT_DEVICE_REMOVAL: /* its status is 0 */
		return set_errno(ENODEV);
	default:
		return set_errno(-id->pub.event->status);
	}
}

int call_end(struct id *id, int err)
{
	bool sync = id->sync;

	iwv_thread_unlock();
	if (err)
		return set_errno(err);
	return sync ? sync_wait(id) : 0;
}

/* is_own matches the events of an id. A connect request is one of its listener. */
static bool is_own(struct queue_item *item, void *id)
{
	return owner(container_of(item, struct cm_event, item)) == id;
}

/* take_all removes all events of an id from its channel, and returns them as a list. */
static struct queue_item *take_all(struct id *id)
{
	return id->channel ? iwv_queue_take(&id->channel->queue, is_own, id) : NULL;
}

void events_drop(struct id *id)
{
	struct queue_item *list = take_all(id);

	while (list) {
		struct cm_event *e = container_of(list, struct cm_event, item);

		list = list->next;
		if (e->pub.event == RDMA_CM_EVENT_CONNECT_REQUEST)
			id_drop(id_of(e->pub.id));
		free(e);
	}
}

int rdma_migrate_id(struct rdma_cm_id *pub, struct rdma_event_channel *channel)
{
	struct id *id = id_of(pub);
	struct rdma_event_channel *old;
	struct queue_item *list;
	bool sync = channel == NULL;

	FORWARD(rdma_migrate_id, pub, channel);
	if (sync) {
		channel = rdma_create_event_channel();
		if (!channel)
			return -1;
	}
	if (id->sync)
		sync_done(id);
	iwv_thread_lock();
	while (id->events > 0) /* others may use the old channel until they have acknowledged them */
		iwv_thread_wait();
	old = pub->channel;
	list = take_all(id);
	pub->channel = channel;
	id->channel = channel_of(channel);
	while (list) {
		struct cm_event *e = container_of(list, struct cm_event, item);

		list = list->next;
		e->pub.id->channel = channel; /* that of a connect request moves too */
		id_of(e->pub.id)->channel = id->channel;
		iwv_queue_put(&channel_of(channel)->queue, &e->item);
	}
	iwv_thread_unlock();
	if (id->sync)
		rdma_destroy_event_channel(old);
	id->sync = sync;
	return 0;
}
