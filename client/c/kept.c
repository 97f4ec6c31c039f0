/* Descriptors that a library keeps open. */
#define _GNU_SOURCE
#include <sys/stat.h>
#include <unistd.h>

#include "kept.h"

void kept_set(struct kept *k, int fd)
{
	struct stat st;

	*k = (struct kept){ .fd = fd };
	if (fd >= 0 && fstat(fd, &st) == 0) {
		k->dev = st.st_dev;
		k->inode = st.st_ino;
	}
}

bool kept_open(const struct kept *k)
{
	struct stat st;

	return k->fd >= 0 && fstat(k->fd, &st) == 0 && st.st_dev == k->dev && st.st_ino == k->inode;
}

void kept_close(struct kept *k)
{
	if (kept_open(k))
		close(k->fd);
	k->fd = -1;
}
