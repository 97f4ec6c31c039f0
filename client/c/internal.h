/*
 * What the files of libiwarpd share. Nothing of it is seen outside.
 *
 * The files form layers, and test/clib checks it: a file calls only those to its left.
 *
 *	error map | socket | call | object bell channel | cq memory | qp | connect | event | device stream
 *
 * What goes up goes through a function pointer: on_event of a device, ended of an object, fired
 * of a completion queue.
 */
#ifndef INTERNAL_H
#define INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "iwarpd.h"
#include "iwarpd.pb-c.h"

/* The shared memory is little-endian, and so is what this library writes. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "libiwarpd needs a little-endian machine");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "libiwarpd needs lock-free atomics");

#define container_of(ptr, type, member) ((type *)((char *)(ptr) - offsetof(type, member)))

enum {
	PROTOCOL_VERSION = 1,
	MAX_PACKET = 65536, /* bytes */
	MAX_FDS = 252,      /* the kernel's SCM_MAX_FD is 253 */
	MAX_EVENTS = 8192,  /* unread, and EVENTS_QP more for each QP; more end the device */
	EVENTS_QP = 4,
};

/* error.c */

struct iwarpd_error;

/* set_error fills *e, if there is one, and returns err, a negative errno value. */
__attribute__((format(printf, 3, 4))) int set_error(struct iwarpd_error *e, int err, const char *format, ...);

/* sys_error is set_error for errno, after a system call that failed. */
int sys_error(struct iwarpd_error *e, const char *what);

/* pb_error fills *e from the daemon's error and returns the errno value. */
int pb_error(struct iwarpd_error *e, const Pb__Error *pb);

/* socket.c */

/* A packet is a message of the daemon's with its descriptors. */
struct packet {
	Pb__Message *msg;
	bool lost; /* this process had no room for its descriptors */
	int num_fds;
	int fds[MAX_FDS];
};

int socket_connect(const char *path, struct iwarpd_error *e);
int socket_send(int sock, const Pb__Request *req, int fd, bool wait);

/* socket_recv returns 1 with a packet, 0 if there is none now, or an error. */
int socket_recv(int sock, void *buf, struct packet *p);
void packet_free(struct packet *p);
void close_fds(const int *fds, int n);

/* map.c: memfds of the daemon's */

enum map_kind { MAP_SQ = 1, MAP_RQ = 2, MAP_CQ = 3, MAP_BELLS = 4 };

struct map {
	uint8_t *mem;
	size_t len;
	/* Copies of the header, which the daemon could change later. */
	uint32_t entries, stride, rings, ring_size, max_sge, max_inline;
};

/* map_open maps the memfd fd, whose size and header must be as docs/api.md says. */
int map_open(struct map *m, int fd, enum map_kind kind);
void map_close(struct map *m);
_Atomic uint32_t *map_word(const struct map *m, size_t offset);

/* A ring, seen from one of its ends. */
struct ring {
	_Atomic uint32_t *ours, *theirs; /* the two indices */
	uint8_t *entries;
	uint32_t size, stride;
	uint32_t next; /* our index */
	uint32_t seen; /* the other end's index when last looked at */
};

void ring_producer(struct ring *r, const struct map *m);
void ring_consumer(struct ring *r, const struct map *m, uint32_t which);

/* Each returns an entry; NULL: full, or empty; *err is set if the index is impossible. */
void *ring_free_entry(struct ring *r, int *err);
const void *ring_next_entry(struct ring *r, int *err);

/* ring_publish makes our index visible. */
void ring_publish(struct ring *r);

/* ring_pending tells whether the consumer has not taken all that we published. */
bool ring_pending(const struct ring *r);

/* object.c */

enum object_kind { OBJECT_PD, OBJECT_MR, OBJECT_MW, OBJECT_CHANNEL, OBJECT_CQ, OBJECT_SRQ, OBJECT_QP, OBJECT_LISTENER };

/* An object is in the device's list, by which it is found and freed. */
struct object {
	struct object *prev, *next;
	struct iwarpd_device *dev;
	enum object_kind kind;
	uint32_t handle;
	void (*free)(struct object *o); /* frees memory; the daemon is not asked */
	void (*ended)(struct object *o); /* the connection or the device has ended; NULL: nothing to do */
};

struct iwarpd_pd {
	struct object obj;
};

struct bell_page {
	struct map map;
	_Atomic uint32_t *sleeping;
	_Atomic uint64_t *bells;
	int wake; /* eventfd */
};

/* A call waits for the reply to its request. */
struct call {
	struct call *next;
	uint64_t id;
	bool done;
	struct packet packet;
};

struct event {
	struct event *next;
	Pb__Message *msg;
	size_t taken; /* of StreamData: bytes that were read */
	bool told;    /* of StreamData: an event said so */
};

/* What a read of a stream waits for. */
struct stream {
	struct stream *next;
	struct iwarpd_device *dev;
	uint32_t conn;
	bool over; /* somebody else was told of its end */
};

