// A stand-in for the CUDA runtime that runs kernels on the host, for tests.
//
// Sources for CUDA compile unchanged as C++ with this folder first among the
// include folders. What they may use is below; device_on_host.cpp executes it.
// A launch has returned from all its threads when cudaLaunchKernelEx returns,
// so a stream is a mere name. Kernels cannot be launched with <<<>>>.

#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
// Nothing, because the standard library writes __attribute__((__noinline__)).
#define __noinline__
#define __align__(n) __attribute__((aligned(n)))
// The blocks of a launch run one after the other on the thread that launches,
// so what a block shares may outlive it.
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1)
      : x(vx), y(vy), z(vz) {}
};

inline constinit thread_local uint3 threadIdx{};
inline constinit thread_local uint3 blockIdx{};
inline constinit thread_local dim3 blockDim{};
inline constinit thread_local dim3 gridDim{};
inline constexpr int warpSize = 32;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};

constexpr float2 make_float2(float x, float y) {
  return {x, y};
}
constexpr float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
constexpr double2 make_double2(double x, double y) {
  return {x, y};
}
constexpr uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
constexpr uint3 make_uint3(unsigned x, unsigned y, unsigned z) {
  return {x, y, z};
}
constexpr uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
constexpr int4 make_int4(int x, int y, int z, int w) {
  return {x, y, z, w};
}

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNotSupported = 801,
};

const char* cudaGetErrorString(cudaError_t error);
/// The last error of this host thread, which is forgotten thereby.
cudaError_t cudaGetLastError();

using cudaStream_t = struct CUstream_st*;
struct cudaLaunchAttribute; // none is supported

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace cuda_on_host::detail {

/// Where threads of a block wait for each other.
enum class Meeting { kSyncThreads, kSyncThreadsOr, kSyncWarp, kShuffle, kVote };

/// Waits until all threads of the block, or those of `mask` in the warp, have
/// come to the same meeting or returned, and gives what the meeting results in
/// from the `bits` of each.
std::uint64_t meet(
    Meeting meeting,
    unsigned mask,
    std::uint64_t bits = 0,
    unsigned source_lane = 0);

/// The position of the running thread in its warp.
unsigned lane();

cudaError_t launch(
    const cudaLaunchConfig_t* config,
    const void* kernel,
    std::size_t parameter_bytes,
    void (*call)(const void* closure),
    const void* closure);

/// The space that kernel parameters take, each at its alignment.
template <typename... Parameters>
constexpr std::size_t parameter_bytes() {
  std::size_t bytes = 0;
  ((bytes = (bytes + alignof(Parameters) - 1) / alignof(Parameters) *
            alignof(Parameters) +
        sizeof(Parameters)),
   ...);
  return bytes;
}

template <typename T>
concept Shuffled =
    std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);

template <Shuffled T>
T shuffle(unsigned mask, T value, unsigned source_lane) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  const auto bits = std::bit_cast<Bits>(value);
  return std::bit_cast<T>(
      static_cast<Bits>(meet(Meeting::kShuffle, mask, bits, source_lane)));
}

template <typename T>
concept AtomicInteger = std::same_as<T, int> || std::same_as<T, unsigned> ||
    std::same_as<T, unsigned long long>;
template <typename T>
concept AtomicNumber =
    AtomicInteger<T> || std::same_as<T, float> || std::same_as<T, double>;

// The order is constant, as race checkers overlook an atomic operation whose
// order is not. The device's own order is weaker: see device_on_host.h.
template <typename T, typename Change>
T change_atomically(T* address, Change change) {
  T old;
  __atomic_load(address, &old, __ATOMIC_ACQUIRE);
  T changed = change(old);
  while (!__atomic_compare_exchange(
      address,
      &old,
      &changed,
      false,
      __ATOMIC_ACQ_REL,
      __ATOMIC_ACQUIRE)) {
    changed = change(old);
  }
  return old;
}

} // namespace cuda_on_host::detail

template <typename... ExpTypes, typename... ActTypes>
cudaError_t cudaLaunchKernelEx(
    const cudaLaunchConfig_t* config,
    void (*kernel)(ExpTypes...),
    ActTypes&&... args) {
  static_assert((std::is_trivially_copyable_v<ExpTypes> && ...));
  return [&](ExpTypes... coerced) {
    const auto call = [&] { kernel(coerced...); };
    return cuda_on_host::detail::launch(
        config,
        reinterpret_cast<const void*>(kernel),
        cuda_on_host::detail::parameter_bytes<ExpTypes...>(),
        [](const void* closure) { (*static_cast<decltype(&call)>(closure))(); },
        &call);
  }(std::forward<ActTypes>(args)...);
}

inline void __syncthreads() {
  cuda_on_host::detail::meet(cuda_on_host::detail::Meeting::kSyncThreads, ~0u);
}
inline int __syncthreads_or(int predicate) {
  return static_cast<int>(cuda_on_host::detail::meet(
      cuda_on_host::detail::Meeting::kSyncThreadsOr,
      ~0u,
      predicate != 0));
}
inline void __syncwarp(unsigned mask = ~0u) {
  cuda_on_host::detail::meet(cuda_on_host::detail::Meeting::kSyncWarp, mask);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(cuda_on_host::detail::meet(
      cuda_on_host::detail::Meeting::kVote,
      mask,
      predicate != 0));
}
inline int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, !predicate) == 0;
}

// A thread that would read beyond its group of `width` threads gets its own
// value.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
  const unsigned group = cuda_on_host::detail::lane() & ~(width - 1u);
  return cuda_on_host::detail::shuffle(
      mask,
      value,
      group | (static_cast<unsigned>(source) & (width - 1u)));
}
template <typename T>
T __shfl_down_sync(
    unsigned mask,
    T value,
    unsigned delta,
    int width = warpSize) {
  const unsigned lane = cuda_on_host::detail::lane();
  const unsigned last = lane | (width - 1u);
  return cuda_on_host::detail::shuffle(
      mask,
      value,
      delta <= last - lane ? lane + delta : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize) {
  const unsigned lane = cuda_on_host::detail::lane();
  const unsigned source = lane ^ static_cast<unsigned>(lanes);
  return cuda_on_host::detail::shuffle(
      mask,
      value,
      source <= (lane | (width - 1u)) ? source : lane);
}

template <cuda_on_host::detail::AtomicNumber T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return cuda_on_host::detail::change_atomically(address, [&](T old) {
    if constexpr (std::same_as<T, int>) { // wraps around
      return static_cast<int>(
          static_cast<unsigned>(old) + static_cast<unsigned>(value));
    } else {
      return old + value;
    }
  });
}
template <cuda_on_host::detail::AtomicInteger T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return cuda_on_host::detail::change_atomically(address, [&](T old) {
    return old | value;
  });
}
template <cuda_on_host::detail::AtomicInteger T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return cuda_on_host::detail::change_atomically(address, [&](T old) {
    return old < value ? value : old;
  });
}
template <cuda_on_host::detail::AtomicInteger T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return cuda_on_host::detail::change_atomically(address, [&](T) {
    return value;
  });
}
template <cuda_on_host::detail::AtomicInteger T>
T atomicCAS(
    T* address,
    std::type_identity_t<T> expected,
    std::type_identity_t<T> value) {
  return cuda_on_host::detail::change_atomically(address, [&](T old) {
    return old == expected ? value : old;
  });
}

// The atomic operations order memory already.
inline void __threadfence() {}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, std::type_identity_t<T> value) {
  *address = value;
}

constexpr int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
constexpr float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
constexpr unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
constexpr float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
constexpr long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}
constexpr double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}
