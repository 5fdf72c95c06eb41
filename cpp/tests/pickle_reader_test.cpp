// The unpickler: every operation that it knows, and pickles made to harm.

#include "pickle_reader.h"
#include "oracle.h"

#include <ATen/ATen.h>

#include <doctest.h>

#include <cstring>
#include <random>

using namespace fp16core;
using fp16core::detail::read_pickle;
using fp16core::detail::StorageRequest;
using fp16core::test::error_of;
using namespace std::string_literals;

namespace {

// A storage of 0, 1, ..., 5 in float32, whatever is asked for.
c10::Storage six_floats(const StorageRequest& request) {
  static const auto tensor = at::arange(6, at::kFloat);
  TORCH_CHECK(request.nbytes == 24, "asked for ", request.nbytes, " bytes");
  return tensor.storage();
}

c10::IValue read(const std::string& pickle) {
  return read_pickle(pickle, six_floats, "load: x");
}

std::string refused(const std::string& pickle) {
  return error_of<c10::Error>([&] { read(pickle); });
}

std::string damaged(const std::string& what, std::size_t at) {
  return "load: x must be a complete checkpoint, but got " + what +
      " at byte " + std::to_string(at) + " of its pickle";
}

std::string repeat(const std::string& text, std::size_t times) {
  std::string all;
  for (std::size_t i = 0; i < times; ++i) {
    all += text;
  }
  return all;
}

std::string string(const std::string& text) {
  return std::string{'\x8c', static_cast<char>(text.size())} + text;
}

std::string long1(std::int64_t value) {
  std::string text = "\x8a\x08";
  for (int i = 0; i < 8; ++i) {
    text += static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i));
  }
  return text;
}

std::string storage(const std::string& count = "K\x06") {
  return std::string("(") + string("storage") + "ctorch\nFloatStorage\n" +
      string("0") + string("cpu") + count + "tQ";
}

// A tensor by _rebuild_tensor_v2, with whatever offset, size and strides.
std::string tensor(
    const std::string& layout,
    const std::string& of = storage()) {
  return std::string("ctorch._utils\n_rebuild_tensor_v2\n(") + of + layout +
      "\x89"
      "ccollections\nOrderedDict\n)RtR";
}

std::vector<std::int64_t> integers(const c10::IValue& value) {
  std::vector<std::int64_t> all;
  for (const auto& item : value.toListRef()) {
    all.push_back(item.toInt());
  }
  return all;
}

} // namespace

TEST_CASE("the unpickler reads numbers") {
  CHECK(read("\x80\x02K\xff.").toInt() == 255);
  CHECK(read("M\xff\xff.").toInt() == 65535);
  CHECK(read("J\xff\xff\xff\xff.").toInt() == -1);
  CHECK(read("J\x00\x00\x00\x80."s).toInt() == -2147483648);
  CHECK(read("\x8a\x00."s).toInt() == 0);
  CHECK(read("\x8a\x01\xff."s).toInt() == -1);
  CHECK(
      read("\x8a\x05\x00\x00\x00\x00\x01."s).toInt() == std::int64_t{1} << 32);
  for (const auto value :
       {std::numeric_limits<std::int64_t>::min(),
        std::numeric_limits<std::int64_t>::max()}) {
    CHECK(read(long1(value) + ".").toInt() == value);
  }
  CHECK(read("G\x3f\xe0\x00\x00\x00\x00\x00\x00."s).toDouble() == 0.5);
  CHECK(read("N.").isNone());
  CHECK(read("\x88.").toBool());
  CHECK_FALSE(read("\x89.").toBool());
}

TEST_CASE("the unpickler reads strings") {
  CHECK(read("X\x02\x00\x00\x00"s + "ab.").toStringRef() == "ab");
  CHECK(read("\x8c\x02"s + "ab.").toStringRef() == "ab");
  CHECK(
      read("\x8d\x02\x00\x00\x00\x00\x00\x00\x00"s + "ab.").toStringRef() ==
      "ab");
  CHECK(read("\x8c\x00."s).toStringRef().empty());
}

