#include <fp16core/checkpoint.h>

#include "dict_reader.h"
#include "parameter_text.h"
#include "pickle_reader.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string_view>
#include <unordered_map>

namespace fp16core {

namespace {

namespace fs = std::filesystem;

constexpr const char* kSave = "save_checkpoint: ";
constexpr const char* kByteOrder =
    std::endian::native == std::endian::little ? "little" : "big";

// Writing.

bool is_utf8(std::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    const auto byte = [&](std::size_t at) {
      return at < text.size() ? static_cast<std::uint8_t>(text[at]) : 0;
    };
    const int first = byte(i);
    const int more = first < 0x80        ? 0
        : first >= 0xc2 && first <= 0xdf ? 1
        : (first & 0xf0) == 0xe0         ? 2
        : first >= 0xf0 && first <= 0xf4 ? 3
                                         : -1;
    if (more < 0 || (first == 0xe0 && byte(i + 1) < 0xa0) ||
        (first == 0xf0 && byte(i + 1) < 0x90) ||
        (first == 0xf4 && byte(i + 1) > 0x8f)) {
      return false;
    }
    for (int k = 1; k <= more; ++k) {
      if ((byte(i + k) & 0xc0) != 0x80) {
        return false;
      }
    }
    i += 1 + more;
  }
  return true;
}

// Makes of any values those that the pickler writes as plain data: lists and
// dicts of no particular type, and detached tensors.
class Normalizer {
 public:
  // Raises `height` to that of the value: how many containers lie in another.
  c10::IValue normalize(
      const c10::IValue& value,
      const std::string& place,
      int& height) {
    if (value.isNone() || value.isBool() || value.isInt() || value.isDouble()) {
      return value;
    }
    if (value.isString()) {
      check_text(value.toStringRef(), place);
      return value;
    }
    if (value.isTensor()) {
      check(value.toTensor(), place);
    } else if (!value.isList() && !value.isTuple() && !value.isGenericDict()) {
      refuse(detail::describe(value), place);
    }
    const auto [found, is_new] = done_.try_emplace(value.internalToPointer());
    // References to elements outlast a rehash.
    auto& done = found->second;
    if (is_new) {
      check_depth(++depth_, place);
      int inner = 0;
      auto normal = value.isTensor() ? c10::IValue(plain(value.toTensor()))
          : value.isGenericDict()    ? dict(value.toGenericDict(), place, inner)
                                     : sequence(value, place, inner);
      --depth_;
      done = {std::move(normal), value.isTensor() ? 0 : inner + 1};
      check_depth(done.height, place);
    }
    TORCH_CHECK_VALUE(
        !done.value.isNone(),
        kSave,
        "a value must not contain itself, but got one that does at ",
        named(place));
    height = std::max(height, done.height);
    return done.value;
  }

 private:
  struct Done {
    // Nothing while its items are looked at.
    c10::IValue value;
    int height = 0;
  };

  static std::string named(const std::string& place) {
    return place.empty() ? "the top" : place;
  }

  static void check_depth(int depth, const std::string& place) {
    TORCH_CHECK_VALUE(
        depth <= detail::kDeepestValue,
        kSave,
        "values must be at most ",
        detail::kDeepestValue,
        " deep in one another, but got more at ",
        named(place));
  }

  static void check_text(const std::string& text, const std::string& place) {
    if (!is_utf8(text)) {
      refuse("a string that is not UTF-8", place);
    }
  }

  [[noreturn]] static void refuse(
      const std::string& what,
      const std::string& place) {
    TORCH_CHECK_TYPE(
        false,
        kSave,
        "a value must be nothing, a bool, an integer, a double, a string, a "
        "dense tensor, or a list, a tuple or a dict of those, but got ",
        what,
        " at ",
        named(place));
  }

