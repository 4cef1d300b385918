/* Records what a program does to the files below one directory.

   Built and preloaded by recording.py. Every call that changes files, names or what is durable is performed and then
   appended to a log, one record each, under a lock: the order in the log is an order in which the calls took effect,
   over all threads and processes. The log speaks of files by their inode and of names by their paths.

   POWER_LOSS_TOP   the directory, without symbolic links
   POWER_LOSS_LOG   the log
   POWER_LOSS_KILL  the process is killed after so many operations, counted from when it is set

   Not seen: writes through memory maps (the map itself is noted), and what the C library's own streams write. Whoever
   reads the log replays it and compares the outcome with the directory, so nothing goes unseen unnoticed. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { CREATE = 1, MKDIR, WRITE, TRUNCATE, LINK, UNLINK, RMDIR, RENAME, FSYNC, SYNC, EXTEND, UNSEEN };

struct header {
    uint32_t kind, pid;
    uint64_t inode;
    int64_t offset;
    uint32_t first, second; /* bytes of two texts that follow */
    uint64_t data;          /* bytes of data that follow those */
};

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })

/* ---- the log */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static pid_t log_owner;

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }
__attribute__((constructor)) static void survive_fork(void) { pthread_atfork(lock, unlock, unlock); }

static void enter(void) {
    lock();
    if (log_fd < 0 || log_owner != getpid()) { /* flock is per open file: a forked child opens its own */
        const char *path = getenv("POWER_LOSS_LOG");
        int fd = path ? REAL(open)(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
        if (fd < 0) abort();
        log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 700);
        if (log_fd < 0) log_fd = fd; else close(fd);
        log_owner = getpid();
    }
    while (flock(log_fd, LOCK_EX) && errno == EINTR) {}
}

static void leave(void) {
    int saved = errno;
    flock(log_fd, LOCK_UN);
    unlock();
    errno = saved;
}

static void put(const void *bytes, size_t size) {
    for (const char *at = bytes; size;) {
        ssize_t done = REAL(write)(log_fd, at, size);
        if (done < 0 && errno != EINTR) abort();
        if (done > 0) { at += done; size -= done; }
    }
}

static void note(enum kind kind, uint64_t inode, int64_t offset, const char *first, const char *second,
                 const struct iovec *data, int parts, size_t size) {
    int saved = errno;
    struct header header = {kind, getpid(), inode, offset, first ? strlen(first) : 0, second ? strlen(second) : 0, size};
    put(&header, sizeof header);
    put(first, header.first);
    put(second, header.second);
    for (int i = 0; i < parts && size; i++) {
        size_t length = data[i].iov_len < size ? data[i].iov_len : size;
        put(data[i].iov_base, length);
        size -= length;
    }
    static long done;
    const char *last = getenv("POWER_LOSS_KILL");
    if (last && ++done >= atol(last)) kill(getpid(), SIGKILL);
    errno = saved;
}

static void say(enum kind kind, uint64_t inode, int64_t offset, const char *first, const char *second) {
    note(kind, inode, offset, first, second, NULL, 0, 0);
}

/* ---- which files it is about */

static int below(const char *path) {
    const char *top = getenv("POWER_LOSS_TOP");
    size_t length = top ? strlen(top) : 0;
    return length && !strncmp(path, top, length) && (path[length] == '/' || !path[length]);
}

static int path_of(int fd, char *out) {
    char link[40];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length < 0 ? 0 : length] = 0;
    errno = saved;
    return length > 0 && out[0] == '/';
}

static int ours(int fd) {
    char path[PATH_MAX];
    return path_of(fd, path) && below(path);
}

/* The absolute path; whether it is below the directory. */
static int resolve(int dir, const char *path, char *out) {
    char base[PATH_MAX];
    int saved = errno, whole = path[0] == '/';
    if (whole) base[0] = 0;
    else if (dir == AT_FDCWD ? !getcwd(base, sizeof base) : !path_of(dir, base)) { errno = saved; return 0; }
    errno = saved;
    return snprintf(out, PATH_MAX, whole ? "%s%s" : "%s/%s", base, path) < PATH_MAX && below(out);
}

