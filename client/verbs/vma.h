/* Mappings of this process. */
#ifndef VMA_H
#define VMA_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct vma {
	uintptr_t start, end;
	int prot; /* PROT_* */
	bool shared, huge;
	uint64_t offset; /* in the file */
	dev_t dev;
	ino_t inode; /* 0: anonymous */
};

/* A search keeps a descriptor of /proc/self/maps open. */
struct vma_search {
	int fd;
	bool text; /* the kernel has no PROCMAP_QUERY (before Linux 6.11) */
	int len, at; /* of buf, where text is read */
	uintptr_t done; /* end of the last mapping that text has given */
	char buf[4096];
};

int vma_open(struct vma_search *s); /* 0, or a negative errno value */
void vma_close(struct vma_search *s);

/* vma_find returns the mapping that holds addr, or else the next one; false: there is none. */
bool vma_find(struct vma_search *s, uintptr_t addr, struct vma *v);

#endif
