// The scheduler of the CUDA emulator: fibers, blocks, barriers, warp meetings, shared memory, launches, records.
//
// Compile this file WITHOUT -fsanitize, in a sanitized build too (pass -DCUDA_EMULATOR_ASAN or -DCUDA_EMULATOR_TSAN
// instead): the bookkeeping here is not part of the program under test, and TSan would report it.
#include "cuda_emulator.h"

#include <algorithm>
#include <cfenv>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>

#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>

#if defined(CUDA_EMULATOR_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(CUDA_EMULATOR_TSAN)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

#if !defined(__x86_64__) && !defined(CUDA_EMULATOR_UCONTEXT)
#define CUDA_EMULATOR_UCONTEXT  // the assembly below is for x86-64; ucontext works everywhere, 30 times slower
#endif
#if defined(CUDA_EMULATOR_UCONTEXT)
#include <ucontext.h>
#endif

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

// ---- Switching stacks ----------------------------------------------------------------------------------------------

#if !defined(CUDA_EMULATOR_UCONTEXT)
// Saves the callee-saved registers on the current stack and continues on another one.
extern "C" void cuda_emulator_switch_stack(void** saved_stack_pointer, void* next_stack_pointer);
asm(R"(
.text
.type cuda_emulator_switch_stack, @function
cuda_emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_emulator_switch_stack, . - cuda_emulator_switch_stack
)");
#endif

