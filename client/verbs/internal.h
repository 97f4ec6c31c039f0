/* Declarations shared by the files of both filter libraries. See docs/verbs.md. */
#ifndef INTERNAL_H
#define INTERNAL_H

#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "iwarpd.h"
#include "kept.h"

#define container_of(ptr, type, member) ((type *)((char *)(ptr) - offsetof(type, member)))

/* UNLINK removes x from a list that it is in. */
#define UNLINK(list, x)                              \
	do {                                         \
		__typeof__(&(list)) at_ = &(list);   \
		while (*at_ != (x))                  \
			at_ = &(*at_)->next;         \
		*at_ = (x)->next;                    \
	} while (0)

enum {
	MAX_ADDRESSES = 64, /* addresses of a device */
	MAX_INLINE = 1024, /* bytes of inline data, gathered by the library */
	CLOSE_WAIT_MS = 12000, /* time a connection has to close after its QP is destroyed; the daemon waits for 10 s, and then reports it */
};

/* settings.c */

struct settings {
	bool off;  /* no devices of iwarpd */
	bool roce; /* devices appear as RoCE: programs that connect with ibv_modify_qp refuse iWARP devices */
	enum { MEMORY_AUTO, MEMORY_NEAR, MEMORY_FAR } memory;
	uint32_t receive_wait; /* how long a Send of the peer waits for its receive, in ms */
	char *sockets;         /* of daemons, with commas between them; NULL: look for them */
	char *log;             /* a file, "1" for standard error, or NULL */
};

/*
 * iwv_settings returns what the environment says. The first call reads it, and complains about
 * values that it ignores.
 */
const struct settings *iwv_settings(void);

/* log.c */

/* log_check complains if the log cannot be written. */
void log_check(const char *log);

/* iwv_complain writes a line to standard error. It is for mistakes that would have no other effect. */
__attribute__((format(printf, 1, 2))) void iwv_complain(const char *format, ...);

/*
 * iwv_log writes a line to the file that IWARPD_VERBS_LOG names, or to standard error if
 * it is 1.
 */
__attribute__((format(printf, 1, 2))) void iwv_log(const char *format, ...);

/* iwv_fail logs an error of libiwarpd. It sets errno to -err, which is positive, and returns it. */
int iwv_fail(int err, const char *what, const struct iwarpd_error *e);

/* iwv_unsupported logs that what is not supported. It sets errno to EOPNOTSUPP and returns it. */
int iwv_unsupported(const char *what);

/* time_us returns the time since some moment, in microseconds. */
static inline int64_t time_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000) + t.tv_nsec / 1000;
}

static inline uint64_t least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* real.c */

/* real_verbs_symbol returns a function of the distribution's libibverbs, or NULL. */
void *real_verbs_symbol(const char *name);

/* REAL(f) is the distribution's f, or NULL if it has none. */
#define REAL(f) ((__typeof__(&f))real_verbs_symbol(#f))

/* OTHERS(ctx, f, args) returns from a function by calling the distribution's f for objects of contexts that are not iwarpd's. */
#define OTHERS(ctx, f, ...)                              \
	do {                                             \
		if (!is_ours(ctx))                   \
			return REAL(f)(__VA_ARGS__);     \
	} while (0)

/* queue.c */

/* A queue_item is the first member of each event. */
struct queue_item {
	struct queue_item *next;
};

/* An event_queue has a descriptor that is readable while the queue holds an item. iwv_thread_lock guards its items. */
struct event_queue {
	struct queue_item *first, **last;
	int fd; /* an eventfd that counts the items, or -1: see iwv_queue_after_fork */
};

int iwv_queue_init(struct event_queue *q); /* returns the descriptor, or -1 with errno set */
void iwv_queue_close(struct event_queue *q); /* unless the program has closed the descriptor */
void iwv_queue_put(struct event_queue *q, struct queue_item *item);

/*
 * iwv_queue_next waits for an item and removes it. taken is called with the lock held, which the caller does not hold.
 * It returns NULL with errno set if the descriptor has O_NONBLOCK and there is none, or if a signal handler ran.
 */
struct queue_item *iwv_queue_next(struct event_queue *q, void (*taken)(struct queue_item *item));

/*
 * iwv_queue_after_fork empties the queue in the child of a fork, and gives it a descriptor of its own, with the same number, or
 * none. The items are the parent's.
 */
void iwv_queue_after_fork(struct event_queue *q);

