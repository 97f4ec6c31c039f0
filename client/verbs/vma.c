/* Mappings of this process, by /proc/self/maps. Nothing here allocates memory. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ioctl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "vma.h"

/* Of linux/fs.h since 6.11, which is newer than the headers of Debian 12. */
struct procmap_query {
	uint64_t size, query_flags, query_addr;
	uint64_t vma_start, vma_end, vma_flags, vma_page_size, vma_offset, inode;
	uint32_t dev_major, dev_minor, vma_name_size, build_id_size;
	uint64_t vma_name_addr, build_id_addr;
};

#define QUERY _IOWR('f', 17, struct procmap_query)

enum { READABLE = 1, WRITABLE = 2, EXECUTABLE = 4, SHARED = 8, OR_NEXT = 16 };

int vma_open(struct vma_search *s)
{
	s->fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	s->text = false;
	s->len = s->at = 0;
	s->done = 0;
	return s->fd < 0 ? -errno : 0;
}

void vma_close(struct vma_search *s)
{
	close(s->fd);
}

static int query(const struct vma_search *s, uintptr_t addr, struct vma *v)
{
	struct procmap_query q = { .size = sizeof(q), .query_flags = OR_NEXT, .query_addr = addr };

	if (ioctl(s->fd, QUERY, &q) < 0)
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

/* next_line returns the next line of the file, without its end; NULL: there is none. */
static char *next_line(struct vma_search *s)
{
	for (;;) {
		char *line = s->buf + s->at, *end = memchr(line, '\n', (size_t)(s->len - s->at));
		ssize_t n;

		if (end) {
			*end = 0;
			s->at = (int)(end - s->buf) + 1;
			return line;
		}
		if (s->at == 0 && s->len == (int)sizeof(s->buf))
			s->len = 0; /* a line without end: no such thing */
		memmove(s->buf, line, (size_t)(s->len - s->at));
		s->len -= s->at;
		s->at = 0;
		n = read(s->fd, s->buf + s->len, sizeof(s->buf) - (size_t)s->len);
		if (n <= 0)
			return NULL;
		s->len += (int)n;
	}
}

/* parse reads "start-end perms offset major:minor inode name". */
static bool parse(char *line, struct vma *v)
{
	unsigned long major, minor;
	char *at, *perms;

	v->start = strtoul(line, &at, 16);
	if (*at != '-')
		return false;
	v->end = strtoul(at + 1, &at, 16);
	if (*at != ' ' || strlen(at) < 6)
		return false;
	perms = at + 1;
	v->prot = (perms[0] == 'r' ? PROT_READ : 0) | (perms[1] == 'w' ? PROT_WRITE : 0) |
		  (perms[2] == 'x' ? PROT_EXEC : 0);
	v->shared = perms[3] == 's';
	v->offset = strtoul(perms + 5, &at, 16);
	major = strtoul(at + 1, &at, 16);
	minor = strtoul(at + 1, &at, 16);
	v->dev = makedev((unsigned int)major, (unsigned int)minor);
	v->inode = strtoul(at + 1, &at, 10);
	v->huge = strstr(at, "anon_hugepage") || strstr(at, "/hugepages/");
	return true;
}

static void rewind_text(struct vma_search *s)
{
	(void)!lseek(s->fd, 0, SEEK_SET);
	s->len = s->at = 0;
	s->done = 0;
}

static bool find_text(struct vma_search *s, uintptr_t addr, struct vma *v)
{
	char *line;

	if (addr < s->done)
		rewind_text(s);
	while ((line = next_line(s)) != NULL) {
		if (!parse(line, v))
			continue;
		s->done = v->end;
		if (v->end > addr)
			return true;
	}
	return false;
}

bool vma_find(struct vma_search *s, uintptr_t addr, struct vma *v)
{
	if (!s->text) {
		int err = query(s, addr, v);

		if (err == 0)
			return true;
		if (err == -ENOENT)
			return false;
		s->text = true;
		rewind_text(s);
	}
	return find_text(s, addr, v);
}