TEST_CASE("the unpickler reads containers") {
  CHECK(read(").").toTupleRef().size() == 0);
  CHECK(read("K\x01\x85.").toTupleRef().size() == 1);
  CHECK(read("K\x01K\x02\x86.").toTupleRef().size() == 2);
  CHECK(read("K\x01K\x02K\x03\x87.").toTupleRef().size() == 3);
  CHECK(read("(K\x01K\x02K\x03K\x04t.").toTupleRef().size() == 4);
  CHECK(
      integers(read(
          "](K\x01K\x02"
          "e.")) == std::vector<std::int64_t>{1, 2});
  CHECK(
      integers(read(
          "]K\x01"
          "aK\x02"
          "a.")) == std::vector<std::int64_t>{1, 2});
  CHECK(integers(read("\x8f(K\x01\x90.")) == std::vector<std::int64_t>{1});
  const auto dict =
      read("}(K\x01K\x02" + string("a") + "K\x03u" + string("b") + "Ns.")
          .toGenericDict();
  CHECK(dict.size() == 3);
  CHECK(dict.at(1).toInt() == 2);
  CHECK(dict.at("a").toInt() == 3);
  CHECK(dict.at("b").isNone());
}

TEST_CASE("the unpickler keeps what is shared") {
  for (const auto& pickle :
       {"]q\x00]q\x01K\x07"
        "a"
        "a"
        "h\x01"
        "a."s,
        "]r\x00\x00\x00\x00]r\x01\x00\x00\x00K\x07"
        "aaj\x01\x00\x00\x00"
        "a."s,
        "\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00]\x94]\x94K\x07"
        "aah\x01"
        "a."s}) {
    const auto list = read(pickle).toListRef().vec();
    REQUIRE(list.size() == 2);
    CHECK(list[0].is(list[1]));
    CHECK(integers(list[1]) == std::vector<std::int64_t>{7});
  }
}

TEST_CASE("the unpickler reads the classes of plain data") {
  const auto ordered = "ccollections\nOrderedDict\n)R";
  CHECK(
      read(
          ordered + string("a") + "K\x01s" + "}" + string("_metadata") + "Nsb.")
          .toGenericDict()
          .size() == 1);
  CHECK(
      read("ccollections\nCounter\n}K\x05K\x02s\x85R.")
          .toGenericDict()
          .at(5)
          .toInt() == 2);
  CHECK(
      read(
          "c__builtin__\nset\n](K\x05"
          "e\x85R.")
          .toListRef()
          .size() == 1);
  CHECK(
      read(
          "cbuiltins\nset\n](K\x05"
          "e\x85R.")
          .toListRef()
          .size() == 1);
  CHECK(read("ctorch\nSize\nK\x02K\x03\x86\x85R.").toTupleRef().size() == 2);
  CHECK(read("ctorch\nfloat16\n.").toStringRef() == "torch.float16");
  CHECK(
      read(string("torch") + string("bfloat16") + "\x93.").toStringRef() ==
      "torch.bfloat16");
  CHECK(
      read("ctorch\ndevice\n" + string("cpu") + "\x85R.").toStringRef() ==
      "cpu");
  CHECK(
      read("ctorch\ndevice\n" + string("cuda") + "K\x01\x86R.").toStringRef() ==
      "cuda:1");
}

TEST_CASE("the unpickler reads tensors") {
  // Offset 1, shape [2, 2], strides [3, 1].
  const auto layout = "K\x01K\x02K\x02\x86K\x03K\x01\x86";
  const auto expected = at::arange(6, at::kFloat).as_strided({2, 2}, {3, 1}, 1);
  const auto check = [&](const std::string& pickle) {
    const auto found = read(pickle + ".").toTensor();
    CHECK(found.equal(expected));
    CHECK(found.strides() == expected.strides());
    CHECK(found.storage_offset() == 1);
    CHECK_FALSE(found.requires_grad());
  };
  const auto hooks = "ccollections\nOrderedDict\n)R"s;
  check(tensor(layout));
  check("ctorch._utils\n_rebuild_tensor\n(" + storage() + layout + "tR");
  check(
      "ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + layout + "\x88" +
      hooks + "}tR");
  check(
      "ctorch._utils\n_rebuild_tensor_v3\n((" + string("storage") +
      "ctorch.storage\nUntypedStorage\n" + string("0") + string("cpu") +
      "K\x18tQ" + layout + "\x89" + hooks + "ctorch\nfloat32\ntR");
  check(
      "ctorch._utils\n_rebuild_parameter\n" + tensor(layout) + "\x88" + hooks +
      "\x87R");
  check(
      "ctorch._utils\n_rebuild_parameter_with_state\n(" + tensor(layout) +
      "\x88" + hooks + "}tR");

  const auto pair = read(
                        "]" + tensor(storage() + "q\x00"s + layout, "") + "a" +
                        tensor("h\x00"s + layout, "") + "a.")
                        .toListRef()
                        .vec();
  CHECK(pair.at(0).toTensor().is_alias_of(pair.at(1).toTensor()));
}

