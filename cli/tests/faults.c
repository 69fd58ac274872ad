/* Preloaded into planc by tests/cli/faults.rs: counts what planc does to its files, and lets one operation go wrong.
 *
 * FAULT=kill:ckpt:17 ends the process before operation 17 on paths with `ckpt`. `term` sends it SIGTERM, `slow` lets
 * the operation take its time, and with `full` nothing more can be written from then on. FAULT_LOG names a file that
 * gets a line for each operation that is done, and one for the fault. Nothing is synced: a test ends processes and not
 * machines.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* Microseconds in which another process gets far. */
enum { DELAY = 100000 };

enum { OTHER, CKPT, METRICS, CLASSES };
static const char *const NAMES[CLASSES] = {"other", "ckpt", "metrics"};

/* Operations that a full disk does not refuse. */
enum { FREES, WRITES };

static atomic_char class_of_fd[1024];
static atomic_int done[CLASSES];
static atomic_int full, slow;
static int log_fd = -1, fault_class = OTHER, fault_at;
static char fault_kind[8];

__attribute__((constructor)) static void start(void) {
    const char *log = getenv("FAULT_LOG"), *fault = getenv("FAULT");
    char name[16];
    if (log) log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fault && sscanf(fault, "%7[^:]:%15[^:]:%d", fault_kind, name, &fault_at) == 3)
        for (int it = CKPT; it < CLASSES; it++)
            if (!strcmp(name, NAMES[it])) fault_class = it;
}

static int class_of(const char *path) {
    return strstr(path, "ckpt") ? CKPT : strstr(path, "m.jsonl") ? METRICS : OTHER;
}

static int of_fd(int fd) { return fd >= 0 && fd < 1024 ? class_of_fd[fd] : OTHER; }

static void note(int class, const char *name, const char *path) {
    char line[512];
    int length = snprintf(line, sizeof line, "%s %s %s\n", NAMES[class], name, path);
    if (log_fd >= 0 && length > 0) (void)!syscall(SYS_write, log_fd, line, length < 512 ? length : 511);
}

/* 0 if the operation may go on, else -1 with errno. */
static int pass(int class, int what, const char *name, const char *path) {
    if (class == OTHER) return 0;
    int index = atomic_fetch_add(&done[class], 1);
    if (class == fault_class && index == fault_at) {
        note(OTHER, "fault", path);
        if (!strcmp(fault_kind, "kill")) kill(getpid(), SIGKILL);
        if (!strcmp(fault_kind, "term")) kill(getpid(), SIGTERM);
        if (!strcmp(fault_kind, "full")) full = 1;
        if (!strcmp(fault_kind, "slow")) usleep(DELAY), slow = 1;
    }
    if (full && what == WRITES) return errno = ENOSPC, -1;
    note(class, name, path);
    return 0;
}

static int opened(int at, const char *path, int flags, int mode) {
    int class = class_of(path), writes = flags & (O_CREAT | O_WRONLY | O_RDWR);
    if (writes && pass(class, flags & O_CREAT ? WRITES : FREES, "open", path)) return -1;
    int fd = syscall(SYS_openat, at, path, flags, mode);
    if (fd >= 0 && fd < 1024) class_of_fd[fd] = class;
    return fd;
}

#define MODE(flags) \
    int mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list list; \
        va_start(list, flags); \
        mode = va_arg(list, int); \
        va_end(list); \
    }

int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) return opened(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) return opened(at, path, flags, mode); }

int close(int fd) {
    if (fd >= 0 && fd < 1024) class_of_fd[fd] = OTHER;
    return syscall(SYS_close, fd);
}

ssize_t write(int fd, const void *bytes, size_t n) {
    return pass(of_fd(fd), WRITES, "write", "") ? -1 : syscall(SYS_write, fd, bytes, n);
}

ssize_t writev(int fd, const struct iovec *parts, int n) {
    return pass(of_fd(fd), WRITES, "write", "") ? -1 : syscall(SYS_writev, fd, parts, n);
}

ssize_t pwrite64(int fd, const void *bytes, size_t n, off64_t at) {
    return pass(of_fd(fd), WRITES, "write", "") ? -1 : syscall(SYS_pwrite64, fd, bytes, n, at);
}

int ftruncate64(int fd, off64_t length) {
    return pass(of_fd(fd), FREES, "truncate", "") ? -1 : syscall(SYS_ftruncate, fd, length);
}

int fsync(int fd) { return of_fd(fd) == OTHER ? syscall(SYS_fsync, fd) : pass(of_fd(fd), WRITES, "sync", ""); }
int fdatasync(int fd) { return of_fd(fd) == OTHER ? syscall(SYS_fdatasync, fd) : pass(of_fd(fd), WRITES, "sync", ""); }

int rename(const char *from, const char *to) {
    if (pass(class_of(to), FREES, "rename", to)) return -1;
    int res = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (!res) note(class_of(to), "renamed", to);
    /* Others see the new name before this process goes on. */
    if (class_of(to) != OTHER && atomic_exchange(&slow, 0)) usleep(DELAY);
    return res;
}

int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    return pass(class_of(to), WRITES, "link", to) ? -1 : syscall(SYS_linkat, from_at, from, to_at, to, flags);
}

int mkdir(const char *path, mode_t mode) {
    return pass(class_of(path), WRITES, "mkdir", path) ? -1 : syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int unlink(const char *path) {
    return pass(class_of(path), FREES, "unlink", path) ? -1 : syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int rmdir(const char *path) {
    return pass(class_of(path), FREES, "rmdir", path) ? -1 : syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
}
