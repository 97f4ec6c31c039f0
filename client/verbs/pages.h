/*
 * Pages of this program that move into a file and back while its other threads run. iwv_thread_lock is held by the
 * callers of all functions, which return 0 or a negative errno value.
 */
#ifndef PAGES_H
#define PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include "vma.h"

struct iwarpd_device;

static inline uintptr_t page_size(void)
{
	return (uintptr_t)sysconf(_SC_PAGESIZE);
}

/*
 * pages_open opens a userfaultfd, for which it may ask the daemon of dev. If there is none, it is not tried again: pages
 * then move only while no other thread of the program runs.
 */
void pages_open(struct iwarpd_device *dev);

/*
 * pages_rest waits, if there is no userfaultfd, until the library's own thread writes to no memory while the lock is
 * held.
 */
void pages_rest(void);

/*
 * pages_may_move reports whether pages can be moved without losing a store. Pages of a file, such
 * as .data, cannot be protected, so they are moved only while no other thread runs.
 */
bool pages_may_move(bool of_file);

/*
 * pages_own reports whether a range contains this thread's current stack frames or its rseq area. Both are written while
 * the thread moves pages, so it would wait for itself.
 */
bool pages_own(uintptr_t start, uintptr_t end);

/* pages_share moves a range of the private mapping v into the file fd, at the offset that equals its address. */
int pages_share(int fd, uintptr_t start, uintptr_t end, const struct vma *v);

/* pages_take_back makes a range, which maps the file fd at an offset, private again. */
int pages_take_back(int fd, uintptr_t start, uintptr_t end, int prot, uint64_t offset);

/* pages_take_back_alone does so with a whole mapping, whose contents fd has at an offset, in a process that has no other thread. */
int pages_take_back_alone(int fd, const struct vma *v, uint64_t offset);

/* pages_forked forgets the parent's userfaultfd in the child of a fork. */
void pages_forked(void);

#endif
