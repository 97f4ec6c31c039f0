/*
 * libiwarpd: RDMA (iWARP) by the daemon iwarpd, at the verbs level.
 *
 * Work requests and completions go through memory shared with the daemon:
 * posting and polling make no system call while the daemon's worker is awake.
 * All else goes over the daemon's socket. See iwarpd(3).
 *
 * Functions that return int return 0 or a count, or a negative errno value;
 * those with a last argument e say more in *e, which may be NULL.
 *
 * Threads: every function may be called from any thread, with these exceptions.
 * The send queue of a QP, its receive queue, an SRQ and a CQ are each for one
 * thread at a time, and an object must not be used while or after it is destroyed.
 *
 * Structures are set to zero before they are filled: zero means the default
 * wherever 0 is not said to mean something else, and later versions of the
 * library add members only where there is room reserved for them.
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

struct iwarpd_device;   /* a client of a daemon, owns all that is made by it */
struct iwarpd_pd;       /* protection domain */
struct iwarpd_cq;       /* completion queue */
struct iwarpd_channel;  /* completion channel: wakes for several completion queues */
struct iwarpd_qp;       /* queue pair */
struct iwarpd_srq;      /* shared receive queue */
struct iwarpd_listener; /* endpoint that takes connect requests */

/* Why something failed. */
struct iwarpd_error {
	int err;        /* negative errno value; 0: nothing failed */
	int code;       /* the daemon's, enum iwarpd_code; 0: not from the daemon */
	char text[248]; /* one line for people */
};

/* The daemon's codes (ctrl/iwarpd.proto), and the errno value of each. */
enum iwarpd_code {
	IWARPD_CODE_INVALID = 1,     /* EINVAL: the request makes no sense */
	IWARPD_CODE_NO_OBJECT = 2,   /* ENOENT */
	IWARPD_CODE_PERMISSION = 3,  /* EACCES: the policy of this uid */
	IWARPD_CODE_QUOTA = 4,       /* EDQUOT: a quota of this uid */
	IWARPD_CODE_PORT_IN_USE = 5, /* EADDRINUSE */
	IWARPD_CODE_ADDRESS = 6,     /* EADDRNOTAVAIL: not of the interface */
	IWARPD_CODE_UNREACHABLE = 7, /* EHOSTUNREACH */
	IWARPD_CODE_TIMEOUT = 8,     /* ETIMEDOUT */
	IWARPD_CODE_REFUSED = 9,     /* ECONNREFUSED, or ECONNRESET once established */
	IWARPD_CODE_REJECTED = 10,   /* ECONNABORTED: the peer's program said no */
	IWARPD_CODE_STATE = 11,      /* EBADFD: not in this state of the object */
	IWARPD_CODE_BUSY = 12,       /* EBUSY: other objects use this one */
	IWARPD_CODE_VERSION = 13,    /* EPROTONOSUPPORT */
	IWARPD_CODE_PROTOCOL = 14,   /* EPROTO: the peer broke the MPA start-up */
	IWARPD_CODE_INTERNAL = 15,   /* EIO: a fault of the daemon or the host */
	IWARPD_CODE_CANCELED = 16,   /* ECANCELED */
	IWARPD_CODE_DRAINING = 17,   /* ESHUTDOWN: the daemon is stopping; see IWARPD_EVENT_DRAINING */
};

/* Device. */

struct iwarpd_device_attr {
	const char *server;    /* name and version of the daemon */
	const char *interface; /* that it serves */
	const char *const *addresses; /* of the interface, ended by NULL */
	uint32_t client;       /* number of this client in the daemon's lists */
	uint32_t workers;
	uint32_t mtu;
	uint32_t max_qp, max_cq, max_pd, max_mr, max_mw, max_listen;
	uint32_t max_qp_wr, max_cqe, max_sge;
	uint32_t max_inline;       /* bytes */
	uint32_t max_ird, max_ord;
	uint32_t max_private_data; /* bytes */
	uint64_t max_mr_size;      /* bytes of one region */
	uint64_t max_registered;   /* bytes of all regions of the uid */
};

