// The loops behind blocks.h, written with ATen's vectors and compiled once for
// every instruction set.
//
// The same bits everywhere rest on three habits. A sum of squares has 16 lanes
// whatever the width of a register: lane i takes the elements i, i + 16, ... in
// order. Products and sums are rounded separately (no fused multiply-add, which
// the baseline lacks). And conversions round to nearest even in hardware and in
// software alike. The update rules, which do fuse, are in updates.cpp.

#include "blocks.h"
#include "stream.h"
#include "vectors.h"

#include "../../math/unscale.h"

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace fp16core::detail::cpu {
namespace CPU_CAPABILITY {
namespace {

constexpr int kLanes = 16;
constexpr int kRegisters = kLanes / kWidth;
static_assert(kLanes % kWidth == 0);

// fp32 partial sums are closed after this many elements, 256 in a lane, which
// bounds their relative error by 256 * 2^-24.
constexpr std::int64_t kSumBlock = 4096;

// Squares below 2^-126 lose bits. Each of the 4096 is then off by at most
// 2^-150, which a sum above this leaves below a relative 2^-38.
constexpr double kTinySum = 0x1p-100;

template <typename T>
void count_nonfinite(const T* source, std::int64_t n, GradientStats& stats) {
  for (std::int64_t i = 0; i < n; ++i) {
    const auto value = static_cast<double>(source[i]);
    stats.inf_count += std::isinf(value);
    stats.nan_count += std::isnan(value);
  }
}

void add_largest(double value, GradientStats& stats) {
  if (std::isnan(value) || value > stats.largest) {
    stats.largest = value;
  }
}

// Takes up to kSumBlock elements of a source of at most 32 bits. The
// destination must not be the source.
template <typename Source, bool kWrite, bool kStream>
void take_block(
    const Source* source,
    float* destination,
    std::int64_t n,
    float factor,
    GradientStats& stats) {
  const Unscale unscale;
  const Floats factors(factor);
  Floats sums[kRegisters];
  Bits largest[kRegisters];
  for (int r = 0; r < kRegisters; ++r) {
    sums[r] = Floats(0.0F);
    largest[r] = Bits(0);
  }
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int r = 0; r < kRegisters; ++r) {
      const Floats scaled = load(source + i + r * kWidth);
      largest[r] = at::vec::maximum(largest[r], magnitude_bits(scaled));
      const Floats value = unscale(scaled, factors);
      sums[r] = sums[r] + value * value;
      if constexpr (kWrite && kStream) {
        stream(destination + i + r * kWidth, value);
      } else if constexpr (kWrite) {
        value.store(destination + i + r * kWidth);
      }
    }
  }
  float lanes[kLanes];
  std::int32_t largest_bits = 0;
  for (int r = 0; r < kRegisters; ++r) {
    sums[r].store(lanes + r * kWidth);
    largest_bits = std::max(largest_bits, largest_of(largest[r]));
  }
  for (int lane = 0; i < n; ++i, ++lane) {
    const auto scaled = static_cast<float>(source[i]);
    largest_bits = std::max(largest_bits, magnitude_bits(scaled));
    const float value = unscale(scaled, factor);
    lanes[lane] = lanes[lane] + value * value;
    if constexpr (kWrite) {
      destination[i] = value;
    }
  }
  double sum = 0.0;
  for (const float lane : lanes) {
    sum += lane;
  }
  // The block is still in the cache for a second look.
  if (largest_bits >= kInfinity) {
    count_nonfinite(source, n, stats);
  } else if (!std::isfinite(sum) || (sum < kTinySum && largest_bits != 0)) {
    sum = 0.0;
    for (std::int64_t j = 0; j < n; ++j) {
      const double value = unscale(static_cast<float>(source[j]), factor);
      sum += value * value;
    }
  }
  stats.sum_of_squares += sum;
  add_largest(unscale(std::bit_cast<float>(largest_bits), factor), stats);
}

// Takes a block in place: from a copy, so that a second look sees what was
// there.
void take_block_in_place(
    const float* source,
    float* destination,
    std::int64_t n,
    float factor,
    GradientStats& stats) {
  float copy[kSumBlock];
  std::copy_n(source, n, copy);
  take_block<float, true, false>(copy, destination, n, factor, stats);
}

// Takes up to kSumBlock elements of a float64 source. Plain loops, since such
// gradients are rare. The product is rounded once, to the destination.
template <typename Destination>
void take_block_double(
    const double* source,
    Destination* destination,
    std::int64_t n,
    double factor,
    GradientStats& stats) {
  const Unscale unscale;
  double lanes[kLanes] = {};
  bool finite = true;
  double largest = 0.0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double scaled = source[i];
    finite = finite && std::isfinite(scaled);
    const auto value =
        static_cast<double>(static_cast<Destination>(unscale(scaled, factor)));
    largest = std::fmax(largest, std::fabs(value));
    lanes[i % kLanes] = lanes[i % kLanes] + value * value;
    if (!std::isfinite(scaled)) {
      stats.inf_count += std::isinf(scaled);
      stats.nan_count += std::isnan(scaled);
      largest = std::isnan(scaled) ? scaled : largest;
    }
    if (destination != nullptr) {
      destination[i] = static_cast<Destination>(value);
    }
  }
  for (const double lane : lanes) {
    stats.sum_of_squares += lane;
  }
  add_largest(stats.nan_count > 0 ? std::nan("") : largest, stats);
}

