/*
 * librpma: rpma ADDRESS server on one host, rpma ADDRESS on the other. The client writes
 * into the server's memory, flushes, reads the memory back, and sends the data.
 */
#define _GNU_SOURCE
#include <librpma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SIZE = 1 << 20, MESSAGE = 4096 };

#define CHECK(x)                                                                             \
	do {                                                                                 \
		int err_ = (x);                                                              \
		if (err_) {                                                                  \
			printf("line %d: %s: %s\n", __LINE__, #x, rpma_err_2str(err_));      \
			exit(1);                                                             \
		}                                                                            \
	} while (0)

static const char *const port = "7206";
static struct rpma_conn *conn;

static char *memory(void)
{
	char *p = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		exit(1);
	return p;
}

static void expect(enum rpma_conn_event want)
{
	enum rpma_conn_event got;

	CHECK(rpma_conn_next_event(conn, &got));
	if (got != want) {
		printf("got %s, want %s\n", rpma_utils_conn_event_2str(got), rpma_utils_conn_event_2str(want));
		exit(1);
	}
}

/* complete waits for the completion of one operation. */
static void complete(struct rpma_cq *cq, enum ibv_wc_opcode opcode)
{
	struct ibv_wc wc;

	CHECK(rpma_cq_wait(cq));
	CHECK(rpma_cq_get_wc(cq, 1, &wc, NULL));
	if (wc.status != IBV_WC_SUCCESS || wc.opcode != opcode) {
		printf("completion: %s, opcode %d, want %d\n", ibv_wc_status_str(wc.status), wc.opcode, opcode);
		exit(1);
	}
}

static char pattern(size_t at)
{
	return (char)(at * 7 + (at >> 9));
}

static void check(const char *p, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (p[i] != pattern(i)) {
			printf("byte %zu differs\n", i);
			exit(1);
		}
	}
}

static struct rpma_peer *peer_of(const char *addr, enum rpma_util_ibv_context_type type)
{
	struct ibv_context *ctx;
	struct rpma_peer *peer;

	CHECK(rpma_utils_get_ibv_context(addr, type, &ctx));
	CHECK(rpma_peer_new(ctx, &peer));
	return peer;
}

static void serve(const char *addr)
{
	struct rpma_peer *peer = peer_of(addr, RPMA_UTIL_IBV_CONTEXT_LOCAL);
	struct rpma_mr_local *mr, *inbox;
	struct rpma_conn_private_data data;
	struct rpma_conn_req *req;
	char *p = memory(), *message = memory();
	char descriptor[64];
	struct rpma_cq *cq;
	struct rpma_ep *ep;
	size_t size;

	CHECK(rpma_mr_reg(peer, p, SIZE, RPMA_MR_USAGE_WRITE_DST | RPMA_MR_USAGE_READ_SRC | RPMA_MR_USAGE_FLUSH_TYPE_VISIBILITY, &mr));
	CHECK(rpma_mr_reg(peer, message, SIZE, RPMA_MR_USAGE_RECV, &inbox));
	CHECK(rpma_mr_get_descriptor_size(mr, &size));
	CHECK(size > sizeof(descriptor));
	CHECK(rpma_mr_get_descriptor(mr, descriptor));
	CHECK(rpma_ep_listen(peer, addr, port, &ep));
	CHECK(rpma_ep_next_conn_req(ep, NULL, &req));
	CHECK(rpma_conn_req_recv(req, inbox, 0, MESSAGE, NULL));
	data = (struct rpma_conn_private_data){ descriptor, (uint8_t)size };
	CHECK(rpma_conn_req_connect(&req, &data, &conn));
	expect(RPMA_CONN_ESTABLISHED);
	CHECK(rpma_conn_get_cq(conn, &cq));
	complete(cq, IBV_WC_RECV);
	check(message, MESSAGE);
	check(p, SIZE);
	expect(RPMA_CONN_CLOSED);
	CHECK(rpma_conn_disconnect(conn));
	CHECK(rpma_conn_delete(&conn));
	CHECK(rpma_ep_shutdown(&ep));
	CHECK(rpma_mr_dereg(&mr));
	CHECK(rpma_mr_dereg(&inbox));
	CHECK(rpma_peer_delete(&peer));
}

static void use(const char *addr)
{
	struct rpma_peer *peer = peer_of(addr, RPMA_UTIL_IBV_CONTEXT_REMOTE);
	struct rpma_mr_local *from, *to;
	struct rpma_mr_remote *remote;
	struct rpma_conn_private_data data;
	struct rpma_conn_req *req;
	char *p = memory(), *back = memory();
	struct rpma_cq *cq;

	for (size_t i = 0; i < SIZE; i++)
		p[i] = pattern(i);
	CHECK(rpma_mr_reg(peer, p, SIZE, RPMA_MR_USAGE_WRITE_SRC | RPMA_MR_USAGE_SEND, &from));
	CHECK(rpma_mr_reg(peer, back, SIZE, RPMA_MR_USAGE_READ_DST, &to));
	CHECK(rpma_conn_req_new(peer, addr, port, NULL, &req));
	CHECK(rpma_conn_req_connect(&req, NULL, &conn));
	expect(RPMA_CONN_ESTABLISHED);
	CHECK(rpma_conn_get_private_data(conn, &data));
	CHECK(rpma_mr_remote_from_descriptor(data.ptr, data.len, &remote));
	CHECK(rpma_conn_get_cq(conn, &cq));
	CHECK(rpma_write(conn, remote, 0, from, 0, SIZE, RPMA_F_COMPLETION_ON_ERROR, NULL));
	CHECK(rpma_flush(conn, remote, 0, SIZE, RPMA_FLUSH_TYPE_VISIBILITY, RPMA_F_COMPLETION_ALWAYS, NULL));
	complete(cq, IBV_WC_RDMA_READ);
	CHECK(rpma_read(conn, to, 0, remote, 0, SIZE, RPMA_F_COMPLETION_ALWAYS, NULL));
	complete(cq, IBV_WC_RDMA_READ);
	check(back, SIZE);
	CHECK(rpma_send(conn, from, 0, MESSAGE, RPMA_F_COMPLETION_ALWAYS, NULL));
	complete(cq, IBV_WC_SEND);
	CHECK(rpma_conn_disconnect(conn));
	expect(RPMA_CONN_CLOSED);
	CHECK(rpma_conn_delete(&conn));
	CHECK(rpma_mr_remote_delete(&remote));
	CHECK(rpma_mr_dereg(&from));
	CHECK(rpma_mr_dereg(&to));
	CHECK(rpma_peer_delete(&peer));
}

int main(int argc, char **argv)
{
	if (argc > 2)
		serve(argv[1]);
	else
		use(argv[1]);
	return 0;
}
