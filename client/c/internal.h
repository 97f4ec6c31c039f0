/*
 * Declarations shared by the files of libiwarpd. They are not exported.
 *
 * The files form layers, and test/clib checks it: a file calls only those to its left.
 *
 *	error kept map | socket | waiter | call | object bell channel | cq memory | qp | connect | event | device stream
 *
 * Calls in the other direction use function pointers: on_event, on_listen and drop_events of a device, ended of an
 * object, fired of a completion queue.
 */
#ifndef INTERNAL_H
#define INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "iwarpd.h"
#include "iwarpd.pb-c.h"
#include "kept.h"

/* Shared memory is little-endian, as is what this library writes. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "libiwarpd needs a little-endian machine");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "libiwarpd needs lock-free atomics");

#define container_of(ptr, type, member) ((type *)((char *)(ptr) - offsetof(type, member)))

enum {
	PROTOCOL_VERSION = 1,
	MAX_PACKET = 65536, /* bytes */
	MAX_FDS = 252,      /* the kernel's SCM_MAX_FD is 253 */
	MAX_EVENTS = 8192,  /* unread events, plus EVENTS_QP per QP; more end the device */
	EVENTS_QP = 4,
};

/* error.c */

/*
 * set_error fills in *e, unless e is NULL, and returns err, a negative errno value.
 */
__attribute__((format(printf, 3, 4))) int set_error(struct iwarpd_error *e, int err, const char *format, ...);

/* sys_error is set_error for errno after a failed system call. */
int sys_error(struct iwarpd_error *e, const char *what);

/* pb_error fills in *e from the daemon's error and returns the errno value. */
int pb_error(struct iwarpd_error *e, const Pb__Error *pb);

/* socket.c */

