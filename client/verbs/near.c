/*
 * Near memory: pages of the program that the daemon maps too.
 *
 * They are in a memfd as large as the address space, each at the offset that equals its
 * address. Registering a range copies its pages into the file and maps the file over
 * them. When no region uses a page any more, it becomes private again. pages.h moves them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "internal.h"
#include "pages.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

enum {
	SPARE = 16 << 20, /* bytes of the file that are kept though no region uses them */
	MAX_SPARES = 16,
};

#define FILE_SIZE (INT64_C(1) << 56) /* the address space with five-level page tables */

/* A range of pages that a region uses. */
struct use {
	uintptr_t start, end;
};

/* iwv_thread_lock guards all of this. */
static struct kept file = { .fd = -1 };
static struct use spares[MAX_SPARES]; /* pages that are kept, oldest first */
static size_t num_spares;
static bool left; /* the program may still have pages of the file that no region uses */
static struct use *uses;
static size_t num_uses, room;

extern void *__libc_stack_end; /* stack of the first thread */

static void make_ends(void);

static int make_file(void)
{
	const unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
	int fd;

	if (file.fd >= 0)
		return kept_open(&file) ? 0 : -EBADF;
	fd = memfd_create("iwarpd-near", flags | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL) /* before Linux 6.3 */
		fd = memfd_create("iwarpd-near", flags);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, FILE_SIZE) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0) {
		int err = -errno;

		close(fd);
		return err;
	}
	kept_set(&file, fd);
	make_ends();
	return 0;
}

static bool is_file(const struct vma *v)
{
	return v->inode == file.inode && v->dev == file.dev && v->shared;
}

/* in_place reports whether v maps the file at the offset that equals its address. */
static bool in_place(const struct vma *v)
{
	return is_file(v) && v->offset == v->start;
}

/* holds_stack reports whether a mapping is the stack of the first thread or of this one. */
static bool holds_stack(const struct vma *v)
{
	uintptr_t first = (uintptr_t)__libc_stack_end, mine = (uintptr_t)__builtin_frame_address(0);

	return (first >= v->start && first < v->end) || (mine >= v->start && mine < v->end);
}

/* usable returns 0 if the pages of a mapping are in the file or can be moved there. */
static int usable(const struct vma *v, bool writable)
{
	if (!(v->prot & PROT_READ) || (writable && !(v->prot & PROT_WRITE)))
		return -EFAULT;
	if (in_place(v))
		return 0;
	return v->shared || v->huge || (v->prot & PROT_EXEC) || holds_stack(v) ? -EOPNOTSUPP : 0;
}

/* The pages of a range that must be moved. */
struct todo {
	bool any, of_file;
};

/* check returns 0 if all of a range can be near memory. */
static int check(uintptr_t start, uintptr_t end, bool writable, struct todo *todo)
{
	struct vma v;

	*todo = (struct todo){ 0 };
	for (uintptr_t at = start; at < end; at = v.end) {
		int err;

		if (!vma_find(at, &v) || v.start > at)
			return -EFAULT;
		err = usable(&v, writable);
		if (err)
			return err;
		todo->any |= !in_place(&v);
		todo->of_file |= !in_place(&v) && v.inode != 0;
	}
	return todo->any && pages_own(start, end) ? -EOPNOTSUPP : 0;
}

/* used reports whether a region uses a page of the range. */
static bool used(uintptr_t start, uintptr_t end)
{
	for (size_t i = 0; i < num_uses; i++)
		if (uses[i].start < end && start < uses[i].end)
			return true;
	return false;
}

/*
 * recover makes pages of a range of the file private that mremap has moved, for example because
 * the program enlarged registered memory. The range is then free.
 */
static int recover(uintptr_t start, uintptr_t end)
{
	uintptr_t at = 0;
	struct vma v;
	int err = 0;

	while (!err && vma_find(at, &v)) {
		uintptr_t from = v.offset > start ? v.offset : start; /* in the file */
		uintptr_t to = least(v.offset + (v.end - v.start), end);

		at = v.end;
		if (is_file(&v) && from < to)
			err = pages_take_back(file.fd, v.start + (from - v.offset), v.start + (to - v.offset), v.prot, from);
	}
	return err;
}

/* punch frees the pages of the file in a range. */
static void punch(uintptr_t start, uintptr_t end)
{
	if (fallocate(file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)start, (off_t)(end - start)) < 0)
		iwv_log("near memory: free pages: %s", strerror(errno));
}

