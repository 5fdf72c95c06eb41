// Runs the blocks of a launch one after the other on the host thread that
// launches, each CUDA thread on a stack of its own while it waits for others.
//
// A thread that returns without having waited leaves its stack to the next one,
// so that only barriers cost a switch of stacks. A stack is kept for later
// launches of the same host thread.

#include "device_on_host.h"

#include <link.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/tsan_interface.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <utility>

// Not in a header of the compiler's.
extern "C" void __tsan_java_alloc(unsigned long begin, unsigned long size);
extern "C" void __tsan_java_free(unsigned long begin, unsigned long size);

// For what CUDA threads run of this file: it must neither count as an access of
// theirs, nor happen between two threads.
#define FP16CORE_UNSEEN __attribute__((no_sanitize("thread")))

namespace cuda_on_host {

namespace {

using detail::Meeting;

#if defined(__SANITIZE_THREAD__)
constexpr bool kRacesChecked = true;
#else
constexpr bool kRacesChecked = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressesChecked = true;
#else
constexpr bool kAddressesChecked = false;
#endif

constexpr std::size_t kStackBytes =
    kRacesChecked || kAddressesChecked ? 256 << 10 : 64 << 10;
constexpr std::size_t kGuardBytes = 64 << 10; // a multiple of any page's size

#if defined(__x86_64__)

// The stack pointer; what must be preserved else is on the stack.
using Context = void*;

extern "C" void fp16core_switch_context(Context* from, Context* to);
asm(R"(
.pushsection .text
.type fp16core_switch_context, @function
fp16core_switch_context:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fp16core_switch_context, . - fp16core_switch_context
.popsection
)");

void make_context(
    Context& context,
    char* stack,
    std::size_t bytes,
    void (*start)()) {
  void** top = reinterpret_cast<void**>(stack + bytes);
  *--top = nullptr; // start() does not return
  *--top = reinterpret_cast<void*>(start);
  context = top - 6; // the registers
}

#else

using Context = ucontext_t;

FP16CORE_UNSEEN void fp16core_switch_context(Context* from, Context* to) {
  swapcontext(from, to);
}

void make_context(
    Context& context,
    char* stack,
    std::size_t bytes,
    void (*start)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  makecontext(&context, start, 0);
}

#endif

[[noreturn]] void fail(const char* what) {
  std::fprintf(
      stderr,
      "cuda_on_host: block (%u, %u, %u): %s\n",
      blockIdx.x,
      blockIdx.y,
      blockIdx.z,
      what);
  std::abort();
}

struct Fiber {
  Context context{};
  const void* stack = nullptr;
  std::size_t stack_bytes = 0;
  void* fake_stack = nullptr; // the address checker's
  void* history = nullptr;    // the race checker's
};

FP16CORE_UNSEEN void enter_history(const Fiber& fiber) {
  if constexpr (kRacesChecked) {
    __tsan_switch_to_fiber(fiber.history, __tsan_switch_to_fiber_no_sync);
  }
}

FP16CORE_UNSEEN void switch_fiber(Fiber& from, Fiber& to) {
  enter_history(to);
  if constexpr (kAddressesChecked) {
    __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
  }
  fp16core_switch_context(&from.context, &to.context);
  if constexpr (kAddressesChecked) {
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
  }
}

/// A point in time for the race checker.
class Moment {
 public:
  FP16CORE_UNSEEN void release() const {
    if constexpr (kRacesChecked) {
      __tsan_release(address_);
    }
  }
  FP16CORE_UNSEEN void acquire() const {
    if constexpr (kRacesChecked) {
      __tsan_acquire(address_);
    }
  }

 private:
  // What was released is forgotten together with the memory.
  std::unique_ptr<char> memory_{kRacesChecked ? new char : nullptr};
  char* address_ = memory_.get();
};

enum class State { kNotStarted, kRunning, kWaiting, kReady, kDone };

struct CudaThread {
  uint3 index;
  State state;
  Fiber* fiber;
  Meeting meeting;
  unsigned mask;
  unsigned source_lane;
  std::uint64_t bits;
  std::uint64_t result;
};

bool of_block(Meeting meeting) {
  return meeting == Meeting::kSyncThreads || meeting == Meeting::kSyncThreadsOr;
}

class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  void run(
      const cudaLaunchConfig_t& config,
      std::uint64_t seed,
      void (*call)(const void*),
      const void* closure);

