/*
 * Pages that move between private memory and a file, at any of its offsets, while other
 * threads run. Write protection by userfaultfd blocks those that store into a page while it
 * is moved, also within a system call. The thread that moves pages makes only raw system
 * calls meanwhile, since any memory but its stack and its rseq area may be in a protected page.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"
#include "pages.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef UFFD_FEATURE_WP_UNPOPULATED /* since Linux 6.4 */
#define UFFD_FEATURE_WP_UNPOPULATED (1 << 13)
#endif

enum { CHUNK = 4 << 20 }; /* bytes moved at once, while threads that write to them are blocked */

static struct kept protector = { .fd = -1 }; /* a userfaultfd */
static bool tried;         /* pages_open has run */
static bool unpopulated;   /* protector also protects pages that were never touched */

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

/*
 * only_us reports whether no other thread can write to memory. The library's own thread, which the child of a fork may lack,
 * waits for iwv_thread_lock, which the caller holds, before it writes to any but its stack.
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
	return n == 1 + thread_runs();
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

void pages_open(struct iwarpd_device *dev)
{
	struct uffdio_api api = { .api = UFFD_API, .features = NEEDED | UFFD_FEATURE_WP_UNPOPULATED };
	int fd;

	if (tried)
		return;
	tried = true;
	fd = open_userfaultfd(dev);
	unpopulated = fd >= 0 && ioctl(fd, UFFDIO_API, &api) == 0;
	api = (struct uffdio_api){ .api = UFFD_API, .features = NEEDED };
	if (fd >= 0 && !unpopulated && ioctl(fd, UFFDIO_API, &api) < 0) {
		iwv_log("memory is far once the program has several threads: userfaultfd: %s", strerror(errno));
		close(fd);
		fd = -1;
	}
	kept_set(&protector, fd);
}

void pages_rest(void)
{
	if (protector.fd < 0)
		thread_rest(); /* see only_us */
}

bool pages_may_move(bool of_file)
{
	return (protector.fd >= 0 && !of_file) || only_us();
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
static int share_chunk(int fd, uintptr_t start, size_t len, int prot, int uffd)
{
	const int copier = protector.fd;
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
static int take_back_chunk(int fd, uintptr_t start, size_t len, int prot, uint64_t offset, int uffd)
{
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

bool pages_own(uintptr_t start, uintptr_t end)
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

int pages_share(int fd, uintptr_t start, uintptr_t end, const struct vma *v)
{
	int uffd = v->inode ? -1 : protector.fd;
	sigset_t old;
	int err = 0;

	block_signals(&old);
	for (; start < end && !err; start += least(CHUNK, end - start))
		err = share_chunk(fd, start, least(CHUNK, end - start), v->prot, uffd);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return err;
}

int pages_take_back(int fd, uintptr_t start, uintptr_t end, int prot, uint64_t offset)
{
	sigset_t old;
	int err = pages_may_move(false) ? 0 : -EBUSY; /* there may be more threads than at registration */

	if (pages_own(start, end))
		err = -EDEADLK;
	block_signals(&old);
	while (start < end && !err) {
		size_t n = least(CHUNK, end - start);

		err = take_back_chunk(fd, start, n, prot, offset, protector.fd);
		start += n;
		offset += n;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return err;
}

int pages_take_back_alone(int fd, const struct vma *v, uint64_t offset)
{
	return take_back_chunk(fd, v->start, v->end - v->start, v->prot, offset, -1);
}

void pages_forked(void)
{
	kept_close(&protector);
	tried = false;
}
