/* Requests and their replies, and reading from the socket. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#include "internal.h"

#define NSEC INT64_C(1000000000)

/* In nanoseconds; see await_packet. */
enum {
	POLL = 100000,
	LONG_YIELD = 1000000,
	REST = 100000000,
};

int64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * NSEC + t.tv_nsec;
}

int64_t deadline_in(int timeout_ms)
{
	return timeout_ms < 0 ? -1 : now_ns() + (int64_t)timeout_ms * 1000000;
}

int wait_fd(int fd, int64_t deadline)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct timespec t = { 0, 0 };
	int n;

	if (deadline >= 0) {
		int64_t left = deadline - now_ns();

		if (left > 0)
			t = (struct timespec){ left / NSEC, left % NSEC };
	}
	n = ppoll(&p, 1, deadline < 0 ? NULL : &t, NULL);
	if (n < 0)
		return -errno;
	return n == 0 ? -ETIMEDOUT : 0;
}

/* device_died marks the device as dead: the connection to the daemon is lost. */
static void device_died(struct iwarpd_device *dev, int err)
{
	if (dev->dead)
		return;
	dev->dead = err;
	shutdown(dev->wait.sock.fd, SHUT_RDWR); /* iwarpd_event_fd stays readable */
	for (struct object *o = dev->objects.next; o != &dev->objects; o = o->next)
		if (o->ended)
			o->ended(o);
}

/* listens reports whether device_call accepts a reply to a Listen. */
static bool listens(const struct packet *p)
{
	return p->msg->reply->body_case == PB__REPLY__BODY_LISTEN && !p->msg->reply->error && p->num_fds == 0 && !p->lost;
}

/* reply_arrived passes a packet to the call that waits for it, if any, and returns whether there is one. */
static bool reply_arrived(struct iwarpd_device *dev, struct packet *p)
{
	for (struct call **at = &dev->calls; *at; at = &(*at)->next) {
		struct call *c = *at;

		if (c->req->id != p->msg->reply->id)
			continue;
		*at = c->next;
		c->packet = *p;
		if (c->req->body_case == PB__REQUEST__BODY_LISTEN && listens(p))
			dev->on_listen(c->req, p->msg->reply->listen);
		c->done = true;
		return true;
	}
	packet_free(p); /* reply to device_post */
	return false;
}

/* note_cut_off stores the reason in the daemon's last message. */
static void note_cut_off(struct iwarpd_device *dev, const Pb__CutOff *m)
{
	if (m->error)
		strncpy(dev->why, m->error->text, sizeof(dev->why) - 1);
}

/* packet_arrived processes a packet and returns whether a call waits for it. */
static bool packet_arrived(struct iwarpd_device *dev, struct packet *p)
{
	int err;

	switch (p->msg->body_case) {
	case PB__MESSAGE__BODY_REPLY:
		return reply_arrived(dev, p);
	case PB__MESSAGE__BODY_EVENT:
		close_fds(p->fds, p->num_fds);
		if (p->msg->event->body_case == PB__EVENT__BODY_CUT_OFF)
			note_cut_off(dev, p->msg->event->cut_off);
		err = dev->on_event(dev, p->msg);
		if (err)
			device_died(dev, err);
		return false;
	default: /* of a later protocol version */
		packet_free(p);
		return false;
	}
}

/* post_due lets the objects post whose requests did not fit the socket, as long as they do. */
static void post_due(struct iwarpd_device *dev)
{
	struct object *o = dev->objects.next;

	if (!dev->due)
		return;
	for (dev->due = false; o != &dev->objects && !dev->due; o = o->next)
		if (o->due)
			o->ended(o);
}

/* received processes the result n of socket_recv and returns whether to read on. */
static bool received(struct iwarpd_device *dev, int n, struct packet *p)
{
	bool more;

	if (n < 0)
		device_died(dev, n);
	more = n > 0 && !packet_arrived(dev, p);
	post_due(dev); /* the packet may be the reply to a request that filled the socket */
	return more;
}

