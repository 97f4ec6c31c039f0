/* The log. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

/* log_open returns a descriptor of the log, or -1 if there is none. It complains once about one that cannot be opened. */
static int log_open(const char *log)
{
	static atomic_flag complained = ATOMIC_FLAG_INIT;
	int fd;

	if (!log)
		return -1;
	if (strcmp(log, "1") == 0)
		return STDERR_FILENO; /* not duplicated: the process may have no descriptor to spare */
	fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
	if (fd < 0 && !atomic_flag_test_and_set(&complained))
		iwv_complain("IWARPD_VERBS_LOG=%s: the log cannot be written: %s; give a file that can, or 1 for standard error",
			     log, strerror(errno));
	return fd;
}

static void log_close(int fd)
{
	if (fd >= 0 && fd != STDERR_FILENO)
		close(fd);
}

void log_check(const char *log)
{
	log_close(log_open(log));
}

__attribute__((format(printf, 2, 0))) static void put(int fd, const char *format, va_list ap)
{
	char line[512];
	int n = snprintf(line, sizeof(line), "iwarpd-verbs[%d]: ", (int)getpid());

	vsnprintf(line + n, sizeof(line) - (size_t)n - 1, format, ap);
	strcat(line, "\n");
	(void)!write(fd, line, strlen(line));
}

void iwv_complain(const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	put(STDERR_FILENO, format, ap);
	va_end(ap);
}

/* The caller may hold a lock, so that the thread must not be canceled here. */
void iwv_log(const char *format, ...)
{
	int saved = errno, state, fd;
	va_list ap;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	fd = log_open(iwv_settings()->log);
	if (fd >= 0) {
		va_start(ap, format);
		put(fd, format, ap);
		va_end(ap);
	}
	log_close(fd);
	pthread_setcancelstate(state, &state);
	errno = saved;
}

int iwv_fail(int err, const char *what, const struct iwarpd_error *e)
{
	iwv_log("%s: %s", what, e && e->text[0] ? e->text : strerror(-err));
	errno = -err;
	return -err;
}

int iwv_unsupported(const char *what)
{
	iwv_log("%s: not supported by iwarpd", what);
	errno = EOPNOTSUPP;
	return EOPNOTSUPP;
}