namespace cuda_emulator {

Settings settings;
PtxEntry (*find_ptx_entry)(const void* kernel) = nullptr;

namespace {

// Where a suspended stack can be continued.
struct Context {
#if defined(CUDA_EMULATOR_UCONTEXT)
  ucontext_t state;
  void prepare(unsigned char* stack, size_t bytes, void (*entry)()) {
    getcontext(&state);
    state.uc_stack.ss_sp = stack;
    state.uc_stack.ss_size = bytes;
    state.uc_link = nullptr;
    makecontext(&state, entry, 0);
  }
  static void change(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
#else
  void* stack_pointer;
  void prepare(unsigned char* stack, size_t bytes, void (*entry)()) {
    // What cuda_emulator_switch_stack pops: six registers, then the address it returns to. Above them a null
    // return address, which ends backtraces and leaves the stack aligned as the ABI wants it at function entry.
    constexpr size_t kRegisters = 6;
    void** top = reinterpret_cast<void**>(stack + bytes - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (size_t i = 0; i < kRegisters; i++) {
      *--top = nullptr;
    }
    stack_pointer = top;
  }
  static void change(Context& from, Context& to) {
    cuda_emulator_switch_stack(&from.stack_pointer, to.stack_pointer);
  }
#endif
};

// ---- Sanitizers ----------------------------------------------------------------------------------------------------
// TSan sees each fiber as a thread. The only happens-before edges are the ones given here: from barriers, __syncwarp,
// fences, and the start and end of a launch.

void tsan_release([[maybe_unused]] void* edge) {
#if defined(CUDA_EMULATOR_TSAN)
  __tsan_release(edge);
#endif
}
void tsan_acquire([[maybe_unused]] void* edge) {
#if defined(CUDA_EMULATOR_TSAN)
  __tsan_acquire(edge);
#endif
}
void asan_poison([[maybe_unused]] const void* address, [[maybe_unused]] size_t bytes) {
#if defined(CUDA_EMULATOR_ASAN)
  __asan_poison_memory_region(address, bytes);
#endif
}
void asan_unpoison([[maybe_unused]] const void* address, [[maybe_unused]] size_t bytes) {
#if defined(CUDA_EMULATOR_ASAN)
  __asan_unpoison_memory_region(address, bytes);
#endif
}

// In this scope, what intercepted functions (malloc, memcpy) touch is not an access of the program under test.
class NotTheProgram {
 public:
#if defined(CUDA_EMULATOR_TSAN)
  NotTheProgram() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~NotTheProgram() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  NotTheProgram() {}
#endif
  NotTheProgram(const NotTheProgram&) = delete;
  NotTheProgram& operator=(const NotTheProgram&) = delete;
};

// ---- State ---------------------------------------------------------------------------------------------------------

#if defined(CUDA_EMULATOR_ASAN) || defined(CUDA_EMULATOR_TSAN)
constexpr size_t kStackBytes = 512 << 10;  // sanitizers inflate stack frames
#else
constexpr size_t kStackBytes = 128 << 10;
#endif
constexpr size_t kGuardBytes = 4096;
constexpr size_t kSharedLimit = 48 << 10;  // beyond it a launcher would have to call cudaFuncSetAttribute
constexpr size_t kSharedAlignment = 128;
constexpr size_t kRedzoneBytes = 64;
constexpr unsigned char kRedzoneByte = 0xB7;
constexpr int kWarpSize = 32;
constexpr size_t kRecordLimit = 65536;

struct Fiber {
  Context context;
  unsigned char* stack = nullptr;
  void* tsan_fiber = nullptr;
  void* asan_fake_stack = nullptr;
};

using FiberTeam = std::vector<Fiber*>;  // one for each thread of a block, see take_team

enum class State : uint8_t { kNew, kReady, kWaiting, kDone };

struct Block;

struct Thread {
  uint3 index{};
  int linear = 0;
  int lane = 0;
  int warp = 0;
  State state = State::kNew;
  Fiber* fiber = nullptr;
  Block* block = nullptr;
  Site waits_at{"", "", 0};
};

// Votes of one block barrier.
struct Votes {
  int any = 0;
  int all = 1;
  int count = 0;
};

struct Block {
  uint3 index{};
  std::vector<Thread> threads;
  FiberTeam* team = nullptr;
  std::vector<std::vector<std::unique_ptr<WarpMeeting>>> meetings;  // per warp; finished ones are used again
  int exited = 0;

  int at_barrier = 0;
  Site barrier_site{"", "", 0};
  Votes votes;
  Votes last_votes;
  unsigned barriers_passed = 0;
  char barrier_edge[2];  // alternating: a thread may reach the next barrier before all have left this one
  char fence_edge;

  struct SharedArray {
    const void* key;
    unsigned char* data;
    size_t bytes;
  };
  std::vector<SharedArray> shared_arrays;
  unsigned char* shared = nullptr;  // [redzone, array, redzone, array, redzone ...] [dynamic, redzone]
  unsigned char* dynamic = nullptr;
  size_t shared_capacity = 0;
  size_t static_used = 0;
  size_t static_bytes = 0;
};

struct Scheduler {
  std::mutex mutex;  // one grid at a time, whichever host thread launches it
  const Launch* launch = nullptr;
  const std::function<void()>* thread_body = nullptr;
  Thread* running = nullptr;
  bool failed = false;
  std::string error;
  uint64_t random_state = 1;

  Context context;
  void* tsan_fiber = nullptr;
  void* asan_fake_stack = nullptr;
  const void* asan_stack_bottom = nullptr;
  size_t asan_stack_bytes = 0;

  std::vector<Fiber*> free_fibers;
  std::vector<FiberTeam*> free_teams;
  size_t team_count = 0;

  std::vector<LaunchRecord> records;
  uint64_t blocks_launched = 0;  // since the records were cleared
  uint64_t switches = 0;
  char launch_edge;
  char completion_edge;
  char fence_edge;
};
Scheduler scheduler;
thread_local bool this_host_thread_runs_a_grid = false;

uint64_t random_bits() {  // xorshift64*
  uint64_t& state = scheduler.random_state;
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 2685821657736338717ull >> 11;
}

template <class T>
void shuffle(std::vector<T>& items) {
  for (size_t i = items.size(); i > 1; i--) {
    std::swap(items[i - 1], items[random_bits() % i]);
  }
}

std::string symbol_name(const void* kernel, bool demangled) {
  Dl_info info;
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr || info.dli_saddr != kernel) {
    return "(a kernel without a symbol: is it static or in an anonymous namespace?)";
  }
  if (!demangled) {
    return info.dli_sname;
  }
  int status = 0;
  char* const text = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string result = status == 0 ? text : info.dli_sname;
  std::free(text);
  return result;
}

std::string format_text(const char* format, va_list arguments) {
  char text[1024];
  std::vsnprintf(text, sizeof(text), format, arguments);
  return text;
}

[[gnu::format(printf, 1, 2)]] std::string format_text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = format_text(format, arguments);
  va_end(arguments);
  return text;
}

const char* schedule_name(Schedule schedule) {
  switch (schedule) {
    case Schedule::kInOrder:
      return "in_order";
    case Schedule::kShuffled:
      return "shuffled";
    case Schedule::kStarving:
      return "starving";
  }
  return "?";
}

// ---- Fibers --------------------------------------------------------------------------------------------------------

void leave_to_scheduler([[maybe_unused]] bool for_good) {
  Fiber& fiber = *scheduler.running->fiber;
#if defined(CUDA_EMULATOR_TSAN)
  __tsan_switch_to_fiber(scheduler.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(CUDA_EMULATOR_ASAN)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.asan_fake_stack, scheduler.asan_stack_bottom,
                                 scheduler.asan_stack_bytes);
#endif
  Context::change(fiber.context, scheduler.context);
#if defined(CUDA_EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(fiber.asan_fake_stack, &scheduler.asan_stack_bottom,
                                  &scheduler.asan_stack_bytes);
#endif
}

void fiber_entry() {
#if defined(CUDA_EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.asan_stack_bottom, &scheduler.asan_stack_bytes);
#endif
  tsan_acquire(&scheduler.launch_edge);
  (*scheduler.thread_body)();
  tsan_release(&scheduler.completion_edge);
  scheduler.running->state = State::kDone;
  leave_to_scheduler(true);
  std::abort();  // a finished fiber is never continued
}

unsigned char* allocate_stack() {
  void* const memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::bad_alloc();
  }
  mprotect(memory, kGuardBytes, PROT_NONE);  // a stack overflow faults instead of corrupting a neighbour
  return static_cast<unsigned char*>(memory) + kGuardBytes;
}

