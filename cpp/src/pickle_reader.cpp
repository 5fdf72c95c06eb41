#include "pickle_reader.h"

#include "dict_reader.h"

#include <fp16core/state_dict.h>

#include <ATen/ATen.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fp16core::detail {

namespace {

constexpr std::uint64_t kMostDimensions = 64;

enum class Op : std::uint8_t {
  kMark = '(',
  kStop = '.',
  kBinFloat = 'G',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersId = 'Q',
  kReduce = 'R',
  kBinUnicode = 'X',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kSetItems = 'u',
  kEmptyTuple = ')',
  kEmptyList = ']',
  kEmptyDict = '}',
  kProto = 0x80,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
};

// The classes that stand for the dtype of a storage.
constexpr std::array<std::pair<std::string_view, c10::ScalarType>, 12>
    kStorageClasses{{
        {"torch.BFloat16Storage", c10::kBFloat16},
        {"torch.BoolStorage", c10::kBool},
        {"torch.ByteStorage", c10::kByte},
        {"torch.CharStorage", c10::kChar},
        {"torch.ComplexDoubleStorage", c10::kComplexDouble},
        {"torch.ComplexFloatStorage", c10::kComplexFloat},
        {"torch.DoubleStorage", c10::kDouble},
        {"torch.FloatStorage", c10::kFloat},
        {"torch.HalfStorage", c10::kHalf},
        {"torch.IntStorage", c10::kInt},
        {"torch.LongStorage", c10::kLong},
        {"torch.ShortStorage", c10::kShort},
    }};
constexpr std::string_view kUntypedStorage = "torch.storage.UntypedStorage";

constexpr std::array<std::string_view, 10> kFunctions{
    "__builtin__.set",
    "builtins.set",
    "collections.Counter",
    "collections.OrderedDict",
    "torch.Size",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
};
constexpr std::string_view kDevice = "torch.device";

std::optional<c10::ScalarType> storage_dtype(std::string_view name) {
  for (const auto& [storage, dtype] : kStorageClasses) {
    if (storage == name) {
      return dtype;
    }
  }
  return std::nullopt;
}

std::optional<c10::ScalarType> named_dtype(std::string_view name) {
  constexpr std::string_view kPrefix = "torch.";
  if (!name.starts_with(kPrefix)) {
    return std::nullopt;
  }
  const auto& dtypes = c10::getStringToDtypeMap();
  const auto found = dtypes.find(std::string(name.substr(kPrefix.size())));
  return found == dtypes.end() ? std::nullopt : std::optional(found->second);
}

bool is_function(std::string_view name) {
  return name == kDevice ||
      std::ranges::find(kFunctions, name) != kFunctions.end();
}

// What Python has and a state dict has not: a class or function, or a storage.
struct Reference final : torch::CustomClassHolder {
  explicit Reference(std::string name) : name(std::move(name)) {}

  std::string name;
  std::optional<c10::Storage> storage;
};

const Reference& reference(const c10::IValue& value) {
  return static_cast<const Reference&>(*value.toCapsule());
}

// What is known of a container besides its items.
struct Container {
  int depth = 1;
  // Whether it holds no reference.
  bool plain = true;
  // Whether it is an item itself. It may not change then: nothing can contain
  // itself, and depths are final.
  bool settled = false;
  // The keys and values of a dict that is not settled.
  std::vector<c10::IValue> entries;
};

// Returns whether a c10::Dict of `hashes` needs no more slots than 16 to 32
// times their number: to equal hashes it would answer with ever more.
bool spread(const std::vector<c10::IValue>& entries) {
  const auto slots = std::bit_ceil(entries.size() / 2) * 16;
  const auto bits = std::countr_zero(slots);
  std::vector<std::uint64_t> wanted;
  for (std::size_t i = 0; i < entries.size(); i += 2) {
    const std::uint64_t hash = c10::detail::DictKeyHash()(entries[i]);
    wanted.push_back((11400714819323198485u * hash) >> (64 - bits));
  }
  std::ranges::sort(wanted);
  std::uint64_t free = 0;
  for (const auto slot : wanted) {
    free = std::max(free, slot);
    if (free - slot >= static_cast<std::uint64_t>(bits)) {
      return false;
    }
    ++free;
  }
  return true;
}

class PickleReader {
 public:
  PickleReader(
      std::string_view pickle,
      const LoadStorage& load_storage,
      const std::string& owner)
      : pickle_(pickle), load_storage_(load_storage), owner_(owner) {}

