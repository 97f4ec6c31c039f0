/* What test programs share. CHECK ends one unless x is true. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../testdata/descriptors.h"

#define CHECK(x)                                                                            \
	do {                                                                                \
		if (!(x)) {                                                                 \
			printf("line %d: failed: %s: %s\n", __LINE__, #x, strerror(errno)); \
			exit(1);                                                            \
		}                                                                           \
	} while (0)
