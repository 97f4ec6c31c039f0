/*
 * Near memory: pages of the program that the daemon maps too.
 *
 * They are in a memfd as large as the address space, each at the offset that equals its
 * address. Registering a range copies its pages into the file and maps the file over
 * them. When no region uses a page any more, it becomes private again.
 *
 * Other threads keep running. Write protection by userfaultfd blocks those that store
 * into a page while it is moved, also within a system call. The thread that moves pages
 * makes only raw system calls meanwhile, since any memory but its stack and its rseq area
 * may be in a protected page.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"
#include "vma.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef UFFD_FEATURE_WP_UNPOPULATED /* since Linux 6.4 */
#define UFFD_FEATURE_WP_UNPOPULATED (1 << 13)
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

enum {
	CHUNK = 4 << 20,  /* bytes moved at once, while threads that write to them are blocked */
	SPARE = 16 << 20, /* bytes of the file that are kept though no region uses them */
	MAX_SPARES = 16,
};

#define FILE_SIZE (INT64_C(1) << 56) /* the address space with five-level page tables */

/* A range of pages that a region uses. */
struct use {
	uintptr_t start, end;
};

/* iwv_thread_lock guards all of this. */
static int file = -1;
static dev_t file_dev;
static ino_t file_inode;
static int protector = -1; /* a userfaultfd */
static bool tried;         /* open_protector has run */
static bool unpopulated;   /* protector also protects pages that were never touched */
static struct use spares[MAX_SPARES]; /* pages that are kept, oldest first */
static size_t num_spares;
static bool left; /* the program may still have pages of the file that no region uses */
static struct use *uses;
static size_t num_uses, room;

extern void *__libc_stack_end; /* stack of the first thread */

static uintptr_t page_size(void)
{
	return (uintptr_t)sysconf(_SC_PAGESIZE);
}

/*
 * raw makes a system call. It does not write errno, which may be in a protected page, and
 * returns a negative errno value.
 */
static long raw(long n, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long ret;

	__asm__ volatile("syscall" : "=a"(ret) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return ret;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = n;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
#else
#error "near memory needs raw system calls of this processor"
#endif
}

/* copy_out writes a range into the file. */
static int copy_out(int fd, uintptr_t at, size_t len)
{
	while (len > 0) {
		long n = raw(SYS_pwrite64, fd, (long)at, (long)len, (long)at, 0, 0);

		if (n <= 0)
			return n == 0 ? -EIO : (int)n;
		at += (size_t)n;
		len -= (size_t)n;
	}
	return 0;
}

/* copy_in reads len bytes at an offset of the file. */
static int copy_in(int fd, uintptr_t to, uint64_t offset, size_t len)
{
	while (len > 0) {
		long n = raw(SYS_pread64, fd, (long)to, (long)len, (long)offset, 0, 0);

		if (n <= 0)
			return n == 0 ? -EIO : (int)n;
		to += (size_t)n;
		offset += (uint64_t)n;
		len -= (size_t)n;
	}
	return 0;
}

static void make_ends(void);

static int make_file(void)
{
	const unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
	struct stat st;
	int fd;

	if (file >= 0)
		return 0;
	fd = memfd_create("iwarpd-near", flags | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL) /* before Linux 6.3 */
		fd = memfd_create("iwarpd-near", flags);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, FILE_SIZE) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0 ||
	    fstat(fd, &st) < 0) {
		int err = -errno;

		close(fd);
		return err;
	}
	file = fd;
	file_dev = st.st_dev;
	file_inode = st.st_ino;
	make_ends();
	return 0;
}

/*
 * only_us reports whether no other thread can write to memory. The library's own thread waits
 * for iwv_thread_lock, which the caller holds, before it writes to any but its stack.
 */
static bool only_us(void)
{
	DIR *d = opendir("/proc/self/task");
	struct dirent *e;
	int n = 0;

	if (!d)
		return false;
	while ((e = readdir(d)) != NULL)
		n += e->d_name[0] != '.';
	closedir(d);
	return n <= 2; /* the caller and the library's thread */
}

