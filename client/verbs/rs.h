/*
 * Declarations shared by the files of rsockets, which are stream sockets over an RDMA connection: rsocket(7). They use
 * the public functions of libibverbs and librdmacm, and ask an identifier how its connection has ended.
 */
#ifndef RS_H
#define RS_H

#include <rdma/rsocket.h>

#include "cm.h"

/*
 * What peers exchange: the "rsocket Protocol and Design Guide" of rdma-core. Each writes data into the buffer that the
 * other offers, one half after the other, and then sends a message of four bytes: iWARP has no Write with Immediate
 * Data. The fields of struct rs_hello have network byte order, everything else that of the hosts, which must agree.
 */
struct rs_sge {
	uint64_t addr;
	uint32_t key;
	uint32_t length;
};

/* An entry of the table of a peer's mapped buffers; with length 0 it is unused. */
struct rs_iomap {
	uint64_t offset;
	struct rs_sge sge;
};

/* Private data of the connect request, and of the reply. */
struct rs_hello {
	uint8_t version;
	uint8_t flags;
	uint16_t credits;
	uint8_t reserved[3];
	uint8_t iomaps;       /* length of the table of mapped buffers, see rs_iomap.c */
	struct rs_sge offers; /* where this side finds what the peer offers: length is that of the table */
	struct rs_sge buffer; /* the first half of the buffer */
};

enum {
	RS_OFFERS = 2, /* entries of the table of offers */
	RS_MAX_IOMAPS = 128,
	RS_CLOSE_MS = 10000, /* how long rclose waits */
	RS_FOREVER = -1,     /* no time-out, in ms */
};

/* The table that the peer writes to. There is nothing between its parts. */
struct rs_table {
	struct rs_sge offers[RS_OFFERS];
	struct rs_iomap iomaps[RS_MAX_IOMAPS];
};

enum rs_op { RS_DATA = 0, RS_CREDIT = 4, RS_IOMAP = 6, RS_CONTROL = 7 };
enum rs_control { RS_DISCONNECT = 0, RS_KEEPALIVE = 1, RS_SHUTDOWN = 2 };

enum rs_state {
	RS_OPEN,
	RS_LISTENING,
	RS_CONNECTING,
	RS_ACCEPTING, /* accepted, but not established */
	RS_CONNECTED,
	RS_ENDING,    /* nothing can be sent any more; an event will say why */
	RS_OVER,      /* the connection has ended, or was not made */
};

/* What a side says of its end: nothing, that it sends no more, or that it neither sends nor receives. */
enum rs_bye { RS_STAYS, RS_HALF, RS_LEAVES };

/* Options, which a connection of a listener inherits. Sizes are in bytes, times in ms. */
struct rs_options {
	uint32_t in_size, out_size;	  /* of the buffers */
	uint32_t send_queue, recv_queue; /* messages */
	uint32_t inline_size, iomaps;
	int recv_wait, send_wait; /* SO_RCVTIMEO and SO_SNDTIMEO, or RS_FOREVER */
	int nodelay, keepalive, keepidle, keepintvl, keepcnt; /* the daemon's TCP does as it is configured */
	int oobinline, reuseaddr, v6only;
	struct linger linger;
};

struct rs {
	int fd;	  /* an eventfd, whose number is the socket; readable to wake sleepers */
	int refs; /* calls that use it, and one until rclose; guarded by the table's lock */
	pthread_mutex_t lock; /* guards all below */
	enum rs_state state;
	int family, flags; /* flags: O_NONBLOCK or 0 */
	int err;	   /* why it is RS_OVER, or 0 after an orderly end */
	bool in_done;	   /* no more data will be read */
	bool out_done;	   /* no more data may be sent */
	struct rs_options opt;
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	struct sockaddr_storage bound; /* by rbind; of no family if it is not */
	struct rdma_cm_id *request; /* that a listener has taken and raccept has not, or NULL */
	struct rs_hello request_hello;

	/* Threads that wait for the descriptors: see rs_wait.c. */
	int sleepers;
	bool woken;
	unsigned int turn; /* how often the events have been taken */

	/* The connection: rs_stream.c. The table that the peer writes to and both buffers are one mapping. */
	struct ibv_comp_channel *completions;
	struct ibv_cq *cq;
	struct rs_table *table;
	uint32_t *messages;
	uint8_t *in, *out;
	struct ibv_mr *table_mr, *in_mr, *out_mr; /* that of out has the messages too */
	uint32_t in_pos, in_len;   /* where the unread data begin, and how many there are */
	uint32_t in_offer;	   /* where the bytes begin that are neither offered to the peer nor unread */
	uint32_t in_free;	   /* and how many there are */
	uint32_t in_offered;	   /* bytes that the peer may still send */
	uint32_t out_pos, out_len; /* where the data begin that are being sent, and how many there are */
	uint32_t sends, controls;  /* work requests outstanding, and those of them that are not for data */
	uint16_t received, granted; /* messages that came, and those that had come at the last grant */
	uint16_t sent, limit;	   /* messages sent, and those that may be */
	uint16_t reserve;	   /* credits that no data takes */
	struct rs_sge offers[RS_OFFERS]; /* of the peer; the first is in use */
	unsigned int next_offer;   /* entry of the table in which the next one will be */
	struct rs_sge peer_table, peer_iomaps;
	unsigned int peer_next;	   /* entry of the peer's table in which it finds the next offer */
	enum rs_bye bye, said;	   /* what is to be said, and what was */
	struct rs_mapping *mappings;
};