Fiber* new_fiber() {
  Fiber* const fiber = new Fiber;
  fiber->stack = allocate_stack();
  return fiber;
}

#if defined(CUDA_EMULATOR_TSAN)

// Creating a TSan fiber takes about a millisecond, so fibers run many CUDA threads in turn; and two threads that ran
// on one fiber look ordered to TSan. So each block takes a whole team of fibers, one a thread, at random from more
// teams than can be resident: what one block does to another is then hidden only if both get the same team.
constexpr size_t kSpareTeams = 2;

void take_team(Block& block) {
  std::vector<FiberTeam*>& teams = scheduler.free_teams;
  if (scheduler.team_count < settings.resident_blocks + kSpareTeams) {
    scheduler.team_count++;
    block.team = new FiberTeam;
    return;
  }
  const size_t pick = random_bits() % teams.size();
  block.team = teams[pick];
  teams.erase(teams.begin() + static_cast<std::ptrdiff_t>(pick));
}

Fiber* take_fiber(Thread& thread) {
  FiberTeam& team = *thread.block->team;
  while (team.size() <= static_cast<size_t>(thread.linear)) {
    team.push_back(new_fiber());
  }
  Fiber* const fiber = team[static_cast<size_t>(thread.linear)];
  if (fiber->tsan_fiber == nullptr) {
    fiber->tsan_fiber = __tsan_create_fiber(0);
  }
  return fiber;
}

void give_back_fiber(Thread& thread) {
  if (thread.fiber != nullptr && thread.state != State::kDone) {
    // Abandoned after an error. The host has to be ordered after all it did: a switch there and back without the
    // no_sync flag does that. TSan's view of the fiber (its call stack, what it ignores) cannot be unwound; it is
    // forgotten, not destroyed, because TSan would report the state it ends in.
    __tsan_switch_to_fiber(thread.fiber->tsan_fiber, 0);
    __tsan_switch_to_fiber(scheduler.tsan_fiber, 0);
    thread.fiber->tsan_fiber = nullptr;
  }
  thread.fiber = nullptr;
}

void give_back_team(Block& block) {
  scheduler.free_teams.push_back(block.team);
  block.team = nullptr;
}

#else

// One stack for all threads of a block that never waits is the fastest: it stays in the cache.
Fiber* take_fiber(Thread&) {
  std::vector<Fiber*>& pool = scheduler.free_fibers;
  if (pool.empty()) {
    return new_fiber();
  }
  Fiber* const fiber = pool.back();
  pool.pop_back();
  return fiber;
}

void give_back_fiber(Thread& thread) {
  if (thread.fiber == nullptr) {
    return;
  }
  asan_unpoison(thread.fiber->stack, kStackBytes);
  scheduler.free_fibers.push_back(thread.fiber);
  thread.fiber = nullptr;
}

void take_team(Block&) {}
void give_back_team(Block&) {}

#endif

void run_thread(Thread& thread) {
  if (thread.state == State::kNew) {
    thread.fiber = take_fiber(thread);
    thread.fiber->context.prepare(thread.fiber->stack, kStackBytes, fiber_entry);
  }
  thread.state = State::kReady;
  scheduler.running = &thread;
  scheduler.switches++;
  threadIdx = thread.index;
  blockIdx = thread.block->index;
#if defined(CUDA_EMULATOR_ASAN)
  __sanitizer_start_switch_fiber(&scheduler.asan_fake_stack, thread.fiber->stack, kStackBytes);
#endif
#if defined(CUDA_EMULATOR_TSAN)
  __tsan_switch_to_fiber(thread.fiber->tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
  Context::change(scheduler.context, thread.fiber->context);
#if defined(CUDA_EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(scheduler.asan_fake_stack, nullptr, nullptr);
#endif
  scheduler.running = nullptr;
  if (scheduler.failed) {
    throw std::runtime_error(scheduler.error);
  }
  if (thread.state == State::kDone) {
    thread.block->exited++;
#if !defined(CUDA_EMULATOR_TSAN)
    give_back_fiber(thread);
#endif
  }
}

Thread& running_thread(const char* operation) {
  if (!this_host_thread_runs_a_grid || scheduler.running == nullptr) {
    throw std::runtime_error(std::string("CUDA emulator: ") + operation + " was called outside a kernel");
  }
  return *scheduler.running;
}

}  // namespace

// ---- Errors --------------------------------------------------------------------------------------------------------

