/*
 * Connections and the devices that they are by.
 *
 *	arrive server PORT [TOS]   listens on every address
 *	arrive client ADDR PORT
 *
 * The server says its port, and of each connection from which address to which it is, and by which
 * device. The client connects and disconnects.
 */
#include <arpa/inet.h>
#include <netdb.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

/* make_qp makes a queue pair, and what it needs, on the device of id. */
static void make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_pd *pd = ibv_alloc_pd(id->verbs);

	CHECK(pd && rdma_create_qp(id, pd, &attr) == 0);
}

/* drop frees what make_qp made, and the id. */
static void drop(struct rdma_cm_id *id)
{
	struct ibv_pd *pd = id->qp->pd;

	rdma_destroy_qp(id);
	CHECK(ibv_dealloc_pd(pd) == 0);
	CHECK(rdma_destroy_id(id) == 0);
}

static const char *text(struct sockaddr *a, char host[NI_MAXHOST])
{
	socklen_t len = a->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);

	CHECK(getnameinfo(a, len, host, NI_MAXHOST, NULL, 0, NI_NUMERICHOST) == 0);
	return host;
}

static void handle(struct rdma_cm_event *event)
{
	struct rdma_cm_id *id = event->id;
	char from[NI_MAXHOST], to[NI_MAXHOST];

	switch (event->event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		printf("%s to %s by %s\n", text(rdma_get_peer_addr(id), from), text(rdma_get_local_addr(id), to),
		       ibv_get_device_name(id->verbs->device));
		make_qp(id);
		CHECK(rdma_accept(id, NULL) == 0);
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		rdma_disconnect(id);
		break;
	default:
		CHECK(!rdma_event_str(event->event));
	}
}

static void serve(int port, const char *tos)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port) };
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listener;

	CHECK(channel && rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(listener, (struct sockaddr *)&any) == 0);
	if (tos) {
		uint8_t value = (uint8_t)strtol(tos, NULL, 0);

		CHECK(rdma_set_option(listener, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &value, sizeof(value)) == 0);
	}
	CHECK(rdma_listen(listener, 5) == 0);
	printf("port %d\n", ntohs(rdma_get_src_port(listener)));
	for (;;) {
		struct rdma_cm_event *event;
		struct rdma_cm_id *gone = NULL;

		CHECK(rdma_get_cm_event(channel, &event) == 0);
		handle(event);
		if (event->event == RDMA_CM_EVENT_DISCONNECTED)
			gone = event->id;
		CHECK(rdma_ack_cm_event(event) == 0);
		if (gone)
			drop(gone);
	}
}

static void call(const char *host, const char *port)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST }, *to;
	struct rdma_cm_id *id;

	CHECK(getaddrinfo(host, port, &hints, &to) == 0);
	CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, to->ai_addr, 2000) == 0);
	CHECK(rdma_resolve_route(id, 2000) == 0);
	make_qp(id);
	CHECK(rdma_connect(id, NULL) == 0);
	CHECK(rdma_disconnect(id) == 0);
	drop(id);
	freeaddrinfo(to);
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc >= 3 && strcmp(argv[1], "server") == 0)
		serve(atoi(argv[2]), argc > 3 ? argv[3] : NULL);
	CHECK(argc == 4 && strcmp(argv[1], "client") == 0);
	call(argv[2], argv[3]);
	return 0;
}
