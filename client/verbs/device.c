/* Devices: the interfaces of daemons, and the devices of the distribution's library. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <glob.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "internal.h"

enum {
	OPEN_WAIT_MS = 10000, /* time that a daemon has to answer */
	SHORT_WAIT_MS = 100,  /* the same, while all events wait */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held while daemons are probed */
static pthread_mutex_t addresses_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(struct device *) devices; /* in the order of discovery; read without the lock too */
static unsigned int num_devices;
static unsigned int scans = 1;
static _Thread_local bool importing; /* in the distribution's ibv_import_device */

/* mark identifies iwarpd's devices: no other device has it among its operations. */
static struct ibv_context *mark(struct ibv_device *device, int fd)
{
	(void)device, (void)fd;
	return NULL;
}

static bool device_ours(const struct ibv_device *ibv)
{
	return ibv->_ops._dummy1 == mark;
}

bool is_ours(const struct ibv_context *ibv)
{
	return ibv->ops.poll_cq == poll_cq;
}

struct context *iwv_context_of(struct ibv_context *ibv)
{
	return container_of(ibv, struct context, v.context);
}

/* hash is FNV-1a, so that a name gives the same number in each run. */
static uint64_t hash(uint64_t h, const char *s)
{
	while (*s)
		h = (h ^ (unsigned char)*s++) * UINT64_C(0x100000001b3);
	return h;
}

/* device_update stores what the daemon reports about an interface. */
static void device_update(struct device *d, const struct iwarpd_device_attr *a)
{
	uint64_t guid;
	unsigned int i;

	pthread_mutex_lock(&addresses_lock);
	for (i = 0; i < MAX_ADDRESSES && a->addresses[i]; i++)
		snprintf(d->addresses[i], sizeof(d->addresses[i]), "%s", a->addresses[i]);
	atomic_store(&d->num_addresses, i);
	guid = hash(hash(UINT64_C(0xcbf29ce484222325), d->interface), i > 0 ? d->addresses[0] : "");
	pthread_mutex_unlock(&addresses_lock);
	atomic_store(&d->guid, (guid & ~(UINT64_C(1) << 56)) | (UINT64_C(2) << 56)); /* locally administered */
	atomic_store(&d->seen, scans);
	atomic_store(&d->present, true);
}

static struct device *device_at(const char *socket, const char *interface)
{
	_Atomic(struct device *) *at = &devices;
	struct device *d;
	bool roce = iwv_settings()->roce;

	for (; (d = *at) != NULL; at = &d->next)
		if (strcmp(d->socket, socket) == 0 && strcmp(d->interface, interface) == 0)
			return d;
	d = calloc(1, sizeof(*d));
	if (!d)
		return NULL;
	snprintf(d->socket, sizeof(d->socket), "%s", socket);
	snprintf(d->interface, sizeof(d->interface), "%s", interface);
	d->ibv._ops._dummy1 = mark;
	d->ibv.node_type = roce ? IBV_NODE_CA : IBV_NODE_RNIC;
	d->ibv.transport_type = roce ? IBV_TRANSPORT_IB : IBV_TRANSPORT_IWARP;
	snprintf(d->ibv.name, sizeof(d->ibv.name), "iwarpd%u", num_devices);
	snprintf(d->ibv.dev_name, sizeof(d->ibv.dev_name), "iwarpd%u", num_devices);
	snprintf(d->ibv.dev_path, sizeof(d->ibv.dev_path), "/sys/class/infiniband_verbs/iwarpd%u", num_devices);
	snprintf(d->ibv.ibdev_path, sizeof(d->ibv.ibdev_path), "/sys/class/infiniband/iwarpd%u", num_devices);
	num_devices++;
	*at = d;
	return d;
}

/* known reports whether there is, or was, a daemon at a socket. */
static bool known(const char *socket, bool present)
{
	for (struct device *d = devices; d; d = d->next)
		if ((atomic_load(&d->present) || !present) && strcmp(d->socket, socket) == 0)
			return true;
	return false;
}

/* open_daemon connects to the daemon at a socket. */
static int open_daemon(const char *socket, enum scan how, struct iwarpd_device **dev, struct iwarpd_error *e)
{
	return iwarpd_open_within(socket, NULL, how == SCAN_BY_THREAD ? SHORT_WAIT_MS : OPEN_WAIT_MS, dev, e);
}

