/* Settings from the environment. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

extern char **environ;

static struct settings settings;

/* The variables, with the values they may have: words, of which the first is the default, or else a text. */
static const struct variable {
	const char *name, *allowed;
	const char *words[4];
} variables[] = {
	{ "IWARPD_VERBS", "on or off", { "on", "off" } },
	{ "IWARPD_VERBS_MEMORY", "auto, near or far", { "auto", "near", "far" } },
	{ "IWARPD_VERBS_TRANSPORT", "iwarp or roce", { "iwarp", "roce" } },
	{ "IWARPD_VERBS_RECEIVE_WAIT", "a number of milliseconds up to 60000", { NULL } },
	{ "IWARPD_VERBS_LOG", "a file that can be written, or 1 for standard error", { NULL } },
	{ "IWARPD_SOCKET", "sockets of daemons, with commas between them", { NULL } },
	{ "IWARPD_VERBS_DIR", "the folder of the libraries", { NULL } }, /* iwarpd-run's */
};

enum { OFF, MEMORY, TRANSPORT, RECEIVE_WAIT, LOG, SOCKET, VARIABLES = sizeof(variables) / sizeof(*variables) };

/* value returns the value of a variable, or NULL if it has none. */
static const char *value(const struct variable *v)
{
	const char *s = secure_getenv(v->name);

	return s && *s ? s : NULL;
}

static void refuse(const struct variable *v, const char *s)
{
	iwv_complain("%s=%s is ignored: it must be %s", v->name, s, v->allowed);
}

/* word returns which of the words of a variable its value is. */
static unsigned int word(const struct variable *v)
{
	const char *s = value(v);

	for (unsigned int i = 0; s && v->words[i]; i++)
		if (strcmp(s, v->words[i]) == 0)
			return i;
	if (s)
		refuse(v, s);
	return 0;
}

static uint32_t number(const struct variable *v, unsigned long most)
{
	const char *s = value(v);
	unsigned long n;
	char *end;

	if (!s)
		return 0;
	n = strtoul(s, &end, 10);
	if (*s < '0' || *s > '9' || *end || n > most) {
		refuse(v, s);
		return 0;
	}
	return (uint32_t)n;
}

/* unknown complains about variables that are no settings, such as misspelled ones. */
static void unknown(void)
{
	for (char **e = environ; e && *e; e++) {
		size_t n = strcspn(*e, "="), i = 0;

		if (strncmp(*e, variables[OFF].name, strlen(variables[OFF].name)) != 0)
			continue;
		while (i < VARIABLES && (strlen(variables[i].name) != n || strncmp(*e, variables[i].name, n) != 0))
			i++;
		if (i == VARIABLES)
			iwv_complain("%s is ignored: there is no variable %.*s; see iwarpd-run(1)", *e, (int)n, *e);
	}
}

static void read_settings(void)
{
	/* They are copied, since the program may change its environment. */
	const char *log = value(&variables[LOG]), *sockets = value(&variables[SOCKET]);

	if (log && strcmp(log, "0") != 0)
		settings.log = strdup(log);
	if (sockets && sockets[strspn(sockets, ",")])
		settings.sockets = strdup(sockets);
	else if (sockets)
		refuse(&variables[SOCKET], sockets);
	settings.off = word(&variables[OFF]) == 1;
	settings.memory = word(&variables[MEMORY]);
	settings.roce = word(&variables[TRANSPORT]) == 1;
	settings.receive_wait = number(&variables[RECEIVE_WAIT], 60000);
	log_check(settings.log);
	unknown();
}

const struct settings *iwv_settings(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, read_settings);
	return &settings;
}
