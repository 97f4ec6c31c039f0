/*
 * libiwarpd: RDMA (iWARP) through the daemon iwarpd, at the verbs level.
 *
 * Work requests and completions are passed through memory shared with the daemon:
 * posting and polling make no system call while the daemon's worker is awake.
 * Everything else uses the daemon's socket. See iwarpd(3).
 *
 * Functions that return int return 0 or a count, or a negative errno value. Those
 * with a last argument e also store details in *e; e may be NULL.
 *
 * Threads: every function may be called from any thread, with these exceptions. The
 * send queue of a QP, its receive queue, an SRQ and a CQ may each be used by one
 * thread at a time, and an object must not be used while or after it is destroyed. When
 * the daemon is gone, a function that destroys an object frees it and returns -EPIPE.
 *
 * Zero structures before filling them in: zero means the default, unless documented
 * otherwise, and later versions of the library add members only in reserved space.
 */
#ifndef IWARPD_H
#define IWARPD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define IWARPD_API __attribute__((visibility("default")))
#else
#define IWARPD_API
#endif

#define IWARPD_SOCKET "/run/iwarpd/iwarpd.sock" /* of iwarpd_open(NULL, ...) */

#define IWARPD_MAX_PRIVATE_DATA 512 /* bytes */

struct iwarpd_device;   /* a client of a daemon; owns all objects created with it */
struct iwarpd_pd;       /* protection domain */
struct iwarpd_cq;       /* completion queue */
struct iwarpd_channel;  /* completion channel: wake-ups for several completion queues */
struct iwarpd_qp;       /* queue pair */
struct iwarpd_srq;      /* shared receive queue */
struct iwarpd_listener; /* endpoint that receives connect requests */

/* Details of a failure. */
struct iwarpd_error {
	int err;        /* negative errno value; 0: nothing failed */
	int code;       /* enum iwarpd_code of the daemon; 0: not from the daemon */
	char text[248]; /* one-line description */
};

/* The daemon's codes (ctrl/iwarpd.proto), and the errno value of each. */
enum iwarpd_code {
	IWARPD_CODE_INVALID = 1,     /* EINVAL: invalid request */
	IWARPD_CODE_NO_OBJECT = 2,   /* ENOENT */
	IWARPD_CODE_PERMISSION = 3,  /* EACCES: not allowed for this uid */
	IWARPD_CODE_QUOTA = 4,       /* EDQUOT: quota of this uid exceeded */
	IWARPD_CODE_PORT_IN_USE = 5, /* EADDRINUSE */
	IWARPD_CODE_ADDRESS = 6,     /* EADDRNOTAVAIL: not an address of the interface */
	IWARPD_CODE_UNREACHABLE = 7, /* EHOSTUNREACH */
	IWARPD_CODE_TIMEOUT = 8,     /* ETIMEDOUT */
	IWARPD_CODE_REFUSED = 9,     /* ECONNREFUSED, or ECONNRESET once established */
	IWARPD_CODE_REJECTED = 10,   /* ECONNABORTED: rejected by the peer's program */
	IWARPD_CODE_STATE = 11,      /* EBADFD: not possible in this state of the object */
	IWARPD_CODE_BUSY = 12,       /* EBUSY: the object is in use */
	IWARPD_CODE_VERSION = 13,    /* EPROTONOSUPPORT */
	IWARPD_CODE_PROTOCOL = 14,   /* EPROTO: the peer violated the MPA start-up or SCTP */
	IWARPD_CODE_INTERNAL = 15,   /* EIO: internal error of the daemon or the host */
	IWARPD_CODE_CANCELED = 16,   /* ECANCELED */
	IWARPD_CODE_DRAINING = 17,   /* ESHUTDOWN: the daemon is stopping; see IWARPD_EVENT_DRAINING */
};

/* Device. */

struct iwarpd_device_attr {
	const char *server;    /* name and version of the daemon */
	const char *interface; /* served by the daemon; "" over kernel sockets */
	const char *const *addresses; /* of the interface, ended by NULL */
	uint32_t client;       /* number of this client in the daemon's lists */
	uint32_t workers;
	uint32_t mtu;
	uint32_t max_qp, max_cq, max_pd, max_mr, max_mw, max_listen;
	uint32_t max_qp_wr, max_cqe, max_sge;
	uint32_t max_inline;       /* bytes */
	uint32_t max_ird, max_ord;
	uint32_t max_private_data; /* bytes */
	uint64_t max_mr_size;      /* bytes of a region */
	uint64_t max_registered;   /* bytes of all regions of the uid */
};

/*
 * Connects to the daemon at a socket; NULL means $IWARPD_SOCKET, or IWARPD_SOCKET
 * if that is not set. name is shown in the daemon's list of clients; NULL means the
 * name of the program. Returns -ENOENT or -ECONNREFUSED if no daemon runs there.
 */
IWARPD_API int iwarpd_open(const char *socket, const char *name, struct iwarpd_device **dev, struct iwarpd_error *e);

/*
 * Like iwarpd_open, but gives the daemon timeout_ms to answer, or any time if that is
 * negative. A daemon that is starting takes connections up to some seconds before it
 * answers. Returns -ETIMEDOUT if it has not answered, and -EAGAIN if too many
 * connections wait for it already.
 */