/*
 * probe adds the interfaces of the daemon at a socket. It complains, once, if IWARPD_SOCKET names
 * a socket that never had one.
 */
static void probe(const char *socket, bool named, enum scan how)
{
	static bool complained;
	const struct iwarpd_device_attr *a;
	struct iwarpd_device *dev;
	struct iwarpd_error e;

	if (open_daemon(socket, how, &dev, &e) < 0) {
		named = named && !known(socket, false);
		if (named && !complained)
			iwv_complain("IWARPD_SOCKET: %s", e.text);
		else if (how != SCAN_BY_THREAD) /* which looks each second */
			iwv_log("%s", e.text);
		complained |= named;
		return;
	}
	for (unsigned int i = 0; (a = iwarpd_query_interface(dev, i)) != NULL; i++) {
		struct device *d = device_at(socket, a->interface);

		if (d)
			device_update(d, a);
	}
	iwarpd_close(dev);
}

/* probe_list probes several sockets, separated by commas, as in IWARPD_SOCKET. */
static void probe_list(const char *sockets, enum scan how)
{
	char *list = strdup(sockets), *save, *s;

	for (s = list ? strtok_r(list, ",", &save) : NULL; s; s = strtok_r(NULL, ",", &save))
		if (how == SCAN_ALL || !known(s, true))
			probe(s, true, how);
	free(list);
}

/* probe_all probes all sockets, or those at which there was no daemon. */
static void probe_all(enum scan how)
{
	glob_t g = { 0 };

	if (iwv_settings()->sockets) {
		probe_list(iwv_settings()->sockets, how);
		return;
	}
	/* The default daemon, and the daemons of one interface each. */
	glob("/run/iwarpd/iwarpd.sock", 0, NULL, &g);
	glob("/run/iwarpd-*/iwarpd.sock", GLOB_APPEND, NULL, &g);
	for (size_t i = 0; i < g.gl_pathc; i++)
		if (how == SCAN_ALL || !known(g.gl_pathv[i], true))
			probe(g.gl_pathv[i], false, how);
	globfree(&g);
}

void devices_after_fork_child(void)
{
	pthread_mutex_init(&lock, NULL);
	pthread_mutex_init(&addresses_lock, NULL);
	for (struct device *d = devices; d; d = d->next)
		d->cm = NULL;
}

/* A thread is not canceled while it scans, so that it releases the lock. */
struct device *iwv_devices_scan(enum scan how)
{
	int state;

	if (how == SCAN_NONE)
		return devices;
	if (how != SCAN_BY_THREAD)
		pthread_mutex_lock(&lock);
	else if (pthread_mutex_trylock(&lock) != 0)
		return devices; /* another thread is looking */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	thread_opens(1);
	scans += how == SCAN_ALL;
	if (!iwv_settings()->off)
		probe_all(how);
	for (struct device *d = devices; d; d = d->next)
		atomic_store(&d->present, atomic_load(&d->seen) == scans);
	thread_opens(-1);
	pthread_mutex_unlock(&lock);
	pthread_setcancelstate(state, NULL);
	return devices;
}

void devices_forget(const struct device *ended)
{
	for (struct device *d = devices; d; d = d->next)
		if (strcmp(d->socket, ended->socket) == 0) {
			atomic_store(&d->seen, 0);
			atomic_store(&d->present, false);
		}
}

bool iwv_device_address(const struct device *d, unsigned int i, struct sockaddr_storage *a)
{
	struct sockaddr_in6 *a6 = (struct sockaddr_in6 *)a;
	struct sockaddr_in *a4 = (struct sockaddr_in *)a;
	char text[64];
	bool any;

	pthread_mutex_lock(&addresses_lock);
	any = i < atomic_load(&d->num_addresses);
	if (any)
		memcpy(text, d->addresses[i], sizeof(text));
	pthread_mutex_unlock(&addresses_lock);
	if (!any)
		return false;
	memset(a, 0, sizeof(*a));
	text[strcspn(text, "/")] = 0;
	a->ss_family = inet_pton(AF_INET, text, &a4->sin_addr) == 1 ? AF_INET : AF_INET6;
	return a->ss_family == AF_INET || inet_pton(AF_INET6, text, &a6->sin6_addr) == 1;
}

