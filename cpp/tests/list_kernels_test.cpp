// The list kernels of the CPU: every instruction set of this machine against
// plain loops in double, at the edges of vectors, sums and chunks.

#include "oracle.h"

#include "kernels.h"

#include <ATen/Parallel.h>

#include <doctest.h>

#include <algorithm>
#include <cstring>

using namespace fp16core;
using namespace fp16core::detail;
using namespace fp16core::test;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A partial sum holds 256 squares a lane in fp32: each square and each addition
// is rounded once, 2^-24 at most of what is there.
constexpr double kSumTolerance = 257 * 0x1p-24;

// Sums that are made again in double are as good as the oracle.
constexpr double kDoubleTolerance = 1e-12;

// The lengths where vectors (4 to 16 wide, in pairs), partial sums (4096) and
// chunks (65536) begin and end.
std::vector<std::int64_t> lengths() {
  std::vector<std::int64_t> all;
  for (std::int64_t n = 0; n <= 70; ++n) {
    all.push_back(n);
  }
  for (const std::int64_t edge : {4096, 8192}) {
    for (const std::int64_t beside : {-17, -1, 0, 1, 15, 33}) {
      all.push_back(edge + beside);
    }
  }
  return all;
}

// ---- element types ----

// How the oracle sees a type: random values, and as doubles.
struct HalfBits {
  using Value = std::uint16_t;
  static constexpr auto kType = c10::ScalarType::Half;
  static constexpr const Format& format = kHalf;
};
struct BFloat16Bits {
  using Value = std::uint16_t;
  static constexpr auto kType = c10::ScalarType::BFloat16;
  static constexpr const Format& format = kBFloat16;
};
struct Float {
  using Value = float;
  static constexpr auto kType = c10::ScalarType::Float;
};
struct Double {
  using Value = double;
  static constexpr auto kType = c10::ScalarType::Double;
};

template <typename T>
constexpr bool kNarrow = std::is_same_v<typename T::Value, std::uint16_t>;

// What a gradient of the type becomes.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, Double>, double, float>;

template <typename T>
double to_double(typename T::Value value) {
  if constexpr (kNarrow<T>) {
    return value_of(T::format, value);
  } else {
    return value;
  }
}

template <typename T>
typename T::Value from_double(double value) {
  if constexpr (kNarrow<T>) {
    return bits_of(T::format, value);
  } else {
    return static_cast<typename T::Value>(value);
  }
}

template <typename T>
bool equal(typename T::Value a, typename T::Value b) {
  if constexpr (kNarrow<T>) {
    return same_bits(T::format, a, b);
  } else {
    return same_bits(a, b);
  }
}

template <typename T>
double largest_finite() {
  if constexpr (kNarrow<T>) {
    return value_of(T::format, T::format.infinity - 1);
  } else {
    return std::numeric_limits<typename T::Value>::max();
  }
}

// One product, rounded once. The product of two floats is exact in double.
template <typename T>
Wide<T> product(double value, const Factor& factor) {
  if constexpr (std::is_same_v<T, Double>) {
    return value * factor.f64;
  } else {
    return static_cast<float>(value * static_cast<double>(factor.f32));
  }
}

// Values of mixed sign and of magnitudes from 2^-6 to 4: nothing special.
template <typename T>
void fill(Array<typename T::Value>& values, unsigned seed) {
  std::mt19937 bits(seed);
  std::uniform_real_distribution<double> exponent(-6.0, 2.0);
  for (std::int64_t i = 0; i < values.size(); ++i) {
    const double magnitude = std::exp2(exponent(bits));
    values[i] = from_double<T>((bits() & 1) != 0 ? magnitude : -magnitude);
  }
}

template <typename T>
GradientItem gradient_item(
    const void* source,
    void* destination,
    std::int64_t n) {
  return {
      source,
      destination,
      n,
      T::kType,
      std::is_same_v<T, Double> ? c10::ScalarType::Double
                                : c10::ScalarType::Float,
      true};
}

template <typename T>
GradientStats take(
    const Variant& variant,
    const Array<typename T::Value>& source,
    Wide<T>* destination,
    const Factor& factor,
    bool stream = false) {
  GradientStats stats;
  variant.blocks->take_gradient(
      gradient_item<T>(source.data(), destination, source.size()),
      0,
      source.size(),
      factor,
      stream,
      stats);
  return stats;
}

bool same_stats(const GradientStats& a, const GradientStats& b) {
  return same_bits(a.sum_of_squares, b.sum_of_squares) &&
      same_bits(a.largest, b.largest) && a.inf_count == b.inf_count &&
      a.nan_count == b.nan_count;
}

} // namespace

#define FOR_EACH_TYPE HalfBits, BFloat16Bits, Float, Double

// ---- casts ----