/* from_device makes a userfaultfd from a descriptor of /dev/userfaultfd, and closes that. */
static int from_device(int fd)
{
	int made = -1;

	if (fd >= 0) {
		made = ioctl(fd, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
		close(fd);
	}
	return made;
}

/* open_userfaultfd opens the best userfaultfd that this process, or the daemon for it, may open. */
static int open_userfaultfd(struct iwarpd_device *dev)
{
	struct iwarpd_error e = { 0 };
	int device, fd = from_device(open("/dev/userfaultfd", O_RDWR | O_CLOEXEC));

	if (fd < 0)
		fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 && iwarpd_open_userfaultfd(dev, &device, &e) == 0)
		fd = from_device(device);
	if (fd >= 0)
		return fd;
	fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
	if (fd >= 0)
		iwv_log("system calls that write to memory while it is registered fail: "
			"neither this process nor the daemon for it may use /dev/userfaultfd: %s", e.text);
	else
		iwv_log("memory is far once the program has several threads: no userfaultfd: %s; from the daemon: %s",
			strerror(errno), e.text[0] ? e.text : "the system call is forbidden");
	return fd;
}

#define NEEDED (UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM)

/* open_protector sets protector, to -1 if there is no userfaultfd. It is not tried again. */
static void open_protector(struct iwarpd_device *dev)
{
	struct uffdio_api api = { .api = UFFD_API, .features = NEEDED | UFFD_FEATURE_WP_UNPOPULATED };
	int fd = open_userfaultfd(dev);

	unpopulated = fd >= 0 && ioctl(fd, UFFDIO_API, &api) == 0;
	api = (struct uffdio_api){ .api = UFFD_API, .features = NEEDED };
	if (fd >= 0 && !unpopulated && ioctl(fd, UFFDIO_API, &api) < 0) {
		iwv_log("memory is far once the program has several threads: userfaultfd: %s", strerror(errno));
		close(fd);
		fd = -1;
	}
	protector = fd;
	tried = true;
}

/*
 * may_move reports whether pages can be moved without losing a store. Pages of a file, such
 * as .data, cannot be protected, so they are moved only while no other thread runs.
 */
static bool may_move(bool of_file)
{
	return (protector >= 0 && !of_file) || only_us();
}

/* touch reads every page of a range, like MADV_POPULATE_READ since Linux 5.14. */
static void touch(uintptr_t start, size_t len)
{
	for (uintptr_t at = start, size = page_size(); at < start + len; at += size)
		(void)*(volatile const char *)at;
}

/* protect blocks threads that write to the range. */
static int protect(int fd, uintptr_t start, size_t len, int prot)
{
	struct uffdio_register reg = { .range = { start, len }, .mode = UFFDIO_REGISTER_MODE_WP };
	struct uffdio_writeprotect wp = { .range = { start, len }, .mode = UFFDIO_WRITEPROTECT_MODE_WP };
	long err;

	if (fd < 0)
		return 0;
	err = raw(SYS_ioctl, fd, UFFDIO_REGISTER, (long)&reg, 0, 0, 0);
	/* On older kernels pages that were never touched would not be protected. Those without access cannot be touched. */
	if (!err && !unpopulated && (prot & PROT_READ) && raw(SYS_madvise, (long)start, (long)len, MADV_POPULATE_READ, 0, 0, 0) != 0)
		touch(start, len);
	if (!err)
		err = raw(SYS_ioctl, fd, UFFDIO_WRITEPROTECT, (long)&wp, 0, 0, 0);
	return (int)err;
}

/* release lets blocked threads continue. */
static void release(int fd, uintptr_t start, size_t len, bool moved)
{
	struct uffdio_range range = { start, len };
	struct uffdio_writeprotect wp = { .range = range };

	if (fd < 0)
		return;
	if (!moved) {
		raw(SYS_ioctl, fd, UFFDIO_WRITEPROTECT, (long)&wp, 0, 0, 0);
		raw(SYS_ioctl, fd, UFFDIO_UNREGISTER, (long)&range, 0, 0, 0);
	}
	raw(SYS_ioctl, fd, UFFDIO_WAKE, (long)&range, 0, 0, 0);
}

/* replace moves a mapping over another one. */
static int replace(uintptr_t from, uintptr_t to, size_t len)
{
	long at = raw(SYS_mremap, (long)from, (long)len, (long)len, MREMAP_MAYMOVE | MREMAP_FIXED, (long)to, 0);

	return at < 0 && at > -4096 ? (int)at : 0;
}