/*
 * The array that is returned has the devices, then NULL, and then the array of the
 * distribution's library, which ibv_free_device_list frees.
 */
struct ibv_device **ibv_get_device_list(int *num)
{
	int all = 0, theirs = 0, n = 0;
	struct ibv_device **real = REAL(ibv_get_device_list) ? REAL(ibv_get_device_list)(&theirs) : NULL;
	struct device *first = importing ? NULL : iwv_devices_scan(SCAN_ALL);
	struct ibv_device **list;

	if (!real)
		theirs = 0;
	for (struct device *d = first; d; d = d->next)
		all++;
	list = calloc((size_t)(all + theirs) + 2, sizeof(*list));
	if (list) {
		for (struct device *d = first; d && n < all; d = d->next) /* another thread may have found more */
			if (atomic_load(&d->present)) /* its daemon may end at any time */
				list[n++] = &d->ibv;
		if (theirs > 0)
			memcpy(list + n, real, (size_t)theirs * sizeof(*list));
		n += theirs;
		list[n + 1] = (struct ibv_device *)real;
	} else {
		if (real)
			REAL(ibv_free_device_list)(real);
		errno = ENOMEM;
	}
	if (num)
		*num = n;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	struct ibv_device **end = list;

	if (!list)
		return;
	while (*end)
		end++;
	if (end[1])
		REAL(ibv_free_device_list)((struct ibv_device **)end[1]);
	free(list);
}

/*
 * ibv_import_device of the distribution's library calls ibv_get_device_list, which is ours, and
 * uses private members of each device.
 */
struct ibv_context *ibv_import_device(int fd)
{
	struct ibv_context *c;

	importing = true;
	c = REAL(ibv_import_device)(fd);
	importing = false;
	return c;
}

const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

__be64 ibv_get_device_guid(struct ibv_device *device)
{
	if (!device_ours(device))
		return REAL(ibv_get_device_guid)(device);
	return htobe64(atomic_load(&container_of(device, struct device, ibv)->guid));
}

int ibv_get_device_index(struct ibv_device *device)
{
	return device_ours(device) ? -1 : REAL(ibv_get_device_index)(device);
}

/* query_device_ex is ibv_query_device_ex, whose inline function leaves the number of ports 0 without it. */
static int query_device_ex(struct ibv_context *ibv, const struct ibv_query_device_ex_input *input, struct ibv_device_attr_ex *attr, size_t size)
{
	struct ibv_device_attr_ex a = { 0 };
	int err = input && input->comp_mask ? EINVAL : ibv_query_device(ibv, &a.orig_attr);

	if (err)
		return err;
	a.phys_port_cnt_ex = a.orig_attr.phys_port_cnt;
	a.device_cap_flags_ex = a.orig_attr.device_cap_flags;
	memset(attr, 0, size);
	memcpy(attr, &a, size < sizeof(a) ? size : sizeof(a));
	return 0;
}

/* attr_of returns the daemon's attributes of the device's interface. */
static const struct iwarpd_device_attr *attr_of(const struct iwarpd_device *dev, const struct device *d)
{
	const struct iwarpd_device_attr *a;

	for (unsigned int i = 0; (a = iwarpd_query_interface(dev, i)) != NULL; i++)
		if (strcmp(a->interface, d->interface) == 0)
			return a;
	return iwarpd_query_device(dev);
}

static struct context *new_context(struct device *d, enum scan how)
{
	struct context *c = calloc(1, sizeof(*c));
	struct iwarpd_error e;
	int err;