  std::uint64_t meet(
      Meeting meeting,
      unsigned mask,
      std::uint64_t bits,
      unsigned source_lane);
  unsigned lane() const;
  [[noreturn]] void run_fiber();

 private:
  void start_block(std::uint64_t block);
  void run_block(std::minstd_rand* random);
  void resume(CudaThread& thread);
  void run(Fiber& fiber);
  Fiber& idle_fiber();
  void make_fiber();

  bool meet_where_complete();
  bool is_complete(
      const CudaThread* first,
      const CudaThread* last,
      const CudaThread&);
  void complete(CudaThread* first, CudaThread* last, CudaThread one);
  void order_memory(
      const CudaThread* first,
      const CudaThread* last,
      unsigned mask);
  [[noreturn]] void report_deadlock();

  void (*call_)(const void*) = nullptr;
  const void* closure_ = nullptr;
  const Moment* begin_ = nullptr;
  const Moment* end_ = nullptr;

  std::vector<CudaThread> threads_;
  std::vector<unsigned> order_;
  // What fibers see of the above.
  CudaThread* first_ = nullptr;
  const unsigned* next_ = nullptr; // of order_, not yet started
  const unsigned* last_ = nullptr;
  CudaThread* thread_ = nullptr; // the running one
  std::size_t unfinished_ = 0;