/* fd_mark marks an eventfd or epoll of the library, and fd_marked reports whether fd is one, and not a file of the program. */
void fd_mark(int fd);
bool fd_marked(int fd);

int iwv_eventfd(int flags); /* makes a marked eventfd that is closed on exec, or returns -1 with errno set */

/*
 * iwv_eventfd_after_fork makes fd an eventfd of the child of a fork alone, with a count of 0; type is EFD_SEMAPHORE or 0. It returns
 * false after closing fd if it cannot, and without touching fd if the program has closed it.
 */
bool iwv_eventfd_after_fork(int fd, int type);

/* iwv_queue_take removes all items for which match returns true, and returns them as a list. */
struct queue_item *iwv_queue_take(struct event_queue *q, bool (*match)(struct queue_item *item, void *arg), void *arg);

/* device.c */

/* A device is an interface of a daemon. It is never freed. */
struct device {
	struct ibv_device ibv;
	_Atomic(struct device *) next;
	char socket[108];
	char interface[64];
	char addresses[MAX_ADDRESSES][64]; /* "address/length"; see iwv_device_address */
	atomic_uint num_addresses;
	_Atomic uint64_t guid;
	atomic_uint seen; /* the last scan that has found it */
	atomic_bool present;
	struct context *cm; /* of librdmacm; it stays open, since ids use it; guarded by iwv_thread_lock */
};

enum {
	QP_NUMS = 1 << 24,
	NUMBERS = 1 << 12,
};

/* QPs with consecutive numbers. */
struct numbers {
	_Atomic(struct qp *) qp[NUMBERS];
};

/* A context is a connection to a daemon. */
struct context {
	struct iwarpd_device *dev;
	struct device *device;
	struct iwarpd_device_attr attr; /* its strings belong to the iwarpd_device */
	struct context *next;  /* list of all contexts, of thread.c */
	struct event_queue async;
	atomic_bool gone;     /* the daemon has ended */
	_Atomic uint32_t sender; /* number of the QP that sent last */
	atomic_uint sends;       /* that it has posted without one of another QP; answer.c counts no further than it needs */
	struct cq *cqs;       /* this and the members below are guarded by iwv_thread_lock */
	struct channel *channels; /* completion channels */
	struct srq *srqs;
	struct qp *qps;       /* QPs of the program */
	struct qp *closing;   /* destroyed QPs whose connections are still closing */
	_Atomic(struct numbers *) numbers[QP_NUMS / NUMBERS]; /* of QPs of the program; freed with the context */
	struct ibv_pd *pd;    /* of librdmacm, for ids whose program has created none; or NULL */
	atomic_bool inherited; /* the parent of this process has opened it and made no object; dev is NULL */
	bool shown;           /* the program may use it, if it is librdmacm's */
	struct verbs_context v; /* its last member is the ibv_context */
};

struct context *iwv_context_of(struct ibv_context *ibv);

/*
 * context_own opens the device of an inherited context, as in a program that has become a daemon. It returns false with errno if it
 * cannot.
 */
bool context_own(struct context *c);

/* iwv_context_close frees a context. The lock is held. */
void iwv_context_close(struct context *c);

/* is_ours reports whether a context is one of iwarpd's. */
bool is_ours(const struct ibv_context *ibv);

/*
 * A scan looks for all daemons, which takes milliseconds, for those that the last scan has not found, or for none. That
 * of the library's thread does not wait for a daemon that is starting.
 */
enum scan { SCAN_ALL, SCAN_NEW, SCAN_NONE, SCAN_BY_THREAD };

/*
 * iwv_devices_scan looks for daemons. It returns the list of all devices, including those no longer present. A daemon
 * may take seconds to answer, so the lock is not held, but for SCAN_NONE.
 */
struct device *iwv_devices_scan(enum scan how);

/* iwv_context_open opens a device. It returns NULL, with errno set, if it cannot. The lock is not held here either. */
struct context *iwv_context_open(struct device *d, enum scan how);

/* devices_forget records that the daemon of a device has ended. */
void devices_forget(const struct device *d);

/* devices_after_fork_child makes the list usable in the child, which opens the devices again. */
void devices_after_fork_child(void);

/* iwv_device_address stores address i of a device, and reports whether there is one. */
bool iwv_device_address(const struct device *d, unsigned int i, struct sockaddr_storage *a);

/* put_gid stores the GID of address index of a device. It returns -1 if there is none. */
int put_gid(const struct context *c, unsigned int index, union ibv_gid *gid);