	if (!c)
		return NULL;
	err = open_daemon(d->socket, how, &c->dev, &e);
	if (err) {
		iwv_fail(err, "ibv_open_device", &e);
		free(c);
		return NULL;
	}
	c->device = d;
	c->attr = *attr_of(c->dev, d);
	c->v.sz = sizeof(c->v);
	c->v.create_qp_ex = create_qp_ex;
	c->v.query_device_ex = query_device_ex;
	c->v.context = (struct ibv_context){
		.device = &d->ibv,
		.cmd_fd = -1,
		.num_comp_vectors = 1,
		.abi_compat = __VERBS_ABI_IS_EXTENDED,
		.ops = {
			.alloc_mw = alloc_mw,
			.dealloc_mw = dealloc_mw,
			.poll_cq = poll_cq,
			.req_notify_cq = req_notify_cq,
			.post_srq_recv = post_srq_recv,
			.post_send = post_send,
			.post_recv = post_recv,
		},
	};
	pthread_mutex_init(&c->v.context.mutex, NULL);
	return c;
}

static void free_context(struct context *c)
{
	for (int i = 0; i < QP_NUMS / NUMBERS; i++)
		free(c->numbers[i]);
	iwarpd_close(c->dev);
	free(c);
}

/* serve makes the program get the events of a context, or frees it. The lock is held. */
static struct context *serve(struct context *c)
{
	if (async_init(c) < 0) {
		free_context(c);
		return NULL;
	}
	c->v.context.async_fd = c->async.fd;
	if (thread_serve(c) < 0) {
		async_close(c);
		free_context(c);
		return NULL;
	}
	return c;
}

struct context *iwv_context_open(struct device *d, enum scan how)
{
	struct context *c;
	int state;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); /* the device would stay open */
	thread_opens(1);
	c = new_context(d, how);
	if (c) {
		iwv_thread_lock();
		c = serve(c);
		iwv_thread_unlock();
	}
	thread_opens(-1);
	pthread_setcancelstate(state, &state);
	return c;
}

bool context_own(struct context *c)
{
	struct iwarpd_device *other = NULL;
	struct iwarpd_error e = { 0 };
	int state, err;

	if (!atomic_load(&c->inherited))
		return true;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	thread_opens(1);
	err = open_daemon(c->device->socket, SCAN_NONE, &other, &e);
	if (!err) {
		iwv_thread_lock();
		if (atomic_load(&c->inherited)) {
			c->dev = other;
			other = NULL;
			c->attr = *attr_of(c->dev, c->device);
			if (thread_serve(c) < 0)
				atomic_store(&c->gone, true);
			atomic_store(&c->inherited, false);
		}
		iwv_thread_unlock();
		iwarpd_close(other); /* another thread was faster */
	}
	thread_opens(-1);
	pthread_setcancelstate(state, NULL);
	if (err)
		iwv_fail(err, "the child of a fork opens the device", &e);
	return !err;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct context *c;

	if (!device_ours(device))
		return REAL(ibv_open_device)(device);
	c = iwv_context_open(container_of(device, struct device, ibv), SCAN_NONE);
	return c ? &c->v.context : NULL;
}

void iwv_context_close(struct context *c)
{
	thread_forget(c);
	qp_free_closing(c);
	async_close(c);
	free_context(c);
}

int ibv_close_device(struct ibv_context *ibv)
{
	OTHERS(ibv, ibv_close_device, ibv);
	iwv_thread_lock();
	iwv_context_close(iwv_context_of(ibv));
	iwv_thread_unlock();
	return 0;
}

static int to_int(uint64_t n)
{
	return (int)least(n, INT32_MAX);
}

/*
 * max_wr returns the limit of a program's work requests. libiwarpd asks for up to 65 more, so that
 * a completed work request frees its place at once.
 */
static int max_wr(const struct iwarpd_device_attr *d)
{
	return to_int(d->max_qp_wr > 130 ? d->max_qp_wr - 65 : d->max_qp_wr / 2);
}

