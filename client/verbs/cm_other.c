/* Address lookup, and functions that iwarpd does not support. */
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>

#include "cm.h"

static struct sockaddr *copy_addr(const struct sockaddr *a, socklen_t len)
{
	struct sockaddr *to = malloc(len);

	if (to)
		memcpy(to, a, len);
	return to;
}

/* lookup resolves a name with getaddrinfo. */
static int lookup(const char *node, const char *service, const struct rdma_addrinfo *hints, struct addrinfo **ai)
{
	struct addrinfo h = { .ai_socktype = SOCK_STREAM };
	int flags = hints ? hints->ai_flags : 0;

	if (flags & RAI_PASSIVE)
		h.ai_flags |= AI_PASSIVE;
	if (flags & RAI_NUMERICHOST)
		h.ai_flags |= AI_NUMERICHOST;
	if (hints && (hints->ai_family == AF_INET || hints->ai_family == AF_INET6))
		h.ai_family = hints->ai_family;
	return getaddrinfo(node, service, &h, ai);
}

/* put_addr sets an address of an entry if a is not NULL. */
static int put_addr(struct sockaddr **to, socklen_t *to_len, const struct sockaddr *a, socklen_t len)
{
	if (!a || len == 0)
		return 0;
	*to = copy_addr(a, len);
	*to_len = len;
	return *to ? 0 : -1;
}

/* put_addresses sets the addresses of an entry: that of ai, and those of the hints. */
static int put_addresses(struct rdma_addrinfo *r, const struct rdma_addrinfo *hints, const struct addrinfo *ai)
{
	bool passive = r->ai_flags & RAI_PASSIVE;
	int err = 0;

	if (ai)
		err = passive ? put_addr(&r->ai_src_addr, &r->ai_src_len, ai->ai_addr, ai->ai_addrlen) :
				put_addr(&r->ai_dst_addr, &r->ai_dst_len, ai->ai_addr, ai->ai_addrlen);
	if (!err && hints && !r->ai_src_addr)
		err = put_addr(&r->ai_src_addr, &r->ai_src_len, hints->ai_src_addr, hints->ai_src_len);
	if (!err && hints && !ai)
		err = put_addr(&r->ai_dst_addr, &r->ai_dst_len, hints->ai_dst_addr, hints->ai_dst_len);
	return err;
}

/* put_kind sets the port space and the type of queue pairs. One that the hints do not name follows from the other. */
static void put_kind(struct rdma_addrinfo *r, const struct rdma_addrinfo *hints)
{
	r->ai_port_space = hints ? hints->ai_port_space : 0;
	r->ai_qp_type = hints ? hints->ai_qp_type : 0;
	if (!r->ai_port_space)
		r->ai_port_space = r->ai_qp_type == IBV_QPT_UD ? RDMA_PS_UDP : RDMA_PS_TCP;
	if (!r->ai_qp_type)
		r->ai_qp_type = r->ai_port_space == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC;
}

/* new_entry makes an entry from an address of getaddrinfo, or from the hints alone. */
static struct rdma_addrinfo *new_entry(const struct rdma_addrinfo *hints, const struct addrinfo *ai)
{
	struct rdma_addrinfo *r = calloc(1, sizeof(*r));

	if (!r)
		return NULL;
	r->ai_flags = hints ? hints->ai_flags : 0;
	r->ai_family = ai ? ai->ai_family : hints->ai_family;
	put_kind(r, hints);
	if (put_addresses(r, hints, ai) == 0)
		return r;
	rdma_freeaddrinfo(r);
	return NULL;
}

/* entries makes an entry for each address of a name. */
static int entries(const char *node, const char *service, const struct rdma_addrinfo *hints, struct rdma_addrinfo **list)
{
	struct addrinfo *all, *ai;
	int err = lookup(node, service, hints, &all);

	if (err) {
		iwv_log("rdma_getaddrinfo: %s: %s", node ? node : "", gai_strerror(err));
		if (err != EAI_SYSTEM)
			errno = err == EAI_MEMORY ? ENOMEM : ENODATA;
		return err;
	}
	for (ai = all; ai; ai = ai->ai_next) {
		*list = new_entry(hints, ai);
		if (!*list)
			break;
		list = &(*list)->ai_next;
	}
	freeaddrinfo(all);
	return 0;
}