IWARPD_API int iwarpd_open_within(const char *socket, const char *name, int timeout_ms, struct iwarpd_device **dev,
				  struct iwarpd_error *e);

/*
 * Like iwarpd_open, but waits up to timeout_ms, or indefinitely if that is
 * negative, for a daemon that is not running yet or being restarted; 0 means a single
 * attempt. Returns -ETIMEDOUT if none answered. Errors that waiting cannot fix are
 * returned at once, and -EACCES after a second attempt, since a daemon that starts permits
 * access a moment after it has made the socket. After -EPIPE or IWARPD_EVENT_DRAINING, a
 * program calls iwarpd_close and this function, and creates its objects again.
 */
IWARPD_API int iwarpd_open_wait(const char *socket, const char *name, int timeout_ms, struct iwarpd_device **dev,
				struct iwarpd_error *e);

/*
 * Returns a number that changes when data of a peer has been placed for a queue pair of
 * the program, also where that makes no completion, as with RDMA Writes. With a daemon
 * older than this function it never changes.
 */
IWARPD_API uint32_t iwarpd_received(const struct iwarpd_device *dev);

/*
 * Yields the CPU, and returns whether that may help the daemon: whether another
 * thread took the CPU, or a worker sleeps. A program that waits for a peer's Write
 * by looking at its memory calls this in between, since a worker on the same CPU
 * cannot receive the Write otherwise.
 */
IWARPD_API bool iwarpd_yield(const struct iwarpd_device *dev);

/*
 * Separates the child of a fork from a device of its parent: what it does with it has no effect on the parent. The
 * child calls it before any other function for the device, which is then as if the daemon had ended. iwarpd_close closes
 * no descriptor that the child has closed itself, as daemons do with all. Returns whether the device has objects.
 */
IWARPD_API bool iwarpd_after_fork(struct iwarpd_device *dev);

/* Disconnects from the daemon. All connections are reset and all objects freed. */
IWARPD_API void iwarpd_close(struct iwarpd_device *dev);

/* Returns the attributes of the interface of iwarpd_use, or else of the first one. */
IWARPD_API const struct iwarpd_device_attr *iwarpd_query_device(const struct iwarpd_device *dev);

/*
 * Returns the attributes of interface i of those that the daemon served when the
 * device was opened, counted from 0, or NULL if there are not that many.
 */
IWARPD_API const struct iwarpd_device_attr *iwarpd_query_interface(const struct iwarpd_device *dev, unsigned int i);

/*
 * Makes connects and listeners use one interface of the daemon from now on. Without
 * it, or after NULL, a connection takes the interface that the host's route to the
 * peer names, and a listener listens on all. Regions, queue pairs and completion
 * queues do not belong to an interface. Returns -ENODEV if the daemon does not serve
 * the interface.
 */
IWARPD_API int iwarpd_use(struct iwarpd_device *dev, const char *interface, struct iwarpd_error *e);

/* Protection domains. */

IWARPD_API int iwarpd_alloc_pd(struct iwarpd_device *dev, struct iwarpd_pd **pd, struct iwarpd_error *e);
IWARPD_API int iwarpd_dealloc_pd(struct iwarpd_pd *pd, struct iwarpd_error *e); /* -EBUSY while in use */

/* Memory. */

enum iwarpd_access { /* local read is always granted */
	IWARPD_LOCAL_WRITE = 1,
	IWARPD_REMOTE_WRITE = 2,  /* needs LOCAL_WRITE */
	IWARPD_REMOTE_READ = 4,
	IWARPD_REMOTE_ATOMIC = 8, /* needs LOCAL_WRITE */
	IWARPD_MW_BIND = 16,
	IWARPD_ZERO_BASED = 32,   /* tagged offsets start at 0 */
	IWARPD_IGNORE_INVALIDATE = 0x10000, /* of iwarpd_modify_qp only */
};

struct iwarpd_mr {
	void *addr;      /* the memory; NULL if iwarpd_reg_mr did not get an address */
	uint64_t length; /* bytes */
	uint64_t base;   /* address of the first byte in work requests, local and of the peer */
	uint32_t lkey;   /* for SGEs */
	uint32_t rkey;   /* for the peer: the STag */
};

struct iwarpd_mr_attr {
	int fd;          /* a memfd that can be sealed; owned by the caller */
	uint64_t offset; /* in fd */
	uint64_t length; /* bytes, 1 to 2^32 - 1 */
	void *addr;      /* the caller's mapping; may be NULL */
	uint64_t base;   /* address of the first byte; 0 with IWARPD_ZERO_BASED */
	unsigned int access; /* enum iwarpd_access */
	bool fast;       /* for IWARPD_WR_REG: invalid until then */
	/*
	 * Register any memory of this process, at addr; fd and offset are not used. The
	 * daemon copies it through /proc/self/mem, which is slower. No atomics.
	 */
	bool far;
	/*
	 * fd is one memfd for all such regions of the device, in which the caller has
	 * allocated the pages. The daemon gets it once, so that a region costs less.
	 */
	bool near;
};

