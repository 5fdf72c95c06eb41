"""Old files are read without their packages, and nothing in them is executed."""

import copy
import io
import os
import pathlib
import pickle
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch

from fp16core import (
    DynamicLossScaler,
    FP16_Optimizer,
    LossScaler,
    PickledObject,
    load_checkpoint,
)
from helpers import assert_same, copy_of, half, train
from relatives import ENTRIES, EXPECTED, FOLDER, read


@pytest.fixture(autouse=True)
def nothing_stays_allowed(tmp_path: pathlib.Path, monkeypatch: Any) -> Any:
    """No test leaves a name on torch's list; markers would lie in a folder of its
    own."""
    monkeypatch.chdir(tmp_path)
    before = set(torch.serialization.get_safe_globals())
    yield
    left = set(torch.serialization.get_safe_globals()) - before
    # torch adds names of its own when it first needs its packages.
    torchs = {
        entry for entry in left if getattr(entry, "__module__", "")[:6] == "torch."
    }
    assert left == torchs


# Files of other projects.


@pytest.mark.parametrize("name", ENTRIES)
def test_a_file_of_another_project_is_read_without_it(name: str) -> None:
    entry = ENTRIES[name]
    modules = set(sys.modules)
    saved = read(name)
    new = {module.partition(".")[0] for module in set(sys.modules) - modules}
    assert not new & {"apex", "fp16", "megatron", "deepspeed", "fairseq"}
    assert set(entry["top_level"]) <= set(saved)
    scaler = saved["optimizer"].get("loss_scaler")
    if entry["scaler_class"] is None:
        assert scaler is None
        return
    assert isinstance(scaler, PickledObject)
    assert f"{scaler.module}.{scaler.name}" == entry["scaler_class"]
    for counter, want in entry["scaler"]["counters"].items():
        assert getattr(scaler, counter) == scaler.attributes[counter] == want


def test_the_rest_of_a_training_checkpoint_is_read_too() -> None:
    saved = read("megatron_package_training_checkpoint.pt")
    assert saved["iteration"] == 7
    assert saved["args"].hysteresis == 2
    assert saved["args"].params_dtype is torch.float16
    assert saved["torch_rng_state"].dtype is torch.uint8
    name, words, position, *_ = saved["np_rng_state"]
    assert (name, words.dtype, words.shape) == ("MT19937", np.dtype("u4"), (624,))
    assert position == 624
    np.random.RandomState().set_state(saved["np_rng_state"])


@pytest.mark.parametrize(
    "name", [n for n, e in ENTRIES.items() if e["torch_load_default_reads_it"]]
)
def test_what_torch_reads_comes_out_the_same(name: str) -> None:
    want = torch.load(FOLDER / name, map_location="cpu")
    assert_same(read(name), want)


@pytest.mark.parametrize("by", ["text", "path", "file", "buffer"])
def test_a_path_or_a_file_may_be_given(by: str) -> None:
    path = FOLDER / "megatron_old_pickle_adam.pt"
    if by == "file":
        with open(path, "rb") as file:
            saved = load_checkpoint(file, "cpu")
    elif by == "buffer":
        saved = load_checkpoint(io.BytesIO(path.read_bytes()), "cpu")
    else:
        saved = load_checkpoint(str(path) if by == "text" else path, "cpu")
    assert saved["optimizer"]["loss_scaler"].cur_iter == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_files_of_a_gpu_ask_for_a_device(form: str) -> None:
    [name, *_] = [
        name
        for name, entry in ENTRIES.items()
        if (entry["serialization"], entry["storage_location"]) == (form, "cuda:0")
    ]
    with pytest.raises(RuntimeError, match="map_location"):
        load_checkpoint(FOLDER / name)


@pytest.mark.parametrize("new_zip", [True, False])
def test_our_own_files_and_plain_ones_are_read(
    tmp_path: pathlib.Path, new_zip: bool
) -> None:
    param = half(1.0, 2.0)
    optimizer = FP16_Optimizer(torch.optim.Adam([param], lr=0.5), verbose=False)
    train(optimizer, param.float().sum())
    state = {"optimizer": optimizer.state_dict(), "epoch": 3, "list": [None, "text"]}
    torch.save(state, tmp_path / "own.pt", _use_new_zipfile_serialization=new_zip)
    got = load_checkpoint(tmp_path / "own.pt")
    assert_same(copy_of(got), copy_of(state))