/* async.c */

int async_init(struct context *c);
void async_close(struct context *c);
void async_error(struct context *c, const struct iwarpd_event *ev);
void async_terminated(struct context *c, const struct iwarpd_event *ev);
void async_fatal(struct context *c);

/* async_last_recv reports that a QP has used its last receive of an SRQ. */
void async_last_recv(struct qp *qp);

/*
 * async_drop drops the events of an object that is being destroyed, and waits until the program has
 * acknowledged those that it has taken. iwv_thread_lock is held.
 */
void async_drop(struct context *c, const void *element, const unsigned int *unacknowledged);

/* thread.c */

/*
 * iwv_thread_lock guards the lists of objects, the state of all connections, and the pages of
 * near memory. The library's thread holds it while it takes and handles an event, so a thread
 * that holds it may free an object, and the library's thread writes to no memory meanwhile. A
 * thread cannot be canceled while it holds the lock, which nobody would release.
 */
void iwv_thread_lock(void);
void iwv_thread_unlock(void);

/* iwv_thread_wait releases the lock until iwv_thread_wake is called, when the program acknowledges an event. */
void iwv_thread_wait(void);
void iwv_thread_wake(void);

/*
 * iwv_acknowledge counts down the unacknowledged events of an object, and wakes those that wait. The child of a fork begins with none,
 * and may acknowledge those of its parent. The lock is held.
 */
void iwv_acknowledge(unsigned int *count);

/* thread_serve makes the library's thread take the events of a context. The lock is held. */
int thread_serve(struct context *c);

/* thread_forget undoes thread_serve. The thread does not use the context after it returns. The lock is held. */
void thread_forget(struct context *c);

/*
 * thread_gone handles the waiting events of a context, and reports whether its daemon has ended. libiwarpd has freed an
 * object then, though it failed to destroy it. The lock is held.
 */
bool thread_gone(struct context *c);

/* daemon_gone is thread_gone for callers without the lock. */
bool daemon_gone(struct ibv_context *ibv);

/* thread_opens adds n to the number of scans, and of devices that are being opened, for which a fork waits. */
void thread_opens(int n);

/* thread_runs reports whether this process has the library's thread. The lock is held. */
bool thread_runs(void);

/* thread_rest waits until the library's thread does nothing without the lock, which is held. */
void thread_rest(void);

/*
 * iwv_thread_set_cm sets the handler of connection events, which is called under the lock, and a function that is
 * called each second, without it. ev is NULL if the daemon has ended.
 */
typedef void cm_handler(struct context *c, const struct iwarpd_event *ev);
typedef void cm_timer(void);
void iwv_thread_set_cm(cm_handler *handler, cm_timer *timer);

/* near.c: memory of the program that the daemon maps */

/*
 * near_get moves those pages of a range into the memfd that are not there yet, where their offset equals their address.
 * It returns the memfd, or a negative errno value: -EOPNOTSUPP for memory that cannot be moved. The daemon of dev may
 * provide the userfaultfd.
 */
int near_get(struct iwarpd_device *dev, uintptr_t addr, size_t length, bool writable);

/* near_put makes the pages of a range private again where no other region uses them. */
void near_put(uintptr_t addr, size_t length);

/* fork calls these with the lock held. The child gets a copy of the pages. */
void near_before_fork(void);
void near_after_fork_parent(void);
void near_after_fork_child(void);

/* far_check returns 0 if the program may read, or write, all of the range, or -EFAULT. */
int far_check(uintptr_t addr, size_t length, bool writable);

/* cq.c */

/* A completion made by the library, or kept by it. */
struct late {
	struct late *next;
	struct ibv_wc wc;
};

/*
 * The wr_id of work requests that the library adds. Their completions are not shown to
 * the program.
 */
#define HIDDEN_WR ((uint64_t)(uintptr_t)&hidden_wr)
extern const char hidden_wr;

/* What is known of the answers to the Writes of a CQ. */
struct answers {
	_Atomic uint32_t received; /* iwarpd_received when the last send was posted */
	unsigned int quick; /* Writes in a row that were answered soon */
	unsigned int vain;  /* waits without an answer since the last one that had one */
	unsigned int rest;  /* completions without an answer that do not wait */
};