  static void check(const at::Tensor& tensor, const std::string& place) {
    // Those that the pickler names as torch.load knows them.
    constexpr std::array kDtypes{
        c10::kBool,
        c10::kByte,
        c10::kChar,
        c10::kShort,
        c10::kInt,
        c10::kLong,
        c10::kHalf,
        c10::kBFloat16,
        c10::kFloat,
        c10::kDouble,
        c10::kComplexFloat,
        c10::kComplexDouble};
    if (!tensor.defined() || tensor.layout() != at::kStrided ||
        !tensor.has_storage() || !(tensor.is_cpu() || tensor.is_cuda())) {
      refuse(detail::describe(tensor), place);
    }
    TORCH_CHECK_TYPE(
        std::ranges::find(kDtypes, tensor.scalar_type()) != kDtypes.end(),
        kSave,
        "a tensor must be of bool, uint8, int8 to int64, float16 to float64, "
        "bfloat16, complex64 or complex128, but got ",
        detail::describe(tensor),
        " at ",
        place);
  }

  // A storage has one dtype in the file, that of the first tensor of it.
  at::Tensor plain(const at::Tensor& tensor) {
    auto detached = tensor.detach().resolve_conj().resolve_neg();
    const auto dtype = detached.scalar_type();
    const auto [found, is_new] =
        dtypes_.try_emplace(detached.storage().unsafeGetStorageImpl(), dtype);
    return found->second == dtype ? detached : detached.clone();
  }

  c10::IValue sequence(
      const c10::IValue& value,
      const std::string& place,
      int& height) {
    const auto items = value.isTuple() ? value.toTupleRef().elements().vec()
                                       : value.toListRef().vec();
    std::vector<c10::IValue> normal;
    for (std::size_t i = 0; i < items.size(); ++i) {
      normal.push_back(
          normalize(items[i], place + "[" + std::to_string(i) + "]", height));
    }
    if (value.isTuple()) {
      return c10::ivalue::Tuple::create(std::move(normal));
    }
    c10::impl::GenericList list(c10::AnyType::get());
    for (auto& item : normal) {
      list.push_back(std::move(item));
    }
    return list;
  }

  c10::IValue dict(
      const StateDict& values,
      const std::string& place,
      int& height) {
    auto normal = make_state_dict();
    for (const auto& entry : values) {
      const auto key = entry.key();
      TORCH_CHECK_TYPE(
          key.isString() || key.isInt(),
          kSave,
          "a dict must have strings or integers as keys, but got ",
          detail::describe(key),
          " at ",
          named(place));
      if (key.isString()) {
        check_text(key.toStringRef(), place);
      }
      const auto inner = key.isInt()
          ? place + "[" + std::to_string(key.toInt()) + "]"
          : (place.empty() ? "" : place + ".") + key.toStringRef();
      normal.insert(key, normalize(entry.value(), inner, height));
    }
    return normal;
  }

  int depth_ = 0;
  // By address, so that what is shared stays so.
  std::unordered_map<const void*, Done> done_;
  std::unordered_map<const void*, c10::ScalarType> dtypes_;
};

// A file that takes the place of another when it is complete.
class NewFile {
 public:
  explicit NewFile(const std::string& path) : path_(path), target_(path) {
    std::error_code error;
    const auto status = fs::status(target_, error);
    TORCH_CHECK(
        !fs::exists(status) || fs::is_regular_file(status),
        kSave,
        path_,
        " must be a file, but got ",
        fs::is_directory(status) ? "a directory" : "a device or a pipe");
    // The file that a link leads to is replaced, not the link.
    if (fs::is_symlink(fs::symlink_status(target_, error))) {
      target_ = fs::weakly_canonical(target_, error);
      check(!error, error.value());
    }
    std::random_device random;
    do {
      temporary_ = target_;
      temporary_ += ".tmp" + std::to_string(random());
      descriptor_ = ::open(
          temporary_.c_str(),
          O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
          0666);
    } while (descriptor_ < 0 && errno == EEXIST);
    check(descriptor_ >= 0, errno);
  }

