/* Preloaded: wall clocks as a mapped file says; monotonic clocks, sleeps and timers as they are.
 *
 * CLOCK_FILE (given when compiled) holds one struct slot for each kind of process, chosen by the command
 * line; all zeros is the true time. Nothing here allocates or locks, so it may be called from anywhere.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 8
#define NS 1000000000LL

struct slot {
    volatile int64_t offset_ns; /* added to the true time */
    volatile int64_t frozen_ns; /* not 0: the time is this and stands still */
    volatile int64_t jitter_ns; /* each reading is off by up to this, either way */
    volatile int64_t readings;  /* how often the time was asked for: counted here */
};

static struct slot *mine;
static const char *kinds[SLOTS] = {"supervisor", "wal_shard", "compactor", "reclaimer",
                                   "relocator", "gateway", "chaos", "other"};

static int kind_of_process(void) {
    char line[4096];
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? 0 : read(fd, line, sizeof line - 1);
    if (fd >= 0)
        close(fd);
    for (ssize_t i = 0; i < got; i++)
        if (!line[i])
            line[i] = ' ';
    line[got > 0 ? got : 0] = 0;
    for (int i = 1; i < 6; i++) {
        char spawned[64] = "actors.", named[64] = "ringlog: ";
        strcat(spawned, kinds[i]);
        strcat(named, kinds[i]);
        if (strstr(line, spawned) || strstr(line, named))
            return i;
    }
    return strstr(line, "--data-dir") ? 0 : 7;
}

static struct slot *all;

/* A process shows another command line when it has become what it is to be. */
static void choose(void) { mine = all + kind_of_process(); }

__attribute__((constructor)) static void map(void) {
    int fd = open(CLOCK_FILE, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *at = mmap(0, SLOTS * sizeof(struct slot), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return;
    all = at;
    choose();
}

/* Whoever is no actor yet shows no kind of actor; the first thing that one does as an actor is to name itself. */
int prctl(int option, ...) {
    unsigned long words[4];
    va_list more;
    va_start(more, option);
    for (int i = 0; i < 4; i++)
        words[i] = va_arg(more, unsigned long);
    va_end(more);
    if (option == PR_SET_NAME && all)
        choose();
    return syscall(SYS_prctl, option, words[0], words[1], words[2], words[3]);
}

static int true_time(clockid_t id, struct timespec *now) { return syscall(SYS_clock_gettime, id, now); }

static void bend(struct timespec *now) {
    struct slot *slot = mine;
    int64_t ns = slot->frozen_ns;
    int64_t nth = __atomic_add_fetch(&slot->readings, 1, __ATOMIC_RELAXED);
    if (!ns) {
        ns = now->tv_sec * NS + now->tv_nsec + slot->offset_ns;
        if (slot->jitter_ns) {
            uint64_t x = (uint64_t)nth * 0x9E3779B97F4A7C15ULL;
            x ^= x >> 29;
            ns += (int64_t)(x % (uint64_t)(2 * slot->jitter_ns)) - slot->jitter_ns;
        }
    }
    now->tv_sec = ns / NS;
    now->tv_nsec = ns % NS;
    if (now->tv_nsec < 0) {
        now->tv_nsec += NS;
        now->tv_sec--;
    }
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = true_time(id, now);
    if (!failed && mine && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        bend(now);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise))
        return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out)
        *out = precise.tv_sec;
    return precise.tv_sec;
}
