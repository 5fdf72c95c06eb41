// The device that stands for CUDA's in tests: what it does must be what CUDA
// does, or tests of kernels show nothing.

#include "device_on_host.h"

#include <cuda_runtime.h>

#include <doctest.h>

#include <numeric>
#include <thread>
#include <vector>

namespace {

template <typename... Parameters, typename... Arguments>
cudaError_t launch(
    void (*kernel)(Parameters...),
    dim3 grid,
    dim3 block,
    Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// Runs a check in orders of threads and blocks that differ.
template <typename Check>
void in_any_order(Check check) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    CAPTURE(seed);
    cuda_on_host::set_schedule(seed);
    check();
  }
  cuda_on_host::set_schedule(0);
}

__global__ void __launch_bounds__(256)
    sum_kernel(const double* values, int n, double* partial, double* sum) {
  __shared__ double of_warp[8];
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  double mine = i < n ? values[i] : 0;
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    mine += __shfl_xor_sync(~0u, mine, lanes);
  }
  if (threadIdx.x % warpSize == 0) {
    of_warp[threadIdx.x / warpSize] = mine;
  }
  __syncthreads();
  for (unsigned half = 4; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      of_warp[threadIdx.x] += of_warp[threadIdx.x + half];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    atomicAdd(sum, of_warp[0]);
    partial[blockIdx.x] = of_warp[0];
  }
}

// The last block to finish gathers what the others left.
__global__ void gather_kernel(int* partial, unsigned* finished, int* sum) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = static_cast<int>(blockIdx.x) + 1;
    __threadfence();
    is_last = atomicAdd(finished, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last && threadIdx.x < gridDim.x) {
    atomicAdd(sum, __ldcs(&partial[threadIdx.x]));
  }
}

__global__ void leave_early_kernel(int* seen, int* any) {
  if (threadIdx.x % 3 == 1) {
    return;
  }
  const int found = __syncthreads_or(threadIdx.x == 5);
  const int missing = __syncthreads_or(threadIdx.x == 4); // has returned
  __syncwarp();
  seen[threadIdx.x] = 1;
  if (threadIdx.x == 0) {
    *any = found + 2 * missing;
  }
}

struct WarpResults {
  float up[32];
  long long down[32];
  int from[32];
  unsigned ballot[32];
  int any;
  int all;
  unsigned halves[2];
  unsigned absent;
};

__global__ void warp_kernel(WarpResults* results) {
  const unsigned lane = threadIdx.x;
  const int value = static_cast<int>(lane);
  results->up[lane] = __shfl_xor_sync(~0u, static_cast<float>(value), 4, 8);
  results->down[lane] = __shfl_down_sync(~0u, 1ll << lane, 3, 16);
  results->from[lane] = __shfl_sync(~0u, -value, 9, 8);
  results->ballot[lane] = __ballot_sync(~0u, lane % 2);
  const int any = __any_sync(~0u, lane == 7);
  const int all = __all_sync(~0u, lane < 31);
  if (lane == 0) {
    results->any = any;
    results->all = all;
  }
  // The halves of a warp may go different ways.
  if (lane < 16) {
    const unsigned votes = __ballot_sync(0xffff, 1);
    if (lane == 0) {
      results->halves[0] = votes;
    }
  } else {
    __syncwarp(0xffff0000);
    const unsigned votes = __ballot_sync(0xffff0000, lane != 20);
    const unsigned absent = __shfl_sync(0xffff0000, lane, 3);
    if (lane == 31) {
      results->halves[1] = votes;
      results->absent = absent;
    }
  }
}

__global__ void index_kernel(
    unsigned* counts,
    const __grid_constant__ dim3 shape) {
  const unsigned x = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned y = blockIdx.y * blockDim.y + threadIdx.y;
  const unsigned z = blockIdx.z * blockDim.z + threadIdx.z;
  counts[(z * shape.y + y) * shape.x + x] += 1;
}

__global__ void atomic_kernel(
    int* sum,
    unsigned* bits,
    unsigned long long* most,
    float* total,
    int* slot) {
  const int i = static_cast<int>(threadIdx.x);
  atomicAdd(sum, i % 2 ? 2147483647 : -2147483647);
  atomicOr(bits, 1u << i);
  atomicMax(most, static_cast<unsigned long long>(i) << 32);
  atomicAdd(total, 0.5f);
  atomicCAS(slot, 0, i + 1);
  atomicExch(slot + 1, 7);
}

__global__ void nothing_kernel() {}

struct Large {
  char bytes[4096];
};
__global__ void large_kernel(Large, char* first) {
  *first = 1;
}
struct JustFits {
  char* first;
  char bytes[4088];
};
__global__ void just_fits_kernel(const __grid_constant__ JustFits argument) {
  *argument.first = argument.bytes[4087];
}

} // namespace

