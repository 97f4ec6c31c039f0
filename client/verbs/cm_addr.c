/* Conversion between socket addresses and the text form of iwarpd. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cm.h"

static const struct sockaddr_in *in4(const struct sockaddr *a)
{
	return (const struct sockaddr_in *)(const void *)a;
}

static const struct sockaddr_in6 *in6(const struct sockaddr *a)
{
	return (const struct sockaddr_in6 *)(const void *)a;
}

socklen_t addr_len(const struct sockaddr *a)
{
	switch (a ? a->sa_family : AF_UNSPEC) {
	case AF_INET:
		return sizeof(struct sockaddr_in);
	case AF_INET6:
		return sizeof(struct sockaddr_in6);
	default:
		return 0;
	}
}

bool addr_any(const struct sockaddr *a)
{
	if (a->sa_family == AF_INET)
		return in4(a)->sin_addr.s_addr == htonl(INADDR_ANY) || ntohl(in4(a)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
	return IN6_IS_ADDR_UNSPECIFIED(&in6(a)->sin6_addr) || IN6_IS_ADDR_LOOPBACK(&in6(a)->sin6_addr);
}

bool addr_same(const struct sockaddr *a, const struct sockaddr *b)
{
	if (a->sa_family != b->sa_family)
		return false;
	if (a->sa_family == AF_INET)
		return in4(a)->sin_addr.s_addr == in4(b)->sin_addr.s_addr;
	return memcmp(&in6(a)->sin6_addr, &in6(b)->sin6_addr, 16) == 0;
}

uint16_t addr_port(const struct sockaddr *a)
{
	switch (a->sa_family) {
	case AF_INET:
		return ntohs(in4(a)->sin_port);
	case AF_INET6:
		return ntohs(in6(a)->sin6_port);
	default:
		return 0;
	}
}

void addr_set_port(struct sockaddr *a, uint16_t port)
{
	if (a->sa_family == AF_INET)
		((struct sockaddr_in *)(void *)a)->sin_port = htons(port);
	else
		((struct sockaddr_in6 *)(void *)a)->sin6_port = htons(port);
}

void addr_text(const struct sockaddr *a, bool port, char text[128])
{
	char host[INET6_ADDRSTRLEN] = "", zone[IF_NAMESIZE + 1] = "", name[IF_NAMESIZE];
	bool v6 = a->sa_family == AF_INET6;

	inet_ntop(a->sa_family, v6 ? (const void *)&in6(a)->sin6_addr : (const void *)&in4(a)->sin_addr, host, sizeof(host));
	if (v6 && IN6_IS_ADDR_LINKLOCAL(&in6(a)->sin6_addr) && if_indextoname(in6(a)->sin6_scope_id, name))
		snprintf(zone, sizeof(zone), "%%%s", name);
	if (!port)
		snprintf(text, 128, "%s%s", host, zone);
	else
		snprintf(text, 128, v6 ? "[%s%s]:%u" : "%s%s:%u", host, zone, addr_port(a));
}

bool addr_parse(const char *text, const struct device *d, struct sockaddr_storage *a)
{
	struct sockaddr_in6 *a6 = (struct sockaddr_in6 *)a;
	struct sockaddr_in *a4 = (struct sockaddr_in *)a;
	char host[128], *colon;

	memset(a, 0, sizeof(*a));
	snprintf(host, sizeof(host), "%s", text);
	colon = strrchr(host, ':');
	if (!colon)
		return false;
	*colon = 0;
	if (inet_pton(AF_INET, host, &a4->sin_addr) == 1) {
		a4->sin_family = AF_INET;
		a4->sin_port = htons((uint16_t)atoi(colon + 1));
		return true;
	}
	if (host[0] != '[' || colon == host + 1 || colon[-1] != ']')
		return false;
	colon[-1] = 0;
	a6->sin6_family = AF_INET6;
	a6->sin6_port = htons((uint16_t)atoi(colon + 1));
	if (inet_pton(AF_INET6, host + 1, &a6->sin6_addr) != 1)
		return false;
	if (IN6_IS_ADDR_LINKLOCAL(&a6->sin6_addr))
		a6->sin6_scope_id = if_nametoindex(d->interface);
	return true;
}