/*
 * Connects to the daemon at a socket; NULL: $IWARPD_SOCKET, or IWARPD_SOCKET.
 * name is shown in the daemon's list of clients; NULL: the program's.
 * -ENOENT, -ECONNREFUSED: no daemon there.
 */
IWARPD_API int iwarpd_open(const char *socket, const char *name, struct iwarpd_device **dev, struct iwarpd_error *e);

/*
 * iwarpd_open for a program that outlives its daemon: waits for one that does not run yet, or
 * is being restarted, for at most timeout_ms, or without end if that is negative. -ETIMEDOUT:
 * none answered. An error that no wait cures, such as -EACCES, returns at once. After -EPIPE
 * or IWARPD_EVENT_DRAINING a program calls iwarpd_close and this, and makes its objects again.
 */
IWARPD_API int iwarpd_open_wait(const char *socket, const char *name, int timeout_ms, struct iwarpd_device **dev,
				struct iwarpd_error *e);

/* Ends the client: all its connections are cut, all its objects freed. */
IWARPD_API void iwarpd_close(struct iwarpd_device *dev);

IWARPD_API const struct iwarpd_device_attr *iwarpd_query_device(const struct iwarpd_device *dev);

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
};

struct iwarpd_mr {
	void *addr;      /* the memory; NULL if iwarpd_reg_mr was not told */
	uint64_t length; /* bytes */
	uint64_t base;   /* address of the first byte in work requests, here and of the peer */
	uint32_t lkey;   /* for SGEs */
	uint32_t rkey;   /* for the peer: its STag */
};

struct iwarpd_mr_attr {
	int fd;          /* a memfd that may be sealed; stays the caller's */
	uint64_t offset; /* in fd */
	uint64_t length; /* bytes, 1 to 2^32 - 1 */
	void *addr;      /* where the caller has it mapped; may be NULL */
	uint64_t base;   /* address of the first byte; 0 with IWARPD_ZERO_BASED */
	unsigned int access; /* enum iwarpd_access */
	bool fast;       /* for IWARPD_WR_REG: not valid until then */
};

/* Makes memory of length bytes and registers it; base is its address. */
IWARPD_API int iwarpd_alloc_mr(struct iwarpd_pd *pd, size_t length, unsigned int access, struct iwarpd_mr **mr,
			       struct iwarpd_error *e);

/* Registers memory that the caller has in a memfd, which can never shrink again. */
IWARPD_API int iwarpd_reg_mr(struct iwarpd_pd *pd, const struct iwarpd_mr_attr *attr, struct iwarpd_mr **mr,
			     struct iwarpd_error *e);

/* Deregisters a region, and frees its memory if iwarpd_alloc_mr made it. */
IWARPD_API int iwarpd_dereg_mr(struct iwarpd_mr *mr, struct iwarpd_error *e);

struct iwarpd_mw {
	uint32_t rkey; /* the low byte is the caller's to choose with each binding */
};

/* A memory window of type 2, bound by IWARPD_WR_BIND_MW. */
IWARPD_API int iwarpd_alloc_mw(struct iwarpd_pd *pd, struct iwarpd_mw **mw, struct iwarpd_error *e);
IWARPD_API int iwarpd_dealloc_mw(struct iwarpd_mw *mw, struct iwarpd_error *e);

/* Completion queues. */

enum iwarpd_wc_status { /* as libibverbs' IBV_WC_* */
	IWARPD_WC_SUCCESS = 0,
	IWARPD_WC_LOC_LEN_ERR = 1,
	IWARPD_WC_LOC_QP_OP_ERR = 2,
	IWARPD_WC_LOC_PROT_ERR = 4,
	IWARPD_WC_WR_FLUSH_ERR = 5, /* the connection ended first */
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
	uint32_t inv_key; /* with IWARPD_WC_WITH_INV: what the peer invalidated */
	uint64_t imm;    /* with IWARPD_WC_WITH_IMM */
	uint32_t vendor; /* with an error: the Terminate behind it; see docs/api.md */
	uint32_t reserved[5];
};

/*
 * depth: completions that must find room before they are polled. A queue that
 * runs over ends its QPs.
 */
