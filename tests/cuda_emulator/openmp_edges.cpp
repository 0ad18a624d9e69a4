// Preloaded under ThreadSanitizer: libgomp, through which torch starts its threads, is not instrumented, so that TSan
// sees no order between what a thread does before a parallel region, in it and after it. Here it is told.
#include <dlfcn.h>

extern "C" {
// Weak: the sanitizer's runtime is in the process, not in this library.
void __tsan_acquire(void* address) __attribute__((weak));
void __tsan_release(void* address) __attribute__((weak));

using Body = void (*)(void*);

struct Region {
  Body body;
  void* data;
  char started;
  char ended;
};

static void run_region(void* pointer) {
  Region* const region = static_cast<Region*>(pointer);
  __tsan_acquire(&region->started);
  region->body(region->data);
  __tsan_release(&region->ended);
}

void GOMP_parallel(Body body, void* data, unsigned threads, unsigned flags) {
  using Parallel = void (*)(Body, void*, unsigned, unsigned);
  static const Parallel parallel = reinterpret_cast<Parallel>(dlsym(RTLD_NEXT, "GOMP_parallel"));
  Region region{body, data, 0, 0};
  __tsan_release(&region.started);
  parallel(run_region, &region, threads, flags);
  __tsan_acquire(&region.ended);
}
}
