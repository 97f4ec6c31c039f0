/*
 * A connection to a QP that another one is to connect to by ibv_modify_qp.
 *
 *	intruder ADDR QP FROM   connects to QP on ADDR as QP FROM
 *
 * It prints how that ends.
 */
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"

int main(int argc, char **argv)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *info;
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	uint32_t hello[3];
	struct rdma_conn_param param = { .private_data = hello, .private_data_len = sizeof(hello) };
	struct rdma_cm_id *id;
	char port[16];

	setlinebuf(stdout);
	CHECK(argc == 4);
	snprintf(port, sizeof(port), "%d", 61000 + atoi(argv[2]) % 4536);
	hello[0] = htonl(0x69577651);
	hello[1] = htonl((uint32_t)atoi(argv[3]));
	hello[2] = htonl((uint32_t)atoi(argv[2]));
	CHECK(rdma_getaddrinfo(argv[1], port, &hints, &info) == 0);
	CHECK(rdma_create_ep(&id, info, NULL, &attr) == 0);
	if (rdma_connect(id, &param) == 0)
		printf("connected\n");
	else
		perror("refused");
	return 0;
}