/* read_packets reads the available packets, up to a limit or the end of a call. */
static void read_packets(struct iwarpd_device *dev)
{
	struct packet p;

	for (int i = 0; i < 64 && !dev->dead; i++)
		if (!received(dev, socket_recv(dev->wait.sock.fd, &dev->in, &p, false), &p))
			return;
}

/* watch_socket makes iwarpd_event_fd readable, or not, when the socket is. */
static void watch_socket(struct iwarpd_device *dev, bool yes)
{
	struct epoll_event ev = { .events = yes ? EPOLLIN : 0 };

	epoll_ctl(dev->wait.epoll, EPOLL_CTL_MOD, dev->wait.sock.fd, &ev);
}

/*
 * begin_turn makes the caller read the socket on behalf of all threads, until end_turn. If
 * the caller sleeps, a thread that waits for iwarpd_event_fd sleeps on meanwhile, unless
 * there is an event.
 */
static void begin_turn(struct iwarpd_device *dev, bool sleeps)
{
	dev->reading = true;
	if (sleeps)
		watch_socket(dev, false);
}

static void end_turn(struct iwarpd_device *dev, bool sleeps)
{
	dev->reading = false;
	if (sleeps)
		watch_socket(dev, true);
	pthread_cond_broadcast(&dev->turn);
}

/* A turn of a thread that may be canceled while it waits for the socket. */
struct turn {
	struct iwarpd_device *dev;
	bool sleeps;
};

/* turn_canceled leaves the socket to another thread. */
static void turn_canceled(void *arg)
{
	const struct turn *t = arg;

	pthread_mutex_lock(&t->dev->lock);
	end_turn(t->dev, t->sleeps);
	pthread_mutex_unlock(&t->dev->lock);
}

static int read_turn(struct iwarpd_device *dev, int64_t deadline, int cancel)
{
	struct turn t = { dev, deadline < 0 || deadline > now_ns() };
	int err, state;

	begin_turn(dev, t.sleeps);
	pthread_mutex_unlock(&dev->lock);
	pthread_cleanup_push(turn_canceled, &t);
	pthread_setcancelstate(cancel, &state);
	err = wait_fd(dev->wait.sock.fd, deadline);
	pthread_setcancelstate(state, &state);
	pthread_cleanup_pop(0);
	pthread_mutex_lock(&dev->lock);
	if (!err)
		read_packets(dev);
	end_turn(dev, t.sleeps);
	return err;
}

static void unlock(void *lock)
{
	pthread_mutex_unlock(lock);
}

/* await_turn waits until the reading thread has read something. */
static int await_turn(struct iwarpd_device *dev, int64_t deadline, int cancel)
{
	struct timespec t = { deadline / NSEC, deadline % NSEC };
	int err, state;

	pthread_cleanup_push(unlock, &dev->lock);
	pthread_setcancelstate(cancel, &state);
	err = deadline < 0 ? pthread_cond_wait(&dev->turn, &dev->lock) :
			     pthread_cond_timedwait(&dev->turn, &dev->lock, &t);
	pthread_setcancelstate(state, &state);
	pthread_cleanup_pop(0);
	return -err;
}

int device_wait(struct iwarpd_device *dev, bool (*until)(void *arg), void *arg, int64_t deadline, int cancel)
{
	int err = 0;

	while (!until(arg)) {
		if (dev->dead)
			return dev->dead;
		if (err)
			return err;
		err = dev->reading ? await_turn(dev, deadline, cancel) : read_turn(dev, deadline, cancel);
	}
	return 0;
}

static bool call_done(void *arg)
{
	return ((struct call *)arg)->done;
}

bool device_listening(const struct iwarpd_device *dev)
{
	for (const struct call *c = dev->calls; c; c = c->next)
		if (c->req->body_case == PB__REQUEST__BODY_LISTEN)
			return true;
	return false;
}

static void forget_call(struct iwarpd_device *dev, struct call *c)
{
	for (struct call **at = &dev->calls; *at; at = &(*at)->next) {
		if (*at == c) {
			*at = c->next;
			return;
		}
	}
}

/*
 * await_packet waits for a packet, which is probably the reply. At first it polls, since the
 * daemon often takes less time than sleeping and waking would. Between polls it yields the
 * CPU, as the daemon may need it. If another program takes the CPU then, polling is slower
 * than sleeping, so it polls no more for a while. It does not sleep if there is a deadline.
 */