@pytest.mark.parametrize("new_zip", [True, False])
def test_our_own_scalers_are_read_as_they_are(new_zip: bool) -> None:
    dynamic = DynamicLossScaler.preset("fairseq", scale_window=5)
    dynamic.update_scale(True)
    got = load_checkpoint(save([LossScaler(8.0), dynamic], new_zip))
    assert [type(scaler) for scaler in got] == [LossScaler, DynamicLossScaler]
    assert [repr(scaler) for scaler in got] == [repr(LossScaler(8.0)), repr(dynamic)]
    assert got[1].overflows_since_rescale == dynamic.overflows_since_rescale


def save(value: Any, new_zip: bool = True) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=new_zip)
    file.seek(0)
    return file


def test_arrays_and_numbers_of_numpy_are_read() -> None:
    state = {
        "loss": np.float64(0.25),
        "flags": np.array([[True, False]]),
        "fortran": np.asfortranarray(np.arange(6, dtype="<i4").reshape(2, 3)),
        "big": np.arange(3, dtype=">f4"),
        "empty": np.zeros((0, 2), np.float16),
    }
    got = load_checkpoint(save(state))
    for name, want in state.items():
        assert np.array_equal(got[name], want), name
        # NumPy's own pickles change the byte order too.
        own = pickle.loads(pickle.dumps(want, protocol=2))
        assert np.asarray(got[name]).dtype == np.asarray(own).dtype, name
    # Saved again it is an ordinary array.
    again = pickle.loads(pickle.dumps(got["fortran"]))
    assert type(again) is np.ndarray
    assert np.array_equal(again, state["fortran"])


# Objects whose class is not loaded.


def module_with(name: str, **members: Any) -> types.ModuleType:
    """Return a module of this name, in sys.modules until the test ends."""
    module = types.ModuleType(name)
    for key, value in members.items():
        value.__module__, value.__qualname__ = name, key
        setattr(module, key, value)
    return module


def pickled(
    monkeypatch: Any, kind: str, new_zip: bool = True, **attributes: Any
) -> io.BytesIO:
    """Return a file with an object of a class of this name, gone afterwards."""

    class Made:
        def __init__(self) -> None:
            raise AssertionError("it was executed")

        def __setstate__(self, state: Any) -> None:
            raise AssertionError("it was executed")

    module = module_with("project.scalers", **{kind: Made})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "project", types.ModuleType("project"))
        patch.setitem(sys.modules, "project.scalers", module)
        made = Made.__new__(Made)
        made.__dict__.update(attributes)
        return save({"it": made}, new_zip)


@pytest.mark.parametrize("new_zip", [True, False])
def test_an_object_keeps_its_attributes_and_cannot_be_changed(
    monkeypatch: Any, new_zip: bool
) -> None:
    file = pickled(monkeypatch, "LossScaler", new_zip, cur_scale=8.0, _hidden=[1])
    got = load_checkpoint(file)["it"]
    assert isinstance(got, PickledObject)
    assert (got.module, got.name) == ("project.scalers", "LossScaler")
    assert dict(got.attributes) == {"cur_scale": 8.0, "_hidden": [1]}
    assert got._hidden == [1]
    text = "<pickled project.scalers.LossScaler(cur_scale=8.0, _hidden=[1])>"
    assert repr(got) == text
    with pytest.raises(AttributeError, match="pickled .*LossScaler has no attribute"):
        _ = got.loss_scale
    with pytest.raises(AttributeError, match="LossScaler cannot be changed"):
        got.cur_scale = 4.0
    with pytest.raises(TypeError):
        got.attributes["cur_scale"] = 4.0
    for other in (copy.copy(got), copy.deepcopy(got), pickle.loads(pickle.dumps(got))):
        assert repr(other) == repr(got)


@pytest.mark.parametrize("new_zip", [True, False])
def test_a_project_that_is_installed_is_not_used(
    monkeypatch: Any, new_zip: bool
) -> None:
    file = pickled(monkeypatch, "LossScaler", new_zip, cur_scale=8.0)

    class Real:
        def __setstate__(self, state: Any) -> None:
            raise AssertionError("it was executed")

    module = module_with("project.scalers", LossScaler=Real)
    monkeypatch.setitem(sys.modules, "project", types.ModuleType("project"))
    monkeypatch.setitem(sys.modules, "project.scalers", module)
    assert isinstance(load_checkpoint(file)["it"], PickledObject)


