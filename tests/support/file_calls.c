/* Counts a process's calls to the files of one folder. For tests/support/file_calls.py, by LD_PRELOAD.
 *
 * COUNT_FILES_UNDER is the folder, COUNT_FILES_TO another one: there each process keeps a file of its
 * pid, with the numbers below and the name of its program. A call counts when its path is in the folder,
 * or its descriptor was opened there: what a server of a shared file system may be asked because of it.
 * Calls that libc makes inside itself (stdio's reads) are not seen; Python's go through these names.
 *
 * With STAND_IN_MOUNTS, a file, the folder is like one that an NFS server exports and that each process
 * has mounted by itself: /proc/self/mountinfo is that file, inotify is refused for the names of a folder,
 * since it hears nothing of other hosts (not for what is written to files: a supervisor listens to sruns of
 * its own), and a name that was not there stays so for whoever looked until he opens its folder or changes
 * it, or a minute is over ("negative dentries", with lookupcache=all and acdirmax=60).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { CALLS, NEW_FILES, OPENS, LOOKS, READS, WRITES, CHANGES, CLOSES, KINDS };
#define MAX_FDS 4096
#define NAME_BYTES 512

struct counts {
    unsigned long of[KINDS];
    char name[NAME_BYTES];
};
static struct counts none, *counts = &none;
static char under[PATH_MAX];
static size_t under_length;
static volatile char is_ours[MAX_FDS];

static const char *mounts;

static void count(int kind) {
    __atomic_add_fetch(&counts->of[CALLS], 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&counts->of[kind], 1, __ATOMIC_RELAXED);
}

/* Also called by a process that tests/fork_server forked, which has the library and now the variables. */
__attribute__((constructor)) void begin_counting(void) {
    const char *folder = getenv("COUNT_FILES_UNDER"), *to = getenv("COUNT_FILES_TO");
    char path[PATH_MAX];
    int fd;
    if (!folder || !to)
        return;
    mounts = getenv("STAND_IN_MOUNTS");
    under_length = (size_t)snprintf(under, sizeof under, "%s", folder);
    snprintf(path, sizeof path, "%s/%d", to, (int)getpid());
    fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof *counts))
        return;
    counts = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (counts == MAP_FAILED) {
        counts = &none;
        return;
    }
    fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY);
    memset(counts->name, 0, NAME_BYTES); /* of the program before exec */
    if (fd >= 0) {
        ssize_t length = syscall(SYS_read, fd, counts->name, NAME_BYTES - 1);
        for (ssize_t i = 0; i + 1 < length; i++)
            if (!counts->name[i])
                counts->name[i] = ' ';
        syscall(SYS_close, fd);
    }
}

static int is_in(const char *path) {
    return !strncmp(path, under, under_length) && (!path[under_length] || path[under_length] == '/');
}

/* The whole path, in ``whole``; false when it is not in the folder. Links and dots are not followed. */
static int path_in(int dirfd, const char *path, char *whole) {
    char link[64];
    ssize_t length = 0;
    if (!under_length || !path)
        return 0;
    if (path[0] != '/') {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
        length = syscall(SYS_readlinkat, AT_FDCWD, dirfd == AT_FDCWD ? "/proc/self/cwd" : link, whole,
                         PATH_MAX - 1);
        if (length < 0)
            return 0;
        whole[length++] = '/';
    }
    snprintf(whole + length, (size_t)(PATH_MAX - length), "%s", path);
    return is_in(whole);
}

static int path_counts(int dirfd, const char *path) {
    char whole[2 * PATH_MAX];
    return path_in(dirfd, path, whole);
}

/* ---- the stand-in for NFS: names that were not there ---- */

#define MAX_MISSED 4096
#define MISSED_S 60
static struct missed {
    unsigned long name, folder;
    time_t until;
} missed[MAX_MISSED];
static unsigned next_missed;
static pthread_mutex_t missed_lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned long hash(const char *text, size_t length) {
    unsigned long value = 14695981039346656037UL; /* FNV-1a */
    while (length--)
        value = (value ^ (unsigned char)*text++) * 1099511628211UL;
    return value;
}

static time_t now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

static unsigned long folder_of(const char *whole) {
    const char *slash = strrchr(whole, '/');
    return hash(whole, (size_t)(slash - whole));
}

static int is_missed(int dirfd, const char *path) {
    char whole[2 * PATH_MAX];
    unsigned long name;
    int found = 0;
    if (!mounts || !path_in(dirfd, path, whole))
        return 0;
    name = hash(whole, strlen(whole));
    pthread_mutex_lock(&missed_lock);
    for (int i = 0; i < MAX_MISSED; i++)
        found |= missed[i].name == name && missed[i].until > now_s();
    pthread_mutex_unlock(&missed_lock);
    return found;
}

