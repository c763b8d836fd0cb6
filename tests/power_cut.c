// A disk that loses what was not synced: preloaded into every process that writes to it (power_cut.py).
// All that they change in $DISK_FOLDER is done as ever, and noted in $DISK_LOG in the order in which it is done. From
// the notes follows what a disk would have kept at any moment. No call here waits for the real disk.
//
// Not noted, since no store needs it: writev, links, renames by file descriptor, and what is written to mapped memory.

#define _GNU_SOURCE
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
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { HEADER = 4096 };

static struct {
  int64_t end;             // of the whole notes: what follows was begun by a process that was killed
  volatile int64_t sync_ns;  // how long the disk takes to sync a file
  int64_t tear;              // of 1,000 bytes of the next write, those that its process writes before it is killed, or 0
  int64_t victim;            // the process whose next write that is, or 0: of any process
  volatile int64_t torn_by;  // the last process that was killed so
  volatile int64_t error;    // with which each change fails, such as EIO, or 0
} * header;
static const char *folder, *log_path;
static int notes;  // open during a turn: a process that was forked may close what it has inherited
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static void open_notes(void) {
  notes = syscall(SYS_openat, AT_FDCWD, log_path, O_RDWR | O_CLOEXEC);
  if (notes < 0) abort();  // a test whose notes are not whole proves nothing
}

__attribute__((constructor)) static void begin(void) {
  folder = getenv("DISK_FOLDER");
  log_path = getenv("DISK_LOG");
  if (!folder || !log_path) return;
  open_notes();
  header = mmap(NULL, HEADER, PROT_READ | PROT_WRITE, MAP_SHARED, notes, 0);
  if (header == MAP_FAILED) abort();
  close(notes);
}

// --- Turns: a change and its note are one, among threads and processes. The kernel ends the turn of a killed process.

static void begin_turn(void) {
  pthread_mutex_lock(&turn);
  open_notes();
  struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  while (fcntl(notes, F_SETLKW, &whole) && errno == EINTR) continue;
}

static void end_turn(void) {
  int error = errno;
  close(notes);  // unlocks it
  pthread_mutex_unlock(&turn);
  errno = error;
}

static void append(const void* data, size_t size, off_t at) {
  while (size > 0) {
    ssize_t done = syscall(SYS_pwrite64, notes, data, size, at);
    if (done <= 0) abort();
    data = (const char*)data + done, size -= done, at += done;
  }
}

static void note(char kind, ino_t file, ino_t in, int64_t at, const void* data, size_t size) {
  int64_t head[] = {kind, file, in, at, size};
  append(head, sizeof head, header->end);
  append(data, size, header->end + sizeof head);
  __atomic_store_n(&header->end, header->end + sizeof head + size, __ATOMIC_SEQ_CST);
}

// --- What lies on the disk

static int is_on_disk(int fd, struct stat* found) {
  if (!header || fstat(fd, found) || !(S_ISREG(found->st_mode) || S_ISDIR(found->st_mode))) return 0;
  char link[40], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1), length = strlen(folder);
  if (size < length || strncmp(path, folder, length)) return 0;
  path[size] = 0;
  return path[length] == '/' || !path[length];
}

