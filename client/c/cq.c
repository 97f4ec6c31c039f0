#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

enum {
	CQ_ARM = 2048, /* offsets in the memfd */
	CQ_OVERRUNS = 2112,

	ARM_NONE = 0,
	ARM_NEXT = 1,
	ARM_SOLICITED = 2,
};

/* An entry has the layout of struct iwarpd_wc. */
_Static_assert(sizeof(struct iwarpd_wc) == 64, "CQE of docs/api.md");
_Static_assert(offsetof(struct iwarpd_wc, opcode) == 12 && offsetof(struct iwarpd_wc, qp) == 20 &&
	       offsetof(struct iwarpd_wc, inv_key) == 28 && offsetof(struct iwarpd_wc, imm) == 32 &&
	       offsetof(struct iwarpd_wc, vendor) == 40, "CQE of docs/api.md");

/* The rings of a completion queue, one for each worker. */
struct cq_rings {
	struct map map;
	_Atomic uint32_t *arm, *overruns;
	uint32_t turn; /* ring to poll first */
	struct ring rings[];
};

struct iwarpd_cq {
	struct object obj;
	struct cq_rings *now;
	struct iwarpd_wc *saved; /* completions from before a resize, or NULL */
	size_t num_saved, polled_saved;
	uint32_t overruns;       /* overruns of rings that are gone */
	struct kept wakes;       /* none: the channel has them */
	void *context;
	struct iwarpd_channel *channel; /* or NULL; its lock guards link, and protects now during a resize */
	struct cq_link link;
	_Atomic bool armed;
};

struct iwarpd_cq *cq_of(struct object *o)
{
	return container_of(o, struct iwarpd_cq, obj);
}

static bool cq_fired(const struct iwarpd_cq *cq)
{
	return atomic_load(&cq->armed) && atomic_load(cq->now->arm) == ARM_NONE;
}

uint32_t cq_handle(const struct iwarpd_cq *cq)
{
	return cq->obj.handle;
}

static void rings_free(struct cq_rings *r)
{
	if (r)
		map_close(&r->map);
	free(r);
}

static void cq_free(struct object *o)
{
	struct iwarpd_cq *cq = cq_of(o);

	if (cq->channel)
		channel_remove(cq->channel, &cq->link);
	rings_free(cq->now);
	free(cq->saved);
	kept_close(&cq->wakes);
	free(cq);
}

void cq_after_fork(struct object *o)
{
	map_after_fork(&cq_of(o)->now->map);
	kept_after_fork(&cq_of(o)->wakes);
}

static struct cq_rings *new_rings(const struct iwarpd_device *dev)
{
	return calloc(1, sizeof(struct cq_rings) + dev->workers * sizeof(struct ring));
}

/* rings_open maps the memfd fd. */
static int rings_open(struct cq_rings *r, const struct iwarpd_device *dev, int fd)
{
	int err = map_open(&r->map, fd, MAP_CQ);

	if (err)
		return err;
	if (r->map.rings != dev->workers)
		return -EPROTO;
	r->arm = map_word(&r->map, CQ_ARM);
	r->overruns = map_word(&r->map, CQ_OVERRUNS);
	for (uint32_t i = 0; i < r->map.rings; i++)
		ring_consumer(&r->rings[i], &r->map, i);
	return 0;
}

/*
 * new_cq creates a queue from the descriptors in p, which it takes over on success.
 */
static int new_cq(const struct iwarpd_device *dev, struct packet *p, struct iwarpd_cq **out)
{
	struct iwarpd_cq *cq = calloc(1, sizeof(*cq));
	int err = -ENOMEM;

	if (!cq)
		return err;
	cq->now = new_rings(dev);
	if (cq->now)
		err = rings_open(cq->now, dev, p->fds[0]);
	if (err) {
		rings_free(cq->now);
		free(cq);
		return err;
	}
	cq->wakes.fd = -1;
	if (p->num_fds > 1) {
		kept_set(&cq->wakes, p->fds[1]);
		fcntl(cq->wakes.fd, F_SETFL, O_NONBLOCK);
		p->num_fds = 1;
	}
	*out = cq;
	return 0;
}