static int await_packet(struct iwarpd_device *dev, struct packet *p)
{
	int64_t now = now_ns(), end = now + POLL;

	while (now >= dev->rest && now < end) {
		int64_t before = now;
		int n = socket_recv(dev->wait.sock.fd, &dev->in, p, false);

		if (n != 0)
			return n;
		sched_yield();
		now = now_ns();
		if (now - before > LONG_YIELD)
			dev->rest = now + REST;
	}
	return socket_recv(dev->wait.sock.fd, &dev->in, p, dev->deadline < 0);
}

/*
 * send_request sends a request. The caller's turn begins before, if no other thread is
 * reading: the reply may come at once and should wake no other thread. But nobody has a turn
 * while the socket is full, as the daemon may wait for replies to be read. The lock is held.
 */
static int send_request(struct iwarpd_device *dev, Pb__Request *req, int fd)
{
	bool turn = !dev->reading;
	struct packet p;
	int n = 0, err;

	if (turn)
		begin_turn(dev, true);
	pthread_mutex_unlock(&dev->lock);
	err = socket_send(dev->wait.sock.fd, req, fd, !turn);
	if (turn && !err)
		n = await_packet(dev, &p);
	pthread_mutex_lock(&dev->lock);
	if (turn) {
		received(dev, n, &p);
		end_turn(dev, true);
	}
	if (!turn || err != -EAGAIN)
		return err;
	pthread_mutex_unlock(&dev->lock);
	err = socket_send(dev->wait.sock.fd, req, fd, true);
	pthread_mutex_lock(&dev->lock);
	return err;
}

/* exchange sends a request and waits for the reply. */
static int exchange(struct iwarpd_device *dev, Pb__Request *req, int fd, struct call *c)
{
	int err;

	pthread_mutex_lock(&dev->lock);
	c->req = req;
	req->id = ++dev->last_id;
	c->next = dev->calls;
	dev->calls = c;
	err = dev->dead ? dev->dead : send_request(dev, req, fd);
	/* If the daemon is gone, its last packet may be queued and say why. */
	if (!err || err == -EPIPE || err == -ECONNRESET)
		do {
			err = device_wait(dev, call_done, c, dev->deadline, PTHREAD_CANCEL_DISABLE);
		} while (err == -EINTR); /* the daemon executes the request anyway */
	else if (fd < 0 && err != -ENOMEM && err != -EMSGSIZE)
		device_died(dev, err); /* a sandbox, for one: what is destroyed from now on ends with the connection */
	forget_call(dev, c);
	pthread_mutex_unlock(&dev->lock);
	return err;
}

bool device_dead(struct iwarpd_device *dev)
{
	bool dead;

	pthread_mutex_lock(&dev->lock);
	dead = dev->dead != 0;
	pthread_mutex_unlock(&dev->lock);
	return dead;
}

int device_gone(struct iwarpd_device *dev, struct iwarpd_error *e)
{
	int err;

	pthread_mutex_lock(&dev->lock);
	if (dev->why[0])
		err = set_error(e, -EPIPE, "the daemon has cut this client off: %s", dev->why);
	else
		err = set_error(e, -EPIPE, "the daemon is gone");
	pthread_mutex_unlock(&dev->lock);
	return err;
}

#define DESTROY(kind, M, F, f, member)              \
	case OBJECT_##kind: {                       \
		Pb__##M body = PB__##F##__INIT;     \
		Pb__Request req = REQUEST(f, F, &body); \
                                                    \
		body.member = handle;               \
		return device_do(dev, &req, e);     \
	}

