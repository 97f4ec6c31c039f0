/* What a program waits for: a socket of the daemon's, and what the library has taken from it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "internal.h"

static int watch(int epoll, int fd)
{
	struct epoll_event ev = { .events = EPOLLIN };

	return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &ev);
}

static void close_all(struct waiter *w)
{
	close_fd(w->sock.fd);
	close_fd(w->more);
	if (w->epoll != w->sock.fd)
		close_fd(w->epoll);
	w->sock.fd = w->more = w->epoll = -1;
}

int waiter_open(struct waiter *w, int sock)
{
	int err;

	kept_set(&w->sock, sock);
	w->more = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	w->epoll = epoll_create1(EPOLL_CLOEXEC);
	if (w->more >= 0 && w->epoll >= 0 && watch(w->epoll, sock) == 0 && watch(w->epoll, w->more) == 0)
		return 0;
	err = -errno;
	close_all(w);
	return err;
}

/* watches reports whether an epoll has been given the file fd, under that number. */
static bool watches(int epoll, int fd)
{
	struct epoll_event none = { 0 };

	if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &none) < 0)
		return errno == EEXIST;
	epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL); /* it is the program's, which could at most have got an EPOLLHUP or EPOLLERR */
	return false;
}

/*
 * is_open reports whether the program has not closed the descriptors. All epolls have one inode, and so have all eventfds. But only
 * ours watches our socket, whose number the program does not know, and only our eventfd is watched by our epoll.
 */
static bool is_open(const struct waiter *w)
{
	if (!kept_open(&w->sock))
		return false;
	return w->epoll == w->sock.fd || (watches(w->epoll, w->sock.fd) && watches(w->epoll, w->more));
}

void waiter_close(struct waiter *w)
{
	if (w->epoll != w->sock.fd || kept_open(&w->sock))
		close_all(w);
}

/*
 * never_readable makes the descriptor fd one of a file that is never readable, or closes it and returns -1. The number is never free
 * meanwhile, which another thread could get. The file is a socket, since each has an inode of its own.
 */
static int never_readable(int fd)
{
	int sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), done = dup3(sock, fd, O_CLOEXEC);

	if (done < 0)
		close(fd);
	close_fd(sock);
	return done;
}

bool waiter_after_fork(struct waiter *w)
{
	bool open = is_open(w);

	if (open && w->epoll == w->sock.fd) /* the parent is the child of a fork too */
		return true;
	if (open) { /* first these, so that there is a descriptor */
		close_fd(w->sock.fd);
		close_fd(w->more);
	}
	kept_set(&w->sock, open ? never_readable(w->epoll) : -1);
	w->more = -1;
	w->epoll = w->sock.fd;
	return open;
}

void kept_after_fork(struct kept *k)
{
	kept_set(k, kept_open(k) ? never_readable(k->fd) : -1);
}
