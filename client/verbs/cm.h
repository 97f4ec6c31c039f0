/* Declarations shared by the files of librdmacm.so.1. */
#ifndef CM_H
#define CM_H

#include <errno.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdbool.h>

#include "internal.h"

/* real_cm_symbol returns a function of the distribution's librdmacm, or NULL. */
void *real_cm_symbol(const char *name);

/*
 * FORWARD(f, args) returns from a function by calling the distribution's f if iwarpd is
 * switched off and it has f.
 */
#define FORWARD(f, ...)                                                                                        \
	do {                                                                                                   \
		__typeof__(&f) real_##f = iwv_settings()->off ? (__typeof__(&f))real_cm_symbol(#f) : NULL;     \
		if (real_##f)                                                                                  \
			return real_##f(__VA_ARGS__);                                                          \
	} while (0)

struct channel {
	struct rdma_event_channel pub;
	struct event_queue queue;
	struct channel *next; /* list of all channels */
};

static inline struct channel *channel_of(struct rdma_event_channel *pub)
{
	return container_of(pub, struct channel, pub);
}

/*
 * An endpoint is a listener of iwarpd. An id bound to every address has one for each
 * device. An id bound to every IPv4 address and one bound to every IPv6 address may share
 * a listener.
 */
struct endpoint {
	struct endpoint *next;
	struct context *ctx;
	struct iwarpd_listener *listener;
};

enum { MAX_REQUESTS = 1024 }; /* that a listener holds at most */

/* The state of an id, as in the kernel's rdma_cm. A connect request begins in ID_CONNECT. */
enum id_state { ID_IDLE, ID_BOUND, ID_LISTEN, ID_ADDR_RESOLVED, ID_ROUTE_RESOLVED, ID_CONNECT };

struct id {
	struct rdma_cm_id pub;
	struct id *next;   /* list of all ids */
	struct channel *channel; /* of its events, or NULL if the program has destroyed it */
	bool sync;         /* calls wait for their results; the id owns its channel */
	enum id_state state;
	bool afonly;       /* RDMA_OPTION_ID_AFONLY */
	bool reuse;        /* RDMA_OPTION_ID_REUSEADDR: another id may be bound to the same port */
	int backlog;
	int dscp;          /* of struct iwarpd_startup */
	uint8_t ack_timeout; /* RDMA_OPTION_ID_ACK_TIMEOUT, which only ibv_query_qp returns: TCP has its own time-out */
	struct endpoint *endpoints;
	int refused;       /* why the id could not listen on a device the last time, or 0 */
	uint32_t conn;     /* connect request to answer, or 0 */
	bool request_gone; /* there was one to answer, which the peer has withdrawn: see cm_withdrawn */
	int end;           /* why the connection has ended, as a negative errno value, or 0 after a graceful close */
	bool unreported; /* its only event is the connect request, which the program has not taken */
	unsigned int requests; /* connect requests of the listener that the program has not taken */
	unsigned int events; /* returned by rdma_get_cm_event and not acknowledged */
	struct ibv_qp_init_attr *ep_attr; /* of rdma_create_ep, for its connections */
	void *connect;     /* private data of the rdma_addrinfo of an active endpoint */
	size_t connect_len;
};

static inline struct id *id_of(struct rdma_cm_id *pub)
{
	return container_of(pub, struct id, pub);
}

/* An event with its private data. */
struct cm_event {
	struct queue_item item;
	struct rdma_cm_event pub;
	unsigned int generation; /* of the process that has taken it */
	uint8_t data[IWARPD_MAX_PRIVATE_DATA];
};

/* set_errno returns 0, or -1 with errno set to err, which is positive. */
static inline int set_errno(int err)
{
	if (!err)
		return 0;
	errno = err;
	return -1;
}

/* cm_event.c */

/* event_new makes an event of id. It returns NULL if there is no memory. */
struct cm_event *event_new(struct id *id, enum rdma_cm_event_type type, int status);
void event_post(struct cm_event *e);

/* event_simple posts an event that has only a status. */
void event_simple(struct id *id, enum rdma_cm_event_type type, int status);

/* sync_wait waits for the next event of a synchronous id, and returns its result. */
int sync_wait(struct id *id);

/*
 * call_end releases the lock at the end of a call with the error err, and waits for the result if the id is synchronous. Another
 * thread may have taken the event of the call since, and ended the id.
 */
int call_end(struct id *id, int err);

/* sync_done acknowledges the event that a synchronous id holds. */
void sync_done(struct id *id);

/* events_drop frees the events of id that the program has not taken, and the ids of its connect requests. */
void events_drop(struct id *id);

/* cm_id.c: called with the lock held, but for listeners_follow */

extern struct id *ids;
struct id *id_new(struct rdma_event_channel *channel, void *context, enum rdma_port_space ps, enum ibv_qp_type type);
void close_endpoints(struct id *id); /* ends its listeners. The lock is held. */
int id_bind_device(struct id *id, struct context *c); /* returns 0 or an errno value */

/* id_drop rejects the connect request of an id that is not reported, and frees the id. */
void id_drop(struct id *id);

/* listeners_follow makes the ids that listen on every address listen on all devices, which come and go with their daemons. */
void listeners_follow(void);

/* listeners_forget frees the listeners of a daemon that has ended. */
void listeners_forget(const struct context *c);

/* id_qp returns the QP that carries the connection of id, or NULL. */
struct qp *id_qp(const struct id *id);

/* cm_device.c */

/* The functions from here to cm_route are called without the lock, since a daemon may take seconds to answer. */

/* cm_scan looks for daemons, and opens the devices that are present. */
void cm_scan(enum scan how);

/* cm_find looks for the device with the address a, unless it is open, or for all daemons that were not there before. */
void cm_find(const struct sockaddr *a);

/*
 * cm_route stores the source address for dst by the kernel's routes, or the unspecified address if they have none. A
 * daemon may be in another network namespace. It returns -1 with errno if the process can have no socket.
 */
int cm_route(const struct sockaddr *dst, struct sockaddr_storage *src);

/* context_live reports whether c is a context, and that of a daemon that has not ended. */
static inline bool context_live(const struct context *c)
{
	return c && !atomic_load(&c->gone);
}

/* context_with returns the context whose device has the address a, or NULL. The lock is held. */
struct context *context_with(const struct sockaddr *a);

/*
 * context_for returns the context of the device that reaches dst. src is what cm_route has stored, and becomes the
 * source address. Any device reaches this host's loopback address. In a container, whose routes are not those of the
 * daemon, it is the first device. The lock is held.
 */
struct context *context_for(const struct sockaddr *dst, struct sockaddr_storage *src);

/* cm_addr.c */

socklen_t addr_len(const struct sockaddr *a); /* 0 if iwarpd does not support the family */
bool addr_any(const struct sockaddr *a); /* unspecified or loopback: rdma_cm treats both alike */
bool addr_same(const struct sockaddr *a, const struct sockaddr *b); /* without the port */
uint16_t addr_port(const struct sockaddr *a);
void addr_set_port(struct sockaddr *a, uint16_t port);

/*
 * addr_text writes "192.0.2.1:7174" or "[2001:db8::1]:7174", or the address alone if port
 * is false.
 */
void addr_text(const struct sockaddr *a, bool port, char text[128]);

/* addr_parse reads an address and port of the daemon. Link-local addresses, which have no zone there, get that of the device. */
bool addr_parse(const char *text, const struct device *d, struct sockaddr_storage *a);

/* cm_connect.c */

/* cm_withdrawn reports whether the peer of a connect request has withdrawn it. The lock is not held. */
bool cm_withdrawn(const struct id *id);

#endif