TEST_CASE("the unpickler reads tensors without elements") {
  const auto wild = long1(std::numeric_limits<std::int64_t>::max());
  const auto empty =
      read(tensor(wild + "K\x03K\x00\x86"s + wild + "K\x01\x86") + ".");
  CHECK(empty.toTensor().sizes() == at::IntArrayRef({3, 0}));
  CHECK(empty.toTensor().storage_offset() == 0);
  CHECK(read(tensor("K\x05))") + ".").toTensor().item<float>() == 5.0F);
}

TEST_CASE("the unpickler refuses pickles that are no such thing") {
  const auto check = [](const std::string& what, const std::string& pickle) {
    CAPTURE(pickle);
    CHECK(refused(pickle) == damaged(what, pickle.size()));
  };
  check("an end", "");
  check("an end", "N");
  check("an end", "X\x05\x00\x00\x00"s);
  check("an end", "\x8d" + repeat("\xff", 8));
  check("an end", "c");
  CHECK(refused("Xabc") == damaged("an end", 1));
  CHECK(refused("\x8c\x05" + "abc"s) == damaged("an end", 2));
  CHECK(refused("cos") == damaged("an end", 1));

  check("too few values", ".");
  check("too few values", "\x85");
  check("too few values", "N\x86");
  check("too few values", "N(\x85");
  check("too few values", "a");
  check("too few values", "Na");
  check("too few values", "K\x01s");
  check("too few values", "R");
  check("too few values", "Q");
  check("too few values", "b");
  check("too few values", "q\x00"s);
  check("too few values", "\x93");
  check("too few marks", "t");
  check("too few marks", "]e");

  check("a wrong memo", "h\x00"s);
  check("a wrong memo", "Nq\x01");
  check("a wrong memo", "Nr\xff\xff\xff\xff");
  check("a wrong memo", "j\xff\xff\xff\xff");

  check("items of no list", "NNa");
  check("items of no list", "}(Ne");
  check("items of no dict", "]NNs");
  check("items of no dict", "}(Nu");
  check("attributes of no dict", "]}b");
  check("a wrong name", "NN\x93");

  check("a text that is not UTF-8", "\x8c\x02\xc3\xff");
  check("an unknown operation", "\xff");
  check("an unknown operation", "I");
  check("an unknown operation", "0");
  check("an unknown operation", "i");
  check("an unknown operation", "o");
  check("an unknown operation", "\x81");
  CHECK(
      refused("\x8a\x09" + repeat("\xff", 9) + ".") ==
      "load: x must hold integers of 64 bits, but got one of 72");
}

TEST_CASE("the unpickler refuses everything but plain data") {
  const auto check = [](const std::string& name, const std::string& pickle) {
    CHECK(refused(pickle) == "load: x must hold plain data, but got a " + name);
  };
  check("os.system", "cos\nsystem\n(" + string("true") + "tR.");
  check("os.system", string("os") + string("system") + "\x93.");
  check("builtins.eval", "cbuiltins\neval\n.");
  check("torch.load", "ctorch\nload\n.");
  check("collections.defaultdict", "ccollections\ndefaultdict\n.");
  check("?[1m.x", "c\x1b[1m\nx\n.");
  check(repeat("m", 98), "c" + repeat("m", 200) + "\nx\n.");

  check("torch.Size", "ctorch\nSize\n.");
  check("torch.Size", "]ctorch\nSize\na.");
  check(
      "torch.Size",
      "]ctorch\nSize\n\x85\x85"
      "a.");
  check("torch.Size", "ctorch\nSize\n\x85.");
  check(
      "torch.Size",
      "}K\x01"
      "ctorch\nSize\ns.");
  check("torch.FloatStorage", storage() + ".");
  check(
      "tensor with a conjugate or negative bit",
      "ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + "K\x00))\x89N}"s +
          string("conj") + "\x88stR.");
}