template <typename Destination>
void take_double(
    const GradientItem& item,
    std::int64_t begin,
    std::int64_t n,
    double factor,
    GradientStats& stats) {
  const auto* source = static_cast<const double*>(item.source) + begin;
  auto* destination = static_cast<Destination*>(item.destination);
  for (std::int64_t i = 0; i < n; i += kSumBlock) {
    take_block_double<Destination>(
        source + i,
        destination == nullptr ? nullptr : destination + begin + i,
        std::min(kSumBlock, n - i),
        factor,
        stats);
  }
}

template <typename Source>
void take_narrow(
    const GradientItem& item,
    std::int64_t begin,
    std::int64_t n,
    float factor,
    bool use_stream,
    GradientStats& stats) {
  const auto* source = static_cast<const Source*>(item.source) + begin;
  auto* destination = static_cast<float*>(item.destination);
  auto* block = &take_block<Source, false, false>;
  if (destination != nullptr) {
    destination += begin;
    block = use_stream ? &take_block<Source, true, true>
                       : &take_block<Source, true, false>;
    if constexpr (std::is_same_v<Source, float>) {
      if (source == destination) {
        block = &take_block_in_place;
      }
    }
  }
  for (std::int64_t i = 0; i < n; i += kSumBlock) {
    const auto size = std::min(kSumBlock, n - i);
    block(
        source + i,
        destination == nullptr ? nullptr : destination + i,
        size,
        factor,
        stats);
  }
  if (use_stream) {
    stream_fence();
  }
}

void take_gradient(
    const GradientItem& item,
    std::int64_t begin,
    std::int64_t n,
    const Factor& factor,
    bool use_stream,
    GradientStats& stats) {
  const float f32 = item.unscale ? factor.f32 : 1.0F;
  switch (item.source_type) {
    case c10::ScalarType::Half:
      take_narrow<c10::Half>(item, begin, n, f32, use_stream, stats);
      break;
    case c10::ScalarType::BFloat16:
      take_narrow<c10::BFloat16>(item, begin, n, f32, use_stream, stats);
      break;
    case c10::ScalarType::Float:
      take_narrow<float>(item, begin, n, f32, use_stream, stats);
      break;
    default: {
      const double f64 = item.unscale ? factor.f64 : 1.0;
      if (item.destination_type == c10::ScalarType::Double) {
        take_double<double>(item, begin, n, f64, stats);
      } else {
        take_double<float>(item, begin, n, f64, stats);
      }
    }
  }
}

template <typename Narrow>
void scale_narrow(Narrow* values, std::int64_t n, float factor) {
  const Unscale unscale;
  const Floats factors(factor);
  std::int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    narrow<Narrow>(
        unscale(load(values + i), factors),
        unscale(load(values + i + kWidth), factors))
        .store(values + i);
  }
  for (; i < n; ++i) {
    values[i] =
        static_cast<Narrow>(unscale(static_cast<float>(values[i]), factor));
  }
}

template <typename T>
void scale_plain(T* values, std::int64_t n, T factor) {
  const Unscale unscale;
  for (std::int64_t i = 0; i < n; ++i) {
    values[i] = unscale(values[i], factor);
  }
}

void scale_(
    const ScaleItem& item,
    std::int64_t begin,
    std::int64_t n,
    const Factor& factor) {
  switch (item.type) {
    case c10::ScalarType::Half:
      scale_narrow(static_cast<c10::Half*>(item.values) + begin, n, factor.f32);
      break;
    case c10::ScalarType::BFloat16:
      scale_narrow(
          static_cast<c10::BFloat16*>(item.values) + begin,
          n,
          factor.f32);
      break;
    case c10::ScalarType::Float:
      scale_plain(static_cast<float*>(item.values) + begin, n, factor.f32);
      break;
    default:
      scale_plain(static_cast<double*>(item.values) + begin, n, factor.f64);
  }
}