/* Allocates and registers length bytes of memory; base is its address. */
IWARPD_API int iwarpd_alloc_mr(struct iwarpd_pd *pd, size_t length, unsigned int access, struct iwarpd_mr **mr,
			       struct iwarpd_error *e);

/* Registers memory in a memfd of the caller, which is sealed against shrinking, or far memory. */
IWARPD_API int iwarpd_reg_mr(struct iwarpd_pd *pd, const struct iwarpd_mr_attr *attr, struct iwarpd_mr **mr,
			     struct iwarpd_error *e);

/* Deregisters a region, and frees its memory if iwarpd_alloc_mr allocated it. */
IWARPD_API int iwarpd_dereg_mr(struct iwarpd_mr *mr, struct iwarpd_error *e);

/*
 * Opens /dev/userfaultfd through the daemon, for programs that may not open it. The
 * caller owns *fd, and makes a userfaultfd by ioctl(*fd, USERFAULTFD_IOC_NEW).
 * -EPERM: the daemon's configuration forbids it.
 */
IWARPD_API int iwarpd_open_userfaultfd(struct iwarpd_device *dev, int *fd, struct iwarpd_error *e);

struct iwarpd_mw {
	uint32_t rkey; /* the caller may change the low byte with each binding */
};

/* A memory window of type 2, bound by IWARPD_WR_BIND_MW. */
IWARPD_API int iwarpd_alloc_mw(struct iwarpd_pd *pd, struct iwarpd_mw **mw, struct iwarpd_error *e);
IWARPD_API int iwarpd_dealloc_mw(struct iwarpd_mw *mw, struct iwarpd_error *e);

/* Completion queues. */

enum iwarpd_wc_status { /* values of libibverbs' IBV_WC_* */
	IWARPD_WC_SUCCESS = 0,
	IWARPD_WC_LOC_LEN_ERR = 1,
	IWARPD_WC_LOC_QP_OP_ERR = 2,
	IWARPD_WC_LOC_PROT_ERR = 4,
	IWARPD_WC_WR_FLUSH_ERR = 5, /* the connection ended before */
	IWARPD_WC_MW_BIND_ERR = 6,
	IWARPD_WC_BAD_RESP_ERR = 7,
	IWARPD_WC_LOC_ACCESS_ERR = 8,
	IWARPD_WC_REM_INV_REQ_ERR = 9,
	IWARPD_WC_REM_ACCESS_ERR = 10,
	IWARPD_WC_REM_OP_ERR = 11,
	IWARPD_WC_FATAL_ERR = 19,
	IWARPD_WC_GENERAL_ERR = 21,
};

enum iwarpd_wc_opcode {
	IWARPD_WC_SEND = 0,
	IWARPD_WC_RDMA_WRITE = 1,
	IWARPD_WC_RDMA_READ = 2,
	IWARPD_WC_COMP_SWAP = 3,
	IWARPD_WC_FETCH_ADD = 4,
	IWARPD_WC_BIND_MW = 5,
	IWARPD_WC_LOCAL_INV = 6,
	IWARPD_WC_IMM = 64,
	IWARPD_WC_REG = 65,
	IWARPD_WC_RECV = 128,
};

enum iwarpd_wc_flags {
	IWARPD_WC_WITH_IMM = 2,
	IWARPD_WC_WITH_INV = 8,
	IWARPD_WC_SOLICITED = 128,
};

struct iwarpd_wc {
	uint64_t id;     /* of the work request */
	uint32_t status; /* enum iwarpd_wc_status */
	uint32_t opcode; /* enum iwarpd_wc_opcode */
	uint32_t len;    /* bytes received or read */
	uint32_t qp;     /* number of the QP */
	uint32_t flags;  /* enum iwarpd_wc_flags */
	uint32_t inv_key; /* with IWARPD_WC_WITH_INV: the key that the peer invalidated */
	uint64_t imm;    /* with IWARPD_WC_WITH_IMM */
	uint32_t vendor; /* with an error: the Terminate that caused it; see docs/api.md */
	uint32_t reserved[5];
};

/*
 * depth is the number of completions that the queue can hold. If it overflows, the
 * connections of its QPs end.
 */
IWARPD_API int iwarpd_create_cq(struct iwarpd_device *dev, uint32_t depth, struct iwarpd_cq **cq, struct iwarpd_error *e);
IWARPD_API int iwarpd_destroy_cq(struct iwarpd_cq *cq, struct iwarpd_error *e);

/*
 * Stores up to n completions and returns their number. Does not block. May return -EPIPE
 * if the daemon is gone, or has cut this client off: then there are no more.
 */
IWARPD_API int iwarpd_poll_cq(struct iwarpd_cq *cq, struct iwarpd_wc *wc, int n);

/*
 * Removes the completions of the QP with this number. Those of a QP that has been
 * destroyed, or left, take up room in the queue otherwise until they are polled.
 */
IWARPD_API void iwarpd_clean_cq(struct iwarpd_cq *cq, uint32_t qp);

