/* Settings from the environment, and the log. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

bool verbs_off(void)
{
	const char *v = secure_getenv("IWARPD_VERBS");

	return v && strcmp(v, "off") == 0;
}

/* log_fd returns the descriptor of the log, or -1. */
static int log_fd(void)
{
	const char *v = secure_getenv("IWARPD_VERBS_LOG");

	if (!v || !*v || strcmp(v, "0") == 0)
		return -1;
	if (strcmp(v, "1") == 0)
		return STDERR_FILENO; /* not duplicated: the process may have no descriptor to spare */
	return open(v, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

void iwv_log(const char *format, ...)
{
	char line[512];
	int saved = errno, fd = log_fd();
	va_list ap;
	int n;

	if (fd < 0) {
		errno = saved;
		return;
	}
	n = snprintf(line, sizeof(line), "iwarpd-verbs[%d]: ", (int)getpid());
	va_start(ap, format);
	vsnprintf(line + n, sizeof(line) - (size_t)n - 1, format, ap);
	va_end(ap);
	strcat(line, "\n");
	(void)!write(fd, line, strlen(line));
	if (fd != STDERR_FILENO)
		close(fd);
	errno = saved;
}

int iwv_fail(int err, const char *what, const struct iwarpd_error *e)
{
	iwv_log("%s: %s", what, e && e->text[0] ? e->text : strerror(-err));
	errno = -err;
	return -1;
}

int iwv_unsupported(const char *what)
{
	iwv_log("%s: not supported by iwarpd", what);
	errno = EOPNOTSUPP;
	return EOPNOTSUPP;
}

int64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}
