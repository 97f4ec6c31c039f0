/* Mappings of this process, from /proc/self/maps. Nothing here allocates memory. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ioctl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "internal.h"
#include "vma.h"

/* From linux/fs.h since Linux 6.11. The headers of Debian 12 are older. */
struct procmap_query {
	uint64_t size, query_flags, query_addr;
	uint64_t vma_start, vma_end, vma_flags, vma_page_size, vma_offset, inode;
	uint32_t dev_major, dev_minor, vma_name_size, build_id_size;
	uint64_t vma_name_addr, build_id_addr;
};

#define QUERY _IOWR('f', 17, struct procmap_query)

enum { READABLE = 1, WRITABLE = 2, EXECUTABLE = 4, SHARED = 8, OR_NEXT = 16 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the rest */
static struct kept maps = { .fd = -1 }; /* /proc/self/maps */
static bool text;   /* the kernel has no PROCMAP_QUERY (before Linux 6.11), so the text is parsed */
static char buf[4096];
static int len, at;    /* bytes in buf, and the position in it */
static uintptr_t done; /* end of the last mapping that was parsed */

static void rewind_text(void)
{
	(void)!lseek(maps.fd, 0, SEEK_SET);
	len = at = 0;
}

int vma_begin(void)
{
	int err = 0;

	pthread_mutex_lock(&lock);
	if (!kept_open(&maps)) {
		kept_set(&maps, open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
		if (maps.fd < 0)
			err = -errno;
	}
	if (err)
		pthread_mutex_unlock(&lock);
	else if (text)
		rewind_text();
	return err;
}

void vma_end(void)
{
	pthread_mutex_unlock(&lock);
}

void vma_forked(void)
{
	pthread_mutex_init(&lock, NULL);
	kept_close(&maps); /* the parent's mappings */
}

static int query(uintptr_t addr, struct vma *v)
{
	struct procmap_query q = { .size = sizeof(q), .query_flags = OR_NEXT, .query_addr = addr };

	if (ioctl(maps.fd, QUERY, &q) < 0)
		return -errno;
	*v = (struct vma){
		.start = q.vma_start,
		.end = q.vma_end,
		.prot = (q.vma_flags & READABLE ? PROT_READ : 0) | (q.vma_flags & WRITABLE ? PROT_WRITE : 0) |
			(q.vma_flags & EXECUTABLE ? PROT_EXEC : 0),
		.shared = q.vma_flags & SHARED,
		.huge = q.vma_page_size > (uint64_t)sysconf(_SC_PAGESIZE),
		.offset = q.vma_offset,
		.dev = makedev(q.dev_major, q.dev_minor),
		.inode = q.inode,
	};
	return 0;
}

/* next_line returns the next line of the file without its newline, or NULL at the end. */
static char *next_line(void)
{
	for (;;) {
		char *line = buf + at, *end = memchr(line, '\n', (size_t)(len - at));
		ssize_t n;

		if (end) {
			*end = 0;
			at = (int)(end - buf) + 1;
			return line;
		}
		if (at == 0 && len == (int)sizeof(buf))
			len = 0; /* discard a line longer than any that the kernel writes */
		memmove(buf, line, (size_t)(len - at));
		len -= at;
		at = 0;
		n = read(maps.fd, buf + len, sizeof(buf) - (size_t)len);
		if (n <= 0)
			return NULL;
		len += (int)n;
	}
}

/* parse reads "start-end perms offset major:minor inode name". */
static bool parse(char *line, struct vma *v)
{
	unsigned long major, minor;
	char *p, *perms;

	v->start = strtoul(line, &p, 16);
	if (*p != '-')
		return false;
	v->end = strtoul(p + 1, &p, 16);
	if (*p != ' ' || strlen(p) < 6)
		return false;
	perms = p + 1;
	v->prot = (perms[0] == 'r' ? PROT_READ : 0) | (perms[1] == 'w' ? PROT_WRITE : 0) |
		  (perms[2] == 'x' ? PROT_EXEC : 0);
	v->shared = perms[3] == 's';
	v->offset = strtoul(perms + 5, &p, 16);
	major = strtoul(p + 1, &p, 16);
	minor = strtoul(p + 1, &p, 16);
	v->dev = makedev((unsigned int)major, (unsigned int)minor);
	v->inode = strtoul(p + 1, &p, 10);
	v->huge = strstr(p, "anon_hugepage") || strstr(p, "/hugepages/");
	return true;
}

static bool find_text(uintptr_t addr, struct vma *v)
{
	char *line;

	if (addr < done)
		rewind_text();
	while ((line = next_line()) != NULL) {
		if (!parse(line, v))
			continue;
		done = v->end;
		if (v->end > addr)
			return true;
	}
	return false;
}

bool vma_find(uintptr_t addr, struct vma *v)
{
	if (!text) {
		int err = query(addr, v);

		if (err == 0)
			return true;
		if (err == -ENOENT)
			return false;
		text = true;
		rewind_text();
	}
	return find_text(addr, v);
}
