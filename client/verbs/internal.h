/* What the files of the two filter libraries share. See docs/verbs.md. */
#ifndef INTERNAL_H
#define INTERNAL_H

#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "iwarpd.h"

#define container_of(ptr, type, member) ((type *)((char *)(ptr) - offsetof(type, member)))

enum {
	MAX_ADDRESSES = 64, /* of a device */
	CLOSE_WAIT_MS = 10000, /* how long a connection may take to close after its QP is destroyed */
};

/* log.c */

/* verbs_off reports whether IWARPD_VERBS=off hides iwarpd's devices. */
bool verbs_off(void);

/* iwv_log writes a line where IWARPD_VERBS_LOG says: a file, or 1 for standard error. */
__attribute__((format(printf, 1, 2))) void iwv_log(const char *format, ...);

/* fail logs what iwarpd said, sets errno to -err, and returns -1. */
int iwv_fail(int err, const char *what, const struct iwarpd_error *e);

/* unsupported logs that what is not possible and sets errno to EOPNOTSUPP, which it returns. */
int iwv_unsupported(const char *what);

int64_t now_ms(void);

/* real.c */

/* real_symbol returns a function of the distribution's library, or NULL. */
void *real_verbs_symbol(const char *name);

/* REAL(f) is the distribution's f, or one that does not exist. */
#define REAL(f) ((__typeof__(&f))real_verbs_symbol(#f))

/* queue.c */

/* An event of a queue is the first member of a larger structure. */
struct queue_item {
	struct queue_item *next;
};

/* A queue has a descriptor that is readable while it holds an item. */
struct event_queue {
	pthread_mutex_t lock;
	struct queue_item *first, **last;
	int fd; /* an eventfd that counts the items */
};

int iwv_queue_init(struct event_queue *q); /* returns the descriptor, or -1 with errno */
void iwv_queue_close(struct event_queue *q); /* the descriptor too */
void iwv_queue_put(struct event_queue *q, struct queue_item *item);

/* iwv_queue_wait waits for an item. It blocks, or fails with EAGAIN, by O_NONBLOCK of the descriptor. */
int iwv_queue_wait(struct event_queue *q);

/* iwv_queue_pop takes the item that was waited for; NULL: iwv_queue_take was faster. */
struct queue_item *iwv_queue_pop(struct event_queue *q);

/* iwv_queue_take takes all items for which match returns true, as a list. */
struct queue_item *iwv_queue_take(struct event_queue *q, bool (*match)(struct queue_item *item, void *arg), void *arg);

/* device.c */

/* A device is an interface of a daemon. It is never freed. */
struct device {
	struct ibv_device ibv;
	struct device *next;
	char socket[108];
	char interface[64];
	char addresses[MAX_ADDRESSES][64]; /* "address/length" */
	unsigned int num_addresses;
	uint64_t guid;
	bool present;
};

/* A context is a client of a daemon. */
struct context {
	struct iwarpd_device *dev;
	struct device *device;
	struct iwarpd_device_attr attr; /* numbers; its texts are the iwarpd_device's */
	struct context *next;  /* of those that the library thread serves */
	struct event_queue async;
	atomic_bool gone;     /* the daemon is */
	struct cq *cqs;       /* guarded by iwv_thread_lock, as the rest */
	struct qp *qps;       /* that the program has */
	struct qp *closing;   /* that it destroyed, and whose connections are still closing */
	struct verbs_context v; /* its last member is the ibv_context */
};

struct context *iwv_context_of(struct ibv_context *ibv);

/* iwv_is_ours reports whether a context is one of iwarpd. */
bool iwv_is_ours(const struct ibv_context *ibv);

/* device_ours reports whether a device is one of iwarpd. */
bool device_ours(const struct ibv_device *ibv);

/* iwv_devices_scan looks for daemons and returns the list of devices, present or not. */
struct device *iwv_devices_scan(void);

