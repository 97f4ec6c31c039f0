/*
 * Listens on port 3260 of every IPv4 address and of every IPv6 address, and prints which
 * listener gets each of two connect requests.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"

enum { PORT = 3260 };

static struct rdma_event_channel *channel;

/* make makes an id that is bound to addr, and to no other family if af_only is set. */
static struct rdma_cm_id *make(void *addr, int af_only)
{
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &af_only, sizeof(af_only)) == 0);
	CHECK(rdma_bind_addr(id, addr) == 0);
	return id;
}

int main(void)
{
	struct sockaddr_in any4 = { .sin_family = AF_INET, .sin_port = htons(PORT) }, free4 = { .sin_family = AF_INET };
	struct sockaddr_in6 any6 = { .sin6_family = AF_INET6, .sin6_port = htons(PORT) };
	struct rdma_cm_id *v4, *v6, *again, *bound;

	setvbuf(stdout, NULL, _IOLBF, 0);
	channel = rdma_create_event_channel();
	CHECK(channel);
	v4 = make(&any4, 1);
	CHECK(rdma_listen(v4, 5) == 0);
	v6 = make(&any6, 1);
	CHECK(rdma_listen(v6, 5) == 0);
	CHECK(rdma_create_id(channel, &again, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(again, (struct sockaddr *)&any4) < 0 && errno == EADDRINUSE);
	CHECK(rdma_destroy_id(again) == 0);
	/* The port is known before rdma_listen is called. */
	bound = make(&free4, 0);
	CHECK(rdma_get_src_port(bound) != 0);
	CHECK(rdma_destroy_id(bound) == 0);
	for (int i = 0; i < 2; i++) {
		struct rdma_cm_event *event;
		struct rdma_cm_id *id;

		CHECK(rdma_get_cm_event(channel, &event) == 0);
		CHECK(event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
		printf("request to %s\n", event->listen_id == v4 ? "v4" : event->listen_id == v6 ? "v6" : "no one");
		id = event->id;
		CHECK(rdma_reject(id, NULL, 0) == 0);
		rdma_ack_cm_event(event);
		CHECK(rdma_destroy_id(id) == 0);
		if (i == 0) /* the other one continues */
			CHECK(rdma_destroy_id(v4) == 0);
	}
	CHECK(rdma_destroy_id(v6) == 0);
	rdma_destroy_event_channel(channel);
	return 0;
}