TEST_CASE_TEMPLATE(
    "every 16-bit value widens exactly",
    T,
    HalfBits,
    BFloat16Bits) {
  Array<std::uint16_t> source(65536);
  for (std::int64_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<std::uint16_t>(i);
  }
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    for (const double multiplier : {1.0, 0x1p-5, 0x1p-30, 1.0 / 3.0, 3e-7}) {
      CAPTURE(multiplier);
      const auto factor = Factor::of(multiplier);
      Array<float> wide(source.size());
      take<T>(variant, source, wide.data(), factor);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < source.size(); ++i) {
        wrong += !same_bits(
            wide[i],
            product<T>(value_of(T::format, source[i]), factor));
      }
      CHECK(wrong == 0);
    }
  }
}

namespace {

// Floats at and around every point where the rounding to `format` turns, and
// random bit patterns. Both signs.
std::vector<float> rounding_probes(const Format& format) {
  std::vector<float> probes{
      0.0F,
      std::numeric_limits<float>::denorm_min(),
      std::numeric_limits<float>::min(),
      std::numeric_limits<float>::max(),
      kInf,
      kNan};
  for (std::uint16_t bits = 0; bits < format.infinity; ++bits) {
    const double value = value_of(format, bits);
    // The last one stands for what would follow the largest finite value.
    const double next = bits + 1 < format.infinity
        ? value_of(format, bits + 1)
        : 2 * value - value_of(format, bits - 1);
    const auto tie = static_cast<float>((value + next) / 2);
    for (const float probe :
         {static_cast<float>(value),
          std::nextafter(tie, 0.0F),
          tie,
          std::nextafter(tie, kInf)}) {
      probes.push_back(probe);
    }
  }
  const auto positive = probes.size();
  for (std::size_t i = 0; i < positive; ++i) {
    probes.push_back(-probes[i]);
  }
  std::mt19937 random(7);
  for (int i = 0; i < 1 << 17; ++i) {
    probes.push_back(
        std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  }
  return probes;
}

} // namespace

TEST_CASE_TEMPLATE("masters round to nearest even", T, HalfBits, BFloat16Bits) {
  auto probes = rounding_probes(T::format);
  const auto n = static_cast<std::int64_t>(probes.size());
  Array<std::uint16_t> model(n);
  for (const auto& variant : variants()) {
    for (const bool stream : {false, true}) {
      CAPTURE(variant.name);
      CAPTURE(stream);
      std::fill_n(model.data(), n, std::uint16_t{0x1234});
      variant.blocks->write_model(
          {probes.data(), model.data(), n, T::kType},
          0,
          n,
          stream);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        wrong += !same_bits(T::format, model[i], bits_of(T::format, probes[i]));
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("masters go to a float32 or float64 model as they are") {
  auto probes = rounding_probes(kHalf);
  const auto n = static_cast<std::int64_t>(probes.size());
  Array<float> floats(n);
  Array<double> doubles(n);
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    CHECK_FALSE(variant.blocks->write_model(
        {probes.data(), floats.data(), n, c10::ScalarType::Float},
        0,
        n,
        false));
    CHECK_FALSE(variant.blocks->write_model(
        {probes.data(), doubles.data(), n, c10::ScalarType::Double},
        0,
        n,
        false));
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      wrong += !same_bits(floats[i], probes[i]) ||
          !same_bits(doubles[i], static_cast<double>(probes[i]));
    }
    CHECK(wrong == 0);
  }
}

// ---- gradients ----

TEST_CASE_TEMPLATE(
    "gradients of every length are unscaled and measured",
    T,
    FOR_EACH_TYPE) {
  const double tolerance =
      std::is_same_v<T, Double> ? kDoubleTolerance : kSumTolerance;
  for (const auto n : lengths()) {
    for (const std::size_t offset : {0, 1, 3}) {
      Array<typename T::Value> source(n, offset);
      fill<T>(source, static_cast<unsigned>(n + offset));
      const auto factor = Factor::of(1.0 / 3.0);
      double squares = 0.0;
      double largest = 0.0;
      Array<Wide<T>> expected(n);
      for (std::int64_t i = 0; i < n; ++i) {
        expected[i] = product<T>(to_double<T>(source[i]), factor);
        squares += static_cast<double>(expected[i]) * expected[i];
        largest = std::max<double>(largest, std::fabs(expected[i]));
      }
      GradientStats first;
      for (const auto& variant : variants()) {
        CAPTURE(variant.name);
        CAPTURE(n);
        CAPTURE(offset);
        Array<Wide<T>> destination(n, offset);
        const auto stats = take<T>(variant, source, destination.data(), factor);
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          wrong += !same_bits(destination[i], expected[i]);
        }
        REQUIRE(wrong == 0);
        REQUIRE(stats.inf_count == 0);
        REQUIRE(stats.nan_count == 0);
        REQUIRE(stats.largest == largest);
        REQUIRE(
            std::fabs(stats.sum_of_squares - squares) <= tolerance * squares);
        // Measuring alone finds the same.
        REQUIRE(same_stats(take<T>(variant, source, nullptr, factor), stats));
        // So does every other instruction set.
        if (variant.blocks == variants().front().blocks) {
          first = stats;
        }
        REQUIRE(same_stats(stats, first));
      }
    }
  }
}

TEST_CASE_TEMPLATE("a gradient may be unscaled in place", T, Float, Double) {
  const auto factor = Factor::of(1.0 / 3.0);
  for (const auto n : lengths()) {
    Array<typename T::Value> source(n, 1);
    fill<T>(source, static_cast<unsigned>(n));
    for (const auto& variant : variants()) {
      CAPTURE(variant.name);
      CAPTURE(n);
      Array<typename T::Value> apart(n);
      const auto expected = take<T>(variant, source, apart.data(), factor);
      Array<typename T::Value> values(n, 1);
      std::copy_n(source.data(), n, values.data());
      const auto stats = take<T>(variant, values, values.data(), factor);
      REQUIRE(same_stats(stats, expected));
      REQUIRE(std::equal(apart.data(), apart.data() + n, values.data()));
    }
  }
}

TEST_CASE_TEMPLATE(
    "an item that is not unscaled counts as it is",
    T,
    FOR_EACH_TYPE) {
  Array<typename T::Value> source(4133);
  fill<T>(source, 1);
  const auto factor = Factor::of(1.0 / 3.0);
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    auto item = gradient_item<T>(source.data(), nullptr, source.size());
    item.unscale = false;
    GradientStats stats;
    variant.blocks->take_gradient(item, 0, source.size(), factor, false, stats);
    CHECK(same_stats(stats, take<T>(variant, source, nullptr, Factor{})));
  }
}

