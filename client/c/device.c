/*
 * Opening and closing a device: the connection to the daemon and everything that
 * belongs to it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

/* put_attr fills in the attributes of an interface. */
static int put_attr(struct iwarpd_device_attr *a, const Pb__HelloReply *h, const Pb__DeviceAttr *d)
{
	const char **addresses;

	addresses = calloc(d->n_addresses + 1, sizeof(*addresses));
	if (!addresses)
		return -ENOMEM;
	for (size_t i = 0; i < d->n_addresses; i++)
		addresses[i] = d->addresses[i];
	*a = (struct iwarpd_device_attr){
		.server = h->server,
		.interface = d->interface,
		.addresses = addresses,
		.client = h->client,
		.workers = h->workers,
		.mtu = d->mtu,
		.max_qp = d->max_qp,
		.max_cq = d->max_cq,
		.max_pd = d->max_pd,
		.max_mr = d->max_mr,
		.max_mw = d->max_mw,
		.max_listen = d->max_listen,
		.max_qp_wr = d->max_qp_wr,
		.max_cqe = d->max_cqe,
		.max_sge = d->max_sge,
		.max_inline = d->max_inline,
		.max_ird = d->max_ird,
		.max_ord = d->max_ord,
		.max_private_data = d->max_private_data,
		.max_mr_size = d->max_mr_size,
		.max_registered = d->max_registered,
	};
	return 0;
}

static int put_attrs(struct iwarpd_device *dev, const Pb__HelloReply *h)
{
	/* A daemon that can serve only one interface has no list. */
	Pb__DeviceAttr *const *all = h->n_devices > 0 ? h->devices : &h->device;
	size_t n = h->n_devices > 0 ? h->n_devices : 1;

	dev->attrs = calloc(n, sizeof(*dev->attrs));
	if (!dev->attrs)
		return -ENOMEM;
	for (; dev->num_attrs < n; dev->num_attrs++) {
		int err = put_attr(&dev->attrs[dev->num_attrs], h, all[dev->num_attrs]);

		if (err)
			return err;
	}
	return 0;
}

/* hello_done processes the reply to Hello: texts and doorbell pages. */
static int hello_done(struct iwarpd_device *dev, struct packet *p)
{
	const Pb__HelloReply *h = p->msg->reply->hello;
	int err;

	if (h->version != PROTOCOL_VERSION || !h->device)
		return -EPROTO;
	dev->hello = p->msg;
	p->msg = NULL;
	err = bells_open(dev, h->workers, p);
	return err ? err : put_attrs(dev, h);
}

static int hello(struct iwarpd_device *dev, const char *name, struct iwarpd_error *e)
{
	Pb__Hello body = PB__HELLO__INIT;
	Pb__Request req = REQUEST(hello, HELLO, &body);
	struct packet p;
	int err;

	body.version = body.min_version = PROTOCOL_VERSION;
	body.name = (char *)name;
	err = device_call(dev, &req, -1, PB__REPLY__BODY_HELLO, -1, &p, e);
	if (err)
		return err;
	err = hello_done(dev, &p);
	packet_free(&p);
	if (err)
		return set_error(e, err, "hello: %s", strerror(-err));
	return 0;
}

static void init_locks(struct iwarpd_device *dev)
{
	pthread_condattr_t attr;

	pthread_mutex_init(&dev->attaching, NULL);
	pthread_mutex_init(&dev->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&dev->turn, &attr);
	pthread_condattr_destroy(&attr);
}

static struct iwarpd_device *new_device(void)
{
	struct iwarpd_device *dev = calloc(1, sizeof(*dev));

	if (!dev)
		return NULL;
	dev->last_event = &dev->events;
	dev->on_event = event_arrived;
	dev->on_listen = listen_replied;
	dev->drop_events = events_drop;
	dev->objects.next = dev->objects.prev = &dev->objects;
	init_locks(dev);
	return dev;
}

static const char *socket_path(const char *path)
{
	if (!path)
		path = secure_getenv("IWARPD_SOCKET");
	return path && *path ? path : IWARPD_SOCKET;
}

/* open_until opens a device. The daemon has until the deadline to answer, unless that is negative. */
static int open_until(const char *socket, const char *name, int64_t deadline, struct iwarpd_device **out, struct iwarpd_error *e)
{
	const char *path = socket_path(socket);
	struct iwarpd_device *dev;
	int sock, err;

	sock = socket_connect(path, deadline < 0, e);
	if (sock < 0)
		return sock;
	dev = new_device();
	if (!dev) {
		close(sock);
		return set_error(e, -ENOMEM, "out of memory");
	}
	err = waiter_open(&dev->wait, sock);
	dev->deadline = deadline;
	if (err)
		set_error(e, err, "event descriptor: %s", strerror(-err));
	else
		err = hello(dev, name ? name : program_invocation_short_name, e);
	dev->deadline = -1;
	if (err == -ETIMEDOUT)
		set_error(e, err, "%s: the daemon does not answer", path);
	if (err) {
		iwarpd_close(dev);
		return err;
	}
	*out = dev;
	return 0;
}