static int create_cq(struct iwarpd_device *dev, struct iwarpd_channel *channel, uint32_t depth, void *context,
		     struct iwarpd_cq **out, struct iwarpd_error *e)
{
	Pb__CreateCQ body = PB__CREATE_CQ__INIT;
	Pb__Request req = REQUEST(create_cq, CREATE_CQ, &body);
	struct iwarpd_cq *cq;
	struct packet p;
	int err;

	body.depth = depth;
	body.channel = channel ? channel_object(channel)->handle : 0;
	err = device_call(dev, &req, -1, PB__REPLY__BODY_CQ, channel ? 1 : 2, &p, e);
	if (err)
		return err;
	err = new_cq(dev, &p, &cq);
	if (!err) {
		cq->context = context;
		cq->channel = channel;
		cq->link = (struct cq_link){ .cq = cq, .handle = p.msg->reply->cq->cq, .fired = cq_fired };
		if (channel)
			channel_add(channel, &cq->link);
		object_add(&cq->obj, dev, OBJECT_CQ, cq->link.handle, cq_free);
		*out = cq;
	}
	return create_done(dev, &p, err, "completion queue", e);
}

int iwarpd_create_cq(struct iwarpd_device *dev, uint32_t depth, struct iwarpd_cq **out, struct iwarpd_error *e)
{
	return create_cq(dev, NULL, depth, NULL, out, e);
}

int iwarpd_create_cq_on(struct iwarpd_channel *channel, uint32_t depth, void *context, struct iwarpd_cq **out,
			struct iwarpd_error *e)
{
	return create_cq(channel_object(channel)->dev, channel, depth, context, out, e);
}

void *iwarpd_cq_context(const struct iwarpd_cq *cq)
{
	return cq->context;
}

int iwarpd_destroy_cq(struct iwarpd_cq *cq, struct iwarpd_error *e)
{
	return object_destroy(&cq->obj, e);
}

int iwarpd_modify_cq(struct iwarpd_cq *cq, uint32_t count, uint32_t period_us, struct iwarpd_error *e)
{
	Pb__ModifyCQ body = PB__MODIFY_CQ__INIT;
	Pb__Request req = REQUEST(modify_cq, MODIFY_CQ, &body);

	body.cq = cq->obj.handle;
	body.count = count;
	body.period_us = period_us;
	return device_do(cq->obj.dev, &req, e);
}

/* poll_ring removes up to n completions from a ring. */
static int poll_ring(struct ring *r, struct iwarpd_wc *wc, int n)
{
	const void *entry;
	int got = 0, err = 0;

	while (got < n && (entry = ring_next_entry(r, &err)) != NULL) {
		memcpy(&wc[got++], entry, sizeof(*wc));
		r->next++;
	}
	if (got == 0)
		return err;
	ring_publish(r);
	return ring_freed(r) ? -EPIPE : got;
}

/* max_in_rings returns how many completions the rings can hold. */
static size_t max_in_rings(const struct iwarpd_cq *cq)
{
	return (size_t)cq->now->map.rings * cq->now->map.entries;
}

static int poll_rings(struct cq_rings *r, struct iwarpd_wc *wc, int n)
{
	int got = 0;

	for (uint32_t i = 0; i < r->map.rings && got < n; i++) {
		int more = poll_ring(&r->rings[r->turn], wc + got, n - got);

		if (more < 0)
			return got > 0 ? got : more;
		got += more;
		if (got < n && ++r->turn == r->map.rings) /* the ring is empty */
			r->turn = 0;
	}
	return got;
}