/*
 * Like iwarpd_poll_cq, but waits for a completion, up to timeout_ms, or
 * indefinitely if that is negative. Returns -ETIMEDOUT after the timeout, -EPIPE if
 * the daemon is gone, and -EINVAL if the queue is empty and belongs to a channel.
 */
IWARPD_API int iwarpd_wait_cq(struct iwarpd_cq *cq, struct iwarpd_wc *wc, int n, int timeout_ms);

/*
 * Makes iwarpd_cq_fd readable at the next completion, or at the next one that is
 * solicited or failed. Earlier completions do not count, so poll the queue once
 * more before sleeping. The bytes read from the descriptor have no meaning. A queue
 * of a channel wakes the channel, once, and has the channel's descriptor.
 */
IWARPD_API void iwarpd_arm_cq(struct iwarpd_cq *cq, bool solicited_only);

/* Undoes iwarpd_arm_cq. Returns false if the queue is not armed, or its wake-up comes anyway. */
IWARPD_API bool iwarpd_disarm_cq(struct iwarpd_cq *cq);
IWARPD_API int iwarpd_cq_fd(const struct iwarpd_cq *cq);

/* Number of completions lost because the queue was full. */
IWARPD_API uint32_t iwarpd_cq_overruns(const struct iwarpd_cq *cq);

/*
 * Makes room for depth completions; pending ones are kept. The queue must be armed
 * again. If the process lacks memory or a descriptor, the queue stays as it is.
 */
IWARPD_API int iwarpd_resize_cq(struct iwarpd_cq *cq, uint32_t depth, struct iwarpd_error *e);

/*
 * Moderation: an armed queue wakes its client after count completions, or period_us
 * after the first of them, but at once for a solicited or failed one. 0 for either
 * disables moderation.
 */
IWARPD_API int iwarpd_modify_cq(struct iwarpd_cq *cq, uint32_t count, uint32_t period_us, struct iwarpd_error *e);

/*
 * Completion channels wait for several completion queues. They replace libibverbs'
 * ibv_create_comp_channel, ibv_req_notify_cq and ibv_get_cq_event. A program
 * creates a channel, and queues on it, and then
 *   1. arms each queue (iwarpd_arm_cq), and polls it until it is empty;
 *   2. waits with iwarpd_get_cq_event, or for iwarpd_channel_fd to be readable;
 *   3. repeats 1 for the queue that was returned.
 * Events need no acknowledgement.
 */

IWARPD_API int iwarpd_create_channel(struct iwarpd_device *dev, struct iwarpd_channel **channel, struct iwarpd_error *e);
IWARPD_API int iwarpd_destroy_channel(struct iwarpd_channel *channel, struct iwarpd_error *e); /* -EBUSY while it has queues */

/*
 * Like iwarpd_create_cq, for a queue that wakes this channel. context is for the
 * caller's use.
 */
IWARPD_API int iwarpd_create_cq_on(struct iwarpd_channel *channel, uint32_t depth, void *context, struct iwarpd_cq **cq,
				   struct iwarpd_error *e);
IWARPD_API void *iwarpd_cq_context(const struct iwarpd_cq *cq);

/*
 * Waits for an armed queue of the channel that has a completion, up to timeout_ms,
 * or indefinitely if that is negative. The queue is then disarmed, and may be
 * empty. Several threads may wait; each gets a different queue. Returns -ETIMEDOUT
 * after the timeout, -EPIPE if the daemon is gone, and -EINTR after a signal
 * handler ran.
 */
IWARPD_API int iwarpd_get_cq_event(struct iwarpd_channel *channel, struct iwarpd_cq **cq, int timeout_ms);

/* Makes iwarpd_get_cq_event return the queue, as a completion of an armed queue does. */
IWARPD_API void iwarpd_wake_cq(struct iwarpd_cq *cq);

/*
 * Descriptor for poll and epoll that is readable while a queue may be ready. Owned
 * by the channel.
 */
IWARPD_API int iwarpd_channel_fd(const struct iwarpd_channel *channel);

/*
 * Shared receive queues: several QPs of a PD take their receives from the same
 * queue.
 */

struct iwarpd_srq_attr {
	uint32_t depth;   /* work requests; 0: 64 */
	uint32_t max_sge; /* 0: 4 */
	uint32_t limit;   /* as for iwarpd_modify_srq */
	void *context;    /* returned by iwarpd_srq_context */
};

IWARPD_API int iwarpd_create_srq(struct iwarpd_pd *pd, const struct iwarpd_srq_attr *attr, struct iwarpd_srq **srq,
				 struct iwarpd_error *e);
IWARPD_API int iwarpd_destroy_srq(struct iwarpd_srq *srq, struct iwarpd_error *e); /* -EBUSY while a QP uses it */

/*
 * Arms the event ASYNC_ERROR with IWARPD_ASYNC_SRQ_LIMIT. It occurs once, when a
 * message leaves fewer than limit receives. 0 disarms it.
 */
IWARPD_API int iwarpd_modify_srq(struct iwarpd_srq *srq, uint32_t limit, struct iwarpd_error *e);
IWARPD_API void *iwarpd_srq_context(const struct iwarpd_srq *srq);

/* Queue pairs. A QP can have only one connection. */

