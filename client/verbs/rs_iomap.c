/* Buffers of the program that its peer may write to by riowrite: rsocket(7). */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>

#include "rs.h"

#define LOCAL UINT32_MAX

/* A mapping of a buffer. The peer finds it in its table. */
struct rs_mapping {
	struct rs_mapping *next;
	struct ibv_mr *mr;   /* NULL after riounmap, until the peer knows */
	void *buf;
	size_t len;
	uint64_t offset;
	unsigned int index;  /* of the entry of the peer's table, or LOCAL */
	bool unsaid;	     /* the peer does not know */
};

void rs_iomaps_free(struct rs *rs)
{
	struct rs_mapping *m;

	while ((m = rs->mappings) != NULL) {
		rs->mappings = m->next;
		if (m->mr)
			ibv_dereg_mr(m->mr);
		free(m);
	}
}

bool rs_send_iomaps(struct rs *rs)
{
	struct rs_mapping **at = &rs->mappings, *m;

	while ((m = *at) != NULL) {
		struct rs_iomap entry = { .offset = m->offset };

		if (m->unsaid && !rs_has_credit(rs))
			return false;
		if (m->mr)
			entry.sge = (struct rs_sge){
				.addr = (uintptr_t)m->buf, .key = m->mr->rkey, .length = (uint32_t)m->len,
			};
		if (m->unsaid && rs_send_iomap(rs, m->index, &entry) < 0)
			return false;
		m->unsaid = false;
		if (m->mr) {
			at = &m->next;
		} else {
			*at = m->next;
			free(m);
		}
	}
	return true;
}

/* free_index returns the first entry of the peer's table that is unused, or its length. */
static unsigned int free_index(const struct rs *rs)
{
	const struct rs_mapping *m;
	unsigned int i = 0;

	for (m = rs->mappings; m && i < rs->peer_iomaps.length; m = m->next)
		if (m->index == i) {
			i++;
			m = rs->mappings;
		}
	return i;
}

static off_t map(struct rs *rs, void *buf, size_t len, int prot, off_t offset)
{
	struct rs_mapping *m, **at = &rs->mappings;
	int access = prot & PROT_WRITE ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE : 0;

	if (!rs->table)
		return set_errno(ENOTCONN);
	if (len == 0 || len > UINT32_MAX || prot & ~PROT_WRITE)
		return set_errno(EINVAL);
	m = calloc(1, sizeof(*m));
	if (!m)
		return -1;
	m->buf = buf;
	m->len = len;
	m->offset = offset == -1 ? (uintptr_t)buf : (uint64_t)offset;
	m->unsaid = prot & PROT_WRITE;
	m->index = m->unsaid ? free_index(rs) : LOCAL;
	m->mr = m->unsaid && m->index >= rs->peer_iomaps.length ? NULL : ibv_reg_mr(rs->id->qp->pd, buf, len, access);
	if (!m->mr) {
		free(m);
		return set_errno(ENOMEM);
	}
	while (*at)
		at = &(*at)->next;
	*at = m;
	return (off_t)m->offset;
}

off_t riomap(int socket, void *buf, size_t len, int prot, int flags, off_t offset)
{
	struct rs *rs;

	FORWARD(riomap, socket, buf, len, prot, flags, offset);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	offset = map(rs, buf, len, prot, offset);
	rs_put(rs);
	return offset;
}

int riounmap(int socket, void *buf, size_t len)
{
	struct rs_mapping *m;
	struct rs *rs;

	FORWARD(riounmap, socket, buf, len);
	rs = rs_get(socket);
	if (!rs)
		return -1;
	for (m = rs->mappings; m && (!m->mr || m->buf != buf || m->len != len); m = m->next)
		;
	if (m) {
		ibv_dereg_mr(m->mr);
		m->mr = NULL;
		m->unsaid = m->index != LOCAL;
	}
	rs_put(rs);
	return set_errno(m ? 0 : EINVAL);
}

/* find stores where the peer's memory for offset is, and reports whether the table has it. */
static bool find(const struct rs *rs, uint64_t offset, struct rs_sge *to)
{
	for (uint32_t i = 0; i < rs->opt.iomaps; i++) {
		struct rs_iomap m = rs->table->iomaps[i];

		if (offset < m.offset || offset - m.offset >= m.sge.length)
			continue;
		*to = m.sge;
		to->addr += offset - m.offset;
		to->length -= (uint32_t)(offset - m.offset);
		return true;
	}
	return false;
}

static size_t write_all(struct rs *rs, const struct iovec *from, uint64_t offset, int flags)
{
	size_t done = 0;
	int err = 0;

	while (done < from->iov_len) {
		struct rs_sge to;

		err = rs_await_room(rs, flags);
		if (err)
			break;
		if (!find(rs, offset + done, &to)) {
			errno = EAGAIN; /* the peer may map it later */
			return done;
		}
		done += rs_write(rs, from, done, from->iov_len - done, &to, false);
	}
	return done > 0 || !err ? done : (size_t)set_errno(err);
}

size_t riowrite(int socket, const void *buf, size_t count, off_t offset, int flags)
{
	struct iovec v = { .iov_base = (void *)(uintptr_t)buf, .iov_len = count };
	struct rs *rs;

	FORWARD(riowrite, socket, buf, count, offset, flags);
	rs = rs_get(socket);
	if (!rs)
		return (size_t)-1;
	count = write_all(rs, &v, (uint64_t)offset, flags);
	rs_put(rs);
	return count;
}
