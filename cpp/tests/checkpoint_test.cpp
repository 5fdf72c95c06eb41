// Checkpoint files: round trips, Python's files, and files that are damaged or
// something else.

#include "oracle.h"

#include <fp16core/checkpoint.h>

#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>

#include <doctest.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

using namespace fp16core;
using fp16core::test::error_of;
using namespace std::string_literals;

namespace {

namespace fs = std::filesystem;
using Values = std::vector<std::pair<std::string, c10::IValue>>;

// A folder that is gone at the end of the test.
class Folder {
 public:
  Folder() {
    auto name = (fs::temp_directory_path() / "checkpoint-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const {
    return (path_ / name).string();
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(path_)) {
      all.push_back(entry.path().filename().string());
    }
    return all;
  }

 private:
  fs::path path_;
};

std::string contents(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

struct Record {
  std::string name;
  std::string bytes;
  bool compress = false;
};

void write_archive(
    const std::string& path,
    const std::vector<Record>& records) {
  caffe2::serialize::PyTorchStreamWriter writer(path);
  for (const auto& record : records) {
    writer.writeRecord(
        record.name,
        record.bytes.data(),
        record.bytes.size(),
        record.compress);
  }
  writer.writeEndOfFile();
}

std::string python(const std::string& name) {
  return FP16CORE_TEST_DATA "/checkpoints/" + name;
}

// Returns the error without "load_checkpoint: PATH must ".
std::string load_error(
    const std::string& path,
    std::optional<c10::Device> device = std::nullopt) {
  const auto text =
      error_of<c10::Error>([&] { load_checkpoint(path, device); });
  const auto start = "load_checkpoint: " + path + " must ";
  CHECK(text.starts_with(start));
  return text.substr(std::min(start.size(), text.size()));
}

template <typename Error = c10::TypeError>
std::string save_error(const c10::IValue& value) {
  const Folder folder;
  const auto text = error_of<Error>(
      [&] { save_checkpoint(folder / "a", Values{{"model", value}}); });
  CHECK(folder.names().empty());
  return text;
}

c10::IValue list(const std::vector<c10::IValue>& items) {
  c10::impl::GenericList values(c10::AnyType::get());
  for (const auto& item : items) {
    values.push_back(item);
  }
  return values;
}

StateDict round_trip(const Values& values) {
  const Folder folder;
  save_checkpoint(folder / "a", values);
  return load_checkpoint(folder / "a");
}

} // namespace

TEST_CASE("a checkpoint returns values of every kind") {
  auto inner = make_state_dict();
  inner.insert(-3, "three");
  inner.insert("list", list({1, list({}), c10::IValue()}));
  c10::Dict<std::string, std::int64_t> typed;
  typed.insert("x", 5);
  const auto loaded = round_trip(
      {{"none", {}},
       {"true", true},
       {"false", false},
       {"small", 7},
       {"negative", -70000},
       {"large", std::int64_t{1} << 40},
       {"smallest", std::numeric_limits<std::int64_t>::min()},
       {"double", 0.1},
       {"string", "h\u00e9llo"},
       {"text", std::string(70000, 'x')},
       {"dict", inner},
       {"tuple", c10::ivalue::Tuple::create({c10::IValue(1), "a"})},
       {"integers", c10::List<std::int64_t>({1, std::int64_t{1} << 33})},
       {"bools", c10::List<bool>({true})},
       {"doubles", c10::List<double>({0.5})},
       {"typed", typed}});
  CHECK(loaded.at("none").isNone());
  CHECK(loaded.at("true").toBool());
  CHECK_FALSE(loaded.at("false").toBool());
  CHECK(loaded.at("small").toInt() == 7);
  CHECK(loaded.at("negative").toInt() == -70000);
  CHECK(loaded.at("large").toInt() == std::int64_t{1} << 40);
  CHECK(
      loaded.at("smallest").toInt() ==
      std::numeric_limits<std::int64_t>::min());
  CHECK(loaded.at("double").toDouble() == 0.1);
  CHECK(loaded.at("string").toStringRef() == "h\u00e9llo");
  CHECK(loaded.at("text").toStringRef().size() == 70000);
  const auto dict = loaded.at("dict").toGenericDict();
  CHECK(dict.at(-3).toStringRef() == "three");
  CHECK(dict.at("list").toListRef().size() == 3);
  CHECK(dict.at("list").toListRef()[2].isNone());
  CHECK(loaded.at("tuple").toTupleRef().elements()[1].toStringRef() == "a");
  CHECK(loaded.at("integers").toListRef()[1].toInt() == std::int64_t{1} << 33);
  CHECK(loaded.at("bools").toListRef()[0].toBool());
  CHECK(loaded.at("doubles").toListRef()[0].toDouble() == 0.5);
  CHECK(loaded.at("typed").toGenericDict().at("x").toInt() == 5);
  std::vector<std::string> names;
  for (const auto& entry : loaded) {
    names.push_back(entry.key().toStringRef());
  }
  CHECK(names.front() == "none");
  CHECK(names.back() == "typed");
}

TEST_CASE("a checkpoint returns tensors of every dtype and layout") {
  const auto base = at::arange(12, at::kFloat);
  Values values{
      {"base", base},
      {"slice", base.slice(0, 3, 9, 2)},
      {"transposed", base.view({3, 4}).t()},
      {"expanded", base.slice(0, 2, 3).expand({2, 3})},
      {"scalar", at::full({}, 7)},
      {"empty", at::empty({0, 3})},
      {"beyond", at::zeros({5, 5}).slice(0, 5).slice(1, 3)},
      {"conjugate", at::full({2}, c10::complex<float>(1, 2)).conj()},
      {"parameter", at::ones({2}).set_requires_grad(true)},
      {"unaligned", base.view(at::kByte).slice(0, 1, 4)}};
  for (const auto type :
       {at::kBool,
        at::kByte,
        at::kChar,
        at::kShort,
        at::kInt,
        at::kLong,
        at::kHalf,
        at::kBFloat16,
        at::kDouble,
        at::kComplexFloat,
        at::kComplexDouble}) {
    values.emplace_back(c10::toString(type), at::arange(3).to(type));
  }
  const auto loaded = round_trip(values);
  for (const auto& [name, value] : values) {
    CAPTURE(name);
    const auto expected = value.toTensor().detach();
    const auto found = loaded.at(name).toTensor();
    CHECK(found.dtype() == expected.dtype());
    CHECK(found.equal(expected));
    CHECK(found.strides() == expected.strides());
    CHECK_FALSE(found.requires_grad());
  }
  const auto found = loaded.at("base").toTensor();
  for (const auto* name : {"slice", "transposed", "expanded"}) {
    CHECK(loaded.at(name).toTensor().is_alias_of(found));
  }
  CHECK_FALSE(loaded.at("unaligned").toTensor().is_alias_of(found));
}

TEST_CASE("a checkpoint keeps what is shared, and each storage once") {
  const Folder folder;
  const auto tensor = at::zeros({1 << 18}, at::kFloat);
  auto shared = list({1});
  for (int i = 0; i < 200; ++i) {
    shared = list({shared, shared});
  }
  save_checkpoint(
      folder / "a",
      Values{
          {"a", tensor},
          {"b", tensor},
          {"c", tensor.view({2, -1})},
          {"d", shared}});
  CHECK(fs::file_size(folder / "a") < (1 << 20) + (1 << 15));
  const auto loaded = load_checkpoint(folder / "a");
  CHECK(loaded.at("a").is(loaded.at("b")));
  CHECK(loaded.at("a").toTensor().is_alias_of(loaded.at("c").toTensor()));
  const auto pair = loaded.at("d").toListRef();
  CHECK(pair[0].is(pair[1]));
}

TEST_CASE("a checkpoint that was read can be written again") {
  const Folder folder;
  save_checkpoint(folder / "a", load_checkpoint(python("training.pt")));
  save_checkpoint(folder / "b", load_checkpoint(folder / "a"));
  CHECK(contents(folder / "a") == contents(folder / "b"));
}

TEST_CASE("a checkpoint replaces a file at once and leaves nothing beside it") {
  const Folder folder;
  save_checkpoint(folder / "a", Values{{"x", 1}});
  save_checkpoint(folder / "a", Values{{"x", 2}});
  CHECK(load_checkpoint(folder / "a").at("x").toInt() == 2);
  CHECK(folder.names() == std::vector<std::string>{"a"});

  CHECK_THROWS_AS(
      save_checkpoint(folder / "a", Values{{"x", c10::Device("cpu")}}),
      c10::TypeError);
  CHECK(load_checkpoint(folder / "a").at("x").toInt() == 2);
  CHECK(folder.names() == std::vector<std::string>{"a"});
}

TEST_CASE("a checkpoint that finds no room leaves the old file") {
  const Folder folder;
  save_checkpoint(folder / "a", Values{{"x", 1}});
  rlimit old{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{100000, old.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  const auto error = error_of<c10::Error>([&] {
    save_checkpoint(folder / "a", Values{{"x", at::zeros({100000})}});
  });
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
  std::signal(SIGXFSZ, handler);
  CHECK(
      error ==
      "save_checkpoint: " + folder / "a" +
          " must be a file that can be written, but got: File too large");
  CHECK(folder.names() == std::vector<std::string>{"a"});
  CHECK(load_checkpoint(folder / "a").at("x").toInt() == 1);
}

TEST_CASE("a checkpoint goes where a link leads") {
  const Folder folder;
  save_checkpoint(folder / "a", Values{{"x", 1}});
  fs::create_symlink("a", folder / "link");
  save_checkpoint(folder / "link", Values{{"x", 2}});
  CHECK(fs::is_symlink(folder / "link"));
  CHECK(load_checkpoint(folder / "a").at("x").toInt() == 2);
  CHECK(load_checkpoint(folder / "link").at("x").toInt() == 2);
}

TEST_CASE("a checkpoint that cannot be written says why") {
  const Folder folder;
  const auto error = [](const std::string& path) {
    return error_of<c10::Error>(
        [&] { save_checkpoint(path, Values{{"x", 1}}); });
  };
  CHECK(
      error(folder / "no/a") ==
      "save_checkpoint: " + folder / "no/a" +
          " must be a file that can be written, but got: No such file or "
          "directory");
  fs::create_directory(folder / "b");
  CHECK(
      error(folder / "b") ==
      "save_checkpoint: " + folder / "b" +
          " must be a file, but got a directory");
  CHECK(
      error("/dev/null") ==
      "save_checkpoint: /dev/null must be a file, but got a device or a pipe");
  CHECK(folder.names() == std::vector<std::string>{"b"});
}

TEST_CASE("values that Python could not read are refused by their place") {
  const auto rule =
      "save_checkpoint: a value must be nothing, a bool, an integer, a double, "
      "a string, a dense tensor, or a list, a tuple or a dict of those, but "
      "got "s;
  CHECK(
      save_error(c10::Device("cpu")) ==
      rule + "a value of kind Device at model");
  auto dict = make_state_dict();
  dict.insert("weights", list({1, c10::Device("cpu")}));
  CHECK(
      save_error(dict) == rule + "a value of kind Device at model.weights[1]");
  CHECK(
      save_error(c10::List<c10::complex<double>>({{1, 2}})) ==
      rule + "a value of kind ComplexDouble at model[0]");
  CHECK(
      save_error(c10::ivalue::Tuple::create({c10::IValue(at::Tensor())})) ==
      rule + "an undefined tensor at model[0]");
  CHECK(
      save_error(at::ones({2}).to_sparse()) ==
      rule + "a Sparse float32 tensor of shape [2] at model");
  CHECK(
      save_error(at::empty({2}, at::device(at::kMeta))) ==
      rule + "a meta float32 tensor of shape [2] at model");
  CHECK(
      save_error(at::_nested_tensor_from_tensor_list({at::ones({2})})) ==
      rule + "a nested tensor at model");
  for (const auto* text :
       {"\xff",
        "\xc3",
        "\xc0\x80",
        "\xed\xa0\x80",
        "\xf4\x90\x80\x80",
        "\xe0\x80\x80",
        "\xf0\x80\x80\x80",
        "a\x80"}) {
    CHECK(save_error(text) == rule + "a string that is not UTF-8 at model");
  }
  CHECK(
      save_error(at::ones({2}).to(at::kUInt16)) ==
      "save_checkpoint: a tensor must be of bool, uint8, int8 to int64, "
      "float16 "
      "to float64, bfloat16, complex64 or complex128, but got a uint16 tensor "
      "of shape [2] at model");
  c10::Dict<bool, std::int64_t> bools;
  bools.insert(true, 1);
  CHECK(
      save_error(list({bools})) ==
      "save_checkpoint: a dict must have strings or integers as keys, but got "
      "True at model[0]");
  auto names = make_state_dict();
  names.insert(0.5, 1);
  CHECK(
      error_of<c10::TypeError>([&] { save_checkpoint("a", names); }) ==
      "save_checkpoint: a dict must have strings or integers as keys, but got "
      "0.5 at the top");
  CHECK(error_of<c10::ValueError>([] {
          save_checkpoint("a", Values{{"x", 1}, {"x", 2}});
        }) == "save_checkpoint: the names must differ, but got two of 'x'");
}

TEST_CASE("cycles and great depths are not written") {
  auto dict = make_state_dict();
  dict.insert("self", list({dict}));
  CHECK(
      save_error<c10::ValueError>(dict) ==
      "save_checkpoint: a value must not contain itself, but got one that does "
      "at model.self[0]");
  dict.clear();

  auto deep = list({});
  for (int i = 1; i < 499; ++i) {
    deep = list({deep});
  }
  CHECK(round_trip({{"deep", deep}}).at("deep").isList());
  const auto deeper = list({deep});
  CHECK(
      error_of<c10::ValueError>([&] {
        save_checkpoint("a", Values{{"x", deep}, {"model", deeper}});
      }) ==
      "save_checkpoint: values must be at most 500 deep in one another, but "
      "got more at the top");
  auto deepest = list({deeper});
  for (int i = 0; i < 10000; ++i) {
    deepest = list({deepest});
  }
  CHECK(
      save_error<c10::ValueError>(deepest).starts_with(
          "save_checkpoint: values must be at most 500 deep in one another, "
          "but "
          "got more at model[0][0]"));
}

TEST_CASE("Python's training is read") {
  const auto loaded = load_checkpoint(python("training.pt"));
  const auto model = loaded.at("model").toGenericDict();
  CHECK(model.size() == 10);
  const auto half = model.at("half_scale").toTensor();
  CHECK((half.scalar_type() == at::kHalf));
  CHECK((model.at("bfloat16_scale").toTensor().scalar_type() == at::kBFloat16));
  CHECK(model.at("head.weight")
            .toTensor()
            .is_alias_of(model.at("embedding.weight").toTensor()));
  CHECK(
      model.at("norm.num_batches_tracked").toTensor().item<std::int64_t>() ==
      1);
  const auto optimizer = loaded.at("optimizer").toGenericDict();
  const auto state = optimizer.at("state").toGenericDict().at(0);
  CHECK(
      (state.toGenericDict().at("exp_avg").toTensor().scalar_type() ==
       at::kHalf));
  const auto group = optimizer.at("param_groups").toListRef()[0];
  CHECK(group.toGenericDict().at("eps").toDouble() == 0.5);
  CHECK(group.toGenericDict().at("params").toListRef()[5].toInt() == 5);
  CHECK(loaded.at("scaler").toGenericDict().at("scale").toDouble() == 1024.0);
  const auto schedulers = loaded.at("schedulers").toGenericDict();
  CHECK(schedulers.at("cosine").toGenericDict().at("T_max").toInt() == 10);
  CHECK(
      schedulers.at("steps")
          .toGenericDict()
          .at("milestones")
          .toGenericDict()
          .at(2)
          .toInt() == 2);
  CHECK(
      schedulers.at("plateau").toGenericDict().at("best").toDouble() ==
      std::numeric_limits<double>::infinity());
}

TEST_CASE("Python's values are read, by every protocol") {
  for (const auto* protocol : {"2", "3", "4", "5"}) {
    CAPTURE(protocol);
    const auto loaded = load_checkpoint(python("values_"s + protocol + ".pt"));
    const auto items = [&](const char* name) {
      return loaded.at(name).toListRef().vec();
    };
    const auto tensor = [&](const char* name) {
      return loaded.at(name).toTensor();
    };
    CHECK(loaded.size() == 30);
    CHECK(loaded.at("none").isNone());
    CHECK(items("bools")[0].toBool());
    std::vector<std::int64_t> integers;
    for (const auto& item : items("integers")) {
      integers.push_back(item.toInt());
    }
    CHECK(
        integers ==
        std::vector<std::int64_t>{
            0,
            255,
            256,
            65536,
            -1,
            std::int64_t{1} << 31,
            std::int64_t{1} << 40,
            std::numeric_limits<std::int64_t>::min(),
            std::numeric_limits<std::int64_t>::max()});
    CHECK(items("doubles")[0].toDouble() == 0.1);
    CHECK(items("strings")[1].toStringRef() == "h\u00e9llo");
    CHECK(items("strings")[2].toStringRef().size() == 300);
    for (std::size_t size = 0; size < 5; ++size) {
      CHECK(items("tuples")[size].toTupleRef().size() == size);
    }
    CHECK(items("long").size() == 1500);
    CHECK(items("long")[1499].toInt() == 1499);
    CHECK(items("shared")[0].is(items("shared")[1]));
    CHECK(items("set")[0].toInt() == 7);
    const auto ordered = loaded.at("ordered").toGenericDict();
    CHECK(ordered.begin()->key().toStringRef() == "b");
    CHECK(loaded.at("counter").toGenericDict().at("a").toInt() == 2);
    CHECK(loaded.at("size").toTupleRef().elements()[1].toInt() == 3);
    CHECK(loaded.at("dtype").toStringRef() == "torch.float16");
    CHECK(items("devices")[1].toStringRef() == "cuda:1");
    const auto base = tensor("base");
    CHECK(base.equal(at::arange(12, at::kFloat)));
    CHECK(tensor("slice").equal(base.slice(0, 3, 7, 2)));
    CHECK(tensor("slice").is_alias_of(base));
    CHECK(tensor("transposed").equal(base.view({3, 4}).t()));
    CHECK(tensor("expanded").strides() == at::IntArrayRef({0, 0}));
    CHECK(tensor("scalar").item<std::int64_t>() == 7);
    CHECK(tensor("empty").sizes() == at::IntArrayRef({0, 2}));
    CHECK(tensor("half").equal(at::full({1}, 1.5, at::kHalf)));
    CHECK(tensor("bfloat16").equal(at::full({1}, 1.5, at::kBFloat16)));
    CHECK(tensor("double").item<double>() == 0.1);
    CHECK((tensor("bool").scalar_type() == at::kBool));
    CHECK(
        tensor("complex").item<c10::complex<float>>() ==
        c10::complex<float>(1, 2));
    CHECK((tensor("uint16").scalar_type() == at::kUInt16));
    CHECK((tensor("float8").scalar_type() == at::kFloat8_e4m3fn));
    CHECK(tensor("float8").to(at::kFloat).item<float>() == 1.5F);
    CHECK_FALSE(tensor("parameter").requires_grad());
    CHECK(loaded.at(3).toGenericDict().at(0).toStringRef() == "zero");
  }
}

TEST_CASE("what else Python writes is refused by name") {
  CHECK(load_checkpoint(python("attribute.pt"))
            .at("parameter")
            .toTensor()
            .equal(at::ones({2})));
  CHECK(
      load_error(python("defaultdict.pt")) ==
      "hold plain data, but got a collections.defaultdict");
  CHECK(
      load_error(python("integer.pt")) ==
      "hold integers of 64 bits, but got one of 72");
  CHECK(load_error(python("list.pt")) == "hold a dict, but got a list of 1");
  CHECK(
      load_error(python("module.pt")) ==
      "hold plain data, but got a torch.nn.modules.linear.Linear");
}

TEST_CASE("files of other kinds are refused by what they are") {
  const Folder folder;
  const auto rule = "be a file of save_checkpoint or torch.save, but got "s;
  CHECK(
      load_error(python("old.pt")) ==
      rule + "a file of torch before 1.6, which a newer torch can save again");
  CHECK(
      load_error(python("script.pt")) ==
      rule +
          "a TorchScript archive, which torch.jit.save and, in C++, "
          "torch::save write");
  CHECK(
      load_error(folder / "none") ==
      "be a file that can be read, but got: No such file or directory");
  CHECK(load_error(folder / "") == rule + "a directory");
  CHECK(load_error("/dev/zero") == rule + "a device or a pipe");
  REQUIRE(::mkfifo((folder / "fifo").c_str(), 0600) == 0);
  CHECK(load_error(folder / "fifo") == rule + "a device or a pipe");
  const auto of = [&](const std::string& text) {
    write(folder / "a", text);
    return load_error(folder / "a");
  };
  CHECK(of("") == rule + "an empty file");
  CHECK(of("{\"a\": 1}") == rule + "another kind of file");
  CHECK(of("\x80\x04]\x94.") == rule + "a bare pickle");
  CHECK(of(std::string(257, 'a') + "ustar") == rule + "a tar archive");
  CHECK(
      of("PK\x03\x04 and no more") ==
      "be a complete checkpoint, but got an archive that is cut off, damaged "
      "or "
      "not of torch");
  write_archive(folder / "a", {{"weights", "abc"}});
  CHECK(load_error(folder / "a") == rule + "an archive without data.pkl");
}

TEST_CASE("archives that lie are refused") {
  const Folder folder;
  const auto tensor = [](const std::string& key, const std::string& location) {
    const auto string = [](const std::string& text) {
      return std::string{'\x8c', static_cast<char>(text.size())} + text;
    };
    // A tensor of the first of four elements.
    return "}"s + string("x") + "ctorch._utils\n_rebuild_tensor_v2\n((" +
        string("storage") + "ctorch\nFloatStorage\n" + string(key) +
        string(location) + "K\x04tQK\x00K\x01\x85K\x01\x85\x89Nt"s + "Rs.";
  };
  const auto of = [&](const std::vector<Record>& records) {
    write_archive(folder / "a", records);
    return load_error(folder / "a", std::nullopt);
  };
  const std::string bytes(16, '\0');
  const auto rule = "be a complete checkpoint, but got "s;

  write_archive(
      folder / "a",
      {{"data.pkl", tensor("0", "cpu")}, {"data/0", bytes}});
  CHECK(load_checkpoint(folder / "a").at("x").toTensor().equal(at::zeros({1})));

  CHECK(
      of({{"data.pkl", tensor("1", "cpu")}, {"data/0", bytes}}) ==
      rule + "one without its record 'data/1'");
  CHECK(
      of({{"data.pkl", tensor("0", "cpu")}, {"data/0", bytes + "1"}}) ==
      rule + "a record 'data/0' of another size");
  CHECK(
      of({{"data.pkl", tensor("0", "cpu")}, {"data/0", ""}}) ==
      rule + "a record 'data/0' of another size");
  CHECK(
      of({{"data.pkl", "}."}, {"byteorder", "big"}}) ==
      "be a file of save_checkpoint or torch.save, but got one of a machine of "
      "another byte order");
  CHECK(of({{"data.pkl", "}"}}) == rule + "an end at byte 1 of its pickle");
  CHECK(of({{"data.pkl", ""}}) == rule + "an end at byte 0 of its pickle");
  CHECK(
      of({{"data.pkl", std::string(1 << 20, '('), true}}) ==
      rule + "a record 'data.pkl' larger than the file");
  CHECK(
      of({{"data.pkl", tensor("0", "cpu")},
          {"data/0", std::string(1 << 20, '\0'), true}}) ==
      rule + "a record 'data/0' larger than the file");

  const auto here =
      "hold tensors of devices that are here, unless load_checkpoint is given "
      "a "
      "device such as torch::kCPU, but got one of "s;
  for (const auto* location : {"cuda:99", "meta", "mps", "nonsense", ""}) {
    CHECK(
        of({{"data.pkl", tensor("0", location)}, {"data/0", bytes}}) ==
        here + "'" + location + "'");
    CHECK(load_checkpoint(folder / "a", c10::Device("cpu"))
              .at("x")
              .toTensor()
              .equal(at::zeros({1})));
  }
}

TEST_CASE("files that are cut off or have wrong bytes do no harm") {
  const Folder folder;
  save_checkpoint(
      folder / "a",
      Values{
          {"tensor", at::arange(6, at::kFloat).view({2, 3}).t()},
          {"list", c10::List<std::int64_t>({1, 2})}});
  const auto good = contents(folder / "a");
  for (std::size_t size = 0; size < good.size(); ++size) {
    write(folder / "b", good.substr(0, size));
    CHECK_THROWS_AS(load_checkpoint(folder / "b"), c10::Error);
  }
  std::mt19937 random(3);
  int refused = 0;
  for (int i = 0; i < 4000; ++i) {
    auto bad = good;
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
      bad[random() % bad.size()] = static_cast<char>(random());
    }
    write(folder / "b", bad);
    try {
      load_checkpoint(folder / "b");
    } catch (const c10::Error&) {
      ++refused;
    }
  }
  CHECK(refused > 0);
  CHECK(refused < 4000);
}