static void miss(int dirfd, const char *path) {
    char whole[2 * PATH_MAX];
    if (!mounts || errno != ENOENT || !path_in(dirfd, path, whole))
        return;
    pthread_mutex_lock(&missed_lock);
    missed[next_missed++ % MAX_MISSED] =
        (struct missed){hash(whole, strlen(whole)), folder_of(whole), now_s() + MISSED_S};
    pthread_mutex_unlock(&missed_lock);
}

static void forget(unsigned long folder) {
    pthread_mutex_lock(&missed_lock);
    for (int i = 0; i < MAX_MISSED; i++)
        if (missed[i].folder == folder)
            missed[i].name = 0;
    pthread_mutex_unlock(&missed_lock);
}

static void folder_opened(int dirfd, const char *path) {
    char whole[2 * PATH_MAX];
    int before = errno;
    if (mounts && path_in(dirfd, path, whole))
        forget(hash(whole, strlen(whole)));
    errno = before;
}

static void folder_changed(int dirfd, const char *path) {
    char whole[2 * PATH_MAX];
    int before = errno;
    if (mounts && path_in(dirfd, path, whole))
        forget(folder_of(whole));
    errno = before;
}

int inotify_add_watch(int fd, const char *path, uint32_t mask) {
    if (!mounts || mask == IN_MODIFY)
        return (int)syscall(SYS_inotify_add_watch, fd, path, mask);
    errno = ENOSYS;
    return -1;
}

static int fd_counts(int fd) { return fd >= 0 && fd < MAX_FDS && is_ours[fd]; }

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
        real = (__typeof__(real))dlsym(RTLD_NEXT, #name)

static int opened(int dirfd, const char *path, int flags, int fd, int was_there) {
    int ours = path_counts(dirfd, path);
    if (fd >= 0 && fd < MAX_FDS)
        is_ours[fd] = (char)ours;
    if (ours) {
        count(OPENS);
        if (fd >= 0 && (flags & O_CREAT) && !was_there) {
            __atomic_add_fetch(&counts->of[NEW_FILES], 1, __ATOMIC_RELAXED);
            folder_changed(dirfd, path);
        }
        if (fd >= 0 && (flags & O_DIRECTORY) == O_DIRECTORY)
            folder_opened(dirfd, path);
        if (fd < 0)
            miss(dirfd, path);
    }
    return fd;
}

/* Before an open: -1 when it fails by what is remembered. Takes another path for the mounts. */
static int ask_memory(int dirfd, const char **path, int flags) {
    if (mounts && !strcmp(*path, "/proc/self/mountinfo"))
        *path = mounts;
    if ((flags & O_CREAT) || !is_missed(dirfd, *path))
        return 0;
    count(OPENS);
    errno = ENOENT;
    return -1;
}

static int is_there(int dirfd, const char *path, int flags) {
    int before = errno, there;
    if (!under_length || !(flags & O_CREAT))
        return 1;
    there = !syscall(SYS_faccessat, dirfd, path, F_OK);
    errno = before;
    return there;
}

#define OPEN_AT(name) \
    int name(int dirfd, const char *path, int flags, ...) { \
        mode_t mode = 0; \
        int there = is_there(dirfd, path, flags); \
        REAL(name); \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        if (ask_memory(dirfd, &path, flags)) \
            return -1; \
        return opened(dirfd, path, flags, real(dirfd, path, flags, mode), there); \
    }
OPEN_AT(openat)
OPEN_AT(openat64)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        mode_t mode = 0; \
        int there = is_there(AT_FDCWD, path, flags); \
        REAL(name); \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        if (ask_memory(AT_FDCWD, &path, flags)) \
            return -1; \
        return opened(AT_FDCWD, path, flags, real(path, flags, mode), there); \
    }
OPEN(open)
OPEN(open64)

#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        int flags = strchr(mode, 'r') ? 0 : O_CREAT, there = is_there(AT_FDCWD, path, flags); \
        FILE *file; \
        REAL(name); \
        file = real(path, mode); \
        opened(AT_FDCWD, path, flags, file ? MAX_FDS : -1, there); /* fclose would not be seen */ \
        return file; \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* Calls with a path, or two; with a descriptor; what kind they are. */