int iwarpd_open(const char *socket, const char *name, struct iwarpd_device **dev, struct iwarpd_error *e)
{
	return open_until(socket, name, -1, dev, e);
}

int iwarpd_open_within(const char *socket, const char *name, int timeout_ms, struct iwarpd_device **dev,
		       struct iwarpd_error *e)
{
	return open_until(socket, name, deadline_in(timeout_ms), dev, e);
}

/*
 * no_daemon reports whether an error of open_until means that the daemon may still
 * start, or start again.
 */
static bool no_daemon(int err)
{
	return err == -ENOENT || err == -ECONNREFUSED || err == -EAGAIN || err == -EPIPE || err == -ESHUTDOWN;
}

int iwarpd_open_wait(const char *socket, const char *name, int timeout_ms, struct iwarpd_device **out,
		     struct iwarpd_error *e)
{
	static const struct timespec pause = { .tv_nsec = 200000000 };
	int64_t deadline = deadline_in(timeout_ms);
	bool denied = false;

	for (;;) {
		struct iwarpd_error last;
		int err = open_until(socket, name, timeout_ms == 0 ? -1 : deadline, out, &last);
		bool before = denied;

		denied = err == -EACCES;
		if ((no_daemon(err) || (denied && !before)) && (deadline < 0 || deadline_in(0) < deadline)) {
			nanosleep(&pause, NULL);
			continue;
		}
		if (err && no_daemon(err))
			return set_error(e, -ETIMEDOUT, "no daemon within %d ms: %s", timeout_ms, last.text);
		if (err && e)
			*e = last;
		return err;
	}
}

/* object_after_fork separates what the child and its parent share of an object. */
static void object_after_fork(struct object *o)
{
	switch (o->kind) {
	case OBJECT_CHANNEL:
		channel_after_fork(o);
		break;
	case OBJECT_CQ:
		cq_after_fork(o);
		break;
	case OBJECT_SRQ:
		srq_after_fork(o);
		break;
	default:
		if (o->ended) /* a QP: nothing can be posted */
			o->ended(o);
	}
}

/*
 * The descriptors of the child are its parent's: what the child asks the daemon to destroy would be the parent's, and
 * what it reads the parent would miss. The numbers that the program may know become those of files that are never readable, and
 * can be told from any other; all else is closed now. Later the child may close all descriptors, and open files with their numbers.
 */
bool iwarpd_after_fork(struct iwarpd_device *dev)
{
	init_locks(dev); /* other threads of the parent may have had them */
	dev->reading = false;
	dev->calls = NULL;
	dev->readers = NULL;
	dev->dead = -EPIPE;
	strcpy(dev->why, "the child of a fork has to open the device itself");
	bells_forget(dev, waiter_after_fork(&dev->wait));
	for (struct object *o = dev->objects.next; o != &dev->objects; o = o->next)
		object_after_fork(o);
	return dev->objects.next != &dev->objects;
}

void iwarpd_close(struct iwarpd_device *dev)
{
	if (!dev)
		return;
	waiter_close(&dev->wait);
	while (dev->objects.next != &dev->objects)
		object_free(dev->objects.next);
	bells_close(dev);
	events_free(dev);
	for (size_t i = 0; i < dev->num_attrs; i++)
		free((void *)dev->attrs[i].addresses);
	free(dev->attrs);
	if (dev->hello)
		pb__message__free_unpacked(dev->hello, NULL);
	pthread_cond_destroy(&dev->turn);
	pthread_mutex_destroy(&dev->lock);
	pthread_mutex_destroy(&dev->attaching);
	inbox_close(&dev->in);
	free(dev);
}

const struct iwarpd_device_attr *iwarpd_query_device(const struct iwarpd_device *dev)
{
	const struct iwarpd_device_attr *used = atomic_load(&dev->used);

	return used ? used : &dev->attrs[0];
}

const struct iwarpd_device_attr *iwarpd_query_interface(const struct iwarpd_device *dev, unsigned int i)
{
	return i < dev->num_attrs ? &dev->attrs[i] : NULL;
}

int iwarpd_use(struct iwarpd_device *dev, const char *interface, struct iwarpd_error *e)
{
	if (!interface) {
		atomic_store(&dev->used, NULL);
		return 0;
	}
	for (size_t i = 0; i < dev->num_attrs; i++) {
		if (strcmp(dev->attrs[i].interface, interface) == 0) {
			atomic_store(&dev->used, &dev->attrs[i]);
			return 0;
		}
	}
	return set_error(e, -ENODEV, "use: the daemon does not serve an interface %s", interface);
}

int iwarpd_event_fd(const struct iwarpd_device *dev)
{
	return dev->wait.epoll;
}