// An exception cannot cross stacks: the fiber stores the message and gives up, the scheduler throws.
void fail(const char* format, ...) {
  NotTheProgram scope;
  va_list arguments;
  va_start(arguments, format);
  std::string message = format_text(format, arguments);
  va_end(arguments);
  const Thread& thread = running_thread(message.c_str());
  const uint3 block = thread.block->index;
  scheduler.error = "CUDA emulator: " + message +
                    format_text(" [block (%u,%u,%u) thread (%u,%u,%u) of ", block.x, block.y, block.z, thread.index.x,
                                thread.index.y, thread.index.z) +
                    symbol_name(scheduler.launch->kernel, true) +
                    format_text(" launched at %s:%d, schedule %s seed %llu]", scheduler.launch->file,
                                scheduler.launch->line, schedule_name(settings.schedule),
                                static_cast<unsigned long long>(settings.seed));
  scheduler.failed = true;
  leave_to_scheduler(true);
  std::abort();
}

// ---- Barriers, fences, atomics -------------------------------------------------------------------------------------

int lane_index() { return running_thread("a warp operation").lane; }

void maybe_preempt() {
  if (settings.preempt_one_in == 0 || scheduler.running == nullptr) {
    return;
  }
  NotTheProgram scope;
  if (random_bits() % settings.preempt_one_in == 0) {
    leave_to_scheduler(false);
  }
}

// Ordered with every other fence that the schedule put before it. Memory itself is sequentially consistent here:
// only TSan notices a missing fence.
void fence_device() {
  maybe_preempt();
  tsan_acquire(&scheduler.fence_edge);
  tsan_release(&scheduler.fence_edge);
  fence_block();
}

void fence_block() {
  char* const edge = &running_thread("a fence").block->fence_edge;
  tsan_acquire(edge);
  tsan_release(edge);
}

int block_barrier(int predicate, BarrierResult result, Site site) {
  NotTheProgram scope;
  Thread& thread = running_thread(site.operation);
  Block& block = *thread.block;
  if (block.exited != 0) {
    fail("%s at %s:%d after %d thread(s) of the block have exited (divergent barrier)", site.operation, site.file,
         site.line, block.exited);
  }
  if (block.at_barrier == 0) {
    block.barrier_site = site;
  } else if (block.barrier_site.line != site.line || std::strcmp(block.barrier_site.file, site.file) != 0) {
    fail("%s at %s:%d while other threads of the block wait at %s:%d (divergent barrier)", site.operation, site.file,
         site.line, block.barrier_site.file, block.barrier_site.line);
  }
  block.votes.any |= predicate != 0;
  block.votes.all &= predicate != 0;
  block.votes.count += predicate != 0;
  char* const edge = &block.barrier_edge[block.barriers_passed & 1];
  tsan_release(edge);
  thread.waits_at = site;
  if (++block.at_barrier < static_cast<int>(block.threads.size())) {
    thread.state = State::kWaiting;
    leave_to_scheduler(false);
  } else {
    block.at_barrier = 0;
    block.barriers_passed++;
    block.last_votes = block.votes;
    block.votes = Votes();
    for (Thread& other : block.threads) {
      if (other.state == State::kWaiting) {
        other.state = State::kReady;
      }
    }
    if (settings.schedule != Schedule::kInOrder) {
      leave_to_scheduler(false);  // the last to arrive need not be the first to go on
    }
  }
  tsan_acquire(edge);
  switch (result) {
    case BarrierResult::kNone:
      return 0;
    case BarrierResult::kOr:
      return block.last_votes.any;
    case BarrierResult::kAnd:
      return block.last_votes.all;
    case BarrierResult::kCount:
      return block.last_votes.count;
  }
  return 0;
}

// ---- Warp collectives ----------------------------------------------------------------------------------------------

struct WarpMeeting {
  uint32_t mask = 0;  // 0: free for use
  uint32_t arrived = 0;
  uint32_t left = 0;
  bool complete = false;
  Site site{"", "", 0};
  // From the heap, a new one each time: TSan would carry the order of an earlier meeting over.
  std::unique_ptr<char> edge;
  alignas(16) unsigned char values[kWarpSize][16];
};

namespace {

WarpMeeting& join_meeting(Block& block, int warp, uint32_t mask, Site site) {
  std::vector<std::unique_ptr<WarpMeeting>>& meetings = block.meetings[warp];
  WarpMeeting* unused = nullptr;
  for (std::unique_ptr<WarpMeeting>& meeting : meetings) {
    if (meeting->mask == 0) {
      unused = meeting.get();
      continue;
    }
    if (meeting->complete || (meeting->mask & mask) == 0) {
      continue;
    }
    const Site other = meeting->site;
    if (meeting->mask != mask) {
      fail("%s at %s:%d: mask %08x overlaps mask %08x of a pending %s at %s:%d", site.operation, site.file, site.line,
           mask, meeting->mask, other.operation, other.file, other.line);
    }
    if (other.line != site.line || std::strcmp(other.operation, site.operation) != 0 ||
        std::strcmp(other.file, site.file) != 0) {
      fail("lanes of mask %08x meet at different collectives: %s at %s:%d and %s at %s:%d", mask, site.operation,
           site.file, site.line, other.operation, other.file, other.line);
    }
    return *meeting;
  }
  if (unused == nullptr) {
    meetings.push_back(std::make_unique<WarpMeeting>());
    unused = meetings.back().get();
  }
  unused->mask = mask;
  unused->arrived = 0;
  unused->left = 0;
  unused->complete = false;
  unused->site = site;
  unused->edge.reset();
  return *unused;
}

}  // namespace