int device_destroy(struct iwarpd_device *dev, enum object_kind kind, uint32_t handle, struct iwarpd_error *e)
{
	switch (kind) {
		DESTROY(PD, DeallocPD, DEALLOC_PD, dealloc_pd, pd)
		DESTROY(MR, DeregisterMR, DEREGISTER_MR, deregister_mr, mr)
		DESTROY(MW, DeallocMW, DEALLOC_MW, dealloc_mw, mw)
		DESTROY(CHANNEL, DestroyChannel, DESTROY_CHANNEL, destroy_channel, channel)
		DESTROY(CQ, DestroyCQ, DESTROY_CQ, destroy_cq, cq)
		DESTROY(SRQ, DestroySRQ, DESTROY_SRQ, destroy_srq, srq)
		DESTROY(QP, DestroyQP, DESTROY_QP, destroy_qp, qp)
		DESTROY(LISTENER, Unlisten, UNLISTEN, unlisten, listen)
	}
	return -EINVAL;
}

/* give_back destroys the object in a reply that cannot be used. */
static void give_back(struct iwarpd_device *dev, const Pb__Reply *r)
{
	switch (r->body_case) {
	case PB__REPLY__BODY_CHANNEL:
		device_destroy(dev, OBJECT_CHANNEL, r->channel->channel, NULL);
		break;
	case PB__REPLY__BODY_CQ:
		device_destroy(dev, OBJECT_CQ, r->cq->cq, NULL);
		break;
	case PB__REPLY__BODY_QP:
		device_destroy(dev, OBJECT_QP, r->qp->qp, NULL);
		break;
	case PB__REPLY__BODY_SRQ:
		device_destroy(dev, OBJECT_SRQ, r->srq->srq, NULL);
		break;
	default:
		break;
	}
}

int create_done(struct iwarpd_device *dev, struct packet *p, int err, const char *what, struct iwarpd_error *e)
{
	if (err)
		give_back(dev, p->msg->reply);
	packet_free(p);
	return err ? set_error(e, err, "%s: %s", what, strerror(-err)) : 0;
}

void device_broken(struct iwarpd_device *dev, int err)
{
	pthread_mutex_lock(&dev->lock);
	device_died(dev, err);
	pthread_mutex_unlock(&dev->lock);
}

/*
 * descriptors_lost returns the error for a reply whose descriptors were dropped
 * because the process has too many open.
 */
static int descriptors_lost(struct iwarpd_device *dev, const Pb__Request *req, const Pb__Reply *reply,
			    struct iwarpd_error *e)
{
	if (req->body_case == PB__REQUEST__BODY_RESIZE_CQ)
		device_broken(dev, -EMFILE); /* completions would be lost */
	else
		give_back(dev, reply);
	return set_error(e, -EMFILE, "too many open files: raise RLIMIT_NOFILE (ulimit -n)");
}

int device_call(struct iwarpd_device *dev, Pb__Request *req, int fd, Pb__Reply__BodyCase body, int num_fds,
		struct packet *p, struct iwarpd_error *e)
{
	struct call c = { 0 };
	const Pb__Reply *reply;
	int err, state;

	/* A thread that is canceled while it reads would leave all others waiting. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	err = exchange(dev, req, fd, &c);
	pthread_setcancelstate(state, &state);
	*p = c.packet;
	if (err == -EPIPE)
		return device_gone(dev, e);
	if (err)
		return set_error(e, err, "request to the daemon: %s", strerror(-err));
	reply = p->msg->reply;
	if (reply->error) {
		err = pb_error(e, reply->error);
		packet_free(p);
		return err;
	}
	if (p->lost) {
		err = descriptors_lost(dev, req, reply, e);
		packet_free(p);
		return err;
	}
	if ((body != PB__REPLY__BODY__NOT_SET && reply->body_case != body) || (num_fds >= 0 && p->num_fds != num_fds)) {
		packet_free(p);
		return set_error(e, -EPROTO, "invalid reply from the daemon");
	}
	return 0;
}

int device_do(struct iwarpd_device *dev, Pb__Request *req, struct iwarpd_error *e)
{
	struct packet p;
	int err = device_call(dev, req, -1, PB__REPLY__BODY__NOT_SET, 0, &p, e);

	if (!err)
		packet_free(&p);
	return err;
}

int device_post(struct iwarpd_device *dev, Pb__Request *req)
{
	int err, state;

	if (dev->dead)
		return dev->dead;
	req->id = ++dev->last_id;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); /* nobody would release the lock */
	err = socket_send(dev->wait.sock.fd, req, -1, false);
	pthread_setcancelstate(state, &state);
	return err;
}
