// The runtime that the CUDA backend gets in tests: the memory of the device is
// the host's, and what is asked of it is recorded.

#pragma once

#include "cuda/runtime.h"

#include <cstdint>

namespace cuda_on_host {

/// What the backend asked for, of all devices, since the last `reset_counts`.
struct RuntimeCounts {
  // Reads that wait for the device.
  std::int64_t reads = 0;
  std::int64_t late_reads = 0;
  // Lists and numbers sent to the device, and their bytes.
  std::int64_t copies = 0;
  std::int64_t copied_bytes = 0;
};

RuntimeCounts& runtime_counts();
void reset_counts();

/// The stream that is current from now on.
void set_stream(cudaStream_t stream);

/// Whether a graph is being captured. Launches run all the same; reading throws
/// as it does with CUDA.
void set_capturing(bool capturing);

/// Whether late reads are held back: not ready, unless somebody waits for them.
void hold_late_reads(bool hold);

} // namespace cuda_on_host