// Return the inode of the folder that a path's last name is in, or 0 where that is not on the disk.
static ino_t place(int dir, const char* path, const char** name) {
  char above[PATH_MAX] = ".";
  const char* slash = strrchr(path, '/');
  *name = slash ? slash + 1 : path;
  if (slash) snprintf(above, sizeof above, "%.*s", (int)(slash - path) + 1, path);
  int fd = header ? syscall(SYS_openat, dir, above, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
  if (fd < 0) return 0;
  struct stat found;
  ino_t in = is_on_disk(fd, &found) ? found.st_ino : 0;
  close(fd);
  return in;
}

// Whether a change of what is on the disk fails; it has set errno then.
static int fails(int on_disk) {
  if (!on_disk || !header->error) return 0;
  errno = header->error;
  return 1;
}

// --- Names

static int open_noted(int dir, const char* path, int flags, mode_t mode) {
  const char* name;
  int changes = flags & (O_CREAT | O_TRUNC) || (header && header->error == EROFS && flags & O_ACCMODE);
  ino_t in = changes ? place(dir, path, &name) : 0;
  if (!in) return syscall(SYS_openat, dir, path, flags, mode);
  struct stat found;
  if (fails(header->error == EROFS || fstatat(dir, path, &found, 0))) return -1;  // EIO: what is there can be opened
  begin_turn();
  int is_new = fstatat(dir, path, &found, 0);
  int fd = syscall(SYS_openat, dir, path, flags, mode);
  if (fd >= 0 && !fstat(fd, &found)) {
    if (is_new) note('c', found.st_ino, in, 0, name, strlen(name));
    if (!is_new && flags & O_TRUNC) note('t', found.st_ino, 0, 0, NULL, 0);
  }
  end_turn();
  return fd;
}

#define OPENS(NAME, DIR, ...)                    \
  int NAME(__VA_ARGS__ const char* path, int flags, ...) { \
    va_list more;                                \
    va_start(more, flags);                       \
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0; \
    va_end(more);                                \
    return open_noted(DIR, path, flags, mode);   \
  }
OPENS(open, AT_FDCWD)
OPENS(open64, AT_FDCWD)
OPENS(openat, dir, int dir, )
OPENS(openat64, dir, int dir, )

int mkdir(const char* path, mode_t mode) {
  const char* name;
  struct stat made;
  ino_t in = place(AT_FDCWD, path, &name);
  if (!in) return syscall(SYS_mkdirat, AT_FDCWD, path, mode);
  if (fails(1)) return -1;
  begin_turn();
  int failed = syscall(SYS_mkdirat, AT_FDCWD, path, mode);
  if (!failed && !stat(path, &made)) note('m', made.st_ino, in, 0, name, strlen(name));
  end_turn();
  return failed;
}

static int remove_noted(int dir, const char* path, int flags) {
  const char* name;
  ino_t in = place(dir, path, &name);
  if (!in) return syscall(SYS_unlinkat, dir, path, flags);
  if (fails(1)) return -1;
  begin_turn();
  int failed = syscall(SYS_unlinkat, dir, path, flags);
  if (!failed) note('u', 0, in, 0, name, strlen(name));
  end_turn();
  return failed;
}

int unlink(const char* path) { return remove_noted(AT_FDCWD, path, 0); }
int unlinkat(int dir, const char* path, int flags) { return remove_noted(dir, path, flags); }
int rmdir(const char* path) { return remove_noted(AT_FDCWD, path, AT_REMOVEDIR); }

int rename(const char* from, const char* to) {
  const char *old, *new;
  char both[2 * NAME_MAX + 2];
  ino_t left = place(AT_FDCWD, from, &old), entered = place(AT_FDCWD, to, &new);
  if (!left && !entered) return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
  if (fails(1)) return -1;
  begin_turn();
  int failed = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
  if (!failed) note('r', 0, left, entered, both, snprintf(both, sizeof both, "%s/%s", old, new));
  end_turn();
  return failed;
}

// --- Bytes

static ssize_t write_noted(int fd, const void* data, size_t size, off_t at) {
  struct stat found;
  int noted = is_on_disk(fd, &found), tears = 0;
  if (fails(noted)) return -1;
  if (noted) begin_turn();
  if (noted && size > 1 && header->tear && (!header->victim || header->victim == getpid())) {
    size = 1 + (size - 2) * header->tear / 1000, tears = 1;
    header->tear = 0, header->torn_by = getpid();
  }
  ssize_t done = at < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, at);
  if (!noted) return done;
  if (done > 0) note('w', found.st_ino, 0, at < 0 ? lseek(fd, 0, SEEK_CUR) - done : at, data, done);
  end_turn();
  if (tears) kill(getpid(), SIGKILL);
  return done;
}

ssize_t write(int fd, const void* data, size_t size) { return write_noted(fd, data, size, -1); }
ssize_t pwrite(int fd, const void* data, size_t size, off_t at) { return write_noted(fd, data, size, at); }
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) { return write_noted(fd, data, size, at); }

static int truncate_noted(int fd, off_t size) {
  struct stat found;
  int noted = is_on_disk(fd, &found);
  if (fails(noted)) return -1;
  if (noted) begin_turn();
  int failed = syscall(SYS_ftruncate, fd, size);
  if (!noted) return failed;
  if (!failed) note('t', found.st_ino, 0, size, NULL, 0);
  end_turn();
  return failed;
}

int ftruncate(int fd, off_t size) { return truncate_noted(fd, size); }
int ftruncate64(int fd, off64_t size) { return truncate_noted(fd, size); }

static int sync_noted(int fd, long call) {
  struct stat found;
  if (!is_on_disk(fd, &found)) return syscall(call, fd);
  struct timespec wait = {header->sync_ns / 1000000000, header->sync_ns % 1000000000};
  nanosleep(&wait, NULL);
  if (fails(1)) return -1;
  begin_turn();
  note('s', found.st_ino, 0, 0, NULL, 0);
  end_turn();
  return 0;
}

int fsync(int fd) { return sync_noted(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_noted(fd, SYS_fdatasync); }