struct iwarpd_qp_attr {
	struct iwarpd_cq *send_cq, *recv_cq; /* may be the same */
	struct iwarpd_srq *srq;              /* NULL: the QP has its own receive queue */
	uint32_t send_depth, recv_depth;     /* work requests; 0: 64 */
	uint32_t max_sge;                    /* 0: 4 */
	uint32_t max_inline;                 /* bytes */
	bool sig_all; /* all send work requests generate completions */
	bool flush_late; /* work requests posted after the end of the connection are flushed; otherwise posting them fails */
	/*
	 * How long a Send of the peer may wait for its receive over TCP, at most
	 * 60000; 0: a Send without a receive ends the connection.
	 */
	uint32_t receive_wait_ms;
	void *context; /* returned by iwarpd_qp_context */
};

IWARPD_API int iwarpd_create_qp(struct iwarpd_pd *pd, const struct iwarpd_qp_attr *attr, struct iwarpd_qp **qp,
				struct iwarpd_error *e);

/*
 * Sets which of the rights with IWARPD_REMOTE the peer may use on this QP, in regions and windows
 * that allow it: at first all. Other bits mean nothing. When it returns, the peer does nothing else.
 * With IWARPD_IGNORE_INVALIDATE a Send with Invalidate invalidates nothing: inv_key of its
 * completion is 32 bits of the peer's choice.
 */
IWARPD_API int iwarpd_modify_qp(struct iwarpd_qp *qp, uint32_t access, struct iwarpd_error *e);

/* Resets the connection. Outstanding work requests never complete, and a thread that reads from its byte stream returns. */
IWARPD_API int iwarpd_destroy_qp(struct iwarpd_qp *qp, struct iwarpd_error *e);

IWARPD_API uint32_t iwarpd_qp_num(const struct iwarpd_qp *qp); /* as in completions */
IWARPD_API void *iwarpd_qp_context(const struct iwarpd_qp *qp);

struct iwarpd_sge {
	uint64_t addr; /* base of the region + offset in it */
	uint32_t len;  /* bytes */
	uint32_t lkey;
};

enum iwarpd_wr_opcode {           /* with the fields used besides sge or inline_data: */
	IWARPD_WR_RDMA_WRITE = 0,    /* remote_addr, rkey */
	IWARPD_WR_SEND = 2,
	IWARPD_WR_RDMA_READ = 4,     /* remote_addr, rkey; one SGE */
	IWARPD_WR_CMP_SWAP = 5,      /* remote_addr, rkey, compare_add, swap, compare_mask, swap_mask; one SGE of 8 bytes */
	IWARPD_WR_FETCH_ADD = 6,     /* remote_addr, rkey, compare_add, swap_mask; one SGE of 8 bytes */
	IWARPD_WR_LOCAL_INV = 7,     /* inv_key; no SGE */
	IWARPD_WR_BIND_MW = 8,       /* rkey, access; one SGE: region and range */
	IWARPD_WR_SEND_WITH_INV = 9, /* inv_key */
	IWARPD_WR_IMM = 64,          /* imm; no SGE */
	IWARPD_WR_REG = 65,          /* rkey, remote_addr (the base), access; one SGE: offset and length */
};

enum iwarpd_wr_flags {
	IWARPD_FENCE = 1,     /* start after earlier Reads and atomics have completed */
	IWARPD_SIGNALED = 2,  /* report success too */
	IWARPD_SOLICITED = 4, /* SEND, SEND_WITH_INV, IMM: wakes a peer armed for solicited completions only */
	IWARPD_INLINE = 8,    /* inline_data instead of sge */

	/* Not of the API: post it only if there is room for the next work request of the list too. */
	IWARPD_WITH_NEXT = 256,
};

struct iwarpd_send_wr {
	uint64_t id;     /* returned in the completion */
	uint32_t opcode; /* enum iwarpd_wr_opcode */
	uint32_t flags;  /* enum iwarpd_wr_flags */
	const struct iwarpd_sge *sge;
	uint32_t num_sge;
	uint32_t inline_len;
	const void *inline_data; /* copied; may be reused when the call returns */
	uint64_t remote_addr;
	uint32_t rkey;
	uint32_t inv_key;
	uint64_t imm; /* most significant byte first on the wire */
	uint64_t compare_add;
	uint64_t swap;
	uint64_t compare_mask; /* UINT64_MAX: compare all bits */
	uint64_t swap_mask;    /* CMP_SWAP: UINT64_MAX: swap all bits; FETCH_ADD: 0: one number */
	uint32_t access;       /* enum iwarpd_access */
};

struct iwarpd_recv_wr {
	uint64_t id;
	const struct iwarpd_sge *sge;
	uint32_t num_sge;
};

