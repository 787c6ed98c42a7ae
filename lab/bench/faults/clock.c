// The wall clock of Python code, some seconds off: LD_PRELOAD it, with CLOCK_SKEW naming a file that holds them.
//
// Only calls from the interpreter are answered so. Whoever waits for a moment of the kernel's own clock, as C++ does,
// would wait an hour too long otherwise, which no clock that is really set makes anybody do.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long skew_for(void *caller) {
    Dl_info whose;
    if (!dladdr(caller, &whose) || !whose.dli_fname) return 0;
    const char *slash = strrchr(whose.dli_fname, '/'), *name = slash ? slash + 1 : whose.dli_fname;
    if (strncmp(name, "python", 6) && strncmp(name, "libpython", 9)) return 0;
    char text[32] = "";
    const char *path = getenv("CLOCK_SKEW");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
    return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (!status && clock == CLOCK_REALTIME) now->tv_sec += skew_for(__builtin_return_address(0));
    return status;
}
