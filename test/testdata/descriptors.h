/* What test programs in C do with descriptors. */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* open_files returns the number of descriptors of this process. */
static inline int open_files(void)
{
	DIR *d = opendir("/proc/self/fd");
	int n = 0;

	if (!d)
		abort();
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

/* lose_descriptors makes a received message one whose descriptors the kernel has dropped, because the process has too many. */
static inline void lose_descriptors(struct msghdr *h)
{
	const struct cmsghdr *c = CMSG_FIRSTHDR(h);

	for (size_t i = 0; CMSG_LEN(i * sizeof(int)) < c->cmsg_len; i++) {
		int lost;

		memcpy(&lost, CMSG_DATA(c) + i * sizeof(int), sizeof(lost));
		close(lost);
	}
	h->msg_controllen = 0;
	h->msg_flags |= MSG_CTRUNC;
}