WarpMeeting* warp_meet(uint32_t mask, const void* value, size_t bytes, bool orders_memory, Site site) {
  NotTheProgram scope;
  Thread& thread = running_thread(site.operation);
  Block& block = *thread.block;
  const uint32_t own_bit = 1u << thread.lane;
  if ((mask & own_bit) == 0) {
    fail("%s at %s:%d: the calling lane %d is not in mask %08x", site.operation, site.file, site.line, thread.lane,
         mask);
  }
  Thread* const warp = &block.threads[static_cast<size_t>(thread.warp) * kWarpSize];
  const size_t warp_threads = block.threads.size() - static_cast<size_t>(thread.warp) * kWarpSize;
  for (int lane = 0; lane < kWarpSize; lane++) {
    if ((mask >> lane & 1) == 0) {
      continue;
    }
    if (static_cast<size_t>(lane) >= warp_threads) {
      fail("%s at %s:%d: mask %08x names lane %d, but the block of %zu threads ends before it", site.operation,
           site.file, site.line, mask, lane, block.threads.size());
    }
    if (warp[lane].state == State::kDone) {
      fail("%s at %s:%d: mask %08x names lane %d, which has exited", site.operation, site.file, site.line, mask, lane);
    }
  }
  WarpMeeting& meeting = join_meeting(block, thread.warp, mask, site);
  if (bytes != 0) {
    std::memcpy(meeting.values[thread.lane], value, bytes);
  }
  if (orders_memory) {
    if (meeting.edge == nullptr) {
      meeting.edge = std::make_unique<char>();
    }
    tsan_release(meeting.edge.get());
  }
  meeting.arrived |= own_bit;
  thread.waits_at = site;
  if (meeting.arrived != mask) {
    thread.state = State::kWaiting;
    leave_to_scheduler(false);
  } else {
    meeting.complete = true;
    for (int lane = 0; lane < kWarpSize; lane++) {
      if (lane != thread.lane && (mask >> lane & 1) != 0) {
        warp[lane].state = State::kReady;
      }
    }
    if (settings.schedule != Schedule::kInOrder && (random_bits() & 1) != 0) {
      leave_to_scheduler(false);
    }
  }
  if (orders_memory) {
    tsan_acquire(meeting.edge.get());
  }
  return &meeting;
}

void warp_read(const WarpMeeting* meeting, int source_lane, void* value, size_t bytes, Site site) {
  NotTheProgram scope;
  if ((meeting->mask >> source_lane & 1) == 0) {
    fail("%s at %s:%d reads lane %d, which is not in mask %08x", site.operation, site.file, site.line, source_lane,
         meeting->mask);
  }
  std::memcpy(value, meeting->values[source_lane], bytes);
}

void warp_leave(WarpMeeting* meeting) {
  meeting->left |= 1u << lane_index();
  if (meeting->left == meeting->mask) {
    meeting->mask = 0;
  }
}

// ---- Shared memory -------------------------------------------------------------------------------------------------

void* static_shared(const void* key, size_t bytes, size_t alignment) {
  NotTheProgram scope;
  Block& block = *running_thread("FASTAMP_SHARED").block;
  for (const Block::SharedArray& array : block.shared_arrays) {
    if (array.key == key) {
      return array.data;
    }
  }
  alignment = std::max<size_t>(alignment, 16);
  if (alignment > kSharedAlignment) {
    fail("a shared array asks for an alignment of %zu bytes; the emulator gives %zu", alignment, kSharedAlignment);
  }
  const size_t offset = (block.static_used + kRedzoneBytes + alignment - 1) / alignment * alignment;
  block.static_bytes += bytes;
  const size_t dynamic_bytes = scheduler.launch->dynamic_shared_bytes;
  if (block.static_bytes + dynamic_bytes > kSharedLimit) {
    fail("%zu bytes of static and %zu of dynamic shared memory are more than 48 KiB", block.static_bytes,
         dynamic_bytes);
  }
  if (block.shared + offset + bytes + kRedzoneBytes > block.dynamic - kRedzoneBytes) {
    fail("too many shared arrays for the emulator: their red zones do not fit");
  }
  block.static_used = offset + bytes;
  unsigned char* const data = block.shared + offset;
  asan_unpoison(data, bytes);
  std::memset(data, static_cast<int>(settings.junk_byte), bytes);
  block.shared_arrays.push_back({key, data, bytes});
  return data;
}