static uint64_t inode_of(int fd) {
    struct stat status;
    int saved = errno, failed = fstat(fd, &status);
    errno = saved;
    return failed ? 0 : status.st_ino;
}

static uint64_t inode_at(const char *path) {
    struct stat status;
    int saved = errno, failed = lstat(path, &status);
    errno = saved;
    return failed ? 0 : status.st_ino;
}

/* ---- opening */

static void opened(int fd, const char *path, int flags, uint64_t before) {
    if ((flags & O_TMPFILE) == O_TMPFILE) say(CREATE, inode_of(fd), 0, NULL, NULL);
    else if ((flags & O_CREAT) && !before) say(CREATE, inode_of(fd), 0, path, NULL);
    else if (flags & O_TRUNC) say(TRUNCATE, inode_of(fd), 0, NULL, NULL);
}

#define MODE(flags, last) \
    mode_t mode = 0; \
    if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) { va_list rest; va_start(rest, last); mode = va_arg(rest, mode_t); va_end(rest); }

#define OPENING(dir, path, flags, call) \
    char full[PATH_MAX]; \
    if (!((flags) & (O_CREAT | O_TRUNC | (O_TMPFILE & ~O_DIRECTORY))) || !resolve(dir, path, full)) return call; \
    enter(); \
    uint64_t before = inode_at(full); \
    int fd = call; \
    if (fd >= 0) opened(fd, full, flags, before); \
    leave(); \
    return fd;

int open(const char *path, int flags, ...) { MODE(flags, flags) OPENING(AT_FDCWD, path, flags, REAL(open)(path, flags, mode)) }
int open64(const char *path, int flags, ...) { MODE(flags, flags) OPENING(AT_FDCWD, path, flags, REAL(open64)(path, flags, mode)) }
int openat(int dir, const char *path, int flags, ...) { MODE(flags, flags) OPENING(dir, path, flags, REAL(openat)(dir, path, flags, mode)) }
int openat64(int dir, const char *path, int flags, ...) { MODE(flags, flags) OPENING(dir, path, flags, REAL(openat64)(dir, path, flags, mode)) }
int __open_2(const char *path, int flags) { OPENING(AT_FDCWD, path, flags, REAL(open)(path, flags)) }
int __open64_2(const char *path, int flags) { OPENING(AT_FDCWD, path, flags, REAL(open64)(path, flags)) }
int __openat_2(int dir, const char *path, int flags) { OPENING(dir, path, flags, REAL(openat)(dir, path, flags)) }
int __openat64_2(int dir, const char *path, int flags) { OPENING(dir, path, flags, REAL(openat64)(dir, path, flags)) }
int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open64(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

#define STREAM(name) \
    FILE *name(const char *path, const char *how) { \
        char full[PATH_MAX]; \
        int flags = (how[0] == 'w' ? O_CREAT | O_TRUNC : how[0] == 'a' ? O_CREAT : 0); \
        if (!flags || !resolve(AT_FDCWD, path, full)) return REAL(name)(path, how); \
        enter(); \
        uint64_t before = inode_at(full); \
        FILE *file = REAL(name)(path, how); \
        if (file) opened(fileno(file), full, flags, before); \
        leave(); \
        return file; \
    }
STREAM(fopen)
STREAM(fopen64)

/* ---- data */

static void written(int fd, int64_t at, const struct iovec *data, int parts, ssize_t size) {
    if (at < 0) at = lseek64(fd, 0, SEEK_CUR) - size; /* right for O_APPEND, too */
    note(WRITE, inode_of(fd), at, NULL, NULL, data, parts, size);
}

#define WRITING(at, data, parts, call) \
    if (!ours(fd)) return call; \
    enter(); \
    ssize_t size = call; \
    if (size > 0) written(fd, at, data, parts, size); \
    leave(); \
    return size;

#define ONE(bytes, length) (&(struct iovec){(void *)(bytes), length})

ssize_t write(int fd, const void *bytes, size_t length) { WRITING(-1, ONE(bytes, length), 1, REAL(write)(fd, bytes, length)) }
ssize_t pwrite(int fd, const void *bytes, size_t length, off_t at) { WRITING(at, ONE(bytes, length), 1, REAL(pwrite)(fd, bytes, length, at)) }
ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t at) { WRITING(at, ONE(bytes, length), 1, REAL(pwrite64)(fd, bytes, length, at)) }
ssize_t writev(int fd, const struct iovec *data, int parts) { WRITING(-1, data, parts, REAL(writev)(fd, data, parts)) }
ssize_t pwritev(int fd, const struct iovec *data, int parts, off_t at) { WRITING(at, data, parts, REAL(pwritev)(fd, data, parts, at)) }
ssize_t pwritev64(int fd, const struct iovec *data, int parts, off64_t at) { WRITING(at, data, parts, REAL(pwritev64)(fd, data, parts, at)) }
ssize_t pwritev2(int fd, const struct iovec *data, int parts, off_t at, int flags) { WRITING(at, data, parts, REAL(pwritev2)(fd, data, parts, at, flags)) }
ssize_t pwritev64v2(int fd, const struct iovec *data, int parts, off64_t at, int flags) { WRITING(at, data, parts, REAL(pwritev64v2)(fd, data, parts, at, flags)) }