int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints, struct rdma_addrinfo **res)
{
	int err;

	FORWARD(rdma_getaddrinfo, node, service, hints, res);
	if (!node && !service && !hints)
		return set_errno(EINVAL);
	*res = NULL;
	if (!node && !service)
		*res = new_entry(hints, NULL);
	else if ((err = entries(node, service, hints, res)) != 0)
		return err;
	return *res ? 0 : set_errno(ENOMEM);
}

void rdma_freeaddrinfo(struct rdma_addrinfo *res)
{
	FORWARD(rdma_freeaddrinfo, res);
	while (res) {
		struct rdma_addrinfo *next = res->ai_next;

		free(res->ai_src_addr);
		free(res->ai_dst_addr);
		/* The program may have set the others. */
		free(res->ai_src_canonname);
		free(res->ai_dst_canonname);
		free(res->ai_route);
		free(res->ai_connect);
		free(res);
		res = next;
	}
}

int rdma_notify(struct rdma_cm_id *id, enum ibv_event_type event)
{
	FORWARD(rdma_notify, id, event);
	return 0;
}

int rdma_establish(struct rdma_cm_id *id)
{
	FORWARD(rdma_establish, id);
	return 0; /* the daemon has already completed the connection */
}

/*
 * A program that makes its QP itself asks which attributes to pass to ibv_modify_qp.
 * iwarpd needs none.
 */
int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
	FORWARD(rdma_init_qp_attr, id, attr, mask);
	attr->port_num = 1;
	attr->qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
				IBV_ACCESS_REMOTE_ATOMIC;
	*mask = IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PORT;
	return 0;
}

int rdma_join_multicast(struct rdma_cm_id *id, struct sockaddr *addr, void *context)
{
	FORWARD(rdma_join_multicast, id, addr, context);
	return set_errno(iwv_unsupported("rdma_join_multicast"));
}

int rdma_join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attr, void *context)
{
	FORWARD(rdma_join_multicast_ex, id, attr, context);
	return set_errno(iwv_unsupported("rdma_join_multicast_ex"));
}

int rdma_leave_multicast(struct rdma_cm_id *id, struct sockaddr *addr)
{
	FORWARD(rdma_leave_multicast, id, addr);
	return set_errno(EINVAL);
}

int rdma_set_local_ece(struct rdma_cm_id *id, struct ibv_ece *ece)
{
	FORWARD(rdma_set_local_ece, id, ece);
	return set_errno(iwv_unsupported("rdma_set_local_ece"));
}

int rdma_get_remote_ece(struct rdma_cm_id *id, struct ibv_ece *ece)
{
	FORWARD(rdma_get_remote_ece, id, ece);
	return set_errno(iwv_unsupported("rdma_get_remote_ece"));
}

/* Functions of librdmacm since 2025, which older headers and libraries lack. */
int rdma_resolve_addrinfo(struct rdma_cm_id *id, const char *node, const char *service,
			  const struct rdma_addrinfo *hints);
int rdma_query_addrinfo(struct rdma_cm_id *id, struct rdma_addrinfo **info);
int rdma_write_cm_event(struct rdma_cm_id *id, enum rdma_cm_event_type event, int status, uint64_t arg);

int rdma_resolve_addrinfo(struct rdma_cm_id *id, const char *node, const char *service,
			  const struct rdma_addrinfo *hints)
{
	FORWARD(rdma_resolve_addrinfo, id, node, service, hints);
	return set_errno(iwv_unsupported("rdma_resolve_addrinfo"));
}

int rdma_query_addrinfo(struct rdma_cm_id *id, struct rdma_addrinfo **info)
{
	FORWARD(rdma_query_addrinfo, id, info);
	return set_errno(iwv_unsupported("rdma_query_addrinfo"));
}

int rdma_write_cm_event(struct rdma_cm_id *id, enum rdma_cm_event_type event, int status, uint64_t arg)
{
	FORWARD(rdma_write_cm_event, id, event, status, arg);
	return set_errno(iwv_unsupported("rdma_write_cm_event"));
}