  c10::IValue read() {
    for (;;) {
      const auto op = static_cast<Op>(number(1));
      if (op == Op::kStop) {
        auto value = pop();
        settle(value);
        require_plain(value);
        return value;
      }
      step(op);
    }
  }

 private:
  using Values = std::vector<c10::IValue>;

  [[noreturn]] void damaged(const std::string& what) const {
    TORCH_CHECK(
        false,
        owner_,
        " must be a complete checkpoint, but got ",
        what,
        " at byte ",
        position_,
        " of its pickle");
  }

  [[noreturn]] void not_plain(std::string what) const {
    constexpr std::size_t kLongest = 100;
    what.resize(std::min(what.size(), kLongest));
    for (auto& letter : what) {
      if (letter < ' ' || letter > '~') {
        letter = '?';
      }
    }
    TORCH_CHECK(false, owner_, " must hold plain data, but got ", what);
  }

  // Bytes.

  std::string_view bytes(std::uint64_t count) {
    if (count > pickle_.size() - position_) {
      damaged("an end");
    }
    const auto found = pickle_.substr(position_, count);
    position_ += count;
    return found;
  }

  std::uint64_t number(int size) {
    std::uint64_t value = 0;
    int shift = 0;
    for (const char byte : bytes(size)) {
      value |= std::uint64_t{static_cast<std::uint8_t>(byte)} << shift;
      shift += 8;
    }
    return value;
  }

  std::int64_t signed_number(int size) {
    const int unused = 64 - 8 * size;
    return size == 0
        ? 0
        : static_cast<std::int64_t>(number(size) << unused) >> unused;
  }

  double big_endian_double() {
    std::uint64_t bits = 0;
    for (const char byte : bytes(8)) {
      bits = bits << 8 | static_cast<std::uint8_t>(byte);
    }
    return std::bit_cast<double>(bits);
  }

  std::string line() {
    const auto end = pickle_.find('\n', position_);
    if (end == std::string_view::npos) {
      damaged("an end");
    }
    const auto found = bytes(end - position_);
    ++position_;
    return std::string(found);
  }

  // The stack.

  void push(c10::IValue value) { stack_.push_back(std::move(value)); }

  void push_container(c10::IValue value, Container container = {}) {
    containers_[value.internalToPointer()] = std::move(container);
    push(std::move(value));
  }

  // Returns how many values there are above the last mark.
  std::size_t available() const {
    return stack_.size() - (marks_.empty() ? 0 : marks_.back());
  }

  c10::IValue& top() {
    if (available() == 0) {
      damaged("too few values");
    }
    return stack_.back();
  }

  c10::IValue pop() {
    auto value = std::move(top());
    stack_.pop_back();
    return value;
  }

  Values pop(std::size_t count) {
    if (available() < count) {
      damaged("too few values");
    }
    const auto first = stack_.end() - static_cast<std::ptrdiff_t>(count);
    Values values(
        std::make_move_iterator(first),
        std::make_move_iterator(stack_.end()));
    stack_.erase(first, stack_.end());
    return values;
  }

  Values pop_mark() {
    if (marks_.empty()) {
      damaged("too few marks");
    }
    auto values = pop(available());
    marks_.pop_back();
    return values;
  }

  void put(std::uint64_t index) {
    if (index > memo_.size()) {
      damaged("a wrong memo");
    }
    if (index == memo_.size()) {
      memo_.push_back(top());
    } else {
      memo_[index] = top();
    }
  }

  void get(std::uint64_t index) {
    if (index >= memo_.size()) {
      damaged("a wrong memo");
    }
    push(memo_[index]);
  }

  // Containers.

  Container* container(const c10::IValue& value) {
    return value.isList() || value.isTuple() || value.isGenericDict()
        ? &containers_.at(value.internalToPointer())
        : nullptr;
  }