/*
 * fill copies private pages to their places in the file, of which tmp is a mapping. A
 * userfaultfd allocates the pages, fills and maps them in one call. It refuses pages that the
 * file has already.
 */
static int fill(int fd, int uffd, uintptr_t tmp, uintptr_t start, size_t len)
{
	struct uffdio_register reg = { .range = { tmp, len }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	struct uffdio_copy copy = { .dst = tmp, .src = start, .len = len };
	size_t done = 0;
	long err = 0;

	if (uffd >= 0 && raw(SYS_ioctl, uffd, UFFDIO_REGISTER, (long)&reg, 0, 0, 0) == 0) {
		raw(SYS_ioctl, uffd, UFFDIO_COPY, (long)&copy, 0, 0, 0);
		done = copy.copy > 0 ? (size_t)copy.copy : 0;
		err = raw(SYS_ioctl, uffd, UFFDIO_UNREGISTER, (long)&reg.range, 0, 0, 0);
	}
	if (err || done == len)
		return (int)err;
	err = copy_out(fd, start + done, len - done);
	if (!err)
		raw(SYS_madvise, (long)(tmp + done), (long)(len - done), MADV_POPULATE_READ, 0, 0, 0);
	return (int)err;
}

/* refill does both in place, for a process that may have no further mapping. */
static int refill(int fd, uintptr_t start, size_t len, int prot)
{
	int err = copy_out(fd, start, len);
	long at = err ? 0 : raw(SYS_mmap, (long)start, (long)len, prot, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, (long)start);

	return at < 0 && at > -4096 ? (int)at : err;
}

/* share_chunk moves private pages into the file. */
static int share_chunk(uintptr_t start, size_t len, int prot, int uffd)
{
	const int fd = file, copier = protector;
	long tmp = raw(SYS_mmap, 0, (long)len, prot, MAP_SHARED, fd, (long)start);
	bool apart = tmp >= 0 || tmp <= -4096;
	int err = protect(uffd, start, len, prot);

	if (!err)
		err = apart ? fill(fd, copier, (uintptr_t)tmp, start, len) : refill(fd, start, len, prot);
	if (!err && apart)
		err = replace((uintptr_t)tmp, start, len);
	release(uffd, start, len, err == 0);
	if (err && apart)
		raw(SYS_munmap, tmp, (long)len, 0, 0, 0, 0);
	return err;
}

/* take_back_chunk makes pages at an offset of the file private again. */
static int take_back_chunk(uintptr_t start, size_t len, int prot, uint64_t offset, int uffd)
{
	const int fd = file;
	long tmp = raw(SYS_mmap, 0, (long)len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int err;

	if (tmp < 0 && tmp > -4096)
		return (int)tmp;
	err = protect(uffd, start, len, prot);
	if (!err)
		err = copy_in(fd, (uintptr_t)tmp, offset, len);
	if (!err && prot != (PROT_READ | PROT_WRITE))
		err = (int)raw(SYS_mprotect, tmp, (long)len, prot, 0, 0, 0);
	if (!err)
		err = replace((uintptr_t)tmp, start, len);
	release(uffd, start, len, err == 0);
	if (err)
		raw(SYS_munmap, tmp, (long)len, 0, 0, 0, 0);
	return err;
}

static const ptrdiff_t *rseq_offset;

__attribute__((constructor)) static void init(void)
{
	rseq_offset = dlsym(RTLD_DEFAULT, "__rseq_offset"); /* since glibc 2.35 */
}

/* rseq_area returns where the kernel stores on which CPU this thread runs, whenever that changes, or 0. */
static uintptr_t rseq_area(void)
{
	return rseq_offset ? (uintptr_t)__builtin_thread_pointer() + (uintptr_t)*rseq_offset : 0;
}

/*
 * own reports whether a range contains this thread's current stack frames or its rseq area. Both are written while the
 * thread moves pages, so it would wait for itself.
 */
static bool own(uintptr_t start, uintptr_t end)
{
	uintptr_t frame = (uintptr_t)__builtin_frame_address(0), area = rseq_area();

	return (start < frame + page_size() && frame - page_size() < end) || (start <= area && area < end);
}

/* block_signals blocks all signals: a handler could write to a protected page. */
static void block_signals(sigset_t *old)
{
	sigset_t all;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, old);
}

static int share(uintptr_t start, uintptr_t end, const struct vma *v)
{
	int uffd = v->inode ? -1 : protector;
	sigset_t old;
	int err = 0;

	block_signals(&old);
	for (; start < end && !err; start += least(CHUNK, end - start))
		err = share_chunk(start, least(CHUNK, end - start), v->prot, uffd);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return err;
}

static int take_back(uintptr_t start, uintptr_t end, int prot, uint64_t offset)
{
	sigset_t old;
	int err = may_move(false) ? 0 : -EBUSY; /* there may be more threads than at registration */

	if (own(start, end))
		err = -EDEADLK;
	block_signals(&old);
	while (start < end && !err) {
		size_t n = least(CHUNK, end - start);

		err = take_back_chunk(start, n, prot, offset, protector);
		start += n;
		offset += n;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return err;
}

static bool is_file(const struct vma *v)
{
	return v->inode == file_inode && v->dev == file_dev && v->shared;
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
	return todo->any && own(start, end) ? -EOPNOTSUPP : 0;
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
			err = take_back(v.start + (from - v.offset), v.start + (to - v.offset), v.prot, from);
	}
	return err;
}

/* punch frees the pages of the file in a range. */
static void punch(uintptr_t start, uintptr_t end)
{
	if (fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)start, (off_t)(end - start)) < 0)
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
			err = share(start, to, &v);
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
			int err = take_back(from, to, v.prot, from);

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

	if (!err && (todo.any || file < 0) && limited())
		err = -EFBIG;
	if (!err)
		err = make_file();
	if (!err && todo.any && !tried)
		open_protector(dev);
	if (!err && todo.any && !may_move(todo.of_file))
		err = -EOPNOTSUPP;
	if (!err && todo.any) {
		err = move(start, end);
		if (err)
			free_unused(start, end);
	}
	return err ? err : add_use(start, end);
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
	if (protector < 0)
		thread_rest(); /* see only_us */
	err = vma_begin();
	if (!err) {
		err = get(dev, p.start, p.end, writable);
		vma_end();
	}
	fd = file;
	iwv_thread_unlock();
	return err ? err : fd;
}