struct iwarpd_device {
	int sock;
	int epoll;    /* of sock and queued: iwarpd_event_fd */
	int queued;   /* eventfd, readable while there are events */
	uint32_t workers;
	struct bell_page *pages; /* one for each worker */
	struct iwarpd_device_attr attr;
	Pb__Message *hello;      /* whose texts attr uses */

	void (*on_event)(struct iwarpd_device *dev, Pb__Message *msg); /* takes msg; the lock is held */

	pthread_mutex_t lock; /* guards the rest */
	pthread_cond_t turn;  /* something was read, or nobody reads any more */
	bool reading;         /* a thread waits for the socket */
	int dead;             /* error that ended the device */
	char why[248];        /* what the daemon said of it */
	uint64_t last_id;
	struct call *calls;
	struct event *events, **last_event;
	unsigned int num_events;
	bool event_lost;        /* for want of memory */
	struct stream *readers; /* iwarpd_stream_read calls */
	unsigned int num_qps, most_qps; /* now, and at most */
	unsigned int listening; /* iwarpd_listen calls whose listener is not known yet */
	struct object objects; /* head of the list */
	uint8_t buf[MAX_PACKET];
};

void object_add(struct object *o, struct iwarpd_device *dev, enum object_kind kind, uint32_t handle,
		void (*free)(struct object *));
void object_free(struct object *o);

/* find_object returns the object with that handle. The lock is held. */
struct object *find_object(struct iwarpd_device *dev, enum object_kind kind, uint32_t handle);

/* bell.c */

/* bells_open maps the doorbell pages of the workers; it uses up the descriptors of p. */
int bells_open(struct iwarpd_device *dev, uint32_t workers, struct packet *p);
void bells_close(struct iwarpd_device *dev);

/* ring_bell tells a worker that a QP has work. */
void ring_bell(struct iwarpd_device *dev, uint32_t worker, uint32_t bell);

/* call.c */

/*
 * device_call sends a request, with the descriptor fd unless it is -1, and waits
 * for the reply, which must have that body and come with num_fds descriptors (-1:
 * any number).
 * The packet is the caller's to free.
 */
int device_call(struct iwarpd_device *dev, Pb__Request *req, int fd, Pb__Reply__BodyCase body, int num_fds,
		struct packet *p, struct iwarpd_error *e);

/* device_do is device_call for replies that say nothing but done. */
int device_do(struct iwarpd_device *dev, Pb__Request *req, struct iwarpd_error *e);

/* give_back destroys what a reply has brought that cannot be used. */
void give_back(struct iwarpd_device *dev, const Pb__Reply *r);

/* device_wait reads from the socket until until(arg) with the lock held, or the deadline. */
int device_wait(struct iwarpd_device *dev, bool (*until)(void *arg), void *arg, int64_t deadline);

/* device_post sends a request whose reply does not matter. */
void device_post(struct iwarpd_device *dev, Pb__Request *req);

/* device_broken ends a device that cannot go on. */
void device_broken(struct iwarpd_device *dev, int err);

/* device_gone fills *e for a device that has died. */
int device_gone(struct iwarpd_device *dev, struct iwarpd_error *e);

int64_t deadline_in(int timeout_ms); /* ns; negative: none */
int wait_fd(int fd, int64_t deadline);

/* event.c */

void event_arrived(struct iwarpd_device *dev, Pb__Message *msg); /* on_event of a device */
void events_free(struct iwarpd_device *dev);

/*
 * stream_event returns where the queue has the first event that a reader of the
 * stream conn has to see: its data or its end; NULL: none. The lock is held.
 */
struct event **stream_event(struct iwarpd_device *dev, uint32_t conn);

/* stream_forget drops what was not read of the stream conn. */
void stream_forget(struct iwarpd_device *dev, uint32_t conn);

/* event_done takes the event that *at points to out of the queue. */
void event_done(struct iwarpd_device *dev, struct event **at);

/* qp.c */

void qp_established(struct object *o, uint32_t worker);
struct iwarpd_qp *qp_of(struct object *o);
struct iwarpd_srq *srq_of(struct object *o);
struct object *qp_object(struct iwarpd_qp *qp);

/* channel.c */

/* A completion queue in the lists of its channel. */
struct cq_link {
	struct cq_link *next, *next_ready;
	struct iwarpd_cq *cq;
	uint32_t handle;
	bool is_ready;
	bool (*fired)(const struct iwarpd_cq *cq); /* the daemon has taken the arming back; the lock is held */
};

struct object *channel_object(struct iwarpd_channel *ch);
void channel_add(struct iwarpd_channel *ch, struct cq_link *l);
void channel_remove(struct iwarpd_channel *ch, struct cq_link *l);
void channel_lock(struct iwarpd_channel *ch);
void channel_unlock(struct iwarpd_channel *ch);

/* cq.c */

struct iwarpd_cq *cq_of(struct object *o);
uint32_t cq_handle(const struct iwarpd_cq *cq);

/* connect.c */

struct iwarpd_listener *listener_of(struct object *o);
ProtobufCBinaryData bytes(const void *data, size_t len);

#endif