/*
 * Post work requests. This is possible before the connection is established, but
 * sends start only then. The memory of the SGEs must not be used until the
 * completion.
 *   -EAGAIN    the queue is full: poll the CQ first
 *   -EMSGSIZE  more SGEs or inline data than the QP was created for
 *   -EINVAL    inline data without the flag, or both inline data and SGEs
 *   -ENOTCONN  the connection has ended, or the daemon is gone; with flush_late only the latter
 *   -EPROTO    the daemon has corrupted the queue
 * The completion of a Write means that its memory may be reused, not that the data
 * has been placed: the peer does not acknowledge a Write. If the peer's memory does
 * not allow it, the peer ends the connection with a Terminate. A Read after the
 * Write shows that it was placed. iwarpd_post_sends posts up to n work requests
 * with one doorbell and returns their number, or the error of the first.
 */
IWARPD_API int iwarpd_post_send(struct iwarpd_qp *qp, const struct iwarpd_send_wr *wr);
IWARPD_API int iwarpd_post_sends(struct iwarpd_qp *qp, const struct iwarpd_send_wr *wr, int n);
IWARPD_API int iwarpd_post_recv(struct iwarpd_qp *qp, const struct iwarpd_recv_wr *wr); /* -EINVAL with an SRQ */
IWARPD_API int iwarpd_post_srq_recv(struct iwarpd_srq *srq, const struct iwarpd_recv_wr *wr);

/* Connections. Addresses are strings: "192.0.2.1:7174", "[2001:db8::1]:7174". */

/*
 * Settings of the MPA negotiation. Zero, or NULL for the whole structure, means the
 * daemon's configuration. In crc, markers, fallback and p2p, 1 means yes and -1 no;
 * in ird and ord, -1 means none.
 */
struct iwarpd_startup {
	int crc;      /* no: a wish, which counts only where the daemon has "crc: optional"; the
	               * CRC is used all the same if the peer asks for it. See iwarpd_negotiated */
	int markers;  /* ask the peer to send markers */
	int fallback; /* retry with revision 1, then without markers */
	int p2p;      /* peer-to-peer mode: either side may send first */
	unsigned int revision; /* 1 or 2 */
	unsigned int rtr;      /* RTR bits: 1 Send, 2 Write, 4 Read */
	int ird; /* maximum outstanding Reads of the peer */
	int ord; /* maximum outstanding Reads of ours */
	unsigned int timeout_ms; /* for each step */
	unsigned int transport;  /* enum iwarpd_transport */
	int udp_encapsulation;   /* nonzero: SCTP over UDP (RFC 6951) */
	/*
	 * Nonzero: connects over SCTP to the same address and port that have this
	 * set share one association. The first connect opens it, and it ends with
	 * the last connection. If the association fails, all its connections end.
	 */
	int shared_association;
	/*
	 * Fields of the packets' headers. 0: the daemon's default, -1: 0. On a
	 * shared association those of the connect that opened it count.
	 */
	int dscp;              /* 1 to 63 */
	int priority;          /* in VLAN tags, 1 to 7 */
	unsigned int ttl;      /* or hop limit, 1 to 255; 0: the daemon's default */
	unsigned int reserved[1];
};

/*
 * The transport for DDP. Over SCTP only revision, ird and ord of the MPA settings
 * are used.
 */
enum iwarpd_transport {
	IWARPD_TRANSPORT_TCP = 0,
	IWARPD_TRANSPORT_SCTP = 1,       /* RFC 5043 */
	IWARPD_TRANSPORT_SCTP_DRAFT = 2, /* draft-ietf-rddp-sctp-00 */
	IWARPD_TRANSPORT_SOCKET = 3,     /* TCP of the kernel, if the daemon has kernel sockets */
};

struct iwarpd_connect_attr {
	const char *remote; /* "addr:port" */
	const char *local;  /* NULL, "addr", "addr:port" or ":port" */
	const void *private_data;
	size_t private_len;
	const struct iwarpd_startup *startup;
	unsigned int timeout_ms; /* for the whole connect */
	bool streaming; /* start as a byte stream: the result is STREAM_READY or CONNECT_FAILED; no private data */
};

/*
 * Starts a connection. The result is an event: ESTABLISHED, REJECTED or
 * CONNECT_FAILED.
 */
IWARPD_API int iwarpd_connect(struct iwarpd_qp *qp, const struct iwarpd_connect_attr *attr, struct iwarpd_error *e);

struct iwarpd_listen_attr {
	const char *address; /* NULL: all addresses of the interface */
	uint16_t port;       /* 0: the daemon chooses */
	uint32_t backlog;    /* unanswered connect requests; 0: 128; more are reset: CONNECT_FAILED, -ECONNREFUSED */
	const struct iwarpd_startup *startup;
	bool streaming; /* connections start as byte streams: STREAM_READY instead of CONNECT_REQUEST */
	bool keep_requests; /* iwarpd_unlisten leaves requests that are not answered; otherwise it resets them */
};

/* Listens for connect requests, which are reported as events. */
IWARPD_API int iwarpd_listen(struct iwarpd_device *dev, const struct iwarpd_listen_attr *attr,
			     struct iwarpd_listener **listener, struct iwarpd_error *e);
IWARPD_API const char *iwarpd_listener_address(const struct iwarpd_listener *listener); /* "addr:port" */
IWARPD_API int iwarpd_unlisten(struct iwarpd_listener *listener, struct iwarpd_error *e);