/* Copies inside the kernel: what arrived is read back. */
static void copied(int fd, int64_t at, ssize_t size) {
    char link[40], *bytes = malloc(size);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (at < 0) at = lseek64(fd, 0, SEEK_CUR) - size;
    int reader = REAL(open)(link, O_RDONLY | O_CLOEXEC);
    if (!bytes || reader < 0 || pread64(reader, bytes, size, at) != size) abort();
    close(reader);
    written(fd, at, ONE(bytes, size), 1, size);
    free(bytes);
}

#define COPYING(at, call) \
    if (!ours(fd)) return call; \
    enter(); \
    int64_t start = at; \
    ssize_t size = call; \
    if (size > 0) copied(fd, start, size); \
    leave(); \
    return size;

ssize_t sendfile(int fd, int from, off_t *at, size_t length) { COPYING(-1, REAL(sendfile)(fd, from, at, length)) }
ssize_t sendfile64(int fd, int from, off64_t *at, size_t length) { COPYING(-1, REAL(sendfile64)(fd, from, at, length)) }
ssize_t copy_file_range(int from, off64_t *at, int fd, off64_t *to, size_t length, unsigned flags) {
    COPYING(to ? *to : -1, REAL(copy_file_range)(from, at, fd, to, length, flags))
}
ssize_t splice(int from, off64_t *at, int fd, off64_t *to, size_t length, unsigned flags) {
    COPYING(to ? *to : -1, REAL(splice)(from, at, fd, to, length, flags))
}

#define RESIZING(kind, size, call) \
    if (!ours(fd)) return call; \
    enter(); \
    int result = call; \
    if (!result) say(kind, inode_of(fd), size, NULL, NULL); \
    leave(); \
    return result;

int ftruncate(int fd, off_t size) { RESIZING(TRUNCATE, size, REAL(ftruncate)(fd, size)) }
int ftruncate64(int fd, off64_t size) { RESIZING(TRUNCATE, size, REAL(ftruncate64)(fd, size)) }
int posix_fallocate(int fd, off_t at, off_t length) { RESIZING(EXTEND, at + length, REAL(posix_fallocate)(fd, at, length)) }
int posix_fallocate64(int fd, off64_t at, off64_t length) { RESIZING(EXTEND, at + length, REAL(posix_fallocate64)(fd, at, length)) }
int fallocate(int fd, int how, off_t at, off_t length) { RESIZING(how ? UNSEEN : EXTEND, at + length, REAL(fallocate)(fd, how, at, length)) }
int fallocate64(int fd, int how, off64_t at, off64_t length) { RESIZING(how ? UNSEEN : EXTEND, at + length, REAL(fallocate64)(fd, how, at, length)) }

#define CUTTING(call) \
    char full[PATH_MAX]; \
    if (!resolve(AT_FDCWD, path, full)) return call; \
    enter(); \
    int result = call; \
    if (!result) say(TRUNCATE, inode_at(full), size, NULL, NULL); \
    leave(); \
    return result;

int truncate(const char *path, off_t size) { CUTTING(REAL(truncate)(path, size)) }
int truncate64(const char *path, off64_t size) { CUTTING(REAL(truncate64)(path, size)) }

