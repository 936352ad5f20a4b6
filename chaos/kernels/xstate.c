/* Lets a User-Mode Linux that knows a smaller register file run on a processor with a larger one.
 *
 * Such a kernel keeps 2,696 bytes of extended state for each of its processes and hands them to ptrace. A host
 * whose processor has more refuses to set a part, and the guest's first process dies. So what is set is laid
 * over what the traced process has: the rest, which the guest never uses, stays as it is.
 *
 * And the guest ends when whoever started it does.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { GETREGSET = 0x4204, SETREGSET = 0x4205, XSTATE = 0x202, WHOLE = 65536 };

typedef long (*ptrace_fn)(int, pid_t, void *, void *);

__attribute__((constructor)) static void end_with_parent(void)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
}

long ptrace(int request, ...)
{
    static ptrace_fn real;
    static char whole[WHOLE] __attribute__((aligned(64)));
    va_list rest;
    va_start(rest, request);
    pid_t pid = va_arg(rest, pid_t);
    void *addr = va_arg(rest, void *);
    void *data = va_arg(rest, void *);
    va_end(rest);
    if (!real)
        real = (ptrace_fn)dlsym(RTLD_NEXT, "ptrace");
    if (request == SETREGSET && (long)addr == XSTATE) {
        struct iovec *given = data;
        struct iovec all = { whole, WHOLE };
        if (real(GETREGSET, pid, addr, &all) == 0 && given->iov_len < all.iov_len) {
            memcpy(whole, given->iov_base, given->iov_len);
            return real(SETREGSET, pid, addr, &all);
        }
    }
    return real(request, pid, addr, data);
}
