/* Memfds of the daemon, and the rings in them. See docs/api.md. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "internal.h"

enum {
	HEADER_SIZE = 4096,
	LAYOUT_VERSION = 1,
	RING_THEIRS = 128,  /* offset of the consumer index; the producer's is 0 */
	RING_ENTRIES = 256, /* offset of the first entry */
	CQE_SIZE = 64,
	BELL_PAGE = 4096,
	MAX_BELLS = (BELL_PAGE - 128) * 8,
	MAX_ENTRIES = 1 << 16,
	MAX_CQ_ENTRIES = 1 << 18,
	MAX_RINGS = 256,
	MAX_PIECES = 1 << 10,
	MAX_INLINE = 1 << 16,
};

struct header {
	char magic[8];
	uint32_t version, kind, entries, stride, rings, ring_size, max_sge, max_inline;
};
_Static_assert(sizeof(struct header) == 40, "header of docs/api.md");

static uint32_t round_up(uint32_t n, uint32_t to)
{
	return (n + to - 1) & ~(to - 1);
}

/* want_stride returns the only stride valid for the header, or 0. */
static uint32_t want_stride(const struct header *h)
{
	uint32_t pieces = h->max_sge * (uint32_t)sizeof(struct iwarpd_sge);

	switch (h->kind) {
	case MAP_SQ:
		return round_up(64 + (pieces > h->max_inline ? pieces : h->max_inline), 64);
	case MAP_RQ:
		return round_up(16 + pieces, 64);
	case MAP_CQ:
		return CQE_SIZE;
	}
	return 0;
}

/* ring_size returns the size of a ring, in whole pages. */
static uint64_t ring_size(uint32_t entries, uint32_t stride)
{
	return ((uint64_t)RING_ENTRIES + (uint64_t)entries * stride + 4095) / 4096 * 4096;
}

size_t map_cq_size(uint32_t rings, uint32_t depth)
{
	uint32_t entries = 1;

	if (depth == 0 || depth > MAX_CQ_ENTRIES)
		return 0;
	while (entries < depth)
		entries *= 2;
	return HEADER_SIZE + (size_t)(rings * ring_size(entries, CQE_SIZE));
}

static bool header_valid(const struct header *h, uint64_t size)
{
	if (h->rings < 1 || h->rings > MAX_RINGS || (h->kind != MAP_CQ && h->rings != 1))
		return false;
	if (size != HEADER_SIZE + (uint64_t)h->rings * h->ring_size)
		return false;
	if (h->kind == MAP_BELLS)
		return h->ring_size == BELL_PAGE && h->entries > 0 && h->entries <= MAX_BELLS && h->entries % 64 == 0;
	if (h->entries < 1 || h->entries > (h->kind == MAP_CQ ? MAX_CQ_ENTRIES : MAX_ENTRIES) || (h->entries & (h->entries - 1)) != 0)
		return false;
	if (h->max_sge > MAX_PIECES || h->max_inline > MAX_INLINE || h->stride != want_stride(h))
		return false;
	return h->ring_size == ring_size(h->entries, h->stride);
}

/*
 * sealed_size returns the size of a memfd that is sealed against resizing, or an
 * error.
 */
static int64_t sealed_size(int fd)
{
	int seals = fcntl(fd, F_GET_SEALS);
	struct stat st;

	if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
		return -EPROTO;
	if (fstat(fd, &st) < 0)
		return -errno;
	if (st.st_size < HEADER_SIZE || st.st_size > INT64_C(1) << 40)
		return -EPROTO;
	return st.st_size;
}

int map_open(struct map *m, int fd, enum map_kind kind)
{
	int64_t size = sealed_size(fd);
	struct header h;
	void *mem;

	memset(m, 0, sizeof(*m));
	if (size < 0)
		return (int)size;
	mem = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (mem == MAP_FAILED)
		return -errno;
	memcpy(&h, mem, sizeof(h));
	if (memcmp(h.magic, "WARPRING", 8) != 0 || h.version != LAYOUT_VERSION || h.kind != kind ||
	    !header_valid(&h, (uint64_t)size)) {
		munmap(mem, (size_t)size);
		return -EPROTO;
	}
	*m = (struct map){ mem, (size_t)size, h.entries, h.stride, h.rings, h.ring_size, h.max_sge, h.max_inline };
	return 0;
}

void map_close(struct map *m)
{
	if (m->mem)
		munmap(m->mem, m->len);
	m->mem = NULL;
}

void map_after_fork(const struct map *m)
{
	const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;

	/* Memory that cannot be written does not count in RLIMIT_DATA. */
	if (mmap(m->mem, m->len, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED &&
	    mmap(m->mem, m->len, PROT_READ, flags, -1, 0) == MAP_FAILED)
		abort(); /* the child would take its parent's completions */
}

_Atomic uint32_t *map_word(const struct map *m, size_t offset)
{
	return (_Atomic uint32_t *)(void *)(m->mem + offset);
}

static void ring_init(struct ring *r, const struct map *m, uint32_t which, size_t ours, size_t theirs)
{
	size_t start = HEADER_SIZE + (size_t)which * m->ring_size;

	*r = (struct ring){
		.magic = map_word(m, 0),
		.ours = map_word(m, start + ours),
		.theirs = map_word(m, start + theirs),
		.entries = m->mem + start + RING_ENTRIES,
		.size = m->entries,
		.stride = m->stride,
	};
	r->next = atomic_load(r->ours);
	r->seen = atomic_load(r->theirs);
}

void ring_producer(struct ring *r, const struct map *m)
{
	ring_init(r, m, 0, 0, RING_THEIRS);
}

void ring_consumer(struct ring *r, const struct map *m, uint32_t which)
{
	ring_init(r, m, which, RING_THEIRS, 0);
	r->seen = r->next;
}

void *ring_entry(const struct ring *r, uint32_t index)
{
	return r->entries + (size_t)(index & (r->size - 1)) * r->stride;
}

/* free_entries returns the number of free entries as last seen, or 0 if the index is invalid. */
static uint32_t free_entries(const struct ring *r)
{
	uint32_t used = r->next - r->seen;

	return used < r->size ? r->size - used : 0;
}

void *ring_free_entry(struct ring *r, uint32_t n, int *err)
{
	if (free_entries(r) < n) {
		r->seen = atomic_load(r->theirs);
		if (r->next - r->seen > r->size)
			*err = ring_freed(r) ? -ENOTCONN : -EPROTO;
	}
	return free_entries(r) < n ? NULL : ring_entry(r, r->next);
}

const void *ring_next_entry(struct ring *r, int *err)
{
	if (r->next == r->seen) {
		uint32_t theirs = atomic_load(r->theirs);

		if (theirs - r->next > r->size) {
			*err = ring_freed(r) ? -EPIPE : -EPROTO;
			return NULL;
		}
		r->seen = theirs;
		if (r->next == r->seen)
			return NULL;
	}
	return ring_entry(r, r->next);
}

bool ring_freed(const struct ring *r)
{
	return atomic_load(r->magic) == 0;
}

void ring_publish(struct ring *r)
{
	atomic_store(r->ours, r->next);
}

bool ring_pending(const struct ring *r)
{
	return atomic_load(r->theirs) != atomic_load(r->ours);
}
