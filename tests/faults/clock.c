// Preloaded into a process: shifts the time of day by the seconds in the file FENCEPOST_TEST_CLOCK. The file holds one
// native int64 and is mapped, so that a change counts at once and a read costs little: all threads of a JVM ask for the
// time again and again. Timers (CLOCK_MONOTONIC) do not change, as with NTP.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift_s;

__attribute__((constructor)) static void open_clock(void) {
  const char *path = getenv("FENCEPOST_TEST_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) shift_s = found;
  close(file);
}

static int64_t shift(void) { return shift_s ? *shift_s : 0; }

int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(id, now);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  static int (*real)(struct timeval *, void *);
  if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
  int failed = real(now, zone);
  if (!failed) now->tv_sec += shift();
  return failed;
}

time_t time(time_t *where) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (where) *where = now.tv_sec;
  return now.tv_sec;
}