IWARPD_API int iwarpd_create_cq(struct iwarpd_device *dev, uint32_t depth, struct iwarpd_cq **cq, struct iwarpd_error *e);
IWARPD_API int iwarpd_destroy_cq(struct iwarpd_cq *cq, struct iwarpd_error *e);

/* Takes up to n completions and returns how many. It never waits. */
IWARPD_API int iwarpd_poll_cq(struct iwarpd_cq *cq, struct iwarpd_wc *wc, int n);

/*
 * iwarpd_poll_cq that sleeps until there is a completion, for at most
 * timeout_ms, or without end if that is negative: then -ETIMEDOUT. -EPIPE: the
 * daemon is gone. -EINVAL: the queue is empty and wakes a channel.
 */
IWARPD_API int iwarpd_wait_cq(struct iwarpd_cq *cq, struct iwarpd_wc *wc, int n, int timeout_ms);

/*
 * Asks that iwarpd_cq_fd becomes readable with the next completion, or the next
 * that is solicited or failed. What came before does not count: poll the queue
 * once more before sleeping. Bytes read from the descriptor mean nothing. A queue
 * of a channel wakes that, once, and has the channel's descriptor.
 */
IWARPD_API void iwarpd_arm_cq(struct iwarpd_cq *cq, bool solicited_only);
IWARPD_API int iwarpd_cq_fd(const struct iwarpd_cq *cq);

/* Completions that were lost for want of room. */
IWARPD_API uint32_t iwarpd_cq_overruns(const struct iwarpd_cq *cq);

/* Gives the queue room for depth completions; those that it holds stay. It has to be armed anew. */
IWARPD_API int iwarpd_resize_cq(struct iwarpd_cq *cq, uint32_t depth, struct iwarpd_error *e);

/*
 * Moderation: an armed queue wakes its client when count completions have come,
 * or period_us after the first of them; for a solicited or failed one at once. 0
 * for either: no moderation.
 */
IWARPD_API int iwarpd_modify_cq(struct iwarpd_cq *cq, uint32_t count, uint32_t period_us, struct iwarpd_error *e);

/*
 * Completion channels: one place to sleep for several completion queues. Where
 * libibverbs has ibv_create_comp_channel, ibv_req_notify_cq and ibv_get_cq_event,
 * a program makes a channel, and queues on it, and then
 *   1. arms each queue (iwarpd_arm_cq), and polls it until it is empty;
 *   2. waits with iwarpd_get_cq_event, or for iwarpd_channel_fd to be readable;
 *   3. does 1 again for the queue that it was given.
 * Nothing has to be acknowledged.
 */

IWARPD_API int iwarpd_create_channel(struct iwarpd_device *dev, struct iwarpd_channel **channel, struct iwarpd_error *e);
IWARPD_API int iwarpd_destroy_channel(struct iwarpd_channel *channel, struct iwarpd_error *e); /* -EBUSY while it has queues */

/* iwarpd_create_cq for a queue that wakes this channel. context is the caller's. */
IWARPD_API int iwarpd_create_cq_on(struct iwarpd_channel *channel, uint32_t depth, void *context, struct iwarpd_cq **cq,
				   struct iwarpd_error *e);
IWARPD_API void *iwarpd_cq_context(const struct iwarpd_cq *cq);

/*
 * Waits for a queue of the channel that was armed and has a completion, for at
 * most timeout_ms, or without end if that is negative: then -ETIMEDOUT. The queue is
 * not armed any more, and may be empty already. Several threads may wait: each is
 * given another queue. -EPIPE: the daemon is gone. -EINTR: a signal was handled.
 */
IWARPD_API int iwarpd_get_cq_event(struct iwarpd_channel *channel, struct iwarpd_cq **cq, int timeout_ms);

/* Readable, for poll and epoll, while iwarpd_get_cq_event would not wait long. It stays the channel's. */
IWARPD_API int iwarpd_channel_fd(const struct iwarpd_channel *channel);

/* Shared receive queues: several QPs of a PD take their receives from one. */

struct iwarpd_srq_attr {
	uint32_t depth;   /* work requests; 0: 64 */
	uint32_t max_sge; /* 0: 4 */
	uint32_t limit;   /* as of iwarpd_modify_srq */
	void *context;    /* the caller's; iwarpd_srq_context returns it */
};

