// What tests can ask of the device that cuda_runtime.h stands for.
//
// Race checkers see each CUDA thread as a thread: a launch happens after what
// its host thread did before and before what it does next, barriers order
// the threads that meet at them, and nothing orders two blocks. Shuffles and
// votes order nothing. Atomic operations order memory as if each came with a
// __threadfence(), so a fence that is missing goes unnoticed.
//
// What the device would leave to chance stops the program with a message where
// it cannot go on: threads that wait for each other in vain. A value that is
// shuffled from a thread that does not take part has all its bits set.

#pragma once

#include "cuda_runtime.h"

#include <cstdint>
#include <vector>

namespace cuda_on_host {

/// Permutes the order in which the blocks of a grid run, and the threads of a
/// block between two barriers, for all launches to come. Equal seeds give equal
/// orders; with 0, which is the default, the order is ascending.
void set_schedule(std::uint64_t seed);

struct Launch {
  const void* kernel;
  dim3 grid;
  dim3 block;
  cudaStream_t stream;
};

/// The launches that were not refused, of all host threads, since the last
/// reset().
std::vector<Launch> launches();
void reset();

} // namespace cuda_on_host
