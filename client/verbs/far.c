/*
 * Far memory: memory that the daemon copies through /proc/self/mem, because its pages
 * cannot be moved.
 */
#include <errno.h>
#include <sys/mman.h>

#include "internal.h"
#include "vma.h"

/*
 * The daemon's writes would ignore read-only mappings, so far_check refuses accesses that
 * the program itself may not make.
 */
int far_check(uintptr_t addr, size_t length, bool writable)
{
	const int need = PROT_READ | (writable ? PROT_WRITE : 0);
	uintptr_t end = addr + length;
	struct vma v;
	int err = vma_begin();

	if (err)
		return err;
	while (addr < end && vma_find(addr, &v) && v.start <= addr && (v.prot & need) == need)
		addr = v.end;
	vma_end();
	return addr < end ? -EFAULT : 0;
}