IWARPD_API int iwarpd_create_srq(struct iwarpd_pd *pd, const struct iwarpd_srq_attr *attr, struct iwarpd_srq **srq,
				 struct iwarpd_error *e);
IWARPD_API int iwarpd_destroy_srq(struct iwarpd_srq *srq, struct iwarpd_error *e); /* -EBUSY while a QP uses it */

/*
 * Arms the event ASYNC_ERROR with IWARPD_ASYNC_SRQ_LIMIT: it comes once, when a
 * message leaves fewer than limit receives. 0 disarms it.
 */
IWARPD_API int iwarpd_modify_srq(struct iwarpd_srq *srq, uint32_t limit, struct iwarpd_error *e);
IWARPD_API void *iwarpd_srq_context(const struct iwarpd_srq *srq);

/* Queue pairs. A QP has one connection in its life. */

struct iwarpd_qp_attr {
	struct iwarpd_cq *send_cq, *recv_cq; /* may be the same */
	struct iwarpd_srq *srq;              /* NULL: the QP has a receive queue of its own */
	uint32_t send_depth, recv_depth;     /* work requests; 0: 64 */
	uint32_t max_sge;                    /* 0: 4 */
	uint32_t max_inline;                 /* bytes */
	bool sig_all; /* every send work request completes on the CQ */
	void *context; /* the caller's; iwarpd_qp_context returns it */
};

IWARPD_API int iwarpd_create_qp(struct iwarpd_pd *pd, const struct iwarpd_qp_attr *attr, struct iwarpd_qp **qp,
				struct iwarpd_error *e);

/* Cuts the connection. What is not complete then never will be. */
IWARPD_API int iwarpd_destroy_qp(struct iwarpd_qp *qp, struct iwarpd_error *e);

IWARPD_API uint32_t iwarpd_qp_num(const struct iwarpd_qp *qp); /* as in completions */
IWARPD_API void *iwarpd_qp_context(const struct iwarpd_qp *qp);

struct iwarpd_sge {
	uint64_t addr; /* base of the region + offset in it */
	uint32_t len;  /* bytes */
	uint32_t lkey;
};

enum iwarpd_wr_opcode {           /* what counts beside sge, or inline_data: */
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
	IWARPD_FENCE = 1,     /* start when earlier Reads and atomics are complete */
	IWARPD_SIGNALED = 2,  /* report success too */
	IWARPD_SOLICITED = 4, /* SEND, SEND_WITH_INV, IMM: wakes a peer that waits for such alone */
	IWARPD_INLINE = 8,    /* inline_data instead of sge */
};

