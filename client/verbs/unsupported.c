/* Functions that fail for objects of iwarpd. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "internal.h"

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	OTHERS(pd->context, ibv_create_ah, pd, attr);
	iwv_unsupported("ibv_create_ah");
	return NULL;
}

struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port)
{
	OTHERS(pd->context, ibv_create_ah_from_wc, pd, wc, grh, port);
	iwv_unsupported("ibv_create_ah_from_wc");
	return NULL;
}

int ibv_init_ah_from_wc(struct ibv_context *ibv, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh,
			    struct ibv_ah_attr *attr)
{
	OTHERS(ibv, ibv_init_ah_from_wc, ibv, port, wc, grh, attr);
	iwv_unsupported("ibv_init_ah_from_wc");
	return -1;
}

int ibv_destroy_ah(struct ibv_ah *ah)
{
	return is_ours(ah->context) ? EINVAL : REAL(ibv_destroy_ah)(ah);
}

int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	return is_ours(qp->context) ? iwv_unsupported("ibv_attach_mcast") : REAL(ibv_attach_mcast)(qp, gid, lid);
}

int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	return is_ours(qp->context) ? iwv_unsupported("ibv_detach_mcast") : REAL(ibv_detach_mcast)(qp, gid, lid);
}

int ibv_resolve_eth_l2_from_gid(struct ibv_context *ibv, struct ibv_ah_attr *attr, uint8_t mac[ETHERNET_LL_SIZE],
				    uint16_t *vid)
{
	OTHERS(ibv, ibv_resolve_eth_l2_from_gid, ibv, attr, mac, vid);
	return iwv_unsupported("ibv_resolve_eth_l2_from_gid");
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	return is_ours(qp->context) ? NULL : REAL(ibv_qp_to_qp_ex)(qp);
}

int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	return is_ours(qp->context) ? iwv_unsupported("ibv_set_ece") : REAL(ibv_set_ece)(qp, ece);
}

int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	OTHERS(qp->context, ibv_query_ece, qp, ece);
	memset(ece, 0, sizeof(*ece));
	return 0;
}

int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
	return is_ours(qp->context) ? 0 : REAL(ibv_query_qp_data_in_order)(qp, op, flags);
}

struct ibv_pd *ibv_import_pd(struct ibv_context *ibv, uint32_t handle)
{
	OTHERS(ibv, ibv_import_pd, ibv, handle);
	iwv_unsupported("ibv_import_pd");
	return NULL;
}

void ibv_unimport_pd(struct ibv_pd *pd)
{
	if (!is_ours(pd->context))
		REAL(ibv_unimport_pd)(pd);
}

struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t handle)
{
	OTHERS(pd->context, ibv_import_mr, pd, handle);
	iwv_unsupported("ibv_import_mr");
	return NULL;
}

void ibv_unimport_mr(struct ibv_mr *mr)
{
	if (!is_ours(mr->context))
		REAL(ibv_unimport_mr)(mr);
}

struct ibv_dm *ibv_import_dm(struct ibv_context *ibv, uint32_t handle)
{
	OTHERS(ibv, ibv_import_dm, ibv, handle);
	iwv_unsupported("ibv_import_dm");
	return NULL;
}

void ibv_unimport_dm(struct ibv_dm *dm)
{
	if (!is_ours(dm->context))
		REAL(ibv_unimport_dm)(dm);
}

/* near.c copies registered memory at a fork, so programs need neither ibv_fork_init nor madvise. */
enum ibv_fork_status ibv_is_fork_initialized(void)
{
	return iwv_settings()->off ? REAL(ibv_is_fork_initialized)() : IBV_FORK_UNNEEDED;
}

/*
 * Providers and ibv_devinfo call this function of libibverbs' private interface. Its
 * symbol version differs between releases.
 */
int iwv_query_gid_type(struct ibv_context *ibv, uint8_t port, unsigned int index, unsigned int *type);

#define PRIVATE(n)                                                                     \
	extern __typeof__(iwv_query_gid_type) gid_type_##n                             \
		__attribute__((alias("iwv_query_gid_type"),                            \
			       symver("ibv_query_gid_type@IBVERBS_PRIVATE_" #n)))

PRIVATE(25);
PRIVATE(33);
PRIVATE(34);
PRIVATE(57);
PRIVATE(59);
PRIVATE(64);
PRIVATE(65);

int iwv_query_gid_type(struct ibv_context *ibv, uint8_t port, unsigned int index, unsigned int *type)
{
	__typeof__(&iwv_query_gid_type) f = is_ours(ibv) ? NULL : real_verbs_symbol("ibv_query_gid_type");

	if (f)
		return f(ibv, port, index, type);
	*type = 1; /* RoCE v2, whose GIDs have the same form */
	return 0;
}
