// The kernels of CUDA against those of the CPU: the same lists must give the
// same bits, and sums that agree to the last bits, whatever the order of the
// threads.

#include "device_on_host.h"
#include "runtime_on_host.h"

#include <fp16core/scale_policies.h>

#include "kernels.h"
#include "oracle.h"

#include "cuda/task_list.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <doctest.h>

#include <cmath>
#include <cstring>
#include <random>

using namespace fp16core;
using namespace fp16core::detail;
using namespace fp16core::test;

namespace {

using c10::ScalarType;

constexpr std::array kTypes{
    ScalarType::Half,
    ScalarType::BFloat16,
    ScalarType::Float,
    ScalarType::Double};

// Where vectors (8 and 4 elements), rounds of a block (2048 elements) and
// chunks (2048 elements in lists of up to 8 M) begin and end.
const std::vector<std::int64_t> kLengths{
    0,    1,    2,    3,    4,    5,    7,    8,    9,    15,   16,
    17,   255,  256,  257,  1023, 1024, 1025, 2040, 2047, 2048, 2049,
    2055, 2056, 2057, 4095, 4096, 4097, 6143, 6145, 8191, 8193};

// A race checker watches every access; it gets a little of everything.
#if defined(__SANITIZE_THREAD__)
constexpr bool kWatched = true;
#else
constexpr bool kWatched = false;
#endif

// Both sum up in fp32 first: the CPU 256 squares, CUDA eight.
constexpr double kSumTolerance = 257 * 0x1p-24;

std::int64_t size_of(ScalarType type) {
  return static_cast<std::int64_t>(c10::elementSize(type));
}

// Elements of a type, `offset` elements behind an aligned address, and what
// lies around them, which nothing may touch.
class Buffer {
 public:
  Buffer(ScalarType type, std::int64_t n, std::int64_t offset = 0)
      : type_(type),
        n_(n),
        offset_((kGuard + offset) * size_of(type)),
        lines_((offset_ + (n + kGuard) * size_of(type)) / sizeof(Line) + 1) {
    for (std::size_t i = 0; i < lines_.size() * sizeof(Line); ++i) {
      bytes()[i] = static_cast<std::uint8_t>(i * 7 + 1);
    }
  }

  ScalarType type() const { return type_; }
  std::int64_t size() const { return n_; }
  void* data() { return bytes() + offset_; }

  void set(std::int64_t i, double value) {
    switch (type_) {
      case ScalarType::Half:
        at<c10::Half>(i) = static_cast<c10::Half>(static_cast<float>(value));
        break;
      case ScalarType::BFloat16:
        at<c10::BFloat16>(i) =
            static_cast<c10::BFloat16>(static_cast<float>(value));
        break;
      case ScalarType::Float:
        at<float>(i) = static_cast<float>(value);
        break;
      default:
        at<double>(i) = value;
    }
  }

  double get(std::int64_t i) {
    switch (type_) {
      case ScalarType::Half:
        return static_cast<float>(at<c10::Half>(i));
      case ScalarType::BFloat16:
        return static_cast<float>(at<c10::BFloat16>(i));
      case ScalarType::Float:
        return at<float>(i);
      default:
        return at<double>(i);
    }
  }