TEST_CASE("a block reduces through shared memory and shuffles") {
  std::vector<double> values(1000);
  std::iota(values.begin(), values.end(), 1.0);
  in_any_order([&] {
    double partial[4] = {};
    double sum = 0;
    REQUIRE(
        launch(sum_kernel, 4, 256, values.data(), 1000, partial, &sum) ==
        cudaSuccess);
    CHECK(sum == 500500);
    CHECK(partial[0] == 256 * 257 / 2);
  });
}

TEST_CASE("the last block sees what the others wrote") {
  in_any_order([] {
    int partial[40] = {};
    unsigned finished = 0;
    int sum = 0;
    REQUIRE(
        launch(gather_kernel, 40, 64, partial, &finished, &sum) == cudaSuccess);
    CHECK(sum == 40 * 41 / 2);
  });
}

TEST_CASE("threads that have returned hold up no barrier") {
  in_any_order([] {
    int seen[100] = {};
    int any = 0;
    REQUIRE(launch(leave_early_kernel, 1, 100, seen, &any) == cudaSuccess);
    CHECK(std::accumulate(seen, seen + 100, 0) == 67);
    CHECK(any == 1);
  });
}

TEST_CASE("shuffles and votes reach the lanes that CUDA reaches") {
  in_any_order([] {
    WarpResults results{};
    REQUIRE(launch(warp_kernel, 1, 32, &results) == cudaSuccess);
    for (int lane = 0; lane < 32; ++lane) {
      CAPTURE(lane);
      CHECK(results.up[lane] == static_cast<float>(lane ^ 4));
      CHECK(
          results.down[lane] == 1ll << (lane % 16 + 3 < 16 ? lane + 3 : lane));
      CHECK(results.from[lane] == -(lane / 8 * 8 + 1));
      CHECK(results.ballot[lane] == 0xaaaaaaaa);
    }
    CHECK(results.any == 1);
    CHECK(results.all == 0);
    CHECK(results.halves[0] == 0xffff);
    CHECK(results.halves[1] == 0xffef0000);
    CHECK(results.absent == ~0u);
  });
}

TEST_CASE("every thread of a grid runs once") {
  in_any_order([] {
    std::vector<unsigned> counts(6 * 6 * 6);
    REQUIRE(
        launch(
            index_kernel,
            dim3(3, 1, 2),
            dim3(2, 6, 3),
            counts.data(),
            dim3(6, 6, 6)) == cudaSuccess);
    CHECK(counts == std::vector<unsigned>(counts.size(), 1));
  });
}

TEST_CASE("atomic operations return and store what CUDA's do") {
  int sum = 0;
  unsigned bits = 0;
  unsigned long long most = 0;
  float total = 0;
  int slots[2] = {};
  REQUIRE(
      launch(atomic_kernel, 1, 32, &sum, &bits, &most, &total, slots) ==
      cudaSuccess);
  CHECK(sum == 0);
  CHECK(bits == ~0u);
  CHECK(most == 31ull << 32);
  CHECK(total == 16);
  CHECK(slots[0] == 1);
  CHECK(slots[1] == 7);
}

TEST_CASE("a launch that CUDA refuses is refused") {
  cuda_on_host::reset();
  const auto refusal = [](dim3 grid, dim3 block) {
    return launch(nothing_kernel, grid, block);
  };
  CHECK(refusal(0, 1) == cudaErrorInvalidConfiguration);
  CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(refusal(1, dim3(1, 0)) == cudaErrorInvalidConfiguration);
  CHECK(refusal(1, 1025) == cudaErrorInvalidConfiguration);
  CHECK(refusal(1, dim3(32, 33)) == cudaErrorInvalidConfiguration);
  CHECK(refusal(1, dim3(1, 1, 65)) == cudaErrorInvalidConfiguration);
  CHECK(refusal(0x80000000u, 1) == cudaErrorInvalidConfiguration);
  CHECK(refusal(dim3(1, 65536), 1) == cudaErrorInvalidConfiguration);
  CHECK(refusal(dim3(1, 1, 65536), 1) == cudaErrorInvalidConfiguration);
  char first = 0;
  CHECK(launch(large_kernel, 1, 1, Large{}, &first) == cudaErrorInvalidValue);
  CHECK(first == 0);
  CHECK(cuda_on_host::launches().empty());
  JustFits argument{&first, {}};
  argument.bytes[4087] = 5;
  CHECK(launch(just_fits_kernel, 1, 1, argument) == cudaSuccess);
  CHECK(first == 5);
}

TEST_CASE("launches are on record") {
  cuda_on_host::reset();
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([] { launch(nothing_kernel, dim3(2, 3), 33); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  const auto launches = cuda_on_host::launches();
  REQUIRE(launches.size() == 2);
  CHECK(launches[0].kernel == reinterpret_cast<const void*>(&nothing_kernel));
  CHECK(launches[1].grid.y == 3);
  CHECK(launches[1].block.x == 33);
  CHECK(launches[1].stream == nullptr);
}