int ibv_query_device(struct ibv_context *ibv, struct ibv_device_attr *a)
{
	const struct context *c;
	const struct iwarpd_device_attr *d;

	OTHERS(ibv, ibv_query_device, ibv, a);
	c = iwv_context_of(ibv);
	d = &c->attr;
	*a = (struct ibv_device_attr){
		.node_guid = htobe64(atomic_load(&c->device->guid)),
		.sys_image_guid = htobe64(atomic_load(&c->device->guid)),
		.max_mr_size = UINT64_C(1) << 57, /* far memory */
		.page_size_cap = (uint64_t)sysconf(_SC_PAGESIZE),
		.vendor_id = 0x695770, /* "iWp", which is not assigned to a vendor */
		.max_qp = to_int(d->max_qp),
		.max_qp_wr = max_wr(d),
		/* The extensions are Send with Invalidate and Local Invalidate; fast registration is not of libibverbs. */
		.device_cap_flags = IBV_DEVICE_MEM_WINDOW_TYPE_2B | IBV_DEVICE_MEM_MGT_EXTENSIONS,
		.max_sge = to_int(d->max_sge),
		.max_sge_rd = 1,
		.max_cq = to_int(d->max_cq),
		.max_cqe = to_int(d->max_cqe),
		.max_mr = to_int(d->max_mr),
		.max_pd = to_int(d->max_pd),
		.max_qp_rd_atom = to_int(d->max_ird),
		.max_res_rd_atom = to_int((uint64_t)d->max_ird * d->max_qp),
		.max_qp_init_rd_atom = to_int(d->max_ord),
		.atomic_cap = IBV_ATOMIC_HCA,
		.max_mw = to_int(d->max_mw),
		.max_srq = to_int(d->max_qp),
		.max_srq_wr = max_wr(d),
		.max_srq_sge = to_int(d->max_sge),
		.max_pkeys = 1,
		.phys_port_cnt = 1,
	};
	snprintf(a->fw_ver, sizeof(a->fw_ver), "%s", c->dev ? iwarpd_query_device(c->dev)->server : "");
	return 0;
}

static enum ibv_mtu mtu_of(uint32_t mtu)
{
	enum ibv_mtu m = IBV_MTU_256;

	while (m < IBV_MTU_4096 && (256u << m) <= mtu)
		m++;
	return m;
}

/* ethtool asks the kernel about an interface, which the network namespace of the program may lack, as in a container. */
static bool ethtool(const char *interface, void *cmd)
{
	struct ifreq r = { .ifr_data = cmd };
	int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool known;

	snprintf(r.ifr_name, sizeof(r.ifr_name), "%.*s", IFNAMSIZ - 1, interface);
	known = s >= 0 && ioctl(s, SIOCETHTOOL, &r) == 0;
	if (s >= 0)
		close(s);
	return known;
}

/* speed_of returns the speed of an interface in Mbit/s, or that of a veth if it is not known. */
static uint32_t speed_of(const char *interface)
{
	struct ethtool_cmd cmd = { .cmd = ETHTOOL_GSET };
	bool known = ethtool(interface, &cmd) && ethtool_cmd_speed(&cmd) != (uint32_t)SPEED_UNKNOWN;

	return known ? ethtool_cmd_speed(&cmd) : SPEED_10000;
}

/* linked reports whether an interface is up and has a link, or that is not known. */
static bool linked(const char *interface)
{
	struct ethtool_value link = { .cmd = ETHTOOL_GLINK };

	return !ethtool(interface, &link) || link.data;
}

/* put_speed stores the slowest width and speed of InfiniBand that are not slower than an interface. */
static void put_speed(struct ibv_port_attr *a, const char *interface)
{
	enum { X1 = 1, X4 = 2, SDR = 1, FDR10 = 8, EDR = 32, HDR = 64, NDR = 128 };
	static const struct { uint32_t mbit; uint8_t width, speed; } rates[] = {
		{ 2500, X1, SDR }, { 10000, X1, FDR10 }, { 25000, X1, EDR }, { 40000, X4, FDR10 }, { 50000, X1, HDR },
		{ 100000, X4, EDR }, { 200000, X4, HDR }, { UINT32_MAX, X4, NDR },
	};
	uint32_t mbit = speed_of(interface);
	size_t i = 0;

	while (rates[i].mbit < mbit)
		i++;
	a->active_width = rates[i].width;
	a->active_speed = rates[i].speed;
}