  // Whether all bytes are those of `other`, but for the payload of NaN.
  bool same(Buffer& other) {
    const auto guard = static_cast<std::size_t>(offset_);
    const std::int64_t end = offset_ + n_ * size_of(type_);
    if (std::memcmp(bytes(), other.bytes(), guard) != 0 ||
        std::memcmp(
            bytes() + end,
            other.bytes() + end,
            lines_.size() * sizeof(Line) - end) != 0) {
      return false;
    }
    for (std::int64_t i = 0; i < n_; ++i) {
      if (!same_bits(get(i), other.get(i))) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::int64_t kGuard = 32;

  // So that a copy is aligned as the original.
  struct alignas(64) Line {
    std::uint8_t bytes[64];
  };

  std::uint8_t* bytes() {
    return reinterpret_cast<std::uint8_t*>(lines_.data());
  }

  template <typename T>
  T& at(std::int64_t i) {
    return static_cast<T*>(data())[i];
  }

  ScalarType type_;
  std::int64_t n_;
  std::int64_t offset_;
  std::vector<Line> lines_;
};

struct Random {
  std::mt19937 bits;

  explicit Random(unsigned seed) : bits(seed) {}

  double value() {
    std::uniform_real_distribution<double> exponent(-20.0, 4.0);
    const double magnitude = std::exp2(exponent(bits));
    return (bits() & 1) != 0 ? magnitude : -magnitude;
  }
  void fill(Buffer& buffer) {
    for (std::int64_t i = 0; i < buffer.size(); ++i) {
      buffer.set(i, value());
    }
  }
  std::int64_t below(std::int64_t end) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(end));
  }
};

// Runs `body` under several orders of threads and blocks.
template <typename Body>
void for_schedules(const Body& body) {
  for (const std::uint64_t seed : {2, 1, 0}) {
    CAPTURE(seed);
    cuda_on_host::set_schedule(seed);
    body();
    if (kWatched) {
      break;
    }
  }
  cuda_on_host::set_schedule(0);
}

// ---- gradients ----

// A list of gradients, twice: for the CPU, and for CUDA.
struct Gradients {
  struct Entry {
    Buffer source;
    std::unique_ptr<Buffer> destination;
    bool in_place;
    bool unscale;
    ScalarType destination_type;
  };
  std::vector<std::unique_ptr<Entry>> entries;

  void add(
      const Buffer& source,
      std::int64_t offset,
      bool write,
      bool in_place,
      bool unscale,
      ScalarType destination_type) {
    auto entry = std::make_unique<Entry>(
        Entry{source, nullptr, in_place, unscale, destination_type});
    if (write && !in_place) {
      entry->destination =
          std::make_unique<Buffer>(destination_type, source.size(), offset);
    }
    entries.push_back(std::move(entry));
  }

  std::vector<GradientItem> items() {
    std::vector<GradientItem> list;
    for (auto& entry : entries) {
      void* destination = entry->in_place ? entry->source.data()
          : entry->destination != nullptr ? entry->destination->data()
                                          : nullptr;
      list.push_back(
          {entry->source.data(),
           destination,
           entry->source.size(),
           entry->source.type(),
           entry->destination_type,
           entry->unscale});
    }
    return list;
  }
};

bool close(double a, double b) {
  return same_bits(a, b) || std::fabs(a - b) <= kSumTolerance * std::fabs(b);
}

void check_same_findings(ListKernels& got, ListKernels& want) {
  const auto& stats = got.gradient_stats();
  const auto& expected = want.gradient_stats();
  REQUIRE(stats.size() == expected.size());
  for (std::size_t i = 0; i < stats.size(); ++i) {
    CAPTURE(i);
    CHECK(stats[i].inf_count == expected[i].inf_count);
    CHECK(stats[i].nan_count == expected[i].nan_count);
    CHECK(same_bits(stats[i].largest, expected[i].largest));
    if (expected[i].inf_count + expected[i].nan_count == 0) {
      CHECK(close(stats[i].sum_of_squares, expected[i].sum_of_squares));
    } else {
      CHECK_FALSE(std::isfinite(stats[i].sum_of_squares));
    }
  }
  const auto totals = got.read_totals();
  const auto wanted = want.read_totals();
  CHECK(totals.found_inf == wanted.found_inf);
  CHECK(totals.first_offender == wanted.first_offender);
  CHECK(totals.inf_count == wanted.inf_count);
  CHECK(totals.nan_count == wanted.nan_count);
  CHECK(same_bits(totals.largest, wanted.largest));
  if (wanted.found_inf == 0.0F) {
    CHECK(close(totals.sum_of_squares, wanted.sum_of_squares));
  }
}

void check_take(Gradients& want, Gradients& got, double factor) {
  const auto cpu = make_cpu_kernels();
  const auto cuda = make_cuda_kernels(c10::kCPU);
  cpu->take_gradients(want.items(), {factor});
  cuda->take_gradients(got.items(), {factor});
  check_same_findings(*cuda, *cpu);
  for (std::size_t i = 0; i < want.entries.size(); ++i) {
    CAPTURE(i);
    CHECK(got.entries[i]->source.same(want.entries[i]->source));
    if (want.entries[i]->destination != nullptr) {
      CHECK(got.entries[i]->destination->same(*want.entries[i]->destination));
    }
  }
}

// All lengths and types in one list, at addresses of every alignment, with what
// `change` makes of each source.
template <typename Change>
void check_all_lengths(double factor, const Change& change) {
  Random random(1);
  Gradients want;
  Gradients got;
  std::int64_t count = 0;
  for (const auto n : kLengths) {
    for (const auto type : kTypes) {
      const bool in_place = count % 5 == 0 &&
          (type == ScalarType::Float || type == ScalarType::Double);
      const auto destination_type =
          type == ScalarType::Double && (in_place || count % 2 == 0)
          ? ScalarType::Double
          : ScalarType::Float;
      Buffer source(type, n, count % 11);
      random.fill(source);
      change(source, random);
      for (auto* list : {&want, &got}) {
        list->add(
            source,
            count % 7,
            count % 6 != 0,
            in_place,
            count % 13 != 0,
            destination_type);
      }
      ++count;
    }
  }
  check_take(want, got, factor);
}

} // namespace