struct iwarpd_send_wr {
	uint64_t id;     /* comes back in the completion */
	uint32_t opcode; /* enum iwarpd_wr_opcode */
	uint32_t flags;  /* enum iwarpd_wr_flags */
	const struct iwarpd_sge *sge;
	uint32_t num_sge;
	uint32_t inline_len;
	const void *inline_data; /* copied: free when the call returns */
	uint64_t remote_addr;
	uint32_t rkey;
	uint32_t inv_key;
	uint64_t imm; /* high byte first on the wire */
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
 * Post work requests: from before the connection is established (sends wait for
 * that) until it ends. The SGEs' memory is the QP's until the completion.
 *   -EAGAIN    the queue is full: poll the CQ first
 *   -EMSGSIZE  more SGEs or inline data than the QP was made for
 *   -EINVAL    inline data without the flag, or both inline data and SGEs
 *   -ENOTCONN  the connection has ended
 *   -EPROTO    the daemon has broken the queue
 * The completion of a Write says that its memory may be used again, not that the
 * peer took it: there is no answer to a Write. Where the peer's memory does not
 * allow it the connection ends with a Terminate; a Read after the Write tells.
 * iwarpd_post_sends posts up to n with one doorbell and returns how many, or
 * the error of the first.
 */
IWARPD_API int iwarpd_post_send(struct iwarpd_qp *qp, const struct iwarpd_send_wr *wr);
IWARPD_API int iwarpd_post_sends(struct iwarpd_qp *qp, const struct iwarpd_send_wr *wr, int n);
IWARPD_API int iwarpd_post_recv(struct iwarpd_qp *qp, const struct iwarpd_recv_wr *wr); /* -EINVAL with an SRQ */
IWARPD_API int iwarpd_post_srq_recv(struct iwarpd_srq *srq, const struct iwarpd_recv_wr *wr);

/* Connections. Addresses are texts: "192.0.2.1:7174", "[2001:db8::1]:7174". */

/*
 * What MPA negotiates; zero, or NULL for the whole, is what the daemon is
 * configured for. In crc, markers, fallback and p2p 1 means yes and -1 no; in ird
 * and ord -1 means none.
 */
struct iwarpd_startup {
	int crc;      /* no: a wish, which counts only where the daemon has "crc: optional"; the
	               * CRC is used all the same if the peer asks for it. See iwarpd_negotiated */
	int markers;  /* ask the peer to send markers */
	int fallback; /* try again with revision 1, then without markers */
	int p2p;      /* peer-to-peer mode: either side may send first */
	unsigned int revision; /* 1 or 2 */
	unsigned int rtr;      /* RTR bits: 1 Send, 2 Write, 4 Read */
	int ird; /* Reads of the peer that may be outstanding */
	int ord; /* Reads of ours */
	unsigned int timeout_ms; /* of each wait */
	unsigned int transport;  /* enum iwarpd_transport */
	int udp_encapsulation;   /* not 0: SCTP over UDP (RFC 6951) */
	/*
	 * Not 0: a connect over SCTP is one of many on one association, which all
	 * connects of the device to the same address and port that ask for it share.
	 * The first opens it, it goes with the last, and its end ends all of them.
	 */
	int shared_association;
	unsigned int reserved[4];
};

/* What carries DDP. Over SCTP of what MPA negotiates only revision, ird and ord count. */
enum iwarpd_transport {
	IWARPD_TRANSPORT_TCP = 0,
	IWARPD_TRANSPORT_SCTP = 1,       /* RFC 5043 */
	IWARPD_TRANSPORT_SCTP_DRAFT = 2, /* draft-ietf-rddp-sctp-00 */
};

struct iwarpd_connect_attr {
	const char *remote; /* "addr:port" */
	const char *local;  /* NULL, "addr", "addr:port" or ":port" */
	const void *private_data;
	size_t private_len;
	const struct iwarpd_startup *startup;
	unsigned int timeout_ms; /* for all of it */
	bool streaming; /* begin as a byte stream: STREAM_READY, or CONNECT_FAILED, is the outcome; no private data */
};

/* Starts a connection. Its outcome is an event: ESTABLISHED, REJECTED or CONNECT_FAILED. */
IWARPD_API int iwarpd_connect(struct iwarpd_qp *qp, const struct iwarpd_connect_attr *attr, struct iwarpd_error *e);

struct iwarpd_listen_attr {
	const char *address; /* NULL: every address of the interface */
	uint16_t port;       /* 0: the daemon chooses */
	uint32_t backlog;    /* connect requests that may wait; 0: 128 */
	const struct iwarpd_startup *startup;
	bool streaming; /* connections begin as byte streams: STREAM_READY in place of CONNECT_REQUEST */
};

/* Takes connect requests, which are events, at an endpoint. */
IWARPD_API int iwarpd_listen(struct iwarpd_device *dev, const struct iwarpd_listen_attr *attr,
			     struct iwarpd_listener **listener, struct iwarpd_error *e);
IWARPD_API const char *iwarpd_listener_address(const struct iwarpd_listener *listener); /* "addr:port" */
IWARPD_API int iwarpd_unlisten(struct iwarpd_listener *listener, struct iwarpd_error *e);

struct iwarpd_accept_attr {
	const void *private_data;
	size_t private_len;
	/*
	 * 0: what the peer asks for, its ord and ird, up to the startup of iwarpd_listen if that
	 * names them, otherwise up to max_ird and max_ord; -1: none.
	 */
	int ird, ord;
};

/*
 * Answer the connect request conn of an event. Accepted, its outcome is an
 * event: ESTABLISHED or CONNECT_FAILED. attr may be NULL. -ENOENT: the peer has
 * left.
 */
IWARPD_API int iwarpd_accept(struct iwarpd_device *dev, uint32_t conn, struct iwarpd_qp *qp,
			     const struct iwarpd_accept_attr *attr, struct iwarpd_error *e);
IWARPD_API int iwarpd_reject(struct iwarpd_device *dev, uint32_t conn, const void *private_data, size_t private_len,
			     struct iwarpd_error *e);

/*
 * Ends the connection of a QP: in order, after what was posted before, or by a
 * reset. The end is the event DISCONNECTED; a connect that is under way ends with
 * CONNECT_FAILED.
 */
IWARPD_API int iwarpd_disconnect(struct iwarpd_qp *qp, bool abort, struct iwarpd_error *e);

/*
 * Byte streams ahead of MPA (delayed start, RFC 5044 section 7.1.3): both
 * programs connect and listen with streaming set, exchange bytes on the conn of
 * STREAM_READY, and then start MPA. A program reads what its peer sends ahead of
 * MPA to the last byte: what it has not read then is MPA's.
 */

/*
 * Reads up to len bytes, at least one, and returns how many. 0: the peer sends no
 * more; do not read again. It waits as iwarpd_get_event does, for one thread a
 * stream. -ECONNRESET: the connection is over, as an event tells.
 */
IWARPD_API int iwarpd_stream_read(struct iwarpd_device *dev, uint32_t conn, void *buf, size_t len, int timeout_ms,
				  struct iwarpd_error *e);

/* Writes bytes and returns how many were taken, at most 32768. -EBUSY: the peer is behind; try again later. */
IWARPD_API int iwarpd_stream_write(struct iwarpd_device *dev, uint32_t conn, const void *data, size_t len,
				   struct iwarpd_error *e);

/* A side of the MPA start-up. Which is nothing to do with who opened the TCP connection (RFC 5044 section 7.1). */
enum iwarpd_mpa_role {
	IWARPD_MPA_BY_TCP = 0,    /* initiator where the TCP connection was opened, responder where accepted */
	IWARPD_MPA_INITIATOR = 1, /* sends the request: the outcome is ESTABLISHED, REJECTED or CONNECT_FAILED */
	IWARPD_MPA_RESPONDER = 2, /* waits for it: the peer's CONNECT_REQUEST follows */
};

struct iwarpd_mpa_attr {
	uint32_t role;            /* enum iwarpd_mpa_role */
	struct iwarpd_qp *qp;     /* of an initiator that accepted the TCP connection; else NULL, or that of the connect */
	const void *private_data; /* of an initiator */
	size_t private_len;
	uint64_t reserved[4];
};

/*
 * Starts MPA. The programs agree on who is the initiator: where both are, both
 * fail with -EPROTO, where neither is, with -ETIMEDOUT. The request to a responder
 * that connected has a qp and no listener; it is accepted with that QP, or NULL,
 * and a rejection ends the QP's connection by CONNECT_FAILED with -ECANCELED.
 */
IWARPD_API int iwarpd_start_mpa_as(struct iwarpd_device *dev, uint32_t conn, const struct iwarpd_mpa_attr *attr,
				   struct iwarpd_error *e);

/* iwarpd_start_mpa_as with IWARPD_MPA_BY_TCP. A responder gives no private data. */
IWARPD_API int iwarpd_start_mpa(struct iwarpd_device *dev, uint32_t conn, const void *private_data, size_t private_len,
				struct iwarpd_error *e);

/* Ends the connection instead: after what was written, or by a reset. conn is gone with it. */
IWARPD_API int iwarpd_stream_close(struct iwarpd_device *dev, uint32_t conn, bool abort, struct iwarpd_error *e);

/* Events. */

enum iwarpd_event_type {
	IWARPD_EVENT_CONNECT_REQUEST = 1, /* listener, or qp of a stream that was connected; conn, local, remote, data, negotiated: revision, p2p, and the peer's ird, ord */
	IWARPD_EVENT_ESTABLISHED = 2,     /* qp, local, remote, data, negotiated, peer_ird, peer_ord */
	IWARPD_EVENT_REJECTED = 3,        /* qp, data, peer_ird, peer_ord */
	IWARPD_EVENT_CONNECT_FAILED = 4,  /* qp, error */
	IWARPD_EVENT_DISCONNECTED = 5,    /* qp, error; error.err is 0 if it was closed in order */
	IWARPD_EVENT_TERMINATED = 6,      /* qp, terminate, error.text, data: headers; DISCONNECTED follows */
	IWARPD_EVENT_ASYNC_ERROR = 7,     /* async; qp, cq, srq or listener; error */
	IWARPD_EVENT_CONNECT_GONE = 8,    /* conn, error: the connect request is withdrawn */
	IWARPD_EVENT_STREAM_READY = 9,    /* conn, local, remote; qp at the side that connected, listener at the other */
	IWARPD_EVENT_STREAM_DATA = 10,    /* conn: iwarpd_stream_read does not wait; comes again, behind all others, until it was called */
	/*
	 * The daemon is about to stop, for an upgrade for example: connections go on for drain_ms,
	 * but iwarpd_listen and iwarpd_connect fail with -ESHUTDOWN. A program finishes its
	 * transfers, calls iwarpd_close, and iwarpd_open_wait. The daemon exits as soon as no
	 * client has connections.
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
	IWARPD_ASYNC_CQ_OVERRUN = 1, /* cq was full: qp was ended, completions of it are lost */
	IWARPD_ASYNC_QP_FATAL = 2,   /* a violation ended the stream of qp */
	IWARPD_ASYNC_SRQ_LIMIT = 3,  /* srq has fewer receives than its limit */
	/*
	 * Over IWARPD_TRANSPORT_SCTP_DRAFT: remote has sent a DDP Stream Session Negotiate with data,
	 * to listener or to the connect of qp. It asks for no answer.
	 */
	IWARPD_ASYNC_NEGOTIATE = 4,
};

struct iwarpd_event {
	uint32_t type; /* enum iwarpd_event_type */
	uint32_t conn; /* for iwarpd_accept, iwarpd_reject and iwarpd_stream_* */
	struct iwarpd_qp *qp;
	struct iwarpd_cq *cq;
	struct iwarpd_srq *srq;
	struct iwarpd_listener *listener; /* NULL: it was given back meanwhile */
	char local[64], remote[64];
	struct iwarpd_negotiated negotiated;
	struct iwarpd_terminate terminate;
	struct iwarpd_error error;
	uint32_t async; /* enum iwarpd_async */
	uint32_t data_len;
	/*
	 * What the peer's request or reply says (RFC 6581 section 9.1): Reads of ours that it
	 * takes, and that it wants outstanding. 0x3fff leaves the number to the programs; -1:
	 * it does not say (revision 1).
	 */
	int32_t peer_ird, peer_ord;
	uint32_t drain_ms;
	uint32_t reserved32;
	uint64_t reserved[6];
	uint8_t data[IWARPD_MAX_PRIVATE_DATA]; /* private data of the peer */
};

/*
 * Waits for the next event, for at most timeout_ms, or without end if that is
 * negative: then -ETIMEDOUT. -EPIPE: the daemon is gone. Sends that were posted
 * before ESTABLISHED start when an event function, or any other call that talks
 * to the daemon, has seen it.
 */
IWARPD_API int iwarpd_get_event(struct iwarpd_device *dev, struct iwarpd_event *ev, int timeout_ms, struct iwarpd_error *e);

/* iwarpd_get_event for the events of one QP; others stay. */
IWARPD_API int iwarpd_get_qp_event(struct iwarpd_qp *qp, struct iwarpd_event *ev, int timeout_ms, struct iwarpd_error *e);

/* Readable, for poll and epoll, while iwarpd_get_event would not wait long. */
IWARPD_API int iwarpd_event_fd(const struct iwarpd_device *dev);

/* Texts for people. Those of unknown values are texts too. */
IWARPD_API const char *iwarpd_wc_status_text(uint32_t status);
IWARPD_API const char *iwarpd_event_text(uint32_t type);

#ifdef __cplusplus
}
#endif
#endif