struct cq {
	struct ibv_cq ibv;
	struct iwarpd_cq *q;
	struct cq *next;
	uint32_t depth; /* depth of q; grows with need up to ibv.cqe */
	uint64_t need;  /* most completions that its QPs can have outstanding; guarded by iwv_thread_lock */
	unsigned int unacknowledged; /* asynchronous events that the program has taken; guarded by iwv_thread_lock */
	pthread_mutex_t lock; /* held while polling, arming and disarming; guards the late completions */
	struct late *late, **last_late; /* come after the completions of the daemon */
	uint32_t received;              /* iwarpd_received when it was armed, if it has a channel */
	unsigned int empty;      /* polls in a row that found nothing */
	struct answers answers;  /* guarded by lock, but for received */
};

/* cq_of returns the CQ of an ibv_cq. */
static inline struct cq *cq_of(struct ibv_cq *ibv)
{
	return container_of(ibv, struct cq, ibv);
}

/* cq_grow enlarges a CQ for the completions that it needs. iwv_thread_lock is held. */
int cq_grow(struct ibv_cq *ibv, struct iwarpd_error *e);

/* cq_late adds a list of completions. */
void cq_late(struct ibv_cq *ibv, struct late *list);
void free_late(struct late *list);

/* cq_flush adds a flushed completion for a work request that the daemon cannot flush, because it is gone. */
int cq_flush(struct ibv_cq *ibv, struct ibv_qp *qp, uint64_t wr_id, enum ibv_wc_opcode opcode);

/* cq_forget drops the completions of a QP that has been destroyed, which needed n. iwv_thread_lock is held. */
void cq_forget(struct ibv_cq *ibv, uint32_t qp, uint64_t n);

/* cqs_after_fork unlocks the CQs and completion channels of a context in the child of a fork. */
void cqs_after_fork(const struct context *c);

/*
 * iwv_interrupts reports whether a signal must end a call that waits by poll(2), which is never restarted. The kernel's
 * verbs use read(2), which handlers with SA_RESTART restart.
 */
bool iwv_interrupts(void);

int poll_cq(struct ibv_cq *ibv, int n, struct ibv_wc *wc);
int req_notify_cq(struct ibv_cq *ibv, int solicited_only);

/* answer.c */

/* answer_posted notes that qp posts a send, which nothing that has been received until now answers. */
void answer_posted(struct qp *qp);

/*
 * answer_wait returns for how many microseconds a completed Write is to wait for the peer's
 * answer, or 0. The lock of cq is held.
 */
int answer_wait(struct cq *cq);

/* await_answer waits until there is an answer, for at most us microseconds. The lock of cq is not held. */
void await_answer(struct cq *cq, int us);

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
	struct srq *next;
	pthread_mutex_t lock; /* held while posting */
	struct ibv_srq_attr attr; /* srq_limit is guarded by iwv_thread_lock */
	unsigned int unacknowledged; /* asynchronous events that the program has taken; guarded by iwv_thread_lock */
};

static inline struct srq *srq_of(struct ibv_srq *ibv)
{
	return container_of(ibv, struct srq, ibv);
}

/* State of the connection of a QP. CONN_OVER is also that of a QP in the error state that has had none. */
enum connection { CONN_NONE, CONN_MAKING, CONN_UP, CONN_CLOSING, CONN_OVER };

struct qp {
	struct ibv_qp ibv;
	struct iwarpd_qp *q;
	struct context *ctx;
	struct qp *next;
	struct ibv_qp_attr attr; /* but for the state; what ibv_modify_qp sets is guarded by iwv_thread_lock */
	bool sig_all;
	uint32_t recvs;    /* most receive completions outstanding: each QP of an SRQ may use all of its receives */
	_Atomic uint32_t signaled; /* sends that were posted and report success; changes under send_lock */
	_Atomic uint32_t receives; /* that were posted to the QP; changes under recv_lock */
	/* Completions that the program has polled; they change under the locks of the CQs. */
	_Atomic uint32_t polled, received; /* of sends, and of receives */
	_Atomic(void *) cm; /* librdmacm's id, or NULL */
	uint32_t half_status, half_vendor; /* see shown, in cq.c; guarded by the lock of the CQ */
	atomic_int conn;    /* enum connection */
	atomic_bool posted; /* work requests, which the daemon has */
	atomic_bool immediate; /* a Send with Invalidate carries Immediate Data, both ways: see exchange.c */
	int64_t deadline;   /* when a closing connection is cut, in ms */
	struct exchange *exchange; /* connection by ibv_modify_qp, or NULL */
	unsigned int unacknowledged; /* asynchronous events that the program has taken; guarded by iwv_thread_lock */
	pthread_mutex_t send_lock, recv_lock;
};