TEST_CASE("CUDA takes gradients of every type and length as the CPU does") {
  for_schedules([] {
    for (const double factor : {1.0 / 3.0, 1.0, 0x1p-16}) {
      if (kWatched && factor == 1.0) {
        break;
      }
      check_all_lengths(factor, [](Buffer&, Random&) {});
    }
  });
}

TEST_CASE("CUDA finds inf and NaN wherever they are") {
  for (const unsigned kind : {2U, 1U, 0U}) {
    if (kWatched && kind != 2U) {
      break;
    }
    check_all_lengths(0x1p-3, [&](Buffer& source, Random& random) {
      for (std::int64_t k = 0; source.size() > 0 && k < 3; ++k) {
        const std::int64_t at =
            k == 0 ? source.size() - 1 : random.below(source.size());
        const double inf = std::numeric_limits<double>::infinity();
        const bool nan = kind == 1 || (kind == 2 && k % 2 == 0);
        source.set(at, nan ? std::nan("") : k % 2 == 0 ? inf : -inf);
      }
    });
  }
}

TEST_CASE("CUDA measures what leaves the range of fp32 sums") {
  for (const double magnitude : {1e19, 3e38, 1e-20, 1e-23, 1e-38, 0.0}) {
    if (kWatched && magnitude != 1e-23) {
      continue;
    }
    check_all_lengths(1.0, [&](Buffer& source, Random& random) {
      for (std::int64_t i = 0; i < source.size(); ++i) {
        source.set(i, source.type() == ScalarType::Half ? 0.0 : magnitude);
      }
      if (source.size() > 0) {
        source.set(random.below(source.size()), 1.0);
      }
    });
  }
}

TEST_CASE("CUDA takes nothing at all") {
  const auto cuda = make_cuda_kernels(c10::kCPU);
  CHECK(cuda->read_totals().found_inf == 0.0F);
  for (const std::int64_t count : {0, 1, 5}) {
    Gradients none;
    for (std::int64_t i = 0; i < count; ++i) {
      Buffer empty(ScalarType::Half, 0);
      none.add(empty, 0, true, false, true, ScalarType::Float);
    }
    cuda->take_gradients(none.items(), {1.0});
    const auto totals = cuda->read_totals();
    CHECK(totals.found_inf == 0.0F);
    CHECK(totals.first_offender == -1);
    CHECK(totals.sum_of_squares == 0.0);
    CHECK(cuda->gradient_stats().size() == static_cast<std::size_t>(count));
  }
}

TEST_CASE("empty tensors stand anywhere in a list without harm") {
  // At the ends, in rows, and alone between others.
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{
           {0, 5},
           {5, 0},
           {0, 0, 5, 0, 0, 2049, 0},
           {2048, 0},
           {0, 2048, 0, 1}}) {
    Random random(3);
    Gradients want;
    Gradients got;
    for (const auto n : sizes) {
      Buffer source(ScalarType::Half, n);
      random.fill(source);
      if (n == 5) {
        source.set(3, std::nan(""));
      }
      want.add(source, 0, true, false, true, ScalarType::Float);
      got.add(source, 0, true, false, true, ScalarType::Float);
    }
    check_take(want, got, 0.5);
  }
}