void* dynamic_shared() { return running_thread("FASTAMP_DYN_SHARED").block->dynamic; }

unsigned char* shared_memory_base() { return running_thread("shared memory").block->shared; }

namespace {

void allocate_shared(Block& block, size_t dynamic_bytes) {
  const size_t static_capacity = 2 * kSharedLimit;  // arrays and the red zones between them
  block.shared_capacity =
      (static_capacity + dynamic_bytes + kRedzoneBytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  block.shared = static_cast<unsigned char*>(std::aligned_alloc(kSharedAlignment, block.shared_capacity));
  if (block.shared == nullptr) {
    throw std::bad_alloc();
  }
  block.dynamic = block.shared + static_capacity;
  std::memset(block.shared, kRedzoneByte, block.shared_capacity);
  std::memset(block.dynamic, static_cast<int>(settings.junk_byte), dynamic_bytes);
  asan_poison(block.shared, block.shared_capacity);
  asan_unpoison(block.dynamic, dynamic_bytes);
}

// Writes beside the arrays. (Reads beside them are ASan's and UBSan's to see.)
void check_redzones(const Block& block, size_t dynamic_bytes) {
  asan_unpoison(block.shared, block.shared_capacity);
  const unsigned char* position = block.shared;
  auto check_until = [&](const unsigned char* end) {
    for (; position < end; position++) {
      if (*position != kRedzoneByte) {
        throw std::runtime_error(
            format_text("CUDA emulator: block (%u,%u,%u) of ", block.index.x, block.index.y, block.index.z) +
            symbol_name(scheduler.launch->kernel, true) +
            format_text(" launched at %s:%d wrote outside its shared arrays", scheduler.launch->file,
                        scheduler.launch->line));
      }
    }
  };
  for (const Block::SharedArray& array : block.shared_arrays) {  // in order of address
    check_until(array.data);
    position = array.data + array.bytes;
  }
  check_until(block.dynamic);
  position = block.dynamic + dynamic_bytes;
  check_until(block.shared + block.shared_capacity);
}

// ---- Running a grid ------------------------------------------------------------------------------------------------

std::unique_ptr<Block> make_block(uint64_t linear_index, const Launch& launch) {
  auto block = std::make_unique<Block>();
  const dim3 grid = launch.grid;
  block->index = make_uint3(linear_index % grid.x, linear_index / grid.x % grid.y, linear_index / grid.x / grid.y);
  const unsigned thread_count = launch.block.x * launch.block.y * launch.block.z;
  block->threads.resize(thread_count);
  block->meetings.resize((thread_count + kWarpSize - 1) / kWarpSize);
  for (unsigned i = 0; i < thread_count; i++) {
    Thread& thread = block->threads[i];
    thread.index = make_uint3(i % launch.block.x, i / launch.block.x % launch.block.y,
                              i / launch.block.x / launch.block.y);
    thread.linear = static_cast<int>(i);
    thread.lane = static_cast<int>(i % kWarpSize);
    thread.warp = static_cast<int>(i / kWarpSize);
    thread.block = block.get();
  }
  allocate_shared(*block, launch.dynamic_shared_bytes);
  take_team(*block);
  return block;
}

void release_block(Block& block) {
  for (Thread& thread : block.threads) {
    give_back_fiber(thread);
  }
  give_back_team(block);
  asan_unpoison(block.shared, block.shared_capacity);
  std::free(block.shared);
}

void check_launch_limits(const Launch& launch) {
  auto refuse = [&](const std::string& reason) {
    throw std::runtime_error("CUDA emulator: invalid launch of " + symbol_name(launch.kernel, true) +
                             format_text(" at %s:%d: ", launch.file, launch.line) + reason);
  };
  const dim3 grid = launch.grid;
  const dim3 block = launch.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64) {
    refuse(format_text("block (%u,%u,%u)", block.x, block.y, block.z));
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    refuse(format_text("grid (%u,%u,%u)", grid.x, grid.y, grid.z));
  }
  if (launch.dynamic_shared_bytes > kSharedLimit) {
    refuse(format_text("%zu bytes of dynamic shared memory are more than 48 KiB", launch.dynamic_shared_bytes));
  }
  if (launch.parameter_bytes > settings.parameter_limit) {
    refuse(format_text("%zu bytes of kernel parameters are more than %zu", launch.parameter_bytes,
                       settings.parameter_limit));
  }
}

std::string describe_deadlock(const std::vector<std::unique_ptr<Block>>& resident) {
  constexpr int kShown = 4;
  std::string waiting;
  int stuck = 0;
  for (const std::unique_ptr<Block>& block : resident) {
    for (const Thread& thread : block->threads) {
      if (thread.state == State::kDone) {
        continue;
      }
      if (stuck < kShown) {
        waiting += format_text("; block %u thread %d waits in %s at %s:%d", block->index.x, thread.linear,
                               thread.waits_at.operation, thread.waits_at.file, thread.waits_at.line);
      }
      stuck++;
    }
  }
  return "CUDA emulator: deadlock in " + symbol_name(scheduler.launch->kernel, true) +
         format_text(" launched at %s:%d: %d thread(s) are stuck", scheduler.launch->file, scheduler.launch->line,
                     stuck) +
         waiting;
}

// Keeps only the threads of the one warp that is first in an order which changes now and then.
void keep_one_warp(std::vector<Thread*>& ready, uint64_t& order) {
  if (random_bits() % 16 == 0) {
    order = random_bits() | 1;
  }
  auto rank = [&](const Thread* thread) -> uint64_t {
    const uint64_t warp = thread->block->index.x * 64ull + thread->warp + 1;
    return (warp * order * 0x9E3779B97F4A7C15ull) >> 20;
  };
  uint64_t best = 0;
  for (const Thread* thread : ready) {
    best = std::max(best, rank(thread));
  }
  ready.erase(std::remove_if(ready.begin(), ready.end(), [&](const Thread* thread) { return rank(thread) != best; }),
              ready.end());
}

// Blocks of one launch, in the order in which they start.
class BlockQueue {
 public:
  BlockQueue(uint64_t count, uint64_t blocks_before) : count_(count) {
    skip_from_ = std::max(settings.skip_from, blocks_before) - blocks_before;
    skip_to_ = std::max(settings.skip_to, blocks_before) - blocks_before;
    if (settings.schedule != Schedule::kInOrder && skip_from_ >= skip_to_) {
      shuffled_.resize(count);
      for (uint64_t i = 0; i < count; i++) {
        shuffled_[i] = i;
      }
      shuffle(shuffled_);
    }
    skip();
  }
  bool empty() const { return next_ >= count_; }
  uint64_t take() {
    const uint64_t block = shuffled_.empty() ? next_ : shuffled_[next_];
    next_++;
    skip();
    return block;
  }