/* rs_table.c */

/* From rs_enter to rs_leave a thread can be canceled in rs_sleep only, which is poll(2). That calls canceled then. */
void rs_enter(void);
void rs_leave(void);
int rs_sleep(struct pollfd *p, nfds_t n, int ms, void (*canceled)(void *arg), void *arg);

/* rs_find returns the socket fd, or NULL. */
struct rs *rs_find(int fd);
void rs_drop(struct rs *rs);

/* rs_get is rs_enter and rs_find, and locks the socket; it returns NULL with errno EBADF. */
struct rs *rs_get(int fd);
void rs_put(struct rs *rs);

int rs_insert(struct rs *rs);
void rs_remove(struct rs *rs);

/* rs_socket.c */

/* rs_new makes a socket with the options of from, or with the defaults. It is not in the table. */
struct rs *rs_new(const struct rs *from);
void rs_free(struct rs *rs);

/* All functions below are called with the lock of rs held. */

/* rs_make_id makes the identifier of a socket that has none, with those options that it must know. */
int rs_make_id(struct rs *rs);

/*
 * rs_copy_address stores as much of an address as there is room for, as accept(2) does. A socket of IPv6 has IPv4
 * addresses as ::ffff:192.0.2.1.
 */
void rs_copy_address(const struct rs *rs, struct sockaddr *to, socklen_t *len, const struct sockaddr *from);

/*
 * rs_plain_address stores an address of the program, which must be of the family of the socket. ::ffff:192.0.2.1 becomes
 * 192.0.2.1. It returns 0 or an errno value: ENETUNREACH for such an address if the socket has IPV6_V6ONLY.
 */
int rs_plain_address(const struct rs *rs, struct sockaddr_storage *to, const struct sockaddr *addr, socklen_t len);

/* rs_say_goodbye tells the peer that the socket is closed, and waits until it has that and all data, for at most ms. */
void rs_say_goodbye(struct rs *rs, int ms);

/* rs_connect.c */

/* rs_cm_events handles the events of the connection manager. */
void rs_cm_events(struct rs *rs);

/* rs_end makes a socket RS_OVER. */
void rs_end(struct rs *rs, int err);

/*
 * rs_reopen makes a socket RS_OPEN, and binds it to its address again, if it is RS_OVER without having been connected, and why
 * has been reported. It returns -1 with errno if it cannot.
 */
int rs_reopen(struct rs *rs);

/* rs_report returns why a socket is RS_OVER, or 0. The caller reports it, so the socket is opened again if rs_reopen can. */
int rs_report(struct rs *rs);

/* rs_stream.c */

/* rs_open makes what a connection needs. It returns -1 with errno if it cannot; rs_close undoes it. */
int rs_open(struct rs *rs);
void rs_close(struct rs *rs);

void rs_put_hello(const struct rs *rs, struct rs_hello *h);

/* rs_check_hello reports whether h, of len bytes, is that of a peer that this side can talk to. */
bool rs_check_hello(const void *h, size_t len);
void rs_take_hello(struct rs *rs, const struct rs_hello *h);

/* rs_progress takes completions, and sends what the peer waits for. */
void rs_progress(struct rs *rs);

/* Each of these reports whether a call need not wait any more: to receive, to send, until all has been sent. */
bool rs_can_recv(const struct rs *rs);
bool rs_can_send(const struct rs *rs);
bool rs_all_sent(const struct rs *rs);

/* rs_has_credit reports whether a Write with a message can be sent now. */
bool rs_has_credit(const struct rs *rs);

/*
 * rs_write writes up to len bytes of a vector, from byte skip on, to memory of the peer, and with tell also sends a
 * message about them. It returns how many, or 0 if the connection has ended. There is room for some.
 */
uint32_t rs_write(struct rs *rs, const struct iovec *from, size_t skip, size_t len, const struct rs_sge *to, bool tell);

/* rs_send_iomap writes an entry of the peer's table. */
int rs_send_iomap(struct rs *rs, unsigned int index, const struct rs_iomap *m);

/* rs_io.c */

/* rs_patience returns how long a call may wait, of the time-out of its direction and the flags of send or recv. */
int rs_patience(const struct rs *rs, int ms, int flags);

/*
 * rs_await_room waits until data can be sent to a peer that knows all mappings, with the flags of send. It returns 0, or
 * an errno value.
 */
int rs_await_room(struct rs *rs, int flags);

/* rs_iomap.c */

/* rs_send_iomaps tells the peer of mappings that it does not know. It reports whether it knows all. */
bool rs_send_iomaps(struct rs *rs);

/* rs_iomaps_free ends all mappings of a socket. */
void rs_iomaps_free(struct rs *rs);

/* rs_wait.c */

/*
 * rs_wait makes progress until ready returns true, for at most ms milliseconds or, if ms is RS_FOREVER, without end. It
 * returns 0, or an errno value: EAGAIN when the time is over, EINTR.
 */
int rs_wait(struct rs *rs, bool (*ready)(const struct rs *rs), int ms);

/* rs_ms returns a time, which is not negative, in ms, rounded up, or INT32_MAX if it is longer. */
int rs_ms(const struct timeval *t);

/* rs_wake wakes all threads that wait for rs. */
void rs_wake(const struct rs *rs);

/* rs_option.c */

/* rs_defaults stores the options of a new socket, which /etc/rdma/rsocket may set. */
void rs_defaults(struct rs_options *opt);

#endif