TEST_CASE("any number of tensors shares a launch") {
  constexpr std::int64_t kCount = kWatched ? 300 : 20000;
  Random random(13);
  Gradients want;
  Gradients got;
  for (std::int64_t i = 0; i < kCount; ++i) {
    Buffer source(kTypes[i % 2], i % 4);
    random.fill(source);
    if (i == kCount - 3) {
      source.set(0, std::nan(""));
    }
    want.add(source, 0, true, false, true, ScalarType::Float);
    got.add(source, 0, true, false, true, ScalarType::Float);
  }
  cuda_on_host::reset();
  check_take(want, got, 0.5);
  // The pass, and two that gather what it found.
  CHECK(cuda_on_host::launches().size() == 3);
}

TEST_CASE("sums do not depend on the order of threads and blocks") {
  Random random(4);
  Buffer source(ScalarType::Float, kWatched ? 9001 : 300001);
  random.fill(source);
  std::vector<double> sums;
  for_schedules([&] {
    Gradients list;
    list.add(source, 0, false, false, true, ScalarType::Float);
    const auto cuda = make_cuda_kernels(c10::kCPU);
    cuda->take_gradients(list.items(), {1.0 / 3.0});
    sums.push_back(cuda->read_totals().sum_of_squares);
    sums.push_back(cuda->sum_of_powers(list.items(), 3.0));
  });
  for (std::size_t i = 2; i < sums.size(); ++i) {
    CHECK(same_bits(sums[i], sums[i % 2]));
  }
}

TEST_CASE("chunks grow with the list and keep the bits") {
  // 8 M elements make chunks of 2048, more make larger ones.
  constexpr std::int64_t kEdge =
      cuda::kSmallestChunk * (cuda::kWantedChunks + 1);
  if (kWatched) {
    return; // too many threads to watch
  }
  CHECK(cuda::chunk_size_for(kEdge - 1) == cuda::kSmallestChunk);
  CHECK(cuda::chunk_size_for(kEdge) == 2 * cuda::kSmallestChunk);
  CHECK(cuda::chunk_size_for(std::int64_t{1} << 40) == cuda::kLargestChunk);
  Buffer source(ScalarType::Half, kEdge + 4099);
  for (std::int64_t i = 0; i < source.size(); ++i) {
    source.set(i, static_cast<double>(i % 37) - 18.0);
  }
  source.set(source.size() - 1, std::nan(""));
  Gradients want;
  Gradients got;
  want.add(source, 0, true, false, true, ScalarType::Float);
  got.add(source, 0, true, false, true, ScalarType::Float);
  check_take(want, got, 0.25);
}

TEST_CASE("CUDA sums up powers as the CPU does") {
  Random random(5);
  for (const double power : {0.0, 1.0, 1.5, 3.0}) {
    Gradients list;
    for (const auto n : kLengths) {
      for (const auto type : kTypes) {
        Buffer source(type, n, n % 3);
        random.fill(source);
        if (n > 2) {
          source.set(1, 0.0);
        }
        list.add(source, 0, false, false, true, ScalarType::Float);
      }
    }
    const double want = make_cpu_kernels()->sum_of_powers(list.items(), power);
    const double got =
        make_cuda_kernels(c10::kCPU)->sum_of_powers(list.items(), power);
    CAPTURE(power);
    // Two orders of additions in double.
    CHECK(std::fabs(got - want) <= 1e-12 * want);
  }
}

// ---- spans and weights ----

TEST_CASE("CUDA scales spans of every type and length as the CPU does") {
  for (const double factor : {1.0, 0.5, 1.0 / 3.0, 0.0}) {
    Random random(6);
    std::vector<Buffer> want;
    std::int64_t count = 0;
    for (const auto n : kLengths) {
      for (const auto type : kTypes) {
        random.fill(want.emplace_back(type, n, count++ % 9));
      }
    }
    auto got = want;
    const auto items = [](std::vector<Buffer>& buffers) {
      std::vector<ScaleItem> list;
      for (auto& buffer : buffers) {
        list.push_back({buffer.data(), buffer.size(), buffer.type()});
      }
      return list;
    };
    make_cpu_kernels()->scale_(items(want), {factor});
    // From memory of the device too.
    make_cuda_kernels(c10::kCPU)->scale_(items(got), {7.0, &factor});
    for (std::size_t i = 0; i < want.size(); ++i) {
      CAPTURE(i);
      CHECK(got[i].same(want[i]));
    }
  }
}