TEST_CASE("the unpickler refuses keys that are neither strings nor integers") {
  const auto check = [](const std::string& key, const std::string& got) {
    CHECK(
        refused("}" + key + "Ns.") ==
        "load: x must have strings or integers as keys, but got " + got);
  };
  check("N", "None");
  check("\x88", "True");
  check("G\x3f\xe0\x00\x00\x00\x00\x00\x00"s, "0.5");
  check(")", "a tuple of 0");
  check("]", "a list of 0");
  check(tensor("K\x00))"s), "a float32 tensor of shape []");
}

TEST_CASE("the unpickler refuses calls with wrong arguments") {
  for (const auto* pickle :
       {"N)R",
        "ctorch\nSize\nNR",
        "ctorch\nSize\n)R",
        "ctorch\nSize\nN\x85R",
        "ctorch\ndevice\n)R",
        "ctorch\ndevice\nN\x85R",
        "ccollections\nOrderedDict\n]\x85R",
        "ccollections\nCounter\n]\x85R",
        "cbuiltins\nset\n)R",
        "ctorch._utils\n_rebuild_parameter\n)R",
        "ctorch._utils\n_rebuild_parameter\nNNN\x87R",
        "ctorch._utils\n_rebuild_parameter_with_state\n(NNNNtR",
        "ctorch\nFloatStorage\n)R"}) {
    CAPTURE(pickle);
    CHECK(refused(pickle) == damaged("a wrong call", std::strlen(pickle)));
  }
}

TEST_CASE("the unpickler refuses tensors that their storage does not hold") {
  const auto max = long1(std::numeric_limits<std::int64_t>::max());
  const auto large = long1(std::int64_t{1} << 62);
  const auto error = [](const std::string& pickle) {
    const auto text = refused(pickle + ".");
    return text.substr(0, text.find(" at byte"));
  };
  const auto larger =
      "load: x must be a complete checkpoint, but got a tensor larger than its "
      "storage"s;
  CHECK(error(tensor("K\x06))")) == larger);
  CHECK(error(tensor("K\x00K\x07\x85K\x01\x85"s)) == larger);
  CHECK(error(tensor("K\x01K\x06\x85K\x01\x85")) == larger);
  CHECK(error(tensor("K\x00K\x02\x85K\x06\x85"s)) == larger);
  CHECK(error(tensor(max + "))")) == larger);
  CHECK(error(tensor(max + "K\x02\x85K\x01\x85")) == larger);
  CHECK(error(tensor("K\x00"s + max + "\x85K\x01\x85")) == larger);
  CHECK(error(tensor("K\x00K\x03\x85"s + max + "\x85")) == larger);
  CHECK(
      error(tensor("K\x00"s + large + large + "\x86K\x00K\x00\x86"s)) ==
      larger);
  CHECK(error(tensor("K\x00K\x03\x85"s + large + "\x85")) == larger);

  const auto wrong =
      "load: x must be a complete checkpoint, but got a wrong tensor"s;
  CHECK(error(tensor(long1(-1) + "))")) == wrong);
  CHECK(error(tensor("N))")) == wrong);
  CHECK(error(tensor("K\x00]]"s)) == wrong);
  CHECK(error(tensor("K\x00"s + long1(-1) + "\x85K\x01\x85")) == wrong);
  CHECK(error(tensor("K\x00K\x01\x85"s + long1(-1) + "\x85")) == wrong);
  CHECK(error(tensor("K\x00K\x01\x85)"s)) == wrong);
  CHECK(error(tensor("K\x00N\x85K\x01\x85"s)) == wrong);
  CHECK(
      error(tensor(
          "K\x00("s + repeat("K\x01", 65) + "t(" + repeat("K\x01", 65) +
          "t")) == wrong);
  CHECK(error(tensor("K\x00))"s, "N")) == wrong);
  CHECK(error(tensor("K\x00))"s, "ctorch\nFloatStorage\n")) == wrong);
  CHECK(error("ctorch._utils\n_rebuild_tensor_v2\n)R") == wrong);
  for (const auto* dtype : {"qint8", "bits8"}) {
    CHECK(
        error(
            "ctorch._utils\n_rebuild_tensor_v3\n(" + storage() +
            "K\x00))\x89Nctorch\n"s + dtype + "\ntR") == wrong);
  }

  const auto storages =
      "load: x must be a complete checkpoint, but got a wrong storage"s;
  CHECK(error(storage(long1(-1))) == storages);
  CHECK(error(storage(large)) == storages);
  CHECK(error(storage("N")) == storages);
  CHECK(error("NQ") == storages);
  CHECK(error(")Q") == storages);
  CHECK(
      error(
          "(" + string("storage") + "ctorch\nSize\n" + string("0") +
          string("cpu") + "K\x06tQ") == storages);
  CHECK(error(storage("K\x05")) == "asked for 20 bytes");
}