#define MAPPING(call) \
    void *result = call; \
    if (result != MAP_FAILED && fd >= 0 && (how & MAP_SHARED) && (access & PROT_WRITE) && ours(fd)) { \
        enter(); \
        say(UNSEEN, inode_of(fd), 0, "mmap", NULL); \
        leave(); \
    } \
    return result;

void *mmap(void *at, size_t length, int access, int how, int fd, off_t offset) { MAPPING(REAL(mmap)(at, length, access, how, fd, offset)) }
void *mmap64(void *at, size_t length, int access, int how, int fd, off64_t offset) { MAPPING(REAL(mmap64)(at, length, access, how, fd, offset)) }

/* ---- durability */

int fsync(int fd) { RESIZING(FSYNC, 0, REAL(fsync)(fd)) }
int fdatasync(int fd) { RESIZING(FSYNC, 0, REAL(fdatasync)(fd)) }
int syncfs(int fd) { RESIZING(SYNC, 0, REAL(syncfs)(fd)) }
void sync(void) {
    enter();
    REAL(sync)();
    say(SYNC, 0, 0, NULL, NULL);
    leave();
}

/* ---- names */

#define NAMING(kind, dir, path, inode, call) \
    char full[PATH_MAX]; \
    if (!resolve(dir, path, full)) return call; \
    enter(); \
    int result = call; \
    if (!result) say(kind, inode, 0, full, NULL); \
    leave(); \
    return result;

int mkdir(const char *path, mode_t mode) { NAMING(MKDIR, AT_FDCWD, path, inode_at(full), REAL(mkdir)(path, mode)) }
int mkdirat(int dir, const char *path, mode_t mode) { NAMING(MKDIR, dir, path, inode_at(full), REAL(mkdirat)(dir, path, mode)) }
int rmdir(const char *path) { NAMING(RMDIR, AT_FDCWD, path, 0, REAL(rmdir)(path)) }
int unlink(const char *path) { NAMING(UNLINK, AT_FDCWD, path, 0, REAL(unlink)(path)) }
int unlinkat(int dir, const char *path, int flags) { NAMING((flags & AT_REMOVEDIR ? RMDIR : UNLINK), dir, path, 0, REAL(unlinkat)(dir, path, flags)) }
int link(const char *from, const char *path) { NAMING(LINK, AT_FDCWD, path, inode_at(full), REAL(link)(from, path)) }
int linkat(int old, const char *from, int dir, const char *path, int flags) { NAMING(LINK, dir, path, inode_at(full), REAL(linkat)(old, from, dir, path, flags)) }
int symlink(const char *to, const char *path) { NAMING(UNSEEN, AT_FDCWD, path, 0, REAL(symlink)(to, path)) }
int symlinkat(const char *to, int dir, const char *path) { NAMING(UNSEEN, dir, path, 0, REAL(symlinkat)(to, dir, path)) }
int mknod(const char *path, mode_t mode, dev_t device) { NAMING(UNSEEN, AT_FDCWD, path, 0, REAL(mknod)(path, mode, device)) }

int remove(const char *path) {
    struct stat status;
    if (lstat(path, &status)) return -1;
    return S_ISDIR(status.st_mode) ? rmdir(path) : unlink(path);
}

#define RENAMING(old, from, dir, to, kind, call) \
    char source[PATH_MAX], target[PATH_MAX]; \
    if (!(resolve(old, from, source) | resolve(dir, to, target))) return call; \
    enter(); \
    int result = call; \
    if (!result) say(kind, inode_at(target), 0, source, target); \
    leave(); \
    return result;

int rename(const char *from, const char *to) { RENAMING(AT_FDCWD, from, AT_FDCWD, to, RENAME, REAL(rename)(from, to)) }
int renameat(int old, const char *from, int dir, const char *to) { RENAMING(old, from, dir, to, RENAME, REAL(renameat)(old, from, dir, to)) }
int renameat2(int old, const char *from, int dir, const char *to, unsigned flags) {
    RENAMING(old, from, dir, to, (flags & ~RENAME_NOREPLACE ? UNSEEN : RENAME), REAL(renameat2)(old, from, dir, to, flags))
}