TEST_CASE_TEMPLATE(
    "a run within an item touches nothing beside it",
    T,
    FOR_EACH_TYPE) {
  constexpr std::int64_t kSize = 4400;
  constexpr std::int64_t kBegin = 37;
  constexpr std::int64_t kRun = 4201;
  Array<typename T::Value> source(kSize);
  fill<T>(source, 2);
  source[kBegin - 1] = source[kBegin + kRun] =
      from_double<T>(std::numeric_limits<double>::infinity());
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    Array<Wide<T>> destination(kSize);
    std::fill_n(destination.data(), kSize, Wide<T>{-7});
    GradientStats stats;
    variant.blocks->take_gradient(
        gradient_item<T>(source.data(), destination.data(), kSize),
        kBegin,
        kRun,
        Factor{},
        false,
        stats);
    CHECK(stats.inf_count == 0);
    for (std::int64_t i = 0; i < kSize; ++i) {
      const bool inside = i >= kBegin && i < kBegin + kRun;
      REQUIRE(
          destination[i] ==
          (inside ? static_cast<Wide<T>>(to_double<T>(source[i])) : -7));
    }
  }
}

namespace {

// First, last, and both sides of every vector and sum boundary that matters.
const std::vector<std::int64_t>& plants() {
  static const std::vector<std::int64_t> all{
      0,    1,    3,    4,    7,    8,    15,   16,   17,   31,   32,   4079,
      4080, 4095, 4096, 4097, 4111, 4112, 8191, 8192, 8207, 8208, 8209, 8212};
  return all;
}

} // namespace

TEST_CASE_TEMPLATE(
    "a single inf or NaN is found wherever it stands",
    T,
    FOR_EACH_TYPE) {
  constexpr std::int64_t kSize = 8213; // two sums, a vector of 16, and 5 more
  Array<typename T::Value> source(kSize);
  fill<T>(source, 3);
  const auto factor = Factor::of(0x1p-3);
  for (const auto& variant : variants()) {
    for (const auto place : plants()) {
      for (const float planted : {kInf, -kInf, kNan}) {
        CAPTURE(variant.name);
        CAPTURE(place);
        CAPTURE(planted);
        const auto before = source[place];
        source[place] = from_double<T>(planted);
        Array<Wide<T>> destination(kSize);
        for (auto* target :
             {destination.data(), static_cast<Wide<T>*>(nullptr)}) {
          const auto stats = take<T>(variant, source, target, factor);
          REQUIRE(stats.inf_count == (std::isinf(planted) ? 1 : 0));
          REQUIRE(stats.nan_count == (std::isnan(planted) ? 1 : 0));
          REQUIRE_FALSE(std::isfinite(stats.sum_of_squares));
          REQUIRE(same_bits(
              stats.largest,
              std::isnan(planted) ? double{kNan} : double{kInf}));
        }
        source[place] = before;
      }
    }
  }
}

TEST_CASE_TEMPLATE("inf and NaN are counted apart", T, FOR_EACH_TYPE) {
  Array<typename T::Value> source(8213);
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    fill<T>(source, 4);
    for (std::int64_t i = 0; i < source.size(); i += 7) {
      source[i] = from_double<T>(i % 2 == 0 ? kInf : -kInf);
    }
    for (std::int64_t i = 0; i < source.size(); i += 10) {
      source[i] = from_double<T>(kNan);
    }
    const auto stats = take<T>(variant, source, nullptr, Factor{});
    CHECK(stats.nan_count == 822);        // multiples of 10 below 8213
    CHECK(stats.inf_count == 1174 - 118); // of 7, without those of 70
    CHECK(std::isnan(stats.largest));
  }
}