/* iwv_device_address puts address i of a device; false: there is none. */
bool iwv_device_address(const struct device *d, unsigned int i, struct sockaddr_storage *a, unsigned int *prefix);

/* put_gid makes the GID of address index of a device; -1: there is none. */
int put_gid(const struct context *c, unsigned int index, union ibv_gid *gid);

/* async.c */

int async_init(struct context *c);
void async_close(struct context *c);
void async_error(struct context *c, const struct iwarpd_event *ev);
void async_fatal(struct context *c);

/* async_drop drops events about an object that is destroyed. */
void async_drop(struct context *c, const void *element);

/* thread.c */

/*
 * iwv_thread_lock guards the lists of objects and all state of connections. The thread
 * holds it from taking an event to the end of what it does about it, so that an
 * object can be freed by a thread that holds it.
 */
void iwv_thread_lock(void);
void iwv_thread_unlock(void);

/* iwv_thread_wait releases the lock until iwv_thread_wake, or for at most ms. */
void iwv_thread_wait(int ms);
void iwv_thread_wake(void);

/* thread_serve makes the library's thread take the events of a context. */
int thread_serve(struct context *c);

/* thread_forget ends that; the thread does not touch the context any more. */
void thread_forget(struct context *c);

/*
 * iwv_thread_set_cm sets what the thread calls with connection events, under the lock;
 * ev is NULL when the daemon is gone.
 */
typedef void cm_handler(struct context *c, const struct iwarpd_event *ev);
void iwv_thread_set_cm(cm_handler *handler);

/* near.c: memory of the program that the daemon can map */

struct near_region {
	int fd;          /* the memfd, the library's */
	uint64_t offset; /* in it: the address */
};

/*
 * near_get moves the pages of a range into the memfd, where they are not there yet.
 * 0, or a negative errno value: -EOPNOTSUPP for memory that cannot be moved.
 * The daemon of dev may provide the userfaultfd.
 */
int near_get(struct iwarpd_device *dev, uintptr_t addr, size_t length, bool writable, struct near_region *r);

/* near_put moves them back where no other region uses them. */
void near_put(uintptr_t addr, size_t length);

/* far_check returns 0 if the program may use all of a range so, or -EFAULT. */
int far_check(uintptr_t addr, size_t length, bool writable);

/* cq.c */

/* A completion that the library makes itself. */
struct late {
	struct late *next;
	struct ibv_wc wc;
};

/* The wr_id of work requests that the library adds; their completions are not shown. */
#define HIDDEN_WR ((uint64_t)(uintptr_t)&hidden_wr)
extern const char hidden_wr;

struct cq {
	struct ibv_cq ibv;
	struct iwarpd_cq *q;
	struct cq *next;
	uint32_t depth; /* of q, which grows with need up to ibv.cqe */
	uint64_t need;  /* work requests that its QPs can have or had; guarded by iwv_thread_lock */
	bool solicited; /* it was armed for these alone */
	pthread_mutex_t lock; /* of polling and arming, and of late */
	struct late *late, **last_late; /* after all that the daemon has completed */
	bool armed;                     /* and no late completion has come since */
	struct cq *next_ready;          /* of those whose channel has an event for a late completion */
	bool ready;
	struct iwarpd_wc hidden; /* the last one that failed and was not shown */
	unsigned int empty;      /* how often polling has found nothing since it last found something */
};

/* cq_of returns the CQ of an ibv_cq. */
static inline struct cq *cq_of(struct ibv_cq *ibv)
{
	return container_of(ibv, struct cq, ibv);
}

/*
 * cq_need adds work requests whose completions the CQ may have to hold, and makes room for
 * them. The lock of iwv_thread_lock is held.
 */
int cq_need(struct ibv_cq *ibv, uint64_t n, struct iwarpd_error *e);

/* cq_late adds a completion. */
int cq_late(struct ibv_cq *ibv, const struct ibv_wc *wc);