#undef ibv_query_port
int ibv_query_port(struct ibv_context *ibv, uint8_t port, struct _compat_ibv_port_attr *out)
{
	const struct context *c;
	struct ibv_port_attr a;
	bool active;

	OTHERS(ibv, ibv_query_port, ibv, port, out);
	if (port != 1)
		return EINVAL;
	c = iwv_context_of(ibv);
	active = !atomic_load(&c->gone) && linked(c->device->interface);
	a = (struct ibv_port_attr){
		.state = active ? IBV_PORT_ACTIVE : IBV_PORT_DOWN,
		.max_mtu = IBV_MTU_4096,
		.active_mtu = mtu_of(c->attr.mtu),
		.gid_tbl_len = (int)atomic_load(&c->device->num_addresses),
		.max_msg_sz = INT32_MAX, /* of the daemon */
		.pkey_tbl_len = 1,
		.max_vl_num = 1,
		.phys_state = active ? 5 : 3, /* link up, or disabled */
		.link_layer = IBV_LINK_LAYER_ETHERNET,
	};
	put_speed(&a, c->device->interface);
	/*
	 * The exported function fills the members before flags; the inline function
	 * zeroes the rest.
	 */
	memcpy(out, &a, offsetof(struct ibv_port_attr, flags));
	return 0;
}

/* put_gid makes a GID from an address. IPv4 addresses are IPv4-mapped, as in RoCE. */
int put_gid(const struct context *c, unsigned int index, union ibv_gid *gid)
{
	struct sockaddr_storage a;

	memset(gid, 0, sizeof(*gid));
	if (!iwv_device_address(c->device, index, &a))
		return -1;
	if (a.ss_family == AF_INET6) {
		memcpy(gid->raw, &((struct sockaddr_in6 *)&a)->sin6_addr, 16);
		return 0;
	}
	gid->raw[10] = gid->raw[11] = 0xff;
	memcpy(gid->raw + 12, &((struct sockaddr_in *)&a)->sin_addr, 4);
	return 0;
}

int ibv_query_gid(struct ibv_context *ibv, uint8_t port, int index, union ibv_gid *gid)
{
	OTHERS(ibv, ibv_query_gid, ibv, port, index, gid);
	if (port != 1 || index < 0 || put_gid(iwv_context_of(ibv), (unsigned int)index, gid) < 0) {
		errno = EINVAL;
		return -1;
	}
	return 0;
}

int _ibv_query_gid_ex(struct ibv_context *ibv, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
			  uint32_t flags, size_t size)
{
	struct ibv_gid_entry e = { .gid_index = index, .port_num = 1, .gid_type = IBV_GID_TYPE_ROCE_V2 };
	const struct context *c = iwv_context_of(ibv);

	OTHERS(ibv, _ibv_query_gid_ex, ibv, port, index, entry, flags, size);
	if (port != 1 || flags || put_gid(c, index, &e.gid) < 0)
		return EINVAL;
	e.ndev_ifindex = if_nametoindex(c->device->interface);
	memcpy(entry, &e, size < sizeof(e) ? size : sizeof(e));
	return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *ibv, struct ibv_gid_entry *entries, size_t max, uint32_t flags,
				 size_t size)
{
	size_t n;

	OTHERS(ibv, _ibv_query_gid_table, ibv, entries, max, flags, size);
	if (flags || size < sizeof(*entries))
		return -EINVAL;
	for (n = 0; n < max && n < atomic_load(&iwv_context_of(ibv)->device->num_addresses); n++) {
		struct ibv_gid_entry *e = (struct ibv_gid_entry *)(void *)((char *)entries + n * size);

		if (_ibv_query_gid_ex(ibv, 1, (uint32_t)n, e, 0, sizeof(*e)))
			break;
	}
	if (n == max && n < atomic_load(&iwv_context_of(ibv)->device->num_addresses))
		return -EINVAL;
	return (ssize_t)n;
}

int ibv_query_pkey(struct ibv_context *ibv, uint8_t port, int index, __be16 *pkey)
{
	OTHERS(ibv, ibv_query_pkey, ibv, port, index, pkey);
	if (port != 1 || index != 0) {
		errno = EINVAL;
		return -1;
	}
	*pkey = htobe16(0xffff);
	return 0;
}

int ibv_get_pkey_index(struct ibv_context *ibv, uint8_t port, __be16 pkey)
{
	OTHERS(ibv, ibv_get_pkey_index, ibv, port, pkey);
	if (port == 1 && pkey == htobe16(0xffff))
		return 0;
	errno = EINVAL;
	return -1;
}