/* drop_spare removes an entry of spares. */
static void drop_spare(size_t i)
{
	num_spares--;
	for (; i < num_spares; i++)
		spares[i] = spares[i + 1];
}

/*
 * keep keeps the pages of the file in a range that no region uses. Programs often register
 * the same addresses again, and copying to new pages takes several times as long.
 */
static void keep(uintptr_t start, uintptr_t end)
{
	size_t bytes = end - start;

	for (size_t i = 0; i < num_spares; i++)
		bytes += spares[i].end - spares[i].start;
	while (num_spares > 0 && (bytes > SPARE || num_spares == MAX_SPARES)) {
		bytes -= spares[0].end - spares[0].start;
		punch(spares[0].start, spares[0].end);
		drop_spare(0);
	}
	if (bytes > SPARE)
		punch(start, end);
	else
		spares[num_spares++] = (struct use){ start, end };
}

/*
 * use_spares forgets the kept pages of a range that will be written. The other pages of the same
 * spares are freed.
 */
static void use_spares(uintptr_t start, uintptr_t end)
{
	for (size_t i = num_spares; i-- > 0;) {
		struct use s = spares[i];

		if (s.start >= end || start >= s.end)
			continue;
		drop_spare(i);
		if (s.start < start)
			punch(s.start, start);
		if (end < s.end)
			punch(end, s.end);
	}
}

/* move moves the private pages of a range into the file. check has accepted the range. */
static int move(uintptr_t start, uintptr_t end)
{
	struct vma v;
	int err = 0;

	while (start < end && !err) {
		uintptr_t to;

		if (!vma_find(start, &v) || v.start > start)
			return -EFAULT;
		to = v.end < end ? v.end : end;
		if (!in_place(&v)) {
			if (left || used(start, to))
				err = recover(start, to);
			if (err)
				return err;
			use_spares(start, to);
			err = pages_share(file.fd, start, to, &v);
		}
		start = to;
	}
	return err;
}

static int add_use(uintptr_t start, uintptr_t end)
{
	if (num_uses == room) {
		size_t more = room ? 2 * room : 64;
		struct use *u = realloc(uses, more * sizeof(*u));

		if (!u)
			return -ENOMEM;
		uses = u;
		room = more;
	}
	uses[num_uses++] = (struct use){ start, end };
	return 0;
}

static void remove_use(uintptr_t start, uintptr_t end)
{
	for (size_t i = num_uses; i-- > 0;) {
		if (uses[i].start == start && uses[i].end == end) {
			uses[i] = uses[--num_uses];
			return;
		}
	}
}

/* private_again makes a range private, and what mremap has moved out of it. */
static int private_again(uintptr_t start, uintptr_t end)
{
	bool elsewhere = false;
	uintptr_t at = start;
	struct vma v;

	while (at < end) {
		uintptr_t from, to;

		if (!vma_find(at, &v) || v.start >= end) {
			elsewhere = true;
			break;
		}
		from = v.start > at ? v.start : at;
		to = v.end < end ? v.end : end;
		elsewhere |= from > at || !in_place(&v);
		if (in_place(&v)) {
			int err = pages_take_back(file.fd, from, to, v.prot, from);

			if (err)
				return err;
		}
		at = to;
	}
	return elsewhere ? recover(start, end) : 0;
}

/*
 * give_back makes a range private. No region uses it. Pages that cannot be made private now
 * stay shared until they are registered again.
 */
static void give_back(uintptr_t start, uintptr_t end)
{
	int err = private_again(start, end);

	if (!err) {
		keep(start, end);
		return;
	}
	left = true;
	iwv_log("%zu bytes at %#lx stay shared with the daemon: %s", (size_t)(end - start), (unsigned long)start,
		err == -EBUSY ? "other threads may write to them, and there is no userfaultfd" : strerror(-err));
}

/* unused finds the first part of a range that no region uses. */
static bool unused(uintptr_t start, uintptr_t end, struct use *part)
{
	for (size_t i = 0; i < num_uses && start < end;) {
		if (uses[i].start <= start && start < uses[i].end) {
			start = uses[i].end;
			i = 0;
		} else {
			i++;
		}
	}
	if (start >= end)
		return false;
	*part = (struct use){ start, end };
	for (size_t i = 0; i < num_uses; i++)
		if (uses[i].start > start && uses[i].start < part->end)
			part->end = uses[i].start;
	return true;
}