  // Makes `value` unchangeable and returns how deep it is.
  int settle(const c10::IValue& value) {
    auto* known = container(value);
    if (known == nullptr) {
      return 0;
    }
    if (!known->settled && !known->entries.empty()) {
      if (!spread(known->entries)) {
        damaged("keys that collide");
      }
      const auto dict = value.toGenericDict();
      for (std::size_t i = 0; i < known->entries.size(); i += 2) {
        dict.insert_or_assign(known->entries[i], known->entries[i + 1]);
      }
      known->entries = {};
    }
    known->settled = true;
    return known->depth;
  }

  void settle(Container& into, const Values& items) {
    for (const auto& item : items) {
      into.depth = std::max(into.depth, settle(item) + 1);
    }
    if (into.settled || into.depth > kDeepestValue) {
      damaged(into.settled ? "a cycle" : "too deep a nesting");
    }
  }

  void require_plain(const c10::IValue& value) {
    if (value.isCapsule()) {
      not_plain("a " + reference(value).name);
    }
    const auto* known = container(value);
    if (known != nullptr && !known->plain) {
      for (const auto& item : value.toTupleRef().elements()) {
        require_plain(item);
      }
    }
  }

  void push_tuple(Values items) {
    Container known;
    settle(known, items);
    for (const auto& item : items) {
      const auto* inner = container(item);
      known.plain = known.plain && !item.isCapsule() &&
          (inner == nullptr || inner->plain);
    }
    push_container(
        c10::ivalue::Tuple::create(std::move(items)),
        std::move(known));
  }

  void push_list() {
    push_container(c10::impl::GenericList(c10::AnyType::get()));
  }
  void push_dict() { push_container(make_state_dict()); }

  void append(const Values& items) {
    const auto& list = top();
    if (!list.isList()) {
      damaged("items of no list");
    }
    settle(*container(list), items);
    for (const auto& item : items) {
      require_plain(item);
      list.toList().push_back(item);
    }
  }

  void set_items(Values items) {
    const auto& dict = top();
    if (!dict.isGenericDict() || items.size() % 2 != 0) {
      damaged("items of no dict");
    }
    auto& known = *container(dict);
    settle(known, items);
    for (std::size_t i = 0; i < items.size(); ++i) {
      require_plain(items[i]);
      if (i % 2 == 0 && !items[i].isString() && !items[i].isInt()) {
        TORCH_CHECK(
            false,
            owner_,
            " must have strings or integers as keys, but got ",
            describe(items[i]));
      }
      known.entries.push_back(std::move(items[i]));
    }
  }

  // Classes, functions and storages.

  void push_global(const std::string& name) {
    if (named_dtype(name)) {
      push(name);
    } else if (
        is_function(name) || storage_dtype(name) || name == kUntypedStorage) {
      push(c10::IValue::make_capsule(c10::make_intrusive<Reference>(name)));
    } else {
      not_plain("a " + name);
    }
  }

  void push_storage() {
    const auto id = pop();
    if (!id.isTuple()) {
      damaged("a wrong storage");
    }
    const auto& items = id.toTupleRef().elements();
    if (items.size() != 5 || !items[0].isString() ||
        items[0].toStringRef() != "storage" || !items[1].isCapsule() ||
        !items[2].isString() || !items[3].isString() || !items[4].isInt()) {
      damaged("a wrong storage");
    }
    const auto& name = reference(items[1]).name;
    const auto dtype = storage_dtype(name);
    const auto count = items[4].toInt();
    std::int64_t nbytes = 0;
    if (is_function(name) || count < 0 ||
        __builtin_mul_overflow(
            count,
            dtype ? c10::elementSize(*dtype) : 1,
            &nbytes)) {
      damaged("a wrong storage");
    }
    auto storage = c10::make_intrusive<Reference>(name);
    storage->storage = load_storage_(
        {items[2].toStringRef(),
         items[3].toStringRef(),
         static_cast<std::uint64_t>(nbytes)});
    push(c10::IValue::make_capsule(std::move(storage)));
  }