/* poll_saved removes up to n saved completions. */
static int poll_saved(struct iwarpd_cq *cq, struct iwarpd_wc *wc, int n)
{
	size_t left = cq->num_saved - cq->polled_saved;
	int got = left < (size_t)n ? (int)left : n;

	memcpy(wc, cq->saved + cq->polled_saved, (size_t)got * sizeof(*wc));
	cq->polled_saved += (size_t)got;
	if (cq->polled_saved == cq->num_saved) {
		free(cq->saved);
		cq->saved = NULL;
		cq->num_saved = cq->polled_saved = 0;
	}
	return got;
}

/* What a resize needs when the daemon has replied. */
struct reserve {
	struct cq_rings *rings;
	void *room; /* for the memfd, or MAP_FAILED */
	size_t size;
};

/*
 * make_reserve prepares a resize: when the daemon has replied, new completions come in the new rings, so that the queue is
 * lost if they cannot be mapped. Other threads may still use up the descriptors.
 */
static int make_reserve(struct reserve *r, struct iwarpd_cq *cq, uint32_t depth)
{
	const struct iwarpd_device *dev = cq->obj.dev;
	struct iwarpd_wc *saved = realloc(cq->saved, (cq->num_saved + max_in_rings(cq)) * sizeof(*saved));
	int fd;

	if (!saved)
		return -ENOMEM;
	cq->saved = saved;
	r->rings = new_rings(dev);
	if (!r->rings)
		return -ENOMEM;
	r->size = map_cq_size(dev->workers, depth);
	if (r->size == 0) /* the daemon says why */
		return 0;
	r->room = mmap(NULL, r->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (r->room == MAP_FAILED)
		return -errno;
	fd = fcntl(dev->wait.sock.fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	close(fd);
	return 0;
}

static void free_room(struct reserve *r)
{
	if (r->room != MAP_FAILED)
		munmap(r->room, r->size);
	r->room = MAP_FAILED;
}

/* free_reserve frees what a resize has not used. */
static void free_reserve(struct reserve *r, struct iwarpd_cq *cq)
{
	struct iwarpd_wc *saved = cq->num_saved > 0 ? realloc(cq->saved, cq->num_saved * sizeof(*saved)) : NULL;

	if (cq->num_saved == 0)
		free(cq->saved);
	if (cq->num_saved == 0 || saved)
		cq->saved = saved;
	free_room(r);
	rings_free(r->rings);
}

/* save saves the completions in the rings, to which the daemon adds nothing more. There is room for them. */
static int save(struct iwarpd_cq *cq)
{
	int got = poll_rings(cq->now, cq->saved + cq->num_saved, (int)max_in_rings(cq));

	if (got > 0)
		cq->num_saved += (size_t)got;
	return got < 0 ? got : 0;
}

/* replace_rings continues with the rings of the memfd fd. */
static int replace_rings(struct iwarpd_cq *cq, struct reserve *r, int fd)
{
	struct cq_rings *rings = r->rings, *old = cq->now;
	int err = save(cq);

	free_room(r);
	if (!err)
		err = rings_open(rings, cq->obj.dev, fd);
	if (err)
		return err;
	r->rings = NULL;
	if (cq->channel)
		channel_lock(cq->channel);
	iwarpd_disarm_cq(cq);
	cq->now = rings;
	if (cq->channel)
		channel_unlock(cq->channel);
	cq->overruns += atomic_load(old->overruns);
	rings_free(old);
	return 0;
}

int iwarpd_resize_cq(struct iwarpd_cq *cq, uint32_t depth, struct iwarpd_error *e)
{
	Pb__ResizeCQ body = PB__RESIZE_CQ__INIT;
	Pb__Request req = REQUEST(resize_cq, RESIZE_CQ, &body);
	struct reserve r = { .room = MAP_FAILED };
	struct packet p;
	int err;

	body.cq = cq->obj.handle;
	body.depth = depth;
	err = make_reserve(&r, cq, depth);
	if (err)
		set_error(e, err, "completion queue: %s", strerror(-err));
	else
		err = device_call(cq->obj.dev, &req, -1, PB__REPLY__BODY_CQ, 1, &p, e);
	if (!err) {
		err = replace_rings(cq, &r, p.fds[0]);
		packet_free(&p);
		if (err) {
			device_broken(cq->obj.dev, err); /* completions would be lost */
			set_error(e, err, "completion queue: %s", strerror(-err));
		}
	}
	free_reserve(&r, cq);
	return err;
}

int iwarpd_poll_cq(struct iwarpd_cq *cq, struct iwarpd_wc *wc, int n)
{
	int got = cq->num_saved > 0 && n > 0 ? poll_saved(cq, wc, n) : 0;
	int more = poll_rings(cq->now, wc + got, n - got);

	return got > 0 && more < 0 ? got : got + more;
}

/* clean_ring removes the completions of a QP from a ring. The others move towards the newest one. */
static void clean_ring(struct ring *r, uint32_t qp)
{
	uint32_t from = atomic_load(r->theirs), to = from;

	if (from - r->next > r->size)
		return; /* iwarpd_poll_cq reports it */
	r->seen = from;
	while (from != r->next) {
		const struct iwarpd_wc *wc = ring_entry(r, --from);

		if (wc->qp != qp)
			memmove(ring_entry(r, --to), wc, sizeof(*wc));
	}
	r->next = to;
	ring_publish(r);
}

void iwarpd_clean_cq(struct iwarpd_cq *cq, uint32_t qp)
{
	size_t kept = cq->polled_saved;

	for (size_t i = kept; i < cq->num_saved; i++)
		if (cq->saved[i].qp != qp)
			cq->saved[kept++] = cq->saved[i];
	cq->num_saved = kept;
	for (uint32_t i = 0; i < cq->now->map.rings; i++)
		clean_ring(&cq->now->rings[i], qp);
}

void iwarpd_arm_cq(struct iwarpd_cq *cq, bool solicited_only)
{
	uint32_t none = ARM_NONE;

	atomic_store(&cq->armed, true);
	if (solicited_only)
		atomic_compare_exchange_strong(cq->now->arm, &none, ARM_SOLICITED);
	else
		atomic_store(cq->now->arm, ARM_NEXT);
}

bool iwarpd_disarm_cq(struct iwarpd_cq *cq)
{
	if (atomic_exchange(cq->now->arm, ARM_NONE) == ARM_NONE)
		return false; /* its wake-up may be lost, and the channel then asks cq_fired */
	atomic_store(&cq->armed, false);
	return true;
}

void iwarpd_wake_cq(struct iwarpd_cq *cq)
{
	if (cq->channel)
		channel_push(cq->channel, &cq->link);
}

/* drain reads pending wake-ups. It returns -EPIPE if the daemon is gone. */
static int drain(int fd)
{
	char b[512];
	ssize_t n;

	do {
		n = read(fd, b, sizeof(b));
	} while (n == (ssize_t)sizeof(b));
	return n == 0 ? -EPIPE : 0;
}

int iwarpd_wait_cq(struct iwarpd_cq *cq, struct iwarpd_wc *wc, int n, int timeout_ms)
{
	int64_t deadline = deadline_in(timeout_ms);
	int got = iwarpd_poll_cq(cq, wc, n);

	if (got == 0 && cq->channel)
		return -EINVAL;
	while (got == 0) {
		int err;

		iwarpd_arm_cq(cq, false);
		got = iwarpd_poll_cq(cq, wc, n);
		if (got != 0)
			break;
		err = wait_fd(cq->wakes.fd, deadline);
		if (!err)
			err = drain(cq->wakes.fd);
		got = iwarpd_poll_cq(cq, wc, n);
		if (got == 0 && err)
			return err;
	}
	return got;
}

int iwarpd_cq_fd(const struct iwarpd_cq *cq)
{
	return cq->channel ? iwarpd_channel_fd(cq->channel) : cq->wakes.fd;
}

uint32_t iwarpd_cq_overruns(const struct iwarpd_cq *cq)
{
	return cq->overruns + atomic_load(cq->now->overruns);
}