static void free_unused(uintptr_t start, uintptr_t end)
{
	struct use part;

	while (unused(start, end, &part)) {
		give_back(part.start, part.end);
		start = part.end;
	}
}

/* limited reports whether RLIMIT_FSIZE forbids the file. Enlarging it or writing to it would kill the program by SIGXFSZ. */
static bool limited(void)
{
	struct rlimit l;

	return getrlimit(RLIMIT_FSIZE, &l) < 0 || l.rlim_cur < FILE_SIZE;
}

static int get(struct iwarpd_device *dev, uintptr_t start, uintptr_t end, bool writable)
{
	struct todo todo;
	int err = check(start, end, writable, &todo);

	if (!err && (todo.any || file.fd < 0) && limited())
		err = -EFBIG;
	if (!err)
		err = make_file();
	if (!err && todo.any)
		pages_open(dev);
	if (!err && todo.any && !pages_may_move(todo.of_file))
		err = -EOPNOTSUPP;
	if (err)
		return err;
	if (todo.any)
		err = move(start, end);
	if (!err)
		err = add_use(start, end);
	if (err)
		free_unused(start, end);
	return err;
}

/* pages rounds a range to whole pages. */
static struct use pages(uintptr_t addr, size_t length)
{
	uintptr_t size = page_size();

	return (struct use){ addr & ~(size - 1), (addr + length + size - 1) & ~(size - 1) };
}

int near_get(struct iwarpd_device *dev, uintptr_t addr, size_t length, bool writable)
{
	struct use p = pages(addr, length);
	int err, fd;

	iwv_thread_lock();
	pages_rest();
	err = vma_begin();
	if (!err) {
		err = get(dev, p.start, p.end, writable);
		vma_end();
	}
	fd = file.fd;
	iwv_thread_unlock();
	return err ? err : fd;
}

void near_put(uintptr_t addr, size_t length)
{
	struct use p = pages(addr, length);

	iwv_thread_lock();
	pages_rest();
	remove_use(p.start, p.end);
	if (kept_open(&file) && vma_begin() == 0) { /* near_get has opened both, but not in the child of a fork */
		free_unused(p.start, p.end);
		vma_end();
	}
	iwv_thread_unlock();
}

/*
 * fork: the child needs memory of its own, with the contents at the time of the fork. The
 * child makes the copy before fork returns, and the parent waits for it.
 */

/*
 * ends are the ends of a pipe. The parent waits until no process has the second end open.
 * A pipe made in advance ensures that fork finds two free descriptors.
 */
static struct kept ends[2] = { { .fd = -1 }, { .fd = -1 } };

static void close_ends(void)
{
	for (int i = 0; i < 2; i++)
		kept_close(&ends[i]);
}

static void make_ends(void)
{
	int fds[2];

	close_ends();
	if (pipe2(fds, O_CLOEXEC) < 0)
		return;
	for (int i = 0; i < 2; i++)
		kept_set(&ends[i], fds[i]);
}

void near_before_fork(void)
{
	if (file.fd < 0)
		return;
	make_ends();
	if (ends[0].fd < 0)
		iwv_log("fork: %s: the child may see what its parent writes to registered memory while it is copied", strerror(errno));
}

void near_after_fork_parent(void)
{
	char b;

	if (ends[0].fd < 0)
		return;
	kept_close(&ends[1]);
	while (read(ends[0].fd, &b, 1) < 0 && errno == EINTR)
		;
	make_ends();
}

/* own_copy makes every mapping of the file private. If the program has closed the file, it reads what is mapped. */
static int own_copy(void)
{
	bool closed = !kept_open(&file);
	int fd = closed ? open("/proc/self/mem", O_RDONLY | O_CLOEXEC) : file.fd;
	uintptr_t at = 0;
	struct vma v;
	int err = vma_begin();

	if (err)
		return err;
	while (!err && vma_find(at, &v)) {
		at = v.end;
		if (is_file(&v))
			err = pages_take_back_alone(fd, &v, closed ? v.start : v.offset);
	}
	vma_end();
	if (closed)
		close(fd);
	return err;
}

void near_after_fork_child(void)
{
	int err = 0;

	vma_forked();
	if (file.fd >= 0) {
		err = own_copy();
		kept_close(&file);
	}
	if (err) {
		iwv_log("fork: the child's copy of registered memory: %s", strerror(-err));
		abort(); /* the child would write to its parent's memory */
	}
	pages_forked();
	left = false;
	num_uses = num_spares = 0;
	close_ends();
}