/* cq_flush adds the completion of a work request that came after the end of its QP's connection. */
int cq_flush(struct ibv_cq *ibv, const struct ibv_qp *qp, uint64_t wr_id, enum ibv_wc_opcode opcode);

int poll_cq(struct ibv_cq *ibv, int n, struct ibv_wc *wc);
int req_notify_cq(struct ibv_cq *ibv, int solicited_only);

/* memory.c */

struct pd {
	struct ibv_pd ibv;
	struct iwarpd_pd *pd;
};

struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int dealloc_mw(struct ibv_mw *mw);

/* qp.c */

struct srq {
	struct ibv_srq ibv;
	struct iwarpd_srq *q;
	pthread_mutex_t lock; /* of posting */
	struct ibv_srq_attr attr;
};

/* What has become of the connection of a QP. */
enum connection { CONN_NONE, CONN_MAKING, CONN_UP, CONN_CLOSING, CONN_OVER };

struct qp {
	struct ibv_qp ibv;
	struct iwarpd_qp *q;
	struct context *ctx;
	struct qp *next;
	struct ibv_qp_cap cap;
	bool sig_all;
	_Atomic(void *) cm; /* librdmacm's id, or NULL */
	atomic_int conn;    /* enum connection */
	int64_t deadline;   /* of a connection that is closing, ms */
	uint64_t *early;    /* wr_id of each receive that was posted before there is a connection */
	uint32_t num_early; /* guarded by recv_lock, as early and dead */
	bool dead;          /* it went to the error state without a connection */
	struct exchange *exchange; /* connection by ibv_modify_qp, or NULL */
	pthread_mutex_t send_lock, recv_lock;
};

static inline struct qp *qp_of(struct ibv_qp *ibv)
{
	return container_of(ibv, struct qp, ibv);
}

/* The functions from here to qp_wait_closing are called with the lock held. */

/* iwv_qp_of_event returns the QP that an event is about, or NULL. */
struct qp *iwv_qp_of_event(const struct iwarpd_event *ev);

/* iwv_qp_find returns the QP with that number, or NULL. */
struct qp *iwv_qp_find(struct context *c, uint32_t num);

/* iwv_qp_disconnect ends the connection of a QP, if it has one. */
int iwv_qp_disconnect(struct qp *qp, bool abort, struct iwarpd_error *e);

/* qp_event notes what an event says of its QP, after the connection manager has seen it. */
void qp_event(struct context *c, const struct iwarpd_event *ev);

/* qp_expire ends connections that have not closed in time; it returns ms until it is to be called again, or -1. */
int qp_expire(struct context *c);

/* qp_wait_closing waits until no QP that uses the CQ, SRQ or PD used is closing. */
void qp_wait_closing(struct context *c, const void *used);

/* qp_connecting notes that a QP gets a connection. */
void iwv_qp_connecting(struct qp *qp, bool yes);

/* exchange.c: connections that ibv_modify_qp makes. With the lock held, but for exchange_hold. */

/* exchange_listen prepares a QP in the state INIT for the connection of its peer. */
int exchange_listen(struct qp *qp);

/* exchange_connect connects a QP to the one that attr names, for the state RTR. */
int exchange_connect(struct qp *qp, const struct ibv_qp_attr *attr);

/* exchange_end drops what a QP has for that. */
void exchange_end(struct qp *qp);

/*
 * exchange_hold keeps the completion of a receive that was flushed because the peer of
 * such a QP has left, until the program moves the QP to the error state: a QP of
 * InfiniBand does not notice that its peer leaves. false: it is to be shown. It may be
 * called with any lock held.
 */
bool exchange_hold(const struct ibv_wc *wc);

/* exchange_show makes the CQ show what was held. */
void exchange_show(struct qp *qp);

/* exchange_event returns whether an event is of such a connection. */
bool exchange_event(struct context *c, const struct iwarpd_event *ev);

int post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int post_srq_recv(struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

#endif