TEST_CASE("CUDA clears just the bytes that it is asked to") {
  for (std::int64_t offset = 0; offset < 20; ++offset) {
    for (const std::int64_t n : {0, 1, 15, 16, 17, 33, 2047, 2048, 4113}) {
      Buffer got(ScalarType::Half, n, offset);
      auto want = got;
      const std::int64_t bytes = n * 2;
      make_cpu_kernels()->zero_(ZeroItem{want.data(), bytes});
      make_cuda_kernels(c10::kCPU)->zero_(ZeroItem{got.data(), bytes});
      CHECK(got.same(want));
    }
  }
}

namespace {

struct Weights {
  std::vector<Buffer> masters;
  std::vector<Buffer> models;

  explicit Weights(unsigned seed) {
    Random random(seed);
    std::int64_t count = 0;
    for (const auto n : kLengths) {
      for (const auto type : kTypes) {
        auto& master = masters.emplace_back(ScalarType::Float, n, count % 5);
        random.fill(master);
        auto& model = models.emplace_back(type, n, count % 7);
        for (std::int64_t i = 0; i < n; ++i) {
          // Mostly what the master rounds to.
          model.set(i, i % 9 == 4 ? random.value() : master.get(i));
        }
        ++count;
      }
    }
  }

  std::vector<MasterItem> items() {
    std::vector<MasterItem> list;
    for (std::size_t i = 0; i < masters.size(); ++i) {
      list.push_back(
          {static_cast<float*>(masters[i].data()),
           models[i].data(),
           masters[i].size(),
           models[i].type()});
    }
    return list;
  }

  void check_same(Weights& want) {
    for (std::size_t i = 0; i < masters.size(); ++i) {
      CAPTURE(i);
      CHECK(masters[i].same(want.masters[i]));
      CHECK(models[i].same(want.models[i]));
    }
  }
};

} // namespace

TEST_CASE("CUDA writes the model as the CPU does, and tells what saturates") {
  Weights want(7);
  for (std::size_t i = 0; i < want.masters.size(); i += 3) {
    auto& master = want.masters[i];
    if (master.size() > 0) {
      const std::array<double, 5> special{
          65520.0,
          -3.4e38,
          std::nan(""),
          HUGE_VAL,
          65519.0};
      master.set(master.size() - 1, special[i % special.size()]);
    }
  }
  auto got = want;
  const auto wanted = make_cpu_kernels()->write_model(want.items())->wait();
  for_schedules([&] {
    CHECK(
        make_cuda_kernels(c10::kCPU)->write_model(got.items())->wait() ==
        wanted);
    got.check_same(want);
  });
}

TEST_CASE("CUDA adopts what others wrote as the CPU does") {
  Weights want(8);
  for (std::size_t i = 0; i < want.models.size(); ++i) {
    if (want.models[i].size() > 4) {
      want.models[i].set(2, std::nan(""));
      want.masters[i].set(2, std::nan(""));
      want.models[i].set(3, -0.0);
      want.masters[i].set(3, 0.0);
      want.models[i].set(4, HUGE_VAL);
      want.masters[i].set(4, 65520.0);
    }
  }
  auto got = want;
  make_cpu_kernels()->adopt_model(want.items());
  make_cuda_kernels(c10::kCPU)->adopt_model(got.items());
  got.check_same(want);
}

// ---- update rules ----

namespace {

struct Update {
  struct Entry {
    Buffer gradient;
    Buffer weight;
    Buffer model;
    std::vector<Buffer> tensors;
    std::array<double, 2> wide_counters;
    std::array<float, 2> counters;
    bool has_model;
    bool unscale;
    bool fresh;
    bool wide_counter;
  };
  std::vector<std::unique_ptr<Entry>> entries;

  Update() = default;
  Update(const Update& other) {
    for (const auto& entry : other.entries) {
      entries.push_back(std::make_unique<Entry>(*entry));
    }
  }