void zero_(void* values, std::int64_t n, bool use_stream) {
  auto* bytes = static_cast<char*>(values);
  std::int64_t i = 0;
  if (use_stream) {
    constexpr std::int64_t kBytes = kWidth * sizeof(float);
    const Floats zeros(0.0F);
    for (; i + kBytes <= n; i += kBytes) {
      stream(reinterpret_cast<float*>(bytes + i), zeros);
    }
    stream_fence();
  }
  std::memset(bytes + i, 0, n - i);
}

template <typename Narrow, bool kStream>
bool write_narrow(const float* master, Narrow* model, std::int64_t n) {
  Bits largest(0);
  std::int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    const Floats low = load(master + i);
    const Floats high = load(master + i + kWidth);
    largest = at::vec::maximum(
        largest,
        at::vec::maximum(magnitude_bits(low), magnitude_bits(high)));
    if constexpr (kStream) {
      stream(model + i, narrow<Narrow>(low, high));
    } else {
      narrow<Narrow>(low, high).store(model + i);
    }
  }
  std::int32_t largest_bits = largest_of(largest);
  for (; i < n; ++i) {
    largest_bits = std::max(largest_bits, magnitude_bits(master[i]));
    model[i] = static_cast<Narrow>(master[i]);
  }
  return rounds_to_infinity<Narrow>(master, n, largest_bits);
}

template <typename Narrow>
bool write_narrow(
    const float* master,
    void* model,
    std::int64_t begin,
    std::int64_t n,
    bool use_stream) {
  auto* target = static_cast<Narrow*>(model) + begin;
  if (!use_stream) {
    return write_narrow<Narrow, false>(master, target, n);
  }
  const bool saturated = write_narrow<Narrow, true>(master, target, n);
  stream_fence();
  return saturated;
}

bool write_model(
    const MasterItem& item,
    std::int64_t begin,
    std::int64_t n,
    bool use_stream) {
  const float* master = item.master + begin;
  switch (item.model_type) {
    case c10::ScalarType::Half:
      return write_narrow<c10::Half>(master, item.model, begin, n, use_stream);
    case c10::ScalarType::BFloat16:
      return write_narrow<c10::BFloat16>(
          master,
          item.model,
          begin,
          n,
          use_stream);
    case c10::ScalarType::Float:
      std::copy_n(master, n, static_cast<float*>(item.model) + begin);
      return false;
    default:
      std::copy_n(master, n, static_cast<double*>(item.model) + begin);
      return false;
  }
}

template <typename Narrow>
void adopt_narrow(float* master, const Narrow* model, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    // Rounding in pairs, since a narrow register holds two wide ones.
    Narrow rounded[2 * kWidth];
    narrow<Narrow>(load(master + i), load(master + i + kWidth)).store(rounded);
    for (int half = 0; half < 2 * kWidth; half += kWidth) {
      const Floats own = load(master + i + half);
      const Floats was = load(rounded + half);
      const Floats now = load(model + i + half);
      const Floats same = (was == now) | ((was != was) & (now != now));
      Floats::blendv(now, own, same).store(master + i + half);
    }
  }
  for (; i < n; ++i) {
    const auto was = static_cast<float>(static_cast<Narrow>(master[i]));
    const auto now = static_cast<float>(model[i]);
    if (was != now && !(std::isnan(was) && std::isnan(now))) {
      master[i] = now;
    }
  }
}

template <typename T>
void adopt_plain(float* master, const T* model, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (static_cast<T>(master[i]) != model[i]) {
      master[i] = static_cast<float>(model[i]);
    }
  }
}

void adopt_model(const MasterItem& item, std::int64_t begin, std::int64_t n) {
  float* master = item.master + begin;
  switch (item.model_type) {
    case c10::ScalarType::Half:
      adopt_narrow(master, static_cast<c10::Half*>(item.model) + begin, n);
      break;
    case c10::ScalarType::BFloat16:
      adopt_narrow(master, static_cast<c10::BFloat16*>(item.model) + begin, n);
      break;
    case c10::ScalarType::Float:
      adopt_plain(master, static_cast<float*>(item.model) + begin, n);
      break;
    default:
      adopt_plain(master, static_cast<double*>(item.model) + begin, n);
  }
}

} // namespace

const BlockKernels kBlocks = {
    take_gradient,
    scale_,
    zero_,
    write_model,
    adopt_model,
    update_kernel,
};

} // namespace CPU_CAPABILITY
} // namespace fp16core::detail::cpu