void near_put(uintptr_t addr, size_t length)
{
	struct use p = pages(addr, length);

	iwv_thread_lock();
	if (protector < 0)
		thread_rest();
	remove_use(p.start, p.end);
	if (file >= 0 && vma_begin() == 0) { /* near_get has opened both, but not in the child of a fork */
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
static int ends[2] = { -1, -1 };

static void close_ends(void)
{
	for (int i = 0; i < 2; i++) {
		if (ends[i] >= 0)
			close(ends[i]);
		ends[i] = -1;
	}
}

static void make_ends(void)
{
	close_ends();
	if (pipe2(ends, O_CLOEXEC) < 0)
		ends[0] = ends[1] = -1;
}

void near_before_fork(void)
{
	if (file < 0)
		return;
	make_ends();
	if (ends[0] < 0)
		iwv_log("fork: %s: the child may see what its parent writes to registered memory while it is copied", strerror(errno));
}

void near_after_fork_parent(void)
{
	char b;

	if (ends[0] < 0)
		return;
	close(ends[1]);
	ends[1] = -1;
	while (read(ends[0], &b, 1) < 0 && errno == EINTR)
		;
	make_ends();
}

/* own_copy makes every mapping of the file private. */
static int own_copy(void)
{
	uintptr_t at = 0;
	struct vma v;
	int err = vma_begin();

	if (err)
		return err;
	while (!err && vma_find(at, &v)) {
		at = v.end;
		if (is_file(&v))
			err = take_back_chunk(v.start, v.end - v.start, v.prot, v.offset, -1);
	}
	vma_end();
	return err;
}

void near_after_fork_child(void)
{
	int err = 0;

	vma_forked();
	if (file >= 0) {
		err = own_copy();
		close(file);
		file = -1;
	}
	if (err) {
		iwv_log("fork: the child's copy of registered memory: %s", strerror(-err));
		abort(); /* the child would write to its parent's memory */
	}
	if (protector >= 0)
		close(protector);
	protector = -1;
	tried = left = false;
	num_uses = num_spares = 0;
	close_ends();
}