static inline struct qp *qp_of(struct ibv_qp *ibv)
{
	return container_of(ibv, struct qp, ibv);
}

/* count adds one to a counter of a QP, whose lock is held. */
static inline void count(_Atomic uint32_t *n)
{
	atomic_store_explicit(n, atomic_load_explicit(n, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* outstanding returns by how much one of two counters of a QP is ahead of the other. */
static inline int32_t outstanding(const _Atomic uint32_t *posted, const _Atomic uint32_t *polled)
{
	uint32_t n = atomic_load_explicit(posted, memory_order_relaxed);

	return (int32_t)(n - atomic_load_explicit(polled, memory_order_relaxed));
}

/* qp_plain reports whether init asks for nothing that ibv_create_qp does not do. */
static inline bool qp_plain(const struct ibv_qp_init_attr_ex *init)
{
	if (init->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && init->create_flags)
		return false;
	return !(init->comp_mask & ~(uint32_t)(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS));
}

/*
 * qps_failed moves the QPs of failed ones of n completions to the error state. The end of the connection, which they precede, may
 * be reported much later.
 */
void qps_failed(struct context *c, const struct ibv_wc *wc, int n);

struct ibv_qp *create_qp_ex(struct ibv_context *ctx, struct ibv_qp_init_attr_ex *init);

/*
 * qp_numbered returns the QP of the program that has the number num, or NULL. It is not freed while iwv_thread_lock or
 * the lock of one of its CQs is held.
 */
static inline struct qp *qp_numbered(const struct context *c, uint32_t num)
{
	struct numbers *n = atomic_load_explicit(&c->numbers[num % QP_NUMS / NUMBERS], memory_order_acquire);

	return n ? atomic_load_explicit(&n->qp[num % NUMBERS], memory_order_acquire) : NULL;
}

/* The functions from here to qp_free_closing are called with the lock held. */

/* iwv_qp_of_event returns the QP of an event, or NULL. */
struct qp *iwv_qp_of_event(const struct iwarpd_event *ev);

/* iwv_qp_disconnect ends the connection of a QP, if it has one. */
int iwv_qp_disconnect(struct qp *qp, bool abort, struct iwarpd_error *e);

/* qp_event updates the state of a QP after the connection manager has handled the event. */
void qp_event(const struct iwarpd_event *ev);

/*
 * qp_permit lets the peer do what access flags say, and no more, and invalidate keys unless its Send with Invalidate
 * carries Immediate Data. The lock is held.
 */
int qp_permit(struct qp *qp, unsigned int access, bool immediate, struct iwarpd_error *e);

/* qps_after_fork unlocks the QPs and SRQs of a context in the child of a fork. */
void qps_after_fork(const struct context *c);

/* qp_expire frees the destroyed QPs whose connections have closed, or have not closed in time. */
void qp_expire(struct context *c);

/* qp_free_closing frees the destroyed QPs of a context that is being closed. What they have sent arrives. */
void qp_free_closing(struct context *c);

/*
 * exchange.c: connections made by ibv_modify_qp. All but exchange_hold are called with
 * the lock held.
 */

/* exchange_listen makes a QP in the state INIT listen for its peer. */
int exchange_listen(struct qp *qp);

/* exchange_connect connects a QP to the one that attr names, on the transition to RTR. */
int exchange_connect(struct qp *qp, const struct ibv_qp_attr *attr);

/* exchange_end frees the exchange state of a QP. */
void exchange_end(struct qp *qp);

/* iwv_exchange_leave does so for a QP that librdmacm connects. */
void iwv_exchange_leave(struct qp *qp);

/*
 * exchange_hold keeps a receive that was flushed because the peer has left, until the
 * program moves the QP to the error state: a QP of InfiniBand does not notice that its
 * peer leaves. It returns false if the completion is to be shown now. The lock of the CQ
 * is held.
 */
bool exchange_hold(struct qp *qp, const struct ibv_wc *wc);

/* exchange_show adds the held completions to the CQ. */
void exchange_show(struct qp *qp);

/* exchange_event handles an event of such a connection, and reports whether it was one. */
bool exchange_event(struct context *c, const struct iwarpd_event *ev);

/* wr.c */

int post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int post_srq_recv(struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

#endif