@pytest.mark.parametrize("new_zip", [True, False])
def test_other_classes_are_refused_unless_they_are_named(
    monkeypatch: Any, new_zip: bool
) -> None:
    file = pickled(monkeypatch, "Mask", new_zip, value=2)
    with pytest.raises(
        pickle.UnpicklingError,
        match="^load_checkpoint: 'BytesIO' must refer to nothing but tensors, plain "
        "data and loss scalers, but got project.scalers.Mask; nothing was executed. "
        r"If it is .* as_data=\['project.scalers.Mask'\] reads their attributes$",
    ):
        load_checkpoint(file)
    file.seek(0)
    assert load_checkpoint(file, as_data=["project.scalers.Mask"])["it"].value == 2


class Constructed:
    """Is made by calling its class with arguments, as members of enums are."""

    def __reduce__(self) -> Any:
        return Constructed, (2,)


def test_arguments_of_a_constructor_are_kept() -> None:
    name = f"{Constructed.__module__}.Constructed"
    got = load_checkpoint(save({"it": Constructed()}), as_data=[name])["it"]
    assert got.arguments == (2,)


# What is no checkpoint, or no honest one.


@pytest.mark.parametrize("name", EXPECTED["hostile"])
def test_a_hostile_file_is_refused_and_nothing_is_executed(name: str) -> None:
    said = EXPECTED["hostile"][name]
    with pytest.raises(
        pickle.UnpicklingError,
        match=f"^load_checkpoint: '.*{name}' must refer to nothing but tensors, plain "
        f"data and loss scalers, but got {said['call']}; nothing was executed$",
    ):
        load_checkpoint(FOLDER / name)
    assert not pathlib.Path(said["marker"]).exists()
    assert not os.listdir()


class Calls:
    """Calls something when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


HOSTILE = {
    "builtin": Calls(exec, "open('marker', 'w')"),
    "open": Calls(open, "marker", "w"),
    "getattr": Calls(getattr, "text", "upper"),
    "torch's": Calls(torch.hub.load_state_dict_from_url, "http://127.0.0.1/"),
    "numpy's": Calls(np.load, "marker"),
    "array of objects": np.array([Calls(open, "marker", "w")], dtype=object),
    "record": np.zeros(2, [("a", "f4")]),
}


@pytest.mark.parametrize("new_zip", [True, False])
@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_calls_and_objects_are_refused(value: Any, new_zip: bool) -> None:
    with pytest.raises(
        (pickle.UnpicklingError, ValueError), match="^load_checkpoint: "
    ):
        load_checkpoint(save({"model": {"w": torch.ones(2)}, "it": value}, new_zip))
    assert not os.listdir()


@pytest.mark.parametrize("new_zip", [True, False])
def test_the_name_of_a_scaler_is_no_way_in(monkeypatch: Any, new_zip: bool) -> None:
    # A callable under the name of a scaler is data, whatever it is.
    module = module_with("project.scalers", LossScaler=lambda text: open(text, "w"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "project", types.ModuleType("project"))
        patch.setitem(sys.modules, "project.scalers", module)
        file = save({"it": Calls(module.LossScaler, "marker")}, new_zip)
        got = load_checkpoint(file)["it"]
    assert isinstance(got, PickledObject)
    assert got.arguments == ("marker",)
    assert not os.listdir()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("name", ["torch_amp_sgd.pt", "megatron_old_pickle_adam.pt"])
def test_a_truncated_file_is_refused(name: str, share: float) -> None:
    data = (FOLDER / name).read_bytes()
    file = io.BytesIO(data[: int(len(data) * share)])
    with pytest.raises(
        ValueError,
        match="^load_checkpoint: path must lead to a whole file of torch.save, but got "
        "'BytesIO': ",
    ):
        load_checkpoint(file, "cpu")


NO_CHECKPOINT = {
    "text": b"hello, world\n" * 20,
    "zeros": bytes(100),
    "pickle": pickle.dumps({"a": 1}),
    "zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("data", NO_CHECKPOINT.values(), ids=NO_CHECKPOINT)
def test_another_kind_of_file_is_refused(data: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="^load_checkpoint: path must lead to a whole"):
        load_checkpoint(path)


def test_a_file_that_is_not_there_says_so() -> None:
    with pytest.raises(FileNotFoundError, match="missing.pt"):
        load_checkpoint("missing.pt")


# torch's list of names.


def test_threads_do_not_take_names_from_each_other() -> None:
    files = [name for name, entry in ENTRIES.items() if entry["scaler_class"]]
    failures: list[BaseException] = []

    def load() -> None:
        try:
            for name in files:
                read(name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_names_that_the_user_allowed_stay_allowed() -> None:
    with torch.serialization.safe_globals([Constructed]):
        read("megatron_v1_adam_static.pt")
        assert Constructed in torch.serialization.get_safe_globals()
