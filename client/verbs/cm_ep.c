/* Queue pairs of identifiers, and endpoints (identifiers with a queue pair). */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cm.h"

static void destroy_cq(struct ibv_cq *cq, struct ibv_comp_channel *channel)
{
	if (cq)
		ibv_destroy_cq(cq);
	if (channel)
		ibv_destroy_comp_channel(channel);
}

/*
 * destroy_cqs frees the CQs of an id. A program may have stored its own there, one for sends and receives, as with
 * rdma-core. What another queue pair uses stays, and is the program's.
 */
static void destroy_cqs(struct rdma_cm_id *pub)
{
	destroy_cq(pub->send_cq != pub->recv_cq ? pub->send_cq : NULL,
		   pub->send_cq_channel != pub->recv_cq_channel ? pub->send_cq_channel : NULL);
	destroy_cq(pub->recv_cq, pub->recv_cq_channel);
	pub->send_cq = pub->recv_cq = NULL;
	pub->send_cq_channel = pub->recv_cq_channel = NULL;
}

/* name_cq makes *cq a CQ of an id, unless it is one already. own, which is made if there is none, is that of the id. */
static bool name_cq(struct id *id, struct ibv_cq **cq, uint32_t depth, struct ibv_cq **own,
		    struct ibv_comp_channel **channel)
{
	if (*cq)
		return true;
	if (!*own && !*channel)
		*channel = ibv_create_comp_channel(id->pub.verbs);
	if (!*own && *channel)
		*own = ibv_create_cq(id->pub.verbs, depth > 0 ? (int)depth : 1, &id->pub, *channel, 0);
	else if (*own && (*own)->cqe < (int)depth && ibv_resize_cq(*own, (int)depth))
		return false;
	*cq = *own;
	return *cq;
}

/* name_cqs makes attr name two CQs. If it fails, it may have made one of them. */
static bool name_cqs(struct id *id, struct ibv_qp_init_attr *attr)
{
	/* max_recv_wr does not count with an SRQ. */
	uint32_t recvs = attr->srq ? srq_of(attr->srq)->attr.max_wr : attr->cap.max_recv_wr;

	return name_cq(id, &attr->recv_cq, recvs, &id->pub.recv_cq, &id->pub.recv_cq_channel) &&
	       name_cq(id, &attr->send_cq, attr->cap.max_send_wr, &id->pub.send_cq, &id->pub.send_cq_channel);
}

int rdma_create_qp(struct rdma_cm_id *pub, struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct id *id = id_of(pub);
	struct ibv_qp_init_attr attr = *init;
	struct ibv_qp *qp;

	FORWARD(rdma_create_qp, pub, pd, init);
	if (!pd)
		pd = pub->pd;
	if (!pub->verbs || pub->qp || !pd || pd->context != pub->verbs)
		return set_errno(EINVAL);
	if (!attr.srq)
		attr.srq = pub->srq;
	qp = name_cqs(id, &attr) ? ibv_create_qp(pd, &attr) : NULL;
	if (!qp) {
		int err = errno;

		destroy_cqs(pub);
		return set_errno(err);
	}
	init->cap = attr.cap;
	init->send_cq = attr.send_cq;
	init->recv_cq = attr.recv_cq;
	iwv_thread_lock();
	qp->state = IBV_QPS_INIT;
	atomic_store(&qp_of(qp)->cm, id);
	pub->qp = qp;
	pub->pd = pd;
	iwv_thread_unlock();
	return 0;
}

int rdma_create_qp_ex(struct rdma_cm_id *pub, struct ibv_qp_init_attr_ex *ex)
{
	FORWARD(rdma_create_qp_ex, pub, ex);
	if (!qp_plain(ex))
		return set_errno(iwv_unsupported("rdma_create_qp_ex: comp_mask or create_flags"));
	/* ex begins with the members of an ibv_qp_init_attr. */
	return rdma_create_qp(pub, ex->comp_mask & IBV_QP_INIT_ATTR_PD ? ex->pd : NULL, (struct ibv_qp_init_attr *)ex);
}

void rdma_destroy_qp(struct rdma_cm_id *pub)
{
	struct ibv_qp *qp;

	FORWARD(rdma_destroy_qp, pub);
	iwv_thread_lock();
	qp = pub->qp;
	pub->qp = NULL;
	iwv_thread_unlock();
	if (qp)
		ibv_destroy_qp(qp);
	destroy_cqs(pub);
}

int rdma_create_srq(struct rdma_cm_id *pub, struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	FORWARD(rdma_create_srq, pub, pd, attr);
	if (!pd)
		pd = pub->pd;
	if (!pub->verbs || !pd || pd->context != pub->verbs)
		return set_errno(EINVAL);
	pub->srq = ibv_create_srq(pd, attr);
	return pub->srq ? 0 : -1;
}