/* REQUEST initializes a Pb__Request with the message b as its body, which is named f there and in the body's constants F. */
#define REQUEST(f, F, b) \
	{ .base = PROTOBUF_C_MESSAGE_INIT(&pb__request__descriptor), .body_case = PB__REQUEST__BODY_##F, .f = (b) }

/* A packet is a message from the daemon with its descriptors. */
struct packet {
	Pb__Message *msg;
	bool lost; /* descriptors were dropped: the process has too many open */
	int num_fds;
	int fds[MAX_FDS];
};

/* An inbox receives packets. spare is freed for a message for which the process has no memory, so that it is not lost. */
struct inbox {
	void *spare; /* or NULL */
	uint8_t buf[MAX_PACKET];
};

void inbox_close(struct inbox *in);
void *inbox_alloc(struct inbox *in, size_t size); /* memory for what is received, which free frees, or NULL */

/* socket_connect connects to the daemon. If it may not wait, it fails with -EAGAIN while too many connections wait for it. */
int socket_connect(const char *path, bool wait, struct iwarpd_error *e);

/* socket_send waits at most about 5 s for buffers of the kernel. If wait is false, it fails with -EAGAIN if the socket is full. */
int socket_send(int sock, const Pb__Request *req, int fd, bool wait);

/* socket_recv returns 1 with a packet, 0 if none is available and wait is false, or an error. */
int socket_recv(int sock, struct inbox *in, struct packet *p, bool wait);
void packet_free(struct packet *p);
void close_fds(const int *fds, int n);

void close_fd(int fd); /* unless it is -1 */

/*
 * set_readable makes an eventfd readable that is not, or the reverse. The caller may hold a lock, which a thread that
 * is canceled here would not release.
 */
void set_readable(int fd, bool yes);

/* waiter.c */

/*
 * A waiter is a socket of the daemon's, and what else the program waits for with it. The child of a fork has only epoll, a file
 * of its own that is never readable; sock is that one then, and more is -1.
 */
struct waiter {
	struct kept sock;
	int more;  /* eventfd */
	int epoll; /* of both; the program may know its number */
};

/* waiter_open takes over sock, also if it fails. */
int waiter_open(struct waiter *w, int sock);

void waiter_close(struct waiter *w); /* in the child of a fork it leaves the number alone if the child has closed the descriptor */

/*
 * waiter_after_fork separates the child of a fork from the files of its parent, and returns whether they were open: the program may
 * have closed them. If RLIMIT_NOFILE has become lower than the number of epoll, the child has no descriptor.
 */
bool waiter_after_fork(struct waiter *w);

/* kept_after_fork does the same to a socket whose number the program may know. */
void kept_after_fork(struct kept *k);

/* map.c: memfds of the daemon */

enum map_kind { MAP_SQ = 1, MAP_RQ = 2, MAP_CQ = 3, MAP_BELLS = 4 };

struct map {
	uint8_t *mem;
	size_t len;
	/* Copies of header fields, which the daemon could change later. */
	uint32_t entries, stride, rings, ring_size, max_sge, max_inline;
};

/*
 * map_open maps the memfd fd after checking its size and header against
 * docs/api.md.
 */
int map_open(struct map *m, int fd, enum map_kind kind);
void map_close(struct map *m);

/* map_cq_size returns the size of the memfd of a completion queue of a depth, or 0 if the daemon makes no such queue. */
size_t map_cq_size(uint32_t rings, uint32_t depth);

/* map_after_fork replaces what the child of a fork shares with its parent by zeros, which are no valid ring. */
void map_after_fork(const struct map *m);
_Atomic uint32_t *map_word(const struct map *m, size_t offset);

/* One end of a ring. */
struct ring {
	_Atomic uint32_t *magic; /* of the header */
	_Atomic uint32_t *ours, *theirs; /* the two indices */
	uint8_t *entries;
	uint32_t size, stride;
	uint32_t next; /* our index */
	uint32_t seen; /* last value read of the other end's index */
};

void ring_producer(struct ring *r, const struct map *m);
void ring_consumer(struct ring *r, const struct map *m, uint32_t which);
void *ring_entry(const struct ring *r, uint32_t index);

/*
 * Both return an entry, or NULL if fewer than n are free or the ring is empty. *err is set if
 * the index is invalid.
 */
void *ring_free_entry(struct ring *r, uint32_t n, int *err);
const void *ring_next_entry(struct ring *r, int *err);

/* ring_publish publishes our index. */
void ring_publish(struct ring *r);

/*
 * ring_freed reports whether the daemon has freed the memory, or map_after_fork was
 * called: all of it is zero then. What was read before it returned false is true.
 */
bool ring_freed(const struct ring *r);

/* ring_pending reports whether the consumer has published entries left to take. */
bool ring_pending(const struct ring *r);

/* object.c */

enum object_kind { OBJECT_PD, OBJECT_MR, OBJECT_MW, OBJECT_CHANNEL, OBJECT_CQ, OBJECT_SRQ, OBJECT_QP, OBJECT_LISTENER };

/* An object is in the device's list, which is used to find and free it. */
struct object {
	struct object *prev, *next;
	struct iwarpd_device *dev;
	enum object_kind kind;
	uint32_t handle;
	uint32_t conn; /* of a QP whose connection is, or was, a byte stream; otherwise 0 */
	bool due; /* ended could not post its request, and is called again */
	void (*free)(struct object *o); /* frees the memory without notifying the daemon */
	void (*ended)(struct object *o); /* called when the connection or the device has ended; may be NULL */
};

struct iwarpd_pd {
	struct object obj;
};

struct bell_page {
	struct map map;
	_Atomic uint32_t *sleeping, *received;
	_Atomic uint64_t *bells;
	int wake; /* eventfd */
};

/* A call waits for the reply to its request. */
struct call {
	struct call *next;
	Pb__Request *req;
	bool done;
	struct packet packet;
};

struct event {
	struct event *next;
	Pb__Message *msg;
	size_t taken; /* of StreamData: bytes already read */
	bool reported; /* of StreamData */
};

/* A pending read of a stream. */
struct stream {
	struct stream *next;
	struct iwarpd_device *dev;
	uint32_t conn;
	bool over; /* the end was reported to another thread */
	int cancel; /* as of device_wait */
};

struct iwarpd_device {
	struct waiter wait; /* for the daemon; more is readable while events are queued; iwarpd_event_fd */
	uint32_t workers;
	struct bell_page *pages; /* one per worker */
	struct iwarpd_device_attr *attrs; /* of the interfaces, at least one once the device is open */
	size_t num_attrs;
	_Atomic(const struct iwarpd_device_attr *) used; /* of iwarpd_use; NULL: none */
	Pb__Message *hello;      /* owns the texts in attrs */

	int (*on_event)(struct iwarpd_device *dev, Pb__Message *msg); /* takes ownership of msg; an error ends the device; the lock is held */
	void (*on_listen)(Pb__Request *req, const Pb__ListenReply *r); /* the reply to a Listen has come; the lock is held */
	void (*drop_events)(const struct object *qp);                  /* of a QP that is being freed; the lock is held */

	pthread_mutex_t attaching; /* held during the request; guards the next line */
	bool far, near;            /* the daemon has our /proc/self/mem, and the memfd of near memory */
	pthread_mutex_t lock; /* guards the rest */
	pthread_cond_t turn;  /* signaled when a thread has read something or stopped reading */
	int64_t deadline;     /* of requests, in ns; negative: none, as always once the device is open */
	bool reading;         /* a thread is waiting for the socket */
	int64_t rest;         /* until when await_packet does not poll; used by the thread that reads */
	int dead;             /* error that ended the device */
	char why[248];        /* the daemon's reason */
	uint64_t last_id;
	struct call *calls;
	struct event *events, **last_event;
	unsigned int num_events;
	struct stream *readers; /* pending iwarpd_stream_read calls */
	unsigned int num_qps, most_qps; /* current and maximum number */
	bool due;               /* an object is due */
	struct object objects; /* head of the list */
	struct inbox in; /* of the thread that reads */
};

void object_add(struct object *o, struct iwarpd_device *dev, enum object_kind kind, uint32_t handle,
		void (*free)(struct object *));
void object_link(struct object *o, struct iwarpd_device *dev, enum object_kind kind, uint32_t handle,
		 void (*free)(struct object *)); /* object_add with the lock held */
void object_free(struct object *o);

/* object_destroy destroys an object of the daemon, and then frees ours. If the device has died, it frees ours and fails with -EPIPE. */
int object_destroy(struct object *o, struct iwarpd_error *e);

/* find_object returns the object with the given handle. The lock is held. */
struct object *find_object(struct iwarpd_device *dev, enum object_kind kind, uint32_t handle);

/* bell.c */

/*
 * bells_open maps the doorbell pages of the workers. It takes over the descriptors
 * of p.
 */
int bells_open(struct iwarpd_device *dev, uint32_t workers, struct packet *p);
void bells_close(struct iwarpd_device *dev);

/* bells_forget forgets the descriptors of the pages, and closes them if the program has not. */
void bells_forget(struct iwarpd_device *dev, bool open);

/* ring_bell notifies a worker that a QP has work. */
void ring_bell(struct iwarpd_device *dev, uint32_t worker, uint32_t bell);

/* call.c */

/*
 * device_call sends a request, with the descriptor fd unless it is -1, and waits
 * for the reply, which must have the given body and num_fds descriptors (-1: any
 * number). The caller must free the packet.
 */
int device_call(struct iwarpd_device *dev, Pb__Request *req, int fd, Pb__Reply__BodyCase body, int num_fds,
		struct packet *p, struct iwarpd_error *e);

/* device_do is device_call for replies without a body. */
int device_do(struct iwarpd_device *dev, Pb__Request *req, struct iwarpd_error *e);

/* device_destroy destroys an object of the daemon. */
int device_destroy(struct iwarpd_device *dev, enum object_kind kind, uint32_t handle, struct iwarpd_error *e);

/*
 * create_done ends a call that creates an object: it frees the reply, and destroys the daemon's object
 * if err, the result of making ours, is not 0.
 */
int create_done(struct iwarpd_device *dev, struct packet *p, int err, const char *what, struct iwarpd_error *e);

/*
 * device_wait reads from the socket until until(arg), called with the lock held,
 * returns true, or the deadline. The caller cannot be canceled, as nobody would release
 * the lock; while it waits, its state is cancel.
 */
int device_wait(struct iwarpd_device *dev, bool (*until)(void *arg), void *arg, int64_t deadline, int cancel);

/* device_listening reports whether a call waits for the reply to a Listen. The lock is held. */
bool device_listening(const struct iwarpd_device *dev);

/* device_post sends a request and ignores its reply. It does not wait: it fails if the socket is full. The lock is held. */
int device_post(struct iwarpd_device *dev, Pb__Request *req);

/* device_broken ends a device after an unrecoverable error. */
void device_broken(struct iwarpd_device *dev, int err);

/* device_dead reports whether a device has died. */
bool device_dead(struct iwarpd_device *dev);

/* device_gone fills in *e for a device that has died. */
int device_gone(struct iwarpd_device *dev, struct iwarpd_error *e);

int64_t now_ns(void);
int64_t deadline_in(int timeout_ms); /* ns; negative: none */
int wait_fd(int fd, int64_t deadline);

/* event.c */

int event_arrived(struct iwarpd_device *dev, Pb__Message *msg); /* on_event of a device */
void events_drop(const struct object *qp);                             /* drop_events of a device */
void events_free(struct iwarpd_device *dev);

/*
 * stream_event returns the first queued event that a reader of the stream conn must
 * handle, data or the end, or NULL. The lock is held.
 */
struct event **stream_event(struct iwarpd_device *dev, uint32_t conn);

/* stream_forget drops unread data of the stream conn. */
void stream_forget(struct iwarpd_device *dev, uint32_t conn);

/* event_done removes the event at *at from the queue. */
void event_done(struct iwarpd_device *dev, struct event **at);

/* qp.c */

void qp_established(struct object *o, uint32_t worker);
struct iwarpd_qp *qp_of(struct object *o);
struct iwarpd_srq *srq_of(struct object *o);
void srq_after_fork(struct object *o);
struct object *qp_object(struct iwarpd_qp *qp);

/* channel.c */

/* A completion queue in the lists of its channel. */
struct cq_link {
	struct cq_link *next, *next_ready;
	struct iwarpd_cq *cq;
	uint32_t handle;
	bool is_ready;
	bool (*fired)(const struct iwarpd_cq *cq); /* the daemon has disarmed the queue; the lock is held */
};

struct object *channel_object(struct iwarpd_channel *ch);
void channel_add(struct iwarpd_channel *ch, struct cq_link *l);
void channel_remove(struct iwarpd_channel *ch, struct cq_link *l);
void channel_push(struct iwarpd_channel *ch, struct cq_link *l); /* makes iwarpd_get_cq_event return l */
void channel_after_fork(struct object *o);
void channel_lock(struct iwarpd_channel *ch);
void channel_unlock(struct iwarpd_channel *ch);

/* cq.c */

struct iwarpd_cq *cq_of(struct object *o);
void cq_after_fork(struct object *o);
uint32_t cq_handle(const struct iwarpd_cq *cq);

/* connect.c */

struct iwarpd_listener *listener_of(struct object *o);
void listen_replied(Pb__Request *req, const Pb__ListenReply *r); /* on_listen of a device */
ProtobufCBinaryData bytes(const void *data, size_t len);

#endif
