/* Descriptors that a library keeps open, of libiwarpd and of client/verbs. */
#ifndef KEPT_H
#define KEPT_H

#include <stdbool.h>
#include <sys/types.h>

/*
 * A descriptor that the library keeps, and which file it is. The program may close it, as daemons do with all that they do not
 * know, and its number may then be that of another file. fd is -1 if there is none. Not an eventfd or
 * an epoll, all of which have one inode.
 */
struct kept {
	int fd;
	dev_t dev;
	ino_t inode;
};

void kept_set(struct kept *k, int fd);

/* kept_open reports whether there is a descriptor that the program has not closed. */
bool kept_open(const struct kept *k);

/* kept_close closes it, unless the program has, and forgets it. */
void kept_close(struct kept *k);

#endif