TEST_CASE_TEMPLATE(
    "what is counted is the source, in place too",
    T,
    Float,
    Double) {
  // Doubled, the large values leave the range: they are no inf of the source.
  const auto large = static_cast<typename T::Value>(largest_finite<T>());
  for (const auto& variant : variants()) {
    for (const double multiplier : {2.0, 1.0, 0.0}) {
      CAPTURE(variant.name);
      CAPTURE(multiplier);
      Array<typename T::Value> values(67);
      std::fill_n(values.data(), 67, large);
      values[5] = kInf;
      values[66] = kNan;
      const auto stats =
          take<T>(variant, values, values.data(), Factor::of(multiplier));
      CHECK(stats.inf_count == 1);
      CHECK(stats.nan_count == 1);
    }
  }
}

TEST_CASE_TEMPLATE("finite extremes raise no alarm", T, FOR_EACH_TYPE) {
  constexpr std::int64_t kSize = 8213;
  Array<typename T::Value> source(kSize);
  for (const auto& variant : variants()) {
    for (const double sign : {1.0, -1.0}) {
      CAPTURE(variant.name);
      CAPTURE(sign);
      const double extreme = sign * largest_finite<T>();
      std::fill_n(source.data(), kSize, from_double<T>(extreme));
      const auto stats = take<T>(variant, source, nullptr, Factor{});
      CHECK(stats.inf_count == 0);
      CHECK(stats.nan_count == 0);
      CHECK(stats.largest == largest_finite<T>());
      if (!std::is_same_v<T, Double>) { // whose squares leave the range
        CHECK(
            stats.sum_of_squares ==
            doctest::Approx(kSize * extreme * extreme).epsilon(kSumTolerance));
      }
    }
  }
}

TEST_CASE("a float64 gradient may go to a float32 destination") {
  constexpr std::int64_t kSize = 4133;
  Array<double> source(kSize);
  fill<Double>(source, 6);
  source[7] = 1e300; // finite, and inf as a float32
  const auto factor = Factor::of(1.0 / 3.0);
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    Array<float> destination(kSize);
    auto item = gradient_item<Double>(source.data(), destination.data(), kSize);
    item.destination_type = c10::ScalarType::Float;
    GradientStats stats;
    variant.blocks->take_gradient(item, 0, kSize, factor, false, stats);
    CHECK(stats.inf_count == 0);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < kSize; ++i) {
      wrong += !same_bits(
          destination[i],
          static_cast<float>(source[i] * factor.f64));
    }
    CHECK(wrong == 0);
  }
}

// ---- norms ----

TEST_CASE("squares beyond the range of float32 are summed in double") {
  for (const auto& variant : variants()) {
    for (const float value : {1e30F, 3e38F, 1e-25F, 1e-38F, 1e-44F}) {
      for (const bool in_place : {false, true}) {
        CAPTURE(variant.name);
        CAPTURE(value);
        CAPTURE(in_place);
        // The factor takes part once, in place as well.
        const auto factor = Factor::of(0.25);
        Array<float> source(4099);
        std::fill_n(source.data(), 4099, value);
        const double unscaled = product<Float>(value, factor);
        const auto stats = take<Float>(
            variant,
            source,
            in_place ? source.data() : nullptr,
            factor);
        CHECK(
            stats.sum_of_squares ==
            doctest::Approx(4099 * unscaled * unscaled)
                .epsilon(kDoubleTolerance));
      }
    }
  }
}

TEST_CASE("one large square among small ones keeps the sum right") {
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    Array<float> source(3 * 4096);
    std::fill_n(source.data(), source.size(), 0x1p-70F);
    source[4096] = 0x1p-40F;
    source[2 * 4096 + 4095] = 0x1p90F;
    double expected = 0.0;
    for (std::int64_t i = 0; i < source.size(); ++i) {
      expected += static_cast<double>(source[i]) * source[i];
    }
    const auto stats = take<Float>(variant, source, nullptr, Factor{});
    CHECK(
        stats.sum_of_squares ==
        doctest::Approx(expected).epsilon(kSumTolerance));
    // The first two sums, without the large value that hides them.
    GradientStats small;
    variant.blocks->take_gradient(
        gradient_item<Float>(source.data(), nullptr, source.size()),
        0,
        2 * 4096,
        Factor{},
        false,
        small);
    CHECK(
        small.sum_of_squares ==
        doctest::Approx(0x1p-80 + 8191 * 0x1p-140).epsilon(kSumTolerance));
  }
}

TEST_CASE("nothing but zeros has the norm zero") {
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    Array<float> source(4099);
    std::fill_n(source.data(), source.size(), -0.0F);
    const auto stats = take<Float>(variant, source, nullptr, Factor{});
    CHECK(stats.sum_of_squares == 0.0);
    CHECK(same_bits(stats.largest, 0.0));
  }
}

// ---- scaling in place ----