#define LOOK(type, name, where, path, parameters, arguments) \
    type name parameters { \
        type result; \
        REAL(name); \
        if (path_counts(where, path)) \
            count(LOOKS); \
        if (is_missed(where, path)) { \
            errno = ENOENT; \
            return -1; \
        } \
        result = real arguments; \
        if (result < 0) \
            miss(where, path); \
        return result; \
    }
#define CHANGE(name, where, path, parameters, arguments) \
    int name parameters { \
        int result; \
        REAL(name); \
        if (path_counts(where, path)) \
            count(CHANGES); \
        result = real arguments; \
        folder_changed(where, path); \
        return result; \
    }
#define ON_FD(kind, type, name, parameters, arguments) \
    type name parameters { \
        REAL(name); \
        if (fd_counts(fd)) \
            count(kind); \
        return real arguments; \
    }

LOOK(int, access, AT_FDCWD, p, (const char *p, int m), (p, m))
LOOK(int, faccessat, d, p, (int d, const char *p, int m, int f), (d, p, m, f))
LOOK(int, stat, AT_FDCWD, p, (const char *p, struct stat *s), (p, s))
LOOK(int, stat64, AT_FDCWD, p, (const char *p, struct stat64 *s), (p, s))
LOOK(int, lstat, AT_FDCWD, p, (const char *p, struct stat *s), (p, s))
LOOK(int, lstat64, AT_FDCWD, p, (const char *p, struct stat64 *s), (p, s))
LOOK(int, fstatat, d, p, (int d, const char *p, struct stat *s, int f), (d, p, s, f))
LOOK(int, fstatat64, d, p, (int d, const char *p, struct stat64 *s, int f), (d, p, s, f))
LOOK(int, statx, d, p,
        (int d, const char *p, int f, unsigned m, struct statx *s), (d, p, f, m, s))
LOOK(ssize_t, readlink, AT_FDCWD, p, (const char *p, char *b, size_t n), (p, b, n))
DIR *opendir(const char *path) {
    REAL(opendir);
    if (path_counts(AT_FDCWD, path)) {
        count(LOOKS);
        folder_opened(AT_FDCWD, path);
    }
    return real(path);
}
CHANGE(mkdir, AT_FDCWD, p, (const char *p, mode_t m), (p, m))
CHANGE(mkdirat, d, p, (int d, const char *p, mode_t m), (d, p, m))
CHANGE(rmdir, AT_FDCWD, p, (const char *p), (p))
CHANGE(unlink, AT_FDCWD, p, (const char *p), (p))
CHANGE(unlinkat, d, p, (int d, const char *p, int f), (d, p, f))
CHANGE(rename, AT_FDCWD, q, (const char *p, const char *q), (p, q))
CHANGE(renameat, e, q, (int d, const char *p, int e, const char *q), (d, p, e, q))
CHANGE(link, AT_FDCWD, q, (const char *p, const char *q), (p, q))
CHANGE(linkat, e, q,
        (int d, const char *p, int e, const char *q, int f), (d, p, e, q, f))
CHANGE(symlink, AT_FDCWD, q, (const char *p, const char *q), (p, q))
CHANGE(chmod, AT_FDCWD, p, (const char *p, mode_t m), (p, m))
CHANGE(utimensat, d, p,
        (int d, const char *p, const struct timespec t[2], int f), (d, p, t, f))
ON_FD(LOOKS, int, fstat, (int fd, struct stat *s), (fd, s))
ON_FD(LOOKS, int, fstat64, (int fd, struct stat64 *s), (fd, s))
ON_FD(READS, ssize_t, read, (int fd, void *b, size_t n), (fd, b, n))
ON_FD(READS, ssize_t, pread, (int fd, void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD(READS, ssize_t, pread64, (int fd, void *b, size_t n, off64_t o), (fd, b, n, o))
ON_FD(WRITES, ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n))
ON_FD(WRITES, ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD(WRITES, ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o))
ON_FD(CHANGES, int, fsync, (int fd), (fd))
ON_FD(CHANGES, int, fdatasync, (int fd), (fd))
ON_FD(CHANGES, int, ftruncate, (int fd, off_t n), (fd, n))
ON_FD(CHANGES, int, ftruncate64, (int fd, off64_t n), (fd, n))
ON_FD(CHANGES, int, flock, (int fd, int operation), (fd, operation))
ON_FD(CHANGES, int, futimens, (int fd, const struct timespec t[2]), (fd, t))

int close(int fd) {
    REAL(close);
    if (fd_counts(fd)) {
        count(CLOSES);
        is_ours[fd] = 0;
    }
    return real(fd);
}