int rdma_create_srq_ex(struct rdma_cm_id *pub, struct ibv_srq_init_attr_ex *ex)
{
	struct ibv_srq_init_attr attr = { .srq_context = ex->srq_context, .attr = ex->attr };
	int err;

	FORWARD(rdma_create_srq_ex, pub, ex);
	if ((ex->comp_mask & IBV_SRQ_INIT_ATTR_TYPE) && ex->srq_type != IBV_SRQT_BASIC)
		return set_errno(iwv_unsupported("rdma_create_srq_ex: a type that is not basic"));
	err = rdma_create_srq(pub, ex->comp_mask & IBV_SRQ_INIT_ATTR_PD ? ex->pd : NULL, &attr);
	if (!err)
		ex->attr = attr.attr;
	return err;
}

void rdma_destroy_srq(struct rdma_cm_id *pub)
{
	FORWARD(rdma_destroy_srq, pub);
	if (pub->srq)
		ibv_destroy_srq(pub->srq);
	pub->srq = NULL;
}

/* passive stores in a listening endpoint the attributes of the QPs of its connections. */
static int passive(struct id *id, const struct rdma_addrinfo *res, struct ibv_pd *pd, const struct ibv_qp_init_attr *attr)
{
	if (rdma_bind_addr(&id->pub, res->ai_src_addr) < 0)
		return -1;
	if (pd)
		id->pub.pd = pd;
	if (!attr)
		return 0;
	id->ep_attr = malloc(sizeof(*attr));
	if (!id->ep_attr)
		return -1;
	*id->ep_attr = *attr;
	id->ep_attr->qp_type = (enum ibv_qp_type)res->ai_qp_type;
	return 0;
}

static int active(struct id *id, const struct rdma_addrinfo *res, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	if (res->ai_connect_len > IWARPD_MAX_PRIVATE_DATA)
		return set_errno(EINVAL);
	if (rdma_resolve_addr(&id->pub, res->ai_src_addr, res->ai_dst_addr, 2000) < 0 ||
	    rdma_resolve_route(&id->pub, 2000) < 0)
		return -1;
	if (res->ai_connect_len > 0) {
		id->connect = malloc(res->ai_connect_len);
		if (!id->connect)
			return -1;
		memcpy(id->connect, res->ai_connect, res->ai_connect_len);
		id->connect_len = res->ai_connect_len;
	}
	if (!attr)
		return 0;
	attr->qp_type = (enum ibv_qp_type)res->ai_qp_type;
	return rdma_create_qp(&id->pub, pd, attr);
}

int rdma_create_ep(struct rdma_cm_id **out, struct rdma_addrinfo *res, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct rdma_cm_id *pub;
	int err;

	FORWARD(rdma_create_ep, out, res, pd, attr);
	if (rdma_create_id(NULL, &pub, NULL, (enum rdma_port_space)res->ai_port_space) < 0)
		return -1;
	pub->qp_type = (enum ibv_qp_type)res->ai_qp_type;
	err = res->ai_flags & RAI_PASSIVE ? passive(id_of(pub), res, pd, attr) : active(id_of(pub), res, pd, attr);
	if (err) {
		err = errno;
		rdma_destroy_id(pub);
		return set_errno(err);
	}
	*out = pub;
	return 0;
}

void rdma_destroy_ep(struct rdma_cm_id *pub)
{
	FORWARD(rdma_destroy_ep, pub);
	if (pub->qp)
		rdma_destroy_qp(pub);
	if (pub->srq)
		rdma_destroy_srq(pub);
	rdma_destroy_id(pub);
}

int rdma_get_request(struct rdma_cm_id *listen, struct rdma_cm_id **out)
{
	struct id *l = id_of(listen);
	struct rdma_cm_event *event;
	struct rdma_cm_id *pub;

	FORWARD(rdma_get_request, listen, out);
	if (!l->sync)
		return set_errno(EINVAL);
	if (sync_wait(l) < 0)
		return -1;
	event = listen->event;
	if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST)
		return set_errno(EINVAL);
	pub = event->id;
	/* Move the event with its private data to the new id. */
	listen->event = NULL;
	pub->event = event;
	if (l->ep_attr) {
		struct ibv_qp_init_attr attr = *l->ep_attr;

		if (rdma_create_qp(pub, listen->pd, &attr) < 0) {
			int err = errno;

			rdma_destroy_id(pub);
			return set_errno(err);
		}
	}
	*out = pub;
	return 0;
}