TEST_CASE_TEMPLATE(
    "values are scaled in place with one product each",
    T,
    FOR_EACH_TYPE) {
  for (const double multiplier : {0.5, 1.0 / 3.0, 8.0, 1e-6}) {
    const auto factor = Factor::of(multiplier);
    for (const auto n : lengths()) {
      Array<typename T::Value> source(n);
      fill<T>(source, static_cast<unsigned>(n));
      if (n > 20) {
        source[3] = from_double<T>(kInf);
        source[n - 1] = from_double<T>(kNan);
        source[n - 2] = from_double<T>(-largest_finite<T>());
      }
      for (const auto& variant : variants()) {
        CAPTURE(variant.name);
        CAPTURE(n);
        CAPTURE(multiplier);
        Array<typename T::Value> values(n, 1);
        std::copy_n(source.data(), n, values.data());
        variant.blocks->scale_({values.data(), n, T::kType}, 0, n, factor);
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          const auto expected =
              from_double<T>(product<T>(to_double<T>(source[i]), factor));
          wrong += !equal<T>(values[i], expected);
        }
        REQUIRE(wrong == 0);
      }
    }
  }
}

// ---- masters and model ----

TEST_CASE_TEMPLATE(
    "masters of every length are written",
    T,
    HalfBits,
    BFloat16Bits) {
  for (const auto n : lengths()) {
    for (const std::size_t offset : {0, 1, 5}) {
      Array<float> master(n, offset);
      fill<Float>(master, static_cast<unsigned>(n));
      for (const auto& variant : variants()) {
        CAPTURE(variant.name);
        CAPTURE(n);
        CAPTURE(offset);
        Array<std::uint16_t> model(n, offset);
        REQUIRE_FALSE(variant.blocks->write_model(
            {master.data(), model.data(), n, T::kType},
            0,
            n,
            false));
        for (std::int64_t i = 0; i < n; ++i) {
          REQUIRE(model[i] == bits_of(T::format, master[i]));
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE(
    "a finite master that is stored as inf is noticed",
    T,
    HalfBits,
    BFloat16Bits) {
  // Halfway between the largest finite value and what would follow it.
  const double largest = largest_finite<T>();
  const double threshold =
      largest + (largest - value_of(T::format, T::format.infinity - 2)) / 2;
  const auto beyond = static_cast<float>(threshold);
  const float below = std::nextafter(beyond, 0.0F);
  constexpr std::int64_t kSize = 71;
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    Array<float> master(kSize);
    Array<std::uint16_t> model(kSize);
    const auto saturates = [&] {
      return variant.blocks->write_model(
          {master.data(), model.data(), kSize, T::kType},
          0,
          kSize,
          false);
    };
    for (std::int64_t place = 0; place < kSize; ++place) {
      CAPTURE(place);
      for (const float value : {below, -below, kInf, -kInf, kNan}) {
        CAPTURE(value);
        master[place] = value;
        REQUIRE_FALSE(saturates());
      }
      for (const float value :
           {beyond, -beyond, std::numeric_limits<float>::max()}) {
        CAPTURE(value);
        master[place] = value;
        REQUIRE(saturates());
        REQUIRE((model[place] & 0x7fff) == T::format.infinity);
        for (const float beside : {kInf, kNan}) { // which hide nothing
          master[(place + 3) % kSize] = beside;
          REQUIRE(saturates());
          master[(place + 3) % kSize] = 0.0F;
        }
      }
      master[place] = 0.0F;
    }
  }
}

TEST_CASE_TEMPLATE(
    "a master keeps its bits under an equal model and yields to another",
    T,
    HalfBits,
    BFloat16Bits) {
  // Every 16-bit value twice: once as the rounding of its master, which lies a
  // little off, and once beside a master that rounds to the next value.
  constexpr std::int64_t kSize = 65536;
  Array<std::uint16_t> model(kSize);
  Array<float> near(kSize);
  Array<float> off(kSize);
  for (std::int64_t i = 0; i < kSize; ++i) {
    model[i] = static_cast<std::uint16_t>(i);
    const auto value = static_cast<float>(value_of(T::format, model[i]));
    near[i] = std::isfinite(value) ? std::nextafter(value, 0.0F) : value;
    off[i] = static_cast<float>(
        value_of(T::format, static_cast<std::uint16_t>(i ^ 1)));
  }
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    Array<float> kept(kSize);
    Array<float> taken(kSize);
    std::copy_n(near.data(), kSize, kept.data());
    std::copy_n(off.data(), kSize, taken.data());
    variant.blocks->adopt_model(
        {kept.data(), model.data(), kSize, T::kType},
        0,
        kSize);
    variant.blocks->adopt_model(
        {taken.data(), model.data(), kSize, T::kType},
        0,
        kSize);
    std::int64_t lost = 0;
    std::int64_t missed = 0;
    for (std::int64_t i = 0; i < kSize; ++i) {
      lost += !same_bits(kept[i], near[i]);
      missed += !same_bits(
          taken[i],
          static_cast<float>(value_of(T::format, model[i])));
    }
    CHECK(lost == 0);
    CHECK(missed == 0);
  }
}

TEST_CASE_TEMPLATE(
    "models of every length are adopted",
    T,
    HalfBits,
    BFloat16Bits) {
  for (const auto n : lengths()) {
    for (const auto& variant : variants()) {
      CAPTURE(variant.name);
      CAPTURE(n);
      Array<float> master(n, 1);
      fill<Float>(master, static_cast<unsigned>(n));
      Array<float> expected(n);
      Array<std::uint16_t> model(n, 1);
      for (std::int64_t i = 0; i < n; ++i) {
        model[i] = bits_of(T::format, master[i]);
        expected[i] = master[i];
        if (i % 3 == 0) {
          model[i] ^= 1;
          expected[i] = static_cast<float>(value_of(T::format, model[i]));
        }
      }
      variant.blocks->adopt_model(
          {master.data(), model.data(), n, T::kType},
          0,
          n);
      REQUIRE(std::equal(expected.data(), expected.data() + n, master.data()));
    }
  }
}

TEST_CASE("zeros of either sign are equal, and so are all NaN") {
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    // Long enough for a vector, and a remainder of the same.
    Array<float> master(70);
    Array<std::uint16_t> model(70);
    for (std::int64_t i = 0; i < 70; ++i) {
      master[i] = i % 2 == 0 ? -0.0F : kNan;
      model[i] = i % 2 == 0 ? 0x0000 : 0x7e55;
    }
    const auto nan_bits = std::bit_cast<std::uint32_t>(kNan);
    variant.blocks->adopt_model(
        {master.data(), model.data(), 70, c10::ScalarType::Half},
        0,
        70);
    for (std::int64_t i = 0; i < 70; ++i) {
      REQUIRE(
          std::bit_cast<std::uint32_t>(master[i]) ==
          (i % 2 == 0 ? 0x80000000U : nan_bits));
    }
  }
}

TEST_CASE("a float32 or float64 model is adopted by value") {
  for (const auto& variant : variants()) {
    CAPTURE(variant.name);
    Array<float> master(3);
    master[0] = 1.0F;
    master[1] = 0.1F;
    master[2] = 5.0F;
    const std::vector<float> floats{1.0F, 0.2F, kNan};
    auto copy = floats;
    variant.blocks->adopt_model(
        {master.data(), copy.data(), 3, c10::ScalarType::Float},
        0,
        3);
    CHECK(master[0] == 1.0F);
    CHECK(master[1] == 0.2F);
    CHECK(std::isnan(master[2]));
    std::vector<double> doubles{0.3, 0.2F, 7.0};
    variant.blocks->adopt_model(
        {master.data(), doubles.data(), 3, c10::ScalarType::Double},
        0,
        3);
    CHECK(master[0] == 0.3F);
    CHECK(master[1] == 0.2F);
    CHECK(master[2] == 7.0F);
  }
}

// ---- lists ----

namespace {

class Threads {
 public:
  explicit Threads(int count) : before_(at::get_num_threads()) {
    at::set_num_threads(count);
  }
  ~Threads() { at::set_num_threads(before_); }

 private:
  int before_;
};

// Gradients of several sizes around the chunk's, with the memory they need.
struct Gradients {
  std::vector<std::unique_ptr<Array<std::uint16_t>>> sources;
  std::vector<std::unique_ptr<Array<float>>> destinations;
  std::vector<GradientItem> items;

  explicit Gradients(const std::vector<std::int64_t>& sizes) {
    for (const auto n : sizes) {
      auto& source =
          *sources.emplace_back(std::make_unique<Array<std::uint16_t>>(n));
      auto& destination =
          *destinations.emplace_back(std::make_unique<Array<float>>(n));
      fill<HalfBits>(source, static_cast<unsigned>(n));
      items.push_back(
          gradient_item<HalfBits>(source.data(), destination.data(), n));
    }
  }

  bool same_values(const Gradients& other) const {
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (std::memcmp(
              destinations[i]->data(),
              other.destinations[i]->data(),
              destinations[i]->size() * sizeof(float)) != 0) {
        return false;
      }
    }
    return true;
  }
};

bool same_stats(
    const std::vector<GradientStats>& a,
    const std::vector<GradientStats>& b) {
  return std::equal(
      a.begin(),
      a.end(),
      b.begin(),
      b.end(),
      [](const auto& x, const auto& y) { return same_stats(x, y); });
}

const std::vector<std::int64_t>
    kListSizes{1, 0, 65535, 65536, 65537, 17, 0, 4096, 131072, 200001, 3};

} // namespace

TEST_CASE("a list gives what its items give one by one") {
  const auto factor = Factor::of(1.0 / 3.0);
  Gradients alone(kListSizes);
  std::vector<GradientStats> expected;
  const auto kernels = make_cpu_kernels();
  for (const auto& item : alone.items) {
    kernels->take_gradients(item, FactorSource{factor.f64});
    REQUIRE(kernels->gradient_stats().size() == 1);
    expected.push_back(kernels->gradient_stats().front());
  }
  for (const int threads : {1, 2, 3, 5}) {
    CAPTURE(threads);
    const Threads limit(threads);
    Gradients together(kListSizes);
    kernels->take_gradients(together.items, FactorSource{factor.f64});
    CHECK(same_stats(kernels->gradient_stats(), expected));
    CHECK(together.same_values(alone));
  }
}

TEST_CASE("an inf is found in every item and on both sides of a chunk") {
  const auto kernels = make_cpu_kernels();
  for (const int threads : {1, 3}) {
    const Threads limit(threads);
    Gradients list(kListSizes);
    for (std::size_t i = 0; i < list.items.size(); ++i) {
      const auto n = list.items[i].numel;
      for (const std::int64_t place :
           {std::int64_t{0}, std::int64_t{65535}, std::int64_t{65536}, n - 1}) {
        if (place < 0 || place >= n) {
          continue;
        }
        CAPTURE(i);
        CAPTURE(place);
        auto& value = (*list.sources[i])[place];
        const auto before = std::exchange(value, std::uint16_t{0xfc00});
        kernels->take_gradients(list.items, {});
        const auto& stats = kernels->gradient_stats();
        for (std::size_t j = 0; j < stats.size(); ++j) {
          REQUIRE(stats[j].inf_count == (j == i ? 1 : 0));
          REQUIRE(stats[j].nan_count == 0);
        }
        value = before;
      }
    }
  }
}

TEST_CASE("an empty list is no trouble") {
  const auto kernels = make_cpu_kernels();
  kernels->take_gradients({}, {});
  CHECK(kernels->gradient_stats().empty());
  kernels->scale_({}, {});
  kernels->zero_({});
  CHECK(kernels->write_model({})->wait().empty());
  kernels->adopt_model({});
}

TEST_CASE("kernels forget the list before") {
  const auto kernels = make_cpu_kernels();
  Gradients list({5, 7});
  (*list.sources[0])[0] = 0x7c00;
  kernels->take_gradients(list.items, {});
  CHECK(kernels->gradient_stats()[0].inf_count == 1);
  (*list.sources[0])[0] = 0;
  kernels->take_gradients(list.items, {});
  CHECK(kernels->gradient_stats()[0].inf_count == 0);
  kernels->take_gradients({}, {});
  CHECK(kernels->gradient_stats().empty());
}

// Above 16 MiB of destinations the stores bypass the caches.
TEST_CASE("a long list of gradients gives the bits of a short one") {
  const std::vector<std::int64_t> sizes{4194304 + 37, 65537, 1000};
  const auto factor = Factor::of(1.0 / 3.0);
  const auto kernels = make_cpu_kernels();
  Gradients streamed(sizes);
  kernels->take_gradients(streamed.items, FactorSource{factor.f64});
  const auto stats = kernels->gradient_stats();
  Gradients plain(sizes);
  std::vector<GradientStats> expected(sizes.size());
  const auto& blocks = *variants().front().blocks;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    for (std::int64_t begin = 0; begin < sizes[i]; begin += 65536) {
      GradientStats chunk;
      blocks.take_gradient(
          plain.items[i],
          begin,
          std::min<std::int64_t>(65536, sizes[i] - begin),
          factor,
          false,
          chunk);
      expected[i].sum_of_squares += chunk.sum_of_squares;
      expected[i].largest = std::max(expected[i].largest, chunk.largest);
    }
  }
  CHECK(streamed.same_values(plain));
  CHECK(same_stats(stats, expected));
}