  std::vector<std::int64_t> numbers(const c10::IValue& value) {
    std::vector<std::int64_t> found;
    if (value.isTuple()) {
      for (const auto& item : value.toTupleRef().elements()) {
        if (!item.isInt() || item.toInt() < 0) {
          damaged("a wrong tensor");
        }
        found.push_back(item.toInt());
      }
    }
    return found;
  }

  // The size, the strides and the offset come from the file: whether the
  // storage has all of them is reckoned without overflow.
  at::Tensor tensor(
      const c10::Storage& storage,
      c10::ScalarType dtype,
      c10::ArrayRef<c10::IValue> layout) {
    const auto sizes = numbers(layout[1]);
    const auto strides = numbers(layout[2]);
    if (!layout[0].isInt() || layout[0].toInt() < 0 || !layout[1].isTuple() ||
        !layout[2].isTuple() || sizes.size() != strides.size() ||
        sizes.size() > kMostDimensions) {
      damaged("a wrong tensor");
    }
    std::int64_t count = 1;
    std::int64_t last = layout[0].toInt();
    bool fits = true;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      std::int64_t step = 0;
      fits = fits && !__builtin_mul_overflow(count, sizes[d], &count) &&
          !__builtin_mul_overflow(
                 std::max<std::int64_t>(sizes[d] - 1, 0),
                 strides[d],
                 &step) &&
          !__builtin_add_overflow(last, step, &last);
    }
    const auto elements =
        storage.nbytes() / static_cast<std::uint64_t>(c10::elementSize(dtype));
    const bool empty = std::ranges::count(sizes, 0) != 0;
    if (!empty && (!fits || static_cast<std::uint64_t>(last) >= elements)) {
      damaged("a tensor larger than its storage");
    }
    const auto offset = empty ? 0 : layout[0].toInt();
    return at::empty({0}, at::device(storage.device()).dtype(dtype))
        .set_(storage, offset, sizes, strides);
  }

  at::Tensor rebuild_tensor(c10::ArrayRef<c10::IValue> arguments) {
    if (arguments.size() < 4 || !arguments[0].isCapsule() ||
        !reference(arguments[0]).storage) {
      damaged("a wrong tensor");
    }
    const auto& storage = reference(arguments[0]);
    auto dtype = storage_dtype(storage.name);
    auto metadata = arguments.size() > 6 ? arguments[6] : c10::IValue();
    if (metadata.isString()) {
      dtype = named_dtype(metadata.toStringRef());
      metadata = arguments.size() > 7 ? arguments[7] : c10::IValue();
    }
    if (!dtype || c10::isQIntType(*dtype) || c10::isBitsType(*dtype) ||
        *dtype == c10::ScalarType::Undefined) {
      damaged("a wrong tensor");
    }
    if (!metadata.isNone() &&
        (!metadata.isGenericDict() || !metadata.toGenericDict().empty())) {
      not_plain("a tensor with a conjugate or negative bit");
    }
    return tensor(*storage.storage, *dtype, arguments.slice(1, 3));
  }

  void reduce() {
    const auto arguments = pop();
    const auto function = pop();
    if (!arguments.isTuple() || !function.isCapsule()) {
      damaged("a wrong call");
    }
    const auto& items = arguments.toTupleRef().elements();
    const auto& name = reference(function).name;
    const auto is = [&](std::size_t size, auto kind) {
      return items.size() == size && (items[0].*kind)();
    };
    if (name.starts_with("torch._utils._rebuild_tensor")) {
      push(rebuild_tensor(
          c10::ArrayRef<c10::IValue>(items.begin(), items.end())));
    } else if (
        name == "torch._utils._rebuild_parameter" &&
        is(3, &c10::IValue::isTensor)) {
      push(items[0]);
    } else if (name.ends_with("_with_state") && is(4, &c10::IValue::isTensor)) {
      push(items[0]);
    } else if (name.starts_with("collections.") && items.size() == 0) {
      push_dict();
    } else if (
        (name == "collections.Counter" && is(1, &c10::IValue::isGenericDict)) ||
        (name.ends_with(".set") && is(1, &c10::IValue::isList)) ||
        (name == "torch.Size" && is(1, &c10::IValue::isTuple))) {
      push(items[0]);
    } else if (name == kDevice && is(1, &c10::IValue::isString)) {
      push(items[0]);
    } else if (
        name == kDevice && is(2, &c10::IValue::isString) && items[1].isInt()) {
      push(items[0].toStringRef() + ":" + std::to_string(items[1].toInt()));
    } else {
      damaged("a wrong call");
    }
  }