  void add(
      Random& random,
      std::int64_t n,
      ScalarType gradient_type,
      ScalarType weight_type,
      ScalarType model_type,
      std::int64_t position) {
    auto entry = std::make_unique<Entry>(Entry{
        Buffer(gradient_type, n, position % 5 == 0 ? 1 : 0),
        Buffer(weight_type, n, position % 7 == 0 ? 3 : 0),
        Buffer(
            model_type == ScalarType::Undefined ? ScalarType::Half : model_type,
            n,
            position % 3 == 0 ? 5 : 0),
        {},
        {3.0, 0.7},
        {3.0F, 0.7F},
        model_type != ScalarType::Undefined,
        gradient_type != weight_type || position % 2 == 0,
        false,
        position % 4 == 0});
    entry->unscale = entry->unscale && weight_type == ScalarType::Float;
    random.fill(entry->gradient);
    random.fill(entry->weight);
    for (std::size_t t = 0; t < UpdateRule::kMostTensors; ++t) {
      auto& tensor = entry->tensors.emplace_back(
          weight_type,
          n,
          position % 6 == 0 ? 2 : 0);
      for (std::int64_t i = 0; i < n; ++i) {
        tensor.set(i, std::fabs(random.value()));
      }
    }
    entries.push_back(std::move(entry));
  }

  std::vector<UpdateItem> items(
      const UpdateRule& rule,
      const std::vector<double>& options) {
    std::vector<UpdateItem> list;
    for (auto& entry : entries) {
      UpdateItem item{};
      item.gradient = entry->gradient.data();
      item.weight = entry->weight.data();
      item.model = entry->has_model ? entry->model.data() : nullptr;
      for (std::size_t t = 0; t < rule.tensors.size(); ++t) {
        item.tensors[t] =
            rule.uses(options.data(), t) ? entry->tensors[t].data() : nullptr;
      }
      for (std::size_t i = 0; i < rule.counters.size(); ++i) {
        item.counters[i] = entry->wide_counter
            ? CounterMemory{&entry->wide_counters[i], false}
            : CounterMemory{&entry->counters[i], true};
      }
      item.numel = entry->weight.size();
      item.gradient_type = entry->gradient.type();
      item.weight_type = entry->weight.type();
      item.model_type =
          entry->has_model ? entry->model.type() : ScalarType::Undefined;
      item.unscale = entry->unscale;
      item.fresh = entry->fresh;
      list.push_back(item);
    }
    return list;
  }

  void check_same(Update& want) {
    for (std::size_t i = 0; i < entries.size(); ++i) {
      CAPTURE(i);
      auto& a = *entries[i];
      auto& b = *want.entries[i];
      CHECK(a.gradient.same(b.gradient));
      CHECK(a.weight.same(b.weight));
      CHECK(a.model.same(b.model));
      for (std::size_t t = 0; t < a.tensors.size(); ++t) {
        CHECK(a.tensors[t].same(b.tensors[t]));
      }
      for (std::size_t c = 0; c < 2; ++c) {
        CHECK(same_bits(a.counters[c], b.counters[c]));
        CHECK(same_bits(a.wide_counters[c], b.wide_counters[c]));
      }
    }
  }
};

Update all_kinds() {
  Random random(9);
  Update all;
  std::int64_t position = 0;
  for (const auto n : kLengths) {
    for (const auto gradient : kTypes) {
      for (const auto model :
           {ScalarType::Half,
            ScalarType::BFloat16,
            ScalarType::Float,
            ScalarType::Double,
            ScalarType::Undefined}) {
        if (position % 3 == n % 3) { // a third of the combinations
          all.add(random, n, gradient, ScalarType::Float, model, position);
        }
        ++position;
      }
    }
    all.add(
        random,
        n,
        ScalarType::Double,
        ScalarType::Double,
        ScalarType::Undefined,
        position++);
  }
  return all;
}

// Options that turn every part of a rule on, or as many as may be off.
std::vector<double> options_of(const UpdateRule& rule, bool all) {
  std::vector<double> values;
  for (const auto name : rule.options) {
    double value = all ? 1.0 : 0.0; // switches
    if (name == "lr") {
      value = 0.01;
    } else if (name == "betas[0]") {
      value = 0.9;
    } else if (name == "betas[1]" || name == "alpha") {
      value = 0.99;
    } else if (name == "eps") {
      value = 1e-8;
    } else if (name == "momentum_decay") {
      value = 0.004;
    } else if (
        name != "maximize" && !name.ends_with("d_weight_decay") &&
        (name.ends_with("decay") || name.ends_with("mentum") ||
         name == "dampening" || name == "initial_accumulator_value")) {
      value = all ? 0.25 : 0.0;
    }
    values.push_back(value);
  }
  return values;
}

} // namespace

