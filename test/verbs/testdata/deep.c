/*
 * A completion queue for far more completions than one queue pair can have: deep ADDRESS
 * on the client, deep on the server.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { CQE = 262144, PAIRS = 3, RECVS = 8000 };

static const char *const port = "7207";

static struct rdma_cm_id *endpoint(const char *addr, int flags)
{
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_port_space = RDMA_PS_TCP }, *res;
	struct ibv_qp_init_attr attr = { .cap = { 1, 1, 1, 1, 0 } };
	struct rdma_cm_id *id;

	CHECK(rdma_getaddrinfo(addr, port, &hints, &res) == 0);
	CHECK(rdma_create_ep(&id, res, NULL, flags ? &attr : NULL) == 0);
	rdma_freeaddrinfo(res);
	return id;
}

static void serve(void)
{
	struct rdma_cm_id *listener = endpoint(NULL, RAI_PASSIVE), *id[PAIRS];

	CHECK(rdma_listen(listener, PAIRS) == 0);
	for (int i = 0; i < PAIRS; i++) {
		CHECK(rdma_get_request(listener, &id[i]) == 0);
		CHECK(rdma_accept(id[i], NULL) == 0);
	}
	for (int i = 0; i < PAIRS; i++)
		CHECK(rdma_disconnect(id[i]) == 0);
	for (int i = 0; i < PAIRS; i++)
		rdma_destroy_ep(id[i]);
	rdma_destroy_ep(listener);
}

static void await_end(struct rdma_cm_id *id)
{
	struct rdma_cm_event *ev;

	CHECK(rdma_get_cm_event(id->channel, &ev) == 0);
	CHECK(ev->event == RDMA_CM_EVENT_DISCONNECTED);
	CHECK(rdma_ack_cm_event(ev) == 0);
}

int main(int argc, char **argv)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 1, RECVS, 1, 1, 0 } };
	struct rdma_cm_id *id[PAIRS];
	int got = 0, n;

	if (argc < 2) {
		serve();
		return 0;
	}
	for (int i = 0; i < PAIRS; i++) {
		id[i] = endpoint(argv[1], 0);
		if (!attr.send_cq) {
			attr.send_cq = attr.recv_cq = ibv_create_cq(id[i]->verbs, CQE, NULL, NULL, 0);
			CHECK(attr.send_cq && attr.send_cq->cqe >= CQE);
		}
		CHECK(rdma_create_qp(id[i], NULL, &attr) == 0);
		for (int k = 0; k < RECVS; k++) {
			struct ibv_recv_wr wr = { .wr_id = (uint64_t)k }, *bad;

			CHECK(ibv_post_recv(id[i]->qp, &wr, &bad) == 0);
		}
	}
	for (int i = 0; i < PAIRS; i++)
		CHECK(rdma_connect(id[i], NULL) == 0);
	/* Poll only when all receives have completed. */
	for (int i = 0; i < PAIRS; i++)
		await_end(id[i]);
	do {
		struct ibv_wc wc[64];

		n = ibv_poll_cq(attr.send_cq, 64, wc);
		for (int i = 0; i < n; i++)
			CHECK(wc[i].status == IBV_WC_WR_FLUSH_ERR);
		got += n;
	} while (n > 0);
	CHECK(n == 0);
	if (got != PAIRS * RECVS) {
		printf("%d completions, want %d\n", got, PAIRS * RECVS);
		return 1;
	}
	for (int i = 0; i < PAIRS; i++)
		rdma_destroy_ep(id[i]);
	CHECK(ibv_destroy_cq(attr.send_cq) == 0);
	return 0;
}
