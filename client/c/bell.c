/* Doorbells, which notify a worker that a queue pair has work. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "internal.h"

enum {
	BELLS_SLEEPING = 4096, /* offsets in the memfd */
	BELLS_RECEIVED = 4096 + 64,
	BELLS_WORDS = 4096 + 128,
};

/*
 * wake writes to the eventfd that wakes a worker. The caller may hold a lock of the program's, so
 * that the thread must not be canceled here.
 */
static void wake(int fd)
{
	static const uint64_t one = 1;
	int state;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	(void)!write(fd, &one, sizeof(one)); /* it does not block, so that no signal interrupts it */
	pthread_setcancelstate(state, &state);
}

void ring_bell(struct iwarpd_device *dev, uint32_t worker, uint32_t bell)
{
	struct bell_page *page = &dev->pages[worker];
	uint32_t asleep = 1;

	atomic_fetch_or(&page->bells[bell / 64], UINT64_C(1) << (bell % 64));
	if (atomic_load(page->sleeping) == 1 && atomic_compare_exchange_strong(page->sleeping, &asleep, 0))
		wake(page->wake);
}

uint32_t iwarpd_received(const struct iwarpd_device *dev)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < dev->workers; i++)
		n += atomic_load(dev->pages[i].received);
	return n;
}

/* SWITCH is less time, in ns, than two switches of threads take, and more than a system call. */
enum { SWITCH = 1000 };

bool iwarpd_yield(const struct iwarpd_device *dev)
{
	int64_t began = now_ns();

	sched_yield();
	if (now_ns() - began >= SWITCH)
		return true;
	for (uint32_t i = 0; i < dev->workers; i++)
		if (atomic_load(dev->pages[i].sleeping))
			return true;
	return false;
}

int bells_open(struct iwarpd_device *dev, uint32_t workers, struct packet *p)
{
	int err = 0;

	if (workers == 0 || p->num_fds != 2 * (int64_t)workers)
		return -EPROTO;
	dev->pages = calloc(workers, sizeof(*dev->pages));
	if (!dev->pages)
		return -ENOMEM;
	dev->workers = workers;
	for (uint32_t i = 0; i < workers; i++) {
		struct bell_page *page = &dev->pages[i];

		page->wake = p->fds[2 * i + 1];
		if (!err)
			err = map_open(&page->map, p->fds[2 * i], MAP_BELLS);
		close(p->fds[2 * i]);
		if (err)
			continue;
		fcntl(page->wake, F_SETFL, O_NONBLOCK);
		page->sleeping = map_word(&page->map, BELLS_SLEEPING);
		page->received = map_word(&page->map, BELLS_RECEIVED);
		page->bells = (_Atomic uint64_t *)(void *)(page->map.mem + BELLS_WORDS);
	}
	p->num_fds = 0;
	return err;
}

void bells_forget(struct iwarpd_device *dev, bool open)
{
	for (uint32_t i = 0; i < dev->workers; i++) {
		if (open)
			close_fd(dev->pages[i].wake);
		dev->pages[i].wake = -1;
	}
}

void bells_close(struct iwarpd_device *dev)
{
	bells_forget(dev, true);
	for (uint32_t i = 0; i < dev->workers; i++)
		map_close(&dev->pages[i].map);
	free(dev->pages);
}