TEST_CASE("CUDA runs every rule on every kind of parameter as the CPU does") {
  const Update before = all_kinds();
  for (const auto& rule : update_rules()) {
    CAPTURE(rule.name);
    for (const bool all : {false, true}) {
      RuleOptions options;
      options.values = options_of(rule, all);
      options.resolve(rule);
      for (const std::size_t count : {3, 2, 1, 0}) {
        if (kWatched && (count != 2 || !all)) {
          continue;
        }
        CAPTURE(count);
        const std::vector<double> numbers{0x1p-4, 1.0 / 3.0, 0.7};
        std::vector<FactorSource> factors;
        std::vector<FactorSource> on_device;
        for (std::size_t f = 0; f < count; ++f) {
          factors.push_back({numbers[f]});
          on_device.push_back({1.0, &numbers[f]});
        }
        Update want = before;
        Update got = before;
        auto items = want.items(rule, options.values);
        const auto wanted = make_cpu_kernels()
                                ->update(rule, items, options, factors, nullptr)
                                ->wait();
        items = got.items(rule, options.values);
        const float go_on = 0.0F;
        cuda_on_host::set_schedule(count);
        CHECK(
            make_cuda_kernels(c10::kCPU)
                ->update(rule, items, options, on_device, &go_on)
                ->wait() == wanted);
        got.check_same(want);
      }
    }
  }
  cuda_on_host::set_schedule(0);
}

TEST_CASE("a set flag keeps an update from changing anything") {
  const Update before = all_kinds();
  for (const auto& rule : update_rules()) {
    RuleOptions options;
    options.values = options_of(rule, true);
    options.resolve(rule);
    for (const float flag : {1.0F, 2.0F, -1.0F}) {
      if (kWatched && flag != 1.0F) {
        continue;
      }
      for (const bool cuda : {false, true}) {
        Update want = before;
        Update got = before;
        auto items = got.items(rule, options.values);
        const auto kernels =
            cuda ? make_cuda_kernels(c10::kCPU) : make_cpu_kernels();
        CHECK(
            kernels->update(rule, items, options, FactorSource{0.5}, &flag)
                ->wait() == std::vector<std::uint8_t>(items.size(), 0));
        got.check_same(want);
      }
    }
  }
}

TEST_CASE("a weight that outgrows the model is told by its item") {
  const auto& rule = *find_update_rule("torch.optim.sgd.SGD");
  RuleOptions options;
  options.values = options_of(rule, false);
  options.resolve(rule);
  Random random(10);
  Update want;
  for (const auto n : {1, 9, 0, 4100, 2048}) {
    want.add(
        random,
        n,
        ScalarType::Half,
        ScalarType::Float,
        ScalarType::Half,
        n);
  }
  want.entries[1]->weight.set(8, 70000.0);
  want.entries[3]->weight.set(4097, -70000.0);
  auto items = want.items(rule, options.values);
  CHECK(
      make_cuda_kernels(c10::kCPU)
          ->update(rule, items, options, FactorSource{0.5}, nullptr)
          ->wait() == std::vector<std::uint8_t>{0, 1, 0, 1, 0});
}

TEST_CASE("SGD's first step fills its buffer, by itself alone") {
  const auto& rule = *find_update_rule("torch.optim.sgd.SGD");
  RuleOptions options;
  options.values = options_of(rule, true);
  options.resolve(rule);
  Random random(11);
  Update want;
  for (const auto n : {1, 9, 4100}) {
    want.add(
        random,
        n,
        ScalarType::Float,
        ScalarType::Float,
        ScalarType::Half,
        n);
    want.entries.back()->fresh = n != 9;
  }
  Update got = want;
  auto items = want.items(rule, options.values);
  make_cpu_kernels()->update(rule, items, options, {}, nullptr);
  items = got.items(rule, options.values);
  make_cuda_kernels(c10::kCPU)->update(rule, items, options, {}, nullptr);
  got.check_same(want);
}

