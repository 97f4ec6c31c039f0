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

/*
 * vma_begin begins a search, and vma_end ends it. One thread at a time can search; others
 * wait. vma_begin returns 0 or a negative errno value. Its first call opens a descriptor
 * that stays open.
 */
int vma_begin(void);
void vma_end(void);

/*
 * vma_find finds the mapping that holds addr, or else the next one. It returns false if
 * there is none.
 */
bool vma_find(uintptr_t addr, struct vma *v);

/* vma_forked makes searches in the child of a fork use the child's mappings. */
void vma_forked(void);

#endif
