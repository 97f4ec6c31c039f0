/* What test programs share. CHECK ends one unless x is true. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x)                                                                            \
	do {                                                                                \
		if (!(x)) {                                                                 \
			printf("line %d: failed: %s: %s\n", __LINE__, #x, strerror(errno)); \
			exit(1);                                                            \
		}                                                                           \
	} while (0)

/* open_files returns the number of descriptors of this process. */
static inline int open_files(void)
{
	DIR *d = opendir("/proc/self/fd");
	int n = 0;

	CHECK(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}