TEST_CASE(
    "a long list with a destination off the grid is written all the same") {
  constexpr std::int64_t kSize = 4194304 + 5;
  const auto kernels = make_cpu_kernels();
  const auto factor = Factor::of(0.5);
  Array<std::uint16_t> source(kSize);
  fill<BFloat16Bits>(source, 9);
  for (const std::size_t offset : {1, 8}) {
    CAPTURE(offset);
    Array<float> destination(kSize, offset);
    kernels->take_gradients(
        gradient_item<BFloat16Bits>(source.data(), destination.data(), kSize),
        FactorSource{factor.f64});
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < kSize; ++i) {
      wrong += destination[i] != value_of(kBFloat16, source[i]) * 0.5;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("a long list of masters gives the bits of a short one") {
  constexpr std::int64_t kSize = 8388608 + 37; // 16 MiB of model, and some
  const auto kernels = make_cpu_kernels();
  Array<float> master(kSize);
  std::mt19937 random(5);
  for (std::int64_t i = 0; i < kSize; ++i) {
    // Random bits with exponents within half's normal range.
    master[i] = std::bit_cast<float>(
        static_cast<std::uint32_t>((random() & 0x83ffffffU) + 0x3c000000U));
  }
  for (const std::size_t offset : {0, 3}) {
    CAPTURE(offset);
    Array<std::uint16_t> model(kSize, offset);
    const auto saturated = kernels->write_model(
        MasterItem{master.data(), model.data(), kSize, c10::ScalarType::Half});
    CHECK(saturated->wait() == std::vector<std::uint8_t>{0});
    Array<std::uint16_t> plain(kSize);
    variants().front().blocks->write_model(
        {master.data(), plain.data(), kSize, c10::ScalarType::Half},
        0,
        kSize,
        false);
    CHECK(
        std::memcmp(model.data(), plain.data(), kSize * sizeof(plain[0])) == 0);
  }
}

TEST_CASE("saturation is told for each item") {
  const auto kernels = make_cpu_kernels();
  Array<float> master(200000);
  Array<std::uint16_t> model(200000);
  const auto item = [&](std::int64_t begin, std::int64_t n) {
    return MasterItem{
        master.data() + begin,
        model.data() + begin,
        n,
        c10::ScalarType::Half};
  };
  const std::vector<MasterItem> items{
      item(0, 1),
      item(1, 0),
      item(1, 150000),
      item(150001, 49999)};
  master[65536 + 1] = 70000.0F; // first of the third item's second chunk
  CHECK(
      kernels->write_model(items)->wait() ==
      std::vector<std::uint8_t>{0, 0, 1, 0});
  master[65536 + 1] = 0.0F;
  master[199999] = -65520.0F;
  CHECK(
      kernels->write_model(items)->wait() ==
      std::vector<std::uint8_t>{0, 0, 0, 1});
}

TEST_CASE("lists are scaled, adopted and cleared alike by any threads") {
  const auto kernels = make_cpu_kernels();
  const auto factor = Factor::of(1.0 / 3.0);
  constexpr std::int64_t kSize = 300001;
  Array<float> source(kSize);
  fill<Float>(source, 11);
  for (const int threads : {1, 2, 3}) {
    CAPTURE(threads);
    const Threads limit(threads);
    Array<float> values(kSize);
    std::copy_n(source.data(), kSize, values.data());
    // Two items, of which the second starts off the grid.
    kernels->scale_(
        {{values.data(), 100001, c10::ScalarType::Float},
         {values.data() + 100001, 200000, c10::ScalarType::Float}},
        FactorSource{factor.f64});
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < kSize; ++i) {
      wrong += values[i] != product<Float>(source[i], factor);
    }
    CHECK(wrong == 0);

    Array<std::uint16_t> model(kSize);
    std::fill_n(model.data(), kSize, std::uint16_t{0x3c00}); // 1.0
    kernels->adopt_model(
        MasterItem{values.data(), model.data(), kSize, c10::ScalarType::Half});
    wrong = 0;
    for (std::int64_t i = 0; i < kSize; ++i) {
      const float before = product<Float>(source[i], factor);
      wrong += values[i] != (bits_of(kHalf, before) == 0x3c00 ? before : 1.0F);
    }
    CHECK(wrong == 0);

    auto* bytes = reinterpret_cast<unsigned char*>(values.data());
    constexpr std::int64_t kBytes = kSize * sizeof(float);
    std::memset(bytes, 0xa5, kBytes);
    kernels->zero_({{bytes + 1, 70001}, {bytes + 70003, kBytes - 70003}});
    CHECK(bytes[0] == 0xa5);
    CHECK(bytes[70002] == 0xa5);
    CHECK(std::count(bytes, bytes + kBytes, 0) == kBytes - 2);
  }
}

TEST_CASE("bytes of every length are cleared, and none beside them") {
  for (const auto n : lengths()) {
    for (const bool stream : {false, true}) {
      for (const auto& variant : variants()) {
        CAPTURE(variant.name);
        CAPTURE(n);
        CAPTURE(stream);
        Array<unsigned char> bytes(n + 64);
        std::fill_n(bytes.data(), n + 64, 0xa5);
        // Streaming needs the grid.
        const std::int64_t begin = stream ? 0 : 1;
        variant.blocks->zero_(bytes.data() + begin, n, stream);
        REQUIRE(std::count(bytes.data(), bytes.data() + n + 64, 0) == n);
        REQUIRE(
            std::count(bytes.data() + begin, bytes.data() + begin + n, 0) == n);
      }
    }
  }
}

TEST_CASE("a long list is cleared as a short one, on and off the grid") {
  constexpr std::int64_t kBytes = (std::int64_t{20} << 20) + 3;
  const auto kernels = make_cpu_kernels();
  for (const std::size_t offset : {0, 1}) {
    CAPTURE(offset);
    Array<unsigned char> bytes(kBytes + 1, offset);
    std::fill_n(bytes.data(), kBytes + 1, 0xa5);
    kernels->zero_(ZeroItem{bytes.data(), kBytes});
    CHECK(std::count(bytes.data(), bytes.data() + kBytes, 0) == kBytes);
    CHECK(bytes[kBytes] == 0xa5);
  }
}

TEST_CASE("only the CPU and what was built in has kernels") {
  CHECK(has_kernels(c10::kCPU));
  CHECK_FALSE(has_kernels(c10::kMeta));
  CHECK_FALSE(error_of<c10::NotImplementedError>([] {
                make_kernels(c10::kMeta);
              }).empty());
}
