/* Connections: listen, connect, accept, reject, disconnect. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct iwarpd_listener {
	struct object obj;
	char address[64];
};

struct iwarpd_listener *listener_of(struct object *o)
{
	return container_of(o, struct iwarpd_listener, obj);
}

/* put_startup fills the message; what is not said stays absent. */
static void put_startup(Pb__Startup *m, const struct iwarpd_startup *s)
{
	const struct {
		int value;
		protobuf_c_boolean *field;
		uint32_t *which;
		uint32_t there;
	} choices[] = {
		{ s->crc, &m->crc, &m->opt_crc_case, PB__STARTUP__OPT_CRC_CRC },
		{ s->markers, &m->markers, &m->opt_markers_case, PB__STARTUP__OPT_MARKERS_MARKERS },
		{ s->fallback, &m->fallback, &m->opt_fallback_case, PB__STARTUP__OPT_FALLBACK_FALLBACK },
		{ s->p2p, &m->p2p, &m->opt_p2p_case, PB__STARTUP__OPT_P2P_P2P },
	};
	(void)choices;
}
