// Wires that lose, delay and spoil what they carry: preloaded into every process of a deployment (wires.py).
// What one process reads from its links, by `recv`, is hurt while the file $CHAOS_WIRES says so: over TCP, and over Unix
// sockets in place of it, where all parts are on one machine. HTTP's event loop reads by other calls, so no client of the
// deployment is hurt; Redis has its socket elsewhere; and ranks share one machine for good.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static struct {
  volatile int64_t victim;    // the process whose reads are hurt, or 0
  volatile int64_t delay_ns;  // before each read
  volatile int64_t flips;     // reads of which a bit is flipped
  volatile int64_t breaks;    // reads at which the connection breaks
  volatile int64_t done;      // reads that were spoilt or broken since the start
} * wires;

__attribute__((constructor)) static void begin(void) {
  const char* path = getenv("CHAOS_WIRES");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void* mapped = mmap(NULL, sizeof *wires, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped != MAP_FAILED) wires = mapped;
  close(fd);
}

static int is_parts(const struct sockaddr_un* at, socklen_t size) {
  size_t has = size > offsetof(struct sockaddr_un, sun_path) ? size - offsetof(struct sockaddr_un, sun_path) : 0;
  char path[sizeof at->sun_path + 1] = "";
  memcpy(path, at->sun_path, has < sizeof at->sun_path ? has : sizeof at->sun_path);
  return strstr(path, "/alignedserve") && !strstr(path, "-ranks");
}

static int is_link(int fd) {
  struct sockaddr_un own, theirs;  // one end of the two has a name
  socklen_t of_own = sizeof own, of_theirs = sizeof theirs;
  if (getsockname(fd, (struct sockaddr*)&own, &of_own) || getpeername(fd, (struct sockaddr*)&theirs, &of_theirs)) return 0;
  if (own.sun_family == AF_INET || own.sun_family == AF_INET6) return 1;
  return own.sun_family == AF_UNIX && (is_parts(&own, of_own) || is_parts(&theirs, of_theirs));
}

static int take(volatile int64_t* left) {  // another thread may take the last one
  if (*left <= 0 || __atomic_fetch_sub(left, 1, __ATOMIC_SEQ_CST) <= 0) return 0;
  __atomic_fetch_add(&wires->done, 1, __ATOMIC_SEQ_CST);
  return 1;
}

ssize_t recv(int fd, void* into, size_t size, int flags) {
  static ssize_t (*real)(int, void*, size_t, int);
  if (!real) real = (ssize_t(*)(int, void*, size_t, int))dlsym(RTLD_NEXT, "recv");
  if (!wires || wires->victim != getpid() || !is_link(fd)) return real(fd, into, size, flags);
  const struct timespec delay = {wires->delay_ns / 1000000000, wires->delay_ns % 1000000000};
  nanosleep(&delay, NULL);
  if (take(&wires->breaks)) {
    shutdown(fd, SHUT_RDWR);
    errno = ECONNRESET;
    return -1;
  }
  ssize_t got = real(fd, into, size, flags);
  if (got > 0 && take(&wires->flips)) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((uint8_t*)into)[now.tv_nsec / 8 % got] ^= 1 << now.tv_nsec % 8;
  }
  return got;
}
