#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

int set_error(struct iwarpd_error *e, int err, const char *format, ...)
{
	va_list args;

	if (!e)
		return err;
	memset(e, 0, sizeof(*e));
	e->err = err;
	va_start(args, format);
	vsnprintf(e->text, sizeof(e->text), format, args);
	va_end(args);
	return err;
}

int sys_error(struct iwarpd_error *e, const char *what)
{
	int err = errno;

	return set_error(e, -err, "%s: %s", what, strerror(err));
}

static const int code_errno[] = {
	[IWARPD_CODE_INVALID] = EINVAL,
	[IWARPD_CODE_NO_OBJECT] = ENOENT,
	[IWARPD_CODE_PERMISSION] = EACCES,
	[IWARPD_CODE_QUOTA] = EDQUOT,
	[IWARPD_CODE_PORT_IN_USE] = EADDRINUSE,
	[IWARPD_CODE_ADDRESS] = EADDRNOTAVAIL,
	[IWARPD_CODE_UNREACHABLE] = EHOSTUNREACH,
	[IWARPD_CODE_TIMEOUT] = ETIMEDOUT,
	[IWARPD_CODE_REFUSED] = ECONNREFUSED,
	[IWARPD_CODE_REJECTED] = ECONNABORTED,
	[IWARPD_CODE_STATE] = EBADFD,
	[IWARPD_CODE_BUSY] = EBUSY,
	[IWARPD_CODE_VERSION] = EPROTONOSUPPORT,
	[IWARPD_CODE_PROTOCOL] = EPROTO,
	[IWARPD_CODE_INTERNAL] = EIO,
	[IWARPD_CODE_CANCELED] = ECANCELED,
	[IWARPD_CODE_DRAINING] = ESHUTDOWN,
};

int pb_error(struct iwarpd_error *e, const Pb__Error *pb)
{
	unsigned int code = (unsigned int)pb->code;
	int err = EIO;

	if (code < sizeof(code_errno) / sizeof(code_errno[0]) && code_errno[code])
		err = code_errno[code];
	set_error(e, -err, "%s", pb->text);
	if (e)
		e->code = (int)code;
	return -err;
}

const char *iwarpd_wc_status_text(uint32_t status)
{
	switch (status) {
	case IWARPD_WC_SUCCESS:
		return "success";
	case IWARPD_WC_LOC_LEN_ERR:
		return "message longer than the receive, or than a message may be";
	case IWARPD_WC_LOC_QP_OP_ERR:
		return "bad work request";
	case IWARPD_WC_LOC_PROT_ERR:
		return "SGE out of its region, or without the right";
	case IWARPD_WC_WR_FLUSH_ERR:
		return "flushed: the connection ended first";
	case IWARPD_WC_MW_BIND_ERR:
		return "binding or registration refused";
	case IWARPD_WC_BAD_RESP_ERR:
		return "the peer's response does not fit the request";
	case IWARPD_WC_LOC_ACCESS_ERR:
		return "local invalidation refused";
	case IWARPD_WC_REM_INV_REQ_ERR:
		return "the peer found the request invalid";
	case IWARPD_WC_REM_ACCESS_ERR:
		return "the peer refused access to its memory";
	case IWARPD_WC_REM_OP_ERR:
		return "the peer could not complete the request";
	case IWARPD_WC_FATAL_ERR:
		return "fatal error";
	case IWARPD_WC_GENERAL_ERR:
		return "error";
	}
	return "unknown status";
}

const char *iwarpd_event_text(uint32_t type)
{
	switch (type) {
	case IWARPD_EVENT_CONNECT_REQUEST:
		return "connect request";
	case IWARPD_EVENT_ESTABLISHED:
		return "established";
	case IWARPD_EVENT_REJECTED:
		return "rejected";
	case IWARPD_EVENT_CONNECT_FAILED:
		return "connect failed";
	case IWARPD_EVENT_DISCONNECTED:
		return "disconnected";
	case IWARPD_EVENT_TERMINATED:
		return "terminated";
	case IWARPD_EVENT_ASYNC_ERROR:
		return "asynchronous error";
	case IWARPD_EVENT_CONNECT_GONE:
		return "connect request gone";
	case IWARPD_EVENT_STREAM_READY:
		return "stream ready";
	case IWARPD_EVENT_STREAM_DATA:
		return "stream data";
	case IWARPD_EVENT_DRAINING:
		return "the daemon is stopping";
	}
	return "unknown event";
}