  ~NewFile() {
    close();
    if (!temporary_.empty()) {
      ::unlink(temporary_.c_str());
    }
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  // Remembers a failure rather than to report it, since torch's writer, told of
  // one, throws again from its destructor.
  void write(const void* data, std::size_t size) {
    const auto* next = static_cast<const char*>(data);
    while (size > 0 && failure_ == 0) {
      const auto written = ::write(descriptor_, next, size);
      if (written > 0) {
        next += written;
        size -= static_cast<std::size_t>(written);
      } else if (written == 0 || errno != EINTR) {
        failure_ = written == 0 ? EIO : errno;
      }
    }
  }

  void replace_target() {
    check(failure_ == 0, failure_);
    check(::fsync(descriptor_) == 0, errno);
    check(close(), errno);
    check(::rename(temporary_.c_str(), target_.c_str()) == 0, errno);
    temporary_.clear();
    // That the name lasts takes the folder's own flush, which not every file
    // system offers.
    auto folder = target_.parent_path();
    const int opened = ::open(
        folder.empty() ? "." : folder.c_str(),
        O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (opened >= 0) {
      ::fsync(opened);
      ::close(opened);
    }
  }

 private:
  void check(bool succeeded, int error) const {
    TORCH_CHECK(
        succeeded,
        kSave,
        path_,
        " must be a file that can be written, but got: ",
        std::strerror(error));
  }

  bool close() {
    const int open = std::exchange(descriptor_, -1);
    return open < 0 || ::close(open) == 0;
  }

  std::string path_;
  fs::path target_;
  fs::path temporary_;
  int descriptor_ = -1;
  int failure_ = 0;
};

// Returns the bytes of a tensor's storage, on the host.
at::Tensor host_bytes(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  const auto element = static_cast<std::int64_t>(tensor.element_size());
  // Of a part of an element at the end, which no tensor reaches, nothing is
  // said in the pickle.
  const auto size =
      static_cast<std::int64_t>(storage.nbytes()) / element * element;
  return at::empty({0}, tensor.options().dtype(at::kByte))
      .set_(storage, 0, {size}, {1})
      .cpu();
}

void write_archive(NewFile& file, const c10::IValue& values) {
  std::string pickle;
  torch::jit::Pickler pickler(
      [&](const char* data, std::size_t size) { pickle.append(data, size); },
      nullptr,
      nullptr,
      nullptr,
      nullptr,
      /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(values);
  pickler.stop();
  caffe2::serialize::PyTorchStreamWriter writer(
      [&](const void* data, std::size_t size) {
        file.write(data, size);
        return size;
      });
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  writer.writeRecord("byteorder", kByteOrder, std::strlen(kByteOrder));
  std::size_t number = 0;
  for (const auto& tensor : pickler.tensorData()) {
    const auto bytes = host_bytes(tensor);
    writer.writeRecord(
        "data/" + std::to_string(number++),
        bytes.const_data_ptr(),
        static_cast<std::size_t>(bytes.numel()));
  }
  writer.writeEndOfFile();
}

// Reading.

class CheckpointFile {
 public:
  CheckpointFile(const std::string& path, std::optional<c10::Device> device)
      : owner_("load_checkpoint: " + path), device_(device) {
    std::error_code error;
    const auto status = fs::status(path, error);
    if (fs::exists(status) && !fs::is_regular_file(status)) {
      refuse(fs::is_directory(status) ? "a directory" : "a device or a pipe");
    }
    stream_.open(path, std::ios::binary | std::ios::ate);
    TORCH_CHECK(
        stream_.is_open(),
        owner_,
        " must be a file that can be read, but got: ",
        std::strerror(errno));
    unread_ = static_cast<std::uint64_t>(stream_.tellg());
    check_kind();
    open_archive();
  }

  StateDict read() {
    const auto pickle = record("data.pkl");
    const auto value = detail::read_pickle(
        {static_cast<const char*>(pickle.const_data_ptr()),
         static_cast<std::size_t>(pickle.numel())},
        [this](const auto& request) { return storage(request); },
        owner_);
    TORCH_CHECK(
        value.isGenericDict(),
        owner_,
        " must hold a dict, but got ",
        detail::describe(value));
    return value.toGenericDict();
  }

 private:
  [[noreturn]] void refuse(const std::string& got) const {
    TORCH_CHECK(
        false,
        owner_,
        " must be a file of save_checkpoint or torch.save, but got ",
        got);
  }

  [[noreturn]] void damaged(const std::string& got) const {
    TORCH_CHECK(false, owner_, " must be a complete checkpoint, but got ", got);
  }

  void check_kind() {
    constexpr std::string_view kZip = "PK\x03\x04";
    constexpr std::string_view kOldMagic =
        "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
    constexpr std::size_t kTarMagicAt = 257;
    std::array<char, kTarMagicAt + 5> buffer{};
    stream_.seekg(0);
    stream_.read(buffer.data(), buffer.size());
    stream_.clear();
    const std::string_view start(buffer.data(), buffer.size());
    if (unread_ == 0) {
      refuse("an empty file");
    }
    if (start.starts_with(kOldMagic)) {
      refuse("a file of torch before 1.6, which a newer torch can save again");
    }
    if (start.substr(kTarMagicAt) == "ustar") {
      refuse("a tar archive");
    }
    if (start.front() == '\x80') {
      refuse("a bare pickle");
    }
    if (!start.starts_with(kZip)) {
      refuse("another kind of file");
    }
  }

  void open_archive() {
    try {
      archive_ =
          std::make_unique<caffe2::serialize::PyTorchStreamReader>(&stream_);
    } catch (const std::exception&) {
      damaged("an archive that is cut off, damaged or not of torch");
    }
    if (archive_->hasRecord("constants.pkl")) {
      refuse(
          "a TorchScript archive, which torch.jit.save and, in C++, "
          "torch::save write");
    }
    if (!archive_->hasRecord("data.pkl")) {
      refuse("an archive without data.pkl");
    }
    if (archive_->hasRecord("byteorder")) {
      const auto bytes = record("byteorder");
      const std::string_view order(
          static_cast<const char*>(bytes.const_data_ptr()),
          static_cast<std::size_t>(bytes.numel()));
      if (order != kByteOrder) {
        refuse("one of a machine of another byte order");
      }
    }
  }

  // Returns the bytes of a record. Together they are never more than the file,
  // so records that are compressed, or that overlap, cannot use up the memory.
  at::Tensor record(const std::string& name) {
    std::uint64_t size = 0;
    try {
      size = archive_->getRecordSize(name);
    } catch (const std::exception&) {
      damaged("one without its record " + name);
    }
    if (size > unread_) {
      damaged("a record " + name + " larger than the file");
    }
    unread_ -= size;
    auto bytes = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
    try {
      TORCH_CHECK(
          archive_->getRecord(name, bytes.mutable_data_ptr(), size) == size);
    } catch (const std::exception&) {
      damaged("a damaged record " + name);
    }
    return bytes;
  }

  c10::Device device_of(const std::string& location) const {
    if (device_) {
      return *device_;
    }
    std::optional<c10::Device> device;
    try {
      device = c10::Device(location);
    } catch (const c10::Error&) {
    }
    const int devices =
        at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
    TORCH_CHECK(
        device &&
            (device->is_cpu() ||
             (device->is_cuda() && device->index() < devices)),
        owner_,
        " must hold tensors of devices that are here, unless load_checkpoint "
        "is given a device such as torch::kCPU, but got one of ",
        location);
    return *device;
  }

  c10::Storage storage(const detail::StorageRequest& request) {
    auto found = storages_.find(request.key);
    if (found == storages_.end()) {
      const auto device = device_of(request.location);
      const auto bytes = record("data/" + request.key);
      found = storages_.emplace(request.key, bytes.to(device).storage()).first;
    }
    if (found->second.nbytes() != request.nbytes) {
      damaged("a record data/" + request.key + " of another size");
    }
    return found->second;
  }

  std::string owner_;
  std::optional<c10::Device> device_;
  std::ifstream stream_;
  std::uint64_t unread_ = 0;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> archive_;
  std::unordered_map<std::string, c10::Storage> storages_;
};

} // namespace

void save_checkpoint(
    const std::string& path,
    const std::vector<std::pair<std::string, c10::IValue>>& values) {
  const auto dict = make_state_dict();
  for (const auto& [name, value] : values) {
    TORCH_CHECK_VALUE(
        dict.insert(name, value).second,
        kSave,
        "the names must differ, but got two of '",
        name,
        "'");
  }
  save_checkpoint(path, dict);
}

void save_checkpoint(const std::string& path, const StateDict& values) {
  int height = 0;
  const auto plain = Normalizer().normalize(values, "", height);
  NewFile file(path);
  write_archive(file, plain);
  file.replace_target();
}

StateDict load_checkpoint(
    const std::string& path,
    std::optional<c10::Device> device) {
  return CheckpointFile(path, device).read();
}

} // namespace fp16core