TEST_CASE("the unpickler refuses cycles and great depths") {
  CHECK(
      refused(
          "]q\x00h\x00"
          "a"s) == damaged("a cycle", 6));
  CHECK(refused("}q\x00K\x01h\x00s"s) == damaged("a cycle", 8));
  CHECK(
      refused(
          "]q\x00]h\x00"
          "aa"s) == damaged("a cycle", 8));
  CHECK(
      refused(
          "]]q\x00"
          "ah\x00K\x01"
          "a"s) == damaged("a cycle", 10));
  CHECK(read(repeat("]", 500) + repeat("a", 499) + ".").isList());
  CHECK(
      refused(repeat("]", 501) + repeat("a", 500) + ".") ==
      damaged("too deep a nesting", 1001));
  CHECK(
      refused(")" + repeat("\x85", 1000000) + ".") ==
      damaged("too deep a nesting", 501));
  CHECK(
      refused(repeat("}K\x01", 501) + "N" + repeat("s", 501) + ".") ==
      damaged("too deep a nesting", 2005));
}

TEST_CASE("the unpickler refuses keys that would blow up a hash table") {
  // The table multiplies an integer with this number, and takes the upper bits.
  constexpr std::uint64_t kGolden = 11400714819323198485u;
  std::uint64_t inverse = kGolden;
  for (int i = 0; i < 6; ++i) {
    inverse *= 2 - kGolden * inverse;
  }
  REQUIRE(inverse * kGolden == 1);
  std::string colliding = "}(";
  std::string far = "}(";
  std::string strings = "}(";
  std::mt19937_64 random(1);
  for (std::uint64_t i = 0; i < 3000; ++i) {
    if (i < 40) {
      colliding += long1(static_cast<std::int64_t>(i * inverse)) + "N";
    }
    far += long1(static_cast<std::int64_t>(random())) + "N";
    strings += string("layers." + std::to_string(i) + ".weight") + "N";
  }
  CHECK(
      refused(colliding + "u.") ==
      damaged("keys that collide", colliding.size() + 2));
  CHECK(read(far + "u.").toGenericDict().size() == 3000);
  CHECK(read(strings + "u.").toGenericDict().size() == 3000);
}

TEST_CASE("the unpickler survives every cut and thousands of wrong bytes") {
  const auto good = "\x80\x02}q\x00("s + string("a") + "](K\x01M\x01\x02"s +
      long1(-5) + "G\x3f\xe0\x00\x00\x00\x00\x00\x00"s + "\x88\x89N)" +
      "K\x01\x85K\x01K\x02\x86" + "K\x01K\x02K\x03\x87" + "e" + string("b") +
      tensor("K\x01K\x02K\x02\x86K\x03K\x01\x86") + "q\x01" + string("c") +
      "h\x01" + string("d") + "ctorch\nSize\nK\x02\x85\x85R" + string("e") +
      "ccollections\nOrderedDict\n)RK\x01K\x02s}b" + string("f") +
      "ctorch\nfloat16\nu.";
  REQUIRE(read(good).toGenericDict().size() == 6);
  for (std::size_t size = 0; size < good.size(); ++size) {
    CHECK_THROWS_AS(read(good.substr(0, size)), c10::Error);
  }
  std::mt19937 random(7);
  int survived = 0;
  for (int i = 0; i < 20000; ++i) {
    auto bad = good;
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
      bad[random() % bad.size()] = static_cast<char>(random());
    }
    try {
      read(bad);
      ++survived;
    } catch (const c10::Error&) {
    }
  }
  CHECK(survived < 20000);
}