  Fiber host_;
  Fiber* fiber_ = nullptr; // the running one
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::deque<Fiber*> idle_;
};

thread_local Device this_device;
// The above while it runs a kernel: without the hidden initialization, which
// would be an access of the CUDA thread.
constinit thread_local Device* running_device = nullptr;

FP16CORE_UNSEEN void start_fiber() {
  running_device->run_fiber();
}

Device::~Device() {
  for (const auto& fiber : fibers_) {
    char* stack = static_cast<char*>(const_cast<void*>(fiber->stack));
    if constexpr (kAddressesChecked) {
      __asan_unpoison_memory_region(stack, kStackBytes);
    }
    if constexpr (kRacesChecked) {
      __tsan_destroy_fiber(fiber->history);
    }
    munmap(stack - kGuardBytes, kGuardBytes + kStackBytes);
  }
}

void Device::make_fiber() {
  auto fiber = std::make_unique<Fiber>();
  void* memory = mmap(
      nullptr,
      kGuardBytes + kStackBytes,
      PROT_NONE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  char* stack = static_cast<char*>(memory) + kGuardBytes;
  if (memory == MAP_FAILED ||
      mprotect(stack, kStackBytes, PROT_READ | PROT_WRITE) != 0) {
    fail("no memory for the stack of a thread");
  }
  fiber->stack = stack;
  // Stacks that all end at the same place in a page would share few cache
  // lines.
  fiber->stack_bytes = kStackBytes - fibers_.size() % 32 * 128;
  if constexpr (kRacesChecked) {
    fiber->history = __tsan_create_fiber(0);
  }
  make_context(fiber->context, stack, fiber->stack_bytes, &start_fiber);
  idle_.push_front(fiber.get());
  fibers_.push_back(std::move(fiber));
}

Fiber& Device::idle_fiber() {
  if (idle_.empty()) {
    make_fiber();
  }
  Fiber& fiber = *idle_.front();
  idle_.pop_front();
  return fiber;
}

FP16CORE_UNSEEN void Device::run_fiber() {
  if constexpr (kAddressesChecked) {
    __sanitizer_finish_switch_fiber(nullptr, &host_.stack, &host_.stack_bytes);
  }
  Fiber& fiber = *fiber_;
  for (;;) {
    do {
      CudaThread& thread = first_[*next_++];
      thread.fiber = &fiber;
      thread.state = State::kRunning;
      thread_ = &thread;
      threadIdx = thread.index;
      begin_->acquire();
      call_(closure_);
      end_->release();
      thread.state = State::kDone;
      --unfinished_;
      // A fiber is one thread for the race checker.
    } while (!kRacesChecked && next_ != last_);
    switch_fiber(fiber, host_);
  }
}

FP16CORE_UNSEEN std::uint64_t Device::meet(
    Meeting meeting,
    unsigned mask,
    std::uint64_t bits,
    unsigned source_lane) {
  CudaThread& thread = *thread_;
  if ((mask >> lane() & 1) == 0) {
    fail("a thread is not in the mask that it waits for");
  }
  thread.meeting = meeting;
  thread.mask = mask;
  thread.bits = bits;
  thread.source_lane = source_lane;
  thread.state = State::kWaiting;
  switch_fiber(*thread.fiber, host_);
  return thread.result;
}

FP16CORE_UNSEEN unsigned Device::lane() const {
  return static_cast<unsigned>(thread_ - first_) % warpSize;
}

FP16CORE_UNSEEN void Device::resume(CudaThread& thread) {
  thread.state = State::kRunning;
  thread_ = &thread;
  threadIdx = thread.index;
  run(*thread.fiber);
}

void Device::run(Fiber& fiber) {
  fiber_ = &fiber;
  switch_fiber(host_, fiber);
  if (thread_->state == State::kDone) {
    // The race checker takes a fiber for the same thread in all blocks, so the
    // next block gets others.
    if constexpr (kRacesChecked) {
      idle_.push_back(&fiber);
    } else {
      idle_.push_front(&fiber);
    }
  }
}

bool Device::is_complete(
    const CudaThread* first,
    const CudaThread* last,
    const CudaThread& one) {
  for (const CudaThread* other = first; other != last; ++other) {
    const bool awaited = one.mask >> ((other - first) % warpSize) & 1;
    if (awaited && other->state != State::kDone &&
        !(other->state == State::kWaiting && other->meeting == one.meeting &&
          other->mask == one.mask)) {
      return false;
    }
  }
  return true;
}

FP16CORE_UNSEEN bool takes_part(
    const CudaThread* thread,
    const CudaThread* first,
    unsigned mask) {
  return thread->state == State::kWaiting &&
      (mask >> ((thread - first) % warpSize) & 1) != 0;
}

/// Lets what each thread did before happen before what each does next.
FP16CORE_UNSEEN void Device::order_memory(
    const CudaThread* first,
    const CudaThread* last,
    unsigned mask) {
  const Moment moment;
  for (const CudaThread* thread = first; thread != last; ++thread) {
    if (takes_part(thread, first, mask)) {
      enter_history(*thread->fiber);
      moment.release();
    }
  }
  for (const CudaThread* thread = first; thread != last; ++thread) {
    if (takes_part(thread, first, mask)) {
      enter_history(*thread->fiber);
      moment.acquire();
    }
  }
  enter_history(host_);
}

void Device::complete(CudaThread* first, CudaThread* last, CudaThread one) {
  if (one.meeting != Meeting::kShuffle && one.meeting != Meeting::kVote) {
    if constexpr (kRacesChecked) {
      order_memory(first, last, one.mask);
    }
  }
  std::uint64_t result = 0;
  for (CudaThread* thread = first; thread != last; ++thread) {
    if (takes_part(thread, first, one.mask)) {
      result |= one.meeting == Meeting::kVote ? thread->bits << (thread - first)
                                              : thread->bits;
    }
  }
  for (CudaThread* thread = first; thread != last; ++thread) {
    if (takes_part(thread, first, one.mask)) {
      if (one.meeting == Meeting::kShuffle) {
        const CudaThread* source = first + thread->source_lane;
        result = source < last && takes_part(source, first, one.mask)
            ? source->bits
            : ~std::uint64_t{0};
      }
      thread->result = result;
    }
  }
  for (CudaThread* thread = first; thread != last; ++thread) {
    if (takes_part(thread, first, one.mask)) {
      thread->state = State::kReady;
    }
  }
}

bool Device::meet_where_complete() {
  CudaThread* const last = first_ + threads_.size();
  const CudaThread* live = first_;
  while (live->state == State::kDone) {
    ++live;
  }
  if (of_block(live->meeting)) {
    if (is_complete(first_, last, *live)) {
      complete(first_, last, *live);
      return true;
    }
  }
  bool any = false;
  for (CudaThread* warp = first_; warp < last; warp += warpSize) {
    CudaThread* const end =
        warp + std::min<std::ptrdiff_t>(warpSize, last - warp);
    for (const CudaThread* thread = warp; thread != end; ++thread) {
      if (thread->state == State::kWaiting && !of_block(thread->meeting) &&
          is_complete(warp, end, *thread)) {
        complete(warp, end, *thread);
        any = true;
      }
    }
  }
  return any;
}

void Device::report_deadlock() {
  static constexpr const char* kNames[] = {
      "__syncthreads",
      "__syncthreads_or",
      "__syncwarp",
      "a shuffle",
      "a vote"};
  for (const auto& thread : threads_) {
    if (thread.state == State::kWaiting) {
      std::fprintf(
          stderr,
          "cuda_on_host: thread (%u, %u, %u) waits at %s, mask %08x\n",
          thread.index.x,
          thread.index.y,
          thread.index.z,
          kNames[static_cast<int>(thread.meeting)],
          thread.mask);
    }
  }
  fail("the threads wait for each other in vain");
}

FP16CORE_UNSEEN void Device::start_block(std::uint64_t block) {
  const dim3 grid = gridDim;
  blockIdx.x = static_cast<unsigned>(block % grid.x);
  blockIdx.y = static_cast<unsigned>(block / grid.x % grid.y);
  blockIdx.z = static_cast<unsigned>(block / grid.x / grid.y);
}

void Device::run_block(std::minstd_rand* random) {
  const auto shuffle_order = [&] {
    if (random != nullptr) {
      std::shuffle(order_.begin(), order_.end(), *random);
    }
  };
  for (auto& thread : threads_) {
    thread.state = State::kNotStarted;
  }
  unfinished_ = threads_.size();
  shuffle_order();
  next_ = order_.data();
  last_ = next_ + order_.size();
  while (next_ != last_) {
    run(idle_fiber());
  }
  while (unfinished_ > 0) {
    if (!meet_where_complete()) {
      report_deadlock();
    }
    shuffle_order();
    for (const unsigned i : order_) {
      if (threads_[i].state == State::kReady) {
        resume(threads_[i]);
      }
    }
  }
}

/// Makes the race checker forget who accessed the shared memory of the last
/// block: the next one merely has it at the same address.
class SharedMemory {
 public:
  SharedMemory() {
    if constexpr (kRacesChecked) {
      dl_iterate_phdr(
          [](dl_phdr_info* module, std::size_t, void* self) {
            static_cast<SharedMemory*>(self)->add(*module);
            return 0;
          },
          this);
    }
  }

  void forget_accesses() const {
    if constexpr (kRacesChecked) {
      for (const auto& [begin, bytes] : blocks_) {
        __tsan_java_alloc(begin, bytes);
        __tsan_java_free(begin, bytes);
      }
    }
  }

 private:
  void add(const dl_phdr_info& module) {
    for (int i = 0; i < module.dlpi_phnum; ++i) {
      if (module.dlpi_phdr[i].p_type == PT_TLS &&
          module.dlpi_tls_data != nullptr) {
        blocks_.emplace_back(
            reinterpret_cast<unsigned long>(module.dlpi_tls_data),
            (module.dlpi_phdr[i].p_memsz + 7) / 8 * 8);
      }
    }
  }

  std::vector<std::pair<unsigned long, unsigned long>> blocks_;
};

FP16CORE_UNSEEN void set_shape(const cudaLaunchConfig_t& config) {
  gridDim.x = config.gridDim.x;
  gridDim.y = config.gridDim.y;
  gridDim.z = config.gridDim.z;
  blockDim.x = config.blockDim.x;
  blockDim.y = config.blockDim.y;
  blockDim.z = config.blockDim.z;
}

void Device::run(
    const cudaLaunchConfig_t& config,
    std::uint64_t seed,
    void (*call)(const void*),
    const void* closure) {
  const dim3 grid = config.gridDim;
  const dim3 block = config.blockDim;
  const std::size_t size = std::size_t{block.x} * block.y * block.z;
  threads_.resize(size);
  order_.resize(size);
  std::iota(order_.begin(), order_.end(), 0u);
  for (unsigned i = 0; i < size; ++i) {
    threads_[i].index = {
        i % block.x,
        i / block.x % block.y,
        i / block.x / block.y};
  }
  first_ = threads_.data();
  call_ = call;
  closure_ = closure;
  if constexpr (kRacesChecked) {
    host_.history = __tsan_get_current_fiber();
    while (fibers_.size() < std::max<std::size_t>(2 * size, 64)) {
      make_fiber();
    }
  }
  const SharedMemory shared_memory;
  const Moment begin;
  const Moment end;
  begin_ = &begin;
  end_ = &end;
  set_shape(config);
  begin.release();

  const std::uint64_t count = std::uint64_t{grid.x} * grid.y * grid.z;
  std::minstd_rand random(static_cast<std::minstd_rand::result_type>(seed));
  std::vector<std::uint64_t> blocks;
  if (seed != 0) {
    blocks.resize(count);
    std::iota(blocks.begin(), blocks.end(), 0u);
    std::shuffle(blocks.begin(), blocks.end(), random);
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    start_block(seed != 0 ? blocks[i] : i);
    run_block(seed != 0 ? &random : nullptr);
    shared_memory.forget_accesses();
  }
  end.acquire();
}

std::atomic<std::uint64_t> schedule = 0;
std::mutex launches_mutex;
std::vector<Launch> launches_so_far;
constinit thread_local cudaError_t last_error = cudaSuccess;

cudaError_t check(
    const cudaLaunchConfig_t* config,
    const void* kernel,
    std::size_t parameter_bytes) {
  if (config == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (kernel == nullptr) {
    return cudaErrorInvalidDeviceFunction;
  }
  const dim3& grid = config->gridDim;
  const dim3& block = config->blockDim;
  if (std::min({grid.x, grid.y, grid.z, block.x, block.y, block.z}) == 0 ||
      grid.x > 0x7fffffff || std::max(grid.y, grid.z) > 65535 ||
      std::max(block.x, block.y) > 1024 || block.z > 64 ||
      block.x * block.y * block.z > 1024) {
    return cudaErrorInvalidConfiguration;
  }
  if (parameter_bytes > 4096 || config->dynamicSmemBytes > (48 << 10)) {
    return cudaErrorInvalidValue;
  }
  if (config->numAttrs != 0 || running_device != nullptr) {
    return cudaErrorNotSupported;
  }
  return cudaSuccess;
}

FP16CORE_UNSEEN Device& kernel_device() {
  if (running_device == nullptr) {
    fail("a function of the device is called outside a kernel");
  }
  return *running_device;
}

} // namespace

namespace detail {

FP16CORE_UNSEEN std::uint64_t meet(
    Meeting meeting,
    unsigned mask,
    std::uint64_t bits,
    unsigned source_lane) {
  return kernel_device().meet(meeting, mask, bits, source_lane);
}

FP16CORE_UNSEEN unsigned lane() {
  return kernel_device().lane();
}

cudaError_t launch(
    const cudaLaunchConfig_t* config,
    const void* kernel,
    std::size_t parameter_bytes,
    void (*call)(const void*),
    const void* closure) {
  const cudaError_t error = check(config, kernel, parameter_bytes);
  if (error != cudaSuccess) {
    last_error = error;
    return error;
  }
  {
    const std::lock_guard lock(launches_mutex);
    launches_so_far.push_back(
        {kernel, config->gridDim, config->blockDim, config->stream});
  }
  running_device = &this_device;
  running_device->run(*config, schedule, call, closure);
  running_device = nullptr;
  return cudaSuccess;
}

} // namespace detail

void set_schedule(std::uint64_t seed) {
  schedule = seed;
}

std::vector<Launch> launches() {
  const std::lock_guard lock(launches_mutex);
  return launches_so_far;
}

void reset() {
  const std::lock_guard lock(launches_mutex);
  launches_so_far.clear();
}

} // namespace cuda_on_host

cudaError_t cudaGetLastError() {
  return std::exchange(cuda_on_host::last_error, cudaSuccess);
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    case cudaErrorNotSupported:
      return "operation not supported";
  }
  return "unrecognized error code";
}