  void step(Op op) {
    switch (op) {
      case Op::kProto:
        number(1);
        break;
      case Op::kFrame:
        number(8);
        break;
      case Op::kMark:
        marks_.push_back(stack_.size());
        break;
      case Op::kNone:
        push({});
        break;
      case Op::kNewTrue:
      case Op::kNewFalse:
        push(op == Op::kNewTrue);
        break;
      case Op::kBinInt:
        push(signed_number(4));
        break;
      case Op::kBinInt1:
        push(static_cast<std::int64_t>(number(1)));
        break;
      case Op::kBinInt2:
        push(static_cast<std::int64_t>(number(2)));
        break;
      case Op::kLong1: {
        const auto size = number(1);
        TORCH_CHECK(
            size <= 8,
            owner_,
            " must hold integers of 64 bits, but got one of ",
            8 * size);
        push(signed_number(static_cast<int>(size)));
        break;
      }
      case Op::kBinFloat:
        push(big_endian_double());
        break;
      case Op::kBinUnicode:
        push(std::string(bytes(number(4))));
        break;
      case Op::kShortBinUnicode:
        push(std::string(bytes(number(1))));
        break;
      case Op::kBinUnicode8:
        push(std::string(bytes(number(8))));
        break;
      case Op::kEmptyTuple:
        push_tuple({});
        break;
      case Op::kTuple1:
        push_tuple(pop(1));
        break;
      case Op::kTuple2:
        push_tuple(pop(2));
        break;
      case Op::kTuple3:
        push_tuple(pop(3));
        break;
      case Op::kTuple:
        push_tuple(pop_mark());
        break;
      case Op::kEmptyList:
      case Op::kEmptySet:
        push_list();
        break;
      case Op::kAppend:
        append(pop(1));
        break;
      case Op::kAppends:
      case Op::kAddItems:
        append(pop_mark());
        break;
      case Op::kEmptyDict:
        push_dict();
        break;
      case Op::kSetItem:
        set_items(pop(2));
        break;
      case Op::kSetItems:
        set_items(pop_mark());
        break;
      case Op::kBinPut:
        put(number(1));
        break;
      case Op::kLongBinPut:
        put(number(4));
        break;
      case Op::kMemoize:
        put(memo_.size());
        break;
      case Op::kBinGet:
        get(number(1));
        break;
      case Op::kLongBinGet:
        get(number(4));
        break;
      case Op::kGlobal: {
        const auto module = line();
        push_global(module + "." + line());
        break;
      }
      case Op::kStackGlobal: {
        const auto names = pop(2);
        if (!names[0].isString() || !names[1].isString()) {
          damaged("a wrong name");
        }
        push_global(names[0].toStringRef() + "." + names[1].toStringRef());
        break;
      }
      case Op::kBinPersId:
        push_storage();
        break;
      case Op::kReduce:
        reduce();
        break;
      case Op::kBuild:
        // The attributes of an ordered dict, such as _metadata.
        pop();
        if (!top().isGenericDict()) {
          damaged("attributes of no dict");
        }
        break;
      default:
        damaged("an unknown operation");
    }
  }

  std::string_view pickle_;
  const LoadStorage& load_storage_;
  const std::string& owner_;
  std::uint64_t position_ = 0;
  Values stack_;
  std::vector<std::size_t> marks_;
  Values memo_;
  std::unordered_map<const void*, Container> containers_;
};

} // namespace

c10::IValue read_pickle(
    std::string_view pickle,
    const LoadStorage& load_storage,
    const std::string& owner) {
  return PickleReader(pickle, load_storage, owner).read();
}

} // namespace fp16core::detail