struct iwarpd_accept_attr {
	const void *private_data;
	size_t private_len;
	/*
	 * 0: what the peer requests (its ord and ird), up to the values given to
	 * iwarpd_listen, or else max_ird and max_ord; -1: none.
	 */
	int ird, ord;
};

/*
 * Answer the connect request conn of an event. The result of accepting is an event:
 * ESTABLISHED or CONNECT_FAILED. attr may be NULL. Returns -ENOENT if the peer has
 * disconnected.
 */
IWARPD_API int iwarpd_accept(struct iwarpd_device *dev, uint32_t conn, struct iwarpd_qp *qp,
			     const struct iwarpd_accept_attr *attr, struct iwarpd_error *e);
IWARPD_API int iwarpd_reject(struct iwarpd_device *dev, uint32_t conn, const void *private_data, size_t private_len,
			     struct iwarpd_error *e);

/*
 * Ends the connection of a QP, gracefully after all posted work, or by a reset. The
 * event DISCONNECTED reports the end; a connect in progress ends with
 * CONNECT_FAILED. So does a QP that has had no connection, if abort is set: it can have
 * none then, and what was posted is flushed. Otherwise it is -EBADFD.
 */
IWARPD_API int iwarpd_disconnect(struct iwarpd_qp *qp, bool abort, struct iwarpd_error *e);

/*
 * Ends the connection of a QP gracefully, but drops what the peer sends and, but for 16 KiB, what
 * was posted and has not completed. When it returns, no memory is accessed for this QP, no receive
 * is used, and nothing completes: its PD, CQs and SRQ can be destroyed before it. DISCONNECTED does
 * not wait for a peer over TCP to close. To daemons older than this function it is iwarpd_disconnect.
 */
IWARPD_API int iwarpd_leave(struct iwarpd_qp *qp, struct iwarpd_error *e);

/*
 * Sets the DSCP, 0 to 63, of the packets that this end of an established connection
 * sends from now on; over SCTP, of all connections of its association. -EINVAL: another
 * value; -EBADFD: there is no established connection.
 */
IWARPD_API int iwarpd_set_dscp(struct iwarpd_qp *qp, unsigned dscp, struct iwarpd_error *e);

/*
 * Byte streams before MPA (delayed start, RFC 5044 section 7.1.3): both programs
 * connect and listen with streaming set, exchange bytes on the conn of
 * STREAM_READY, and then start MPA. A program must read everything that its peer
 * sends before MPA; unread bytes are taken for MPA's.
 */

/*
 * Reads up to len bytes, waiting for at least one, and returns their number, or 0
 * at the end of the stream. It waits like iwarpd_get_event; only one thread may
 * read from a stream. Returns -ECONNRESET if the connection has ended, which an
 * event reports too.
 */
IWARPD_API int iwarpd_stream_read(struct iwarpd_device *dev, uint32_t conn, void *buf, size_t len, int timeout_ms,
				  struct iwarpd_error *e);

/*
 * Writes bytes and returns how many were accepted, at most 32768. -EBUSY means that
 * the peer reads slowly: try again later.
 */
IWARPD_API int iwarpd_stream_write(struct iwarpd_device *dev, uint32_t conn, const void *data, size_t len,
				   struct iwarpd_error *e);

/*
 * A role in the MPA start-up. It is independent of which side opened the TCP
 * connection (RFC 5044 section 7.1).
 */
enum iwarpd_mpa_role {
	IWARPD_MPA_BY_TCP = 0,    /* initiator if it opened the TCP connection, responder if it accepted it */
	IWARPD_MPA_INITIATOR = 1, /* sends the request: the result is ESTABLISHED, REJECTED or CONNECT_FAILED */
	IWARPD_MPA_RESPONDER = 2, /* waits for the request: the peer's CONNECT_REQUEST follows */
};

struct iwarpd_mpa_attr {
	uint32_t role;            /* enum iwarpd_mpa_role */
	struct iwarpd_qp *qp;     /* for an initiator that accepted the TCP connection; otherwise NULL, or the QP of the connect */
	const void *private_data; /* initiator only */
	size_t private_len;
	uint64_t reserved[4];
};

/*
 * Starts MPA. The programs must agree on who is the initiator: with two initiators
 * both fail with -EPROTO, with two responders with -ETIMEDOUT. For a responder that
 * opened the TCP connection the request has a qp and no listener. Accept it with
 * that QP or NULL; a rejection ends the QP's connection by CONNECT_FAILED with
 * -ECANCELED.
 */
IWARPD_API int iwarpd_start_mpa_as(struct iwarpd_device *dev, uint32_t conn, const struct iwarpd_mpa_attr *attr,
				   struct iwarpd_error *e);

/*
 * iwarpd_start_mpa_as with IWARPD_MPA_BY_TCP. A responder must not pass private
 * data.
 */
IWARPD_API int iwarpd_start_mpa(struct iwarpd_device *dev, uint32_t conn, const void *private_data, size_t private_len,
				struct iwarpd_error *e);

/*
 * Ends the connection instead of starting MPA, after all written data or by a
 * reset. conn is invalid afterwards.
 */
IWARPD_API int iwarpd_stream_close(struct iwarpd_device *dev, uint32_t conn, bool abort, struct iwarpd_error *e);

