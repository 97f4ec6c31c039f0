/* The list of a device's objects. */
#include <errno.h>

#include "internal.h"

void object_link(struct object *o, struct iwarpd_device *dev, enum object_kind kind, uint32_t handle,
		 void (*free)(struct object *))
{
	o->dev = dev;
	o->kind = kind;
	o->handle = handle;
	o->free = free;
	o->next = dev->objects.next;
	o->prev = &dev->objects;
	o->next->prev = o;
	o->prev->next = o;
	if (kind == OBJECT_QP && ++dev->num_qps > dev->most_qps)
		dev->most_qps = dev->num_qps;
}

void object_add(struct object *o, struct iwarpd_device *dev, enum object_kind kind, uint32_t handle,
		void (*free)(struct object *))
{
	pthread_mutex_lock(&dev->lock);
	object_link(o, dev, kind, handle, free);
	pthread_mutex_unlock(&dev->lock);
}

void object_free(struct object *o)
{
	pthread_mutex_lock(&o->dev->lock);
	o->next->prev = o->prev;
	o->prev->next = o->next;
	if (o->kind == OBJECT_QP) {
		o->dev->num_qps--;
		o->dev->drop_events(o);
	}
	pthread_mutex_unlock(&o->dev->lock);
	o->free(o);
}

int object_destroy(struct object *o, struct iwarpd_error *e)
{
	int err = device_destroy(o->dev, o->kind, o->handle, e);

	if (err && device_dead(o->dev))
		err = device_gone(o->dev, e);
	if (!err || err == -EPIPE)
		object_free(o);
	return err;
}

struct object *find_object(struct iwarpd_device *dev, enum object_kind kind, uint32_t handle)
{
	for (struct object *o = dev->objects.next; o != &dev->objects; o = o->next)
		if (o->kind == kind && o->handle == handle)
			return o;
	return NULL;
}