// ---- decisions ----

TEST_CASE("CUDA moves the scale by every policy as the host does") {
  const auto cuda = make_cuda_kernels(c10::kCPU);
  Random random(13);
  for (const auto& name : scale_policy_names()) {
    CAPTURE(name);
    auto options = scale_policy(name);
    options.init_scale = 64.0;
    options.scale_window = 3.0;
    // A device raises nothing; what else there is to these two stays.
    options.raise_at_floor = false;
    options.error_scale = 0.0;
    options.tolerance = name == "fairseq" ? 0.4 : 0.0;
    DynamicLossScaler want(options);
    auto got = want.state();
    StepCounts counts;
    for (int i = 0; i < 300; ++i) {
      const bool overflow = random.below(4) == 0;
      Buffer source(ScalarType::Float, 4);
      for (int j = 0; j < 4; ++j) {
        source.set(j, 0.5);
      }
      source.set(2, overflow ? HUGE_VAL : 0.5);
      cuda->take_gradients(
          GradientItem{
              source.data(),
              nullptr,
              4,
              ScalarType::Float,
              ScalarType::Float,
              true},
          {1.0});
      cuda->end_iteration(ScaleRule{options, true}, true, &got, &counts);
      want.update_scale(overflow);
      REQUIRE(got.cur_scale == want.state().cur_scale);
      REQUIRE(got.cur_hysteresis == want.state().cur_hysteresis);
      REQUIRE(got.last_rescale_iter == want.state().last_rescale_iter);
      REQUIRE(
          got.overflows_since_rescale == want.state().overflows_since_rescale);
      REQUIRE(counts.last.scale_after == got.cur_scale);
      REQUIRE((overflow || counts.last.norm == 1.0));
    }
  }
}

TEST_CASE("CUDA clips and ends iterations with the arithmetic of the host") {
  const auto cpu = make_cpu_kernels();
  const auto cuda = make_cuda_kernels(c10::kCPU);
  DynamicLossScalerOptions rule_options;
  rule_options.init_scale = 16.0;
  rule_options.scale_window = 3.0;
  rule_options.min_scale = 4.0;
  rule_options.delayed_shift = 2;
  const ScaleRule rule{rule_options, true};
  DynamicLossScaleState want{16.0, 0, -1, 2};
  auto got = want;
  StepCounts want_counts;
  StepCounts got_counts;
  Random random(12);
  for (int i = 0; i < 200; ++i) {
    Buffer source(ScalarType::Float, 9);
    random.fill(source);
    const bool overflow = random.below(3) == 0;
    if (overflow) {
      source.set(random.below(9), HUGE_VAL);
    }
    for (auto* kernels : {cpu.get(), cuda.get()}) {
      kernels->take_gradients(
          GradientItem{
              source.data(),
              nullptr,
              9,
              ScalarType::Float,
              ScalarType::Float,
              true},
          {1.0});
    }
    for (const bool by_largest : {false, true}) {
      Clip a;
      Clip b;
      cpu->clip(true, by_largest, 0.5, &a);
      cuda->clip(true, by_largest, 0.5, &b);
      CHECK(b.norm == doctest::Approx(a.norm).epsilon(1e-6));
      CHECK(b.coefficient == doctest::Approx(a.coefficient).epsilon(1e-6));
      CHECK((b.norm == -1.0F) == overflow);
    }
    cpu->end_iteration(rule, true, &want, &want_counts);
    cuda->end_iteration(rule, true, &got, &got_counts);
    cpu->count_applied(true, &want_counts);
    cuda->count_applied(true, &got_counts);
    CHECK(got.cur_scale == want.cur_scale);
    CHECK(got.cur_iter == want.cur_iter);
    CHECK(got.last_overflow_iter == want.last_overflow_iter);
    CHECK(got.cur_hysteresis == want.cur_hysteresis);
    CHECK(got_counts.applied == want_counts.applied);
    CHECK(got_counts.skipped == want_counts.skipped);
    CHECK(got_counts.last.overflow == overflow);
    CHECK(got_counts.last.at_floor_after == want_counts.last.at_floor_after);
  }
  CHECK(want_counts.skipped > 30);
  CHECK(want_counts.applied > 30);
}