/* Events. */

enum iwarpd_event_type {
	IWARPD_EVENT_CONNECT_REQUEST = 1, /* listener, or qp of a stream that we opened; conn, local, remote, data, negotiated: revision, p2p, and the peer's ird, ord */
	IWARPD_EVENT_ESTABLISHED = 2,     /* qp, local, remote, data, negotiated, peer_ird, peer_ord */
	IWARPD_EVENT_REJECTED = 3,        /* qp, data, peer_ird, peer_ord */
	IWARPD_EVENT_CONNECT_FAILED = 4,  /* qp, error */
	IWARPD_EVENT_DISCONNECTED = 5,    /* qp, error; error.err is 0 after a graceful close */
	IWARPD_EVENT_TERMINATED = 6,      /* qp, terminate, error.text, data: headers; DISCONNECTED follows */
	IWARPD_EVENT_ASYNC_ERROR = 7,     /* async; qp, cq, srq or listener; error */
	IWARPD_EVENT_CONNECT_GONE = 8,    /* conn, error: the connect request is withdrawn */
	IWARPD_EVENT_STREAM_READY = 9,    /* conn, local, remote; qp on the connecting side, listener on the other */
	IWARPD_EVENT_STREAM_DATA = 10,    /* conn: iwarpd_stream_read will not block; repeated after all other events until it is called */
	/*
	 * The daemon will stop, for example for an upgrade. Connections continue
	 * for drain_ms, but iwarpd_listen and iwarpd_connect fail with -ESHUTDOWN.
	 * A program should finish its transfers and call iwarpd_close and
	 * iwarpd_open_wait. The daemon exits when no client has connections.
	 */
	IWARPD_EVENT_DRAINING = 11,       /* drain_ms */
};

struct iwarpd_negotiated {
	uint32_t revision;
	uint32_t rtr; /* RTR bit used; 0: none */
	uint32_t ird, ord;
	bool crc, send_markers, recv_markers, p2p;
};

struct iwarpd_terminate { /* RFC 5040 section 4.8 */
	bool remote;  /* the peer sent it */
	uint8_t layer, type, code;
};

enum iwarpd_async {
	IWARPD_ASYNC_CQ_OVERRUN = 1, /* cq overflowed: the connection of qp ended, and completions are lost */
	IWARPD_ASYNC_QP_FATAL = 2,   /* a protocol violation ended the stream of qp */
	IWARPD_ASYNC_SRQ_LIMIT = 3,  /* srq has fewer receives than its limit */
	/*
	 * With IWARPD_TRANSPORT_SCTP_DRAFT: remote has sent a DDP Stream Session
	 * Negotiate with data, to listener or to the connect of qp. It needs no
	 * answer.
	 */
	IWARPD_ASYNC_NEGOTIATE = 4,
};

struct iwarpd_event {
	uint32_t type; /* enum iwarpd_event_type */
	uint32_t conn; /* for iwarpd_accept, iwarpd_reject and iwarpd_stream_* */
	struct iwarpd_qp *qp;
	struct iwarpd_cq *cq;
	struct iwarpd_srq *srq;
	struct iwarpd_listener *listener; /* NULL if it was closed in the meantime */
	char local[64], remote[64];
	struct iwarpd_negotiated negotiated;
	struct iwarpd_terminate terminate;
	struct iwarpd_error error;
	uint32_t async; /* enum iwarpd_async */
	uint32_t data_len;
	/*
	 * The peer's IRD and ORD (RFC 6581 section 9.1): the number of our Reads
	 * that it accepts, and the number of Reads that it wants outstanding.
	 * 0x3fff leaves the number to the programs; -1 means that it is not known
	 * (revision 1).
	 */
	int32_t peer_ird, peer_ord;
	uint32_t drain_ms;
	uint32_t reserved32;
	uint64_t reserved[6];
	uint8_t data[IWARPD_MAX_PRIVATE_DATA]; /* private data of the peer */
};

/*
 * Waits for the next event, up to timeout_ms, or indefinitely if that is negative.
 * Returns -ETIMEDOUT after the timeout and -EPIPE if the daemon is gone. Sends
 * posted before ESTABLISHED start when an event function, or any other call that
 * communicates with the daemon, has received that event. A thread that waits may be
 * canceled.
 */
IWARPD_API int iwarpd_get_event(struct iwarpd_device *dev, struct iwarpd_event *ev, int timeout_ms, struct iwarpd_error *e);

/* Like iwarpd_get_event, for the events of one QP. Other events stay queued. */
IWARPD_API int iwarpd_get_qp_event(struct iwarpd_qp *qp, struct iwarpd_event *ev, int timeout_ms, struct iwarpd_error *e);

/*
 * Descriptor for poll and epoll that is readable while an event may be available.
 */
IWARPD_API int iwarpd_event_fd(const struct iwarpd_device *dev);

/* Descriptive texts, also for unknown values. */
IWARPD_API const char *iwarpd_wc_status_text(uint32_t status);
IWARPD_API const char *iwarpd_event_text(uint32_t type);

#ifdef __cplusplus
}
#endif
#endif