 private:
  void skip() {
    if (next_ >= skip_from_ && next_ < skip_to_) {
      next_ = skip_to_;
    }
  }
  uint64_t count_;
  uint64_t next_ = 0;
  uint64_t skip_from_;
  uint64_t skip_to_;
  std::vector<uint64_t> shuffled_;
};

void run_blocks(BlockQueue& queue, std::vector<std::unique_ptr<Block>>& resident) {
  const Launch& launch = *scheduler.launch;
  uint64_t starving_order = random_bits() | 1;
  std::vector<Thread*> ready;
  while (!queue.empty() || !resident.empty()) {
    while (!queue.empty() && resident.size() < settings.resident_blocks) {
      resident.push_back(make_block(queue.take(), launch));
    }
    ready.clear();
    for (std::unique_ptr<Block>& block : resident) {
      for (Thread& thread : block->threads) {
        if (thread.state == State::kNew || thread.state == State::kReady) {
          ready.push_back(&thread);
        }
      }
    }
    if (ready.empty()) {
      throw std::runtime_error(describe_deadlock(resident));
    }
    if (settings.schedule == Schedule::kStarving) {
      keep_one_warp(ready, starving_order);
    }
    if (settings.schedule != Schedule::kInOrder) {
      shuffle(ready);
    }
    for (Thread* thread : ready) {
      run_thread(*thread);
    }
    for (size_t i = 0; i < resident.size();) {
      Block& block = *resident[i];
      if (block.exited < static_cast<int>(block.threads.size())) {
        i++;
        continue;
      }
      check_redzones(block, launch.dynamic_shared_bytes);
      release_block(block);
      resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

}  // namespace

void run_grid(const Launch& launch, const std::function<void()>& thread_body) {
  if (this_host_thread_runs_a_grid) {
    fail("a kernel was launched from device code at %s:%d", launch.file, launch.line);
  }
  NotTheProgram scope;
  check_launch_limits(launch);
  const std::lock_guard<std::mutex> one_grid_at_a_time(scheduler.mutex);
  const uint64_t block_count = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  if (scheduler.records.size() < kRecordLimit) {
    scheduler.records.push_back({launch.kernel, launch.grid, launch.block, launch.dynamic_shared_bytes, launch.stream,
                                 launch.parameter_bytes});
  }
  gridDim = launch.grid;
  blockDim = launch.block;
  scheduler.launch = &launch;
  scheduler.thread_body = &thread_body;
  scheduler.failed = false;
  scheduler.random_state = settings.seed * 0x9E3779B97F4A7C15ull + 0x1234567;
#if defined(CUDA_EMULATOR_TSAN)
  scheduler.tsan_fiber = __tsan_get_current_fiber();
#endif
  BlockQueue queue(block_count, scheduler.blocks_launched);
  scheduler.blocks_launched += block_count;

  // A GPU rounds to nearest and keeps subnormals, whatever the host thread has set for itself.
  std::fenv_t host_environment;
  std::fegetenv(&host_environment);
  std::fesetenv(FE_DFL_ENV);
  this_host_thread_runs_a_grid = true;
  tsan_release(&scheduler.launch_edge);
  std::vector<std::unique_ptr<Block>> resident;
  auto finish = [&] {
    for (std::unique_ptr<Block>& block : resident) {
      release_block(*block);
    }
    tsan_acquire(&scheduler.completion_edge);
    this_host_thread_runs_a_grid = false;
    scheduler.launch = nullptr;
    std::fesetenv(&host_environment);
  };
  try {
    run_blocks(queue, resident);
  } catch (...) {
    finish();
    throw;
  }
  finish();
}

// ---- Settings from text, for Python and for the environment --------------------------------------------------------

namespace {

// "schedule=starving seed=12 resident_blocks=3": settings that are not named return to their defaults.
Settings parse_settings(const std::string& text) {
  Settings result;
  size_t position = 0;
  while (position < text.size()) {
    const size_t end = std::min(text.find(' ', position), text.size());
    const std::string item = text.substr(position, end - position);
    position = end + 1;
    if (item.empty()) {
      continue;
    }
    const size_t equals = item.find('=');
    const std::string name = item.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : item.substr(equals + 1);
    if (name == "schedule") {
      bool found = false;
      for (Schedule schedule : {Schedule::kInOrder, Schedule::kShuffled, Schedule::kStarving}) {
        if (value == schedule_name(schedule)) {
          result.schedule = schedule;
          found = true;
        }
      }
      if (!found) {
        throw std::invalid_argument("unknown schedule '" + value + "'");
      }
      continue;
    }
    size_t used = 0;
    uint64_t number = 0;
    try {
      number = std::stoull(value, &used);
    } catch (const std::exception&) {
    }
    if (used == 0 || used != value.size()) {
      throw std::invalid_argument("'" + item + "': expected name=number");
    }
    if (name == "seed") {
      result.seed = number;
    } else if (name == "resident_blocks" && number > 0) {
      result.resident_blocks = static_cast<unsigned>(number);
    } else if (name == "preempt_one_in") {
      result.preempt_one_in = static_cast<unsigned>(number);
    } else if (name == "junk_byte" && number < 256) {
      result.junk_byte = static_cast<unsigned>(number);
    } else if (name == "skip_from") {
      result.skip_from = number;
    } else if (name == "skip_to") {
      result.skip_to = number;
    } else if (name == "parameter_limit") {
      result.parameter_limit = number;
    } else if (name == "grid_limit" && number > 0) {
      result.grid_limit = static_cast<int64_t>(number);
    } else {
      throw std::invalid_argument("unknown setting or bad value '" + item + "'");
    }
  }
  return result;
}

// FASTAMP_EMULATOR holds the settings a process starts with, so that a whole test run can use one schedule.
const bool settings_from_environment = [] {
  if (const char* text = std::getenv("FASTAMP_EMULATOR")) {
    settings = parse_settings(text);
  }
  return true;
}();

std::string to_json(const LaunchRecord& record) {
  return "{\"kernel\": \"" + symbol_name(record.kernel, true) + "\", \"symbol\": \"" +
         symbol_name(record.kernel, false) +
         format_text("\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"dynamic_shared_bytes\": %zu, "
                     "\"stream\": %zu, \"parameter_bytes\": %zu}",
                     record.grid.x, record.grid.y, record.grid.z, record.block.x, record.block.y, record.block.z,
                     record.dynamic_shared_bytes, reinterpret_cast<size_t>(record.stream), record.parameter_bytes);
}

std::string returned_text;  // what the functions below hand to Python; valid until the next call

}  // namespace

}  // namespace cuda_emulator

extern "C" {

// Returns an empty string, or what is wrong with the text.
const char* cuda_emulator_configure(const char* text) {
  using namespace cuda_emulator;
  const std::lock_guard<std::mutex> lock(scheduler.mutex);
  returned_text.clear();
  try {
    settings = parse_settings(text);
  } catch (const std::invalid_argument& error) {
    returned_text = error.what();
  }
  return returned_text.c_str();
}

const char* cuda_emulator_launches() {
  using namespace cuda_emulator;
  const std::lock_guard<std::mutex> lock(scheduler.mutex);
  returned_text = "[";
  for (const LaunchRecord& record : scheduler.records) {
    returned_text += (returned_text.size() > 1 ? ", " : "") + to_json(record);
  }
  returned_text += "]";
  return returned_text.c_str();
}

void cuda_emulator_clear_launches() {
  using namespace cuda_emulator;
  const std::lock_guard<std::mutex> lock(scheduler.mutex);
  scheduler.records.clear();
  scheduler.blocks_launched = 0;
}

uint64_t cuda_emulator_switches() { return cuda_emulator::scheduler.switches; }
}
